"""The page on which a person confirms a change that deletes queues, by typing a name as for a deletion."""

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render

from accounts.pages.forms import NameForm
from core.confirmation import ConfirmationRequired
from core.formatting import counted

OWN_FIELDS = ("csrfmiddlewaretoken", "confirm", "typed")
"""The fields of the page itself. All others are those of the change."""


def typed_confirmation(request: HttpRequest, name: str) -> tuple[NameForm, str]:
    """Return the form of the typed name, and the confirmation from the page, if the name is right."""
    form = NameForm(name, request.POST if "confirm" in request.POST else None)
    form.fields["typed"].label = "To confirm, type or paste the text in the box above"
    return form, request.POST["confirm"] if form.is_valid() else ""


def fate_of_messages(*, are_purged: bool = False) -> str:
    """Return what becomes of the messages of queues that are deleted, or only purged, in words."""
    others = "Unacknowledged messages stay in the queue." if are_purged else "Other messages are lost."
    if not settings.GUARDIAN_ARCHIVE_DAYS:
        return f"Ready messages are lost. {others}"
    kept = counted(settings.GUARDIAN_ARCHIVE_DAYS, "day")
    return f"Guardian archives ready messages first, and you can bring these back for {kept}. {others}"


def confirm_page(
    request: HttpRequest,
    required: ConfirmationRequired,
    form: NameForm,
    *,
    title: str,
    about: str,
    back: str,
    verb: str = "delete",
) -> HttpResponse:
    """Show what the change deletes, or does as ``verb`` says, and the form that sends it again with the confirmation.

    ``about`` says when the queues are deleted, and what becomes of their messages. ``back`` is the path of the page
    without the change.
    """
    fields = [(name, value) for name in request.POST if name not in OWN_FIELDS for value in request.POST.getlist(name)]
    context = {
        "required": required,
        "effect": required.effect,
        "form": form,
        "fields": fields,
        "title": title,
        "about": about,
        "back": back,
        "verb": verb,
    }
    return render(request, "confirm.html", context)
