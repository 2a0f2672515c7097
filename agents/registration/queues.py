"""Registration: agents get their queues with the right arguments, and logins that read only these queues.

The row is committed first, in state ``creating``, so that every queue of Guardian has a row. It becomes ``ready`` once
the broker has the queue. After a crash the row stays ``creating``, and the next request or a sweep finishes it. A
failed registration deletes the row that it created; ``core/removals.py`` removes what may have reached the broker.

Who may register: ``agents/access.py``.
"""

import contextlib
import uuid as uuids
from collections.abc import Sequence
from typing import Any

from django.core.exceptions import ObjectDoesNotExist, PermissionDenied
from django.db import transaction

from accounts.models import Owner
from agents.models import (
    AgentIdentity,
    Consumer,
    EventSubscription,
    Offering,
    Registration,
    SubscriptionQueue,
)
from agents.registration.credentials import PresentedToken, grant_login
from agents.registration.declaring import declare_or_replace
from agents.registration.identities import check_object_type
from agents.registration.records import (
    MAX_ATTEMPTS,
    Busy,
    cancel_removal,
    delete_row,
    get_or_create,
    insert,
    remove_later,
    repeatedly_removed,
)
from agents.registration.vhosts import in_vhost, require_vhost
from core import broker
from core.models import Removal
from rabbit import arguments, names
from rabbit.errors import BrokerError, BrokerUnavailable, MalformedResponse, NotOnBroker
from rabbit.management import Management

# Subscriptions


def register_subscription(
    identity: AgentIdentity,
    object_type: str,
    presented: PresentedToken,
    *,
    description: str = "",
    source_ip: str | None = None,
) -> tuple[EventSubscription, bool]:
    """Return the agent's subscription to an object type, and whether it is new. The token becomes its password."""
    check_object_type(object_type)
    management = broker.management()
    owner = identity.owner
    for _ in range(MAX_ATTEMPTS):
        subscription, is_new = get_or_create(
            EventSubscription.objects.select_related("owner"),
            {"owner": owner, "description": description, "source_ip": source_ip},
            owner,
            identity=identity,
            object_type=object_type,
        )
        try:
            _grant_or_undo(subscription, is_new, presented, management)
        except EventSubscription.DoesNotExist:
            continue
        return subscription, is_new
    raise repeatedly_removed("The subscription")


def create_subscription(
    owner: Owner,
    presented: PresentedToken,
    *,
    observable_objects: Sequence[dict[str, Any]] = (),
    description: str = "",
    source_ip: str | None = None,
) -> EventSubscription:
    """Create a subscription without an identity. The token becomes its password."""
    management = broker.management()
    subscription = EventSubscription(
        owner=owner, observable_objects=list(observable_objects), description=description, source_ip=source_ip
    )
    insert(lambda: subscription.save(force_insert=True), owner, EventSubscription)
    _grant_or_undo(subscription, True, presented, management)
    return subscription


def _grant_or_undo(
    subscription: EventSubscription, is_new: bool, presented: PresentedToken, management: Management
) -> None:
    """Make the token the password of a subscription's login. If that fails, undo a new subscription."""
    try:
        require_vhost(subscription.owner, management)
        grant_login(subscription, presented, management)
    except (BrokerError, PermissionDenied, ObjectDoesNotExist) as error:
        if is_new:
            _undo_subscription(subscription, has_user=not _certainly_not_sent(error))
        raise


def _undo_subscription(subscription: EventSubscription, *, has_user: bool) -> None:
    """Delete the subscription of a failed request, unless another request has used it since."""
    with transaction.atomic():
        # Lock the row, so that no queue is registered for it.
        rows = EventSubscription.objects.select_for_update().filter(pk=subscription.pk, token=None)
        if rows.first() is None or subscription.queues.exists():
            return
        delete_row(EventSubscription.objects.filter(pk=subscription.pk))
        if has_user:
            remove_later(Removal(kind=Removal.Kind.USER, name=subscription.rmq_username))


# Queues


def create_queue(
    subscription: EventSubscription,
    offering: Offering,
    object_type: str,
    presented: PresentedToken,
) -> tuple[SubscriptionQueue, bool]:
    """Return the queue of a subscription for events of a type about an offering, and whether it is new.

    Afterwards the broker has the queue with the right arguments, and the token can read it. If the broker has it with
    other arguments and in use, the text of the Refused names them.
    """
    check_object_type(object_type)
    management = broker.management()
    for _ in range(MAX_ATTEMPTS):
        queue, is_new = get_or_create(
            SubscriptionQueue.objects.all(),
            {
                "vhost": subscription.owner.uuid.hex,
                "queue_name": names.subscription_queue(subscription.uuid.hex, offering.uuid.hex, object_type),
            },
            subscription.owner,
            subscription=subscription,
            offering=offering,
            object_type=object_type,
        )
        queue.subscription, queue.offering = subscription, offering  # spares their queries
        if _ensure(queue, is_new, management, presented):
            return queue, is_new
    raise repeatedly_removed("The queue")


def register_consumer(
    identity: AgentIdentity, presented: PresentedToken, object_types: Sequence[str] | None
) -> tuple[Consumer, bool]:
    """Return the consumer queue of an agent, and whether it is new.

    ``object_types`` are the types of events that it gets from now on. An empty list means all types. None leaves the
    types unchanged, and means all types for a new queue. Everything else is as in :func:`create_queue`.
    """
    types = None if object_types is None else list(dict.fromkeys(check_object_type(one) for one in object_types))
    management = broker.management()
    for _ in range(MAX_ATTEMPTS):
        uuid = uuids.uuid4()
        consumer, is_new = get_or_create(
            Consumer.objects.all(),
            {
                "uuid": uuid,
                "object_types": types or [],
                "vhost": identity.owner.uuid.hex,
                "queue_name": names.consumer_queue(uuid.hex),
            },
            identity.owner,
            identity=identity,
        )
        consumer.identity = identity  # spares its query
        changes = {} if types is None else {"object_types": types}
        if _ensure(consumer, is_new, management, presented, **changes):
            return consumer, is_new
    raise repeatedly_removed("The queue")


SUBSCRIBE_AGAIN = "The queue was lost and declared again. Subscribe again"
"""The reason that the broker gives to clients when it closes their connections."""


def redeclare(row: SubscriptionQueue | Consumer, management: Management) -> None:
    """Declare a registered queue that the broker has lost or never had, and create its vhost if it is missing.

    Then close the connections of its login. An agent that read the lost queue over STOMP got an ERROR for its
    subscription, and its connection stays open without a subscription. Raises Refused if the broker has the queue with
    other arguments and in use.
    """
    # Not ready until the connections are closed: after a crash, the next pass closes them.
    type(row)._default_manager.filter(pk=row.pk, state=Registration.READY).update(state=Registration.CREATING)
    _ensure(row, False, management)


def _ensure(
    row: SubscriptionQueue | Consumer,
    is_new: bool,
    management: Management,
    presented: PresentedToken | None = None,
    **changes: Any,
) -> bool:
    """Ensure that the queue, its vhost and, with a token, its login exist. Mark the row ready and apply the changes.

    Without a token, close the login's connections if the broker did not have the queue.

    Return False if the row no longer exists. If the broker refuses or is unreachable, delete a new row.
    """
    has_queue = False
    try:
        if row.state == Registration.CREATING:
            has_queue = cancel_removal(Removal.Kind.QUEUE, row.vhost, row.queue_name)
    except Busy:
        _undo(row, is_new)
        raise
    try:
        require_vhost(row.owner, management)
        is_lost = _declare(row, management)
        has_queue = is_lost or has_queue
        if presented is not None:
            grant_login(row.login, presented, management)
        elif is_lost or row.state == Registration.CREATING:
            _close_connections(row.login, management)
    except Consumer.DoesNotExist:
        pass  # A consumer is its own login: the row itself was removed.
    except (BrokerError, PermissionDenied, ObjectDoesNotExist) as error:
        has_queue = has_queue or _may_have_executed(error)
        _undo(row, is_new, has_queue=has_queue, has_user=has_queue or not _certainly_not_sent(error))
        raise
    changes["state"] = Registration.READY
    if not type(row)._default_manager.filter(pk=row.pk).update(**changes):
        try:
            cancel_removal(Removal.Kind.QUEUE, row.vhost, row.queue_name)
        finally:
            _undo(row, is_new, has_queue=True, has_user=True)
        return False
    for name, value in changes.items():
        setattr(row, name, value)
    return True


def _undo(row: SubscriptionQueue | Consumer, is_new: bool, *, has_queue: bool = False, has_user: bool = False) -> None:
    """Delete the row that a failed request created, unless another request has marked it ready since.

    Without a row, remove later what the broker may have: the queue, and the user of a consumer.
    """
    rows = type(row)._default_manager.filter(pk=row.pk)
    with transaction.atomic():
        if is_new:
            delete_row(rows.filter(state=Registration.CREATING))
        if rows.exists():
            return
        if has_queue:
            remove_later(Removal(kind=Removal.Kind.QUEUE, vhost=row.vhost, name=row.queue_name, if_unused=True))
        if has_user and isinstance(row, Consumer):
            remove_later(Removal(kind=Removal.Kind.USER, name=row.rmq_username))


def _declare(row: SubscriptionQueue | Consumer, management: Management) -> bool:
    """Declare the queue, and return whether the broker did not have it."""
    return in_vhost(
        row.owner,
        management,
        lambda: declare_or_replace(row.vhost, row.queue_name, arguments.REGISTERED_QUEUE_ARGUMENTS, management),
    )


def _close_connections(login: EventSubscription | Consumer, management: Management) -> None:
    with contextlib.suppress(NotOnBroker):
        management.close_connections_of(login.rmq_username, SUBSCRIBE_AGAIN)


def _may_have_executed(error: Exception) -> bool:
    return isinstance(error, MalformedResponse) or (isinstance(error, BrokerUnavailable) and not error.never_reached)


def _certainly_not_sent(error: Exception) -> bool:
    return isinstance(error, BrokerUnavailable) and error.never_reached
