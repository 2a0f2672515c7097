"""Create, change and adopt RabbitMQ accounts, on the broker and in the database.

The row is committed first, with ``ready`` false, so that every account created here has a row. It becomes ready once
the broker has the account. After a crash it stays not ready, until one of its owners creates the account again.
"""

import contextlib
import copy
import logging
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

from django.conf import settings
from django.contrib.auth.password_validation import validate_password
from django.core.exceptions import PermissionDenied, ValidationError
from django.db import IntegrityError, models, transaction
from django.utils import timezone

from accounts import audit, queue_effects
from accounts.access import quotas, vouching
from accounts.access.reserved_names import is_reserved
from accounts.models import (
    UNCHANGED,
    Owner,
    PulseUser,
    Unchanged,
    check_thresholds,
    has_control_characters,
)
from accounts.pulse_users import addresses, invitations, namespace, ownership
from accounts.pulse_users.namespace import NOTHING, Belongings
from accounts.pulse_users.ownership import LastOwner
from core import broker, locks, removals
from core.confirmation import ConfirmableChange
from core.models import Removal
from rabbit import names, permissions
from rabbit.addresses import split_addresses
from rabbit.management import (
    BrokerError,
    BrokerUnavailable,
    Connection,
    Management,
    NotOnBroker,
    QueueConsumer,
    Refused,
)
from rabbit.permissions import Permissions

logger = logging.getLogger(__name__)

MAX_PASSWORD_LENGTH = 255

MAX_NAMES_SHOWN = 10
"""Queues and exchanges named in an error."""

HARMLESS_TAGS = frozenset({"management", "monitoring"})
"""These tags only allow reading the management API. Other tags allow more than an account's permissions do."""


class NameTaken(ValueError):
    """An account has this name already, here or on the broker."""


class NamespaceInUse(NameTaken):
    """The broker has queues or exchanges of this name. The text names them for operators only."""

    def __init__(self, username: str, used: Belongings, by: Owner | None) -> None:
        if by is None or by.is_staff:
            listed = [names.readable(name) for name in (*used.queues, *used.exchanges)]
            more = f", and {len(listed) - MAX_NAMES_SHOWN} more" if len(listed) > MAX_NAMES_SHOWN else ""
            shown = ", ".join(listed[:MAX_NAMES_SHOWN]) + more
            text = (
                f"The broker already has queues or exchanges of this name: {shown}. Adopt them, or choose another name."
            )
        else:
            text = (
                f"The broker already has queues or exchanges of this name ({names.queue_prefix(username)}…, "
                f"{names.exchange_prefix(username)}…). Choose another name, or ask an operator, who can adopt them."
            )
        super().__init__(text)


class NameReserved(ValueError):
    """The name is reserved."""


class CannotAdopt(ValueError):
    """The account must not be adopted. The text says why."""


# Creating


def check_name(username: str) -> None:
    """Check that an account can be created with this name. Sends no request to the broker.

    The name of an unfinished creation passes; :func:`create_pulse_user` checks its owners.

    Raises:
        rabbit.names.InvalidUserName: the name is invalid; the text says why.
        NameReserved: the name is reserved.
        NameTaken: an account here has the name.
    """
    names.check_user_name(username)
    of_guardian = {name.casefold() for name in guardian_usernames()}
    if is_reserved(username) or username.casefold() in of_guardian:
        raise NameReserved(f"'{username}' is reserved; choose another name.")
    if names.is_agents_login(username):
        raise NameReserved("Names of 32 hex digits are reserved for agents' logins; choose another name.")
    row = PulseUser.objects.filter(username=username).first()
    if row is None:
        return
    if row.removing_since is not None:
        raise NameTaken(f"'{username}' is being removed; wait until it is gone, or choose another name.")
    if row.ready:
        raise NameTaken(f"'{username}' is taken; choose another name.")


def check_password(password: str, username: str) -> None:
    """Check that this is a valid password of the account with this name.

    Raises:
        ValidationError: the password is invalid; on the field ``password``.
    """
    try:
        if settings.GUARDIAN_REQUIRE_GENERATED_PASSWORDS:
            raise ValidationError("Passwords are generated here. Leave yours out.")
        # SASL PLAIN separates name and password by a NUL.
        if has_control_characters(password):
            raise ValidationError("The password contains a control character, such as a line break. Remove it.")
        if len(password) > MAX_PASSWORD_LENGTH:
            raise ValidationError(f"The password is too long; at most {MAX_PASSWORD_LENGTH} characters are allowed.")
        validate_password(password, PulseUser(username=username))  # type: ignore[arg-type]  # it has a username
    except ValidationError as error:
        raise ValidationError({"password": error.messages}) from None


def create_pulse_user(
    username: str,
    owners: Sequence[Owner],
    password: str | None = None,
    notification_emails: Sequence[str] = (),
    by: Owner | None = None,
    *,
    adopt_namespace: bool = False,
) -> tuple[PulseUser, str]:
    """Create a RabbitMQ account with permissions for its own names, and return its row and its password.

    Without a password, one is generated. Show the password now, since only the broker stores it. ``by`` creates it:
    an operator or None (a command) for these owners, others for themselves, and invite the other owners. With
    ``adopt_namespace``, the account gets the queues and exchanges of its name that the broker has.

    Raises:
        PermissionDenied: ``by`` is no operator, and adopts the namespace.
        rabbit.names.InvalidUserName: the name is invalid; the text says why.
        NameReserved: the name is reserved.
        NameTaken: the name is taken, or the account is being created, changed or removed.
        NamespaceInUse: the broker has queues or exchanges of this name.
        NotVouched: an owner may not use the broker.
        LastOwner: there is no owner.
        QuotaReached: ``by`` has ``GUARDIAN_MAX_PULSE_USERS`` accounts.
        ValidationError: the password or an address is invalid; on the field ``password`` or ``notification_emails``.
            After an unfinished creation, an address may have got a request within the last hour; the row is then not
            ready.
        BrokerError: the broker is unreachable or refuses. Nothing was created. If that is not certain, or with
            ``adopt_namespace``, the row may stay and is not ready; creating the account again finishes it.
    """
    if adopt_namespace and by is not None:
        require_operator(by)
    check_name(username)
    if not owners:
        raise LastOwner("An account needs at least one owner.")
    for owner in owners:
        vouching.require_vouched(owner)
    owners, invitees = ownership.owners_of_new_account(owners, by)
    wanted = addresses.usable_addresses(notification_emails, owners)
    if password is not None:
        check_password(password, username)
    management = broker.management()
    try:
        with locks.lock(username) as lock:
            management = lock.renewing_client(management)
            pulse_user = _unfinished_row(management, username, owners)
            if pulse_user is None:
                used = namespace.used_names(management, username)
                if any(used) and not adopt_namespace:
                    raise NamespaceInUse(username, used, by)
                pulse_user = _create_row(username, owners, by, used)
            password = password or secrets.token_urlsafe(24)
            # Undoing would remove an account with its queues, also those that it had before.
            _create_on_broker(management, pulse_user, password, undo=not adopt_namespace)
            if not _mark_ready(pulse_user, owners, invitees, wanted, by or owners[0]):
                raise NameTaken(f"'{username}' was removed by another request while it was being created.")
    except locks.LockTaken as error:
        raise NameTaken(
            f"'{username}' is being created by another request; try again in a few minutes, or choose another name."
        ) from error
    return pulse_user, password


def _unfinished_row(management: Management, username: str, owners: Sequence[Owner]) -> PulseUser | None:
    """Return the row of an unfinished creation by one of these owners, if there is one.

    Raises:
        NameTaken: the broker has another account of this name.
    """
    rows = PulseUser.objects.filter(username=username, ready=False, removing_since=None)
    unfinished = rows.filter(owners__in=owners).first()
    if not is_free_on_broker(management, username, allow_unfinished=unfinished is not None):
        raise NameTaken(f"'{username}' is an account on the broker already; choose another name.")
    return unfinished


def _create_on_broker(management: Management, pulse_user: PulseUser, password: str, *, undo: bool) -> None:
    try:
        management.put_user(pulse_user.username, password)
        _grant(management, pulse_user.username)
    except BrokerError:
        if undo:
            _undo_creation(management, pulse_user)
        raise


def is_free_on_broker(management: Management, username: str, *, allow_unfinished: bool) -> bool:
    """Return whether the name is free on the broker.

    With ``allow_unfinished``, an account that an unfinished creation left there counts as free.
    """
    try:
        tags = management.user(username).tags
    except NotOnBroker:
        return True
    if not allow_unfinished or tags:
        return False
    created = {settings.GUARDIAN_PULSE_VHOST: permissions.for_pulse_user(username)}
    return management.permissions_of(username) in ({}, created)


def _create_row(username: str, owners: Sequence[Owner], by: Owner | None, adopted: Belongings = NOTHING) -> PulseUser:
    try:
        with transaction.atomic():
            # Locked: another request may be withdrawing the vouching, and with it all accounts of the owner.
            for owner in vouching.lock_all(owners):
                vouching.require_vouched(owner)
            if by is not None:
                quotas.require_room(quotas.PULSE_USERS, by, by.pulse_users.all())
            pulse_user = PulseUser.objects.create(username=username)
            pulse_user.owners.set(owners)
            if any(adopted):
                audit.record(None, "adopted", pulse_user, **adopted._asdict())
    except IntegrityError as error:
        raise NameTaken(f"'{username}' is taken; choose another name.") from error
    return pulse_user


def _grant(management: Management, username: str) -> None:
    vhost = settings.GUARDIAN_PULSE_VHOST
    try:
        management.set_permissions(vhost, username, permissions.for_pulse_user(username))
    except NotOnBroker as error:
        raise BrokerUnavailable(
            f"The broker has no vhost '{vhost}' (GUARDIAN_PULSE_VHOST), or lost the account again: {error}"
        ) from error


def _mark_ready(
    pulse_user: PulseUser, owners: Sequence[Owner], invitees: Sequence[Owner], emails: Sequence[str], by: Owner
) -> bool:
    """Mark the account as ready, and return whether it is. False if its removal has begun."""
    with transaction.atomic():
        if not _live_row(pulse_user).update(ready=True):
            return False
        pulse_user.ready = True
        pulse_user.owners.set(owners)
        ownership.assigned(dict.fromkeys(owners, (pulse_user,)), by)
        invitations.invite(pulse_user, invitees, by)
        for email in emails:
            if not pulse_user.notification_addresses.filter(email=email).exists():
                addresses.create_address(pulse_user, email, by)
        return True


def _undo_creation(management: Management, pulse_user: PulseUser) -> None:
    """Delete an unfinished account. If the broker is unreachable, the row stays and is not ready."""
    unfinished = PulseUser.objects.filter(pk=pulse_user.pk, ready=False)
    # A ready row is a finished account. Marking the row as being removed keeps others from making it ready.
    marked_at = timezone.now()
    with transaction.atomic():
        if not unfinished.filter(removing_since=None).update(removing_since=marked_at):
            return
        # A crash leaves the row to the task. Without the mark, the task drops the Removal.
        removals.reserve([Removal(kind=Removal.Kind.ACCOUNT, name=pulse_user.username)])
    try:
        with contextlib.suppress(NotOnBroker):
            management.delete_user(pulse_user.username)
    except BrokerError:
        unfinished.filter(removing_since=marked_at).update(removing_since=None)  # keeps the mark of another removal
    else:
        unfinished.delete()
        Removal.objects.filter(kind=Removal.Kind.ACCOUNT, name=pulse_user.username).delete()


def _live_row(pulse_user: PulseUser) -> models.QuerySet[PulseUser]:
    """Return a queryset of the account's row, empty if it is deleted or being removed."""
    return PulseUser.objects.filter(pk=pulse_user.pk, removing_since=None)


# The password


def rotate_password(
    pulse_user: PulseUser, password: str | None = None, *, close_connections: bool = False, by: Owner | None = None
) -> str:
    """Change the account's password and return it. Without a password, one is generated. Show it now.

    ``by`` is the owner or operator who does; None: a command. Permissions and tags stay. Live connections stay open
    unless ``close_connections``. If the broker lost the account, or it was not ready, it is created again with the
    permissions of a new account.

    Raises:
        ValidationError: the password is invalid (on the field ``password``), another request is changing or removing
            the account, it has become Guardian's own or an administrator's, or it was not ready and the broker has
            another, manually created account of that name.
        PulseUser.DoesNotExist: ``by`` no longer owns the account.
        BrokerError: the broker is unreachable or refuses. If closing the connections failed, the text says that the
            password has changed already; repeating the call completes it.
    """
    username = pulse_user.username
    if password is not None:
        check_password(password, username)
    management = broker.management()
    try:
        with locks.lock(username) as lock:
            # Checked under the lock: if an owner removed ``by`` and set a password, it must stay.
            if by is not None:
                ownership.require_access(pulse_user, by)
            return _rotate(lock.renewing_client(management), pulse_user, password, close_connections=close_connections)
    except locks.LockTaken as error:
        raise ValidationError(
            f"Another request is changing '{username}' right now; try again in a few minutes."
        ) from error


def _rotate(management: Management, pulse_user: PulseUser, password: str | None, *, close_connections: bool) -> str:
    row = _live_row(pulse_user).first()
    if row is None:
        raise ValidationError(f"'{pulse_user.username}' is being removed; its password can't be changed.")
    username, is_ready = row.username, row.ready
    try:
        tags = management.user(username).tags
    except NotOnBroker:
        tags, is_ready = frozenset(), False
        # Not ready until it has its permissions again, even if this process is killed.
        _live_row(row).update(ready=False)
    if reason := why_not_ownable(username, tags):
        raise ValidationError(reason)
    if not is_ready and not is_free_on_broker(management, username, allow_unfinished=True):
        raise ValidationError(
            f"The broker has another account '{username}', which was created manually. Ask an operator."
        )
    password = password or secrets.token_urlsafe(24)
    with audit.audited(None, "changed the password", row):
        is_new = management.put_user(username, password, sorted(tags))
    if is_new or not is_ready:
        _grant(management, username)
    if not _live_row(row).update(ready=True):
        raise ValidationError(f"'{username}' was removed by another request.")
    pulse_user.ready = True
    if row.password_exposed_at is not None:
        # Unless another owner left since the row was read, who may know the new password.
        _live_row(row).filter(password_exposed_at=row.password_exposed_at).update(password_exposed_at=None)
    if close_connections:
        _close_connections(management, username)
    return password


def _close_connections(management: Management, username: str) -> None:
    try:
        with contextlib.suppress(NotOnBroker):
            management.close_connections_of(username, "The password of this account was changed.")
    except BrokerError as error:
        raise BrokerUnavailable(
            "The password was changed, but the open connections could not be closed. "
            f"Change it again to see the new password: {error}"
        ) from error


def connections_of(pulse_user: PulseUser) -> list[Connection]:
    """Return the account's live connections.

    Raises:
        BrokerError: the broker is unreachable or refuses.
    """
    return broker.management().connections_of(pulse_user.username)


def consumers_of(connections: Collection[Connection]) -> dict[str, list[QueueConsumer]] | None:
    """Return the consumers of these connections by the connection's name; None: the broker did not answer."""
    management = broker.management()
    found: dict[str, list[QueueConsumer]] = {connection.name: [] for connection in connections}
    try:
        for vhost in {connection.vhost for connection in connections}:
            for consumer in management.consumers(vhost):
                if consumer.connection in found:
                    found[consumer.connection].append(consumer)
    except BrokerError as error:
        logger.warning("Could not list the consumers of an account: %s", error)
        return None
    return found


def close_connection(pulse_user: PulseUser, name: str, by: Owner) -> None:
    """Close one live connection of the account.

    Raises:
        NotOnBroker: the account has no connection of this name.
        BrokerError: the broker is unreachable or refuses, as it does in a connection's first seconds.
    """
    management = broker.management()
    if name not in {connection.name for connection in management.connections_of(pulse_user.username)}:
        raise NotOnBroker(f"The account has no connection '{name}'")
    try:
        with audit.audited(by, "closed a connection of", pulse_user):
            management.close_connection(name, "An owner of this account closed the connection.")
    except NotOnBroker as error:  # the broker has no statistics of it yet
        reason = "the connection is new; try again in a few seconds"
        raise Refused(f"closing '{name}': {reason}", status=0, reason=reason) from error


# Adopting


def require_operator(by: Owner) -> None:
    """Check that this owner may adopt what the broker has.

    Raises:
        PermissionDenied: the owner is no operator.
    """
    if not by.is_staff:
        raise PermissionDenied("Only operators can adopt accounts, queues and exchanges of the broker.")


def adopt_pulse_user(username: str, owners: Sequence[Owner], by: Owner) -> PulseUser:
    """Assign owners to a manually created account of the broker. The account on the broker doesn't change.

    Raises:
        PermissionDenied: ``by`` is no operator.
        rabbit.names.InvalidUserName: the name is invalid, so the account can't have queues of its own.
        CannotAdopt: the account is Guardian's own, or has a tag that allows more than its permissions do.
        NameTaken: the account has owners here already, or another request is changing it.
        NotVouched: an owner may not use the broker.
        LastOwner: there is no owner.
        NotOnBroker: the broker has no such account.
        BrokerError: the broker is unreachable or refuses.
    """
    require_operator(by)
    names.check_user_name(username)
    if reason := why_not_ownable(username):
        raise CannotAdopt(reason)
    if not owners:
        raise LastOwner("An account needs at least one owner.")
    management = broker.management()
    try:
        with locks.lock(username) as lock:
            if reason := why_not_ownable(username, lock.renewing_client(management).user(username).tags):
                raise CannotAdopt(reason)
            pulse_user = _create_row(username, owners, by)
            with transaction.atomic():
                _live_row(pulse_user).update(ready=True)
                audit.record(by, "adopted", pulse_user)
                ownership.assigned(dict.fromkeys(owners, (pulse_user,)), by)
    except locks.LockTaken as error:
        raise NameTaken(f"Another request is changing '{username}' right now; try again in a few minutes.") from error
    pulse_user.ready = True
    return pulse_user


def adoptable() -> list[str]:
    """Return the names of the accounts on the broker that can be adopted.

    Raises:
        BrokerError: the broker is unreachable or refuses.
    """
    users = broker.management().users()
    stored = set(PulseUser.objects.values_list("username", flat=True))
    return sorted(
        user.name
        for user in users
        if user.name not in stored and not why_not_ownable(user.name, user.tags) and _is_valid_name(user.name)
    )


def why_not_ownable(username: str, tags: Collection[str] = ()) -> str:
    """Return why an account with these tags must not have owners, or "" if it may."""
    if username in guardian_usernames():
        return f"'{username}' is the account that Guardian itself uses."
    if names.is_agents_login(username):
        return f"'{username}' has the name of an agent's login. Guardian creates and removes these with registrations."
    powerful_tags = sorted(set(tags) - HARMLESS_TAGS)
    if "administrator" in powerful_tags:
        return f"'{username}' is an administrator of the broker."
    if powerful_tags:
        return (
            f"'{username}' has the tag {', '.join(powerful_tags)} on the broker, which allows more than its "
            "permissions do. An operator can remove the tag on the broker."
        )
    return ""


def guardian_usernames() -> set[str]:
    """Return the names of the accounts that Guardian itself uses."""
    urls = split_addresses(settings.RABBITMQ_MANAGEMENT_URL) + split_addresses(settings.RABBIT_URL)
    return {unquote(urlsplit(url).username or "guest") for url in urls}


def _is_valid_name(name: str) -> bool:
    try:
        names.check_user_name(name)
    except names.InvalidUserName:
        return False
    return True


# Thresholds


def set_thresholds(
    pulse_user: PulseUser, warn: int | Unchanged | None, limit: int | Unchanged | None, by: Owner, confirm: str = ""
) -> None:
    """Set the warning threshold and the deletion limit of the account's queues, in messages; None: the policy's.

    Raises:
        PermissionDenied: owners may not set thresholds.
        ValidationError: a threshold is invalid, or the limit is above what owners may set.
        ConfirmationRequired: the next pass would delete queues, and ``confirm`` does not confirm it.
        PulseUser.DoesNotExist: the account no longer exists.
    """
    if set_thresholds_of_all([pulse_user], warn, limit, by, confirm):
        raise PulseUser.DoesNotExist("The account no longer exists.")


def set_thresholds_of_all(
    pulse_users: Sequence[PulseUser],
    warn: int | Unchanged | None,
    limit: int | Unchanged | None,
    by: Owner,
    confirm: str = "",
) -> list[PulseUser]:
    """Set the thresholds of several accounts, all or none, and return the accounts that no longer exist.

    Raises:
        PermissionDenied: owners may not set thresholds.
        ValidationError: a threshold is invalid, or the limit is above what owners may set.
        ConfirmationRequired: the next pass would delete queues, and ``confirm`` does not confirm it.
    """
    if not by.is_staff and not settings.GUARDIAN_OWNERS_MAX_QUEUE_LENGTH:
        raise PermissionDenied("Only operators set thresholds here. Ask an operator.")
    given = {"warn_length": warn, "max_length": limit}
    values = {name: value for name, value in given.items() if value is not UNCHANGED}
    change = ConfirmableChange(by, "set thresholds", pulse_users, values, confirm)
    with transaction.atomic():
        keys = [pulse_user.pk for pulse_user in pulse_users]
        before = list(PulseUser.objects.select_for_update(no_key=True).filter(pk__in=keys).order_by("pk"))
        after = {account.pk: _with_thresholds(account, values, by) for account in before}
        for account in after.values():
            account.save(update_fields=["warn_length", "max_length"])
        changed = [(account, after[account.pk]) for account in before]
        change.require_confirmed(queue_effects.provider().of_thresholds(changed))
    for pulse_user in pulse_users:
        if pulse_user.pk in after:
            account = after[pulse_user.pk]
            pulse_user.warn_length, pulse_user.max_length = account.warn_length, account.max_length
    return [pulse_user for pulse_user in pulse_users if pulse_user.pk not in after]


def _with_thresholds(pulse_user: PulseUser, values: Mapping[str, Any], by: Owner) -> PulseUser:
    """Return a copy of the account with these thresholds.

    Raises:
        ValidationError: a threshold is invalid, or the limit is above what owners may set.
    """
    changed = copy.copy(pulse_user)
    for name, value in values.items():
        setattr(changed, name, value)
    limit, largest = changed.max_length, settings.GUARDIAN_OWNERS_MAX_QUEUE_LENGTH
    check_thresholds(changed.warn_length, limit)
    if not by.is_staff and limit is not None and limit > largest and limit != pulse_user.max_length:
        raise ValidationError(f"Owners can set a deletion limit of at most {largest} messages. Ask an operator.")
    return changed


def set_keeps_archives(pulse_user: PulseUser, keeps: bool) -> None:
    """Set whether the messages of the account's deleted and purged queues are archived.

    Raises:
        PulseUser.DoesNotExist: the account no longer exists.
    """
    with transaction.atomic():
        row = PulseUser.objects.locked(pulse_user)
        row.keeps_archives = keeps
        row.save(update_fields=["keeps_archives"])
    pulse_user.keeps_archives = keeps


def permissions_of(pulse_user: PulseUser) -> dict[str, Permissions]:
    """Return the account's permissions on the broker, by vhost.

    Raises:
        NotOnBroker: the broker has no such account.
        BrokerError: the broker is unreachable or refuses.
    """
    return broker.management().permissions_of(pulse_user.username)
