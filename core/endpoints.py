"""What the endpoints of all apps share: reading a body, paging a list, searching, errors at a field."""

import contextlib
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

from django.core.exceptions import ValidationError as InvalidValue
from drf_spectacular.utils import OpenApiParameter
from rest_framework import request as rest
from rest_framework.exceptions import APIException, ValidationError
from rest_framework.response import Response
from rest_framework.serializers import Serializer
from rest_framework.viewsets import GenericViewSet

LONGEST_SEARCH = 255

SHOWN_ONCE = {"Cache-Control": "no-store"}

SEARCH = OpenApiParameter("search", str, description="A part of the name or of an owner's address.")


class Conflict(APIException):
    """It can't be done as things stand."""

    status_code = HTTPStatus.CONFLICT


@contextlib.contextmanager
def at_field(name: str, *errors: type[Exception]) -> Iterator[None]:
    """Say at this field of the body what these errors say, unless they name a field by themselves."""
    try:
        yield
    except errors as error:
        if hasattr(error, "error_dict"):
            raise
        texts = error.messages if isinstance(error, InvalidValue) else [str(error)]
        raise ValidationError({name: texts}) from error


def read(serializer: type[Serializer[Any]], request: rest.Request) -> dict[str, Any]:
    """Return what the body says.

    Raises:
        ValidationError: it says something else; the errors stand at their fields.
    """
    body = serializer(data=request.data)
    body.is_valid(raise_exception=True)
    fields: dict[str, Any] = body.validated_data
    return fields


def page_of(view: GenericViewSet[Any], serializer: type[Serializer[Any]], rows: Any) -> Response:
    """Return the page that is asked for of these rows, whether they are the database's or the broker's."""
    found: Any = view.paginate_queryset(rows)
    return view.get_paginated_response(serializer(found, many=True, context=view.get_serializer_context()).data)


def search_in(request: rest.Request) -> str:
    """Return what a list is searched for; a NUL, which no column holds and PostgreSQL doesn't take, is replaced.

    Raises:
        ValidationError: it is longer than what could be found.
    """
    search = request.query_params.get("search", "")
    if len(search) > LONGEST_SEARCH:
        raise ValidationError({"search": [f"This is longer than {LONGEST_SEARCH} characters."]})
    return search.replace("\0", "\N{REPLACEMENT CHARACTER}")
