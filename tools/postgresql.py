"""A private PostgreSQL server from Debian's package, which leaves no files behind."""

import contextlib
import os
import pwd
import re
import secrets
import signal
import subprocess
from pathlib import Path
from typing import BinaryIO, Self

import psycopg2
from psycopg2 import sql

from tools.processes import StartError, end, spawn, tail
from tools.server import PrivateServer

USER = "guardian"


def binaries() -> Path:
    """Return the directory of the newest version's programs. Raises StartError if PostgreSQL is not installed."""
    found = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/initdb")]
    if not found:
        raise StartError(
            "PostgreSQL is not installed: there is no initdb. On Debian or Ubuntu run `apt-get install postgresql`."
        )
    return max(found, key=lambda path: [int(number) for number in re.findall(r"\d+", path.parent.name)])


class PrivateCluster(PrivateServer):
    """A private PostgreSQL server, fast but not crash-safe. Data survives `halt`."""

    name = "PostgreSQL"
    not_ready = psycopg2.OperationalError
    stop_signal = signal.SIGINT  # "fast shutdown": it doesn't wait for clients

    def __init__(self) -> None:
        """Choose port and directory. Raises StartError if PostgreSQL isn't installed."""
        self._binaries = binaries()
        # PostgreSQL refuses to run as root, and its account may not have access to TMPDIR.
        self._user = "postgres" if os.geteuid() == 0 else None
        super().__init__(None if self._user is None else "/tmp")
        self.password = secrets.token_hex(16)

    def start(self, timeout: float = 60) -> Self:
        """Start the server, creating the cluster if needed.

        Raises StartError with the end of the log after ``timeout`` seconds.
        """
        try:
            if not self._data.exists():
                self._initialise(timeout)
        except BaseException:
            self.stop()
            raise
        return super().start(timeout)

    def _launch(self, output: BinaryIO) -> "subprocess.Popen[bytes]":
        return spawn(
            [self._binaries / "postgres", "-D", self._data, *self._options()],
            environment=self._environment,
            directory=self.directory,
            output=output,
            user=self._user,
            # "Immediate shutdown": the server removes its children and its shared memory.
            death_signal=signal.SIGQUIT,
        )

    def _check_ready(self) -> None:
        psycopg2.connect(self.database_url(), connect_timeout=5).close()

    @property
    def _data(self) -> Path:
        return self.directory / "data"

    @property
    def _environment(self) -> dict[str, str]:
        return {"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8", "HOME": str(self.directory)}

    def _options(self) -> list[str]:
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": "",
            "max_connections": "200",
            # The data is temporary.
            "fsync": "off",
            "synchronous_commit": "off",
            "full_page_writes": "off",
        }
        return [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]

    def _initialise(self, timeout: float) -> None:
        password = self.directory / "password"
        password.write_text(self.password)
        if self._user is not None:
            account = pwd.getpwnam(self._user)
            for path in (self.directory, password):
                os.chown(path, account.pw_uid, account.pw_gid)
        command: list[str | Path] = [
            self._binaries / "initdb",
            *("--pgdata", self._data, "--username", USER, "--pwfile", password, "--auth", "scram-sha-256"),
            *("--encoding", "UTF8", "--no-locale", "--no-sync"),
        ]
        with self._log.open("wb") as output:
            process = spawn(
                command, environment=self._environment, directory=self.directory, output=output, user=self._user
            )
            try:
                code = process.wait(timeout)
            except subprocess.TimeoutExpired:
                end(process, 0)
                code = -signal.SIGKILL
        if code != 0:
            raise StartError(f"PostgreSQL's initdb ended with code {code}. Its output:\n{tail(self._log)}")

    def database_url(self, name: str = "postgres") -> str:
        return f"postgres://{USER}:{self.password}@127.0.0.1:{self.port}/{name}"

    def create_database(self, name: str) -> str:
        """Create an empty database and return its address. (Django's test runner creates its own.)"""
        with contextlib.closing(psycopg2.connect(self.database_url())) as connection:
            connection.autocommit = True
            connection.cursor().execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        return self.database_url(name)
