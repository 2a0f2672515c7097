"""Middleware that limits bodies, waits for the broker and wrong tokens, and sets the time zone and Cache-Control."""

import logging
from http import HTTPStatus
from typing import Any

from django.conf import settings
from django.db import DatabaseError
from django.http import HttpRequest, HttpResponse, UnreadablePostError
from django.middleware.common import CommonMiddleware
from django.utils import timezone
from django.utils.cache import patch_cache_control

from accounts.allauth_private import client_network
from core import limits, time_zones
from core.body_timeout import limit_body_time
from core.broker import ACTION_SECONDS, PAGE_SECONDS
from core.middleware import Middleware
from guardian_site.errors import refused
from rabbit import deadline

logger = logging.getLogger(__name__)

WRONG_KEYS = limits.RateLimit("wrong tokens and keys", 30, 60)
"""From one address. A right token is never refused: another client may have the same address."""

PROBES = ("/healthz", "/readyz", "/metrics")
"""Paths that health checks and Prometheus request by an IP address. ``/metrics`` has rules of its own."""


class CheckHost(CommonMiddleware):
    """Django's CommonMiddleware, which refuses hosts that are not in ALLOWED_HOSTS, except for probes."""

    def process_request(self, request: HttpRequest) -> Any:
        return None if request.path in PROBES else super().process_request(request)


class BodyLimits(Middleware):
    """Middleware: refuse a body that is too large or too slow.

    Otherwise anybody could fill the disk with uploaded files, or block all threads. The message store's API has its own
    limits.
    """

    def __call__(self, request: HttpRequest) -> HttpResponse:
        length = request.META.get("CONTENT_LENGTH") or ""
        if request.path.startswith("/v1/") or not (length.isascii() and length.isdecimal()):
            return self.get_response(request)
        if int(length) > (settings.DATA_UPLOAD_MAX_MEMORY_SIZE or 0):
            return refused(request, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "The body is too large.")
        with limit_body_time(request.META.get("gunicorn.socket")) as timed_out:
            try:
                received = len(request.body)  # Django caches the body
            except UnreadablePostError:
                return refused(request, HTTPStatus.REQUEST_TIMEOUT, "The body timed out, or is incomplete.")
            if timed_out():
                return refused(request, HTTPStatus.REQUEST_TIMEOUT, "The body timed out.")
        if received < int(length):
            return refused(request, HTTPStatus.BAD_REQUEST, "The body is shorter than its Content-Length.")
        return self.get_response(request)


class BrokerWait(Middleware):
    """Middleware: limit the time that a page waits for the broker. After that it shows what is stored, and says so."""

    def __call__(self, request: HttpRequest) -> HttpResponse:
        if request.method in ("GET", "HEAD", "OPTIONS"):
            with deadline.limit(PAGE_SECONDS):
                return self.get_response(request)
        with deadline.limit(ACTION_SECONDS, renewed=True):
            return self.get_response(request)


class LocalTime(Middleware):
    """Middleware: show times in the owner's time zone, before the sign-in in the browser's. The APIs use UTC."""

    def __call__(self, request: HttpRequest) -> HttpResponse:
        if request.path.startswith(("/api/", "/v1/")) or request.path in PROBES:
            return self.get_response(request)
        with timezone.override(time_zones.zone_of(_time_zone(request))):
            return self.get_response(request)


def _time_zone(request: HttpRequest) -> str:
    try:
        user = request.user
        return user.time_zone if user.is_authenticated else time_zones.of_browser(request)
    except DatabaseError:  # the view may not need the database, and otherwise answers 503
        return time_zones.of_browser(request)


class WrongKeyLimit(Middleware):
    """Middleware: answer 429 instead of 401 to a client that sends many wrong tokens or keys."""

    def __call__(self, request: HttpRequest) -> HttpResponse:
        response = self.get_response(request)
        if response.status_code != HTTPStatus.UNAUTHORIZED or "HTTP_AUTHORIZATION" not in request.META:
            return response
        try:
            limits.consume(WRONG_KEYS, client_network(request) or "nobody")
        except limits.RateLimitExceeded as error:
            response = refused(request, HTTPStatus.TOO_MANY_REQUESTS, str(error), "rate")
            response["Retry-After"] = str(error.seconds)
        except DatabaseError as error:
            logger.warning("A wrong token could not be counted: %s", error)
        return response


class KeepPagesPrivate(Middleware):
    """Middleware: forbid caching of pages of signed-in users, so that "back" shows nothing after signing out."""

    def __call__(self, request: HttpRequest) -> HttpResponse:
        response = self.get_response(request)
        # A view that did not access the session, such as /healthz, shows nothing private. Don't read the user for it.
        may_be_private = request.session.accessed and _is_signed_in(request)
        if may_be_private and not response.has_header("Cache-Control"):
            patch_cache_control(response, private=True, no_store=True)
        return response


def _is_signed_in(request: HttpRequest) -> bool:
    """Return whether the user is signed in, also if the database can't tell."""
    try:
        return request.user.is_authenticated
    except DatabaseError:
        return True
