"""How the REST API reads, pages and refuses. What it does is in each app's ``api.py``.

REST framework imports this while it is being imported itself, so its views can't be had here.
"""

import json
import logging
from http import HTTPStatus
from typing import Any, cast

import orjson
from django.core.exceptions import ObjectDoesNotExist, PermissionDenied, TooManyFieldsSent
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

from core.limits import RateLimitExceeded
from core.links import absolute_url
from rabbit.management import BrokerError, BrokerUnavailable, MalformedResponse, NotOnBroker, Refused
from rabbit.publishing import NotPublished, OutcomeUnknown

logger = logging.getLogger(__name__)

PROBLEM = "application/problem+json"
RETRY_AFTER_SECONDS = 30
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
MAY_BE_EXECUTED = "If it did not answer in time, what you asked for may be done already; asking again does no harm."


class LengthRequired(exceptions.APIException):
    """The length of the body isn't told."""

    status_code = HTTPStatus.LENGTH_REQUIRED
    default_detail = "Send the body with a Content-Length, not in chunks."


class TooManyRequests(exceptions.APIException):
    """It is done too often."""

    status_code = HTTPStatus.TOO_MANY_REQUESTS


class StrictJSONParser(BaseParser):
    """Reads JSON in UTF-8, whatever charset is named.

    orjson refuses what the standard library lets through or falls over: halves of surrogate pairs, which no database
    stores, and nesting without an end. The standard library reads what orjson let through: it makes no float of an
    integer that has more than 64 bits.
    """

    media_type = "application/json"

    def parse(self, stream: Any, media_type: str | None = None, parser_context: Any = None) -> Any:
        """Return what the body holds.

        Raises:
            ParseError: it isn't JSON.
        """
        body = stream.read()  # which is not too large: guardian_site/middleware.py checks that
        try:
            orjson.loads(body)
            return json.loads(body)
        except orjson.JSONDecodeError as error:
            raise exceptions.ParseError(f"The body isn't JSON: {error}.") from error
        except (ValueError, RecursionError) as error:
            raise exceptions.ParseError("The body has a number that is too long, or is nested too deep.") from error


class AlwaysJSONNegotiation(DefaultContentNegotiation):
    """Answers in JSON to whoever asks for something else, since there is nothing else.

    It is the first to look at a request, whatever the endpoint. A body in chunks is refused here, because Django would
    take it for an empty one: it reads as much as the ``Content-Length`` says.
    """

    def select_renderer(
        self, request: Request, renderers: Any, format_suffix: str | None = None
    ) -> tuple[BaseRenderer, str]:
        """Return the renderer that fits what is asked for, or the first.

        Raises:
            LengthRequired: the body comes in chunks.
        """
        if "HTTP_TRANSFER_ENCODING" in request.META and not request.META.get("CONTENT_LENGTH"):
            raise LengthRequired
        try:
            chosen: tuple[BaseRenderer, str] = super().select_renderer(request, renderers, format_suffix)
        except (exceptions.NotAcceptable, Http404):
            return renderers[0], renderers[0].media_type
        return chosen


class MethodsMetadata(BaseMetadata):
    """Answers OPTIONS with the methods of an address. What they take and tell is in the schema."""

    def determine_metadata(self, request: Request, view: Any) -> dict[str, list[str]]:
        """Return the methods."""
        return {"methods": view.allowed_methods}


class HeaderPagination(PageNumberPagination):
    """Plain arrays; how many there are, and where the other pages are, stands in headers."""

    page_size = 10
    page_size_query_param = "page_size"
    max_page_size = 300
    page_query_description = "Which page, from 1."
    page_size_query_description = f"How many on a page: {page_size} unless told, {max_page_size} at most."

    def paginate_queryset(self, queryset: Any, request: Request, view: Any = None) -> list[Any]:
        """Return the page that is asked for.

        Raises:
            ValidationError: page or page_size isn't a number from 1.
            NotFound: there are fewer pages.
        """
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
        """Return the page, with ``X-Result-Count`` and ``Link``."""
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
        """Return the schema of a page: an array."""
        return schema

    def get_schema_operation_parameters(self, view: Any) -> list[dict[str, Any]]:
        """Return the two parameters, with their bounds."""
        parameters: list[dict[str, Any]] = super().get_schema_operation_parameters(view)
        for parameter in parameters:
            parameter["schema"] |= {"minimum": 1}
        return parameters

    def _number(self, request: Request, name: str, default: int) -> int:
        text = request.query_params.get(name)
        if text is None:
            return default
        if not (text.isascii() and text.isdecimal() and len(text) < 20 and int(text)):
            raise exceptions.ValidationError({name: ["This has to be a number from 1."]})
        return int(text)

    def _url(self, url: str, number: int) -> str:
        if number == 1:
            return str(remove_query_param(url, self.page_query_param))
        return str(replace_query_param(url, self.page_query_param, number))


LINKS = ("first", "prev", "next", "last")


def exception_handler(error: Exception, context: dict[str, Any]) -> Response | None:
    """Return the answer to what went wrong, for REST framework's ``EXCEPTION_HANDLER``.

    Errors of input say at which field, as REST framework's own do. All others are problem details (RFC 9457). What
    isn't the client's doing, nor the broker's, is None: a 500.
    """
    request: Request = context["request"]
    retry_after = error.seconds if isinstance(error, RateLimitExceeded) else RETRY_AFTER_SECONDS
    if isinstance(error, InvalidValue):
        error = _of_fields(error)
    elif isinstance(error, BrokerError):
        error = _of_broker(error, request)
    elif isinstance(error, RateLimitExceeded):
        error = TooManyRequests(str(error))
    elif isinstance(error, PermissionDenied):
        error = exceptions.PermissionDenied(str(error) or None)
    elif isinstance(error, Http404 | ObjectDoesNotExist):  # the second: removed by somebody in between
        error = exceptions.NotFound()
    elif isinstance(error, TooManyFieldsSent):
        error = exceptions.ParseError("The address has too many parameters.")
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
    if isinstance(error, ServiceUnavailable | TooManyRequests):
        headers["Retry-After"] = str(retry_after)
    return Response(details, error.status_code, headers=headers, content_type=PROBLEM)


def problem_details(status: HTTPStatus, detail: str, path: str) -> dict[str, Any]:
    """Return the body of a problem (RFC 9457), whose media type is ``PROBLEM``."""
    return {
        "type": "about:blank",
        "title": status.phrase,
        "status": status.value,
        "detail": detail,
        "instance": iri_to_uri(path),
    }


def _of_fields(error: InvalidValue) -> exceptions.ValidationError:
    """Return REST framework's form of Django's error."""
    if not hasattr(error, "error_dict"):
        return exceptions.ValidationError({"non_field_errors": error.messages})
    by_field = error.message_dict
    if "__all__" in by_field:
        by_field["non_field_errors"] = by_field.pop("__all__")
    return exceptions.ValidationError(by_field)


class ServiceUnavailable(exceptions.APIException):
    """The broker can't be asked, or doesn't let Guardian in. Its address is for operators: it stands in the log."""

    status_code = HTTPStatus.SERVICE_UNAVAILABLE
    default_detail = "The broker can't be asked at the moment. Try again in a minute."


class RefusedByBroker(exceptions.APIException):
    """The broker won't, and says why."""

    status_code = HTTPStatus.CONFLICT


def _of_broker(error: BrokerError, request: Request) -> exceptions.APIException:
    """Return the answer to what the broker did, or did not do."""
    if isinstance(error, NotOnBroker):
        return exceptions.NotFound("It isn't on the broker.")
    logger.warning("%s %s: %s", request.method, iri_to_uri(request.path), error)
    if isinstance(error, OutcomeUnknown):
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
            "The broker doesn't let Guardian do this. An operator has to look at Guardian's own account there."
        )
    return RefusedByBroker(f"The broker refuses: {error.reason if isinstance(error, Refused) else error}")
