"""Sending mails: several at once, each over a connection that stays open."""

import logging
import smtplib
import time
from collections import deque
from collections.abc import Collection
from concurrent.futures import wait
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from django.core.mail import EmailMessage, get_connection
from django.core.mail.backends.base import BaseEmailBackend
from django.utils import timezone

from notifications import claims, mails
from notifications.claims import (
    DeliveryCounts,
    claim,
    drop_outdated,
    postpone,
    record_sent,
    release_claim,
    render_or_fail,
)
from notifications.models import Notification
from rabbit.threads import ContextThreadPool

logger = logging.getLogger(__name__)

MAX_SENDING_SECONDS = 30
"""For so long one call sends mails. What is due after that is the next one's."""

MAX_CONNECTIONS = 4
"""Connections to the mail server at most, on which one call sends side by side."""

MAIL_BATCH_SIZE = 16
"""Mails that one call puts into words, sends and notes together. The mail server may have accepted as many of them at
most that are not noted yet."""


def send_mails(counts: DeliveryCounts) -> None:
    """Send the mails that are due, several at once, until none is, the time is over or the mail server is away."""
    until = time.monotonic() + MAX_SENDING_SECONDS
    connections: list[BaseEmailBackend] = [get_connection() for _ in range(MAX_CONNECTIONS)]
    usable = Connections(open=set(), unused=set(connections))
    with ContextThreadPool(MAX_CONNECTIONS) as pool:
        try:
            while time.monotonic() < until and (batch := claim(claims.MAX_CLAIMED)):
                counts.claimed += len(batch)
                if not _send(pool, usable, drop_outdated(batch), until, counts):
                    break
        finally:
            list(pool.map(_close, connections))


class Connections(NamedTuple):
    """Connections to the mail server that may be sent over: ``open`` are those that were, ``unused`` the others."""

    open: set[BaseEmailBackend]
    unused: set[BaseEmailBackend]

    def first(self, number: int) -> list[BaseEmailBackend]:
        """Return so many at most, those that stand before others."""
        return [*self.open, *self.unused][:number]

    def note(self, tried: Collection[BaseEmailBackend], failed: Collection[BaseEmailBackend]) -> None:
        """Do without those that failed, and then without the unused ones: a server may want no more of them."""
        self.open.update(tried)
        self.open.difference_update(failed)
        self.unused.difference_update(tried)
        if failed:
            self.unused.clear()


@dataclass
class MailBatch:
    """Mails that wait for a connection, in words, and what became of those that were sent over one."""

    waiting: deque[tuple[Notification, EmailMessage]]
    arrived: list[Notification] = field(default_factory=list)
    failed: list[tuple[Notification, Exception]] = field(default_factory=list)


def _send(
    pool: ContextThreadPool, usable: Connections, batch: list[Notification], until: float, counts: DeliveryCounts
) -> bool:
    """Send these as long as there is time, and return whether the mail server can still be reached.

    Several are put into words first, and then sent side by side: beside threads that send, everything else waits for
    its turn. No two of a batch are about one thing to one recipient.
    """
    left = deque(batch)
    away: Exception = ConnectionError("there is no connection to it")
    while any(usable) and left and time.monotonic() < until:
        bag = MailBatch(_render_next(left, until, counts))
        trying = usable.first(len(bag.waiting))
        sending = [pool.submit(_send_over, connection, bag, until) for connection in trying]
        try:
            reasons = [future.result() for future in sending]
        finally:
            wait(sending)  # nobody closes a connection that is in use
            record_sent(bag.arrived, counts)
        for notification, error in bag.failed:
            postpone(notification, error, counts)
        left.extendleft(notification for notification, _ in reversed(bag.waiting))
        failed = {connection: reason for connection, reason in zip(trying, reasons, strict=True) if reason}
        usable.note(trying, failed)
        away = next(iter(failed.values()), away)
    if any(usable):
        for notification in left:
            release_claim(notification, state=Notification.State.DUE, due_at=timezone.now())
        return True
    # Each of the others would wait for it as long, and passes for a free worker.
    logger.warning("The mail server can't be reached (%s); %d notifications wait.", away, len(left))
    for notification in left:
        postpone(notification, away, counts)
    return False


def _render_next(
    left: deque[Notification], until: float, counts: DeliveryCounts
) -> deque[tuple[Notification, EmailMessage]]:
    """Take the next of these, ``MAIL_BATCH_SIZE`` at most, and return in words what is still to be said of them."""
    found: deque[tuple[Notification, EmailMessage]] = deque()
    while left and len(found) < MAIL_BATCH_SIZE and time.monotonic() < until:
        notification = left.popleft()
        message = render_or_fail(notification, partial(mails.compose, notification), counts)
        if message is not None:
            found.append((notification, message))
    return found


def _send_over(connection: BaseEmailBackend, bag: MailBatch, until: float) -> Exception | None:
    """Send what waits over this connection, one at least, and return why it is of no more use, or None.

    Runs beside others, without the database.
    """
    while True:
        try:
            notification, message = bag.waiting.popleft()
        except IndexError:
            return None
        try:
            _send_one(message, connection)
        except _NotOpened as reason:
            bag.waiting.appendleft((notification, message))
            return reason.error
        except OSError as error:
            bag.failed.append((notification, error))
            return error
        except _NotSent as reason:
            bag.failed.append((notification, reason.error))
        except Exception as error:  # of this mail alone: the others must not wait for it
            logger.exception("Notification %s can't be sent.", notification.uuid)
            bag.failed.append((notification, error))
        else:
            bag.arrived.append(notification)
        if time.monotonic() >= until:
            return None


class _NotSent(Exception):
    """The mail server refuses this mail; others may go. ``error`` is its reason."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class _NotOpened(_NotSent):
    """A connection didn't come about, so that nothing was sent over it."""


def _send_one(message: EmailMessage, connection: BaseEmailBackend) -> None:
    """Send a mail over its connection, which is opened where it isn't open. Runs beside others, without the database.

    Raises:
        _NotOpened: the mail server can't be reached, or wants no further connection.
        _NotSent: it refuses this mail.
        OSError: the connection was cut.
    """
    try:
        connection.open()
    except (OSError, ValueError) as error:  # ValueError: a host name that is none
        raise _NotOpened(error) from error
    try:
        connection.send_messages([message])
    except smtplib.SMTPHeloError as error:
        _close(connection)
        raise _NotOpened(error) from error
    except (smtplib.SMTPResponseException, smtplib.SMTPRecipientsRefused, ValueError) as error:
        _close(connection)  # the next one opens it anew
        raise _NotSent(error) from error


def _close(connection: BaseEmailBackend) -> None:
    try:
        connection.close()
    except (OSError, smtplib.SMTPException):
        logger.debug("The mail server went before it was left.")
