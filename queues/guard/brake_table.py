"""The table by which operators decide about queues to delete: on the brake's page, and in a dry run."""

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from accounts.models import Owner, PulseUser
from queues.guard.facts import Facts
from queues.models import Queue
from queues.rules import growth, thresholds
from queues.rules.changes import Deletable
from queues.rules.listing import whose, with_first_sample
from rabbit.names import QueueName


class Line(NamedTuple):
    """A queue to delete. ``length`` and ``limit`` are messages, ``per_second`` its growth; None: unknown.

    ``reason`` is why its deletion is blocked, one of ``Queue.BlockReason``; empty: it is not. ``diagnosis`` is why it
    grew, if a pass says it.
    """

    vhost: str
    queue: str
    owner: str
    length: int | None
    limit: int
    per_second: float | None
    consumers: int | None
    reason: str
    diagnosis: dict[str, Any] | None = None

    @property
    def key(self) -> QueueName:
        """The vhost and the name."""
        return self.vhost, self.queue


class Totals(NamedTuple):
    """The totals of a table. Unknown figures are left out; None: all are unknown."""

    queues: int
    messages: int | None
    per_second: float | None
    consumers: int | None


ORDERS: dict[str, Callable[[Line], Any]] = {
    "queue": lambda line: (line.queue, line.vhost),
    "owner": lambda line: line.owner,
    "length": lambda line: line.length,
    "limit": lambda line: line.limit,
    "rate": lambda line: line.per_second,
    "consumers": lambda line: line.consumers,
}
"""What each order of a table compares."""

LONGEST_FIRST = "-length"


def in_order(lines: Iterable[Line], order: str) -> list[Line]:
    """Return the lines in one of ``ORDERS``; a minus sign in front reverses it. Unknown figures come last."""
    value = ORDERS[order.removeprefix("-")]
    by_name = sorted(lines, key=ORDERS["queue"])
    known = sorted((line for line in by_name if value(line) is not None), key=value, reverse=order.startswith("-"))
    return known + [line for line in by_name if value(line) is None]


def totals(lines: Sequence[Line]) -> Totals:
    """Return the totals of these lines."""

    def total(figures: Iterable[float | None]) -> Any:
        known = [figure for figure in figures if figure is not None]
        return sum(known) if known else None

    return Totals(
        len(lines),
        total(line.length for line in lines),
        total(line.per_second for line in lines),
        total(line.consumers for line in lines),
    )


def blocked_lines(now: datetime) -> list[Line]:
    """Return the blocked queues with their stored figures, in one statement."""
    rows = Queue.objects.blocked().select_related("pulse_user", "owner")
    return [_stored_line(queue, now) for queue in with_first_sample(rows, now)]


def _stored_line(queue: Any, now: datetime) -> Line:
    limit = thresholds.of_queue(queue).max
    grows = None
    if queue.length is not None and queue.first_at is not None:
        grows = growth.growth([(queue.first_at, queue.first_length), (now, queue.length)], limit)
    return Line(
        vhost=queue.vhost,
        queue=queue.name,
        owner=whose(queue.pulse_user, queue.owner),
        length=queue.length,
        limit=limit,
        per_second=grows.per_second if grows else None,
        consumers=queue.consumers,
        reason=queue.block_reason,
    )


def lines_of_pass(deletable: Sequence[Deletable], facts: Facts) -> list[Line]:
    """Return the queues that a pass would delete or blocks. ``facts`` covers them."""
    pulse_users = PulseUser.objects.in_bulk({one.queue.pulse_user_id for one in deletable} - {None})
    owners = Owner.objects.in_bulk({one.queue.owner_id for one in deletable} - {None})
    lines = []
    for one in deletable:
        figures = facts.of(one.queue, one.thresholds)
        lines.append(
            Line(
                vhost=one.queue.vhost,
                queue=one.queue.name,
                owner=whose(pulse_users.get(one.queue.pulse_user_id), owners.get(one.queue.owner_id)),
                length=one.queue.length,
                limit=one.thresholds.max,
                per_second=figures["per_second"],
                consumers=figures["consumers"],
                reason=one.queue.block_reason,
                diagnosis=figures["diagnosis"],
            )
        )
    return lines
