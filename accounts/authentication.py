"""Who a request to the REST API speaks for."""

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
"""How exactly the last use of a token is noted, so that reading doesn't write each time."""

_TOKEN = re.compile(r"[0-9a-f]{64}")


class TokenAuthentication(BaseAuthentication):
    """``Authorization: Token KEY``.

    knox's own class deletes the owner's expired tokens on the way, and fails on bytes that aren't UTF-8. This one
    deletes nothing, looks the digest up once, and answers 401 to whatever is no token in force.
    """

    def authenticate(self, request: Request) -> tuple[Owner, AuthToken] | None:
        """Return the owner and the token; None where the header speaks of no token.

        Raises:
            AuthenticationFailed: the token can't be used; the text says why.
        """
        words = str(request.META.get("HTTP_AUTHORIZATION", "")).split()
        if not words or words[0].lower() != "token":
            return None
        if len(words) != 2 or not _TOKEN.fullmatch(words[1]):
            raise AuthenticationFailed("After the word Token comes the token: 64 characters, 0 to 9 and a to f.")
        token = AuthToken.objects.select_related("user").filter(digest=hash_token(words[1])).first()
        now = timezone.now()
        if token is None:
            raise AuthenticationFailed("No such token; it may have been revoked. Make another on the page Tokens.")
        if token.expiry is not None and token.expiry <= now:
            raise AuthenticationFailed(
                f"This token expired on {token.expiry:%d %B %Y}. Make another on the page Tokens."
            )
        owner: Owner = token.user
        if not owner.is_active:
            raise AuthenticationFailed("The owner of this token can't sign in any more. Ask an operator.")
        if token.last_used is None or token.last_used < now - LAST_USED_RESOLUTION:
            stale = Q(last_used=None) | Q(last_used__lt=now - LAST_USED_RESOLUTION)
            try:
                AuthToken.objects.filter(stale, pk=token.pk).update(last_used=now)
            except DatabaseError as error:  # it can only be read, or its disk is full: that keeps nobody from reading
                logger.warning("When the token %s was last used could not be noted: %s", token.uuid, error)
            else:
                token.last_used = now
        return owner, token

    def authenticate_header(self, request: Request) -> str:
        """Return what a 401 answers in ``WWW-Authenticate``."""
        return "Token"


def presented_key(request: Request) -> str:
    """Return the token in clear, as the request presents it. Only where ``request.auth`` is a token there is one."""
    return str(request.META["HTTP_AUTHORIZATION"]).split()[1]
