from typing import Any

from django.contrib import admin
from django.db.models import Model
from django.http import HttpRequest

from queues.models import Notification, Pass, Queue, QueueEvent


class ReadOnlyAdmin(admin.ModelAdmin):
    """To be looked at: these rows are written by the monitor and the outbox."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Refuse."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        """Refuse."""
        return False


@admin.register(Queue)
class QueueAdmin(ReadOnlyAdmin):
    """Queues. Their thresholds and the unbounded flag are the operators'; all else is what was seen."""

    list_display = ["name", "vhost", "state", "ready", "unacknowledged", "pulse_user", "unbounded"]
    list_filter = ["state", "unbounded", "vhost", "type"]
    list_select_related = ["pulse_user"]
    search_fields = ["name"]
    fields = [
        "name", "vhost", "pulse_user", "state", "ready", "unacknowledged", "unbounded", "warn_length", "max_length",
        "type", "durable", "auto_delete", "exclusive", "registered", "node", "first_seen", "last_seen",
    ]  # fmt: skip

    def save_model(self, request: HttpRequest, obj: Queue, form: Any, change: bool) -> None:
        """Write what was changed and nothing else: a pass may have written the rest in the meantime."""
        obj.save(update_fields=form.changed_data)

    def get_readonly_fields(self, request: HttpRequest, obj: Model | None = None) -> list[str]:
        """Return all fields but the operators' own."""
        return [str(name) for name in self.fields if name not in ("unbounded", "warn_length", "max_length")]


class LogAdmin(ReadOnlyAdmin):
    """What was written once and isn't changed."""

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        """Refuse."""
        return False


@admin.register(QueueEvent)
class QueueEventAdmin(LogAdmin):
    """What happened to queues."""

    list_display = ["at", "kind", "queue_name", "vhost", "by"]
    list_filter = ["kind", "vhost"]
    list_select_related = ["by"]
    search_fields = ["queue_name"]


@admin.register(Notification)
class NotificationAdmin(LogAdmin):
    """The outbox."""

    list_display = ["created", "kind", "recipient", "state", "attempts", "sent_at"]
    list_filter = ["state", "kind"]
    search_fields = ["recipient"]


@admin.register(Pass)
class PassAdmin(LogAdmin):
    """The monitor's reports."""

    list_display = ["at", "queues", "new", "changed", "gone", "warned", "deleted", "kept", "brake_held", "seconds"]
    list_filter = ["brake_held"]
