"""What a reader gets instead of a page: never a stack trace, always the next step."""

import logging
from http import HTTPStatus
from typing import Any

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.utils.encoding import iri_to_uri
from django.views import defaults
from rest_framework.exceptions import NotFound
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from rabbit.management import BrokerError

logger = logging.getLogger(__name__)


def server_error(request: HttpRequest) -> HttpResponse:
    """Answer 500, to programs as a problem (RFC 9457)."""
    if request.path.startswith("/api/"):
        detail = "This is a mistake of Guardian's. Its operators find it in the log."
        return _problem(request, HTTPStatus.INTERNAL_SERVER_ERROR, detail)
    return defaults.server_error(request)


def bad_request(request: HttpRequest, exception: Exception) -> HttpResponse:
    """Answer 400 to what no view has seen, such as a wrong Host, to programs as a problem (RFC 9457)."""
    if request.path.startswith("/api/"):
        return _problem(request, HTTPStatus.BAD_REQUEST, "The request can't be used; its headers may be wrong.")
    return defaults.bad_request(request, exception)


def _problem(request: HttpRequest, status: HTTPStatus, detail: str) -> HttpResponse:
    body = {
        "type": "about:blank",
        "title": status.phrase,
        "status": status.value,
        "detail": detail,
        "instance": iri_to_uri(request.path),
    }
    return JsonResponse(body, status=status, content_type="application/problem+json")


class NothingHere(APIView):
    """The answer to addresses of the API that lead nowhere."""

    schema = None

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Refuse visitors without a name first, as everywhere.

        Raises:
            NotFound: to all others, but for a GET without the slash.
        """
        super().initial(request, *args, **kwargs)
        if request.path.endswith("/"):
            raise NotFound("There is nothing at this address.")
        if request.method not in ("GET", "HEAD"):  # most clients would follow a redirect with a GET
            raise NotFound("There is nothing at this address. All addresses here end in a slash.")

    def get(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        """Lead to the address with the slash."""
        location = request.get_full_path(force_append_slash=True)
        return Response(status=HTTPStatus.MOVED_PERMANENTLY, headers={"Location": location})


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
