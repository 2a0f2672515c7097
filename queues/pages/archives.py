"""The pages of archives: their list, their messages, downloads and deletion. And the messages of a live queue."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any
from urllib.parse import urlencode
from uuid import UUID

from django import forms
from django.conf import settings
from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpResponse, StreamingHttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_http_methods, require_safe

from accounts import audit
from accounts.pages.common import page_of
from core.refusals import Refusal
from queues.actions import peek, single
from queues.archives import reading
from queues.archives.download import download
from queues.archives.message_display import MAX_PREVIEW_BYTES, line, shown
from queues.archives.searching import Search
from queues.models import Archive, Queue, Replay
from queues.pages.destroy import describe_failure
from queues.pages.forms import TimeInput
from queues.pages.queue_list import offer_choices
from queues.pages.visitors import Request, signed_in
from queues.rules import restoring
from queues.rules.listing import ArchiveFilter
from rabbit.errors import BrokerError
from rabbit.fetching import Fetched
from rabbit.names import readable

MESSAGES_PER_PAGE = 20
MAX_LAST = 100
BINDINGS_SHOWN = 20
REPLAYS_SHOWN = 10

CHOICES = 50
"""With more vhosts or Pulse users, the filter is a text field instead of a list."""

MAX_PEEKED_CHARACTERS = 20_000
"""The part of a body that is shown of a message in a live queue."""

GONE_ACTOR = "a deleted owner"


def what_happened(archive: Archive) -> str:
    """Return why an archive's queue was deleted or purged, and by whom, in a sentence."""
    who = archive.by.email if archive.by else GONE_ACTOR
    return {
        Archive.Reason.LENGTH: "Guardian deleted the queue, because it was over its deletion limit.",
        Archive.Reason.NAME: "Guardian deleted the queue, because of its name.",
        Archive.Reason.PULSE_USER: "Guardian deleted the queue with its Pulse user.",
        Archive.Reason.DELETED: f"{who} deleted the queue.",
        Archive.Reason.PURGED: f"{who} purged the queue.",
        Archive.Reason.CALLED_OFF: (
            "Guardian kept the queue, and returned these messages to it. "
            "RabbitMQ may have dropped those that were delivered too often."
        ),
    }[Archive.Reason(archive.reason)]


def archive_of(request: Request, uuid: UUID) -> Archive:
    """Return an archive that the visitor may see, or raise Http404."""
    seen = Archive.objects.seen_by(request.user)
    return get_object_or_404(seen.select_related("pulse_user", "queue", "by"), uuid=uuid)


def describe(archive: Archive) -> dict[str, Any]:
    return {
        "archive": archive,
        "name": readable(archive.queue_name),
        "vhost": readable(archive.vhost),
        "what_happened": what_happened(archive),
    }


def describe_declaration(
    arguments: Mapping[str, Any] | None, bindings: Sequence[Mapping[str, Any]] | None
) -> dict[str, Any]:
    """Return the arguments and the first bindings of a queue in words."""
    bindings = bindings or ()
    return {
        "arguments": [(readable(name), restoring.shown(value)) for name, value in (arguments or {}).items()],
        "bindings": [restoring.binding_name(one) for one in bindings[:BINDINGS_SHOWN]],
        "more_bindings": max(0, len(bindings) - BINDINGS_SHOWN),
    }


@signed_in
@require_safe
def archives_page(request: Request) -> HttpResponse:
    """List the archives that the visitor may see, newest first."""
    seen = Archive.objects.seen_by(request.user)
    filtered = ArchiveFilter(request.GET, seen)
    form = filtered.form
    form.label_suffix = ""
    form.fields["queue"].widget = forms.HiddenInput()  # people search; links may name a queue
    for name in ("vhost", "pulse_user__username"):
        values = seen.order_by(name).exclude(**{name: None}).values_list(name, flat=True).distinct()
        if len(found := values[: CHOICES + 1]) <= CHOICES:
            offer_choices(form, name.partition("__")[0], [(value, readable(value)) for value in found])
    page = page_of(request, filtered.qs.select_related("pulse_user", "by"))
    filters = {name: value for name, value in request.GET.items() if value and name in ArchiveFilter.base_filters}
    return render(
        request,
        "archives/archives.html",
        {
            "form": form,
            "page": page,
            "rows": [describe(archive) for archive in page],
            "filters": urlencode(filters),
            "is_filtered": bool(filters),
            "several_vhosts": not form.fields["vhost"].widget.is_hidden,
            "days": settings.GUARDIAN_ARCHIVE_DAYS,
        },
    )


class MessagesForm(forms.Form):
    """Which messages of an archive are listed."""

    search = forms.CharField(required=False, max_length=255, label="Text in routing key, header or body")
    after = forms.DateTimeField(required=False, label="Published after (UTC)", widget=TimeInput)
    first = forms.IntegerField(required=False, min_value=1, label="From message")
    last = forms.IntegerField(required=False, min_value=1, max_value=MAX_LAST, label="Last messages")


@signed_in
@require_safe
def archive_page(request: Request, uuid: UUID) -> HttpResponse:
    archive = archive_of(request, uuid)
    form = MessagesForm(request.GET if MessagesForm.base_fields.keys() & request.GET.keys() else None, label_suffix="")
    asked = form.cleaned_data if form.is_valid() else {}
    first, count = min(asked.get("first") or 1, max(1, archive.messages)), MESSAGES_PER_PAGE
    if last := asked.get("last"):
        first, count = max(1, archive.messages - last + 1), last
    search = None
    if asked.get("search") or asked.get("after"):
        search = Search(archive, first, asked["search"], asked["after"])
        lines = [line(position, message) for position, message in islice(search, count)]
        audit.record(request.user, reading.LOOKED_AT, [archive], first=first, count=len(lines))
    else:
        found = reading.look(archive, request.user, first, count, max_body=MAX_PREVIEW_BYTES)
        lines = [line(position, message) for position, message in found]
    read_to = search.read_to if search else first + count - 1
    filters = {name: request.GET[name] for name in ("search", "after") if asked.get(name)}
    return render(
        request,
        "archives/archive.html",
        {
            **describe(archive),
            **describe_declaration(archive.arguments, archive.bindings),
            "form": form,
            "lines": lines,
            "first": first,
            "read_to": min(read_to, archive.messages),
            "filters": urlencode(filters),
            "previous": max(1, first - MESSAGES_PER_PAGE) if first > 1 and not filters else None,
            "last_page": max(1, archive.messages - MESSAGES_PER_PAGE + 1),
            "next": read_to + 1 if read_to < archive.messages else None,
            "replays": archive.replays.select_related("by")[:REPLAYS_SHOWN],
        },
    )


def _message(request: Request, archive: Archive, position: int, action: str) -> Fetched:
    for _, message in reading.look(archive, request.user, position, 1, action):
        return message
    raise Http404("The archive has no message at this position.")


@signed_in
@require_safe
def message_page(request: Request, uuid: UUID, position: int) -> HttpResponse:
    archive = archive_of(request, uuid)
    message = _message(request, archive, position, reading.LOOKED_AT)
    return render(
        request,
        "archives/message.html",
        {
            **describe(archive),
            "message": shown(position, message),
            "previous": position - 1 if position > 1 else None,
            "next": position + 1 if position < archive.messages else None,
            "page_first": position - (position - 1) % MESSAGES_PER_PAGE,
        },
    )


@login_required
@require_safe
def message_body(request: Request, uuid: UUID, position: int) -> StreamingHttpResponse:
    """Download the body of one message as it is."""
    archive = archive_of(request, uuid)
    _message(request, archive, position, reading.DOWNLOADED)
    disposition = f'attachment; filename="message-{position}"'
    return StreamingHttpResponse(
        reading.body(archive, position),
        content_type="application/octet-stream",
        headers={"Content-Disposition": disposition},
    )


@login_required
@require_safe
def archive_download(request: Request, uuid: UUID) -> StreamingHttpResponse:
    return download(archive_of(request, uuid), request.user)


@signed_in
@require_http_methods(["GET", "HEAD", "POST"])
def archive_delete(request: Request, uuid: UUID) -> HttpResponse:
    archive = archive_of(request, uuid)
    context = describe(archive)
    if request.method == "POST":
        reading.delete(archive, request.user)
        messages.success(request, f"The archive of {context['name']} was deleted with its messages.")
        return redirect("archives")
    is_replaying = archive.replays.filter(state=Replay.State.RUNNING).exists()
    return render(request, "archives/delete.html", {**context, "is_replaying": is_replaying})


# Messages of a live queue


class PeekForm(forms.Form):
    count = forms.IntegerField(min_value=1, max_value=peek.MAX_MESSAGES, initial=10, label="Number of messages")


@signed_in
@require_http_methods(["GET", "HEAD", "POST"])
def queue_messages(request: Request, uuid: UUID) -> HttpResponse:
    """Say what looking at a queue's messages changes, and show them once the visitor asks for it."""
    queue = get_object_or_404(Queue.objects.seen_by(request.user), uuid=uuid)
    if queue.state == Queue.State.GONE:
        messages.warning(request, "The queue is no longer on the broker.")
        return redirect("queue", uuid)
    form = PeekForm(request.POST if request.method == "POST" else None, label_suffix="")
    context: dict[str, Any] = {"queue": queue, "name": readable(queue.name), "form": form}
    status = 200
    try:
        peek.require_classic(queue)
        if form.is_valid():
            found = peek.peek(queue, request.user, form.cleaned_data["count"])
            context["found"] = [
                shown(position, message, MAX_PEEKED_CHARACTERS) for position, message in enumerate(found, 1)
            ]
    except single.Gone as error:
        context["trouble"] = str(error)
    except Refusal as error:
        context |= {"form": None, "trouble": str(error)}
    except BrokerError as error:
        context["trouble"], status = describe_failure(error, "The messages can't be shown", destructive=False)
    return render(request, "queues/messages.html", context, status=status)
