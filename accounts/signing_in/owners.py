"""The owner of an address, created at the first sign-in."""

from datetime import timedelta
from importlib import import_module

from allauth.account.models import EmailAddress
from auditlog.context import disable_auditlog
from django.conf import settings
from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction
from django.db.models import Q
from django.utils import timezone

from accounts.models import Owner, SignInLink, check_address, normalize_address, owner_with_address

VISITOR_LIFETIME = timedelta(days=1)


def valid_address(text: str) -> str:
    """Return this e-mail address in normal form, or raise ValidationError."""
    address = normalize_address(text)
    check_address(address)
    return address


def get_or_create_owner(address: str) -> Owner:
    """Return the owner with this address. A new owner is not vouched for, and the address is not verified."""
    owner = owner_with_address(address)
    if owner is None:
        try:
            with transaction.atomic():
                owner = Owner.objects.create_user(address)
        except (IntegrityError, ValidationError):
            owner = owner_with_address(address)  # another request created it
            if owner is None:
                raise
    _email_address_row(owner)
    return owner


def mark_address_verified(owner: Owner) -> None:
    row = _email_address_row(owner)
    if not row.verified:
        row.verified = True
        row.save(update_fields=["verified"])


def _email_address_row(owner: Owner) -> EmailAddress:
    """Return allauth's row of the owner's address. Delete its rows of previous addresses and previous owners."""
    stale = Q(user=owner) & ~Q(email=owner.email) | Q(email=owner.email) & ~Q(user=owner)
    EmailAddress.objects.filter(stale).delete()
    row: EmailAddress
    row, _ = EmailAddress.objects.get_or_create(user=owner, email=owner.email, defaults={"primary": True})
    return row


def prune_visitors() -> int:
    """Delete owners who never verified their address, and expired links and sessions. Return the number of owners.

    An owner is deleted a day after the first sign-in attempt. Owners with a vouching record, a Pulse user or a token
    stay. So do owners that an operator created manually: allauth has a row only of addresses typed on the sign-in page.
    """
    now = timezone.now()
    visitors = Owner.objects.filter(
        last_login=None,
        date_joined__lt=now - VISITOR_LIFETIME,
        is_active=True,
        is_staff=False,
        vouched=False,
        vouchings=None,
        pulse_users=None,
        auth_token_set=None,
        emailaddress__isnull=False,
    ).exclude(emailaddress__verified=True)
    removed = 0
    while keys := list(visitors.values_list("pk", flat=True)[:500]):  # keeps transactions short
        # Filtered again: an owner may have verified the address, or been vouched for, since the first query.
        with disable_auditlog():  # the creation of these owners was not audited, either
            removed += visitors.filter(pk__in=keys).delete()[1].get(Owner._meta.label, 0)
    SignInLink.objects.filter(expires_at__lte=now).delete()
    import_module(settings.SESSION_ENGINE).SessionStore.clear_expired()
    return removed
