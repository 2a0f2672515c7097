"""Queues as subjects of notifications."""

from collections.abc import Collection

from django.urls import reverse

from notifications import subjects
from notifications.audience import Ownership
from notifications.subjects import Subject
from queues.models import Queue

KIND = "queue"


def subject_key(queue_id: int | None) -> str:
    """Return the key of a queue for ``Notification.about``, or an empty text if the queue has no row."""
    return "" if queue_id is None else subjects.key(KIND, queue_id)


def _look_up(ids: Collection[int]) -> dict[int, Subject]:
    rows = Queue.objects.filter(pk__in=ids).values_list("pk", "pulse_user_id", "owner_id", "uuid", "state")
    return {
        pk: Subject(Ownership(pulse_user, owner), reverse("queue", args=[uuid]), state == Queue.State.GONE)
        for pk, pulse_user, owner, uuid, state in rows
    }


subjects.register(KIND, _look_up)
