"""What visitors do to several queues that they selected in the list."""

from uuid import UUID

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_http_methods

from accounts.confirm_page import confirm_page, typed_confirmation
from accounts.each import apply_to_each, report_results
from core.confirmation import ConfirmableChange, ConfirmationRequired, Effect
from queues import actions, effects
from queues.forms import LimitsForm
from queues.models import Queue
from queues.views import ROWS, Request, signed_in, uuids_in

DESTROY = {"delete": ("deletes", actions.delete_queue, "deleted"), "purge": ("purges", actions.purge_queue, "purged")}
"""The actions that lose messages: the verb of their effect, the function and the participle."""


@signed_in
@require_http_methods(["GET", "HEAD", "POST"])
def queues_selected(request: Request) -> HttpResponse:
    """Delete, purge or limit the selected queues. The pressed button selects the action."""
    if request.method != "POST":
        return redirect("queues")
    selected = Queue.objects.seen_by(request.user).filter(uuid__in=_selected(request)).exclude(state=Queue.State.GONE)
    queues = list(selected.select_related("pulse_user")[:ROWS])
    action = request.POST.get("action", "")
    if not queues:
        messages.warning(request, "Select queues in the list first.")
    elif action in DESTROY:
        return _destroy(request, queues, action)
    elif action == "limits":
        return _limit(request, queues)
    return redirect("queues")


def _selected(request: Request) -> list[UUID]:
    return uuids_in(",".join(request.POST.getlist("uuid")))


def _destroy(request: Request, queues: list[Queue], action: str) -> HttpResponse:
    """Delete or purge these queues after a confirmation. Their messages are archived first."""
    verb, destroy, done = DESTROY[action]
    form, confirm = typed_confirmation(request, _number(queues))
    change = ConfirmableChange(request.user, f"{action} selected queues", queues, {}, confirm)
    question = change.question(Effect(effects.of_deletion(queues).queues, verb))
    if question is not None:
        return confirm_page(
            request,
            question,
            form,
            title=f"{action.capitalize()} these queues?",
            about="Guardian archives their ready messages first, within the bounds of archives.",
            back=reverse("queues"),
            verb=action,
        )
    apply_to_each(request, queues, lambda queue: destroy(queue, request.user), done, refusals=(actions.Gone,))
    return redirect("queues")


def _limit(request: Request, queues: list[Queue]) -> HttpResponse:
    """Set the same limits for these queues, as an operator."""
    if not request.user.is_staff:
        raise PermissionDenied("Only operators can change the limits of queues.")
    form = LimitsForm(request.POST if "set" in request.POST else None)
    if form.is_valid():
        typed, confirm = typed_confirmation(request, _number(queues))
        try:
            refused = actions.set_limits_of_all(queues, request.user, form.cleaned_data, confirm)
        except ConfirmationRequired as required:
            about = "With these limits, the next pass deletes the queues."
            return confirm_page(
                request, required, typed, title="Set these limits?", about=about, back=reverse("queues")
            )
        succeeded = [str(queue) for queue in queues if queue.pk not in refused]
        failed = [(str(queue), refused[queue.pk]) for queue in queues if queue.pk in refused]
        report_results(request, succeeded, "given these limits", failed)
        return redirect("queues")
    return render(request, "queues/selected_limits.html", {"queues": queues, "form": form})


def _number(queues: list[Queue]) -> str:
    return f"{len(queues)} queue{'' if len(queues) == 1 else 's'}"
