"""The pages of replays: three steps to start one, its progress, and its result."""

from contextlib import suppress
from typing import Any
from urllib.parse import urlencode
from uuid import UUID, uuid4

from django import forms
from django.contrib import messages
from django.db import IntegrityError
from django.db.models import F, Max
from django.http import HttpResponse, QueryDict
from django.shortcuts import get_object_or_404, redirect, render
from django.utils import timezone
from django.views.decorators.http import require_http_methods, require_POST, require_safe
from django_htmx.http import HttpResponseClientRefresh

from core.formatting import duration
from queues.archives import replay
from queues.archives.replay import ReplayRefused, Room
from queues.models import Archive, Queue, Replay
from queues.pages.archives import archive_of, describe
from queues.pages.destroy import describe_failure
from queues.pages.visitors import Request, signed_in
from rabbit.errors import BrokerError
from rabbit.names import MAX_NAME_BYTES, exchange_prefix, queue_prefix, readable

MAX_RATE = 100_000
SUGGESTIONS = 50
SLOW_START_SECONDS = 60

BACK, QUEUE, EXCHANGE = "back", "queue", "exchange"

WHERE, WHICH, CHECK = 1, 2, 3


class TargetForm(forms.Form):
    """Where the messages are sent to. ``replay.require_writable`` checks it."""

    name = forms.CharField(
        required=False,
        strip=False,
        max_length=MAX_NAME_BYTES,
        label="Name of the other queue or the exchange",
        widget=forms.TextInput(
            attrs={"autocomplete": "off", "autocapitalize": "none", "spellcheck": "false", "list": "suggestions"}
        ),
    )

    def __init__(self, archive: Archive, data: QueryDict | None) -> None:
        super().__init__(data, label_suffix="")
        self.archive = archive
        choices = [
            (BACK, f"the queue that they come from, {readable(archive.queue_name)}"),
            (QUEUE, "another queue"),
            (EXCHANGE, "an exchange, with their own routing keys"),
        ]
        to = forms.ChoiceField(label="Send the messages to", choices=choices, widget=forms.RadioSelect, initial=BACK)
        self.fields = {"to": to, **self.fields}
        if archive.pulse_user:
            username = archive.pulse_user.username
            self.fields["name"].help_text = f"Begins with {queue_prefix(username)} or {exchange_prefix(username)}"

    def clean(self) -> dict[str, Any]:
        """Resolve the target to a queue or an exchange that the archive's Pulse user may write to."""
        cleaned = super().clean() or self.cleaned_data
        name = {BACK: self.archive.queue_name}.get(cleaned.get("to", ""), cleaned.get("name", ""))
        cleaned["queue"], cleaned["exchange"] = ("", name) if cleaned.get("to") == EXCHANGE else (name, "")
        if not self.errors:
            try:
                replay.require_writable(self.archive, cleaned["queue"], cleaned["exchange"])
            except ReplayRefused as error:
                self.add_error("to" if cleaned["to"] == BACK else "name", str(error))
        return cleaned


class RangeForm(forms.Form):
    first = forms.IntegerField(label="From message", min_value=1)
    last = forms.IntegerField(label="To message", min_value=1)
    rate = forms.IntegerField(
        required=False,
        min_value=1,
        max_value=MAX_RATE,
        label="Messages a second",
        help_text="Empty: as fast as the broker confirms them.",
    )
    uuid = forms.UUIDField(required=False, widget=forms.HiddenInput)  # of the replay, from the preview

    def __init__(self, archive: Archive, room: Room, data: QueryDict | None, initial: dict[str, Any]) -> None:
        super().__init__(data, initial=initial, label_suffix="")
        self.archive = archive
        self.room = room

    def clean(self) -> dict[str, Any]:
        """Refuse messages that the archive does not have, and more than fit into the target queue."""
        cleaned = super().clean() or self.cleaned_data
        first, last = cleaned.get("first"), cleaned.get("last")
        if last is not None and last > self.archive.messages:
            self.add_error("last", f"The archive has {self.archive.messages:,} messages.")
        elif first is not None and last is not None and first > last:
            self.add_error("last", f"Enter {first:,} or more.")
        elif first is not None and last is not None and self.room.fits is not None:
            number, fits, limit = last - first + 1, self.room.fits, self.room.limit
            if number > fits:
                text = (
                    f"With {number:,} messages, the queue would be over its deletion limit of {limit:,}. {fits:,} fit."
                )
                self.add_error("last", text)
        return cleaned


@signed_in
@require_http_methods(["GET", "HEAD", "POST"])
def archive_replay(request: Request, uuid: UUID) -> HttpResponse:
    """Start a replay in three steps: where to, which messages and how fast, and a preview."""
    archive = archive_of(request, uuid)
    given = request.POST if request.method == "POST" else request.GET
    step = CHECK if request.method == "POST" else {"2": WHICH, "3": CHECK}.get(given.get("step", ""), WHERE)
    target = TargetForm(archive, given if step > WHERE else None)
    room, trouble, status = Room(), "", 200
    if step > WHERE and target.is_valid():
        try:
            room = replay.room(archive, queue=target.cleaned_data["queue"], exchange=target.cleaned_data["exchange"])
        except ReplayRefused as error:
            target.add_error("to" if target.cleaned_data["to"] == BACK else "name", str(error))
        except BrokerError as error:
            trouble, status = describe_failure(error, "The replay can't begin", destructive=False)
    if step > WHERE and not target.is_valid():
        step = WHERE
    begin = _first_unsent(archive)
    end = min(archive.messages, begin - 1 + (room.fits or archive.messages))
    every = {"first": given.get("first") or begin, "last": given.get("last") or end, "rate": given.get("rate")}
    chosen = RangeForm(archive, room, given if step == CHECK else None, every)
    if step == CHECK and not chosen.is_valid():
        step = WHICH
    fields = {name: given[name] for name in ("to", "name", "first", "last", "rate") if given.get(name)}
    context = {
        **describe(archive),
        "step": step,
        "steps": [(number, f"?{urlencode({**fields, 'step': number})}") for number in (WHERE, WHICH, CHECK)],
        "target": target,
        "range": chosen,
        "fields": fields,
        "room": room,
        "trouble": trouble,
    }
    if step == CHECK:
        return _preview(request, archive, target.cleaned_data, chosen.cleaned_data, context, status)
    if step == WHERE:
        context |= {"suggestions": _suggestions(archive), "is_gone": _is_gone(archive)}
        context["fields"] = {name: value for name, value in fields.items() if name in chosen.fields}
    else:
        context["fields"] = {name: value for name, value in fields.items() if name in target.fields}
        if room.fits is not None and room.fits < archive.messages:
            context["target_queue"] = _seen_queue(request, archive, target.cleaned_data["queue"])
    return render(request, "archives/replay_start.html", context)


def _preview(
    request: Request,
    archive: Archive,
    target: dict[str, Any],
    chosen: dict[str, Any],
    context: dict[str, Any],
    status: int,
) -> HttpResponse:
    """Start the replay if the preview was confirmed and the broker answers, else show the preview."""
    to = {"queue": target["queue"], "exchange": target["exchange"]}
    span = {"first": chosen["first"], "last": chosen["last"]}
    rate, uuid = chosen["rate"], chosen["uuid"] or uuid4()
    try:
        if request.method == "POST" and not context["trouble"]:
            with suppress(IntegrityError):  # the form was sent twice
                replay.start(archive, request.user, **to, **span, rate=rate, uuid=uuid)
            return redirect("replay", archive.uuid, uuid)
    except ReplayRefused as error:
        context["trouble"] = str(error)
    except BrokerError as error:
        context["trouble"], status = describe_failure(error, "The replay can't begin", destructive=False)
    number = span["last"] - span["first"] + 1
    earlier = archive.replays.filter(first__lte=span["last"], last__gte=span["first"])
    context |= {
        **span,
        "uuid": uuid,
        "number": number,
        "rate": rate,
        "lasts": duration(number / rate) if rate else "",
        "to": readable(to["queue"] or to["exchange"]),
        "to_exchange": bool(to["exchange"]),
        "earlier": earlier.exclude(sent=0, state__in=[Replay.State.STOPPED, Replay.State.FAILED]).first(),
    }
    return render(request, "archives/replay_start.html", context, status=status)


def _is_gone(archive: Archive) -> bool:
    return not Queue.objects.filter(vhost=archive.vhost, name=archive.queue_name).exclude(state="gone").exists()


def _seen_queue(request: Request, archive: Archive, name: str) -> Queue | None:
    return Queue.objects.seen_by(request.user).filter(vhost=archive.vhost, name=name).first()


def _first_unsent(archive: Archive) -> int:
    """Return the number of the first message that no replay sent, or 1 if they sent the last one."""
    sent = archive.replays.filter(sent__gt=0).aggregate(to=Max(F("first") + F("sent")))["to"] or 1
    return sent if sent <= archive.messages else 1


def _suggestions(archive: Archive) -> list[str]:
    """Return names of queues of the archive's Pulse user that can be typed."""
    if archive.pulse_user is None:
        return []
    queues = Queue.objects.filter(pulse_user=archive.pulse_user, vhost=archive.vhost, registered=False)
    names = queues.exclude(state=Queue.State.GONE).values_list("name", flat=True)[:SUGGESTIONS]
    return [name for name in names if readable(name) == name]


# The progress


def _replay(request: Request, uuid: UUID, replay_uuid: UUID) -> Replay:
    archive = archive_of(request, uuid)
    return get_object_or_404(Replay.objects.select_related("archive", "by"), archive=archive, uuid=replay_uuid)


@signed_in
@require_safe
def replay_page(request: Request, uuid: UUID, replay_uuid: UUID) -> HttpResponse:
    """Show a replay's progress, or its result. An htmx request gets the progress only."""
    one = _replay(request, uuid, replay_uuid)
    is_running = one.state == Replay.State.RUNNING
    if request.htmx and not is_running:
        return HttpResponseClientRefresh()  # so that the page loses its button and shows the result
    left = one.total - one.sent
    begin, end = (one.first + one.sent, one.last) if left else (one.last + 1, one.archive.messages)
    waits = one.sent == 0 and (timezone.now() - one.created).total_seconds() > SLOW_START_SECONDS
    context = {
        **describe(one.archive),
        "replay": one,
        "to": readable(one.to_queue or one.to_exchange),
        "is_running": is_running,
        "waits": waits,
        "lasts": duration(left / one.rate) if one.rate else "",
        "left": end - begin + 1,
        "error": readable(one.error),
        "queue": _seen_queue(request, one.archive, one.to_queue),
        "rest": _rest(one, begin, end) if not is_running and begin <= end else "",
    }
    return render(request, "archives/_progress.html" if request.htmx else "archives/replay.html", context)


def _rest(one: Replay, begin: int, end: int) -> str:
    """Return the query of a replay of these messages, which this one did not send."""
    fields: dict[str, Any] = {"to": EXCHANGE if one.to_exchange else QUEUE, "name": one.to_queue or one.to_exchange}
    if one.to_queue == one.archive.queue_name:
        fields = {"to": BACK}
    return urlencode({**fields, "first": begin, "last": end, "rate": one.rate or "", "step": WHICH})


@signed_in
@require_POST
def replay_stop(request: Request, uuid: UUID, replay_uuid: UUID) -> HttpResponse:
    one = _replay(request, uuid, replay_uuid)
    replay.stop(one, request.user)
    messages.success(request, "The replay is stopped. A batch of at most 100 messages may still arrive.")
    return redirect("replay", uuid, replay_uuid)
