"""The pages of Pulse users: list, creation, password, connections, thresholds, removal."""

import contextlib
import logging
from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any
from urllib.parse import quote

from django.conf import settings
from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.contrib.auth.views import redirect_to_login
from django.core.exceptions import ValidationError
from django.http import HttpResponse, QueryDict
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.views.decorators.http import require_safe

from accounts import queue_effects
from accounts.access import vouching
from accounts.models import Invitation, PulseUser
from accounts.pages import forms
from accounts.pages.common import (
    OwnersRequest,
    add_error,
    broker_trouble,
    form_data,
    page_of,
    page_with_forms,
    search_text,
)
from accounts.pages.confirmation import confirm_page, fate_of_messages, typed_confirmation
from accounts.pulse_users import creation, passwords, removal, thresholds, validation
from core import connecting
from core.confirmation import ConfirmationRequired
from core.refusals import Refusal
from rabbit.entities import Connection
from rabbit.errors import BrokerError, NotOnBroker
from rabbit.names import exchange_prefix, queue_prefix, readable
from rabbit.permissions import in_words

logger = logging.getLogger(__name__)
RECORDS_SHOWN = 50
CONNECTIONS_SHOWN = 50


@login_required
@page_with_forms
def pulse_users_page(request: OwnersRequest) -> HttpResponse:
    """List the visitor's Pulse users (all for operators) and create Pulse users. Operators also adopt Pulse users."""
    if request.method != "POST":
        return _pulse_users_response(request)
    if "adopt" in request.POST:
        return _adopt(request)
    return _create(request)


def _pulse_users_response(
    request: OwnersRequest,
    form: forms.PulseUserForm | None = None,
    adopt_form: forms.AdoptForm | None = None,
    trouble: str = "",
    status: int = 200,
) -> HttpResponse:
    pulse_users = PulseUser.objects.seen_by(request.user)
    pulse_users = pulse_users.prefetch_related("owners")
    search = search_text(request)
    if search:
        pulse_users = pulse_users.search(search)
    if adopt_form is None and request.user.is_staff and "adopt" in request.GET:
        try:
            adopt_form = forms.AdoptForm(adoptable=creation.adoptable())
        except BrokerError as error:
            trouble, status = broker_trouble(request, error, "The RabbitMQ users to adopt can't be listed."), 503
    page = page_of(request, pulse_users)
    numbers = queue_effects.count([pulse_user.pk for pulse_user in page])
    for pulse_user in page:
        pulse_user.number_of_queues = numbers.get(pulse_user.pk, 0)
    return render(
        request,
        "accounts/pulse_users.html",
        {
            "page": page,
            "search": search,
            "invitations": Invitation.objects.received_by(request.user),
            "may_make": vouching.may_use_broker(request.user),
            "form": form or _new_pulse_user_form(request),
            "adopt_form": adopt_form,
            "trouble": trouble,
        },
        status=status,
    )


def _new_pulse_user_form(request: OwnersRequest, data: QueryDict | None = None) -> forms.PulseUserForm:
    return (forms.OperatorsPulseUserForm if request.user.is_staff else forms.PulseUserForm)(data)


def _create(request: OwnersRequest) -> HttpResponse:
    form = _new_pulse_user_form(request, request.POST)
    try:
        vouching.require_vouched(request.user)
        if form.is_valid():
            own_password = form.cleaned_data.get("password", "")
            pulse_user, password = creation.create_pulse_user(
                form.cleaned_data["username"],
                [request.user, *(owner for owner in form.cleaned_data["owners"] if owner != request.user)],
                own_password or None,
                form.cleaned_data["notification_emails"],
                by=request.user,
                adopt_namespace=form.cleaned_data.get("adopt_namespace", False),
            )
            return _password_page(request, pulse_user, "" if own_password else password, made=True)
    except vouching.NotVouched as error:
        return _pulse_users_response(request, trouble=str(error), status=403)
    except ValidationError as error:
        add_error(form, error, "password")
    except BrokerError as error:
        trouble = broker_trouble(request, error, "Nothing was created. Your input is below, except for a password.")
        return _pulse_users_response(request, form=form, trouble=trouble, status=503)
    return _pulse_users_response(request, form=form)


def _adopt(request: OwnersRequest) -> HttpResponse:
    validation.require_operator(request.user)  # only operators may see which Pulse users can be adopted
    try:
        form = forms.AdoptForm(request.POST, adoptable=creation.adoptable())
    except BrokerError as error:
        return _pulse_users_response(
            request, trouble=broker_trouble(request, error, "Nothing was adopted."), status=503
        )
    if form.is_valid():
        try:
            pulse_user = creation.adopt_pulse_user(
                form.cleaned_data["username"], form.cleaned_data["owners"], request.user
            )
        except Refusal as error:
            add_error(form, error, "owners")
        except NotOnBroker:
            form.add_error("username", "RabbitMQ has no such user any more. Choose another.")
        except BrokerError as error:
            trouble = broker_trouble(request, error, "Nothing was adopted.")
            return _pulse_users_response(request, adopt_form=form, trouble=trouble, status=503)
        else:
            messages.success(request, f"{pulse_user} has owners now. Its password and permissions did not change.")
            return redirect("pulse_user", pulse_user.username)
    return _pulse_users_response(request, adopt_form=form)


@login_required
@require_safe
def pulse_user_page(request: OwnersRequest, username: str) -> HttpResponse:
    """Show one Pulse user to its owners and operators, with forms to change it."""
    return pulse_user_response(request, get_object_or_404(PulseUser.objects.seen_by(request.user), username=username))


def pulse_user_response(
    request: OwnersRequest, pulse_user: PulseUser, trouble: str = "", status: int = 200, **given: forms.Form
) -> HttpResponse:
    """Return the page of a Pulse user, with the ``given`` forms, such as ``owner_form``, in place of empty ones."""
    permissions: dict[str, list[str]] = {}
    live = None
    if pulse_user.ready and pulse_user.removing_since is None and not trouble:
        try:
            permissions = {
                vhost: in_words(allowed, pulse_user.username)
                for vhost, allowed in validation.permissions_of(pulse_user).items()
            }
            live = _connections_shown(passwords.connections_of(pulse_user))
        except NotOnBroker:
            trouble = "RabbitMQ no longer has this user. Set a new password to create it again, or delete it here, too."
        except BrokerError as error:
            trouble = broker_trouble(request, error, "The permissions can't be shown.")
    password_form = given.get("password_form") or forms.PasswordForm()
    if live and not live["total"] and not pulse_user.password_exposed_at:
        del password_form.fields["close_connections"]
    current = {"warn_length": pulse_user.warn_length, "max_length": pulse_user.max_length}
    return render(
        request,
        "accounts/pulse_user.html",
        {
            "pulse_user": pulse_user,
            **_connecting(pulse_user.username),
            "queues_api": connecting.curl(f"/api/queues/?pulse_user={quote(pulse_user.username, safe='')}"),
            "owners": list(pulse_user.owners.all()),
            "invitations": pulse_user.invitations.open().select_related("invitee", "inviter"),
            "addresses": pulse_user.notification_addresses.all(),
            "permissions": permissions,
            "connections": live,
            "trouble": trouble,
            "may_set_thresholds": request.user.is_staff or settings.GUARDIAN_OWNERS_MAX_QUEUE_LENGTH,
            "largest_max_length": 0 if request.user.is_staff else settings.GUARDIAN_OWNERS_MAX_QUEUE_LENGTH,
            "default_warn_length": settings.GUARDIAN_WARN_QUEUE_LENGTH,
            "default_max_length": settings.GUARDIAN_MAX_QUEUE_LENGTH,
            "owner_form": forms.OwnerForm(),
            "address_form": forms.AddressForm(),
            "thresholds_form": forms.ThresholdsForm(initial=current),
            "hold_off_form": forms.HoldOffForm(initial={"hold_off_minutes": pulse_user.hold_off_minutes}),
            "archive_days": settings.GUARDIAN_ARCHIVE_DAYS,
            "archives_form": forms.ArchivesForm(initial={"keeps_archives": pulse_user.keeps_archives}),
            "password_form": password_form,
            **given,
        },
        status=status,
    )


def _connections_shown(connections: list[Connection]) -> dict[str, Any]:
    """Return these connections as the page shows them, each with its consumers, or None if they are unknown."""
    shown = sorted(connections, key=lambda connection: connection.name)[:CONNECTIONS_SHOWN]
    consumers = passwords.consumers_of(shown)
    return {
        "shown": [(connection, None if consumers is None else consumers[connection.name]) for connection in shown],
        "more": len(connections) - len(shown),
        "addresses": sorted(Counter(connection.client_address for connection in connections).items()),
        "total": len(connections),
        "with_times": any(connection.connected_at for connection in shown),
    }


def _connecting(username: str) -> dict[str, Any]:
    """Return the context that shows how this Pulse user publishes to an exchange and consumes a queue of its own."""
    return connecting.context(
        username,
        settings.GUARDIAN_PULSE_VHOST,
        f"{queue_prefix(username)}example",
        f"{exchange_prefix(username)}example",
    )


def pulse_user_action(view: Callable[[OwnersRequest, PulseUser], HttpResponse]) -> Callable[..., HttpResponse]:
    """Decorate a view that changes a Pulse user by POST.

    Visitors who must sign in first, and those who open the form's URL by GET, are redirected to the Pulse user's page.
    """

    @page_with_forms
    @wraps(view)
    def checked(request: OwnersRequest, username: str) -> HttpResponse:
        if not request.user.is_authenticated:
            return redirect_to_login(reverse("pulse_user", args=[username]))
        pulse_user = get_object_or_404(PulseUser.objects.seen_by(request.user), username=username)
        if request.method != "POST":
            return redirect("pulse_user", username)
        try:
            return view(request, pulse_user)
        except PulseUser.DoesNotExist:
            messages.error(request, f"{username} no longer exists, or you no longer own it.")
            return redirect("pulse_users")

    return checked


@pulse_user_action
def pulse_user_password(request: OwnersRequest, pulse_user: PulseUser) -> HttpResponse:
    """Change the password of a Pulse user, and show it if it was generated. Or show a new one that is set later."""
    form = forms.PasswordForm(request.POST)
    if not form.is_valid():
        return pulse_user_response(request, pulse_user, password_form=form)
    own_password, prepared = form.cleaned_data.get("password", ""), request.POST.get("prepared", "")
    close = form.cleaned_data["close_connections"]
    try:
        if "later" in request.POST:
            if own_password:
                raise Refusal("Leave this empty to get a new password that is set later.", "password")
            return _prepared_page(request, pulse_user, *passwords.prepare_password(pulse_user, request.user))
        password = passwords.rotate_password(
            pulse_user, own_password or None, prepared=prepared, close_connections=close, by=request.user
        )
    except ValidationError as error:
        add_error(form, error, "password")
        return pulse_user_response(request, pulse_user, password_form=form)
    except BrokerError as error:
        trouble = broker_trouble(request, error, "We don't know whether the password was changed. Change it again.")
        if prepared:
            password = passwords.prepared_password(pulse_user, request.user, prepared)
            return _prepared_page(request, pulse_user, password, prepared, trouble)
        return pulse_user_response(request, pulse_user, trouble=trouble, status=503)
    shown = "" if own_password or prepared else password
    return _password_page(request, pulse_user, shown, was_shown=bool(prepared), closed=close)


def _prepared_page(
    request: OwnersRequest, pulse_user: PulseUser, password: str, prepared: str, trouble: str = ""
) -> HttpResponse:
    """Return the page that shows a new password before it is set, and sets it once its owner says so."""
    connections = None
    with contextlib.suppress(BrokerError):
        connections = _connections_shown(passwords.connections_of(pulse_user))
    context = {
        "pulse_user": pulse_user,
        "password": password,
        "connections": connections,
        "prepared": prepared,
        "form": forms.PasswordForm(),
        "trouble": trouble,
    }
    response = render(request, "accounts/prepared_password.html", context, status=503 if trouble else 200)
    response["Cache-Control"] = "no-store"
    return response


@pulse_user_action
def pulse_user_connections(request: OwnersRequest, pulse_user: PulseUser) -> HttpResponse:
    try:
        passwords.close_connection(pulse_user, request.POST.get("close", ""), request.user)
    except NotOnBroker:
        messages.warning(request, "The connection was closed already.")
    except BrokerError as error:
        trouble = broker_trouble(request, error, "We don't know whether the connection was closed.")
        return pulse_user_response(request, pulse_user, trouble=trouble, status=503)
    else:
        messages.success(request, "The connection is closed. Its program may connect again at once.")
    return redirect_to(request, pulse_user)


def change_password(request: OwnersRequest, pulse_user: PulseUser) -> HttpResponse:
    """Set a generated password, close the connections, and show the password."""
    try:
        password = passwords.rotate_password(pulse_user, close_connections=True, by=request.user)
    except ValidationError as error:
        trouble = " ".join(error.messages)
    except BrokerError as error:
        trouble = broker_trouble(request, error, "We don't know whether the password was changed. Change it below.")
    else:
        return _password_page(request, pulse_user, password, closed=True)
    return pulse_user_response(request, PulseUser.objects.get(pk=pulse_user.pk), trouble=trouble, status=503)


@pulse_user_action
def pulse_user_thresholds(request: OwnersRequest, pulse_user: PulseUser) -> HttpResponse:
    form = forms.ThresholdsForm(request.POST)
    if form.is_valid():
        typed, confirm = typed_confirmation(request, pulse_user.username)
        warn, limit = form.cleaned_data["warn_length"], form.cleaned_data["max_length"]
        try:
            thresholds.set_thresholds(pulse_user, warn, limit, request.user, confirm)
        except ValidationError as error:
            add_error(form, error, "max_length")
        except ConfirmationRequired as required:
            return confirm_page(
                request,
                required,
                typed,
                title="Set these thresholds?",
                about="With these thresholds, the next pass deletes the queues, unless the brake blocks that. "
                + fate_of_messages(),
                back=reverse("pulse_user", args=[pulse_user.username]),
            )
        else:
            messages.success(request, "The thresholds are set for all its queues without thresholds of their own.")
            return redirect_to(request, pulse_user)
    return pulse_user_response(request, pulse_user, thresholds_form=form)


@pulse_user_action
def pulse_user_hold_off(request: OwnersRequest, pulse_user: PulseUser) -> HttpResponse:
    form = forms.HoldOffForm(request.POST)
    if form.is_valid():
        thresholds.set_options(pulse_user, **form.cleaned_data)
        messages.success(request, "Saved. It applies to the warnings of all owners, and to no other notifications.")
    else:
        messages.error(request, f"Enter 0 to {thresholds.MAX_HOLD_OFF_MINUTES} minutes.")
    return redirect_to(request, pulse_user)


@pulse_user_action
def pulse_user_archives(request: OwnersRequest, pulse_user: PulseUser) -> HttpResponse:
    form = forms.ArchivesForm(request.POST)
    form.is_valid()  # any value is
    thresholds.set_options(pulse_user, **form.cleaned_data)
    archives = "archives" if pulse_user.keeps_archives else "no longer archives"
    messages.success(request, f"Guardian {archives} the messages of its queues before it deletes or purges them.")
    return redirect_to(request, pulse_user)


def redirect_to(request: OwnersRequest, pulse_user: PulseUser) -> HttpResponse:
    """Redirect to the Pulse user's page, or to the list if the visitor can't see the Pulse user any more."""
    if PulseUser.objects.seen_by(request.user).filter(pk=pulse_user.pk).exists():
        return redirect("pulse_user", pulse_user.username)
    return redirect("pulse_users")


@login_required
@page_with_forms
def pulse_user_delete(request: OwnersRequest, username: str) -> HttpResponse:
    """Show what is deleted with a Pulse user, and delete it once its name is typed."""
    pulse_user = get_object_or_404(PulseUser.objects.seen_by(request.user), username=username)
    if pulse_user.removing_since is not None:
        return redirect("pulse_user", pulse_user.username)
    form = forms.NameForm(pulse_user.username, form_data(request))
    belongings, trouble = None, ""
    effect = queue_effects.of_removal([pulse_user])
    question = queue_effects.removal_of([pulse_user], request.user).question(effect)
    try:
        if request.method == "POST" and form.is_valid():
            change = queue_effects.removal_of([pulse_user], request.user, request.POST.get("confirm", ""))
            try:
                removal.remove_pulse_user(pulse_user, change, request.user)
            except ConfirmationRequired as required:
                question = required
            except PulseUser.DoesNotExist:
                messages.error(request, f"{username} is no longer yours. Nothing was deleted.")
                return redirect("pulse_users")
            else:
                messages.success(request, f"{pulse_user} was deleted, with its queues and exchanges.")
                return redirect("pulse_users")
        belongings = removal.belongings_of(pulse_user)
    except (BrokerError, removal.RemovalPending) as error:
        left = PulseUser.objects.filter(pk=pulse_user.pk).first()
        if isinstance(error, removal.RemovalPending) or left is None or left.removing_since is not None:
            messages.warning(request, f"{pulse_user} is being deleted. Guardian completes the deletion.")
            return redirect("pulse_users")
        trouble = broker_trouble(request, error, "Nothing was deleted.")
    return render(
        request,
        "accounts/pulse_user_delete.html",
        {
            "pulse_user": pulse_user,
            "owners": pulse_user.owners.all(),
            "queues": [readable(name) for name in belongings.queues] if belongings else [],
            "exchanges": [readable(name) for name in belongings.exchanges] if belongings else [],
            "archives": bool(settings.GUARDIAN_ARCHIVE_DAYS) and pulse_user.keeps_archives,
            "question": question,
            "number_of_queues": queue_effects.count([pulse_user.pk]).get(pulse_user.pk, 0) if trouble else None,
            "form": form,
            "trouble": trouble,
        },
        status=503 if trouble else 200,
    )


def _password_page(
    request: OwnersRequest,
    pulse_user: PulseUser,
    password: str,
    *,
    made: bool = False,
    was_shown: bool = False,
    closed: bool = False,
) -> HttpResponse:
    """Return the page that shows how to connect, and a generated password; "" if the visitor has it already."""
    response = render(
        request,
        "accounts/password.html",
        {
            "pulse_user": pulse_user,
            "password": password,
            "was_shown": was_shown,
            "made": made,
            "closed": closed,
            **_connecting(pulse_user.username),
            "queue_prefix": queue_prefix(pulse_user.username),
            "exchange_prefix": exchange_prefix(pulse_user.username),
        },
        status=201 if made else 200,
    )
    response["Cache-Control"] = "no-store"
    return response
