"""The pages on which messages are watched as they arrive."""

from collections.abc import Callable
from typing import Any
from uuid import UUID

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from accounts.pages.common import add_error
from accounts.pages.forms import Form
from core.refusals import Refusal
from queues.archives.message_display import line, shown
from queues.models import MessageWatch
from queues.pages.destroy import describe_failure
from queues.pages.forms import WatchForm
from queues.pages.queue import seen_queue
from queues.pages.visitors import Request, signed_in
from queues.watching import polling, starting
from rabbit.errors import BrokerError
from rabbit.names import readable
from rabbit.watch_queue import MAX_MESSAGES

MAX_SHOWN_CHARACTERS = 5_000
"""The part of a body that is shown."""


@signed_in
@require_http_methods(["GET", "HEAD", "POST"])
def exchange_watch(request: Request) -> HttpResponse:
    initial = {"exchange": request.GET.get("name", "")}
    form = WatchForm(request.POST) if request.method == "POST" else WatchForm(initial=initial)
    return _start(
        request,
        form,
        "exchange",
        lambda: starting.start_at_exchange(
            request.user, form.cleaned_data["exchange"], form.cleaned_data["routing_key"]
        ),
    )


@signed_in
@require_http_methods(["GET", "HEAD", "POST"])
def queue_watch(request: Request, uuid: UUID) -> HttpResponse:
    queue = seen_queue(request, uuid)
    form = Form(request.POST if request.method == "POST" else None)
    context = {"queue": queue, "name": readable(queue.name)}
    return _start(request, form, "", lambda: starting.start_at_queue(request.user, queue), **context)


def _start(request: Request, form: Form, field: str, start: Callable[[], MessageWatch], **context: Any) -> HttpResponse:
    status = 200
    try:
        if form.is_valid():
            return redirect("watch", start().uuid)
    except BrokerError as error:
        trouble, status = describe_failure(error, "The watch did not start", destructive=False)
        form.add_error(None, trouble)
    except Refusal as error:
        status = 403 if isinstance(error, PermissionDenied) else 200
        add_error(form, error, field)
    return render(request, "watches/start.html", {**context, "form": form}, status=status)


@signed_in
@require_safe
def watch_page(request: Request, uuid: UUID) -> HttpResponse:
    """Show the messages since the last request, or to htmx only these. Each is shown once: nothing stores it."""
    watch = _own(request, uuid)
    context: dict[str, Any] = {"watch": watch, "most": MAX_MESSAGES}
    if watch is not None:
        context["name"] = readable(watch.queue.name if watch.queue else watch.exchange)
        context["routing_key"] = readable(watch.routing_key)
    try:
        if watch is None:
            if not request.htmx:
                raise Http404
            raise polling.Ended("The watch has ended.")
        caught = polling.poll(watch)
        found = list(enumerate(caught.messages, caught.first))[::-1]
        context["caught"] = [
            (line(position, message), shown(position, message, MAX_SHOWN_CHARACTERS)) for position, message in found
        ]
    except Refusal as error:
        context["ended"] = str(error)
    except BrokerError as error:
        context["trouble"], _ = describe_failure(error, "No new messages", destructive=False)
    return render(request, "watches/_caught.html" if request.htmx else "watches/watch.html", context)


@signed_in
@require_POST
def watch_stop(request: Request, uuid: UUID) -> HttpResponse:
    watch = _own(request, uuid)
    if watch is None:
        raise Http404
    polling.stop(watch)
    messages.success(request, "The watch has ended. Its copies are deleted.")
    return redirect("queue", watch.queue.uuid) if watch.queue else redirect("exchanges")


def _own(request: Request, uuid: UUID) -> MessageWatch | None:
    """Return the visitor's watch with this UUID. Operators do not see others', either."""
    return MessageWatch.objects.filter(owner=request.user, uuid=uuid).select_related("owner", "queue").first()
