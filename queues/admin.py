"""Queues, the outbox, the monitor's reports and the agents in the administration.

What it does is done by the functions that pages and the API call; accounts/admin.py has what the pages share.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast
from uuid import UUID

from django import forms
from django.conf import settings
from django.contrib import admin, messages
from django.contrib.admin.actions import delete_selected
from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.db.models import F, Model, Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.urls import reverse

from accounts import removal, vouching
from accounts.admin import (
    Audited,
    GoesWithItsOwner,
    OwnerAdmin,
    PulseUserAdmin,
    Question,
    ReadOnly,
    Removable,
    Row,
    ask,
    chosen,
    count,
    do_to_each,
    is_agreed,
    tell_each,
    visitor,
)
from accounts.models import Owner, PulseUser, check_thresholds
from core.models import Lease
from queues import by_hand, removals
from queues.models import (
    AgentIdentity,
    AgentVhost,
    Consumer,
    EventSubscription,
    Offering,
    Pass,
    Queue,
    QueueEvent,
    Removal,
    SubscriptionQueue,
    Sweep,
    Watch,
)
from queues.thresholds import brake_limit
from rabbit.names import readable


class QueueForm(forms.ModelForm):
    """What operators change of a queue, checked as it is wherever else they change it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for field in self.fields.values():
            field.show_hidden_initial = True  # what was shown, so that what wasn't changed isn't set

    def clean(self) -> dict[str, Any]:
        """Refuse limits by which it would be deleted before anybody is warned."""
        cleaned = super().clean() or self.cleaned_data
        by_hand.check_limits(self.instance.pulse_user, cleaned.get("warn_length"), cleaned.get("max_length"))
        return cleaned


class LengthsForm(forms.Form):
    """The limits that several queues are given. What each can have is said where they are set."""

    warn_length = forms.IntegerField(required=False, label="Warned at (messages)")
    max_length = forms.IntegerField(required=False, label="Deleted past (messages)")

    def clean(self) -> dict[str, Any]:
        """Refuse two that no queue can have."""
        cleaned = super().clean() or self.cleaned_data
        warn, most = cleaned.get("warn_length"), cleaned.get("max_length")
        if warn is not None and most is not None:
            check_thresholds(warn, most)
        return cleaned


class WhoseFilter(admin.SimpleListFilter):
    """Whose queues they are: what nobody owns is the operators' own to look after."""

    title = "owner"
    parameter_name = "owned"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """Return what can be chosen."""
        return [("account", "a RabbitMQ account's"), ("agents", "an owner's agents'"), ("nobody", "nobody's")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Queue]) -> QuerySet[Queue]:
        """Return the queues that were chosen."""
        conditions = {
            "account": Q(pulse_user__isnull=False),
            "agents": Q(owner__isnull=False),
            "nobody": Q(pulse_user=None, owner=None),
        }
        return queryset.filter(conditions.get(self.value() or "", Q()))


@admin.register(Queue)
class QueueAdmin(ReadOnly):
    """Queues. Their thresholds and the unbounded flag are the operators'; all else is what was seen."""

    form = QueueForm
    list_display = [
        "shown_name", "vhost", "state", "length", "consumers", "whose", "warn_length", "max_length", "unbounded",
        "last_seen",
    ]  # fmt: skip
    list_filter = [
        "state", "unbounded", WhoseFilter, "registered", "type", "exclusive",
        ("max_length", admin.EmptyFieldListFilter), "vhost",
    ]  # fmt: skip
    list_select_related = ["pulse_user", "owner"]
    search_fields = ["name", "vhost", "pulse_user__username", "owner__email"]
    fields = [
        "name", "vhost", "pulse_user", "owner", "state", "ready", "unacknowledged", "consumers", "unbounded",
        "warn_length", "max_length", "type", "durable", "auto_delete", "exclusive", "registered", "node", "first_seen",
        "last_seen", "unattended_since", "delete_sent_at",
    ]  # fmt: skip
    actions = ["delete_on_broker", "purge", "set_limits", "unbind", "bind"]

    def has_change_permission(self, request: HttpRequest, obj: object = None) -> bool:
        """Allow what the model's permissions allow."""
        return admin.ModelAdmin.has_change_permission(self, request, obj)

    @admin.display(description="name", ordering="name")
    def shown_name(self, queue: Queue) -> str:
        """Return the name as it can be shown."""
        return readable(queue.name)

    @admin.display(ordering=F("ready") + F("unacknowledged"))
    def length(self, queue: Queue) -> int | None:
        """Return the length as last seen; None: unknown."""
        return queue.length

    @admin.display(ordering="pulse_user__username")
    def whose(self, queue: Queue) -> str:
        """Return the account whose it is, or the owner whose agents registered it."""
        return str(queue.pulse_user or queue.owner or "")

    def view_on_site(self, queue: Queue) -> str:
        """Return its page, with its chart."""
        return reverse("queue", args=[queue.uuid])

    def save_model(self, request: HttpRequest, obj: Queue, form: Any, change: bool) -> None:
        """Set the limits that were changed: somebody, or a pass, may have written the rest in the meantime."""
        by_hand.set_limits(obj, visitor(request), **{name: form.cleaned_data[name] for name in form.changed_data})

    def get_readonly_fields(self, request: HttpRequest, obj: Model | None = None) -> list[str]:
        """Return all fields but the operators' own."""
        return [str(name) for name in self.fields if name not in by_hand.LIMITS]

    @admin.action(description="Delete the selected queues on the broker", permissions=["change"])
    def delete_on_broker(self, request: HttpRequest, queryset: QuerySet[Queue]) -> HttpResponse | None:
        """Delete them with all that is in them, once it was confirmed."""
        question = Question(
            "delete_on_broker",
            "Delete these queues on the broker",
            "They go with all messages that are in them. This can't be taken back.",
            "Delete them",
            "Length",
        )
        return self._destroy(request, queryset, question, by_hand.delete_queue, "deleted")

    @admin.action(description="Empty the selected queues", permissions=["change"])
    def purge(self, request: HttpRequest, queryset: QuerySet[Queue]) -> HttpResponse | None:
        """Remove their ready messages, once it was confirmed."""
        question = Question(
            "purge",
            "Empty these queues",
            "Their ready messages are removed; what consumers hold unacknowledged stays. This can't be taken back.",
            "Empty them",
            "Length",
        )
        return self._destroy(request, queryset, question, by_hand.purge_queue, "emptied")

    def _destroy(
        self,
        request: HttpRequest,
        queryset: QuerySet[Queue],
        question: Question,
        destroy: Callable[[Queue, Owner], None],
        done: str,
    ) -> HttpResponse | None:
        queues = list(chosen(self, request, queryset).exclude(state=Queue.State.GONE))
        if not queues:
            self.message_user(request, "None of these is on the broker any more.", messages.WARNING)
        elif refused := too_many(len(queues)):
            self.message_user(request, refused, messages.ERROR)
        elif not is_agreed(request):
            return ask(self, request, question, queues, _with_length)
        else:
            do_to_each(
                self, request, queues, lambda queue: destroy(queue, visitor(request)), done, refusals=(by_hand.Gone,)
            )
        return None

    @admin.action(description="Set the limits of the selected queues", permissions=["change"])
    def set_limits(self, request: HttpRequest, queryset: QuerySet[Queue]) -> HttpResponse | None:
        """Give them the same warn length and maximum."""
        form = LengthsForm(request.POST if is_agreed(request) else None)
        if form.is_valid():
            self._limit(request, chosen(self, request, queryset), "given these limits", **form.cleaned_data)
            return None
        question = Question(
            "set_limits",
            "Set the limits of these queues",
            "They replace the limits that these queues have of their own. Empty: as their account or the policy says.",
            "Set them",
            "Length now",
            is_dangerous=False,
        )
        return ask(self, request, question, list(chosen(self, request, queryset)), _with_length, form)

    @admin.action(description="Mark as unbounded: warned about, never deleted", permissions=["change"])
    def unbind(self, request: HttpRequest, queryset: QuerySet[Queue]) -> None:
        """Never delete them for their length."""
        self._limit(request, queryset, "unbounded from now on", unbounded=True)

    @admin.action(description="Mark as bounded again", permissions=["change"])
    def bind(self, request: HttpRequest, queryset: QuerySet[Queue]) -> HttpResponse | None:
        """Let their maximum hold again, once it was confirmed: the next pass may delete them."""
        queues = chosen(self, request, queryset)
        if is_agreed(request):
            self._limit(request, queues, "bounded again", unbounded=False)
            return None
        question = Question(
            "bind",
            "Mark these queues as bounded again",
            "The next pass deletes those that are longer than their maximum, as far as the brake allows.",
            "Mark them",
            "Length now",
        )
        return ask(self, request, question, list(queues), _with_length)

    def _limit(self, request: HttpRequest, queues: QuerySet[Queue], done: str, **limits: Any) -> None:
        these = list(queues)
        refused = by_hand.set_limits_of_all(these, visitor(request), limits)
        went_well = [str(queue) for queue in these if queue.pk not in refused]
        tell_each(self, request, went_well, done, [(str(one), refused[one.pk]) for one in these if one.pk in refused])


def too_many(queues: int) -> str:
    """Return why so many queues are not removed at once; empty: they may be. The brake holds here as for a pass."""
    limit = brake_limit(settings.GUARDIAN_DELETE_BRAKE, Queue.objects.exclude(state=Queue.State.GONE).count())
    if queues <= limit:
        return ""
    return (
        f"These are {queues:,} queues, and {limit:,} may go at once: GUARDIAN_DELETE_BRAKE, or a quarter of all. "
        "Nothing was done; choose fewer."
    )


def _with_length(queue: Queue) -> Row:
    length = f"{queue.length:,}" if queue.length is not None else "unknown"
    return Row(f"{readable(queue.name)} in {readable(queue.vhost)}", length)


@admin.register(QueueEvent)
class QueueEventAdmin(ReadOnly):
    """What happened to queues."""

    list_display = ["at", "kind", "queue_name", "vhost", "by"]
    list_filter = ["kind", "at", "vhost"]
    list_select_related = ["by"]
    search_fields = ["queue_name", "vhost", "by__email"]


@admin.register(Pass)
class PassAdmin(ReadOnly):
    """The monitor's reports."""

    list_display = [
        "at", "queues", "new", "changed", "gone", "warned", "deleted", "kept", "brake_held", "seconds",
    ]  # fmt: skip
    list_filter = ["brake_held", "at"]


@admin.register(Watch)
class WatchAdmin(ReadOnly):
    """What the monitor remembers. A row changed by hand could lift the brake, or blind it."""

    list_display = ["__str__", "outage_since", "brake_since", "listed_at"]


@admin.register(Lease)
class LeaseAdmin(ReadOnly):
    """Who is at what only one process may do at a time. It is over by itself when that process is killed."""

    list_display = ["name", "holder", "expires_at"]
    search_fields = ["name"]


# Agents


class RemovingAdmin(Audited):
    """What may have agents' registrations below it, which go from the broker with it.

    ``queues_below`` are the models that stand for queues which go with it, and the way from each to it.
    """

    queues_below: Mapping[type[Model], str]

    def delete_model(self, request: HttpRequest, obj: Model) -> None:
        """Remove it."""
        removals.delete(obj)
        self._tell_what_follows(request)

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> None:
        """Remove them."""
        removals.delete(queryset)
        self._tell_what_follows(request)

    @admin.action(description="Delete the selected %(verbose_name_plural)s", permissions=["delete"])
    def delete_selected(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse | None:
        """Ask, and remove them, as far as the brake allows so many queues at once."""
        these = list(queryset.values_list("pk", flat=True))
        if len(these) > 1 and (refused := too_many(self._queues_of(these))):
            self.message_user(request, refused, messages.ERROR)
            return None
        return cast("HttpResponse | None", delete_selected(self, request, queryset))

    def _queues_of(self, rows: Sequence[int]) -> int:
        return sum(
            model._default_manager.filter(**{f"{way}__in": rows}).count() for model, way in self.queues_below.items()
        )

    def _tell_what_follows(self, request: HttpRequest) -> None:
        what = "What it had on the broker goes now; while the broker is away, Removals has what is still to go."
        self.message_user(request, what, messages.INFO)


admin.site.unregister([Owner, PulseUser])


@admin.register(Owner)
class OwnerWithAgentsAdmin(RemovingAdmin, OwnerAdmin):
    """Owners, with what their agents registered."""

    queues_below = {SubscriptionQueue: "subscription__owner", Consumer: "identity__owner"}

    def delete_model(self, request: HttpRequest, obj: Model) -> None:
        """Remove one, unless they have become an account's owner since they were allowed to be removed."""
        with transaction.atomic():
            vouching.lock_those([owner := cast("Owner", obj)])
            if owner.pulse_users.exists():
                raise PermissionDenied(f"{obj} owns a RabbitMQ account by now.")
            super().delete_model(request, obj)


@admin.register(PulseUser)
class PulseUserWithQueuesAdmin(PulseUserAdmin):
    """RabbitMQ accounts, with their queues."""

    list_display = [*PulseUserAdmin.list_display[:2], "queues", *PulseUserAdmin.list_display[2:]]
    actions = [*PulseUserAdmin.actions, "remove"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[PulseUser]:
        """Count the queues of each, without a statement for each."""
        there = Queue.objects.exclude(state=Queue.State.GONE)
        return super().get_queryset(request).annotate(number_of_queues=count(Queue, "pulse_user", there))

    @admin.display(ordering="number_of_queues")
    def queues(self, pulse_user: PulseUser) -> int:
        """Return how many queues it has, as last seen."""
        return cast("int", pulse_user.number_of_queues)  # type: ignore[attr-defined]

    @admin.action(description="Remove the selected accounts from the broker", permissions=["change"])
    def remove(self, request: HttpRequest, queryset: QuerySet[PulseUser]) -> HttpResponse | None:
        """Remove them with their queues and exchanges, once it was confirmed."""
        accounts = list(chosen(self, request, queryset))
        going = sum(self.queues(account) for account in accounts)
        if len(accounts) > 1 and (refused := too_many(going)):
            self.message_user(request, refused, messages.ERROR)
        elif not is_agreed(request):
            question = Question(
                "remove",
                "Remove these RabbitMQ accounts from the broker",
                "Each goes with its queues and exchanges, and with all messages in them; its connections are closed. "
                "This can't be taken back.",
                "Remove them",
                "Queues, as last seen",
            )
            return ask(self, request, question, accounts, lambda one: Row(one.username, f"{self.queues(one):,}"))
        else:
            do_to_each(
                self,
                request,
                accounts,
                removal.remove_pulse_user,
                "removed, with queues and exchanges",
                refusals=(removal.GoesOn,),
            )
        return None


@admin.register(Offering)
class OfferingAdmin(RemovingAdmin):
    """Offerings: who may subscribe to their events, and who may publish them.

    Deleting one takes the agents' identities and queues for it along, from the broker too.
    """

    queues_below = {SubscriptionQueue: "offering", Consumer: "identity__offering"}
    actions = ["delete_selected"]
    list_display = ["name", "uuid", "agents", "queues", "created"]
    list_filter = ["created"]
    search_fields = ["name", "uuid", "members__email", "publishers__email"]
    autocomplete_fields = ["members", "publishers"]
    fields = ["name", "uuid", "members", "publishers", "created"]
    readonly_fields = ["uuid", "created"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[Offering]:
        """Count what agents have of each, without a statement for each."""
        offerings: QuerySet[Offering] = super().get_queryset(request)
        return offerings.annotate(
            number_of_agents=count(AgentIdentity, "offering"),
            number_of_queues=count(SubscriptionQueue, "offering"),
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


class RegisteredAdmin(RemovingAdmin, Removable):
    """What agents registered. It may be deleted, and what it stands for on the broker goes with it."""

    actions = ["delete_selected"]

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Find one by its UUID in any of its forms, too."""
        found, may_have_duplicates = super().get_search_results(request, queryset, search_term)
        return _or_by_uuid(found, queryset, search_term), may_have_duplicates


@admin.register(AgentIdentity)
class AgentIdentityAdmin(RegisteredAdmin):
    """Agents. Their configuration may have secrets in it, and isn't shown."""

    queues_below = {SubscriptionQueue: "subscription__identity", Consumer: "identity"}
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
    fields = ["uuid", "subscription", "offering", "object_type", "vhost", "queue_name", "state", "created"]

    @admin.display(ordering="subscription__owner__email")
    def owner(self, queue: SubscriptionQueue) -> str:
        """Return whose it is."""
        return queue.subscription.owner.email


@admin.register(Consumer)
class ConsumerAdmin(RegisteredAdmin):
    """Agents' consumers: one queue for everything."""

    queues_below = {Consumer: "pk"}
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
class RemovalAdmin(ReadOnly):
    """What is still to go from the broker. What stays here for long says why in its last error."""

    list_display = ["name", "kind", "vhost", "created", "due_at", "attempts", "last_error"]
    list_filter = ["kind", "created"]
    search_fields = ["name", "vhost", "last_error"]


@admin.register(Sweep)
class SweepAdmin(ReadOnly):
    """The reports of the two clean-ups."""

    list_display = [
        "at", "kind", "seen", "found", "deleted", "kept", "repaired", "subscriptions", "tokens", "brake_held",
        "seconds",
    ]  # fmt: skip
    list_filter = ["kind", "brake_held"]


def _or_by_uuid(found: QuerySet[Any], queryset: QuerySet[Any], search: str) -> QuerySet[Any]:
    try:
        uuid = UUID(search.strip())
    except ValueError:
        return found
    return queryset.filter(Q(uuid=uuid) | Q(pk__in=found.values("pk")))
