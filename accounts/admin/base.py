"""The base classes and confirmation pages of all admins."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast
from uuid import UUID

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import ChangeList
from django.contrib.contenttypes.models import ContentType
from django.core.exceptions import ValidationError
from django.db import DataError, NotSupportedError, ProgrammingError
from django.db.models import Count, Model, OuterRef, QuerySet, Subquery
from django.db.models.functions import Coalesce
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.http import urlencode

from accounts.models import (
    Owner,
)
from accounts.pulse_users.each import MAX_ROWS_SHOWN, describe_error, report_results
from core.confirmation import ConfirmationRequired

CHOSEN_FIELD = "chosen"


REFUSED_LOOKUPS = ("regex", "range", "contained_by")
"""Endings of lookups that a URL can't have: a regex could take unlimited time, and a range needs two values."""


@contextmanager
def _refusing_odd_lookups() -> Iterator[None]:
    try:
        yield
    except (ValueError, OverflowError, DataError, NotSupportedError, ProgrammingError) as error:
        raise IncorrectLookupParameters(error) from error


class CheckedChangeList(ChangeList):
    """A list that is shown without filters if its URL has a lookup or a value that the database can't compare with.

    Django checks a part of them. The others raise an error when the query is compiled or executed.
    """

    @_refusing_odd_lookups()
    def get_queryset(self, *args: Any, **kwargs: Any) -> QuerySet[Any]:
        """Return the rows that match the filters."""
        return super().get_queryset(*args, **kwargs)

    @_refusing_odd_lookups()
    def get_results(self, request: HttpRequest) -> None:
        """Count the rows. This is the first query with the filters."""
        super().get_results(request)


class AuditedAdmin(admin.ModelAdmin):
    """The admin of a model whose changes are in the audit trail."""

    key = "pk"
    """The field that identifies a row on confirmation pages."""

    empty_value_display = "none"

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest) -> bool:
        """Refuse the lookups that a URL can't have."""
        return not lookup.endswith(REFUSED_LOOKUPS) and super().lookup_allowed(lookup, value, request)

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        """Return the class of the list."""
        return CheckedChangeList

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Find nothing for a NUL character, which PostgreSQL refuses."""
        if "\0" in search_term:
            return queryset.none(), False
        return super().get_search_results(request, queryset, search_term)

    def changeform_view(
        self,
        request: HttpRequest,
        object_id: str | None = None,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        """Show and process the form. If the change is no longer valid when it is saved, show why."""
        try:
            return super().changeform_view(request, object_id, form_url, extra_context)
        except ValidationError as error:
            self.message_user(request, f"Nothing was changed. {describe_error(error)}", messages.ERROR)
            return redirect(request.get_full_path())
        except ConfirmationRequired as required:
            return ask_again(self, request, required)

    def response_action(  # type: ignore[override]  # the stubs are a version ahead
        self, request: HttpRequest, queryset: QuerySet[Any]
    ) -> HttpResponse | None:
        """Ignore selected values that are no valid keys. Only forged requests contain them."""
        posted = request.POST.copy()
        selected = posted.getlist(ACTION_CHECKBOX_NAME)
        posted.setlist(ACTION_CHECKBOX_NAME, [text for text in selected if _is_key(self.model, "pk", text)])
        request.POST = posted  # type: ignore[assignment]
        return super().response_action(request, queryset)

    def history_view(
        self, request: HttpRequest, object_id: str, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Redirect to the audit trail of the row. Django's history contains only changes in the admin."""
        return audit_trail_of(ContentType.objects.get_for_model(self.model), object_id)


def audit_trail_of(kind: ContentType | None, key: str) -> HttpResponse:
    """Redirect to the audit trail of one thing."""
    wanted = {"content_type__id__exact": str(kind.pk), "object_pk": key} if kind else {"content_type__isnull": "True"}
    return redirect(f"{reverse('admin:accounts_auditentry_changelist')}?{urlencode(wanted)}")


class ReadOnlyAdmin(AuditedAdmin):
    """The admin of a model that operators only read."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Refuse."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: object = None) -> bool:
        """Refuse."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: object = None) -> bool:
        """Refuse."""
        return False


class DeletedWithOwnerAdmin(ReadOnlyAdmin):
    """The admin of a model whose rows are deleted only with their owner."""

    def has_delete_permission(self, request: HttpRequest, obj: object = None) -> bool:
        """Refuse on the model's own pages. Elsewhere the admin checks the rows that a deletion cascades to."""
        own_pages = reverse(f"admin:{self.opts.app_label}_{self.opts.model_name}_changelist")
        return not request.path.startswith(own_pages) and admin.ModelAdmin.has_delete_permission(self, request, obj)


class RemovableAdmin(ReadOnlyAdmin):
    """The admin of a model that operators read and delete."""

    def has_delete_permission(self, request: HttpRequest, obj: object = None) -> bool:
        """Return what the model's permissions say."""
        return admin.ModelAdmin.has_delete_permission(self, request, obj)


# Actions


class Confirmation(NamedTuple):
    """The texts of the page that asks to confirm an action on the selected rows.

    ``action`` is the name of the action to run after confirmation. ``text`` says what it does. ``column`` is the
    heading of ``Row.about``.
    """

    action: str
    title: str
    text: str
    button: str
    column: str
    is_dangerous: bool = True


class Row(NamedTuple):
    """A selected row on a confirmation page."""

    name: str
    about: str


def chosen_rows(model_admin: AuditedAdmin, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
    """Return the rows named on the confirmation page if the request comes from it, else those selected in the list."""
    if CHOSEN_FIELD not in request.POST:
        return queryset
    keys = [text for text in request.POST[CHOSEN_FIELD].split(",") if _is_key(model_admin.model, model_admin.key, text)]
    return model_admin.get_queryset(request).filter(**{f"{model_admin.key}__in": keys})


def _is_key(model: type[Model], name: str, text: str) -> bool:
    """Return whether the text is a valid value of this field."""
    field = model._meta.pk if name == "pk" else model._meta.get_field(name)
    try:
        field.clean(text, None)  # type: ignore[union-attr]
    except ValidationError:
        return False
    return True


def is_confirmed(request: HttpRequest) -> bool:
    """Return whether the request comes from a confirmation page."""
    return "post" in request.POST


def confirmation_page(
    model_admin: AuditedAdmin,
    request: HttpRequest,
    question: Confirmation,
    rows: Sequence[Any],
    shown: Callable[[Any], Row],
    form: forms.Form | None = None,
    required: ConfirmationRequired | None = None,
) -> HttpResponse:
    """Return the page that asks to confirm an action on these rows. Without rows, redirect back with a message.

    ``required``: the action deletes queues, which the page shows.
    """
    if not rows:
        report_results(request, [], "", [])
        return redirect(request.get_full_path())
    context = {
        **model_admin.admin_site.each_context(request),
        "title": question.title,
        "question": question,
        "opts": model_admin.opts,
        "list": request.get_full_path(),
        "rows": [shown(row) for row in rows[:MAX_ROWS_SHOWN]],
        "number": len(rows),
        "more": max(0, len(rows) - MAX_ROWS_SHOWN),
        # One field for all keys: Django accepts at most 1,000 fields.
        "chosen": ",".join(str(getattr(row, model_admin.key)) for row in rows),
        "first": getattr(rows[0], model_admin.key),
        "form": form,
        "required": required,
    }
    request.current_app = model_admin.admin_site.name
    return TemplateResponse(request, "admin/ask.html", context)


def given_confirmation(request: HttpRequest) -> str:
    """Return the confirmation that queues are deleted, as a page of the admin sends it; empty: none."""
    return str(request.POST.get("confirm", ""))


def ask_again(model_admin: AuditedAdmin, request: HttpRequest, required: ConfirmationRequired) -> HttpResponse:
    """Return the page that shows which queues a change deletes, and sends the same request with the confirmation."""
    own = ("csrfmiddlewaretoken", "confirm")
    context = {
        **model_admin.admin_site.each_context(request),
        "title": "Delete these queues?",
        "opts": model_admin.opts,
        "back": request.get_full_path(),
        "fields": [(name, value) for name in request.POST if name not in own for value in request.POST.getlist(name)],
        "required": required,
    }
    request.current_app = model_admin.admin_site.name
    return TemplateResponse(request, "admin/confirm.html", context)


def count_related(model: type[Model], by: str, those: QuerySet[Any] | None = None) -> Coalesce:
    """Return a subquery that counts the rows of a model that refer to the outer row by this foreign key."""
    rows = (model._default_manager.all() if those is None else those).filter(**{by: OuterRef("pk")})
    rows = rows.order_by().values(by)
    return Coalesce(Subquery(rows.annotate(number=Count("pk")).values("number")), 0)


def current_operator(request: HttpRequest) -> Owner:
    """Return the signed-in operator. The admin admits only operators."""
    return cast("Owner", request.user)


def is_uuid(text: str) -> bool:
    """Return whether the text is a UUID in any notation."""
    try:
        UUID(text)
    except ValueError:
        return False
    return True
