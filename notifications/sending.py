"""Send the notifications in the outbox.

A notification is written with the state that caused it, claimed by one sender, and retried for a day. No correctness
rests on the delivery of a task: the row is the truth, and ``send_due`` finds it.

Each sender claims its rows by a conditional update, and skips locked ones, so no two send the same row. If a sender is
killed after the mail server accepted mails and before it recorded them, these are sent again with the same Message-ID:
at most ``MAIL_BATCH_SIZE``.

A call of ``send_due`` ends within about a minute, and the next one continues. Mails are sent first. One process at a
time sends to channels, several concurrently, so unresponsive services block at most one worker.
"""

import logging
from collections.abc import Collection

from django.db import transaction
from django.db.models import Exists, F, OuterRef, Q
from django.utils import timezone

from accounts import audit
from core.leases import LeaseTaken, lease
from notifications.channel_sending import send_to_channels
from notifications.claims import DeliveryCounts
from notifications.enqueue import wake
from notifications.mail_sending import send_mails
from notifications.models import Notification

logger = logging.getLogger(__name__)

LEASE = "channels"


def send_again(selected: Collection[int]) -> int:
    """Send the failed ones of these notifications as if they were new, and return their number.

    A notification is left out if a later one about the same subject to the same recipient was sent, or failed and is
    not selected: it is no longer true. Concurrent calls send it once.
    """
    states = Notification.State
    later = Notification.objects.filter(
        Q(state=states.SENT) | (Q(state=states.FAILED) & ~Q(pk__in=selected)),
        about=OuterRef("about"),
        recipient=OuterRef("recipient"),
        channel=OuterRef("channel"),
        id__gt=OuterRef("id"),
    ).exclude(kind=F("about"))  # notifications without a subject, such as the weekly summary
    failed = Notification.objects.filter(~Exists(later), pk__in=selected, state=states.FAILED)
    with transaction.atomic():
        again = list(failed.select_for_update().order_by("pk"))
        if again:
            Notification.objects.filter(pk__in=[one.pk for one in again]).update(
                state=states.DUE, attempts=0, due_at=timezone.now(), claim=None, deferred_until=None, last_error=""
            )
            audit.record(None, "sent again", again)
            transaction.on_commit(wake, robust=True)
    return len(again)


def send_due() -> DeliveryCounts:
    """Send what is due, mails first, and return the numbers by outcome. After the time limit the rest stays due.

    Mails end early if the mail server is unreachable, and are retried later. Channels are skipped if another process is
    sending to them.
    """
    counts = DeliveryCounts()
    send_mails(counts)
    try:
        with lease(LEASE):
            send_to_channels(counts)
    except LeaseTaken:
        logger.debug("Another process is sending to channels.")
    return counts
