import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache, wraps
from typing import Any, NamedTuple
from urllib.parse import urlencode
from uuid import UUID

from django import forms
from django.conf import settings
from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.core.exceptions import PermissionDenied
from django.core.paginator import Paginator
from django.http import HttpRequest, HttpResponse, QueryDict
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import require_http_methods, require_safe
from django_htmx.http import HttpResponseClientRefresh
from django_htmx.middleware import HtmxDetails

from accounts.models import Owner, PulseUser
from accounts.pages.forms import NameForm
from core.formatting import duration, rate_in_words, short_rate
from queues.actions import limit_requests, single
from queues.actions.endings import bindings_at_deletion, ending
from queues.archives.writing import Removed, outcome_in_words
from queues.guard import feeding
from queues.models import Archive, Queue, QueueEvent, QueueSample, Watch
from queues.pages.forms import LimitsForm
from queues.pages.trends import Trend, trends
from queues.rules import charts, growth, thresholds
from queues.rules.listing import ORDERINGS, WORST_FIRST, QueueFilter, add_up, count_by_state, should_have_consumer
from queues.rules.thresholds import Thresholds
from rabbit.arguments import REGISTERED_MAX_LENGTH
from rabbit.management import Binding, BrokerError, Refused, was_not_executed
from rabbit.names import DEAD_LETTER_QUEUE, readable
from rabbit.snapshot import CLASSIC, MQTT_QOS_0, STREAM

logger = logging.getLogger(__name__)

EVENTS_SHOWN = 50
ROWS = 50
ACCOUNTS_TO_CHOOSE_FROM = 50
"""With more accounts, the filter is a text field instead of a list."""
BINDINGS_SHOWN = 50
ARCHIVES_SHOWN = 5
LATE_AFTER_POLLS = 3

BLOCKED = "deletion is blocked until an operator decides"

OFFERED = ("state", "-length", "-growth", "name", "vhost", "pulse_user")
OFFERED_ORDERS = [order for order in ORDERINGS if order[0] in OFFERED]

HEADINGS = {
    "name": "Name",
    "-length": "Messages",
    "-growth": "Growth",
    "-consumers": "Consumers",
    "-bytes": "Size",
    "state": "State",
}
"""The columns of the list by the order that the first click on each selects."""

HEX_VHOST = re.compile("[0-9a-f]{32}")

View = Callable[..., HttpResponse]


class Request(HttpRequest):
    """A request of a signed-in owner, with django-htmx's details."""

    user: Owner
    htmx: HtmxDetails


def signed_in(view: View) -> View:
    """Require sign-in. An htmx request without it reloads the whole page, which redirects to the sign-in."""
    required = login_required(view)

    @wraps(view)
    def decorated(request: Request, *args: Any, **kwargs: Any) -> HttpResponse:
        if request.htmx and not request.user.is_authenticated:
            return HttpResponseClientRefresh()
        return required(request, *args, **kwargs)

    return decorated


# The list


@dataclass(frozen=True)
class Row:
    """A row of the list. ``bar`` is None if the queue is gone or its length unknown, ``trend`` if it isn't shown."""

    queue: Queue
    thresholds: Thresholds
    spared: bool
    bar: charts.Bar | None
    trend: Trend | None = None

    @property
    def name(self) -> str:
        """The queue's readable name."""
        return readable(self.queue.name)

    @property
    def vhost(self) -> str:
        """The vhost's readable name."""
        return readable(self.queue.vhost)

    @property
    def unattended(self) -> bool:
        """Whether the queue lacks a consumer that it should have, as in ``listing.WITHOUT_CONSUMER``."""
        queue = self.queue
        missed = should_have_consumer(queue.name, exclusive=queue.exclusive, registered=queue.registered)
        return queue.consumers == 0 and queue.state != Queue.State.GONE and missed

    @property
    def needs_attention(self) -> bool:
        """Whether the queue is not healthy, as in ``listing.NEEDS_ATTENTION``."""
        queue = self.queue
        if queue.state == Queue.State.GONE:
            return False
        return queue.state != Queue.State.OK or bool(queue.block_reason) or self.stalled or self.unread

    @property
    def unread(self) -> bool:
        """Whether the queue has messages, and lacks a consumer that it should have."""
        return self.unattended and bool(self.queue.ready or self.queue.unacknowledged)

    @property
    def short_vhost(self) -> str:
        """The vhost's readable name; of an agents' vhost, the first digits."""
        return f"{self.vhost[:8]}…" if HEX_VHOST.fullmatch(self.vhost) else self.vhost

    @property
    def of_agents(self) -> str:
        """Whose agents the queue belongs to, in words; empty: it is not in the vhost of agents."""
        if self.queue.owner is None:
            return ""
        return f"{'' if self.queue.registered else 'not registered by '}agents of {self.queue.owner.email}"

    @property
    def state(self) -> str:
        """The state of the queue, in words; empty: it is within its limits, and yet not healthy."""
        if not self.queue.block_reason:
            within_limits = self.queue.state == Queue.State.OK
            return "" if within_limits and self.needs_attention else self.queue.get_state_display()
        return f"{'over deletion limit' if self.is_over else self.queue.get_state_display()}; {BLOCKED}"

    @property
    def is_over(self) -> bool:
        """Whether the queue is known to be over its deletion limit."""
        return self.queue.length is not None and self.queue.length > self.thresholds.max

    @property
    def limits(self) -> str:
        """The limits that apply, in words."""
        return _limits_in_words(self.thresholds, self.spared)

    @property
    def rate(self) -> str:
        """The growth in the last minutes, such as "+28/min"; empty: unknown."""
        return short_rate(self._growth.per_second) if self._growth else ""

    @property
    def outlook(self) -> str:
        """The queue's condition and what happens next, in one or two sentences."""
        return outlook(self, self._growth, is_limited=False)

    @property
    def _growth(self) -> growth.Growth | None:
        return self.trend.growth if self.trend else None

    @property
    def stalled(self) -> bool:
        """Whether owners were notified of a stall that is not over, as in ``listing.STALLED``."""
        queue = self.queue
        return queue.stalled_notified_at is not None and queue.consumers != 0 and queue.state != Queue.State.GONE

    @property
    def dead_letters(self) -> bool:
        """Whether the queue is a dead-letter queue of agents."""
        return self.queue.registered and self.queue.name == DEAD_LETTER_QUEUE


@lru_cache  # most queues have the same limits, and a page refreshes fifty rows in one request
def _limits_in_words(limits: Thresholds, spared: bool) -> str:
    most = "never deleted for its length" if spared else f"deletion limit {limits.max:,}"
    return f"warning threshold {limits.warn:,}; {most}"


@signed_in
@require_safe
def queues_page(request: Request) -> HttpResponse:
    """Show the visitor's queues, to an operator all. An htmx request gets new figures for the rows on its page."""
    mine = Queue.objects.seen_by(request.user)
    groups = count_by_state(mine)
    counts = add_up(groups)
    context = {"counts": counts, "freshness": _freshness(Watch.objects.filter(id=1).first())}
    if request.htmx:
        shown = mine.filter(uuid__in=uuids_in(request.GET.get("shown", ""))).select_related("pulse_user")
        return render(request, "queues/_live.html", {**context, "rows": rows_of(shown, timezone.now())})
    accounts = PulseUser.objects.seen_by(request.user)
    names = list(accounts.values_list("username", flat=True)[: ACCOUNTS_TO_CHOOSE_FROM + 1])
    if not groups:
        return render(request, "queues/none.html", {**context, "accounts": names})
    vhosts = sorted({group.vhost for group in groups})
    filtered = QueueFilter(request.GET, mine)
    form = _with_choices(filtered.form, vhosts, names)
    paginator = Paginator(filtered.qs.select_related("pulse_user", "owner"), ROWS)
    if not set(request.GET) - {"page", "ordering"}:
        # Without a filter the number is known. Another count would read all rows again.
        paginator.count = counts.total
    page = paginator.get_page(request.GET.get("page"))
    rows = rows_of(page.object_list, timezone.now())
    filters = {name: value for name, value in request.GET.items() if value and name in form.fields}
    return render(
        request,
        "queues/queues.html",
        {
            **context,
            "form": form,
            "page": page,
            "filters": urlencode(filters),
            "query": request.GET.urlencode(),
            "headings": _headings(filters),
            "filtered": bool(filters.keys() - {"ordering"}),
            "rows": rows,
            "shown": ",".join(row.queue.uuid.hex for row in rows),
            "several_vhosts": len(vhosts) > 1,
            "selectable": any(row.queue.state != Queue.State.GONE for row in rows),
        },
    )


class Heading(NamedTuple):
    """The heading of a column: its link, and how it is sorted now, as ``aria-sort`` has it; empty: it isn't."""

    label: str
    query: str
    sorted: str


def _headings(filters: Mapping[str, Any]) -> list[Heading]:
    """Return the headings of the list. A second click reverses the order."""
    now = str(filters.get("ordering", WORST_FIRST))
    found = []
    for first, label in HEADINGS.items():
        second = first[1:] if first.startswith("-") else f"-{first}"
        query = urlencode({**filters, "ordering": second if now == first else first})
        direction = ("descending" if now.startswith("-") else "ascending") if now in (first, second) else ""
        found.append(Heading(label, query, direction))
    return found


class Freshness(NamedTuple):
    """When queues were last listed (None: never). ``late``: too long ago. ``outage``: the broker is unreachable."""

    listed_at: datetime | None
    late: bool
    outage: bool


def _freshness(watch: Watch | None) -> Freshness:
    if watch is None or watch.listed_at is None:
        return Freshness(None, late=True, outage=watch is not None and watch.outage_since is not None)
    since = timezone.now() - watch.listed_at
    late = since > timedelta(seconds=LATE_AFTER_POLLS * settings.GUARDIAN_POLL_SECONDS)
    return Freshness(watch.listed_at, late, watch.outage_since is not None)


def uuids_in(text: str) -> list[UUID]:
    """Return the UUIDs in a comma-separated list, at most one page of them. Other words are ignored."""
    found = []
    for word in text.split(",")[:ROWS]:
        try:
            found.append(UUID(word))
        except ValueError:
            continue
    return found


def rows_of(queues: Iterable[Queue], now: datetime | None = None) -> list[Row]:
    """Return the rows of these queues, with their trends up to ``now`` if it is given."""
    listed = list(queues)
    trend_of = trends(listed, now) if now else {}
    rows = []
    for queue in listed:
        limits = thresholds.of_queue(queue)
        length = None if queue.state == Queue.State.GONE else queue.length
        bar = charts.bar(length, limits) if length is not None else None
        rows.append(Row(queue, limits, thresholds.is_spared(queue), bar, trend_of.get(queue.pk)))
    return rows


def _with_choices(form: forms.Form, vhosts: list[str], accounts: list[str]) -> forms.Form:
    """Turn filters with few values into lists, and hide filters with a single value."""
    form.label_suffix = ""
    form.fields["ordering"].widget.choices = OFFERED_ORDERS
    for name in ("without_consumers", "blocked"):
        form.fields[name].widget = forms.CheckboxInput()
    offer_choices(form, "vhost", [(vhost, readable(vhost)) for vhost in vhosts])
    if len(accounts) <= ACCOUNTS_TO_CHOOSE_FROM:
        offer_choices(form, "pulse_user", [(name, name) for name in accounts])
    return form


def offer_choices(form: forms.Form, name: str, choices: list[tuple[str, str]]) -> None:
    """Turn a filter into a list of these values, or hide it if there is only one."""
    if len(choices) > 1:
        form.fields[name].widget = forms.Select(choices=[("", "all"), *choices])
    elif not form.data.get(name):
        form.fields[name].widget = forms.HiddenInput()


# One queue


@signed_in
@require_safe
def queue_page(request: Request, uuid: UUID) -> HttpResponse:
    """Show one queue to its owners and to operators. Others get 404."""
    queue = seen_queue(request, uuid)
    there = queue.state != Queue.State.GONE
    live = single.live(queue) if there else single.Live()
    if live.consumers is not None:
        queue.consumers = live.consumers  # the stored count may be a minute old
    events = list(queue.events.select_related("by")[:EVENTS_SHOWN])
    limit = live.limit if not queue.registered else None
    is_limited = limit is not None and limit.keeps_within(thresholds.of_queue(queue).max)
    context = _now(request, queue, is_limited=is_limited)
    limits = LimitsForm(initial={name: getattr(queue, name) for name in single.LIMITS})
    return render(
        request,
        "queues/queue.html",
        {
            **context,
            "there": there,
            "owners": _owners(queue),
            "max_messages": REGISTERED_MAX_LENGTH if queue.registered else None,
            "live": live,
            "bindings": bindings_shown(live.bindings),
            "upstream": bindings_shown(live.upstream),
            "arguments": _arguments_shown(live),
            "limits": limits if request.user.is_staff else None,
            "fetch_paused_until": thresholds.fetch_paused_until(queue, timezone.now()),
            "limit_request": limit_requests.open_request(queue) if there else None,
            "may_destroy": request.user.is_staff or not queue.registered,
            "removing": _pending_removal(queue, events, context["freshness"].listed_at),
            "ending": None if there else ending(events),
            "bound_before": [] if live.bindings else _readable_bindings(bindings_at_deletion(events)),
            "archives": Archive.objects.seen_by(request.user).filter(queue=queue)[:ARCHIVES_SHOWN],
            "can_peek": there and queue.type == CLASSIC,
            "events": [(event, *describe_event(event)) for event in events],
        },
    )


def _owners(queue: Queue) -> list[Owner]:
    """Return the owners of the queue's Pulse user, and the owner whose agents' vhost it is in."""
    of_agents = [queue.owner] if queue.owner else []
    return [*queue.pulse_user.owners.all(), *of_agents] if queue.pulse_user else of_agents


@signed_in
@require_safe
def queue_chart(request: Request, uuid: UUID) -> HttpResponse:
    """Return the part of a queue's page that refreshes. Other than htmx requests are redirected to the page."""
    queue = seen_queue(request, uuid)
    if not request.htmx:
        return redirect(f"{reverse('queue', args=[uuid])}?{urlencode({'span': _span(request).name})}")
    if queue.state == Queue.State.GONE:
        return HttpResponseClientRefresh()  # so that the page loses its buttons
    # The page asked the broker, so that this need not.
    is_limited = request.GET.get("limited") == "1"
    return render(request, "queues/_now.html", _now(request, queue, is_limited=is_limited))


def seen_queue(request: Request, uuid: UUID) -> Queue:
    """Return the queue with this UUID, or raise Http404 if the visitor may not see it."""
    seen = Queue.objects.seen_by(request.user)
    return get_object_or_404(seen.select_related("pulse_user", "owner"), uuid=uuid)


def _span(request: HttpRequest) -> charts.Span:
    return charts.SPANS.get(request.GET.get("span", ""), charts.SPANS["hour"])


def _now(request: HttpRequest, queue: Queue, *, is_limited: bool) -> dict[str, Any]:
    """Return the context that changes with each pass. It is read from the database only.

    ``is_limited``: the broker itself keeps the queue within its deletion limit.
    """
    watch = Watch.objects.filter(id=1).first()
    limits = thresholds.of_queue(queue)
    span = _span(request)
    there = queue.state != Queue.State.GONE
    now = timezone.now() if there else queue.last_seen
    samples = _samples(queue, now - span.duration, now)
    if queue.length is not None and (not samples or samples[-1][1] != queue.length):
        # Samples are pruned: a length that has not changed for longer than they are kept has no sample.
        samples.append((now if samples else max(now - span.duration, queue.first_seen), queue.length))
    began = timezone.localtime(now - span.duration)
    to_limit = request.GET.get("scale") == "limit"
    has_maximum = not thresholds.is_spared(queue)
    drawn = charts.chart(samples, began, now, limits, has_maximum=has_maximum, to_limit=to_limit)
    since = growth.since(now, queue.first_seen)
    recent = [sample for sample in samples if sample[0] >= since]
    grows = growth.growth([*recent, (now, queue.length)], limits.max) if queue.length is not None else None
    (row,) = rows_of([queue])
    return {
        "row": row,
        "queue": queue,
        "name": row.name,
        "vhost": row.vhost,
        "thresholds": limits,
        "spared": row.spared,
        "outlook": outlook(row, grows, is_limited=is_limited),
        "is_limited": is_limited,
        "rate": rate_in_words(grows.per_second) if grows else "",
        "time_to_max": duration(grows.seconds_to_max) if grows and not row.spared and not is_limited else "",
        "chart": drawn,
        "chart_began": began,
        "times": charts.time_ticks(span, began, now),
        "to_limit": to_limit,
        "span": span,
        "spans": charts.SPANS.values(),
        "freshness": _freshness(watch),
        "watch": watch,
    }


def _samples(queue: Queue, began: datetime, ended: datetime) -> list[charts.Sample]:
    """Return the samples of this window, oldest first, preceded by the one that gives the length at its start."""
    samples = QueueSample.objects.filter(queue=queue).order_by("at").values_list("at", "length")
    earlier = samples.filter(at__lte=began).order_by("-at")[:1]
    return [*earlier, *samples.filter(at__gt=began, at__lte=ended)]


def outlook(row: Row, grows: growth.Growth | None, *, is_limited: bool) -> str:
    """Return the queue's condition and what happens next, in one or two sentences."""
    queue, limits = row.queue, row.thresholds
    if queue.state == Queue.State.GONE:
        return "The queue is no longer on the broker. A client that declares it again gets an empty queue."
    if queue.length is None:
        if queue.type == STREAM:
            return "A stream keeps messages after they are read, so Guardian does not check its length."
        if queue.type == MQTT_QOS_0:
            return "An MQTT subscription with QoS 0 stores no messages, so it has no length."
        return "The broker does not report its length. Until it does, Guardian does not warn about or delete the queue."
    if queue.block_reason:
        over = f"It is over its deletion limit of {limits.max:,} messages, and its" if row.is_over else "Its"
        return f"{over} {BLOCKED}. Start its consumer, or purge or delete it yourself."
    if queue.state == Queue.State.DELETING:
        if queue.length > limits.max:
            return f"It is over its deletion limit of {limits.max:,} messages. Guardian rechecks and deletes it."
        return "Guardian deletes it, because its name does not follow the pattern that this broker requires."
    if row.is_over and not row.spared and thresholds.fetch_paused_until(queue, timezone.now()):
        return (
            f"It is over its deletion limit of {limits.max:,} messages. Guardian deletes it past {2 * limits.max:,}, "
            "because its deletion was interrupted or called off: see its limits below."
        )
    if queue.length >= limits.warn:
        if row.dead_letters:
            return (
                "It is over its warning threshold. Agents did not get these messages: their queues were full, or no "
                "consumer read the messages in time. The broker drops the oldest messages; the queue is not deleted."
            )
        if queue.registered:
            return (
                "It is over its warning threshold, because its agent doesn't keep up. It is not deleted for its "
                f"length. Messages past {REGISTERED_MAX_LENGTH:,}, or that wait too long, go to the dead-letter queue."
            )
        if is_limited:
            return "It is over its warning threshold. The broker itself limits it: see its limits below."
        if row.spared:
            return (
                "It is over its warning threshold. It is not deleted for its length, but its messages use the broker's "
                "memory until they are consumed."
            )
        when = ""
        if grows and grows.seconds_to_max is not None:
            when = f" At its current rate, it reaches that in {duration(grows.seconds_to_max)}."
        elif grows and grows.per_second < 0:
            when = " It is shrinking at the moment."
        return f"It is over its warning threshold. Guardian deletes it past {limits.max:,} messages.{when}"
    if row.stalled:
        condition = "Its consumers acknowledge no messages. Check or restart them."
    elif row.unread:
        condition = (
            f"It has no consumer, so its messages wait. Start its {'agent' if queue.registered else 'consumer'}."
        )
    else:
        condition = "It is healthy."
    if grows and grows.per_second > 0:
        seconds = (limits.warn - queue.length) / grows.per_second
        if seconds < timedelta(days=1).total_seconds():
            return f"{condition} At its current rate, its owners are warned in {duration(seconds)}."
    return f"{condition} Its owners are warned at {limits.warn:,} messages."


def bindings_shown(bindings: list[Binding] | None) -> dict[str, Any]:
    """Return the first of these bindings as the page shows them, and the number of the others."""
    shown = _readable_bindings(feeding.described(bindings or []))
    return {"shown": shown[:BINDINGS_SHOWN], "more": max(0, len(shown) - BINDINGS_SHOWN)}


def _readable_bindings(bindings: Iterable[Mapping[str, str]]) -> list[dict[str, str]]:
    return [{key: readable(text) for key, text in one.items()} for one in bindings]


def _arguments_shown(live: single.Live) -> list[tuple[str, str]]:
    return sorted((readable(key), readable(str(value))) for key, value in (live.arguments or {}).items())


def _pending_removal(queue: Queue, events: list[QueueEvent], listed_at: datetime | None) -> QueueEvent | None:
    """Return the event of a requested deletion whose outcome is unknown until the next list."""
    if queue.state == Queue.State.GONE or not events or events[0].kind != QueueEvent.Kind.REMOVING:
        return None
    return events[0] if listed_at is None or events[0].at > listed_at else None


BY_PEOPLE = (
    QueueEvent.Kind.REMOVING,
    QueueEvent.Kind.REMOVED,
    QueueEvent.Kind.PURGED,
    QueueEvent.Kind.ADJUSTED,
    QueueEvent.Kind.ASKED,
    QueueEvent.Kind.DECLINED,
)


BY_GUARDIAN = (QueueEvent.Kind.DELETED, QueueEvent.Kind.KEPT, QueueEvent.Kind.SKIPPED)

WHY_REMOVED = {"unregistered": "because it has no registration", "vhost": "with its virtual host"}


def describe_event(event: QueueEvent) -> tuple[str, str, str]:
    """Return an event's kind, its details and its actor, in words. The actor is empty if nobody acted."""
    what = event.get_kind_display()
    who = event.by.email if event.by else "a deleted owner" if event.kind in BY_PEOPLE else ""
    if event.kind in BY_GUARDIAN:
        who = "Guardian"
    if event.kind == QueueEvent.Kind.DELETED:
        what = QueueEvent.Kind.REMOVED.label
    if "command" in event.details:
        who = f"the command {event.details['command']}"
    if "with" in event.details:
        return what, f"with the Pulse user {event.details['with']}", "Guardian"
    if event.kind in (QueueEvent.Kind.SKIPPED, QueueEvent.Kind.REJECTED):
        count = event.details.get("count", 1)
        return what, f"{count:,} event{'' if count == 1 else 's'}: {event.details.get('why', '')}", who
    if event.kind == QueueEvent.Kind.ASKED:
        return what, f"{event.details['wanted']:,} messages: {event.details['reason']}", who
    if event.kind == QueueEvent.Kind.DECLINED:
        return what, event.details["reason"], who
    if "why" in event.details:
        return what, WHY_REMOVED.get(event.details["why"], ""), "Guardian"
    if event.kind != QueueEvent.Kind.ADJUSTED:
        return what, "", who
    before, after = event.details.get("before", {}), event.details.get("after", {})
    changed = [name for name in single.LIMITS if before.get(name) != after.get(name)]
    return what, "; ".join(f"{LIMITS_IN_WORDS[name]}: {_limit(after.get(name))}" for name in changed), who


LIMITS_IN_WORDS = {"unbounded": "unbounded", "warn_length": "warning threshold", "max_length": "deletion limit"}


def _limit(value: bool | int | None) -> str:
    if value is None:
        return "default"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else f"{value:,}"


# What people do to a queue


class DestroyForm(NameForm):
    """Asks for the queue's name, and whether its messages are archived."""

    keep = forms.BooleanField(required=False, initial=True, label="Archive the messages first", label_suffix="")

    def __init__(self, name: str, data: QueryDict | None, *, can_archive: bool) -> None:
        super().__init__(name, data)
        if not can_archive:
            del self.fields["keep"]


@signed_in
@require_http_methods(["GET", "HEAD", "POST"])
def queue_delete(request: Request, uuid: UUID) -> HttpResponse:
    """Delete a queue after its name was typed."""
    return _destroy(request, uuid, "queues/delete.html", single.delete_queue, "deleted")


@signed_in
@require_http_methods(["GET", "HEAD", "POST"])
def queue_purge(request: Request, uuid: UUID) -> HttpResponse:
    """Purge a queue after its name was typed."""
    return _destroy(request, uuid, "queues/purge.html", single.purge_queue, "purged")


def _destroy(request: Request, uuid: UUID, template: str, destroy: Callable[..., Removed], done: str) -> HttpResponse:
    queue = seen_queue(request, uuid)
    if queue.state == Queue.State.GONE:
        messages.warning(request, "The queue is no longer on the broker. You don't have to do anything.")
        return redirect("queue", uuid)
    name = readable(queue.name)
    why_not_archived = single.why_not_archived(queue, request.user)
    data = request.POST if request.method == "POST" else None
    form = DestroyForm(name, data, can_archive=not why_not_archived)
    trouble, status = "", 200
    try:
        single.require_may_destroy(queue, request.user)
        if form.is_valid():
            removed = destroy(queue, request.user, keep=form.cleaned_data.get("keep", False))
            messages.success(request, f"The queue {name} was {done}. {outcome_in_words(removed)}".strip())
            return redirect("queue", uuid)
    except PermissionDenied as error:
        return render(request, "queues/refused.html", {"queue": queue, "name": name, "why": str(error)}, status=403)
    except single.Gone as error:
        messages.warning(request, f"The queue {name} was not {done}. {error}")
        return redirect("queue", uuid)
    except BrokerError as error:
        trouble, status = describe_failure(error, f"The queue was not {done}")
    live = single.live(queue) if not trouble else single.Live()
    context = {
        "queue": queue,
        "name": name,
        "vhost": readable(queue.vhost),
        "form": form,
        "why_not_archived": why_not_archived,
        "most_archived": settings.GUARDIAN_ARCHIVE_MAX_MESSAGES,
        "most_bytes": settings.GUARDIAN_ARCHIVE_MAX_BYTES,
        "days": settings.GUARDIAN_ARCHIVE_DAYS,
        "trouble": trouble,
        "ready": live.ready if live.ready is not None else queue.ready,
        "consumers": live.consumers if live.consumers is not None else queue.consumers,
        "stored_at": _freshness(Watch.objects.filter(id=1).first()).listed_at if live.ready is None else None,
        "bindings": bindings_shown(live.bindings) if live.bindings is not None else None,
    }
    return render(request, template, context, status=status)


def describe_failure(error: BrokerError, failure: str, *, destructive: bool = True) -> tuple[str, int]:
    """Return the text and the HTTP status of a page after a failed request to the broker.

    ``failure`` begins the text, as in "It was not deleted". ``destructive``: the request may have changed something.
    """
    logger.warning("A request of a page failed: %s", error)
    if isinstance(error, Refused):
        reason = readable(error.reason)
        if error.status in (401, 403):
            return f"{failure}: the broker does not allow Guardian to do this ({reason}). Contact an operator.", 503
        return f"{failure}, because the broker refuses: {reason}", 409
    if not destructive or was_not_executed(error):
        return f"{failure}, because the broker does not answer. Try again in a minute.", 503
    return "The broker gave no clear answer, so the outcome is unknown. Refresh the page in a minute.", 503
