"""The password of a Pulse user, and its connections: a new password closes them."""

import contextlib
import json
import logging
import secrets
from collections.abc import Collection
from typing import Any

from accounts import audit
from accounts.models import Owner, PulseUser
from accounts.pulse_users import ownership
from accounts.pulse_users.validation import (
    check_password,
    grant_permissions,
    is_free_on_broker,
    live_row,
    why_not_ownable,
)
from core import broker, locks, sealing
from core.refusals import Refusal
from rabbit.entities import Connection, QueueConsumer
from rabbit.errors import BrokerError, BrokerUnavailable, NotOnBroker, Refused
from rabbit.management import Management

logger = logging.getLogger(__name__)


MAX_PREPARED_SECONDS = 7 * 24 * 3600


def prepare_password(pulse_user: PulseUser, by: Owner) -> tuple[str, str]:
    """Return a generated password, and a sealed text with which ``rotate_password`` sets it within seven days.

    Nothing is changed or stored, so that programs can get the password first.
    """
    password = secrets.token_urlsafe(24)
    return password, sealing.seal(sealing.PASSWORDS, json.dumps([*_sealed_for(pulse_user, by), password]))


def prepared_password(pulse_user: PulseUser, by: Owner, prepared: str) -> str:
    """Return the password of ``prepare_password``. Raises Refusal unless it was for this Pulse user and person."""
    try:
        *sealed_for, password = json.loads(sealing.unseal(sealing.PASSWORDS, prepared, MAX_PREPARED_SECONDS))
    except sealing.CannotUnseal:
        sealed_for, password = [], ""
    if sealed_for != _sealed_for(pulse_user, by):
        raise Refusal("This new password is not valid any more. Nothing was changed. Begin again.", "prepared")
    return str(password)


def _sealed_for(pulse_user: PulseUser, by: Owner) -> list[Any]:
    """Return what must not change until the password is set. An owner who left meanwhile may know it, too."""
    return [pulse_user.pk, by.pk, str(pulse_user.password_exposed_at)]


def rotate_password(
    pulse_user: PulseUser,
    password: str | None = None,
    *,
    prepared: str = "",
    close_connections: bool = False,
    by: Owner | None = None,
) -> str:
    """Change the Pulse user's password and return it. Without a password, one is generated. Show it now.

    ``prepared`` is the text of ``prepare_password``, in place of a password. ``by`` is None for a command. Permissions
    and tags stay. Live connections stay open unless ``close_connections``. If closing them fails, the text of the
    BrokerError says that the password has changed already; repeating the call completes it. If the broker lost the
    Pulse user, or it was not ready, it is created again with the permissions of a new Pulse user.
    """
    username = pulse_user.username
    if prepared and password is not None:
        raise Refusal("Send either `password` or `prepared`.", "prepared")
    if prepared and by is not None:
        password = prepared_password(pulse_user, by, prepared)
    elif password is not None:
        check_password(password, username)
    management = broker.management()
    try:
        with locks.lock(username) as lock:
            # Checked under the lock: if an owner removed ``by`` and set a password, it must stay.
            if by is not None:
                ownership.require_access(pulse_user, by)
            return _rotate(lock.renewing_client(management), pulse_user, password, close_connections=close_connections)
    except locks.LockTaken as error:
        raise Refusal(
            f"Another request is changing '{username}' right now; try again in a few minutes.", "password"
        ) from error


def _rotate(management: Management, pulse_user: PulseUser, password: str | None, *, close_connections: bool) -> str:
    row = live_row(pulse_user).first()
    if row is None:
        raise Refusal(f"'{pulse_user.username}' is being removed; its password can't be changed.", "password")
    username, is_ready = row.username, row.ready
    try:
        tags = management.user(username).tags
    except NotOnBroker:
        tags, is_ready = frozenset(), False
        # Not ready until it has its permissions again, even if this process is killed.
        live_row(row).update(ready=False)
    if reason := why_not_ownable(username, tags):
        raise Refusal(reason, "password")
    if not is_ready and not is_free_on_broker(management, username, allow_unfinished=True):
        raise Refusal(
            f"The broker has another user '{username}', which was created manually. Ask an operator.", "password"
        )
    password = password or secrets.token_urlsafe(24)
    with audit.audited(None, "changed the password", row):
        is_new = management.put_user(username, password, sorted(tags))
    if is_new or not is_ready:
        grant_permissions(management, username)
    if not live_row(row).update(ready=True):
        raise Refusal(f"'{username}' was removed by another request.", "password")
    pulse_user.ready = True
    if row.password_exposed_at is not None:
        # Unless another owner left since the row was read, who may know the new password.
        live_row(row).filter(password_exposed_at=row.password_exposed_at).update(password_exposed_at=None)
    if close_connections:
        _close_connections(management, username)
    return password


def _close_connections(management: Management, username: str) -> None:
    try:
        with contextlib.suppress(NotOnBroker):
            management.close_connections_of(username, "The password of this Pulse user was changed.")
    except BrokerError as error:
        raise BrokerUnavailable(
            "The password was changed, but the open connections could not be closed. "
            f"Change it again to see the new password: {error}"
        ) from error


def connections_of(pulse_user: PulseUser) -> list[Connection]:
    return broker.management().connections_of(pulse_user.username)


def consumers_of(connections: Collection[Connection]) -> dict[str, list[QueueConsumer]] | None:
    """Return the consumers of these connections by the connection's name, or None if the broker did not answer."""
    management = broker.management()
    found: dict[str, list[QueueConsumer]] = {connection.name: [] for connection in connections}
    try:
        for vhost in {connection.vhost for connection in connections}:
            for consumer in management.consumers(vhost):
                if consumer.connection in found:
                    found[consumer.connection].append(consumer)
    except BrokerError as error:
        logger.warning("Could not list the consumers of a Pulse user: %s", error)
        return None
    return found


def close_connection(pulse_user: PulseUser, name: str, by: Owner) -> None:
    """Close one live connection of the Pulse user. Raises NotOnBroker if it has none of this name.

    The broker refuses to close a connection in its first seconds.
    """
    management = broker.management()
    if name not in {connection.name for connection in management.connections_of(pulse_user.username)}:
        raise NotOnBroker(f"The Pulse user has no connection '{name}'")
    try:
        with audit.audited(by, "closed a connection of", pulse_user):
            management.close_connection(name, "An owner of this Pulse user closed the connection.")
    except NotOnBroker as error:  # the broker has no statistics of it yet
        reason = "the connection is new; try again in a few seconds"
        raise Refused(f"closing '{name}': {reason}", status=0, reason=reason) from error
