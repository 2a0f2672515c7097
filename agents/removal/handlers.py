"""The handlers of ``core/removals.py`` for agents' passwords, users, vhosts and queues."""

import logging
import uuid
from collections.abc import Sequence
from functools import partial
from time import monotonic

from django.db import transaction
from django.db.models import Case, F, Q, When
from django.db.models.functions import Now
from django.utils import timezone

from accounts.models import AuthToken
from agents.models import REGISTERED, AgentVhost, Consumer, EventSubscription
from core import bulk, locks, removals
from core.broker import Clients
from core.models import Removal
from core.removals import Handler, Kept, Postponed
from queues.actions import tombstones
from rabbit.amqp import NODE_DOWN
from rabbit.errors import NotOnBroker, Refused
from rabbit.names import QueueName
from rabbit.publishing import NOT_ALLOWED

logger = logging.getLogger(__name__)

REVOKED = "The token that was this RabbitMQ user's password is no longer valid"
"""The reason that the broker gives to clients when it closes their connections."""

LOGINS: dict[type[EventSubscription] | type[Consumer], str] = {EventSubscription: "uuid", Consumer: "rmq_username"}
"""The models with a login on the broker, and the field that its user is named after."""


def pending() -> set[QueueName]:
    """Return the queues with a pending removal, in one statement. Passes do not report these as missing."""
    return set(Removal.objects.filter(kind=Removal.Kind.QUEUE).order_by().values_list("vhost", "name"))


def schedule_password_reset(username: str) -> None:
    """Schedule the reset of a user's password, unless a valid one is confirmed before. Call this in a transaction.

    This is for a request with an unknown outcome whose token is no longer stored. The broker may execute it after the
    valid password was set, so the next registration sets the password again.
    """
    removals.write([Removal(kind=Removal.Kind.PASSWORD, name=username)], due_at=timezone.now())
    Removal.objects.filter(kind=Removal.Kind.PASSWORD, name=username).update(attempts=1)


# Tokens that were passwords


def is_expired() -> Q:
    """Return the condition that a token is no longer valid: it has expired, or its owner is not active."""
    return Q(expiry__lte=Now()) | Q(user__is_active=False)


def revoke_expired_passwords() -> int:
    """Reset the passwords of all logins whose token is no longer valid, and return their number.

    The subscriptions, the consumers and the token's row stay. The next token presented becomes the password again.
    """
    usernames: list[str] = []
    expired = AuthToken.objects.filter(is_expired()).values("pk")
    with transaction.atomic():
        for model, field in LOGINS.items():
            # Lock the rows. A registration that stores a token after this is left to the next run.
            logins = model._default_manager.select_for_update().filter(Q(token__in=expired) | Q(next_token__in=expired))
            found = list(logins.order_by("pk").values_list("pk", field))
            if found:
                model._default_manager.filter(pk__in=[pk for pk, _ in found]).update(
                    token=Case(When(token__in=expired, then=None), default=F("token")),
                    next_token=Case(When(next_token__in=expired, then=None), default=F("next_token")),
                    password_set=False,
                )
            usernames += [_username(value) for _, value in found]
        removals.write([Removal(kind=Removal.Kind.PASSWORD, name=username) for username in usernames])
    if usernames:
        logger.info("Resetting the passwords of %d logins whose token is no longer valid", len(usernames))
    return len(usernames)


def mark_passwords_unset(tokens: Q) -> dict[str, list[str]]:
    """Record that these tokens are no longer passwords. Return the users that may have them, by the token's digest.

    Lock the tokens first. A registration that sets one as a password is either seen here, or fails because the token is
    deleted. The deletion of the tokens clears the foreign keys to them.
    """
    locked = AuthToken.objects.select_for_update().filter(tokens).order_by("pk").values_list("pk", flat=True)
    found: dict[str, list[str]] = {pk: [] for pk in locked}
    if not found:
        return found
    for model, field in LOGINS.items():
        logins = model._default_manager.filter(Q(token__in=list(found)) | Q(next_token__in=list(found)))
        locked_logins = logins.select_for_update().order_by("pk")
        for token, next_token, value in locked_logins.values_list("token_id", "next_token_id", field):
            for pk in found.keys() & {token, next_token}:
                found[pk].append(_username(value))
        logins.update(password_set=False)
    return found


def _username(value: uuid.UUID | str) -> str:
    return value.hex if isinstance(value, uuid.UUID) else value


# Passwords


def _reset_password(clients: Clients, removal: Removal, until: float) -> None:
    """Make a user's password unusable and close its connections, unless a valid one was confirmed since."""
    name = removal.name
    with locks.lock(name) as lock:
        logins = EventSubscription.objects.filter(uuid=name), Consumer.objects.filter(rmq_username=name)
        confirmed = Q(token__isnull=False, next_token=None, password_set=True)
        is_valid = any(rows.filter(confirmed).exists() for rows in logins)
        if not is_valid or removal.attempts:
            # After a failed attempt, the password is uncertain: the broker may have executed the attempt later.
            for rows in logins:
                rows.update(password_set=False)
        if is_valid:
            return
        locked = lock.renewing_client(clients.management)
        # put_user would create a missing user, so `user` raises NotOnBroker first.
        for request in (
            partial(locked.user, name),
            partial(locked.put_user, name, None),
            partial(locked.close_connections_of, name, REVOKED),
        ):
            if monotonic() >= until:
                raise Postponed
            request()


# Users


def _delete_user(clients: Clients, removal: Removal, until: float) -> None:
    """Delete a user. The broker closes its connections.

    Lock its name. A registration checks under the same lock that its row still exists before it creates the user.
    """
    with locks.lock(removal.name) as lock:
        lock.renewing_client(clients.management).delete_user(removal.name)


def _needed_users(users: Sequence[Removal]) -> list[Removal]:
    given = [removal.name for removal in users]
    subscriptions = EventSubscription.objects.filter(uuid__in=map(uuid.UUID, given))
    names = {uuid.hex for uuid in subscriptions.values_list("uuid", flat=True)}
    names |= set(Consumer.objects.filter(rmq_username__in=given).values_list("rmq_username", flat=True))
    return [removal for removal in users if removal.name in names]


# Vhosts


def _delete_vhost(clients: Clients, removal: Removal, until: float) -> None:
    clients.management.delete_vhost(removal.name)


def _needed_vhosts(vhosts: Sequence[Removal]) -> list[Removal]:
    given = [removal.name for removal in vhosts]
    names = set(AgentVhost.objects.filter(name__in=given).values_list("name", flat=True))
    return [removal for removal in vhosts if removal.name in names]


def _vhosts_removed(vhosts: Sequence[Removal]) -> None:
    for vhost in vhosts:
        tombstones.forget_vhost(vhost.name)
        Removal.objects.filter(kind=Removal.Kind.QUEUE, vhost=vhost.name).delete()


# Queues


def _delete_queue(clients: Clients, removal: Removal, until: float) -> None:
    try:
        clients.sessions.of(removal.vhost).delete_queue(removal.name, if_unused=removal.if_unused)
    except Refused as error:
        if removal.if_unused and error.reason.endswith("in use"):
            raise Kept from error
        if error.status == NOT_ALLOWED:  # the creation of the vhost was cut off: the next attempt is allowed
            clients.management.take_permissions(removal.vhost)
        raise
    except NotOnBroker as error:
        if NODE_DOWN in str(error):  # the queue exists again when its node runs
            raise Refused(str(error), status=0, reason=NODE_DOWN) from error
        raise


def _needed_queues(queues: Sequence[Removal]) -> list[Removal]:
    names = [(removal.vhost, removal.name) for removal in queues]
    registered = {
        name
        for model in REGISTERED
        for name in model._default_manager.filter(bulk.among(model, ("vhost", "queue_name"), names))
        .order_by()
        .values_list("vhost", "queue_name")
    }
    return [removal for removal in queues if (removal.vhost, removal.name) in registered]


def _queues_removed(queues: Sequence[Removal]) -> None:
    tombstones.forget([(queue.vhost, queue.name) for queue in queues])


def register_handlers() -> None:
    kinds = Removal.Kind
    removals.register(kinds.PASSWORD, Handler(_reset_password))
    removals.register(kinds.USER, Handler(_delete_user, obsolete=_needed_users))
    removals.register(kinds.VHOST, Handler(_delete_vhost, obsolete=_needed_vhosts, removed=_vhosts_removed))
    removals.register(
        kinds.QUEUE, Handler(_delete_queue, obsolete=_needed_queues, removed=_queues_removed, parallel=True)
    )
