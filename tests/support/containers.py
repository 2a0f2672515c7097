"""A machine within this one with a real Docker and no network, to run what docker-compose.yml describes.

`tools/make-docker` installs it. Docker runs in a chroot with namespaces of its own, so nothing outside var/docker
changes, and everything ends with this program. Docker Compose finds the images that it names: tools/images has
stand-ins for them. The stand-ins and the build cache are kept; containers, volumes and Guardian's image are not.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Self

from tools.processes import StartError, end, lock_directory, spawn, tail

PROJECT = Path(__file__).resolve().parents[2]
FOLDER = PROJECT / "var" / "docker"
ROOT = FOLDER / "root"
RABBITMQ = {"4.0": ROOT, "4.3": PROJECT / "var" / "rabbitmq-4.3" / "root"}
"""Where Debian's RabbitMQ of each series is installed."""

HOST = "172.17.0.1"
"""The machine's address for its containers."""

CGROUP = "guardian-containers"
"""The parent of the control groups of the containers."""

IMAGES = {
    "python": "python:3.13-slim",
    "postgres": "postgres:17",
    "redis": "redis:7",
    "nginx": "nginx:1.28",
    "rabbitmq": "rabbitmq:4-management",
}
"""The names of the stand-ins, by their targets in tools/images/Dockerfile."""

_START = """
set -e
root=$1 project=$2
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount --rbind /sys/fs/cgroup "$root/sys/fs/cgroup"
mount --rbind /dev "$root/dev"
mount -t tmpfs tmpfs "$root/run"
mount -t tmpfs tmpfs "$root/tmp"
mkdir -p "$root/guardian" "$root/images" "$root/old"
mount --bind "$project" "$root/guardian"
mount --bind "$3" "$root/images"
cd "$root"
pivot_root . old
umount -l /old
ip link set lo up
echo 1 > /proc/sys/net/ipv4/ip_forward
exec dockerd --log-level warn --bip "$4/16" --cgroup-parent "$5"
"""

_CLONE_NEWNET = 0x40000000
_SECONDS = 600


class Unsupported(Exception):
    """This system can't run the machine; the text says why."""


class CommandFailed(Exception):
    """A command on the machine failed; the text has its output."""


class DockerMachine:
    """A machine with Docker. Its folder ``/guardian`` is a copy of the project, in ``directory``.

    Use it as a context manager.
    """

    def __init__(self) -> None:
        """Raise Unsupported, or StartError if the machine is not installed."""
        if os.geteuid() != 0:
            raise Unsupported("Docker runs on a machine with namespaces of its own, which needs root.")
        namespaces = ["unshare", "--mount", "--net", "--pid", "--ipc", "--uts", "--fork", "true"]
        if subprocess.run(namespaces, stderr=subprocess.DEVNULL, check=False).returncode != 0:
            raise Unsupported("Docker runs on a machine with namespaces of its own, which this system denies.")
        if not (FOLDER / "installed").exists():
            raise StartError("Docker is not installed in var/docker: run `tools/make-docker` as root.")
        self.directory = Path(tempfile.mkdtemp(prefix="guardian-containers-"))
        self._lock: IO[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._pid = 0

    def __enter__(self) -> Self:
        try:
            self._lock = lock_directory(FOLDER, "another program runs the machine in")
            self._copy_project()
            self._start()
            self._remove_leftovers()
            self._build_images()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _copy_project(self) -> None:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=PROJECT,
            capture_output=True,
            text=True,
            check=True,
        )
        for name in filter(None, listed.stdout.split("\0")):
            if (PROJECT / name).is_file():
                (self.directory / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(PROJECT / name, self.directory / name)

    def _start(self) -> None:
        log = FOLDER / "dockerd.log"
        context = FOLDER / "context"
        context.mkdir(exist_ok=True)
        with log.open("wb") as output:
            self._process = spawn(
                [
                    *("unshare", "--mount", "--net", "--pid", "--ipc", "--uts", "--fork", "--kill-child=SIGKILL"),
                    *("--propagation", "private"),
                    *("sh", "-c", _START, "-", ROOT, self.directory, context, HOST, CGROUP),
                ],
                environment={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"},
                directory=FOLDER,
                output=output,
            )
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        deadline = time.monotonic() + 60
        while True:
            with suppress(CommandFailed, OSError, ValueError):
                self._pid = int(children.read_text())
                self.run("docker", "version")
                return
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise StartError(f"dockerd did not start. Its log:\n{tail(log)}")
            time.sleep(0.1)

    def _remove_leftovers(self) -> None:
        """Remove the containers, volumes, networks and images of earlier runs. What was built for them stays cached."""
        self._remove_containers()
        self.run("docker", "volume", "prune", "--all", "--force")
        self.run("docker", "network", "prune", "--force")
        if self.run("docker", "images", "--quiet", "guardian"):
            self.run("docker", "image", "rm", "--force", "guardian")
        self.run("docker", "image", "prune", "--force")

    def _remove_containers(self) -> None:
        if left := self.run("docker", "ps", "--all", "--quiet").split():
            self.run("docker", "rm", "--force", "--volumes", *left)

    def _build_images(self) -> None:
        context = FOLDER / "context"
        for path in (PROJECT / "tools" / "images").iterdir():
            shutil.copy(path, context)
        # A hard link: the machine sees no other folder of var/docker.
        shutil.rmtree(context / "wheels", ignore_errors=True)
        shutil.copytree(FOLDER / "wheels", context / "wheels", copy_function=os.link)
        self._import("base", FOLDER / "base.tar")
        for target, name in IMAGES.items():
            self._build(target, name)

    def _import(self, name: str, tar: Path) -> None:
        if self.run("docker", "images", "--quiet", name):
            return
        with tar.open("rb") as file:
            self.run("docker", "import", "-", name, stdin=file)

    def _build(self, target: str, name: str, *options: str) -> None:
        self.run("docker", "build", "--quiet", "--target", target, "--tag", name, *options, "/images")

    def use_rabbitmq(self, series: str) -> None:
        base = "base"
        if series != "4.0":
            base = f"rabbitmq-{series}"
            if not self.run("docker", "images", "--quiet", base):
                root = RABBITMQ[series]
                packed = subprocess.Popen(
                    ["tar", "--create", "--directory", root, "--exclude", "./dev", "--exclude", "./var/lib/apt", "."],
                    stdout=subprocess.PIPE,
                )
                with packed:
                    self.run("docker", "import", "-", base, stdin=packed.stdout)
        self._build("rabbitmq", IMAGES["rabbitmq"], "--build-arg", f"RABBITMQ={base}")

    def run(self, *command: str, stdin: IO[bytes] | None = None, environment: dict[str, str] | None = None) -> str:
        """Run a command in the project's folder, and return its output. Raises CommandFailed."""
        done = self.attempt(*command, stdin=stdin, environment=environment)
        if done.returncode != 0:
            raise CommandFailed(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout

    def attempt(
        self, *command: str, stdin: IO[bytes] | None = None, environment: dict[str, str] | None = None
    ) -> "subprocess.CompletedProcess[str]":
        entered = ["nsenter", "--target", str(self._pid), "--mount", "--net", "--pid", "--ipc", "--uts", "--root"]
        return subprocess.run(
            [*entered, "env", "--chdir=/guardian", *command],
            env={"PATH": "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", **(environment or {})},
            stdin=stdin or subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )

    @contextmanager
    def network(self) -> Iterator[None]:
        """Use the machine's network in this thread, and in threads and processes that it starts meanwhile."""
        own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            machines = os.open(f"/proc/{self._pid}/ns/net", os.O_RDONLY)
            try:
                _enter(machines)
            finally:
                os.close(machines)
            try:
                yield
            finally:
                _enter(own)
        finally:
            os.close(own)

    def stop(self) -> None:
        if self._process is not None:
            if self._pid:
                with suppress(CommandFailed, subprocess.TimeoutExpired):
                    self._remove_containers()  # at once, while dockerd would wait for each
                with suppress(ProcessLookupError):
                    os.kill(self._pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(30)
            end(self._process, 10)
            self._process = None
        if self._lock is not None:
            self._lock.close()
        _remove_control_groups()
        shutil.rmtree(self.directory, ignore_errors=True)


def _remove_control_groups() -> None:
    hierarchies = Path("/sys/fs/cgroup")
    for group in [hierarchies / CGROUP, *hierarchies.glob(f"*/{CGROUP}")]:
        for path, _, _ in os.walk(group, topdown=False):
            with suppress(OSError):
                Path(path).rmdir()


def _enter(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
