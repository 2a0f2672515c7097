"""The REST API that agents register by, and by which events are published to them.

What may be done is decided by the functions it calls. Unchanged agents speak this: what they read is not to be changed.
"""

from http import HTTPStatus
from typing import Any, TypeVar
from uuid import UUID

from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.db.models import Exists, Model, OuterRef, QuerySet
from django.http import Http404
from django_filters import CharFilter, ChoiceFilter, FilterSet, UUIDFilter  # type: ignore[import-untyped]
from drf_spectacular.utils import extend_schema
from rest_framework import mixins
from rest_framework import request as rest
from rest_framework.response import Response
from rest_framework.serializers import Serializer
from rest_framework.viewsets import GenericViewSet

from accounts import vouching
from accounts.api import Request
from accounts.authentication import presented_key
from accounts.models import AuthToken, Owner
from accounts.signin import AccountAdapter
from agents import deletions, events, identities, registration
from agents.credentials import PresentedToken
from agents.identities import IdentityExists, NoSuchOffering
from agents.models import AgentIdentity, Consumer, EventSubscription, ObjectType, Offering, SubscriptionQueue
from agents.serializers import (
    AgentIdentitySerializer,
    ConsumerQueueSerializer,
    ConsumerSerializer,
    EventSubscriptionSerializer,
    NewAgentIdentitySerializer,
    NewAgentSubscriptionSerializer,
    NewConsumerSerializer,
    NewEventSerializer,
    NewEventSubscriptionSerializer,
    NewSubscriptionQueueSerializer,
    OfferingSerializer,
    PublishedSerializer,
    StrictUUIDFormField,
    SubscriptionQueueSerializer,
)
from core.endpoints import at_field, read

Row = TypeVar("Row", bound=Model)


def presented_token(request: Request, owner_id: int) -> PresentedToken:
    """Return the token that the request came with. It becomes the password by which the agent of this owner reads.

    Raises:
        PermissionDenied: the visitor is somebody else, or there is no token.
    """
    if owner_id != request.user.pk:
        raise PermissionDenied(
            "Only its owner can register here, not an operator either: "
            "the token presented becomes the password by which the owner's agent reads."
        )
    if not isinstance(request.auth, AuthToken):
        raise PermissionDenied(
            "Present a token, not a session: it becomes the password by which your agent logs in to the broker."
        )
    return PresentedToken(request.auth, presented_key(request))


def source_ip_of(request: Request) -> str | None:
    """Return the address that the request came from, as attempts at signing in are counted; None: not known."""
    try:
        found = AccountAdapter().get_client_ip(request._request)
    except ImproperlyConfigured:  # fewer proxies than GUARDIAN_PROXIES says
        return None
    return found.partition("%")[0] or None  # no column takes the interface of a link-local address


class ByUUID(mixins.ListModelMixin, mixins.RetrieveModelMixin, GenericViewSet[Row]):
    """Rows that are listed, and shown at their UUID."""

    lookup_field = "uuid"

    def get_object(self) -> Row:
        """Return the one that the path names.

        Raises:
            Http404: the visitor sees none of that UUID, or it isn't written as one.
        """
        try:
            identities.read_uuid(self.kwargs["uuid"])
        except ValueError as error:
            raise Http404 from error
        return super().get_object()


class RemovableByUUID(ByUUID[Row]):
    """Rows that are removed, too, with what they stand for."""

    def destroy(self, request: Request, uuid: str) -> Response:
        """Remove it."""
        deletions.delete(self.get_object())
        return Response(status=HTTPStatus.NO_CONTENT)

    def created_or_found(self, serializer: type[Serializer[Any]], row: Model, new: bool = True) -> Response:
        """Return what was made, or was there."""
        data = serializer(row, context=self.get_serializer_context()).data
        if not new:
            return Response(data)
        headers = {"Location": data["url"]} if "url" in data else {}
        return Response(data, HTTPStatus.CREATED, headers=headers)

    def filter_queryset(self, queryset: QuerySet[Row, Any]) -> QuerySet[Row, Any]:
        """Filter the list alone."""
        return super().filter_queryset(queryset) if self.action == "list" else queryset


class IdentityFilter(FilterSet):  # type: ignore[misc]  # the library has no types
    """By name: an agent looks for itself before it introduces itself."""

    name = CharFilter(label="The whole name of one of your own.", strip=False)

    class Meta:
        model = AgentIdentity
        fields: list[str] = []

    def filter_queryset(self, queryset: QuerySet[AgentIdentity]) -> QuerySet[AgentIdentity]:
        """Return those of this name. They are the visitor's own, so that an operator's agent takes no other's."""
        if "name" not in self.data:
            return queryset
        return queryset.filter(name=self.form.cleaned_data["name"], owner=self.request.user.pk)


class AgentIdentities(RemovableByUUID[AgentIdentity]):
    """Agents: your own, and all to operators."""

    serializer_class = AgentIdentitySerializer
    filterset_class = IdentityFilter

    def get_queryset(self) -> QuerySet[AgentIdentity]:
        """Return those that the visitor sees."""
        return AgentIdentity.objects.seen_by(self.request.user).select_related("owner", "offering")

    def list(self, request: rest.Request, *args: Any, **kwargs: Any) -> Response:
        """List agents.

        Your own; to operators all, and with a name their own of that name.
        """
        return super().list(request, *args, **kwargs)

    def retrieve(self, request: rest.Request, *args: Any, **kwargs: Any) -> Response:
        """Show an agent as it introduced itself."""
        return super().retrieve(request, *args, **kwargs)

    @extend_schema(request=NewAgentIdentitySerializer, responses={201: AgentIdentitySerializer})
    def create(self, request: Request) -> Response:
        """Introduce an agent.

        It is for one offering, and has a name of its own there.
        """
        vouching.require_vouched(request.user)
        body = self._introduced(request, request.user)
        with at_field("name", IdentityExists), at_field("offering", NoSuchOffering):
            identity = identities.create_identity(request.user, **body)
        data = self.get_serializer(identity).data
        return Response(data, HTTPStatus.CREATED, headers={"Location": str(data["url"])})

    @extend_schema(request=NewAgentIdentitySerializer, responses=AgentIdentitySerializer)
    def update(self, request: Request, uuid: str) -> Response:
        """Introduce an agent anew.

        Offering and name are needed; what else is left out stays. The content of the configuration file is its owner's
        alone: from an operator, who isn't told it, it is taken as left out.
        """
        identity = self.get_object()
        body = self._introduced(request, identity.owner)
        if identity.owner != request.user:
            body.pop("config_file_content", None)
        with at_field("name", IdentityExists), at_field("offering", NoSuchOffering):
            identities.update_identity(identity, **body)
        return Response(self.get_serializer(self.get_object()).data)

    def destroy(self, request: Request, uuid: str) -> Response:
        """Remove an agent.

        Its subscriptions and its consumer go with it, with their queues and logins on the broker.
        """
        return super().destroy(request, uuid)

    @extend_schema(
        request=NewAgentSubscriptionSerializer,
        responses={201: EventSubscriptionSerializer, 200: EventSubscriptionSerializer, 409: None, 503: None},
    )
    def register_event_subscription(self, request: Request, uuid: str) -> Response:
        """Subscribe an agent to events of one type.

        An agent has one subscription for each type. 201: it is new. 200: it was there. The token presented becomes its
        password on the broker.
        """
        identity, presented = self._registering(request)
        body = read(NewAgentSubscriptionSerializer, request)
        subscription, new = registration.register_subscription(
            identity,
            body["observable_object_type"],
            presented,
            description=body.get("description", ""),
            source_ip=source_ip_of(request),
        )
        return self.created_or_found(EventSubscriptionSerializer, subscription, new)

    @extend_schema(
        request=NewConsumerSerializer,
        responses={201: ConsumerQueueSerializer, 200: ConsumerQueueSerializer, 409: None, 503: None},
    )
    def register_queue(self, request: Request, uuid: str) -> Response:
        """Give an agent its one queue, for events of all the types that it wants.

        201: it is new. 200: it was there. The token presented becomes the password of `rmq_username` on the broker.
        """
        identity, presented = self._registering(request)
        body = read(NewConsumerSerializer, request)
        consumer, new = registration.register_consumer(identity, presented, body.get("object_types"))
        return self.created_or_found(ConsumerQueueSerializer, consumer, new)

    @extend_schema(
        request=NewSubscriptionQueueSerializer,
        responses={201: SubscriptionQueueSerializer, 200: SubscriptionQueueSerializer, 409: None, 503: None},
    )
    def create_queue(self, request: Request, uuid: str) -> Response:
        """Give an agent a queue for events of one type.

        As POST `/api/event-subscriptions/{uuid}/create_queue/`, through the agent's subscription for that type, which
        is made where there is none.
        """
        identity = self.get_object()
        presented = presented_token(request, identity.owner_id)
        body = read(NewSubscriptionQueueSerializer, request)
        object_type = body["object_type"]
        with at_field("offering_uuid", NoSuchOffering):
            offering = identities.subscribable_offering(identity.owner, body["offering_uuid"])
        subscription, _ = registration.register_subscription(
            identity, object_type, presented, source_ip=source_ip_of(request)
        )
        queue, new = registration.create_queue(subscription, offering, object_type, presented)
        return self.created_or_found(SubscriptionQueueSerializer, queue, new)

    def _registering(self, request: Request) -> tuple[AgentIdentity, PresentedToken]:
        """Return the agent that the path names, and the token that is presented for it.

        Raises:
            PermissionDenied: the visitor can't register it, or may no longer subscribe to its offering.
        """
        identity = self.get_object()
        presented = presented_token(request, identity.owner_id)
        try:
            identities.subscribable_offering(identity.owner, identity.offering.uuid)
        except NoSuchOffering as error:
            raise PermissionDenied("You may no longer subscribe to this agent's offering. Ask an operator.") from error
        return identity, presented

    def _introduced(self, request: Request, owner: Owner) -> dict[str, Any]:
        body = read(NewAgentIdentitySerializer, request)
        with at_field("offering", NoSuchOffering):
            return body | {"offering": identities.subscribable_offering(owner, body["offering"])}


class EventSubscriptions(RemovableByUUID[EventSubscription]):
    """Event subscriptions: your own, and all to operators."""

    serializer_class = EventSubscriptionSerializer

    def get_queryset(self) -> QuerySet[EventSubscription]:
        """Return those that the visitor sees."""
        return EventSubscription.objects.seen_by(self.request.user).select_related("owner")

    def list(self, request: rest.Request, *args: Any, **kwargs: Any) -> Response:
        """List event subscriptions, the newest first.

        Your own; to operators all.
        """
        return super().list(request, *args, **kwargs)

    def retrieve(self, request: rest.Request, *args: Any, **kwargs: Any) -> Response:
        """Show an event subscription."""
        return super().retrieve(request, *args, **kwargs)

    @extend_schema(
        request=NewEventSubscriptionSerializer, responses={201: EventSubscriptionSerializer, 409: None, 503: None}
    )
    def create(self, request: Request) -> Response:
        """Subscribe to events.

        The token presented becomes the subscription's password on the broker.
        """
        vouching.require_vouched(request.user)
        presented = presented_token(request, request.user.pk)
        body = read(NewEventSubscriptionSerializer, request)
        observed = body.get("observable_objects", [])
        with at_field("observable_objects", NoSuchOffering):
            self._check_offerings(request.user, {one["offering_uuid"] for one in observed if "offering_uuid" in one})
        subscription = registration.create_subscription(
            request.user,
            presented,
            observable_objects=[
                one | {"offering_uuid": one["offering_uuid"].hex} if "offering_uuid" in one else one for one in observed
            ],
            description=body.get("description", ""),
            source_ip=source_ip_of(request),
        )
        data = self.get_serializer(subscription).data
        return Response(data, HTTPStatus.CREATED, headers={"Location": str(data["url"])})

    def destroy(self, request: Request, uuid: str) -> Response:
        """Remove an event subscription, with its queues and its login on the broker."""
        return super().destroy(request, uuid)

    @extend_schema(
        request=NewSubscriptionQueueSerializer,
        responses={201: SubscriptionQueueSerializer, 200: SubscriptionQueueSerializer, 409: None, 503: None},
    )
    def create_queue(self, request: Request, uuid: str) -> Response:
        """Give a subscription its queue for the events of one type about one offering.

        To be called before the agent reads from it, so that the queue has the right arguments. 201: it is new. 200: it
        was there. The token presented becomes the subscription's password on the broker.
        """
        subscription = self.get_object()
        presented = presented_token(request, subscription.owner_id)
        body = read(NewSubscriptionQueueSerializer, request)
        with at_field("offering_uuid", NoSuchOffering):
            offering = identities.subscribable_offering(subscription.owner, body["offering_uuid"])
        queue, new = registration.create_queue(subscription, offering, body["object_type"], presented)
        return self.created_or_found(SubscriptionQueueSerializer, queue, new)

    def _check_offerings(self, owner: Owner, uuids: set[UUID]) -> None:
        """Make sure that this owner may subscribe to all of them, in one statement where it is so."""
        usable = Offering.objects.subscribed_by(owner).filter(uuid__in=uuids)
        for uuid in uuids.difference(usable.values_list("uuid", flat=True)):
            identities.subscribable_offering(owner, uuid)


class StrictUUIDFilter(UUIDFilter):  # type: ignore[misc]  # the library has no types
    """By a UUID, written as in a body."""

    field_class = StrictUUIDFormField


class SubscriptionQueueFilter(FilterSet):  # type: ignore[misc]  # the library has no types
    """By subscription, offering and object type."""

    event_subscription_uuid = StrictUUIDFilter(field_name="subscription__uuid", label="Of one subscription.")
    offering_uuid = StrictUUIDFilter(field_name="offering__uuid", label="About one offering.")
    object_type = ChoiceFilter(choices=ObjectType.choices, label="Of one type.")

    class Meta:
        model = SubscriptionQueue
        fields: list[str] = []


class SubscriptionQueues(RemovableByUUID[SubscriptionQueue]):
    """Queues of event subscriptions: your own, and all to operators."""

    serializer_class = SubscriptionQueueSerializer
    filterset_class = SubscriptionQueueFilter

    def get_queryset(self) -> QuerySet[SubscriptionQueue]:
        """Return those that the visitor sees."""
        return SubscriptionQueue.objects.seen_by(self.request.user).select_related("subscription", "offering")

    def list(self, request: rest.Request, *args: Any, **kwargs: Any) -> Response:
        """List the queues of event subscriptions, the newest first.

        Your own; to operators all.
        """
        return super().list(request, *args, **kwargs)

    def retrieve(self, request: rest.Request, *args: Any, **kwargs: Any) -> Response:
        """Show the queue of an event subscription."""
        return super().retrieve(request, *args, **kwargs)

    def destroy(self, request: Request, uuid: str) -> Response:
        """Remove the queue of an event subscription, with all that is in it."""
        return super().destroy(request, uuid)


class Consumers(RemovableByUUID[Consumer]):
    """Agents' consumer queues: your own, and all to operators."""

    serializer_class = ConsumerSerializer

    def get_queryset(self) -> QuerySet[Consumer]:
        """Return those that the visitor sees."""
        return Consumer.objects.seen_by(self.request.user).select_related("identity__offering")

    def list(self, request: rest.Request, *args: Any, **kwargs: Any) -> Response:
        """List the consumer queues of agents, the newest first.

        Your own; to operators all.
        """
        return super().list(request, *args, **kwargs)

    def retrieve(self, request: rest.Request, *args: Any, **kwargs: Any) -> Response:
        """Show the consumer queue of an agent."""
        return super().retrieve(request, *args, **kwargs)

    def destroy(self, request: Request, uuid: str) -> Response:
        """Remove the consumer queue of an agent, with all that is in it, and its login on the broker."""
        return super().destroy(request, uuid)


class Offerings(ByUUID[Offering]):
    """What events are about: those that you may subscribe or publish to, and all to operators."""

    serializer_class = OfferingSerializer
    filter_backends = []

    def get_queryset(self) -> QuerySet[Offering]:
        """Return those that the visitor sees."""
        visitor, this = self.request.user, OuterRef("pk")
        seen = Offering.objects.seen_by(visitor).annotate(
            may_subscribe=Exists(Offering.objects.subscribed_by(visitor).filter(pk=this)),
            may_publish=Exists(Offering.objects.published_by(visitor).filter(pk=this)),
        )
        return seen.prefetch_related("members", "publishers") if visitor.is_staff else seen

    def list(self, request: rest.Request, *args: Any, **kwargs: Any) -> Response:
        """List offerings.

        Those that you may subscribe or publish to; to operators all.
        """
        return super().list(request, *args, **kwargs)

    def retrieve(self, request: rest.Request, *args: Any, **kwargs: Any) -> Response:
        """Show an offering."""
        return super().retrieve(request, *args, **kwargs)

    @extend_schema(request=NewEventSerializer, responses={200: PublishedSerializer, 503: None})
    def publish(self, request: Request, uuid: str) -> Response:
        """Publish an event of an offering to all agents that are registered for it.

        For its publishers. The answer counts the queues that took it. 503 where the outcome is unknown: repeat it with
        the message id that the detail names, so that agents can drop what they have already.
        """
        offering = self.get_object()
        body = read(NewEventSerializer, request)
        with at_field("payload", events.InvalidPayload):
            published = events.publish(
                offering, body["object_type"], body["payload"], request.user, body.get("message_id")
            )
        return Response(published.as_json())
