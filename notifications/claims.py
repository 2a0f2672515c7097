"""Claim notifications that are due, and record their outcomes."""

import logging
import operator
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from datetime import timedelta
from functools import reduce
from typing import Any, TypeVar

from django.db import transaction
from django.db.models import Exists, Min, OuterRef, Q, QuerySet
from django.db.models.lookups import In
from django.utils import timezone

from accounts.models import Owner
from core import bulk, leases
from notifications import kinds, subjects
from notifications.audience import EMAIL, Ownership, operators, recipients_of
from notifications.grouping import Delivery
from notifications.models import Notification
from notifications.retries import retry_seconds, should_give_up

logger = logging.getLogger(__name__)

MAX_CLAIMED = 50
"""Notifications in one claim: few enough that two senders share those of one pass evenly. A group counts as one."""

CLAIM_SECONDS = 300
"""A claim expires after this time. Senders stop earlier; another one claims the rest."""


REPLACED = "A later notification replaces it."
SUBJECT_GONE = "The queue is gone."
NOT_ACTIVE = "The recipient can no longer sign in."
NOT_INTERESTED = "The recipient is no longer notified about this subject."
CHANNEL_REMOVED = "The channel was removed."
OUTDATED = (REPLACED, SUBJECT_GONE, NOT_ACTIVE, NOT_INTERESTED, CHANNEL_REMOVED)
"""The reasons why a notification is not sent any more."""

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
        return DeliveryCounts(*map(sum, zip(astuple(self), astuple(other), strict=True)))


def claim(limit: int, *, to_channels: bool = False) -> list[Notification]:
    """Claim and return mails, or messages to channels, that are due: up to ``limit``, oldest first, and their groups.

    A notification waits for earlier ones about the same subject to the same recipient, so that messages arrive in
    order, unless it replaces them. A critical one does not wait for those that quiet hours defer. A group waits for the
    end of the lease under which it is written. It is claimed together with its first notification, so that no other
    sender claims a part of it.
    """
    now = timezone.now()
    is_released = Q(deferred_until=None) | Q(deferred_until__lte=now)
    is_due = Unsent & Q(due_at__lte=now) & is_released & ~Q(group__in=leases.holders())
    wanted = ~Q(channel=EMAIL) if to_channels else Q(channel=EMAIL)
    is_replaced = _any(Q(kind__in=old) & Q(In(OuterRef("kind"), new)) for old, new in kinds.replacements())
    earlier = Notification.objects.filter(
        Unsent,
        is_released | ~Q(In(OuterRef("kind"), kinds.critical())),
        Q(state=Notification.State.SENDING) | ~is_replaced,
        about=OuterRef("about"),
        recipient=OuterRef("recipient"),
        channel=OuterRef("channel"),
        id__lt=OuterRef("id"),
    )
    ready = Notification.objects.filter(wanted, is_due, ~Exists(earlier))
    in_groups = Notification.objects.filter(is_due, group__isnull=False).order_by()
    firsts = in_groups.values("group", "recipient", "channel").annotate(first=Min("id")).values("first")
    leading = ready.filter(Q(group=None) | Q(id__in=firsts)).order_by("id")
    claim_id = uuid.uuid4()
    with transaction.atomic():
        bulk.disable_nested_loops()  # the statistics lack rows that just became due
        locked = leading.select_for_update(skip_locked=True).values_list("id", "group", "recipient", "channel")
        rows = list(locked[:limit])
        if not rows:
            return []
        selected = Q(id__in=[id_ for id_, *_ in rows])
        if groups := [group for _, *group in rows if group[0] is not None]:
            selected |= Q(bulk.among(Notification, ("group", "recipient", "channel"), groups))
        ready.filter(selected).update(
            state=Notification.State.SENDING, claim=claim_id, due_at=now + timedelta(seconds=CLAIM_SECONDS)
        )
    claimed = Notification.objects.filter(claim=claim_id, state=Notification.State.SENDING)
    return list(claimed.order_by("id"))


def drop_outdated(claimed: list[Notification]) -> list[Notification]:
    """Return the claimed notifications that are still true, and whose recipients still get them. The others fail.

    While a message waits, its subject may change, or its recipient may lose the Pulse user or the right to sign in.
    Operators get their copies anyway, and everybody gets the deletion of a queue whose Pulse user or owner was removed
    too.
    """
    current = subjects.look_up({one.about for one in claimed})
    for one in claimed:
        one.subject = current.get(one.about)
    recipients = {
        (ownership, recipient.address, recipient.channel)
        for ownership, interested in recipients_of(subject.ownership for subject in current.values()).items()
        for recipient in interested
    }
    owners = dict(Owner.objects.filter(email__in={one.recipient for one in claimed}).values_list("email", "is_active"))
    operator_addresses = operators()
    replaced = _replaced(claimed)

    def why_outdated(one: Notification) -> str:
        kind = kinds.get(one.kind)
        if one.id in replaced:
            return REPLACED
        if one.subject is not None and one.subject.is_gone and kind.topic and not kind.is_final:
            return SUBJECT_GONE
        if one.channel == EMAIL and one.recipient in operator_addresses:
            return ""
        if not owners.get(one.recipient, not kind.needs_active_recipient):
            return NOT_ACTIVE
        is_interested = (
            one.subject is None
            or (kind.is_final and one.subject.ownership == Ownership())
            or (one.subject.ownership, one.recipient, one.channel) in recipients
        )
        return "" if is_interested else NOT_INTERESTED

    by_reason: dict[str, list[Notification]] = {}
    for one in claimed:
        by_reason.setdefault(why_outdated(one), []).append(one)
    remaining = by_reason.pop("", [])
    for reason, outdated in by_reason.items():
        release(outdated, state=Notification.State.FAILED, last_error=reason)
    return remaining


def _replaced(claimed: Sequence[Notification]) -> set[int]:
    """Return the ids of the notifications that a later one replaces."""
    replaces = _any(Q(kind__in=new) & Q(In(OuterRef("kind"), old)) for old, new in kinds.replacements())
    later = Notification.objects.filter(
        replaces,
        about=OuterRef("about"),
        recipient=OuterRef("recipient"),
        channel=OuterRef("channel"),
        id__gt=OuterRef("id"),
    )
    return set(_rows(claimed).filter(Exists(later)).values_list("id", flat=True)) if claimed else set()


def _any(conditions: Iterable[Q]) -> Q:
    return reduce(operator.or_, conditions)


def record_sent(deliveries: Sequence[Delivery], counts: DeliveryCounts) -> None:
    """Record in one statement that these messages of one claim were sent."""
    sent = [one for delivery in deliveries for one in delivery]
    release(sent, state=Notification.State.SENT, sent_at=timezone.now(), last_error="")
    counts.sent += len(sent)


def render_or_fail(delivery: Delivery, render: Callable[..., T], counts: DeliveryCounts) -> T | None:
    """Return what ``render`` returns for these notifications, or None if it fails or they are not to be sent now."""
    try:
        return render(*delivery)
    except kinds.Obsolete as error:
        release(delivery, state=Notification.State.FAILED, last_error=str(error))
    except kinds.OfAnotherRelease as error:
        postpone(delivery, error, counts)
    except Exception as error:  # a retry would fail too, and must not delay the others
        logger.exception("Notification %s could not be rendered.", delivery[0].uuid)
        release(delivery, state=Notification.State.FAILED, last_error=repr(error)[:1000])
        counts.failed += len(delivery)
    return None


def postpone(delivery: Delivery, error: Exception, counts: DeliveryCounts) -> None:
    """Record a failed attempt, and schedule the next one or give up."""
    now = timezone.now()
    first = delivery[0]
    attempts = max(one.attempts for one in delivery) + 1
    if should_give_up(first.created, attempts, now):
        logger.error("Gave up notification %s to %s: %s", first.uuid, first.recipient, error)
        release(delivery, state=Notification.State.FAILED, attempts=attempts, last_error=str(error)[:1000])
        counts.failed += len(delivery)
        return
    release(
        delivery,
        state=Notification.State.DUE,
        attempts=attempts,
        due_at=now + timedelta(seconds=retry_seconds(attempts)),
        last_error=str(error)[:1000],
    )
    counts.postponed += len(delivery)


def release(notifications: Sequence[Notification], **values: Any) -> None:
    """Release the claim of these notifications and write these values, if this sender still has the claim."""
    if notifications:
        _rows(notifications).filter(claim=notifications[0].claim).update(claim=None, **values)


def _rows(notifications: Sequence[Notification]) -> QuerySet[Notification]:
    return Notification.objects.filter(pk__in=[one.pk for one in notifications])
