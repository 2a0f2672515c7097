"""A private ZooKeeper server from Debian's package, which leaves no files behind."""

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
"""Its manifest lists the other JARs."""

TICK_MILLISECONDS = 200
"""Session timeouts are from 2 to 20 ticks."""


class PrivateZooKeeper(PrivateServer):
    """A private ZooKeeper server for tests, not crash-safe."""

    name = "ZooKeeper"
    not_ready = KazooTimeoutError

    def __init__(self) -> None:
        """Choose port and directory. Raises StartError if ZooKeeper or Java isn't installed."""
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
