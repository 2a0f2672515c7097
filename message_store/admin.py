"""The admin pages of applications and their keys.

``applications.py`` makes the changes and audits them. An application can't be renamed: the store identifies its queues
by the name. A key is shown once, after its creation.
"""

from typing import Any, cast

from django import forms
from django.contrib import admin, messages
from django.core.exceptions import ObjectDoesNotExist, ValidationError
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse

from accounts.admin.base import (
    Confirmation,
    ReadOnlyAdmin,
    Row,
    chosen_rows,
    confirmation_page,
    count_related,
    current_operator,
    is_confirmed,
)
from accounts.pulse_users.each import apply_to_each, report_results
from core.links import absolute_url
from message_store import applications
from message_store.models import Application, ApplicationKey
from message_store.store import StoreUnavailable


class ApplicationForm(forms.ModelForm):
    """The form of a new application."""

    def clean(self) -> dict[str, Any]:
        """Validate the name."""
        cleaned = super().clean() or self.cleaned_data
        if "name" in cleaned:
            applications.check_name(cleaned["name"])
        return cleaned


@admin.register(Application)
class ApplicationAdmin(ReadOnlyAdmin):
    """Applications. A new one gets a key; an action creates further keys."""

    form = ApplicationForm
    list_display = ["name", "keys", "created"]
    list_filter = ["created"]
    search_fields = ["name"]
    fields = ["name"]
    actions = ["create_key", "remove"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[Application]:
        """Add the number of keys in one query."""
        found: QuerySet[Application] = super().get_queryset(request)
        return found.annotate(number_of_keys=count_related(ApplicationKey, "application"))

    @admin.display(description="keys", ordering="number_of_keys")
    def keys(self, application: Application) -> int:
        """Return the number of keys."""
        return cast("int", application.number_of_keys)  # type: ignore[attr-defined]

    def view_on_site(self, application: Application) -> str:
        """Return the URL of the page of its queues."""
        return reverse("stored_queues", args=[application.name])

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Check the model's permission to add."""
        return admin.ModelAdmin.has_add_permission(self, request)

    def has_manage_permission(self, request: HttpRequest) -> bool:
        """Check the model's permission to change, for the actions."""
        return admin.ModelAdmin.has_change_permission(self, request)

    def save_model(self, request: HttpRequest, obj: Application, form: Any, change: bool) -> None:
        """Create the application."""
        obj.pk = applications.create_application(obj.name, current_operator(request)).pk

    def response_add(
        self, request: HttpRequest, obj: Application, post_url_continue: str | None = None
    ) -> HttpResponse:
        """Create the first key and show it."""
        return _show_new_key(request, obj)

    @admin.action(description="Create a key for the selected application", permissions=["manage"])
    def create_key(self, request: HttpRequest, queryset: QuerySet[Application]) -> HttpResponse | None:
        """Create a key for one application after confirmation, and show it."""
        found = list(chosen_rows(self, request, queryset))
        if len(found) > 1:
            self.message_user(request, "A key is shown only once. Select one application.", messages.ERROR)
            return None
        if found and is_confirmed(request):
            try:
                return _show_new_key(request, found[0])
            except (ValidationError, ObjectDoesNotExist) as error:
                report_results(request, [], "", [(str(found[0]), error)])
                return None
        question = Confirmation(
            "create_key",
            "Create a key for this application",
            "Anybody who has the key can do everything that the application can. Existing keys stay valid.",
            "Create key",
            "Keys now",
            is_dangerous=False,
        )
        return confirmation_page(self, request, question, found, lambda one: Row(one.name, str(one.number_of_keys)))

    @admin.action(description="Remove the selected applications", permissions=["manage"])
    def remove(self, request: HttpRequest, queryset: QuerySet[Application]) -> HttpResponse | None:
        """Delete the applications without queues after confirmation."""
        found = list(chosen_rows(self, request, queryset))
        if is_confirmed(request):
            apply_to_each(
                request,
                found,
                lambda one: applications.delete_application(one, current_operator(request)),
                "removed",
                (StoreUnavailable,),
            )
            return None
        question = Confirmation(
            "remove",
            "Remove these applications",
            "They are removed with their keys. Applications that have queues stay. Delete their queues first.",
            "Remove the applications",
            "Keys",
        )
        return confirmation_page(self, request, question, found, lambda one: Row(one.name, str(one.number_of_keys)))


def _show_new_key(request: HttpRequest, application: Application) -> HttpResponse:
    row, key = applications.create_key(application, current_operator(request))
    context = {"application": application, "row": row, "key": key, "address": absolute_url(f"/v1/{application.name}")}
    response = render(request, "message_store/key.html", context, status=201)
    response["Cache-Control"] = "no-store"
    return response


@admin.register(ApplicationKey)
class ApplicationKeyAdmin(ReadOnlyAdmin):
    """Keys of applications. They can only be revoked here."""

    list_display = ["shown_beginning", "application", "created"]
    list_filter = ["created", ("application", admin.RelatedOnlyFieldListFilter)]
    list_select_related = ["application"]
    search_fields = ["beginning", "application__name"]
    fields = ["shown_beginning", "application", "created"]
    actions = ["revoke"]

    @admin.display(description="beginning", ordering="beginning")
    def shown_beginning(self, key: ApplicationKey) -> str:
        """Return the first characters."""
        return f"{key.beginning}…"

    def has_revoke_permission(self, request: HttpRequest) -> bool:
        """Check the model's permission to delete."""
        return admin.ModelAdmin.has_delete_permission(self, request)

    @admin.action(description="Revoke the selected keys", permissions=["revoke"])
    def revoke(self, request: HttpRequest, queryset: QuerySet[ApplicationKey]) -> HttpResponse | None:
        """Revoke the keys after confirmation."""
        found = list(chosen_rows(self, request, queryset).select_related("application"))
        if is_confirmed(request):
            apply_to_each(
                request, found, lambda key: applications.revoke_key(key, current_operator(request)), "revoked"
            )
            return None
        question = Confirmation(
            "revoke",
            "Revoke these keys",
            "Programs that use them are refused at once. The queues and their messages stay.",
            "Revoke the keys",
            "Application",
        )
        return confirmation_page(
            self, request, question, found, lambda key: Row(f"{key.beginning}…", key.application.name)
        )
