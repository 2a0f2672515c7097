"""A private RabbitMQ node, from Debian's package, that leaves nothing behind."""

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

from tools.processes import StartError, end, free_port, kill, lock_directory, port_answers, spawn, tail

SCRIPTS = Path("/usr/lib/rabbitmq/bin")
USER = "guardian"
PLUGINS = ("rabbitmq_management", "rabbitmq_prometheus", "rabbitmq_web_stomp")


class ControlError(Exception):
    """``rabbitmqctl`` or ``erl_call`` failed; the text is its output."""


class PrivateNode:
    """A RabbitMQ node of one's own: on free ports of 127.0.0.1, with its own data, Erlang cookie and epmd.

    It ends with the program that started it, even when that one is killed.
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
        """Choose ports and write the configuration; nothing runs yet.

        ``config`` holds further lines of ``rabbitmq.conf``. ``directory`` keeps data, password and ports from one time
        to the next; without it both are in a temporary directory that `stop` removes. ``peer`` is a running node whose
        cookie, password and epmd this one shares, so that it can `join` it; its ``name`` must be another.
        ``quorum_tick_seconds`` is how old the listed length of a quorum queue may be; 5 is RabbitMQ's default.
        Raises StartError when RabbitMQ isn't installed, or another program runs the node of that directory.
        """
        if not (SCRIPTS / "rabbitmq-server").exists():
            raise StartError(
                "RabbitMQ is not installed: there is no rabbitmq-server. On Debian or Ubuntu run `apt-get install"
                " rabbitmq-server`, or name a broker that is there already in RABBITMQ_MANAGEMENT_URL and RABBIT_URL."
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
        """Give what the file holds, having written the default where there is none."""
        path = self.directory / name
        if not path.exists():
            path.touch(mode=0o600)
            path.write_text(default)
        return path.read_text()

    def _stored_port(self, name: str) -> int:
        """Give the port that was used the last time where it is free, so that an address stays what it was."""
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
        # A key of a plugin that isn't enabled stops the start.
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
        (self.directory / "rabbitmq-env.conf").write_text("")  # so that the one under /etc isn't read
        (self.directory / "enabled_plugins").write_text(f"[{','.join(self.plugins)}].\n")

    @property
    def _environment(self) -> dict[str, str]:
        return {
            "PATH": os.environ.get("PATH", os.defpath),
            "LANG": "C.UTF-8",
            "HOME": str(self.directory / "home"),
            "ERL_EPMD_PORT": str(self._epmd_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            # The start script then becomes the broker, under the same process id, instead of waiting beside it.
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
            # By default each scheduler keeps to one core. Whatever else is at work there then holds it up, although the
            # other core rests; and every node on this machine binds its first one to the same core.
            "RABBITMQ_SCHEDULER_BIND_TYPE": "u",
            "RABBITMQ_CTL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
            # rabbitmqctl listens too, by default on a port of a range that other programs use; 0 takes any.
            "RABBITMQ_CTL_DIST_PORT_MIN": "0",
            "RABBITMQ_CTL_DIST_PORT_MAX": "0",
        }

    @property
    def management_url(self) -> str:
        """The management API's address, with an administrator's credentials."""
        return f"http://{USER}:{self.password}@127.0.0.1:{self.management_port}"

    @property
    def amqp_url(self) -> str:
        """The AMQP address with the same credentials, without a vhost."""
        return f"amqp://{USER}:{self.password}@127.0.0.1:{self.port}"

    @property
    def stomp_url(self) -> str | None:
        """Where agents connect by STOMP over WebSocket; None without the plugin ``rabbitmq_web_stomp``."""
        return None if self.stomp_port is None else f"ws://127.0.0.1:{self.stomp_port}/ws"

    @property
    def pid(self) -> int:
        """The process id of the running node."""
        if self._process is None:
            raise RuntimeError(f"{self.name} is not running")
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether its process is there; it may not be ready yet."""
        return self._process is not None and self._process.poll() is None

    @property
    def ended(self) -> bool:
        """Whether its process has ended without being asked to."""
        return self._process is not None and self._process.poll() is not None

    def start(self, timeout: float = 90) -> Self:
        """Start the node, and return when the management API, the AMQP port and STOMP's, where it has one, answer.

        Raises StartError, with the end of the log, when that takes more than ``timeout`` seconds.
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
        """Keep a second program from using the same directory: it would change this one's configuration."""
        if self._lock is not None:
            return
        self._lock = lock_directory(self.directory, "another program is running the RabbitMQ node in")

    def _start_epmd(self) -> None:
        # Without one of our own the node would start a daemon that stays when everything else has ended.
        if self._peer is not None or (self._epmd is not None and self._epmd.poll() is None):
            return
        self._epmd = spawn(
            [_epmd(), "-port", str(self._epmd_port), "-address", "127.0.0.1"],
            environment=self._environment,
            directory=self.directory,
            output=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 10
        while not port_answers(self._epmd_port):
            if self._epmd.poll() is not None or time.monotonic() > deadline:
                raise StartError("epmd, Erlang's port mapper, does not start")
            time.sleep(0.01)

    def _wait_until_ready(self, timeout: float) -> None:
        assert self._process is not None
        deadline = time.monotonic() + timeout
        while not (self._management_answers() and all(map(port_answers, self._ports))):
            code = self._process.poll()
            if code is not None or time.monotonic() > deadline:
                what = f"ended with code {code}" if code is not None else f"was not ready after {timeout:.0f} s"
                raise StartError(f"RabbitMQ {what}. It said:\n{self._startup_errors()}")
            time.sleep(0.05)

    @property
    def _ports(self) -> list[int]:
        return [port for port in (self.port, self.stomp_port) if port is not None]

    def _startup_errors(self) -> str:
        """Give the errors that the node wrote first; what follows them is Erlang's report of its own end."""
        log = self.directory / "log" / f"{self.name}.log"
        for path in (log, self.directory / "output"):
            errors = [line for line in tail(path, 1000).splitlines() if "[error]" in line]
            if errors:
                return "\n".join(errors[:15])
        return tail(self.directory / "output") + tail(log)

    def _management_answers(self) -> bool:
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
        """Stop the broker as its operator would, keeping data, ports and epmd; `start` brings it back.

        It takes about 7 seconds, all of them RabbitMQ's own; after ``timeout`` seconds it is killed.
        """
        self._finish(lambda process: end(process, timeout))

    def kill(self) -> None:
        """Kill the broker as a power cut would, keeping data, ports and epmd; `start` brings it back.

        As with a power cut, what was declared in the last seconds is not always there again.
        """
        self._finish(kill)

    def restart(self, timeout: float = 90) -> None:
        """Stop the broker and start it again, on the same data and ports."""
        self.halt()
        self.start(timeout)

    def suspend(self) -> None:
        """Stop the broker's process where it is (SIGSTOP): it accepts connections and answers nothing."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let a suspended broker go on."""
        os.kill(self.pid, signal.SIGCONT)

    def stop(self, grace: float | None = None) -> None:
        """End the node and all that belongs to it, and remove its directory where it was a temporary one.

        ``grace`` is how long it may take to write its data, in seconds: 30 for a directory that is kept; none
        for one that goes anyway.
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
        # The broker's helpers end by themselves when they read the end of its pipe, which takes them a moment.
        deadline = time.monotonic() + 5
        while self._has_helpers() and time.monotonic() < deadline:
            time.sleep(0.01)

    def _has_helpers(self) -> bool:
        """Whether a process that was started with this node's environment is there, other than its epmd."""
        mark = os.fsencode(f"RABBITMQ_PID_FILE={self._environment['RABBITMQ_PID_FILE']}")
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # it has ended since, or is somebody else's
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
        """Run ``rabbitmqctl`` on this node and give its output; raises ControlError with what it said otherwise."""
        try:
            done = subprocess.run(
                [SCRIPTS / "rabbitmqctl", "-q", *arguments],
                env=self._environment,
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ControlError(f"rabbitmqctl {' '.join(arguments)}: no answer in {timeout:.0f} s") from error
        if done.returncode != 0:
            raise ControlError(f"rabbitmqctl {' '.join(arguments)}: code {done.returncode}\n{done.stdout}")
        return done.stdout

    def eval(self, expression: str, timeout: float = 60) -> str:
        """Evaluate an Erlang expression in the node and return the result as text; the final dot may be left out.

        Raises ControlError if it fails. It takes milliseconds: ``rabbitmqctl eval`` starts an Erlang node first.
        """
        expression = expression.strip().removesuffix(".")
        try:
            done = subprocess.run(
                ["erl_call", "-sname", self.name, "-e"],
                env=self._environment,
                cwd=self.directory,
                input=f"{expression}.\n",
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ControlError(f"{expression}: no answer in {timeout:.0f} s") from error
        if done.returncode != 0 or not done.stdout.startswith("{ok, "):
            raise ControlError(f"{expression}: code {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout.removeprefix("{ok, ").removesuffix("}")

    def join(self, other: "PrivateNode") -> None:
        """Make this node, which loses its own data by it, a member of the other's cluster."""
        if self._peer is not other:
            raise ValueError("give the other node as `peer` when making this one: they have to share cookie and epmd")
        self.ctl("stop_app")
        self.ctl("reset")
        self.ctl("join_cluster", other.name)
        self.ctl("start_app")
        self._wait_until_ready(60)


def stomp_url_of(overview: Mapping[str, Any], host: str) -> str | None:
    """Find where a broker serves STOMP over WebSocket, in its management API's overview; None: it doesn't."""
    for listener in overview.get("listeners", []):
        if listener["protocol"] == "http/web-stomp":
            return f"ws://{host}:{listener['port']}/ws"
    return None


def _epmd() -> str:
    """Find Erlang's port mapper: on the path, or inside Erlang's own directory."""
    found = shutil.which("epmd")
    if found is not None:
        return found
    for path in sorted(Path("/usr/lib/erlang").glob("erts-*/bin/epmd"), reverse=True):
        return str(path)
    raise StartError(
        "Erlang is not installed: there is no epmd. On Debian or Ubuntu run `apt-get install erlang-base`."
    )
