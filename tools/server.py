"""The base class of private servers, each with its own directory and port."""

import shutil
import signal
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import BinaryIO, ClassVar, Self

from tools.processes import StartError, end, free_port, kill, tail


class PrivateServer(ABC):
    """A private server on a free port of 127.0.0.1. It ends with this program, even if this is killed.

    Subclasses define how to launch the server and how to check whether it is ready.
    """

    name: ClassVar[str]
    not_ready: ClassVar[type[Exception]]
    """The exception of ``_check_ready``."""

    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM

    def __init__(self, parent: str | None = None) -> None:
        """Choose a port and create the directory, by default in the system's temporary directory."""
        self.port = free_port()
        self.directory = Path(tempfile.mkdtemp(prefix=f"guardian-{self.name.lower()}-", dir=parent))
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, timeout: float = 60) -> Self:
        """Start the server, and wait until it is ready. Raises StartError with its log after ``timeout`` seconds."""
        try:
            with self._log.open("ab") as output:
                self._process = self._launch(output)
            self._wait_until_ready(timeout)
        except BaseException:
            self.stop()
            raise
        return self

    @property
    def running(self) -> bool:
        return self._process is not None

    @abstractmethod
    def _launch(self, output: BinaryIO) -> "subprocess.Popen[bytes]": ...

    @abstractmethod
    def _check_ready(self) -> None:
        """Raise ``not_ready`` if the server doesn't answer correctly."""

    @property
    def _log(self) -> Path:
        return self.directory / "log"

    def _wait_until_ready(self, timeout: float) -> None:
        assert self._process is not None
        deadline = time.monotonic() + timeout
        while True:
            try:
                self._check_ready()
                return
            except self.not_ready as error:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise StartError(f"{self.name} did not start: {error}\nIts log:\n{tail(self._log)}") from error
                time.sleep(0.02)

    def kill(self) -> None:
        """Kill the server, as a power cut does, keeping its data and port for `start`."""
        if self._process is not None:
            kill(self._process)
            self._process = None

    def halt(self) -> None:
        if self._process is not None:
            end(self._process, 10, self.stop_signal)
            self._process = None

    def stop(self) -> None:
        self.halt()
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self if self._process is not None else self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()
