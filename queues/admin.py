"""The admin pages of queues, their events and archives, passes, the monitor's state, leases and Pulse users.

They call the same functions as the other pages and the API. accounts/admin/base.py has their shared parts.
"""

from collections.abc import Callable
from typing import Any, cast

from django import forms
from django.conf import settings
from django.contrib import admin, messages
from django.db.models import F, Model, Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.defaultfilters import filesizeformat
from django.urls import reverse

from accounts import queue_effects
from accounts.admin.base import (
    Confirmation,
    ReadOnlyAdmin,
    Row,
    chosen_rows,
    confirmation_page,
    count_related,
    current_operator,
    given_confirmation,
    is_confirmed,
)
from accounts.admin.pulse_users import PulseUserAdmin
from accounts.models import Owner, PulseUser, check_thresholds
from accounts.pulse_users import removal
from accounts.pulse_users.each import apply_to_each, report_results
from core.confirmation import ConfirmationRequired
from core.models import Lease
from queues.actions import effects
from queues.actions import single as actions
from queues.archives.outcomes import Removed
from queues.models import Archive, Pass, Queue, QueueEvent, Replay, Watch
from queues.rules import thresholds
from queues.rules.brake import brake_limit
from rabbit.names import readable


class QueueForm(forms.ModelForm):
    """The limits of a queue, with the checks of ``actions``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for field in self.fields.values():
            field.show_hidden_initial = True  # so that only fields changed since the page was shown are set

    def clean(self) -> dict[str, Any]:
        """Refuse a deletion limit below the warning threshold."""
        cleaned = super().clean() or self.cleaned_data
        actions.check_limits(self.instance.pulse_user, cleaned.get("warn_length"), cleaned.get("max_length"))
        return cleaned


class BulkLimitsForm(forms.Form):
    """Limits for several queues. ``actions.set_limits_of_all`` checks them for each queue."""

    warn_length = forms.IntegerField(required=False, label="Warning threshold (messages)")
    max_length = forms.IntegerField(required=False, label="Deletion limit (messages)")

    def clean(self) -> dict[str, Any]:
        """Refuse a deletion limit below the warning threshold."""
        cleaned = super().clean() or self.cleaned_data
        warn, limit = cleaned.get("warn_length"), cleaned.get("max_length")
        if warn is not None and limit is not None:
            check_thresholds(warn, limit)
        return cleaned


class OwnerFilter(admin.SimpleListFilter):
    """Filter queues by their kind of owner. Operators look after the queues without one."""

    title = "owner"
    parameter_name = "owned"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """Return the choices."""
        return [("account", "Pulse user"), ("agents", "owner of agents"), ("nobody", "none")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Queue]) -> QuerySet[Queue]:
        """Return the queues of the chosen kind."""
        conditions = {
            "account": Q(pulse_user__isnull=False),
            "agents": Q(owner__isnull=False),
            "nobody": Q(pulse_user=None, owner=None),
        }
        return queryset.filter(conditions.get(self.value() or "", Q()))


@admin.register(Queue)
class QueueAdmin(ReadOnlyAdmin):
    """Queues. Operators edit the limits; all other fields are as last listed."""

    form = QueueForm
    list_display = [
        "shown_name", "vhost", "state", "length", "shown_consumers", "whose", "warning_threshold", "deletion_limit",
        "unbounded", "last_seen",
    ]  # fmt: skip
    list_filter = [
        "state", "block_reason", "unbounded", OwnerFilter, "registered", "type", "exclusive",
        ("max_length", admin.EmptyFieldListFilter), "vhost",
    ]  # fmt: skip
    list_select_related = ["pulse_user", "owner"]
    search_fields = ["name", "vhost", "pulse_user__username", "owner__email"]
    fields = [
        "shown_name", "vhost", "pulse_user", "owner", "state", "length", "ready", "unacknowledged", "shown_consumers",
        "unbounded", "warn_length", "max_length", "warning_threshold", "deletion_limit", "type", "durable",
        "auto_delete", "exclusive", "registered", "node", "first_seen",
        "last_seen", "unattended_since", "delete_sent_at", "block_reason",
    ]  # fmt: skip
    actions = ["delete_on_broker", "purge", "set_limits", "make_unbounded", "make_bounded"]

    def has_change_permission(self, request: HttpRequest, obj: object = None) -> bool:
        """Apply the model's permissions, unlike ``ReadOnly``."""
        return admin.ModelAdmin.has_change_permission(self, request, obj)

    @admin.display(description="name", ordering="name")
    def shown_name(self, queue: Queue) -> str:
        """Return the readable name."""
        return readable(queue.name)

    @admin.display(description="messages", ordering=F("ready") + F("unacknowledged"))
    def length(self, queue: Queue) -> str:
        """Return the last listed length."""
        return _or_unknown(queue.length)

    @admin.display(description="consumers", ordering="consumers")
    def shown_consumers(self, queue: Queue) -> str:
        """Return the last counted number of consumers."""
        return _or_unknown(queue.consumers)

    @admin.display(description="effective warning threshold", ordering="warn_length")
    def warning_threshold(self, queue: Queue) -> str:
        """Return the warning threshold that applies."""
        return f"{thresholds.of_queue(queue).warn:,}"

    @admin.display(description="effective deletion limit", ordering="max_length")
    def deletion_limit(self, queue: Queue) -> str:
        """Return the deletion limit that applies."""
        return "none" if thresholds.is_spared(queue) else f"{thresholds.of_queue(queue).max:,}"

    @admin.display(description="owner", ordering="pulse_user__username")
    def whose(self, queue: Queue) -> str:
        """Return the queue's Pulse user, or the owner whose agents registered it."""
        return str(queue.pulse_user or queue.owner or "")

    def view_on_site(self, queue: Queue) -> str:
        """Return the path of the queue's page."""
        return reverse("queue", args=[queue.uuid])

    def save_model(self, request: HttpRequest, obj: Queue, form: Any, change: bool) -> None:
        """Set only the changed limits: other fields may have been written in the meantime."""
        limits = {name: form.cleaned_data[name] for name in form.changed_data}
        actions.set_limits(obj, current_operator(request), confirm=given_confirmation(request), **limits)

    def get_readonly_fields(self, request: HttpRequest, obj: Model | None = None) -> list[str]:
        """Return all fields except the limits."""
        return [str(name) for name in self.fields if name not in actions.LIMITS]

    @admin.action(description="Delete the selected queues on the broker", permissions=["change"])
    def delete_on_broker(self, request: HttpRequest, queryset: QuerySet[Queue]) -> HttpResponse | None:
        """Delete the queues and their messages after confirmation."""
        question = Confirmation(
            "delete_on_broker",
            "Delete these queues on the broker",
            "Their ready messages are archived, within the limits of archives. Everything else is lost.",
            "Delete the queues",
            "Length",
        )
        return self._destroy(request, queryset, question, actions.delete_queue, "deleted")

    @admin.action(description="Purge the selected queues", permissions=["change"])
    def purge(self, request: HttpRequest, queryset: QuerySet[Queue]) -> HttpResponse | None:
        """Purge the ready messages after confirmation."""
        question = Confirmation(
            "purge",
            "Purge these queues",
            "Their ready messages are archived, within the limits of archives, and deleted. Unacknowledged messages "
            "stay.",
            "Purge the queues",
            "Length",
        )
        return self._destroy(request, queryset, question, actions.purge_queue, "purged")

    def _destroy(
        self,
        request: HttpRequest,
        queryset: QuerySet[Queue],
        question: Confirmation,
        destroy: Callable[[Queue, Owner], Removed],
        done: str,
    ) -> HttpResponse | None:
        queues = list(chosen_rows(self, request, queryset).exclude(state=Queue.State.GONE))
        if not queues:
            self.message_user(request, "None of these queues is on the broker any more.", messages.WARNING)
        elif refused := brake_refusal(len(queues)):
            self.message_user(request, refused, messages.ERROR)
        elif not is_confirmed(request):
            return confirmation_page(self, request, question, queues, _with_length)
        else:
            apply_to_each(
                request,
                queues,
                lambda queue: destroy(queue, current_operator(request)),
                done,
            )
        return None

    @admin.action(description="Set the limits of the selected queues", permissions=["change"])
    def set_limits(self, request: HttpRequest, queryset: QuerySet[Queue]) -> HttpResponse | None:
        """Set the same limits for the queues."""
        form = BulkLimitsForm(request.POST if is_confirmed(request) else None)
        queues = chosen_rows(self, request, queryset)
        required = None
        if form.is_valid():
            required = self._limit(request, queues, "updated", **form.cleaned_data)
            if required is None:
                return None
        question = Confirmation(
            "set_limits",
            "Set the limits of these queues",
            "These replace the queues' own limits. Leave a field empty to use the Pulse user's limit, or the default.",
            "Set limits",
            "Length now",
            is_dangerous=False,
        )
        return confirmation_page(self, request, question, list(queues), _with_length, form, required)

    @admin.action(description="Mark as unbounded: warned about, never deleted", permissions=["change"])
    def make_unbounded(self, request: HttpRequest, queryset: QuerySet[Queue]) -> None:
        """Mark the queues as unbounded."""
        self._limit(request, queryset, "unbounded from now on", unbounded=True)

    @admin.action(description="Mark as bounded again", permissions=["change"])
    def make_bounded(self, request: HttpRequest, queryset: QuerySet[Queue]) -> HttpResponse | None:
        """Mark the queues as bounded. If the next pass would delete some, ask first."""
        queues = chosen_rows(self, request, queryset)
        required = self._limit(request, queues, "bounded again", unbounded=False)
        if required is None:
            return None
        question = Confirmation(
            "make_bounded",
            "Mark these queues as bounded again",
            "The next pass deletes those that are over their deletion limit, unless the brake blocks that.",
            "Mark as bounded",
            "Length now",
        )
        return confirmation_page(self, request, question, list(queues), _with_length, required=required)

    def _limit(
        self, request: HttpRequest, queues: QuerySet[Queue], done: str, **limits: Any
    ) -> ConfirmationRequired | None:
        """Set these limits, and report the results. If it must be confirmed, change nothing and return the question."""
        chosen_queues = list(queues)
        confirm = given_confirmation(request)
        try:
            refused = actions.set_limits_of_all(chosen_queues, current_operator(request), limits, confirm)
        except ConfirmationRequired as required:
            return required
        succeeded = [str(queue) for queue in chosen_queues if queue.pk not in refused]
        report_results(
            request,
            succeeded,
            done,
            [(str(queue), refused[queue.pk]) for queue in chosen_queues if queue.pk in refused],
        )
        return None


def brake_refusal(queues: int) -> str:
    """Return why this many queues cannot be removed together; empty: they can. The limit is that of a pass."""
    limit = brake_limit(settings.GUARDIAN_DELETE_BRAKE, Queue.objects.exclude(state=Queue.State.GONE).count())
    if queues <= limit:
        return ""
    return (
        f"These are {queues:,} queues, and at most {limit:,} may be deleted at once (GUARDIAN_DELETE_BRAKE, or a "
        "quarter of all). Nothing was done. Select fewer."
    )


def _with_length(queue: Queue) -> Row:
    return Row(f"{readable(queue.name)} in {readable(queue.vhost)}", _or_unknown(queue.length))


def _or_unknown(number: int | None) -> str:
    return "unknown" if number is None else f"{number:,}"


@admin.register(QueueEvent)
class QueueEventAdmin(ReadOnlyAdmin):
    """Events of queues."""

    list_display = ["at", "kind", "shown_name", "vhost", "by"]
    exclude = ["queue_name"]
    readonly_fields = ["shown_name"]
    list_filter = ["kind", "at", "vhost"]
    list_select_related = ["by"]
    search_fields = ["queue_name", "vhost", "by__email"]

    @admin.display(description="queue", ordering="queue_name")
    def shown_name(self, event: QueueEvent) -> str:
        """Return the queue's readable name."""
        return readable(event.queue_name)


@admin.register(Archive)
class ArchiveAdmin(ReadOnlyAdmin):
    """Archives, without their messages: pages and API show these, and record who looks at them."""

    list_display = [
        "created", "shown_name", "vhost", "pulse_user", "reason", "state", "messages", "dropped", "held", "size",
        "expires",
    ]  # fmt: skip
    fields = [
        "uuid", "shown_name", "vhost", "queue", "pulse_user", "reason", "by", "state", "error", "messages",
        "dropped", "held", "bytes", "stored_bytes", "created", "expires",
    ]  # fmt: skip
    list_filter = ["state", "reason", "created", "vhost"]
    list_select_related = ["pulse_user"]
    search_fields = ["queue_name", "vhost", "pulse_user__username", "uuid", "error"]

    @admin.display(description="queue", ordering="queue_name")
    def shown_name(self, archive: Archive) -> str:
        """Return the queue's readable name."""
        return readable(archive.queue_name)

    @admin.display(ordering="stored_bytes")
    def size(self, archive: Archive) -> str:
        """Return the size in the database."""
        return filesizeformat(archive.stored_bytes)


@admin.register(Replay)
class ReplayAdmin(ReadOnlyAdmin):
    """Replays of archives, to read. Owners of the archive stop them on its page or over the API."""

    list_display = ["created", "target", "archive", "state", "sent", "total", "repeated", "rate", "by", "finished"]
    fields = [
        "uuid", "archive", "target", "first", "last", "rate", "state", "sent", "total", "in_flight", "repeated",
        "error", "by", "created", "finished",
    ]  # fmt: skip
    list_filter = ["state", "created"]
    list_select_related = ["archive", "by"]
    search_fields = ["to_queue", "to_exchange", "by__email", "error"]

    @admin.display(description="to")
    def target(self, replay: Replay) -> str:
        """Return the readable name of the queue or exchange."""
        return readable(replay.to_queue or replay.to_exchange)


@admin.register(Pass)
class PassAdmin(ReadOnlyAdmin):
    """The monitor's reports."""

    list_display = [
        "at", "queues", "new", "changed", "gone", "warned", "deleted", "kept", "brake_held", "seconds",
    ]  # fmt: skip
    list_filter = ["brake_held", "at"]


@admin.register(Watch)
class WatchAdmin(ReadOnlyAdmin):
    """The monitor's state. It is read-only, as an edit could lift the brake."""

    list_display = ["__str__", "outage_since", "brake_since", "listed_at"]


@admin.register(Lease)
class LeaseAdmin(ReadOnlyAdmin):
    """Leases. The lease of a killed process expires."""

    list_display = ["name", "holder", "expires_at"]
    search_fields = ["name"]


@admin.register(PulseUser)
class PulseUserWithQueuesAdmin(PulseUserAdmin):
    """Pulse users, with their queues."""

    list_display = [*PulseUserAdmin.list_display[:2], "queues", *PulseUserAdmin.list_display[2:]]
    actions = [*PulseUserAdmin.actions, "remove"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[PulseUser]:
        """Annotate the number of queues."""
        existing = Queue.objects.exclude(state=Queue.State.GONE)
        return super().get_queryset(request).annotate(number_of_queues=count_related(Queue, "pulse_user", existing))

    @admin.display(ordering="number_of_queues")
    def queues(self, pulse_user: PulseUser) -> int:
        """Return the number of queues that exist."""
        return cast("int", pulse_user.number_of_queues)  # type: ignore[attr-defined]

    @admin.action(description="Remove the selected Pulse users from the broker", permissions=["change"])
    def remove(self, request: HttpRequest, queryset: QuerySet[PulseUser]) -> HttpResponse | None:
        """Remove the Pulse users with their queues and exchanges after confirmation."""
        pulse_users = list(chosen_rows(self, request, queryset))
        queues = sum(self.queues(pulse_user) for pulse_user in pulse_users)
        change = queue_effects.removal_of(pulse_users, current_operator(request), given_confirmation(request))
        required = change.question(effects.of_removal(pulse_users))
        if len(pulse_users) > 1 and (refused := brake_refusal(queues)):
            self.message_user(request, refused, messages.ERROR)
        elif required or not is_confirmed(request):
            question = Confirmation(
                "remove",
                "Remove these Pulse users from the broker",
                "Their queues and exchanges are deleted, too, and their connections are closed. This can't be undone.",
                "Remove the Pulse users",
                "Queues, as last listed",
            )
            return confirmation_page(
                self,
                request,
                question,
                pulse_users,
                lambda one: Row(one.username, f"{self.queues(one):,}"),
                required=required,
            )
        else:
            apply_to_each(
                request,
                pulse_users,
                lambda pulse_user: removal.remove_pulse_user(pulse_user, change, current_operator(request)),
                "removed, with queues and exchanges",
                refusals=(removal.RemovalPending, ConfirmationRequired),
            )
        return None
