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
from notifications.claims import Delivery, claim, finish, in_words, note_sent, postpone, still_to_tell
from notifications.models import Notification
from rabbit.threads import ContextThreadPool

logger = logging.getLogger(__name__)

MAIL_SECONDS = 30
"""For so long one call sends mails. What is due after that is the next one's."""

MAILS_AT_ONCE = 4
"""Connections to the mail server at most, on which one call sends side by side."""

MAILS_TOGETHER = 16
"""Mails that one call puts into words, sends and notes together. The mail server may have accepted as many of them at
most that are not noted yet."""


def send_mails(delivery: Delivery) -> None:
    """Send the mails that are due, several at once, until none is, the time is over or the mail server is away."""
    until = time.monotonic() + MAIL_SECONDS
    connections: list[BaseEmailBackend] = [get_connection() for _ in range(MAILS_AT_ONCE)]
    usable = Usable(standing=set(), spare=set(connections))
    with ContextThreadPool(MAILS_AT_ONCE) as pool:
        try:
            while time.monotonic() < until and (batch := claim(claims.BATCH)):
                delivery.claimed += len(batch)
                if not _send(pool, usable, still_to_tell(batch), until, delivery):
                    break
        finally:
            list(pool.map(_close, connections))


class Usable(NamedTuple):
    """Connections to the mail server that may be sent over: ``standing`` are those that were, ``spare`` the others."""

    standing: set[BaseEmailBackend]
    spare: set[BaseEmailBackend]

    def first(self, number: int) -> list[BaseEmailBackend]:
        """Return so many at most, those that stand before others."""
        return [*self.standing, *self.spare][:number]

    def note(self, tried: Collection[BaseEmailBackend], failed: Collection[BaseEmailBackend]) -> None:
        """Do without those that failed, and then without the spare ones: a server may want no more of them."""
        self.standing.update(tried)
        self.standing.difference_update(failed)
        self.spare.difference_update(tried)
        if failed:
            self.spare.clear()


@dataclass
class Mailbag:
    """Mails that wait for a connection, in words, and what became of those that were sent over one."""

    waiting: deque[tuple[Notification, EmailMessage]]
    arrived: list[Notification] = field(default_factory=list)
    failed: list[tuple[Notification, Exception]] = field(default_factory=list)


def _send(pool: ContextThreadPool, usable: Usable, batch: list[Notification], until: float, delivery: Delivery) -> bool:
    """Send these as long as there is time, and return whether the mail server can still be reached.

    Several are put into words first, and then sent side by side: beside threads that send, everything else waits for
    its turn. No two of a batch are about one thing to one recipient.
    """
    left = deque(batch)
    away: Exception = ConnectionError("there is no connection to it")
    while any(usable) and left and time.monotonic() < until:
        bag = Mailbag(_next_in_words(left, until, delivery))
        trying = usable.first(len(bag.waiting))
        sending = [pool.submit(_send_over, connection, bag, until) for connection in trying]
        try:
            reasons = [future.result() for future in sending]
        finally:
            wait(sending)  # nobody closes a connection that is in use
            note_sent(bag.arrived, delivery)
        for notification, error in bag.failed:
            postpone(notification, error, delivery)
        left.extendleft(notification for notification, _ in reversed(bag.waiting))
        failed = {connection: reason for connection, reason in zip(trying, reasons, strict=True) if reason}
        usable.note(trying, failed)
        away = next(iter(failed.values()), away)
    if any(usable):
        for notification in left:
            finish(notification, state=Notification.State.DUE, due_at=timezone.now())
        return True
    # Each of the others would wait for it as long, and passes for a free worker.
    logger.warning("The mail server can't be reached (%s); %d notifications wait.", away, len(left))
    for notification in left:
        postpone(notification, away, delivery)
    return False


def _next_in_words(
    left: deque[Notification], until: float, delivery: Delivery
) -> deque[tuple[Notification, EmailMessage]]:
    """Take the next of these, ``MAILS_TOGETHER`` at most, and return in words what is still to be said of them."""
    found: deque[tuple[Notification, EmailMessage]] = deque()
    while left and len(found) < MAILS_TOGETHER and time.monotonic() < until:
        notification = left.popleft()
        message = in_words(notification, partial(mails.compose, notification), delivery)
        if message is not None:
            found.append((notification, message))
    return found


def _send_over(connection: BaseEmailBackend, bag: Mailbag, until: float) -> Exception | None:
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
