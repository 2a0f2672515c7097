"""Private brokers, databases and child processes for benchmarks."""

import json
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rabbit.management import Management
from tools.postgresql import PrivateCluster
from tools.processes import StartError, kill, spawn
from tools.rabbitmq import PrivateNode

PROJECT = Path(__file__).resolve().parents[2]
CHILD_TIMEOUT_SECONDS = 3600.0
"""Timeout of one measurement."""


class ChildError(Exception):
    """A measurement failed. The text is the output of its process."""


@dataclass(frozen=True)
class Services:
    """The private broker, its management client, and the databases. ``cluster`` is None without PostgreSQL.

    ``say`` is called with progress messages. ``directory`` is a temporary one.
    """

    node: PrivateNode
    management: Management
    cluster: PrivateCluster | None
    directory: Path
    say: Callable[[str], None]

    @property
    def databases(self) -> list[str]:
        """The kinds of databases to measure."""
        return ["SQLite"] if self.cluster is None else ["SQLite", "PostgreSQL"]

    def versions(self) -> dict[str, str]:
        """Return the versions of the services."""
        versions = {"RabbitMQ": str(self.management.overview()["rabbitmq_version"]), "Python": sys.version.split()[0]}
        return versions | {"databases": ", ".join(self.databases)}

    def measure(
        self, module: str, database: str, vhost: str, *, settings: Mapping[str, str] | None = None, **arguments: Any
    ) -> dict[str, Any]:
        """Run ``module.measure(vhost=…, **arguments)`` in a child process on an empty database, and return the result.

        The process has Guardian's documented defaults, with these settings, and guards this vhost.
        Raises ChildError if it fails or takes more than ``CHILD_TIMEOUT_SECONDS``.
        """
        with ExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=self.directory)))
            address = stack.enter_context(self._empty_database(directory, database))
            outcome, log = directory / "outcome.json", directory / "log"
            call = json.dumps({"vhost": vhost, **arguments})
            with log.open("wb") as output:
                child = spawn(
                    [sys.executable, "-m", "tools.benchmarks.child", module, call, outcome],
                    environment={**self._environment(directory, address, vhost), **(settings or {})},
                    directory=PROJECT,
                    output=output,
                )
                try:
                    code = child.wait(CHILD_TIMEOUT_SECONDS)
                except subprocess.TimeoutExpired:
                    code = None
                finally:
                    kill(child)
            if code != 0:
                what = (
                    f"ended with code {code}" if code is not None else f"took more than {CHILD_TIMEOUT_SECONDS:.0f} s"
                )
                raise ChildError(f"{module} on {database} {what}. It said:\n{log.read_text(errors='replace')[-4000:]}")
            measured: dict[str, Any] = json.loads(outcome.read_text())
            return measured

    def _environment(self, directory: Path, address: str, vhost: str) -> dict[str, str]:
        return {
            **documented_defaults(),  # override this machine's .env
            "PATH": "/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "DJANGO_SETTINGS_MODULE": "guardian_site.settings",
            "LOG_LEVEL": "WARNING",
            "SECRET_KEY": secrets.token_hex(32),
            "GUARDIAN_VAR_DIR": str(directory),
            "DATABASE_URL": address,
            "RABBITMQ_MANAGEMENT_URL": self.node.management_url,
            "RABBIT_URL": self.node.amqp_url,
            "GUARDIAN_VHOSTS": vhost,
            "GUARDIAN_PULSE_VHOST": vhost,
            "GUARDIAN_IGNORED_QUEUES": "",
            "GUARDIAN_OPERATOR_EMAILS": "",
        }

    @contextmanager
    def _empty_database(self, directory: Path, database: str) -> Iterator[str]:
        """Create an empty database, and drop it afterwards, so that no vacuum disturbs later measurements."""
        if database == "SQLite":
            yield f"sqlite:///{directory / 'guardian.sqlite3'}"
            return
        assert self.cluster is not None
        name = f"bench_{secrets.token_hex(4)}"
        address = self.cluster.create_database(name)
        try:
            yield address
        finally:
            self.cluster.drop_database(name)


@contextmanager
def with_separate_broker(services: Services) -> Iterator[Services]:
    """Yield the same services with another private broker, which is killed afterwards.

    Deleting tens of thousands of queues would take minutes.
    """
    services.say("starting another private RabbitMQ")
    with PrivateNode(name="bench-apart") as node:
        management = Management(node.management_url, read_timeout=300)
        try:
            yield replace(services, node=node, management=management)
        finally:
            management.close()


@contextmanager
def running(say: Callable[[str], None]) -> Iterator[Services]:
    """Start the services, and stop them afterwards.

    Raises StartError if RabbitMQ isn't installed or a service doesn't start.
    """
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="guardian-bench-"))
        say("starting a private RabbitMQ")
        node = stack.enter_context(PrivateNode(name="bench"))
        management = Management(node.management_url, read_timeout=300)
        stack.callback(management.close)
        cluster: PrivateCluster | None
        try:
            cluster = PrivateCluster()
        except StartError as missing:
            say(f"SQLite only. {missing}")
            cluster = None
        else:
            say("starting a private PostgreSQL")
            stack.enter_context(cluster)
        yield Services(node, management, cluster, Path(directory), say)


def documented_defaults() -> dict[str, str]:
    """Return the settings of ``.env.example`` that have a default."""
    lines = (PROJECT / ".env.example").read_text().splitlines()
    return {match[1]: match[2] for line in lines if (match := re.fullmatch(r"# ([A-Z_]+)=(.+)", line))}
