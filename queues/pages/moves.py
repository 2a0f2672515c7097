"""The pages of moves: start one, send dead letters back, and see the progress."""

import json
from http import HTTPStatus
from typing import Any
from urllib.parse import urlencode
from uuid import UUID, uuid4

from django import forms
from django.contrib import messages
from django.http import HttpResponse, QueryDict
from django.shortcuts import get_object_or_404, redirect, render
from django.utils import timezone
from django.views.decorators.http import require_http_methods, require_POST, require_safe
from django_htmx.http import HttpResponseClientRefresh

from core.refusals import Refusal
from queues.models import Move, Queue
from queues.moves import moving, sending_back
from queues.moves.moving import BATCH, Destination
from queues.pages.destroy import describe_failure
from queues.pages.queue import seen_queue
from queues.pages.replays import SLOW_START_SECONDS
from queues.pages.restores import EXCHANGE, NAME_ATTRIBUTES, QUEUE, names_that_can_be_typed
from queues.pages.visitors import Request, signed_in
from queues.rules.dead_letters import Group
from rabbit.errors import BrokerError
from rabbit.names import MAX_NAME_BYTES, readable, readable_text
from rabbit.snapshot import CLASSIC


class MoveForm(forms.Form):
    """Where to, which messages, and whether they are copied instead."""

    to = forms.ChoiceField(
        label="Send the messages to",
        choices=[(QUEUE, "another queue"), (EXCHANGE, "an exchange")],
        widget=forms.RadioSelect,
        initial=QUEUE,
    )
    name = forms.CharField(
        strip=False,
        max_length=MAX_NAME_BYTES,
        label="Name of the queue or exchange",
        widget=forms.TextInput(attrs=NAME_ATTRIBUTES),
    )
    routing_key = forms.CharField(
        required=False,
        strip=False,
        max_length=MAX_NAME_BYTES,
        label="Routing key, for an exchange",
        help_text="Empty: each message keeps its own.",
    )
    count = forms.IntegerField(
        required=False, min_value=1, label="Only the first", help_text="Messages. Empty: all that are ready now."
    )
    copy = forms.BooleanField(
        required=False,
        label="Copy them instead",
        label_suffix="",
        help_text=f"At most the first {BATCH}. This sets the redelivered flag of the messages that stay.",
    )
    uuid = forms.UUIDField(required=False, widget=forms.HiddenInput)  # of the move, from the preview

    def __init__(self, queue: Queue, data: QueryDict | None) -> None:
        super().__init__(data, label_suffix="")
        if queue.type != CLASSIC:
            del self.fields["copy"]

    @property
    def target(self) -> Destination:
        given = self.cleaned_data
        if given["to"] == QUEUE:
            return Destination(queue=given["name"])
        return Destination(exchange=given["name"], routing_key=given["routing_key"] or None)


class CountForm(forms.Form):
    count = forms.IntegerField(
        required=False, min_value=1, label="Only the first", help_text="Messages. Empty: all that are ready now."
    )


@signed_in
@require_http_methods(["GET", "HEAD", "POST"])
def queue_move(request: Request, uuid: UUID) -> HttpResponse:
    """Start a move in two steps: where to and which messages, and a preview."""
    queue = seen_queue(request, uuid)
    given = request.POST if request.method == "POST" else request.GET
    form = MoveForm(queue, given if "to" in given else None)
    context = _described(queue) | {"form": form, "suggestions": names_that_can_be_typed(queue.pulse_user, queue.vhost)}
    status = 200
    try:
        moving.require_source(queue, request.user)
        if form.is_valid() and "edit" not in given:
            to, wanted = form.target, form.cleaned_data
            copy, again = wanted.get("copy", False), wanted["uuid"] or uuid4()
            if request.method == "POST":
                started = moving.start(queue, request.user, to, wanted["count"], is_copy=copy, uuid=again)
                return redirect("move", uuid, started.uuid)
            fields = {name: given[name] for name in form.fields if given.get(name) and name != "uuid"}
            context |= {
                "plan": moving.plan(queue, request.user, to, wanted["count"], is_copy=copy),
                "to": readable(to.queue or to.exchange),
                "target": to,
                "routing_key": readable(to.routing_key or ""),
                "copies": copy,
                "fields": {**fields, "uuid": again},
                "back": urlencode(fields),
            }
    except Refusal as error:
        if form.is_bound and error.status == HTTPStatus.BAD_REQUEST:
            form.add_error("name" if error.field == "to" else error.field, str(error))
        else:
            context |= {"trouble": str(error), "form": None, "plan": None}
            status = error.status
    except BrokerError as error:
        context["trouble"], status = describe_failure(error, "The messages can't be moved", destructive=False)
    return render(request, "queues/move_start.html", context, status=status)


@signed_in
@require_http_methods(["GET", "HEAD", "POST"])
def dead_letters(request: Request, uuid: UUID) -> HttpResponse:
    """Say what looking changes, show why messages died, and send the selected groups back."""
    queue = seen_queue(request, uuid)
    is_classic = queue.type == CLASSIC
    form = CountForm(request.POST if request.method == "POST" else None, label_suffix="")
    context = _described(queue) | {"form": form, "is_classic": is_classic, "most": sending_back.LOOK.messages}
    status = 200
    try:
        sending_back.require_pulse_user(queue, request.user)
        if request.method == "POST" and "confirm" in request.POST and form.is_valid():
            groups = _keys(request.POST.getlist("group")) if is_classic else None
            started = sending_back.send_back(
                queue,
                request.user,
                confirm=request.POST["confirm"],
                groups=groups,
                count=form.cleaned_data["count"],
                uuid=_uuid(request.POST.get("uuid", "")),
            )
            return redirect("move", uuid, started.uuid)
        if request.method == "POST" or not is_classic:
            context |= _looked(sending_back.look(queue, request.user))
    except Refusal as error:
        context["trouble"] = str(error)
        status = error.status
        if error.field in ("groups", "confirm"):
            context |= _looked(sending_back.look(queue, request.user))
    except BrokerError as error:
        context["trouble"], status = describe_failure(error, "The messages can't be sent back", destructive=False)
    return render(request, "queues/dead_letters.html", context, status=status)


def _keys(texts: list[str]) -> list[tuple[str, ...]]:
    """Return the keys of groups from their JSON. A name may hold NUL, which no form sends."""
    try:
        return [tuple(map(str, json.loads(text))) for text in texts]
    except (ValueError, TypeError) as error:
        raise moving.MoveRefused("Select groups of the table.", "groups") from error


def _uuid(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None


def _looked(looked: sending_back.Looked) -> dict[str, Any]:
    return {
        "looked": looked,
        "possible": [_shown(group) for group in looked.groups if not group.origin.why_not],
        "impossible": [_shown(group) for group in looked.groups if group.origin.why_not],
        "uuid": uuid4(),
    }


def _shown(group: Group) -> dict[str, Any]:
    """Return a group as the page shows it. ``key`` is its value in the form."""
    origin, latest = group.origin, group.latest
    return {
        "key": json.dumps(origin.key),
        "group": group,
        "reason": readable(group.reason),
        "queue": readable(origin.queue),
        "exchange": readable(origin.exchange),
        "routing_key": readable(origin.routing_key),
        "why_not": readable(origin.why_not),
        "error": readable(latest.error),
        "traceback": readable_text(latest.traceback),
        "attempts": latest.attempts,
    }


# The progress


def _move(request: Request, uuid: UUID, move_uuid: UUID) -> Move:
    queue = seen_queue(request, uuid)
    return get_object_or_404(Move.objects.select_related("queue", "by"), queue=queue, uuid=move_uuid)


def _described(queue: Queue) -> dict[str, Any]:
    return {"queue": queue, "name": readable(queue.name), "vhost": readable(queue.vhost)}


@signed_in
@require_safe
def move_page(request: Request, uuid: UUID, move_uuid: UUID) -> HttpResponse:
    """Show a move's progress, or its result. An htmx request gets the progress only."""
    move = _move(request, uuid, move_uuid)
    is_running = move.state == Move.State.RUNNING
    if request.htmx and not is_running:
        return HttpResponseClientRefresh()  # so that the page loses its button and shows the result
    target = Queue.objects.seen_by(request.user).filter(vhost=move.queue.vhost, name=move.to_queue).first()
    context = _described(move.queue) | {
        "move": move,
        "to": readable(move.to_queue or move.to_exchange),
        "groups": [[readable(part) for part in group] for group in move.groups or []],
        "is_running": is_running,
        "waits": move.sent == 0 and (timezone.now() - move.created).total_seconds() > SLOW_START_SECONDS,
        "is_deleting": move.queue.state == Queue.State.DELETING,
        "error": readable(move.error),
        "target": target,
        "rest": move.total - move.sent - move.kept,
    }
    return render(request, "queues/_move_progress.html" if request.htmx else "queues/move.html", context)


@signed_in
@require_POST
def move_stop(request: Request, uuid: UUID, move_uuid: UUID) -> HttpResponse:
    move = _move(request, uuid, move_uuid)
    moving.stop(move, request.user)
    messages.success(request, f"It is stopped. A batch of at most {BATCH} messages may still arrive.")
    return redirect("move", uuid, move_uuid)
