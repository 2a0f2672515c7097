"""What the REST API tells and takes about queues, exchanges, and how their owners are told of them."""

from datetime import datetime
from typing import Any
from urllib.parse import urlencode

from django.urls import reverse
from drf_spectacular.utils import OpenApiExample, extend_schema_field, extend_schema_serializer
from rest_framework import serializers

from accounts.models import PulseUser
from accounts.serializers import HexURLField, HexUUIDField, OwnerEmailField, ThresholdField
from core.links import absolute_url
from queues import thresholds
from queues.charts import SPANS
from queues.exchanges import OwnExchange
from queues.models import Queue, QueueEvent, QueueSample
from rabbit.management import Binding

QUEUE = {
    "uuid": "8d9c5b7ef0a14c5f9e0a4f6b6f7c8d9e",
    "url": "https://guardian.example.org/api/queues/8d9c5b7ef0a14c5f9e0a4f6b6f7c8d9e/",
    "vhost": "/",
    "name": "queue/alice/builds",
    "type": "classic",
    "durable": True,
    "pulse_user": "alice",
    "owners": ["alice@example.org"],
    "state": "warned",
    "length": 2104,
    "ready": 2100,
    "unacknowledged": 4,
    "consumers": 1,
    "warn_length": 2000,
    "max_length": 8000,
    "unbounded": False,
    "registered": False,
    "first_seen": "2026-01-05T09:00:00Z",
    "last_seen": "2026-01-05T12:00:00Z",
}
BINDING = {
    "source": "exchange/builder/jobs",
    "destination": "queue/alice/builds",
    "destination_type": "queue",
    "routing_key": "build.#",
    "arguments": {},
}


@extend_schema_serializer(examples=[OpenApiExample("A queue", QUEUE, response_only=True)])
class QueueSerializer(serializers.ModelSerializer[Queue]):
    """A queue as last seen. What is unknown is null, which is not 0."""

    uuid = HexUUIDField()
    url = HexURLField(view_name="api-queue")
    pulse_user: serializers.SlugRelatedField[PulseUser] = serializers.SlugRelatedField(
        slug_field="username", read_only=True, allow_null=True
    )
    owners = serializers.SerializerMethodField(help_text="Their e-mail addresses.")
    length = serializers.IntegerField(allow_null=True, help_text="Ready and unacknowledged messages.")
    warn_length = serializers.SerializerMethodField(help_text="Messages at which its owners are warned.")
    max_length = serializers.SerializerMethodField(
        help_text="Messages past which it is deleted, unless unbounded or registered."
    )
    last_seen = serializers.SerializerMethodField(help_text="When it was last there.")

    class Meta:
        model = Queue
        fields = list(QUEUE)
        read_only_fields = fields

    def get_owners(self, queue: Queue) -> list[str]:
        """Return the addresses of its Pulse user's owners, or that of the owner of the agents whose it is."""
        owners = [owner.email for owner in queue.pulse_user.owners.all()] if queue.pulse_user else []
        return [*owners, queue.owner.email] if queue.owner else owners

    def get_warn_length(self, queue: Queue) -> int:
        """Return the one that applies."""
        return thresholds.of_queue(queue).warn

    def get_max_length(self, queue: Queue) -> int:
        """Return the one that applies."""
        return thresholds.of_queue(queue).max

    def get_last_seen(self, queue: Queue) -> datetime:
        """Return when it was last there: at the last list, where that had it; the row is written when it changes."""
        listed_at: datetime | None = self.context["listed_at"]
        there = queue.state != Queue.State.GONE and queue.misses == 0
        return max(queue.last_seen, listed_at) if there and listed_at else queue.last_seen


@extend_schema_serializer(examples=[OpenApiExample("Its own maximum", {"max_length": 50000}, request_only=True)])
class LimitsSerializer(serializers.Serializer[Any]):
    """Limits of a queue's own; what is left out stays."""

    unbounded = serializers.BooleanField(required=False, help_text="Warned about, never deleted for its length.")
    warn_length = ThresholdField(help_text="Messages; null: as its Pulse user or the policy says.")
    max_length = ThresholdField(help_text="Messages; null: as its Pulse user or the policy says.")


@extend_schema_serializer(examples=[OpenApiExample("A binding", BINDING, response_only=True)])
class BindingSerializer(serializers.Serializer[Binding]):
    """What carries messages from an exchange to a queue or to another exchange."""

    source = serializers.CharField()  # type: ignore[assignment]  # the field, not where it comes from
    destination = serializers.CharField()
    destination_type = serializers.CharField()
    routing_key = serializers.CharField()
    arguments = serializers.DictField()


@extend_schema_serializer(
    examples=[
        OpenApiExample(
            "A queue", {"ready": 2100, "consumers": 1, "arguments": {"x-queue-type": "classic"}, "bindings": [BINDING]}
        )
    ]
)
class LiveSerializer(serializers.Serializer[Any]):
    """What the broker says of a queue right now; null where it could not be asked, or doesn't say."""

    ready = serializers.IntegerField(allow_null=True, help_text="Messages.")
    consumers = serializers.IntegerField(allow_null=True)
    arguments = serializers.DictField(allow_null=True, help_text="What it was declared with.")
    bindings = BindingSerializer(many=True, allow_null=True)


class SampleSerializer(serializers.ModelSerializer[QueueSample]):
    """The length of a queue at one moment, which held until the next sample."""

    class Meta:
        model = QueueSample
        fields = ["at", "length"]
        read_only_fields = fields


class SamplesAskedSerializer(serializers.Serializer[Any]):
    """Which samples are asked for."""

    span = serializers.ChoiceField(
        choices=list(SPANS), required=False, help_text="The last hour (default), day or week."
    )
    since = serializers.DateTimeField(required=False, help_text="Instead of a span.")


@extend_schema_serializer(
    examples=[
        OpenApiExample(
            "A warning",
            {"kind": "warned", "at": "2026-01-05T12:00:00Z", "by": None, "details": {"length": 2104}},
            response_only=True,
        )
    ]
)
class EventSerializer(serializers.ModelSerializer[QueueEvent]):
    """Something that happened to a queue."""

    by = OwnerEmailField(allow_null=True, help_text="Who did it; null: Guardian itself.")
    details = serializers.DictField(help_text="The figures that it was decided by.")

    class Meta:
        model = QueueEvent
        fields = ["kind", "at", "by", "details"]
        read_only_fields = fields


@extend_schema_serializer(
    examples=[
        OpenApiExample(
            "An exchange",
            {
                "name": "exchange/alice/results",
                "url": "https://guardian.example.org/api/exchanges/?name=exchange%2Falice%2Fresults",
                "vhost": "/",
                "type": "topic",
                "durable": True,
                "pulse_user": "alice",
                "bindings": [],
            },
            response_only=True,
        )
    ]
)
class ExchangeSerializer(serializers.Serializer[OwnExchange]):
    """An exchange of a Pulse user, and what is bound to it."""

    name = serializers.CharField()
    url = serializers.SerializerMethodField(help_text="Where this one alone is read and deleted.")
    vhost = serializers.CharField()
    type = serializers.CharField()
    durable = serializers.BooleanField()
    pulse_user = serializers.CharField()
    bindings = BindingSerializer(many=True)

    @extend_schema_field({"type": "string", "format": "uri"})
    def get_url(self, exchange: OwnExchange) -> str:
        """Return it with the name as a parameter, since slashes in a path don't arrive everywhere."""
        return absolute_url(f"{reverse('api-exchanges')}?{urlencode({'name': exchange.name})}")
