"""Load Django and Guardian as for a pass. Runs in ``tools.benchmarks.child``."""

from typing import Any

from queues.guard import monitor


def measure(vhost: str) -> dict[str, Any]:
    """Do nothing. The caller adds the peak memory."""
    return {"due": monitor.is_due()}
