"""The pages of replays: progress and result."""

from typing import Any
from urllib.parse import urlencode
from uuid import UUID

from django.contrib import messages
from django.http import HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils import timezone
from django.views.decorators.http import require_POST, require_safe
from django_htmx.http import HttpResponseClientRefresh

from core.formatting import duration
from queues.archives import replay
from queues.models import Replay
from queues.pages.archives import archive_of, describe
from queues.pages.restores import EXCHANGE, QUEUE, target_queue
from queues.pages.visitors import Request, signed_in
from rabbit.names import readable

SLOW_START_SECONDS = 60


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
        "bindings": len((one.restore or {}).get("bindings", ())),
        "queue": target_queue(request, one.archive, one.to_queue),
        "rest": _rest(one, begin, end) if not is_running and begin <= end else "",
    }
    return render(request, "archives/_progress.html" if request.htmx else "archives/replay.html", context)


def _rest(one: Replay, begin: int, end: int) -> str:
    """Return the query of a replay of these messages, which this one did not send."""
    fields: dict[str, Any] = {"to": EXCHANGE if one.to_exchange else QUEUE, "name": one.to_queue or one.to_exchange}
    if one.to_queue == one.archive.queue_name:
        fields = {}
    return urlencode({**fields, "first": begin, "last": end, "rate": one.rate or ""})


@signed_in
@require_POST
def replay_stop(request: Request, uuid: UUID, replay_uuid: UUID) -> HttpResponse:
    one = _replay(request, uuid, replay_uuid)
    replay.stop(one, request.user)
    messages.success(request, "The replay is stopped. A batch of at most 100 messages may still arrive.")
    return redirect("replay", uuid, replay_uuid)
