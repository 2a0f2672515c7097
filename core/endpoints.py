"""Helpers for the endpoints of all apps: reading a body, pagination, search, errors of a field."""

import contextlib
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any, ClassVar, TypeVar

from django.core.exceptions import ValidationError as InvalidValue
from django_filters import MultipleChoiceFilter  # type: ignore[import-untyped]
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import request as rest
from rest_framework.exceptions import ValidationError
from rest_framework.response import Response
from rest_framework.serializers import CharField, Serializer
from rest_framework.settings import api_settings
from rest_framework.views import APIView
from rest_framework.viewsets import GenericViewSet

from core.refusals import Refusal
from core.rest import SAFE_METHODS

MAX_SEARCH_LENGTH = 255

SHOWN_ONCE = {"Cache-Control": "no-store"}

SEARCH = OpenApiParameter("search", str, description="A part of the name or of an owner's address.")

Handler = TypeVar("Handler", bound=Callable[..., Any])


def takes(*parameters: OpenApiParameter | type[Serializer[Any]]) -> Callable[[Handler], Handler]:
    """Decorate a GET handler: it accepts these query parameters, and the schema has them."""

    def decorate(handler: Handler) -> Handler:
        for one in parameters:
            names = {one.name: one.many} if isinstance(one, OpenApiParameter) else dict.fromkeys(one().fields, False)
            handler.__dict__.setdefault("parameters", {}).update(names)
        return extend_schema(parameters=list(parameters))(handler)

    return decorate


class StrictParameters(APIView):
    """A mixin: GET refuses unknown query parameters, and repeated ones that aren't lists.

    Ignoring a filter would return rows that the caller excluded. The known ones are those of ``takes``, of the
    pagination, and in ``list`` those of the ``filterset_class``, which filters nothing else.
    """

    ignored_parameters: ClassVar[set[str]] = set()
    """Parameters that released clients send and that do nothing."""

    def initial(self, request: rest.Request, *args: Any, **kwargs: Any) -> None:
        """Refuse unknown and repeated parameters once the user may use the endpoint."""
        super().initial(request, *args, **kwargs)
        action = getattr(self, "action", "get")
        if request.method not in ("GET", "HEAD") or action is None:  # None: the method is not allowed
            return
        known = dict(getattr(getattr(self, action), "parameters", {}))  # True: a list, which may be repeated
        if action == "list":
            filters = getattr(getattr(self, "filterset_class", None), "base_filters", {})
            known.update({name: isinstance(one, MultipleChoiceFilter) for name, one in filters.items()})
        if getattr(self, "pagination_class", None):
            known.update(page=False, page_size=False)
        for name, values in request.query_params.lists():
            if len(values) > 1 and known.get(name) is False:
                raise ValidationError({name: [f"This parameter is given {len(values)} times. Give it once."]})
            if name not in known.keys() | self.ignored_parameters | {api_settings.URL_FORMAT_OVERRIDE}:
                remedy = f"Use one of these: {', '.join(sorted(known))}." if known else "Remove it."
                raise ValidationError({name: [f"There is no such parameter. {remedy}"]})

    def filter_queryset(self, queryset: Any) -> Any:
        """Filter only the list. One row is found whatever its state."""
        if getattr(self, "action", "") != "list":
            return queryset
        return super().filter_queryset(queryset)  # type: ignore[misc]  # of GenericAPIView


class ConfirmField(CharField):
    """The confirmation of a change that deletes queues."""

    def __init__(self) -> None:
        super().__init__(
            required=False,
            allow_blank=True,
            max_length=1_000_000,  # of some 300,000 queues
            help_text="Confirms that queues are deleted: the `confirm` of the 409 that the same request got.",
        )


class ConfirmSerializer(Serializer[Any]):
    """The confirmation of a deletion."""

    confirm = ConfirmField()


@contextlib.contextmanager
def at_field(name: str) -> Iterator[None]:
    """Report invalid values as errors of a field in the body, unless they name fields themselves."""
    try:
        yield
    except InvalidValue as error:
        if hasattr(error, "error_dict"):
            raise
        if isinstance(error, Refusal) and (error.field or error.status != HTTPStatus.BAD_REQUEST):
            raise
        raise ValidationError({name: error.messages}) from error


def read(serializer: type[Serializer[Any]], request: rest.Request) -> dict[str, Any]:
    """Return the validated fields of the body, or the parameters of a GET. Raises ValidationError, by field."""
    given = serializer(data=request.query_params if request.method in SAFE_METHODS else request.data)
    given.is_valid(raise_exception=True)
    fields: dict[str, Any] = given.validated_data
    return fields


def page_of(view: GenericViewSet[Any], serializer: type[Serializer[Any]], rows: Any) -> Response:
    """Return the requested page of these rows: a queryset, or a list from the broker."""
    page: Any = view.paginate_queryset(rows)
    return view.get_paginated_response(serializer(page, many=True, context=view.get_serializer_context()).data)


def name_in(request: rest.Request, thing: str) -> str:
    """Return the required parameter ``name``. It is in the query, because some proxies alter slashes in a path."""
    name = request.query_params.get("name")
    if not name:
        raise ValidationError({"name": [f"This parameter is required: the full name of the {thing}."]})
    return name


def search_in(request: rest.Request) -> str:
    """Return the parameter ``search``. A NUL is replaced, because PostgreSQL refuses it. A long text is invalid."""
    search = request.query_params.get("search", "")
    if len(search) > MAX_SEARCH_LENGTH:
        raise ValidationError({"search": [f"This has more than {MAX_SEARCH_LENGTH} characters. Shorten it."]})
    return search.replace("\0", "\N{REPLACEMENT CHARACTER}")
