"""A private ZooKeeper, from Debian's package, that leaves nothing behind."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import BinaryIO

from kazoo.client import KazooClient
from kazoo.handlers.threading import KazooTimeoutError

from tools.processes import StartError, spawn
from tools.server import PrivateServer

JAR = Path("/usr/share/java/zookeeper.jar")
"""Its manifest names all the others that it needs."""

TICK_MILLISECONDS = 200
"""Sessions last from 2 to 20 of these."""


class PrivateZooKeeper(PrivateServer):
    """A ZooKeeper of one's own, for tests: it isn't safe from a power cut."""

    name = "ZooKeeper"
    not_ready = KazooTimeoutError

    def __init__(self) -> None:
        """Choose port and directory; nothing runs yet. Raises StartError when ZooKeeper or Java isn't installed."""
        java = shutil.which("java")
        if java is None or not JAR.exists():
            raise StartError(
                f"ZooKeeper is not installed: there is no {'java' if java is None else JAR}. On Debian or Ubuntu run"
                " `apt-get install zookeeper`."
            )
        super().__init__()
        self._java = java
        settings = {
            "clientPort": self.port,
            "clientPortAddress": "127.0.0.1",
            "dataDir": self.directory / "data",
            "tickTime": TICK_MILLISECONDS,
            "maxClientCnxns": 0,
            "admin.enableServer": "false",
            "forceSync": "no",
        }
        (self.directory / "zoo.cfg").write_text("".join(f"{name}={value}\n" for name, value in settings.items()))

    @property
    def hosts(self) -> str:
        """The server's address, as ZOOKEEPER_HOSTS takes it."""
        return f"127.0.0.1:{self.port}"

    def _launch(self, output: BinaryIO) -> "subprocess.Popen[bytes]":
        return spawn(
            [
                *(self._java, "-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"),
                *("-Dzookeeper.forceSync=no", "-cp", JAR, "org.apache.zookeeper.server.ZooKeeperServerMain"),
                self.directory / "zoo.cfg",
            ],
            environment={"LANG": "C.UTF-8", "PATH": os.environ.get("PATH", os.defpath)},
            directory=self.directory,
            output=output,
        )

    def _check_ready(self) -> None:
        client = KazooClient(self.hosts)
        try:
            client.start(timeout=2)
        finally:
            client.stop()
            client.close()
