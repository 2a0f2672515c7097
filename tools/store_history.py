"""What clients of the message store did and saw in a chaos run, and the checks of what each level promises."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple
from uuid import UUID

from guardian_store._ids import place
from tools.faults import Finding
from tools.load import Request

MAX_STRONG_GAP_SECONDS = 10.0
"""The longest time without a successful post at strong while one node is away."""

MAX_WEAK_GAP_SECONDS = 10.0
"""The longest time without a successful post or read at weak while two nodes are away."""

POSTS, BATCHES, READS = "posts", "batches", "reads"
"""Kinds of requests for messages. Batches are those for several partitions."""

FAULTS = ("killed", "paused", "cut off", "full disk")


class Entry(NamedTuple):
    """A message in a queue. ``body`` is unique: it names the batch, and the number of its messages."""

    partition: int
    id: str
    body: str


def body_of(batch: str, number: int, size: int) -> str:
    """Return the body of one of ``size`` messages of a batch."""
    return f"{batch} {number} {size}"


@dataclass
class QueueHistory:
    """A queue with what was acknowledged, what its followers saw in turn, and what it has in the end."""

    name: str
    level: str
    acked: set[Entry] = field(default_factory=set)
    followed: list[list[Entry]] = field(default_factory=list)
    stored: list[Entry] = field(default_factory=list)

    def findings(self) -> Iterator[Finding]:
        """Yield the findings. Messages of a weak queue may be lost, missed or stored in part."""

        def unless_weak(breaches: list[str]) -> list[str]:
            return [] if self.level == "weak" else breaches

        lost = [f"{entry} was acknowledged, and is lost" for entry in self.acked - set(self.stored)]
        counts = f"{len(self.acked)} acknowledged, {len(lost)} of them lost; {len(self.stored)} stored"
        twice = [f"stored twice: {body}" for body in repeated(entry.body for entry in self.stored)]
        breaches = unless_weak(lost) + twice + disorder(self.stored) + _required(self.acked, "acknowledged messages")
        yield Finding(f"{self.level}: messages", counts, breaches)

        missed = [f"{entry} was missed by a follower" for seen in self.followed for entry in self.acked - set(seen)]
        wrong = [breach for seen in self.followed for breach in disorder(seen)]
        counts = (
            f"{len(self.followed)} saw {sum(map(len, self.followed))}, missed {len(missed)};"
            f" {len(wrong)} twice or out of order"
        )
        breaches = unless_weak(missed) + wrong + _required(self.followed, "followers")
        yield Finding(f"{self.level}: followers", counts, breaches)

        parts = self.partial_batches()
        many = [name for name, size in sizes_by_batch(self.stored) if size > 1]
        counts = f"{len(many)} stored, {len(parts)} of them in part"
        yield Finding(f"{self.level}: batches", counts, unless_weak(parts) + _required(many, "batches"))

    def partial_batches(self) -> list[str]:
        return [
            f"of the batch {name}, {count} of {size} are stored"
            for (name, size), count in sizes_by_batch(self.stored).items()
            if count != size
        ]


def disorder(entries: Sequence[Entry]) -> list[str]:
    """Return the messages that are not after the previous one of their partition."""
    by_partition: defaultdict[int, list[Entry]] = defaultdict(list)
    for entry in entries:
        by_partition[entry.partition].append(entry)
    return [
        f"{later} came after {entry}"
        for some in by_partition.values()
        for entry, later in pairwise(some)
        if place(UUID(later.id)) <= place(UUID(entry.id))
    ]


def repeated(values: Iterable[str]) -> list[str]:
    return [value for value, count in Counter(values).items() if count > 1]


def sizes_by_batch(entries: Iterable[Entry]) -> Counter[tuple[str, int]]:
    """Return how many messages there are of each batch, by its name and the number of its messages."""
    names = Counter[tuple[str, int]]()
    for body in {entry.body for entry in entries}:
        batch, _, size = body.split()
        names[batch, int(size)] += 1
    return names


@dataclass
class Position:
    """A consumer's positions: the last ones that were acknowledged, and those sent since then without an answer."""

    acked: dict[int, str] = field(default_factory=dict)
    unknown: list[dict[int, str]] = field(default_factory=list)

    def breaches(self, found: dict[int, str]) -> list[str]:
        """Return what is wrong with the positions in the end."""
        return [] if found in (self.acked, *self.unknown) else [f"positions are {found}, and {self.acked} were set"]


class Outage(NamedTuple):
    """A fault of one node or two. Times are monotonic: it began, was complete, began to end, and was over."""

    how: str
    nodes: Sequence[int]
    began: float
    gone: float
    until: float
    back: float


def answer_findings(requests: Sequence[Request]) -> Iterator[Finding]:
    """Yield a finding for each kind of request. Any answer but success and 503 is a breach."""
    by_kind: defaultdict[str, list[Request]] = defaultdict(list)
    for request in requests:
        by_kind[request.what].append(request)
    for kind, some in sorted(by_kind.items()):
        done = [request for request in some if request.status == 200]
        unavailable = [request for request in some if request.status == 503]
        wrong = [f"{one.status}: {one.problem}" for one in some if one.status not in (200, 503)]
        slowest = max(request.ended - request.began for request in some)
        counts = f"{len(done)} succeeded, {len(unavailable)} got 503; the slowest took {slowest:.1f} s"
        yield Finding(f"requests: {kind}", counts, wrong + _required(done, f"successful {kind}"))


def outage_findings(outages: Sequence[Outage], requests: Sequence[Request]) -> Iterator[Finding]:
    """Yield a finding for each kind of fault of one node, and for two nodes away at once."""
    for how in FAULTS:
        some = [outage for outage in outages if len(outage.nodes) == 1 and outage.how == how]
        gap = _longest_gap(requests, f"strong: {POSTS}", some)
        of_batches = _longest_gap(requests, f"strong: {BATCHES}", some)
        counts = f"{_times(some)}; longest without a strong post {gap:.1f} s, without a batch {of_batches:.1f} s"
        breaches = _required(some, f"nodes {how}")
        if gap > MAX_STRONG_GAP_SECONDS:
            breaches.append(f"there was no successful strong post for {gap:.1f} s")
        yield Finding(f"one node: {how}", counts, breaches)
    for how in FAULTS[:3]:
        some = [outage for outage in outages if len(outage.nodes) == 2 and outage.how == how]
        strong = [request for one in some for request in _strong_within(requests, one)]
        refused = [request for request in strong if request.status == 503]
        posts, reads = (_longest_gap(requests, f"weak: {kind}", some) for kind in (POSTS, READS))
        counts = (
            f"{_times(some)}; {len(refused)} strong requests got 503; longest without a weak post {posts:.1f} s,"
            f" without a weak read {reads:.1f} s"
        )
        breaches = [f"{one.what} succeeded without a majority" for one in strong if one.status == 200]
        if max(posts, reads) > MAX_WEAK_GAP_SECONDS:
            breaches.append("weak queues were unusable for too long")
        breaches += _required(some, f"two nodes {how}") + _required(refused, "strong requests that got 503")
        yield Finding(f"two nodes: {how}", counts, breaches)


def _longest_gap(requests: Sequence[Request], what: str, outages: Collection[Outage]) -> float:
    return max((longest_gap(requests, what, outage) for outage in outages), default=0.0)


def longest_gap(requests: Sequence[Request], what: str, outage: Outage) -> float:
    """Return the longest time without a success of these requests that begins or ends in an outage."""
    ended = sorted(request.ended for request in requests if request.what == what and request.status == 200)
    before = [at for at in ended if at <= outage.began][-1:]
    after = [at for at in ended if at >= outage.back][:1]
    end = max([outage.back, *(request.ended for request in requests)])
    during = [at for at in ended if outage.began < at < outage.back]
    times = [*(before or [outage.began]), *during, *(after or [end])]
    return max(later - earlier for earlier, later in pairwise(times))


def _strong_within(requests: Iterable[Request], outage: Outage) -> Iterator[Request]:
    for request in requests:
        is_strong = request.what.startswith(("strong: ", "very_strong: "))
        if is_strong and outage.gone <= request.began and request.ended <= outage.until:
            yield request


def _times(outages: Collection[Outage]) -> str:
    longest = max((outage.until - outage.gone for outage in outages), default=0.0)
    return f"{len(outages)} times, for up to {longest:.0f} s"


def _required(found: Collection[object], what: str) -> list[str]:
    return [] if found else [f"there were no {what}"]
