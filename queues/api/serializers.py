"""Serializers of queues, their samples and events, and exchanges."""

from datetime import datetime
from typing import Any
from urllib.parse import urlencode

from django.urls import reverse
from django.utils import timezone
from django.utils.functional import cached_property
from drf_spectacular.utils import OpenApiExample, extend_schema_field, extend_schema_serializer
from rest_framework import serializers

from accounts.api.fields import HexURLField, HexUUIDField, OwnerEmailField, ThresholdField
from accounts.models import MAX_THRESHOLD, PulseUser
from core.endpoints import ConfirmField
from core.links import absolute_url
from queues.actions import notices
from queues.actions.exchanges import OwnExchange, Published
from queues.actions.limit_requests import MAX_REASON_LENGTH
from queues.actions.selected import MAX_SELECTED
from queues.models import Queue, QueueEvent, QueueSample
from queues.rules import diagnosis, thresholds
from queues.rules.charts import SPANS
from queues.rules.conditions import conditions
from queues.rules.diagnosis import Diagnosis
from queues.rules.freshness import Freshness
from queues.rules.reminders import is_acknowledged
from queues.rules.states import Condition, Level
from rabbit.entities import Binding, PublishedBy
from rabbit.names import MAX_NAME_BYTES

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
    "severity": "warning",
    "blocked": False,
    "length": 2104,
    "ready": 2100,
    "unacknowledged": 4,
    "consumers": 0,
    "bytes": 537600,
    "warn_length": 2000,
    "max_length": 8000,
    "unbounded": False,
    "limits_until": None,
    "registered": False,
    "diagnosis": {
        "code": "no_consumer",
        "text": "It has had no consumer for 12 minutes. The last one that Guardian saw was worker-1 (user alice), "
        "13 minutes ago. 2,104 messages wait.",
        "since": "2026-01-05T11:48:00Z",
    },
    "muted_until": None,
    "acknowledged_at": "2026-01-05T11:30:00Z",
    "acknowledged_by": "alice@example.org",
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


class LiteralNameField(serializers.CharField):
    """A name or routing key on the broker, with the spaces that it begins or ends with."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(trim_whitespace=False, max_length=MAX_NAME_BYTES, **kwargs)


class DiagnosisSerializer(serializers.Serializer[Diagnosis]):
    """Why a queue grows, or that nothing is wrong."""

    code = serializers.ChoiceField(choices=Queue.Diagnosis.values)
    text = serializers.CharField(help_text="With the figures that it rests on.")
    since = serializers.DateTimeField(allow_null=True)


@extend_schema_serializer(examples=[OpenApiExample("A queue", QUEUE, response_only=True)])
class QueueSerializer(serializers.ModelSerializer[Queue]):
    """A queue as last listed. Null means unknown, which is not 0."""

    uuid = HexUUIDField()
    url = HexURLField("api-queue-detail")
    pulse_user: serializers.SlugRelatedField[PulseUser] = serializers.SlugRelatedField(
        slug_field="username", read_only=True, allow_null=True
    )
    owners = serializers.SerializerMethodField(help_text="Their e-mail addresses.")
    severity = serializers.SerializerMethodField(
        help_text="Critical is what is lost, or will be within half an hour at its present growth."
    )
    blocked = serializers.BooleanField(
        source="is_blocked",
        read_only=True,
        help_text="Whether its deletion is blocked until an operator decides, for example while it is over its limit.",
    )
    length = serializers.IntegerField(allow_null=True, help_text="Ready and unacknowledged messages.")
    warn_length = serializers.SerializerMethodField(help_text="The length in messages at which the owners are warned.")
    max_length = serializers.SerializerMethodField(
        help_text="The length in messages above which the queue is deleted, unless it is unbounded or registered."
    )
    diagnosis = serializers.SerializerMethodField(
        help_text="Null: the queue is gone, or the length of its type says nothing."
    )
    muted_until = serializers.SerializerMethodField(help_text="Until when you muted it; null: you did not.")
    acknowledged_at = serializers.SerializerMethodField(
        help_text="When its present warning was acknowledged; null: it was not."
    )
    acknowledged_by = serializers.SerializerMethodField(help_text="The address of who is on it.")
    last_seen = serializers.SerializerMethodField(help_text="When the queue last existed.")

    class Meta:
        model = Queue
        fields = [
            "uuid", "url", "vhost", "name", "type", "durable", "pulse_user", "owners", "state", "severity", "blocked",
            "length", "ready", "unacknowledged", "consumers", "bytes", "warn_length", "max_length",
            "unbounded", "limits_until", "registered", "diagnosis", "muted_until", "acknowledged_at", "acknowledged_by",
            "first_seen", "last_seen",
        ]  # fmt: skip
        read_only_fields = fields

    def get_owners(self, queue: Queue) -> list[str]:
        """Return the addresses of the Pulse user's owners, or of the owner whose agents registered the queue."""
        owners = [owner.email for owner in queue.pulse_user.owners.all()] if queue.pulse_user else []
        return [*owners, queue.owner.email] if queue.owner else owners

    @extend_schema_field(serializers.ChoiceField(choices=[level.value for level in Level]))
    def get_severity(self, queue: Queue) -> str:
        return self._conditions[queue.pk].level

    @cached_property
    def _muted(self) -> dict[int, datetime]:
        """Until when the visitor muted the queues that are shown, read at once."""
        return notices.muted_until(self._shown, self.context["request"].user)

    @property
    def _shown(self) -> list[Queue]:
        shown: Any = self.parent.instance if self.parent else [self.instance]
        return list(shown)

    @cached_property
    def _conditions(self) -> dict[int, Condition]:
        """The conditions of all queues that are shown, read at once."""
        freshness: Freshness = self.context["freshness"]
        return conditions(self._shown, freshness.now)

    def get_warn_length(self, queue: Queue) -> int:
        return thresholds.of_queue(queue).warn

    def get_max_length(self, queue: Queue) -> int:
        return thresholds.of_queue(queue).max

    @extend_schema_field(DiagnosisSerializer(allow_null=True))
    def get_diagnosis(self, queue: Queue) -> dict[str, Any] | None:
        found = diagnosis.of_queue_at(queue, self.context["freshness"].counted_at, timezone.now())
        return DiagnosisSerializer(found).data if found else None

    def get_muted_until(self, queue: Queue) -> datetime | None:
        return self._muted.get(queue.pk)

    def get_acknowledged_at(self, queue: Queue) -> datetime | None:
        return queue.acknowledged_at if is_acknowledged(queue) else None

    def get_acknowledged_by(self, queue: Queue) -> str | None:
        by = queue.acknowledged_by if is_acknowledged(queue) else None
        return by.email if by else None

    def get_last_seen(self, queue: Queue) -> datetime:
        """Return the time of the last list if it had the queue: an unchanged queue's row is not written."""
        listed_at: datetime | None = self.context["freshness"].listed_at
        exists = queue.state != Queue.State.GONE and queue.misses == 0
        return max(queue.last_seen, listed_at) if exists and listed_at else queue.last_seen


@extend_schema_serializer(examples=[OpenApiExample("Its own deletion limit", {"max_length": 50000}, request_only=True)])
class LimitsSerializer(serializers.Serializer[Any]):
    """A queue's own limits. Fields that are left out stay unchanged."""

    unbounded = serializers.BooleanField(required=False, help_text="Warned about, never deleted for its length.")
    warn_length = ThresholdField(help_text="Messages; null: the value of its Pulse user or the policy applies.")
    max_length = ThresholdField(help_text="Messages; null: the value of its Pulse user or the policy applies.")
    limits_until = serializers.DateTimeField(
        required=False,
        allow_null=True,
        help_text="When the limits before return; at most a year from now. Null, or limits without it: never. A queue "
        "that is over the earlier deletion limit then keeps the present one until it is not.",
    )
    confirm = ConfirmField()


class SelectionSerializer(serializers.Serializer[Any]):
    """Several queues."""

    uuids = serializers.ListField(
        child=serializers.UUIDField(), min_length=1, max_length=MAX_SELECTED, help_text="Queues that are not gone."
    )
    confirm = ConfirmField()


@extend_schema_serializer(
    examples=[OpenApiExample("A deletion limit", {"uuids": [QUEUE["uuid"]], "max_length": 50000}, request_only=True)]
)
class SelectedLimitsSerializer(SelectionSerializer, LimitsSerializer):
    """The same limits for several queues. Limits that are left out stay unchanged."""


class FailureSerializer(serializers.Serializer[Any]):
    """A queue that was not changed, and why."""

    uuid = HexUUIDField()
    detail = serializers.CharField()


class ResultsSerializer(serializers.Serializer[Any]):
    """What became of each selected queue."""

    done = serializers.ListField(child=HexUUIDField())
    failed = FailureSerializer(many=True)
    not_tried = serializers.ListField(child=HexUUIDField())
    stop_reason = serializers.CharField(help_text="Why some were not tried; empty: all were.")


@extend_schema_serializer(examples=[OpenApiExample("A week", {"until": "2026-01-12T00:00:00Z"}, request_only=True)])
class MuteQueueSerializer(serializers.Serializer[Any]):
    """Until when you get no warnings about a queue."""

    until = serializers.DateTimeField(help_text="At most a year from now.")


class DeclineSerializer(serializers.Serializer[Any]):
    """Why a request for a higher deletion limit is declined."""

    reason = serializers.CharField(max_length=MAX_REASON_LENGTH)


class LimitRequestSerializer(serializers.Serializer[Any]):
    """A request for a higher deletion limit."""

    max_length = serializers.IntegerField(min_value=1, max_value=MAX_THRESHOLD, help_text="In messages.")
    reason = serializers.CharField(
        max_length=MAX_REASON_LENGTH, help_text="Why the queue needs it. The operators read it."
    )
    limits_until = serializers.DateTimeField(
        default=None, allow_null=True, help_text="When you no longer need it; null: you need it permanently."
    )


@extend_schema_serializer(examples=[OpenApiExample("A binding", BINDING, response_only=True)])
class BindingSerializer(serializers.Serializer[Binding]):
    """A binding of a queue or an exchange to an exchange."""

    source = serializers.CharField()  # type: ignore[assignment]  # a field, not the attribute of Field
    destination = serializers.CharField()
    destination_type = serializers.CharField()
    routing_key = serializers.CharField()
    arguments = serializers.DictField()


@extend_schema_serializer(
    examples=[
        OpenApiExample(
            "A queue",
            {
                "ready": 2100,
                "consumers": 1,
                "arguments": {"x-queue-type": "classic"},
                "bindings": [BINDING],
                "upstream": [],
            },
        )
    ]
)
class LiveSerializer(serializers.Serializer[Any]):
    """A queue's current state on the broker. Null: the broker did not answer, or does not report it."""

    ready = serializers.IntegerField(allow_null=True, help_text="Messages.")
    consumers = serializers.IntegerField(allow_null=True)
    arguments = serializers.DictField(allow_null=True, help_text="The arguments of its declaration.")
    bindings = BindingSerializer(many=True, allow_null=True)
    upstream = BindingSerializer(
        many=True, allow_null=True, help_text="The bindings between exchanges that lead to these, nearest first."
    )


class KeepSerializer(serializers.Serializer[Any]):
    """Whether the messages of a queue are archived before they are deleted."""

    archive = serializers.BooleanField(default=True)


class SampleSerializer(serializers.ModelSerializer[QueueSample]):
    """The length of a queue from one moment until the next sample."""

    class Meta:
        model = QueueSample
        fields = ["at", "length"]
        read_only_fields = fields


class SampleQuerySerializer(serializers.Serializer[Any]):
    """The query parameters of samples."""

    span = serializers.ChoiceField(
        choices=list(SPANS), required=False, help_text="The last hour (default), 8 hours, day or week."
    )
    since = serializers.DateTimeField(required=False, help_text="Instead of a span.")


class RateQuerySerializer(serializers.Serializer[Any]):
    """The query parameters of rates."""

    span = serializers.ChoiceField(
        choices=[span.name for span in SPANS.values() if span.rate_step],
        default="hour",
        help_text="The last hour, 8 hours or day.",
    )


class RateSampleSerializer(serializers.Serializer[Any]):
    """Messages a second, on average since the sample before."""

    at = serializers.DateTimeField()
    published = serializers.FloatField()
    acknowledged = serializers.FloatField()
    redelivered = serializers.FloatField()


class RatesSerializer(serializers.Serializer[Any]):
    """The rates of a queue."""

    step = serializers.IntegerField(help_text="The time between two samples, in seconds.")
    samples = RateSampleSerializer(many=True, help_text="Oldest first.")
    why_none = serializers.CharField(help_text="Why there are no samples; empty: there are.")


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
    """An event of a queue."""

    by = OwnerEmailField(allow_null=True, help_text="The owner who did it; null: Guardian itself.")
    details = serializers.DictField(help_text="The figures behind the decision.")

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
    """An exchange of a Pulse user, and its bindings."""

    name = serializers.CharField()
    url = serializers.SerializerMethodField(help_text="The address to read or delete this exchange.")
    vhost = serializers.CharField()
    type = serializers.CharField()
    durable = serializers.BooleanField()
    pulse_user = serializers.CharField()
    bindings = BindingSerializer(many=True)

    @extend_schema_field({"type": "string", "format": "uri"})
    def get_url(self, exchange: OwnExchange) -> str:
        """Return the address with the name as a query parameter, as some proxies alter slashes in a path."""
        return absolute_url(f"{reverse('api-exchanges')}?{urlencode({'name': exchange.name})}")


class PublishedBySerializer(serializers.Serializer[PublishedBy]):
    """What a RabbitMQ user publishes."""

    user = serializers.CharField()
    published = serializers.FloatField(help_text="Messages a second.")
    unroutable = serializers.IntegerField(help_text="Messages of its open channels that no queue got.")


class TrafficSerializer(serializers.Serializer[Published]):
    """What is published to an exchange. Null: RabbitMQ does not count it."""

    published = serializers.FloatField(allow_null=True, help_text="Messages a second.")
    routed = serializers.FloatField(
        allow_null=True, help_text="Copies a second to queues and exchanges, one for each that it is bound to."
    )
    publishers = PublishedBySerializer(many=True, allow_null=True)
    is_of_user = serializers.BooleanField(
        help_text="Whether the publishers' figures are of all their exchanges. RabbitMQ counts by exchange only with "
        "rates_mode detailed."
    )
