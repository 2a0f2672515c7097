"""Pages on which people mute queues for themselves, and acknowledge a warning for all."""

from collections.abc import Collection
from datetime import timedelta
from uuid import UUID

from django.contrib import messages
from django.core.exceptions import ValidationError
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import require_http_methods, require_POST

from queues.actions import notices
from queues.models import Queue
from queues.pages.forms import MuteForm
from queues.pages.queue import seen_queue
from queues.pages.visitors import Request, signed_in

DEFAULT = timedelta(days=7)


@signed_in
@require_http_methods(["GET", "HEAD", "POST"])
def queue_mute(request: Request, uuid: UUID) -> HttpResponse:
    return mute(request, [seen_queue(request, uuid)], reverse("queue", args=[uuid]))


def mute(request: Request, queues: Collection[Queue], back: str) -> HttpResponse:
    """Mute these queues until a date that the form asks for, or notify their owner again."""
    notices.require_own(queues, request.user)
    if "unmute" in request.POST:
        notices.unmute(queues, request.user)
        messages.success(request, "You get their notifications again.")
        return redirect(back)
    form = MuteForm(request.POST if "set" in request.POST else None, initial={"until": timezone.localdate() + DEFAULT})
    muted = notices.muted_until(queues, request.user)
    if form.is_valid():
        try:
            notices.mute(queues, request.user, form.starts_at(request.user.time_zone))
        except ValidationError as error:
            form.add_error("until", error)
        else:
            messages.success(request, f"Muted until {form.cleaned_data['until']:%-d %B %Y}, for you alone.")
            return redirect(back)
    context = {"queues": queues, "form": form, "is_muted": bool(muted), "back": back, "list": request.POST.get("list")}
    return render(request, "queues/mute.html", context)


@signed_in
@require_POST
def queue_acknowledge(request: Request, uuid: UUID) -> HttpResponse:
    queue = seen_queue(request, uuid)
    try:
        notices.acknowledge(queue, request.user)
    except ValidationError as error:
        messages.error(request, error.messages[0])
    else:
        messages.success(request, "You are on it: nobody is reminded until the queue is back to normal.")
    return redirect("queue", uuid)
