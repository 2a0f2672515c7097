"""Invariants that hold despite any fault: checked by `make soak` and the tests of faults.

Call these functions with Django set up, after all pending work is done. Each returns a sentence for each breach, so an
empty list is OK.
"""

import itertools
import re
import uuid
from collections import Counter
from collections.abc import Collection, Iterable
from datetime import datetime, timedelta
from typing import NamedTuple

from django.conf import settings
from django.db.models import F, Q, Sum
from django.utils import timezone

from agents.models import AgentVhost, Consumer, EventSubscription, Registration, SubscriptionQueue
from core.models import Removal
from notifications import audience, claims, retries
from notifications.mails import GROUP
from notifications.models import Notification
from queues.guard import pass_run
from queues.models import Archive, Pass, Queue, QueueEvent, Watch
from queues.rules import quiet
from rabbit import snapshot
from rabbit.management import Management
from rabbit.names import DEAD_LETTER_QUEUE, NameKind, is_agents_login, is_agents_queue, kind_of_queue, user_of_queue
from tools.mail import Mail

VALID_FAILURE_REASONS = {
    *claims.OUTDATED,
    "The address was confirmed or removed in the meantime.",
    "The invitation was answered or withdrawn in the meantime.",
    "The Pulse user was deleted, or has other owners.",
    "The Pulse users were deleted, or have other owners.",
}
"""Reasons to give up a notification before a day of attempts."""

WARNINGS = ["warning", "last-call", "summary"]

QUEUE_KINDS = [*WARNINGS, "recovery", "deletion"]
"""The kinds of notifications about a queue's state."""

REGISTERED: tuple[type[SubscriptionQueue] | type[Consumer], ...] = (SubscriptionQueue, Consumer)

_MESSAGE_ID = re.compile(r"<([0-9a-f-]{36})@")


class _Notified(NamedTuple):
    """A recipient's last notification about a queue: its kind, and the queue's state in it."""

    kind: str
    state: str | None
    created: datetime


def breaches(
    management: Management, vhosts: Collection[str], mails: Iterable[Mail], *, interrupted: int = 0
) -> list[str]:
    """Return all breaches that are visible after a pass and a sweep, without knowledge of the actions.

    ``vhosts`` are the vhosts to check; ``mails`` are all accepted mails; ``interrupted`` is as for `duplicate_mails`.
    """
    return [
        *mail_breaches(mails, interrupted=interrupted),
        *deleted_below_maximum(),
        *incomplete_archives(),
        *inconsistent_decisions(),
        *disagreements(management, vhosts),
    ]


def mail_breaches(mails: Iterable[Mail], *, interrupted: int = 0) -> list[str]:
    """Return the results of `missing_notifications`, `undelivered_mails` and `duplicate_mails`."""
    caught = list(mails)
    return [*missing_notifications(), *undelivered_mails(caught), *duplicate_mails(caught, interrupted=interrupted)]


def missing_notifications(*, settled: bool = True) -> list[str]:
    """Return the unsent, missing and outdated notifications.

    ``settled``: all deferred work is done. Otherwise a notification may wait for its next attempt, or for the expiry of
    a killed sender's claim.
    """
    now = timezone.now()
    unsent = Notification.objects.filter(claims.Unsent).exclude(deferred_until__gt=now)
    if not settled:
        unsent = unsent.filter(due_at__lte=now)
    wrong = [
        f"{_describe(one)} is still {one.state} after {one.attempts} attempts ({one.last_error or 'no error'})"
        for one in unsent
    ]
    failed = Notification.objects.filter(state=Notification.State.FAILED).exclude(last_error__in=VALID_FAILURE_REASONS)
    wrong += [
        f"{_describe(one)} was given up after {one.attempts} attempts: {one.last_error}"
        for one in failed
        if one.attempts < retries.MIN_ATTEMPTS or now - one.created < retries.RETRY_FOR
    ]
    return [*wrong, *_miscounted_deletions(), *_outdated_states(settled=settled)]


def _miscounted_deletions() -> list[str]:
    """Return the deletions with fewer or more notifications to an operator than deletions."""
    deleted = Counter(
        QueueEvent.objects.filter(kind=QueueEvent.Kind.DELETED).order_by().values_list("vhost", "queue_name")
    )
    deletions = Notification.objects.filter(kind="deletion", channel=audience.EMAIL).order_by()
    told = Counter((to, facts["vhost"], facts["queue"]) for to, facts in deletions.values_list("recipient", "facts"))
    return [
        f"{name} in {vhost} was deleted {times} times, but {operator} has {told[operator, vhost, name]} notifications"
        for operator in audience.operators()
        for (vhost, name), times in deleted.items()
        if told[operator, vhost, name] != times
    ]


def _outdated_states(*, settled: bool) -> list[str]:
    """Return the queues whose state differs from the last notification to an operator."""
    now = timezone.now()
    wrong = []
    last: dict[tuple[str, str], _Notified] = {}
    rows = Notification.objects.filter(kind__in=QUEUE_KINDS, channel=audience.EMAIL).order_by("id")
    for to, about, kind, facts, created in rows.values_list("recipient", "about", "kind", "facts", "created"):
        last[to, about] = _Notified(kind, facts.get("state"), created)
    for queue in Queue.objects.filter(state__in=[Queue.State.OK, Queue.State.WARNED]):
        is_quiet = queue.quiet_until is not None and not quiet.is_over(queue.quiet_until, now)
        if settled and not is_quiet and queue.notified_state != queue.state:
            wrong.append(f"{queue} is {queue.state}, but the notified state is {queue.notified_state}")
        if queue.notified_state == Queue.State.OK and queue.pulse_user_id is None and user_of_queue(queue.name):
            continue  # the queues of a removed Pulse user start anew, without a notification
        for operator in audience.operators():
            told = last.get((operator, f"queue {queue.pk}"), _Notified("none", None, now))
            is_told_warned = told.kind in WARNINGS and told.state == Queue.State.WARNED
            may_start_anew = queue.notified_state == Queue.State.OK and told.created < queue.first_seen
            if is_told_warned != (queue.notified_state == Queue.State.WARNED) and not may_start_anew:
                wrong.append(
                    f"the notified state of {queue} is {queue.notified_state}, "
                    f"but {operator}'s last notification is {told.kind}"
                )
    return wrong


def undelivered_mails(mails: Iterable[Mail]) -> list[str]:
    """Return the notifications recorded as sent by mail that the mail server did not accept."""
    single: set[tuple[str, uuid.UUID]] = set()
    tables: set[tuple[str, uuid.UUID]] = set()
    for mail in mails:
        if id_ := _message_id(mail):
            to_update = tables if mail.message["X-Guardian-Kind"] == GROUP else single
            to_update.update((to, id_) for to in mail.recipients)
    rows = Notification.objects.filter(channel=audience.EMAIL)
    # A table has the id of its first notification.
    groups = {(one.recipient, one.group) for one in rows.exclude(group=None) if (one.recipient, one.uuid) in tables}
    return [
        f"{_describe(one)} is recorded as sent, but was never accepted"
        for one in rows.filter(state=Notification.State.SENT)
        if (one.recipient, one.uuid) not in single and (one.recipient, one.group) not in groups
    ]


def duplicate_mails(mails: Iterable[Mail], *, interrupted: int = 0) -> list[str]:
    """Return the mails that were accepted more than once for a recipient, and those without a notification.

    ``interrupted`` is the allowed number of repeated mails with the same Message-ID: their senders were killed, or lost
    the database, after the mail server accepted them and before they recorded this.
    """
    accepted: Counter[tuple[str, uuid.UUID]] = Counter()
    for mail in mails:
        if id_ := _message_id(mail):
            accepted.update((to, id_) for to in mail.recipients)
    known = {one.uuid: one for one in Notification.objects.filter(channel=audience.EMAIL)}
    wrong = [f"the mail {row} to {to} has no notification" for to, row in accepted if row not in known]
    again = {key: count for key, count in accepted.items() if count > 1}
    if sum(again.values()) - len(again) > interrupted:
        wrong += [
            f"{_describe(known[row]) if row in known else row} was accepted {count} times for {to}"
            for (to, row), count in again.items()
        ]
    return wrong


def count_resent_mails(mails: Iterable[Mail]) -> int:
    """Return the number of repeated mails, with the same Message-ID and recipient as an accepted one."""
    accepted = Counter((to, id_) for mail in mails if (id_ := _message_id(mail)) for to in mail.recipients)
    return accepted.total() - len(accepted)


def deleted_below_maximum() -> list[str]:
    """Return Guardian's deletions of queues that were not over their deletion limit.

    Deletions by the namespace policy are OK.
    """
    wrong = []
    for event in QueueEvent.objects.filter(kind=QueueEvent.Kind.DELETED):
        for_its_name = settings.GUARDIAN_NAMESPACE_POLICY != "report" and kind_of_queue(event.queue_name) in (
            NameKind.MISNAMED,
            NameKind.UNPATTERNED,
        )
        length, most = event.details.get("length"), event.details.get("max")
        if for_its_name:
            continue
        if length is None or most is None:
            wrong.append(f"{event.queue_name} in {event.vhost} was deleted, but its length or limit is not recorded")
        elif length <= most or event.details.get("spared"):
            why = "though it must never be deleted" if event.details.get("spared") else f"and its limit is {most}"
            wrong.append(f"{event.queue_name} in {event.vhost} was deleted with {length} messages, {why}")
    return wrong


def incomplete_archives() -> list[str]:
    """Return the kept archives that have fewer or more messages than they say."""
    kept = Archive.objects.filter(state=Archive.State.KEPT).annotate(stored=Sum("chunks__count", default=0))
    wrong = kept.exclude(stored=F("messages")).values_list("queue_name", "messages", "stored")
    return [f"the archive of {name} has {stored} messages, not {messages}" for name, messages, stored in wrong]


def inconsistent_decisions() -> list[str]:
    """Return the queues that are about to be deleted without a decision, and a lateness without such queues."""
    deleting = Queue.objects.filter(state=Queue.State.DELETING)
    undecided = deleting.filter(Q(decided_at=None) | Q(decided_for="") | ~Q(block_reason=""))
    wrong = [f"{queue} is about to be deleted, but nobody decided that" for queue in undecided]
    if Watch.objects.exclude(late_since=None).exists() and not deleting.exists():
        wrong.append("recorded deletions count as late, but none waits")
    return wrong


def disagreements(management: Management, vhosts: Collection[str]) -> list[str]:
    """Return the differences between database and broker: rows or queues without a counterpart, and lengths.

    They cover the guarded and registered queues in these vhosts, and pending removals. Call this after a pass and a
    sweep.

    Raises:
        BrokerError: the broker is unreachable.
    """
    listed = snapshot.take(management, sorted(vhosts)) if vhosts else None
    there = {seen[:2]: seen.length for seen in listed.queues} if listed else {}
    unlisted = [f"vhost {vhost} can't be listed: {why}" for vhost, why in listed.unlisted.items()] if listed else []
    return [
        *unlisted,
        *_guarded_disagreements(there, vhosts),
        *_agents_disagreements(there, vhosts),
        *_logins_disagreements(management, vhosts),
    ]


def _guarded_disagreements(there: dict[tuple[str, str], int | None], vhosts: Collection[str]) -> list[str]:
    rules = pass_run.rules()
    guarded = {key: length for key, length in there.items() if not rules.ignores(*key)}
    rows = {
        (row.vhost, row.name): row
        for row in Queue.objects.filter(vhost__in=vhosts).exclude(state=Queue.State.GONE)
        if not rules.ignores(row.vhost, row.name)
    }
    wrong = [f"{name} in {vhost} is on the broker, but has no row" for vhost, name in guarded.keys() - rows.keys()]
    wrong += [f"{rows[key]} is {rows[key].state}, but not on the broker" for key in rows.keys() - guarded.keys()]
    for key in guarded.keys() & rows.keys():
        row, length = rows[key], guarded[key]
        if row.state == Queue.State.DELETING:
            wrong.append(f"{row} is still {row.state}")
        if length is not None and row.length != length:
            wrong.append(f"{row} has {length} messages, but {row.length} by its row")
    return wrong


def _agents_disagreements(there: Collection[tuple[str, str]], vhosts: Collection[str]) -> list[str]:
    made = dict(AgentVhost.objects.filter(name__in=vhosts).values_list("name", "ready"))
    registered: set[tuple[str, str]] = set()
    wrong = []
    for model in REGISTERED:
        for row in model._default_manager.filter(vhost__in=vhosts):
            key = (row.vhost, row.queue_name)
            registered.add(key)
            if row.state != Registration.READY:
                wrong.append(f"{row.queue_name} in {row.vhost} is registered, but still {row.state}")
            elif key not in there:
                wrong.append(f"{row.queue_name} in {row.vhost} is registered, but not on the broker")
    wrong += [
        f"{name} in {vhost} is on the broker, but not registered"
        for vhost, name in there
        if vhost in made and is_agents_queue(name) and (vhost, name) not in registered
    ]
    wrong += [
        f"vhost {name} lacks its dead-letter queue"
        for name, ready in made.items()
        if ready and (name, DEAD_LETTER_QUEUE) not in there
    ]
    pending = Removal.objects.filter(Q(vhost__in=vhosts) | ~Q(kind=Removal.Kind.QUEUE))
    wrong += [f"{one} is still to be removed ({one.last_error or 'no error'})" for one in pending]
    return wrong


def _logins_disagreements(management: Management, vhosts: Collection[str]) -> list[str]:
    """Return the agents' RabbitMQ users with permissions in these vhosts that have no row."""
    known = {one.hex for one in EventSubscription.objects.values_list("uuid", flat=True)}
    known |= set(Consumer.objects.values_list("rmq_username", flat=True))
    return [
        f"the RabbitMQ user {user} has permissions in {vhost}, but no row"
        for user, allowed in management.all_permissions().items()
        for vhost in allowed
        if vhost in vhosts and is_agents_login(user) and user not in known
    ]


def missing_registrations(registered: Iterable[tuple[str, str]]) -> list[str]:
    """Return the queues (vhost, name) whose registration was answered, but that aren't registered."""
    ready: set[tuple[str, str]] = set()
    for model in REGISTERED:
        rows = model._default_manager.filter(state=Registration.READY).order_by()
        ready.update(rows.values_list("vhost", "queue_name"))
    return [
        f"the registration of {name} in {vhost} was answered, but is missing"
        for vhost, name in registered
        if (vhost, name) not in ready
    ]


def overlapping_passes() -> list[str]:
    """Return the passes that overlap with an earlier one."""
    wrong = []
    passes = Pass.objects.order_by("at").values_list("at", "seconds")
    for (earlier, seconds), (later, _) in itertools.pairwise(passes):
        if later < earlier + timedelta(seconds=seconds):
            wrong.append(f"the pass of {later:%T.%f} began before the one of {earlier:%T.%f} was over")
    return wrong


def _message_id(mail: Mail) -> uuid.UUID | None:
    """Return the UUID in a mail's Message-ID, or None if Guardian didn't send it."""
    if "X-Guardian-Kind" not in mail.message:
        return None
    found = _MESSAGE_ID.match(str(mail.message["Message-ID"]))
    return uuid.UUID(found[1]) if found else None


def _describe(one: Notification) -> str:
    about = f" about {one.facts['queue']}" if "queue" in one.facts else ""
    return f"the {one.kind}{about} to {one.recipient}"
