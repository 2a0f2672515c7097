"""The content of the admin's front page: the health of the broker and of Guardian, and figures of both.

``overview`` collects it in a constant number of statements and three requests to the broker. Their timeout is short,
because operators need the page most while the broker has problems. ``facts.py`` measures, ``rules.py`` judges.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from django.conf import settings
from django.db.models import F, Q, QuerySet
from django.db.models.expressions import OrderBy

from accounts.access import vouching
from core.formatting import counted, duration, short_rate
from core.models import Removal
from queues.actions import limit_requests
from queues.models import Pass, Queue
from queues.rules import charts, growth, thresholds
from queues.rules.conditions import conditions, soonest_to_fill
from queues.rules.freshness import freshness_of_list
from queues.rules.listing import LENGTH, STALLED, add_up, count_by_state, whose, with_first_sample
from queues.rules.thresholds import Thresholds
from rabbit.entities import Node
from rabbit.names import FEDERATION_QUEUE, NameKind, kind_of_queue, readable
from rabbit.requests.sending import JSONObject
from status import facts, rules
from status.facts import BrokerFacts, GuardianFacts
from status.verdicts import Level, Verdict

CHART_SPAN = charts.SPANS["hour"]

QUEUES_SHOWN = 8
NAMES_SHOWN = 5
REMOVALS_SHOWN = 5
REQUESTS_SHOWN = 10

GONE = Queue.State.GONE


class Summary(NamedTuple):
    """The worst verdict, and the others that are wrong."""

    worst: Verdict
    others: Sequence[Verdict] = ()


class Gauge(NamedTuple):
    """A value's share of its limit: in percent, and in words."""

    percent: float
    words: str
    level: Level

    @property
    def full(self) -> float:
        return min(self.percent, 100)


class NodeShown(NamedTuple):
    """A node on the page. A gauge is None if its value is unknown; ``uptime`` is in words."""

    name: str
    state: str
    level: Level
    memory: Gauge | None
    disk: Gauge | None
    files: Gauge | None
    uptime: str


class QueueLine(NamedTuple):
    """A queue in a list. ``share`` is of the longest bar, in the colour of ``level``."""

    queue: Queue
    figure: str
    more: str = ""
    share: float = 0
    level: str = ""

    @property
    def name(self) -> str:
        return readable(self.queue.name)

    @property
    def vhost(self) -> str:
        return readable(self.queue.vhost)

    @property
    def whose(self) -> str:
        return whose(self.queue.pulse_user, self.queue.owner)

    @property
    def full(self) -> float:
        return round(self.share * 100, 1)


class Named(NamedTuple):
    """Queues with the same fault, such as a wrong name: their number, and the longest of them."""

    number: int
    shown: Sequence[QueueLine]

    @property
    def more(self) -> int:
        return self.number - len(self.shown)


MAX_GAPS_NAMED = 3


class Gap(NamedTuple):
    """A gap between passes: its position and width in percent of the chart, and its duration in words."""

    left: float
    width: float
    words: str


class Passes(NamedTuple):
    """The passes of the last hour. ``chart`` is of milliseconds, ``longest`` in seconds."""

    chart: charts.Chart
    gaps: Sequence[Gap]
    number: int
    longest: float
    gaps_in_words: str = ""


def overview(now: datetime) -> dict[str, Any]:
    """Collect the content of the front page. If the broker doesn't answer, only the broker's part is missing."""
    cluster = facts.measure_broker()
    guardian = facts.measure_guardian(now)
    predicted_at = freshness_of_list(guardian.watch).now
    longest, growing = _with_levels([_longest(), _growing(now)], predicted_at)
    unowned, misnamed, unpatterned = _unowned()
    return {
        "at": now,
        "notifies_operators": bool(settings.GUARDIAN_OPERATOR_EMAILS),
        "broker": of_broker(cluster),
        "guardian": of_guardian(guardian),
        "nodes": [show_node(node) for node in cluster.nodes],
        "cluster": readable(str(cluster.overview.get("cluster_name", ""))),
        "totals": _totals(cluster.overview),
        "facts": guardian,
        "poll_seconds": settings.GUARDIAN_POLL_SECONDS,
        "misnamed_exchanges": [readable(name) for name in guardian.watch.misnamed_exchanges],
        "passes": _passes(now),
        "removals": _removals(guardian),
        "limit_requests": limit_requests.open_requests()[:REQUESTS_SHOWN],
        "access_requests": vouching.open_requests()[:REQUESTS_SHOWN],
        "counts": add_up(count_by_state(Queue.objects.all(), soonest_to_fill(Queue.objects.all(), predicted_at))),
        "longest": longest,
        "growing": growing,
        "stalled": _stalled(now),
        "notifies_of_stalls": bool(settings.GUARDIAN_STALLED_MINUTES),
        "exclusive": _first(Queue.objects.exclude(state=GONE).filter(exclusive=True), LENGTH.desc(nulls_last=True)),
        "unowned": unowned,
        "misnamed": misnamed,
        "unpatterned": unpatterned,
    }


# The verdicts


def of_broker(cluster: BrokerFacts) -> Summary:
    nodes = f"{len(cluster.nodes)} node{' runs' if len(cluster.nodes) == 1 else 's run'}"
    version = readable(str(cluster.overview.get("rabbitmq_version", "")))
    healthy = cluster.answer.verdict._replace(sentence=f"The broker is healthy: {nodes} RabbitMQ {version}, no alarms.")
    return _summary(cluster.verdicts(), healthy)


def of_guardian(guardian: GuardianFacts) -> Summary:
    verdicts = guardian.verdicts()
    healthy = verdicts[0]
    if last := guardian.last_pass:
        ago = duration((guardian.at - last.at).total_seconds())
        sentence = f"Guardian is healthy: it listed {counted(last.queues, 'queue')} {ago} ago, in {last.seconds:.2f} s."
        healthy = healthy._replace(sentence=sentence)
    return _summary(verdicts, healthy)


def _summary(verdicts: Sequence[Verdict], healthy: Verdict) -> Summary:
    """Return the wrong verdicts, the worst first, or ``healthy``."""
    wrong = [verdict for verdict in verdicts if verdict.is_wrong]
    worst, *others = sorted(wrong, key=lambda verdict: -verdict.level) or [healthy]
    return Summary(worst, others)


# The broker


def _totals(overview: JSONObject) -> list[tuple[str, int]]:
    """Return the broker's totals, each with the singular noun of what it counts."""
    wanted = (
        ("object_totals", "queues", "queue"),
        ("queue_totals", "messages", "message"),
        ("object_totals", "connections", "connection"),
        ("object_totals", "consumers", "consumer"),
    )
    groups: dict[str, Any] = {name: overview[name] for name, _, _ in wanted if isinstance(overview.get(name), dict)}
    totals = [(noun, groups.get(name, {}).get(key)) for name, key, noun in wanted]
    return [(noun, total) for noun, total in totals if isinstance(total, int)]


HEALTHY = "running, no alarm"


def show_node(node: Node) -> NodeShown:
    alarms = [name for name, raised in (("memory", node.mem_alarm), ("disk", node.disk_alarm)) if raised]
    state = HEALTHY
    if not node.running:
        state = "not running"
    elif node.partitions:
        state = "the cluster is split"
    elif alarms:
        state = f"{' and '.join(alarms)} alarm"
    gauges = {one.rule: _gauge(one) for one in facts.measure_usage(node)}
    for rule, alarm in ((rules.MEMORY, node.mem_alarm), (rules.DISK, node.disk_alarm)):
        if (gauge := gauges[rule]) and alarm:
            gauges[rule] = gauge._replace(level=Level.CRITICAL)
    return NodeShown(
        name=readable(node.name),
        state=state,
        level=Level.OK if state == HEALTHY else Level.CRITICAL,
        memory=gauges[rules.MEMORY],
        disk=gauges[rules.DISK],
        files=gauges[rules.FILES],
        uptime=duration(node.uptime),
    )


def _gauge(one: facts.Measurement) -> Gauge | None:
    if one.value is None:
        return None
    level = one._replace(details={"node": "", **one.details}).verdict.level
    return Gauge(round(one.value * 100, 1), one.details["figures"], level)


# Guardian


def _removals(guardian: GuardianFacts) -> dict[str, Any]:
    """Return pending removals from the broker, and the oldest with their last errors."""
    numbers, oldest = guardian.removals
    return {
        "waiting": sum(numbers.values()),
        "lasts": duration((guardian.at - oldest).total_seconds()) if oldest else "",
        "shown": [
            (readable(str(one)), readable(one.last_error) or "not tried yet")
            for one in Removal.objects.all()[:REMOVALS_SHOWN]
        ],
    }


def _passes(now: datetime) -> Passes | None:
    """Return the passes of the last hour as a chart; None: there were none.

    A gap is longer than the limit during an outage, when passes are less frequent.
    """
    began = now - CHART_SPAN.duration
    rows = Pass.objects.filter(at__gt=began, at__lte=now).order_by("at").values_list("at", "seconds")
    longest = rules.PASS_AGE_IN_OUTAGE.limit(Level.WARNING, settings) or 0.0
    return chart_of_passes(list(rows), began, now, timedelta(seconds=longest))


def chart_of_passes(
    passes: Sequence[tuple[datetime, float]], began: datetime, ended: datetime, max_gap: timedelta
) -> Passes | None:
    """Return the chart of these passes (start, seconds), the oldest first; None: there are none.

    The chart has a gap where more than ``max_gap`` lies between two passes, or after the last one.
    """
    milliseconds = [(at, round(seconds * 1000)) for at, seconds in passes]
    chart = charts.chart(milliseconds, began, ended, Thresholds(1, 1), has_maximum=False)
    if chart is None:
        return None
    long = ended - began
    ends = [at + timedelta(seconds=seconds) for at, seconds in passes]
    moments = zip(ends, [*(at for at, _ in passes[1:]), ended], strict=True)
    found = [(since, until) for since, until in moments if until - since > max_gap]
    gaps = [
        Gap(
            round((since - began) / long * 100, 2),
            round((until - since) / long * 100, 2),
            f"from {since:%H:%M} for {duration((until - since).total_seconds())}",
        )
        for since, until in found
    ]
    words = ", ".join(gap.words for gap in gaps)
    if len(gaps) > MAX_GAPS_NAMED:
        words = f"{len(gaps)} times from {found[0][0]:%H:%M} to {found[-1][1]:%H:%M}"
    return Passes(chart, gaps, len(passes), max(seconds for _, seconds in passes), words)


# Queues


def _queues_of_known_length() -> QuerySet[Queue]:
    return Queue.objects.exclude(state=GONE).filter(ready__isnull=False, unacknowledged__isnull=False)


def _with_levels(lists: Sequence[list[QueueLine]], now: datetime | None) -> list[list[QueueLine]]:
    """Return these lists with the levels of the queues' conditions."""
    found = conditions([line.queue for lines in lists for line in lines], now)
    return [[line._replace(level=found[line.queue.pk].level) for line in lines] for lines in lists]


def _longest() -> list[QueueLine]:
    rows = (
        _queues_of_known_length()
        .annotate(messages=LENGTH)
        .filter(messages__gt=0)
        .order_by("-messages", "name", "vhost")
    )
    return [
        QueueLine(queue, _messages(queue.length), _limit_in_words(queue), min(_share_of_limit(queue), 1))
        for queue in rows.select_related("pulse_user", "owner")[:QUEUES_SHOWN]
    ]


def _messages(number: int | None) -> str:
    return "unknown length" if number is None else counted(number, "message")


def _share_of_limit(queue: Queue) -> float:
    return (queue.length or 0) / max(thresholds.of_queue(queue).max, 1)


def _limit_in_words(queue: Queue) -> str:
    if thresholds.is_spared(queue):
        return "never deleted for its length"
    return f"{_share_of_limit(queue) * 100:,.0f} % of its deletion limit {thresholds.of_queue(queue).max:,}"


def _growing(now: datetime) -> list[QueueLine]:
    """Return the fastest growing queues, with the same rate as in notifications, in two statements."""
    rows = with_first_sample(_queues_of_known_length().order_by().annotate(messages=LENGTH), now)
    grown = rows.filter(messages__gt=F("first_length")).values_list("id", "first_at", "first_length", "messages")
    lengths = {id_: [(at, first), (now, length)] for id_, at, first, length in grown}
    rates = {id_: found.per_second for id_, both in lengths.items() if (found := growth.growth(both, 0)) is not None}
    fastest = sorted(rates, key=lambda id_: (-rates[id_], id_))[:QUEUES_SHOWN]
    queues = Queue.objects.select_related("pulse_user", "owner").in_bulk(fastest)
    most = rates[fastest[0]] if fastest else 0.0
    return [
        QueueLine(queue, short_rate(rates[id_]), _time_to_maximum(queue, lengths[id_]), rates[id_] / most)
        for id_ in fastest
        if (queue := queues.get(id_)) is not None
    ]


def _time_to_maximum(queue: Queue, lengths: Sequence[tuple[datetime, int]]) -> str:
    length = lengths[-1][1]
    if queue.unbounded or queue.exclusive or queue.registered:
        return f"{_messages(length)} now, never deleted for its length"
    grows = growth.growth(lengths, thresholds.of_queue(queue).max)
    if grows is None or grows.seconds_to_max is None:
        return f"{_messages(length)} now, over its deletion limit"
    return f"{_messages(length)} now, at its deletion limit in {duration(grows.seconds_to_max)}"


def _stalled(now: datetime) -> Named:
    """Return the queues whose consumers have stalled, the longest stalled first."""
    diagnosed = Q(diagnosis=Queue.Diagnosis.STALLED) & ~Q(state=GONE)
    found = _first(Queue.objects.filter(STALLED | diagnosed), F("stalled_since").asc(nulls_last=True))
    return found._replace(shown=[_stalled_line(line, now) for line in found.shown])


def _stalled_line(line: QueueLine, now: datetime) -> QueueLine:
    since = line.queue.stalled_since
    lasts = f", nothing acknowledged for {duration(max(0.0, (now - since).total_seconds()))}" if since else ""
    return line._replace(figure=f"owner {line.whose}, {line.figure}{lasts}")


def _first(rows: QuerySet[Queue], order: OrderBy) -> Named:
    """Return the number of rows and the first of them, in two statements."""
    queues = rows.order_by(order, "name", "vhost").select_related("pulse_user", "owner")[:NAMES_SHOWN]
    return Named(rows.count(), [QueueLine(queue, _messages(queue.length)) for queue in queues])


def _unowned() -> tuple[Named, Named, Named]:
    """Return the queues without an owner, and of these the misnamed and the unpatterned ones, in two statements.

    The first statement reads only a few columns, because it may return all queues of the broker.
    """
    rows = Queue.objects.exclude(state=GONE).filter(pulse_user=None, owner=None)
    all_ids: list[int] = []
    by_kind: dict[NameKind, list[int]] = {}
    longest_first = rows.order_by(LENGTH.desc(nulls_last=True), "name")
    for id_, name, vhost, registered in longest_first.values_list("id", "name", "vhost", "registered"):
        all_ids.append(id_)
        # Names matter only in this vhost. A name with a user who does not exist follows the pattern.
        if vhost == settings.GUARDIAN_PULSE_VHOST and not registered and not name.startswith(FEDERATION_QUEUE):
            by_kind.setdefault(kind_of_queue(name), []).append(id_)
    named = [all_ids, by_kind.get(NameKind.MISNAMED, []), by_kind.get(NameKind.UNPATTERNED, [])]
    queues = Queue.objects.in_bulk({id_ for ids in named for id_ in ids[:NAMES_SHOWN]})
    unowned, misnamed, unpatterned = (
        Named(
            len(ids),
            [QueueLine(queues[id_], _messages(queues[id_].length)) for id_ in ids[:NAMES_SHOWN] if id_ in queues],
        )
        for ids in named
    )
    return unowned, misnamed, unpatterned
