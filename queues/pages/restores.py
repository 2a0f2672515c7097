"""The page that brings an archive's messages back: what will happen, and one button.

To a queue that does not exist, it restores that; to others, and to exchanges, it sends the messages.
"""

from typing import Any
from urllib.parse import urlencode
from uuid import UUID, uuid4

from django import forms
from django.http import HttpResponse, QueryDict
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods

from accounts.models import PulseUser
from core.confirmation import ConfirmationRequired
from core.formatting import duration
from core.refusals import Refusal
from queues.archives import restore
from queues.archives.restore import Wanted
from queues.models import Archive, Queue, Replay
from queues.pages.archives import archive_of, describe, describe_declaration
from queues.pages.destroy import describe_failure
from queues.pages.visitors import Request, signed_in
from queues.rules import restoring
from queues.rules.restoring import LEAVABLE
from rabbit.errors import BrokerError
from rabbit.names import MAX_NAME_BYTES, exchange_prefix, queue_prefix, readable

MAX_RATE = 100_000
SUGGESTIONS = 50

NAME_ATTRIBUTES = {"autocomplete": "off", "autocapitalize": "none", "spellcheck": "false", "list": "suggestions"}

BACK, QUEUE, EXCHANGE = "back", "queue", "exchange"


class RestoreForm(forms.Form):
    """Where the messages are sent to, which, and how fast. ``queues.archives.restore`` checks the target."""

    to = forms.ChoiceField(label="Send the messages to", widget=forms.RadioSelect)
    name = forms.CharField(
        required=False,
        strip=False,
        max_length=MAX_NAME_BYTES,
        label="Name of the other queue or the exchange",
        widget=forms.TextInput(attrs=NAME_ATTRIBUTES),
    )
    first = forms.IntegerField(required=False, label="From message", min_value=1)
    last = forms.IntegerField(required=False, label="To message", min_value=1)
    rate = forms.IntegerField(
        required=False,
        min_value=1,
        max_value=MAX_RATE,
        label="Messages a second",
        help_text="Empty: as fast as the broker confirms them.",
    )
    without = forms.MultipleChoiceField(
        required=False, choices=[(name, name) for name in LEAVABLE], widget=forms.MultipleHiddenInput
    )

    def __init__(self, archive: Archive, data: QueryDict) -> None:
        data = data.copy()
        data.setdefault("to", BACK)
        super().__init__(data, label_suffix="")
        self.archive = archive
        self.fields["to"].choices = [  # type: ignore[attr-defined]
            (BACK, f"the queue that they come from, {readable(archive.queue_name)}"),
            (QUEUE, "another queue, which may be new"),
            (EXCHANGE, "an exchange, with their own routing keys"),
        ]
        self.fields["last"].help_text = f"The archive has {archive.messages:,}. Message 1 is the oldest."
        if archive.pulse_user:
            username = archive.pulse_user.username
            self.fields["name"].help_text = f"Begins with {queue_prefix(username)} or {exchange_prefix(username)}"

    def clean(self) -> dict[str, Any]:
        """Refuse a target without a name, and a range that the archive does not have."""
        cleaned = super().clean() or self.cleaned_data
        first, last = cleaned.get("first"), cleaned.get("last")
        if cleaned.get("to") != BACK and not cleaned.get("name") and "name" not in self.errors:
            self.add_error("name", "Enter the name.")
        if last is not None and last > self.archive.messages:
            self.add_error("last", f"The archive has {self.archive.messages:,} messages.")
        elif first is not None and first > (last or self.archive.messages):
            self.add_error("first", f"Enter {last or self.archive.messages:,} or less.")
        return cleaned

    @property
    def wanted(self) -> Wanted:
        fields = dict(self.cleaned_data)
        to, name = fields.pop("to"), fields.pop("name")
        return Wanted(
            queue=name if to == QUEUE else "", exchange=name if to == EXCHANGE else "", fitting=True, **fields
        )


@signed_in
@require_http_methods(["GET", "HEAD", "POST"])
def archive_restore(request: Request, uuid: UUID) -> HttpResponse:
    """Show what a restore or a replay will do, and start it if the visitor confirmed that."""
    archive = archive_of(request, uuid)
    form = RestoreForm(archive, request.POST if request.method == "POST" else request.GET)
    suggestions = names_that_can_be_typed(archive.pulse_user, archive.vhost)
    context: dict[str, Any] = {**describe(archive), "form": form, "suggestions": suggestions}
    status = 200
    if form.is_valid():
        try:
            if request.method == "POST":
                outcome = _start(request, archive, form)
                if isinstance(outcome, HttpResponse):
                    return outcome
                context["reason"], status = outcome, 409
            context |= _preview(request, archive, form)
        except Refusal as error:
            form.add_error("name" if form.cleaned_data["to"] != BACK else "to", error)
        except BrokerError as error:
            context["trouble"], status = describe_failure(error, "The messages can't be sent", destructive=False)
    return render(request, "archives/restore.html", context, status=status)


class _SentForm(forms.Form):
    """What the page adds to the visitor's choice: the replay's UUID, and the confirmation of what would be lost."""

    uuid = forms.UUIDField(required=False)
    confirm = forms.CharField(required=False)


def _start(request: Request, archive: Archive, form: RestoreForm) -> HttpResponse | str:
    """Start the restore, and return the way to its page, or else why the confirmation was not accepted, if any was."""
    sent = _SentForm(request.POST)
    sent.is_valid()  # one without a valid UUID is another restore
    confirm, uuid = sent.cleaned_data.get("confirm", ""), sent.cleaned_data.get("uuid")
    try:
        started = restore.start(archive, request.user, form.wanted, confirm=confirm, uuid=uuid)
    except ConfirmationRequired as required:
        return required.reason
    return redirect("replay", archive.uuid, started.uuid)


def _preview(request: Request, archive: Archive, form: RestoreForm) -> dict[str, Any]:
    found = restore.look(archive, request.user, form.wanted)
    one, plan, room = found.replay, found.plan, found.room
    fields = [(name, value) for name in ("to", "name", "rate") if (value := form.data.get(name))]
    fields += [("first", one.first), ("last", one.last)]
    without = [("without", name) for name in form.cleaned_data["without"]]
    fits = min(room.fits or 0, archive.messages)
    earlier = archive.replays.filter(first__lte=one.last, last__gte=one.first)
    return {
        **describe_declaration(plan.arguments, plan.bindings),
        "found": found,
        "plan": plan,
        "one": one,
        "to": readable(one.to_queue or one.to_exchange),
        "lasts": duration(one.total / one.rate) if one.rate else "",
        "differences": [tuple(restoring.shown(value) for value in difference) for difference in plan.differences],
        "lacks_arguments": plan.declares and not (archive.arguments or {}).items() <= (plan.arguments or {}).items(),
        "fields": [*fields, *without, ("uuid", uuid4())],
        "losses": [
            (loss, urlencode([*fields, *without, ("without", loss.argument)]) if loss.argument else "")
            for loss in plan.losses
        ],
        "fitting": urlencode(
            [*fields[:-2], ("first", archive.messages - fits + 1), ("last", archive.messages), *without]
        ),
        "fits": fits,
        "target_queue": target_queue(request, archive, one.to_queue),
        "earlier": earlier.exclude(sent=0, state__in=[Replay.State.STOPPED, Replay.State.FAILED]).first(),
    }


def target_queue(request: Request, archive: Archive, name: str) -> Queue | None:
    """Return the queue of this name in the archive's virtual host, if the visitor may see it."""
    return Queue.objects.seen_by(request.user).filter(vhost=archive.vhost, name=name).first()


def names_that_can_be_typed(pulse_user: PulseUser | None, vhost: str) -> list[str]:
    """Return the first names of queues of a Pulse user that can be typed."""
    if pulse_user is None:
        return []
    queues = Queue.objects.filter(pulse_user=pulse_user, vhost=vhost, registered=False)
    names = queues.exclude(state=Queue.State.GONE).values_list("name", flat=True)[:SUGGESTIONS]
    return [name for name in names if readable(name) == name]
