"""Send mails concurrently, over connections that stay open."""

import logging
import smtplib
import time
from collections import deque
from collections.abc import Collection, Iterable
from concurrent.futures import wait
from dataclasses import dataclass, field
from typing import NamedTuple

from django.core.mail import EmailMessage, get_connection
from django.core.mail.backends.base import BaseEmailBackend
from django.utils import timezone

from notifications import claims, grouping, mails
from notifications.claims import (
    DeliveryCounts,
    claim,
    drop_outdated,
    postpone,
    record_sent,
    release,
    render_or_fail,
)
from notifications.grouping import Delivery
from notifications.models import Notification
from rabbit.threads import ContextThreadPool

logger = logging.getLogger(__name__)

MAX_SENDING_SECONDS = 30
"""The time limit of one call. The next call sends the rest."""

MAX_CONNECTIONS = 4
"""Concurrent connections of one call to the mail server."""

MAIL_BATCH_SIZE = 16
"""Mails that are rendered, sent and recorded together. A crash can leave this many accepted but not recorded."""


def send_mails(counts: DeliveryCounts) -> None:
    """Send due mails concurrently, until none is due, the time is over or the mail server is unreachable."""
    deadline = time.monotonic() + MAX_SENDING_SECONDS
    connections: list[BaseEmailBackend] = [get_connection() for _ in range(MAX_CONNECTIONS)]
    usable = Connections(open=set(), unused=set(connections))
    with ContextThreadPool(MAX_CONNECTIONS) as pool:
        try:
            while time.monotonic() < deadline and (batch := claim(claims.MAX_CLAIMED)):
                counts.claimed += len(batch)
                if not _send(pool, usable, grouping.deliveries(drop_outdated(batch)), deadline, counts):
                    break
        finally:
            list(pool.map(_close, connections))


class Connections(NamedTuple):
    """Usable connections to the mail server: ``open`` ones that have sent, and ``unused`` ones."""

    open: set[BaseEmailBackend]
    unused: set[BaseEmailBackend]

    def first(self, number: int) -> list[BaseEmailBackend]:
        """Return up to ``number`` connections, open ones first."""
        return [*self.open, *self.unused][:number]

    def record(self, tried: Collection[BaseEmailBackend], failed: Collection[BaseEmailBackend]) -> None:
        """Drop the failed connections, and with them the unused ones: the server may limit their number."""
        self.open.update(tried)
        self.open.difference_update(failed)
        self.unused.difference_update(tried)
        if failed:
            self.unused.clear()


@dataclass
class MailBatch:
    """Rendered mails that wait for a connection, and the outcomes of the others."""

    waiting: deque[tuple[Delivery, EmailMessage]]
    sent: list[Delivery] = field(default_factory=list)
    failed: list[tuple[Delivery, Exception]] = field(default_factory=list)


def _send(
    pool: ContextThreadPool, usable: Connections, batch: list[Delivery], deadline: float, counts: DeliveryCounts
) -> bool:
    """Send these mails until the deadline, and return whether the mail server is still reachable.

    Mails are rendered before the threads start, as sending threads slow down everything else. A batch never has two
    mails about one subject to one recipient.
    """
    left = deque(batch)
    away: Exception = ConnectionError("there is no connection to it")
    while any(usable) and left and time.monotonic() < deadline:
        mail_batch = MailBatch(_render_next(left, deadline, counts))
        trying = usable.first(len(mail_batch.waiting))
        sending = [pool.submit(_send_over, connection, mail_batch, deadline) for connection in trying]
        try:
            reasons = [future.result() for future in sending]
        finally:
            wait(sending)  # close no connection in use
            record_sent(mail_batch.sent, counts)
        for delivery, error in mail_batch.failed:
            postpone(delivery, error, counts)
        left.extendleft(delivery for delivery, _ in reversed(mail_batch.waiting))
        failed = {connection: reason for connection, reason in zip(trying, reasons, strict=True) if reason}
        usable.record(trying, failed)
        away = next(iter(failed.values()), away)
    if any(usable):
        release(_all(left), state=Notification.State.DUE, due_at=timezone.now())
        return True
    # Postpone the rest: each would wait as long, and passes need a free worker.
    logger.warning("The mail server is unreachable (%s); %d notifications wait.", away, len(_all(left)))
    for delivery in left:
        postpone(delivery, away, counts)
    return False


def _all(deliveries: Iterable[Delivery]) -> list[Notification]:
    return [one for delivery in deliveries for one in delivery]


def _render_next(
    left: deque[Delivery], deadline: float, counts: DeliveryCounts
) -> deque[tuple[Delivery, EmailMessage]]:
    """Remove up to ``MAIL_BATCH_SIZE`` messages from ``left``, and return those that could be rendered."""
    rendered: deque[tuple[Delivery, EmailMessage]] = deque()
    while left and len(rendered) < MAIL_BATCH_SIZE and time.monotonic() < deadline:
        delivery = left.popleft()
        message = render_or_fail(delivery, mails.compose, counts)
        if message is not None:
            rendered.append((delivery, message))
    return rendered


def _send_over(connection: BaseEmailBackend, mail_batch: MailBatch, deadline: float) -> Exception | None:
    """Send waiting mails over this connection, at least one, and return the error that broke it, or None.

    It runs in a thread, without the database.
    """
    while True:
        try:
            delivery, message = mail_batch.waiting.popleft()
        except IndexError:
            return None
        try:
            _send_one(message, connection)
        except _NotOpened as reason:
            mail_batch.waiting.appendleft((delivery, message))
            return reason.error
        except OSError as error:
            mail_batch.failed.append((delivery, error))
            return error
        except _NotSent as reason:
            mail_batch.failed.append((delivery, reason.error))
        except Exception as error:  # only of this mail: it must not delay the others
            logger.exception("Notification %s could not be sent.", delivery[0].uuid)
            mail_batch.failed.append((delivery, error))
        else:
            mail_batch.sent.append(delivery)
        if time.monotonic() >= deadline:
            return None


class _NotSent(Exception):
    """The mail server refused this mail, for the reason ``error``. It may accept others."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class _NotOpened(_NotSent):
    """The connection could not be opened, so nothing was sent."""


def _send_one(message: EmailMessage, connection: BaseEmailBackend) -> None:
    """Send a mail, and open the connection if needed. It runs in a thread, without the database.

    Raises _NotSent if the mail server refuses this mail, _NotOpened if it is unreachable or refuses another connection,
    and OSError if the connection was closed.
    """
    try:
        connection.open()
    except (OSError, ValueError) as error:  # ValueError: an invalid host name
        raise _NotOpened(error) from error
    try:
        connection.send_messages([message])
    except smtplib.SMTPHeloError as error:
        _close(connection)
        raise _NotOpened(error) from error
    except (smtplib.SMTPResponseException, smtplib.SMTPRecipientsRefused, ValueError) as error:
        _close(connection)  # the next mail opens it again
        raise _NotSent(error) from error


def _close(connection: BaseEmailBackend) -> None:
    try:
        connection.close()
    except (OSError, smtplib.SMTPException):
        logger.debug("The mail server closed the connection first.")
