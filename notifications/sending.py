"""What people are to be told: written with the state that caused it, claimed by one sender, retried for a day.

No correctness rests on a task being delivered: a task is a nudge, the row is the truth, and ``send_due`` finds it.
Two senders never send one row at once, as each claims its rows by a conditional update, and takes others where some are
just being claimed. A sender that is killed between the mail server's "accepted" and its own note of it makes the few
mails that it had not noted go out again, with the same Message-ID: ``MAIL_BATCH_SIZE`` at most.

A call of ``send_due`` is over within a minute or so, however much is due, and the next one goes on. Mails go first.
Channels have one sender at a time, which sends to several side by side: services that don't answer hold one worker
at most.
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
from notifications.enqueue import nudge
from notifications.mail_sending import send_mails
from notifications.models import Notification

logger = logging.getLogger(__name__)

LEASE = "channels"


def send_again(picked: Collection[int]) -> int:
    """Have those of these that were given up sent as if they were new, and return their number.

    Left out is what a later message about the same thing to the same recipient has made untrue: one that was sent, or
    was given up too and isn't among these. Two who ask for it at once have it sent once.
    """
    states = Notification.State
    later = Notification.objects.filter(
        Q(state=states.SENT) | (Q(state=states.FAILED) & ~Q(pk__in=picked)),
        about=OuterRef("about"),
        recipient=OuterRef("recipient"),
        channel=OuterRef("channel"),
        id__gt=OuterRef("id"),
    ).exclude(kind=F("about"))  # a letter about nothing else, such as an owner's week
    given_up = Notification.objects.filter(~Exists(later), pk__in=picked, state=states.FAILED)
    with transaction.atomic():
        again = list(given_up.select_for_update().order_by("pk"))
        if again:
            Notification.objects.filter(pk__in=[one.pk for one in again]).update(
                state=states.DUE, attempts=0, due_at=timezone.now(), claim=None, deferred_until=None, last_error=""
            )
            audit.record(None, "had sent again", again)
            transaction.on_commit(nudge, robust=True)
    return len(again)


def send_due() -> DeliveryCounts:
    """Send what is due now, mails first, and return what became of it. Where the time is over, the rest stays due.

    It stops early where the mail server can't be reached: everything stays in the outbox, to be tried again. Channels
    are left to whoever is sending to them already.
    """
    counts = DeliveryCounts()
    send_mails(counts)
    try:
        with lease(LEASE):
            send_to_channels(counts)
    except LeaseTaken:
        logger.debug("Another process is sending to channels.")
    return counts
