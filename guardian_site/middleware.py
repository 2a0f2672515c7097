"""Middleware: what is refused at the door, before or behind every view: bodies without an end, and guessed keys."""

import logging
from collections.abc import Callable
from http import HTTPStatus

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError
from django.http import HttpRequest, HttpResponse, UnreadablePostError

from accounts.allauth_private import client_network
from core import limits
from core.body_timeout import limit_body_time
from guardian_site.errors import refused

logger = logging.getLogger(__name__)

WRONG_KEYS = limits.RateLimit("wrong tokens and keys", 30, 60)
"""From one address. A right one is never held up: somebody else at the same address may have sent the wrong ones."""

View = Callable[[HttpRequest], HttpResponse]


class BodyLimits:
    """A body larger than any form's is not read, and one that doesn't come in is waited for only so long.

    Otherwise anybody could fill the disk with files that no form asks for, or hold all threads. The API of the message
    store has bounds of its own.
    """

    def __init__(self, get_response: View) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        """Read the body, and pass on."""
        length = request.META.get("CONTENT_LENGTH") or ""
        if request.path.startswith("/v1/") or not (length.isascii() and length.isdecimal()):
            return self.get_response(request)
        if int(length) > (settings.DATA_UPLOAD_MAX_MEMORY_SIZE or 0):
            return refused(request, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "The body is too large.")
        with limit_body_time(request.META.get("gunicorn.socket")) as is_late:
            try:
                came = len(request.body)  # Django keeps it
            except UnreadablePostError:
                return refused(request, HTTPStatus.REQUEST_TIMEOUT, "The body didn't come in time, or broke off.")
            if is_late():
                return refused(request, HTTPStatus.REQUEST_TIMEOUT, "The body didn't come in time.")
        if came < int(length):
            return refused(request, HTTPStatus.BAD_REQUEST, "The body broke off.")
        return self.get_response(request)


class WrongKeyLimit:
    """Whoever presents one wrong token or key after the other is told to wait, in place of that it is wrong."""

    def __init__(self, get_response: View) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        """Pass on, and count what was wrong."""
        response = self.get_response(request)
        if response.status_code != HTTPStatus.UNAUTHORIZED or "HTTP_AUTHORIZATION" not in request.META:
            return response
        try:
            limits.consume(WRONG_KEYS, _place(request))
        except limits.RateLimitExceeded as error:
            response = refused(request, HTTPStatus.TOO_MANY_REQUESTS, str(error), "rate")
            response["Retry-After"] = str(error.seconds)
        except DatabaseError as error:
            logger.warning("A wrong key could not be counted: %s", error)
        return response


def _place(request: HttpRequest) -> str:
    """Return what wrong keys are counted by: the client's address, of IPv6 its network.

    Where fewer proxies are named than GUARDIAN_PROXIES says, it is that of who is connected.
    """
    try:
        return client_network(request)
    except ImproperlyConfigured:
        return str(request.META.get("REMOTE_ADDR") or "nobody")
