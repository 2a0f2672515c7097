"""Claim notifications that are due, and record their outcomes."""

import logging
import uuid
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from datetime import timedelta
from typing import Any, TypeVar

from django.db import transaction
from django.db.models import Exists, OuterRef, Q
from django.db.models.lookups import In
from django.utils import timezone

from accounts.models import Owner
from core import bulk
from notifications import kinds, subjects
from notifications.audience import EMAIL, Ownership, operators, recipients_of
from notifications.models import Notification
from notifications.retries import retry_seconds, should_give_up

logger = logging.getLogger(__name__)

MAX_CLAIMED = 50
"""Notifications in one claim: few enough that two senders share those of one pass evenly."""

CLAIM_SECONDS = 300
"""A claim expires after this time. Senders stop earlier; another one claims the rest."""


T = TypeVar("T")

Unsent = Q(state__in=[Notification.State.DUE, Notification.State.SENDING])


@dataclass
class DeliveryCounts:
    """The numbers of notifications by outcome.

    A ``claimed`` one in no other number became outdated, or is still due because the time was over.
    """

    claimed: int = 0
    sent: int = 0
    postponed: int = 0
    failed: int = 0

    def __add__(self, other: "DeliveryCounts") -> "DeliveryCounts":
        """Return the sums."""
        return DeliveryCounts(*map(sum, zip(astuple(self), astuple(other), strict=True)))


def claim(limit: int, *, to_channels: bool = False) -> list[Notification]:
    """Claim and return up to ``limit`` mails, or messages to channels, that are due, oldest first.

    A notification waits for earlier ones about the same subject to the same recipient, so that messages arrive in
    order. Only a deletion does not wait for deferred ones: ``enqueue`` releases these, but it cannot see rows that
    another process has not committed yet.
    """
    now = timezone.now()
    is_released = Q(deferred_until=None) | Q(deferred_until__lte=now)
    precedes_deletion = Q(In(OuterRef("kind"), kinds.final()))
    wanted = Unsent & (~Q(channel=EMAIL) if to_channels else Q(channel=EMAIL))
    earlier = Notification.objects.filter(
        Unsent,
        is_released | ~precedes_deletion,
        about=OuterRef("about"),
        recipient=OuterRef("recipient"),
        channel=OuterRef("channel"),
        id__lt=OuterRef("id"),
    )
    is_due = Q(due_at__lte=now) & is_released
    due = Notification.objects.filter(wanted, is_due, ~Exists(earlier)).order_by("id")
    claim_id = uuid.uuid4()
    with transaction.atomic():
        bulk.disable_nested_loops()  # the statistics lack rows that just became due
        ids = list(due.select_for_update(skip_locked=True).values_list("id", flat=True)[:limit])
        if not ids:
            return []
        Notification.objects.filter(Unsent, is_due, id__in=ids).update(
            state=Notification.State.SENDING, claim=claim_id, due_at=now + timedelta(seconds=CLAIM_SECONDS)
        )
    claimed = Notification.objects.filter(claim=claim_id, state=Notification.State.SENDING)
    return list(claimed.order_by("id"))


def drop_outdated(batch: list[Notification]) -> list[Notification]:
    """Return the notifications whose recipients still get them. The others become failed.

    While a message is deferred, its recipient may lose the account or the right to sign in. Operators get their copies
    anyway, and everybody gets the deletion of a queue whose account or owner was removed too.
    """
    current = subjects.look_up({one.about for one in batch})
    for one in batch:
        one.subject = current.get(one.about)
    recipients = {
        (ownership, recipient.address, recipient.channel)
        for ownership, interested in recipients_of(subject.ownership for subject in current.values()).items()
        for recipient in interested
    }
    owners = dict(Owner.objects.filter(email__in={one.recipient for one in batch}).values_list("email", "is_active"))
    operator_addresses = operators()
    remaining = []
    for one in batch:
        if one.channel == EMAIL and one.recipient in operator_addresses:
            remaining.append(one)
        elif not owners.get(one.recipient, not kinds.get(one.kind).needs_active_recipient):
            release_claim(one, state=Notification.State.FAILED, last_error="The recipient can no longer sign in.")
        elif (
            one.subject is None
            or (kinds.get(one.kind).is_final and one.subject.ownership == Ownership())
            or (one.subject.ownership, one.recipient, one.channel) in recipients
        ):
            remaining.append(one)
        else:
            release_claim(
                one,
                state=Notification.State.FAILED,
                last_error="The recipient is no longer notified about this subject.",
            )
    return remaining


def record_sent(sent: Sequence[Notification], counts: DeliveryCounts) -> None:
    """Record that these notifications of one claim were sent, in one statement, after one for each deletion."""
    if not sent:
        return
    for deletion in sent:
        if not kinds.get(deletion.kind).is_final:
            continue
        # A deferred notification that the deletion overtook (see ``claim``) is no longer true.
        before = Notification.objects.filter(
            state=Notification.State.DUE,
            about=deletion.about,
            recipient=deletion.recipient,
            channel=deletion.channel,
            id__lt=deletion.id,
        )
        before.update(state=Notification.State.FAILED, last_error="The queue was deleted in the meantime.")
    Notification.objects.filter(id__in=[one.id for one in sent], claim=sent[0].claim).update(
        claim=None, state=Notification.State.SENT, sent_at=timezone.now(), last_error=""
    )
    counts.sent += len(sent)


def render_or_fail(notification: Notification, render: Callable[[], T], counts: DeliveryCounts) -> T | None:
    """Return the result of ``render``, or None if it fails or the notification is obsolete, and record that."""
    try:
        return render()
    except kinds.Obsolete as error:
        release_claim(notification, state=Notification.State.FAILED, last_error=str(error))
    except Exception as error:  # a retry would fail too, and must not delay the others
        logger.exception("Notification %s could not be rendered.", notification.uuid)
        release_claim(notification, state=Notification.State.FAILED, last_error=repr(error)[:1000])
        counts.failed += 1
    return None


def postpone(notification: Notification, error: Exception, counts: DeliveryCounts) -> None:
    """Record a failed attempt, and schedule the next one or give up."""
    now = timezone.now()
    attempts = notification.attempts + 1
    if should_give_up(notification.created, attempts, now):
        logger.error("Gave up notification %s to %s: %s", notification.uuid, notification.recipient, error)
        release_claim(notification, state=Notification.State.FAILED, attempts=attempts, last_error=str(error)[:1000])
        counts.failed += 1
        return
    release_claim(
        notification,
        state=Notification.State.DUE,
        attempts=attempts,
        due_at=now + timedelta(seconds=retry_seconds(attempts)),
        last_error=str(error)[:1000],
    )
    counts.postponed += 1


def release_claim(notification: Notification, **values: Any) -> None:
    """Release the claim of a notification and write these values, if this sender still has the claim."""
    Notification.objects.filter(id=notification.id, claim=notification.claim).update(claim=None, **values)
