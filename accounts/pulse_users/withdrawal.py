"""Withdraw an owner's access to the broker and, optionally, remove their Pulse users and tokens.

Deleting an owner removes what their agents registered (``agents/removal/deletions.py``), not their Pulse users:
``withdraw`` removes these first, and the admin refuses to delete an owner who has any.
"""

from django.db import transaction
from django.db.models import QuerySet

from accounts import audit, queue_effects
from accounts.access import tokens, vouching
from accounts.models import Owner, PulseUser
from accounts.pulse_users import ownership, removal
from core.confirmation import ConfirmableChange


def withdraw(owner: Owner, by: Owner, *, remove: bool = False, reason: str = "", confirm: str = "") -> None:
    """Stop an owner from creating Pulse users and tokens, and record who decided it.

    Existing Pulse users and tokens stay, unless ``remove``: then the tokens are revoked, the Pulse users without
    another active owner are removed with their queues and exchanges, and the owner is removed from the others.

    Raises PermissionDenied if ``by`` is no operator or the owner is one; ConfirmationRequired if queues of the Pulse
    users or of the owner's agents would be deleted; and ValidationError for an invalid reason. Then nothing changed.
    """
    with transaction.atomic():
        vouching.unvouch(owner, by, reason)
        if remove:
            tokens.revoke_tokens_of(owner)
            leave_all(owner, by, ConfirmableChange(by, "withdraw and remove", [owner], {}, confirm))


def leave_all(owner: Owner, by: Owner, change: ConfirmableChange) -> None:
    """Remove an owner from all shared Pulse users, and mark those without another active owner for removal.

    Call this in a transaction. The number of queries doesn't depend on the number of Pulse users. Raises
    ConfirmationRequired if the change, which deletes queues, is not confirmed.
    """
    through = PulseUser.owners.through
    owned = through.objects.filter(owner=owner).values("pulseuser")
    list(PulseUser.objects.select_for_update(no_key=True).filter(pk__in=owned).order_by("pk"))
    # Read them again now that they are locked: another request may have removed the owner from some.
    pulse_users = list(owner.pulse_users.order_by("pk"))
    shared = set(shared_pulse_users(owner).values_list("pk", flat=True))
    owned_alone = [pulse_user for pulse_user in pulse_users if pulse_user.pk not in shared]
    # Without a token, what the owner's agents registered is deleted by the next clean-up.
    change.require_confirmed(queue_effects.of_removal(owned_alone) + queue_effects.of_agents(owner))
    removal.mark_for_removal(owned_alone)
    through.objects.filter(owner=owner, pulseuser__in=shared).delete()
    if left := [pulse_user for pulse_user in pulse_users if pulse_user.pk in shared]:
        audit.record(None, "removed an owner", left, owner=owner.email)
        ownership.departed([owner], left, by)


def shared_pulse_users(owner: Owner) -> QuerySet[PulseUser]:
    """Return the Pulse users of this owner that another active owner has, too."""
    others = Owner.objects.filter(is_active=True).exclude(pk=owner.pk)
    return PulseUser.objects.filter(pk__in=owner.pulse_users.all(), owners__in=others).distinct()
