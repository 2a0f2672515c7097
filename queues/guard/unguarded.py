"""Which queues Guardian can't bound. Operators see them in ``status``, with the policy of the broker that does.

- ``unaddressable``: the broker lists them by a name that no client can use.
- ``streams``: streams that keep all messages. Readers remove nothing from a stream, so it has no length to judge.
- ``exclusive``: queues over their deletion limit that only one connection may delete.
- ``uncounted``: quorum queues that the broker lists without message counts. After ``UNCOUNTED_TIME`` a pass asks for
  their ready messages by passive declare.
"""

from collections.abc import Collection, Mapping
from datetime import datetime, timedelta
from itertools import islice
from typing import Any, NamedTuple

from notifications.enqueue import Notice
from queues.mails import kinds
from queues.models import Watch
from queues.rules.changes import Changes
from queues.rules.rows import Rules
from rabbit import streams
from rabbit.arguments import QUORUM
from rabbit.management import Management
from rabbit.names import QueueName
from rabbit.snapshot import STREAM, Snapshot

NAMES_IN_NOTICE = 20

UNCOUNTED_TIME = timedelta(minutes=2)
"""A new queue, or one whose leader is being elected, has no counts for some seconds."""

MAX_UNCOUNTED = 1000
DECLARE_SECONDS = 2.0
"""Bounds of the passive declares in one pass. 500 take up to 0.26 s; a queue without a leader takes 0.25 s."""


class Unguarded(NamedTuple):
    """The vhosts and names of the queues that Guardian can't bound, by the reason; of some, since when."""

    unaddressable: Collection[QueueName] = ()
    streams: Collection[QueueName] = ()
    exclusive: Collection[QueueName] = ()
    uncounted: Mapping[QueueName, datetime] = {}


def stored(watch: Watch) -> Unguarded:
    """Return the queues that the last passes found."""
    found = dict(watch.unguarded)
    uncounted = {(vhost, name): datetime.fromisoformat(since) for vhost, name, since in found.pop("uncounted", ())}
    named = {reason: [(vhost, name) for vhost, name in keys] for reason, keys in found.items()}
    return Unguarded(**named, uncounted=uncounted)


def uncounted(watch: Watch, listing: Snapshot, rules: Rules, now: datetime) -> dict[QueueName, datetime]:
    """Return the quorum queues that are listed without counts, and since when: the first ``MAX_UNCOUNTED``."""
    before = stored(watch).uncounted
    if listing.lagging:
        return dict(before)
    listed = {(one.vhost, one.name) for one in listing.queues if one.type == QUORUM and one.length is None}
    found = {key for key in listed if not rules.ignores(*key)}
    still = {key: since for key, since in before.items() if key in found}
    new = dict.fromkeys(sorted(found - still.keys()), now)
    return dict(islice((still | new).items(), MAX_UNCOUNTED))


def to_declare(found: Mapping[QueueName, datetime], at: datetime | None) -> list[QueueName]:
    """Return the queues that have been listed without counts for ``UNCOUNTED_TIME`` at this time."""
    return [key for key, since in found.items() if at is not None and at - since >= UNCOUNTED_TIME]


def streams_without_retention(management: Management, listing: Snapshot, rules: Rules) -> list[QueueName]:
    """Return the listed streams that keep all messages, without the ignored ones."""
    listed = {(queue.vhost, queue.name) for queue in listing.queues if queue.type == STREAM}
    return streams.without_retention(management, {key for key in listed if not rules.ignores(*key)})


def after_pass(
    watch: Watch, changes: Changes, unlimited_streams: list[QueueName] | None, *, lagging: bool
) -> dict[str, Any]:
    """Return the column of the watch to update after a pass.

    ``unlimited_streams`` None: this pass did not look for them. ``lagging``: it used the figures of the nodes, which
    show no unaddressable queue.
    """
    before = stored(watch)
    after = Unguarded(
        before.unaddressable if lagging else changes.unaddressable,
        before.streams if unlimited_streams is None else unlimited_streams,
        changes.long_exclusive,
    )
    found = after._asdict() | {"uncounted": [(*key, since.isoformat()) for key, since in changes.uncounted.items()]}
    return {"unguarded": {reason: queues for reason, queues in found.items() if queues}}


def notices(watch: Watch, changes: Changes, now: datetime) -> list[Notice]:
    """Return the notices for operators about the first queues without a usable name, and without message counts."""
    before = stored(watch)
    without_counts = to_declare(changes.uncounted, now)
    first = {
        kinds.UNADDRESSABLE: [] if before.unaddressable else changes.unaddressable,
        kinds.UNCOUNTED: [] if to_declare(before.uncounted, watch.listed_at) else without_counts,
    }
    return [Notice(kind, _named(queues)) for kind, queues in first.items() if queues]


def _named(queues: list[QueueName]) -> dict[str, Any]:
    shown = [{"vhost": vhost, "queue": name} for vhost, name in queues[:NAMES_IN_NOTICE]]
    return {"count": len(queues), "shown": shown, "more": len(queues) - len(shown)}
