"""Nodes whose quorum queues may look shorter than they are, because they have new leaders.

A quorum queue's leader recovers its messages from a log after it has started. Until then lists and passive declares
report too few, without a sign. So a shorter length is unknown for a while after a node came back. When a node is lost,
the others elect new leaders.
"""

from collections.abc import Collection, Mapping
from datetime import datetime, timedelta

from rabbit.snapshot import Snapshot

RECOVERY_TIME = timedelta(seconds=15)
"""Leaders recover within seconds, and RabbitMQ lists their length as of a tick, which is at most 5 s ago."""


def after(
    earlier: Mapping[str, str] | None, nodes: Collection[str], listing: Snapshot, now: datetime, *, was_outage: bool
) -> dict[str, str]:
    """Return the nodes that are recovering after this list, and since when, as ``queues.models.Watch`` stores them.

    ``earlier`` are those after the last list, and ``nodes`` those that ran then. After an outage of the broker
    (``was_outage``), or if nodes started or stopped during the list, any node may have been restarted. A node whose
    quorum queues come back later than itself recovers again: ``Changes.returned_nodes``.
    """
    was_lost = not listing.nodes.issuperset(nodes)
    if was_outage or was_lost or not listing.nodes_unchanged:
        returned = listing.nodes
    else:
        returned = listing.nodes.difference(nodes) if nodes else frozenset()
    still = {
        node: since
        for node, since in (earlier or {}).items()
        if node in listing.nodes and timedelta(0) <= now - datetime.fromisoformat(since) < RECOVERY_TIME
    }
    return still | dict.fromkeys(returned, now.isoformat())
