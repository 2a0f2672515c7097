"""What people are to be told: written with the state that caused it, claimed by one sender, retried for a day.

No correctness rests on a task being delivered: a task is a nudge, the row is the truth, and ``send_due`` finds it.
Two senders never send one row at once, as each claims its rows by a conditional update. A sender that is killed between
the mail server's "accepted" and its own note of it makes the mail go out again; it has the same Message-ID.
"""

import logging
import smtplib
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from celery import current_app
from django.conf import settings
from django.core.mail import get_connection
from django.core.mail.backends.base import BaseEmailBackend
from django.db.models import Exists, OuterRef, Q
from django.utils import timezone

from accounts.models import PulseUser, normal_address
from queues import bulk, mails
from queues.models import Notification

logger = logging.getLogger(__name__)

BATCH = 100
CLAIM_SECONDS = 300
"""How long a sender may take over a batch. It stops before; what is left is claimed by the next."""

RETRY_FIRST_SECONDS = 15
RETRY_MOST_SECONDS = 900
GIVE_UP_AFTER = timedelta(hours=24)
GIVE_UP_ATTEMPTS = 100
"""So many attempts take a day. Both have to be over: a clock that jumps a day ahead is no day of trying."""

FIELDS = (
    "uuid", "recipient", "kind", "queue", "about", "facts", "channel", "state", "created", "due_at", "attempts",
    "last_error",
)  # fmt: skip
Unsent = Q(state__in=[Notification.State.DUE, Notification.State.SENDING])


@dataclass(frozen=True)
class Telling:
    """One thing to tell, before it is known whom.

    Owners of ``pulse_user_id`` are told, and operators get a copy of everything. ``facts`` is what the message says.
    """

    kind: str
    facts: dict[str, Any]
    queue_id: int | None = None
    pulse_user_id: int | None = None


@dataclass
class Delivery:
    """What became of the notifications that were due, as numbers of them."""

    sent: int = 0
    postponed: int = 0
    failed: int = 0


def operators() -> list[str]:
    """Return the addresses that get a copy of everything."""
    return list(dict.fromkeys(normal_address(address) for address in settings.GUARDIAN_OPERATOR_EMAILS))


def owners_of(pulse_users: Iterable[int | None]) -> dict[int, list[str]]:
    """Return the addresses of the owners of these Pulse users, by the Pulse user's id."""
    wanted = {pulse_user for pulse_user in pulse_users if pulse_user is not None}
    owners: dict[int, list[str]] = {}
    if not wanted:
        return owners
    through = PulseUser.owners.through
    these = bulk.among(through, ("pulseuser",), [(pulse_user,) for pulse_user in wanted])
    rows = through.objects.filter(these, owner__is_active=True).order_by("owner__email")
    for pulse_user, address in rows.values_list("pulseuser", "owner__email"):
        owners.setdefault(pulse_user, []).append(address)
    return owners


def is_anybody_told(pulse_user_id: int | None, owners: dict[int, list[str]]) -> bool:
    """Return whether a message about a queue of this Pulse user has a recipient at all."""
    return bool(settings.GUARDIAN_OPERATOR_EMAILS) or bool(pulse_user_id is not None and owners.get(pulse_user_id))


def tell(tellings: Sequence[Telling], now: datetime) -> int:
    """Write the outbox rows of these, one for each recipient, and return their number.

    Call it in the transaction that writes the state that caused them, and ``nudge`` once that is committed.
    """
    owners = owners_of(telling.pulse_user_id for telling in tellings)
    rows = []
    for telling in tellings:
        told = owners.get(telling.pulse_user_id, []) if telling.pulse_user_id is not None else []
        facts = {**telling.facts, "owners": told}
        about = f"queue {telling.queue_id}" if telling.queue_id is not None else "the broker"
        common = (telling.kind, telling.queue_id, about, facts, "email", Notification.State.DUE, now, now, 0, "")
        rows += [(uuid.uuid4(), recipient, *common) for recipient in dict.fromkeys([*told, *operators()])]
    bulk.insert(Notification, FIELDS, rows)
    return len(rows)


def nudge() -> None:
    """Ask a worker to send what is due. When the task queue is away, the sweep does it later."""
    try:
        current_app.send_task("queues.tasks.send_notifications", expires=60, retry=False)
    except Exception as error:  # whatever the transport raises: nothing depends on it
        logger.warning("The task queue is away (%s); the sweep will send what is due.", error)


def send_due() -> Delivery:
    """Send everything that is due now, and return what became of it.

    It stops early where the mail server can't be reached: everything stays in the outbox, to be tried again.
    """
    delivery = Delivery()
    while batch := claim(BATCH):
        if not _send(batch, delivery):
            break
    return delivery


def claim(limit: int) -> list[Notification]:
    """Claim up to so many notifications that are due, oldest first, and return them.

    A notification waits for the earlier ones about the same thing to the same recipient, so that the last message that
    a person has is the last one that was written.
    """
    now = timezone.now()
    earlier = Notification.objects.filter(
        Unsent,
        about=OuterRef("about"),
        recipient=OuterRef("recipient"),
        channel=OuterRef("channel"),
        id__lt=OuterRef("id"),
    )
    # Due, or due later than anything is ever put off: then the clock was set back.
    is_due = Q(due_at__lte=now) | Q(due_at__gt=now + timedelta(seconds=RETRY_MOST_SECONDS))
    due = Notification.objects.filter(Unsent, is_due, ~Exists(earlier)).order_by("id")
    ids = list(due.values_list("id", flat=True)[:limit])
    if not ids:
        return []
    mine = uuid.uuid4()
    Notification.objects.filter(Unsent, is_due, id__in=ids).update(
        state=Notification.State.SENDING, claim=mine, due_at=now + timedelta(seconds=CLAIM_SECONDS)
    )
    mails_of_mine = Notification.objects.filter(claim=mine, state=Notification.State.SENDING)
    return list(mails_of_mine.select_related("queue").order_by("id"))


def _send(batch: list[Notification], delivery: Delivery) -> bool:
    """Send these, and return whether the mail server could be reached."""
    began = time.monotonic()
    connection: BaseEmailBackend = get_connection()
    left = list(batch)
    try:
        connection.open()
        while left and time.monotonic() - began < CLAIM_SECONDS / 2:
            _send_one(left[0], connection, delivery)
            left.pop(0)
    except (OSError, ValueError) as error:  # ValueError: an address or a host name that is none
        # Each of the others would wait for it as long, and passes for a free worker.
        logger.warning("The mail server can't be reached (%s); %d notifications wait.", error, len(left))
        for notification in left:
            _postpone(notification, error, delivery)
        return False
    finally:
        _close(connection)
    return True


def _send_one(notification: Notification, connection: BaseEmailBackend, delivery: Delivery) -> None:
    """Send one, or put it off where the mail server refuses this one. Anything else that fails is raised."""
    try:
        message = mails.compose(notification, connection)
    except Exception as error:  # a template that can't be filled in never will be; the others must not wait for it
        logger.exception("Notification %s can't be put into words.", notification.uuid)
        _finish(notification, state=Notification.State.FAILED, last_error=repr(error)[:1000])
        delivery.failed += 1
        return
    try:
        message.send()
    except (smtplib.SMTPResponseException, smtplib.SMTPRecipientsRefused, ValueError) as error:
        _postpone(notification, error, delivery)
        _close(connection)  # the next one opens it anew
    else:
        _finish(notification, state=Notification.State.SENT, sent_at=timezone.now(), last_error="")
        delivery.sent += 1


def _postpone(notification: Notification, error: Exception, delivery: Delivery) -> None:
    now = timezone.now()
    attempts = notification.attempts + 1
    if now - notification.created >= GIVE_UP_AFTER and attempts >= GIVE_UP_ATTEMPTS:
        logger.error("Notification %s to %s given up: %s", notification.uuid, notification.recipient, error)
        _finish(notification, state=Notification.State.FAILED, attempts=attempts, last_error=str(error)[:1000])
        delivery.failed += 1
        return
    _finish(
        notification,
        state=Notification.State.DUE,
        attempts=attempts,
        due_at=now + timedelta(seconds=retry_seconds(attempts)),
        last_error=str(error)[:1000],
    )
    delivery.postponed += 1


def _finish(notification: Notification, **values: Any) -> None:
    Notification.objects.filter(id=notification.id, claim=notification.claim).update(claim=None, **values)


def retry_seconds(attempts: int) -> int:
    """Return how long to wait after so many failed attempts: twice as long each time, up to a quarter of an hour."""
    return min(RETRY_MOST_SECONDS, RETRY_FIRST_SECONDS << min(attempts - 1, 10))


def _close(connection: BaseEmailBackend) -> None:
    try:
        connection.close()
    except (OSError, smtplib.SMTPException):
        logger.debug("The mail server went before it was left.")
