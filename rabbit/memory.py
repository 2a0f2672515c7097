"""How much memory the nodes use, and the queues hold.

A queue's messages are in memory only in part: those of lazy queues and of quorum queues are on disk, and since RabbitMQ
4 nearly all others, too. Deleting these frees next to nothing, whatever their size.
"""

from collections.abc import Sequence
from typing import NamedTuple

from rabbit.management import Management
from rabbit.names import QueueName

COLUMNS = "name,vhost,memory,message_bytes_ram"


class NodeMemory(NamedTuple):
    """The memory of a running node in bytes: used, and the watermark of its alarm."""

    used: int
    watermark: int

    @property
    def share(self) -> float:
        return self.used / self.watermark


def of_nodes(management: Management) -> dict[str, NodeMemory]:
    """Return the memory of the running nodes that report it."""
    return {
        node.name: NodeMemory(node.mem_used, node.mem_limit)
        for node in management.nodes()
        if node.running and node.mem_used is not None and node.mem_limit
    }


def of_queues(management: Management, vhosts: Sequence[str] | None) -> dict[QueueName, int]:
    """Return the bytes of memory that each queue's process and its messages hold. They lag by 5 s or more.

    It takes one request, which costs the broker the statistics of all queues: in one vhost, or in all of them.
    """
    vhost = vhosts[0] if vhosts is not None and len(vhosts) == 1 else None
    rows = management.list_queues(vhost, {"columns": COLUMNS})
    return {
        (row["vhost"], row["name"]): _bytes(row.get("memory")) + _bytes(row.get("message_bytes_ram")) for row in rows
    }


def _bytes(value: object) -> int:
    return value if isinstance(value, int) and value >= 0 else 0
