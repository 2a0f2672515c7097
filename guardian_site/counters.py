"""What processes count for /metrics: calls to the broker, requests, deleted queues, failed passes.

Web processes, workers and commands each count for themselves, in files of their own under ``GUARDIAN_VAR_DIR/metrics``;
whoever is scraped adds all of them up. So they are the figures of one machine, or of all that share that folder. What
the database knows is the same everywhere, and is in ``metrics.py``.

Nothing that is counted may fail because of the counting.
"""

import fcntl
import functools
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ParamSpec, TextIO

from django.conf import settings
from django.http import HttpRequest
from django.http.response import HttpResponseBase

from rabbit.management import Call

FOLDER = Path(settings.VAR_DIR) / "metrics"
os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(FOLDER)  # which is read when prometheus_client is imported

from prometheus_client import Counter, Histogram, Metric, values  # noqa: E402
from prometheus_client.mmap_dict import MmapedDict  # noqa: E402
from prometheus_client.multiprocess import MultiProcessCollector  # noqa: E402

logger = logging.getLogger(__name__)

BYTES = 64 * 1024
"""The size of a file: room for several times the figures there are."""

KINDS = ("counter", "histogram")
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
DELETED_BY = ("pass", "orphans", "stale")
WHY_FAILED = ("away", "errors")

P = ParamSpec("P")


class _Process:
    """The files of this process: their name, which no other ever has, and the lock that says that it lives."""

    def __init__(self) -> None:
        self.id = os.getpid()
        self.name = uuid.uuid4().hex
        self.alive: TextIO | None = None
        self.opening = threading.Lock()  # here, since a fork copies a lock that another thread holds for ever

    def has_files(self) -> bool:
        """Return whether its files are made, and still there."""
        # Asked each time that something is counted, and a Path takes its time to be made.
        return self.alive is not None and os.path.exists(self.alive.name)  # noqa: PTH110


_process = _Process()


def _name() -> str:
    """Return the name that the files of this process have; a forked one has its own."""
    global _process
    if _process.id != os.getpid():
        _process = _Process()
    return _process.name


# By process ids, which containers that share the folder have in common, two would write into one file.
values.ValueClass = values.MultiProcessValue(_name)  # type: ignore[no-untyped-call]

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
            _open_files()
            count(*args, **kwargs)
        except Exception as error:  # a full disk, a folder that can't be written, a file that somebody removed
            _say_once(f"{type(error).__name__}: {error}")

    return counting


@functools.lru_cache(maxsize=10)
def _say_once(error: str) -> None:
    logger.warning("Figures for /metrics can't be counted in %s (%s).", FOLDER, error)


@_harmless
def count_call(call: Call) -> None:
    """Count a call to the broker's management API. It is one of ``rabbit.connections.listeners``."""
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
        OSError: the folder can't be read.
    """
    _begin_at_zero()
    with _folder_locked():
        _clear_up()
        files = [str(path) for path in FOLDER.glob("*.db") if _read(path) is not None]
        return list(MultiProcessCollector.merge(files))  # type: ignore[no-untyped-call]


@_harmless
def _begin_at_zero() -> None:
    """Make what is seldom counted be there before it is: of a figure that appears as 1 nobody sees that it grew."""
    for by in DELETED_BY:
        DELETED.labels(by)
    for why in WHY_FAILED:
        FAILED.labels(why)


def _open_files() -> None:
    """Make the files of this process where it has none yet, or somebody has removed them.

    They are written whole: they are mapped into memory, and where the disk is full, filling a hole in one of them would
    end the process.
    """
    global _process
    _name()
    process = _process
    if process.has_files():
        return
    with process.opening:
        if process is not _process or process.has_files():
            return  # another thread made them
        # Under a name of its own: what is mapped into memory under the old one is of the files that are gone.
        opened = process if process.alive is None else _Process()
        with _folder_locked():
            _clear_up()
            for kind in KINDS:
                _write_whole(_figures(kind, opened.name))
            alive = (FOLDER / f"{opened.name}.alive").open("w")
            fcntl.flock(alive, fcntl.LOCK_EX)  # until the process ends, however it does
        opened.alive = alive
        _process = opened


def _clear_up() -> None:
    """Add up what the dead counted. Whoever opens files does it too: where nobody scrapes, they would be ever more."""
    try:
        _keep_what_the_dead_counted()
    except Exception as error:  # a full disk: what is there can be read all the same
        _say_once(f"{type(error).__name__}: {error}")


def _keep_what_the_dead_counted() -> None:
    """Add the figures of processes that have ended to those of all before them, and remove their files.

    Killed right before their removal, they are added once more; a figure that is a little too high is no harm.
    """
    for left in FOLDER.glob("*.unfinished"):
        with suppress(OSError):
            left.unlink()
    dead = [name for name in {path.stem.rpartition("_")[2] for path in FOLDER.glob("*_*.db")} if _is_dead(name)]
    for kind in KINDS:
        files = [path for name in dead if (path := _figures(kind, name)).exists()]
        if not files:
            continue
        together: dict[str, float] = {}
        before = _figures(kind, "before")
        for path in [*files, *([before] if before.exists() else [])]:
            for key, value in _read(path) or ():
                together[key] = together.get(key, 0.0) + value
        unfinished = FOLDER / f"{kind}.unfinished"
        unfinished.write_bytes(bytes(BYTES))
        sums = MmapedDict(str(unfinished))  # type: ignore[no-untyped-call]
        for key, value in together.items():
            sums.write_value(key, value, 0.0)  # type: ignore[no-untyped-call]
        sums.close()  # type: ignore[no-untyped-call]
        unfinished.replace(before)
        for path in files:
            path.unlink()
    for name in dead:
        (FOLDER / f"{name}.alive").unlink(missing_ok=True)


def _read(path: Path) -> list[tuple[str, float]] | None:
    """Return the figures in a file; None: it can't be read. A full disk leaves such, and so may another account."""
    try:
        found = MmapedDict.read_all_values_from_file(str(path))  # type: ignore[no-untyped-call]
        figures = [(key, value) for key, value, _, _ in found]
        MultiProcessCollector.merge([str(path)])  # type: ignore[no-untyped-call]
    except Exception as error:  # of any kind, by what it has instead of figures
        _say_once(f"{path.name}: {type(error).__name__}: {error}")
        return None
    return figures


def _is_dead(name: str) -> bool:
    if name == "before":
        return False
    try:
        with (FOLDER / f"{name}.alive").open() as alive:
            fcntl.flock(alive, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    except OSError:  # it lives, or is another account's, which nobody here can tell anything of
        return False
    return True


def _figures(kind: str, name: str) -> Path:
    return FOLDER / f"{kind}_{name}.db"


def _write_whole(path: Path) -> None:
    """Make a file of zeros, whole or not at all."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(bytes(BYTES))
    unfinished.rename(path)


@contextmanager
def _folder_locked() -> Iterator[None]:
    """Keep others from adding files up while one is being made, and from adding them up twice."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    # For reading, which is enough: another account may have made it.
    lock = os.open(FOLDER / "lock", os.O_RDONLY | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)  # to close it isn't enough: a process forked meanwhile has it, too
        os.close(lock)
