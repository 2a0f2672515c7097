"""The admin of the audit trail."""

from typing import Any

import auditlog.admin  # noqa: F401 - it registers the model that is unregistered below
from django.contrib import admin
from django.core.exceptions import FieldDoesNotExist
from django.http import Http404, HttpRequest, HttpResponse
from django.urls import NoReverseMatch, reverse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from accounts import audit
from accounts.models import AuditEntry
from core.admin import AuditedAdmin, audit_trail_of, column
from core.templatetags.components import ago
from rabbit.names import readable

admin.site.unregister(AuditEntry)

ORIGIN_KEYS = ("token", "task", "command")
"""Details of an entry that name the origin of the action."""


@admin.register(AuditEntry)
class AuditEntryAdmin(AuditedAdmin):
    """The audit trail."""

    date_hierarchy = "timestamp"
    list_display = ["when", "who", "event", "kind", "thing", "details", "outcome"]
    list_filter = ["outcome", "event", ("content_type", admin.RelatedOnlyFieldListFilter)]
    list_select_related = ["content_type", "actor"]
    list_per_page = 50
    search_fields = ["actor_email", "object_repr", "event", "changes", "additional_data", "cid"]
    search_help_text = "An e-mail address, a name, an event, or the id of a request from the log."
    fields = ["when", "who", "event", "kind", "thing", "details", "outcome", "remote_addr", "cid"]
    when = column("timestamp", "when", ago)

    def history_view(
        self, request: HttpRequest, object_id: str, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Redirect to the other entries about the same thing."""
        entry = self.get_object(request, object_id)
        if entry is None:
            raise Http404("There is no such entry.")
        return audit_trail_of(entry.content_type, entry.object_pk)

    @admin.display(ordering="actor_email")
    def who(self, entry: AuditEntry) -> str:
        return actor_of(entry)

    @admin.display(ordering="content_type")
    def kind(self, entry: AuditEntry) -> str:
        return entry.content_type.name if entry.content_type else ""

    @admin.display(ordering="object_repr")
    def thing(self, entry: AuditEntry) -> str:
        return thing_of(entry)

    @admin.display(description="details")
    def details(self, entry: AuditEntry) -> str:
        return format_html_join(SafeString("<br>"), "{}", ((line,) for line in details_of(entry)))


def actor_of(entry: AuditEntry) -> str:
    """Return the owner and the token, if any; without an owner, the command or task."""
    details = entry.additional_data or {}
    if entry.actor_email:
        return f"{entry.actor_email} by the token {details['token']}" if "token" in details else entry.actor_email
    for what in ("command", "task"):
        if what in details:
            return f"the {what} {details[what]}"
    return "not signed in" if entry.remote_addr else "Guardian"


def thing_of(entry: AuditEntry) -> str:
    """Return the thing that was changed, with a link to its page if there is one."""
    name = readable(entry.object_repr)
    if entry.content_type is None or not entry.object_pk or entry.event == audit.DELETED:
        return name
    page = f"admin:{entry.content_type.app_label}_{entry.content_type.model}_change"
    try:
        return format_html('<a href="{}">{}</a>', reverse(page, args=[entry.object_pk]), name)
    except NoReverseMatch:
        return name


def details_of(entry: AuditEntry) -> list[str]:
    """Return the changed fields, before and after, and further details, each in words."""
    details = entry.additional_data or {}
    others = (f"{name}: {_format_value(value)}" for name, value in details.items() if name not in ORIGIN_KEYS)
    return [readable(line) for line in (*_changes(entry), *others)]


def _changes(entry: AuditEntry) -> list[str]:
    model = entry.content_type.model_class() if entry.content_type else None
    lines = []
    for name, change in sorted((entry.changes or {}).items()):
        try:
            field = str(model._meta.get_field(name).verbose_name) if model else name  # type: ignore[union-attr]
        except (FieldDoesNotExist, AttributeError):
            field = name
        if isinstance(change, dict):
            verb = {"add": "with", "delete": "without"}[change["operation"]]
            lines.append(f"{verb} the {field} {', '.join(change['objects'])}")
        elif entry.event == audit.CHANGED:
            lines.append(f"{field}: {_format_value(change[0])} → {_format_value(change[1])}")
        elif (value := change[0 if entry.event == audit.DELETED else 1]) not in ("", "None", "False"):
            lines.append(f"{field}: {value}")
    return lines


def _format_value(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{number} {name}" for name, number in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "none" if value in (None, "", "None") else str(value)
