from typing import cast

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest
from django.urls import reverse

from accounts import tokens, vouching, withdrawal
from accounts.models import AuthToken, NotificationAddress, Owner, PulseUser, Vouching


class ReadOnly(admin.ModelAdmin):
    """A log: what stands in it is written by what happens."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Refuse."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: object = None) -> bool:
        """Refuse."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: object = None) -> bool:
        """Refuse."""
        return False


class GoesWithItsOwner(ReadOnly):
    """A log that goes when its owner is deleted, and not by itself."""

    def has_delete_permission(self, request: HttpRequest, obj: object = None) -> bool:
        """Allow it where the admin asks for each row that goes along with another."""
        own_pages = reverse(f"admin:{self.opts.app_label}_{self.opts.model_name}_changelist")
        return not request.path.startswith(own_pages) and admin.ModelAdmin.has_delete_permission(self, request, obj)


@admin.register(Owner)
class OwnerAdmin(admin.ModelAdmin):
    """Owners. They sign in without a password. Who is vouched for is changed by the two actions, which record it."""

    list_display = ["email", "vouched", "is_staff", "is_active", "date_joined"]
    list_filter = ["vouched", "is_staff", "is_active"]
    search_fields = ["email", "full_name"]
    fields = ["email", "full_name", "vouched", "is_staff", "is_superuser", "is_active", "uuid", "date_joined"]
    readonly_fields = ["vouched", "uuid", "date_joined"]
    actions = ["vouch_for", "withdraw"]

    def has_delete_permission(self, request: HttpRequest, obj: Owner | None = None) -> bool:
        """Refuse where an account would lose an owner, maybe its last, and to delete several at once."""
        return obj is not None and not obj.pulse_users.exists() and super().has_delete_permission(request, obj)

    @admin.action(description="Vouch for the selected owners", permissions=["change"])
    def vouch_for(self, request: HttpRequest, queryset: QuerySet[Owner]) -> None:
        """Let them use the broker."""
        for owner in queryset:
            vouching.vouch(owner, _visitor(request), "in the admin")
        self.message_user(request, "They can use the broker.", messages.SUCCESS)

    @admin.action(description="Withdraw, and leave them what they have", permissions=["change"])
    def withdraw(self, request: HttpRequest, queryset: QuerySet[Owner]) -> None:
        """Stop them from making new accounts and tokens."""
        for owner in queryset:
            try:
                withdrawal.withdraw(owner, _visitor(request), reason="in the admin")
            except PermissionDenied as error:
                self.message_user(request, str(error), messages.ERROR)
            else:
                self.message_user(request, f"{owner.email} can make no new accounts and tokens.", messages.SUCCESS)


@admin.register(Vouching)
class VouchingAdmin(GoesWithItsOwner):
    """Who vouched for whom, and when."""

    list_display = ["owner", "vouched", "by", "reason", "at"]
    list_filter = ["vouched"]
    list_select_related = ["owner", "by"]
    search_fields = ["owner__email", "by__email", "reason"]


@admin.register(AuthToken)
class AuthTokenAdmin(ReadOnly):
    """Tokens. They are made by their owners; revoking one deletes it."""

    list_display = ["name", "user", "created", "expiry", "last_used"]
    list_display_links = None
    list_select_related = ["user"]
    search_fields = ["name", "user__email"]

    def has_delete_permission(self, request: HttpRequest, obj: object = None) -> bool:
        """Allow what the model's permissions allow."""
        return admin.ModelAdmin.has_delete_permission(self, request, obj)

    def delete_model(self, request: HttpRequest, obj: AuthToken) -> None:
        """Revoke it."""
        tokens.revoke_token(obj)

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[AuthToken]) -> None:
        """Revoke them."""
        for token in queryset:
            tokens.revoke_token(token)


@admin.register(PulseUser)
class PulseUserAdmin(admin.ModelAdmin):
    """RabbitMQ accounts. What is done together with the broker, or to their owners, is done on their pages."""

    list_display = ["username", "warn_length", "max_length", "ready", "removing_since", "created"]
    search_fields = ["username", "owners__email"]
    fields = ["username", "owned_by", "warn_length", "max_length", "ready", "removing_since", "created"]
    readonly_fields = ["username", "owned_by", "ready", "removing_since", "created"]

    @admin.display(description="owners")
    def owned_by(self, pulse_user: PulseUser) -> str:
        """Return the owners' addresses."""
        return ", ".join(owner.email for owner in pulse_user.owners.all())

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Refuse: a row alone would stand for no account."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: PulseUser | None = None) -> bool:
        """Refuse: the account on the broker would stay."""
        return False


@admin.register(NotificationAddress)
class NotificationAddressAdmin(ReadOnly):
    """Where the messages about accounts go beside their owners."""

    list_display = ["email", "pulse_user", "added_by", "created", "confirmed_at"]
    list_select_related = ["pulse_user", "added_by"]
    search_fields = ["email", "pulse_user__username"]


def _visitor(request: HttpRequest) -> Owner:
    return cast("Owner", request.user)  # the admin lets nobody else in
