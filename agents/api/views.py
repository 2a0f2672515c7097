"""The REST API by which agents register and events are published.

The functions it calls check what the user may do. Released agents use this API: do not change what they read.
"""

from http import HTTPStatus
from typing import Any, ClassVar, TypeVar
from uuid import UUID

from django.core.exceptions import PermissionDenied
from django.db.models import Exists, Model, OuterRef, QuerySet
from django.http import Http404
from django_filters import BooleanFilter, CharFilter, ChoiceFilter, FilterSet  # type: ignore[import-untyped]
from drf_spectacular.utils import extend_schema, extend_schema_view
from rest_framework import mixins
from rest_framework.decorators import action
from rest_framework.response import Response
from rest_framework.serializers import Serializer
from rest_framework.viewsets import GenericViewSet

from accounts.access import vouching
from accounts.access.authentication import presented_key
from accounts.allauth_private import client_address
from accounts.api.views import Request
from accounts.models import AuthToken, Owner
from agents.api.filters import AddressFilter, StrictUUIDFilter, TimeFilter
from agents.api.offering_serializers import NewEventSerializer, OfferingSerializer, PublishedSerializer
from agents.api.serializers import (
    AgentIdentitySerializer,
    ConsumerQueueSerializer,
    ConsumerSerializer,
    EventSubscriptionSerializer,
    NewAgentIdentitySerializer,
    NewAgentSubscriptionSerializer,
    NewConsumerSerializer,
    NewEventSubscriptionSerializer,
    NewServiceSerializer,
    NewSubscriptionQueueSerializer,
    SubscriptionQueueSerializer,
)
from agents.api.service_serializers import ServiceSerializer
from agents.api.unused import CleanedUpIdentitiesSerializer, CleanUpSerializer, clean_up
from agents.events import publishing
from agents.events.delivery import with_delivery
from agents.models import (
    AgentIdentity,
    Consumer,
    EventSubscription,
    ObjectType,
    Offering,
    SubscriptionQueue,
)
from agents.registration import identities, queues
from agents.registration.credentials import PresentedToken
from agents.removal import deletions
from agents.services import services
from agents.services.unused import orphaned_identities
from core.endpoints import StrictParameters, at_field, read
from core.refusals import Refusal

Row = TypeVar("Row", bound=Model)


def presented_token(request: Request, owner_id: int) -> PresentedToken:
    """Return the token of the request, which becomes the broker password of this owner's agent."""
    if owner_id != request.user.pk:
        raise PermissionDenied(
            "Only the owner can register here, and operators can't do it either: "
            "the token of the request becomes the password by which the owner's agent logs in to the broker."
        )
    if not isinstance(request.auth, AuthToken):
        raise PermissionDenied(
            "Use a token, not a session: it becomes the password by which your agent logs in to the broker."
        )
    return PresentedToken(request.auth, presented_key(request))


class ByUUID(StrictParameters, mixins.ListModelMixin, mixins.RetrieveModelMixin, GenericViewSet[Row]):
    """Lists rows, and shows a row by its UUID."""

    lookup_field = "uuid"
    ignored_parameters: ClassVar[set[str]] = {"o", "search"}  # docs/agents.md

    def get_object(self) -> Row:
        try:
            identities.read_uuid(self.kwargs["uuid"])
        except ValueError as error:
            raise Http404 from error
        return super().get_object()


def require_own(identity: AgentIdentity, request: Request) -> None:
    """Raise PermissionDenied for an operator who does not own the agent that reports."""
    if identity.owner_id != request.user.pk:
        raise PermissionDenied("Only the owner's agent reports about its services.")


class RemovableByUUID(ByUUID[Row]):
    """Lists, shows and removes rows. Removing a row removes its queues and logins on the broker."""

    def destroy(self, request: Request, uuid: str) -> Response:
        """Remove the row."""
        deletions.delete(self.get_object())
        return Response(status=HTTPStatus.NO_CONTENT)

    def created_or_found(self, serializer: type[Serializer[Any]], row: Model, new: bool = True) -> Response:
        """Return 201 for a new row, 200 for an existing one."""
        data = serializer(row, context=self.get_serializer_context()).data
        if not new:
            return Response(data)
        headers = {"Location": data["url"]} if "url" in data else {}
        return Response(data, HTTPStatus.CREATED, headers=headers)


class IdentityFilter(FilterSet):  # type: ignore[misc]  # the library has no types
    """Filters of identities. Agents look for their own identity by name before they create it."""

    name = CharFilter(label="The exact name of one of your own identities.", strip=False)
    offering_uuid = StrictUUIDFilter(field_name="offering__uuid", label="UUID of an offering.")
    version = CharFilter(label="With exactly this version.", strip=False)
    last_restarted = TimeFilter(lookup_expr="gte", label="Restarted at this time or later.")
    orphaned = BooleanFilter(
        method="filter_orphaned", label="Whether it has no subscription, no consumer and no service."
    )

    class Meta:
        model = AgentIdentity
        fields: list[str] = []

    def filter_queryset(self, queryset: QuerySet[AgentIdentity]) -> QuerySet[AgentIdentity]:
        """Return the identities. By name, only the user's own: an operator's agent must not use another's identity."""
        queryset = super().filter_queryset(queryset)
        if "name" not in self.data:
            return queryset
        return queryset.filter(name=self.form.cleaned_data["name"], owner=self.request.user.pk)

    def filter_orphaned(self, queryset: QuerySet[AgentIdentity], name: str, value: bool) -> QuerySet[AgentIdentity]:
        orphaned = orphaned_identities().values("pk")
        return queryset.filter(pk__in=orphaned) if value else queryset.exclude(pk__in=orphaned)


@extend_schema_view(
    list=extend_schema(
        summary="List your agent identities",
        description="Operators see all identities; if they filter by name, only their own.",
    ),
    retrieve=extend_schema(summary="Show an agent identity"),
    destroy=extend_schema(
        summary="Remove an agent identity",
        description="Its subscriptions and its consumer are removed too, with their queues and logins on the broker.",
    ),
)
class AgentIdentities(RemovableByUUID[AgentIdentity]):
    """Identities of agents: your own; for operators, all."""

    serializer_class = AgentIdentitySerializer
    filterset_class = IdentityFilter

    def get_queryset(self) -> QuerySet[AgentIdentity]:
        rows = AgentIdentity.objects.seen_by(self.request.user)
        return rows.select_related("owner", "offering").prefetch_related("services__processors")

    @extend_schema(request=NewAgentIdentitySerializer, responses={201: AgentIdentitySerializer})
    def create(self, request: Request) -> Response:
        """Create an agent identity.

        An identity belongs to one offering. Its name is unique among your identities for the offering.
        """
        vouching.require_vouched(request.user)
        body = self._introduced(request, request.user)
        with at_field("offering"):
            identity = identities.create_identity(request.user, **body)
        return self.created_or_found(AgentIdentitySerializer, identity)

    @extend_schema(request=NewAgentIdentitySerializer, responses=AgentIdentitySerializer)
    def update(self, request: Request, uuid: str) -> Response:
        """Update an agent identity.

        Offering and name are required. Other fields that you leave out keep their values. Operators can neither read
        nor change the content of the configuration file.
        """
        identity = self.get_object()
        body = self._introduced(request, identity.owner)
        if identity.owner != request.user:
            body.pop("config_file_content", None)
        with at_field("offering"):
            identities.update_identity(identity, **body)
        return Response(self.get_serializer(self.get_object()).data)

    @extend_schema(
        request=NewAgentSubscriptionSerializer,
        responses={201: EventSubscriptionSerializer, 200: EventSubscriptionSerializer, 409: None, 503: None},
    )
    @action(detail=True, methods=["post"])
    def register_event_subscription(self, request: Request, uuid: str) -> Response:
        """Subscribe an agent to events of one type.

        An agent has one subscription for each type. 201: the subscription is new. 200: it exists already. The token of
        the request becomes its password on the broker.
        """
        identity, presented = self._registering(request)
        body = read(NewAgentSubscriptionSerializer, request)
        subscription, new = queues.register_subscription(
            identity,
            body["observable_object_type"],
            presented,
            description=body.get("description", ""),
            source_ip=client_address(request._request) or None,
        )
        return self.created_or_found(EventSubscriptionSerializer, subscription, new)

    @extend_schema(
        request=NewConsumerSerializer,
        responses={201: ConsumerQueueSerializer, 200: ConsumerQueueSerializer, 409: None, 503: None},
    )
    @action(detail=True, methods=["post"])
    def register_queue(self, request: Request, uuid: str) -> Response:
        """Register the consumer queue of an agent, for events of several or all types.

        201: the queue is new. 200: it exists already. The token of the request becomes the password of `rmq_username`
        on the broker.
        """
        identity, presented = self._registering(request)
        body = read(NewConsumerSerializer, request)
        consumer, new = queues.register_consumer(identity, presented, body.get("object_types"))
        return self.created_or_found(ConsumerQueueSerializer, consumer, new)

    @extend_schema(
        request=NewSubscriptionQueueSerializer,
        responses={201: SubscriptionQueueSerializer, 200: SubscriptionQueueSerializer, 409: None, 503: None},
    )
    @action(detail=True, methods=["post"])
    def create_queue(self, request: Request, uuid: str) -> Response:
        """Create a queue of an agent for events of one type.

        Like POST `/api/event-subscriptions/{uuid}/create_queue/` with the agent's subscription for that type, which is
        created if it doesn't exist.
        """
        identity = self.get_object()
        presented = presented_token(request, identity.owner_id)
        body = read(NewSubscriptionQueueSerializer, request)
        object_type = body["object_type"]
        with at_field("offering_uuid"):
            offering = identities.subscribable_offering(identity.owner, body["offering_uuid"])
        subscription, _ = queues.register_subscription(
            identity, object_type, presented, source_ip=client_address(request._request) or None
        )
        queue, new = queues.create_queue(subscription, offering, object_type, presented)
        return self.created_or_found(SubscriptionQueueSerializer, queue, new)

    @extend_schema(request=NewServiceSerializer, responses={201: ServiceSerializer, 200: ServiceSerializer})
    @action(detail=True, methods=["post"])
    def register_service(self, request: Request, uuid: str) -> Response:
        """Register a service of an agent, or say that it is active. 201: it is new."""
        identity = self.get_object()
        require_own(identity, request)
        body = read(NewServiceSerializer, request)
        return self.created_or_found(
            ServiceSerializer, *services.register_service(identity, body["name"], body.get("mode") or "")
        )

    @extend_schema(request=CleanUpSerializer, responses=CleanedUpIdentitiesSerializer, filters=False)
    @action(detail=False, methods=["post"], pagination_class=None)
    def cleanup_orphaned(self, request: Request) -> Response:
        """Remove identities without a subscription, a consumer and a service.

        For operators. By default nothing is removed: the response lists what would be.
        """
        return clean_up(request, orphaned_identities().select_related("offering"), CleanedUpIdentitiesSerializer)

    def _registering(self, request: Request) -> tuple[AgentIdentity, PresentedToken]:
        """Return the identity in the path and the token of the request, if its owner may subscribe to its offering."""
        identity = self.get_object()
        presented = presented_token(request, identity.owner_id)
        try:
            identities.subscribable_offering(identity.owner, identity.offering.uuid)
        except Refusal as error:
            raise PermissionDenied("You may no longer subscribe to this agent's offering. Ask an operator.") from error
        return identity, presented

    def _introduced(self, request: Request, owner: Owner) -> dict[str, Any]:
        body = read(NewAgentIdentitySerializer, request)
        with at_field("offering"):
            return body | {"offering": identities.subscribable_offering(owner, body["offering"])}


class SubscriptionFilter(FilterSet):  # type: ignore[misc]  # the library has no types
    """Filters of subscriptions by their owner."""

    user_uuid = StrictUUIDFilter(field_name="owner__uuid", label="UUID of the owner.")
    user_username = AddressFilter(field_name="owner__email", label="The owner's address.")

    class Meta:
        model = EventSubscription
        fields: list[str] = []


@extend_schema_view(
    list=extend_schema(
        summary="List your event subscriptions, newest first", description="Operators see all subscriptions."
    ),
    retrieve=extend_schema(summary="Show an event subscription"),
    destroy=extend_schema(summary="Remove an event subscription, with its queues and its login on the broker"),
)
class EventSubscriptions(RemovableByUUID[EventSubscription]):
    """Event subscriptions: your own; for operators, all."""

    serializer_class = EventSubscriptionSerializer
    filterset_class = SubscriptionFilter

    def get_queryset(self) -> QuerySet[EventSubscription]:
        return EventSubscription.objects.seen_by(self.request.user).select_related("owner")

    @extend_schema(
        request=NewEventSubscriptionSerializer, responses={201: EventSubscriptionSerializer, 409: None, 503: None}
    )
    def create(self, request: Request) -> Response:
        """Subscribe to events.

        The token of the request becomes the subscription's password on the broker.
        """
        vouching.require_vouched(request.user)
        presented = presented_token(request, request.user.pk)
        body = read(NewEventSubscriptionSerializer, request)
        observed = body.get("observable_objects", [])
        with at_field("observable_objects"):
            self._check_offerings(request.user, {one["offering_uuid"] for one in observed if "offering_uuid" in one})
        subscription = queues.create_subscription(
            request.user,
            presented,
            observable_objects=[
                one | {"offering_uuid": one["offering_uuid"].hex} if "offering_uuid" in one else one for one in observed
            ],
            description=body.get("description", ""),
            source_ip=client_address(request._request) or None,
        )
        return self.created_or_found(EventSubscriptionSerializer, subscription)

    @extend_schema(
        request=NewSubscriptionQueueSerializer,
        responses={201: SubscriptionQueueSerializer, 200: SubscriptionQueueSerializer, 409: None, 503: None},
    )
    @action(detail=True, methods=["post"])
    def create_queue(self, request: Request, uuid: str) -> Response:
        """Create the queue of a subscription for events of one type about one offering.

        Call this before the agent reads from the queue, so that the queue has the right arguments. 201: the queue is
        new. 200: it exists already. The token of the request becomes the subscription's password on the broker.
        """
        subscription = self.get_object()
        presented = presented_token(request, subscription.owner_id)
        body = read(NewSubscriptionQueueSerializer, request)
        with at_field("offering_uuid"):
            offering = identities.subscribable_offering(subscription.owner, body["offering_uuid"])
        queue, new = queues.create_queue(subscription, offering, body["object_type"], presented)
        return self.created_or_found(SubscriptionQueueSerializer, queue, new)

    def _check_offerings(self, owner: Owner, uuids: set[UUID]) -> None:
        """Check that this owner may subscribe to all these offerings, normally in one statement."""
        usable = Offering.objects.subscribed_by(owner).filter(uuid__in=uuids)
        for uuid in uuids.difference(usable.values_list("uuid", flat=True)):
            identities.subscribable_offering(owner, uuid)


class SubscriptionQueueFilter(FilterSet):  # type: ignore[misc]  # the library has no types
    """Filters by subscription, offering and object type."""

    event_subscription_uuid = StrictUUIDFilter(field_name="subscription__uuid", label="UUID of a subscription.")
    offering_uuid = StrictUUIDFilter(field_name="offering__uuid", label="UUID of an offering.")
    object_type = ChoiceFilter(choices=ObjectType.choices, label="Object type.")

    class Meta:
        model = SubscriptionQueue
        fields: list[str] = []


@extend_schema_view(
    list=extend_schema(
        summary="List the queues of your event subscriptions, newest first", description="Operators see all queues."
    ),
    retrieve=extend_schema(summary="Show the queue of an event subscription"),
    destroy=extend_schema(summary="Remove the queue of an event subscription, with its messages"),
)
class SubscriptionQueues(RemovableByUUID[SubscriptionQueue]):
    """Queues of event subscriptions: your own; for operators, all."""

    serializer_class = SubscriptionQueueSerializer
    filterset_class = SubscriptionQueueFilter

    def get_queryset(self) -> QuerySet[SubscriptionQueue]:
        return SubscriptionQueue.objects.seen_by(self.request.user).select_related("subscription", "offering")


@extend_schema_view(
    list=extend_schema(
        summary="List the consumer queues of your agents, newest first",
        description="Operators see all consumer queues.",
    ),
    retrieve=extend_schema(summary="Show the consumer queue of an agent"),
    destroy=extend_schema(
        summary="Remove the consumer queue of an agent, with its messages and its login on the broker"
    ),
)
class Consumers(RemovableByUUID[Consumer]):
    """Consumer queues of agents: your own; for operators, all."""

    serializer_class = ConsumerSerializer

    def get_queryset(self) -> QuerySet[Consumer]:
        return with_delivery(Consumer.objects.seen_by(self.request.user).select_related("identity__offering"))


@extend_schema_view(
    list=extend_schema(
        summary="List the offerings that you may subscribe or publish to", description="Operators see all offerings."
    ),
    retrieve=extend_schema(summary="Show an offering"),
)
class Offerings(ByUUID[Offering]):
    """Offerings that you may subscribe or publish to; for operators, all."""

    serializer_class = OfferingSerializer

    def get_queryset(self) -> QuerySet[Offering]:
        visitor, this = self.request.user, OuterRef("pk")
        seen = Offering.objects.seen_by(visitor).annotate(
            may_subscribe=Exists(Offering.objects.subscribed_by(visitor).filter(pk=this)),
            may_publish=Exists(Offering.objects.published_by(visitor).filter(pk=this)),
        )
        return seen.prefetch_related("members", "publishers") if visitor.is_staff else seen

    @extend_schema(request=NewEventSerializer, responses={200: PublishedSerializer, 503: None})
    @action(detail=True, methods=["post"], url_path="events")
    def publish(self, request: Request, uuid: str) -> Response:
        """Publish an event of an offering to all agents that registered for it.

        For the offering's publishers. The response counts the queues that got the event. 503 means that the outcome is
        unknown. Repeat the request with the message id in the detail, so that agents can drop duplicates.
        """
        offering = self.get_object()
        body = read(NewEventSerializer, request)
        published = publishing.publish(
            offering, body["object_type"], body["payload"], request.user, body.get("message_id")
        )
        return Response(PublishedSerializer(published).data)
