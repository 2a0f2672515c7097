"""Error responses: they name the next step, and contain no stack trace."""

import logging
import sys
from http import HTTPStatus
from typing import Any

from django.conf import settings
from django.core.exceptions import DisallowedHost
from django.db import InterfaceError, InternalError, OperationalError
from django.http import HttpRequest, HttpResponse, HttpResponseServerError, JsonResponse
from django.shortcuts import render
from django.template import loader
from django.views import defaults
from rest_framework.exceptions import NotFound
from rest_framework.permissions import IsAuthenticated
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from core.middleware import Middleware
from core.rest import PROBLEM, RETRY_AFTER_SECONDS, problem_details
from guardian_site import tracing
from message_store.http.views import error_answer
from rabbit.errors import BrokerError

logger = logging.getLogger(__name__)

READ_ONLY = "25006"
"""PostgreSQL's error code if the database is read-only, such as a standby."""


def server_error(request: HttpRequest) -> HttpResponse:
    """Answer 500, or 503 if the database is unavailable.

    The body is a page, problem details (RFC 9457) for the REST API, or an error in the message store's format.
    """
    if _is_database_unavailable(sys.exception()):
        return _database_unavailable(request)
    detail = (
        f"This is an error in Guardian. Send its operators this id, which they find in the log: {tracing.current()}."
    )
    if request.path.startswith("/v1/"):
        return error_answer(HTTPStatus.INTERNAL_SERVER_ERROR, {"server": detail})
    if request.path.startswith("/api/"):
        return _problem(request, HTTPStatus.INTERNAL_SERVER_ERROR, detail)
    page = loader.render_to_string("500.html", {"request_id": tracing.current()})  # Django's page lacks the id
    return HttpResponseServerError(page)


def _is_database_unavailable(error: BaseException | None) -> bool:
    """Return whether the database did not answer, or is read-only or locked. A retry may succeed."""
    if isinstance(error, InternalError):
        return getattr(error.__cause__, "pgcode", None) == READ_ONLY
    # SQLite raises OperationalError for errors in our SQL too: "no such table", "no such column".
    return isinstance(error, OperationalError | InterfaceError) and not str(error).startswith("no such ")


def _database_unavailable(request: HttpRequest) -> HttpResponse:
    detail = "The database can't be used at the moment. Try again in a minute."
    if request.path.startswith("/v1/"):
        answer = error_answer(HTTPStatus.SERVICE_UNAVAILABLE, {"storage": detail})
    elif request.path.startswith("/api/"):
        answer = _problem(request, HTTPStatus.SERVICE_UNAVAILABLE, detail)
    else:  # render without the request, because its session is in the database
        page = loader.render_to_string("503_database.html")
        answer = HttpResponse(page, status=HTTPStatus.SERVICE_UNAVAILABLE)
    answer["Retry-After"] = RETRY_AFTER_SECONDS
    return answer


def bad_request(request: HttpRequest, exception: Exception) -> HttpResponse:
    """Answer 400 to a request that Django refuses before the view, such as one with a wrong Host."""
    if isinstance(exception, DisallowedHost):
        return _wrong_host(request)
    if request.path.startswith(("/v1/", "/api/")):
        return refused(request, HTTPStatus.BAD_REQUEST, "The request is invalid. Check its headers.")
    return defaults.bad_request(request, exception)


def _wrong_host(request: HttpRequest) -> HttpResponse:
    address = settings.GUARDIAN_BASE_URL
    host = request.META.get("HTTP_HOST", "")
    logger.warning("Refused a request for the host %.255r: GUARDIAN_BASE_URL is %s", host, address)
    if request.path.startswith(("/v1/", "/api/")):
        return refused(request, HTTPStatus.BAD_REQUEST, f"Guardian's address is {address}. Use it instead of this one.")
    return HttpResponse(loader.render_to_string("400_host.html", {"address": address}), status=HTTPStatus.BAD_REQUEST)


def refused(request: HttpRequest, status: HTTPStatus, detail: str, field: str = "request") -> HttpResponse:
    """Refuse a request before the view, in the same formats as ``server_error``.

    ``field`` is the key of the text in the message store's format.
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
    """Answers requests to unknown URLs of the API."""

    schema = None
    permission_classes = [IsAuthenticated]  # no scope of a token matters where there is nothing

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Refuse the request, except a GET without a trailing slash. Check authentication first, like all endpoints."""
        super().initial(request, *args, **kwargs)
        if request.path.endswith("/"):
            raise NotFound("There is nothing at this URL.")
        if request.method not in ("GET", "HEAD"):  # most clients follow a redirect with a GET
            raise NotFound("There is nothing at this URL. All URLs of the API end in a slash.")

    def get(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        location = request.get_full_path(force_append_slash=True)
        return Response(status=HTTPStatus.MOVED_PERMANENTLY, headers={"Location": location})


class BrokerErrors(Middleware):
    """Middleware: answer 503 if a view raises an error of the broker."""

    def process_exception(self, request: HttpRequest, exception: Exception) -> HttpResponse | None:
        if not isinstance(exception, BrokerError):
            return None
        logger.error("%s %s: %s", request.method, request.path, exception)
        response = render(request, "503.html", status=HTTPStatus.SERVICE_UNAVAILABLE)
        response["Retry-After"] = RETRY_AFTER_SECONDS
        return response
