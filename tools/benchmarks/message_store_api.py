"""The message store's API under gunicorn: posts and reads of single messages by one and by concurrent clients."""

from statistics import quantiles
from typing import Any

from tools.benchmarks.figures import Figure
from tools.benchmarks.services import Services

CLIENTS = (1, 8, 32)
REQUESTS = 500
ROUNDS = 3


def measure(services: Services) -> list[Figure]:
    """Run the benchmark on each database. The floor is an empty view of the same server, requested in the same way."""
    figures: list[Figure] = []
    for database in services.databases:
        services.say(f"posting and reading single messages over HTTP on {database}, with up to {CLIENTS[-1]} clients")
        measured = services.measure(
            "tools.benchmarks.message_store_api_child", database, "/", clients=CLIENTS, requests=REQUESTS, rounds=ROUNDS
        )
        for clients in CLIENTS:
            where = f"single messages over HTTP, {clients} {'client' if clients == 1 else 'clients'}, {database}"
            figures += [
                one for what in ("posts", "reads") for one in _figures(where, what, measured[f"{what} {clients}"])
            ]
    return figures


def _figures(where: str, what: str, measured: dict[str, list[dict[str, Any]]]) -> list[Figure]:
    done, empty = measured["done"], measured["empty"]
    return [
        Figure(where, f"{what} a second", "", [_a_second(one) for one in done], [_a_second(one) for one in empty]),
        Figure(where, f"{what}, 99 of 100 within", "ms", [_p99(one) for one in done], [_p99(one) for one in empty]),
    ]


def _a_second(measured: dict[str, Any]) -> float:
    return float(len(measured["milliseconds"]) / measured["seconds"])


def _p99(measured: dict[str, Any]) -> float:
    return float(quantiles(measured["milliseconds"], n=100)[98])
