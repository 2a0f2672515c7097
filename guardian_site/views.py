from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe

from accounts.models import PulseUser


@require_safe
def home(request: HttpRequest) -> HttpResponse:
    """Show the home page."""
    return render(request, "home.html", {"has_account": PulseUser.objects.seen_by(request.user).exists()})
