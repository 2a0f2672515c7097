"""Token authentication of the REST API."""

import logging
import re
from datetime import timedelta

from django.db import DatabaseError
from django.db.models import Q
from django.utils import timezone
from knox.crypto import hash_token
from rest_framework.authentication import BaseAuthentication
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.request import Request

from accounts.models import AuthToken, Owner

logger = logging.getLogger(__name__)

LAST_USED_RESOLUTION = timedelta(minutes=1)
"""``last_used`` is written at most once in this time, so that not every read request writes."""

_TOKEN = re.compile(r"[0-9a-f]{64}")


class TokenAuthentication(BaseAuthentication):
    """``Authorization: Token KEY``.

    knox's class deletes the owner's expired tokens, and fails on bytes that aren't UTF-8. This class deletes nothing,
    looks up the digest in one query, and answers 401 to every invalid token.
    """

    def authenticate(self, request: Request) -> tuple[Owner, AuthToken] | None:
        """Return the owner and the token, or None if the header has no token.

        Raises AuthenticationFailed if the token is malformed, unknown or expired, or its owner is inactive.
        """
        words = str(request.META.get("HTTP_AUTHORIZATION", "")).split()
        if not words or words[0].lower() != "token":
            return None
        if len(words) != 2 or not _TOKEN.fullmatch(words[1]):
            raise AuthenticationFailed("The header must be 'Authorization: Token KEY', where KEY is 64 hex digits.")
        token = AuthToken.objects.select_related("user").filter(digest=hash_token(words[1])).first()
        now = timezone.now()
        if token is None:
            raise AuthenticationFailed("Invalid token; it may have been revoked. Create another on the page Tokens.")
        if token.expiry is not None and token.expiry <= now:
            raise AuthenticationFailed(
                f"This token expired on {token.expiry:%d %B %Y}. Create another on the page Tokens."
            )
        owner: Owner = token.user
        if not owner.is_active:
            raise AuthenticationFailed("The owner of this token is deactivated. Ask an operator.")
        if token.last_used is None or token.last_used < now - LAST_USED_RESOLUTION:
            stale = Q(last_used=None) | Q(last_used__lt=now - LAST_USED_RESOLUTION)
            try:
                AuthToken.objects.filter(stale, pk=token.pk).update(last_used=now)
            except DatabaseError as error:  # a read-only database or a full disk must not block read requests
                logger.warning("Could not record the last use of the token %s: %s", token.uuid, error)
            else:
                token.last_used = now
        owner.reads_only = token.pulse_user_id
        return owner, token

    def authenticate_header(self, request: Request) -> str:
        return "Token"


def presented_key(request: Request) -> str:
    """Return the plaintext token of the request. Call this only if ``request.auth`` is a token."""
    return str(request.META["HTTP_AUTHORIZATION"]).split()[1]
