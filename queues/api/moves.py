"""The REST API of moves: their progress, and what is sent to start one. ``queues/{uuid}/move/`` starts it."""

from http import HTTPStatus
from typing import Any

from django.db.models import QuerySet
from drf_spectacular.utils import (
    OpenApiExample,
    extend_schema,
    extend_schema_field,
    extend_schema_serializer,
    extend_schema_view,
)
from rest_framework import mixins, serializers
from rest_framework.response import Response
from rest_framework.viewsets import GenericViewSet

from accounts.api.fields import HexUUIDField, OwnerEmailField
from accounts.api.views import Request
from core.endpoints import StrictParameters
from core.rest import PROBLEM, problem_details
from queues.api.archives import TargetSerializer
from queues.api.serializers import LiteralNameField
from queues.models import Move, Queue
from queues.moves import moving, sending_back
from queues.moves.moving import Destination
from queues.moves.sending_back import GroupsUnconfirmed
from queues.rules.dead_letters import Group
from rabbit.names import MAX_NAME_BYTES

ORIGIN = "origin"
NAME = {"type": "string", "maxLength": MAX_NAME_BYTES}


class MoveTargetSerializer(TargetSerializer):
    """A queue, or an exchange. Without a routing key, each message keeps its own."""

    routing_key = LiteralNameField(required=False, allow_blank=True)


@extend_schema_field(
    {
        "oneOf": [
            {"type": "object", "properties": dict.fromkeys(Destination._fields, NAME)},
            {
                "type": "string",
                "enum": [ORIGIN],
                "description": f'"{ORIGIN}": each message goes back to where it died.',
            },
        ]
    }
)
class TargetField(serializers.Field):  # type: ignore[type-arg]  # its types differ between versions of the stubs
    """A queue or an exchange, or the text "origin"."""

    def to_internal_value(self, data: Any) -> Destination | None:
        if data == ORIGIN:
            return None
        target = MoveTargetSerializer(data=data)
        target.is_valid(raise_exception=True)
        return Destination(**target.validated_data)


class GroupKeySerializer(serializers.Serializer[Any]):
    """A group of dead letters, as a 409 listed it. Its other fields are ignored."""

    exchange = LiteralNameField(allow_blank=True, help_text="Empty: the default exchange.")
    routing_key = LiteralNameField(allow_blank=True)
    reason = serializers.CharField(allow_blank=True, trim_whitespace=False, max_length=1_000)
    queue = LiteralNameField(help_text="The queue in which the messages died.")


class GroupSerializer(serializers.Serializer[Group]):
    """Dead letters with one reason that go to one place."""

    exchange = serializers.CharField(source="origin.exchange", help_text="Empty: straight to the queue.")
    routing_key = serializers.CharField(source="origin.routing_key")
    reason = serializers.CharField(
        source="origin.reason", help_text="As the broker says it; the class of the exception for parked messages."
    )
    queue = serializers.CharField(source="origin.queue", help_text="The queue in which they died.")
    messages = serializers.IntegerField()
    deaths = serializers.IntegerField(help_text="How often one of them died there for this reason, at most.")
    since = serializers.DateTimeField(allow_null=True, help_text="When the first of them died.")
    sent_back = serializers.IntegerField(help_text="How often one of them was sent back before, at most.")
    attempts = serializers.IntegerField(source="latest.attempts", help_text="Of the last parked message.")
    error = serializers.CharField(source="latest.error", help_text="Of the last parked message.")
    traceback = serializers.CharField(source="latest.traceback", help_text="Of the last parked message.")
    why_not = serializers.CharField(source="origin.why_not", help_text="Why they can't be sent back; empty: they can.")


class GroupsToConfirmSerializer(serializers.Serializer[Any]):
    """Nothing was sent. To confirm it, send the same request with `confirm`, and optionally some of the `groups`."""

    type = serializers.CharField()
    title = serializers.CharField()
    status = serializers.IntegerField()
    detail = serializers.CharField()
    instance = serializers.CharField()
    groups = GroupSerializer(many=True)
    looked_at = serializers.IntegerField(help_text="The first messages, which Guardian looked at.")
    confirm = serializers.CharField()


@extend_schema_serializer(
    examples=[
        OpenApiExample("All to a queue", {"to": {"queue": "queue/alice/later"}}, request_only=True),
        OpenApiExample("The first to where they died", {"to": ORIGIN, "count": 50}, request_only=True),
    ]
)
class StartMoveSerializer(serializers.Serializer[Any]):
    """A move to start."""

    to = TargetField()
    count = serializers.IntegerField(required=False, min_value=1, help_text="The first messages; without it, all.")
    copy = serializers.BooleanField(
        default=False, help_text=f"Copy instead, {moving.BATCH} messages at most. It sets their redelivered flag."
    )
    confirm = serializers.CharField(
        required=False, allow_blank=True, max_length=1_000_000, help_text="Of the 409 that the same request got."
    )
    groups = serializers.ListField(
        child=GroupKeySerializer(),
        required=False,
        max_length=1_000,
        help_text="Some groups of that 409; without it, all.",
    )


class MoveSerializer(serializers.ModelSerializer[Move]):
    """A move and its progress."""

    uuid = HexUUIDField()
    queue = HexUUIDField(source="queue.uuid", help_text="The source.")
    copy = serializers.BooleanField(source="is_copy")
    by = OwnerEmailField(allow_null=True)

    class Meta:
        model = Move
        fields = [
            "uuid", "queue", "to_queue", "to_exchange", "routing_key", "to_origin", "copy", "state", "total", "sent",
            "kept", "repeated", "error", "by", "created", "finished",
        ]  # fmt: skip
        read_only_fields = fields


def start(queue: Queue, request: Request, fields: dict[str, Any]) -> Response:
    """Start the move that these fields describe, or answer 409 with the groups to confirm."""
    to, count, by = fields["to"], fields.get("count"), request.user
    if to is not None:
        started = moving.start(queue, by, to, count, is_copy=fields["copy"])
        return Response(MoveSerializer(started).data, HTTPStatus.ACCEPTED)
    groups = fields.get("groups")
    keys = None if groups is None else [tuple(group.values()) for group in groups]
    try:
        started = sending_back.send_back(queue, by, confirm=fields.get("confirm", ""), groups=keys, count=count)
    except GroupsUnconfirmed as error:
        looked = error.looked
        answer = {
            **problem_details(HTTPStatus.CONFLICT, str(error), request.path),
            "groups": [GroupSerializer(group).data for group in looked.groups],
            "looked_at": looked.looked,
            "confirm": looked.confirm,
        }
        return Response(answer, HTTPStatus.CONFLICT, content_type=PROBLEM)
    return Response(MoveSerializer(started).data, HTTPStatus.ACCEPTED)


@extend_schema_view(retrieve=extend_schema(summary="Show a move's progress"))
class Moves(StrictParameters, mixins.RetrieveModelMixin, GenericViewSet[Move]):
    """Moves of messages of your queues; for operators, of all."""

    serializer_class = MoveSerializer
    lookup_field = "uuid"
    filter_backends = []

    def get_queryset(self) -> QuerySet[Move]:
        return Move.objects.filter(queue__in=Queue.objects.seen_by(self.request.user)).select_related("queue", "by")

    def destroy(self, request: Request, uuid: str) -> Response:
        """Stop a move. Messages that were sent stay where they are."""
        moving.stop(self.get_object(), request.user)
        return Response(status=HTTPStatus.NO_CONTENT)
