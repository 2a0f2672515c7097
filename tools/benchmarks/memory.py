"""The most memory that a process has while it runs passes, at 10,000 and at 50,000 queues."""

from tools.benchmarks.figures import Figure
from tools.benchmarks.growth import grow
from tools.benchmarks.services import Services

MAX_MEGABYTES = {10_000: 200, 50_000: 500}


def measure(services: Services) -> list[Figure]:
    """Measure it on each database, and what the process has without a pass: Django and Guardian loaded."""
    figures: list[Figure] = []
    for database in services.databases:
        idle = services.measure("tools.benchmarks.memory_child", database, "/")["peak_mb"]
        figures.append(Figure(database, "without a pass", "MB", [idle]))
        for queues, most in MAX_MEGABYTES.items():
            peak = grow(services).passes[queues, database]["peak_mb"]
            figures.append(Figure(database, f"{queues:,} queues", "MB", [peak], limit=most))
    return figures
