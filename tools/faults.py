"""Faults of a chaos run, the requests that may fail because of them, and what the run finds."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import NamedTuple

from tools.load import Request

RECOVERY_SECONDS = {"RabbitMQ": 20, "the mail server": 20, "PostgreSQL": 110, "web": 110}
"""How long after a fault of this part requests may still get 503.

Connections are pooled. If a web process is killed or loses PostgreSQL, its lock on a queue expires after 90 s. Its lock
on a Pulse user lasts longer than this: ``core.locks.lock_seconds()``.
"""


class Fault(NamedTuple):
    """A fault of one part. Times are monotonic, except ``back``: the end by the wall clock.

    From ``gone`` on the part was certainly down.
    """

    part: str
    how: str
    began: float
    gone: float
    ended: float
    back: datetime


def was_down(since: datetime, until: datetime, faults: Collection[Fault], recovery: Mapping[str, float]) -> bool:
    """Return whether one of these parts was down between two times, or recovered for these seconds."""
    return any(
        fault.back - timedelta(seconds=fault.ended - fault.began) <= until
        and since <= fault.back + timedelta(seconds=recovery[part])
        for fault in faults
        if (part := fault.part.partition("-")[0]) in recovery
    )


@dataclass
class Finding:
    """A row of the table: the check, the counts, and the breaches."""

    what: str
    counts: str
    breaches: list[str] = field(default_factory=list)


def is_excused(request: Request, faults: Collection[Fault]) -> bool:
    """Return whether a request may fail: it was cut off, needed a part that was down, or hit a rate limit."""
    if request.status == 429:
        return request.what == "sign in"  # all sign-ins come from one address
    for fault in faults:
        if fault.how == "ended":
            continue  # a terminated process finishes its requests
        is_meanwhile = request.began <= fault.gone and fault.began <= request.ended
        if request.status == 0 and fault.part == request.process and is_meanwhile:
            return True
        part = fault.part.partition("-")[0]
        is_needed = part in RECOVERY_SECONDS and (part != "the mail server" or request.what == "sign in")
        is_felt = is_needed and fault.began <= request.ended and request.began <= fault.ended + RECOVERY_SECONDS[part]
        if request.status == 503 and is_felt:
            return True
    return False
