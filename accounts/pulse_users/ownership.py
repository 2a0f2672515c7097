"""Who owns a Pulse user. Owners invite others, who decide themselves; operators assign owners.

An owner who leaves or is deactivated may know the password. So it counts as exposed until it is changed, and the other
owners are notified.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from django.db import transaction
from django.utils import timezone

from accounts import signals
from accounts.access import vouching
from accounts.models import Invitation, NotificationAddress, Owner, PulseUser, normalize_address, owners_by_address
from accounts.pulse_users import addresses, invitations
from core.refusals import Refusal

MAX_OWNERS = 100
"""Including those who are invited."""


NO_OWNER = "A Pulse user needs at least one owner."


def find_owners(emails: Iterable[str]) -> list[Owner]:
    """Return the owners with these addresses, without duplicates, in one query.

    They must have signed in and may use the broker. A Refusal doesn't reveal which addresses belong to an owner.
    """
    wanted = list(dict.fromkeys(normalize_address(email) for email in emails))
    if len(wanted) > MAX_OWNERS:
        raise Refusal(f"A Pulse user can have {MAX_OWNERS} owners; you gave {len(wanted)}.", "owners")
    valid = [email for email in wanted if addresses.is_address(email)]
    found = owners_by_address(valid, vouching.possible_owners())
    missing = [email for email in wanted if email not in found]
    if missing:
        raise Refusal(
            f"No owner who may use the broker has this address: {', '.join(missing)}. "
            "An owner must have signed in here and have access.",
            "owners",
        )
    return [found[email] for email in wanted]


def owners_of_new_pulse_user(owners: Sequence[Owner], by: Owner | None) -> tuple[list[Owner], list[Owner]]:
    """Return who of these people owns a Pulse user that ``by`` creates, and who is invited.

    Operators and commands (None) assign all owners. Others own what they create, and invite the rest.
    """
    if by is None or by.is_staff:
        return list(owners), []
    return [by], [owner for owner in owners if owner != by]


def add_owner(pulse_user: PulseUser, owner: Owner, by: Owner) -> None:
    """Invite a person to own the Pulse user, or assign the person if ``by`` is an operator. Idempotent."""
    with transaction.atomic():
        # Lock the owner first, as a withdrawal does: whichever transaction is second sees the first one's changes.
        [person] = vouching.lock_all([owner])
        locked = _lock(pulse_user, by)
        owners = set(locked.owners.values_list("pk", flat=True))
        if person.pk in owners:
            return
        _check_number({*owners, *locked.invitations.open().values_list("invitee", flat=True), person.pk})
        _add(locked, [person], by)


def set_owners(pulse_user: PulseUser, owners: Sequence[Owner], by: Owner | None) -> None:
    """Replace the owners of the Pulse user.

    Those who are missing from the list are removed, and invitations to others are withdrawn. New owners are invited,
    or assigned if ``by`` is an operator or None (a command). If only new owners are in the list, the present ones
    stay, because none of the new ones has accepted yet.
    """
    if not owners:
        raise Refusal(NO_OWNER, "owners")
    with transaction.atomic():
        wanted = vouching.lock_all(owners)
        locked = _lock(pulse_user, by)
        present = set(locked.owners.all())
        new = [owner for owner in wanted if owner not in present]
        staying = wanted if vouching.acts_as_operator(by) else [owner for owner in wanted if owner in present]
        can_sign_in = any(owner.is_active for owner in staying)
        if not can_sign_in and (vouching.acts_as_operator(by) or not new):
            raise Refusal("A Pulse user needs at least one owner who can sign in.", "owners")
        if not can_sign_in:
            _check_number({owner.pk for owner in (*present, *wanted)})
        invitations.withdraw(locked.invitations.open().exclude(invitee__in=wanted), locked, by)
        if new:
            _add(locked, new, by)
        if can_sign_in:
            _remove(locked, sorted(present - set(wanted), key=lambda owner: owner.email), by)


def remove_owner(pulse_user: PulseUser, owner: Owner, by: Owner) -> None:
    """Remove an owner, or let ``by`` leave, unless no owner who can sign in would remain."""
    with transaction.atomic():
        locked = _lock(pulse_user, by)
        is_active = dict(locked.owners.values_list("pk", "is_active"))
        if owner.pk not in is_active:
            raise Refusal(f"{owner.email} isn't an owner of '{pulse_user.username}'.")
        leaves_active = is_active.pop(owner.pk)
        if not is_active or (leaves_active and not any(is_active.values())):
            who = "the last owner who can sign in" if is_active else "the last owner"
            raise Refusal(
                f"{owner.email} is {who} of '{pulse_user.username}' and can't be removed. "
                "Add another owner first, or delete the Pulse user."
            )
        _remove(locked, [owner], by)


def withdraw_invitation(pulse_user: PulseUser, invitee: Owner, by: Owner) -> None:
    """Withdraw an open invitation. Idempotent."""
    with transaction.atomic():
        locked = _lock(pulse_user, by)
        invitations.withdraw(locked.invitations.open().filter(invitee=invitee), locked, by)


def assigned(pulse_users: Mapping[Owner, Sequence[PulseUser]], by: Owner | None) -> None:
    """Notify the owners whom an operator, or a command (None), assigned. Call this in the same transaction."""
    others = {owner: owned for owner, owned in pulse_users.items() if owner != by}
    if vouching.acts_as_operator(by) and others:
        signals.owners_assigned.send(PulseUser, pulse_users=others, by=by)


def departed(owners: Sequence[Owner], pulse_users: Sequence[PulseUser], by: Owner | None) -> None:
    """Record that owners left Pulse users or were removed, in the transaction that removed them."""
    _end_influence(owners, pulse_users)
    signals.owners_left.send(PulseUser, owners=owners, pulse_users=pulse_users, by=by)


def deactivated(owner: Owner, by: Owner) -> None:
    """Record that an owner was deactivated, in the transaction that did it. The Pulse users stay theirs."""
    if pulse_users := list(owner.pulse_users.order_by("username")):
        _end_influence([owner], pulse_users)
        signals.owner_deactivated.send(PulseUser, owner=owner, pulse_users=pulse_users, by=by)


def _end_influence(owners: Sequence[Owner], pulse_users: Sequence[PulseUser]) -> None:
    """Delete open invitations and notification addresses of these owners, who may not use the Pulse users any more.

    Mark the passwords as exposed, because the owners may know them.
    """
    Invitation.objects.filter(pulse_user__in=pulse_users, inviter__in=owners, closed_at=None).delete()
    NotificationAddress.objects.filter(pulse_user__in=pulse_users, added_by__in=owners).delete()
    PulseUser.objects.filter(pk__in=[one.pk for one in pulse_users]).update(password_exposed_at=timezone.now())


def require_access(pulse_user: PulseUser, by: Owner | None) -> None:
    """Check that ``by`` may change the Pulse user, in case that they were removed since their request began."""
    pulse_users = PulseUser.objects.all() if by is None else PulseUser.objects.seen_by(by)
    pulse_users.get(pk=pulse_user.pk)


def _lock(pulse_user: PulseUser, by: Owner | None) -> PulseUser:
    """Return the Pulse user from the database, locked until the transaction ends, if ``by`` may change it."""
    locked = PulseUser.objects.locked(pulse_user)
    require_access(locked, by)
    return locked


def _check_number(owners: Collection[int]) -> None:
    if len(owners) > MAX_OWNERS:
        raise Refusal(f"A Pulse user can have {MAX_OWNERS} owners, including those who are invited.", "owners")


def _add(locked: PulseUser, new: Sequence[Owner], by: Owner | None) -> None:
    for owner in new:
        vouching.require_vouched(owner)
    if by is None or by.is_staff:
        locked.owners.add(*new)
        locked.invitations.filter(invitee__in=new).delete()
        assigned(dict.fromkeys(new, (locked,)), by)
    else:
        invitations.invite(locked, new, by)


def _remove(locked: PulseUser, leaving: Sequence[Owner], by: Owner | None) -> None:
    if leaving:
        locked.owners.remove(*leaving)
        departed(leaving, [locked], by)
