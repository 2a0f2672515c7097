from typing import Any, cast

from django import forms
from django.contrib import admin
from django.db.models import Model
from django.http import HttpRequest

from accounts.models import Owner
from queues import by_hand
from queues.models import Notification, Pass, Queue, QueueEvent


class ReadOnlyAdmin(admin.ModelAdmin):
    """To be looked at: these rows are written by the monitor and the outbox."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Refuse."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        """Refuse."""
        return False


class QueueForm(forms.ModelForm):
    """What operators change of a queue, checked as it is wherever else they change it."""

    def clean(self) -> dict[str, Any]:
        """Refuse limits by which it would be deleted before anybody is warned."""
        cleaned = super().clean() or self.cleaned_data
        by_hand.check_limits(self.instance.pulse_user, cleaned.get("warn_length"), cleaned.get("max_length"))
        return cleaned


@admin.register(Queue)
class QueueAdmin(ReadOnlyAdmin):
    """Queues. Their thresholds and the unbounded flag are the operators'; all else is what was seen."""

    form = QueueForm
    list_display = ["name", "vhost", "state", "ready", "unacknowledged", "pulse_user", "unbounded"]
    list_filter = ["state", "unbounded", "vhost", "type"]
    list_select_related = ["pulse_user"]
    search_fields = ["name"]
    fields = [
        "name", "vhost", "pulse_user", "state", "ready", "unacknowledged", "unbounded", "warn_length", "max_length",
        "type", "durable", "auto_delete", "exclusive", "registered", "node", "first_seen", "last_seen",
    ]  # fmt: skip

    def save_model(self, request: HttpRequest, obj: Queue, form: Any, change: bool) -> None:
        """Set the limits, and nothing else: a pass may have written the rest in the meantime."""
        by_hand.set_limits(obj, cast(Owner, request.user), **{name: getattr(obj, name) for name in by_hand.LIMITS})

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

    list_display = ["created", "kind", "recipient", "channel", "state", "held_until", "attempts", "sent_at"]
    list_filter = ["state", "kind"]
    search_fields = ["recipient"]


@admin.register(Pass)
class PassAdmin(LogAdmin):
    """The monitor's reports."""

    list_display = ["at", "queues", "new", "changed", "gone", "warned", "deleted", "kept", "brake_held", "seconds"]
    list_filter = ["brake_held"]
