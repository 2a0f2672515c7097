"""What has to hold whatever was killed, cut or away: checked by `make soak` and the tests of faults.

It runs inside Django, on the database that is configured, once what was to follow has followed. Each function gives
one sentence for each breach, so an empty list is all right.
"""

import itertools
import re
import uuid
from collections import Counter
from collections.abc import Collection, Iterable
from datetime import timedelta
from typing import NamedTuple

from django.conf import settings
from django.db.models import Q
from django.utils import timezone

from agents.models import AgentVhost, Consumer, EventSubscription, Registration, SubscriptionQueue
from core.models import Removal
from notifications import audience, claims
from notifications.models import Notification
from queues import pass_run, quiet
from queues.models import Pass, Queue, QueueEvent
from rabbit import snapshot
from rabbit.management import Management
from rabbit.names import DEAD_LETTER_QUEUE, NameKind, is_agents_login, is_agents_queue, kind_of_queue
from tools.mail import Mail

OUT_OF_DATE = "The queue was deleted in the meantime."
"""Why a warning is given up that would come after the news of the deletion."""

VALID_FAILURE_REASONS = {
    OUT_OF_DATE,
    "The recipient can't sign in any more.",
    "The recipient is not told of it any more.",
    "The channel was removed.",
    "The address was confirmed or removed in the meantime.",
}
"""Why a notification may be given up that was not tried for a day."""

QUEUE_KINDS = ["warning", "recovery", "summary", "deletion"]
"""The kinds of notifications that say where a queue stands."""

REGISTERED: tuple[type[SubscriptionQueue] | type[Consumer], ...] = (SubscriptionQueue, Consumer)

_MESSAGE_ID = re.compile(r"<([0-9a-f-]{36})@")


class _Notified(NamedTuple):
    """What one recipient was told about a queue: the kind of the message, and the queue's state by it."""

    kind: str
    state: str | None


def breaches(
    management: Management, vhosts: Collection[str], mails: Iterable[Mail], *, interrupted: int = 0
) -> list[str]:
    """Give all breaches that can be seen without knowing what was done, after a pass and a sweep.

    ``vhosts`` are those to look at; ``mails`` all that the mail server accepted, and ``interrupted`` as for
    `duplicate_mails`.
    """
    return [
        *mail_breaches(mails, interrupted=interrupted),
        *deleted_below_maximum(),
        *disagreements(management, vhosts),
    ]


def mail_breaches(mails: Iterable[Mail], *, interrupted: int = 0) -> list[str]:
    """Give what was to be told and wasn't, or was told more than once: `lost`, `undelivered_mails` and `duplicate_mails`."""
    caught = list(mails)
    return [*missing_notifications(), *undelivered_mails(caught), *duplicate_mails(caught, interrupted=interrupted)]


def missing_notifications(*, settled: bool = True) -> list[str]:
    """Give what somebody was to be told and isn't: rows of the outbox, and what has no row there.

    ``settled``: what was put off has had its time; otherwise a notification may wait for its next attempt, or for the
    end of the claim of a sender that was killed.
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
        if one.attempts < claims.MIN_ATTEMPTS or now - one.created < claims.RETRY_FOR
    ]
    return [*wrong, *_miscounted_deletions(), *_outdated_states(settled=settled)]


def _miscounted_deletions() -> list[str]:
    """Give the deletions that an operator was told of less or more often than they happened."""
    deleted = Counter(
        QueueEvent.objects.filter(kind=QueueEvent.Kind.DELETED).order_by().values_list("vhost", "queue_name")
    )
    deletions = Notification.objects.filter(kind="deletion", channel=audience.EMAIL).order_by()
    told = Counter((to, facts["vhost"], facts["queue"]) for to, facts in deletions.values_list("recipient", "facts"))
    return [
        f"{name} in {vhost} was deleted {times} times, and {told[operator, vhost, name]} notifications tell {operator}"
        for operator in audience.operators()
        for (vhost, name), times in deleted.items()
        if told[operator, vhost, name] != times
    ]


def _outdated_states(*, settled: bool) -> list[str]:
    """Give the queues about which the last that was written to an operator isn't where they stand."""
    now = timezone.now()
    wrong = []
    last: dict[tuple[str, str], _Notified] = {}
    rows = Notification.objects.filter(kind__in=QUEUE_KINDS, channel=audience.EMAIL).order_by("id")
    for to, about, kind, facts in rows.values_list("recipient", "about", "kind", "facts"):
        last[to, about] = _Notified(kind, facts.get("state"))
    for queue in Queue.objects.filter(state__in=[Queue.State.OK, Queue.State.WARNED]):
        is_quiet = queue.quiet_until is not None and not quiet.is_over(queue.quiet_until, now)
        if settled and not is_quiet and queue.said != queue.state:
            wrong.append(f"{queue} is {queue.state}, and people were told that it is {queue.said}")
        for operator in audience.operators():
            told = last.get((operator, f"queue {queue.pk}"), _Notified("nothing", None))
            is_told_warned = told.kind in ("warning", "summary") and told.state == Queue.State.WARNED
            if is_told_warned != (queue.said == Queue.State.WARNED):
                wrong.append(
                    f"{queue} is said to be {queue.said}, and the last that {operator} was told is {told.kind}"
                )
    return wrong


def undelivered_mails(mails: Iterable[Mail]) -> list[str]:
    """Give the notifications that are noted as sent by mail, and of which the mail server has none."""
    caught = {(to, row) for mail in mails if (row := _notification_uuid(mail)) for to in mail.recipients}
    sent = Notification.objects.filter(state=Notification.State.SENT, channel=audience.EMAIL)
    return [
        f"{_describe(one)} is noted as sent, and was never accepted"
        for one in sent
        if (one.recipient, one.uuid) not in caught
    ]


def duplicate_mails(mails: Iterable[Mail], *, interrupted: int = 0) -> list[str]:
    """Give the notifications that the mail server accepted more than once for one recipient, and those nobody wrote.

    ``interrupted`` is how many mails may have gone out once more, with the same Message-ID: since their sender was
    killed, or lost the database, between the mail server's "accepted" and its own note of it.
    """
    accepted: Counter[tuple[str, uuid.UUID]] = Counter()
    for mail in mails:
        if row := _notification_uuid(mail):
            accepted.update((to, row) for to in mail.recipients)
    known = {one.uuid: one for one in Notification.objects.filter(uuid__in={row for _, row in accepted})}
    wrong = [f"the mail {row} to {to} is no notification's" for to, row in accepted if row not in known]
    again = {key: count for key, count in accepted.items() if count > 1}
    if sum(again.values()) - len(again) > interrupted:
        wrong += [
            f"{_describe(known[row]) if row in known else row} was accepted {count} times for {to}"
            for (to, row), count in again.items()
        ]
    return wrong


def count_resent_mails(mails: Iterable[Mail]) -> int:
    """Give how many mails came once more, with the Message-ID and for the recipient of one that was accepted."""
    accepted = Counter((to, row) for mail in mails if (row := _notification_uuid(mail)) for to in mail.recipients)
    return accepted.total() - len(accepted)


def deleted_below_maximum() -> list[str]:
    """Give the deletions by Guardian of queues whose length was not over the maximum that held then.

    All right is one for its name, where the namespace policy asks for that.
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
            wrong.append(f"{event.queue_name} in {event.vhost} was deleted, and nothing tells by which figures")
        elif length <= most or event.details.get("spared"):
            why = "though it is one that is never deleted" if event.details.get("spared") else f"and {most} are allowed"
            wrong.append(f"{event.queue_name} in {event.vhost} was deleted with {length} messages, {why}")
    return wrong


def disagreements(management: Management, vhosts: Collection[str]) -> list[str]:
    """Give the rows without their queue, the queues without their row, and those of another length.

    That is of all guarded queues, and of all that agents registered, in these vhosts; with what is still to be removed
    from the broker. A pass has to have seen what is there now, and a sweep to have been.

    Raises:
        BrokerError: the broker can't be asked.
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
    rules = pass_run.rules(pass_run.guarded_vhosts())
    guarded = {key: length for key, length in there.items() if not rules.ignores(*key)}
    rows = {
        (row.vhost, row.name): row
        for row in Queue.objects.filter(vhost__in=vhosts).exclude(state=Queue.State.GONE)
        if not rules.ignores(row.vhost, row.name)
    }
    wrong = [f"{name} in {vhost} is on the broker, and has no row" for vhost, name in guarded.keys() - rows.keys()]
    wrong += [f"{rows[key]} is {rows[key].state}, and not on the broker" for key in rows.keys() - guarded.keys()]
    for key in guarded.keys() & rows.keys():
        row, length = rows[key], guarded[key]
        if row.state == Queue.State.DELETING:
            wrong.append(f"{row} is still {row.state}")
        if length is not None and row.length != length:
            wrong.append(f"{row} has {length} messages, and its row says {row.length}")
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
                wrong.append(f"{row.queue_name} in {row.vhost} is registered, and still {row.state}")
            elif key not in there:
                wrong.append(f"{row.queue_name} in {row.vhost} is registered, and not on the broker")
    wrong += [
        f"{name} in {vhost} is on the broker, and nobody registered it"
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
    """Give the agents' accounts that may do something in these vhosts, and that no row stands for."""
    known = {one.hex for one in EventSubscription.objects.values_list("uuid", flat=True)}
    known |= set(Consumer.objects.values_list("rmq_username", flat=True))
    return [
        f"the RabbitMQ user {user} has permissions in {vhost}, and no row"
        for user, allowed in management.all_permissions().items()
        for vhost in allowed
        if vhost in vhosts and is_agents_login(user) and user not in known
    ]


def missing_registrations(registered: Iterable[tuple[str, str]]) -> list[str]:
    """Give those of these queues (vhost, name), whose registration was answered, that aren't registered."""
    ready: set[tuple[str, str]] = set()
    for model in REGISTERED:
        rows = model._default_manager.filter(state=Registration.READY).order_by()
        ready.update(rows.values_list("vhost", "queue_name"))
    return [
        f"the registration of {name} in {vhost} was answered, and is not there"
        for vhost, name in registered
        if (vhost, name) not in ready
    ]


def overlapping_passes() -> list[str]:
    """Return the passes that began before another was over."""
    wrong = []
    passes = Pass.objects.order_by("at").values_list("at", "seconds")
    for (earlier, seconds), (later, _) in itertools.pairwise(passes):
        if later < earlier + timedelta(seconds=seconds):
            wrong.append(f"the pass of {later:%T.%f} began before the one of {earlier:%T.%f} was over")
    return wrong


def _notification_uuid(mail: Mail) -> uuid.UUID | None:
    """Give the UUID of the notification that this mail is by its Message-ID; None: it is none of Guardian's."""
    if "X-Guardian-Kind" not in mail.message:
        return None
    found = _MESSAGE_ID.match(str(mail.message["Message-ID"]))
    return uuid.UUID(found[1]) if found else None


def _describe(one: Notification) -> str:
    about = f" about {one.facts['queue']}" if "queue" in one.facts else ""
    return f"the {one.kind}{about} to {one.recipient}"
