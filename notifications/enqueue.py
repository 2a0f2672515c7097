"""Writing notifications: in the transaction of the state that caused them, one row for each recipient."""

import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from celery import current_app

from core import bulk
from notifications import claims, kinds
from notifications.audience import EMAIL, Ownership, Recipient, operators, recipients_of
from notifications.models import Notification
from notifications.preferences import deferred_until

logger = logging.getLogger(__name__)


COLUMNS = (
    "uuid", "recipient", "channel", "kind", "about", "facts", "deferred_until", "state", "created", "due_at",
    "attempts", "last_error",
)  # fmt: skip


@dataclass(frozen=True)
class Notice:
    """One thing to tell, before it is known whom.

    Whoever is to hear of the queues of ``pulse_user_id`` is recipients, or the owner ``owner_id`` of the agents whose it is,
    and operators get a copy of everything. Where ``recipients`` are given, these addresses alone are recipients instead, by
    mail, once ``deferred_until`` is over.
    ``facts`` is what the message says.
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
        """Who owns the queue that this is about."""
        return Ownership(self.pulse_user_id, self.owner_id)

    @property
    def about(self) -> str:
        """What it is about: messages about one thing reach one recipient in order."""
        return self.subject or (self.kind if self.recipients else "the broker")


def enqueue(notices: Sequence[Notice], now: datetime) -> int:
    """Write the outbox rows of these, one for each recipient, and return their number.

    Call it in the transaction that writes the state that caused them, and ``nudge`` once that is committed.
    """
    people = recipients_of(notice.ownership for notice in notices)
    copies = operators()
    rows: list[tuple[Any, ...]] = []
    brought_forward = []
    for notice in notices:
        recipients = people.get(notice.ownership, [])
        owners = [one.address for one in recipients if one.channel == EMAIL and not one.account]
        is_deletion = kinds.get(notice.kind).is_final
        for to in _recipients(notice, recipients, copies):
            deferred = notice.deferred_until
            if not is_deletion and (to.channel != EMAIL or to.address not in copies):
                deferred = deferred or deferred_until(*to.quiet, now)
            facts = {**notice.facts, "owners": owners}
            if to.account:
                facts |= {"account": to.account, "added_by": to.added_by}
            common = (notice.kind, notice.about, facts, deferred)
            state = (Notification.State.DUE, now, now, 0, "")
            rows.append((uuid.uuid4(), to.address, to.channel, *common, *state))
            if is_deletion:
                brought_forward.append((notice.about, to.address, to.channel))
    if brought_forward:
        _release_deferred(brought_forward)
    bulk.insert(Notification, COLUMNS, rows)
    return len(rows)


def _recipients(notice: Notice, recipients: list[Recipient], copies: list[str]) -> list[Recipient]:
    """Return where this goes, each place once: an owner is recipients as an owner, whatever else the address stands for."""
    if notice.recipients:
        return [Recipient(address) for address in dict.fromkeys(notice.recipients)]
    places: dict[tuple[str, str], Recipient] = {}
    for recipient in [*recipients, *map(Recipient, copies)]:
        places.setdefault((recipient.address, recipient.channel), recipient)
    return list(places.values())


def _release_deferred(keys: Sequence[tuple[str, str, str]]) -> None:
    """Hold nothing back any more about these things, given with recipient and channel: what follows can't wait."""
    these = bulk.among(Notification, ("about", "recipient", "channel"), keys)
    # What is just being sent is past its hold. Its sender notes several at once, and would wait for this in a circle.
    deferred = Notification.objects.filter(these, state=Notification.State.DUE, deferred_until__isnull=False)
    deferred.update(deferred_until=None)


def nudge(written: int = 1) -> None:
    """Ask a worker to send what is due, and another one to help where more was written than one claim takes.

    It is the processor that mails cost most. When the task queue is away, the sweep does it later.
    """
    try:
        for _ in range(2 if written > claims.MAX_CLAIMED else 1):
            current_app.send_task("notifications.tasks.send_notifications", expires=60, retry=False)
    except Exception as error:  # whatever the transport raises: nothing depends on it
        logger.warning("The task queue is away (%s); the sweep will send what is due.", error)
