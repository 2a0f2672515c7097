"""The REST API of queues and exchanges. The functions that it calls decide what is allowed."""

from collections.abc import Collection
from http import HTTPStatus
from typing import Any
from uuid import UUID

from django.db.models import QuerySet
from django.utils import timezone
from drf_spectacular.utils import OpenApiParameter, extend_schema, extend_schema_view
from rest_framework import mixins
from rest_framework.decorators import action
from rest_framework.exceptions import NotFound, ValidationError
from rest_framework.response import Response
from rest_framework.viewsets import GenericViewSet

from accounts.api.views import Request
from core.confirmation import ConfirmationRequired
from core.each import Results, describe_error
from core.endpoints import StrictParameters, name_in, page_of, read, takes
from queues.actions import exchanges, limit_requests, notices, peek, rates, selected, single
from queues.api import moves
from queues.api.archives import CountSerializer, MessageSerializer
from queues.api.serializers import (
    BindingSerializer,
    DeclineSerializer,
    EventSerializer,
    ExchangeSerializer,
    KeepSerializer,
    LimitRequestSerializer,
    LimitsSerializer,
    LiveSerializer,
    MuteQueueSerializer,
    QueueSerializer,
    RateQuerySerializer,
    RatesSerializer,
    ResultsSerializer,
    SampleQuerySerializer,
    SampleSerializer,
    SelectedLimitsSerializer,
    SelectionSerializer,
    TrafficSerializer,
)
from queues.archives import reading
from queues.models import Queue, QueueEvent, QueueSample, Watch
from queues.rules import charts
from queues.rules.freshness import freshness_of_list
from queues.rules.listing import QueueFilter
from rabbit.errors import BrokerUnavailable

MAX_SAMPLES = 5000


@extend_schema_view(
    list=extend_schema(
        summary="List queues",
        description="Operators see all queues, owners their own. Queues that are gone are left out unless you filter "
        "by that state.",
    ),
    retrieve=extend_schema(summary="Show a queue as last listed"),
)
class Queues(StrictParameters, mixins.ListModelMixin, mixins.RetrieveModelMixin, GenericViewSet[Queue]):
    """Queues: your own, and all to operators."""

    serializer_class = QueueSerializer
    lookup_field = "uuid"
    filterset_class = QueueFilter

    def get_queryset(self) -> QuerySet[Queue]:
        seen = Queue.objects.seen_by(self.request.user)
        return seen.select_related("pulse_user", "owner", "acknowledged_by").prefetch_related("pulse_user__owners")

    def get_serializer_context(self) -> dict[str, Any]:
        freshness = freshness_of_list(Watch.current())
        return {**super().get_serializer_context(), "freshness": freshness}

    @extend_schema(request=LimitsSerializer, responses={200: QueueSerializer, 409: ConfirmationRequired})
    def partial_update(self, request: Request, uuid: str) -> Response:
        """Set a queue's own limits.

        For operators. Fields that you leave out stay unchanged. 409: the next pass would delete the queue. To confirm
        it, send the same request with `confirm`.
        """
        queue = self.get_object()
        single.set_limits(queue, request.user, **read(LimitsSerializer, request))
        return Response(self.get_serializer(queue).data)

    @extend_schema(request=KeepSerializer, responses={204: None, 409: None, 503: None})
    def destroy(self, request: Request, uuid: str) -> Response:
        """Delete a queue.

        Its ready messages are archived first, unless the body has `{"archive": false}`.
        """
        single.delete_queue(self.get_object(), request.user, keep=read(KeepSerializer, request)["archive"])
        return Response(status=HTTPStatus.NO_CONTENT)

    @extend_schema(request=KeepSerializer, responses={204: None, 409: None, 503: None})
    @action(detail=True, methods=["post"])
    def purge(self, request: Request, uuid: str) -> Response:
        """Purge a queue.

        Its ready messages are archived and deleted. Unacknowledged messages stay.
        """
        single.purge_queue(self.get_object(), request.user, keep=read(KeepSerializer, request)["archive"])
        return Response(status=HTTPStatus.NO_CONTENT)

    @extend_schema(request=LimitRequestSerializer, responses={204: None})
    @action(detail=True, methods=["post"], url_path="limits/ask")
    def ask_for_limit(self, request: Request, uuid: str) -> Response:
        """Ask the operators for a higher deletion limit of a queue.

        An owner can ask five times an hour. The operators get a mail, and decide. Until then, the request is the last
        event of the kind `asked`.
        """
        limit_requests.ask(self.get_object(), request.user, **read(LimitRequestSerializer, request))
        return Response(status=HTTPStatus.NO_CONTENT)

    @extend_schema(request=DeclineSerializer, responses={204: None})
    @action(detail=True, methods=["post"], url_path="limits/decline")
    def decline_limit(self, request: Request, uuid: str) -> Response:
        """Decline the open request for a higher deletion limit of a queue.

        For operators. Who asked gets the reason by mail.
        """
        limit_requests.decline(self.get_object(), request.user, **read(DeclineSerializer, request))
        return Response(status=HTTPStatus.NO_CONTENT)

    @extend_schema(request=MuteQueueSerializer, responses=QueueSerializer)
    @action(detail=True, methods=["put"])
    def mute(self, request: Request, uuid: str) -> Response:
        """Mute a queue of yours until a time.

        You get nothing about it until then, but for deletions and last calls. Nothing changes for its other owners.
        """
        queue = self.get_object()
        notices.mute([queue], request.user, read(MuteQueueSerializer, request)["until"])
        return Response(self.get_serializer(queue).data)

    @extend_schema(responses={204: None})
    @mute.mapping.delete
    def unmute(self, request: Request, uuid: str) -> Response:
        """Get notifications about a queue again."""
        notices.unmute([self.get_object()], request.user)
        return Response(status=HTTPStatus.NO_CONTENT)

    @extend_schema(request=None, responses={200: QueueSerializer, 409: None})
    @action(detail=True, methods=["post"])
    def acknowledge(self, request: Request, uuid: str) -> Response:
        """Acknowledge the warning about a queue: you are on it.

        Nobody is reminded of it until the queue is back to normal. 409: it is not over its warning threshold.
        """
        queue = self.get_object()
        notices.acknowledge(queue, request.user)
        return Response(self.get_serializer(queue).data)

    @extend_schema(filters=False, responses={200: MessageSerializer(many=True), 409: None, 503: None})
    @takes(CountSerializer)
    @action(detail=True, pagination_class=None)
    def messages(self, request: Request, uuid: str) -> Response:
        """Look at the first messages of a classic queue.

        They stay in the queue, marked as redelivered.
        """
        count = read(CountSerializer, request)["count"]
        found = peek.peek(self.get_object(), request.user, count)
        return Response([reading.as_json(position, message) for position, message in enumerate(found, 1)])

    @extend_schema(
        request=moves.StartMoveSerializer,
        responses={202: moves.MoveSerializer, 400: None, 409: moves.GroupsToConfirmSerializer, 503: None},
    )
    @action(detail=True, methods=["post"])
    def move(self, request: Request, uuid: str) -> Response:
        """Move messages of a queue to another one, to an exchange, or back to where they died.

        A task sends them with publisher confirms, and then removes them here. 400: the target is missing, belongs to
        another owner, or would be over its deletion limit. To "origin", the first answer is 409 with the groups of dead
        letters: their reason, and where they go. Send the same request with its `confirm`, and with the `groups` to
        send.
        """
        return moves.start(self.get_object(), request, read(moves.StartMoveSerializer, request))

    @extend_schema(responses=LiveSerializer)
    @action(detail=True)
    def live(self, request: Request, uuid: str) -> Response:
        """Query the broker for a queue's current state."""
        return Response(LiveSerializer(single.live(self.get_object())).data)

    @extend_schema(filters=False, responses={200: BindingSerializer(many=True), 503: None})
    @action(detail=True)
    def bindings(self, request: Request, uuid: str) -> Response:
        """List the current bindings of a queue on the broker.

        The binding to the default exchange, which every queue has, is left out.
        """
        queue = self.get_object()
        live = single.live(queue)
        no_answer = live.arguments is None and live.ready is None
        if no_answer and queue.state == Queue.State.GONE:
            raise NotFound("The queue is no longer on the broker.")
        if no_answer or live.bindings is None:  # for a missing queue, the broker lists no bindings
            raise BrokerUnavailable("the broker did not answer a request for a queue's bindings")
        return page_of(self, BindingSerializer, live.bindings)

    @extend_schema(filters=False, responses=SampleSerializer(many=True))
    @takes(SampleQuerySerializer)
    @action(detail=True, pagination_class=None)
    def samples(self, request: Request, uuid: str) -> Response:
        """List the lengths of a queue, oldest first.

        A length is valid until the next sample. The first sample gives the length at the start of the span. Older
        samples are thinned to one a minute, then one an hour. The list is not paged: it has at most the newest 5,000.
        """
        queue = self.get_object()
        asked = read(SampleQuerySerializer, request)
        span = charts.SPANS[asked.get("span", "hour")]
        began = asked.get("since", timezone.now() - span.duration)
        samples = QueueSample.objects.filter(queue=queue).order_by("-at")
        found = [*samples.filter(at__gt=began)[:MAX_SAMPLES], *samples.filter(at__lte=began)[:1]][:MAX_SAMPLES]
        return Response(SampleSerializer(found[::-1], many=True).data)

    @extend_schema(filters=False, responses={200: RatesSerializer, 503: None})
    @takes(RateQuerySerializer)
    @action(detail=True, pagination_class=None)
    def rates(self, request: Request, uuid: str) -> Response:
        """List how many messages a second were published, acknowledged and redelivered.

        RabbitMQ counts them, and keeps the counts for an hour unless its configuration says otherwise. Messages that
        need no acknowledgement count as acknowledged.
        """
        span = charts.SPANS[read(RateQuerySerializer, request)["span"]]
        found = rates.fetch(self.get_object(), span)
        return Response(RatesSerializer({"step": span.rate_step, **found._asdict()}).data)

    @extend_schema(filters=False, responses=EventSerializer(many=True))
    @action(detail=True)
    def events(self, request: Request, uuid: str) -> Response:
        """List the events of a queue, newest first."""
        events = QueueEvent.objects.filter(queue=self.get_object()).select_related("by")
        return page_of(self, EventSerializer, events)


class SelectedQueues(StrictParameters, GenericViewSet[Queue]):
    """Several queues at once. The answer says what became of each."""

    serializer_class = ResultsSerializer
    filter_backends = []

    @extend_schema(
        request=SelectionSerializer,
        responses={200: ResultsSerializer, 409: ConfirmationRequired},
    )
    @action(detail=False, methods=["post"], url_path="delete")
    def delete_selected(self, request: Request) -> Response:
        """Delete several queues.

        Their ready messages are archived first. 409: nothing was deleted. To confirm it, send the same request with
        `confirm`.
        """
        return self._destroy(request, "delete")

    @extend_schema(
        request=SelectionSerializer,
        responses={200: ResultsSerializer, 409: ConfirmationRequired},
    )
    @action(detail=False, methods=["post"], url_path="purge")
    def purge_selected(self, request: Request) -> Response:
        """Purge several queues.

        Their ready messages are archived and deleted. Unacknowledged messages stay. 409: nothing was purged. To confirm
        it, send the same request with `confirm`.
        """
        return self._destroy(request, "purge")

    @extend_schema(
        request=SelectedLimitsSerializer,
        responses={200: ResultsSerializer, 409: ConfirmationRequired},
    )
    @action(detail=False, methods=["post"], url_path="limits")
    def limit_selected(self, request: Request) -> Response:
        """Set the same limits for several queues.

        For operators. Limits that you leave out stay unchanged. 409: the next pass would delete some of the queues. To
        confirm it, send the same request with `confirm`.
        """
        limits = read(SelectedLimitsSerializer, request)
        queues, confirm = self._selected(request, limits.pop("uuids")), limits.pop("confirm", "")
        return self._answer(single.set_limits_of_all(queues, request.user, limits, confirm))

    @extend_schema(
        request=SelectionSerializer,
        responses={200: ResultsSerializer, 409: ConfirmationRequired},
    )
    @action(detail=False, methods=["post"], url_path="release")
    def release_selected(self, request: Request) -> Response:
        """Release several queues whose deletion is blocked.

        For operators. The next pass within ten minutes deletes those that are still too long. 409: nothing was
        released. To confirm it, send the same request with `confirm`.
        """
        body = read(SelectionSerializer, request)
        queues = self._selected(request, body["uuids"])
        return self._answer(selected.release(queues, request.user, body.get("confirm", "")))

    def _destroy(self, request: Request, action: str) -> Response:
        body = read(SelectionSerializer, request)
        queues = self._selected(request, body["uuids"])
        return self._answer(selected.destroy(queues, request.user, action, body.get("confirm", "")))

    def _selected(self, request: Request, uuids: Collection[UUID]) -> list[Queue]:
        """Return these queues.

        Raises:
            ValidationError: one is gone, doesn't exist or is not the user's.
        """
        found = selected.find(request.user, uuids)
        if missing := set(uuids) - {queue.uuid for queue in found}:
            named = ", ".join(sorted(uuid.hex for uuid in missing))
            raise ValidationError({"uuids": [f"You have no such queue, or it is gone: {named}."]})
        return found

    def _answer(self, results: Results[Queue]) -> Response:
        failed = [{"uuid": queue.uuid, "detail": describe_error(error)} for queue, error in results.failed]
        answer = {
            "done": [queue.uuid for queue in results.succeeded],
            "failed": failed,
            "not_tried": [queue.uuid for queue in results.left],
            "stop_reason": results.stop_reason,
        }
        return Response(ResultsSerializer(answer).data)


NAME = OpenApiParameter("name", str, description="The full name of one exchange.")


class Exchanges(StrictParameters, GenericViewSet[Any]):
    """Exchanges: your Pulse users' own; for operators, those of all Pulse users. They are read from the broker."""

    serializer_class = ExchangeSerializer
    filter_backends = []

    @extend_schema(responses={200: ExchangeSerializer(many=True), 503: None})
    @takes(NAME)
    def list(self, request: Request) -> Response:
        """List exchanges with their bindings."""
        found = exchanges.own_exchanges(request.user)
        name = request.query_params.get("name")
        if name is not None:
            found = [exchange for exchange in found if exchange.name == name]
        return page_of(self, ExchangeSerializer, found)

    @extend_schema(responses={200: TrafficSerializer, 404: None, 503: None})
    @takes(OpenApiParameter("name", str, required=True, description="Its full name, percent-encoded."))
    def traffic(self, request: Request) -> Response:
        """Show who publishes to an exchange, as far as RabbitMQ counts it."""
        exchange = exchanges.own_exchange(request.user, name_in(request, "exchange"))
        return Response(TrafficSerializer(exchanges.traffic(exchange)).data)

    @extend_schema(
        parameters=[OpenApiParameter("name", str, required=True, description="Its full name, percent-encoded.")],
        responses={204: None, 404: None, 409: None, 503: None},
    )
    def destroy(self, request: Request) -> Response:
        """Delete an exchange.

        The name is a query parameter, because some proxies alter slashes in a path. Bound queues stay, and receive
        nothing more from the exchange.
        """
        exchanges.delete_exchange(request.user, name_in(request, "exchange"))
        return Response(status=HTTPStatus.NO_CONTENT)
