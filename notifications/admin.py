"""The admin pages of the outbox and the channels."""

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest

from core.admin import AuditedAdmin
from core.formatting import counted
from notifications import sending
from notifications.models import Channel, Notification
from rabbit.names import readable


@admin.register(Notification)
class NotificationAdmin(AuditedAdmin):
    list_display = [
        "created", "kind", "recipient", "channel", "about_what", "state", "deferred_until", "attempts", "due_at",
        "sent_at", "last_error",
    ]  # fmt: skip
    list_filter = ["state", "kind", "created"]
    search_fields = ["recipient", "facts__queue", "channel", "last_error"]
    actions = ["send_again"]

    @admin.display(description="about")
    def about_what(self, notification: Notification) -> str:
        return readable(notification.facts.get("queue") or notification.about)

    @admin.action(description="Send the selected given-up notifications again", permissions=["act"])
    def send_again(self, request: HttpRequest, queryset: QuerySet[Notification]) -> None:
        """Send failed notifications as if they were new."""
        selected = list(queryset.values_list("pk", flat=True))
        sent = sending.send_again(selected)
        if sent:
            text = f"{counted(sent, 'notification')} will be sent again within half a minute."
            self.message_user(request, text, messages.SUCCESS)
        if left := len(selected) - sent:
            why = "they were not given up, or a later message to the same recipient replaces them"
            self.message_user(request, f"{left:,} will not be sent again: {why}.", messages.WARNING)


@admin.register(Channel)
class ChannelAdmin(AuditedAdmin):
    """Channels. Their addresses are secrets, and not shown."""

    allowed = {"delete"}
    list_display = ["name", "owner", "service", "created", "last_sent_at", "last_error"]
    list_filter = ["service", ("last_error", admin.EmptyFieldListFilter), "created"]
    list_select_related = ["owner"]
    search_fields = ["name", "owner__email", "service"]
    fields = ["uuid", "name", "owner", "service", "created", "last_sent_at", "last_error"]
