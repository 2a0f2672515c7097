"""Notifications about owners and their Pulse users.

The signals are sent in the transaction of the change, so the outbox rows are committed or rolled back with it.
"""

from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any

from django.db import transaction
from django.dispatch import receiver
from django.utils import timezone

from accounts import audit, signals
from accounts.models import Invitation, NotificationAddress, Owner, PulseUser
from notifications import audience, enqueue
from notifications.account_kinds import (
    CONFIRM_ADDRESS,
    INVITATION,
    INVITATION_ANSWERED,
    OWNER_ASSIGNED,
    OWNER_LEFT,
    VOUCH_REQUEST,
    VOUCHED,
)
from notifications.enqueue import Notice
from notifications.models import Channel, Notification

COMMAND_SECONDS = timedelta(seconds=30)
"""How long a message about what a command does waits for more of it: a file may assign hundreds of Pulse users."""

audit.watch(Channel, ("owner", "name", "service"))  # the address is a secret


@receiver(signals.address_added)
def ask_to_confirm(sender: object, address: NotificationAddress, **_: Any) -> None:
    facts = {
        "address": str(address.uuid),
        "account": address.pulse_user.username,
        "added_by": address.added_by.email if address.added_by else "",
    }
    _enqueue(Notice(CONFIRM_ADDRESS, facts, recipients=[address.email]))


@receiver(signals.vouch_requested)
def ask_operators(sender: object, owner: Owner, reason: str, **_: Any) -> None:
    if recipients := audience.operators_and_staff():
        facts = {"asks": owner.email, "reason": reason}
        _enqueue(Notice(VOUCH_REQUEST, facts, recipients=recipients))


@receiver(signals.vouched)
def notify_vouched(sender: object, owner: Owner, by: Owner | None, **_: Any) -> None:
    facts = {"by": by.email if by else ""}
    _enqueue(Notice(VOUCHED, facts, recipients=[owner.email]))


@receiver(signals.owners_invited)
def ask_invitees(sender: object, invitations: Sequence[Invitation], **_: Any) -> None:
    _enqueue(
        *(Notice(INVITATION, {"invitation": str(one.uuid)}, recipients=[one.invitee.email]) for one in invitations)
    )


@receiver(signals.invitation_answered)
def notify_inviter(sender: object, invitation: Invitation, accepted: bool, **_: Any) -> None:
    facts = {
        "pulse_user": invitation.pulse_user.username,
        "invitee": invitation.invitee.email,
        "accepted": accepted,
    }
    _enqueue(Notice(INVITATION_ANSWERED, facts, recipients=[invitation.inviter.email]))


@receiver(signals.owners_assigned)
def notify_assigned(
    sender: object, pulse_users: Mapping[Owner, Sequence[PulseUser]], by: Owner | None, **_: Any
) -> None:
    """Notify the new owners. Those assigned by a command within ``COMMAND_SECONDS`` get one message."""
    facts = {"by": by.email if by else ""}
    until = None if by else timezone.now() + COMMAND_SECONDS
    for owner, owned in sorted(pulse_users.items(), key=lambda item: item[0].email):  # in one order: rows are locked
        names = [one.username for one in owned]
        if by is None and (waiting := _waiting_for_a_command(owner)) is not None:
            waiting.facts["pulse_users"] += names
            waiting.save(update_fields=["facts"])
        else:
            facts_of_owner = {**facts, "pulse_users": names}
            _enqueue(Notice(OWNER_ASSIGNED, facts_of_owner, recipients=[owner.email], deferred_until=until))


def _waiting_for_a_command(owner: Owner) -> Notification | None:
    """Return the message about Pulse users that a command assigned a moment ago, locked, or None."""
    rows = Notification.objects.select_for_update().filter(
        kind=OWNER_ASSIGNED, recipient=owner.email, state=Notification.State.DUE, deferred_until__gt=timezone.now()
    )
    return rows.filter(facts__by="").first()


@receiver(signals.owners_left)
def notify_of_departure(
    sender: object, owners: Sequence[Owner], pulse_users: Sequence[PulseUser], by: Owner | None, **_: Any
) -> None:
    """Notify the remaining owners, and those who were removed, but not ``by``. One message for each recipient."""
    left = [owner.email for owner in owners]
    who = by.email if by else ""
    removed = {email: [one.username for one in pulse_users] for email in left if email != who}
    facts = {"left": left, "by": who}
    _enqueue(*_to_each(removed | _names_by_owner(pulse_users, {by} if by else ()), facts))


@receiver(signals.owner_deactivated)
def notify_of_deactivation(sender: object, owner: Owner, pulse_users: Sequence[PulseUser], by: Owner, **_: Any) -> None:
    """Notify the other owners, but not ``by``. One message for each recipient."""
    facts = {"left": [owner.email], "by": by.email, "deactivated": True}
    _enqueue(*_to_each(_names_by_owner(pulse_users, {by, owner}), facts))


def _to_each(pulse_users: Mapping[str, Sequence[str]], facts: Mapping[str, Any]) -> list[Notice]:
    return [
        Notice(OWNER_LEFT, {**facts, "pulse_users": names}, recipients=[email]) for email, names in pulse_users.items()
    ]


def _names_by_owner(pulse_users: Sequence[PulseUser], without: Collection[Owner]) -> dict[str, list[str]]:
    """Return the names of these Pulse users by the addresses of their owners, in one query."""
    owned = PulseUser.owners.through.objects.filter(pulseuser__in=pulse_users).exclude(owner__in=without)
    names: dict[str, list[str]] = {}
    for email, username in owned.order_by("pulseuser__username").values_list("owner__email", "pulseuser__username"):
        names.setdefault(email, []).append(username)
    return names


def _enqueue(*notices: Notice) -> None:
    with transaction.atomic():
        enqueue.enqueue(notices, timezone.now())
        transaction.on_commit(enqueue.wake, robust=True)
