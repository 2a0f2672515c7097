"""The base class of all admins, the pages that ask to confirm their actions, and the admins of this app's models."""

from collections.abc import Callable, Collection, Sequence
from functools import cache, wraps
from operator import attrgetter
from typing import Any, NamedTuple
from uuid import UUID

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import ChangeList
from django.contrib.contenttypes.models import ContentType
from django.core.exceptions import ValidationError
from django.db import DataError, NotSupportedError, ProgrammingError
from django.db.models import Count, DateTimeField, Field, Model, OuterRef, Q, QuerySet, Subquery
from django.db.models.expressions import Combinable
from django.db.models.functions import Coalesce
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.http import urlencode

from core.confirmation import ConfirmationRequired
from core.each import MAX_ROWS_SHOWN, report_results
from core.models import Lease, Removal
from core.templatetags.components import ago, cut
from rabbit.names import readable

CHOSEN_FIELD = "chosen"

REFUSED_LOOKUPS = ("regex", "range", "contained_by")
"""Endings of lookups that a URL can't have: a regex could take unlimited time, and a range needs two values."""


class AuditedAdmin(admin.ModelAdmin):
    """The admin of a model whose changes are in the audit trail. By default, operators only read."""

    allowed: Collection[str] = ()
    """What the forms may do: "add", "change" and "delete", or "cascade": to delete rows only with another row."""

    key = "pk"
    """The field that identifies a row in requests for actions."""

    empty_value_display = "none"
    actions_on_top = False
    actions_on_bottom = True

    def has_add_permission(self, request: HttpRequest) -> bool:
        return "add" in self.allowed and super().has_add_permission(request)

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return "change" in self.allowed and super().has_change_permission(request, obj)

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return whether the user may delete rows. The pages of another model ask it before a cascade."""
        own_pages = reverse(f"admin:{self.opts.app_label}_{self.opts.model_name}_changelist")
        is_cascade = not request.path.startswith(own_pages)
        is_allowed = "delete" in self.allowed or ("cascade" in self.allowed and is_cascade)
        return is_allowed and super().has_delete_permission(request, obj)

    def has_act_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may run the actions that need no form: all operators may."""
        return super().has_change_permission(request)

    def get_list_display(self, request: HttpRequest) -> list[Any]:
        """Return the columns of the list. Times are relative to now, as on all pages."""
        names = super().get_list_display(request)
        fields = {field.name: field for field in self.opts.fields if isinstance(field, DateTimeField)}
        return [_time(fields[name]) if name in fields else name for name in names]

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest) -> bool:
        return not lookup.endswith(REFUSED_LOOKUPS) and super().lookup_allowed(lookup, value, request)

    def get_changelist_instance(self, request: HttpRequest) -> ChangeList:
        """Return the list. If the database can't compare with a value in the URL, it is shown without filters.

        Django checks a part of the values. The others raise an error when the query is compiled or executed.
        """
        try:
            return super().get_changelist_instance(request)
        except (ValueError, OverflowError, DataError, NotSupportedError, ProgrammingError) as error:
            raise IncorrectLookupParameters(error) from error

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Search by UUID too, in any notation. Find nothing for a NUL character, which PostgreSQL refuses."""
        if "\0" in search_term:
            return queryset.none(), False
        found, may_have_duplicates = super().get_search_results(request, queryset, search_term)
        if not hasattr(self.model, "uuid"):
            return found, may_have_duplicates
        try:
            uuid = UUID(search_term.strip())
        except ValueError:
            return found, may_have_duplicates
        return queryset.filter(Q(uuid=uuid) | Q(pk__in=found.values("pk"))), False

    def changeform_view(
        self,
        request: HttpRequest,
        object_id: str | None = None,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        """Show and process the form. If the change deletes queues, ask once more."""
        try:
            return super().changeform_view(request, object_id, form_url, extra_context)
        except ConfirmationRequired as required:
            return ask_again(self, request, required)

    def response_action(  # type: ignore[override]  # the stubs are a version ahead
        self, request: HttpRequest, queryset: QuerySet[Any]
    ) -> HttpResponse | None:
        """Replace the selected keys by primary keys. Only forged requests contain invalid ones."""
        posted = request.POST.copy()
        keys = _valid_keys(self, posted.getlist(ACTION_CHECKBOX_NAME))
        if self.key != "pk":
            keys = [*queryset.filter(**{f"{self.key}__in": keys}).values_list("pk", flat=True)]
        posted.setlist(ACTION_CHECKBOX_NAME, keys)
        request.POST = posted  # type: ignore[assignment]
        return super().response_action(request, queryset)

    def history_view(
        self, request: HttpRequest, object_id: str, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Redirect to the audit trail of the row. Django's history contains only changes in the admin."""
        return audit_trail_of(ContentType.objects.get_for_model(self.model), object_id)


def audit_trail_of(kind: ContentType | None, key: str) -> HttpResponse:
    wanted = {"content_type__id__exact": str(kind.pk), "object_pk": key} if kind else {"content_type__isnull": "True"}
    return redirect(f"{reverse('admin:accounts_auditentry_changelist')}?{urlencode(wanted)}")


# Columns of lists


def column(
    path: str, description: str, show: Callable[[Any], object] = str, ordering: str | Combinable = ""
) -> Callable[[Any, Any], object]:
    """Return a column that shows a field, an annotation, or a field of a related row: ``owner__email``."""
    value_of = attrgetter(path.replace("__", "."))

    @admin.display(description=description, ordering=ordering or path)
    def shown(model_admin: AuditedAdmin, row: Model) -> object:
        return show(value_of(row))

    return shown


def broker_name(path: str, description: str) -> Callable[[Any, Any], object]:
    return column(path, description, lambda name: cut(readable(name)))


@cache  # Django compares the columns of a list with those that may be sorted
def _time(field: "Field[Any, Any]") -> Callable[[Model], str]:
    """Return a column that shows a time relative to now, or None if there is none."""

    @admin.display(description=field.verbose_name, ordering=field.name)
    def shown(row: Model) -> str:
        return ago(getattr(row, field.name)) or "none"

    return shown


def count_related(model: type[Model], by: str, those: QuerySet[Any] | None = None) -> Coalesce:
    """Return a subquery that counts the rows of a model that refer to the outer row by this foreign key."""
    rows = (model._default_manager.all() if those is None else those).filter(**{by: OuterRef("pk")})
    rows = rows.order_by().values(by)
    return Coalesce(Subquery(rows.annotate(number=Count("pk")).values("number")), 0)


# Actions that ask first


class Confirmation(NamedTuple):
    """What the page that asks to confirm an action says about it, and about the selected rows.

    ``column`` is the heading of what ``about`` returns for a row. The action gets the values of ``form`` by name.
    ``narrow`` returns the rows that the action is for. ``refuse`` returns why it is not for so many of them; empty: it
    is. ``effect`` returns what is deleted with the rows; without it, the action raises that question when it is
    confirmed.
    """

    title: str
    text: str
    button: str
    column: str
    about: Callable[[Any], object]
    form: type[forms.Form] | None = None
    is_dangerous: bool = True
    narrow: Callable[[QuerySet[Any]], QuerySet[Any]] = lambda rows: rows
    refuse: Callable[[Sequence[Any]], str] = lambda rows: ""
    effect: Callable[[HttpRequest, Sequence[Any]], ConfirmationRequired | None] = lambda request, rows: None


def confirmed_action(description: str, question: Confirmation) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate an action: it is run on the list of the selected rows, after the user has confirmed it.

    It can raise ``ConfirmationRequired``, and with a form ``ValidationError``. Then nothing has changed, and the page
    is shown again.
    """

    def decorate(run: Callable[..., HttpResponse | None]) -> Callable[..., HttpResponse | None]:
        @admin.action(description=description, permissions=["act"])
        @wraps(run)
        def action(self: AuditedAdmin, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse | None:
            rows = list(question.narrow(_chosen_rows(self, request, queryset)))
            if not rows:
                report_results(request, [], "", [])
                return None
            if refused := question.refuse(rows):
                self.message_user(request, refused, messages.ERROR)
                return None
            is_confirmed = "post" in request.POST
            form = question.form(request.POST if is_confirmed else None) if question.form else None
            required = question.effect(request, rows)
            if is_confirmed and not required and (form is None or form.is_valid()):
                try:
                    return run(self, request, rows, **(form.cleaned_data if form else {}))
                except ConfirmationRequired as error:
                    required = error
                except ValidationError as error:
                    if form is None:
                        raise
                    form.add_error(None, error)
            return _confirmation_page(self, request, run.__name__, question, rows, form, required)

        return action

    return decorate


def _chosen_rows(model_admin: AuditedAdmin, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
    """Return the rows named on the confirmation page if the request comes from it, else those selected in the list."""
    if CHOSEN_FIELD not in request.POST:
        return queryset
    keys = _valid_keys(model_admin, request.POST[CHOSEN_FIELD].split(","))
    return model_admin.get_queryset(request).filter(**{f"{model_admin.key}__in": keys})


def _valid_keys(model_admin: AuditedAdmin, texts: Sequence[str]) -> list[str]:
    meta = model_admin.model._meta
    field: Any = meta.pk if model_admin.key == "pk" else meta.get_field(model_admin.key)
    keys = []
    for text in texts:
        try:
            field.clean(text, None)
        except ValidationError:
            continue
        keys.append(text)
    return keys


def _confirmation_page(
    model_admin: AuditedAdmin,
    request: HttpRequest,
    action: str,
    question: Confirmation,
    rows: Sequence[Any],
    form: forms.Form | None,
    required: ConfirmationRequired | None,
) -> HttpResponse:
    context = {
        "title": question.title,
        "question": question,
        "action": action,
        "list": request.get_full_path(),
        "rows": [(readable(str(row)), question.about(row)) for row in rows[:MAX_ROWS_SHOWN]],
        "number": len(rows),
        "more": max(0, len(rows) - MAX_ROWS_SHOWN),
        # One field for all keys: Django accepts at most 1,000 fields.
        "chosen": ",".join(str(getattr(row, model_admin.key)) for row in rows),
        "first": getattr(rows[0], model_admin.key),
        "form": form,
        "required": required,
    }
    return _page(model_admin, request, "admin/ask.html", context)


def ask_again(model_admin: AuditedAdmin, request: HttpRequest, required: ConfirmationRequired) -> HttpResponse:
    """Return the page that shows which queues a change deletes, and sends the same request with the confirmation."""
    own = ("csrfmiddlewaretoken", "confirm")
    context = {
        "title": "Delete these queues?",
        "back": request.get_full_path(),
        "fields": [(name, value) for name in request.POST if name not in own for value in request.POST.getlist(name)],
        "required": required,
    }
    return _page(model_admin, request, "admin/confirm.html", context)


def _page(model_admin: AuditedAdmin, request: HttpRequest, template: str, context: dict[str, Any]) -> HttpResponse:
    request.current_app = model_admin.admin_site.name
    context = {**model_admin.admin_site.each_context(request), "opts": model_admin.opts, **context}
    return TemplateResponse(request, template, context)


def current_operator(request: HttpRequest) -> Any:
    """Return the signed-in owner. The admin admits only operators."""
    return request.user


def given_confirmation(request: HttpRequest) -> str:
    """Return the confirmation that queues are deleted, as a page of the admin sends it; empty: none."""
    return str(request.POST.get("confirm", ""))


# The models of this app


@admin.register(Removal)
class RemovalAdmin(AuditedAdmin):
    """What is still to be removed from the broker. ``last_error`` says why an old removal is pending."""

    list_display = ["shown_name", "kind", "vhost", "created", "due_at", "attempts", "last_error"]
    exclude = ["name"]
    readonly_fields = ["shown_name"]
    list_filter = ["kind", "created"]
    search_fields = ["name", "vhost", "last_error"]
    shown_name = broker_name("name", "name")


@admin.register(Lease)
class LeaseAdmin(AuditedAdmin):
    """Leases. The lease of a killed process expires."""

    list_display = ["name", "holder", "expires_at"]
    search_fields = ["name"]
