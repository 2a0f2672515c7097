"""Guardian with its processes and servers on one machine, for `make run`, `make demo` and the chaos run."""

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Self
from urllib.parse import urlsplit

from guardian_site import env_file
from rabbit.addresses import split_addresses
from tools.mail import Mail, MailCatcher
from tools.processes import ProcessGroup, StartError, free_port, lock_directory, tail
from tools.rabbitmq import PrivateNode

PROJECT = Path(__file__).resolve().parent.parent
MIN_FREE_BYTES = 1_000_000
"""With less free space, the disk counts as full: SQLite and the task queue can't write any more."""

SETTLING_SECONDS = 10
"""A process that ends sooner can't work with these settings."""

RESTART_SECONDS = 5
"""Like RestartSec in deploy/systemd."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stack:
    """Web processes, workers and beat, with a private RabbitMQ and mail server unless others are configured.

    Each web process has its own port. This program keeps the listening sockets open, so that clients wait while a web
    process restarts. Everything ends with `stop`, or when this program ends or is killed.
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
        commands: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Create a stack without starting it. Use it as a context manager, which stops it.

        ``environment`` has the settings. Files go under ``var``. ``say`` is called with progress messages,
        ``show(name, line)`` with each line of output of a process, and ``on_mail`` with each mail, the last two from
        other threads. ``fresh``: delete the files of earlier runs, and don't let the broker save its data at the end.
        ``web`` and ``workers`` are the numbers of web processes and of workers of each kind. With two, the names are
        web-1, web-2, guard-1 and so on. Without workers, there is no beat.
        ``commands`` run web processes, such as ``env``, by name.
        """
        self.environment = dict(environment)
        self.base_url = ""
        self.addresses: dict[str, str] = {}
        """The addresses of the web processes by name."""
        self.node: PrivateNode | None = None
        self.mail: MailCatcher | None = None
        self._var = var
        self._say = say
        self._on_mail = on_mail
        self._fresh = fresh
        self._web = web
        self._workers = workers
        self._wrappers = commands or {}
        self._sockets: dict[str, socket.socket] = {}
        self._commands: dict[str, list[str]] = {}
        self._lock: IO[str] | None = None
        self._processes: ProcessGroup | None = None
        self._show = show

    @property
    def logs(self) -> Path:
        return self._var / "log"

    def prepare(self) -> None:
        """Start a broker and a mail server if none is configured, and migrate the database. Raises StartError."""
        self._var.mkdir(parents=True, exist_ok=True)
        self._lock_var()
        if self._fresh:
            self._empty_var()
        self._choose_settings()
        if self.environment.get("RABBITMQ_MANAGEMENT_URL"):
            address = urlsplit(split_addresses(self.environment["RABBITMQ_MANAGEMENT_URL"])[0])
            self._say(f"Using the RabbitMQ at {address.hostname}:{address.port}, as configured.")
        else:
            self._choose_broker()
        if not self.environment.get("EMAIL_URL"):
            self._start_mail()
        with ThreadPoolExecutor(1) as executor:  # both take seconds
            starting = executor.submit(self.node.start) if self.node is not None else None
            self.manage("migrate", "--no-input")
        if starting is not None:
            node = starting.result()
            self._say(f"RabbitMQ is ready: {node.management_url} and {node.amqp_url}")
            self._say(f"Agents can use STOMP over WebSocket: {node.stomp_url}")

    def _lock_var(self) -> None:
        """Lock the directory: two Guardians can't share the broker's data and the task queue."""
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
        # With https, the port is that of a proxy.
        wanted = configured.port if configured.scheme == "http" and configured.port is not None else 8000
        port = self._reserve_ports(wanted)
        if port != wanted:
            self._say(f"Port {wanted} is taken or not allowed, so the pages are on port {port}.")
        if configured.scheme == "http" and port != wanted:
            configured = configured._replace(netloc=f"{configured.hostname}:{port}")
        environment["GUARDIAN_BASE_URL"] = configured.geturl()
        self.base_url = environment["GUARDIAN_BASE_URL"]

    def _reserve_ports(self, wanted: int) -> int:
        """Open the listening sockets of all web processes early, so that no other program takes the ports.

        Return the first port.
        """
        for number, name in enumerate(_names("web", self._web)):
            listener = _listen(wanted + number)
            self._sockets[name] = listener
            self.addresses[name] = f"http://127.0.0.1:{listener.getsockname()[1]}"
        return int(next(iter(self._sockets.values())).getsockname()[1])

    def _choose_broker(self) -> None:
        self._say("No RabbitMQ is configured (RABBITMQ_MANAGEMENT_URL), so a private one starts.")
        self.node = PrivateNode(directory=self._var / "rabbitmq")
        self.environment["RABBITMQ_MANAGEMENT_URL"] = self.node.management_url
        self.environment["RABBIT_URL"] = self.node.amqp_url
        # What owners are shown has no credentials.
        public = {"AMQP": f"amqp://127.0.0.1:{self.node.port}", "STOMP": self.node.stomp_url}
        for protocol, address in public.items():
            name = f"GUARDIAN_PUBLIC_{protocol}_URL"
            self.environment[name] = self.environment.get(name) or address or ""

    def _start_mail(self) -> None:
        self.mail = MailCatcher(on_mail=self._keep_mail).start()
        self.environment["EMAIL_URL"] = self.mail.url
        self._say(f"No mail server is configured (EMAIL_URL), so mails are stored in {self._var / 'mail'}.")

    def _keep_mail(self, mail: Mail) -> None:
        folder = self._var / "mail"
        folder.mkdir(parents=True, exist_ok=True)
        now = datetime.datetime.now(datetime.UTC)
        recipient = re.sub(r"[^\w.@+-]", "_", ",".join(mail.recipients))[:100]
        (folder / f"{now:%Y%m%d-%H%M%S-%f}-{recipient}.eml").write_bytes(mail.content)
        if self._on_mail is not None:
            self._on_mail(mail)

    def start(self) -> None:
        """Start the processes after `prepare`, and wait until the web processes answer. Raises StartError."""
        self._processes = ProcessGroup(self.environment, directory=PROJECT, logs=self.logs, show=self._show)
        for name, listener in self._sockets.items():
            self._commands[name] = [
                *self._wrappers.get(name, ()),
                *(sys.executable, "-m", "gunicorn", "guardian_site.wsgi", "--bind", f"fd://{listener.fileno()}"),
                # gthread workers check every second whether their parent still runs; sync workers take 15 s.
                *("--worker-class", "gthread", "--threads", "8", "--no-control-socket"),
            ]
        celery = [sys.executable, "-m", "celery", "-A", "guardian_site"]
        # The workers need no communication with each other.
        quiet = ["--without-mingle", "--without-gossip", "--without-heartbeat"]
        workers = {"guard": ("guarding", "1"), "deleter": ("deleting", "1"), "worker": ("celery", "2")}
        for kind, (queue, concurrency) in workers.items():
            for name in _names(kind, self._workers):
                options = ["--queues", queue, "--concurrency", concurrency, "--hostname", f"{name}@%h"]
                self._commands[name] = [*celery, "worker", *options, "--loglevel", "INFO", *quiet]
        if self._workers:
            schedule = self._var / "celery" / "beat-schedule"
            schedule.parent.mkdir(parents=True, exist_ok=True)
            # No pid file: after a kill it could name an unrelated process, and a second beat does no harm.
            self._commands["beat"] = [*celery, "beat", "--schedule", str(schedule), "--pidfile=", "--loglevel", "INFO"]
        for name in self._commands:
            self.start_process(name)
        self.wait_for_web(*self.addresses)

    def names(self, kind: str) -> list[str]:
        """Return the names of the processes of a kind: web, guard, deleter, worker or beat."""
        count = {"web": self._web, "beat": 1}.get(kind, self._workers)
        return _names(kind, count)

    def start_process(self, name: str) -> None:
        assert self._processes is not None
        inherited = [listener.fileno() for listener in self._sockets.values()] if name in self.addresses else []
        self._processes.start(name, self._commands[name], inherited=inherited)

    def add_beat(self, name: str) -> None:
        schedule = str(self._var / "celery" / f"{name}-schedule")
        mine = self._commands["beat"]
        self._commands[name] = [schedule if part.endswith("/beat-schedule") else part for part in mine]
        self.start_process(name)

    def end_process(self, name: str, timeout: float = 120) -> int:
        """Terminate a process, kill it after ``timeout`` seconds, and return its exit code."""
        assert self._processes is not None
        return self._processes.end(name, timeout)

    def kill_process(self, name: str) -> None:
        assert self._processes is not None
        self._processes.kill(name)

    def wait_for_web(self, *names: str, timeout: float = 60) -> None:
        """Wait until these web processes answer. Raises StartError if one ends or the time is over."""
        assert self._processes is not None
        deadline = time.monotonic() + timeout
        for name in names:
            while not _answers(self.addresses[name]):
                if error := self.unexpected_ends().get(name):
                    raise StartError(error)
                if time.monotonic() > deadline:
                    log = tail(self._processes.log(name))
                    raise StartError(f"the process {name!r} does not answer. Its output:\n{log}")
                time.sleep(0.05)

    def check(self) -> None:
        """Raise StartError with the end of its log if a process has ended unexpectedly."""
        self._check_node()
        for error in self.unexpected_ends().values():
            raise StartError(error)

    def unexpected_ends(self) -> dict[str, str]:
        """Return the processes that ended by themselves, each with its exit code and the end of its log in words."""
        if self._processes is None:
            return {}
        return {
            name: f"the process {name!r} has ended with code {code}. Its output:\n{tail(self._processes.log(name))}"
            for name, code in self._processes.ended().items()
        }

    def _check_node(self) -> None:
        if self.node is not None and self.node.ended:
            raise StartError("the private RabbitMQ has ended")

    def wait(self) -> None:
        """Run `check` repeatedly until it raises StartError. While the disk is full, wait until there is room again.

        After the first ``SETTLING_SECONDS``, start processes that end again: workers end when Redis becomes a replica.
        """
        settled_at = time.monotonic() + SETTLING_SECONDS
        while True:
            if free_bytes(self._var) < MIN_FREE_BYTES:
                self._outlast_full_disk()
            if time.monotonic() < settled_at:
                self.check()
            else:
                self._check_node()
                self._restart_ended()
            time.sleep(0.2)

    def _restart_ended(self) -> None:
        if self._processes is None or not (ended := self._processes.ended()):
            return
        time.sleep(RESTART_SECONDS)
        for name, code in ended.items():
            if self._processes is not None:  # another thread may stop the stack meanwhile
                self._say(f"The process {name!r} starts again, because it has ended with code {code}.")
                self.start_process(name)

    def _outlast_full_disk(self) -> None:
        """Wait until there is room on the disk. Then start what ended or broke meanwhile, as RabbitMQ does."""
        assert self._processes is not None
        self._say(f"The disk of {self._var} is full, so no queue is guarded. Guardian continues when there is room.")
        while free_bytes(self._var) < MIN_FREE_BYTES:
            time.sleep(0.2)
        self._say("There is room on the disk again.")
        if self.node is not None and not self.node.answers():
            self._say("RabbitMQ starts again, because it does not answer since the disk was full.")
            self._restart_node(self.node)
        for name in self._processes.ended():
            self._say(f"The process {name!r} starts again, because it ended on the full disk.")
            self.start_process(name)

    def _restart_node(self, node: PrivateNode) -> None:
        """Start the broker again. Return without it if the disk is full again."""
        try:
            node.restart()
        except StartError:
            if free_bytes(self._var) >= MIN_FREE_BYTES:
                raise

    def manage(self, *arguments: str) -> str:
        """Run a command of ``manage.py`` with the same settings, and return its output. Raises StartError."""
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
        """Stop everything that was started. A second Ctrl-C does not interrupt this."""
        with _signals_ignored():
            processes, self._processes = self._processes, None
            if processes is not None:
                processes.stop()
            while self._sockets:
                self._sockets.popitem()[1].close()
            if self.mail is not None:
                self.mail.stop()
                self.mail = None
            if self.node is not None:
                self.node.stop(grace=0 if self._fresh else None)
                self.node = None
            if self._lock is not None:
                self._lock.close()
                self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


def free_bytes(directory: Path) -> int:
    """Return the free space of a directory's disk that a user may fill."""
    disk = os.statvfs(directory)
    return disk.f_bavail * disk.f_frsize


def _listen(port: int) -> socket.socket:
    while True:
        with contextlib.suppress(OSError):  # another program may have taken the port meanwhile
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
    return {**env_file.parse(PROJECT / ".env").variables, **os.environ}


def isolated(settings: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with these settings and the documented defaults of all others, so that no ``.env`` counts.

    The caller also sets ``DATABASE_URL``. The broker and the mail server are unset, so that a stack starts its own.
    """
    lines = (PROJECT / ".env.example").read_text().splitlines()
    documented = {found[1]: found[2] for line in lines if (found := re.fullmatch(r"# ([A-Z_]+)=(.*)", line))}
    unset = {"EMAIL_URL": "", "GUARDIAN_PROXIES": "0", "MESSAGE_STORE_DELAY_SECONDS": "0"}
    return {"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8", **documented, **unset, **settings}


def turn_signals_into_interrupts() -> None:
    """Turn SIGTERM and a closed terminal into KeyboardInterrupt, like Ctrl-C."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for number in STOP_SIGNALS:
        signal.signal(number, interrupt)


@contextlib.contextmanager
def _signals_ignored() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # only the main thread can set signal handlers
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
