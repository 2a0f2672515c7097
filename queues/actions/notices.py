"""What people do about notifications of a queue: mute it for themselves, and acknowledge a warning for all.

Callers check with ``Queue.objects.seen_by`` that the visitor may see the queues.
"""

from collections.abc import Collection
from datetime import datetime
from http import HTTPStatus

from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.utils import timezone

from accounts import audit
from accounts.access import vouching
from accounts.models import Owner
from core.refusals import Refusal
from notifications import mutes
from queues.access import own_queues
from queues.mails.subject import subject_key
from queues.models import Queue, QueueEvent
from queues.rules import reminders


def mute(queues: Collection[Queue], by: Owner, until: datetime) -> None:
    """Let this owner get nothing about these queues until a time, but for deletions and last calls."""
    require_own(queues, by)
    mutes.mute(by, [subject_key(queue.pk) for queue in queues], until)


def unmute(queues: Collection[Queue], by: Owner) -> None:
    require_own(queues, by)
    mutes.unmute(by, [subject_key(queue.pk) for queue in queues])


def require_own(queues: Collection[Queue], by: Owner) -> None:
    """Require that these queues are this owner's. An operator gets a copy of each notification about all queues."""
    keys = {queue.pk for queue in queues}
    if Queue.objects.filter(own_queues(by), pk__in=keys).count() < len(keys):
        raise PermissionDenied("You can mute only queues that you own.")


def muted_until(queues: Collection[Queue], by: Owner) -> dict[int, datetime]:
    """Return until when this owner muted these queues, by primary key, in one statement."""
    found = mutes.muted_until(by, [subject_key(queue.pk) for queue in queues])
    return {queue.pk: found[key] for queue in queues if (key := subject_key(queue.pk)) in found}


def acknowledge(queue: Queue, by: Owner) -> None:
    """Record that somebody is on it, until the queue is back to normal. Nobody is reminded meanwhile.

    Raises:
        Refusal: the queue is not over its warning threshold.
    """
    with transaction.atomic():
        actor = next(iter(vouching.lock_existing([by])), None)
        row = Queue.objects.select_for_update().get(pk=queue.pk)
        if row.state != Queue.State.WARNED or row.warned_since is None:
            text = "There is no warning to acknowledge: the queue is not over its warning threshold."
            raise Refusal(text, status=HTTPStatus.CONFLICT)
        if not reminders.is_acknowledged(row) or row.acknowledged_by_id != by.pk:
            row.acknowledged_at, row.acknowledged_by = timezone.now(), actor
            row.save(update_fields=["acknowledged_at", "acknowledged_by"])
            row.new_event(QueueEvent.Kind.ACKNOWLEDGED, actor, row.acknowledged_at, length=row.length).save()
            audit.record(by, "acknowledged a warning", [row])
    queue.acknowledged_at, queue.acknowledged_by = row.acknowledged_at, row.acknowledged_by
