"""What visitors do to several queues that they selected in the list."""

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import HttpResponse, QueryDict
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_http_methods

from accounts.pages.common import uuids_in
from accounts.pages.confirmation import confirm_page, fate_of_messages, typed_confirmation
from core.confirmation import ConfirmationRequired
from core.each import report_attempts
from queues.actions import selected, single
from queues.models import Queue
from queues.pages.forms import LimitsForm
from queues.pages.limits import shared_limits
from queues.pages.notices import mute
from queues.pages.visitors import Request, signed_in

DONE = {"delete": "deleted", "purge": "purged"}
"""The actions that lose messages, and their participles."""


@signed_in
@require_http_methods(["GET", "HEAD", "POST"])
def queues_selected(request: Request) -> HttpResponse:
    """Delete, purge, mute or limit the selected queues. The pressed button selects the action."""
    if request.method != "POST":
        return redirect("queues")
    queues = selected.find(request.user, uuids_in(" ".join(request.POST.getlist("uuid"))))
    action = request.POST.get("action", "")
    if not queues:
        messages.warning(request, "Select queues in the list first.")
    elif action in DONE:
        return _destroy(request, queues, action)
    elif action == "limits":
        return _limit(request, queues)
    elif action == "mute":
        return mute(request, queues, _list(request))
    return redirect(_list(request))


def _list(request: Request) -> str:
    """Return the address of the list from which the queues were selected, with its filters."""
    query = QueryDict(request.POST.get("list", "")).urlencode()
    return f"{reverse('queues')}?{query}" if query else reverse("queues")


def _destroy(request: Request, queues: list[Queue], action: str) -> HttpResponse:
    """Delete or purge these queues after a confirmation. Their messages are archived first."""
    form, confirm = typed_confirmation(request, _number(queues))
    try:
        results = selected.destroy(queues, request.user, action, confirm)
    except ConfirmationRequired as question:
        return confirm_page(
            request,
            question,
            form,
            title=f"{action.capitalize()} these queues?",
            about=fate_of_messages(are_purged=action == "purge"),
            back=_list(request),
            verb=action,
        )
    report_attempts(request, results, DONE[action])
    return redirect(_list(request))


def _limit(request: Request, queues: list[Queue]) -> HttpResponse:
    """Set the same limits for these queues, as an operator."""
    if not request.user.is_staff:
        raise PermissionDenied("Only operators can change the limits of queues.")
    form = LimitsForm(request.POST if "set" in request.POST else None, initial=shared_limits(queues))
    if form.is_valid():
        typed, confirm = typed_confirmation(request, _number(queues))
        try:
            results = single.set_limits_of_all(queues, request.user, form.changes(), confirm)
        except ConfirmationRequired as required:
            about = f"With these limits, the next pass deletes the queues. {fate_of_messages()}"
            return confirm_page(request, required, typed, title="Set these limits?", about=about, back=_list(request))
        report_attempts(request, results, "given these limits")
        return redirect(_list(request))
    return render(request, "queues/selected_limits.html", {"queues": queues, "form": form})


def _number(queues: list[Queue]) -> str:
    return f"{len(queues)} queue{'' if len(queues) == 1 else 's'}"
