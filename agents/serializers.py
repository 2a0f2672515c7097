"""What the REST API tells and takes about agents, their subscriptions and queues, and offerings.

The fields of identities, subscriptions and their queues are those that agents in the field read.
"""

import re
import uuid
from typing import Any, NamedTuple

from django import forms
from django.core.exceptions import ValidationError as InvalidValue
from django.urls import reverse
from drf_spectacular.utils import OpenApiExample, extend_schema_field, extend_schema_serializer
from rest_framework import serializers

from accounts.models import Owner
from accounts.serializers import HexURLField, HexUUIDField
from agents import identities
from agents.models import AgentIdentity, Consumer, EventSubscription, ObjectType, Offering, SubscriptionQueue
from core.links import absolute_url, object_url

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
    "created": "2026-01-05T09:00:00Z",
}
THE_OFFERING = {
    "uuid": OFFERING,
    "url": f"{SITE}/offerings/{OFFERING}/",
    "name": "Cluster",
    "may_subscribe": True,
    "may_publish": False,
    "members": None,
    "publishers": None,
}


class Compatibility(NamedTuple):
    """Whether an agent works with Guardian, and a sentence about it."""

    status: str
    message: str


OLDEST_TESTED_VERSION = (1, 0, 5)
_VERSION = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})(?:\.([0-9]{1,9}))?(?![0-9])")


def compatibility(version: str) -> Compatibility:
    """Return whether an agent of this version works with Guardian: those that were tried, and newer ones of 1.x.

    Of all others nobody knows; none is known not to work, so that none is called incompatible.
    """
    match = _VERSION.match(version)
    if match is None:
        return Compatibility("unknown", "The agent tells no version that can be read.")
    found = tuple(int(part or 0) for part in match.groups())
    if found[0] == OLDEST_TESTED_VERSION[0] and found >= OLDEST_TESTED_VERSION:
        return Compatibility("compatible", "Agents of version 1.0.5 and newer 1.x work with Guardian.")
    return Compatibility("unknown", "Guardian was tried with agents of version 1.0.5 and newer 1.x, not with this one.")


def identity_url(identity: AgentIdentity) -> str:
    """Return where an identity is read."""
    return object_url("api-agent-identity", identity.uuid)


# Fields


class StrictUUIDField(serializers.UUIDField):
    """A UUID in a body."""

    def to_internal_value(self, data: Any) -> uuid.UUID:
        """Return it.

        Raises:
            ValidationError: it isn't written as one.
        """
        try:
            return identities.read_uuid(data)
        except ValueError as error:
            raise serializers.ValidationError(str(error)) from error


class StrictUUIDFormField(forms.UUIDField):
    """A UUID that a list is filtered by."""

    def to_python(self, value: Any) -> Any:
        """Return the UUID; None: there is no filter.

        Raises:
            ValidationError: it isn't written as one.
        """
        if value in self.empty_values:
            return None
        try:
            return identities.read_uuid(value)
        except ValueError as error:
            raise InvalidValue(str(error)) from error


class VerbatimField(serializers.CharField):
    """A name or a text, kept as it stands: agents look for what they sent."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(trim_whitespace=False, **kwargs)


class ObjectTypeField(serializers.ChoiceField):
    """What an event is about. ``agents.identities.check_object_type`` says what is one."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(choices=ObjectType.choices, **kwargs)

    def to_internal_value(self, data: Any) -> str:
        """Return it.

        Raises:
            ValidationError: there is no such type.
        """
        if not isinstance(data, str) or len(data) > MAX_NAME_LENGTH:
            raise serializers.ValidationError("This is no object type.")
        try:
            return identities.check_object_type(data)
        except identities.NoSuchObjectType as error:
            raise serializers.ValidationError(str(error)) from error


class BoundedListField(serializers.ListField):
    """A list of which no element is looked at where there are too many."""

    def to_internal_value(self, data: Any) -> list[Any]:
        """Return the elements.

        Raises:
            ValidationError: it is no list, or too long, or an element can't be used.
        """
        if isinstance(data, list) and self.max_length is not None and len(data) > self.max_length:
            raise serializers.ValidationError(f"These are {len(data)}; {self.max_length} are allowed.")
        found: list[Any] = super().to_internal_value(data)
        return found


class ConfigField(VerbatimField):
    """The text of a configuration file."""

    def to_internal_value(self, data: Any) -> str:
        """Return it.

        Raises:
            ValidationError: it is no text, or too long.
        """
        text: str = super().to_internal_value(data)
        if len(text.encode()) > MAX_CONFIG_BYTES:
            raise serializers.ValidationError(f"This is longer than {MAX_CONFIG_BYTES} bytes.")
        return text


# Agents


class DependencySerializer(serializers.Serializer[Any]):
    """A package that an agent is made of."""

    package = VerbatimField(max_length=MAX_NAME_LENGTH)
    version = VerbatimField(max_length=MAX_VERSION_LENGTH, allow_blank=True)


class CompatibilitySerializer(serializers.Serializer[Compatibility]):
    """Whether an agent works with Guardian."""

    status = serializers.ChoiceField(choices=["compatible", "incompatible", "unknown"])
    message = serializers.CharField()


@extend_schema_serializer(examples=[OpenApiExample("An agent", IDENTITY, response_only=True)])
class AgentIdentitySerializer(serializers.ModelSerializer[AgentIdentity]):
    """An agent, as it introduced itself for one offering."""

    uuid = HexUUIDField()
    url = HexURLField(view_name="api-agent-identity")
    offering = HexUUIDField(source="offering.uuid")
    created_by = HexUUIDField(source="owner.uuid")
    services = serializers.SerializerMethodField(help_text="None: Guardian keeps no account of them.")
    compatibility = serializers.SerializerMethodField()
    dependencies = DependencySerializer(many=True, read_only=True)
    config_file_content = serializers.SerializerMethodField(help_text="Told to its owner alone.")
    last_restarted = serializers.SerializerMethodField(help_text="Where the agent didn't tell: when it was created.")

    class Meta:
        model = AgentIdentity
        fields = list(IDENTITY)
        read_only_fields = fields

    @extend_schema_field({"type": "array", "items": {"type": "object"}, "maxItems": 0})
    def get_services(self, identity: AgentIdentity) -> list[Any]:
        """Return those that are kept: none."""
        return []

    @extend_schema_field(CompatibilitySerializer)
    def get_compatibility(self, identity: AgentIdentity) -> dict[str, str]:
        """Return whether it works with Guardian, by its version."""
        return compatibility(identity.version)._asdict()

    def get_config_file_content(self, identity: AgentIdentity) -> str:
        """Return the file's text to its owner, nothing to others: there may be secrets in it."""
        return identities.read_config(identity) if identity.owner == self.context["request"].user else ""

    @extend_schema_field(serializers.DateTimeField())
    def get_last_restarted(self, identity: AgentIdentity) -> str:
        """Return when. It is never null: the agents' client reads a time there, or fails."""
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
    """How an agent introduces itself."""

    offering = StrictUUIDField(help_text="The UUID of an offering that you may subscribe to.")
    name = VerbatimField(max_length=MAX_NAME_LENGTH, help_text="One of its own for each offering.")
    version = VerbatimField(required=False, allow_null=True, allow_blank=True, max_length=MAX_VERSION_LENGTH)
    dependencies = BoundedListField(child=DependencySerializer(), required=False, max_length=MAX_DEPENDENCIES)
    config_file_path = VerbatimField(required=False, allow_null=True, allow_blank=True, max_length=MAX_TEXT_LENGTH)
    config_file_content = ConfigField(
        required=False, allow_null=True, allow_blank=True, help_text="65536 bytes at most. It is kept sealed."
    )
    last_restarted = serializers.DateTimeField(
        required=False, allow_null=True, help_text="In UTC, where it names no time zone."
    )

    def validate_name(self, name: str) -> str:
        """Return it.

        Raises:
            ValidationError: there is nothing to be seen in it.
        """
        if not name.strip():
            raise serializers.ValidationError("This field may not be blank.")
        return name

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        """Return what the body says; a text that is null is an empty one."""
        texts = ("version", "config_file_path", "config_file_content")
        return attrs | {name: attrs[name] or "" for name in texts if name in attrs}


class NewAgentSubscriptionSerializer(serializers.Serializer[Any]):
    """What an agent wants to hear of."""

    observable_object_type = ObjectTypeField()
    description = VerbatimField(required=False, allow_blank=True, max_length=MAX_TEXT_LENGTH)


@extend_schema_serializer(
    examples=[OpenApiExample("Two types", {"object_types": ["order", "user_role"]}, request_only=True)]
)
class NewConsumerSerializer(serializers.Serializer[Any]):
    """What an agent wants to hear of, in its one queue."""

    object_types = BoundedListField(
        child=ObjectTypeField(),
        required=False,
        max_length=MAX_OBSERVED_OBJECTS,
        help_text="None of them: all types. Left out: those that it gets already; all, where the queue is new.",
    )

    def validate_object_types(self, object_types: list[str]) -> list[str]:
        """Return each once."""
        return list(dict.fromkeys(object_types))


class ObservableTypesField(serializers.ListField):
    """The types that a consumer queue gets."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(child=serializers.CharField(), source="object_types", help_text="None: all.", **kwargs)


@extend_schema_serializer(examples=[OpenApiExample("A consumer queue", CONSUMER_QUEUE, response_only=True)])
class ConsumerQueueSerializer(serializers.ModelSerializer[Consumer]):
    """The one queue of an agent, and by which name it logs in to the broker. The password is the token presented."""

    observable_object_types = ObservableTypesField(read_only=True)

    class Meta:
        model = Consumer
        fields = list(CONSUMER_QUEUE)
        read_only_fields = fields


@extend_schema_serializer(examples=[OpenApiExample("A consumer", CONSUMER, response_only=True)])
class ConsumerSerializer(ConsumerQueueSerializer):
    """The one queue of an agent, and whether it is on the broker."""

    uuid = HexUUIDField()
    url = HexURLField(view_name="api-agent-consumer")
    agent_identity = serializers.SerializerMethodField()
    agent_identity_uuid = HexUUIDField(source="identity.uuid")
    offering_uuid = HexUUIDField(source="identity.offering.uuid")

    class Meta(ConsumerQueueSerializer.Meta):
        fields = list(CONSUMER)
        read_only_fields = fields

    @extend_schema_field({"type": "string", "format": "uri"})
    def get_agent_identity(self, consumer: Consumer) -> str:
        """Return where its agent is read."""
        return identity_url(consumer.identity)


# Subscriptions


class ObservableObjectSerializer(serializers.Serializer[Any]):
    """What a subscription is about."""

    object_type = ObjectTypeField()
    object_id = serializers.IntegerField(required=False, min_value=-MAX_ID - 1, max_value=MAX_ID)
    offering_uuid = StrictUUIDField(required=False, format="hex", help_text="Of an offering that you may subscribe to.")


@extend_schema_serializer(examples=[OpenApiExample("A subscription", SUBSCRIPTION, response_only=True)])
class EventSubscriptionSerializer(serializers.ModelSerializer[EventSubscription]):
    """What an owner's agent wants to hear of. Its UUID, in hex, is the name by which it logs in to the broker."""

    uuid = HexUUIDField()
    url = HexURLField(view_name="api-event-subscription")
    user = serializers.SerializerMethodField(help_text="Where its owner is read.")
    user_uuid = HexUUIDField(source="owner.uuid", help_text="The name of the vhost that its queues lie in.")
    user_username = serializers.CharField(source="owner.email", read_only=True)
    user_full_name = serializers.CharField(source="owner.full_name", read_only=True)
    source_ip = serializers.IPAddressField(
        read_only=True, allow_null=True, help_text="Where it was registered from; null: unknown."
    )
    observable_objects = serializers.SerializerMethodField()

    class Meta:
        model = EventSubscription
        fields = list(SUBSCRIPTION)
        read_only_fields = fields

    @extend_schema_field({"type": "string", "format": "uri"})
    def get_user(self, subscription: EventSubscription) -> str:
        """Return an address that the visitor may read: its owner as themselves, operators the owner's."""
        owner = subscription.owner
        if owner == self.context["request"].user:
            return absolute_url(reverse("api-me"))
        return object_url("api-owner", owner.uuid)

    @extend_schema_field(ObservableObjectSerializer(many=True))
    def get_observable_objects(self, subscription: EventSubscription) -> list[dict[str, Any]]:
        """Return its list; of an identity's subscription, which has none, the one type that it is for."""
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
    """What is to be heard of."""

    description = VerbatimField(required=False, allow_blank=True, max_length=MAX_TEXT_LENGTH)
    observable_objects = BoundedListField(
        child=ObservableObjectSerializer(), required=False, max_length=MAX_OBSERVED_OBJECTS
    )


@extend_schema_serializer(examples=[OpenApiExample("A queue", QUEUE, response_only=True)])
class SubscriptionQueueSerializer(serializers.ModelSerializer[SubscriptionQueue]):
    """The queue of a subscription for the events of one type about one offering."""

    uuid = HexUUIDField()
    url = HexURLField(view_name="api-event-subscription-queue")
    event_subscription = serializers.SerializerMethodField(help_text="Where its subscription is read.")
    event_subscription_uuid = HexUUIDField(source="subscription.uuid")
    offering_uuid = HexUUIDField(source="offering.uuid")

    class Meta:
        model = SubscriptionQueue
        fields = list(QUEUE)
        read_only_fields = fields

    @extend_schema_field({"type": "string", "format": "uri"})
    def get_event_subscription(self, queue: SubscriptionQueue) -> str:
        """Return the address of its subscription."""
        return object_url("api-event-subscription", queue.subscription.uuid)


@extend_schema_serializer(
    examples=[OpenApiExample("Orders", {"offering_uuid": OFFERING, "object_type": "order"}, request_only=True)]
)
class NewSubscriptionQueueSerializer(serializers.Serializer[Any]):
    """Whose events, and of which type, a queue is for."""

    offering_uuid = StrictUUIDField(help_text="Of an offering that you may subscribe to.")
    object_type = ObjectTypeField(help_text="Any type, whatever the subscription's own list says.")


# Offerings


@extend_schema_serializer(examples=[OpenApiExample("An offering", THE_OFFERING, response_only=True)])
class OfferingSerializer(serializers.ModelSerializer[Offering]):
    """What events are about."""

    uuid = HexUUIDField()
    url = HexURLField(view_name="api-offering")
    may_subscribe = serializers.BooleanField(read_only=True, help_text="Whether your agents may have its events.")
    may_publish = serializers.BooleanField(read_only=True, help_text="Whether you may publish its events.")
    members = serializers.SerializerMethodField(
        help_text="Whose agents may have its events, by e-mail address. Null: you are no operator."
    )
    publishers = serializers.SerializerMethodField(
        help_text="Who may publish its events, by e-mail address. Null: you are no operator."
    )

    class Meta:
        model = Offering
        fields = list(THE_OFFERING)
        read_only_fields = fields

    def get_members(self, offering: Offering) -> list[str] | None:
        """Return their addresses to operators."""
        return _addresses(offering.members.all()) if self.context["request"].user.is_staff else None

    def get_publishers(self, offering: Offering) -> list[str] | None:
        """Return their addresses to operators."""
        return _addresses(offering.publishers.all()) if self.context["request"].user.is_staff else None


def _addresses(owners: Any) -> list[str]:
    """Return addresses in order. Sorted here: another order of the database's would not use what was fetched before."""
    people: list[Owner] = list(owners)
    return sorted(owner.email for owner in people)


@extend_schema_serializer(
    examples=[OpenApiExample("An order", {"object_type": "order", "payload": {"order_uuid": UUID}}, request_only=True)]
)
class NewEventSerializer(serializers.Serializer[Any]):
    """An event to be published."""

    object_type = ObjectTypeField()
    payload = serializers.DictField(
        help_text="A JSON object. object_type, offering_uuid and schema_version are added at its top level."
    )
    message_id = StrictUUIDField(
        required=False, help_text="The one of a first try whose outcome is unknown. Left out: a new one."
    )


@extend_schema_serializer(
    examples=[
        OpenApiExample(
            "An order",
            {"message_id": str(UUID), "delivered": 2, "skipped": 0, "rejected": 0, "gone": 0},
            response_only=True,
        )
    ]
)
class PublishedSerializer(serializers.Serializer[Any]):
    """What became of an event, in queues."""

    message_id = serializers.CharField(help_text="By which agents can tell that they have had it.")
    delivered = serializers.IntegerField(help_text="Queues that have it.")
    skipped = serializers.IntegerField(help_text="Queues that are not ready, or whose owner may not have it any more.")
    rejected = serializers.IntegerField(help_text="Queues that are full; the dead-letter queue has it.")
    gone = serializers.IntegerField(help_text="Queues that the broker has lost.")
