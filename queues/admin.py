from typing import Any, cast
from uuid import UUID

from django import forms
from django.contrib import admin
from django.db.models import Count, Model, OuterRef, Q, QuerySet, Subquery
from django.db.models.functions import Coalesce
from django.http import HttpRequest

from accounts.admin import GoesWithItsOwner, OwnerAdmin
from accounts.models import Owner
from queues import by_hand, removals
from queues.models import (
    AgentIdentity,
    AgentVhost,
    Consumer,
    EventSubscription,
    Notification,
    Offering,
    Pass,
    Queue,
    QueueEvent,
    Removal,
    SubscriptionQueue,
    Sweep,
)


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


# Agents


class RemovingAdmin(admin.ModelAdmin):
    """What may have agents' registrations below it, which go from the broker with it."""

    def delete_model(self, request: HttpRequest, obj: Model) -> None:
        """Remove it."""
        removals.delete(obj)

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> None:
        """Remove them."""
        removals.delete(queryset)


admin.site.unregister(Owner)


@admin.register(Owner)
class OwnerWithAgentsAdmin(RemovingAdmin, OwnerAdmin):
    """Owners, with what their agents registered."""


@admin.register(Offering)
class OfferingAdmin(RemovingAdmin):
    """Offerings: who may subscribe to their events, and who may publish them.

    Deleting one takes the agents' identities and queues for it along, from the broker too.
    """

    list_display = ["name", "uuid", "agents", "queues", "created"]
    search_fields = ["name", "uuid", "members__email", "publishers__email"]
    autocomplete_fields = ["members", "publishers"]
    fields = ["name", "uuid", "members", "publishers", "created"]
    readonly_fields = ["uuid", "created"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[Offering]:
        """Count what agents have of each, without a statement for each."""
        offerings: QuerySet[Offering] = super().get_queryset(request)
        return offerings.annotate(
            number_of_agents=_number(AgentIdentity, "offering"),
            number_of_queues=_number(SubscriptionQueue, "offering"),
        )

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Offering], search_term: str
    ) -> tuple[QuerySet[Offering], bool]:
        """Find one by its UUID in any of its forms, too."""
        found, may_have_duplicates = super().get_search_results(request, queryset, search_term)
        return _or_by_uuid(found, queryset, search_term), may_have_duplicates

    @admin.display(description="agents")
    def agents(self, offering: Offering) -> int:
        """Return how many agents introduced themselves for it."""
        return cast(int, offering.number_of_agents)  # type: ignore[attr-defined]

    @admin.display(description="subscription queues")
    def queues(self, offering: Offering) -> int:
        """Return how many subscriptions have a queue for it."""
        return cast(int, offering.number_of_queues)  # type: ignore[attr-defined]


class RegisteredAdmin(RemovingAdmin, LogAdmin):
    """What agents registered. It may be deleted, and what it stands for on the broker goes with it."""

    def has_delete_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        """Allow what the model's permissions allow."""
        return admin.ModelAdmin.has_delete_permission(self, request, obj)

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Find one by its UUID in any of its forms, too."""
        found, may_have_duplicates = super().get_search_results(request, queryset, search_term)
        return _or_by_uuid(found, queryset, search_term), may_have_duplicates


@admin.register(AgentIdentity)
class AgentIdentityAdmin(RegisteredAdmin):
    """Agents. Their configuration may have secrets in it, and isn't shown."""

    list_display = ["name", "owner", "offering", "version", "last_restarted", "created"]
    list_filter = ["version", "created"]
    list_select_related = ["owner", "offering"]
    search_fields = ["name", "owner__email", "offering__name"]
    fields = [
        "uuid", "name", "owner", "offering", "version", "dependencies", "config_file_path", "last_restarted",
        "created", "modified",
    ]  # fmt: skip


@admin.register(EventSubscription)
class EventSubscriptionAdmin(RegisteredAdmin):
    """Event subscriptions. The UUID is the name of the RabbitMQ user."""

    list_display = ["uuid", "owner", "identity", "object_type", "password_set", "source_ip", "created"]
    list_filter = ["object_type", "password_set", "created"]
    list_select_related = ["owner", "identity"]
    search_fields = ["owner__email", "identity__name", "description"]
    fields = [
        "uuid", "owner", "identity", "object_type", "description", "observable_objects", "source_ip", "password_set",
        "created", "modified",
    ]  # fmt: skip


@admin.register(SubscriptionQueue)
class SubscriptionQueueAdmin(RegisteredAdmin):
    """The queues of event subscriptions."""

    list_display = ["queue_name", "offering", "object_type", "state", "owner", "created"]
    list_filter = ["state", "object_type", "created"]
    list_select_related = ["offering", "subscription__owner"]
    search_fields = ["queue_name", "vhost", "offering__name", "subscription__owner__email"]
    fields = ["uuid", "subscription", "offering", "object_type", "vhost", "queue_name", "state", "created"]

    @admin.display(ordering="subscription__owner__email")
    def owner(self, queue: SubscriptionQueue) -> str:
        """Return whose it is."""
        return queue.subscription.owner.email


@admin.register(Consumer)
class ConsumerAdmin(RegisteredAdmin):
    """Agents' consumers: one queue for everything."""

    list_display = ["queue_name", "identity", "owner", "object_types", "state", "password_set", "created"]
    list_filter = ["state", "password_set", "created"]
    list_select_related = ["identity__owner"]
    search_fields = ["queue_name", "rmq_username", "vhost", "identity__name", "identity__owner__email"]
    fields = [
        "uuid", "identity", "object_types", "rmq_username", "vhost", "queue_name", "state", "password_set",
        "created", "modified",
    ]  # fmt: skip

    @admin.display(ordering="identity__owner__email")
    def owner(self, consumer: Consumer) -> str:
        """Return whose it is."""
        return consumer.identity.owner.email


@admin.register(AgentVhost)
class AgentVhostAdmin(GoesWithItsOwner):
    """The vhosts of owners' agents. One goes with its owner."""

    list_display = ["name", "owner", "ready", "created"]
    list_filter = ["ready"]
    list_select_related = ["owner"]
    search_fields = ["name", "owner__email"]


@admin.register(Removal)
class RemovalAdmin(LogAdmin):
    """What is still to go from the broker. What stays here for long says why in its last error."""

    list_display = ["name", "kind", "vhost", "created", "due_at", "attempts", "last_error"]
    list_filter = ["kind", "created"]
    search_fields = ["name", "vhost", "last_error"]


@admin.register(Sweep)
class SweepAdmin(LogAdmin):
    """The reports of the two clean-ups."""

    list_display = [
        "at", "kind", "seen", "found", "deleted", "kept", "repaired", "subscriptions", "tokens", "brake_held",
        "seconds",
    ]  # fmt: skip
    list_filter = ["kind", "brake_held"]


def _number(model: type[Model], by: str) -> Coalesce:
    """Count the rows of a model that point here by this key."""
    rows = model._default_manager.filter(**{by: OuterRef("pk")}).order_by().values(by)
    return Coalesce(Subquery(rows.annotate(number=Count("pk")).values("number")), 0)


def _or_by_uuid(found: QuerySet[Any], queryset: QuerySet[Any], search: str) -> QuerySet[Any]:
    try:
        uuid = UUID(search.strip())
    except ValueError:
        return found
    return queryset.filter(Q(uuid=uuid) | Q(pk__in=found.values("pk")))
