"""The page of blocked queues, where operators release them."""

from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from django import forms
from django.contrib import messages
from django.core.paginator import Paginator
from django.http import HttpRequest, HttpResponse, QueryDict
from django.shortcuts import redirect
from django.utils import timezone
from django.views.decorators.http import require_http_methods

from accounts.pages.confirmation import fate_of_messages
from accounts.pages.forms import NameForm
from core.formatting import counted, short_rate
from queues.actions import effects, single
from queues.guard.brake_table import LONGEST_FIRST, ORDERS, Line, blocked_lines, in_order, totals
from queues.models import Queue, Watch
from queues.pages.queue_list import headings
from queues.pages.visitors import Request
from queues.rules import brake
from rabbit.names import QueueName, readable
from status.verdicts import Level
from status.views import (
    EXPIRED,
    NOTHING_SELECTED,
    ActionOutcome,
    ConfirmationForm,
    operation_page,
    operators_only,
    pop_preview,
    store_preview,
)

NOT_THERE = ActionOutcome(
    Level.WARNING, "Guardian no longer has this queue, so nothing was done.", status=HTTPStatus.BAD_REQUEST
)
NOT_TYPED = ActionOutcome(
    Level.WARNING, "You did not type the number of queues, so nothing was done.", status=HTTPStatus.BAD_REQUEST
)

ROWS = 100
"""The rows of one page of the table."""

HEADINGS = {
    "queue": "Queue",
    "owner": "Pulse user",
    "-length": "Messages",
    "-limit": "Limit",
    "-rate": "Rate",
    "-consumers": "Consumers",
}


@dataclass(frozen=True)
class BlockedRow:
    """A row of the brake's page. ``number`` is the queue's position in the preview; None: it is released already."""

    line: Line
    number: int | None
    queue: Queue

    @property
    def name(self) -> str:
        return readable(self.line.queue)

    @property
    def vhost(self) -> str:
        return readable(self.line.vhost)

    @property
    def rate(self) -> str:
        return short_rate(self.line.per_second)

    @property
    def reason(self) -> str:
        return Queue.BlockReason(self.line.reason).label


class KeepForm(forms.Form):
    keep = forms.ModelChoiceField(Queue.objects.all(), to_field_name="uuid")


@operators_only
@require_http_methods(["GET", "HEAD", "POST"])
def operate_brake(request: Request) -> HttpResponse:
    """Show the queues whose deletion is blocked. On confirmation, release all of them, or the selected ones.

    A queue that the operator keeps becomes unbounded, so it no longer waits for a decision.
    """
    outcome = None
    if "keep" in request.POST:
        keep = KeepForm(request.POST)
        queue = keep.cleaned_data["keep"] if keep.is_valid() else None
        if queue and single.set_limits_of_all([queue], request.user, {"unbounded": True}).succeeded:
            messages.success(request, f"You keep {queue}. It is unbounded now, so Guardian never deletes it.")
            return redirect("operate_brake")
        outcome = NOT_THERE
    elif request.method == "POST":
        form = ConfirmationForm(request.POST)
        shown = pop_preview(request.user, "brake", form.cleaned_data["shown"]) if form.is_valid() else None
        if shown and "all" not in request.POST:
            if selected := _selected(request.POST, shown):
                return _ask(request, selected)
            outcome = NOTHING_SELECTED
        elif shown and _typed(len(shown), request.POST).is_valid():
            _tell_release(request, brake.release_brake(request.user, shown))
            return redirect("operate_brake")
        else:
            outcome = NOT_TYPED if shown else EXPIRED
    now = timezone.now()
    blocked = Queue.objects.blocked()
    order = request.GET.get("order", LONGEST_FIRST)
    order = order if order.removeprefix("-") in ORDERS else LONGEST_FIRST
    lines = in_order(blocked_lines(now), order)
    watch = Watch.current()
    released = brake.released_queues(watch, now)
    left = [line.key for line in lines if line.key not in released]
    numbers = {key: number for number, key in enumerate(left)}
    queues = {(queue.vhost, queue.name): queue for queue in blocked}
    rows = [BlockedRow(line, numbers.get(line.key), queues[line.key]) for line in lines if line.key in queues]
    context = {
        "page": Paginator(rows, ROWS).get_page(request.GET.get("page")),
        "headings": headings(HEADINGS, order, ("Messages", "Limit", "Consumers"), "order={}".format),
        "totals": totals(lines),
        "total_rate": short_rate(totals(lines).per_second),
        "left": len(left),
        "typed": _typed(len(left)),
        "released": len(lines) - len(left),
        "released_by": watch.released_by,
        "since": watch.brake_since,
        "key": store_preview(request.user, "brake", left) if left else None,
        "fate": fate_of_messages(),
    }
    return operation_page(request, "admin/operate/brake.html", "Blocked queues", outcome, **context)


def _ask(request: Request, selected: list[QueueName]) -> HttpResponse:
    """Show what a release of these queues deletes, and the form that confirms it, as for a release of all."""
    queues = [queue for queue in Queue.objects.blocked() if (queue.vhost, queue.name) in selected]
    context: dict[str, Any] = {
        "effect": effects.of_deletion(queues),
        "typed": _typed(len(selected)),
        "key": store_preview(request.user, "brake", selected),
        "fate": fate_of_messages(),
    }
    title = f"Delete {counted(len(selected), 'queue')}"
    return operation_page(request, "admin/operate/brake_confirm.html", title, **context)


def _typed(number: int, data: QueryDict | None = None) -> NameForm:
    """Return the form that confirms a release of all queues like a deletion of all."""
    form = NameForm(counted(number, "queue"), data)
    form.fields["typed"].label = "To confirm, type or paste the text above"
    return form


def _selected(data: QueryDict, shown: Sequence[QueueName]) -> list[QueueName]:
    numbers = set(data.getlist("queue"))
    return [key for number, key in enumerate(shown) if str(number) in numbers]


def _tell_release(request: HttpRequest, release: brake.Release) -> None:
    others = []
    if release.earlier:
        others.append(f"{release.earlier_by} had already released {counted(release.earlier, 'queue')}.")
    if release.not_blocked:
        others.append(f"The deletion of {counted(release.not_blocked, 'queue')} is not blocked any more.")
    if release.released:
        did = f"You released {counted(release.released, 'queue')}."
        then = "The next pass within ten minutes deletes those that are still too long."
        messages.success(request, " ".join([did, then, *others]))
    else:
        messages.warning(request, " ".join(["There was nothing left to release.", *others]))
