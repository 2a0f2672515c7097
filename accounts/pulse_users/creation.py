"""Create and adopt Pulse users, on the broker and in the database.

The row is committed first, with ``ready`` false, so that every Pulse user created here has a row. It becomes ready once
the broker has the user. After a crash it stays not ready, until one of its owners creates the Pulse user again.
"""

import contextlib
import logging
import secrets
from collections.abc import Callable, Sequence

from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction
from django.utils import timezone

from accounts import audit
from accounts.access import quotas, vouching
from accounts.models import Owner, PulseUser
from accounts.pulse_users import addresses, invitations, namespace, ownership
from accounts.pulse_users.namespace import NOTHING, Belongings
from accounts.pulse_users.ownership import NO_OWNER
from accounts.pulse_users.validation import (
    NameRefused,
    check_name,
    check_password,
    check_syntax,
    grant_permissions,
    is_free_on_broker,
    is_valid_name,
    live_row,
    namespace_in_use,
    require_operator,
    why_not_ownable,
)
from core import broker, locks, removals
from core.models import Removal
from core.refusals import Refusal
from rabbit.errors import BrokerError, NotOnBroker
from rabbit.management import Management

logger = logging.getLogger(__name__)


def create_pulse_user(
    username: str,
    owners: Sequence[Owner],
    password: str | None = None,
    notification_emails: Sequence[str] = (),
    by: Owner | None = None,
    *,
    adopt_namespace: bool = False,
    on_password: Callable[[str], object] = bool,
) -> tuple[PulseUser, str]:
    """Create a Pulse user with permissions for its own names, and return its row and its password.

    Without a password, one is generated. Show the password now, since only the broker stores it. ``by`` creates it:
    an operator or None (a command) for these owners, others for themselves, and invite the other owners. With
    ``adopt_namespace``, the Pulse user gets the queues and exchanges of its name that the broker has. ``on_password``
    is called with the password before the broker gets it.

    After an error nothing was created. If that is not certain, with ``adopt_namespace``, or if the row was there
    before, the row may stay, not ready; creating the Pulse user again finishes it.
    """
    if adopt_namespace and by is not None:
        require_operator(by)
    check_name(username)
    if not owners:
        raise Refusal(NO_OWNER, "owners")
    for owner in owners:
        vouching.require_vouched(owner)
    owners, invitees = ownership.owners_of_new_pulse_user(owners, by)
    wanted = addresses.usable_addresses(notification_emails, owners)
    if password is not None:
        check_password(password, username)
    management = broker.management()
    try:
        with locks.lock(username) as lock:
            management = lock.renewing_client(management)
            pulse_user = _unfinished_row(management, username, owners)
            is_new = pulse_user is None
            if pulse_user is None:
                used = namespace.used_names(management, username)
                if any(used) and not adopt_namespace:
                    raise namespace_in_use(username, used, by)
                pulse_user = _create_row(username, owners, by, used)
            password = password or secrets.token_urlsafe(24)
            on_password(password)
            try:
                management.put_user(username, password)
                grant_permissions(management, username)
                is_ready = _mark_ready(pulse_user, owners, invitees, wanted, by)
            except (BrokerError, ValidationError):
                # Undoing removes the queues, too. There are some if the broker had lost this Pulse user, or they are
                # to be adopted.
                if is_new and not adopt_namespace:
                    _undo_creation(management, pulse_user)
                raise
            if not is_ready:
                raise NameRefused(f"'{username}' was removed by another request while it was being created.")
    except locks.LockTaken as error:
        raise NameRefused(
            f"'{username}' is being created by another request; try again in a few minutes, or choose another name."
        ) from error
    return pulse_user, password


def _unfinished_row(management: Management, username: str, owners: Sequence[Owner]) -> PulseUser | None:
    """Return the row of an unfinished creation by one of these owners, if there is one."""
    rows = PulseUser.objects.filter(username=username, ready=False, removing_since=None)
    unfinished = rows.filter(owners__in=owners).first()
    if not is_free_on_broker(management, username, allow_unfinished=unfinished is not None):
        raise NameRefused(f"'{username}' is a user on the broker already; choose another name.")
    return unfinished


def _create_row(username: str, owners: Sequence[Owner], by: Owner | None, adopted: Belongings = NOTHING) -> PulseUser:
    try:
        with transaction.atomic():
            # Locked: another request may be withdrawing the vouching, and with it all Pulse users of the owner.
            for owner in vouching.lock_all(owners):
                vouching.require_vouched(owner)
            if by is not None:
                quotas.require_room(quotas.PULSE_USERS, by, by.pulse_users.all())
            pulse_user = PulseUser.objects.create(username=username)
            pulse_user.owners.set(owners)
            if any(adopted):
                audit.record(None, "adopted", pulse_user, **adopted._asdict())
    except IntegrityError as error:
        raise NameRefused(f"'{username}' is taken; choose another name.") from error
    return pulse_user


def _mark_ready(
    pulse_user: PulseUser,
    owners: Sequence[Owner],
    invitees: Sequence[Owner],
    emails: Sequence[str],
    by: Owner | None,
) -> bool:
    """Mark the Pulse user as ready, and return whether it is. It isn't if its removal has begun.

    It may have other owners by now, or from before the broker lost it. Only operators replace them.
    """
    with transaction.atomic():
        vouching.lock_all(owners)  # before the Pulse user, as a withdrawal does
        if not live_row(pulse_user).update(ready=True):
            return False
        present = set(pulse_user.owners.all())
        if by is None or by.is_staff:
            ownership.assigned(dict.fromkeys([one for one in owners if one in present], (pulse_user,)), by)
            ownership.set_owners(pulse_user, owners, by)
        elif by in present:
            invitations.invite(pulse_user, [one for one in invitees if one not in present], by)
        else:
            raise NameRefused(f"You were removed from the owners of '{pulse_user.username}'. Ask one of them.")
        pulse_user.ready = True
        for email in emails:
            if not pulse_user.notification_addresses.filter(email=email).exists():
                addresses.create_address(pulse_user, email, by or owners[0])
        return True


def _undo_creation(management: Management, pulse_user: PulseUser) -> None:
    """Delete an unfinished Pulse user. If the broker is unreachable, the row stays and is not ready."""
    unfinished = PulseUser.objects.filter(pk=pulse_user.pk, ready=False)
    # A ready row is a finished Pulse user. Marking the row as being removed keeps others from making it ready.
    marked_at = timezone.now()
    with transaction.atomic():
        if not unfinished.filter(removing_since=None).update(removing_since=marked_at):
            return
        # A crash leaves the row to the task. Without the mark, the task drops the Removal.
        removals.reserve([Removal(kind=Removal.Kind.PULSE_USER, name=pulse_user.username)])
    try:
        with contextlib.suppress(NotOnBroker):
            management.delete_user(pulse_user.username)
    except BrokerError:
        unfinished.filter(removing_since=marked_at).update(removing_since=None)  # keeps the mark of another removal
    else:
        unfinished.delete()
        Removal.objects.filter(kind=Removal.Kind.PULSE_USER, name=pulse_user.username).delete()


def adopt_pulse_user(username: str, owners: Sequence[Owner], by: Owner) -> PulseUser:
    """Assign owners to a manually created user of the broker. It doesn't change on the broker.

    Raises NotOnBroker if the broker has no such user.
    """
    require_operator(by)
    check_syntax(username)
    if reason := why_not_ownable(username):
        raise NameRefused(reason)
    if not owners:
        raise Refusal(NO_OWNER, "owners")
    management = broker.management()
    try:
        with locks.lock(username) as lock:
            if reason := why_not_ownable(username, lock.renewing_client(management).user(username).tags):
                raise NameRefused(reason)
            pulse_user = _create_row(username, owners, by)
            with transaction.atomic():
                live_row(pulse_user).update(ready=True)
                audit.record(by, "adopted", pulse_user)
                ownership.assigned(dict.fromkeys(owners, (pulse_user,)), by)
    except locks.LockTaken as error:
        raise NameRefused(f"Another request is changing '{username}' right now; try again in a few minutes.") from error
    pulse_user.ready = True
    return pulse_user


def adoptable() -> list[str]:
    """Return the names of the broker's users that can be adopted."""
    users = broker.management().users()
    stored = set(PulseUser.objects.values_list("username", flat=True))
    return sorted(
        user.name
        for user in users
        if user.name not in stored and not why_not_ownable(user.name, user.tags) and is_valid_name(user.name)
    )
