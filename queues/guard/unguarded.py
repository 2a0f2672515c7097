"""Which queues Guardian can't bound. Operators see them in ``status``, with the policy of the broker that does.

- ``unaddressable``: the broker lists them by a name that no client can use.
- ``streams``: streams that keep all messages. Readers remove nothing from a stream, so it has no length to judge.
- ``exclusive``: queues over their deletion limit that only one connection may delete.
"""

from collections.abc import Collection
from typing import Any, NamedTuple

from notifications.enqueue import Notice
from queues.mails import kinds
from queues.models import Watch
from queues.rules.changes import Changes
from queues.rules.rows import Rules
from rabbit import streams
from rabbit.management import Management
from rabbit.names import QueueName
from rabbit.snapshot import STREAM, Snapshot

NAMES_IN_NOTICE = 20


class Unguarded(NamedTuple):
    """The vhosts and names of the queues that Guardian can't bound, by the reason."""

    unaddressable: Collection[QueueName] = ()
    streams: Collection[QueueName] = ()
    exclusive: Collection[QueueName] = ()


def stored(watch: Watch) -> Unguarded:
    """Return the queues that the last passes found."""
    return Unguarded(**{reason: [(vhost, name) for vhost, name in keys] for reason, keys in watch.unguarded.items()})


def streams_without_retention(management: Management, listing: Snapshot, rules: Rules) -> list[QueueName]:
    """Return the listed streams that keep all messages, without the ignored ones.

    Raises:
        BrokerError: the broker is unreachable or refuses.
    """
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
    return {"unguarded": after._asdict()}


def notices(watch: Watch, changes: Changes) -> list[Notice]:
    """Return the notice for operators about the first unaddressable queues."""
    queues = changes.unaddressable
    if not queues or stored(watch).unaddressable:
        return []
    shown = [{"vhost": vhost, "queue": name} for vhost, name in queues[:NAMES_IN_NOTICE]]
    return [Notice(kinds.UNADDRESSABLE, {"count": len(queues), "shown": shown, "more": len(queues) - len(shown)})]
