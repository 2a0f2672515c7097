"""The page with the list of queues, and its rows on other pages."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any, NamedTuple
from urllib.parse import urlencode

from django import forms
from django.core.paginator import Paginator
from django.http import HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.gzip import gzip_page
from django.views.decorators.http import require_safe

from accounts.models import Owner, PulseUser
from core.formatting import duration, short_rate
from queues.actions import notices
from queues.models import Queue, Watch
from queues.pages.visitors import Request, signed_in
from queues.rules import charts, growth, states, thresholds
from queues.rules.conditions import deleted_by_guardian, soonest_to_fill
from queues.rules.diagnosis import Diagnosis
from queues.rules.freshness import freshness_of_list
from queues.rules.listing import BY_STATE, ORDERINGS, WORST_FIRST, Counts, QueueFilter, add_up, count_by_state
from queues.rules.reminders import is_acknowledged
from queues.rules.states import Condition, Level
from queues.rules.thresholds import Thresholds
from queues.rules.trends import Trend, trends
from rabbit.arguments import REGISTERED_MAX_LENGTH
from rabbit.names import DEAD_LETTER_QUEUE, readable
from rabbit.snapshot import MQTT_QOS_0, STREAM

ROWS = 50
PULSE_USERS_TO_CHOOSE_FROM = 50
"""With more Pulse users, the filter is a text field instead of a list."""

BLOCKED = "deletion is blocked until an operator decides"

OFFERED = ("state", "-length", "-growth", "name", "vhost", "pulse_user")
OFFERED_ORDERS = [order for order in ORDERINGS if order[0] in OFFERED]

HEADINGS = {
    "name": "Name",
    "state": "State",
    "-length": "Messages",
    "-growth": "Last hour",
    "-consumers": "Consumers",
    "-bytes": "Size",
}
"""The columns of the list by the order that the first click on each selects."""

HEX_VHOST = re.compile("[0-9a-f]{32}")


# The list


@dataclass(frozen=True)
class Row:
    """A row of the list. ``bar`` is None if the queue is gone or its length unknown, ``trend`` if it isn't shown.

    ``is_limited``: the broker itself keeps the queue within its deletion limit. Only the page of a queue knows it.
    ``muted_until`` is the visitor's.
    """

    queue: Queue
    thresholds: Thresholds
    spared: bool
    bar: charts.Bar | None
    trend: Trend | None = None
    was_deleted: bool = False
    is_limited: bool = False
    muted_until: datetime | None = None

    @property
    def name(self) -> str:
        return readable(self.queue.name)

    @property
    def vhost(self) -> str:
        return readable(self.queue.vhost)

    @property
    def short_vhost(self) -> str:
        """The vhost's readable name; of an agents' vhost, the first digits."""
        return f"{self.vhost[:8]}…" if HEX_VHOST.fullmatch(self.vhost) else self.vhost

    @property
    def owners(self) -> str:
        """Whose the queue is, in words."""
        queue = self.queue
        if queue.owner is not None:
            return f"{'' if queue.registered else 'not registered by '}agents of {queue.owner.email}"
        owners = [owner.email for owner in queue.pulse_user.owners.all()] if queue.pulse_user else []
        return ", ".join(owners) or "nobody"

    @property
    def on_it(self) -> str:
        """Who acknowledged the present warning, or an empty text."""
        if not is_acknowledged(self.queue) or self.queue.length == 0:
            return ""
        return self.queue.acknowledged_by.email if self.queue.acknowledged_by else "A former owner"

    @property
    def on_it_briefly(self) -> str:
        return self.on_it.partition("@")[0]

    @cached_property
    def state(self) -> Condition:
        return states.condition(self.queue, self.thresholds, self.seconds_to_max, was_deleted=self.was_deleted)

    @property
    def cause(self) -> str:
        """Why it grows, in a word, unless that is normal or its state says it."""
        queue = self.queue
        is_unknown = queue.diagnosis == Queue.Diagnosis.UNKNOWN and not self.state.needs_attention
        is_normal = queue.diagnosis == Queue.Diagnosis.HEALTHY or is_unknown or not queue.length
        word = "" if is_normal else queue.get_diagnosis_display()
        return "" if word == self.state.word else word

    @property
    def seconds_to_max(self) -> float | None:
        """The time until the queue is deleted, at its present growth, or None if that is not known or never."""
        if self.growth is None or self.spared or self.is_limited:
            return None
        return self.growth.seconds_to_max

    @property
    def is_over(self) -> bool:
        return self.queue.length is not None and self.queue.length > self.thresholds.max

    @property
    def is_filling(self) -> bool:
        """Whether the queue is over its warning threshold, or will soon be over its limit."""
        return self.queue.state == Queue.State.WARNED or self.state.level == Level.CRITICAL

    @property
    def limits(self) -> str:
        most = "never deleted for its length" if self.spared else f"deletion limit {self.thresholds.max:,}"
        return f"warning threshold {self.thresholds.warn:,}; {most}"

    @property
    def rate(self) -> str:
        """The growth in the last minutes, such as "+28/min", or an empty text if it is unknown."""
        return short_rate(self.growth.per_second) if self.growth else ""

    @property
    def growth(self) -> growth.Growth | None:
        return self.trend.growth if self.trend else None

    @property
    def dead_letters(self) -> bool:
        """Whether the queue is a dead-letter queue of agents."""
        return self.queue.registered and self.queue.name == DEAD_LETTER_QUEUE


@gzip_page
@signed_in
@require_safe
def queues_page(request: Request) -> HttpResponse:
    """Show the visitor's queues, to an operator all. An htmx request gets the part that refreshes."""
    mine = Queue.objects.seen_by(request.user)
    groups = count_by_state(mine)
    freshness = freshness_of_list(Watch.current())
    pulse_users = PulseUser.objects.seen_by(request.user)
    names = list(pulse_users.values_list("username", flat=True)[: PULSE_USERS_TO_CHOOSE_FROM + 1])
    if not groups:
        return render(request, "queues/none.html", {"freshness": freshness, "pulse_users": names})
    vhosts = sorted({group.vhost for group in groups})
    filtered = QueueFilter(request.GET, mine)
    filtered.soon = soonest_to_fill(mine, freshness.now)
    form = _with_choices(filtered.form, vhosts, names)
    shown = filtered.qs.select_related("pulse_user", "owner", "acknowledged_by")
    shown = shown.prefetch_related("pulse_user__owners")
    filters = {name: value for name, value in request.GET.items() if value and name in form.fields}
    is_searched = bool(filters.keys() - BY_STATE - {"ordering"})
    counts = add_up(count_by_state(filtered.in_any_state()) if is_searched else groups)
    paginator = Paginator(shown, ROWS)
    if not filters.keys() & BY_STATE:
        # The number is known. Another count would read all rows again.
        paginator.count = counts.total
    page = paginator.get_page(request.GET.get("page"))
    rows = rows_of(page.object_list, freshness.now, request.user)
    return render(
        request,
        "queues/queues.html",
        {
            "freshness": freshness,
            "form": form,
            "page": page,
            "query": request.GET.urlencode(),
            "headings": headings(
                HEADINGS,
                str(filters.get("ordering", WORST_FIRST)),
                ("Consumers", "Size"),
                lambda order: urlencode({**filters, "ordering": order}),
            ),
            "narrowings": _narrowings(counts, filters),
            "filters": filters,
            "filtered": bool(filters.keys() - {"ordering", "search"}),
            "gone": counts.gone if "search" in filters and filters.get("state") != Queue.State.GONE else 0,
            "gone_query": _state_query(filters, "state", Queue.State.GONE),
            "rows": rows,
            "several_vhosts": len(vhosts) > 1,
            "selectable": any(row.queue.state != Queue.State.GONE for row in rows),
        },
    )


class Narrowing(NamedTuple):
    """A link above the list to the queues of one kind, of which there are ``number``."""

    number: int
    words: str
    query: str
    is_current: bool


def _narrowings(counts: Counts, filters: Mapping[str, Any]) -> list[Narrowing]:
    offered = (
        (counts.total, f"queue{'' if counts.total == 1 else 's'}", "", ""),
        (counts.deleting, "about to be deleted", "state", Queue.State.DELETING.value),
        (counts.blocked, "blocked", "blocked", "true"),
        (counts.warned, "over the warning threshold", "state", Queue.State.WARNED.value),
        (counts.unattended, "without consumers", "without_consumers", "true"),
        (counts.gone, "gone", "state", Queue.State.GONE.value),
    )
    return [
        Narrowing(
            number,
            words,
            _state_query(filters, name, value),
            filters.get(name) == value if name else not filters.keys() & BY_STATE,
        )
        for number, words, name, value in offered
        if number or not name
    ]


def _state_query(filters: Mapping[str, Any], name: str, value: str) -> str:
    """Return the query with one filter by state, or none if its name is empty, and the other filters as they are."""
    kept = {key: one for key, one in filters.items() if key not in BY_STATE}
    return urlencode({**kept, **({name: value} if name else {})})


class Heading(NamedTuple):
    """The heading of a column: its link, and how it is sorted now, as ``aria-sort`` has it, if at all."""

    label: str
    query: str
    sorted: str
    is_number: bool


def headings(
    offered: Mapping[str, str], now: str, numbers: Collection[str], query: Callable[[str], str]
) -> list[Heading]:
    """Return the headings of columns by the order that the first click on each selects. A second click reverses it."""
    found = []
    for first, label in offered.items():
        second = first[1:] if first.startswith("-") else f"-{first}"
        direction = ("descending" if now.startswith("-") else "ascending") if now in (first, second) else ""
        found.append(Heading(label, query(second if now == first else first), direction, label in numbers))
    return found


def rows_of(queues: Iterable[Queue], now: datetime | None = None, visitor: Owner | None = None) -> list[Row]:
    """Return the rows of these queues, with their trends up to ``now``, and what this visitor muted, if given."""
    listed = list(queues)
    trend_of = trends(listed, now) if now else {}
    deleted = deleted_by_guardian(listed)
    muted = notices.muted_until(listed, visitor) if visitor else {}
    rows = []
    for queue in listed:
        limits, key = thresholds.of_queue(queue), queue.pk
        length = None if queue.state == Queue.State.GONE else queue.length
        bar = charts.bar(length, limits) if length is not None else None
        spared = not thresholds.has_limit(queue)
        rows.append(Row(queue, limits, spared, bar, trend_of.get(key), key in deleted, muted_until=muted.get(key)))
    return rows


def _with_choices(form: forms.Form, vhosts: list[str], pulse_users: list[str]) -> forms.Form:
    """Turn filters with few values into lists, and hide filters with a single value."""
    form.label_suffix = ""
    form.fields["ordering"].widget.choices = OFFERED_ORDERS
    for name in ("without_consumers", "blocked"):
        form.fields[name].widget = forms.CheckboxInput()
    offer_choices(form, "vhost", [(vhost, readable(vhost)) for vhost in vhosts])
    if len(pulse_users) <= PULSE_USERS_TO_CHOOSE_FROM:
        offer_choices(form, "pulse_user", [(name, name) for name in pulse_users])
    return form


def offer_choices(form: forms.Form, name: str, choices: list[tuple[str, str]]) -> None:
    """Turn a filter into a list of these values, or hide it if there is only one."""
    if len(choices) > 1:
        form.fields[name].widget = forms.Select(choices=[("", "all"), *choices])
    elif not form.data.get(name):
        form.fields[name].widget = forms.HiddenInput()


def outlook(row: Row, found: Diagnosis | None) -> str:
    """Return what happens next, in one or two sentences, beside this diagnosis."""
    queue, limits, grows = row.queue, row.thresholds, row.growth
    if queue.state == Queue.State.GONE:
        return "The queue is no longer on the broker. A client that declares it again gets an empty queue."
    if queue.length is None:
        if queue.type == STREAM:
            return "A stream keeps messages after they are read, so Guardian does not check its length."
        if queue.type == MQTT_QOS_0:
            return "An MQTT subscription with QoS 0 stores no messages, so it has no length."
        return "The broker does not report its length. Until it does, Guardian does not warn about or delete the queue."
    if queue.is_blocked:
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
        if row.is_limited:
            return "It is over its warning threshold. The broker itself limits it: see its limits below."
        if row.spared:
            return (
                "It is over its warning threshold. It is not deleted for its length, but its messages use the broker's "
                "memory until they are consumed."
            )
        when = ""
        if row.seconds_to_max is not None and (found is None or found.code != Queue.Diagnosis.CONSUMERS_TOO_SLOW):
            when = f" At its current rate, it reaches that in {duration(row.seconds_to_max)}."
        elif grows and grows.per_second < 0:
            when = " It is shrinking at the moment."
        return f"It is over its warning threshold. Guardian deletes it past {limits.max:,} messages.{when}"
    if grows and grows.per_second > 0:
        seconds = (limits.warn - queue.length) / grows.per_second
        if seconds < timedelta(days=1).total_seconds():
            return f"At its current rate, its owners are warned in {duration(seconds)}."
    return f"Its owners are warned at {limits.warn:,} messages."
