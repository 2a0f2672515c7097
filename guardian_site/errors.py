"""What a reader gets instead of a page: never a stack trace, always the next step."""

import logging
from http import HTTPStatus
from typing import Any

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.views import defaults

from rabbit.management import BrokerError

logger = logging.getLogger(__name__)


def server_error(request: HttpRequest) -> HttpResponse:
    """Answer 500, to programs as a problem (RFC 9457)."""
    if request.path.startswith("/api/"):
        status = HTTPStatus.INTERNAL_SERVER_ERROR
        detail = "This is a mistake of Guardian's. Its operators find it in the log."
        body = {"type": "about:blank", "title": status.phrase, "status": status.value, "detail": detail}
        return JsonResponse(body, status=status, content_type="application/problem+json")
    return defaults.server_error(request)


class BrokerErrors:
    """Middleware: a page that couldn't do without the broker says so with 503, whatever the view forgot."""

    def __init__(self, get_response: Any) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        """Pass on."""
        response: HttpResponse = self.get_response(request)
        return response

    def process_exception(self, request: HttpRequest, exception: Exception) -> HttpResponse | None:
        """Answer 503 where the broker didn't do what it was asked to."""
        if not isinstance(exception, BrokerError):
            return None
        logger.error("%s %s: %s", request.method, request.path, exception)
        response = render(request, "503.html", status=HTTPStatus.SERVICE_UNAVAILABLE)
        response["Retry-After"] = "30"
        return response
