"""The REST API of queues, exchanges and channels. What may be done is decided by the functions it calls."""

import contextlib
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

from django.db.models import QuerySet
from django.utils import timezone
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import mixins
from rest_framework import request as rest
from rest_framework.exceptions import NotFound, ValidationError
from rest_framework.response import Response
from rest_framework.viewsets import GenericViewSet

from accounts.api import Request
from core.endpoints import page_of, read
from queues import actions, charts, exchanges
from queues.listing import QueueFilter
from queues.models import Queue, QueueEvent, QueueSample, Watch
from queues.serializers import (
    BindingSerializer,
    EventSerializer,
    ExchangeSerializer,
    LimitsSerializer,
    LiveSerializer,
    QueueSerializer,
    SamplesAskedSerializer,
    SampleSerializer,
)
from rabbit.management import BrokerUnavailable

MAX_SAMPLES = 5000


@contextlib.contextmanager
def gone_as_404() -> Iterator[None]:
    """Answer 404 where what the path names isn't on the broker any more."""
    try:
        yield
    except actions.Gone as error:
        raise NotFound(str(error)) from error


class Queues(mixins.ListModelMixin, GenericViewSet[Queue]):
    """Queues: your own, and all to operators."""

    serializer_class = QueueSerializer
    lookup_field = "uuid"
    filterset_class = QueueFilter

    def get_queryset(self) -> QuerySet[Queue]:
        """Return those that the visitor sees."""
        seen = Queue.objects.seen_by(self.request.user)
        return seen.select_related("pulse_user", "owner").prefetch_related("pulse_user__owners")

    def filter_queryset(self, queryset: QuerySet[Queue, Any]) -> QuerySet[Queue, Any]:
        """Filter the list alone: one queue is found whatever its state."""
        return super().filter_queryset(queryset) if self.action == "list" else queryset

    def get_serializer_context(self) -> dict[str, Any]:
        """Return when queues were last listed, too."""
        listed_at = Watch.objects.values_list("listed_at", flat=True).first()
        return {**super().get_serializer_context(), "listed_at": listed_at}

    def list(self, request: rest.Request, *args: Any, **kwargs: Any) -> Response:
        """List queues.

        Your own; to operators all. Those that are gone are left out unless that state is asked for.
        """
        return super().list(request, *args, **kwargs)

    def retrieve(self, request: Request, uuid: str) -> Response:
        """Show a queue as last seen."""
        return Response(self.get_serializer(self.get_object()).data)

    @extend_schema(request=LimitsSerializer, responses=QueueSerializer)
    def partial_update(self, request: Request, uuid: str) -> Response:
        """Give a queue limits of its own.

        For operators. What is left out stays.
        """
        queue = self.get_object()
        actions.set_limits(queue, request.user, **read(LimitsSerializer, request))
        return Response(self.get_serializer(queue).data)

    @extend_schema(responses={204: None, 409: None, 503: None})
    def destroy(self, request: Request, uuid: str) -> Response:
        """Delete a queue with all that is in it."""
        with gone_as_404():
            actions.delete_queue(self.get_object(), request.user)
        return Response(status=HTTPStatus.NO_CONTENT)

    @extend_schema(request=None, responses={204: None, 409: None, 503: None})
    def purge(self, request: Request, uuid: str) -> Response:
        """Empty a queue.

        Its ready messages are removed. What consumers hold unacknowledged stays.
        """
        with gone_as_404():
            actions.purge_queue(self.get_object(), request.user)
        return Response(status=HTTPStatus.NO_CONTENT)

    @extend_schema(responses=LiveSerializer)
    def live(self, request: Request, uuid: str) -> Response:
        """Ask the broker about a queue, right now."""
        return Response(LiveSerializer(actions.live(self.get_object())).data)

    @extend_schema(filters=False, responses={200: BindingSerializer(many=True), 503: None})
    def bindings(self, request: Request, uuid: str) -> Response:
        """List what feeds a queue, as the broker has it right now.

        Beside the default exchange, to which every queue is bound by its name.
        """
        queue = self.get_object()
        live = actions.live(queue)
        nothing_told = live.arguments is None and live.ready is None
        if nothing_told and queue.state == Queue.State.GONE:
            raise NotFound("The queue isn't on the broker any more.")
        if nothing_told or live.bindings is None:  # of what isn't there, the broker lists no bindings
            raise BrokerUnavailable("the bindings of a queue were asked for, and not told")
        return page_of(self, BindingSerializer, live.bindings)

    @extend_schema(filters=False, parameters=[SamplesAskedSerializer], responses=SampleSerializer(many=True))
    def samples(self, request: Request, uuid: str) -> Response:
        """List how long a queue was, oldest first.

        A sample holds until the next. The first is the one that held when the time began. Older ones are kept a minute
        and an hour apart. It isn't paged: these are the newest 5,000 at most.
        """
        queue = self.get_object()
        asked = SamplesAskedSerializer(data=request.query_params)
        asked.is_valid(raise_exception=True)
        span = charts.SPANS[asked.validated_data.get("span", "hour")]
        began = asked.validated_data.get("since", timezone.now() - span.duration)
        samples = QueueSample.objects.filter(queue=queue).order_by("-at")
        found = [*samples.filter(at__gt=began)[:MAX_SAMPLES], *samples.filter(at__lte=began)[:1]][:MAX_SAMPLES]
        return Response(SampleSerializer(found[::-1], many=True).data)

    @extend_schema(filters=False, responses=EventSerializer(many=True))
    def events(self, request: Request, uuid: str) -> Response:
        """List what happened to a queue, the last first."""
        events = QueueEvent.objects.filter(queue=self.get_object()).select_related("by")
        return page_of(self, EventSerializer, events)


NAME = OpenApiParameter("name", str, description="The whole name of one exchange.")


class Exchanges(GenericViewSet[Any]):
    """Exchanges: your accounts' own, and to operators those of all accounts. The broker alone knows them."""

    serializer_class = ExchangeSerializer
    filter_backends = []

    @extend_schema(parameters=[NAME], responses={200: ExchangeSerializer(many=True), 503: None})
    def list(self, request: Request) -> Response:
        """List exchanges, and what is bound to each."""
        found = exchanges.own_exchanges(request.user)
        name = request.query_params.get("name")
        if name is not None:
            found = [exchange for exchange in found if exchange.name == name]
        return page_of(self, ExchangeSerializer, found)

    @extend_schema(
        parameters=[
            OpenApiParameter("name", str, required=True, description="Its whole name, percent-encoded as in any query.")
        ],
        responses={204: None, 404: None, 409: None, 503: None},
    )
    def destroy(self, request: Request) -> Response:
        """Delete an exchange.

        Its name is a parameter, since it has slashes in it, which don't arrive everywhere in a path. The queues that
        are bound to it stay, and get nothing from it any more.
        """
        name = request.query_params.get("name")
        if not name:
            raise ValidationError({"name": ["Say which exchange."]})
        try:
            with gone_as_404():
                exchanges.delete_exchange(request.user, name)
        except LookupError as error:
            raise NotFound("There is no such exchange of yours.") from error
        return Response(status=HTTPStatus.NO_CONTENT)
