"""Withdraw an owner's access to the broker and, optionally, remove their accounts and tokens.

Deleting an owner removes what their agents registered (``agents/deletions.py``), not their accounts:
``withdraw`` removes these first, and the admin refuses to delete an owner who has any.
"""

from django.db import transaction

from accounts import audit, removal, tokens, vouching
from accounts.models import Owner, PulseUser


def withdraw(owner: Owner, by: Owner, *, remove: bool = False, reason: str = "") -> None:
    """Stop an owner from creating accounts and tokens, and record who decided it.

    Existing accounts and tokens stay, unless ``remove``: then the tokens are revoked, the accounts that only this owner
    has are removed with their queues and exchanges, and the owner is removed from shared accounts.

    Raises:
        PermissionDenied: ``by`` is no operator, or the owner is one.
        ValidationError: the reason is too long, or contains control characters.
    """
    with transaction.atomic():
        vouching.unvouch(owner, by, reason)
        if remove:
            tokens.revoke_tokens_of(owner)
            leave_all(owner)


def leave_all(owner: Owner) -> None:
    """Remove an owner from all shared accounts, and mark the accounts without another owner for removal.

    Call this in a transaction. The number of queries doesn't depend on the number of accounts.
    """
    through = PulseUser.owners.through
    owned = through.objects.filter(owner=owner).values("pulseuser")
    accounts = list(PulseUser.objects.select_for_update(no_key=True).filter(pk__in=owned).order_by("pk"))
    shared = set(
        through.objects.filter(pulseuser__in=owned).exclude(owner=owner).values_list("pulseuser_id", flat=True)
    )
    removal.mark_for_removal([account for account in accounts if account.pk not in shared])
    through.objects.filter(owner=owner, pulseuser__in=shared).delete()
    if shared_accounts := [account for account in accounts if account.pk in shared]:
        audit.record(None, "took an owner off", shared_accounts, owner=owner.email)
