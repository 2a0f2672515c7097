"""The endpoints of event consumers, as released clients call them."""

from http import HTTPStatus
from typing import Any

from django.db.models import QuerySet
from django_filters import BooleanFilter, FilterSet  # type: ignore[import-untyped]
from drf_spectacular.utils import extend_schema, extend_schema_field, extend_schema_view
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.response import Response

from accounts.access import vouching
from accounts.api.fields import HexURLField, HexUUIDField
from accounts.api.views import Request
from agents.api.filters import AddressFilter, StrictUUIDFilter
from agents.api.serializers import (
    MAX_OBSERVED_OBJECTS,
    BoundedListField,
    ConsumerQueueSerializer,
    DeliverySerializer,
    NewConsumerSerializer,
    StrictUUIDField,
    VerbatimField,
)
from agents.api.views import RemovableByUUID, presented_token
from agents.events import event_consumers
from agents.events.delivery import with_delivery
from agents.models import Consumer, Registration
from agents.registration import identities
from core.endpoints import at_field, read

OFFERING = "offering"
ONE_OFFERING = (
    "Send exactly one scope, of the type 'offering'. Guardian has events about offerings only, and a queue for each."
)


class NewScopeSerializer(serializers.Serializer[Any]):
    """What an event consumer gets the events of."""

    type = VerbatimField(max_length=100, help_text="`offering`.")
    uuid = StrictUUIDField(help_text="The UUID of an offering that you may subscribe to.")


class NewEventConsumerSerializer(NewConsumerSerializer):
    """A new or updated event consumer."""

    scopes = BoundedListField(
        child=NewScopeSerializer(), default=list, max_length=MAX_OBSERVED_OBJECTS, help_text="Exactly one offering."
    )

    def validate_scopes(self, scopes: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if [one["type"] for one in scopes] != [OFFERING]:
            raise serializers.ValidationError(ONE_OFFERING)
        return scopes


class EventConsumerUpdateSerializer(NewConsumerSerializer):
    """The object types of an event consumer."""


class ScopeSerializer(serializers.Serializer[Any]):
    """What an event consumer gets the events of."""

    type = serializers.CharField()
    uuid = serializers.CharField()


class EventConsumerSerializer(DeliverySerializer):
    """A consumer with its owner."""

    uuid = HexUUIDField()
    url = HexURLField("api-event-consumer-detail")
    object_types = serializers.ListField(child=serializers.CharField(), help_text="Empty: all types.")
    scopes = serializers.SerializerMethodField()
    is_global = serializers.BooleanField(default=False, help_text="False: a consumer belongs to an offering.")
    queue_created = serializers.SerializerMethodField(help_text="Whether RabbitMQ has the queue.")
    user_uuid = HexUUIDField(source="identity.owner.uuid")
    user_username = serializers.CharField(source="identity.owner.email")
    user_full_name = serializers.CharField(source="identity.owner.full_name")
    user_is_staff = serializers.BooleanField(source="identity.owner.is_staff")
    auth_kind = serializers.CharField(default="token")
    auth_token_prefix = serializers.CharField(default="")
    auth_token_name = serializers.CharField(default="")
    authorized_via = serializers.SerializerMethodField(
        help_text="`staff` for operators, `scope_role` for members of the offering."
    )

    class Meta:
        model = Consumer
        fields = [
            "uuid", "url", "object_types", "scopes", "is_global", "rmq_username", "queue_name", "vhost",
            "queue_created", "user_uuid", "user_username", "user_full_name", "user_is_staff", "auth_kind",
            "auth_token_prefix", "auth_token_name", "authorized_via", "consumers", "delivery_blocked_reason",
            "last_delivered_at", "last_error", "last_error_at", "created", "modified",
        ]  # fmt: skip
        read_only_fields = fields

    @extend_schema_field(ScopeSerializer(many=True))
    def get_scopes(self, consumer: Consumer) -> list[dict[str, str]]:
        return [{"type": OFFERING, "uuid": consumer.identity.offering.uuid.hex}]

    def get_queue_created(self, consumer: Consumer) -> bool:
        return consumer.state == Registration.READY

    def get_authorized_via(self, consumer: Consumer) -> str:
        return "staff" if consumer.identity.owner.is_staff else "scope_role"


class EventConsumerFilter(FilterSet):  # type: ignore[misc]  # the library has no types
    """Filters of consumers by their owner."""

    user_uuid = StrictUUIDFilter(field_name="identity__owner__uuid", label="UUID of the owner.")
    user_username = AddressFilter(field_name="identity__owner__email", label="The owner's address.")
    is_global = BooleanFilter(method="filter_is_global", label="True: none, as each consumer belongs to an offering.")

    class Meta:
        model = Consumer
        fields: list[str] = []

    def filter_is_global(self, queryset: QuerySet[Consumer], name: str, value: bool) -> QuerySet[Consumer]:
        return queryset.none() if value else queryset


@extend_schema_view(
    list=extend_schema(summary="List your consumers, newest first", description="Operators see all consumers."),
    retrieve=extend_schema(summary="Show a consumer"),
)
class EventConsumers(RemovableByUUID[Consumer]):
    """Consumers: your own, with those of your agents; for operators, all."""

    serializer_class = EventConsumerSerializer
    filterset_class = EventConsumerFilter

    def get_queryset(self) -> QuerySet[Consumer]:
        rows = Consumer.objects.seen_by(self.request.user)
        return with_delivery(rows.select_related("identity__offering", "identity__owner"))

    @extend_schema(
        request=NewEventConsumerSerializer,
        responses={201: ConsumerQueueSerializer, 200: ConsumerQueueSerializer, 409: None, 503: None},
    )
    @action(detail=False, methods=["post"])
    def register(self, request: Request) -> Response:
        """Register the queue of an event consumer for an offering, or update its object types.

        201: the queue is new. 200: it exists already. The token of the request becomes the password of `rmq_username`
        on the broker.
        """
        vouching.require_vouched(request.user)
        presented = presented_token(request, request.user.pk)
        body = read(NewEventConsumerSerializer, request)
        with at_field("scopes"):
            offering = identities.subscribable_offering(request.user, body["scopes"][0]["uuid"])
        consumer, new = event_consumers.register(request.user, offering, presented, body.get("object_types"))
        return self.created_or_found(ConsumerQueueSerializer, consumer, new)

    @extend_schema(request=EventConsumerUpdateSerializer, responses=EventConsumerSerializer)
    def partial_update(self, request: Request, uuid: str) -> Response:
        """Change the object types of a consumer."""
        consumer = self.get_object()
        body = read(EventConsumerUpdateSerializer, request)
        if "object_types" in body:
            event_consumers.set_object_types(consumer, body["object_types"])
        return Response(self.get_serializer(self.get_object()).data)

    def destroy(self, request: Request, uuid: str) -> Response:
        """Remove a consumer, with its queue, its messages and its login on the broker."""
        event_consumers.remove(self.get_object())
        return Response(status=HTTPStatus.NO_CONTENT)
