"""Resource alarms and lost nodes: operators are notified once at the start and once at the end of each."""

from datetime import datetime
from typing import Any

from notifications.enqueue import Notice
from queues import kinds
from rabbit.snapshot import Snapshot

NODE = "node"
"""Stands for a lost node, in place of the resource of an alarm."""

Alarms = list[list[str]]
"""Raised alarms and lost nodes, as ``queues.models.Watch.alarms`` stores them: resource, node, and since when."""


def after(earlier: Alarms | None, listing: Snapshot, now: datetime) -> Alarms:
    """Return the alarms of this snapshot."""
    since = {(resource, node): at for resource, node, at in earlier or ()}
    return [[*alarm, since.get(alarm, now.isoformat())] for alarm in sorted(_raised(listing))]


def notices(earlier: Alarms | None, listing: Snapshot, now: datetime) -> list[Notice]:
    """Return a notice of each alarm that this snapshot starts or ends."""
    since = {(resource, node): datetime.fromisoformat(at) for resource, node, at in earlier or ()}
    raised = _raised(listing)
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


def _raised(listing: Snapshot) -> set[tuple[str, str]]:
    return {*listing.alarms, *((NODE, node) for node in listing.down)}


def _facts(resource: str, node: str, listing: Snapshot) -> dict[str, Any]:
    """Return the facts of a notice. ``others`` are the nodes that run besides this one."""
    return {
        "resource": resource,
        "node": node,
        "running": node in listing.nodes,
        "others": sorted(listing.nodes - {node}),
    }
