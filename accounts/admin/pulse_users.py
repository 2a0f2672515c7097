"""The admin of Pulse users, invitations and notification addresses."""

from typing import Any

from django.conf import settings
from django.contrib import admin
from django.core.exceptions import ValidationError
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.urls import reverse

from accounts.admin.base import (
    AuditedAdmin,
    Confirmation,
    DeletedWithOwnerAdmin,
    RemovableAdmin,
    Row,
    chosen_rows,
    confirmation_page,
    current_operator,
    given_confirmation,
    is_confirmed,
)
from accounts.models import (
    UNCHANGED,
    Invitation,
    NotificationAddress,
    PulseUser,
)
from accounts.pages.forms import ThresholdsForm
from accounts.pulse_users import addresses, thresholds
from accounts.pulse_users.each import report_results
from core.confirmation import ConfirmationRequired

# Pulse users


class PulseUserAdmin(AuditedAdmin):
    """Pulse users. Changes on the broker and changes of owners are made on the Pulse user's own page.

    ``queues/admin.py`` registers this admin.
    """

    list_display = [
        "username", "owned_by", "warning_threshold", "deletion_limit", "ready", "removing_since", "created",
    ]  # fmt: skip
    list_filter = ["ready", ("removing_since", admin.EmptyFieldListFilter), ("max_length", admin.EmptyFieldListFilter)]
    search_fields = ["username", "owners__email"]
    fields = [
        "username", "owned_by", "warn_length", "max_length", "ready", "removing_since", "password_exposed_at",
        "created",
    ]  # fmt: skip
    readonly_fields = ["username", "owned_by", "ready", "removing_since", "password_exposed_at", "created"]
    actions = ["set_thresholds"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[PulseUser]:
        """Fetch the owners of all Pulse users in one query."""
        pulse_users: QuerySet[PulseUser] = super().get_queryset(request)
        return pulse_users.prefetch_related("owners")

    @admin.display(description="owners")
    def owned_by(self, pulse_user: PulseUser) -> str:
        """Return the owners' addresses."""
        return ", ".join(owner.email for owner in pulse_user.owners.all())

    @admin.display(ordering="warn_length")
    def warning_threshold(self, pulse_user: PulseUser) -> str:
        """Return the warning threshold that applies."""
        return _effective(pulse_user.warn_length, settings.GUARDIAN_WARN_QUEUE_LENGTH)

    @admin.display(ordering="max_length")
    def deletion_limit(self, pulse_user: PulseUser) -> str:
        """Return the deletion limit that applies."""
        return _effective(pulse_user.max_length, settings.GUARDIAN_MAX_QUEUE_LENGTH)

    def view_on_site(self, pulse_user: PulseUser) -> str:
        """Return the URL of the Pulse user's page."""
        return reverse("pulse_user", args=[pulse_user.username])

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Refuse: this would create only a row, not a Pulse user on the broker."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: PulseUser | None = None) -> bool:
        """Refuse: this would leave the Pulse user on the broker."""
        return False

    def save_model(self, request: HttpRequest, obj: PulseUser, form: Any, change: bool) -> None:
        """Save only changed thresholds, because another request may be removing the Pulse user."""
        changed = {name: form.cleaned_data[name] for name in form.changed_data}
        warn, limit = (changed.get(name, UNCHANGED) for name in ("warn_length", "max_length"))
        try:
            thresholds.set_thresholds(obj, warn, limit, current_operator(request), given_confirmation(request))
        except PulseUser.DoesNotExist as error:
            raise Http404(f"{obj} no longer exists") from error

    @admin.action(description="Set the thresholds of the selected Pulse users", permissions=["change"])
    def set_thresholds(self, request: HttpRequest, queryset: QuerySet[PulseUser]) -> HttpResponse | None:
        """Set the warning threshold and the deletion limit for queues without thresholds of their own."""
        pulse_users = list(chosen_rows(self, request, queryset))
        form = ThresholdsForm(request.POST if is_confirmed(request) else None)
        required = None
        if form.is_valid():
            warn, limit = form.cleaned_data["warn_length"], form.cleaned_data["max_length"]
            confirm = given_confirmation(request)
            try:
                missing = thresholds.set_thresholds_of_all(pulse_users, warn, limit, current_operator(request), confirm)
            except ValidationError as error:
                form.add_error(None, error)
            except ConfirmationRequired as error:
                required = error
            else:
                succeeded = [str(pulse_user) for pulse_user in pulse_users if pulse_user not in missing]
                failed = [(str(pulse_user), PulseUser.DoesNotExist()) for pulse_user in missing]
                report_results(request, succeeded, "updated", failed)
                return None
        question = Confirmation(
            "set_thresholds",
            "Set the thresholds of these Pulse users",
            "They apply to their queues without limits of their own. Leave a field empty to use the default.",
            "Set thresholds",
            "Now: warning threshold / deletion limit",
            is_dangerous=False,
        )
        return confirmation_page(self, request, question, pulse_users, _with_thresholds, form, required)


def _with_thresholds(pulse_user: PulseUser) -> Row:
    warn = _effective(pulse_user.warn_length, settings.GUARDIAN_WARN_QUEUE_LENGTH)
    limit = _effective(pulse_user.max_length, settings.GUARDIAN_MAX_QUEUE_LENGTH)
    return Row(pulse_user.username, f"{warn} / {limit}")


def _effective(own: int | None, default: int) -> str:
    return f"{default:,} (default)" if own is None else f"{own:,}"


@admin.register(Invitation)
class InvitationAdmin(DeletedWithOwnerAdmin):
    """Invitations to own Pulse users. Owners and operators withdraw them on the Pulse user's page."""

    list_display = ["pulse_user", "invitee", "inviter", "created", "closed_at"]
    list_filter = [("closed_at", admin.EmptyFieldListFilter), "created"]
    list_select_related = ["pulse_user", "invitee", "inviter"]
    search_fields = ["pulse_user__username", "invitee__email", "inviter__email"]


@admin.register(NotificationAddress)
class NotificationAddressAdmin(RemovableAdmin):
    """Further notification addresses of Pulse users. They can't be added here, because each must be confirmed."""

    list_display = ["email", "pulse_user", "added_by", "created", "confirmed_at"]
    list_filter = [("confirmed_at", admin.EmptyFieldListFilter), "created"]
    list_select_related = ["pulse_user", "added_by"]
    search_fields = ["email", "pulse_user__username", "added_by__email"]

    def delete_model(self, request: HttpRequest, obj: NotificationAddress) -> None:
        """Remove the address."""
        addresses.remove_address(obj)
