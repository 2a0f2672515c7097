"""Publishing an event: to every agent that registered for its offering and its type, and what became of it.

Nothing of an event is kept here. What didn't reach a queue is counted in the answer and in the queue's events.
"""

import json
import logging
import reprlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.core.exceptions import PermissionDenied
from django.db import DatabaseError, transaction
from django.db.models import BooleanField, Exists, ExpressionWrapper, OuterRef, Q
from django.utils import timezone

from accounts.models import Owner
from accounts.vouching import require_vouched
from agents.identities import check_object_type
from agents.models import Consumer, Offering, Registration, SubscriptionQueue
from core import broker, bulk, limits
from queues.models import Queue, QueueEvent
from rabbit.names import QueueName
from rabbit.publishing import Message, OutcomeUnknown, Result

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1
"""Of what Guardian adds to the payload."""

MAX_PAYLOAD_BYTES = 1024 * 1024
"""How large an event may be, as JSON."""

FOLD_INTERVAL = timedelta(minutes=1)
"""What happens to one queue again within this time is counted in the event that is there."""

MAX_QUEUES_LOGGED = 10
"""Queues that one line of the log names."""

BEING_CREATED = "it is still being created"
NOT_ALLOWED = "its owner may not have this offering's events any more"
NOT_THERE = "the broker doesn't have it"
FULL = "it is full"

Undelivered = tuple[QueueEvent.Kind, str]
"""What is noted of a queue that an event didn't reach, and why."""


class InvalidPayload(ValueError):
    """The payload can't be published. The text says why, in a sentence for the person who sent it."""


class InvalidMessageId(ValueError):
    """The message id isn't a UUID."""


@dataclass(frozen=True)
class Published:
    """What became of an event, as numbers of queues.

    ``delivered``: these have it. ``skipped``: registered, and not ready, or of an owner who may not have it any more.
    ``rejected``: full; the broker puts it into the dead-letter queue of their vhost. ``gone``: ready here, and not on
    the broker. The message id is 32 hex digits.
    """

    message_id: str
    delivered: int = 0
    skipped: int = 0
    rejected: int = 0
    gone: int = 0

    def as_json(self) -> dict[str, Any]:
        """Return it as the REST API answers it."""
        return asdict(self)


def publish(
    offering: Offering,
    object_type: str,
    payload: Mapping[str, Any],
    by: Owner | None = None,
    message_id: str | uuid.UUID | None = None,
) -> Published:
    """Publish an event of an offering to the agents that registered for this type; ``by`` None: Guardian itself.

    Agents get the payload with ``object_type``, ``offering_uuid`` and ``schema_version``. Whoever publishes an event
    again, because its outcome was unknown, gives its message id, so that agents can drop what they have had.
    Call it outside of any transaction. It takes as many statements for one queue as for a thousand.

    Raises:
        NotVouched: ``by`` may not use the broker.
        PermissionDenied: ``by`` may not publish events of this offering.
        RateLimitExceeded: ``by`` published as many within the minute as they may.
        NoSuchObjectType: there is no such object type.
        InvalidPayload: this can't be the payload.
        InvalidMessageId: this can't be the message id.
        OutcomeUnknown: some queues may have it; its ``results`` tell what is known.
        BrokerError: nothing was published.
    """
    if by is not None:
        require_vouched(by)
        if not Offering.objects.published_by(by).filter(pk=offering.pk).exists():
            raise PermissionDenied(f"{by.email} may not publish events of {offering.name}. Ask an operator.")
        limits.consume(limits.RateLimit("events", settings.GUARDIAN_EVENTS_PER_MINUTE, 60), by.uuid.hex)
    check_object_type(object_type)
    body = _body(offering, object_type, payload)
    id_ = _message_id(message_id)
    ready, skipped = _recipients(offering, object_type)
    _log(offering, object_type, id_, skipped)
    results: dict[QueueName, Result] = {}
    unknown: OutcomeUnknown | None = None
    if ready:
        message = Message(id_, body, type=object_type, headers={"object_type": object_type})
        try:
            results = broker.publisher().publish(ready, message)
        except OutcomeUnknown as error:
            results, unknown = error.results, error
    failed = _undelivered(results)
    _log(offering, object_type, id_, failed)
    _count_undelivered(offering, skipped | failed)
    if unknown is not None:
        raise unknown
    found = list(results.values())
    return Published(
        id_,
        delivered=found.count(Result.DELIVERED),
        skipped=len(skipped),
        rejected=found.count(Result.REJECTED),
        gone=found.count(Result.GONE),
    )


def _body(offering: Offering, object_type: str, payload: Mapping[str, Any]) -> bytes:
    if not isinstance(payload, Mapping):
        raise InvalidPayload("The payload has to be a JSON object.")
    added = {"object_type": object_type, "offering_uuid": offering.uuid.hex, "schema_version": SCHEMA_VERSION}
    for key, value in added.items():
        found = payload.get(key, value)
        same = _uuid_hex(found) if key == "offering_uuid" else found
        if type(same) is not type(value) or same != value:
            raise InvalidPayload(
                f"The payload says that '{key}' is {reprlib.repr(found)}, but here it is {value!r}. Leave it out."
            )
    try:
        body = json.dumps({**payload, **added}, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        # What JSON has no word for: NaN, half a surrogate pair, objects of Python's, an object inside itself.
        raise InvalidPayload(f"The payload can't be written as JSON: {error}.") from error
    if len(body) > MAX_PAYLOAD_BYTES:
        raise InvalidPayload(f"The payload has {len(body):,} bytes as JSON; {MAX_PAYLOAD_BYTES:,} are allowed.")
    return body


def _message_id(given: str | uuid.UUID | None) -> str:
    if given is None:
        return uuid.uuid4().hex
    found = _uuid_hex(str(given))
    if found is None:
        raise InvalidMessageId("The message id has to be a UUID, with or without dashes.")
    return found


def _uuid_hex(text: Any) -> str | None:
    """Return a UUID, however it is written, as 32 hex digits; None: it is none."""
    try:
        return uuid.UUID(text).hex if isinstance(text, str) else None
    except ValueError:
        return None


def _recipients(offering: Offering, object_type: str) -> tuple[list[QueueName], dict[QueueName, Undelivered]]:
    """Return the queues that get the event, and those that would if they could."""
    queues = (
        SubscriptionQueue.objects.filter(offering=offering, object_type=object_type)
        .annotate(allowed=_may_subscribe("subscription__owner", offering))
        .order_by()
        .values_list("vhost", "queue_name", "state", "allowed")
    )
    consumers = (
        Consumer.objects.filter(identity__offering=offering)
        .annotate(allowed=_may_subscribe("identity__owner", offering))
        .order_by()
        .values_list("vhost", "queue_name", "state", "allowed", "object_types")
    )
    registered = [*queues, *(one[:4] for one in consumers if not one[4] or object_type in one[4])]
    ready: list[QueueName] = []
    skipped: dict[QueueName, Undelivered] = {}
    for vhost, name, state, allowed in registered:
        if allowed and state == Registration.READY:
            ready.append((vhost, name))
        else:
            skipped[vhost, name] = QueueEvent.Kind.SKIPPED, BEING_CREATED if allowed else NOT_ALLOWED
    return ready, skipped


def _may_subscribe(owner: str, offering: Offering) -> "ExpressionWrapper[Q]":
    """Return whether this owner may subscribe to the offering: ``Offering.objects.subscribed_by``, for many."""
    members = Offering.members.through.objects.filter(offering=offering, owner=OuterRef(f"{owner}_id"))
    may = Q(**{f"{owner}__is_active": True}) & (Q(**{f"{owner}__is_staff": True}) | Q(Exists(members)))
    return ExpressionWrapper(may, output_field=BooleanField())


def _undelivered(results: Mapping[QueueName, Result]) -> dict[QueueName, Undelivered]:
    why = {
        Result.GONE: (QueueEvent.Kind.SKIPPED, NOT_THERE),
        Result.REJECTED: (QueueEvent.Kind.REJECTED, FULL),
    }
    return {queue: why[result] for queue, result in results.items() if result in why}


def _log(offering: Offering, object_type: str, message_id: str, counted: Mapping[QueueName, Undelivered]) -> None:
    """Write a line for each reason, with the queues that it holds for."""
    for kind, why in sorted(set(counted.values())):
        names = [f"{name} in {vhost}" for (vhost, name), found in counted.items() if found == (kind, why)]
        more = f" and {len(names) - MAX_QUEUES_LOGGED} more" if len(names) > MAX_QUEUES_LOGGED else ""
        logger.warning(
            "The event %s (%s of %s) was %s for %s%s: %s",
            message_id, object_type, offering.uuid.hex, kind, ", ".join(names[:MAX_QUEUES_LOGGED]), more, why,
        )  # fmt: skip


def _count_undelivered(offering: Offering, counted: Mapping[QueueName, Undelivered]) -> None:
    """Count in the queues' events what didn't reach them: one event a minute for each queue and kind."""
    if not counted:
        return
    try:
        with transaction.atomic():
            # Two that publish at once would otherwise both write the first. A queue belongs to one offering.
            list(Offering.objects.select_for_update(no_key=True).order_by().filter(pk=offering.pk).values_list("pk"))
            _write(counted)
    except DatabaseError:
        # The agents have the event; to answer that it failed would have it published again.
        logger.exception("Could not count what the event did not reach.")


def _write(counted: Mapping[QueueName, Undelivered]) -> None:
    now, keys = timezone.now(), list(counted)
    recent = QueueEvent.objects.filter(
        bulk.among(QueueEvent, ("vhost", "queue_name"), keys),
        kind__in=[QueueEvent.Kind.SKIPPED, QueueEvent.Kind.REJECTED],
        at__gt=now - FOLD_INTERVAL,
    )
    there = {
        (vhost, name, kind): (id_, details)
        for id_, vhost, name, kind, details in recent.order_by().values_list(
            "id", "vhost", "queue_name", "kind", "details"
        )
    }
    seen = Queue.objects.filter(bulk.among(Queue, ("vhost", "name"), keys)).order_by()
    ids = {(vhost, name): id_ for id_, vhost, name in seen.values_list("id", "vhost", "name")}
    again: list[Sequence[Any]] = []
    new: list[Sequence[Any]] = []
    for (vhost, name), (kind, why) in counted.items():
        found = there.get((vhost, name, kind))
        if found is not None:
            again.append((found[0], {"count": found[1].get("count", 1) + 1, "why": why}))
        else:
            new.append((ids.get((vhost, name)), vhost, name, kind, now, {"count": 1, "why": why}))
    bulk.update(QueueEvent, ("details",), again)
    bulk.insert(QueueEvent, ("queue", "vhost", "queue_name", "kind", "at", "details"), new)
