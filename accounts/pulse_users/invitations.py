"""Invitations to own a Pulse user: nobody becomes responsible for queues without consent.

An invitation is open for seven days, while its inviter owns the Pulse user and has access. Only the invitee can answer
it.
"""

from collections.abc import Sequence
from datetime import timedelta

from django.db import transaction
from django.utils import timezone

from accounts import audit, signals
from accounts.access import quotas, vouching
from accounts.models import INVITATION_LIFETIME, Invitation, InvitationQuerySet, Owner, PulseUser
from core import limits
from core.refusals import Refusal

MIN_INVITATION_INTERVAL = timedelta(days=1)
"""Limits the mails to a person who declines, whatever the owners of a Pulse user do."""

TO_PERSON = limits.RateLimit("invitations to this person", 20, 3600)
"""This limits the mails of owners who delete and create Pulse users."""


def invite(pulse_user: PulseUser, invitees: Sequence[Owner], by: Owner) -> None:
    """Invite these people to own a Pulse user that ``by`` owns. Open invitations to them stay as they are.

    Call this in a transaction that has locked the Pulse user. The number of queries doesn't depend on the number of
    people. Raises NotVouched if ``by`` has no access: nobody could accept.
    """
    vouching.require_vouched(by)
    are_open = set(pulse_user.invitations.open().values_list("invitee", flat=True))
    earlier = pulse_user.invitations.filter(invitee__in=invitees).select_related("invitee")
    for closed in earlier.exclude(closed_at=None):
        again_at = closed.created + MIN_INVITATION_INTERVAL
        if again_at > timezone.now():
            raise Refusal(
                f"An invitation to {closed.invitee.email} was declined or withdrawn. "
                f"You can invite them again after {again_at:%Y-%m-%d %H:%M} UTC.",
                "owners",
            )
    new = [invitee for invitee in invitees if invitee.pk not in are_open]
    if not new:
        return
    for invitee in new:
        limits.consume(TO_PERSON, str(invitee.pk))
    pulse_user.invitations.filter(invitee__in=new).delete()
    created = Invitation.objects.bulk_create(
        [Invitation(pulse_user=pulse_user, invitee=invitee, inviter=by) for invitee in new]
    )
    audit.record(by, "invited to own", pulse_user, owners=[invitee.email for invitee in new])
    signals.owners_invited.send(Invitation, invitations=created)


def accept(invitation: Invitation) -> None:
    """Make the invitee an owner of the Pulse user. Raises Invitation.DoesNotExist if it is no longer open."""
    with transaction.atomic():
        # Lock the owner first, as a withdrawal does: whichever transaction is second sees the first one's changes.
        [invitee] = vouching.lock_all([invitation.invitee])
        vouching.require_vouched(invitee)
        locked = _lock(invitation)
        quotas.require_room(quotas.PULSE_USERS, invitee, invitee.pulse_users.all())
        locked.pulse_user.owners.add(invitee)
        locked.delete()
        audit.record(invitee, "accepted an invitation to own", locked.pulse_user, inviter=locked.inviter.email)
        signals.invitation_answered.send(Invitation, invitation=locked, accepted=True)


def decline(invitation: Invitation) -> None:
    """Decline an invitation, and notify the inviter. Raises Invitation.DoesNotExist if it is no longer open."""
    with transaction.atomic():
        locked = _lock(invitation)
        locked.closed_at = timezone.now()
        locked.save(update_fields=["closed_at"])
        audit.record(locked.invitee, "declined an invitation to own", locked.pulse_user, inviter=locked.inviter.email)
        signals.invitation_answered.send(Invitation, invitation=locked, accepted=False)


def withdraw(invitations: InvitationQuerySet, pulse_user: PulseUser, by: Owner | None) -> None:
    """Withdraw these open invitations to a Pulse user, in a transaction that has locked the Pulse user."""
    found = list(invitations.select_related("invitee"))
    if found:
        Invitation.objects.filter(pk__in=[one.pk for one in found]).update(closed_at=timezone.now())
        audit.record(by, "withdrew an invitation to own", pulse_user, owners=[one.invitee.email for one in found])


def prune() -> None:
    """Delete invitations that can no longer be accepted and are too old to matter for another one."""
    Invitation.objects.filter(created__lte=timezone.now() - INVITATION_LIFETIME).delete()


def _lock(invitation: Invitation) -> Invitation:
    """Return the invitation from the database if it is open, its Pulse user locked until the transaction ends."""
    PulseUser.objects.locked(invitation.pulse_user)
    open_ones = Invitation.objects.open().select_related("pulse_user", "invitee", "inviter")
    return open_ones.get(pk=invitation.pk)
