"""A private Redis server from Debian's package, which leaves no files behind."""

import secrets
import subprocess
from pathlib import Path
from typing import BinaryIO

import redis

from tools.processes import StartError, spawn
from tools.server import PrivateServer

PROGRAM = Path("/usr/bin/redis-server")


class PrivateRedis(PrivateServer):
    """A private Redis server. Data survives `kill` and `start`."""

    name = "Redis"
    not_ready = redis.RedisError

    def __init__(self) -> None:
        """Choose port and directory. Raises StartError if Redis isn't installed."""
        if not PROGRAM.exists():
            raise StartError(
                f"Redis is not installed: there is no {PROGRAM}. On Debian or Ubuntu run"
                " `apt-get install redis-server`."
            )
        super().__init__()
        self._password = secrets.token_hex(16)
        settings = {
            "bind": "127.0.0.1",
            "port": str(self.port),
            "dir": str(self.directory),
            "requirepass": self._password,
            "appendonly": "yes",
            "save": '""',
        }
        configuration = self.directory / "redis.conf"
        configuration.touch(mode=0o600)
        configuration.write_text("".join(f"{name} {value}\n" for name, value in settings.items()))

    @property
    def url(self) -> str:
        return f"redis://:{self._password}@127.0.0.1:{self.port}/0"

    def _launch(self, output: BinaryIO) -> "subprocess.Popen[bytes]":
        return spawn(
            [PROGRAM, self.directory / "redis.conf"],
            environment={"LANG": "C.UTF-8"},
            directory=self.directory,
            output=output,
        )

    def _check_ready(self) -> None:
        with redis.Redis.from_url(self.url, socket_timeout=5) as client:
            client.ping()

    def flush(self) -> None:
        with redis.Redis.from_url(self.url, socket_timeout=5) as client:
            client.flushall()
