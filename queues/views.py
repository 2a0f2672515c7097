from uuid import UUID

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, render
from django.views.decorators.http import require_safe

from queues import thresholds
from queues.mails import readable
from queues.models import Queue

EVENTS_SHOWN = 50


@login_required
@require_safe
def queue_page(request: HttpRequest, uuid: UUID) -> HttpResponse:
    """Show one queue to its owners and to operators; to everybody else it isn't there."""
    queue = get_object_or_404(Queue.objects.seen_by(request.user).select_related("pulse_user"), uuid=uuid)
    return render(
        request,
        "queues/queue.html",
        {
            "queue": queue,
            "name": readable(queue.name),
            "vhost": readable(queue.vhost),
            "thresholds": thresholds.of_queue(queue),
            "owners": queue.pulse_user.owners.all() if queue.pulse_user else [],
            "spared": queue.unbounded or queue.exclusive or queue.registered,
            "events": queue.events.all()[:EVENTS_SHOWN],
        },
    )
