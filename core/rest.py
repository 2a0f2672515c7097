"""Conventions of the REST API: parsing, pagination, errors. The endpoints are in each app's ``api/``.

REST framework imports this module during its own import, so this module can't import its views.
"""

import json
import logging
from http import HTTPStatus
from typing import Any, cast

import orjson
from django.core.exceptions import NON_FIELD_ERRORS, ObjectDoesNotExist, PermissionDenied, TooManyFieldsSent
from django.core.exceptions import ValidationError as InvalidValue
from django.core.paginator import InvalidPage, Page
from django.http import Http404
from django.utils.encoding import iri_to_uri
from rest_framework import exceptions
from rest_framework.metadata import BaseMetadata
from rest_framework.negotiation import DefaultContentNegotiation
from rest_framework.pagination import PageNumberPagination
from rest_framework.parsers import BaseParser
from rest_framework.renderers import BaseRenderer
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.utils.urls import remove_query_param, replace_query_param

from core.confirmation import ConfirmationRequired
from core.limits import RateLimitExceeded
from core.links import absolute_url
from core.refusals import Refusal
from rabbit.errors import BrokerError, BrokerUnavailable, MalformedResponse, NodeDown, NotOnBroker, Refused
from rabbit.publishing import NotPublished, OutcomeUnknown

logger = logging.getLogger(__name__)

PROBLEM = "application/problem+json"
RETRY_AFTER_SECONDS = 30
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
MAY_BE_EXECUTED = "If it did not answer in time, your request may be done already; sending it again does no harm."


class LengthRequired(exceptions.APIException):
    status_code = HTTPStatus.LENGTH_REQUIRED
    default_detail = "Send the body with a Content-Length, not in chunks."


class StrictJSONParser(BaseParser):
    """Parses JSON in UTF-8, whatever charset the request names.

    orjson validates the body. It refuses lone surrogates, which no database stores, and deep nesting, at which the
    standard library fails. The standard library then parses it, because orjson turns integers of more than 64 bits into
    floats.
    """

    media_type = "application/json"

    def parse(self, stream: Any, media_type: str | None = None, parser_context: Any = None) -> Any:
        body = stream.read()  # guardian_site/middleware.py limits its size
        try:
            orjson.loads(body)
            return json.loads(body)
        except orjson.JSONDecodeError as error:
            raise exceptions.ParseError(f"The body isn't JSON: {error}.") from error
        except (ValueError, RecursionError) as error:
            raise exceptions.ParseError("The body has a number that is too long, or is nested too deep.") from error


class AlwaysJSONNegotiation(DefaultContentNegotiation):
    """Answers in JSON even if the client accepts other types only.

    It also refuses chunked bodies, because it is the first code of each endpoint that sees a request. Django would read
    them as empty, for lack of a ``Content-Length``.
    """

    def select_renderer(
        self, request: Request, renderers: Any, format_suffix: str | None = None
    ) -> tuple[BaseRenderer, str]:
        """Return the renderer that the client accepts, or the first one.

        Raises LengthRequired if the body is chunked.
        """
        if "HTTP_TRANSFER_ENCODING" in request.META and not request.META.get("CONTENT_LENGTH"):
            raise LengthRequired
        try:
            chosen: tuple[BaseRenderer, str] = super().select_renderer(request, renderers, format_suffix)
        except (exceptions.NotAcceptable, Http404, TypeError):  # the last: its parameters can't be parsed
            return renderers[0], renderers[0].media_type
        return chosen


class MethodsMetadata(BaseMetadata):
    """Answers OPTIONS with the methods of a URL. The schema describes them."""

    def determine_metadata(self, request: Request, view: Any) -> dict[str, list[str]]:
        return {"methods": view.allowed_methods}


class HeaderPagination(PageNumberPagination):
    """Pages as plain arrays. Headers have the number of results and the links to other pages."""

    page_size = 10
    page_size_query_param = "page_size"
    max_page_size = 300
    page_query_description = "The number of the page, from 1."
    page_size_query_description = f"Results on a page: {page_size} by default, {max_page_size} at most."

    def paginate_queryset(self, queryset: Any, request: Request, view: Any = None) -> list[Any]:
        number = self._number(request, self.page_query_param, 1)
        size = min(self._number(request, self.page_size_query_param, self.page_size), self.max_page_size)
        self.request = request
        paginator = self.django_paginator_class(queryset, size)
        try:
            self.page = paginator.page(number)
        except InvalidPage as error:
            raise exceptions.NotFound(f"There is no page {number}; the last is {paginator.num_pages}.") from error
        return list(self.page)

    def get_paginated_response(self, data: Any) -> Response:
        page, url = cast(Page[Any], self.page), absolute_url(cast(Request, self.request).get_full_path())
        last = page.paginator.num_pages
        pages = {"first": 1, "last": last}
        if page.has_previous():
            pages["prev"] = page.number - 1
        if page.has_next():
            pages["next"] = page.number + 1
        links = ", ".join(f'<{self._url(url, pages[rel])}>; rel="{rel}"' for rel in LINKS if rel in pages)
        return Response(data, headers={"X-Result-Count": str(page.paginator.count), "Link": links})

    def get_paginated_response_schema(self, schema: dict[str, Any]) -> dict[str, Any]:
        return schema

    def get_schema_operation_parameters(self, view: Any) -> list[dict[str, Any]]:
        parameters: list[dict[str, Any]] = super().get_schema_operation_parameters(view)
        for parameter in parameters:
            parameter["schema"] |= {"minimum": 1}
        return parameters

    def _number(self, request: Request, name: str, default: int) -> int:
        text = request.query_params.get(name)
        if text is None:
            return default
        if not (text.isascii() and text.isdecimal() and len(text) < 20 and int(text)):
            raise exceptions.ValidationError({name: ["This must be a whole number, 1 or more."]})
        return int(text)

    def _url(self, url: str, number: int) -> str:
        if number == 1:
            return str(remove_query_param(url, self.page_query_param))
        return str(replace_query_param(url, self.page_query_param, number))


LINKS = ("first", "prev", "next", "last")


def exception_handler(error: Exception, context: dict[str, Any]) -> Response | None:
    """Return the response to an exception, for REST framework's ``EXCEPTION_HANDLER``.

    Errors of input are listed by field, as in REST framework. Other errors of the client or the broker are problem
    details (RFC 9457). For all others return None, which means 500.
    """
    request: Request = context["request"]
    if isinstance(error, ConfirmationRequired):
        return Response(confirmation_details(error, request.path), HTTPStatus.CONFLICT, content_type=PROBLEM)
    retry_after = error.seconds if isinstance(error, RateLimitExceeded) else RETRY_AFTER_SECONDS
    if isinstance(error, InvalidValue):
        error = _of_refusal(error)
    elif isinstance(error, BrokerError):
        error = _of_broker(error, request)
    elif isinstance(error, PermissionDenied):
        error = exceptions.PermissionDenied(str(error) or None)
    elif isinstance(error, Http404 | ObjectDoesNotExist):  # the second: the row was deleted during the request
        error = exceptions.NotFound()
    elif isinstance(error, TooManyFieldsSent):
        error = exceptions.ParseError("The URL has too many parameters.")
    if isinstance(error, exceptions.ValidationError):
        by_field = error.detail if isinstance(error.detail, dict) else {"non_field_errors": error.detail}
        return Response(by_field, HTTPStatus.BAD_REQUEST)
    if not isinstance(error, exceptions.APIException):
        return None
    text = str(error.detail["detail"] if isinstance(error.detail, dict) else error.detail)
    details = problem_details(HTTPStatus(error.status_code), text, request.path)
    headers = {}
    if isinstance(error, exceptions.NotAuthenticated | exceptions.AuthenticationFailed):
        headers["WWW-Authenticate"] = str(getattr(error, "auth_header", "Token"))
    if error.status_code in (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS):
        headers["Retry-After"] = str(retry_after)
    return Response(details, error.status_code, headers=headers, content_type=PROBLEM)


def problem_details(status: HTTPStatus, detail: str, path: str) -> dict[str, Any]:
    """Return the body of problem details (RFC 9457). Their media type is ``PROBLEM``."""
    return {
        "type": "about:blank",
        "title": status.phrase,
        "status": status.value,
        "detail": detail,
        "instance": iri_to_uri(path),
    }


def confirmation_details(error: ConfirmationRequired, path: str) -> dict[str, Any]:
    """Return the body of the answer to a change that must be confirmed."""
    remedy = "To confirm it, send the same request within 10 minutes with this answer's `confirm`."
    problem = problem_details(HTTPStatus.CONFLICT, f"{error} {remedy}", path)
    return {**problem, "effect": error.effect.as_json(), "confirm": error.confirm}


def _of_refusal(error: InvalidValue) -> exceptions.APIException:
    """Convert a refusal, or another ValidationError of Django, to REST framework's exception."""
    if isinstance(error, Refusal) and error.status != HTTPStatus.BAD_REQUEST:
        refused = exceptions.APIException(str(error))
        refused.status_code = error.status
        return refused
    if hasattr(error, "error_dict"):
        by_field = error.message_dict
    else:
        by_field = {getattr(error, "field", "") or NON_FIELD_ERRORS: error.messages}
    if NON_FIELD_ERRORS in by_field:
        by_field["non_field_errors"] = by_field.pop(NON_FIELD_ERRORS)
    return exceptions.ValidationError(by_field)


class ServiceUnavailable(exceptions.APIException):
    """The broker can't be reached, or refuses Guardian's login. Only the log names its address."""

    status_code = HTTPStatus.SERVICE_UNAVAILABLE
    default_detail = "Guardian can't reach the broker at the moment. Try again in a minute."


class RefusedByBroker(exceptions.APIException):
    status_code = HTTPStatus.CONFLICT


def _of_broker(error: BrokerError, request: Request) -> exceptions.APIException:
    if isinstance(error, NotOnBroker):
        return exceptions.NotFound("This doesn't exist on the broker.")
    logger.warning("%s %s: %s", request.method, iri_to_uri(request.path), error)
    if isinstance(error, OutcomeUnknown | NodeDown):
        return ServiceUnavailable(str(error))
    if isinstance(error, NotPublished):
        return ServiceUnavailable(f"{ServiceUnavailable.default_detail} Nothing was published.")
    if isinstance(error, BrokerUnavailable | MalformedResponse):
        return (
            ServiceUnavailable()
            if request.method in SAFE_METHODS
            else ServiceUnavailable(f"{ServiceUnavailable.default_detail} {MAY_BE_EXECUTED}")
        )
    if isinstance(error, Refused) and error.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return ServiceUnavailable(
            "The broker doesn't let Guardian do this. Ask an operator to check Guardian's own RabbitMQ user there."
        )
    return RefusedByBroker(f"The broker refuses this: {error.reason if isinstance(error, Refused) else error}")
