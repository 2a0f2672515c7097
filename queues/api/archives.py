"""The REST API of archives: their messages, downloads and replays."""

from http import HTTPStatus
from typing import Any

from django.db.models import QuerySet
from django.http import HttpResponse, StreamingHttpResponse
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import (
    OpenApiExample,
    OpenApiParameter,
    extend_schema,
    extend_schema_serializer,
    extend_schema_view,
)
from rest_framework import mixins, serializers
from rest_framework.decorators import action
from rest_framework.generics import get_object_or_404
from rest_framework.response import Response
from rest_framework.utils.urls import remove_query_param, replace_query_param
from rest_framework.viewsets import GenericViewSet

from accounts.api.fields import HexUUIDField, OwnerEmailField
from accounts.api.views import Request
from core.confirmation import ConfirmationRequired
from core.endpoints import MAX_SEARCH_LENGTH, ConfirmField, StrictParameters, read, takes
from core.links import absolute_url
from queues.actions import peek
from queues.api.serializers import LiteralNameField
from queues.archives import reading, replay, restore
from queues.archives.download import download
from queues.archives.restore import Wanted
from queues.archives.searching import Search
from queues.models import Archive, Replay
from queues.rules.listing import ArchiveFilter
from queues.rules.restoring import LEAVABLE

MAX_PAGE = 100

MESSAGE = {
    "position": 1,
    "body": {"build": 17},
    "encoding": "json",
    "properties": {"content_type": "application/json", "delivery_mode": 2},
    "headers": {"attempt": 1},
    "exchange": "exchange/builder/jobs",
    "routing_key": "build.done",
    "redelivered": False,
}


class ArchivedBindingSerializer(serializers.Serializer[Any]):
    """A binding of an archived queue."""

    exchange = serializers.CharField()
    routing_key = serializers.CharField()
    arguments = serializers.DictField()


@extend_schema_serializer(
    examples=[
        OpenApiExample(
            "An archive",
            {
                "uuid": "8d9c5b7ef0a14c5f9e0a4f6b6f7c8d9e",
                "queue": "queue/alice/builds",
                "vhost": "/",
                "pulse_user": "alice",
                "reason": "length",
                "messages": 8001,
                "dropped": 0,
                "held": 4,
                "bytes": 1024128,
                "type": "classic",
                "durable": True,
                "auto_delete": False,
                "arguments": {"x-max-priority": 3},
                "bindings": [{"exchange": "exchange/alice/jobs", "routing_key": "build.#", "arguments": {}}],
                "created": "2026-01-05T12:00:00Z",
                "expires": "2026-01-12T12:00:00Z",
            },
            response_only=True,
        )
    ]
)
class ArchiveSerializer(serializers.ModelSerializer[Archive]):
    """The messages of a deleted or purged queue, and how it was declared and bound: null if that is not known."""

    uuid = HexUUIDField()
    queue = serializers.CharField(source="queue_name", help_text="The name that the queue had.")
    pulse_user: Any = serializers.SlugRelatedField(slug_field="username", read_only=True, allow_null=True)
    arguments = serializers.DictField(allow_null=True)
    bindings = ArchivedBindingSerializer(many=True, allow_null=True)

    class Meta:
        model = Archive
        fields = [
            "uuid", "queue", "vhost", "pulse_user", "reason", "messages", "dropped", "held", "bytes", "type", "durable",
            "auto_delete", "arguments", "bindings", "created", "expires",
        ]  # fmt: skip
        read_only_fields = fields


@extend_schema_serializer(examples=[OpenApiExample("A message", MESSAGE, response_only=True)])
class MessageSerializer(serializers.Serializer[Any]):
    """A message. ``encoding`` says what ``body`` is: a JSON value, text, or base64; or null, because it is too long."""

    position = serializers.IntegerField(help_text="In the archive, or from the head of the queue; the first is 1.")
    body = serializers.JSONField()
    encoding = serializers.ChoiceField(choices=["json", "text", "base64", "omitted"])
    properties = serializers.DictField(help_text="The AMQP properties that are set.")
    headers = serializers.DictField()
    exchange = serializers.CharField()
    routing_key = serializers.CharField()
    redelivered = serializers.BooleanField()


class TargetSerializer(serializers.Serializer[Any]):
    """Where messages are sent to: a queue or an exchange."""

    queue = LiteralNameField(required=False)
    exchange = LiteralNameField(required=False)


@extend_schema_serializer(
    examples=[
        OpenApiExample("All to the queue", {"to": {"queue": "queue/alice/builds"}}, request_only=True),
        OpenApiExample(
            "Some, slowly", {"to": {"exchange": "exchange/alice/jobs"}, "first": 1, "last": 500, "rate": 10},
            request_only=True,
        ),
    ]
)  # fmt: skip
class StartReplaySerializer(serializers.Serializer[Any]):
    """A replay to start."""

    to = TargetSerializer()
    first = serializers.IntegerField(required=False, min_value=1, help_text="The position of the first message.")
    last = serializers.IntegerField(required=False, min_value=1, help_text="The position of the last message.")
    rate = serializers.IntegerField(required=False, min_value=1, max_value=100_000, help_text="Messages a second.")


@extend_schema_serializer(
    examples=[
        OpenApiExample("All messages to their queue", {}, request_only=True),
        OpenApiExample(
            "Some to a new queue", {"first": 1, "last": 500, "queue": "queue/alice/again"}, request_only=True
        ),
    ]
)
class StartRestoreSerializer(serializers.Serializer[Any]):
    """A restore to start."""

    queue = LiteralNameField(required=False, help_text="By default the archived one.")
    first = serializers.IntegerField(required=False, min_value=1, help_text="The position of the first message.")
    last = serializers.IntegerField(required=False, min_value=1, help_text="The position of the last message.")
    without = serializers.ListField(
        child=serializers.ChoiceField(choices=LEAVABLE),
        required=False,
        max_length=len(LEAVABLE),
        help_text="Arguments with which the broker would drop messages, to leave out.",
    )
    confirm = ConfirmField()


class LeftOutSerializer(serializers.Serializer[Any]):
    """An argument or a binding that a restore left out."""

    what = serializers.CharField()
    why = serializers.CharField()


class DifferenceSerializer(serializers.Serializer[Any]):
    """An argument with which the existing queue is declared otherwise than the archived one. null: it is not set."""

    argument = serializers.CharField()
    found = serializers.JSONField(allow_null=True)
    wanted = serializers.JSONField(allow_null=True)


class RestoreSerializer(serializers.Serializer[Any]):
    """What a restore declares. ``declares`` is false if the queue existed: then only messages are sent."""

    declares = serializers.BooleanField()
    durable = serializers.BooleanField()
    auto_delete = serializers.BooleanField()
    arguments = serializers.DictField()
    bindings = ArchivedBindingSerializer(many=True)
    left_out = LeftOutSerializer(many=True)
    differences = DifferenceSerializer(many=True)


class ReplaySerializer(serializers.ModelSerializer[Replay]):
    """A replay and its progress. ``restore`` is null if the replay declares no queue."""

    uuid = HexUUIDField()
    total = serializers.IntegerField(help_text="The number of messages to send.")
    by = OwnerEmailField(allow_null=True)
    restore = RestoreSerializer(allow_null=True)

    class Meta:
        model = Replay
        fields = [
            "uuid", "to_queue", "to_exchange", "first", "last", "rate", "state", "sent", "total", "repeated", "error",
            "restore", "by", "created", "finished",
        ]  # fmt: skip
        read_only_fields = fields


class CountSerializer(serializers.Serializer[Any]):
    """How many messages to look at."""

    count = serializers.IntegerField(default=10, min_value=1, max_value=peek.MAX_MESSAGES)


class MessageQuerySerializer(serializers.Serializer[Any]):
    """Which messages to list."""

    first = serializers.IntegerField(default=1, min_value=1, help_text="The position of the first one.")
    count = serializers.IntegerField(default=20, min_value=1, max_value=MAX_PAGE)
    last = serializers.IntegerField(
        required=False, min_value=1, max_value=MAX_PAGE, help_text="The last ones, this many, instead of `first`."
    )
    search = serializers.CharField(
        required=False, max_length=MAX_SEARCH_LENGTH, help_text="A text in the routing key, a header or the body."
    )
    after = serializers.DateTimeField(
        required=False, help_text="The earliest `timestamp` property. Messages without it are left out."
    )


@extend_schema_view(retrieve=extend_schema(summary="Show an archive"))
class Archives(StrictParameters, mixins.ListModelMixin, mixins.RetrieveModelMixin, GenericViewSet[Archive]):
    """Archives of your queues; for operators, all."""

    serializer_class = ArchiveSerializer
    lookup_field = "uuid"
    filterset_class = ArchiveFilter

    def get_queryset(self) -> QuerySet[Archive]:
        return Archive.objects.seen_by(self.request.user).select_related("pulse_user")

    def destroy(self, request: Request, uuid: str) -> Response:
        """Delete an archive and its messages."""
        reading.delete(self.get_object(), request.user)
        return Response(status=HTTPStatus.NO_CONTENT)

    @extend_schema(filters=False, responses=MessageSerializer(many=True))
    @takes(MessageQuerySerializer)
    @action(detail=True, pagination_class=None)
    def messages(self, request: Request, uuid: str) -> HttpResponse:
        """List messages of an archive by position.

        There may be fewer than ``count``, because a page ends before 256 KiB, and a search after a second. ``Link`` has
        the next page. A body of more than 64 KiB is in base64. One of more than 1 MiB is omitted, and only its first
        MiB is searched; the download has it.
        """
        archive = self.get_object()
        asked = read(MessageQuerySerializer, request)
        first, count = asked["first"], asked["count"]
        if last := asked.get("last"):
            first, count = max(1, archive.messages - last + 1), last
        search = None
        if "search" in asked or "after" in asked:
            search = Search(archive, first, asked.get("search", ""), asked.get("after"))
        found, ends_at = reading.page(
            archive, request.user, search or reading.shown(archive, first, count), first, count
        )
        if ends_at is None:
            ends_at = search.read_to if search else first + len(found) - 1
        headers = {}
        if ends_at < archive.messages:
            url = remove_query_param(absolute_url(request.get_full_path()), "last")
            for name, value in {"first": ends_at + 1, "count": count}.items():
                url = replace_query_param(url, name, value)
            headers["Link"] = f'<{url}>; rel="next"'
        content = b"".join([b"[", b",\n".join(found), b"]"])
        return HttpResponse(content, content_type="application/json", headers=headers)

    @extend_schema(responses={(200, "text/plain"): OpenApiTypes.STR})
    @action(detail=True)
    def download(self, request: Request, uuid: str) -> StreamingHttpResponse:
        """Download all messages as JSON Lines, one message a line."""
        return download(self.get_object(), request.user)

    @extend_schema(request=StartReplaySerializer, responses={202: ReplaySerializer, 400: None, 503: None})
    @action(detail=True, methods=["post"])
    def replay(self, request: Request, uuid: str) -> Response:
        """Publish messages of an archive again.

        A task sends them, with publisher confirms. 400: its Pulse user may not write to the target, the target is
        missing, or it would be over its deletion limit.
        """
        fields = read(StartReplaySerializer, request)
        to = fields.pop("to")
        started = replay.start(
            self.get_object(), request.user, queue=to.get("queue", ""), exchange=to.get("exchange", ""), **fields
        )
        return Response(ReplaySerializer(started).data, status=HTTPStatus.ACCEPTED)

    @extend_schema(
        request=StartRestoreSerializer,
        responses={202: ReplaySerializer, 400: None, 409: ConfirmationRequired, 503: None},
    )
    @action(detail=True, methods=["post"])
    def restore(self, request: Request, uuid: str) -> Response:
        """Bring a deleted queue back, with its messages.

        A task declares the queue as it was, binds it where its Pulse user may, and sends the messages. `restore` of the
        answer says what is left out, and why. If the queue exists, only messages are sent. 400: the Pulse user may not
        declare the queue. 409: messages would be lost, or the queue would be over its deletion limit; or the archive
        does not say how its queue was declared.
        """
        fields = read(StartRestoreSerializer, request)
        confirm = fields.pop("confirm", "")
        started = restore.start(self.get_object(), request.user, Wanted(**fields), confirm=confirm)
        return Response(ReplaySerializer(started).data, status=HTTPStatus.ACCEPTED)


@extend_schema(parameters=[OpenApiParameter("uuid", OpenApiTypes.UUID, OpenApiParameter.PATH)])
@extend_schema_view(
    list=extend_schema(summary="List the replays of an archive, newest first"),
    retrieve=extend_schema(summary="Show a replay's progress"),
)
class Replays(StrictParameters, mixins.ListModelMixin, mixins.RetrieveModelMixin, GenericViewSet[Replay]):
    """Replays of an archive."""

    serializer_class = ReplaySerializer
    lookup_field = "uuid"
    lookup_url_kwarg = "replay_uuid"
    filter_backends = []

    def get_queryset(self) -> QuerySet[Replay]:
        archives = Archive.objects.seen_by(self.request.user)
        return Replay.objects.filter(archive=get_object_or_404(archives, uuid=self.kwargs["uuid"])).select_related(
            "by", "archive"
        )

    def destroy(self, request: Request, uuid: str, replay_uuid: str) -> Response:
        """Stop a replay. Messages that were sent stay where they are."""
        replay.stop(self.get_object(), request.user)
        return Response(status=HTTPStatus.NO_CONTENT)
