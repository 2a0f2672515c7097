"""The admin of owners, accounts, tokens and the audit trail, and what the admins of all apps share.

Actions call the same functions as pages and the API. Actions that send requests to the broker continue after single
failures and report each result. The admin offers no change that would leave the broker out of step.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast
from uuid import UUID

import allauth.account.admin  # these four register models that are unregistered below
import allauth.socialaccount.admin  # noqa: F401
import auditlog.admin  # noqa: F401
import django.contrib.auth.admin  # noqa: F401
from allauth.account.models import EmailAddress
from allauth.socialaccount.models import SocialAccount, SocialApp, SocialToken
from django import forms
from django.conf import settings
from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import ChangeList
from django.contrib.auth.models import Group
from django.contrib.contenttypes.models import ContentType
from django.core.exceptions import FieldDoesNotExist, ValidationError
from django.db import DataError, NotSupportedError, ProgrammingError
from django.db.models import Count, Model, OuterRef, QuerySet, Subquery
from django.db.models.functions import Coalesce
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.template.response import TemplateResponse
from django.urls import NoReverseMatch, reverse
from django.utils import timezone
from django.utils.html import format_html, format_html_join
from django.utils.http import urlencode
from django.utils.safestring import SafeString

from accounts import audit, queue_effects
from accounts.access import tokens, vouching
from accounts.models import (
    UNCHANGED,
    AuditEntry,
    AuthToken,
    Invitation,
    NotificationAddress,
    Owner,
    PulseUser,
    Vouching,
)
from accounts.pages.forms import ThresholdsForm, WithdrawForm
from accounts.pulse_users import addresses, ownership, pulse_users, withdrawal
from accounts.pulse_users.each import MAX_ROWS_SHOWN, apply_to_each, describe_error, report_results
from core.confirmation import ConfirmableChange, ConfirmationRequired
from rabbit.names import readable

CHOSEN_FIELD = "chosen"


REFUSED_LOOKUPS = ("regex", "range", "contained_by")
"""Endings of lookups that a URL can't have: a regex could take unlimited time, and a range needs two values."""


@contextmanager
def _refusing_odd_lookups() -> Iterator[None]:
    try:
        yield
    except (ValueError, OverflowError, DataError, NotSupportedError, ProgrammingError) as error:
        raise IncorrectLookupParameters(error) from error


class CheckedChangeList(ChangeList):
    """A list that is shown without filters if its URL has a lookup or a value that the database can't compare with.

    Django checks a part of them. The others raise an error when the query is compiled or executed.
    """

    @_refusing_odd_lookups()
    def get_queryset(self, *args: Any, **kwargs: Any) -> QuerySet[Any]:
        """Return the rows that match the filters."""
        return super().get_queryset(*args, **kwargs)

    @_refusing_odd_lookups()
    def get_results(self, request: HttpRequest) -> None:
        """Count the rows. This is the first query with the filters."""
        super().get_results(request)


class AuditedAdmin(admin.ModelAdmin):
    """The admin of a model whose changes are in the audit trail."""

    key = "pk"
    """The field that identifies a row on confirmation pages."""

    empty_value_display = "none"

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest) -> bool:
        """Refuse the lookups that a URL can't have."""
        return not lookup.endswith(REFUSED_LOOKUPS) and super().lookup_allowed(lookup, value, request)

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        """Return the class of the list."""
        return CheckedChangeList

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Find nothing for a NUL character, which PostgreSQL refuses."""
        if "\0" in search_term:
            return queryset.none(), False
        return super().get_search_results(request, queryset, search_term)

    def changeform_view(
        self,
        request: HttpRequest,
        object_id: str | None = None,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        """Show and process the form. If the change is no longer valid when it is saved, show why."""
        try:
            return super().changeform_view(request, object_id, form_url, extra_context)
        except ValidationError as error:
            self.message_user(request, f"Nothing was changed. {describe_error(error)}", messages.ERROR)
            return redirect(request.get_full_path())
        except ConfirmationRequired as required:
            return ask_again(self, request, required)

    def response_action(  # type: ignore[override]  # the stubs are a version ahead
        self, request: HttpRequest, queryset: QuerySet[Any]
    ) -> HttpResponse | None:
        """Ignore selected values that are no valid keys. Only forged requests contain them."""
        posted = request.POST.copy()
        selected = posted.getlist(ACTION_CHECKBOX_NAME)
        posted.setlist(ACTION_CHECKBOX_NAME, [text for text in selected if _is_key(self.model, "pk", text)])
        request.POST = posted  # type: ignore[assignment]
        return super().response_action(request, queryset)

    def history_view(
        self, request: HttpRequest, object_id: str, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Redirect to the audit trail of the row. Django's history contains only changes in the admin."""
        return audit_trail_of(ContentType.objects.get_for_model(self.model), object_id)


def audit_trail_of(kind: ContentType | None, key: str) -> HttpResponse:
    """Redirect to the audit trail of one thing."""
    wanted = {"content_type__id__exact": str(kind.pk), "object_pk": key} if kind else {"content_type__isnull": "True"}
    return redirect(f"{reverse('admin:accounts_auditentry_changelist')}?{urlencode(wanted)}")


class ReadOnlyAdmin(AuditedAdmin):
    """The admin of a model that operators only read."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Refuse."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: object = None) -> bool:
        """Refuse."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: object = None) -> bool:
        """Refuse."""
        return False


class DeletedWithOwnerAdmin(ReadOnlyAdmin):
    """The admin of a model whose rows are deleted only with their owner."""

    def has_delete_permission(self, request: HttpRequest, obj: object = None) -> bool:
        """Refuse on the model's own pages. Elsewhere the admin checks the rows that a deletion cascades to."""
        own_pages = reverse(f"admin:{self.opts.app_label}_{self.opts.model_name}_changelist")
        return not request.path.startswith(own_pages) and admin.ModelAdmin.has_delete_permission(self, request, obj)


class RemovableAdmin(ReadOnlyAdmin):
    """The admin of a model that operators read and delete."""

    def has_delete_permission(self, request: HttpRequest, obj: object = None) -> bool:
        """Return what the model's permissions say."""
        return admin.ModelAdmin.has_delete_permission(self, request, obj)


# Actions


class Confirmation(NamedTuple):
    """The texts of the page that asks to confirm an action on the selected rows.

    ``action`` is the name of the action to run after confirmation. ``text`` says what it does. ``column`` is the
    heading of ``Row.about``.
    """

    action: str
    title: str
    text: str
    button: str
    column: str
    is_dangerous: bool = True


class Row(NamedTuple):
    """A selected row on a confirmation page."""

    name: str
    about: str


def chosen_rows(model_admin: AuditedAdmin, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
    """Return the rows named on the confirmation page if the request comes from it, else those selected in the list."""
    if CHOSEN_FIELD not in request.POST:
        return queryset
    keys = [text for text in request.POST[CHOSEN_FIELD].split(",") if _is_key(model_admin.model, model_admin.key, text)]
    return model_admin.get_queryset(request).filter(**{f"{model_admin.key}__in": keys})


def _is_key(model: type[Model], name: str, text: str) -> bool:
    """Return whether the text is a valid value of this field."""
    field = model._meta.pk if name == "pk" else model._meta.get_field(name)
    try:
        field.clean(text, None)  # type: ignore[union-attr]
    except ValidationError:
        return False
    return True


def is_confirmed(request: HttpRequest) -> bool:
    """Return whether the request comes from a confirmation page."""
    return "post" in request.POST


def confirmation_page(
    model_admin: AuditedAdmin,
    request: HttpRequest,
    question: Confirmation,
    rows: Sequence[Any],
    shown: Callable[[Any], Row],
    form: forms.Form | None = None,
    required: ConfirmationRequired | None = None,
) -> HttpResponse:
    """Return the page that asks to confirm an action on these rows. Without rows, redirect back with a message.

    ``required``: the action deletes queues, which the page shows.
    """
    if not rows:
        report_results(request, [], "", [])
        return redirect(request.get_full_path())
    context = {
        **model_admin.admin_site.each_context(request),
        "title": question.title,
        "question": question,
        "opts": model_admin.opts,
        "list": request.get_full_path(),
        "rows": [shown(row) for row in rows[:MAX_ROWS_SHOWN]],
        "number": len(rows),
        "more": max(0, len(rows) - MAX_ROWS_SHOWN),
        # One field for all keys: Django accepts at most 1,000 fields.
        "chosen": ",".join(str(getattr(row, model_admin.key)) for row in rows),
        "first": getattr(rows[0], model_admin.key),
        "form": form,
        "required": required,
    }
    request.current_app = model_admin.admin_site.name
    return TemplateResponse(request, "admin/ask.html", context)


def given_confirmation(request: HttpRequest) -> str:
    """Return the confirmation that queues are deleted, as a page of the admin sends it; empty: none."""
    return str(request.POST.get("confirm", ""))


def ask_again(model_admin: AuditedAdmin, request: HttpRequest, required: ConfirmationRequired) -> HttpResponse:
    """Return the page that shows which queues a change deletes, and sends the same request with the confirmation."""
    own = ("csrfmiddlewaretoken", "confirm")
    context = {
        **model_admin.admin_site.each_context(request),
        "title": "Delete these queues?",
        "opts": model_admin.opts,
        "back": request.get_full_path(),
        "fields": [(name, value) for name in request.POST if name not in own for value in request.POST.getlist(name)],
        "required": required,
    }
    request.current_app = model_admin.admin_site.name
    return TemplateResponse(request, "admin/confirm.html", context)


def count_related(model: type[Model], by: str, those: QuerySet[Any] | None = None) -> Coalesce:
    """Return a subquery that counts the rows of a model that refer to the outer row by this foreign key."""
    rows = (model._default_manager.all() if those is None else those).filter(**{by: OuterRef("pk")})
    rows = rows.order_by().values(by)
    return Coalesce(Subquery(rows.annotate(number=Count("pk")).values("number")), 0)


def current_operator(request: HttpRequest) -> Owner:
    """Return the signed-in operator. The admin admits only operators."""
    return cast("Owner", request.user)


def is_uuid(text: str) -> bool:
    """Return whether the text is a UUID in any notation."""
    try:
        UUID(text)
    except ValueError:
        return False
    return True


# Owners

admin.site.unregister(Group)  # groups grant permissions, and operators have all permissions


@admin.register(Owner)
class OwnerAdmin(AuditedAdmin):
    """Owners. They sign in without a password. Two actions change ``vouched``, because each change is recorded.

    Every operator has all permissions and can make other owners operators.
    """

    list_display = ["email", "full_name", "vouched", "is_staff", "is_active", "accounts", "last_login", "date_joined"]
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

    def get_queryset(self, request: HttpRequest) -> QuerySet[Owner]:
        """Add the number of accounts, in the same query."""
        owners: QuerySet[Owner] = super().get_queryset(request)
        return owners.annotate(number_of_accounts=count_related(PulseUser.owners.through, "owner"))

    @admin.display(description="accounts", ordering="number_of_accounts")
    def accounts(self, owner: Owner) -> int:
        """Return the number of RabbitMQ accounts that the owner has."""
        return cast("int", owner.number_of_accounts)  # type: ignore[attr-defined]

    def view_on_site(self, owner: Owner) -> str:
        """Return the URL of the page with the vouching record."""
        return reverse("owner", args=[owner.uuid])

    def get_readonly_fields(self, request: HttpRequest, obj: Owner | None = None) -> list[str]:
        """Keep operators from locking themselves out. Another operator can do it, and undo it."""
        return [*self.readonly_fields, *(["is_staff", "is_active"] if obj == request.user else [])]

    def save_model(self, request: HttpRequest, obj: Owner, form: Any, change: bool) -> None:
        """Save only the changed fields, because another request may have changed ``vouched``."""
        deactivates = change and "is_active" in form.changed_data and not obj.is_active
        if deactivates:
            # The owner's tokens are no longer valid, so the next clean-up deletes the agents' queues.
            deactivation = ConfirmableChange(
                current_operator(request), "deactivate", [obj], {}, given_confirmation(request)
            )
            deactivation.require_confirmed(queue_effects.provider().of_agents(obj))
        if not change:
            obj.save()
        elif form.changed_data:
            obj.save(update_fields=form.changed_data)
        if deactivates:
            ownership.deactivated(obj, current_operator(request))

    def has_delete_permission(self, request: HttpRequest, obj: Owner | None = None) -> bool:
        """Refuse to delete owners of accounts (an account could lose its last owner), in bulk, and oneself."""
        return (
            obj is not None
            and obj != request.user
            and not obj.pulse_users.exists()
            and super().has_delete_permission(request, obj)
        )

    @admin.action(description="Approve access for the selected owners", permissions=["change"])
    def vouch_for(self, request: HttpRequest, queryset: QuerySet[Owner]) -> None:
        """Vouch for the selected owners."""
        apply_to_each(
            request,
            queryset,
            lambda owner: vouching.vouch(owner, current_operator(request), "in the admin"),
            "approved, and can use the broker",
        )

    @admin.action(description="Withdraw access of the selected owners", permissions=["change"])
    def withdraw(self, request: HttpRequest, queryset: QuerySet[Owner]) -> HttpResponse | None:
        """Withdraw the vouching of the selected owners; if requested, remove their accounts and tokens."""
        owners = list(chosen_rows(self, request, queryset))
        form = WithdrawForm(request.POST if is_confirmed(request) else None)
        required = None
        if form.is_valid() and form.cleaned_data["remove"] and len(owners) > 1:
            form.add_error("remove", "Accounts and tokens can be removed for one owner at a time. Select one owner.")
        if form.is_valid():
            try:
                self._withdraw(request, owners, **form.cleaned_data)
                return None
            except ConfirmationRequired as error:
                required = error
        question = Confirmation(
            "withdraw",
            "Withdraw the access of these owners",
            "They can't create accounts and tokens any more. Existing ones keep working, unless you remove them.",
            "Withdraw access",
            "Accounts",
        )
        return confirmation_page(
            self, request, question, owners, lambda one: Row(one.email, f"{one.number_of_accounts:,}"), form, required
        )

    def _withdraw(self, request: HttpRequest, owners: Sequence[Owner], *, remove: bool, reason: str) -> None:
        def withdraw(owner: Owner) -> None:
            withdrawal.withdraw(
                owner,
                current_operator(request),
                remove=remove,
                reason=reason or "in the admin",
                confirm=given_confirmation(request),
            )

        removed = "; Guardian removes the accounts that only they owned" if remove else ""
        apply_to_each(request, owners, withdraw, f"no longer able to create accounts and tokens{removed}")


@admin.register(Vouching)
class VouchingAdmin(DeletedWithOwnerAdmin):
    """Who vouched for whom, and when."""

    list_display = ["owner", "vouched", "by", "reason", "at"]
    list_filter = ["vouched", "at"]
    list_select_related = ["owner", "by"]
    search_fields = ["owner__email", "by__email", "reason"]


@admin.register(AuthToken)
class AuthTokenAdmin(DeletedWithOwnerAdmin):
    """Tokens. Owners create them; operators revoke them by an action.

    A token's primary key is its digest, which no page shows. So rows are identified by their UUID and have no page.
    """

    key = "uuid"
    list_display = ["name", "user", "scope", "created", "expiry", "last_used"]
    list_display_links = None
    list_filter = ["scope", "created", "expiry", "last_used"]
    list_select_related = ["user"]
    search_fields = ["name", "user__email"]
    actions = ["revoke"]

    def get_urls(self) -> list[Any]:
        """Return only URLs that don't contain the digest."""
        return [url for url in super().get_urls() if str(url.name).endswith(("_changelist", "_add"))]

    def action_checkbox(self, obj: AuthToken) -> SafeString:
        """Return the checkbox of a row, with its UUID as the value."""
        name = f"Select this token for an action - {obj}"
        box = forms.CheckboxInput({"class": "action-select", "aria-label": name}, lambda value: False)
        return box.render(ACTION_CHECKBOX_NAME, str(obj.uuid))

    def response_action(  # type: ignore[override]  # the stubs are a version ahead
        self, request: HttpRequest, queryset: QuerySet[AuthToken]
    ) -> HttpResponse | None:
        """Replace the selected UUIDs by primary keys."""
        posted = request.POST.copy()
        uuids = [text for text in posted.getlist(ACTION_CHECKBOX_NAME) if is_uuid(text)]
        posted.setlist(ACTION_CHECKBOX_NAME, list(queryset.filter(uuid__in=uuids).values_list("pk", flat=True)))
        request.POST = posted  # type: ignore[assignment]
        return super().response_action(request, queryset)

    def has_revoke_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may delete tokens."""
        return admin.ModelAdmin.has_delete_permission(self, request)

    @admin.action(description="Revoke the selected tokens", permissions=["revoke"])
    def revoke(self, request: HttpRequest, queryset: QuerySet[AuthToken]) -> HttpResponse | None:
        """Revoke the selected tokens, after confirmation."""
        found = list(chosen_rows(self, request, queryset).select_related("user"))
        required = None
        if is_confirmed(request):
            change = tokens.revocation_of(found, current_operator(request), given_confirmation(request))
            try:
                tokens.revoke_confirmed(found, change)
            except ConfirmationRequired as error:
                required = error
            else:
                report_results(request, [str(token) for token in found], "revoked", [])
                return None
        question = Confirmation(
            "revoke",
            "Revoke these tokens",
            "Programs that use them are refused at once. Agents that log in to the broker with them are disconnected.",
            "Revoke the tokens",
            "Owner",
        )
        return confirmation_page(
            self, request, question, found, lambda token: Row(str(token), token.user.email), required=required
        )


# Models of allauth. accounts/signing_in/signin.py writes their rows. The provider is configured in the settings, and
# its tokens are not stored.

admin.site.unregister([EmailAddress, SocialAccount, SocialApp, SocialToken])


@admin.register(EmailAddress)
class EmailAddressAdmin(DeletedWithOwnerAdmin):
    """Addresses that owners sign in with, and whether they are verified. Creating one manually would grant access."""

    list_display = ["email", "user", "verified"]
    list_filter = ["verified"]
    list_select_related = ["user"]
    search_fields = ["email", "user__email"]


@admin.register(SocialAccount)
class SocialAccountAdmin(DeletedWithOwnerAdmin):
    """Which OpenID Connect identity belongs to which owner. The claims are not shown."""

    list_display = ["uid", "user", "provider", "last_login", "date_joined"]
    list_filter = ["provider"]
    list_select_related = ["user"]
    search_fields = ["uid", "user__email"]
    fields = ["uid", "user", "provider", "last_login", "date_joined"]


# Accounts


@admin.register(PulseUser)
class PulseUserAdmin(AuditedAdmin):
    """RabbitMQ accounts. Changes on the broker and changes of owners are made on the account's own page."""

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
        """Fetch the owners of all accounts in one query."""
        accounts: QuerySet[PulseUser] = super().get_queryset(request)
        return accounts.prefetch_related("owners")

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
        """Return the URL of the account's page."""
        return reverse("pulse_user", args=[pulse_user.username])

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Refuse: this would create only a row, not an account on the broker."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: PulseUser | None = None) -> bool:
        """Refuse: this would leave the account on the broker."""
        return False

    def save_model(self, request: HttpRequest, obj: PulseUser, form: Any, change: bool) -> None:
        """Save only changed thresholds, because another request may be removing the account."""
        changed = {name: form.cleaned_data[name] for name in form.changed_data}
        warn, limit = (changed.get(name, UNCHANGED) for name in ("warn_length", "max_length"))
        try:
            pulse_users.set_thresholds(obj, warn, limit, current_operator(request), given_confirmation(request))
        except PulseUser.DoesNotExist as error:
            raise Http404(f"{obj} no longer exists") from error

    @admin.action(description="Set the thresholds of the selected accounts", permissions=["change"])
    def set_thresholds(self, request: HttpRequest, queryset: QuerySet[PulseUser]) -> HttpResponse | None:
        """Set the warning threshold and the deletion limit for queues without thresholds of their own."""
        accounts = list(chosen_rows(self, request, queryset))
        form = ThresholdsForm(request.POST if is_confirmed(request) else None)
        required = None
        if form.is_valid():
            warn, limit = form.cleaned_data["warn_length"], form.cleaned_data["max_length"]
            confirm = given_confirmation(request)
            try:
                missing = pulse_users.set_thresholds_of_all(accounts, warn, limit, current_operator(request), confirm)
            except ValidationError as error:
                form.add_error(None, error)
            except ConfirmationRequired as error:
                required = error
            else:
                succeeded = [str(account) for account in accounts if account not in missing]
                failed = [(str(account), PulseUser.DoesNotExist()) for account in missing]
                report_results(request, succeeded, "updated", failed)
                return None
        question = Confirmation(
            "set_thresholds",
            "Set the thresholds of these accounts",
            "They apply to the accounts' queues without limits of their own. Leave a field empty to use the default.",
            "Set thresholds",
            "Now: warning threshold / deletion limit",
            is_dangerous=False,
        )
        return confirmation_page(self, request, question, accounts, _with_thresholds, form, required)


def _with_thresholds(pulse_user: PulseUser) -> Row:
    warn = _effective(pulse_user.warn_length, settings.GUARDIAN_WARN_QUEUE_LENGTH)
    limit = _effective(pulse_user.max_length, settings.GUARDIAN_MAX_QUEUE_LENGTH)
    return Row(pulse_user.username, f"{warn} / {limit}")


def _effective(own: int | None, default: int) -> str:
    return f"{default:,} (default)" if own is None else f"{own:,}"


@admin.register(Invitation)
class InvitationAdmin(DeletedWithOwnerAdmin):
    """Invitations to own accounts. Owners and operators withdraw them on the account's page."""

    list_display = ["pulse_user", "invitee", "inviter", "created", "closed_at"]
    list_filter = [("closed_at", admin.EmptyFieldListFilter), "created"]
    list_select_related = ["pulse_user", "invitee", "inviter"]
    search_fields = ["pulse_user__username", "invitee__email", "inviter__email"]


@admin.register(NotificationAddress)
class NotificationAddressAdmin(RemovableAdmin):
    """Further notification addresses of accounts. They can't be added here, because each must be confirmed."""

    list_display = ["email", "pulse_user", "added_by", "created", "confirmed_at"]
    list_filter = [("confirmed_at", admin.EmptyFieldListFilter), "created"]
    list_select_related = ["pulse_user", "added_by"]
    search_fields = ["email", "pulse_user__username", "added_by__email"]

    def delete_model(self, request: HttpRequest, obj: NotificationAddress) -> None:
        """Remove the address."""
        addresses.remove_address(obj)


# The audit trail

admin.site.unregister(AuditEntry)

ORIGIN_KEYS = ("token", "task", "command")
"""Details of an entry that name the origin of the action."""


@admin.register(AuditEntry)
class AuditEntryAdmin(ReadOnlyAdmin):
    """The audit trail."""

    date_hierarchy = "timestamp"
    list_display = ["when", "who", "event", "kind", "thing", "details", "outcome"]
    list_filter = ["outcome", "event", ("content_type", admin.RelatedOnlyFieldListFilter)]
    list_select_related = ["content_type", "actor"]
    list_per_page = 50
    search_fields = ["actor_email", "object_repr", "event", "changes", "additional_data", "cid"]
    search_help_text = "An e-mail address, a name, an event, or the id of a request from the log."
    fields = ["when", "who", "event", "kind", "thing", "details", "outcome", "remote_addr", "cid"]

    def history_view(
        self, request: HttpRequest, object_id: str, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Redirect to the other entries about the same thing."""
        entry = self.get_object(request, object_id)
        if entry is None:
            raise Http404("There is no such entry.")
        return audit_trail_of(entry.content_type, entry.object_pk)

    @admin.display(ordering="timestamp")
    def when(self, entry: AuditEntry) -> str:
        """Return the time, to the second."""
        return f"{timezone.localtime(entry.timestamp):%F %T %Z}"

    @admin.display(ordering="actor_email")
    def who(self, entry: AuditEntry) -> str:
        """Return the owner and the token, if any; without an owner, the command or task."""
        details = entry.additional_data or {}
        if entry.actor_email:
            return f"{entry.actor_email} by the token {details['token']}" if "token" in details else entry.actor_email
        for what in ("command", "task"):
            if what in details:
                return f"the {what} {details[what]}"
        return "not signed in" if entry.remote_addr else "Guardian"

    @admin.display(ordering="content_type")
    def kind(self, entry: AuditEntry) -> str:
        """Return the kind of thing that was changed."""
        return entry.content_type.name if entry.content_type else ""

    @admin.display(ordering="object_repr")
    def thing(self, entry: AuditEntry) -> str:
        """Return the thing that was changed, with a link to its page if there is one."""
        name = readable(entry.object_repr)
        if entry.content_type is None or not entry.object_pk or entry.event == audit.DELETED:
            return name
        page = f"admin:{entry.content_type.app_label}_{entry.content_type.model}_change"
        try:
            return format_html('<a href="{}">{}</a>', reverse(page, args=[entry.object_pk]), name)
        except NoReverseMatch:
            return name

    @admin.display(description="details")
    def details(self, entry: AuditEntry) -> str:
        """Return the changed fields, before and after, and further details."""
        details = entry.additional_data or {}
        lines = [
            *_changes(entry),
            *(f"{name}: {_format_value(value)}" for name, value in details.items() if name not in ORIGIN_KEYS),
        ]
        return format_html_join(SafeString("<br>"), "{}", ((readable(line),) for line in lines))


def _changes(entry: AuditEntry) -> list[str]:
    model = entry.content_type.model_class() if entry.content_type else None
    lines = []
    for name, change in sorted((entry.changes or {}).items()):
        try:
            field = str(model._meta.get_field(name).verbose_name) if model else name  # type: ignore[union-attr]
        except (FieldDoesNotExist, AttributeError):
            field = name
        if isinstance(change, dict):
            verb = {"add": "with", "delete": "without"}[change["operation"]]
            lines.append(f"{verb} the {field} {', '.join(change['objects'])}")
        elif entry.event == audit.CHANGED:
            lines.append(f"{field}: {_format_value(change[0])} → {_format_value(change[1])}")
        elif (value := change[0 if entry.event == audit.DELETED else 1]) not in ("", "None", "False"):
            lines.append(f"{field}: {value}")
    return lines


def _format_value(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{number} {name}" for name, number in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "none" if value in (None, "", "None") else str(value)
