"""Nothing but Django and Guardian, loaded as for a pass. Runs in ``tools.benchmarks.child``."""

from typing import Any

from queues import monitor


def measure(vhost: str) -> dict[str, Any]:
    """Do nothing; the peak memory is added to this."""
    return {"due": monitor.is_due()}
