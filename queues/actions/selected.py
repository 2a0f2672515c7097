"""What owners and operators do to several selected queues at once, on the page or through the API."""

from collections.abc import Collection, Sequence
from uuid import UUID

from django.core.exceptions import PermissionDenied, ValidationError

from accounts.models import Owner
from core.confirmation import ConfirmableChange, Effect
from core.each import Results, try_each
from queues.actions import effects, single
from queues.models import Queue
from queues.rules import brake

MAX_SELECTED = 50

DESTROY = {"delete": ("deletes", single.delete_queue), "purge": ("purges", single.purge_queue)}
"""The actions that lose messages: the verb of their effect, and the function."""


def find(by: Owner, uuids: Collection[UUID]) -> list[Queue]:
    """Return the queues among these that the owner may see and that are not gone, at most ``MAX_SELECTED``."""
    seen = Queue.objects.seen_by(by).filter(uuid__in=uuids).exclude(state=Queue.State.GONE)
    return list(seen.select_related("pulse_user")[:MAX_SELECTED])


def destroy(queues: Sequence[Queue], by: Owner, action: str, confirm: str = "") -> Results[Queue]:
    """Delete or purge these queues, and continue after single failures. Their ready messages are archived first."""
    verb, do = DESTROY[action]
    change = ConfirmableChange(by, f"{action} selected queues", queues, {}, confirm)
    change.require_confirmed(Effect(effects.of_deletion(queues).queues, verb))
    return try_each(queues, lambda queue: do(queue, by))


def release(queues: Sequence[Queue], by: Owner, confirm: str = "") -> Results[Queue]:
    """Let the next pass within ten minutes delete those of these queues whose deletion is blocked."""
    if not by.is_staff:
        raise PermissionDenied("Only operators release blocked queues.")
    blocked = list(Queue.objects.blocked().filter(pk__in=[queue.pk for queue in queues]))
    change = ConfirmableChange(by, "release blocked queues", queues, {}, confirm)
    change.require_confirmed(effects.of_deletion(blocked))
    if blocked:
        brake.release_brake(by, [(queue.vhost, queue.name) for queue in blocked])
    others = [queue for queue in queues if queue not in blocked]
    return Results([], blocked, [(queue, ValidationError("Its deletion is not blocked.")) for queue in others])
