"""Child processes that never outlive this program, and free ports for them."""

import contextlib
import ctypes
import errno
import fcntl
import os
import queue
import secrets
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import IO

_PR_SET_PDEATHSIG = 1
# Only Linux has prctl. Elsewhere children outlive this program if it is killed.
_prctl = getattr(ctypes.CDLL(None), "prctl", None)


_ports = os.open(Path(tempfile.gettempdir()) / f"guardian-ports-{os.getuid()}", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
"""A port seems free until the server on it listens, and while it is stopped: a lock of byte N reserves port N."""

_reserved_ports: set[int] = set()  # of this process, which its own locks do not keep out


class StartError(Exception):
    """A requirement is missing or did not start. The text says what to do."""


def lock_directory(directory: Path, trouble: str) -> IO[str]:
    """Lock a directory and return its lock file. Closing the file releases the lock.

    Raises:
        StartError: another process has the lock. The text is ``trouble`` and the directory.
    """
    lock = (directory / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise StartError(f"{trouble} {directory}") from None
    return lock


def free_port(preferred: int | None = None) -> int:
    """Return a free TCP port of 127.0.0.1: the preferred one if possible.

    Other ports are below the kernel's range for outgoing connections. They are reserved until this process ends.
    """
    for attempt in range(1000):
        if preferred is not None and attempt == 0:
            port = preferred
        else:
            port = 20_000 + secrets.randbelow(12_000)  # not `random`, which tests seed equally in all processes
            if port in _reserved_ports:
                continue
        try:
            fcntl.lockf(_ports, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
        except OSError:  # another process has it
            continue
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                _reserved_ports.add(port)
                return port
    raise StartError("no free port between 20000 and 31999 on 127.0.0.1")


def port_answers(port: int) -> bool:
    """Return whether a server accepts connections on this port of 127.0.0.1."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=2):
        return True
    return False


def happens(what: Callable[[], bool], timeout: float, pause: float = 0.05) -> bool:
    """Return whether ``what()`` becomes true within ``timeout`` seconds, with a pause between two calls."""
    deadline = time.monotonic() + timeout
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
    return True


def tail(path: Path, lines: int = 30) -> str:
    """Return the last lines of a log file, or an empty string if it does not exist."""
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
    """Start a process in its own session. It gets ``death_signal`` when this program ends or is killed.

    ``output`` is an open file or ``subprocess.PIPE`` for stdout and stderr. The session shields the process from the
    terminal's Ctrl-C, so that this program decides the order of shutdown. ``user`` needs root. ``inherited`` are file
    descriptors to pass on. Raises OSError if the command can't be run.
    """
    parent = os.getpid()

    def request_death_signal() -> None:
        if _prctl is not None:
            _prctl(_PR_SET_PDEATHSIG, int(death_signal))
        if os.getppid() != parent:  # the parent ended before the line above
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
    """Get SIGTERM when the parent process ends or is killed."""
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))


class _Starter:
    """A permanent thread that starts all children.

    Linux sends the death signal when the *thread* that started the child ends. So a child of a short-lived thread would
    end with this thread.
    """

    def __init__(self) -> None:
        self._requests: queue.SimpleQueue[
            tuple[Callable[[], subprocess.Popen[bytes]], Future[subprocess.Popen[bytes]]]
        ] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._pid = 0  # of the process with the thread: threads don't survive a fork

    def run(self, start: Callable[[], "subprocess.Popen[bytes]"]) -> "subprocess.Popen[bytes]":
        with self._lock:
            if self._pid != os.getpid():
                self._pid = os.getpid()
                threading.Thread(target=self._serve, name="child starter", daemon=True).start()
        done: Future[subprocess.Popen[bytes]] = Future()
        self._requests.put((start, done))
        return done.result()

    def _serve(self) -> None:
        while True:
            start, done = self._requests.get()
            try:
                done.set_result(start())
            except BaseException as error:
                done.set_exception(error)


_starter = _Starter()


def end(process: "subprocess.Popen[bytes]", timeout: float, request: signal.Signals = signal.SIGTERM) -> None:
    """Terminate a process from `spawn`. After ``timeout`` seconds kill its process group."""
    if process.poll() is not None:
        return
    process.send_signal(request)
    process.send_signal(signal.SIGCONT)  # a suspended process would not handle the signal
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        kill(process)


def kill(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class _Log:
    """A child's log. Lines that can't be written, as on a full disk, are left out: the child must not wait for them."""

    def __init__(self, path: Path, mode: str) -> None:
        self._path = path
        self._mode = mode
        self._file: IO[bytes] | None = None
        self._missing = 0

    def write(self, line: bytes) -> None:
        """Write a line, after a note about the lines that are missing before it."""
        try:
            if self._file is None:
                self._file = self._path.open(self._mode, buffering=0)
            if self._missing:
                self._write(f"\n[{self._missing} lines are missing here, because they could not be written]\n".encode())
                self._missing = 0
            self._write(line)
        except OSError:
            self._missing += 1

    def _write(self, text: bytes) -> None:
        assert self._file is not None
        if self._file.write(text) < len(text):  # what fits is written without an error
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class ProcessGroup:
    """Named children with a common environment. Each has a log, and its output can be shown.

    An ended child may be started again under the same name and appends to its log.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        *,
        directory: Path,
        logs: Path,
        show: Callable[[str, str], None] | None = None,
    ) -> None:
        """Create an empty group.

        The children run in ``directory`` and write ``logs``/NAME.log, which the first start truncates. A thread calls
        ``show(name, line)`` for each line.
        """
        self._environment = {"PYTHONUNBUFFERED": "1", **environment}
        self._directory = directory
        self._logs = logs
        self._show = show
        self._children: dict[str, tuple[subprocess.Popen[bytes], threading.Thread]] = {}
        self._terminated: set[str] = set()

    def start(self, name: str, command: Sequence[str | Path], *, inherited: Sequence[int] = ()) -> None:
        """Start a new or ended child. ``inherited`` is as for `spawn`."""
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
        with contextlib.closing(_Log(self.log(name), mode)) as log:
            for line in process.stdout:
                log.write(line)
                if self._show is not None:
                    self._show(name, line.decode(errors="replace").rstrip())

    def log(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def pid(self, name: str) -> int:
        return self._children[name][0].pid

    def ended(self) -> dict[str, int]:
        """Return the exit codes of children that ended without `end` or `kill` (negative: the signal)."""
        left = [child for child in self._children.copy().items() if child[0] not in self._terminated]
        codes = {name: process.poll() for name, (process, _) in left}
        return {name: code for name, code in codes.items() if code is not None}

    def end(self, name: str, timeout: float) -> int:
        """Terminate a child, kill it after ``timeout`` seconds, and return its exit code (negative: the signal)."""
        process, reader = self._children[name]
        self._terminated.add(name)
        end(process, timeout)
        reader.join(timeout=2)
        return process.wait()

    def kill(self, name: str) -> None:
        process, reader = self._children[name]
        self._terminated.add(name)
        kill(process)
        reader.join(timeout=2)

    def stop(self, timeout: float = 15) -> None:
        """Terminate all children, the last started first, and kill the remaining ones after ``timeout`` seconds."""
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
