"""API tokens of owners. A token is shown once; only its digest is stored.

What a token may do over HTTP is in ``scopes.py``; on the broker, as a password, in ``rabbit/permissions.py``.
"""

from collections.abc import Sequence
from datetime import timedelta

from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import QuerySet
from django.utils import timezone

from accounts import audit, queue_effects
from accounts.access import quotas, vouching
from accounts.models import AuthToken, Owner, PulseUser
from core import limits
from core.confirmation import ConfirmableChange, Effect
from core.texts import check_line

DEFAULT_DAYS = 365

MAX_DAYS = 3650

MAX_NAME_LENGTH = 100

CREATION_LIMIT = limits.RateLimit("tokens", 100, 3600)
"""Per owner, so that a runaway program can't fill the table."""


def create_token(
    owner: Owner, name: str, days: int = DEFAULT_DAYS, scope: str = AuthToken.Scope.AGENT, pulse_user: str = ""
) -> tuple[AuthToken, str]:
    """Create a token that expires after ``days``, and return its row and the plaintext token.

    Show the token now, since it can't be retrieved later. With the scope ``read``, it may be restricted to the
    ``pulse_user`` of this name. A ValidationError about a value names its argument as the field.
    """
    name = name.strip()
    try:
        check_line(name, MAX_NAME_LENGTH)
    except ValidationError as error:
        raise ValidationError({"name": error.messages}) from error
    if not 1 <= days <= MAX_DAYS:
        raise ValidationError({"days": [f"A token is valid for 1 to {MAX_DAYS} days."]})
    if scope not in AuthToken.Scope.values:
        raise ValidationError({"scope": [f"Choose one of: {', '.join(AuthToken.Scope.values)}."]})
    limits.consume(CREATION_LIMIT, owner.uuid.hex)
    with transaction.atomic():
        locked = vouching.lock(owner)  # before the Pulse user, as a withdrawal does
        only = _lock_only_pulse_user(owner, scope, pulse_user) if pulse_user else None
        vouching.require_vouched(locked)
        quotas.require_room(quotas.TOKENS, locked, locked.auth_token_set.exclude(expiry__lte=timezone.now()))
        token, key = AuthToken.objects.create(  # type: ignore[no-untyped-call]
            user=locked, expiry=timedelta(days=days), name=name, scope=scope, pulse_user=only
        )
        restriction = {"pulse_user": pulse_user} if pulse_user else {}
        audit.record(None, audit.CREATED, token, owner=owner.email, days=days, scope=scope, **restriction)
    return token, key


def _lock_only_pulse_user(owner: Owner, scope: str, username: str) -> PulseUser:
    if scope != AuthToken.Scope.READ:
        raise ValidationError({"pulse_user": ["Only a token with the scope 'read' can be for one Pulse user."]})
    seen = PulseUser.objects.seen_by(owner).select_for_update(of=("self",), no_key=True)
    found = seen.filter(username=username).first()
    if found is None:
        raise ValidationError({"pulse_user": ["You have no Pulse user of this name."]})
    return found


def revoke_token(token: AuthToken) -> None:
    """Revoke a token, if it still exists. A person uses :func:`revoke_confirmed`, which asks."""
    _revoke(AuthToken.objects.filter(pk=token.pk))


def revocation_of(tokens: Sequence[AuthToken], by: Owner, confirm: str = "") -> ConfirmableChange:
    return ConfirmableChange(by, "revoke tokens", tokens, {}, confirm)


def revoke_confirmed(tokens: Sequence[AuthToken], change: ConfirmableChange) -> None:
    """Revoke these tokens. ``change`` is their revocation.

    Raises ConfirmationRequired if an owner is left without a valid token, so that the next clean-up deletes the queues
    of their agents. Then nothing was changed.
    """
    with transaction.atomic():
        effect = Effect([])
        owners = vouching.lock_existing({token.user for token in tokens})
        for owner in owners:
            valid = AuthToken.objects.filter(user=owner).exclude(expiry__lte=timezone.now())
            left = valid.exclude(pk__in=[token.pk for token in tokens])
            if valid.exists() and not left.exists():
                effect += queue_effects.of_agents(owner)
        change.require_confirmed(effect)
        for owner in owners:
            _revoke(AuthToken.objects.filter(user=owner, pk__in=[token.pk for token in tokens]))


def revoke_tokens_of(owner: Owner) -> None:
    _revoke(AuthToken.objects.filter(user=owner))


def _revoke(tokens: QuerySet[AuthToken]) -> None:
    """Revoke these tokens, which must belong to one owner."""
    with transaction.atomic():
        found = list(tokens.select_related("user"))
        if found:
            tokens.delete()
            audit.record(None, "revoked", found, owner=found[0].user.email)
