"""What private servers have in common: a directory and a port of their own, a start that is waited for, and an end."""

import shutil
import signal
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import BinaryIO, ClassVar, Self

from tools.processes import StartError, end, free_port, tail


class PrivateServer(ABC):
    """A server of one's own, on a free port of 127.0.0.1, which ends with the program that started it, even by a kill.

    Whoever has one says how it is launched, and how to ask it whether it is ready.
    """

    name: ClassVar[str]
    not_ready: ClassVar[type[Exception]]
    """What ``_check_ready`` raises until it is."""

    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    """By which it is asked to end."""

    def __init__(self, parent: str | None = None) -> None:
        """Choose port and directory, in ``parent`` where that is given; nothing runs yet."""
        self.port = free_port()
        self.directory = Path(tempfile.mkdtemp(prefix=f"guardian-{self.name.lower()}-", dir=parent))
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, timeout: float = 60) -> Self:
        """Start the server, the first time or again; raises StartError, with its log, past ``timeout`` seconds."""
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
        """Whether it was started, and not ended again."""
        return self._process is not None

    @abstractmethod
    def _launch(self, output: BinaryIO) -> "subprocess.Popen[bytes]": ...

    @abstractmethod
    def _check_ready(self) -> None:
        """Raise ``not_ready`` where it doesn't answer as it should."""

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

    def halt(self) -> None:
        """End the server as its operator would, keeping its data and its port; `start` brings it back."""
        if self._process is not None:
            end(self._process, 10, self.stop_signal)
            self._process = None

    def stop(self) -> None:
        """End the server, and remove its directory."""
        self.halt()
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self if self._process is not None else self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()
