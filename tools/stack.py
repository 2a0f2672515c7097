"""Guardian with all that it needs, on one machine: what `make run` and `make demo` have in common."""

import contextlib
import datetime
import http.client
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Self
from urllib.parse import urlsplit

import environ

from tools.mail import Mail, MailCatcher
from tools.processes import ProcessGroup, StartError, free_port, lock_directory, tail
from tools.rabbitmq import PrivateNode

PROJECT = Path(__file__).resolve().parent.parent
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stack:
    """The web processes, workers and beat, with a RabbitMQ and a mail server of their own where none is configured.

    Each web process has a port of its own. This program holds their sockets open, so that whoever connects while one
    is being started again waits, and is answered. All of it ends with `stop`, and with the program, however that ends.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        *,
        var: Path,
        say: Callable[[str], None],
        on_mail: Callable[[Mail], None] | None = None,
        show: Callable[[str, str], None] | None = None,
        fresh: bool = False,
        web: int = 1,
        workers: int = 1,
    ) -> None:
        """Choose; nothing runs yet.

        ``environment`` is what is configured. Files go under ``var``. ``say`` is told what is being done,
        ``show(name, line)`` each line that a process writes, and ``on_mail`` each mail that was caught, the last two
        from other threads. ``fresh``: begin with nothing of an earlier time, and keep no broker data for a later one.
        ``web`` and ``workers`` are how many there are of the web process, and of each kind of worker. With two, their
        names are web-1, web-2, guard-1 and so on.
        """
        self.environment = dict(environment)
        self.base_url = ""
        self.addresses: dict[str, str] = {}
        """Where each web process is, by its name."""
        self.node: PrivateNode | None = None
        self.mail: MailCatcher | None = None
        self._var = var
        self._say = say
        self._on_mail = on_mail
        self._fresh = fresh
        self._web = web
        self._workers = workers
        self._sockets: dict[str, socket.socket] = {}
        self._commands: dict[str, list[str]] = {}
        self._lock: IO[str] | None = None
        self._processes: ProcessGroup | None = None
        self._show = show

    @property
    def logs(self) -> Path:
        """Where the output of the processes is written."""
        return self._var / "log"

    def prepare(self) -> None:
        """Start broker and mail server where none is configured, and make the database; raises StartError."""
        self._var.mkdir(parents=True, exist_ok=True)
        try:
            self._lock_var()
            if self._fresh:
                self._empty_var()
            self._choose_settings()
            if self.environment.get("RABBITMQ_MANAGEMENT_URL"):
                address = urlsplit(self.environment["RABBITMQ_MANAGEMENT_URL"])
                self._say(f"Using the RabbitMQ at {address.hostname}:{address.port}, as configured.")
            else:
                self._choose_broker()
            if not self.environment.get("EMAIL_URL"):
                self._start_mail()
            with ThreadPoolExecutor(1) as side_by_side:  # both take seconds
                starting = side_by_side.submit(self.node.start) if self.node is not None else None
                self.manage("migrate", "--no-input")
            if starting is not None:
                self._report_broker(starting.result())
        except BaseException:
            self.stop()
            raise

    def start(self) -> None:
        """After `prepare`: start the processes, and return when the web one answers; raises StartError."""
        try:
            self._start_processes()
        except BaseException:
            self.stop()
            raise

    def _lock_var(self) -> None:
        """Keep a second one from running on the same files: the broker's data and the task queue are one Guardian's."""
        self._lock = lock_directory(self._var, "another Guardian is running on")

    def _empty_var(self) -> None:
        for path in self._var.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != "lock":
                path.unlink()

    def _choose_settings(self) -> None:
        environment = self.environment
        environment["GUARDIAN_VAR_DIR"] = str(self._var)
        environment["DEBUG"] = environment.get("DEBUG") or "true"
        environment["ALLOWED_HOSTS"] = environment.get("ALLOWED_HOSTS") or "127.0.0.1,localhost"
        if not environment.get("SECRET_KEY"):
            key = self._var / "secret-key"
            if not key.exists():
                key.touch(mode=0o600)
                key.write_text(secrets.token_urlsafe(50))
            environment["SECRET_KEY"] = key.read_text()

        configured = urlsplit(environment.get("GUARDIAN_BASE_URL") or "http://127.0.0.1:8000")
        # Behind https stands a proxy, whose port isn't ours.
        wanted = configured.port if configured.scheme == "http" and configured.port is not None else 8000
        port = self._reserve_ports(wanted)
        if port != wanted:
            self._say(f"Port {wanted} is taken or not allowed, so the pages are on port {port}.")
        if configured.scheme == "http" and port != wanted:
            configured = configured._replace(netloc=f"{configured.hostname}:{port}")
        environment["GUARDIAN_BASE_URL"] = configured.geturl()
        self.base_url = environment["GUARDIAN_BASE_URL"]

    def _reserve_ports(self, wanted: int) -> int:
        """Take a port for each web process long before it listens there, so that no other Guardian takes it meanwhile.

        Returns the first one's.
        """
        for number, name in enumerate(_names("web", self._web)):
            listener = _listen(wanted + number)
            self._sockets[name] = listener
            self.addresses[name] = f"http://127.0.0.1:{listener.getsockname()[1]}"
        return int(next(iter(self._sockets.values())).getsockname()[1])

    def _choose_broker(self) -> None:
        self._say("No RabbitMQ is configured (RABBITMQ_MANAGEMENT_URL), so a private one is started.")
        self.node = PrivateNode(directory=self._var / "rabbitmq")
        self.environment["RABBITMQ_MANAGEMENT_URL"] = self.node.management_url
        self.environment["RABBIT_URL"] = self.node.amqp_url

    def _report_broker(self, node: PrivateNode) -> None:
        self._say(f"RabbitMQ is ready: {node.management_url} and {node.amqp_url}")
        self._say(f"Agents read their queues from it by STOMP over WebSocket: {node.stomp_url}")

    def _start_mail(self) -> None:
        self.mail = MailCatcher(on_mail=self._keep_mail).start()
        self.environment["EMAIL_URL"] = self.mail.url
        self._say(f"No mail server is configured (EMAIL_URL), so mails are kept in {self._var / 'mail'}.")

    def _keep_mail(self, mail: Mail) -> None:
        folder = self._var / "mail"
        folder.mkdir(parents=True, exist_ok=True)
        now = datetime.datetime.now(datetime.UTC)
        recipient = re.sub(r"[^\w.@+-]", "_", ",".join(mail.recipients))[:100]
        (folder / f"{now:%Y%m%d-%H%M%S-%f}-{recipient}.eml").write_bytes(mail.content)
        if self._on_mail is not None:
            self._on_mail(mail)

    def _start_processes(self) -> None:
        self._processes = ProcessGroup(self.environment, directory=PROJECT, logs=self.logs, show=self._show)
        for name, listener in self._sockets.items():
            self._commands[name] = [
                *(sys.executable, "-m", "gunicorn", "guardian_site.wsgi", "--bind", f"fd://{listener.fileno()}"),
                # Its threads look every second whether their parent is there; a plain worker takes 15 seconds.
                *("--worker-class", "gthread", "--threads", "8", "--no-control-socket"),
            ]
        celery = [sys.executable, "-m", "celery", "-A", "guardian_site"]
        # They have nothing to say to each other.
        quiet = ["--without-mingle", "--without-gossip", "--without-heartbeat"]
        for kind, queue, concurrency in (("guard", "guarding", "1"), ("worker", "celery", "2")):
            for name in _names(kind, self._workers):
                options = ["--queues", queue, "--concurrency", concurrency, "--hostname", f"{name}@%h"]
                self._commands[name] = [*celery, "worker", *options, "--loglevel", "INFO", *quiet]
        schedule = self._var / "celery" / "beat-schedule"
        schedule.parent.mkdir(parents=True, exist_ok=True)
        # No pid file: after a kill it would name a process of somebody else, and a second beat does no harm.
        self._commands["beat"] = [*celery, "beat", "--schedule", str(schedule), "--pidfile=", "--loglevel", "INFO"]
        for name in self._commands:
            self.start_process(name)
        self.wait_for_web(*self.addresses)

    def names(self, kind: str) -> list[str]:
        """Return the names of the processes of a kind: web, guard, worker or beat."""
        count = {"web": self._web, "beat": 1}.get(kind, self._workers)
        return _names(kind, count)

    def start_process(self, name: str) -> None:
        """Start one of the processes: the first time, or again after `end_process` or `kill_process`."""
        assert self._processes is not None
        inherited = [listener.fileno() for listener in self._sockets.values()] if name in self.addresses else []
        self._processes.start(name, self._commands[name], inherited=inherited)

    def add_beat(self, name: str) -> None:
        """Start one more beat, with a schedule of its own."""
        schedule = str(self._var / "celery" / f"{name}-schedule")
        mine = self._commands["beat"]
        self._commands[name] = [schedule if part.endswith("/beat-schedule") else part for part in mine]
        self.start_process(name)

    def end_process(self, name: str, timeout: float = 120) -> int:
        """Ask one of the processes to end, and give its exit code; it is killed after ``timeout`` seconds."""
        assert self._processes is not None
        return self._processes.end(name, timeout)

    def kill_process(self, name: str) -> None:
        """Kill one of the processes with its children."""
        assert self._processes is not None
        self._processes.kill(name)

    def wait_for_web(self, *names: str, timeout: float = 60) -> None:
        """Return when these web processes answer; StartError where one has ended, or doesn't in so many seconds."""
        assert self._processes is not None
        deadline = time.monotonic() + timeout
        for name in names:
            while not _answers(self.addresses[name]):
                self.check()
                if time.monotonic() > deadline:
                    log = tail(self._processes.log(name))
                    raise StartError(f"the process {name!r} does not answer. Its output:\n{log}")
                time.sleep(0.05)

    def check(self) -> None:
        """Raise StartError when something that was started has ended by itself, with the end of its log."""
        if self.node is not None and self.node.ended:
            raise StartError("the private RabbitMQ has ended")
        if self._processes is not None:
            for name, code in self._processes.ended().items():
                log = tail(self._processes.log(name))
                raise StartError(f"the process {name!r} has ended with code {code}. Its output:\n{log}")

    def wait(self) -> None:
        """Watch over it, and raise StartError as `check` does; otherwise it returns never."""
        while True:
            self.check()
            time.sleep(0.2)

    def manage(self, *arguments: str) -> str:
        """Run a command of ``manage.py`` with the same settings, and give its output; StartError where it fails."""
        done = subprocess.run(
            [sys.executable, PROJECT / "manage.py", *arguments],
            env=self.environment,
            cwd=PROJECT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            command = " ".join(arguments)
            raise StartError(f"manage.py {command} ended with code {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout

    def stop(self) -> None:
        """End everything that was started, and wait for it; a second Ctrl-C doesn't break into that."""
        with _signals_ignored():
            if self._processes is not None:
                self._processes.stop()
                self._processes = None
            while self._sockets:
                self._sockets.popitem()[1].close()
            if self.mail is not None:
                self.mail.stop()
                self.mail = None
            if self.node is not None:
                self.node.stop(grace=0 if self._fresh else None)  # data that nobody wants need no time
                self.node = None
            if self._lock is not None:
                self._lock.close()
                self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


def _listen(port: int) -> socket.socket:
    """Listen on this port of 127.0.0.1, or on another where it isn't free; raises StartError where none is."""
    while True:
        with contextlib.suppress(OSError):  # somebody may have taken it just now
            return socket.create_server(("127.0.0.1", free_port(preferred=port)))


def _names(kind: str, count: int) -> list[str]:
    return [kind] if count == 1 else [f"{kind}-{number}" for number in range(1, count + 1)]


def _answers(address: str) -> bool:
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=2)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status < 500
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def configured() -> dict[str, str]:
    """Give the environment, completed by what ``.env`` says."""
    if (PROJECT / ".env").exists():
        environ.Env.read_env(PROJECT / ".env")
    return dict(os.environ)


def documented_defaults() -> dict[str, str]:
    """Give the settings of ``.env.example`` that have a default, for what isn't to go by this machine's ``.env``."""
    lines = (PROJECT / ".env.example").read_text().splitlines()
    return {found[1]: found[2] for line in lines if (found := re.fullmatch(r"# ([A-Z_]+)=(.+)", line))}


def turn_signals_into_interrupts() -> None:
    """Let SIGTERM and a closed terminal end the program as Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for number in STOP_SIGNALS:
        signal.signal(number, interrupt)


@contextlib.contextmanager
def _signals_ignored() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # no other one may say what signals do
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
