"""Pages on which operators set the limits of a queue, and owners ask for higher ones."""

from collections.abc import Iterable
from datetime import datetime
from typing import Any
from urllib.parse import urlencode
from uuid import UUID

from django.contrib import messages
from django.core.exceptions import ValidationError
from django.http import HttpResponse, QueryDict
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_http_methods, require_POST

from accounts.pages.confirmation import confirm_page, fate_of_messages, typed_confirmation
from core.confirmation import ConfirmationRequired
from queues.actions import limit_requests, single
from queues.models import Queue
from queues.pages.forms import TIME_FORMAT, DeclineForm, LimitRequestForm, LimitsForm
from queues.pages.queue import seen_queue
from queues.pages.visitors import Request, signed_in
from queues.rules import thresholds
from queues.rules.temporary_limits import limits_of, old_limit
from rabbit.names import readable


def shared_limits(queues: Iterable[Queue]) -> dict[str, Any]:
    """Return the limits that all these queues have."""
    first, *others = [{**limits_of(queue), "limits_until": queue.limits_until} for queue in queues]
    return {name: value for name, value in first.items() if all(one[name] == value for one in others)}


def _as_sent(form: LimitsForm) -> dict[str, Any]:
    """Return what a browser sends of the unchanged form."""
    shown = {field.name: field.value() for field in form if field.value() is not False}
    sent = {name: f"{value:{TIME_FORMAT}}" if isinstance(value, datetime) else value for name, value in shown.items()}
    sent = {name: "" if value is None else value for name, value in sent.items()}
    return {**sent, **{f"initial-{name}": value for name, value in sent.items()}}


@signed_in
@require_http_methods(["GET", "HEAD", "POST"])
def queue_limits(request: Request, uuid: UUID) -> HttpResponse:
    queue = seen_queue(request, uuid)
    name = readable(queue.name)
    if not request.user.is_staff:
        return _refused(request, queue)
    initial = shared_limits([queue])
    wanted = request.GET.get("max_length", "")
    data = request.POST if request.method == "POST" else None
    if data is None and wanted.isascii() and wanted.isdecimal():  # the link in the mail about a request
        asked = {"max_length": wanted, "limits_until": request.GET.get("limits_until", "")}
        data = QueryDict(urlencode({**_as_sent(LimitsForm(initial=initial)), **asked}))
    form = LimitsForm(data, initial=initial)
    if request.method == "POST" and form.is_valid():
        typed, confirm = typed_confirmation(request, name)
        try:
            single.set_limits(queue, request.user, confirm=confirm, **form.changes())
        except ValidationError as error:
            form.add_error(None, error)
        except ConfirmationRequired as required:
            return confirm_page(
                request,
                required,
                typed,
                title="Set these limits?",
                about=f"With these limits, the next pass deletes the queue. {fate_of_messages()}",
                back=reverse("queue", args=[uuid]),
            )
        else:
            messages.success(request, "The limits are set. The next pass applies them.")
            return redirect("queue", uuid)
    return _limits_page(request, queue, form, DeclineForm())


def _refused(request: Request, queue: Queue) -> HttpResponse:
    why = "Only operators can change the limits of a queue. Ask for a higher limit on the queue's page."
    context = {"queue": queue, "name": readable(queue.name), "why": why}
    return render(request, "queues/refused.html", context, status=403)


def _limits_page(request: Request, queue: Queue, form: LimitsForm, decline: DeclineForm) -> HttpResponse:
    context = {
        "queue": queue,
        "name": readable(queue.name),
        "form": form,
        "thresholds": thresholds.of_queue(queue),
        "old": old_limit(queue),
        "limit_request": limit_requests.open_request(queue),
        "decline": decline,
    }
    return render(request, "queues/limits.html", context)


@signed_in
@require_POST
def queue_limit_decline(request: Request, uuid: UUID) -> HttpResponse:
    queue = seen_queue(request, uuid)
    if not request.user.is_staff:
        return _refused(request, queue)
    form = DeclineForm(request.POST)
    if not form.is_valid():
        return _limits_page(request, queue, LimitsForm(initial=shared_limits([queue])), form)
    try:
        limit_requests.decline(queue, request.user, form.cleaned_data["reason"])
    except ValidationError as error:
        messages.error(request, error.messages[0])
    else:
        messages.success(request, "The request is declined. Who asked gets your reason by mail.")
    return redirect("queue", uuid)


@signed_in
@require_http_methods(["GET", "HEAD", "POST"])
def queue_limit_request(request: Request, uuid: UUID) -> HttpResponse:
    queue = seen_queue(request, uuid)
    form = LimitRequestForm(request.POST if request.method == "POST" else None)
    if form.is_valid():
        try:
            limit_requests.ask(queue, request.user, **form.cleaned_data)
        except ValidationError as error:
            form.add_error(None, error)
        else:
            messages.success(request, "The operators have your request. The queue's page shows when the limit changes.")
            return redirect("queue", uuid)
    context = {"queue": queue, "name": readable(queue.name), "form": form, "thresholds": thresholds.of_queue(queue)}
    return render(request, "queues/limit_request.html", context)
