"""What the pages of this package share."""

import logging
from typing import Any
from uuid import UUID

from django.core.exceptions import NON_FIELD_ERRORS, ValidationError
from django.core.paginator import Page, Paginator
from django.db.models import QuerySet
from django.http import HttpRequest, QueryDict
from django.views.decorators.http import require_http_methods

from accounts.models import Owner
from accounts.pages import forms
from rabbit.errors import BrokerError, Refused

logger = logging.getLogger(__name__)

PER_PAGE = 50
MAX_SEARCH_LENGTH = 255

page_with_forms = require_http_methods(["GET", "HEAD", "POST"])


class OwnersRequest(HttpRequest):
    user: Owner


def page_of(request: OwnersRequest, rows: "QuerySet[Any] | list[Any]") -> "Page[Any]":
    """Return the requested page of a list, or the nearest existing one."""
    return Paginator(rows, PER_PAGE).get_page(request.GET.get("page"))


def search_text(request: HttpRequest) -> str:
    """Return the search text of a list, or "" if there is none."""
    return request.GET.get("search", "").replace("\0", "").strip()[:MAX_SEARCH_LENGTH]


def form_data(request: OwnersRequest) -> QueryDict | None:
    return request.POST if request.method == "POST" else None


def uuids_in(text: str) -> list[UUID]:
    """Return the UUIDs among the first words of a text, which are UUIDs or names of agents' queues."""
    found = []
    for word in text.replace("_", " ").split()[:PER_PAGE]:
        try:
            found.append(UUID(word))
        except ValueError:
            continue
    return found


def add_error(form: forms.Form, error: ValidationError, field: str) -> None:
    """Add the errors to the fields they name, or else to ``field``, or to the form if it has neither."""
    by_field = error.error_dict if hasattr(error, "error_dict") else {getattr(error, "field", ""): error}
    for name, errors in by_field.items():
        form.add_error(
            next((one for one in (name, field) if one in (*form.fields, NON_FIELD_ERRORS)), NON_FIELD_ERRORS), errors
        )


def broker_trouble(request: OwnersRequest, error: BrokerError, outcome: str) -> str:
    """Return the message about a failed request to the broker. Only operators see the reason."""
    logger.warning("%s %s: %s", request.method, request.path, error)
    if isinstance(error, Refused):
        text = "RabbitMQ refused Guardian's request. Contact an operator."
    else:
        text = "RabbitMQ does not answer. Try again in a minute."
    return f"{text} {outcome}" + (f" For operators: {error}." if request.user.is_staff else "")
