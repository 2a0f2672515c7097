"""The admin of Pulse users, invitations and notification addresses."""

from django.conf import settings
from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.urls import reverse

from accounts.models import Invitation, NotificationAddress, PulseUser
from accounts.pages.forms import ThresholdsForm
from accounts.pulse_users import thresholds
from core.admin import AuditedAdmin, Confirmation, column, confirmed_action, current_operator, given_confirmation
from core.each import report_results


def _effective(own: int | None, default: int) -> str:
    return f"{default:,} (default)" if own is None else f"{own:,}"


def _warning_threshold(own: int | None) -> str:
    return _effective(own, settings.GUARDIAN_WARN_QUEUE_LENGTH)


def _deletion_limit(own: int | None) -> str:
    return _effective(own, settings.GUARDIAN_MAX_QUEUE_LENGTH)


class PulseUserAdmin(AuditedAdmin):
    """Pulse users. A Pulse user is created on the page of Pulse users, and changed on its own page.

    ``queues/admin.py`` registers this admin.
    """

    list_display = [
        "username", "owned_by", "warning_threshold", "deletion_limit", "ready", "removing_since", "created",
    ]  # fmt: skip
    list_filter = ["ready", ("removing_since", admin.EmptyFieldListFilter), ("max_length", admin.EmptyFieldListFilter)]
    search_fields = ["username", "owners__email"]
    fields = [
        "username", "owned_by", "warning_threshold", "deletion_limit", "ready", "removing_since",
        "password_exposed_at", "created",
    ]  # fmt: skip
    actions = ["set_thresholds"]
    warning_threshold = column("warn_length", "warning threshold", _warning_threshold)
    deletion_limit = column("max_length", "deletion limit", _deletion_limit)

    def get_queryset(self, request: HttpRequest) -> QuerySet[PulseUser]:
        pulse_users: QuerySet[PulseUser] = super().get_queryset(request)
        return pulse_users.prefetch_related("owners")

    @admin.display(description="owners")
    def owned_by(self, pulse_user: PulseUser) -> str:
        return ", ".join(owner.email for owner in pulse_user.owners.all())

    def view_on_site(self, pulse_user: PulseUser) -> str:
        return reverse("pulse_user", args=[pulse_user.username])

    @confirmed_action(
        "Set the thresholds of the selected Pulse users",
        Confirmation(
            title="Set the thresholds of these Pulse users",
            text="They apply to their queues without limits of their own. Leave a field empty to use the default.",
            button="Set thresholds",
            column="Now: warning threshold / deletion limit",
            about=lambda one: f"{_warning_threshold(one.warn_length)} / {_deletion_limit(one.max_length)}",
            form=ThresholdsForm,
            is_dangerous=False,
        ),
    )
    def set_thresholds(
        self, request: HttpRequest, pulse_users: list[PulseUser], warn_length: int | None, max_length: int | None
    ) -> None:
        missing = thresholds.set_thresholds_of_all(
            pulse_users, warn_length, max_length, current_operator(request), given_confirmation(request)
        )
        succeeded = [str(pulse_user) for pulse_user in pulse_users if pulse_user not in missing]
        report_results(request, succeeded, "updated", [(str(one), PulseUser.DoesNotExist()) for one in missing])


@admin.register(Invitation)
class InvitationAdmin(AuditedAdmin):
    """Invitations to own Pulse users. Owners and operators withdraw them on the Pulse user's page."""

    allowed = {"cascade"}
    list_display = ["pulse_user", "invitee", "inviter", "created", "closed_at"]
    list_filter = [("closed_at", admin.EmptyFieldListFilter), "created"]
    list_select_related = ["pulse_user", "invitee", "inviter"]
    search_fields = ["pulse_user__username", "invitee__email", "inviter__email"]


@admin.register(NotificationAddress)
class NotificationAddressAdmin(AuditedAdmin):
    """Further notification addresses of Pulse users. They can't be added here, because each must be confirmed."""

    allowed = {"delete"}
    list_display = ["email", "pulse_user", "added_by", "created", "confirmed_at"]
    list_filter = [("confirmed_at", admin.EmptyFieldListFilter), "created"]
    list_select_related = ["pulse_user", "added_by"]
    search_fields = ["email", "pulse_user__username", "added_by__email"]
