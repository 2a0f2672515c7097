"""The forms about Pulse users, owners and tokens. The functions that process their values validate them."""

import re
from typing import Any

from django import forms
from django.conf import settings
from django.http import QueryDict

from accounts.access import tokens, vouching
from accounts.models import MAX_THRESHOLD, AuthToken
from accounts.pulse_users import ownership, validation
from accounts.pulse_users.thresholds import MAX_HOLD_OFF_MINUTES


class Form(forms.Form):
    """A form on a page with several forms. Its fields have unique ids, and the first invalid field gets the focus."""

    id_prefix = ""

    def __init__(self, data: QueryDict | None = None, initial: dict[str, Any] | None = None) -> None:
        super().__init__(data, initial=initial, auto_id=f"{self.id_prefix}-%s", label_suffix="")
        if settings.GUARDIAN_REQUIRE_GENERATED_PASSWORDS:
            self.fields.pop("password", None)

    def get_context(self) -> dict[str, Any]:
        """Return the rendering context, with the focus on the first invalid field."""
        invalid = [name for name in self.fields if self.is_bound and name in self.errors]
        if invalid:
            self.fields[invalid[0]].widget.attrs["autofocus"] = True
        return super().get_context()


class PlainForm(forms.Form):
    """A form whose labels have no colon."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "label_suffix": ""})


class AddressesField(forms.CharField):
    """E-mail addresses, separated by white space, commas or semicolons. The value is a list without duplicates."""

    widget = forms.Textarea(attrs={"rows": 2, "autocomplete": "off"})

    def clean(self, value: Any) -> list[str]:
        text = super().clean(value)
        return list(dict.fromkeys(filter(None, re.split(r"[\s,;]+", text))))


class OwnersField(AddressesField):
    """Addresses of owners. The value is the owners."""

    def clean(self, value: Any) -> Any:
        return ownership.find_owners(super().clean(value))


def password_field(label: str, help_text: str) -> forms.CharField:
    """Return an optional field for a password, which is taken literally and never shown again."""
    widget = forms.PasswordInput(attrs={"autocomplete": "new-password"})
    return forms.CharField(label=label, help_text=help_text, required=False, strip=False, widget=widget)


class PulseUserForm(Form):
    id_prefix = "new"
    username = forms.CharField(
        label="Name",
        strip=False,
        help_text="Start with a letter. Use letters, digits, '.', '_' and '-'. You can't change the name later.",
        widget=forms.TextInput(attrs={"autocomplete": "off", "autocapitalize": "none", "spellcheck": "false"}),
    )
    password = password_field(
        "Your own password (optional)",
        "If you leave this empty, we generate a password and show it once. "
        "If you choose your own, use one that you use nowhere else.",
    )
    owners = OwnersField(
        label="Further owners (optional)",
        required=False,
        help_text="E-mail addresses of people who have signed in here, one a line. We invite them. "
        "Once they accept, they have the same rights as you.",
    )
    notification_emails = AddressesField(
        label="Further addresses for notifications (optional)",
        required=False,
        help_text="One a line. An address gets notifications once its recipient has confirmed it.",
    )

    def clean_username(self) -> str:
        """Check the name without a request to the broker."""
        username: str = self.cleaned_data["username"]
        validation.check_name(username)
        return username


class OperatorsPulseUserForm(PulseUserForm):
    """A new Pulse user, created by an operator, who assigns owners."""

    owners = OwnersField(
        label="Further owners (optional)",
        required=False,
        help_text="E-mail addresses of people who have signed in here, one a line. As an operator, you assign them: "
        "they become owners at once, and get a mail.",
    )
    adopt_namespace = forms.BooleanField(
        label="Adopt queues and exchanges of this name",
        required=False,
        help_text="Otherwise we refuse a name if RabbitMQ already has queues or exchanges of that name.",
    )


class AdoptForm(Form):
    id_prefix = "adopt"
    owners = OwnersField(
        label="Owners", required=True, help_text="E-mail addresses of people who have signed in here, one a line."
    )

    def __init__(self, data: QueryDict | None = None, *, adoptable: list[str]) -> None:
        super().__init__(data)
        username = forms.ChoiceField(
            label="RabbitMQ user",
            choices=[(name, name) for name in adoptable],
            error_messages={"invalid_choice": "This RabbitMQ user can't be adopted any more. Choose another."},
        )
        self.fields = {"username": username, **self.fields}


class PasswordForm(Form):
    id_prefix = "password"
    password = password_field(
        "Your own password (optional)", "If you leave this empty, we generate a password and show it once."
    )
    close_connections = forms.BooleanField(
        label="Close its open connections",
        required=False,
        help_text="Programs are disconnected, and need the new password to reconnect. "
        "Without the tick nothing is closed.",
    )


class OwnerForm(Form):
    id_prefix = "owner"
    email = forms.EmailField(label="E-mail address of another owner", help_text="The person must have signed in here.")


class RemoveOwnerForm(Form):
    """Whether the Pulse user gets a new password when an owner is removed."""

    id_prefix = "remove"
    new_password = forms.BooleanField(
        label="Set a new password and close open connections",
        required=False,
        initial=True,
        help_text="We show you the new password once. Programs that use the Pulse user need it from then on.",
    )


class AddressForm(Form):
    id_prefix = "address"
    email = forms.EmailField(
        label="Another address",
        help_text="We send it a mail with a link. It gets notifications once its recipient has confirmed it.",
    )


class ThresholdsForm(Form):
    id_prefix = "thresholds"
    warn_length = forms.IntegerField(
        label="Warning threshold (messages)", required=False, min_value=1, max_value=MAX_THRESHOLD
    )
    max_length = forms.IntegerField(
        label="Deletion limit (messages)", required=False, min_value=1, max_value=MAX_THRESHOLD
    )


class HoldOffForm(Form):
    id_prefix = "hold-off"
    hold_off_minutes = forms.IntegerField(
        label="Wait before a warning (minutes)",
        min_value=0,
        max_value=MAX_HOLD_OFF_MINUTES,
        help_text="Minutes over its warning threshold after which the owners of a queue are warned. 0: at once.",
    )


class ArchivesForm(Form):
    """Whether the messages of a Pulse user's queues are archived."""

    id_prefix = "archives"
    keeps_archives = forms.BooleanField(
        label="Archive the messages of its queues before they are deleted or purged",
        required=False,
        help_text="Clear the box for confidential data. Existing archives stay until they expire or you delete them.",
    )


class NameForm(PlainForm):
    """A confirmation: the name as the page shows it, typed."""

    typed = forms.CharField(
        strip=False,
        label="To confirm, type or paste the name above",
        widget=forms.TextInput(attrs={"autocomplete": "off", "autocapitalize": "off", "spellcheck": "false"}),
    )

    def __init__(self, name: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.name = name

    def clean_typed(self) -> str:
        typed: str = self.cleaned_data["typed"]
        if typed != self.name:
            raise forms.ValidationError("This is not the text above. Nothing was changed.")
        return typed


class VouchRequestForm(Form):
    id_prefix = "request"
    reason = forms.CharField(
        label="What do you need RabbitMQ for?",
        max_length=vouching.MAX_REQUEST_LENGTH,
        help_text="One or two sentences for the people who approve requests.",
        widget=forms.Textarea(attrs={"rows": 3}),
    )


class VouchForm(Form):
    id_prefix = "vouch"
    email = forms.EmailField(label="E-mail address", help_text="The person must have signed in here.")
    reason = forms.CharField(
        label="Reason (optional)", required=False, max_length=vouching.MAX_REASON_LENGTH, help_text="We record it."
    )


class WithdrawForm(Form):
    id_prefix = "withdraw"
    remove = forms.BooleanField(
        label="Also remove Pulse users and tokens", required=False, help_text="Otherwise they keep working."
    )
    reason = forms.CharField(
        label="Reason (optional)",
        required=False,
        max_length=vouching.MAX_REASON_LENGTH,
        help_text="We record it, and the owner sees it.",
    )


class TokenForm(Form):
    id_prefix = "token"
    name = forms.CharField(
        label="Name",
        help_text="What the token is for, such as: nightly clean-up.",
        widget=forms.TextInput(attrs={"autocomplete": "off"}),
    )
    scope = forms.ChoiceField(
        label="What can it do?",
        choices=[
            (AuthToken.Scope.AGENT, "Register queues, as agents do. It can't read or change anything else."),
            (AuthToken.Scope.READ, "Read what you can see: Pulse users, queues, archives. No messages, no changes."),
            (AuthToken.Scope.ALL, "Everything that you can do, such as publishing events and deleting queues."),
        ],
        initial=AuthToken.Scope.READ,
        required=False,
        widget=forms.RadioSelect,
    )
    pulse_user = forms.CharField(
        label="Only for this Pulse user (optional)",
        required=False,
        help_text="For a token that reads. It then sees nothing else of yours.",
        widget=forms.TextInput(attrs={"autocomplete": "off", "autocapitalize": "none", "spellcheck": "false"}),
    )
    days = forms.IntegerField(label="Valid for (days)", initial=tokens.DEFAULT_DAYS)

    def clean_scope(self) -> str:
        return self.cleaned_data["scope"] or AuthToken.Scope.AGENT
