"""Measurements of the broker and of Guardian. ``rules.py`` judges them.

The front page, ``doctor``, ``/metrics`` and ``/readyz`` get their values from here. They take a constant number of
statements, and three requests to the broker.
"""

import math
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

from celery import current_app
from django.conf import settings
from django.db import transaction
from django.db.models import Count, Max, Min, Q, Sum
from django.db.models.functions import Coalesce
from django.template.defaultfilters import filesizeformat

from agents.models import Sweep
from core import broker
from core.formatting import duration
from core.masking import text_of
from core.models import Lease, Removal
from notifications import claims, retries
from notifications.models import Notification
from queues.guard import unguarded
from queues.models import Archive, Pass, Watch
from queues.rules.brake import released_queues
from queues.rules.turns import LONGEST_GAP
from rabbit import checkup
from rabbit.entities import Node
from rabbit.errors import BrokerError, BrokerUnavailable
from rabbit.management import Management
from rabbit.names import QueueName, readable
from rabbit.requests.sending import JSONObject
from status import rules
from status.verdicts import Rule, Verdict

Answer = TypeVar("Answer")
Report = TypeVar("Report", Pass, Sweep)

PASSES_READ = 6
SWEEPS_READ = 2

TASK_QUEUE_TIMEOUT_SECONDS = 2

MESSAGE_BYTES = 4096
WRITTEN_KEY = "guardian.written"
WRITTEN_KEY_SECONDS = 60
GIVEN_UP_WITHIN = timedelta(days=2)
FAILED_WITHIN = timedelta(days=2)

NAMES_IN_SENTENCE = 3


class Measurement(NamedTuple):
    """A value for a rule, with the details for the rule's sentence. None: the value is unknown."""

    rule: Rule
    value: float | None
    details: Mapping[str, str] = {}

    @property
    def verdict(self) -> Verdict:
        return self.rule.judge(self.value, settings, **self.details)


# Writes


def attempt(rule: Rule, write: Callable[[], object], **details: str) -> Measurement:
    """Try to write something. The detail ``error`` has the server's reason if it is refused."""
    try:
        write()
    except Exception as error:  # drivers raise errors of any type
        reason = readable(" ".join(text_of(error).split())) or f"no answer in time ({type(error).__name__})"
        return Measurement(rule, True, {**details, "error": reason})
    return Measurement(rule, False, details)


def write_to_database() -> None:
    """Write a row and delete it. On a full disk, and on a standby, the database can still be read."""
    with transaction.atomic():
        row = Lease.objects.create(name=f"written {uuid4().hex}")
        Lease.objects.filter(name=row.name).delete()


def write_to_task_queue() -> None:
    """Write to the task queue: a key of Redis, a queue of RabbitMQ, or a file as large as a message. Leave nothing.

    Raises:
        Exception: of the transport's types; the task queue can't be reached or refuses the write, or its disk is full.
    """
    with current_app.connection_for_write(connect_timeout=TASK_QUEUE_TIMEOUT_SECONDS) as connection:
        connection.ensure_connection(max_retries=1, timeout=TASK_QUEUE_TIMEOUT_SECONDS)
        kind = connection.transport.driver_type
        if kind == "redis":
            channel: Any = connection.default_channel
            channel.client.set(WRITTEN_KEY, "", ex=WRITTEN_KEY_SECONDS)
        elif kind == "amqp":
            checkup.declare_and_delete(connection.default_channel)
    if folder := settings.CELERY_BROKER_TRANSPORT_OPTIONS.get("data_folder_out"):
        write_to_folder(Path(str(folder)))


def write_to_folder(folder: Path) -> None:
    """Write a file as large as a message, and delete it."""
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".unfinished") as file:
        file.write(b" " * MESSAGE_BYTES)


# The broker


def time_answer(request: Callable[[], Answer], timeout: float) -> tuple[Answer | None, Measurement]:
    """Send a request to the broker. Return the answer and its duration; without an answer, None and infinity.

    ``timeout`` is the client's read timeout in seconds. A request that timed out has at least this duration.
    """
    began = time.monotonic()
    try:
        answer = request()
    except BrokerError as error:
        timed_out = isinstance(error, BrokerUnavailable) and error.timed_out
        seconds = max(time.monotonic() - began, timeout) if timed_out else math.inf
        return None, Measurement(rules.BROKER, seconds, {"error": readable(str(error))})
    return answer, Measurement(rules.BROKER, time.monotonic() - began)


@dataclass(frozen=True)
class BrokerFacts:
    """Measurements of the broker. Without an answer, ``nodes`` and ``overview`` are empty."""

    answer: Measurement
    nodes: Sequence[Node] = ()
    overview: JSONObject = field(default_factory=dict)

    def verdicts(self) -> list[Verdict]:
        return [one.verdict for one in self.measurements()]

    def measurements(self) -> Iterator[Measurement]:
        yield self.answer
        for node in self.nodes:
            yield from measure_node(node)


def measure_broker() -> BrokerFacts:
    """Request the broker's nodes, alarms and totals, with a page's timeout."""
    timeout = rules.BROKER_TIMEOUT_SECONDS

    def request() -> tuple[list[Node], JSONObject]:
        client = broker.management(read_timeout=timeout)
        return fetch_nodes(client), client.overview()

    fetched, answer = time_answer(request, timeout)
    return BrokerFacts(answer, *fetched) if fetched else BrokerFacts(answer)


def fetch_nodes(management: Management) -> list[Node]:
    """Return the nodes with their alarms. The list of nodes lacks the alarms if the broker collects no statistics."""
    nodes, alarms = management.nodes(), management.alarms()
    return sorted(
        node._replace(
            mem_alarm=node.mem_alarm or f"memory on {node.name}" in alarms,
            disk_alarm=node.disk_alarm or f"disk on {node.name}" in alarms,
        )
        for node in nodes
    )


def measure_node(node: Node) -> Iterator[Measurement]:
    """Yield the measurements of a node. Most are unknown while the node is stopped."""
    name = {"node": readable(node.name)}
    yield Measurement(rules.NODE_STOPPED, not node.running, name)
    if node.running:
        lost = {"lost": ", ".join(map(readable, node.partitions))}
        yield Measurement(rules.CLUSTER_SPLIT, bool(node.partitions), name | lost)
        yield Measurement(rules.MEMORY_ALARM, node.mem_alarm, name)
        yield Measurement(rules.DISK_ALARM, node.disk_alarm, name)
    alarmed = {rules.MEMORY: node.mem_alarm, rules.DISK: node.disk_alarm}
    for one in measure_usage(node):
        if not alarmed.get(one.rule):  # the alarm has a verdict of its own
            yield one._replace(details=name | dict(one.details))


def measure_usage(node: Node) -> Iterator[Measurement]:
    """Yield a node's usage as a share of each limit. The detail ``figures`` has the numbers."""
    for rule, used, limit, figures in (
        (rules.MEMORY, node.mem_used, node.mem_limit, "{} of {}"),
        (rules.DISK, node.disk_free_limit, node.disk_free, "{1} free, at least {0} needed"),
        (rules.FILES, node.fd_used, node.fd_total or None, "{} of {}"),
    ):
        if used is None or limit is None:
            yield Measurement(rule, None)
            continue
        words = (f"{used:,}", f"{limit:,}") if rule is rules.FILES else map(filesizeformat, (used, limit))
        in_words = figures.format(*words).replace("\N{NO-BREAK SPACE}", " ")
        yield Measurement(rule, used / max(limit, 1), {"figures": in_words})


# Guardian


class Outbox(NamedTuple):
    """Numbers of notifications by state.

    - ``deferred``: unsent notifications that wait for the end of their recipient's quiet hours.
    - ``given_up``: notifications of the last two days whose attempts failed for a day.
    - ``oldest``, ``last_error``: the start of the longest wait, apart from deferred ones, and its last error.
    """

    due: int = 0
    sending: int = 0
    sent: int = 0
    failed: int = 0
    deferred: int = 0
    given_up: int = 0
    oldest: datetime | None = None
    last_error: str = ""


class Removals(NamedTuple):
    """Numbers of pending removals from the broker by kind, and the creation time of the oldest."""

    numbers: Mapping[str, int] = {}
    oldest: datetime | None = None


class Archives(NamedTuple):
    """Numbers of archives by state, the messages in them, and the bytes they take in the database.

    ``failures`` are those of the last two days; ``last_error`` is the reason of one of them.
    """

    numbers: Mapping[str, int] = {}
    messages: int = 0
    stored_bytes: int = 0
    failures: int = 0
    last_error: str = ""


@dataclass(frozen=True)
class GuardianFacts:
    """Measurements of Guardian from the database. ``passes`` and ``sweeps`` are the last of each kind, newest first."""

    at: datetime
    watch: Watch
    passes: Sequence[Pass] = ()
    sweeps: Sequence[Sweep] = ()
    outbox: Outbox = field(default_factory=Outbox)
    removals: Removals = field(default_factory=Removals)
    archives: Archives = field(default_factory=Archives)

    @property
    def last_pass(self) -> Pass | None:
        return self.passes[0] if self.passes else None

    def verdicts(self) -> list[Verdict]:
        return [one.verdict for one in self.measurements()]

    def measurements(self) -> Iterator[Measurement]:
        yield from self._measure_passes()
        yield from self._measure_state()
        for kind, rule in ((Sweep.Kind.ORPHANS, rules.ORPHANS_BRAKE), (Sweep.Kind.STALE, rules.STALE_BRAKE)):
            if last := next((sweep for sweep in self.sweeps if sweep.kind == kind), None):
                yield Measurement(rule, last.found if last.brake_held else 0)
        error = f" Its last error: {readable(self.outbox.last_error)}" if self.outbox.last_error else ""
        yield Measurement(rules.NOTIFICATIONS_WAIT, self._seconds_since(self.outbox.oldest), {"error": error})
        yield Measurement(rules.NOTIFICATIONS_GIVEN_UP, self.outbox.given_up)
        yield Measurement(rules.REMOVALS, self._seconds_since(self.removals.oldest))
        archives, most = self.archives, settings.GUARDIAN_ARCHIVE_TOTAL_BYTES
        yield Measurement(rules.ARCHIVES_FAILED, archives.failures, {"error": readable(archives.last_error)})
        sizes = f"{filesizeformat(archives.stored_bytes)} of {filesizeformat(most)}".replace("\N{NO-BREAK SPACE}", " ")
        yield Measurement(rules.ARCHIVES_FULL, archives.stored_bytes / most, {"figures": sizes})

    def _measure_passes(self) -> Iterator[Measurement]:
        watch, last = self.watch, self.last_pass
        age = rules.PASS_AGE_IN_OUTAGE if watch.outage_since else rules.PASS_AGE
        yield Measurement(age, self._seconds_since(last.at) if last else math.inf)
        if last is None:
            return
        yield Measurement(rules.PASS_SECONDS, last.seconds)
        is_explained = (
            watch.outage_since
            or watch.brake_since
            or watch.short_lists
            or watch.refused_since
            or watch.unresponsive_since
        )
        errors = [] if is_explained else last.errors
        yield Measurement(rules.PASS_ERRORS, len(errors), {"error": errors[0] if errors else ""})
        if watch.outage_since is None:
            counted = watch.consumers_counted_at
            yield Measurement(rules.OTHER_TASKS, self._seconds_since(counted) if counted else math.inf)

    def _measure_state(self) -> Iterator[Measurement]:
        watch = self.watch
        number = len(released_queues(watch, self.at))
        left = watch.blocked - number
        brake_since = watch.brake_since if left > 0 else None
        queues = rules.BRAKE_RELEASE.in_words(left)
        yield self._ongoing(rules.OUTAGE, watch.outage_since)
        yield self._ongoing(rules.BRAKE, brake_since, queues=queues)
        yield Measurement(rules.BRAKE_RELEASE, number, {"by": watch.released_by})
        yield Measurement(rules.SHORT_LISTS, watch.short_lists)
        yield self._ongoing(rules.REFUSED, watch.refused_since)
        seen = watch.deleter_seen_at
        stopped = "" if seen is not None and self.at - seen < LONGEST_GAP else ", and no deleter runs"
        yield self._ongoing(rules.LATE, watch.late_since, stopped=stopped)
        yield self._ongoing(rules.UNRESPONSIVE, watch.unresponsive_since)
        found = unguarded.stored(watch)
        yield _measure_names(rules.UNADDRESSABLE, found.unaddressable)
        yield _measure_names(rules.STREAMS, found.streams)
        yield _measure_names(rules.EXCLUSIVE, found.exclusive)
        yield _measure_names(rules.UNCOUNTED, unguarded.to_declare(found.uncounted, self.at))

    def _ongoing(self, rule: Rule, since: datetime | None, **details: str) -> Measurement:
        return Measurement(rule, since is not None, {"duration": duration(self._seconds_since(since)), **details})

    def _seconds_since(self, moment: datetime | None) -> float:
        """Return the seconds since then; 0 if there is no such time, or the clock was set back."""
        return max((self.at - moment).total_seconds(), 0.0) if moment else 0.0


def _measure_names(rule: Rule, queues: Collection[QueueName]) -> Measurement:
    """Return the number of these queues, with the first names."""
    shown = [f"{readable(name)} in {readable(vhost)}" for vhost, name in list(queues)[:NAMES_IN_SENTENCE]]
    more = [f"{len(queues) - len(shown):,} more"] if len(queues) > len(shown) else []
    return Measurement(rule, len(queues), {"queues": ", ".join([*shown, *more])})


def measure_guardian(now: datetime) -> GuardianFacts:
    """Measure Guardian in nine statements."""
    sweeps = [sweep for kind in Sweep.Kind.values for sweep in Sweep.objects.filter(kind=kind)[:SWEEPS_READ]]
    return GuardianFacts(
        at=now,
        watch=Watch.current(),
        passes=[_readable(one) for one in Pass.objects.order_by("-id")[:PASSES_READ]],
        sweeps=[_readable(one) for one in sorted(sweeps, key=lambda sweep: sweep.at, reverse=True)],
        outbox=_measure_outbox(now),
        removals=_measure_removals(),
        archives=_measure_archives(now),
    )


def _readable(report: Report) -> Report:
    report.errors = [readable(error) for error in report.errors]
    return report


def _measure_outbox(now: datetime) -> Outbox:
    is_deferred = Q(deferred_until__gt=now)
    given_up = Q(
        state=Notification.State.FAILED,
        attempts__gte=retries.MIN_ATTEMPTS,
        due_at__gt=now - GIVEN_UP_WITHIN,
    )
    counted = (
        Notification.objects.order_by()
        .values("state")
        .annotate(
            number=Count("id"),
            deferred=Count("id", filter=claims.Unsent & is_deferred),
            given_up=Count("id", filter=given_up),
        )
    )
    rows = list(counted)
    waiting = Notification.objects.filter(claims.Unsent, Q(deferred_until=None) | Q(deferred_until__lte=now))
    oldest = waiting.annotate(since=Coalesce("deferred_until", "created")).order_by("since").first()
    return Outbox(
        **{row["state"]: row["number"] for row in rows},
        deferred=sum(row["deferred"] for row in rows),
        given_up=sum(row["given_up"] for row in rows),
        oldest=oldest.since if oldest else None,
        last_error=oldest.last_error if oldest else "",
    )


def _measure_removals() -> Removals:
    rows = Removal.objects.order_by().values("kind").annotate(number=Count("id"), oldest=Min("created"))
    oldest = min((row["oldest"] for row in rows), default=None)
    return Removals({row["kind"]: row["number"] for row in rows}, oldest)


def _measure_archives(now: datetime) -> Archives:
    recent = Q(state=Archive.State.FAILED, created__gt=now - FAILED_WITHIN)
    rows = list(
        Archive.objects.order_by()
        .values("state")
        .annotate(
            number=Count("id"),
            all_messages=Sum("messages"),
            all_bytes=Sum("stored_bytes"),
            failures=Count("id", filter=recent),
            one_error=Max("error", filter=recent),
        )
    )
    return Archives(
        {row["state"]: row["number"] for row in rows},
        sum(row["all_messages"] for row in rows),
        sum(row["all_bytes"] for row in rows),
        sum(row["failures"] for row in rows),
        "".join(row["one_error"] or "" for row in rows),
    )
