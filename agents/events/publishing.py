"""Publish an event to every agent that registered for its offering and object type.

Guardian doesn't store events. Deliveries that failed are counted in the response and in the queue's history.
"""

import json
import logging
import reprlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.core.exceptions import PermissionDenied
from django.db import DatabaseError, transaction
from django.utils import timezone

from accounts.access.vouching import require_vouched
from accounts.models import Owner
from agents.events.delivery import record_outcomes
from agents.models import Consumer, Offering, Registration, SubscriptionQueue, may_subscribe
from agents.registration.identities import check_object_type
from core import broker, bulk, limits
from core.refusals import Refusal
from queues.models import Queue, QueueEvent
from rabbit.names import QueueName
from rabbit.publishing import Message, OutcomeUnknown, Result

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1
"""The version of the fields that Guardian adds to the payload."""

MAX_PAYLOAD_BYTES = 1024 * 1024
"""Of the payload as JSON."""

FOLD_INTERVAL = timedelta(minutes=1)
"""Failed deliveries to one queue within this time are counted in one event of its history."""

DELIVERY_PRECISION = timedelta(seconds=10)
"""How often the time of the last delivery to a queue is written at most."""

MAX_QUEUES_LOGGED = 10
"""Queues named in one log line."""

BEING_CREATED = "it is still being created"
NOT_ALLOWED = "its owner may not have this offering's events any more"
MISSING = "the broker doesn't have it"
UNREACHABLE = "its node is down, or its virtual host accepts no further connection"
FULL = "it is full"

Undelivered = tuple[QueueEvent.Kind, str]
"""The kind of a failed delivery to a queue, and the reason."""


class InvalidPayload(Refusal):
    field = "payload"


@dataclass(frozen=True)
class Published:
    """The result of publishing an event, in numbers of queues.

    ``delivered``: got the event. ``skipped``: not ready, or the owner may no longer subscribe. ``rejected``: full; the
    broker moved the event to the dead-letter queue of the vhost. ``unreachable``: its node is down, or its
    vhost accepts no further connection. ``gone``: ready here, but not on the broker. The message id is 32 hex digits.
    """

    message_id: str
    delivered: int = 0
    skipped: int = 0
    rejected: int = 0
    unreachable: int = 0
    gone: int = 0


def publish(
    offering: Offering,
    object_type: str,
    payload: Mapping[str, Any],
    by: Owner | None = None,
    message_id: uuid.UUID | None = None,
) -> Published:
    """Publish an event of an offering to the agents that registered for this type. ``by`` None: Guardian itself.

    Agents get the payload with ``object_type``, ``offering_uuid`` and ``schema_version``. To repeat a call with an
    unknown outcome, pass its message id, so that agents can drop duplicates. Do not call this in a transaction. The
    number of statements doesn't depend on the number of queues.

    Raises OutcomeUnknown if some queues may have the event; ``results`` contains the known outcomes. After any other
    error nothing was published: PermissionDenied (as NotVouched, too), Refusal or BrokerError.
    """
    if by is not None:
        require_vouched(by)
        if not Offering.objects.published_by(by).filter(pk=offering.pk).exists():
            raise PermissionDenied(f"{by.email} may not publish events of {offering.name}. Ask an operator.")
        limits.consume(limits.RateLimit("events", settings.GUARDIAN_EVENTS_PER_MINUTE, 60), by.uuid.hex)
    check_object_type(object_type)
    body = _body(offering, object_type, payload)
    id_ = (message_id or uuid.uuid4()).hex
    ready, skipped = _recipients(offering, object_type)
    _log(offering, object_type, id_, skipped)
    results: dict[QueueName, Result] = {}
    unknown: OutcomeUnknown | None = None
    if ready:
        message = Message(id_, body, type=object_type, headers={"object_type": object_type})
        try:
            results = broker.publisher().publish(list(ready), message)
        except OutcomeUnknown as error:
            results, unknown = error.results, error
    failed = _failed_deliveries(results)
    _log(offering, object_type, id_, failed)
    precise = timezone.now() - DELIVERY_PRECISION
    delivered = [
        queue
        for queue, result in results.items()
        if result is Result.DELIVERED and ((last := ready[queue]) is None or last < precise)
    ]
    _record(offering, delivered, skipped | failed)
    if unknown is not None:
        raise unknown
    found = list(results.values())
    return Published(
        id_,
        delivered=found.count(Result.DELIVERED),
        skipped=len(skipped),
        rejected=found.count(Result.REJECTED),
        unreachable=found.count(Result.UNREACHABLE),
        gone=found.count(Result.GONE),
    )


def _body(offering: Offering, object_type: str, payload: Mapping[str, Any]) -> bytes:
    if not isinstance(payload, Mapping):
        raise InvalidPayload("The payload must be a JSON object.")
    added = {"object_type": object_type, "offering_uuid": offering.uuid.hex, "schema_version": SCHEMA_VERSION}
    for key, value in added.items():
        found = payload.get(key, value)
        same = _uuid_hex(found) if key == "offering_uuid" else found
        if type(same) is not type(value) or same != value:
            raise InvalidPayload(
                f"'{key}' is {reprlib.repr(found)} in the payload, but must be {value!r}. Leave it out."
            )
    try:
        body = json.dumps({**payload, **added}, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        # Not serializable: NaN, a lone surrogate, Python objects, circular references.
        raise InvalidPayload(f"The payload can't be serialized as JSON: {error}.") from error
    if len(body) > MAX_PAYLOAD_BYTES:
        raise InvalidPayload(f"The payload has {len(body):,} bytes as JSON; at most {MAX_PAYLOAD_BYTES:,} are allowed.")
    return body


def _uuid_hex(text: Any) -> str | None:
    """Return a UUID in any notation as 32 hex digits, or None if the value is no UUID."""
    try:
        return uuid.UUID(text).hex if isinstance(text, str) else None
    except ValueError:
        return None


def _recipients(
    offering: Offering, object_type: str
) -> tuple[dict[QueueName, datetime | None], dict[QueueName, Undelivered]]:
    """Return the queues that get the event, each with its last delivery, and the skipped ones with their reasons."""
    columns = ("vhost", "queue_name", "state", "last_delivered_at", "allowed")
    queues = (
        SubscriptionQueue.objects.filter(offering=offering, object_type=object_type)
        .annotate(allowed=may_subscribe("subscription__owner", "offering"))
        .order_by()
        .values_list(*columns)
    )
    consumers = (
        Consumer.objects.filter(identity__offering=offering)
        .annotate(allowed=may_subscribe("identity__owner", "identity__offering"))
        .order_by()
        .values_list(*columns, "object_types")
    )
    registered = [*queues, *(one[:5] for one in consumers if not one[5] or object_type in one[5])]
    ready: dict[QueueName, datetime | None] = {}
    skipped: dict[QueueName, Undelivered] = {}
    for vhost, name, state, last_delivered_at, allowed in registered:
        if allowed and state == Registration.READY:
            ready[vhost, name] = last_delivered_at
        else:
            skipped[vhost, name] = QueueEvent.Kind.SKIPPED, BEING_CREATED if allowed else NOT_ALLOWED
    return ready, skipped


def _failed_deliveries(results: Mapping[QueueName, Result]) -> dict[QueueName, Undelivered]:
    reasons = {
        Result.GONE: (QueueEvent.Kind.SKIPPED, MISSING),
        Result.REJECTED: (QueueEvent.Kind.REJECTED, FULL),
        Result.UNREACHABLE: (QueueEvent.Kind.SKIPPED, UNREACHABLE),
    }
    return {queue: reasons[result] for queue, result in results.items() if result in reasons}


def _log(offering: Offering, object_type: str, message_id: str, undelivered: Mapping[QueueName, Undelivered]) -> None:
    for kind, why in sorted(set(undelivered.values())):
        names = [f"{name} in {vhost}" for (vhost, name), found in undelivered.items() if found == (kind, why)]
        more = f" and {len(names) - MAX_QUEUES_LOGGED} more" if len(names) > MAX_QUEUES_LOGGED else ""
        logger.warning(
            "The event %s (%s of %s) was %s for %s%s: %s",
            message_id, object_type, offering.uuid.hex, kind, ", ".join(names[:MAX_QUEUES_LOGGED]), more, why,
        )  # fmt: skip


def _record(offering: Offering, delivered: Sequence[QueueName], undelivered: Mapping[QueueName, Undelivered]) -> None:
    """Record deliveries on the queues' rows, and count failed ones in the queues' histories."""
    if not delivered and not undelivered:
        return
    try:
        with transaction.atomic():
            # Otherwise two concurrent publishers would both insert the first event. A queue belongs to one offering.
            list(Offering.objects.select_for_update(no_key=True).order_by().filter(pk=offering.pk).values_list("pk"))
            record_outcomes(
                delivered, {queue: f"The queue got no event: {why}." for queue, (_, why) in undelivered.items()}
            )
            if undelivered:
                _count(undelivered)
    except DatabaseError:
        # The agents have the event. Reporting a failure would make the publisher repeat it.
        logger.exception("Could not record the deliveries of an event")


def _count(undelivered: Mapping[QueueName, Undelivered]) -> None:
    """Count failed deliveries: one event a minute for each queue and kind."""
    now, keys = timezone.now(), list(undelivered)
    recent = QueueEvent.objects.filter(
        bulk.among(QueueEvent, ("vhost", "queue_name"), keys),
        kind__in=[QueueEvent.Kind.SKIPPED, QueueEvent.Kind.REJECTED],
        at__gt=now - FOLD_INTERVAL,
    )
    existing = {
        (vhost, name, kind): (id_, details)
        for id_, vhost, name, kind, details in recent.order_by().values_list(
            "id", "vhost", "queue_name", "kind", "details"
        )
    }
    stored = Queue.objects.filter(bulk.among(Queue, ("vhost", "name"), keys)).order_by()
    ids = {(vhost, name): id_ for id_, vhost, name in stored.values_list("id", "vhost", "name")}
    updates: list[Sequence[Any]] = []
    new: list[Sequence[Any]] = []
    for (vhost, name), (kind, why) in undelivered.items():
        found = existing.get((vhost, name, kind))
        if found is not None:
            updates.append((found[0], {"count": found[1].get("count", 1) + 1, "why": why}))
        else:
            new.append((ids.get((vhost, name)), vhost, name, kind, now, {"count": 1, "why": why}))
    bulk.update(QueueEvent, ("details",), updates)
    bulk.insert(QueueEvent, ("queue", "vhost", "queue_name", "kind", "at", "details"), new)
