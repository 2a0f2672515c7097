"""Limits of a queue that end: when the old ones return. Pure.

The old limits return for a queue within them. One that is over keeps the raised limit, and is deleted past it as
before, until it has been within the old one. So no queue is deleted or blocked because its limits end.
"""

import copy
from collections.abc import Mapping
from datetime import datetime, timedelta
from enum import Enum
from typing import Any

from django.core.exceptions import ValidationError

from queues.models import Queue
from queues.rules import thresholds

LIMITS = ("unbounded", "warn_length", "max_length")
END = ("limits_until", "limits_before", "limits_phase")

ANNOUNCED_BEFORE = timedelta(days=1)
MAX_TERM = timedelta(days=366)


class Step(Enum):
    ANNOUNCE = "announce"
    RESTORE = "restore"
    KEEP = "keep"


def next_step(queue: Queue, now: datetime) -> Step | None:
    """Return what to do about the end of a queue's limits now, or None for nothing. The length is as last listed."""
    if queue.limits_until is None or now < queue.limits_until - ANNOUNCED_BEFORE:
        return None
    if now < queue.limits_until:
        return None if queue.limits_phase else Step.ANNOUNCE
    limit = old_limit(queue)
    if limit is None:
        return Step.RESTORE
    if queue.length is None:
        return None
    if queue.length <= limit:
        return Step.RESTORE
    return None if queue.limits_phase == Queue.LimitsPhase.KEPT else Step.KEEP


def limits_of(queue: Queue) -> dict[str, Any]:
    return {name: getattr(queue, name) for name in LIMITS}


def recorded(queue: Queue) -> dict[str, Any]:
    """Return the limits of a queue as events and the audit trail record them."""
    until = queue.limits_until
    return {**limits_of(queue), "limits_until": until.isoformat(timespec="seconds") if until else None}


def with_old_limits(queue: Queue) -> Queue:
    """Return a copy of a queue with the limits that return when its present ones end."""
    old = copy.copy(queue)
    for name, value in (queue.limits_before or {}).items():
        setattr(old, name, value)
    clear_end(old)
    return old


def old_limit(queue: Queue) -> int | None:
    """Return the deletion limit, in messages, that returns when a queue's limits end, or None for none."""
    old = with_old_limits(queue)
    return thresholds.of_queue(old).max if thresholds.has_limit(old) else None


def clear_end(queue: Queue) -> None:
    queue.limits_until, queue.limits_before, queue.limits_phase = None, None, ""


def check_end(until: datetime | None, now: datetime) -> None:
    """Raise ValidationError if limits can't end at this time."""
    if until is not None and not now < until <= now + MAX_TERM:
        raise ValidationError({"limits_until": ["Choose a time within a year from now."]})


def set_end(after: Queue, before: Queue, given: Mapping[str, Any], now: datetime) -> None:
    """Set what returns when the limits of ``after`` end. Limits that are changed without an end are permanent.

    ``before`` is the queue before the change, and ``given`` are the values of the request. Raises ValidationError.
    """
    is_changed = limits_of(after) != limits_of(before)
    if given.get("limits_until") is None:
        if is_changed or "limits_until" in given:
            clear_end(after)
        return
    if after.limits_until != before.limits_until:
        check_end(after.limits_until, now)
        after.limits_phase = ""
    if before.limits_until is None:
        if not is_changed:
            raise ValidationError(
                {"limits_until": ["Change a limit, too: otherwise nothing would change at that time."]}
            )
        after.limits_before = limits_of(before)
    elif limits_of(after) == before.limits_before:
        clear_end(after)
