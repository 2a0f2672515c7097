"""Forms about the limits and the notifications of queues."""

from datetime import datetime, time, timedelta
from typing import Any

from django import forms
from django.utils import timezone

from accounts.models import MAX_THRESHOLD
from accounts.pages.forms import Form, PlainForm
from core.time_zones import zone_of
from notifications.mutes import LONGEST
from queues.actions.limit_requests import MAX_REASON_LENGTH
from rabbit.names import MAX_NAME_BYTES

TIME_FORMAT = "%Y-%m-%dT%H:%M:%S"


class TimeInput(forms.DateTimeInput):
    """A browser's own input of a date and a time."""

    input_type = "datetime-local"

    def __init__(self) -> None:
        super().__init__(format=TIME_FORMAT)


EMPTY = "In messages. Leave empty to use the default."
OPTIONAL: dict[str, Any] = {"required": False, "show_hidden_initial": True}
"""Of fields of which only those changed since the page was shown are set."""


class LimitsForm(PlainForm):
    """A queue's own limits. ``actions.set_limits`` checks them."""

    unbounded = forms.BooleanField(
        **OPTIONAL, help_text="Guardian warns about the queue, but never deletes it for its length."
    )
    warn_length = forms.IntegerField(**OPTIONAL, label="Warning threshold", help_text=EMPTY)
    max_length = forms.IntegerField(**OPTIONAL, label="Deletion limit", help_text=EMPTY)
    limits_until = forms.DateTimeField(
        **OPTIONAL,
        label="Until (optional)",
        help_text="In UTC. Then the earlier limits return. A queue that is over them keeps these until it is not.",
        widget=TimeInput,
    )

    def changes(self) -> dict[str, Any]:
        """Return the limits that were changed. Without an end, they are permanent."""
        changed = {name: self.cleaned_data[name] for name in self.changed_data}
        return {**changed, "limits_until": self.cleaned_data["limits_until"]} if changed else {}


class LimitRequestForm(PlainForm):
    max_length = forms.IntegerField(
        label="Deletion limit", min_value=1, max_value=MAX_THRESHOLD, help_text="In messages."
    )
    reason = forms.CharField(
        max_length=MAX_REASON_LENGTH,
        help_text="Why the queue needs it. The operators read it.",
        widget=forms.Textarea(attrs={"rows": 3}),
    )
    limits_until = forms.DateTimeField(
        required=False, label="Until (optional)", help_text="In UTC. Empty: permanently.", widget=TimeInput
    )


class DeclineForm(PlainForm):
    """Asks why a request for a higher limit is declined."""

    reason = forms.CharField(
        max_length=MAX_REASON_LENGTH,
        label="Reason",
        help_text="The owner who asked gets it by mail.",
        widget=forms.Textarea(attrs={"rows": 3}),
    )


class WatchForm(Form):
    id_prefix = "watch"

    exchange = forms.CharField(max_length=MAX_NAME_BYTES, strip=False)
    routing_key = forms.CharField(
        required=False,
        initial="#",
        strip=False,
        max_length=MAX_NAME_BYTES,
        help_text="Of a topic exchange a pattern: * is a word, # any number of words. Of a direct exchange the exact "
        "key. Others ignore it: you get all messages.",
    )


class MuteForm(PlainForm):
    """Asks until when queues are muted. ``mutes.mute`` checks it."""

    until = forms.DateField(label="Until", help_text="From this day on, you get its notifications again.")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        today = timezone.localdate()
        first, last = today + timedelta(days=1), today + LONGEST - timedelta(days=1)
        days = {"type": "date", "min": first.isoformat(), "max": last.isoformat()}
        self.fields["until"].widget = forms.DateInput(days, "%Y-%m-%d")
        monday = first + timedelta(days=-first.weekday() % 7)
        self.presets = {"tomorrow": first, "Monday": monday, "a week": today + timedelta(days=7)}

    def starts_at(self, time_zone: str) -> datetime:
        """Return when that day begins in this time zone."""
        return datetime.combine(self.cleaned_data["until"], time(), zone_of(time_zone))
