"""A private nginx from Debian's package, which leaves no files behind."""

import os
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import BinaryIO

from tools.processes import StartError, spawn
from tools.server import PrivateServer

PROGRAM = Path("/usr/sbin/nginx")


class PrivateNginx(PrivateServer):
    """A private nginx with these ``locations``: the lines of a ``server`` block, and lines ``before`` that block."""

    name = "nginx"
    not_ready = OSError

    def __init__(self, locations: str, before: str = "") -> None:
        """Choose port and directory. Raises StartError if nginx isn't installed."""
        if not PROGRAM.exists():
            raise StartError(
                f"nginx is not installed: there is no {PROGRAM}. On Debian or Ubuntu run `apt-get install nginx-light`."
            )
        super().__init__()
        # Started by root, nginx's workers run as a user of their own, which can't write into this directory.
        user = "user root;\n" if os.geteuid() == 0 else ""
        temporary = "".join(
            f"{kind}_temp_path {self.directory}/{kind};\n"
            for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        (self.directory / "nginx.conf").write_text(
            f"{user}daemon off;\npid {self.directory}/pid;\nerror_log stderr;\nevents {{}}\n"
            f"http {{\naccess_log off;\n{temporary}"
            f"{before}\nserver {{\nlisten 127.0.0.1:{self.port};\n{locations}\n}}\n}}\n"
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _launch(self, output: BinaryIO) -> "subprocess.Popen[bytes]":
        return spawn(
            [PROGRAM, "-e", "stderr", "-c", self.directory / "nginx.conf"],
            environment={},
            directory=self.directory,
            output=output,
        )

    def _check_ready(self) -> None:
        try:
            urllib.request.build_opener(urllib.request.ProxyHandler({})).open(self.url, timeout=5).close()
        except urllib.error.HTTPError as answer:
            answer.close()
