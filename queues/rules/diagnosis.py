"""Why a queue grows, or that nothing is wrong: ``diagnose`` decides it, and each page, mail and endpoint says it.

Nothing is stated that the figures don't show. They are those of the last count of consumers, of all queues, and those
of ``activity.py``, of the queues that were looked at lately.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from django.conf import settings

from core.formatting import counted, duration, messages_per
from queues.models import Queue
from queues.rules.activity import Activity, Holder, Seen, stored_activity
from queues.rules.freshness import is_current
from queues.rules.states import has_length, should_have_consumer
from queues.rules.thresholds import has_limit, of_queue
from rabbit.entities import QueueFlow
from rabbit.names import readable

Code = Queue.Diagnosis

STALLED_AFTER = timedelta(minutes=5)
"""How long nothing is acknowledged in a stall, unless ``GUARDIAN_STALLED_MINUTES`` is set."""

MIN_MESSAGES, MIN_SHARE = 10, 0.05
"""A queue grows or shrinks if at least this many messages, and this share of the flow, make the difference."""

BACKLOG_SECONDS = 60
"""Messages that the consumers acknowledge within this time are no backlog."""

FULL = 0.9
"""The share of the broker's limit from which a queue is full: it is a little shorter after each delivery."""

MAX_NAMED = 3

ADVICE: Mapping[str, str] = {
    Code.NO_CONSUMER: "Start its consumer.",
    Code.REDELIVERING: "Look for the error in the consumers' logs. Let them reject a message that always fails.",
    Code.HELD_BY_ONE: "Set a prefetch (basic.qos) of a few messages, so that the other consumers get some.",
    Code.STALLED: "Check whether its consumers hang, and restart them. The broker then delivers their unacknowledged "
    "messages again. If a message takes this long, or the consumers reject all, there is nothing to do.",
    Code.LIMITED_BY_BROKER: "Add consumers, or make them faster. If the queue must be longer, ask who set the limit.",
    Code.CONSUMERS_TOO_SLOW: "Add consumers, or make them faster.",
}


class Diagnosis(NamedTuple):
    """``since`` is when it began, if known. ``figures`` are those it rests on."""

    code: str
    text: str
    since: datetime | None
    figures: dict[str, Any]

    @property
    def advice(self) -> str:
        """What an owner can do about it, or an empty text if it is no problem."""
        is_empty = self.figures["ready"] == 0 == self.figures["unacknowledged"]
        return "" if is_empty else ADVICE.get(self.code, "")

    def as_json(self) -> dict[str, Any]:
        return {**self._asdict(), "since": self.since.isoformat() if self.since else None}


@dataclass(frozen=True)
class Situation:
    """What is known of a queue. ``activity`` and the consumers are None if they are not known or too old.

    ``deletion_limit`` is None if the queue has none. ``code`` and ``since`` are the last diagnosis.
    """

    now: datetime
    consumers: int | None
    ready: int | None
    unacknowledged: int | None
    is_over_threshold: bool = False
    needs_consumer: bool = True
    deletion_limit: int | None = None
    unattended_since: datetime | None = None
    stalled_since: datetime | None = None
    stalled_after: timedelta = STALLED_AFTER
    activity: Activity | None = None
    last_consumer: Seen | None = None
    code: str = ""
    since: datetime | None = None

    @property
    def length(self) -> int | None:
        return None if self.ready is None or self.unacknowledged is None else self.ready + self.unacknowledged

    @property
    def recent(self) -> QueueFlow | None:
        return self.activity.recent if self.activity else None

    @property
    def holders(self) -> Sequence[Holder]:
        """The consumers, if the broker reports each of them."""
        known = self.activity.holders if self.activity else ()
        return known if len(known) == self.consumers else ()

    @property
    def figures(self) -> dict[str, Any]:
        known: dict[str, Any] = {
            "consumers": self.consumers,
            "ready": self.ready,
            "unacknowledged": self.unacknowledged,
        }
        if self.recent:
            known |= {
                "published_per_second": self.recent.rate(self.recent.published),
                "acknowledged_per_second": self.recent.rate(self.recent.acknowledged),
                "redelivered_per_second": self.recent.rate(self.recent.redelivered),
            }
        return known

    def found(self, code: Code, text: str, since: datetime | None = None) -> Diagnosis:
        first_seen = self.activity.at if self.activity else None
        return Diagnosis(code.value, text, since or (self.since if self.code == code else first_seen), self.figures)


NO_PROBLEM = ("", Code.HEALTHY, Code.NO_CONSUMER)
NOTHING_ACKNOWLEDGED = (Code.REDELIVERING, Code.HELD_BY_ONE, Code.STALLED)


def of_queue_at(queue: Queue, counted_at: datetime | None, now: datetime) -> Diagnosis | None:
    """Return the diagnosis of a queue whose consumers were last counted at ``counted_at``, or None if it is gone."""
    if queue.state == Queue.State.GONE:
        return None
    return of_row(queue, counted_at, now, limit=of_queue(queue).max if has_limit(queue) else None)


def of_row(
    row: Any, counted_at: datetime | None, now: datetime, *, limit: int | None = None, consumers: int | None = None
) -> Diagnosis | None:
    """Return the diagnosis of a ``Queue``, or of another row with its columns.

    ``limit`` is its deletion limit. ``consumers`` is their number now, if known better than by the last count. It is
    None for a queue of a type whose length says nothing, unless it has no consumer.
    """
    stored = stored_activity(row.activity)
    fresh = stored if stored and is_current(stored.at, now) else None
    is_counted = is_current(counted_at, now)
    if consumers is None and fresh and (counted_at is None or fresh.at > counted_at):
        consumers = fresh.consumers
    if consumers is None and is_counted:
        consumers = row.consumers
    found = diagnose(
        Situation(
            now=now,
            consumers=consumers,
            ready=row.ready,
            unacknowledged=row.unacknowledged,
            is_over_threshold=row.state != Queue.State.OK,
            needs_consumer=should_have_consumer(row.name, exclusive=row.exclusive, registered=row.registered),
            deletion_limit=limit,
            unattended_since=row.unattended_since if is_counted else None,
            stalled_since=row.stalled_since if is_counted else None,
            stalled_after=timedelta(minutes=settings.GUARDIAN_STALLED_MINUTES) or STALLED_AFTER,
            activity=fresh,
            last_consumer=stored.last_consumer if stored else None,
            code=row.diagnosis,
            since=row.diagnosis_since,
        )
    )
    return found if has_length(row) or found.code == Code.NO_CONSUMER else None


def diagnose(known: Situation) -> Diagnosis:
    """Return the first diagnosis that the figures show, in the order of ``RULES``."""
    return next(found for rule in RULES if (found := rule(known)) is not None)


def _unknown(known: Situation) -> Diagnosis | None:
    if known.consumers is not None:
        return None
    return known.found(
        Code.UNKNOWN,
        "Guardian can't tell what happens in it, because its consumers are not known now. Look at the queue in "
        "RabbitMQ's own management, and check that its node runs.",
    )


def _no_consumer(known: Situation) -> Diagnosis | None:
    if known.consumers or not known.needs_consumer:
        return None
    since = known.unattended_since
    has = f"has had no consumer for {duration((known.now - since).total_seconds())}" if since else "has no consumer"
    waits = "Its length is unknown." if known.length is None else f"{_wait(known.length)}."
    return known.found(Code.NO_CONSUMER, f"It {has}. {_last_consumer(known)} {waits}", since)


def _last_consumer(known: Situation) -> str:
    last = known.last_consumer
    if last is None:
        return "Guardian has not seen which one it had before."
    ago = duration((known.now - last.at).total_seconds())
    return f"The last one that Guardian saw was {_name(last)}, {ago} ago."


def _redelivering(known: Situation) -> Diagnosis | None:
    activity, recent = known.activity, known.recent
    if activity is None or recent is None or not recent.redelivered:
        return None
    # A consumer that connects again gets once what it held before.
    prefetched = sum(one.prefetch or (known.length or 0) for one in activity.holders)
    held = max(1, activity.unacknowledged or 0, min(prefetched, known.length or 0))
    for flow in (recent, activity.window):
        if flow and not flow.acknowledged and flow.redelivered > 2 * held:
            return known.found(
                Code.REDELIVERING,
                f"Its messages are delivered again and again: {flow.redelivered:,} redeliveries in the last "
                f"{duration(flow.seconds)}, and no message was acknowledged. The consumers return their messages, or "
                "disconnect, before they acknowledge one.",
            )
    return None


def _held_by_one(known: Situation) -> Diagnosis | None:
    activity, recent = known.activity, known.recent
    active = [one for one in known.holders if one.is_active]
    holding = [one for one in active if one.unacknowledged]
    if len(active) < 2 or len(holding) != 1 or activity is None or activity.ready or recent is None:
        return None
    if any(one.unacknowledged is None for one in active):
        return None
    (holder,) = holding
    held = holder.unacknowledged or 0
    # It received some of them before.
    if held < 2 or recent.delivered >= held:
        return None
    prefetch = f"is {holder.prefetch:,}" if holder.prefetch else "is unlimited"
    others = len(active) - 1
    idle = "the other consumer has" if others == 1 else f"the other {others:,} consumers have"
    return known.found(
        Code.HELD_BY_ONE,
        f"One consumer holds all {held:,} messages, and {idle} none: {_name(holder)}, whose prefetch {prefetch}.",
    )


def _stalled(known: Situation) -> Diagnosis | None:
    since = known.stalled_since
    if since is None or not known.consumers or not known.length or known.now - since < known.stalled_after:
        return None
    if known.recent and known.recent.acknowledged:
        return None
    who = "Its consumer has" if known.consumers == 1 else f"Its {known.consumers:,} consumers have"
    lasted = duration((known.now - since).total_seconds())
    holding = [one for one in known.holders if one.unacknowledged]
    named = [f"{_name(one)} holds {one.unacknowledged:,}" for one in holding[:MAX_NAMED]]
    if len(holding) > MAX_NAMED:
        named.append(f"{len(holding) - MAX_NAMED:,} more hold others")
    listed = f" ({'; '.join(named)})" if named else ""
    delivered = known.recent.delivered - known.recent.redelivered if known.recent else 0
    rejected = (
        f" {counted(delivered, 'message')} were delivered all the same, so they may reject them." if delivered else ""
    )
    return known.found(
        Code.STALLED,
        f"{who} acknowledged nothing for {lasted}: {counted(known.unacknowledged or 0, 'message')} unacknowledged"
        f"{listed}, {known.ready or 0:,} ready.{rejected}",
        since,
    )


def _limited_by_broker(known: Situation) -> Diagnosis | None:
    activity, recent = known.activity, known.recent
    if activity is None or activity.limit is None or recent is None:
        return None
    limit = activity.limit
    limits = [
        counted(most, noun)
        for most, value, noun in ((limit.messages, activity.ready, "message"), (limit.size, activity.size, "byte"))
        if most is not None and value is not None and value >= FULL * most
    ]
    # Rejected messages were delivered.
    lost = recent.published - recent.growth - max(recent.acknowledged, recent.delivered - recent.redelivered)
    if not limits or lost < _significant(recent):
        return None
    does = "drops the oldest" if limit.drops_oldest else "rejects new ones"
    return known.found(
        Code.LIMITED_BY_BROKER,
        f"It has reached the broker's own limit of {' and '.join(limits)}. The broker {does}: about "
        f"{messages_per(recent.rate(lost))}.",
    )


def _consumers_too_slow(known: Situation) -> Diagnosis | None:
    if not known.consumers or not known.recent or not known.recent.acknowledged:
        return None
    flow = _lasting(known, _excess)
    acknowledged, published = _rates(flow or known.recent)
    is_backlog = known.is_over_threshold and (known.length or 0) >= BACKLOG_SECONDS * acknowledged
    if flow is None and (not is_backlog or _lasting(known, _deficit)):
        return None
    whose = "Its consumer acknowledges" if known.consumers == 1 else f"Its {known.consumers:,} consumers acknowledge"
    pace = f"{whose} {messages_per(acknowledged, beside=published)}"
    publishers = f"{messages_per(published, beside=acknowledged)} are published."
    if flow is None:
        waiting = counted(known.length or 0, "message")
        text = f"{pace}, and {publishers} So the {waiting} that wait get hardly fewer."
        return known.found(Code.CONSUMERS_TOO_SLOW, text)
    text = f"{pace}, but {publishers}"
    left = None if known.deletion_limit is None else known.deletion_limit - (known.length or 0)
    if left is not None and left > 0:
        text += f" At this rate it reaches its deletion limit in {duration(left / (published - acknowledged))}."
    if known.holders and all(one.unacknowledged is not None for one in known.holders):
        needed = math.ceil(published / (acknowledged / known.consumers))
        text += f" It needs {counted(needed, 'consumer')} of the same speed."
    return known.found(Code.CONSUMERS_TOO_SLOW, text)


def _draining(known: Situation) -> Diagnosis | None:
    flow = _lasting(known, _deficit)
    if flow is None or not known.length:
        return None
    acknowledged, published = _rates(flow)
    return known.found(
        Code.DRAINING,
        f"It is getting shorter: {messages_per(acknowledged, beside=published)} are acknowledged, "
        f"{messages_per(published, beside=acknowledged)} are published. At this rate it is empty in "
        f"{duration(known.length / (acknowledged - published))}.",
    )


def _undecided(known: Situation) -> Diagnosis | None:
    """Return that the cause is unknown, if messages wait and the figures don't show that they are consumed."""
    if known.length is None:
        return known.found(
            Code.UNKNOWN, "The broker does not report its length. Check that its node runs, and that it responds."
        )
    if not known.consumers or not known.length:
        return None
    if known.recent is None:
        if not known.is_over_threshold:
            return None
        why = (
            "Guardian has no recent figures of what is published and acknowledged. Open the queue's page: it fetches "
            "them, unless the broker keeps none."
        )
    elif known.ready and not known.recent.acknowledged:
        lasted = duration(known.recent.seconds)
        why = f"In the last {lasted} its consumers acknowledged nothing. See their logs for whether they still work."
    else:
        return None
    return known.found(Code.UNKNOWN, f"{_wait(known.length)}, and Guardian can't tell yet why. {why}")


def _healthy(known: Situation) -> Diagnosis:
    length, recent = known.length or 0, known.recent
    if not known.consumers:
        text = "It needs no consumer."
    elif not length:
        text = f"It has {counted(known.consumers, 'consumer')}, and no message waits."
    elif recent and recent.acknowledged:
        text = f"Its consumers keep up: {messages_per(recent.rate(recent.acknowledged))} are acknowledged."
    else:
        text = f"It has {counted(known.consumers, 'consumer')} and {counted(length, 'message')}."
    return known.found(Code.HEALTHY, text if known.is_over_threshold else f"Nothing is wrong. {text}")


RULES: tuple[Callable[[Situation], Diagnosis | None], ...] = (
    _unknown,
    _no_consumer,
    _redelivering,
    _held_by_one,
    _stalled,
    _limited_by_broker,
    _consumers_too_slow,
    _draining,
    _undecided,
    _healthy,
)


def _excess(flow: QueueFlow) -> int:
    """Return by how many messages more were published than acknowledged, as far as they made the queue longer."""
    return min(flow.published - flow.acknowledged, flow.growth)


def _deficit(flow: QueueFlow) -> int:
    return min(flow.acknowledged - flow.published, -flow.growth)


def _lasting(known: Situation, difference: Callable[[QueueFlow], int]) -> QueueFlow | None:
    """Return the flow that shows this difference: the recent one, or the longer one if the recent one agrees."""
    flows = (known.recent, known.activity.window if known.activity else None)
    if flows[0] is None or difference(flows[0]) < 0:
        return None
    return next((flow for flow in flows if flow and difference(flow) >= _significant(flow)), None)


def _significant(flow: QueueFlow) -> float:
    return max(MIN_MESSAGES, MIN_SHARE * max(flow.published, flow.acknowledged))


def _rates(flow: QueueFlow) -> tuple[float, float]:
    """Return the messages acknowledged and published a second."""
    return flow.rate(flow.acknowledged), flow.rate(flow.published)


def _wait(length: int) -> str:
    return f"{counted(length, 'message') if length else 'No message'} wait{'s' if length < 2 else ''}"


def _name(consumer: Any) -> str:
    """Return a consumer's name with its user. Clients choose the name."""
    return f"{readable(consumer.name)} (user {readable(consumer.user)})"
