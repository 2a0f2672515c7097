"""Write notifications to the outbox: one row for each recipient, in the transaction of the state that caused them."""

import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from celery import current_app

from core import bulk
from core.leases import HeldLease
from notifications import claims, kinds, mutes
from notifications.audience import EMAIL, Ownership, Recipient, operators, recipients_of
from notifications.models import Notification
from notifications.preferences import deferred_until

logger = logging.getLogger(__name__)

COLUMNS = (
    "uuid", "recipient", "channel", "kind", "about", "facts", "deferred_until", "state", "created", "due_at",
    "attempts", "last_error", "group",
)  # fmt: skip


@dataclass(frozen=True)
class Notice:
    """A notification without its recipients.

    They follow from ``pulse_user_id`` or ``owner_id``, and operators get a copy. If ``recipients`` are given, only
    these addresses get it, by mail, after ``deferred_until``. ``facts`` is the content of the message.
    """

    kind: str
    facts: dict[str, Any]
    subject: str = ""
    pulse_user_id: int | None = None
    owner_id: int | None = None
    recipients: Sequence[str] = ()
    deferred_until: datetime | None = None

    @property
    def ownership(self) -> Ownership:
        return Ownership(self.pulse_user_id, self.owner_id)

    @property
    def about(self) -> str:
        """The subject's key. Messages about one subject reach one recipient in order."""
        return self.subject or (self.kind if self.recipients else "the broker")


def enqueue(notices: Sequence[Notice], now: datetime, lease: HeldLease | None = None) -> int:
    """Write the outbox rows of these notices, one for each recipient, and return their number.

    Call it in the transaction that writes the state that caused them. After the commit, call ``wake``. Notifications
    about subjects that are written under one ``lease`` are a group: they are sent when it ends, many as one message.
    """
    people = recipients_of(notice.ownership for notice in notices)
    pulse_users = {notice.pulse_user_id for notice in notices if notice.pulse_user_id is not None}
    muted = mutes.load(pulse_users, {notice.subject for notice in notices if notice.subject}, now)
    operator_addresses = operators()
    rows: list[tuple[Any, ...]] = []
    for notice in notices:
        kind = kinds.get(notice.kind)
        everybody = people.get(notice.ownership, [])
        owners = [one.address for one in everybody if one.channel == EMAIL and not one.pulse_user]
        interested = [one for one in everybody if not muted.apply(kind, notice.pulse_user_id, notice.subject, one)]
        group = lease.holder if lease is not None and kind.topic else None
        for to in _recipients(notice, interested, operator_addresses):
            deferred = notice.deferred_until
            if kind.severity is not kinds.Severity.CRITICAL and (
                to.channel != EMAIL or to.address not in operator_addresses
            ):
                deferred = deferred or deferred_until(*to.quiet, now)
            facts = {**notice.facts, "owners": owners}
            *_, zone = to.quiet
            if zone != "UTC":
                facts |= {"time_zone": zone}
            if to.pulse_user:
                facts |= {"account": to.pulse_user, "added_by": to.added_by}
            common = (notice.kind, notice.about, facts, deferred)
            state = (Notification.State.DUE, now, now, 0, "", group)
            rows.append((uuid.uuid4(), to.address, to.channel, *common, *state))
    bulk.insert(Notification, COLUMNS, rows)
    return len(rows)


def _recipients(notice: Notice, interested: list[Recipient], operator_addresses: list[str]) -> list[Recipient]:
    """Return the distinct recipients. An owner is listed as such, even if also an added address or an operator."""
    if notice.recipients:
        return [Recipient(address) for address in dict.fromkeys(notice.recipients)]
    distinct: dict[tuple[str, str], Recipient] = {}
    for recipient in [*interested, *map(Recipient, operator_addresses)]:
        distinct.setdefault((recipient.address, recipient.channel), recipient)
    return list(distinct.values())


def wake(written: int = 1) -> None:
    """Start a task that sends what is due, and a second one if more was written than one claim takes.

    Mails cost mostly processor time, so two workers share it. Without the task queue, the periodic task sends them.
    """
    try:
        for _ in range(2 if written > claims.MAX_CLAIMED else 1):
            current_app.send_task("notifications.tasks.send_notifications", expires=60, retry=False)
    except Exception as error:  # any error of the transport: nothing depends on the task
        logger.warning("The task queue is unreachable (%s); the periodic task will send what is due.", error)
