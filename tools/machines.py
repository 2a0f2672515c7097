"""Machines within this one, with their own network and disk, to cut them off and fill them, and wrong clocks."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tools.processes import StartError, lock_directory

CLOCK_SOURCE = Path(__file__).with_name("clock.c")

FOLDER = Path("/run/guardian-machines")
"""The place of the disks, and of a lock: the names of the machines exist once."""

NAME = "guardian-chaos"
"""The name of the bridge between the machines, and the beginning of theirs."""

NETWORK = "198.18.54"
"""Within the network for tests of devices (RFC 2544)."""

DISK_SIZE = "512m"


class Clock:
    """Clocks that are wrong by a constant time, for any program."""

    def __init__(self, directory: Path) -> None:
        """Compile the library that shifts a clock to this directory. Raises StartError without a C compiler."""
        self._library = directory / "clock.so"
        _run("cc", "-shared", "-fPIC", "-O2", "-o", str(self._library), str(CLOCK_SOURCE))

    def shifted(self, seconds: float) -> list[str]:
        """Return the command that runs another one with its clock ahead by these seconds."""
        return ["env", f"LD_PRELOAD={self._library}", f"CLOCK_SHIFT={seconds}"]


class Machine:
    """A network namespace with an address, and a disk of `DISK_SIZE` in memory."""

    def __init__(self, number: int) -> None:
        """Create the machine, which `machines` removes."""
        self.name = f"{NAME}-{number}"
        self.address = f"{NETWORK}.{number}"
        self.disk = FOLDER / str(number)
        self.disk.mkdir(exist_ok=True)
        self._link = f"{NAME}{number}"  # at most 15 characters
        self._filler = self.disk / "filler"
        _run("mount", "-t", "tmpfs", "-o", f"size={DISK_SIZE}", NAME, str(self.disk))
        _run("ip", "netns", "add", self.name)
        _run("ip", "link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        _run("ip", "link", "set", self._link, "master", NAME, "up")
        _run(*self.command, "ip", "link", "set", "lo", "up")
        _run(*self.command, "ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        _run(*self.command, "ip", "link", "set", "eth0", "up")

    @property
    def command(self) -> list[str]:
        return ["ip", "netns", "exec", self.name]

    def cut_off(self) -> None:
        """Lose all packets from and to the machine."""
        _run("ip", "link", "set", self._link, "down")

    def reconnect(self) -> None:
        _run("ip", "link", "set", self._link, "up")

    def fill_disk(self) -> None:
        """Leave no byte free on the disk."""
        with suppress(OSError), self._filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 20))

    def free_disk(self) -> None:
        self._filler.unlink()


@contextmanager
def machines(number: int) -> Iterator[list[Machine]]:
    """Yield new machines, and remove them at the end. Raises StartError without root, or if others exist."""
    if os.geteuid() != 0:
        raise StartError("Machines with networks of their own need root.")
    FOLDER.mkdir(exist_ok=True)
    with ExitStack() as exits:
        exits.enter_context(lock_directory(FOLDER, "another chaos run has machines in"))
        _remove_machines()  # of a run that was killed
        exits.callback(_remove_machines)
        _run("ip", "link", "add", NAME, "type", "bridge")
        _run("ip", "address", "add", f"{NETWORK}.254/24", "dev", NAME)
        _run("ip", "link", "set", NAME, "up")
        yield [Machine(one) for one in range(1, number + 1)]


def _remove_machines() -> None:
    for disk in FOLDER.glob("[0-9]*"):
        for command in (
            ("umount", "--lazy", str(disk)),
            ("ip", "link", "delete", f"{NAME}{disk.name}"),
            ("ip", "netns", "delete", f"{NAME}-{disk.name}"),
        ):
            with suppress(StartError):  # a run that was killed has only some of them
                _run(*command)
        with suppress(OSError):
            disk.rmdir()
    with suppress(StartError):
        _run("ip", "link", "delete", NAME)


def _run(*command: str) -> str:
    """Run a command and return its output. Raises StartError."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise StartError(f"{command[0]} is not installed") from error
    if done.returncode != 0:
        raise StartError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
