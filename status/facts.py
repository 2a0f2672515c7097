"""What is measured about the broker and about Guardian, in one place; ``rules.py`` judges it.

The database is read in a constant number of statements, the broker in three requests. The front page, ``doctor``,
``/metrics`` and ``/readyz`` get their figures from here.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import NamedTuple, TypeVar

from celery import current_app
from django.conf import settings
from django.db.models import Count, Min, Q
from django.db.models.functions import Coalesce
from django.template.defaultfilters import filesizeformat

from agents.models import Sweep
from core import broker
from core.formatting import duration
from core.models import Removal
from notifications import claims
from notifications.models import Notification
from queues.brake import released
from queues.models import Pass, Watch
from rabbit.management import BrokerError, BrokerUnavailable, Management, Node, Row
from rabbit.names import readable
from status import rules
from status.rules import Rule, Verdict

Answer = TypeVar("Answer")
Report = TypeVar("Report", Pass, Sweep)

PASSES_READ = 6
SWEEPS_READ = 2

TASK_QUEUE_PATIENCE_SECONDS = 2
GIVEN_UP_WITHIN = timedelta(days=2)


class Measurement(NamedTuple):
    """A value that a rule judges, with the details of its sentence. The value is None where it isn't known."""

    rule: Rule
    value: float | None
    details: Mapping[str, str] = {}

    @property
    def verdict(self) -> Verdict:
        """What the rule says about it."""
        return self.rule.judge(self.value, settings, **self.details)


# The task queue


def connect_to_task_queue() -> None:
    """Connect to the task queue once. Raises whatever its transport raises."""
    with current_app.connection_for_write(connect_timeout=TASK_QUEUE_PATIENCE_SECONDS) as connection:
        connection.ensure_connection(max_retries=1, timeout=TASK_QUEUE_PATIENCE_SECONDS)


# The broker


def time_answer(ask: Callable[[], Answer], patience: float) -> tuple[Answer | None, Measurement]:
    """Query the broker, and return its answer with the time that it took. Without an answer in time, this is None.

    ``patience`` is the client's read timeout in seconds.
    """
    began = time.monotonic()
    try:
        answer = ask()
    except BrokerError as error:
        timed_out = isinstance(error, BrokerUnavailable) and error.timed_out
        seconds = max(time.monotonic() - began, patience) if timed_out else math.inf
        return None, Measurement(rules.BROKER, seconds, {"error": readable(str(error))})
    return answer, Measurement(rules.BROKER, time.monotonic() - began)


@dataclass(frozen=True)
class BrokerFacts:
    """What the broker says about itself. Without an answer there are no nodes, and ``overview`` is empty."""

    answer: Measurement
    nodes: Sequence[Node] = ()
    overview: Row = field(default_factory=dict)

    def verdicts(self) -> list[Verdict]:
        """Return the verdict on each fact."""
        return [one.verdict for one in self.measurements()]

    def measurements(self) -> Iterator[Measurement]:
        """Return what was measured."""
        yield self.answer
        for node in self.nodes:
            yield from of_node(node)


def measure_broker() -> BrokerFacts:
    """Query the broker for its nodes, alarms and totals, for a page."""
    patience = rules.BROKER_PATIENCE_SECONDS

    def ask() -> tuple[list[Node], Row]:
        client = broker.management(read_timeout=patience)
        return ask_nodes(client), client.overview()

    told, answer = time_answer(ask, patience)
    return BrokerFacts(answer, *told) if told else BrokerFacts(answer)


def ask_nodes(management: Management) -> list[Node]:
    """Return the nodes with their alarms, which the list of nodes lacks where the broker gathers no statistics."""
    nodes, alarms = management.nodes(), management.alarms()
    return sorted(
        node._replace(
            mem_alarm=node.mem_alarm or f"memory on {node.name}" in alarms,
            disk_alarm=node.disk_alarm or f"disk on {node.name}" in alarms,
        )
        for node in nodes
    )


def of_node(node: Node) -> Iterator[Measurement]:
    """Return what is measured of a node. Most of it is unknown while the node is stopped."""
    about = {"node": readable(node.name)}
    yield Measurement(rules.NODE_STOPPED, not node.running, about)
    if node.running:
        lost = {"lost": ", ".join(map(readable, node.partitions))}
        yield Measurement(rules.CLUSTER_SPLIT, bool(node.partitions), about | lost)
        yield Measurement(rules.MEMORY_ALARM, node.mem_alarm, about)
        yield Measurement(rules.DISK_ALARM, node.disk_alarm, about)
    alarmed = {rules.MEMORY: node.mem_alarm, rules.DISK: node.disk_alarm}
    for one in shares_of_node(node):
        if not alarmed.get(one.rule):  # the alarm is the worse verdict
            yield one._replace(details=about | dict(one.details))


def shares_of_node(node: Node) -> Iterator[Measurement]:
    """Return how near the node is to its limits; the detail ``figures`` has the numbers."""
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
    """How many notifications are in which state.

    ``deferred`` of the unsent ones wait for the end of somebody's quiet hours. ``oldest`` is since when the first of
    the others waits, with its last error. ``given_up`` are those of the last two days that were tried for a day.
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
    """How much is still to be removed from the broker, by its kind, and since when the oldest of it waits."""

    numbers: Mapping[str, int] = {}
    oldest: datetime | None = None


@dataclass(frozen=True)
class GuardianFacts:
    """What the database knows of Guardian's work. ``passes`` and ``sweeps`` of each kind are the last, newest first."""

    at: datetime
    watch: Watch
    passes: Sequence[Pass] = ()
    sweeps: Sequence[Sweep] = ()
    outbox: Outbox = field(default_factory=Outbox)
    removals: Removals = field(default_factory=Removals)

    @property
    def last_pass(self) -> Pass | None:
        """The last pass that was recorded."""
        return self.passes[0] if self.passes else None

    def verdicts(self) -> list[Verdict]:
        """Return the verdict on each fact."""
        return [one.verdict for one in self.measurements()]

    def value(self, rule: Rule) -> float:
        """Return what was measured for this rule; 0: nothing was."""
        return next((one.value or 0 for one in self.measurements() if one.rule is rule), 0)

    def measurements(self) -> Iterator[Measurement]:
        """Return what was measured."""
        yield from self._of_passes()
        yield from self._of_watch()
        for kind, rule in ((Sweep.Kind.ORPHANS, rules.ORPHANS_BRAKE), (Sweep.Kind.STALE, rules.STALE_BRAKE)):
            if last := next((sweep for sweep in self.sweeps if sweep.kind == kind), None):
                yield Measurement(rule, last.found if last.brake_held else 0)
        error = f" Its last error: {readable(self.outbox.last_error)}" if self.outbox.last_error else ""
        yield Measurement(rules.NOTIFICATIONS_WAIT, self._seconds_since(self.outbox.oldest), {"error": error})
        yield Measurement(rules.NOTIFICATIONS_GIVEN_UP, self.outbox.given_up)
        yield Measurement(rules.REMOVALS, self._seconds_since(self.removals.oldest))

    def _of_passes(self) -> Iterator[Measurement]:
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

    def _of_watch(self) -> Iterator[Measurement]:
        watch = self.watch
        number = released(watch, self.at)
        brake_since = None if number else watch.brake_since
        queues = rules.BRAKE_RELEASE.in_words(watch.braked)
        yield self._lasts(rules.OUTAGE, watch.outage_since)
        yield self._lasts(rules.BRAKE, brake_since, queues=queues)
        yield Measurement(rules.BRAKE_RELEASE, number, {"by": watch.released_by})
        yield Measurement(rules.SHORT_LISTS, watch.short_lists)
        yield self._lasts(rules.REFUSED, watch.refused_since)
        yield self._lasts(rules.UNRESPONSIVE, watch.unresponsive_since)

    def _lasts(self, rule: Rule, since: datetime | None, **details: str) -> Measurement:
        return Measurement(rule, since is not None, {"duration": duration(self._seconds_since(since)), **details})

    def _seconds_since(self, moment: datetime | None) -> float:
        """Return the seconds since then; 0 where there is no such moment, or the clock was set back."""
        return max((self.at - moment).total_seconds(), 0.0) if moment else 0.0


def measure_guardian(now: datetime) -> GuardianFacts:
    """Read what the database knows of Guardian's work, in nine statements.

    Raises:
        django.db.Error: the database can't be read.
    """
    sweeps = [sweep for kind in Sweep.Kind.values for sweep in Sweep.objects.filter(kind=kind)[:SWEEPS_READ]]
    return GuardianFacts(
        at=now,
        watch=Watch.objects.filter(id=1).first() or Watch(),
        passes=[_readable(one) for one in Pass.objects.order_by("-id")[:PASSES_READ]],
        sweeps=[_readable(one) for one in sorted(sweeps, key=lambda sweep: sweep.at, reverse=True)],
        outbox=_measure_outbox(now),
        removals=_measure_removals(),
    )


def _readable(report: Report) -> Report:
    """Return a report whose errors can be shown."""
    report.errors = [readable(error) for error in report.errors]
    return report


def _measure_outbox(now: datetime) -> Outbox:
    is_deferred = Q(deferred_until__gt=now)
    given_up = Q(
        state=Notification.State.FAILED,
        attempts__gte=claims.MIN_ATTEMPTS,
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
