"""Forms about the limits of a queue."""

from typing import Any

from django import forms

from accounts.models import MAX_THRESHOLD
from accounts.pages.forms import Form
from queues.actions.limit_requests import MAX_REASON_LENGTH
from rabbit.names import MAX_NAME_BYTES

EMPTY = "In messages. Leave empty to use the default."


class LimitsForm(forms.Form):
    """A queue's own limits. ``actions.set_limits`` checks them."""

    unbounded = forms.BooleanField(
        required=False, help_text="Guardian warns about the queue, but never deletes it for its length."
    )
    warn_length = forms.IntegerField(required=False, label="Warning threshold", help_text=EMPTY)
    max_length = forms.IntegerField(required=False, label="Deletion limit", help_text=EMPTY)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for field in self.fields.values():
            field.show_hidden_initial = True  # so that only fields changed since the page was shown are set


class LimitRequestForm(forms.Form):
    max_length = forms.IntegerField(
        label="Deletion limit", min_value=1, max_value=MAX_THRESHOLD, help_text="In messages."
    )
    reason = forms.CharField(
        max_length=MAX_REASON_LENGTH,
        help_text="Why the queue needs it, and for how long. The operators read it.",
        widget=forms.Textarea(attrs={"rows": 3}),
    )


class DeclineForm(forms.Form):
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
