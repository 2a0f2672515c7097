"""An operator who applies one file after the other to the installation. Half of the runs are killed midway."""

import json
import random
import re
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from tools.load import LoadThread
from tools.processes import kill, spawn
from tools.stack import PROJECT, Stack

PULSE_USER = "applied-{}"
NUMBER = 6
"""Of what a file may have of each kind."""

KILLED_LEASE = timedelta(seconds=320)
"""How long a killed apply keeps others from running, or from changing a Pulse user: ``locks.lock_seconds`` and more."""

NOTHING_TO_DO = "0 to create, 0 to adopt, 0 to change, 0 to remove"


class Run(NamedTuple):
    """A run of ``manage.py apply``, with its exit code (negative: the signal) and output."""

    began: datetime
    ended: datetime
    code: int
    output: str


class Applying(LoadThread):
    """The thread of the operator."""

    def __init__(self, stack: Stack, owner: str, pause: float, chance: random.Random) -> None:
        """Create the thread. ``owner`` is the e-mail address of an owner with access; ``pause`` is between two runs."""
        super().__init__("operator")
        self.runs: list[Run] = []
        self.pulse_users: set[str] = set()
        """Those of the last file."""
        self._stack = stack
        self._owner = owner
        self._pause = pause
        self._chance = chance
        self._file = stack.logs.parent / "installation.json"

    def work(self) -> None:
        """Apply one file after the other."""
        while not self.ended.is_set():
            self._write_file()
            for _ in range(2):
                self.apply(self._chance.uniform(1, 8) if self._chance.random() < 0.5 else None)
                self.ended.wait(self._chance.uniform(0, 2) * self._pause)

    def _write_file(self) -> None:
        """Write a file with some of all possible Pulse users, owners, offerings, applications and limits."""

        def some(name: str) -> list[str]:
            return [name.format(number) for number in range(NUMBER) if self._chance.random() < 0.5]

        owners = [self._owner, *some("applied-{}@example.org")]
        limits = {"warn_length": 20 + self._chance.randrange(9), "max_length": 60 + self._chance.randrange(9)}
        self.pulse_users = set(some(PULSE_USER))
        content = {
            "version": 1,
            "owners": {email: {"access": True} for email in owners},
            "pulse_users": {name: {"owners": owners, **limits} for name in sorted(self.pulse_users)},
            "queues": [{"name": name, **limits} for name in some("queue/applied/{}")],
            "offerings": [{"name": name, "members": owners} for name in some("Applied {}")],
            "applications": some("applied-{}"),
        }
        self._file.write_text(json.dumps(content))

    def apply(self, kill_after: float | None = None, *, confirm: str = "") -> Run:
        """Apply the last file, once again with the digest that this requires, and return the last run."""
        program: list[str | Path] = [sys.executable, PROJECT / "manage.py"]
        command = [*program, "apply", self._file, "--prune", f"--yes={confirm}"]
        began, output = datetime.now(UTC), self._stack.logs / "apply.log"
        with output.open("wb") as log:
            process = spawn(command, environment=self._stack.environment, directory=PROJECT, output=log.fileno())
        try:
            process.wait(kill_after)
        except subprocess.TimeoutExpired:
            kill(process)
        run = Run(began, datetime.now(UTC), process.wait(), output.read_text())
        self.runs.append(run)
        digest = re.search(r"add --yes (\w+)", run.output)
        return self.apply(kill_after, confirm=digest[1]) if digest and not confirm else run

    def finish(self, timeout: float) -> Run:
        """Apply the last file until there is nothing to do, or until ``timeout`` seconds are over."""
        until = time.monotonic() + timeout
        while NOTHING_TO_DO not in (run := self.apply()).output and time.monotonic() < until:
            time.sleep(1)
        return run
