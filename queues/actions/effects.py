"""Which queues a change by a person deletes, or lets the next pass delete. Pages, admin and API ask here.

Lengths are as last listed, and limits without memory pressure, as pages show them.
"""

import copy
from collections.abc import Collection, Iterable, Iterator, Sequence

from django.conf import settings
from django.db.models import Q

from accounts.models import Owner, PulseUser
from core.confirmation import AffectedQueue, Effect
from queues.guard import pass_run
from queues.models import Queue
from queues.rules.rows import Rules
from queues.rules.thresholds import Action, is_spared, judge, of_queue
from rabbit.names import DEAD_LETTER_QUEUE, user_of_queue
from rabbit.snapshot import TYPES_WITHOUT_LENGTH


def of_limits(changed: Iterable[tuple[Queue, Queue]]) -> Effect:
    """Return the queues that new limits let the next pass delete. Each is given with its limits before and after."""
    rules = pass_run.rules(None)
    return of_deletion(after for before, after in changed if _becomes_deletable(before, after, rules))


def of_thresholds(changed: Sequence[tuple[PulseUser, PulseUser]]) -> Effect:
    """Return the queues that new thresholds let the next pass delete. Each Pulse user is given before and after."""
    by_name = {before.username: (before, after) for before, after in changed}
    return of_limits(
        (_with_pulse_user(queue, before), _with_pulse_user(queue, after))
        for username, queue in queues_of(by_name)
        for before, after in [by_name[username]]
    )


def of_removal(pulse_users: Sequence[PulseUser]) -> Effect:
    """Return the queues that are deleted with these Pulse users. A Pulse user that is being removed has none."""
    names = {pulse_user.username for pulse_user in pulse_users if pulse_user.removing_since is None}
    return of_deletion(queue for _, queue in queues_of(names))


def of_agents(owner: Owner) -> Effect:
    """Return the registered queues that the next clean-up deletes if this owner has no valid token."""
    return of_deletion(Queue.objects.filter(owner=owner, registered=True).exclude(name=DEAD_LETTER_QUEUE))


def of_deletion(queues: Iterable[Queue]) -> Effect:
    """Return these queues, without those that are gone."""
    return Effect(
        [
            AffectedQueue(queue.pk, queue.vhost, queue.name, queue.length)
            for queue in queues
            if queue.state != Queue.State.GONE
        ]
    )


def _becomes_deletable(before: Queue, after: Queue, rules: Rules) -> bool:
    """Return whether new limits let the next pass delete a queue. One of unknown length may turn out to be too long."""
    if _is_deletable(after, rules):
        return not _is_deletable(before, rules)
    if after.length is not None or after.type in TYPES_WITHOUT_LENGTH or is_spared(after):
        return False
    return is_spared(before) or of_queue(after).max < of_queue(before).max


def _is_deletable(queue: Queue, rules: Rules) -> bool:
    """Return whether the next pass would delete a queue, unless the brake blocks it."""
    verdict = judge(queue.state, queue.length, of_queue(queue), spared=is_spared(queue))
    return verdict.action is Action.DELETE or rules.deletes_for_its_name(queue)


def _with_pulse_user(queue: Queue, pulse_user: PulseUser) -> Queue:
    changed = copy.copy(queue)
    changed.pulse_user = pulse_user
    return changed


def queues_of(usernames: Collection[str]) -> Iterator[tuple[str, Queue]]:
    """Yield the queues of these Pulse users. A queue's row lacks its Pulse user until the pass after an adoption."""
    if not usernames:
        return
    not_yet_owned = Q(pulse_user=None, registered=False, vhost=settings.GUARDIAN_PULSE_VHOST, name__startswith="queue/")
    rows = Queue.objects.filter(Q(pulse_user__username__in=usernames) | not_yet_owned)
    for queue in rows.exclude(state=Queue.State.GONE).select_related("pulse_user"):
        username = queue.pulse_user.username if queue.pulse_user else user_of_queue(queue.name)
        if username is not None and username in usernames:
            yield username, queue
