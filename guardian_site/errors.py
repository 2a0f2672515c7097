"""What a reader gets instead of a page: never a stack trace, always the next step."""

import logging
import sys
from http import HTTPStatus
from typing import Any

from django.db import InterfaceError, InternalError, OperationalError
from django.http import HttpRequest, HttpResponse, HttpResponseServerError, JsonResponse
from django.shortcuts import render
from django.template import loader
from django.views import defaults
from rest_framework.exceptions import NotFound
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from core.rest import PROBLEM, RETRY_AFTER_SECONDS, problem_details
from guardian_site import tracing
from message_store.api import error_answer
from rabbit.management import BrokerError

logger = logging.getLogger(__name__)

READ_ONLY = "25006"
"""How PostgreSQL calls it that nothing may be written, as on a standby."""


def server_error(request: HttpRequest) -> HttpResponse:
    """Answer 500, or 503 where it is the database's doing: to programs as a problem (RFC 9457).

    To clients of the message store it is in their own form.
    """
    if _is_database_away(sys.exception()):
        return _database_away(request)
    detail = f"This is a mistake of Guardian's. Its operators find it in the log under {tracing.current()}."
    if request.path.startswith("/v1/"):
        return error_answer(HTTPStatus.INTERNAL_SERVER_ERROR, {"server": detail})
    if request.path.startswith("/api/"):
        return _problem(request, HTTPStatus.INTERNAL_SERVER_ERROR, detail)
    page = loader.render_to_string("500.html", {"request_id": tracing.current()})  # Django's own knows nothing
    return HttpResponseServerError(page)


def _is_database_away(error: BaseException | None) -> bool:
    """Return whether the database did not answer, or did not take what was to be written: it may in a while."""
    if isinstance(error, InternalError):
        return getattr(error.__cause__, "pgcode", None) == READ_ONLY
    # "no such table" and "no such column" are what SQLite says of our own mistakes.
    return isinstance(error, OperationalError | InterfaceError) and not str(error).startswith("no such ")


def _database_away(request: HttpRequest) -> HttpResponse:
    detail = "The database can't be used at the moment. Try again in a minute."
    if request.path.startswith("/v1/"):
        answer = error_answer(HTTPStatus.SERVICE_UNAVAILABLE, {"storage": detail})
    elif request.path.startswith("/api/"):
        answer = _problem(request, HTTPStatus.SERVICE_UNAVAILABLE, detail)
    else:  # without the request, whose session is in the database
        page = loader.render_to_string("503_database.html")
        answer = HttpResponse(page, status=HTTPStatus.SERVICE_UNAVAILABLE)
    answer["Retry-After"] = RETRY_AFTER_SECONDS
    return answer


def bad_request(request: HttpRequest, exception: Exception) -> HttpResponse:
    """Answer 400 to what no view has seen, such as a wrong Host, to programs as ``server_error`` does."""
    if request.path.startswith(("/v1/", "/api/")):
        return refused(request, HTTPStatus.BAD_REQUEST, "The request can't be used; its headers may be wrong.")
    return defaults.bad_request(request, exception)


def refused(request: HttpRequest, status: HTTPStatus, detail: str, field: str = "request") -> HttpResponse:
    """Answer with this status to what no view is to see, to programs as ``server_error`` does.

    ``field`` is what clients of the message store find the text under.
    """
    if request.path.startswith("/v1/"):
        return error_answer(status, {field: detail})
    if request.path.startswith("/api/"):
        return _problem(request, status, detail)
    return HttpResponse(
        loader.render_to_string("refused.html", {"title": status.phrase, "detail": detail}), status=status
    )


def _problem(request: HttpRequest, status: HTTPStatus, detail: str) -> HttpResponse:
    return JsonResponse(problem_details(status, detail, request.path), status=status, content_type=PROBLEM)


class UnknownAddress(APIView):
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
        response["Retry-After"] = RETRY_AFTER_SECONDS
        return response
