from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_safe

from accounts.models import Invitation, Owner
from status.dashboard import dashboard


@require_safe
def home(request: HttpRequest) -> HttpResponse:
    """Show the dashboard; to visitors who aren't signed in or have nothing yet, what Guardian is and how to begin."""
    if not isinstance(request.user, Owner):
        return render(request, "home.html")
    shown = dashboard(request.user, timezone.now())
    is_new = not (shown.counts.total or shown.pulse_users or shown.agents or request.user.is_staff)
    context = {"dashboard": shown, "invitations": Invitation.objects.received_by(request.user)}
    return render(request, "home.html" if is_new else "dashboard.html", context)
