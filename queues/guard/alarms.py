"""Resource alarms and lost nodes: operators are notified once at the start and once at the end of each."""

from collections.abc import Collection
from datetime import datetime, timedelta
from typing import Any

from notifications.enqueue import Notice
from queues.mails import kinds
from rabbit.snapshot import Snapshot

NODE = "node"
"""Stands for a lost node, in place of the resource of an alarm."""

Alarms = list[list[str]]
"""Raised alarms and lost nodes, as ``queues.models.Watch.alarms`` stores them: resource, node, and since when."""


def after(earlier: Alarms | None, listing: Snapshot, now: datetime) -> Alarms:
    """Return the alarms of this snapshot."""
    since = {(resource, node): at for resource, node, at in earlier or ()}
    return [[*alarm, since.get(alarm, now.isoformat())] for alarm in sorted(_raised(earlier, listing))]


def notices(earlier: Alarms | None, listing: Snapshot, now: datetime) -> list[Notice]:
    """Return a notice of each alarm that this snapshot starts or ends."""
    since = {(resource, node): datetime.fromisoformat(at) for resource, node, at in earlier or ()}
    raised = _raised(earlier, listing)
    started = [
        Notice(kinds.NODE_LOST if resource == NODE else kinds.ALARM, _facts(resource, node, listing))
        for resource, node in sorted(raised - since.keys())
    ]
    ended = [
        Notice(
            kinds.NODE_BACK if resource == NODE else kinds.ALARM_OVER,
            {**_facts(resource, node, listing), "seconds": (now - since[resource, node]).total_seconds()},
        )
        for resource, node in sorted(since.keys() - raised)
    ]
    return started + ended


EXPLAINS_OUTAGE = timedelta(minutes=3)
"""For this long after a node stopped responding, it explains why lists hang. RabbitMQ drops it after a minute or so."""


def with_frozen(earlier: Alarms | None, frozen: Collection[str], now: datetime) -> Alarms:
    """Return the alarms after a pass that found these nodes frozen."""
    new = [[NODE, node, now.isoformat()] for node in set(frozen) - _lost(earlier)]
    return sorted([*(earlier or ()), *new])


def frozen_notices(earlier: Alarms | None, frozen: Collection[str], nodes: Collection[str]) -> list[Notice]:
    """Return a notice of each of these frozen nodes that was not lost before. ``nodes`` are all that ran before."""
    facts = {"resource": NODE, "running": True, "others": sorted(set(nodes) - set(frozen)), "is_frozen": True}
    return [Notice(kinds.NODE_LOST, facts | {"node": node}) for node in sorted(set(frozen) - _lost(earlier))]


def explain_hanging(alarms: Alarms, now: datetime) -> bool:
    """Return whether a node that was lost a moment ago explains that lists hang, so that no outage is reported."""
    return any(
        resource == NODE and now - datetime.fromisoformat(since) < EXPLAINS_OUTAGE for resource, _, since in alarms
    )


def _raised(earlier: Alarms | None, listing: Snapshot) -> set[tuple[str, str]]:
    lost = set(listing.down)
    if not listing.nodes_unchanged:
        # A frozen node is listed as running until RabbitMQ drops it, which may be during this list.
        lost |= _lost(earlier)
    return {*listing.alarms, *((NODE, node) for node in lost)}


def _lost(alarms: Alarms | None) -> set[str]:
    return {node for resource, node, _ in alarms or () if resource == NODE}


def _facts(resource: str, node: str, listing: Snapshot) -> dict[str, Any]:
    """Return the facts of a notice. ``others`` are the nodes that run besides this one."""
    return {
        "resource": resource,
        "node": node,
        "running": node in listing.nodes,
        "others": sorted(listing.nodes - {node}),
    }
