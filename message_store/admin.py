"""The admin pages of applications and their keys.

``applications.py`` makes the changes and audits them. An application can't be renamed: the store identifies its queues
by the name. A key is shown once, after its creation.
"""

from typing import Any

from django import forms
from django.contrib import admin
from django.core.exceptions import ObjectDoesNotExist, ValidationError
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse

from core.admin import (
    AuditedAdmin,
    Confirmation,
    column,
    confirmed_action,
    count_related,
    current_operator,
)
from core.each import apply_to_each, report_results
from core.links import absolute_url
from message_store import applications
from message_store.models import Application, ApplicationKey
from message_store.store import StoreUnavailable


class ApplicationForm(forms.ModelForm):
    def clean(self) -> dict[str, Any]:
        cleaned = super().clean() or self.cleaned_data
        if "name" in cleaned:
            applications.check_name(cleaned["name"])
        return cleaned


@admin.register(Application)
class ApplicationAdmin(AuditedAdmin):
    """Applications. A new one gets a key; an action creates further keys."""

    allowed = {"add"}
    form = ApplicationForm
    list_display = ["name", "keys", "created"]
    list_filter = ["created"]
    search_fields = ["name"]
    fields = ["name"]
    actions = ["create_key", "remove"]
    keys = column("number_of_keys", "keys")

    def get_queryset(self, request: HttpRequest) -> QuerySet[Application]:
        found: QuerySet[Application] = super().get_queryset(request)
        return found.annotate(number_of_keys=count_related(ApplicationKey, "application"))

    def view_on_site(self, application: Application) -> str:
        """Return the URL of the page of its queues."""
        return reverse("stored_queues", args=[application.name])

    def save_model(self, request: HttpRequest, obj: Application, form: Any, change: bool) -> None:
        obj.pk = applications.create_application(obj.name, current_operator(request)).pk

    def response_add(
        self, request: HttpRequest, obj: Application, post_url_continue: str | None = None
    ) -> HttpResponse:
        return _show_new_key(request, obj)

    @confirmed_action(
        "Create a key for the selected application",
        Confirmation(
            title="Create a key for this application",
            text="Anybody who has the key can do everything that the application can. Existing keys stay valid.",
            button="Create key",
            column="Keys now",
            about=lambda application: application.number_of_keys,
            is_dangerous=False,
            refuse=lambda found: "A key is shown only once. Select one application." if len(found) > 1 else "",
        ),
    )
    def create_key(self, request: HttpRequest, found: list[Application]) -> HttpResponse | None:
        try:
            return _show_new_key(request, found[0])
        except (ValidationError, ObjectDoesNotExist) as error:
            report_results(request, [], "", [(str(found[0]), error)])
            return None

    @confirmed_action(
        "Remove the selected applications",
        Confirmation(
            title="Remove these applications",
            text="They are removed with their keys. Applications that have queues stay. Delete their queues first.",
            button="Remove the applications",
            column="Keys",
            about=lambda application: application.number_of_keys,
        ),
    )
    def remove(self, request: HttpRequest, found: list[Application]) -> None:
        apply_to_each(
            request,
            found,
            lambda one: applications.delete_application(one, current_operator(request)),
            "removed",
            (StoreUnavailable,),
        )


def _show_new_key(request: HttpRequest, application: Application) -> HttpResponse:
    row, key = applications.create_key(application, current_operator(request))
    context = {"application": application, "row": row, "key": key, "address": absolute_url(f"/v1/{application.name}")}
    response = render(request, "message_store/key.html", context, status=201)
    response["Cache-Control"] = "no-store"
    return response


@admin.register(ApplicationKey)
class ApplicationKeyAdmin(AuditedAdmin):
    """Keys of applications. They can only be revoked here."""

    list_display = ["shown_beginning", "application", "created"]
    list_filter = ["created", ("application", admin.RelatedOnlyFieldListFilter)]
    list_select_related = ["application"]
    search_fields = ["beginning", "application__name"]
    fields = ["shown_beginning", "application", "created"]
    actions = ["revoke"]
    shown_beginning = column("beginning", "beginning", "{}…".format)

    @confirmed_action(
        "Revoke the selected keys",
        Confirmation(
            title="Revoke these keys",
            text="Programs that use them are refused at once. The queues and their messages stay.",
            button="Revoke the keys",
            column="Application",
            about=lambda key: key.application,
            narrow=lambda keys: keys.select_related("application"),
        ),
    )
    def revoke(self, request: HttpRequest, found: list[ApplicationKey]) -> None:
        apply_to_each(request, found, lambda key: applications.revoke_key(key, current_operator(request)), "revoked")
