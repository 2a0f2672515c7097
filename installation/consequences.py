"""What a plan deletes on the broker, and whether the brake allows it to remove that much."""

import copy
from collections.abc import Collection, Sequence
from typing import TypeVar

from django.conf import settings

from accounts import queue_effects
from accounts.models import PulseUser
from agents.removal import deletions
from core.confirmation import Effect
from installation.planning import Change, Do, Plan
from installation.resources import Kind, State
from queues.actions import effects
from queues.models import Queue
from queues.rules.brake import brake_limit
from queues.rules.temporary_limits import with_old_limits

T = TypeVar("T", Queue, PulseUser)


def of_plan(plan: Plan) -> Effect:
    """Return the queues that a plan deletes, or lets the next pass delete, in a constant number of statements."""
    return _of(plan.changes)


def why_braked(plan: Plan, state: State) -> str:
    """Return why the brake blocks what a plan removes, or an empty text. The limits are those of a sweep."""
    removed = [one for one in plan.changes if one.do is Do.REMOVE]
    numbers = [("queues", len(_of(removed).queues), Queue.objects.exclude(state=Queue.State.GONE).count())]
    for kind in Kind:
        number = sum(one.kind is kind for one in removed)
        numbers.append((f"{kind.value}s" if kind is not Kind.QUEUE else "limits", number, len(state.of_kind(kind))))
    for things, number, present in numbers:
        limit = brake_limit(settings.GUARDIAN_DELETE_BRAKE, present)
        if number > limit:
            return (
                f"The brake blocks the removal of {number:,} of {present:,} {things}; at most {limit:,} are allowed. "
                "Nothing was done. Check the file. If all of it is to be removed, remove a part at a time, or set "
                "GUARDIAN_DELETE_BRAKE to a larger number for this command."
            )
    return ""


def of_removed(kind: Kind, rows: Collection[int]) -> Effect:
    """Return the queues that are deleted with these offerings or owners, given as primary keys."""
    if kind is Kind.OFFERING:
        return effects.of_deletion(deletions.queues_deleted_with(rows, deletions.OF_OFFERING))
    return effects.of_deletion(Queue.objects.filter(owner__in=rows))


def _of(changes: Sequence[Change]) -> Effect:
    effect = Effect([])
    for kind in (Kind.OFFERING, Kind.OWNER):
        if rows := [one.pk for one in changes if one.kind is kind and one.do is Do.REMOVE]:
            effect += of_removed(kind, rows)
    limits = {one.pk: one for one in changes if one.kind is Kind.QUEUE and one.pk}
    queues = Queue.objects.filter(pk__in=limits).select_related("pulse_user") if limits else ()
    effect += effects.of_limits((queue, _changed(with_old_limits(queue), limits[queue.pk])) for queue in queues)
    of_pulse_users = {one.pk: one for one in changes if one.kind is Kind.PULSE_USER and one.pk}
    pulse_users = list(PulseUser.objects.filter(pk__in=of_pulse_users)) if of_pulse_users else []
    removed = [one for one in pulse_users if of_pulse_users[one.pk].do is Do.REMOVE]
    staying = [(one, _changed(one, of_pulse_users[one.pk])) for one in pulse_users if one not in removed]
    effect += queue_effects.of_removal(removed) + queue_effects.of_thresholds(staying)
    return Effect(list({queue.id: queue for queue in effect.queues}.values()))


def _changed(row: T, change: Change) -> T:
    """Return a copy of a row with the limits of a change."""
    changed = copy.copy(row)
    for name in ("warn_length", "max_length", "unbounded"):
        if name in change.new:
            setattr(changed, name, change.new[name])
    return changed
