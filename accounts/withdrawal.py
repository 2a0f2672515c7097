"""Taking the broker away from somebody, and what they have there with it where that is wanted."""

from django.db import transaction
from django.utils import timezone

from accounts import audit, removal, tokens, vouching
from accounts.models import Owner, PulseUser


def withdraw(owner: Owner, by: Owner, *, remove: bool = False, reason: str = "") -> None:
    """Stop an owner from making new accounts and tokens, and record who said so.

    What they have goes on, unless ``remove``: then their tokens are revoked, the accounts that they alone own are
    removed with their queues and exchanges, and they are taken off the others. What the broker doesn't remove now is
    removed by the task.

    Raises:
        PermissionDenied: ``by`` is no operator, or the owner is one.
        ValidationError: the reason is too long, or has control characters in it.
    """
    marked: list[PulseUser] = []
    with transaction.atomic():
        vouching.unvouch(owner, by, reason)
        if remove:
            tokens.revoke_tokens_of(owner)
            marked = leave_all(owner)
    removal.remove_marked(marked)


def leave_all(owner: Owner) -> list[PulseUser]:
    """Take an owner off all shared accounts, and mark for removal those that are theirs alone; return these.

    In a transaction of the caller's, in as many queries whatever the number of accounts.
    """
    through = PulseUser.owners.through
    theirs = through.objects.filter(owner=owner).values("pulseuser")
    accounts = list(PulseUser.objects.select_for_update(no_key=True).filter(pk__in=theirs).order_by("pk"))
    shared = set(
        through.objects.filter(pulseuser__in=theirs).exclude(owner=owner).values_list("pulseuser_id", flat=True)
    )
    alone = [account for account in accounts if account.pk not in shared]
    # Those that are marked already, too: a making that fails takes its own mark back, and not this one.
    PulseUser.objects.filter(pk__in=[account.pk for account in alone]).update(removing_since=timezone.now())
    through.objects.filter(owner=owner, pulseuser__in=shared).delete()
    if alone:
        audit.note(None, removal.REMOVES, alone)
    if left := [account for account in accounts if account.pk in shared]:
        audit.note(None, "took an owner off", left, owner=owner.email)
    return alone
