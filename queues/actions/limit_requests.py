"""Requests of owners for a higher deletion limit of a queue, and the operators' decisions.

A request is an event of the queue. It is open until an operator changes the limits or declines it.
"""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from django.core.exceptions import PermissionDenied, ValidationError
from django.db import transaction
from django.db.models import Exists, F, OuterRef, Q, QuerySet
from django.utils import timezone

from accounts import audit
from accounts.models import Owner
from core import limits
from core.texts import check_line
from notifications import enqueue
from notifications.audience import operators_and_staff
from notifications.enqueue import Notice
from queues.mails import kinds
from queues.models import Queue, QueueEvent
from queues.rules import thresholds
from queues.rules.temporary_limits import check_end, recorded

MAX_REASON_LENGTH = 500

REQUESTS = limits.RateLimit("requests for other limits", 5, 3600)
"""From one owner."""

ANSWERS = (QueueEvent.Kind.ADJUSTED, QueueEvent.Kind.DECLINED)


def open_requests() -> QuerySet[QueueEvent]:
    """Return the requests without an answer, the latest first."""
    answers = QueueEvent.objects.filter(queue=OuterRef("queue"), kind__in=ANSWERS, id__gt=OuterRef("id"))
    asked = QueueEvent.objects.filter(kind=QueueEvent.Kind.ASKED, queue__isnull=False)
    # Of a queue that is gone, those since count: it may be restored with a higher limit.
    of_gone = Q(queue__state=Queue.State.GONE, at__lte=F("queue__last_seen"))
    unanswered = asked.exclude(of_gone).exclude(Exists(answers))
    return unanswered.select_related("by", "queue__pulse_user")


def open_request(queue: Queue) -> QueueEvent | None:
    return open_requests().filter(queue=queue).first()


def _checked(reason: str) -> str:
    """Return a reason as one line. Raises ValidationError for ``reason``."""
    line = " ".join(reason.split())
    try:
        check_line(line, MAX_REASON_LENGTH)
    except ValidationError as error:
        raise ValidationError({"reason": error.messages}) from error
    return line


def ask(queue: Queue, by: Owner, max_length: int, reason: str, limits_until: datetime | None = None) -> None:
    """Ask the operators for a deletion limit of this queue, in messages, permanently or until this time.

    Raises RateLimitExceeded. The limit is invalid if it is not higher than the present one, the queue has none, a
    request is open, or there is no operator.
    """
    reason = _checked(reason)
    if not thresholds.has_limit(queue):
        raise ValidationError("Guardian never deletes this queue for its length.")
    present = thresholds.of_queue(queue).max
    if max_length <= present:
        raise ValidationError({"max_length": f"Enter more than {present:,}, the present limit."})
    check_end(limits_until, timezone.now())
    end: dict[str, Any] = {"limits_until": limits_until.astimezone(UTC).isoformat()} if limits_until else {}
    recipients = operators_and_staff()
    if not recipients:
        raise ValidationError("No operator has an address here. Ask in person.")
    limits.consume(REQUESTS, str(by.pk))
    facts = {**_named(queue), "asks": by.email, "reason": reason, "length": queue.length, "max": present}
    with transaction.atomic():
        Queue.objects.select_for_update().get(pk=queue.pk)
        if (earlier := open_request(queue)) is not None:
            wanted = earlier.details["wanted"]
            raise ValidationError(f"The operators have not decided about the request for {wanted:,} yet.")
        queue.new_event(QueueEvent.Kind.ASKED, by, wanted=max_length, reason=reason, **end).save()
        notice = Notice(kinds.LIMIT_REQUEST, {**facts, **end, "wanted": max_length}, recipients=recipients)
        enqueue.enqueue([notice], timezone.now())
        audit.record(by, "asked for another limit", [queue], max_length=max_length)
    enqueue.wake()


def decline(queue: Queue, by: Owner, reason: str) -> None:
    """Decline the open request about this queue. Who asked gets the reason by mail."""
    if not by.is_staff:
        raise PermissionDenied("Only operators decide about requests.")
    reason = _checked(reason)
    with transaction.atomic():
        Queue.objects.select_for_update().get(pk=queue.pk)
        if (request := open_request(queue)) is None:
            raise ValidationError("No request is open: it was answered in the meantime.")
        _notify(request, by, {"declined": reason})
        queue.new_event(QueueEvent.Kind.DECLINED, by, reason=reason).save()
        audit.record(by, "declined a higher limit", [queue])
    enqueue.wake()


def answer(changed: Iterable[Queue], by: Owner | None) -> None:
    """Notify those who asked for other limits of these queues that the limits are set. Call it before the event."""
    for request in open_requests().filter(queue__in=[queue.pk for queue in changed]):
        if request.queue is not None:
            limit = thresholds.of_queue(request.queue).max if thresholds.has_limit(request.queue) else None
            _notify(request, by, {"max": limit, "limits_until": recorded(request.queue)["limits_until"]})


def _notify(request: QueueEvent, by: Owner | None, decision: dict[str, object]) -> None:
    """Notify who asked, if they can still sign in and see the queue."""
    if request.by is None or request.queue is None or not request.by.is_active:
        return
    if Queue.objects.seen_by(request.by).filter(pk=request.queue.pk).exists():
        who = by.email if by else "An operator"
        facts = {**_named(request.queue), "wanted": request.details["wanted"], "by": who, **decision}
        enqueue.enqueue([Notice(kinds.LIMIT_ANSWER, facts, recipients=[request.by.email])], timezone.now())


def _named(queue: Queue) -> dict[str, object]:
    return {"queue": queue.name, "vhost": queue.vhost, "uuid": queue.uuid.hex}
