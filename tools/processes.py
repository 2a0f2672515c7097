"""Child processes that never outlive the program that started them, and the free ports they listen on."""

import contextlib
import ctypes
import fcntl
import os
import queue
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import IO

_PR_SET_PDEATHSIG = 1
# Linux alone has it; elsewhere only an orderly end takes the children along.
_prctl = getattr(ctypes.CDLL(None), "prctl", None)


_reserved_ports: set[int] = set()  # ports that were asked for and may not be in use yet


class StartError(Exception):
    """Something that is needed on this machine is missing, or didn't start; the text says what, and what to do."""


def lock_directory(directory: Path, trouble: str) -> IO[str]:
    """Return the open lock file of this directory, locked until it is closed.

    Raises:
        StartError: another process has locked it; the text is ``trouble`` and the directory.
    """
    lock = (directory / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise StartError(f"{trouble} {directory}") from None
    return lock


def free_port(preferred: int | None = None) -> int:
    """Give a TCP port on 127.0.0.1 that nobody listens on: the preferred one where it is free.

    Another lies below the range from which the kernel takes the ports of outgoing connections, so it is still free
    after the program that listens on it was stopped for a while.
    """
    for attempt in range(1000):
        if preferred is not None and attempt == 0:
            port = preferred
        else:
            port = 20_000 + secrets.randbelow(12_000)  # tests seed `random`, alike in each of their processes
            if port in _reserved_ports:
                continue
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                _reserved_ports.add(port)
                return port
    raise StartError("no free port between 20000 and 31999 on 127.0.0.1")


def port_answers(port: int) -> bool:
    """Tell whether something accepts connections on this port of 127.0.0.1."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=2):
        return True
    return False


def tail(path: Path, lines: int = 30) -> str:
    """Give the last lines of a log file, and nothing where there is no such file."""
    if not path.exists():
        return ""
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


def spawn(
    command: Sequence[str | Path],
    *,
    environment: Mapping[str, str],
    directory: Path,
    output: int | IO[bytes],
    user: str | None = None,
    inherited: Sequence[int] = (),
    death_signal: signal.Signals = signal.SIGKILL,
) -> "subprocess.Popen[bytes]":
    """Start a process in a session of its own, which gets ``death_signal`` when this program ends, however it ends.

    ``output`` takes both its output streams: an open file, or ``subprocess.PIPE``. A session of its own keeps
    the terminal's Ctrl-C from it: this program decides what ends first. ``user`` needs root. ``inherited`` are open
    files of this program that it gets under the same numbers. Raises OSError when the command can't be run.
    """
    parent = os.getpid()

    def request_death_signal() -> None:
        if _prctl is not None:
            _prctl(_PR_SET_PDEATHSIG, int(death_signal))
        if os.getppid() != parent:  # it ended before the line above
            os._exit(1)

    def start() -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [os.fspath(part) for part in command],
            env=dict(environment),
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            user=user,
            group=user,
            extra_groups=None if user is None else [],
            pass_fds=inherited,
            preexec_fn=request_death_signal,
        )

    return _starter.run(start)


def end_with_parent() -> None:
    """Ask for SIGTERM when the program that started this one ends, however it ends."""
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))


class _Starter:
    """A thread that lives as long as the program and starts all its children.

    Linux sends the death signal when the *thread* that started the child ends, so a child that was started by
    a short-lived thread would end with that one.
    """

    def __init__(self) -> None:
        self._wanted: queue.SimpleQueue[
            tuple[Callable[[], subprocess.Popen[bytes]], Future[subprocess.Popen[bytes]]]
        ] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._pid = 0  # of the process whose thread it is: a fork takes no threads along

    def run(self, start: Callable[[], "subprocess.Popen[bytes]"]) -> "subprocess.Popen[bytes]":
        with self._lock:
            if self._pid != os.getpid():
                self._pid = os.getpid()
                threading.Thread(target=self._serve, name="child starter", daemon=True).start()
        done: Future[subprocess.Popen[bytes]] = Future()
        self._wanted.put((start, done))
        return done.result()

    def _serve(self) -> None:
        while True:
            start, done = self._wanted.get()
            try:
                done.set_result(start())
            except BaseException as error:
                done.set_exception(error)


_starter = _Starter()


def end(process: "subprocess.Popen[bytes]", timeout: float, request: signal.Signals = signal.SIGTERM) -> None:
    """Ask a process that `spawn` started to end, wait ``timeout`` seconds, then kill it with all of its group."""
    if process.poll() is not None:
        return
    process.send_signal(request)
    process.send_signal(signal.SIGCONT)  # one that is stopped would not hear of it
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        kill(process)


def kill(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process that `spawn` started with all of its group, and wait for it."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class ProcessGroup:
    """Named children with one environment, whose output is written to a log each, and shown with their names.

    One that has ended may be started again under its name; its log goes on.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        *,
        directory: Path,
        logs: Path,
        show: Callable[[str, str], None] | None = None,
    ) -> None:
        """Prepare; nothing runs yet.

        ``directory`` is where they run, ``logs`` where NAME.log is written, anew each time. ``show(name, line)``
        is called for each line, from a thread; without it, output goes to the logs alone.
        """
        self._environment = {"PYTHONUNBUFFERED": "1", **environment}
        self._directory = directory
        self._logs = logs
        self._show = show
        self._children: dict[str, tuple[subprocess.Popen[bytes], threading.Thread]] = {}
        self._terminated: set[str] = set()

    def start(self, name: str, command: Sequence[str | Path], *, inherited: Sequence[int] = ()) -> None:
        """Start one more child, or one that has ended again; ``inherited`` as for `spawn`."""
        self._logs.mkdir(parents=True, exist_ok=True)
        mode = "ab" if name in self._children else "wb"
        process = spawn(
            command,
            environment=self._environment,
            directory=self._directory,
            output=subprocess.PIPE,
            inherited=inherited,
        )
        reader = threading.Thread(target=self._read, args=(name, process, mode), name=f"output of {name}", daemon=True)
        reader.start()
        self._children[name] = (process, reader)
        self._terminated.discard(name)

    def _read(self, name: str, process: "subprocess.Popen[bytes]", mode: str) -> None:
        assert process.stdout is not None
        with self.log(name).open(mode, buffering=0) as log:
            for line in process.stdout:
                log.write(line)
                if self._show is not None:
                    self._show(name, line.decode(errors="replace").rstrip())

    def log(self, name: str) -> Path:
        """Where the output of this child is."""
        return self._logs / f"{name}.log"

    def pid(self, name: str) -> int:
        """The process id of this child."""
        return self._children[name][0].pid

    def ended(self) -> dict[str, int]:
        """Give the children that have ended by themselves, with their exit codes (negative: the signal)."""
        left = [child for child in self._children.copy().items() if child[0] not in self._terminated]
        codes = {name: process.poll() for name, (process, _) in left}
        return {name: code for name, code in codes.items() if code is not None}

    def end(self, name: str, timeout: float) -> int:
        """Ask one to end, kill it after ``timeout`` seconds, and give its exit code (negative: the signal)."""
        process, reader = self._children[name]
        self._terminated.add(name)
        end(process, timeout)
        reader.join(timeout=2)
        return process.wait()

    def kill(self, name: str) -> None:
        """Kill one with all of its group, as a power cut does."""
        process, reader = self._children[name]
        self._terminated.add(name)
        kill(process)
        reader.join(timeout=2)

    def stop(self, timeout: float = 15) -> None:
        """End all of them, the last one started first; whoever is still there after ``timeout`` seconds is killed."""
        for process, _ in reversed(self._children.values()):
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + timeout
        for process, reader in reversed(self._children.values()):
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                kill(process)
            reader.join(timeout=2)
        self._children.clear()
