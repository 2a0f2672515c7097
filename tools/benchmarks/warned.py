"""The time from 500 queues passing their warning threshold to the mails accepted by the mail server."""

from statistics import median, quantiles
from typing import Any

from tools.benchmarks.figures import Figure
from tools.benchmarks.load import filled_vhost
from tools.benchmarks.services import Services
from tools.processes import free_port
from tools.redis import PrivateRedis

QUEUES = 10_000
WARNED = 500
ROUNDS = 18

POLL_SECONDS = 5
MAX_SECONDS = POLL_SECONDS + 2
"""For the 99th percentile of all rounds. They begin at all points of the poll interval, so the next pass is up to one
interval away."""


def measure(services: Services) -> list[Figure]:
    """Run the benchmark on each database, with production's processes and task queue.

    The floor of the time from the first to the last mail is that of as many mails over as many bare connections. The
    floor of a mail's time beyond the poll interval is the list plus these. If it is close to two seconds, the machine
    is too slow for the target, which is in seconds.
    """
    figures: list[Figure] = []
    with PrivateRedis() as redis, filled_vhost(services, QUEUES) as vhost:
        for database in services.databases:
            services.say(f"mails about {WARNED} of {QUEUES:,} queues on {database}")
            port = free_port()
            settings = {
                "GUARDIAN_WARN_QUEUE_LENGTH": "2",
                "GUARDIAN_QUIET_SECONDS": "0",
                "GUARDIAN_POLL_SECONDS": str(POLL_SECONDS),
                "CELERY_BROKER_URL": redis.url,
                "EMAIL_URL": f"smtp://127.0.0.1:{port}",
            }
            told = {"queues": QUEUES, "warned": WARNED, "rounds": ROUNDS, "poll_seconds": POLL_SECONDS, "port": port}
            measured = services.measure("tools.benchmarks.warned_child", database, vhost, settings=settings, **told)
            figures += _figures(f"{WARNED} of {QUEUES:,} queues, {database}", measured)
    return figures


def _figures(where: str, measured: dict[str, Any]) -> list[Figure]:
    delays: list[list[float]] = measured["delays"]
    highest = _99th([delay for one in delays for delay in one])
    floor = median(measured["listing"]) + median(measured["bare"])
    return [
        Figure(where, "to the mail, 99th percentile", "s", [highest], (), MAX_SECONDS),
        Figure(where, "of it, beyond the poll interval", "s", [highest - POLL_SECONDS], [floor]),
        Figure(where, "to the mail, 99th percentile of each pass", "s", [_99th(one) for one in delays]),
        Figure(where, "to the mail, median", "s", [median(one) for one in delays]),
        Figure(where, "from the first mail to the last", "s", measured["mails"], measured["bare"]),
    ]


def _99th(delays: list[float]) -> float:
    return quantiles(delays, n=100)[-1]
