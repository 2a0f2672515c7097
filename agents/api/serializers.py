"""Serializers of agents, their subscriptions and queues, and offerings.

Released agents read the fields of identities, subscriptions and their queues: do not change them.
"""

import uuid
from typing import Any

from django.urls import reverse
from drf_spectacular.utils import OpenApiExample, extend_schema_field, extend_schema_serializer
from rest_framework import serializers

from accounts.api.fields import HexURLField, HexUUIDField
from agents.api.compatibility import compatibility
from agents.api.service_serializers import NestedServiceSerializer
from agents.events.delivery import blocked_reason
from agents.models import AgentIdentity, Consumer, EventSubscription, ObjectType, SubscriptionQueue
from agents.registration import identities
from core.links import absolute_url, object_url
from core.refusals import Refusal

MAX_DEPENDENCIES = 200
MAX_OBSERVED_OBJECTS = 200
MAX_CONFIG_BYTES = 64 * 1024
MAX_NAME_LENGTH = 255
MAX_VERSION_LENGTH = 100
MAX_TEXT_LENGTH = 500
MAX_ID = 2**63 - 1

UUID = "8d9c5b7ef0a14c5f9e0a4f6b6f7c8d9e"
OWNER = "1b6f4a3c2d5e4f708192a3b4c5d6e7f8"
OFFERING = "52c1a0de7b3f4c6d8e9fa0b1c2d3e4f5"
SITE = "https://guardian.example.org/api"
IDENTITY = {
    "uuid": UUID,
    "url": f"{SITE}/marketplace-site-agent-identities/{UUID}/",
    "offering": OFFERING,
    "created_by": OWNER,
    "name": f"agent-{OFFERING}",
    "created": "2026-01-05T09:00:00Z",
    "modified": "2026-01-05T12:00:00Z",
    "services": [],
    "compatibility": {"status": "compatible", "message": "Agents of version 1.0.5 and newer 1.x work with Guardian."},
    "version": "1.0.7",
    "dependencies": [{"package": "waldur-api-client", "version": "8.1.2"}],
    "config_file_path": "/etc/agent.yaml",
    "config_file_content": "",
    "last_restarted": "2026-01-05T12:00:00Z",
}
SUBSCRIPTION = {
    "uuid": UUID,
    "url": f"{SITE}/event-subscriptions/{UUID}/",
    "user": f"{SITE}/me/",
    "user_uuid": OWNER,
    "user_username": "alice@example.org",
    "user_full_name": "Alice",
    "created": "2026-01-05T09:00:00Z",
    "modified": "2026-01-05T12:00:00Z",
    "source_ip": "192.0.2.7",
    "description": "the agent in the cellar",
    "observable_objects": [{"object_type": "order"}],
}
QUEUE = {
    "uuid": UUID,
    "url": f"{SITE}/event-subscription-queues/{UUID}/",
    "event_subscription": f"{SITE}/event-subscriptions/{UUID}/",
    "event_subscription_uuid": UUID,
    "offering_uuid": OFFERING,
    "object_type": "order",
    "queue_name": f"subscription_{UUID}_offering_{OFFERING}_order",
    "vhost": OWNER,
    "created": "2026-01-05T09:00:00Z",
}
CONSUMER_QUEUE = {
    "rmq_username": "0f1e2d3c4b5a49788796a5b4c3d2e1f0",
    "queue_name": f"consumer_{UUID}",
    "vhost": OWNER,
    "observable_object_types": ["order", "user_role"],
}
CONSUMER = {
    "uuid": UUID,
    "url": f"{SITE}/agent-consumers/{UUID}/",
    "agent_identity": f"{SITE}/marketplace-site-agent-identities/{UUID}/",
    "agent_identity_uuid": UUID,
    "offering_uuid": OFFERING,
    **CONSUMER_QUEUE,
    "state": "ready",
    "consumers": 1,
    "delivery_blocked_reason": None,
    "last_delivered_at": "2026-01-05T12:00:00Z",
    "last_error": "The queue got no event: it is full.",
    "last_error_at": "2026-01-05T11:00:00Z",
    "created": "2026-01-05T09:00:00Z",
}


# Fields


class StrictUUIDField(serializers.UUIDField):
    """A UUID in a body: 32 hex digits, with or without dashes."""

    def to_internal_value(self, data: Any) -> uuid.UUID:
        try:
            return identities.read_uuid(data)
        except ValueError as error:
            raise serializers.ValidationError(str(error)) from error


class VerbatimField(serializers.CharField):
    """A text that is stored unchanged, because agents look for the text that they sent."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(trim_whitespace=False, **kwargs)


class ObjectTypeField(serializers.ChoiceField):
    """An object type, validated by ``agents.registration.identities.check_object_type``."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(choices=ObjectType.choices, **kwargs)

    def to_internal_value(self, data: Any) -> str:
        if not isinstance(data, str) or len(data) > MAX_NAME_LENGTH:
            raise serializers.ValidationError("This is not an object type.")
        try:
            return identities.check_object_type(data)
        except Refusal as error:
            raise serializers.ValidationError(str(error)) from error


class BoundedListField(serializers.ListField):
    """A list whose length is checked before its elements."""

    def to_internal_value(self, data: Any) -> list[Any]:
        if isinstance(data, list) and self.max_length is not None and len(data) > self.max_length:
            raise serializers.ValidationError(
                f"The list has {len(data)} elements; at most {self.max_length} are allowed."
            )
        found: list[Any] = super().to_internal_value(data)
        return found


class ConfigField(VerbatimField):
    """The text of a configuration file."""

    def to_internal_value(self, data: Any) -> str:
        text: str = super().to_internal_value(data)
        if len(text.encode()) > MAX_CONFIG_BYTES:
            raise serializers.ValidationError(f"The text is longer than {MAX_CONFIG_BYTES} bytes.")
        return text


# Agents


class DependencySerializer(serializers.Serializer[Any]):
    """A package that an agent depends on."""

    package = VerbatimField(max_length=MAX_NAME_LENGTH)
    version = VerbatimField(max_length=MAX_VERSION_LENGTH, allow_blank=True)


class CompatibilitySerializer(serializers.Serializer[Any]):
    """Whether an agent works with Guardian."""

    status = serializers.ChoiceField(choices=["compatible", "incompatible", "unknown"])
    message = serializers.CharField()


@extend_schema_serializer(examples=[OpenApiExample("An agent", IDENTITY, response_only=True)])
class AgentIdentitySerializer(serializers.ModelSerializer[AgentIdentity]):
    """An agent's identity for one offering."""

    uuid = HexUUIDField()
    url = HexURLField("api-agent-identity-detail")
    offering = HexUUIDField(source="offering.uuid")
    created_by = HexUUIDField(source="owner.uuid")
    services = NestedServiceSerializer(many=True, read_only=True)
    compatibility = serializers.SerializerMethodField()
    dependencies = DependencySerializer(many=True, read_only=True)
    config_file_content = serializers.SerializerMethodField(help_text="Only the owner can read it.")
    last_restarted = serializers.SerializerMethodField(help_text="The creation time if the agent sent none.")

    class Meta:
        model = AgentIdentity
        fields = [
            "uuid", "url", "offering", "created_by", "name", "created", "modified", "services", "compatibility",
            "version", "dependencies", "config_file_path", "config_file_content", "last_restarted",
        ]  # fmt: skip
        read_only_fields = fields

    @extend_schema_field(CompatibilitySerializer)
    def get_compatibility(self, identity: AgentIdentity) -> dict[str, str]:
        return compatibility(identity.version)

    def get_config_file_content(self, identity: AgentIdentity) -> str:
        """Return the file's text for its owner, "" for others, because it may contain secrets."""
        return identities.read_config(identity) if identity.owner == self.context["request"].user else ""

    @extend_schema_field(serializers.DateTimeField())
    def get_last_restarted(self, identity: AgentIdentity) -> str:
        """Return the time of the last restart. Never null, because the agents' client requires a time."""
        return str(serializers.DateTimeField().to_representation(identity.last_restarted or identity.created))


@extend_schema_serializer(
    examples=[
        OpenApiExample(
            "An agent",
            {
                "offering": OFFERING,
                "name": f"agent-{OFFERING}",
                "version": "1.0.7",
                "dependencies": [{"package": "waldur-api-client", "version": "8.1.2"}],
            },
            request_only=True,
        )
    ]
)
class NewAgentIdentitySerializer(serializers.Serializer[Any]):
    """A new or updated agent identity."""

    offering = StrictUUIDField(help_text="The UUID of an offering that you may subscribe to.")
    name = VerbatimField(max_length=MAX_NAME_LENGTH, help_text="Unique among your identities for the offering.")
    version = VerbatimField(required=False, allow_null=True, allow_blank=True, max_length=MAX_VERSION_LENGTH)
    dependencies = BoundedListField(child=DependencySerializer(), required=False, max_length=MAX_DEPENDENCIES)
    config_file_path = VerbatimField(required=False, allow_null=True, allow_blank=True, max_length=MAX_TEXT_LENGTH)
    config_file_content = ConfigField(
        required=False, allow_null=True, allow_blank=True, help_text="At most 65536 bytes. Stored encrypted."
    )
    last_restarted = serializers.DateTimeField(required=False, allow_null=True, help_text="Without a time zone, UTC.")

    def validate_name(self, name: str) -> str:
        if not name.strip():
            raise serializers.ValidationError("This field may not be blank.")
        return name

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        texts = ("version", "config_file_path", "config_file_content")
        return attrs | {name: attrs[name] or "" for name in texts if name in attrs}


class NewServiceSerializer(serializers.Serializer[Any]):
    """A service, by its name."""

    name = VerbatimField(max_length=MAX_NAME_LENGTH)
    mode = VerbatimField(max_length=100, required=False, allow_null=True, allow_blank=True)


class NewAgentSubscriptionSerializer(serializers.Serializer[Any]):
    """A subscription of an agent."""

    observable_object_type = ObjectTypeField()
    description = VerbatimField(required=False, allow_blank=True, max_length=MAX_TEXT_LENGTH)


@extend_schema_serializer(
    examples=[OpenApiExample("Two types", {"object_types": ["order", "user_role"]}, request_only=True)]
)
class NewConsumerSerializer(serializers.Serializer[Any]):
    """The consumer queue of an agent."""

    object_types = BoundedListField(
        child=ObjectTypeField(),
        required=False,
        max_length=MAX_OBSERVED_OBJECTS,
        help_text="An empty list: all types. Left out: unchanged, or all types for a new queue.",
    )

    def validate_object_types(self, object_types: list[str]) -> list[str]:
        return list(dict.fromkeys(object_types))


class ObservableTypesField(serializers.ListField):
    """The object types of a consumer queue."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(child=serializers.CharField(), source="object_types", help_text="Empty: all types.", **kwargs)


@extend_schema_serializer(examples=[OpenApiExample("A consumer queue", CONSUMER_QUEUE, response_only=True)])
class ConsumerQueueSerializer(serializers.ModelSerializer[Consumer]):
    """The consumer queue of an agent, and its login on the broker. The password is the token of the last request."""

    observable_object_types = ObservableTypesField(read_only=True)

    class Meta:
        model = Consumer
        fields = ["rmq_username", "queue_name", "vhost", "observable_object_types"]
        read_only_fields = fields


class DeliverySerializer(serializers.ModelSerializer[Consumer]):
    """Whether the events of a consumer reach its agent. The row comes from ``with_delivery``."""

    consumers = serializers.IntegerField(
        read_only=True, allow_null=True, help_text="How many clients read the queue, as counted every minute."
    )
    delivery_blocked_reason = serializers.SerializerMethodField(help_text="Null while delivery works.")

    def get_delivery_blocked_reason(self, consumer: Consumer) -> str | None:
        return blocked_reason(consumer)


@extend_schema_serializer(examples=[OpenApiExample("A consumer", CONSUMER, response_only=True)])
class ConsumerSerializer(DeliverySerializer, ConsumerQueueSerializer):
    """The consumer queue of an agent, and whether its events reach the agent."""

    uuid = HexUUIDField()
    url = HexURLField("api-agent-consumer-detail")
    agent_identity = HexURLField("api-agent-identity-detail", "identity")
    agent_identity_uuid = HexUUIDField(source="identity.uuid")
    offering_uuid = HexUUIDField(source="identity.offering.uuid")

    class Meta(ConsumerQueueSerializer.Meta):
        fields = [
            "uuid", "url", "agent_identity", "agent_identity_uuid", "offering_uuid", "rmq_username", "queue_name",
            "vhost", "observable_object_types", "state", "consumers", "delivery_blocked_reason", "last_delivered_at",
            "last_error", "last_error_at", "created",
        ]  # fmt: skip
        read_only_fields = fields


# Subscriptions


class ObservableObjectSerializer(serializers.Serializer[Any]):
    """An object that a subscription observes."""

    object_type = ObjectTypeField()
    object_id = serializers.IntegerField(required=False, min_value=-MAX_ID - 1, max_value=MAX_ID)
    offering_uuid = StrictUUIDField(
        required=False, format="hex", help_text="UUID of an offering that you may subscribe to."
    )


@extend_schema_serializer(examples=[OpenApiExample("A subscription", SUBSCRIPTION, response_only=True)])
class EventSubscriptionSerializer(serializers.ModelSerializer[EventSubscription]):
    """An event subscription. Its UUID, in hex, is the name of its login on the broker."""

    uuid = HexUUIDField()
    url = HexURLField("api-event-subscription-detail")
    user = serializers.SerializerMethodField(help_text="URL of the owner.")
    user_uuid = HexUUIDField(source="owner.uuid", help_text="Also the name of the vhost of its queues.")
    user_username = serializers.CharField(source="owner.email", read_only=True)
    user_full_name = serializers.CharField(source="owner.full_name", read_only=True)
    source_ip = serializers.IPAddressField(
        read_only=True, allow_null=True, help_text="The client's address at registration; null if unknown."
    )
    observable_objects = serializers.SerializerMethodField()

    class Meta:
        model = EventSubscription
        fields = [
            "uuid", "url", "user", "user_uuid", "user_username", "user_full_name", "created", "modified",
            "source_ip", "description", "observable_objects",
        ]  # fmt: skip
        read_only_fields = fields

    @extend_schema_field({"type": "string", "format": "uri"})
    def get_user(self, subscription: EventSubscription) -> str:
        """Return a URL of the owner that the user may read: ``me`` for the owner, the owner's page for operators."""
        owner = subscription.owner
        if owner == self.context["request"].user:
            return absolute_url(reverse("api-me"))
        return object_url("api-owner-detail", owner.uuid)

    @extend_schema_field(ObservableObjectSerializer(many=True))
    def get_observable_objects(self, subscription: EventSubscription) -> list[dict[str, Any]]:
        """Return the observed objects. An identity's subscription stores none, so return its object type."""
        if subscription.object_type and not subscription.observable_objects:
            return [{"object_type": subscription.object_type}]
        objects: list[dict[str, Any]] = subscription.observable_objects
        return objects


@extend_schema_serializer(
    examples=[
        OpenApiExample(
            "Orders of one offering",
            {
                "description": "the agent in the cellar",
                "observable_objects": [{"object_type": "order", "offering_uuid": OFFERING}],
            },
            request_only=True,
        )
    ]
)
class NewEventSubscriptionSerializer(serializers.Serializer[Any]):
    """A new event subscription."""

    description = VerbatimField(required=False, allow_blank=True, max_length=MAX_TEXT_LENGTH)
    observable_objects = BoundedListField(
        child=ObservableObjectSerializer(), required=False, max_length=MAX_OBSERVED_OBJECTS
    )


@extend_schema_serializer(examples=[OpenApiExample("A queue", QUEUE, response_only=True)])
class SubscriptionQueueSerializer(serializers.ModelSerializer[SubscriptionQueue]):
    """The queue of a subscription for the events of one type about one offering."""

    uuid = HexUUIDField()
    url = HexURLField("api-event-subscription-queue-detail")
    event_subscription = HexURLField(
        "api-event-subscription-detail", "subscription", help_text="URL of its subscription."
    )
    event_subscription_uuid = HexUUIDField(source="subscription.uuid")
    offering_uuid = HexUUIDField(source="offering.uuid")

    class Meta:
        model = SubscriptionQueue
        fields = [
            "uuid", "url", "event_subscription", "event_subscription_uuid", "offering_uuid", "object_type",
            "queue_name", "vhost", "created",
        ]  # fmt: skip
        read_only_fields = fields


@extend_schema_serializer(
    examples=[OpenApiExample("Orders", {"offering_uuid": OFFERING, "object_type": "order"}, request_only=True)]
)
class NewSubscriptionQueueSerializer(serializers.Serializer[Any]):
    """A new queue of a subscription."""

    offering_uuid = StrictUUIDField(help_text="UUID of an offering that you may subscribe to.")
    object_type = ObjectTypeField(help_text="Any type, including types that the subscription doesn't list.")
