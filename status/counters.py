"""What processes count for /metrics: calls to the broker, requests, deleted queues, failed passes.

This is prometheus-client's multiprocess mode. Web processes, workers and commands each count in files of their own in
``GUARDIAN_VAR_DIR/metrics``, and a scrape adds up all files, those of processes that have ended too. So they are the
figures of one machine, or of all that share that folder. What the database knows is the same everywhere, and is in
``metrics.py``.

All figures are counters or histograms. A gauge would need a ``multiprocess_mode``, and `mark_process_dead`.

An error in counting never fails what is counted.
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
from django.http import HttpRequest
from django.http.response import HttpResponseBase

from rabbit.management import Call

FOLDER = Path(settings.VAR_DIR) / "metrics"
os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(FOLDER)  # which is read when prometheus_client is imported

from prometheus_client import Counter, Histogram, Metric, values  # noqa: E402
from prometheus_client.multiprocess import MultiProcessCollector  # noqa: E402

logger = logging.getLogger(__name__)

FILE_BYTES = 64 * 1024
"""The size of a new file: prometheus-client's, and room for several times the figures there are."""

HOST = socket.gethostname()
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
DELETED_BY = ("pass", "orphans", "stale")
WHY_FAILED = ("away", "errors")

P = ParamSpec("P")


def _process() -> str:
    """Return what the files of this process are named after: containers share process ids, but not their host names."""
    return f"{HOST}-{os.getpid()}"


values.ValueClass = values.MultiProcessValue(_process)  # type: ignore[no-untyped-call]

CALLS = Counter(
    "guardian_broker_calls", "Requests to the broker's management API, by method and outcome.", ("method", "outcome")
)
CALL_SECONDS = Histogram(
    "guardian_broker_call_seconds",
    "How long requests to the broker's management API took.",
    ("method",),
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 60),
)
REQUESTS = Counter(
    "guardian_api_requests", "Requests to Guardian's own REST API, by method and class of status.", ("method", "status")
)
REQUEST_SECONDS = Histogram(
    "guardian_api_request_seconds", "How long requests to Guardian's own REST API took.", ("method",)
)
DELETED = Counter(
    "guardian_queues_deleted",
    "Queues that Guardian deleted by itself: in a pass, in a sweep of orphans, in the clean-up of stale subscriptions.",
    ("by",),
)
FAILED = Counter(
    "guardian_passes_failed",
    "Passes that could not ask the broker (away), and those that did not succeed in everything (errors).",
    ("why",),
)


def _harmless(count: Callable[P, None]) -> Callable[P, None]:
    """Have this counted into files of this process, and let nothing out that goes wrong with them."""

    @functools.wraps(count)
    def counting(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            _prepare_files(_process())
            count(*args, **kwargs)
        except Exception as error:  # a full disk, a folder that can't be written
            _say_once(f"{type(error).__name__}: {error}")

    return counting


@functools.lru_cache(maxsize=10)
def _say_once(error: str) -> None:
    logger.warning("Figures for /metrics can't be counted in %s (%s).", FOLDER, error)


@_harmless
def count_call(call: Call) -> None:
    """Count a call to the broker's management API. It is one of ``core.broker.listeners``."""
    CALLS.labels(call.method, call.outcome).inc()
    CALL_SECONDS.labels(call.method).observe(call.seconds)


@_harmless
def count_pass(instance: Any, created: bool, **_: Any) -> None:
    """Count what a pass did, when its report becomes a row."""
    if created:
        DELETED.labels("pass").inc(instance.deleted)
        if instance.errors:
            # A list that could not be taken took no time.
            FAILED.labels("errors" if instance.listing_seconds else "away").inc()


@_harmless
def count_sweep(instance: Any, created: bool, **_: Any) -> None:
    """Count what a sweep or a clean-up did, when its report becomes a row."""
    if created:
        DELETED.labels(instance.kind).inc(instance.deleted)


@_harmless
def _count_request(method: str, status: int, seconds: float) -> None:
    method = method if method in METHODS else "other"
    REQUESTS.labels(method, f"{status // 100}xx").inc()
    REQUEST_SECONDS.labels(method).observe(seconds)


class CountRequests:
    """The middleware that counts requests to the REST API."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        """Answer as whatever comes after this does."""
        began = time.perf_counter()
        response = self.get_response(request)
        if request.path.startswith("/api/"):
            _count_request(request.method or "", response.status_code, time.perf_counter() - began)
        return response


def collect() -> list[Metric]:
    """Return what all processes counted that use this folder, those that have ended too.

    Raises:
        Exception: the folder can't be read, or a file in it is damaged; of any kind.
    """
    _begin_at_zero()
    return list(MultiProcessCollector(None, str(FOLDER)).collect())  # type: ignore[no-untyped-call]


@_harmless
def _begin_at_zero() -> None:
    """Make what is seldom counted be there before it is: of a figure that appears as 1 nobody sees that it grew."""
    for by in DELETED_BY:
        DELETED.labels(by)
    for why in WHY_FAILED:
        FAILED.labels(why)


@functools.cache
def _prepare_files(process: str) -> TextIO:
    """Create the files of this process, and return the open lock file that says that it runs.

    The first process that starts while no other runs empties the folder, as prometheus-client requires.
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
    """Create a file with all its disk space: to write into a hole of a mapped file ends the process on a full disk."""
    if not path.exists():
        new = path.with_suffix(".new")
        new.write_bytes(bytes(FILE_BYTES))
        new.rename(path)
