"""Why a message is a dead letter, and where it is sent back to.

A publisher can write any ``x-death``. So the header chooses among what the dead-letter queue's Pulse user has set up: a
queue of that Pulse user which dead-letters here, and an exchange that the Pulse user may write to and that queue is
bound to for this key. In any other case the message goes straight to the queue in which it died.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from guardian_consumers.headers import (
    ATTEMPTS,
    ERROR,
    EXCHANGE,
    FAILED_AT,
    MOVED,
    QUEUE,
    ROUTING_KEY,
    TRACEBACK,
    attempts_of,
)
from guardian_consumers.names import parking_queue, return_key
from rabbit.entities import Binding
from rabbit.names import user_of_queue
from rabbit.permissions import allows, for_pulse_user

SENT_BACK = "x-guardian-sent-back"
"""The header that counts how often Guardian sent a message back. Publishers can write it, so no rule uses it."""

DEATHS = "x-death"
DEATH_HEADERS = (
    DEATHS, "x-first-death-exchange", "x-first-death-queue", "x-first-death-reason",
    "x-last-death-exchange", "x-last-death-queue", "x-last-death-reason", "x-delivery-count", "x-acquired-count",
)  # fmt: skip
"""The broker's headers about a message's past. With the old ones it may drop the message as one in a cycle."""

PARKED_HEADERS = (ATTEMPTS, ERROR, TRACEBACK, FAILED_AT, QUEUE)
"""The consumer toolkit's headers about failures. Without them a message gets all its retries again."""

PARKED_SUFFIX = parking_queue("")

REASONS = {
    "rejected": "rejected by a consumer",
    "expired": "expired",
    "maxlen": "dropped from a full queue",
    "delivery_limit": "delivered too often",
}

MAX_GROUPS = 50


class DeadLetter(NamedTuple):
    """What a message's headers say about its last death, or why the consumer toolkit parked it.

    ``exchange`` and ``routing_key`` are those of its publication to ``queue``, where it died. ``deaths`` is how often
    it died there for this reason. ``error`` and what follows is of parked messages.
    """

    queue: str
    reason: str
    exchange: str
    routing_key: str
    deaths: int = 1
    since: datetime | None = None
    sent_back: int = 0
    error: str = ""
    traceback: str = ""
    attempts: int = 0


class Source(NamedTuple):
    """A queue that dead-letters: to which exchange, with which key (None: the message's own), and its bindings."""

    exchange: str
    routing_key: str | None
    bindings: Sequence[Binding]


class Surroundings(NamedTuple):
    """What leads to a dead-letter queue. ``exchanges`` lead to it.

    ``parking_exchange`` is the consumer toolkit's exchange if this is a parking queue of the toolkit, else empty.
    ``source`` returns a queue of the same vhost by its name, or None if it does not dead-letter or is unknown.
    """

    name: str
    username: str
    exchanges: frozenset[str]
    parking_exchange: str
    source: Callable[[str], Source | None]

    @property
    def work_queue(self) -> str:
        """The queue whose failed messages the consumer toolkit parks here."""
        return self.name.removesuffix(PARKED_SUFFIX)


class Origin(NamedTuple):
    """Where a dead letter is sent back to. ``why_not``: Guardian can't send it back, and the rest is what it says."""

    exchange: str
    routing_key: str
    reason: str
    queue: str
    why_not: str = ""

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self[:4]


class Group(NamedTuple):
    """The dead letters with one origin. ``again`` of them were sent back before, up to ``sent_back`` times.

    ``latest`` is the last of them in the queue.
    """

    origin: Origin
    messages: int
    deaths: int
    since: datetime | None
    again: int
    sent_back: int
    latest: DeadLetter

    @property
    def reason(self) -> str:
        return REASONS.get(self.origin.reason, self.origin.reason)


def surroundings(
    name: str,
    username: str,
    bindings: Iterable[Binding],
    upstream: Iterable[Binding],
    source: Callable[[str], Source | None],
) -> Surroundings:
    """Return the surroundings of a queue with these bindings. ``upstream`` are those that lead to their exchanges."""
    own, parking = list(bindings), ""
    write = for_pulse_user(username).write
    if name.endswith(PARKED_SUFFIX):
        parking = next(
            (one.source for one in own if one.routing_key == name and one.source and allows(write, one.source)), ""
        )
    return Surroundings(name, username, frozenset(one.source for one in [*own, *upstream]), parking, source)


def read(headers: Mapping[Any, Any]) -> DeadLetter | None:
    """Return what the headers of a message say about its death, or None if it is no dead letter."""
    sent_back = sent_back_of(headers)
    if _is_text(headers.get(ERROR)) and _is_text(headers.get(QUEUE)):
        error, trace = str(headers[ERROR]), headers.get(TRACEBACK)
        failed_at = headers.get(FAILED_AT)
        return DeadLetter(
            str(headers[QUEUE]),
            error.partition(":")[0],
            str(headers.get(EXCHANGE, "")),
            str(headers.get(ROUTING_KEY, "")),
            since=_time(failed_at),
            sent_back=sent_back,
            error=error,
            traceback=trace if isinstance(trace, str) else "",
            attempts=attempts_of(headers),
        )
    deaths = headers.get(DEATHS)
    last = deaths[0] if isinstance(deaths, list) and deaths else None  # the broker writes the last one first
    if not isinstance(last, dict) or not all(_is_text(last.get(name)) for name in ("queue", "reason", "exchange")):
        return None
    keys, count, since = last.get("routing-keys"), last.get("count"), last.get("time")
    routing_key = keys[0] if isinstance(keys, list) and keys and _is_text(keys[0]) else ""
    return DeadLetter(
        last["queue"],
        last["reason"],
        last["exchange"],
        routing_key,
        count if type(count) is int and count > 0 else 1,
        since.replace(tzinfo=UTC) if isinstance(since, datetime) else None,
        sent_back,
    )


def sent_back_of(headers: Mapping[Any, Any]) -> int:
    """Return how often Guardian sent a message back, as far as its header says so."""
    count = headers.get(SENT_BACK)
    return count if type(count) is int and 0 < count < 2**31 else 0


def origin_of(letter: DeadLetter, here: Surroundings) -> Origin:
    """Return where a dead letter is sent back to, or why it is not."""
    if here.parking_exchange:  # its name alone decides, no header
        work = here.work_queue
        return Origin(here.parking_exchange, return_key(work), letter.reason, work)
    said = Origin(letter.exchange, letter.routing_key, letter.reason, letter.queue)
    if letter.error:
        return said._replace(why_not=f"move them to the parking queue {letter.queue}{PARKED_SUFFIX} first")
    if user_of_queue(letter.queue) != here.username:
        return said._replace(why_not="it is not a queue of this Pulse user")
    source = here.source(letter.queue)
    if source is None or not _leads_here(source, here):
        return said._replace(why_not="it is not on the broker, or does not dead-letter to this queue")
    if not _is_own_way(letter, source, here.username):
        return Origin("", letter.queue, letter.reason, letter.queue)
    return said


def _leads_here(source: Source, here: Surroundings) -> bool:
    if source.exchange:
        return source.exchange in here.exchanges
    return source.routing_key == here.name


def _is_own_way(letter: DeadLetter, source: Source, username: str) -> bool:
    """Return whether the Pulse user may publish a message as before, and it would reach the queue in which it died."""
    if not letter.exchange or not allows(for_pulse_user(username).write, letter.exchange):
        return False
    return any(
        binding.source == letter.exchange and _fits(binding.routing_key, letter.routing_key)
        for binding in source.bindings
    )


def _fits(pattern: str, key: str) -> bool:
    """Return whether a topic exchange routes a key to a binding. A pattern without ``*`` and ``#`` is the key."""
    parts, end = _words(pattern), len(_words(pattern))

    def skipping(positions: Iterable[int]) -> set[int]:
        """Add the positions that follow a ``#``, which may stand for no word."""
        found = set()
        for position in positions:
            found.add(position)
            while position < end and parts[position] == "#":
                position += 1
                found.add(position)
        return found

    positions = skipping([0])
    for word in _words(key):
        positions = skipping(
            position + (parts[position] != "#")
            for position in positions
            if position < end and parts[position] in ("#", "*", word)
        )
    return end in positions


def _words(key: str) -> list[str]:
    return key.split(".") if key else []


def grouped(letters: Iterable[DeadLetter], here: Surroundings) -> list[Group]:
    """Return these dead letters by origin, the largest group first."""
    found: dict[Origin, list[DeadLetter]] = {}
    for letter in letters:
        found.setdefault(origin_of(letter, here), []).append(letter)
    groups = [
        Group(
            origin,
            len(ones),
            max(one.deaths for one in ones),
            min((one.since for one in ones if one.since), default=None),
            sum(one.sent_back > 0 for one in ones),
            max(one.sent_back for one in ones),
            ones[-1],
        )
        for origin, ones in found.items()
    ]
    return sorted(groups, key=lambda group: (bool(group.origin.why_not), -group.messages, group.origin))


def headers_back(headers: Mapping[Any, Any], letter: DeadLetter) -> dict[Any, Any]:
    """Return the headers of a message that is sent back, before the old ones are moved away.

    The consumer toolkit reads the first publication of a message that moved from headers.
    """
    counted = {**headers, SENT_BACK: sent_back_of(headers) + 1}
    if letter.error:
        counted |= {EXCHANGE: letter.exchange, ROUTING_KEY: letter.routing_key, MOVED: True}
    return counted


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _time(seconds: Any) -> datetime | None:
    is_plausible = type(seconds) is int and 0 < seconds < 2**32
    return datetime.fromtimestamp(seconds, UTC) if is_plausible else None
