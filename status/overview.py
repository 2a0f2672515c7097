"""The front page of the administration: is the broker all right, is Guardian all right, and the figures of both.

``overview`` gathers it in a fixed number of statements and two requests to the broker, which get little time: the page
is wanted most when the broker is in trouble. What the figures mean is said by ``of_broker`` and ``of_guardian``, which
are pure.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import IntEnum
from typing import Any, NamedTuple
from uuid import UUID

from django.conf import settings
from django.db.models import Count, F, Min, OuterRef, Q, QuerySet, Subquery
from django.template.defaultfilters import filesizeformat

from accounts.models import PulseUser
from agents.models import Sweep
from core import broker
from core.formatting import duration, pace
from core.leases import is_held
from core.models import Lease, Removal
from notifications.claims import GIVE_UP_ATTEMPTS
from notifications.models import Notification
from queues import charts, growth, thresholds
from queues.brake import released
from queues.listing import LENGTH, STALLED, standing
from queues.models import Pass, Queue, QueueSample, Watch
from queues.monitor import LEASE
from queues.thresholds import MemoryPressure, Thresholds
from rabbit.management import BrokerAway, BrokerError, Node, Row
from rabbit.names import Kind, kind_of_queue, readable

logger = logging.getLogger(__name__)

BROKER_SECONDS = 2.0
"""For so long the page waits for each answer of the broker, and for no second one where the first didn't come."""

LATE_AFTER_POLLS = 3
CHART_SPAN = charts.SPANS["hour"]

PASSES_SHOWN = 6
SWEEPS_SHOWN = 2
QUEUES_SHOWN = 8
NAMES_SHOWN = 5
STUCK_SHOWN = 5

STUCK_AFTER = timedelta(minutes=10)
"""What is to go from the broker goes within a minute, where nothing is in its way."""

WAITING_AFTER = timedelta(minutes=5)
"""A message that is due for longer than this has nobody who sends it: that is looked for every half minute."""

RETRIED_OFTEN = 3
"""A message that was tried so often waits for a mail server, or a channel, that doesn't take it."""

NEAR_MEMORY = MemoryPressure.RELIEF
NEAR_DISK = 0.5
NEAR_FILES = 0.9
"""From these parts of its limit on, a figure of a node is worth a look."""

GONE = Queue.State.GONE


class Level(IntEnum):
    """How bad it is."""

    GOOD = 0
    WARY = 1
    BAD = 2

    @property
    def word(self) -> str:
        """The word that says it."""
        return ("All right", "Worth a look", "Trouble")[self]


class Finding(NamedTuple):
    """Something that isn't as it should be: what, and what to do about it. ``to`` is the name of a page's URL."""

    level: Level
    what: str
    do: str
    to: str = ""


class Verdict(NamedTuple):
    """The answer to "is it all right?": the worst finding first, and the others. ``error`` is what the broker said."""

    level: Level
    sentence: str
    do: str = ""
    to: str = ""
    others: Sequence[Finding] = ()
    error: str = ""


class Gauge(NamedTuple):
    """How near a figure is to its limit, in percent of a bar's width, and in words."""

    full: float
    words: str
    level: Level


class NodeShown(NamedTuple):
    """A node as the page shows it. A gauge is None where the node doesn't tell; ``uptime`` is in words."""

    name: str
    state: str
    level: Level
    memory: Gauge | None
    disk: Gauge | None
    files: Gauge | None
    uptime: str


class Broker(NamedTuple):
    """What the broker says of itself. ``error`` says why it doesn't; ``slow``: it only didn't in time."""

    nodes: Sequence[Node] = ()
    version: str = ""
    cluster: str = ""
    totals: Sequence[tuple[str, int]] = ()
    error: str = ""
    slow: bool = False


class PassSeen(NamedTuple):
    """A report of a pass, as the page shows it; the fields are those of ``queues.models.Pass``."""

    id: int
    at: datetime
    queues: int
    warned: int
    deleted: int
    errors: Sequence[str]
    seconds: float


class SweepSeen(NamedTuple):
    """A report of a sweep, as the page shows it; the fields are those of ``agents.models.Sweep``."""

    id: int
    kind: str
    at: datetime
    found: int
    deleted: int
    kept: int
    repaired: int
    brake_held: bool
    errors: Sequence[str]
    seconds: float

    @property
    def what(self) -> str:
        """Which of the two, in words."""
        return {Sweep.Kind.ORPHANS.value: "orphans", Sweep.Kind.STALE.value: "stale subscriptions"}[self.kind]


class Outbox(NamedTuple):
    """How many messages are in which state.

    ``held`` of the due ones wait for the end of somebody's quiet hours. ``oldest`` is since when the first of the
    others is due, ``retried`` how many were tried several times, ``given_up`` how many were given up after a day of
    trying, in the last two days.
    """

    due: int = 0
    sending: int = 0
    sent: int = 0
    failed: int = 0
    held: int = 0
    retried: int = 0
    given_up: int = 0
    oldest: datetime | None = None


class Removals(NamedTuple):
    """What is still to go from the broker. ``stuck`` of it are there for too long; some of those are shown, and why."""

    waiting: int = 0
    stuck: int = 0
    shown: Sequence[tuple[str, str]] = ()
    accounts: Sequence[str] = ()


class Guardian(NamedTuple):
    """What is known of Guardian's own work. The moments are those of ``queues.models.Watch``.

    ``running``: a pass is being made right now. ``braked`` is how many queues the brake keeps, ``released`` how many
    ``released_by`` named that the next pass may delete. ``misnamed_exchanges`` are those of the last look at them.
    """

    poll_seconds: float
    passes: Sequence[PassSeen] = ()
    sweeps: Sequence[SweepSeen] = ()
    running: bool = False
    listed_at: datetime | None = None
    next_pass_at: datetime | None = None
    outage_since: datetime | None = None
    brake_since: datetime | None = None
    braked: int = 0
    released: int = 0
    released_by: str = ""
    short_lists: int = 0
    refused_since: datetime | None = None
    unresponsive_since: datetime | None = None
    misnamed_exchanges: Sequence[str] = ()
    outbox: Outbox = Outbox()
    removals: Removals = Removals()


class QueueLine(NamedTuple):
    """A queue in a list: its bar in percent of the longest one's, its figure in words, and what more there is to say.

    ``state`` is that of its row.
    """

    uuid: UUID
    name: str
    vhost: str
    whose: str
    state: str
    state_in_words: str
    full: float
    figure: str
    more: str


class Named(NamedTuple):
    """Queues that share a fault of their name or owner: how many, and the longest of them."""

    number: int
    shown: Sequence[QueueLine]

    @property
    def more(self) -> int:
        """How many aren't shown."""
        return self.number - len(self.shown)


class Gap(NamedTuple):
    """A time without a pass: its place in the chart, in percent of the width, and how long it was, in words."""

    left: float
    width: float
    words: str


class Passes(NamedTuple):
    """The passes of the last hour. ``chart`` is of milliseconds, ``longest`` in seconds."""

    chart: charts.Chart
    gaps: Sequence[Gap]
    number: int
    longest: float


@dataclass(frozen=True)
class Overview:
    """All that the front page shows."""

    at: datetime
    broker: Verdict
    guardian: Verdict
    nodes: Sequence[NodeShown]
    cluster: Broker
    watched: Guardian
    passes: Passes | None
    states: Sequence[tuple[str, str, int]]
    longest: Sequence[QueueLine]
    growing: Sequence[QueueLine]
    stalled: Named | None
    """Those whose consumers have stalled; None: nobody looks."""
    unowned: Named
    misnamed: Named
    unpatterned: Named


def overview(now: datetime) -> Overview:
    """Gather the front page. Where the broker doesn't answer it says so, and the rest is there all the same."""
    cluster = _ask_broker()
    watched = _guardian(now)
    unowned, misnamed, unpatterned = _unowned()
    return Overview(
        at=now,
        broker=of_broker(cluster),
        guardian=of_guardian(watched, now),
        nodes=[show_node(node) for node in cluster.nodes],
        cluster=cluster,
        watched=watched,
        passes=_passes(now, watched.poll_seconds),
        states=_states(),
        longest=_longest(),
        growing=_growing(now),
        stalled=_stalled(now) if settings.GUARDIAN_STALLED_MINUTES else None,
        unowned=unowned,
        misnamed=misnamed,
        unpatterned=unpatterned,
    )


# What the figures mean


def of_broker(broker: Broker) -> Verdict:
    """Say whether the broker is all right."""
    if broker.slow:
        return Verdict(
            Level.WARY,
            f"The broker did not answer within {BROKER_SECONDS:.0f} seconds.",
            "Guardian itself waits longer: see when it last looked. If that is a while ago, see what keeps RabbitMQ "
            "busy.",
            error=broker.error,
        )
    if broker.error:
        return Verdict(
            Level.BAD,
            "The broker can't be asked.",
            "See that RabbitMQ runs and that its management plugin answers; 'manage.py doctor' tells more. Nothing is "
            "guarded until then, and nothing is removed.",
            error=broker.error,
        )
    found = [finding for node in broker.nodes for finding in _of_node(node)]
    nodes = f"{len(broker.nodes)} node{' runs' if len(broker.nodes) == 1 else 's run'}"
    return _verdict(found, f"The broker is all right: {nodes} RabbitMQ {broker.version}, without an alarm.")


def _of_node(node: Node) -> list[Finding]:
    name = readable(node.name)
    if not node.running:
        how = "Start it. Its queues can't be reached until then, and Guardian deletes none of the agents' queues."
        return [Finding(Level.BAD, f"{name} does not run.", how)]
    found = []
    if node.partitions:
        lost = ", ".join(map(readable, node.partitions))
        how = "Mend the network between them, then restart the nodes of the smaller side."
        found.append(Finding(Level.BAD, f"{name} has lost {lost}: the cluster is split.", how))
    shown = show_node(node)
    blocked = "whoever publishes is blocked, on all nodes."
    if node.mem_alarm:
        how = "Guardian guards on. Empty or delete the longest queues, or give the node more memory."
        found.append(Finding(Level.BAD, f"The memory alarm is raised on {name}: {blocked}", how))
    elif shown.memory and shown.memory.level:
        how = "Past its watermark the broker blocks whoever publishes. See which queues are long, and which grow."
        found.append(Finding(Level.WARY, f"Memory on {name} is at {shown.memory.full:.0f} % of its watermark.", how))
    if node.disk_alarm:
        how = "Guardian guards on. Make room on that node's disk, or empty the longest queues."
        found.append(Finding(Level.BAD, f"The disk alarm is raised on {name}: {blocked}", how))
    elif shown.disk and shown.disk.level:
        how = "Below its limit the broker blocks whoever publishes. Make room on that node's disk."
        found.append(Finding(Level.WARY, f"The disk of {name} is nearly full: {shown.disk.words}.", how))
    if shown.files and shown.files.level:
        how = "Without any left, nobody can connect. See who has so many connections, or raise the limit."
        found.append(Finding(Level.WARY, f"{name} has few file descriptors left: {shown.files.words}.", how))
    return found


def of_guardian(guardian: Guardian, now: datetime) -> Verdict:
    """Say whether Guardian is all right."""
    found = [
        *_of_passes(guardian, now),
        *_of_watch(guardian, now),
        *_of_sweeps(guardian.sweeps),
        *_of_outbox(guardian.outbox, now),
        *_of_removals(guardian.removals),
    ]
    if not guardian.passes:
        return _verdict(found, "")
    last = guardian.passes[0]
    queues = f"{last.queues:,} queue{'' if last.queues == 1 else 's'}"
    ago = duration((now - last.at).total_seconds())
    return _verdict(found, f"Guardian is all right: it looked at {queues} {ago} ago, in {last.seconds:.2f} s.")


def is_late(last: PassSeen, next_pass_at: datetime | None, poll_seconds: float, now: datetime) -> bool:
    """Return whether a pass should have been made since. After failures to reach the broker the wait is longer."""
    ended = last.at + timedelta(seconds=last.seconds)
    due = ended if next_pass_at is None else max(ended, next_pass_at)
    return now - due > timedelta(seconds=LATE_AFTER_POLLS * poll_seconds)


def _of_passes(guardian: Guardian, now: datetime) -> list[Finding]:
    ask = "See that beat and the worker that guards are running; 'manage.py doctor' tells what is missing."
    if not guardian.passes:
        return [Finding(Level.BAD, "Guardian has not looked at the broker yet.", ask)]
    last = guardian.passes[0]
    found = []
    if is_late(last, guardian.next_pass_at, guardian.poll_seconds, now):
        ago = duration((now - last.at).total_seconds())
        if guardian.running:
            how = "The broker may be slow, or a pass was killed and the next one waits for its lease, 90 s at most."
            found.append(Finding(Level.WARY, f"The last pass is {ago} ago, and one is still under way.", how))
        else:
            found.append(Finding(Level.BAD, f"Guardian has not looked for {ago}: is beat running?", ask))
    if last.seconds > guardian.poll_seconds:
        what = f"The last pass took {last.seconds:.1f} s, with {guardian.poll_seconds:g} s between two."
        how = "See what keeps RabbitMQ busy, or have Guardian look less often (GUARDIAN_POLL_SECONDS)."
        found.append(Finding(Level.WARY, what, how))
    is_known = (guardian.outage_since or guardian.brake_since or guardian.short_lists or guardian.refused_since) or (
        guardian.unresponsive_since
    )
    if last.errors and not is_known:
        found.append(Finding(Level.WARY, f"The last pass had trouble: {last.errors[0]}", "Its report has all of it."))
    return found


def _of_watch(guardian: Guardian, now: datetime) -> list[Finding]:
    def lasts(since: datetime) -> str:
        return duration(max(0.0, (now - since).total_seconds()))

    found = []
    if guardian.outage_since:
        what = f"Guardian could not ask the broker for {lasts(guardian.outage_since)}, so nothing is guarded."
        how = "It tries again by itself. See what is said of the broker, and the last pass's error."
        found.append(Finding(Level.BAD, what, how))
    if guardian.released:
        number = f"{guardian.released:,} queue{'' if guardian.released == 1 else 's'}"
        what = f"{guardian.released_by} released the brake for {number}."
        how = "The next pass deletes those of them that are still too long. For others the brake holds as before."
        found.append(Finding(Level.WARY, what, how))
    elif guardian.brake_since:
        what = f"The brake has held for {lasts(guardian.brake_since)}: {guardian.braked:,} queues would go at once."
        how = "None is deleted. Look which they are, then release the brake, or mend what made them long."
        found.append(Finding(Level.BAD, what, how, "operate_brake"))
    if guardian.short_lists:
        what = "The broker's list lacks far more known queues than the brake allows, so nothing is removed by it."
        how = "A node that stops or starts looks like this. If they were removed on purpose, wait for two more passes."
        found.append(Finding(Level.WARY, what, how))
    if guardian.refused_since:
        what = f"The broker has refused to delete a queue for {lasts(guardian.refused_since)}."
        how = "The last pass says which and why; Guardian's account needs all permissions on each guarded vhost."
        found.append(Finding(Level.WARY, what, how))
    if guardian.unresponsive_since:
        what = f"A queue's process has not answered for {lasts(guardian.unresponsive_since)}; lengths lag by seconds."
        found.append(Finding(Level.WARY, what, "'rabbitmqctl list_unresponsive_queues' names it."))
    return found


def _of_sweeps(sweeps: Sequence[SweepSeen]) -> list[Finding]:
    pages = {Sweep.Kind.ORPHANS.value: "operate_orphans", Sweep.Kind.STALE.value: "operate_stale"}
    last = {sweep.kind: sweep for sweep in reversed(sweeps)}
    return [
        Finding(
            Level.WARY,
            f"The brake holds the clean-up of {sweep.what}: {sweep.found:,} queues would go at once.",
            "None is deleted. Look which they are before you let them go.",
            pages[sweep.kind],
        )
        for sweep in last.values()
        if sweep.brake_held
    ]


def _of_outbox(outbox: Outbox, now: datetime) -> list[Finding]:
    found = []
    if outbox.oldest and now - outbox.oldest > WAITING_AFTER:
        since = duration((now - outbox.oldest).total_seconds())
        how = "See that beat and the worker for everything but passes are running; 'manage.py doctor' tells more."
        found.append(Finding(Level.WARY, f"Messages to people have waited for {since}, and nobody sends them.", how))
    if outbox.retried:
        many = f"{outbox.retried:,} message{' was' if outbox.retried == 1 else 's were'}"
        how = "They are tried again for a day. See their last error, and that the mail server answers."
        found.append(Finding(Level.WARY, f"{many} tried several times in vain.", how))
    if outbox.given_up:
        many = f"{outbox.given_up:,} message{' was' if outbox.given_up == 1 else 's were'}"
        how = "See their last error; what was mended can be sent again from there."
        found.append(Finding(Level.WARY, f"{many} given up after a day of trying.", how))
    return found


def _of_removals(removals: Removals) -> list[Finding]:
    found = []
    if removals.stuck:
        things = f"{removals.stuck:,} thing{' was' if removals.stuck == 1 else 's were'}"
        how = "It is tried again by itself; each says below why it could not be done."
        found.append(Finding(Level.WARY, f"{things} to go from the broker, and stayed for over 10 minutes.", how))
    if removals.accounts:
        names = ", ".join(removals.accounts)
        how = "Guardian goes on with it each minute; its page says how far it got."
        found.append(Finding(Level.WARY, f"The removal of Pulse users isn't finished: {names}.", how))
    return found


def _verdict(found: Sequence[Finding], good: str) -> Verdict:
    """Return the worst of these first, or that all is good where there are none."""
    if not found:
        return Verdict(Level.GOOD, good)
    worst, *others = sorted(found, key=lambda finding: -finding.level)
    return Verdict(worst.level, worst.what, worst.do, worst.to, others)


# The broker


def _ask_broker() -> Broker:
    try:
        management = broker.management(read_timeout=BROKER_SECONDS)
        nodes = management.nodes()
        told = management.overview()
    except BrokerError as error:
        logger.warning("The front page could not ask the broker: %s", error)
        return Broker(error=readable(str(error)), slow=isinstance(error, BrokerAway) and error.timed_out)
    return Broker(
        nodes=sorted(nodes),
        version=readable(told["rabbitmq_version"]),
        cluster=readable(str(told.get("cluster_name", ""))),
        totals=_totals(told),
    )


def _totals(told: Row) -> list[tuple[str, int]]:
    """Return the figures of the whole broker that it tells, each with the word for one of what it counts."""
    wanted = (
        ("object_totals", "queues", "queue"),
        ("queue_totals", "messages", "message"),
        ("object_totals", "connections", "connection"),
        ("object_totals", "consumers", "consumer"),
    )
    of: dict[str, Any] = {group: told[group] for group, _, _ in wanted if isinstance(told.get(group), dict)}
    figures = [(words, of.get(group, {}).get(key)) for group, key, words in wanted]
    return [(words, figure) for words, figure in figures if isinstance(figure, int)]


def show_node(node: Node) -> NodeShown:
    """Return what the page shows of a node."""
    alarms = [name for name, raised in (("memory", node.mem_alarm), ("disk", node.disk_alarm)) if raised]
    state, level = "runs, no alarm", Level.GOOD
    if not node.running:
        state, level = "does not run", Level.BAD
    elif node.partitions:
        state, level = "the cluster is split", Level.BAD
    elif alarms:
        state, level = f"{' and '.join(alarms)} alarm", Level.BAD
    memory = disk = files = None
    if node.mem_used is not None and node.mem_limit is not None:
        words = f"{filesizeformat(node.mem_used)} of {filesizeformat(node.mem_limit)}"
        memory = _gauge(node.mem_used / max(node.mem_limit, 1), words, NEAR_MEMORY, alarm=node.mem_alarm)
    if node.disk_free is not None and node.disk_free_limit is not None:
        words = f"{filesizeformat(node.disk_free)} free, at least {filesizeformat(node.disk_free_limit)} needed"
        disk = _gauge(node.disk_free_limit / max(node.disk_free, 1), words, NEAR_DISK, alarm=node.disk_alarm)
    if node.fd_used is not None and node.fd_total:
        words = f"{node.fd_used:,} of {node.fd_total:,}"
        files = _gauge(node.fd_used / node.fd_total, words, NEAR_FILES, alarm=False)
    return NodeShown(readable(node.name), state, level, memory, disk, files, duration(node.uptime))


def _gauge(share: float, words: str, near: float, *, alarm: bool) -> Gauge:
    level = Level.BAD if alarm else Level.WARY if share >= near else Level.GOOD
    return Gauge(round(min(share, 1) * 100, 1), words.replace("\N{NO-BREAK SPACE}", " "), level)


# Guardian


def _guardian(now: datetime) -> Guardian:
    """Read what is known of Guardian's own work, in a fixed number of statements."""
    watch = Watch.objects.filter(id=1).first() or Watch()
    passes = Pass.objects.values_list(*PassSeen._fields)[:PASSES_SHOWN]
    sweeps = [
        SweepSeen._make(row)._replace(errors=[readable(error) for error in row[-2]])
        for kind in Sweep.Kind.values
        for row in Sweep.objects.filter(kind=kind).values_list(*SweepSeen._fields)[:SWEEPS_SHOWN]
    ]
    return Guardian(
        poll_seconds=settings.GUARDIAN_POLL_SECONDS,
        passes=[_readable(PassSeen._make(row)) for row in passes],
        sweeps=sorted(sweeps, key=lambda sweep: sweep.at, reverse=True),
        running=Lease.objects.filter(is_held(), name=LEASE).exists(),
        listed_at=watch.listed_at,
        next_pass_at=watch.next_pass_at,
        outage_since=watch.outage_since,
        brake_since=watch.brake_since,
        braked=watch.braked,
        released=released(watch, now),
        released_by=watch.released_by,
        short_lists=watch.short_lists,
        refused_since=watch.refused_since,
        unresponsive_since=watch.unresponsive_since,
        misnamed_exchanges=[readable(name) for name in watch.misnamed_exchanges],
        outbox=_outbox(now),
        removals=_removals(now),
    )


def _readable(one: PassSeen) -> PassSeen:
    return one._replace(errors=[readable(error) for error in one.errors])


def _outbox(now: datetime) -> Outbox:
    states = Notification.State
    held = Q(held_until__gt=now)
    given_up = Q(attempts__gte=GIVE_UP_ATTEMPTS, created__gt=now - timedelta(days=2))
    rows = Notification.objects.order_by().values("state")
    counted = rows.annotate(
        number=Count("id"),
        held=Count("id", filter=held),
        retried=Count("id", filter=Q(attempts__gte=RETRIED_OFTEN)),
        given_up=Count("id", filter=given_up),
        oldest=Min("due_at", filter=~held | Q(held_until=None)),
    )
    by_state = {row["state"]: row for row in counted}
    unsent = [by_state[state] for state in (states.DUE, states.SENDING) if state in by_state]
    due, failed = by_state.get(states.DUE), by_state.get(states.FAILED)
    return Outbox(
        **{state: by_state[state]["number"] for state in states.values if state in by_state},
        held=sum(row["held"] for row in unsent),
        retried=sum(row["retried"] for row in unsent),
        given_up=failed["given_up"] if failed else 0,
        oldest=due["oldest"] if due else None,
    )


def _removals(now: datetime) -> Removals:
    is_old = Q(created__lt=now - STUCK_AFTER)
    counts = Removal.objects.aggregate(waiting=Count("id"), stuck=Count("id", filter=is_old))
    oldest = Removal.objects.filter(is_old)[:STUCK_SHOWN]
    shown = [(readable(str(one)), readable(one.last_error) or "not tried yet") for one in oldest]
    accounts = PulseUser.objects.filter(removing_since__lt=now - STUCK_AFTER).order_by("username")
    return Removals(**counts, shown=shown, accounts=list(accounts.values_list("username", flat=True)[:STUCK_SHOWN]))


def _passes(now: datetime, poll_seconds: float) -> Passes | None:
    """Return the passes of the last hour as a chart; None: there were none."""
    began = now - CHART_SPAN.long
    rows = Pass.objects.filter(at__gt=began, at__lte=now).order_by("at").values_list("at", "seconds")
    return chart_of_passes(list(rows), began, now, longest_wait(poll_seconds))


def longest_wait(poll_seconds: float) -> timedelta:
    """Return how long it may be from one pass to the next: while the broker is away, the wait grows."""
    longest = max(poll_seconds, settings.GUARDIAN_POLL_MAX_SECONDS)
    return timedelta(seconds=longest + LATE_AFTER_POLLS * poll_seconds)


def chart_of_passes(
    passes: Sequence[tuple[datetime, float]], began: datetime, ended: datetime, most: timedelta
) -> Passes | None:
    """Return the chart of these passes, given by their beginnings and seconds, the oldest first; None: there are none.

    There is a gap where it is longer than ``most`` from one to the next, or since the last.
    """
    milliseconds = [(at, round(seconds * 1000)) for at, seconds in passes]
    chart = charts.chart(milliseconds, began, ended, Thresholds(1, 1), has_maximum=False)
    if chart is None:
        return None
    long = ended - began
    ends = [at + timedelta(seconds=seconds) for at, seconds in passes]
    moments = zip(ends, [*(at for at, _ in passes[1:]), ended], strict=True)
    gaps = [
        Gap(
            round((since - began) / long * 100, 2),
            round((until - since) / long * 100, 2),
            f"from {since:%H:%M} on for {duration((until - since).total_seconds())}",
        )
        for since, until in moments
        if until - since > most
    ]
    return Passes(chart, gaps, len(passes), max(seconds for _, seconds in passes))


# Queues


def _states() -> list[tuple[str, str, int]]:
    """Return the states that queues are in, each with its words and the number of them."""
    numbers = dict.fromkeys(Queue.State.values, 0)
    for group in standing(Queue.objects.all()):
        numbers[group.state] += group.number
    worst_first = (Queue.State.DELETING, Queue.State.WARNED, Queue.State.OK)
    return [(state.value, str(state.label), numbers[state]) for state in worst_first]


def _there() -> QuerySet[Queue]:
    return Queue.objects.exclude(state=GONE).filter(ready__isnull=False, unacknowledged__isnull=False)


def _longest() -> list[QueueLine]:
    rows = _there().annotate(messages=LENGTH).filter(messages__gt=0).order_by("-messages", "name", "vhost")
    queues = list(rows.select_related("pulse_user", "owner")[:QUEUES_SHOWN])
    most = max((queue.length or 0 for queue in queues), default=0)
    return [
        _line(queue, (queue.length or 0) / most, f"{queue.length:,} messages", _of_its_maximum(queue))
        for queue in queues
    ]


def _of_its_maximum(queue: Queue) -> str:
    if queue.unbounded or queue.exclusive or queue.registered:
        return "never deleted for its length"
    maximum = thresholds.of_queue(queue).max
    return f"{(queue.length or 0) / max(maximum, 1) * 100:,.0f} % of its maximum {maximum:,}"


def _growing(now: datetime) -> list[QueueLine]:
    """Return the queues that grow fastest, by the pace that messages about them tell. Two statements.

    The first sample of each is found by its index: there may be a hundred of each queue in that time.
    """
    since = now - timedelta(seconds=growth.WINDOW_SECONDS)
    samples = QueueSample.objects.filter(queue=OuterRef("pk"), at__gte=since).order_by("at")
    rows = (
        _there()
        .order_by()
        .annotate(
            messages=LENGTH,
            first_at=Subquery(samples.values("at")[:1]),
            first_length=Subquery(samples.values("length")[:1]),
        )
    )
    grown = rows.filter(messages__gt=F("first_length")).values_list("id", "first_at", "first_length", "messages")
    lengths = {id_: [(at, first), (now, length)] for id_, at, first, length in grown}
    paces = {id_: found.per_second for id_, both in lengths.items() if (found := growth.growth(both, 0)) is not None}
    fastest = sorted(paces, key=lambda id_: (-paces[id_], id_))[:QUEUES_SHOWN]
    queues = Queue.objects.select_related("pulse_user", "owner").in_bulk(fastest)
    most = paces[fastest[0]] if fastest else 0.0
    return [
        _line(queue, paces[id_] / most, pace(paces[id_]), _until_its_maximum(queue, lengths[id_]))
        for id_ in fastest
        if (queue := queues.get(id_)) is not None
    ]


def _until_its_maximum(queue: Queue, lengths: Sequence[tuple[datetime, int]]) -> str:
    length = lengths[-1][1]
    if queue.unbounded or queue.exclusive or queue.registered:
        return f"{length:,} by now, and never deleted for its length"
    grows = growth.growth(lengths, thresholds.of_queue(queue).max)
    if grows is None or grows.seconds_to_max is None:
        return f"{length:,} by now, over its maximum"
    return f"{length:,} by now, at its maximum in {duration(grows.seconds_to_max)}"


def _stalled(now: datetime) -> Named:
    """Return the queues whose consumers have stalled, those first that have for longest. Two statements."""
    rows = Queue.objects.filter(STALLED)
    longest_first = rows.order_by(F("stalled_since").asc(nulls_last=True), "name", "vhost")
    queues = longest_first.select_related("pulse_user", "owner")[:NAMES_SHOWN]
    return Named(rows.count(), [_stalled_line(queue, now) for queue in queues])


def _stalled_line(queue: Queue, now: datetime) -> QueueLine:
    line = _unowned_line(queue)
    since = queue.stalled_since
    lasts = f", nothing acknowledged for {duration(max(0.0, (now - since).total_seconds()))}" if since else ""
    return line._replace(figure=f"of {line.whose}, {line.figure}{lasts}")


def _unowned() -> tuple[Named, Named, Named]:
    """Return the queues without an owner, and of them the misnamed and the unpatterned ones. Two statements.

    The first reads only what it takes to tell them apart: there may be all the queues that the broker has.
    """
    rows = Queue.objects.exclude(state=GONE).filter(pulse_user=None, owner=None)
    everything: list[int] = []
    by_kind: dict[Kind, list[int]] = {}
    longest_first = rows.order_by(LENGTH.desc(nulls_last=True), "name")
    for id_, name, vhost, registered in longest_first.values_list("id", "name", "vhost", "registered"):
        everything.append(id_)
        # Elsewhere names say nothing. And whose name is that of a user who isn't there follows the pattern.
        if vhost == settings.GUARDIAN_PULSE_VHOST and not registered:
            by_kind.setdefault(kind_of_queue(name), []).append(id_)
    named = [everything, by_kind.get(Kind.MISNAMED, []), by_kind.get(Kind.UNPATTERNED, [])]
    queues = Queue.objects.in_bulk({id_ for ids in named for id_ in ids[:NAMES_SHOWN]})
    unowned, misnamed, unpatterned = (
        Named(len(ids), [_unowned_line(queues[id_]) for id_ in ids[:NAMES_SHOWN] if id_ in queues]) for ids in named
    )
    return unowned, misnamed, unpatterned


def _unowned_line(queue: Queue) -> QueueLine:
    return _line(queue, 0, f"{queue.length:,} messages" if queue.length is not None else "unknown length", "")


def _line(queue: Queue, share: float, figure: str, more: str) -> QueueLine:
    whose = "nobody"
    if queue.pulse_user_id is not None and queue.pulse_user is not None:
        whose = queue.pulse_user.username
    elif queue.owner_id is not None and queue.owner is not None:
        whose = f"agents of {queue.owner.email}"
    words = str(Queue.State(queue.state).label)
    name, vhost = readable(queue.name), readable(queue.vhost)
    return QueueLine(queue.uuid, name, vhost, whose, queue.state, words, round(share * 100, 1), figure, more)
