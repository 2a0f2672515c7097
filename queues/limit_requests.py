"""Requests of owners for another deletion limit of a queue. Operators decide on the page that the mail links to."""

from django.core.exceptions import ValidationError
from django.db import transaction
from django.utils import timezone

from accounts import audit
from accounts.models import Owner
from core import limits
from notifications import enqueue
from notifications.audience import operators_and_staff
from notifications.enqueue import Notice
from queues import kinds, thresholds
from queues.models import Queue

MAX_REASON_LENGTH = 500

REQUESTS = limits.RateLimit("requests for other limits", 5, 3600)
"""From one owner."""


def ask(queue: Queue, by: Owner, max_length: int, reason: str) -> None:
    """Ask the operators for a deletion limit of this queue, in messages.

    Raises:
        ValidationError: the limit is not higher than the present one, the queue has none, or there is no operator.
        RateLimitExceeded: the owner sent too many requests.
    """
    if thresholds.is_spared(queue):
        raise ValidationError("Guardian never deletes this queue for its length.")
    present = thresholds.of_queue(queue).max
    if max_length <= present:
        raise ValidationError({"max_length": f"Enter more than {present:,}, the present limit."})
    recipients = operators_and_staff()
    if not recipients:
        raise ValidationError("No operator has an address here. Ask in person.")
    limits.consume(REQUESTS, str(by.pk))
    facts = {
        "queue": queue.name,
        "vhost": queue.vhost,
        "uuid": queue.uuid.hex,
        "asks": by.email,
        "reason": reason,
        "length": queue.length,
        "max": present,
        "wanted": max_length,
    }
    with transaction.atomic():
        enqueue.enqueue([Notice(kinds.LIMIT_REQUEST, facts, recipients=recipients)], timezone.now())
        audit.record(by, "asked for another limit", [queue], max_length=max_length)
    enqueue.nudge()
