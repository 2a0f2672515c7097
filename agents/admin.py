"""The admin of offerings, agents, and the subscriptions and queues that they registered."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from django.contrib import admin, messages
from django.contrib.admin.actions import delete_selected
from django.db import transaction
from django.db.models import Model, QuerySet
from django.http import HttpRequest, HttpResponse

from accounts.admin.owners import OwnerAdmin
from accounts.models import Owner
from agents.models import (
    AgentIdentity,
    AgentProcessor,
    AgentService,
    AgentVhost,
    Consumer,
    EventSubscription,
    Offering,
    SubscriptionQueue,
    Sweep,
)
from agents.removal import deletions
from core.admin import AuditedAdmin, ask_again, column, count_related, current_operator, given_confirmation
from core.confirmation import ConfirmableChange, ConfirmationRequired
from queues.actions import effects
from queues.admin import brake_refusal
from queues.models import Queue


class RemovingAdmin(AuditedAdmin):
    """The admin of a model whose rows may have registrations, which are removed from the broker with the row.

    ``queues_below`` maps each model of a queue that is removed with a row to its lookup of that row.
    """

    queues_below: Mapping[type[Model], str]

    def delete_view(
        self, request: HttpRequest, object_id: str, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show what is deleted with a row, and delete it. If queues are deleted, ask once more."""
        try:
            return super().delete_view(request, object_id, extra_context)
        except ConfirmationRequired as required:
            return ask_again(self, request, required)

    def delete_model(self, request: HttpRequest, obj: Model) -> None:
        self._require_confirmed(request, [obj])
        deletions.delete(obj)
        self._tell_what_follows(request)

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> None:
        deletions.delete(queryset)
        self._tell_what_follows(request)

    @admin.action(description="Delete the selected %(verbose_name_plural)s", permissions=["delete"])
    def delete_selected(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse | None:
        """Delete the selected rows after confirmation, if the brake allows that many queues."""
        keys = list(queryset.values_list("pk", flat=True))
        if len(keys) > 1 and (refused := brake_refusal(self._queues_of(keys))):
            self.message_user(request, refused, messages.ERROR)
            return None
        if "post" in request.POST:
            try:
                self._require_confirmed(request, list(queryset))
            except ConfirmationRequired as required:
                return ask_again(self, request, required)
        return cast("HttpResponse | None", delete_selected(self, request, queryset))

    def queues_deleted_with(self, rows: Sequence[int]) -> QuerySet[Queue]:
        return deletions.queues_deleted_with(rows, self.queues_below)

    def _require_confirmed(self, request: HttpRequest, rows: Sequence[Model]) -> None:
        deletion = ConfirmableChange(current_operator(request), "delete", rows, {}, given_confirmation(request))
        deletion.require_confirmed(effects.of_deletion(self.queues_deleted_with([row.pk for row in rows])))

    def _queues_of(self, rows: Sequence[int]) -> int:
        return sum(
            model._default_manager.filter(**{f"{lookup}__in": rows}).count()
            for model, lookup in self.queues_below.items()
        )

    def _tell_what_follows(self, request: HttpRequest) -> None:
        what = "Guardian removes its queues and logins from the broker. 'Removals' lists what is still pending."
        self.message_user(request, what, messages.INFO)


@admin.register(Owner)
class OwnerWithAgentsAdmin(RemovingAdmin, OwnerAdmin):
    """Owners, with the registrations of their agents."""

    queues_below = {SubscriptionQueue: "subscription__owner", Consumer: "identity__owner"}

    def queues_deleted_with(self, rows: Sequence[int]) -> QuerySet[Queue]:
        """Return all queues of the owners' vhosts, which are deleted with them."""
        return Queue.objects.filter(owner__in=rows)

    def delete_model(self, request: HttpRequest, obj: Model) -> None:
        """Delete an owner, unless the owner got a Pulse user since the permission was checked."""
        with transaction.atomic():
            deletions.require_no_pulse_users(cast("Owner", obj))
            super().delete_model(request, obj)


@admin.register(Offering)
class OfferingAdmin(RemovingAdmin):
    """Offerings: who may subscribe to their events, and who may publish them.

    Deleting an offering also deletes the agents' identities and queues for it, here and on the broker.
    """

    queues_below = deletions.OF_OFFERING
    allowed = {"add", "change", "delete"}
    actions = ["delete_selected"]
    list_display = ["name", "uuid", "agents", "queues", "created"]
    list_filter = ["created"]
    search_fields = ["name", "uuid", "members__email", "publishers__email"]
    autocomplete_fields = ["members", "publishers"]
    fields = ["name", "uuid", "members", "publishers", "created"]
    readonly_fields = ["uuid", "created"]
    agents = column("number_of_agents", "agents")
    queues = column("number_of_queues", "subscription queues")

    def get_queryset(self, request: HttpRequest) -> QuerySet[Offering]:
        offerings: QuerySet[Offering] = super().get_queryset(request)
        return offerings.annotate(
            number_of_agents=count_related(AgentIdentity, "offering"),
            number_of_queues=count_related(SubscriptionQueue, "offering"),
        )


class RegisteredAdmin(RemovingAdmin):
    """The admin of rows that agents registered. Deleting a row removes its queues and logins from the broker."""

    allowed = {"delete"}
    actions = ["delete_selected"]


@admin.register(AgentIdentity)
class AgentIdentityAdmin(RegisteredAdmin):
    """Agents' identities. The configuration is not shown, because it may contain secrets."""

    queues_below = {SubscriptionQueue: "subscription__identity", Consumer: "identity"}
    list_display = ["name", "owner", "offering", "version", "last_restarted", "created"]
    list_filter = ["version", "created"]
    list_select_related = ["owner", "offering"]
    search_fields = ["name", "owner__email", "offering__name"]
    fields = [
        "uuid", "name", "owner", "offering", "version", "dependencies", "config_file_path", "last_restarted",
        "created", "modified",
    ]  # fmt: skip


@admin.register(AgentService)
class AgentServiceAdmin(AuditedAdmin):
    """The services that agents report."""

    allowed = {"delete"}
    list_display = ["name", "identity", "owner", "mode", "state", "created", "modified"]
    list_filter = ["state", "modified"]
    list_select_related = ["identity__owner"]
    search_fields = ["name", "identity__name", "identity__owner__email"]
    owner = column("identity__owner__email", "owner")


@admin.register(AgentProcessor)
class AgentProcessorAdmin(AuditedAdmin):
    """The processors of agents' services."""

    allowed = {"delete"}
    list_display = ["name", "service", "owner", "backend_type", "backend_version", "last_run"]
    list_filter = ["backend_type", "last_run"]
    list_select_related = ["service__identity__owner"]
    search_fields = ["name", "backend_type", "service__name", "service__identity__name"]
    owner = column("service__identity__owner__email", "owner")


@admin.register(EventSubscription)
class EventSubscriptionAdmin(RegisteredAdmin):
    """Event subscriptions. The UUID is the name of the RabbitMQ user."""

    queues_below = {SubscriptionQueue: "subscription"}
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

    queues_below = {SubscriptionQueue: "pk"}
    list_display = ["queue_name", "offering", "object_type", "state", "owner", "created"]
    list_filter = ["state", "object_type", "created"]
    list_select_related = ["offering", "subscription__owner"]
    search_fields = ["queue_name", "vhost", "offering__name", "subscription__owner__email"]
    fields = [
        "uuid", "subscription", "offering", "object_type", "vhost", "queue_name", "state", "last_delivered_at",
        "last_error", "last_error_at", "created",
    ]  # fmt: skip
    owner = column("subscription__owner__email", "owner")


@admin.register(Consumer)
class ConsumerAdmin(RegisteredAdmin):
    """Agents' consumers: one queue for everything."""

    queues_below = {Consumer: "pk"}
    list_display = ["queue_name", "identity", "owner", "object_types", "state", "password_set", "created"]
    list_filter = ["state", "password_set", "created"]
    list_select_related = ["identity__owner"]
    search_fields = ["queue_name", "rmq_username", "vhost", "identity__name", "identity__owner__email"]
    fields = [
        "uuid", "identity", "object_types", "rmq_username", "vhost", "queue_name", "state", "last_delivered_at",
        "last_error", "last_error_at", "password_set", "created", "modified",
    ]  # fmt: skip
    owner = column("identity__owner__email", "owner")


@admin.register(AgentVhost)
class AgentVhostAdmin(AuditedAdmin):
    """The vhosts of owners' agents. A vhost is deleted with its owner."""

    allowed = {"cascade"}
    list_display = ["name", "owner", "ready", "created"]
    list_filter = ["ready"]
    list_select_related = ["owner"]
    search_fields = ["name", "owner__email"]


@admin.register(Sweep)
class SweepAdmin(AuditedAdmin):
    """The reports of sweeps and clean-ups."""

    list_display = [
        "at", "kind", "seen", "found", "deleted", "kept", "repaired", "subscriptions", "tokens", "brake_held",
        "seconds",
    ]  # fmt: skip
    list_filter = ["kind", "brake_held"]
