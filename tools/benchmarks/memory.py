"""Peak memory of a process that runs passes over 10,000 and 50,000 queues."""

from tools.benchmarks.figures import Figure
from tools.benchmarks.growth import grow
from tools.benchmarks.services import Services

MAX_MEGABYTES = {10_000: 200, 50_000: 500}


def measure(services: Services) -> list[Figure]:
    """Run the benchmark on each database, also without a pass: with Django and Guardian loaded."""
    figures: list[Figure] = []
    for database in services.databases:
        idle = services.measure("tools.benchmarks.memory_child", database, "/")["peak_mb"]
        figures.append(Figure(database, "without a pass", "MB", [idle]))
        for queues, most in MAX_MEGABYTES.items():
            peak = grow(services).passes[queues, database]["peak_mb"]
            figures.append(Figure(database, f"{queues:,} queues", "MB", [peak], limit=most))
    return figures
