"""The forms of the notification settings. ``channels`` and ``preferences`` check the values."""

from django import forms

from accounts.pages.forms import Form
from notifications import channels


class ChannelForm(Form):
    about = "channel"
    name = forms.CharField(
        max_length=channels.MAX_NAME_LENGTH, help_text="Your name for it, such as the name of the chat room."
    )
    url = forms.CharField(
        label="Address",
        max_length=channels.MAX_URL_LENGTH,
        help_text=(
            "The https:// address that the service gives you for incoming messages (a webhook): Slack, Discord, "
            "Microsoft Teams, Google Chat, Mattermost, or your own program that accepts JSON. "
            "It is a secret, and is not shown again."
        ),
        widget=forms.TextInput(attrs={"autocomplete": "off", "inputmode": "url", "spellcheck": "false"}),
    )


class QuietHoursForm(Form):
    about = "quiet"
    quiet_from = forms.TimeField(
        label="From",
        required=False,
        widget=forms.TimeInput(format="%H:%M", attrs={"type": "time"}),
        help_text="Such as 22:00. Leave both empty for no quiet hours.",
    )
    quiet_until = forms.TimeField(
        label="Until", required=False, widget=forms.TimeInput(format="%H:%M", attrs={"type": "time"})
    )
    time_zone = forms.CharField(
        max_length=64,
        help_text="Such as Europe/Berlin. The weekly summary is sent on Mondays at 8:00 in this time zone.",
        widget=forms.TextInput(attrs={"list": "time-zones", "autocomplete": "off", "spellcheck": "false"}),
    )


class WeeklyForm(Form):
    about = "weekly"
    weekly_summary = forms.BooleanField(label="Send me a summary of my queues every week", required=False)
