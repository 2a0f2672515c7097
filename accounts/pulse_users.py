"""RabbitMQ accounts: making, changing and adopting them, on the broker and here together.

The row comes first, not ready yet, so that no account made here is ever without one; it is ready when the broker has
the account. What a crash leaves in between is not ready: the same owner making it again finishes it.
"""

import contextlib
import logging
import secrets
from collections.abc import Collection, Iterable, Sequence
from urllib.parse import unquote, urlsplit

from django.conf import settings
from django.contrib.auth.password_validation import validate_password
from django.core.exceptions import PermissionDenied, ValidationError
from django.db import IntegrityError, models, transaction
from django.utils import timezone

from accounts import addresses, audit, vouching
from accounts.models import (
    UNCHANGED,
    Owner,
    PulseUser,
    Unchanged,
    check_thresholds,
    has_control_characters,
    normalize_address,
)
from core import broker, locks, removals
from core.models import Removal
from rabbit import names, permissions
from rabbit.management import BrokerError, BrokerUnavailable, Connection, Management, NotOnBroker
from rabbit.permissions import Permissions

logger = logging.getLogger(__name__)

MAX_OWNERS = 100

MAX_PASSWORD_LENGTH = 255

HARMLESS_TAGS = frozenset({"management", "monitoring"})
"""With these an account looks at the broker; with any other it can do what its permissions don't allow."""


class NameTaken(ValueError):
    """The name belongs to an account already, here or on the broker."""


class NameReserved(ValueError):
    """The name is kept for an account that is not made here."""


class LastOwner(ValueError):
    """An account would be without an owner."""


class NotAnOwner(ValueError):
    """Somebody who doesn't own the account can't leave it."""


class CannotAdopt(ValueError):
    """This account is not to be given to anybody. The text says why."""


# Making


def check_name(username: str) -> None:
    """Make sure that an account can be made with this name, as far as is known here. The broker isn't asked.

    A name whose making was broken off is left to :func:`create_pulse_user`, which knows whose it was.

    Raises:
        rabbit.names.InvalidUserName: the name can't be used; the text says why.
        NameReserved: it is kept for others.
        NameTaken: an account here has it.
    """
    names.check_user_name(username)
    if username.casefold() in {name.casefold() for name in (*settings.GUARDIAN_RESERVED_USERS, *guardian_usernames())}:
        raise NameReserved(f"'{username}' is reserved; choose another name.")
    if names.is_agents_login(username):
        raise NameReserved("A name of 32 hex digits is kept for agents' logins; choose another one.")
    row = PulseUser.objects.filter(username=username).first()
    if row is None:
        return
    if row.removing_since is not None:
        raise NameTaken(f"'{username}' is just being removed; wait until it is gone, or choose another name.")
    if row.ready:
        raise NameTaken(f"'{username}' is taken; choose another name.")


def check_password(password: str, username: str) -> None:
    """Make sure that this can be the password of the account with this name.

    Raises:
        ValidationError: it can't; of the field ``password``.
    """
    try:
        # Logging in sends name and password with a NUL between them.
        if has_control_characters(password):
            raise ValidationError("The password has a character in it that can't be typed, such as a line break.")
        if len(password) > MAX_PASSWORD_LENGTH:
            raise ValidationError(f"The password is too long; {MAX_PASSWORD_LENGTH} characters are allowed.")
        validate_password(password, PulseUser(username=username))  # type: ignore[arg-type]  # it has a username
    except ValidationError as error:
        raise ValidationError({"password": error.messages}) from None


def create_pulse_user(
    username: str,
    owners: Sequence[Owner],
    password: str | None = None,
    notification_emails: Sequence[str] = (),
    by: Owner | None = None,
) -> tuple[PulseUser, str]:
    """Make a RabbitMQ account that may use its own names, and return its row and its password.

    Without a password one is generated. It is on the broker alone afterwards, so this is the time to show it. ``by`` is
    who adds the further addresses; None: the first owner.

    Raises:
        rabbit.names.InvalidUserName: the name can't be used; the text says why.
        NameReserved: it is kept for others.
        NameTaken: somebody has it, or it is being made, changed or removed right now.
        NotVouched: an owner may not use the broker.
        LastOwner: there is no owner.
        ValidationError: the password or an address can't be used; of the field ``password`` or ``notification_emails``.
            An address of a making that was broken off may have been asked within an hour; then the row is not ready.
        BrokerError: the broker is away or refused. Nothing was made; where that could not be made sure of, the row is
            not ready, and making it again finishes it.
    """
    check_name(username)
    if not owners:
        raise LastOwner("An account has one owner at least.")
    for owner in owners:
        vouching.require_vouched(owner)
    wanted = addresses.usable_addresses(notification_emails, owners)
    if password is not None:
        check_password(password, username)
    management = broker.management()
    try:
        with locks.lock(username) as ours:
            password = password or secrets.token_urlsafe(24)
            return _create(ours.renewing_client(management), username, owners, password, wanted, by or owners[0])
    except locks.LockTaken as error:
        raise NameTaken(f"'{username}' is just being made; look again in some minutes, or choose another.") from error


def _create(
    management: Management,
    username: str,
    owners: Sequence[Owner],
    password: str,
    notification_emails: list[str],
    by: Owner,
) -> tuple[PulseUser, str]:
    begun = PulseUser.objects.filter(username=username, ready=False, removing_since=None)
    unfinished = begun.filter(owners__in=owners).first()
    if not may_be_made(management, username, begun=unfinished is not None):
        raise NameTaken(f"'{username}' is an account on the broker already; choose another name.")
    pulse_user = unfinished or _create_row(username, owners)
    try:
        management.put_user(username, password)
        _grant(management, username)
    except BrokerError:
        _undo_creation(management, pulse_user)
        raise
    if not _mark_ready(pulse_user, owners, notification_emails, by):
        raise NameTaken(f"'{username}' was removed by somebody while it was being made.")
    return pulse_user, password


def may_be_made(management: Management, username: str, *, begun: bool) -> bool:
    """Return whether the broker has no such account, or only what a making that was begun here has left of it."""
    try:
        tags = management.user(username).tags
    except NotOnBroker:
        return True
    if not begun or tags:
        return False
    made = {settings.GUARDIAN_PULSE_VHOST: permissions.for_pulse_user(username)}
    return management.permissions_of(username) in ({}, made)


def _create_row(username: str, owners: Sequence[Owner]) -> PulseUser:
    try:
        with transaction.atomic():
            # Somebody may be withdrawing it right now, with all accounts that such an owner has.
            for owner in vouching.lock_all(owners):
                vouching.require_vouched(owner)
            pulse_user = PulseUser.objects.create(username=username)
            pulse_user.owners.set(owners)
    except IntegrityError as error:
        raise NameTaken(f"'{username}' is taken; choose another name.") from error
    return pulse_user


def _grant(management: Management, username: str) -> None:
    vhost = settings.GUARDIAN_PULSE_VHOST
    try:
        management.set_permissions(vhost, username, permissions.for_pulse_user(username))
    except NotOnBroker as error:
        raise BrokerUnavailable(
            f"The broker has no vhost '{vhost}', or lost the account again; operators see GUARDIAN_PULSE_VHOST: {error}"
        ) from error


def _mark_ready(pulse_user: PulseUser, owners: Sequence[Owner], notification_emails: list[str], by: Owner) -> bool:
    """Return whether it is ready; not where somebody has begun to remove it, which the task finishes."""
    with transaction.atomic():
        if not _live_row(pulse_user).update(ready=True):
            return False
        pulse_user.ready = True
        pulse_user.owners.set(owners)
        for email in notification_emails:
            if not pulse_user.notification_addresses.filter(email=email).exists():
                addresses.create_address(pulse_user, email, by)
        return True


def _undo_creation(management: Management, pulse_user: PulseUser) -> None:
    """Take back what was begun. Where the broker can't be asked, the row stays, not ready, and says so."""
    ours = PulseUser.objects.filter(pk=pulse_user.pk, ready=False)
    # A ready one is an account of somebody's by now. Marked as being removed, nobody makes it ready meanwhile.
    marked_at = timezone.now()
    with transaction.atomic():
        if not ours.filter(removing_since=None).update(removing_since=marked_at):
            return
        # A crash leaves the row to the task. Without the mark, the task drops the Removal.
        removals.reserve([Removal(kind=Removal.Kind.ACCOUNT, name=pulse_user.username)])
    try:
        with contextlib.suppress(NotOnBroker):
            management.delete_user(pulse_user.username)
    except BrokerError:
        ours.filter(removing_since=marked_at).update(removing_since=None)  # another mark is somebody's removal
    else:
        ours.delete()


def _live_row(pulse_user: PulseUser) -> models.QuerySet[PulseUser]:
    """Return the account's row, if it isn't gone or being removed."""
    return PulseUser.objects.filter(pk=pulse_user.pk, removing_since=None)


# The password


def rotate_password(pulse_user: PulseUser, password: str | None = None, *, close_connections: bool = False) -> str:
    """Give the account another password and return it; without one it is generated. This is the time to show it.

    Permissions, tags and live connections stay; with ``close_connections`` these are closed. An account that vanished
    from the broker, or was not ready, is made again with the permissions of a new one.

    Raises:
        ValidationError: the password can't be used (of the field ``password``), somebody is changing or removing the
            account right now, it is Guardian's own or an administrator's by now, or it is another's of that name, made
            by hand before this one was ready.
        BrokerError: the broker is away or refused. Where it is about the connections, the password is another already:
            the text says so, and doing it again mends it.
    """
    username = pulse_user.username
    if password is not None:
        check_password(password, username)
    management = broker.management()
    try:
        with locks.lock(username) as ours:
            return _rotate(ours.renewing_client(management), pulse_user, password, close_connections=close_connections)
    except locks.LockTaken as error:
        raise ValidationError(f"Somebody is changing '{username}' right now; look again in some minutes.") from error


def _rotate(management: Management, pulse_user: PulseUser, password: str | None, *, close_connections: bool) -> str:
    row = _live_row(pulse_user).first()
    if row is None:
        raise ValidationError(f"'{pulse_user.username}' is being removed, so it gets no new password.")
    username, is_ready = row.username, row.ready
    try:
        tags = management.user(username).tags
    except NotOnBroker:
        tags, is_ready = frozenset(), False
        # Not ready until it has its permissions again, whatever comes in between.
        _live_row(row).update(ready=False)
    if reason := why_nobodys(username, tags):
        raise ValidationError(reason)
    if not is_ready and not may_be_made(management, username, begun=True):
        raise ValidationError(f"'{username}' is an account on the broker that somebody made by hand. Ask an operator.")
    password = password or secrets.token_urlsafe(24)
    with audit.audited(None, "gave another password", row):
        is_new = management.put_user(username, password, sorted(tags))
    if is_new or not is_ready:
        _grant(management, username)
    if not _live_row(row).update(ready=True):
        raise ValidationError(f"'{username}' was removed by somebody meanwhile.")
    pulse_user.ready = True
    if close_connections:
        _close_connections(management, username)
    return password


def _close_connections(management: Management, username: str) -> None:
    try:
        with contextlib.suppress(NotOnBroker):
            management.close_connections_of(username, "The password of this account was changed.")
    except BrokerError as error:
        raise BrokerUnavailable(
            "The password was changed, but the live connections could not be closed; "
            f"change it once more, and it is shown then: {error}"
        ) from error


def connections_of(pulse_user: PulseUser) -> list[Connection]:
    """Return the account's live connections.

    Raises:
        BrokerError: the broker is away or refused.
    """
    return broker.management().connections_of(pulse_user.username)


# Adopting


def require_operator(by: Owner) -> None:
    """Make sure that this is somebody who may adopt accounts.

    Raises:
        PermissionDenied: it isn't.
    """
    if not by.is_staff:
        raise PermissionDenied("Only operators can adopt an account that was made by hand.")


def adopt_pulse_user(username: str, owners: Sequence[Owner], by: Owner) -> PulseUser:
    """Give an account that was made by hand on the broker its owners. Nothing of it changes there.

    Raises:
        PermissionDenied: ``by`` is no operator.
        rabbit.names.InvalidUserName: no queue could be its own by this name.
        CannotAdopt: it is Guardian's own, or has a tag that gives it more than its permissions do.
        NameTaken: it has owners here already, or somebody is changing it right now.
        NotVouched: an owner may not use the broker.
        LastOwner: there is no owner.
        NotOnBroker: the broker has no such account.
        BrokerError: the broker is away or refused.
    """
    require_operator(by)
    names.check_user_name(username)
    if reason := why_nobodys(username):
        raise CannotAdopt(reason)
    if not owners:
        raise LastOwner("An account has one owner at least.")
    management = broker.management()
    try:
        with locks.lock(username) as ours:
            if reason := why_nobodys(username, ours.renewing_client(management).user(username).tags):
                raise CannotAdopt(reason)
            pulse_user = _create_row(username, owners)
            _live_row(pulse_user).update(ready=True)
            audit.note(by, "adopted", pulse_user)
    except locks.LockTaken as error:
        raise NameTaken(f"Somebody is changing '{username}' right now; look again in some minutes.") from error
    pulse_user.ready = True
    return pulse_user


def adoptable() -> list[str]:
    """Return the names of the accounts on the broker that can be adopted.

    Raises:
        BrokerError: the broker is away or refused.
    """
    users = broker.management().users()
    known = set(PulseUser.objects.values_list("username", flat=True))
    return sorted(
        user.name
        for user in users
        if user.name not in known and not why_nobodys(user.name, user.tags) and _can_be_a_name(user.name)
    )


def why_nobodys(username: str, tags: Collection[str] = ()) -> str:
    """Return why an account with these tags must not be an owner's, or changed by one; empty: it may be."""
    if username in guardian_usernames():
        return f"'{username}' is the account that Guardian itself works with."
    if names.is_agents_login(username):
        return f"'{username}' is named as an agent's login, which Guardian makes and removes with its registration."
    more = sorted(set(tags) - HARMLESS_TAGS)
    if "administrator" in more:
        return f"'{username}' is an administrator of the broker, who may do everything there."
    if more:
        return (
            f"'{username}' has the tag {', '.join(more)} on the broker, which gives it more than its permissions do. "
            "An operator can take that away there."
        )
    return ""


def guardian_usernames() -> set[str]:
    """Return the names of the accounts that Guardian itself works with."""
    urls = [urlsplit(url) for url in (settings.RABBITMQ_MANAGEMENT_URL, settings.RABBIT_URL) if url]
    return {unquote(url.username or "guest") for url in urls}


def _can_be_a_name(name: str) -> bool:
    try:
        names.check_user_name(name)
    except names.InvalidUserName:
        return False
    return True


# Owners


def find_owners(emails: Iterable[str]) -> list[Owner]:
    """Return the owners with these addresses, each once, in one query.

    Raises:
        ValidationError: some are nobody's who has signed in and may use the broker; the text names them, and not
            whether they are known.
    """
    wanted = list(dict.fromkeys(normalize_address(email) for email in emails))
    if len(wanted) > MAX_OWNERS:
        raise ValidationError(f"An account can have {MAX_OWNERS} owners, and these are {len(wanted)}.")
    askable = [email for email in wanted if addresses.is_address(email)]
    there = vouching.possible_owners().filter(email__in=askable)
    found = {owner.email: owner for owner in there}
    missing = [email for email in wanted if email not in found]
    if missing:
        raise ValidationError(
            f"Nobody who may use the broker has this address: {', '.join(missing)}. "
            "An owner has signed in here and is vouched for."
        )
    return [found[email] for email in wanted]


def add_owner(pulse_user: PulseUser, owner: Owner) -> None:
    """Make somebody an owner of the account; who is one already stays it.

    Raises:
        NotVouched: they may not use the broker.
        PulseUser.DoesNotExist: the account is gone meanwhile.
    """
    with transaction.atomic():
        # The owner first, as in withdrawing: whichever comes second sees what the first has done.
        for locked in vouching.lock_all([owner]):
            vouching.require_vouched(locked)
        PulseUser.objects.locked(pulse_user).owners.add(owner)


def remove_owner(pulse_user: PulseUser, owner: Owner) -> None:
    """Take an owner off the account.

    Raises:
        NotAnOwner: they aren't one.
        LastOwner: nobody would be left who can sign in.
        PulseUser.DoesNotExist: the account is gone meanwhile.
    """
    with transaction.atomic():
        locked = PulseUser.objects.locked(pulse_user)
        is_active = dict(locked.owners.values_list("pk", "is_active"))
        if owner.pk not in is_active:
            raise NotAnOwner(f"{owner.email} isn't an owner of '{pulse_user.username}'.")
        leaves_active = is_active.pop(owner.pk)
        if not is_active or (leaves_active and not any(is_active.values())):
            who = "the last owner who can sign in" if is_active else "the last owner"
            raise LastOwner(
                f"{owner.email} is {who} of '{pulse_user.username}', and can't leave it. "
                "Add another owner first, or delete the account."
            )
        locked.owners.remove(owner)


def set_owners(pulse_user: PulseUser, owners: Sequence[Owner]) -> None:
    """Make these, and nobody else, the owners of the account.

    Raises:
        LastOwner: there are none, or none who can sign in.
        NotVouched: one who isn't an owner yet may not use the broker.
        PulseUser.DoesNotExist: the account is gone meanwhile.
    """
    if not owners:
        raise LastOwner("An account has one owner at least.")
    with transaction.atomic():
        current = vouching.lock_all(owners)
        locked = PulseUser.objects.locked(pulse_user)
        present = set(locked.owners.values_list("pk", flat=True))
        for owner in current:
            if owner.pk not in present:
                vouching.require_vouched(owner)
        if not any(owner.is_active for owner in current):
            raise LastOwner("An account has one owner at least who can sign in.")
        locked.owners.set(current)


# Thresholds


def set_thresholds(
    pulse_user: PulseUser, warn: int | Unchanged | None, most: int | Unchanged | None, by: Owner
) -> None:
    """Set the thresholds of the account's queues, in messages; None: as the policy says.

    Raises:
        PermissionDenied: owners set none here.
        ValidationError: they can't be used, or the second is above what owners may set.
        PulseUser.DoesNotExist: the account is gone meanwhile.
    """
    limit = settings.GUARDIAN_OWNERS_MAX_QUEUE_LENGTH
    if not by.is_staff and not limit:
        raise PermissionDenied("The thresholds are set by operators here. Ask one.")
    with transaction.atomic():
        locked = PulseUser.objects.locked(pulse_user)
        warn = locked.warn_length if warn is UNCHANGED else warn
        most = locked.max_length if most is UNCHANGED else most
        check_thresholds(warn, most)
        if not by.is_staff and most is not None and most > limit and most != locked.max_length:
            raise ValidationError(f"The largest maximum that owners may set is {limit} messages. Ask an operator.")
        locked.warn_length, locked.max_length = warn, most
        locked.save(update_fields=["warn_length", "max_length"])
    pulse_user.warn_length, pulse_user.max_length = warn, most


def permissions_of(pulse_user: PulseUser) -> dict[str, Permissions]:
    """Return what the broker lets the account do, by vhost.

    Raises:
        NotOnBroker: the broker has no such account.
        BrokerError: the broker is away or refused.
    """
    return broker.management().permissions_of(pulse_user.username)
