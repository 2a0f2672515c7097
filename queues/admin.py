"""The admin pages of queues, their events and archives, passes, the monitor's state and Pulse users.

Their actions call the same functions as the other pages and the API.
"""

from collections.abc import Sequence

from django.conf import settings
from django.contrib import admin
from django.db.models import F, QuerySet
from django.http import HttpRequest
from django.template.defaultfilters import filesizeformat
from django.urls import reverse

from accounts import queue_effects
from accounts.admin.pulse_users import PulseUserAdmin
from accounts.models import PulseUser
from accounts.pulse_users import removal
from core.admin import (
    AuditedAdmin,
    Confirmation,
    broker_name,
    column,
    confirmed_action,
    count_related,
    current_operator,
    given_confirmation,
)
from core.confirmation import ConfirmableChange, ConfirmationRequired
from core.each import apply_to_each
from queues.actions import effects
from queues.models import Archive, Move, Pass, Queue, QueueEvent, Replay, Watch
from queues.rules import thresholds
from queues.rules.brake import brake_limit
from rabbit.names import readable


def brake_refusal(queues: int) -> str:
    """Return why this many queues cannot be removed together; empty: they can. The limit is that of a pass."""
    limit = brake_limit(settings.GUARDIAN_DELETE_BRAKE, Queue.objects.exclude(state=Queue.State.GONE).count())
    if queues <= limit:
        return ""
    return (
        f"These are {queues:,} queues, and at most {limit:,} may be deleted at once (GUARDIAN_DELETE_BRAKE, or a "
        "quarter of all). Nothing was done. Select fewer."
    )


def _or_unknown(number: int | None) -> str:
    return "unknown" if number is None else f"{number:,}"


@admin.register(Queue)
class QueueAdmin(AuditedAdmin):
    """Queues as last listed. The site's list of queues has the actions."""

    list_display = [
        "shown_name", "vhost", "state", "length", "deletion_limit", "shown_consumers", "whose", "last_seen",
    ]  # fmt: skip
    list_filter = [
        "state", "block_reason", "unbounded", ("pulse_user", admin.EmptyFieldListFilter),
        ("owner", admin.EmptyFieldListFilter), "registered", "type", "exclusive",
        ("max_length", admin.EmptyFieldListFilter), "vhost",
    ]  # fmt: skip
    list_select_related = ["pulse_user", "owner"]
    search_fields = ["name", "vhost", "pulse_user__username", "owner__email"]
    fields = [
        "shown_name", "vhost", "pulse_user", "owner", "state", "length", "ready", "unacknowledged", "shown_consumers",
        "unbounded", "warn_length", "max_length", "limits_until", "warning_threshold", "deletion_limit", "type",
        "durable", "auto_delete", "exclusive", "registered", "node", "first_seen", "last_seen",
        "unattended_since", "delete_sent_at", "block_reason",
    ]  # fmt: skip

    shown_name = broker_name("name", "name")
    length = column("length", "messages", _or_unknown, F("ready") + F("unacknowledged"))
    shown_consumers = column("consumers", "consumers", _or_unknown)

    @admin.display(description="effective warning threshold", ordering="warn_length")
    def warning_threshold(self, queue: Queue) -> str:
        return f"{thresholds.of_queue(queue).warn:,}"

    @admin.display(description="effective limit", ordering="max_length")
    def deletion_limit(self, queue: Queue) -> str:
        return f"{thresholds.of_queue(queue).max:,}" if thresholds.has_limit(queue) else "none"

    @admin.display(description="owner", ordering="pulse_user__username")
    def whose(self, queue: Queue) -> str:
        """Return the queue's Pulse user, or the owner whose agents registered it."""
        return str(queue.pulse_user or queue.owner or "")

    def view_on_site(self, queue: Queue) -> str:
        return reverse("queue", args=[queue.uuid])


@admin.register(QueueEvent)
class QueueEventAdmin(AuditedAdmin):
    """Events of queues."""

    list_display = ["at", "kind", "shown_name", "vhost", "by"]
    exclude = ["queue_name"]
    readonly_fields = ["shown_name"]
    list_filter = ["kind", "at", "vhost"]
    list_select_related = ["by"]
    search_fields = ["queue_name", "vhost", "by__email"]

    shown_name = broker_name("queue_name", "queue")


@admin.register(Archive)
class ArchiveAdmin(AuditedAdmin):
    """Archives, without their messages: pages and API show these, and record who looks at them."""

    list_display = [
        "created", "shown_name", "vhost", "pulse_user", "reason", "state", "messages", "dropped", "held", "size",
        "expires",
    ]  # fmt: skip
    fields = [
        "uuid", "shown_name", "vhost", "queue", "pulse_user", "reason", "by", "state", "error", "messages",
        "dropped", "held", "bytes", "stored_bytes", "type", "durable", "auto_delete", "arguments", "bindings",
        "created", "expires",
    ]  # fmt: skip
    list_filter = ["state", "reason", "created", "vhost"]
    list_select_related = ["pulse_user"]
    search_fields = ["queue_name", "vhost", "pulse_user__username", "uuid", "error"]

    shown_name = broker_name("queue_name", "queue")
    size = column("stored_bytes", "size", filesizeformat)


@admin.register(Replay)
class ReplayAdmin(AuditedAdmin):
    """Replays of archives, to read. Owners of the archive stop them on its page or over the API."""

    list_display = ["created", "target", "archive", "state", "sent", "total", "repeated", "rate", "by", "finished"]
    fields = [
        "uuid", "archive", "target", "first", "last", "rate", "state", "sent", "total", "in_flight", "repeated",
        "error", "restore", "declared_at", "by", "created", "finished",
    ]  # fmt: skip
    list_filter = ["state", "created"]
    list_select_related = ["archive", "by"]
    search_fields = ["to_queue", "to_exchange", "by__email", "error"]

    @admin.display(description="to")
    def target(self, replay: Replay) -> str:
        return readable(replay.to_queue or replay.to_exchange)


@admin.register(Move)
class MoveAdmin(AuditedAdmin):
    """Moves of messages, to read. Owners of the queue stop them on its page or over the API."""

    list_display = ["created", "queue", "target", "state", "sent", "total", "repeated", "by", "finished"]
    fields = [
        "uuid", "queue", "target", "routing_key", "groups", "is_copy", "total", "state", "sent", "kept", "in_flight",
        "repeated", "error", "by", "created", "finished",
    ]  # fmt: skip
    list_filter = ["state", "to_origin", "is_copy", "created"]
    list_select_related = ["queue", "by"]
    search_fields = ["queue__name", "to_queue", "to_exchange", "by__email", "error"]

    @admin.display(description="to")
    def target(self, move: Move) -> str:
        return readable(move.to_queue or move.to_exchange) or "where they died"


@admin.register(Pass)
class PassAdmin(AuditedAdmin):
    """The monitor's reports."""

    list_display = [
        "at", "queues", "new", "changed", "gone", "warned", "deleted", "kept", "brake_held", "lasted",
    ]  # fmt: skip
    list_filter = ["brake_held", "at"]

    lasted = column("seconds", "duration", "{:.2f} s".format)


@admin.register(Watch)
class WatchAdmin(AuditedAdmin):
    """The monitor's state. It is read-only, as an edit could lift the brake."""

    list_display = ["__str__", "outage_since", "brake_since", "listed_at"]


@admin.register(PulseUser)
class PulseUserWithQueuesAdmin(PulseUserAdmin):
    """Pulse users, with their queues."""

    list_display = [*PulseUserAdmin.list_display[:2], "queues", *PulseUserAdmin.list_display[2:]]
    actions = [*PulseUserAdmin.actions, "remove"]
    queues = column("number_of_queues", "queues")

    def get_queryset(self, request: HttpRequest) -> QuerySet[PulseUser]:
        existing = Queue.objects.exclude(state=Queue.State.GONE)
        return super().get_queryset(request).annotate(number_of_queues=count_related(Queue, "pulse_user", existing))

    @confirmed_action(
        "Remove the selected Pulse users from the broker",
        Confirmation(
            title="Remove these Pulse users from the broker",
            text="Their queues and exchanges are deleted, too, and their connections are closed. This can't be undone.",
            button="Remove the Pulse users",
            column="Queues, as last listed",
            about=lambda pulse_user: f"{pulse_user.number_of_queues:,}",
            refuse=lambda found: brake_refusal(sum(one.number_of_queues for one in found)) if len(found) > 1 else "",
            effect=lambda request, found: _removal(request, found).question(effects.of_removal(found)),
        ),
    )
    def remove(self, request: HttpRequest, pulse_users: list[PulseUser]) -> None:
        change = _removal(request, pulse_users)
        apply_to_each(
            request,
            pulse_users,
            lambda pulse_user: removal.remove_pulse_user(pulse_user, change, current_operator(request)),
            "removed, with queues and exchanges",
            refusals=(removal.RemovalPending, ConfirmationRequired),
        )


def _removal(request: HttpRequest, pulse_users: Sequence[PulseUser]) -> ConfirmableChange:
    return queue_effects.removal_of(pulse_users, current_operator(request), given_confirmation(request))
