"""The admin of owners, their access, tokens and sign-in addresses."""

from typing import Any

import allauth.account.admin  # these three register models that are unregistered below
import allauth.socialaccount.admin  # noqa: F401
import django.contrib.auth.admin  # noqa: F401
from allauth.account.models import EmailAddress
from allauth.socialaccount.models import SocialAccount, SocialApp, SocialToken
from django import forms
from django.contrib import admin
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.auth.models import Group
from django.core.exceptions import ValidationError
from django.db.models import QuerySet
from django.http import HttpRequest
from django.urls import reverse
from django.utils.safestring import SafeString

from accounts import queue_effects
from accounts.access import tokens, vouching
from accounts.models import AuthToken, Owner, PulseUser, SignInLink, Vouching
from accounts.pages.forms import WithdrawForm
from accounts.pulse_users import ownership, withdrawal
from core.admin import (
    AuditedAdmin,
    Confirmation,
    column,
    confirmed_action,
    count_related,
    current_operator,
    given_confirmation,
)
from core.confirmation import ConfirmableChange
from core.each import apply_to_each, report_results

admin.site.unregister(Group)  # groups grant permissions, and operators have all permissions


class OwnerAdmin(AuditedAdmin):
    """Owners. They sign in without a password. Two actions change ``vouched``, because each change is recorded.

    Every operator has all permissions and can make other owners operators. ``agents/admin.py`` registers this admin.
    """

    allowed = {"add", "change", "delete"}
    list_display = [
        "email", "full_name", "vouched", "is_staff", "is_active", "owned", "last_login", "date_joined",
    ]  # fmt: skip
    list_filter = ["vouched", "is_staff", "is_active", "weekly_summary", "date_joined"]
    search_fields = ["email", "full_name"]
    fields = [
        "email", "full_name", "vouched", "is_staff", "is_active", "uuid", "last_login", "date_joined", "vouch_request",
        "time_zone", "quiet_from", "quiet_until", "weekly_summary",
    ]  # fmt: skip
    readonly_fields = [
        "vouched", "uuid", "last_login", "date_joined", "vouch_request", "time_zone", "quiet_from", "quiet_until",
        "weekly_summary",
    ]  # fmt: skip
    actions = ["vouch_for", "withdraw"]
    owned = column("number_of_pulse_users", "Pulse users")

    def get_queryset(self, request: HttpRequest) -> QuerySet[Owner]:
        owners: QuerySet[Owner] = super().get_queryset(request)
        return owners.annotate(number_of_pulse_users=count_related(PulseUser.owners.through, "owner"))

    def view_on_site(self, owner: Owner) -> str:
        return reverse("owner", args=[owner.uuid])

    def get_readonly_fields(self, request: HttpRequest, obj: Owner | None = None) -> list[str]:
        """Keep operators from locking themselves out. Another operator can do it, and undo it."""
        return [*self.readonly_fields, *(["is_staff", "is_active"] if obj == request.user else [])]

    def get_form(self, request: HttpRequest, obj: Owner | None = None, change: bool = False, **options: Any) -> Any:
        """Say what a change of the address ends."""
        text = "A change signs the owner out everywhere. Tokens stay valid: revoke them if the owner is another person."
        return super().get_form(request, obj, change, help_texts={"email": text} if change else None, **options)

    def save_model(self, request: HttpRequest, obj: Owner, form: Any, change: bool) -> None:
        """Save only the changed fields, because another request may have changed ``vouched``."""
        deactivates = change and "is_active" in form.changed_data and not obj.is_active
        if deactivates:
            # The owner's tokens are no longer valid, so the next clean-up deletes the agents' queues.
            deactivation = ConfirmableChange(
                current_operator(request), "deactivate", [obj], {}, given_confirmation(request)
            )
            deactivation.require_confirmed(queue_effects.of_agents(obj))
        # To the form, an address that was stored in an older form is unchanged; cleaning has normalized it.
        changed = {*form.changed_data, *(["email"] if obj.email != form.initial.get("email") else [])}
        if change and "email" in changed:
            obj.set_unusable_password()  # nobody has one; sessions end when it changes
            changed.add("password")
            SignInLink.objects.filter(owner=obj).delete()
            SocialAccount.objects.filter(user=obj).delete()
        if not change:
            obj.save()
        elif changed:
            obj.save(update_fields=changed)
        if deactivates:
            ownership.deactivated(obj, current_operator(request))

    def has_delete_permission(self, request: HttpRequest, obj: Owner | None = None) -> bool:
        """Refuse to delete owners of Pulse users (a Pulse user could lose its last owner), in bulk, and oneself."""
        return (
            obj is not None
            and obj != request.user
            and not obj.pulse_users.exists()
            and super().has_delete_permission(request, obj)
        )

    @admin.action(description="Approve access for the selected owners", permissions=["act"])
    def vouch_for(self, request: HttpRequest, queryset: QuerySet[Owner]) -> None:
        apply_to_each(
            request,
            queryset,
            lambda owner: vouching.vouch(owner, current_operator(request), "in the admin"),
            "approved, and can use the broker",
        )

    @confirmed_action(
        "Withdraw access of the selected owners",
        Confirmation(
            title="Withdraw the access of these owners",
            text="They can't create Pulse users and tokens any more. Existing ones keep working, unless you remove "
            "them.",
            button="Withdraw access",
            column="Pulse users",
            about=lambda owner: f"{owner.number_of_pulse_users:,}",
            form=WithdrawForm,
        ),
    )
    def withdraw(self, request: HttpRequest, owners: list[Owner], remove: bool, reason: str) -> None:
        if remove and len(owners) > 1:
            text = "Pulse users and tokens can be removed for one owner at a time. Select one owner."
            raise ValidationError({"remove": text})
        options: dict[str, Any] = {
            "remove": remove,
            "reason": reason or "in the admin",
            "confirm": given_confirmation(request),
        }
        removed = "; Guardian removes the Pulse users that only they owned" if remove else ""
        apply_to_each(
            request,
            owners,
            lambda owner: withdrawal.withdraw(owner, current_operator(request), **options),
            f"no longer able to create Pulse users and tokens{removed}",
        )


@admin.register(Vouching)
class VouchingAdmin(AuditedAdmin):
    """Who vouched for whom, and when."""

    allowed = {"cascade"}
    list_display = ["owner", "vouched", "by", "reason", "at"]
    list_filter = ["vouched", "at"]
    list_select_related = ["owner", "by"]
    search_fields = ["owner__email", "by__email", "reason"]


@admin.register(AuthToken)
class AuthTokenAdmin(AuditedAdmin):
    """Tokens. Owners create them; operators revoke them by an action.

    A token's primary key is its digest, which no page shows. So rows are identified by their UUID and have no page.
    """

    allowed = {"cascade"}
    key = "uuid"
    list_display = ["name", "user", "scope", "pulse_user", "created", "expiry", "last_used"]
    list_display_links = None
    list_filter = ["scope", "created", "expiry", "last_used"]
    list_select_related = ["user", "pulse_user"]
    search_fields = ["name", "user__email"]
    actions = ["revoke"]

    def get_urls(self) -> list[Any]:
        """Return only URLs that don't contain the digest."""
        return [url for url in super().get_urls() if str(url.name).endswith(("_changelist", "_add"))]

    def action_checkbox(self, obj: AuthToken) -> SafeString:
        name = f"Select this token for an action - {obj}"
        box = forms.CheckboxInput({"class": "action-select", "aria-label": name}, lambda value: False)
        return box.render(ACTION_CHECKBOX_NAME, str(obj.uuid))

    @confirmed_action(
        "Revoke the selected tokens",
        Confirmation(
            title="Revoke these tokens",
            text="Programs that use them are refused at once. Agents that log in to the broker with them are "
            "disconnected.",
            button="Revoke the tokens",
            column="Owner",
            about=lambda token: token.user.email,
            narrow=lambda rows: rows.select_related("user"),
        ),
    )
    def revoke(self, request: HttpRequest, found: list[AuthToken]) -> None:
        change = tokens.revocation_of(found, current_operator(request), given_confirmation(request))
        tokens.revoke_confirmed(found, change)
        report_results(request, [str(token) for token in found], "revoked", [])


# Models of allauth. accounts/signing_in/ writes their rows. The provider is configured in the settings, and
# its tokens are not stored.

admin.site.unregister([EmailAddress, SocialAccount, SocialApp, SocialToken])


@admin.register(EmailAddress)
class EmailAddressAdmin(AuditedAdmin):
    """Addresses that owners sign in with, and whether they are verified. Creating one manually would grant access."""

    allowed = {"cascade"}
    list_display = ["email", "user", "verified"]
    list_filter = ["verified"]
    list_select_related = ["user"]
    search_fields = ["email", "user__email"]


@admin.register(SocialAccount)
class SocialAccountAdmin(AuditedAdmin):
    """Which OpenID Connect identity belongs to which owner. The claims are not shown."""

    allowed = {"cascade"}
    list_display = ["uid", "user", "provider", "last_login", "date_joined"]
    list_filter = ["provider"]
    list_select_related = ["user"]
    search_fields = ["uid", "user__email"]
    fields = ["uid", "user", "provider", "last_login", "date_joined"]
