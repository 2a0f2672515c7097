"""The message store's pages: applications, queues, and the messages of a queue."""

import logging
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from functools import wraps
from itertools import islice
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode
from uuid import UUID

from django import forms
from django.contrib.auth.decorators import login_required
from django.contrib.auth.models import AnonymousUser
from django.core.paginator import Paginator
from django.core.validators import MaxValueValidator
from django.db.models import Count
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.utils.dateparse import parse_date, parse_datetime
from django.views.decorators.http import require_safe

from accounts.models import Owner
from core.links import absolute_url
from guardian_store import _ids as ids
from guardian_store._ids import MAX_REST, Place
from message_store import applications, parameters, queues
from message_store.models import MAX_NAME_LENGTH, Application
from message_store.principals import Caller, may_read, may_use_positions
from message_store.store import (
    EPOCH,
    TICKS_PER_MICROSECOND,
    NoQueue,
    StoredMessage,
    StoredQueue,
    StoreUnavailable,
    store,
    time_of,
)
from rabbit.names import readable, readable_text

logger = logging.getLogger(__name__)

APPLICATIONS_PER_PAGE = 50
QUEUES_PER_PAGE = 50
MESSAGES_PER_PAGE = 20
MAX_CONSUMERS = 20

MAX_READERS = 3
"""Readers shown per queue in a list. A queue's page shows all."""

MAX_TEXT_CHARACTERS = 5_000
"""The part of a text message that is shown."""

MAX_BINARY_BYTES = 512
"""The part of a binary message that is shown."""

View = Callable[..., HttpResponse]


class Request(HttpRequest):
    user: Owner


def store_page(view: View) -> View:
    """Require sign-in, and show an error page if the store is unreachable."""

    @login_required
    @require_safe
    @wraps(view)
    def decorated(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        try:
            return view(request, *args, **kwargs)
        except StoreUnavailable:
            logger.exception("The message store could not be shown")
            return render(request, "message_store/away.html", status=503)

    return decorated


def caller(owner: Owner) -> Caller:
    return Caller(email=owner.email)


def has_something_to_see(visitor: Owner | AnonymousUser) -> bool:
    """Return whether the pages show a visitor anything: applications for operators, else queues that name the owner."""
    if not visitor.is_authenticated:
        return False
    if visitor.is_staff:
        return Application.objects.exists()
    try:
        return bool(_queues_naming(visitor, ("", ""), 1))
    except StoreUnavailable:
        return True


# The lists


class Row(NamedTuple):
    queue: StoredQueue
    name: str
    application: str
    number: int
    readers: list[str]
    more_readers: int


def _rows(found: Sequence[StoredQueue], most_readers: int | None = MAX_READERS) -> list[Row]:
    counts = store().count(found) if found else []
    rows = []
    for queue, number in zip(found, counts, strict=True):
        readers = [readable(name) for name in queue.principals or (f"app:{queue.application}",)]
        shown = readers[:most_readers]
        names = (readable(queue.name), readable(queue.application))
        rows.append(Row(queue, *names, number, shown, len(readers) - len(shown)))
    return rows


def _queues_naming(owner: Owner, start: tuple[str, str], limit: int) -> list[StoredQueue]:
    return store().queues_for_principal(str(caller(owner).principal), start=start, limit=limit)


def _name_in(request: HttpRequest, parameter: str) -> str:
    """Return a name from the query, at which a list begins. Invalid names are fine here."""
    return request.GET.get(parameter, "").replace("\0", "")[:MAX_NAME_LENGTH]


@store_page
def message_store_page(request: Request) -> HttpResponse:
    """Show the queues that name the owner; to operators also the applications."""
    context: dict[str, Any] = {}
    if request.user.is_staff:
        search = _name_in(request, "search").strip()
        found = (
            Application.objects.filter(name__icontains=search).annotate(number_of_keys=Count("keys")).order_by("name")
        )
        page = Paginator(found, APPLICATIONS_PER_PAGE).get_page(request.GET.get("page"))
        context = {"page": page, "search": search}
    start = (_name_in(request, "application"), _name_in(request, "from"))
    named = _queues_naming(request.user, start, QUEUES_PER_PAGE + 1)
    beyond = named[QUEUES_PER_PAGE] if len(named) > QUEUES_PER_PAGE else None
    return render(
        request,
        "message_store/applications.html",
        {
            **context,
            "rows": _rows(named[:QUEUES_PER_PAGE]),
            "begun": any(start),
            "next": urlencode({"application": beyond.application, "from": beyond.name}) if beyond else "",
        },
    )


@store_page
def stored_queues_page(request: Request, application: str) -> HttpResponse:
    """Show an application's queues: all to operators, to others those that name them, or 404 if there are none."""
    start = _name_in(request, "from")
    if request.user.is_staff:
        is_there = applications.exists(application)
        found = store().queues(application, start=start, limit=QUEUES_PER_PAGE + 1) if is_there else []
    else:
        found = _queues_of_application_naming(request.user, application, start, QUEUES_PER_PAGE + 1)
        is_there = bool(found or (start and _queues_of_application_naming(request.user, application, "", 1)))
    if not is_there:
        raise Http404("There is no such application, or it has no queue that you can read.")
    beyond = found[QUEUES_PER_PAGE].name if len(found) > QUEUES_PER_PAGE else ""
    return render(
        request,
        "message_store/queues.html",
        {
            "name": readable(application),
            "rows": _rows(found[:QUEUES_PER_PAGE]),
            "begun": start,
            "next": urlencode({"from": beyond}) if beyond else "",
            "address": _address(application),
        },
    )


def _queues_of_application_naming(owner: Owner, application: str, start: str, limit: int) -> list[StoredQueue]:
    """Return an application's queues that name the owner. They are consecutive in the store's list."""
    if "\0" in application:
        return []
    return [queue for queue in _queues_naming(owner, (application, start), limit) if queue.application == application]


def _address(*names: str) -> str:
    return absolute_url("/".join(["/v1", *(quote(name, safe="") for name in names)]))


# A queue


class MessageFilterForm(forms.Form):
    """The partition, order and start of the messages to show."""

    partition = forms.IntegerField(min_value=1)
    order = forms.ChoiceField(choices=[("descending", "newest first"), ("ascending", "oldest first")])
    since = forms.CharField(
        required=False,
        label="From",
        max_length=100,
        widget=forms.TextInput(attrs={"placeholder": "time or message id", "autocomplete": "off", "size": 32}),
    )

    def __init__(self, request: HttpRequest, partitions: int) -> None:
        asked = {name: request.GET[name] for name in self.base_fields if request.GET.get(name)}
        super().__init__({"partition": "1", "order": "descending", **asked}, label_suffix="")
        self.fields["partition"].widget.attrs["max"] = partitions
        self.fields["partition"].validators.append(MaxValueValidator(partitions))

    def clean(self) -> dict[str, Any]:
        cleaned = super().clean() or self.cleaned_data
        if cleaned.get("since"):
            try:
                cleaned["start"] = place_of(cleaned["since"], descending=cleaned.get("order") == "descending")
            except ValueError:
                self.add_error("since", "Write a time, such as 2026-12-31 23:59, or a message id.")
        return cleaned


def place_of(text: str, *, descending: bool) -> Place:
    """Return the place of a day, a time, or a value of the API's parameter ``since``. Raises ValueError."""
    day = parse_date(text)
    at = datetime(day.year, day.month, day.day) if day else parse_datetime(text)  # noqa: DTZ001 - it is made aware next
    if at is None:
        return parameters.parse_since(text, descending=descending)
    aware = at if timezone.is_aware(at) else timezone.make_aware(at)
    ticks = (aware - EPOCH) // timedelta(microseconds=1) * TICKS_PER_MICROSECOND
    return Place(max(ticks, ids.MIN_TICKS), MAX_REST if descending else 0)


class MessagePreview(NamedTuple):
    """The beginning of a message as text or hex. ``more``: how many characters or bytes follow."""

    id: str
    at: datetime
    content_type: str
    size: int
    body: str
    more: int
    unit: str


class Consumer(NamedTuple):
    """A consumer and its last processed message in a partition, if any."""

    name: str
    id: str
    at: datetime | None


@store_page
def stored_queue_page(request: Request, application: str, queue: str) -> HttpResponse:
    """Show a queue and the messages of one partition, to operators and its readers."""
    try:
        found = queues.find(application, queue) if applications.exists(application) else None
    except NoQueue:
        found = None
    if found is None or not (request.user.is_staff or may_read(found, caller(request.user))):
        raise Http404("There is no such queue, or you can't read it.")
    form = MessageFilterForm(request, found.partitions)
    messages: list[MessagePreview] = []
    consumers: list[Consumer] = []
    asked: dict[str, Any] = {}
    if form.is_valid():
        asked = form.cleaned_data
        partition, descending = asked["partition"], asked["order"] == "descending"
        read = queues.read(
            found,
            [partition],
            start=asked.get("start"),
            limit=MESSAGES_PER_PAGE + 1,
            descending=descending,
            batch_bytes=queues.BATCH_BYTES,
        )
        messages = [_shown(message) for message in read]
        if request.user.is_staff or may_use_positions(found, caller(request.user)):
            consumers = _consumers(found, partition)
    beyond = messages[MESSAGES_PER_PAGE].id if len(messages) > MESSAGES_PER_PAGE else ""
    (row,) = _rows([found], most_readers=None)
    return render(
        request,
        "message_store/queue.html",
        {
            "row": row,
            "address": _address(found.application, found.name),
            "form": form,
            "asked": asked,
            "shown": messages[:MESSAGES_PER_PAGE],
            "next": urlencode({"partition": asked["partition"], "order": asked["order"], "since": beyond})
            if beyond
            else "",
            "consumers": consumers[:MAX_CONSUMERS],
            "more_consumers": len(consumers) > MAX_CONSUMERS,
        },
    )


def _consumers(queue: StoredQueue, partition: int) -> list[Consumer]:
    """Return the consumers' positions, up to one more than the page shows."""
    found = []
    for name in islice(store().consumers(queue), MAX_CONSUMERS + 1):
        last = store().positions(queue, name).get(partition)
        found.append(Consumer(readable(name), last.hex if last else "", _time(last) if last else None))
    return found


def _shown(message: StoredMessage) -> MessagePreview:
    size = len(message.body)
    try:
        text = message.body.decode()
    except UnicodeDecodeError:
        body, more, unit = message.body[:MAX_BINARY_BYTES].hex(" "), max(0, size - MAX_BINARY_BYTES), "bytes"
    else:
        body = readable_text(text[:MAX_TEXT_CHARACTERS])
        more, unit = max(0, len(text) - MAX_TEXT_CHARACTERS), "characters"
    return MessagePreview(message.id.hex, _time(message.id), readable(message.content_type), size, body, more, unit)


def _time(message_id: UUID) -> datetime:
    return time_of(ids.place(message_id).ticks)
