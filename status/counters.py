"""Counters of processes for /metrics: requests to the broker and to the API, deleted queues, failed passes.

This is prometheus-client's multiprocess mode. Each process counts in its own files in ``GUARDIAN_VAR_DIR/metrics``. A
scrape adds up all files, including those of ended processes, so the counters are those of one machine, or of all
machines that share the folder. Metrics from the database are in ``metrics.py``.

All metrics here are counters or histograms. A gauge would need a ``multiprocess_mode`` and ``mark_process_dead``.

An error in counting never fails the counted action.
"""

import fcntl
import functools
import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ParamSpec, TextIO

from django.conf import settings
from django.http import HttpRequest, HttpResponse

from core.middleware import Middleware
from rabbit.requests.sending import Call

FOLDER = Path(settings.VAR_DIR) / "metrics"
os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(FOLDER)  # prometheus_client reads this on import

from prometheus_client import Counter, Histogram, Metric, values  # noqa: E402
from prometheus_client.multiprocess import MultiProcessCollector  # noqa: E402

logger = logging.getLogger(__name__)

FILE_BYTES = 64 * 1024
"""The size of a new file. prometheus-client's default has room for several times our counters."""

HOST = socket.gethostname()
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
DELETED_BY = ("pass", "orphans", "stale")
FAILURE_REASONS = ("away", "errors")

P = ParamSpec("P")


def _process() -> str:
    """Return the name of this process's files. Containers may share process ids, but not host names."""
    return f"{HOST}-{os.getpid()}"


values.ValueClass = values.MultiProcessValue(_process)  # type: ignore[no-untyped-call]

CALLS = Counter(
    "guardian_broker_calls", "Requests to the broker's management API, by method and outcome.", ("method", "outcome")
)
CALL_SECONDS = Histogram(
    "guardian_broker_call_seconds",
    "Duration of requests to the broker's management API.",
    ("method",),
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 60),
)
REQUESTS = Counter(
    "guardian_api_requests", "Requests to Guardian's REST API, by method and class of status.", ("method", "status")
)
REQUEST_SECONDS = Histogram("guardian_api_request_seconds", "Duration of requests to Guardian's REST API.", ("method",))
DELETED = Counter(
    "guardian_queues_deleted",
    "Queues that Guardian deleted automatically: in a pass, a sweep of orphans, or a clean-up of stale subscriptions.",
    ("by",),
)
FAILED = Counter(
    "guardian_passes_failed",
    "Passes that could not reach the broker (away), and passes with other errors (errors).",
    ("why",),
)


def _never_raises(count: Callable[P, None]) -> Callable[P, None]:
    """Prepare this process's files before a function counts, and log errors instead of raising them."""

    @functools.wraps(count)
    def counting(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            _prepare_files(_process())
            count(*args, **kwargs)
        except Exception as error:  # such as a full disk, or a folder that can't be written
            _log_once(f"{type(error).__name__}: {error}")

    return counting


@functools.lru_cache(maxsize=10)
def _log_once(error: str) -> None:
    logger.warning("The counters for /metrics can't be written to %s (%s).", FOLDER, error)


@_never_raises
def count_call(call: Call) -> None:
    """Count a request to the broker's management API. It is one of ``core.broker.listeners``."""
    CALLS.labels(call.method, call.outcome).inc()
    CALL_SECONDS.labels(call.method).observe(call.seconds)


@_never_raises
def count_pass(instance: Any, created: bool, **_: Any) -> None:
    if created and instance.errors:
        # Without a list of queues, its duration is 0.
        FAILED.labels("errors" if instance.listing_seconds else "away").inc()


@_never_raises
def count_deletions(number: int, **_: Any) -> None:
    DELETED.labels("pass").inc(number)


@_never_raises
def count_sweep(instance: Any, created: bool, **_: Any) -> None:
    if created:
        DELETED.labels(instance.kind).inc(instance.deleted)


@_never_raises
def _count_request(method: str, status: int, seconds: float) -> None:
    method = method if method in METHODS else "other"
    REQUESTS.labels(method, f"{status // 100}xx").inc()
    REQUEST_SECONDS.labels(method).observe(seconds)


class CountRequests(Middleware):
    """The middleware that counts requests to the REST API."""

    def __call__(self, request: HttpRequest) -> HttpResponse:
        began = time.perf_counter()
        response = self.get_response(request)
        if request.path.startswith("/api/"):
            _count_request(request.method or "", response.status_code, time.perf_counter() - began)
        return response


def collect() -> list[Metric]:
    """Return the counters of all processes that use this folder, including ended ones."""
    _create_labels()
    return list(MultiProcessCollector(None, str(FOLDER)).collect())  # type: ignore[no-untyped-call]


@_never_raises
def _create_labels() -> None:
    """Create rare counters with 0. Prometheus sees no increase if a counter appears with 1."""
    for by in DELETED_BY:
        DELETED.labels(by)
    for why in FAILURE_REASONS:
        FAILED.labels(why)


@functools.cache
def _prepare_files(process: str) -> TextIO:
    """Create this process's files, and return the lock file, which stays open while the process runs.

    A process that starts while no other runs empties the folder, as prometheus-client requires.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    lock = (FOLDER / "lock").open("w")
    with suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for path in FOLDER.glob("*_*"):
            path.unlink()
    fcntl.flock(lock, fcntl.LOCK_SH)
    for kind in ("counter", "histogram"):
        _allocate(FOLDER / f"{kind}_{process}.db")
    return lock


def _allocate(path: Path) -> None:
    """Create a file with all its disk space. On a full disk, writing to a hole of a mapped file kills the process."""
    if not path.exists():
        new = path.with_suffix(".new")
        new.write_bytes(bytes(FILE_BYTES))
        new.rename(path)
