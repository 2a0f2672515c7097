"""Whether the events of a registered queue reach its agent, and why not. Pages and the REST API say it in these words.

The facts are stored already: the registration, the last pass's list, the last count of consumers, and the outcomes of
publishing. Nothing here sends a request to the broker.
"""

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from django.db.models import F, OuterRef, QuerySet, Subquery
from django.db.models.functions import Coalesce
from django.utils import timezone

from agents.models import MAX_ERROR_LENGTH, REGISTERED, Registration, SubscriptionQueue, may_subscribe
from core import bulk
from queues.models import Queue
from rabbit.arguments import REGISTERED_MAX_LENGTH
from rabbit.names import QueueName

NOT_ALLOWED = "The owner may no longer subscribe to the offering. Ask an operator."
NOT_ON_BROKER = (
    "RabbitMQ does not have the queue. Guardian declares it within two minutes, or at once when the agent registers."
)
NO_LENGTH = "RabbitMQ reports no length of the queue: its node may be down. Try again when it runs."
FULL = f"The queue is full: it has {REGISTERED_MAX_LENGTH:,} messages. Start the agent, or check why it does not read."
LOGIN_REFUSED = "The agent cannot log in: its token was revoked or has expired. Register with another token."

_UNKNOWN_LENGTH = -1

Rows = TypeVar("Rows", bound=QuerySet[Any])


def with_delivery(rows: Rows) -> Rows:
    """Annotate what ``blocked_reason`` needs, and ``consumers``: as counted within the last minute, or None."""
    listed = Queue.objects.filter(vhost=OuterRef("vhost"), name=OuterRef("queue_name")).exclude(state=Queue.State.GONE)
    offering = "offering" if rows.model is SubscriptionQueue else "identity__offering"
    return rows.annotate(
        allowed=may_subscribe(rows.model.OWNER_FIELD, offering),
        consumers=Subquery(listed.values("consumers")[:1]),
        listed_ready=Subquery(listed.values(listed_ready=Coalesce(F("ready"), _UNKNOWN_LENGTH))[:1]),
    )


def blocked_reason(row: Any) -> str | None:
    """Return why no event reaches the agent of this registered queue, or None if delivery works.

    The row comes from ``with_delivery``.
    """
    if not row.allowed:
        return NOT_ALLOWED
    if row.state == Registration.CREATING:
        return NOT_ON_BROKER
    if row.listed_ready == _UNKNOWN_LENGTH:
        return NO_LENGTH
    if row.listed_ready is not None and row.listed_ready >= REGISTERED_MAX_LENGTH:
        return FULL
    if row.login.token_id is None:
        return LOGIN_REFUSED
    return None


def record_outcomes(delivered: Collection[QueueName], errors: Mapping[QueueName, str]) -> None:
    """Record on the rows of these queues that an event reached them, or why not. In a transaction.

    At most six statements. Rows that another transaction has locked are left out: it publishes, too, or removes them.
    """
    keys = [*delivered, *errors]
    now = timezone.now()
    for model in REGISTERED:
        these = bulk.among(model, ("vhost", "queue_name"), keys)
        rows = model._default_manager.select_for_update(skip_locked=True, no_key=True).filter(these).order_by()
        found = {(vhost, name): pk for pk, vhost, name in rows.values_list("pk", "vhost", "queue_name")}
        reached = [(found[name], now) for name in delivered if name in found]
        bulk.update(model, ("last_delivered_at",), reached)
        failed = [(found[name], error[:MAX_ERROR_LENGTH], now) for name, error in errors.items() if name in found]
        bulk.update(model, ("last_error", "last_error_at"), failed)
