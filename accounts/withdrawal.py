"""Withdrawing an owner's access to the broker and, if asked for, all that they have there."""

from django.db import transaction

from accounts import audit, removal, tokens, vouching
from accounts.models import Owner, PulseUser


def withdraw(owner: Owner, by: Owner, *, remove: bool = False, reason: str = "") -> None:
    """Stop an owner from creating accounts and tokens, and record who decided it.

    What they have stays, unless ``remove``: then their tokens are revoked, the accounts that they alone own are removed
    with their queues and exchanges, and they are removed from the others' owners.

    Raises:
        PermissionDenied: ``by`` is no operator, or the owner is one.
        ValidationError: the reason is too long, or has control characters in it.
    """
    with transaction.atomic():
        vouching.unvouch(owner, by, reason)
        if remove:
            tokens.revoke_tokens_of(owner)
            leave_all(owner)


def leave_all(owner: Owner) -> None:
    """Remove an owner from all shared accounts, and have the accounts removed that are theirs alone.

    In the caller's transaction, in the same number of queries for any number of accounts.
    """
    through = PulseUser.owners.through
    theirs = through.objects.filter(owner=owner).values("pulseuser")
    accounts = list(PulseUser.objects.select_for_update(no_key=True).filter(pk__in=theirs).order_by("pk"))
    shared = set(
        through.objects.filter(pulseuser__in=theirs).exclude(owner=owner).values_list("pulseuser_id", flat=True)
    )
    alone = [account for account in accounts if account.pk not in shared]
    removal.mark_for_removal(alone)
    through.objects.filter(owner=owner, pulseuser__in=shared).delete()
    if left := [account for account in accounts if account.pk in shared]:
        audit.record(None, "took an owner off", left, owner=owner.email)
