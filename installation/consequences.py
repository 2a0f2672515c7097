"""What a plan deletes on the broker, and whether the brake allows it to remove that much."""

import copy
from collections.abc import Collection, Sequence
from typing import TypeVar

from django.conf import settings

from accounts import queue_effects
from accounts.models import PulseUser
from accounts.pulse_users import namespace
from agents.removal import deletions
from core import broker
from core.confirmation import AffectedQueue, Effect
from installation.planning import Change, Do, Plan
from installation.resources import DEFAULTS, Kind, State
from queues.actions import effects
from queues.models import Queue
from queues.rules.brake import brake_limit
from queues.rules.temporary_limits import with_old_limits

T = TypeVar("T", Queue, PulseUser)


def of_plan(plan: Plan) -> Effect:
    """Return the queues that a plan deletes, or lets the next pass delete, in a constant number of statements.

    They include queues that no pass has listed yet. If Pulse users are removed, this sends two requests to the broker.
    """
    effect, vhost = _of(plan.changes), settings.GUARDIAN_PULSE_VHOST
    removed = {one.name for one in plan.changes if one.kind is Kind.PULSE_USER and one.do is Do.REMOVE}
    if removed:
        listed = {queue.name for queue in effect.queues if queue.vhost == vhost}
        names = namespace.queues_of(broker.management(), removed)
        effect += Effect([AffectedQueue(0, vhost, name, None) for name in names if name not in listed])
    return effect


def why_braked(plan: Plan, state: State) -> str:
    """Return why the brake blocks what a plan removes, or an empty text. The limits are those of a sweep."""
    removed = [one for one in plan.changes if one.do is Do.REMOVE]
    numbers = [("queues", len(_of(removed).queues), Queue.objects.exclude(state=Queue.State.GONE).count())]
    for kind in Kind:
        number = sum(one.kind is kind for one in removed)
        # A pattern has all queues listed; those with limits count.
        present = sum(kind is not Kind.QUEUE or one.values != DEFAULTS[kind] for one in state.of_kind(kind))
        numbers.append((f"{kind.value}s" if kind is not Kind.QUEUE else "limits", number, present))
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
    queues = list(Queue.objects.filter(pk__in=limits).select_related("pulse_user")) if limits else []
    of_pulse_users = {one.name: one for one in changes if one.kind is Kind.PULSE_USER}
    pulse_users = list(PulseUser.objects.filter(username__in=of_pulse_users)) if of_pulse_users else []
    removed = [one for one in pulse_users if of_pulse_users[one.username].do is Do.REMOVE]
    before = {one.username: one for one in pulse_users if one not in removed}
    adopted = {one.name: PulseUser(username=one.name) for one in changes if one.do is Do.ADOPT}
    after = {name: _changed(row, of_pulse_users[name]) for name, row in {**adopted, **before}.items()}
    owned = {queue.pk: (name, queue) for name, queue in effects.queues_of(after)}
    changed = []
    for name, queue in {**{queue.pk: ("", queue) for queue in queues}, **owned}.values():
        # A queue's row lacks its Pulse user until the pass after an adoption.
        old, new = copy.copy(queue), with_old_limits(queue) if queue.pk in limits else copy.copy(queue)
        if name:
            old.pulse_user, new.pulse_user = before.get(name), after[name]
        changed.append((old, _changed(new, limits[queue.pk]) if queue.pk in limits else new))
    effect += queue_effects.of_removal(removed) + effects.of_limits(changed)
    return Effect(list({queue.id: queue for queue in effect.queues}.values()))


def _changed(row: T, change: Change) -> T:
    """Return a copy of a row with the limits of a change."""
    changed = copy.copy(row)
    for name in ("warn_length", "max_length", "unbounded"):
        if name in change.new:
            setattr(changed, name, change.new[name])
    return changed
