"""The tokens by which programs speak for their owner. A token is shown once; here is only its digest."""

from datetime import timedelta

from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import QuerySet

from accounts import audit, vouching
from accounts.models import AuthToken, Owner, check_line
from core import limits

DEFAULT_DAYS = 365
"""How long a token lives unless said otherwise."""

MAX_DAYS = 3650

MAX_NAME_LENGTH = 100

CREATION_LIMIT = limits.RateLimit("tokens", 100, 3600)
"""An owner's, so that a program gone wild fills no table."""


def create_token(owner: Owner, name: str, days: int = DEFAULT_DAYS) -> tuple[AuthToken, str]:
    """Make a token that expires after so many days, and return its row and the token itself.

    The token can't be had again, so this is the time to show it.

    Raises:
        NotVouched: the owner may not use the broker.
        ValidationError: the name or the number of days can't be used; the error is of that field.
        RateLimitExceeded: the owner made too many within the hour.
    """
    name = name.strip()
    try:
        check_line(name, MAX_NAME_LENGTH)
    except ValidationError as error:
        raise ValidationError({"name": error.messages}) from error
    if not 1 <= days <= MAX_DAYS:
        raise ValidationError({"days": [f"A token lives 1 day at least, and {MAX_DAYS} at most."]})
    limits.consume(CREATION_LIMIT, owner.uuid.hex)
    with transaction.atomic():
        locked = vouching.lock(owner)
        vouching.require_vouched(locked)
        token, key = AuthToken.objects.create(user=locked, expiry=timedelta(days=days), name=name)  # type: ignore[no-untyped-call]
        audit.note(None, audit.CREATED, token, owner=owner.email, days=days)
    return token, key


def revoke_token(token: AuthToken) -> None:
    """Revoke a token; one that is gone already is no error."""
    _revoke(AuthToken.objects.filter(pk=token.pk))


def revoke_tokens_of(owner: Owner) -> None:
    """Revoke all tokens of an owner."""
    _revoke(AuthToken.objects.filter(user=owner))


def _revoke(tokens: QuerySet[AuthToken]) -> None:
    """Revoke these tokens, which are one owner's."""
    with transaction.atomic():
        found = list(tokens.select_related("user"))
        if found:
            tokens.delete()
            audit.note(None, "revoked", found, owner=found[0].user.email)
