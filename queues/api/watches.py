"""The REST API of watches: messages as they arrive, as copies."""

from http import HTTPStatus
from typing import Any

from django.db.models import QuerySet
from drf_spectacular.utils import OpenApiExample, extend_schema, extend_schema_serializer
from rest_framework import serializers
from rest_framework.exceptions import ValidationError
from rest_framework.generics import get_object_or_404
from rest_framework.response import Response
from rest_framework.viewsets import GenericViewSet

from accounts.api.fields import HexUUIDField
from accounts.api.views import Request
from core.endpoints import StrictParameters, read
from queues.api.archives import MESSAGE, MessageSerializer
from queues.api.serializers import LiteralNameField
from queues.archives import reading
from queues.models import MessageWatch, Queue
from queues.watching import polling, starting


@extend_schema_serializer(
    examples=[
        OpenApiExample(
            "An exchange", {"exchange": "exchange/alice/events", "routing_key": "build.#"}, request_only=True
        ),
        OpenApiExample("A queue's bindings", {"queue": "8d9c5b7ef0a14c5f9e0a4f6b6f7c8d9e"}, request_only=True),
    ]
)
class StartWatchSerializer(serializers.Serializer[Any]):
    """What to watch: an exchange, or the bindings of a queue."""

    exchange = LiteralNameField(required=False, allow_blank=True)
    routing_key = LiteralNameField(
        default="#",
        allow_blank=True,
        help_text="A pattern of a topic exchange, or the key of a direct one. Others ignore it.",
    )
    queue = serializers.UUIDField(required=False, help_text="The queue's UUID.")

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        if ("exchange" in attrs) == ("queue" in attrs):
            raise ValidationError("Give either an exchange or a queue.")
        return attrs


class WatchSerializer(serializers.ModelSerializer[MessageWatch]):
    """A watch. It ends earlier if nobody reads it for a minute."""

    uuid = HexUUIDField()

    class Meta:
        model = MessageWatch
        fields = ["uuid", "ends"]
        read_only_fields = fields


@extend_schema_serializer(
    examples=[
        OpenApiExample(
            "A message, and others that came too fast",
            {
                "uuid": "0f4a1f0d6c0f4d0e8a53c3f8b5d1a7e2",
                "ends": "2026-01-05T12:05:00Z",
                "messages": [MESSAGE],
                "missed": 12,
            },
            response_only=True,
        )
    ]
)
class CaughtSerializer(WatchSerializer):
    """The messages of a watch since the last request."""

    messages = MessageSerializer(many=True, help_text="At most 100, oldest first. Nothing else stores them.")
    missed = serializers.IntegerField(
        allow_null=True,
        help_text="How many more there were, at least; null: unknown. RabbitMQ counts them every 5 s, if its "
        "statistics are on.",
    )

    class Meta(WatchSerializer.Meta):
        fields = [*WatchSerializer.Meta.fields, "messages", "missed"]
        read_only_fields = fields


class Watches(StrictParameters, GenericViewSet[MessageWatch]):
    """Watches: your own, at most two at a time, of five minutes. Operators do not see others', either."""

    serializer_class = WatchSerializer
    lookup_field = "uuid"
    filter_backends = []
    pagination_class = None

    def get_queryset(self) -> QuerySet[MessageWatch]:
        return MessageWatch.objects.filter(owner=self.request.user.pk).select_related("owner", "queue")

    @extend_schema(request=StartWatchSerializer, responses={201: WatchSerializer, 400: None, 503: None})
    def create(self, request: Request) -> Response:
        """Watch messages as they arrive.

        You get copies: nobody's messages are consumed, and nothing is stored. While a watch matches, publishers of
        `mandatory` messages get none back as unroutable. 400: none of your Pulse users may read the exchange, or
        watching would change where other messages go.
        """
        body = read(StartWatchSerializer, request)
        if "queue" in body:
            queue = Queue.objects.seen_by(request.user).filter(uuid=body["queue"]).first()
            if queue is None:
                raise ValidationError({"queue": ["You have no such queue."]})
            watch = starting.start_at_queue(request.user, queue)
        else:
            watch = starting.start_at_exchange(request.user, body["exchange"], body["routing_key"])
        return Response(WatchSerializer(watch).data, status=HTTPStatus.CREATED)

    @extend_schema(responses={200: CaughtSerializer, 503: None})
    def retrieve(self, request: Request, uuid: str) -> Response:
        """Fetch the messages of a watch since the last request.

        Send this every second or two: RabbitMQ keeps the newest 100 messages, up to 4 MiB, and the watch ends after a
        minute without a request.
        """
        watch = get_object_or_404(self.get_queryset(), uuid=uuid)
        caught = polling.poll(watch)
        found = [reading.as_json(position, one) for position, one in enumerate(caught.messages, caught.first)]
        return Response({**WatchSerializer(watch).data, "messages": found, "missed": caught.missed})

    def destroy(self, request: Request, uuid: str) -> Response:
        """End a watch, and delete its copies."""
        polling.stop(get_object_or_404(self.get_queryset(), uuid=uuid))
        return Response(status=HTTPStatus.NO_CONTENT)
