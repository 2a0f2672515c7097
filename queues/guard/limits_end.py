"""The end of limits, carried out by a pass. ``rules/temporary_limits.py`` decides."""

from datetime import datetime
from typing import Any

from core import bulk
from notifications.enqueue import Notice
from queues.guard.recording import write_events
from queues.mails import kinds
from queues.mails.subject import subject_key
from queues.models import Queue, QueueEvent
from queues.rules import thresholds
from queues.rules.temporary_limits import (
    ANNOUNCED_BEFORE,
    END,
    LIMITS,
    Step,
    next_step,
    old_limit,
    recorded,
    with_old_limits,
)
from rabbit.snapshot import Snapshot

EVENTS = {Step.RESTORE: QueueEvent.Kind.LIMITS_ENDED, Step.KEEP: QueueEvent.Kind.LIMITS_KEPT}


def end_limits(listing: Snapshot, now: datetime) -> list[Notice]:
    """Announce, end or keep the limits of listed queues whose end is near or past, and return the notices.

    Call it in the transaction in which a pass has written the lengths. Rows that somebody is changing wait for the next
    pass, and so does everything if the lengths lag.
    """
    if listing.lagging or not listing.exact:
        return []
    near = Queue.objects.filter(limits_until__lte=now + ANNOUNCED_BEFORE, misses=0)
    near = near.exclude(state__in=[Queue.State.DELETING, Queue.State.GONE]).select_related("pulse_user").order_by("id")
    found = list(near.select_for_update(of=("self",), skip_locked=True))
    listed = {(one.vhost, one.name): (one.ready, one.unacknowledged) for one in listing.queues} if found else {}
    written, events, notices = [], [], []
    for queue in found:
        # A pass leaves out rows that people changed meanwhile: their stored length is older than its list.
        is_current = listed.get((queue.vhost, queue.name)) == (queue.ready, queue.unacknowledged)
        step = next_step(queue, now) if is_current else None
        if step is None:
            continue
        after = with_old_limits(queue) if step is Step.RESTORE else queue
        details = {"before": recorded(queue), "after": recorded(after), "length": queue.length}
        notices.append(_notice(queue, after, step))
        if step is not Step.RESTORE:
            queue.limits_phase = Queue.LimitsPhase.KEPT if step is Step.KEEP else Queue.LimitsPhase.ANNOUNCED
        written.append((queue.pk, *(getattr(after, name) for name in (*LIMITS, *END))))
        if step in EVENTS:
            events.append((queue, EVENTS[step], details))
    bulk.update(Queue, (*LIMITS, *END), written)
    write_events(events, now)
    return notices


def _notice(queue: Queue, after: Queue, step: Step) -> Notice:
    facts: dict[str, Any] = {
        "queue": queue.name,
        "vhost": queue.vhost,
        "length": queue.length,
        "step": step.value,
        "until": queue.limits_until and queue.limits_until.isoformat(),
        "old": old_limit(queue),
        "max": thresholds.of_queue(after).max,
        "spared": not thresholds.has_limit(after),
    }
    return Notice(kinds.LIMITS_END, facts, subject_key(queue.pk), queue.pulse_user_id, queue.owner_id)
