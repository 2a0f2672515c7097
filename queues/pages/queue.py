"""The page of a queue."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any
from uuid import UUID

from django.conf import settings
from django.core.cache import cache
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils import timezone
from django.views.decorators.http import require_POST, require_safe
from django_htmx.http import HttpResponseClientRefresh

from accounts.models import Owner
from core.formatting import rate_in_words
from queues.actions import limit_requests, rates, single
from queues.actions.endings import bindings_at_deletion, describe_event, ending
from queues.guard import activity, feeding
from queues.models import Archive, Move, Queue, QueueEvent, QueueSample, Watch
from queues.moves.moving import may_move
from queues.pages.queue_list import outlook, rows_of
from queues.pages.visitors import Request, signed_in
from queues.rules import charts, diagnosis, states, thresholds
from queues.rules.freshness import freshness_of_list
from queues.rules.temporary_limits import old_limit
from rabbit.arguments import REGISTERED_MAX_LENGTH
from rabbit.entities import Binding
from rabbit.names import readable
from rabbit.snapshot import CLASSIC

EVENTS_SHOWN = 50
MARKS_SHOWN = 20
LIVE_SECONDS = 15
"""Pages refresh more often. The broker's figures are five seconds apart, and cost several requests."""
BINDINGS_SHOWN = 50
ARCHIVES_SHOWN = 5
SCALES = ("fit", "limit")
"""Scales of the chart: to the lengths, or up to the limits, as by default for a queue that needs attention."""

FREQUENT = (QueueEvent.Kind.SKIPPED, QueueEvent.Kind.REJECTED)
"""Kinds of event that are not marked in the chart."""


# One queue


@signed_in
@require_safe
def queue_page(request: Request, uuid: UUID) -> HttpResponse:
    """Show one queue to its owners and to operators. Others get 404. An htmx request gets the part that refreshes."""
    queue = seen_queue(request, uuid)
    there = queue.state != Queue.State.GONE
    if request.htmx and not there:
        return HttpResponseClientRefresh()  # so that the page loses its script, too
    live = _live(queue, is_refresh=bool(request.htmx)) if there else single.Live()
    if live.consumers is not None:
        queue.consumers = live.consumers  # the stored count may be a minute old
    events = list(queue.events.select_related("by")[:EVENTS_SHOWN])
    archives = Archive.objects.seen_by(request.user).filter(queue=queue)
    ended = None if there else ending(events)
    before = ended.facts if ended else {}
    kept = None if there else archives.of_last_deletion().first()
    bound_before = bindings_at_deletion(events) if there or before else _archived_bindings(kept)
    limit = live.limit if not queue.registered else None
    is_limited = limit is not None and limit.keeps_within(thresholds.of_queue(queue).max)
    context, owners = _now(request, queue, is_limited=is_limited), _owners(queue)
    may_destroy = request.user.is_staff or not queue.registered
    why_not_purged = single.why_not_purged(queue)
    return render(
        request,
        "queues/queue.html",
        {
            **context,
            "owners": owners,
            "may_mute": there and request.user in owners,
            "max_messages": REGISTERED_MAX_LENGTH if queue.registered else None,
            "live": live,
            "bindings": bindings_shown(live.bindings),
            "upstream": bindings_shown(live.upstream),
            "arguments": _arguments_shown(live),
            "has_limits": there and states.has_length(queue),
            "may_set_limits": there and request.user.is_staff and states.has_length(queue),
            "old_limit": old_limit(queue),
            "fetch_paused_until": thresholds.fetch_paused_until(queue, timezone.now()),
            "limit_request": limit_requests.open_request(queue) if there else None,
            "may_destroy": may_destroy,
            "can_delete": there and may_destroy and not single.why_not_deleted(queue),
            "can_purge": there and may_destroy and not why_not_purged,
            "why_not_purged": why_not_purged,
            "removing": _pending_removal(queue, events, context["freshness"].listed_at),
            "ending": ended,
            "before": before,
            "rate_before": rate_in_words(before.get("per_second")),
            "bound_before": [] if live.bindings else _readable_bindings(bound_before),
            "archives": archives[:ARCHIVES_SHOWN],
            "kept": kept,
            "can_move": there and may_move(queue, request.user),
            "move": queue.moves.filter(state=Move.State.RUNNING).first(),
            "can_watch": there and queue.vhost == settings.GUARDIAN_PULSE_VHOST,
            "can_peek": there and queue.type == CLASSIC and not queue.exclusive,
            "events": [(event, *describe_event(event)) for event in events],
        },
    )


def _owners(queue: Queue) -> list[Owner]:
    """Return the owners of the queue's Pulse user, and the owner whose agents' vhost it is in."""
    of_agents = [queue.owner] if queue.owner else []
    return [*queue.pulse_user.owners.all(), *of_agents] if queue.pulse_user else of_agents


def _live(queue: Queue, *, is_refresh: bool) -> single.Live:
    """Return the queue's state on the broker, and store its activity. A refresh gets what was fetched a moment ago."""
    key = f"live:{queue.pk}"
    live: single.Live | None = cache.get(key) if is_refresh else None
    if live is None:
        live = single.live(queue)
        cache.set(key, live, LIVE_SECONDS)
        if live.activity is not None:
            activity.store(queue, live.activity)
    return live


@signed_in
@require_POST
def queue_dismiss(request: Request, uuid: UUID) -> HttpResponse:
    """Let the visitor's front page no longer show that Guardian deleted this queue."""
    deletion = seen_queue(request, uuid).events.filter(kind=QueueEvent.Kind.DELETED).first()
    if deletion is not None:
        deletion.dismissed_by.add(request.user)
    return redirect("home")


def seen_queue(request: Request, uuid: UUID) -> Queue:
    """Return the queue with this UUID, or raise Http404 if the visitor may not see it."""
    seen = Queue.objects.seen_by(request.user)
    return get_object_or_404(seen.select_related("pulse_user", "owner", "acknowledged_by"), uuid=uuid)


def _span(request: HttpRequest) -> charts.Span:
    return charts.SPANS.get(request.GET.get("span", ""), charts.SPANS["hour"])


def _now(request: Request, queue: Queue, *, is_limited: bool) -> dict[str, Any]:
    """Return the context that changes with each pass.

    ``is_limited``: the broker itself keeps the queue within its deletion limit.
    """
    watch = Watch.current()
    freshness = freshness_of_list(watch)
    span = _span(request)
    there = queue.state != Queue.State.GONE
    now = timezone.now() if there else queue.last_seen
    samples = _samples(queue, now - span.duration, now)
    if queue.length is not None and (not samples or samples[-1][1] != queue.length):
        # Samples are pruned: a length that has not changed for longer than they are kept has no sample.
        samples.append((now if samples else max(now - span.duration, queue.first_seen), queue.length))
    began = timezone.localtime(now - span.duration)
    (found,) = rows_of([queue], freshness.now, request.user)
    row = replace(found, is_limited=is_limited)
    queue_rates = rates.cached(queue, span) if there else rates.NOT_KEPT
    scale = request.GET.get("scale", "")
    to_limit = scale == "limit" if scale in SCALES else row.state.needs_attention
    limits = row.thresholds
    found_now = diagnosis.of_queue_at(queue, freshness.counted_at, timezone.now())
    drawn = charts.chart(samples, began, now, limits, has_maximum=not row.spared, to_limit=to_limit)
    return {
        "row": row,
        "queue": queue,
        "there": there,
        "name": row.name,
        "vhost": row.vhost,
        "thresholds": limits,
        "spared": row.spared,
        "state": _state(row.state, found_now),
        "diagnosis": found_now,
        "outlook": outlook(row, found_now),
        "chart": drawn,
        "chart_began": began,
        "times": charts.time_ticks(span, began, now),
        "marks": charts.marks(_marked_events(queue, began, now), began, now),
        "rates": queue_rates,
        "rate_chart": charts.rate_chart(queue_rates.samples, began, now),
        "to_limit": to_limit,
        "span": span,
        "spans": charts.SPANS.values(),
        "freshness": freshness,
        "watch": watch,
    }


def _state(condition: states.Condition, found: diagnosis.Diagnosis | None) -> states.Condition:
    """Return the condition of a queue; of a healthy one with a problem, the problem's word."""
    if found is None or not found.advice or condition.word != "healthy":
        return condition
    return condition._replace(word=Queue.Diagnosis(found.code).label)


def _marked_events(queue: Queue, began: datetime, ended: datetime) -> list[tuple[datetime, str]]:
    """Return the queue's latest events in this window, and when its last consumer went, oldest first."""
    events = queue.events.filter(at__gt=began, at__lte=ended).exclude(kind__in=FREQUENT).select_related("by")
    found = []
    for event in events[:MARKS_SHOWN]:
        what, more, who = describe_event(event)
        found.append((event.at, f"{what}{f' ({more})' if more else ''}{f' by {who}' if who else ''}"))
    if queue.unattended_since is not None and began < queue.unattended_since <= ended:
        found.append((queue.unattended_since, "first seen without a consumer"))
    return sorted(found)


def _samples(queue: Queue, began: datetime, ended: datetime) -> list[charts.Sample]:
    """Return the samples of this window, oldest first, preceded by the one that gives the length at its start."""
    samples = QueueSample.objects.filter(queue=queue).order_by("at").values_list("at", "length")
    earlier = samples.filter(at__lte=began).order_by("-at")[:1]
    return [*earlier, *samples.filter(at__gt=began, at__lte=ended)]


def bindings_shown(bindings: list[Binding] | None) -> dict[str, Any]:
    """Return the first of these bindings as the page shows them, and the number of the others."""
    shown = _readable_bindings(feeding.described(bindings or []))
    return {"shown": shown[:BINDINGS_SHOWN], "more": max(0, len(shown) - BINDINGS_SHOWN)}


def _readable_bindings(bindings: Iterable[Mapping[str, str]]) -> list[dict[str, str]]:
    return [{key: readable(text) for key, text in one.items()} for one in bindings]


def _archived_bindings(archive: Archive | None) -> list[dict[str, str]]:
    """Return the first bindings of an archive's queue, as far as the archive has them."""
    if archive is None or not archive.bindings:
        return []
    return feeding.described(
        Binding(
            source=one["exchange"],
            vhost=archive.vhost,
            destination=archive.queue_name,
            destination_type="queue",
            routing_key=one["routing_key"],
            arguments=one["arguments"],
        )
        for one in archive.bindings[:BINDINGS_SHOWN]
    )


def _arguments_shown(live: single.Live) -> list[tuple[str, str]]:
    return sorted((readable(key), readable(str(value))) for key, value in (live.arguments or {}).items())


def _pending_removal(queue: Queue, events: list[QueueEvent], listed_at: datetime | None) -> QueueEvent | None:
    """Return the event of a requested deletion whose outcome is unknown until the next list."""
    if queue.state == Queue.State.GONE or not events or events[0].kind != QueueEvent.Kind.REMOVING:
        return None
    return events[0] if listed_at is None or events[0].at > listed_at else None
