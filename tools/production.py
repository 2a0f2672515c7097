"""Guardian as in production, on private servers, for the chaos run (`tools/chaos.py`)."""

import io
import os
import time
from contextlib import ExitStack, closing
from datetime import timedelta
from pathlib import Path
from typing import Self

import django

from rabbit.management import Management
from tools.postgresql import PrivateCluster
from tools.processes import StartError, happens
from tools.rabbitmq import PLUGINS, PrivateNode
from tools.rabbitmq_cluster import RabbitCluster
from tools.redis import PrivateRedis
from tools.stack import Stack, isolated

OPERATOR = "ops@example.org"

WARN, MAX = 20, 60
"""Warning threshold and deletion limit, in messages."""

SETTINGS = {
    "GUARDIAN_OPERATOR_EMAILS": OPERATOR,
    "GUARDIAN_POLL_SECONDS": "0.7",  # at 1 s, the time a worker blocks on Redis, one guard gets all passes
    "GUARDIAN_POLL_MAX_SECONDS": "5",
    "GUARDIAN_MAX_PULSE_USERS": "0",
    "GUARDIAN_DELETE_BRAKE": "10000",  # many queues are due after an outage
    "GUARDIAN_WARN_QUEUE_LENGTH": str(WARN),
    "GUARDIAN_MAX_QUEUE_LENGTH": str(MAX),
    "GUARDIAN_QUIET_SECONDS": "15",
    "GUARDIAN_ARCHIVE_TOTAL_BYTES": "20000000",  # so that one owner soon takes the share of one
    "GUARDIAN_ARCHIVE_MAX_BYTES": "4000000",
}


class Production:
    """Web processes, guards, deleters, workers and beat, with a private PostgreSQL, Redis, RabbitMQ and mail server.

    This process sets up Django, too, and may use Guardian's functions and rows. Use it as a context manager, once in a
    process.
    """

    def __init__(self, directory: Path, *, each: int, clustered: bool) -> None:
        """Set the directory of logs and data, and the number of processes of each kind.

        ``clustered``: RabbitMQ has three nodes.
        """
        self._directory = directory
        self._each = each
        self._clustered = clustered
        self.nodes: list[PrivateNode] = []
        self._exits = ExitStack()

    def __enter__(self) -> Self:
        """Start everything. Raises StartError."""
        with ExitStack() as exits:
            self.cluster = exits.enter_context(PrivateCluster())
            self.redis = exits.enter_context(PrivateRedis())
            settings = {
                **SETTINGS,
                "DATABASE_URL": self.cluster.create_database("guardian"),
                "CELERY_BROKER_URL": self.redis.url,
            }
            if self._clustered:
                cluster = exits.enter_context(RabbitCluster(plugins=PLUGINS))
                self.nodes = cluster.nodes
                settings |= {"RABBITMQ_MANAGEMENT_URL": cluster.management_url, "RABBIT_URL": cluster.amqp_url}
            stack = Stack(
                isolated(settings),
                var=self._directory,
                say=lambda text: None,
                fresh=True,
                web=self._each,
                workers=self._each,
            )
            self.stack = exits.enter_context(stack)
            self.stack.prepare()
            if self.stack.node is not None:
                self.nodes = [self.stack.node]
            assert self.stack.mail is not None
            self.mail = self.stack.mail
            self.management = exits.enter_context(
                closing(Management(self.stack.environment["RABBITMQ_MANAGEMENT_URL"]))
            )
            os.environ.update(self.stack.environment, DJANGO_SETTINGS_MODULE="guardian_site.settings")
            os.environ["LOG_LEVEL"] = "WARNING"
            django.setup()
            self.stack.start()
            self._exits = exits.pop_all()
        return self

    @property
    def amqp_urls(self) -> list[str]:
        return [node.amqp_url for node in self.nodes]

    def __exit__(self, *exc_info: object) -> None:
        for kind in ("web", "guard", "deleter", "worker", "beat"):
            for name in self.stack.names(kind):
                self.stack.kill_process(name)  # no work is left
        self._exits.close()


def command(*arguments: str) -> str:
    """Run a command of ``manage.py`` in this program, and return its output."""
    from django.core.management import call_command

    output = io.StringIO()
    call_command(*arguments, stdout=output)
    return output.getvalue().strip()


def await_pass(timeout: float = 150) -> None:
    """Wait for a new pass without errors. Raises StartError after ``timeout`` seconds."""
    from django.utils import timezone

    from queues.models import Pass

    now = timezone.now()
    if not happens(lambda: Pass.objects.filter(at__gt=now, errors=[]).exists(), timeout):
        raise StartError(f"there was no pass without an error for {timeout:.0f} s")


def expire_abandoned(seconds: float) -> None:
    """Expire leases and claims that are unused for ``seconds``, which must be longer than any work takes.

    Their normal expiry is after 90, 100 and 300 seconds. The deleter renews its lease every 30 seconds only.
    """
    from django.db.models import Q
    from django.utils import timezone

    from core.leases import LEASE_SECONDS
    from core.models import Lease
    from notifications import enqueue
    from notifications.models import Notification

    used = Q(name="deleter", expires_at__gt=timezone.now() + timedelta(seconds=LEASE_SECONDS * 2 / 3))
    leases = list(Lease.objects.exclude(used).exclude(holder=None).values_list("name", "holder", "expires_at"))
    claims = list(Notification.objects.filter(state="sending").values_list("id", "claim"))
    if not leases and not claims:
        return
    time.sleep(seconds)
    for name, holder, expires_at in leases:
        unused = Lease.objects.filter(name=name, holder=holder, expires_at=expires_at)
        unused.update(expires_at=timezone.now() - timedelta(seconds=1))
    expired = 0
    for id_, claim in claims:
        expired += Notification.objects.filter(id=id_, claim=claim, state="sending").update(due_at=timezone.now())
    if expired:
        enqueue.wake()


def let_a_day_pass() -> None:
    """Backdate the warnings and reminders of queues by a day."""
    from django.db.models import F

    from queues.models import Queue

    day = timedelta(days=1)
    warned = Queue.objects.filter(state=Queue.State.WARNED)
    warned.update(warned_since=F("warned_since") - day, reminded_at=F("reminded_at") - day)


def sweep(*, patience: bool) -> list[str]:
    """Sweep orphans and watches once, and return the sweep's errors.

    A sweep ignores young registrations and watches. So wait until all are old enough with ``patience``; otherwise
    backdate them.
    """
    from django.db.models import F
    from django.utils import timezone

    from agents.sweeps.reports import REGISTRATION_GRACE
    from agents.sweeps.sweep import sweep_orphans
    from queues.models import MessageWatch
    from queues.watching import polling
    from tools.invariants import REGISTERED

    if patience:
        time.sleep(REGISTRATION_GRACE.total_seconds())
    else:
        for model in REGISTERED:
            young = model._default_manager.filter(created__gt=timezone.now() - REGISTRATION_GRACE)
            young.update(created=F("created") - REGISTRATION_GRACE)
        MessageWatch.objects.update(ends=timezone.now())
    polling.sweep()
    return [f"the sweep reported: {error}" for error in sweep_orphans().errors]
