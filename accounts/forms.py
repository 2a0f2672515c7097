"""What people type about accounts, owners and tokens. What may be typed is decided by the functions that it is for."""

import re
from typing import Any

from django import forms
from django.http import QueryDict

from accounts import pulse_users, tokens, vouching
from accounts.models import MAX_THRESHOLD, Owner
from rabbit.names import InvalidUserName


class Form(forms.Form):
    """A form on a page with others: its fields have ids of their own, and the first that is wrong is gone to."""

    id_prefix = ""

    def __init__(self, data: QueryDict | None = None, initial: dict[str, Any] | None = None) -> None:
        super().__init__(data, initial=initial, auto_id=f"{self.id_prefix}-%s", label_suffix="")

    def get_context(self) -> dict[str, Any]:
        """Return what the form is rendered with."""
        wrong = [name for name in self.fields if self.is_bound and name in self.errors]
        if wrong:
            self.fields[wrong[0]].widget.attrs["autofocus"] = True
        return super().get_context()


class AddressesField(forms.CharField):
    """E-mail addresses, one to a line or with commas between them: a list, each of them once."""

    widget = forms.Textarea(attrs={"rows": 2, "autocomplete": "off"})

    def clean(self, value: Any) -> list[str]:
        """Return the addresses."""
        text = super().clean(value)
        return list(dict.fromkeys(filter(None, re.split(r"[\s,;]+", text))))


def password_field(label: str, help_text: str) -> forms.CharField:
    """Return the field for a password of somebody's own. It is taken as it stands, and never shown again."""
    widget = forms.PasswordInput(attrs={"autocomplete": "new-password"})
    return forms.CharField(label=label, help_text=help_text, required=False, strip=False, widget=widget)


class SearchForm(Form):
    """What a list is searched for."""

    id_prefix = "list"
    search = forms.CharField(required=False, max_length=255)


class PulseUserForm(Form):
    """A RabbitMQ account to be made."""

    id_prefix = "new"
    username = forms.CharField(
        label="Name",
        strip=False,
        help_text="Letters, digits, '.', '_' and '-', with a letter first. It can't be changed later.",
        widget=forms.TextInput(attrs={"autocomplete": "off", "autocapitalize": "none", "spellcheck": "false"}),
    )
    password = password_field(
        "A password of your own (optional)",
        "Best left empty: a long one is made then, and shown to you once. "
        "If you choose your own, take one that you use nowhere else.",
    )
    owners = AddressesField(
        label="Further owners (optional)",
        required=False,
        help_text="E-mail addresses of people who signed in here, one to a line. They can do what you can.",
    )
    notification_emails = AddressesField(
        label="Further addresses for its messages (optional)",
        required=False,
        help_text="One to a line. Each gets nothing until somebody there has confirmed it.",
    )

    def clean_username(self) -> str:
        """Make sure, as far as is known here, that an account can have this name."""
        username: str = self.cleaned_data["username"]
        try:
            pulse_users.check_name(username)
        except (InvalidUserName, pulse_users.NameReserved, pulse_users.NameTaken) as error:
            raise forms.ValidationError(str(error)) from error
        return username

    def clean_owners(self) -> list[Owner]:
        """Return the owners."""
        return pulse_users.find_owners(self.cleaned_data["owners"])


class AdoptForm(Form):
    """An account on the broker that was made by hand, and whose it shall be."""

    id_prefix = "adopt"
    owners = AddressesField(
        label="Owners", required=True, help_text="E-mail addresses of people who signed in here, one to a line."
    )

    def __init__(self, data: QueryDict | None = None, *, adoptable: list[str]) -> None:
        super().__init__(data)
        username = forms.ChoiceField(
            label="Account",
            choices=[(name, name) for name in adoptable],
            error_messages={"invalid_choice": "There is no such account to adopt any more; choose another."},
        )
        self.fields = {"username": username, **self.fields}

    def clean_owners(self) -> list[Owner]:
        """Return the owners."""
        return pulse_users.find_owners(self.cleaned_data["owners"])


class PasswordForm(Form):
    """A new password for an account."""

    id_prefix = "password"
    password = password_field(
        "A password of your own (optional)", "Best left empty: a long one is made, and shown once."
    )
    close_connections = forms.BooleanField(
        label="Close its live connections too",
        required=False,
        help_text="Programs that use the account are cut off, and come back with the new password only. "
        "Without the tick they go on until they next connect.",
    )


class OwnerForm(Form):
    """Somebody who shall own an account too."""

    id_prefix = "owner"
    email = forms.EmailField(label="E-mail address of another owner", help_text="Somebody who has signed in here.")


class AddressForm(Form):
    """A further address for the messages about an account's queues."""

    id_prefix = "address"
    email = forms.EmailField(
        label="Another address", help_text="A mail asks there for a confirmation. Until then it gets nothing else."
    )


class ThresholdsForm(Form):
    """The lengths at which owners are warned of an account's queues, and past which these are deleted, in messages."""

    id_prefix = "thresholds"
    warn_length = forms.IntegerField(label="Warned at (messages)", required=False, min_value=1, max_value=MAX_THRESHOLD)
    max_length = forms.IntegerField(
        label="Deleted past (messages)", required=False, min_value=1, max_value=MAX_THRESHOLD
    )


class DeleteForm(Form):
    """The name of what is to be deleted, typed by whoever means it."""

    id_prefix = "delete"
    name = forms.CharField(
        label="Type the account's name to delete it",
        widget=forms.TextInput(attrs={"autocomplete": "off", "autocapitalize": "none", "spellcheck": "false"}),
    )

    def __init__(self, data: QueryDict | None, *, username: str) -> None:
        super().__init__(data)
        self.username = username

    def clean_name(self) -> str:
        """Make sure that it is the name."""
        name: str = self.cleaned_data["name"]
        if name != self.username:
            raise forms.ValidationError("That isn't its name. Nothing was deleted.")
        return name


class VouchRequestForm(Form):
    """Why somebody should be vouched for."""

    id_prefix = "request"
    reason = forms.CharField(
        label="What do you need RabbitMQ for?",
        max_length=vouching.MAX_REQUEST_LENGTH,
        help_text="A sentence or two. Those who may vouch for you read it.",
        widget=forms.Textarea(attrs={"rows": 3}),
    )


class VouchForm(Form):
    """Whom to vouch for."""

    id_prefix = "vouch"
    email = forms.EmailField(label="E-mail address", help_text="Somebody who has signed in here at least once.")
    reason = forms.CharField(
        label="Why (optional)", required=False, max_length=vouching.MAX_REASON_LENGTH, help_text="Kept in the record."
    )


class WithdrawForm(Form):
    """How far a withdrawal goes."""

    id_prefix = "withdraw"
    remove = forms.BooleanField(
        label="Remove what is there too", required=False, help_text="Without the tick, accounts and tokens stay usable."
    )
    reason = forms.CharField(
        label="Why (optional)", required=False, max_length=vouching.MAX_REASON_LENGTH, help_text="Kept in the record."
    )


class TokenForm(Form):
    """A token to be made."""

    id_prefix = "token"
    name = forms.CharField(
        label="Name",
        help_text="What it is for, such as: nightly clean-up.",
        widget=forms.TextInput(attrs={"autocomplete": "off"}),
    )
    days = forms.IntegerField(label="Days until it expires", initial=tokens.DEFAULT_DAYS)
