"""The pages on which a queue is deleted or purged."""

import logging
from collections.abc import Callable
from typing import Any
from uuid import UUID

from django import forms
from django.conf import settings
from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import HttpResponse, QueryDict
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods

from accounts.pages.forms import NameForm
from core.refusals import Refusal
from queues.actions import single
from queues.archives.outcomes import Removed, outcome_in_words
from queues.models import Queue, Watch
from queues.pages.queue import bindings_shown, seen_queue
from queues.pages.visitors import Request, signed_in
from queues.rules.freshness import freshness_of_list
from rabbit.errors import BrokerError, Refused, was_not_executed
from rabbit.names import readable

logger = logging.getLogger(__name__)


# What people do to a queue


class DestroyForm(NameForm):
    """Asks for the queue's name, and whether its messages are archived."""

    keep = forms.BooleanField(required=False, initial=True, label="Archive the messages first")

    def __init__(self, name: str, data: QueryDict | None, *, can_archive: bool) -> None:
        super().__init__(name, data)
        if not can_archive:
            del self.fields["keep"]


@signed_in
@require_http_methods(["GET", "HEAD", "POST"])
def queue_delete(request: Request, uuid: UUID) -> HttpResponse:
    return _destroy(request, uuid, "queues/delete.html", single.delete_queue, single.why_not_deleted, "deleted")


@signed_in
@require_http_methods(["GET", "HEAD", "POST"])
def queue_purge(request: Request, uuid: UUID) -> HttpResponse:
    return _destroy(request, uuid, "queues/purge.html", single.purge_queue, single.why_not_purged, "purged")


def _destroy(
    request: Request,
    uuid: UUID,
    template: str,
    destroy: Callable[..., Removed],
    why_not: Callable[[Queue], str],
    done: str,
) -> HttpResponse:
    queue = seen_queue(request, uuid)
    if queue.state == Queue.State.GONE:
        messages.warning(request, "The queue is no longer on the broker. You don't have to do anything.")
        return redirect("queue", uuid)
    name = readable(queue.name)
    context: dict[str, Any] = {"queue": queue, "name": name}
    if why := why_not(queue):
        return render(request, "queues/refused.html", {**context, "why": why, "is_impossible": True}, status=409)
    why_not_archived = single.why_not_archived(queue, request.user)
    data = request.POST if request.method == "POST" else None
    form = DestroyForm(name, data, can_archive=not why_not_archived)
    trouble, status = "", 200
    try:
        single.require_may_destroy(queue, request.user)
        if form.is_valid():
            removed = destroy(queue, request.user, keep=form.cleaned_data.get("keep", True))
            messages.success(request, f"The queue {name} was {done}. {outcome_in_words(removed)}".strip())
            return redirect("queue", uuid)
    except PermissionDenied as error:
        return render(request, "queues/refused.html", {**context, "why": str(error)}, status=403)
    except Refusal as error:
        messages.warning(request, f"The queue {name} was not {done}. {error}")
        return redirect("queue", uuid)
    except BrokerError as error:
        trouble, status = describe_failure(error, f"The queue was not {done}")
    live = single.live(queue) if not trouble else single.Live()
    context |= {
        "vhost": readable(queue.vhost),
        "form": form,
        "why_not_archived": why_not_archived,
        "most_archived": settings.GUARDIAN_ARCHIVE_MAX_MESSAGES,
        "most_bytes": settings.GUARDIAN_ARCHIVE_MAX_BYTES,
        "days": settings.GUARDIAN_ARCHIVE_DAYS,
        "trouble": trouble,
        "ready": live.ready if live.ready is not None else queue.ready,
        "consumers": live.consumers if live.consumers is not None else queue.consumers,
        "stored_at": freshness_of_list(Watch.current()).listed_at if live.ready is None else None,
        "why_unknown": live.why_unknown,
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
