"""A private RabbitMQ node from Debian's package, which leaves no files behind."""

import base64
import contextlib
import http.client
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from tools.processes import StartError, end, free_port, happens, kill, lock_directory, port_answers, spawn, tail

SERIES = os.environ.get("GUARDIAN_TEST_BROKER", "")
"""The series of RabbitMQ to run, such as "4.3", from ``tools/make-rabbitmq``; empty: the one of this machine."""

_CHROOT = Path(__file__).resolve().parent.parent / "var" / f"rabbitmq-{SERIES}"
SCRIPTS = _CHROOT / "bin" if SERIES else Path("/usr/lib/rabbitmq/bin")
USER = "guardian"
PLUGINS = ("rabbitmq_management", "rabbitmq_prometheus", "rabbitmq_web_stomp")


class ControlError(Exception):
    """``rabbitmqctl`` or ``erl_call`` failed; the text is its output."""


class PrivateNode:
    """A private RabbitMQ node on free ports of 127.0.0.1, with its own data, Erlang cookie and epmd.

    It ends with this program, even if this is killed.
    """

    def __init__(
        self,
        *,
        name: str = "guardian",
        plugins: Sequence[str] = PLUGINS,
        config: Mapping[str, str] | None = None,
        directory: Path | None = None,
        peer: "PrivateNode | None" = None,
        quorum_tick_seconds: float = 5,
    ) -> None:
        """Choose ports and write the configuration.

        ``config`` has further lines of ``rabbitmq.conf``. ``directory`` keeps data, password and ports between runs; by
        default it is a temporary one that `stop` deletes. ``peer`` is a running node with another ``name``, whose
        cookie, password and epmd this node shares, so that it can join it. ``quorum_tick_seconds`` is the maximum age
        of a quorum queue's listed length; 5 is RabbitMQ's default.
        Raises StartError if RabbitMQ isn't installed, or another program runs the node of this directory.
        """
        if not (SCRIPTS / "rabbitmq-server").exists():
            if SERIES:
                raise StartError(f"RabbitMQ {SERIES} is not installed: run `tools/make-rabbitmq {SERIES}` as root")
            raise StartError(
                "RabbitMQ is not installed: there is no rabbitmq-server. On Debian or Ubuntu run `apt-get install"
                " rabbitmq-server`, or set RABBITMQ_MANAGEMENT_URL and RABBIT_URL to an existing broker."
            )
        if peer is not None and peer.name == f"{name}@localhost":
            raise ValueError("two nodes of a cluster need two names")
        self.name: str = f"{name}@localhost"
        self.plugins = tuple(plugins)
        self._temporary = directory is None
        if directory is None:
            directory = Path(tempfile.mkdtemp(prefix="guardian-rabbitmq-"))
        self.directory = directory.resolve()
        self.directory.mkdir(parents=True, exist_ok=True)
        self._lock: IO[str] | None = None
        self._lock_directory()
        self.port = self._stored_port("port")
        self.management_port = self._stored_port("management_port")
        self.stomp_port = self._stored_port("stomp_port") if "rabbitmq_web_stomp" in plugins else None
        self._peer = peer
        self._quorum_tick_seconds = quorum_tick_seconds
        self._epmd: subprocess.Popen[bytes] | None = None
        self._epmd_port: int = free_port() if peer is None else peer._epmd_port
        self._distribution_port = free_port()
        self._config = dict(config or {})
        self._process: subprocess.Popen[bytes] | None = None
        self.password: str = self._stored("password", secrets.token_hex(16) if peer is None else peer.password)
        (self.directory / "home").mkdir(exist_ok=True)
        self._cookie: str = self._stored("home/.erlang.cookie", secrets.token_hex(16) if peer is None else peer._cookie)
        self._write_configuration()

    def _stored(self, name: str, default: str) -> str:
        """Return the content of a file, creating it with the default if needed."""
        path = self.directory / name
        if not path.exists():
            path.touch(mode=0o600)
            path.write_text(default)
        return path.read_text()

    def _stored_port(self, name: str) -> int:
        """Return the port of the last run if it is free, so that the address stays the same."""
        port = free_port(preferred=int(self._stored(name, str(free_port()))))
        (self.directory / name).write_text(str(port))
        return port

    def _write_configuration(self) -> None:
        lines = {
            "listeners.tcp.1": f"127.0.0.1:{self.port}",
            "management.tcp.ip": "127.0.0.1",
            "management.tcp.port": str(self.management_port),
            "default_user": USER,
            "default_pass": self.password,
            "default_user_tags.administrator": "true",
            "loopback_users": "none",
        }
        # RabbitMQ doesn't start with a key of a disabled plugin.
        if "rabbitmq_prometheus" in self.plugins:
            lines |= {"prometheus.tcp.ip": "127.0.0.1", "prometheus.tcp.port": str(free_port())}
        if "rabbitmq_stomp" in self.plugins or "rabbitmq_web_stomp" in self.plugins:
            lines["stomp.listeners.tcp.1"] = f"127.0.0.1:{free_port()}"
        if self.stomp_port is not None:
            lines |= {"web_stomp.tcp.ip": "127.0.0.1", "web_stomp.tcp.port": str(self.stomp_port)}
        if "rabbitmq_stream" in self.plugins:
            lines["stream.listeners.tcp.1"] = f"127.0.0.1:{free_port()}"
        self.config = lines | self._config
        text = "".join(f"{key} = {value}\n" for key, value in self.config.items())
        (self.directory / "rabbitmq.conf").write_text(text)
        tick = round(self._quorum_tick_seconds * 1000)
        (self.directory / "advanced.config").write_text(f"[{{rabbit, [{{quorum_tick_interval, {tick}}}]}}].\n")
        (self.directory / "rabbitmq-env.conf").write_text("")  # instead of the one in /etc
        (self.directory / "enabled_plugins").write_text(f"[{','.join(self.plugins)}].\n")

    @property
    def _environment(self) -> dict[str, str]:
        return {
            "PATH": os.environ.get("PATH", os.defpath),
            "LANG": "C.UTF-8",
            "HOME": str(self.directory / "home"),
            "ERL_EPMD_PORT": str(self._epmd_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            # The start script then replaces itself with the broker, under the same process id.
            "RUNNING_UNDER_SYSTEMD": "true",
            "RABBITMQ_NODENAME": self.name,
            "RABBITMQ_CONF_ENV_FILE": str(self.directory / "rabbitmq-env.conf"),
            "RABBITMQ_CONFIG_FILE": str(self.directory / "rabbitmq.conf"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(self.directory / "advanced.config"),
            "RABBITMQ_GENERATED_CONFIG_DIR": str(self.directory / "generated"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.directory / "enabled_plugins"),
            "RABBITMQ_MNESIA_BASE": str(self.directory / "data"),
            "RABBITMQ_LOG_BASE": str(self.directory / "log"),
            "RABBITMQ_PID_FILE": str(self.directory / "pid"),
            "RABBITMQ_DIST_PORT": str(self._distribution_port),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
            # By default each scheduler is bound to a core, and every node's first one to the same core. Other work on
            # this core then delays it, even if other cores are idle.
            "RABBITMQ_SCHEDULER_BIND_TYPE": "u",
            "RABBITMQ_CTL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
            # rabbitmqctl also listens, by default in a range that other programs use; 0 is any free port.
            "RABBITMQ_CTL_DIST_PORT_MIN": "0",
            "RABBITMQ_CTL_DIST_PORT_MAX": "0",
        }

    @property
    def management_url(self) -> str:
        return f"http://{USER}:{self.password}@127.0.0.1:{self.management_port}"

    @property
    def amqp_url(self) -> str:
        """The AMQP URL with the same credentials, without a vhost."""
        return f"amqp://{USER}:{self.password}@127.0.0.1:{self.port}"

    @property
    def stomp_url(self) -> str | None:
        """The URL of STOMP over WebSocket; None without the plugin ``rabbitmq_web_stomp``."""
        return None if self.stomp_port is None else f"ws://127.0.0.1:{self.stomp_port}/ws"

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError(f"{self.name} is not running")
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def ended(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def start(self, timeout: float = 90) -> Self:
        """Start the node, and wait until the management API and the ports of AMQP and STOMP answer.

        Raises StartError with the errors of the log after ``timeout`` seconds.
        """
        if self.running:
            raise RuntimeError(f"{self.name} is running already")
        self._lock_directory()
        try:
            self._start_epmd()
            with (self.directory / "output").open("wb") as output:
                self._process = spawn(
                    [SCRIPTS / "rabbitmq-server"],
                    environment=self._environment,
                    directory=self.directory,
                    output=output,
                )
            self._wait_until_ready(timeout)
        except BaseException:
            self.stop(grace=0)
            raise
        return self

    def _lock_directory(self) -> None:
        """Lock the directory against other programs, which would change the configuration."""
        if self._lock is not None:
            return
        self._lock = lock_directory(self.directory, "another program is running the RabbitMQ node in")

    def _start_epmd(self) -> None:
        # Otherwise the node would start an epmd daemon that outlives it.
        if self._peer is not None or (self._epmd is not None and self._epmd.poll() is None):
            return
        self._epmd = spawn(
            [_epmd(), "-port", str(self._epmd_port), "-address", "127.0.0.1"],
            environment=self._environment,
            directory=self.directory,
            output=subprocess.DEVNULL,
        )
        if not happens(lambda: port_answers(self._epmd_port), 10):
            raise StartError("epmd, Erlang's port mapper, does not start")

    def _wait_until_ready(self, timeout: float) -> None:
        assert self._process is not None
        deadline = time.monotonic() + timeout
        while not (self.answers() and all(map(port_answers, self._ports))):
            code = self._process.poll()
            if code is not None or time.monotonic() > deadline:
                what = f"ended with code {code}" if code is not None else f"was not ready after {timeout:.0f} s"
                raise StartError(f"RabbitMQ {what}. Its log:\n{self._startup_errors()}")
            time.sleep(0.05)

    @property
    def _ports(self) -> list[int]:
        return [port for port in (self.port, self.stomp_port) if port is not None]

    def _startup_errors(self) -> str:
        """Return the first errors in the log. Erlang's crash reports follow them."""
        log = self.directory / "log" / f"{self.name}.log"
        for path in (log, self.directory / "output"):
            errors = [line for line in tail(path, 1000).splitlines() if "[error]" in line]
            if errors:
                return "\n".join(errors[:15])
        return tail(self.directory / "output") + tail(log)

    def answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.management_port, timeout=5)
        credentials = base64.b64encode(f"{USER}:{self.password}".encode()).decode()
        try:
            connection.request("GET", "/api/overview", headers={"Authorization": f"Basic {credentials}"})
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def halt(self, timeout: float = 30) -> None:
        """Stop the broker gracefully, keeping data, ports and epmd for `start`.

        RabbitMQ takes about 7 seconds. After ``timeout`` seconds it is killed.
        """
        self._finish(lambda process: end(process, timeout))

    def kill(self) -> None:
        """Kill the broker, keeping data, ports and epmd for `start`.

        As after a power cut, declarations of the last seconds may be lost.
        """
        self._finish(kill)

    def restart(self, timeout: float = 90) -> None:
        self.halt()
        self.start(timeout)

    def suspend(self) -> None:
        """Freeze the broker's process (SIGSTOP), and wait until it stops. It accepts connections but doesn't answer."""
        os.kill(self.pid, signal.SIGSTOP)
        # The process stops when one of its threads handles the signal. Under load the others may run for a while.
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def stop(self, grace: float | None = None) -> None:
        """Stop the node and its helpers, and delete a temporary directory.

        ``grace`` is the time in seconds for writing data, by default 30 for a permanent directory, 0 for a temporary
        one.
        """
        if grace is None:
            grace = 0 if self._temporary else 30
        if grace > 0:
            self.halt(grace)
        else:
            self.kill()
        if self._epmd is not None:
            end(self._epmd, 5)
            self._epmd = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        if self._temporary:
            shutil.rmtree(self.directory, ignore_errors=True)

    def _finish(self, finish: Callable[["subprocess.Popen[bytes]"], None]) -> None:
        if self._process is None:
            return
        finish(self._process)
        self._process = None
        # The broker's helper processes end shortly after its pipe is closed.
        happens(lambda: not self._has_helpers(), 5)

    def _has_helpers(self) -> bool:
        """Return whether a process with this node's environment exists, other than epmd."""
        mark = os.fsencode(f"RABBITMQ_PID_FILE={self._environment['RABBITMQ_PID_FILE']}")
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # it has ended, or belongs to another user
                if mark in path.read_bytes() and (self._epmd is None or int(path.parent.name) != self._epmd.pid):
                    return True
        return False

    def __enter__(self) -> Self:
        return self if self.running else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def ctl(self, *arguments: str, timeout: float = 60) -> str:
        """Run ``rabbitmqctl`` on this node and return its output. Raises ControlError with its output if it fails."""
        return self._control([SCRIPTS / "rabbitmqctl", "-q", *arguments], "", timeout)

    def eval(self, expression: str, timeout: float = 60) -> str:
        """Evaluate an Erlang expression in the node and return the result as text. The final dot is optional.

        Raises ControlError if it fails. It takes milliseconds, whereas ``rabbitmqctl eval`` first starts an Erlang
        node.
        """
        expression = expression.strip().removesuffix(".")
        output = self._control(["erl_call", "-sname", self.name, "-e"], f"{expression}.\n", timeout)
        if not output.startswith("{ok, "):
            raise ControlError(f"{expression}: {output}")
        return output.removeprefix("{ok, ").removesuffix("}")

    def _control(self, command: Sequence[str | Path], text: str, timeout: float) -> str:
        what = f"{' '.join(map(str, command))} {text}"
        try:
            done = subprocess.run(
                command, env=self._environment, cwd=self.directory, input=text, capture_output=True, text=True,
                timeout=timeout, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise ControlError(f"{what}: no answer in {timeout:.0f} s") from error
        if done.returncode != 0:
            raise ControlError(f"{what}: code {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout


def stomp_url_of(overview: Mapping[str, Any], host: str) -> str | None:
    """Return a broker's URL of STOMP over WebSocket from its management overview, or None."""
    for listener in overview.get("listeners", []):
        if listener["protocol"] == "http/web-stomp":
            return f"ws://{host}:{listener['port']}/ws"
    return None


def _epmd() -> str:
    """Return the path of Erlang's port mapper, from PATH or Erlang's directory."""
    found = shutil.which("epmd")
    if found is not None:
        return found
    for path in sorted(Path("/usr/lib/erlang").glob("erts-*/bin/epmd"), reverse=True):
        return str(path)
    raise StartError(
        "Erlang is not installed: there is no epmd. On Debian or Ubuntu run `apt-get install erlang-base`."
    )
