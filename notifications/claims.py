"""Claiming what is due, and recording what became of it."""

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

logger = logging.getLogger(__name__)

CLAIM_SECONDS = 300
"""How long a sender may take over a batch. It stops before; what is left is claimed by the next."""

FIRST_RETRY_SECONDS = 15

MAX_RETRY_SECONDS = 900

RETRY_FOR = timedelta(hours=24)

MIN_ATTEMPTS = 100
"""So many attempts take a day. Both have to be over: a clock that jumps a day ahead is no day of trying."""


T = TypeVar("T")

Unsent = Q(state__in=[Notification.State.DUE, Notification.State.SENDING])


@dataclass
class DeliveryCounts:
    """What became of the notifications that were due, as numbers of them.

    What was ``claimed`` and is nothing of the rest was given up quietly, or is still due as the time was over.
    """

    claimed: int = 0
    sent: int = 0
    postponed: int = 0
    failed: int = 0

    def __add__(self, other: "DeliveryCounts") -> "DeliveryCounts":
        """Return what became of both."""
        return DeliveryCounts(*map(sum, zip(astuple(self), astuple(other), strict=True)))


def claim(limit: int, *, to_channels: bool = False) -> list[Notification]:
    """Claim up to so many mails, or messages to channels, that are due, oldest first, and return them.

    A notification waits for the earlier ones about the same thing to the same recipient, so that the last message that
    a person has is the last one that was written. Only a deletion doesn't wait for what is held: ``tell`` releases
    that, but can't see what another process has written and not committed.
    """
    now = timezone.now()
    is_free = Q(deferred_until=None) | Q(deferred_until__lte=now)
    is_before_deletion = Q(In(OuterRef("kind"), kinds.final()))
    wanted = Unsent & (~Q(channel=EMAIL) if to_channels else Q(channel=EMAIL))
    earlier = Notification.objects.filter(
        Unsent,
        is_free | ~is_before_deletion,
        about=OuterRef("about"),
        recipient=OuterRef("recipient"),
        channel=OuterRef("channel"),
        id__lt=OuterRef("id"),
    )
    is_due = Q(due_at__lte=now) & is_free
    due = Notification.objects.filter(wanted, is_due, ~Exists(earlier)).order_by("id")
    mine = uuid.uuid4()
    with transaction.atomic():
        bulk.disable_nested_loops()  # what has just become due is in no statistics
        ids = list(due.select_for_update(skip_locked=True).values_list("id", flat=True)[:limit])
        if not ids:
            return []
        Notification.objects.filter(Unsent, is_due, id__in=ids).update(
            state=Notification.State.SENDING, claim=mine, due_at=now + timedelta(seconds=CLAIM_SECONDS)
        )
    of_mine = Notification.objects.filter(claim=mine, state=Notification.State.SENDING)
    return list(of_mine.order_by("id"))


def drop_outdated(batch: list[Notification]) -> list[Notification]:
    """Return those of these whose recipients still are to hear of it. The others are given up quietly.

    Messages can be held for hours, and meanwhile somebody is taken off an account, or can't sign in any more. What
    operators get as such is sent, and so is a deletion of a queue whose account or owner went with it.
    """
    there = subjects.look_up({one.about for one in batch})
    for one in batch:
        one.subject = there.get(one.about)
    told = {
        (owned, recipient.address, recipient.channel)
        for owned, recipients in recipients_of(subject.ownership for subject in there.values()).items()
        for recipient in recipients
    }
    owners = dict(Owner.objects.filter(email__in={one.recipient for one in batch}).values_list("email", "is_active"))
    copies = operators()
    still = []
    for one in batch:
        if one.channel == EMAIL and one.recipient in copies:
            still.append(one)
        elif not owners.get(one.recipient, not kinds.get(one.kind).needs_active_recipient):
            release_claim(one, state=Notification.State.FAILED, last_error="The recipient can't sign in any more.")
        elif (
            one.subject is None
            or (kinds.get(one.kind).is_final and one.subject.ownership == Ownership())
            or (one.subject.ownership, one.recipient, one.channel) in told
        ):
            still.append(one)
        else:
            release_claim(one, state=Notification.State.FAILED, last_error="The recipient is not told of it any more.")
    return still


def record_sent(sent: Sequence[Notification], counts: DeliveryCounts) -> None:
    """Note that these, which were claimed together, arrived. In one statement, and one before it for each deletion."""
    if not sent:
        return
    for deletion in sent:
        if not kinds.get(deletion.kind).is_final:
            continue
        # Held until after it, as ``claim`` tells: it would not be true any more.
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
    """Return what ``render`` does, or None where there is nothing to send any more, which is written down."""
    try:
        return render()
    except kinds.Obsolete as error:
        release_claim(notification, state=Notification.State.FAILED, last_error=str(error))
    except Exception as error:  # a template that can't be filled in never will be; the others must not wait for it
        logger.exception("Notification %s can't be put into render.", notification.uuid)
        release_claim(notification, state=Notification.State.FAILED, last_error=repr(error)[:1000])
        counts.failed += 1
    return None


def postpone(notification: Notification, error: Exception, counts: DeliveryCounts) -> None:
    """Record that a notification could not be sent, and when it is tried again, or that it is given up."""
    now = timezone.now()
    attempts = notification.attempts + 1
    if now - notification.created >= RETRY_FOR and attempts >= MIN_ATTEMPTS:
        logger.error("Notification %s to %s given up: %s", notification.uuid, notification.recipient, error)
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
    """Record what became of a notification and give up its claim, if it still is this sender's."""
    Notification.objects.filter(id=notification.id, claim=notification.claim).update(claim=None, **values)


def retry_seconds(attempts: int) -> int:
    """Return how long to wait after so many failed attempts: twice as long each time, up to a quarter of an hour."""
    return min(MAX_RETRY_SECONDS, FIRST_RETRY_SECONDS << min(attempts - 1, 10))


MAX_CLAIMED = 50
"""Notifications that one claim takes at most: so few that two senders share what one pass tells evenly."""
