import logging
from collections.abc import Callable
from functools import wraps
from typing import Any
from urllib.parse import quote
from uuid import UUID

from django.conf import settings
from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.contrib.auth.views import redirect_to_login
from django.core.exceptions import PermissionDenied, ValidationError
from django.core.paginator import Page, Paginator
from django.core.signing import BadSignature, SignatureExpired
from django.db.models import Count, QuerySet
from django.http import HttpRequest, HttpResponse, QueryDict
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import require_http_methods, require_safe

from accounts import queue_effects
from accounts.access import quotas, scopes, tokens, vouching
from accounts.models import AuthToken, Invitation, NotificationAddress, Owner, PulseUser, Vouching, owners_matching
from accounts.pages import forms
from accounts.pages.confirmation import confirm_page, fate_of_messages, typed_confirmation
from accounts.pulse_users import addresses, ownership, pulse_users, queue_counts, removal, withdrawal
from core import connecting, limits
from core.confirmation import ConfirmationRequired
from rabbit.management import BrokerError, Connection, NotOnBroker, Refused
from rabbit.names import InvalidUserName, exchange_prefix, queue_prefix, readable
from rabbit.permissions import in_words

logger = logging.getLogger(__name__)

PER_PAGE = 50
RECORDS_SHOWN = 50
REQUESTS_SHOWN = 100
CONNECTIONS_SHOWN = 50

page_with_forms = require_http_methods(["GET", "HEAD", "POST"])


class OwnersRequest(HttpRequest):
    """A request of a signed-in owner."""

    user: Owner


# RabbitMQ accounts


@login_required
@page_with_forms
def pulse_users_page(request: OwnersRequest) -> HttpResponse:
    """List the visitor's accounts (all for operators) and create accounts. Operators also adopt accounts."""
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
    accounts = PulseUser.objects.seen_by(request.user)
    accounts = accounts.prefetch_related("owners")
    search = _search(request)
    if search:
        accounts = accounts.search(search)
    if adopt_form is None and request.user.is_staff and "adopt" in request.GET:
        try:
            adopt_form = forms.AdoptForm(adoptable=pulse_users.adoptable())
        except BrokerError as error:
            trouble, status = _broker_trouble(request, error, "The accounts to adopt can't be listed."), 503
    page = _page(request, accounts)
    numbers = queue_counts.of([account.pk for account in page])
    for account in page:
        account.number_of_queues = numbers.get(account.pk, 0)
    return render(
        request,
        "accounts/pulse_users.html",
        {
            "page": page,
            "search": search,
            "invitations": Invitation.objects.received_by(request.user),
            "may_make": vouching.may_use_broker(request.user),
            "form": form or _new_account_form(request),
            "adopt_form": adopt_form,
            "trouble": trouble,
        },
        status=status,
    )


def _new_account_form(request: OwnersRequest, data: QueryDict | None = None) -> forms.PulseUserForm:
    return (forms.OperatorsPulseUserForm if request.user.is_staff else forms.PulseUserForm)(data)


def _create(request: OwnersRequest) -> HttpResponse:
    form = _new_account_form(request, request.POST)
    try:
        vouching.require_vouched(request.user)
        if form.is_valid():
            own_password = form.cleaned_data.get("password", "")
            pulse_user, password = pulse_users.create_pulse_user(
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
    except (InvalidUserName, pulse_users.NameReserved, pulse_users.NameTaken) as error:
        form.add_error("username", str(error))
    except ValidationError as error:
        _add_error(form, error, "password")
    except BrokerError as error:
        trouble = _broker_trouble(request, error, "Nothing was created. Your input is below, except for a password.")
        return _pulse_users_response(request, form=form, trouble=trouble, status=503)
    return _pulse_users_response(request, form=form)


def _adopt(request: OwnersRequest) -> HttpResponse:
    pulse_users.require_operator(request.user)  # only operators may see which accounts can be adopted
    try:
        form = forms.AdoptForm(request.POST, adoptable=pulse_users.adoptable())
    except BrokerError as error:
        return _pulse_users_response(
            request, trouble=_broker_trouble(request, error, "Nothing was adopted."), status=503
        )
    if form.is_valid():
        try:
            pulse_user = pulse_users.adopt_pulse_user(
                form.cleaned_data["username"], form.cleaned_data["owners"], request.user
            )
        except (InvalidUserName, pulse_users.NameTaken, pulse_users.CannotAdopt) as error:
            form.add_error("username", str(error))
        except (ownership.LastOwner, vouching.NotVouched) as error:
            form.add_error("owners", str(error))
        except NotOnBroker:
            form.add_error("username", "RabbitMQ has no such account any more. Choose another.")
        except BrokerError as error:
            trouble = _broker_trouble(request, error, "Nothing was adopted.")
            return _pulse_users_response(request, adopt_form=form, trouble=trouble, status=503)
        else:
            messages.success(request, f"{pulse_user} has owners now. Its password and permissions did not change.")
            return redirect("pulse_user", pulse_user.username)
    return _pulse_users_response(request, adopt_form=form)


@login_required
@require_safe
def pulse_user_page(request: OwnersRequest, username: str) -> HttpResponse:
    """Show one account to its owners and operators, with forms to change it."""
    return _pulse_user_response(request, get_object_or_404(PulseUser.objects.seen_by(request.user), username=username))


def _pulse_user_response(
    request: OwnersRequest,
    pulse_user: PulseUser,
    owner_form: forms.OwnerForm | None = None,
    address_form: forms.AddressForm | None = None,
    thresholds_form: forms.ThresholdsForm | None = None,
    password_form: forms.PasswordForm | None = None,
    trouble: str = "",
    status: int = 200,
) -> HttpResponse:
    permissions: dict[str, list[str]] = {}
    live = None
    if pulse_user.ready and pulse_user.removing_since is None and not trouble:
        try:
            permissions = {
                vhost: in_words(allowed, pulse_user.username)
                for vhost, allowed in pulse_users.permissions_of(pulse_user).items()
            }
            live = _connections_shown(pulse_users.connections_of(pulse_user))
        except NotOnBroker:
            trouble = (
                "RabbitMQ has no such account any more. Set a new password to create it again, or delete it here, too."
            )
        except BrokerError as error:
            trouble = _broker_trouble(request, error, "The permissions can't be shown.")
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
            "owner_form": owner_form or forms.OwnerForm(),
            "address_form": address_form or forms.AddressForm(),
            "thresholds_form": thresholds_form or forms.ThresholdsForm(initial=current),
            "archive_days": settings.GUARDIAN_ARCHIVE_DAYS,
            "archives_form": forms.ArchivesForm(initial={"keeps_archives": pulse_user.keeps_archives}),
            "password_form": password_form
            or forms.PasswordForm(initial={"close_connections": pulse_user.password_exposed_at is not None}),
        },
        status=status,
    )


def _connections_shown(connections: list[Connection]) -> dict[str, Any]:
    """Return these connections as the page shows them, each with its consumers; None: they are unknown."""
    shown = sorted(connections, key=lambda connection: connection.name)[:CONNECTIONS_SHOWN]
    consumers = pulse_users.consumers_of(shown)
    return {
        "shown": [(connection, None if consumers is None else consumers[connection.name]) for connection in shown],
        "more": len(connections) - len(shown),
        "with_times": any(connection.connected_at for connection in shown),
    }


def _connecting(username: str) -> dict[str, Any]:
    """Return the context that shows how this account publishes to an exchange and consumes a queue of its own."""
    return connecting.context(
        username,
        settings.GUARDIAN_PULSE_VHOST,
        f"{queue_prefix(username)}example",
        f"{exchange_prefix(username)}example",
    )


def pulse_user_action(view: Callable[[OwnersRequest, PulseUser], HttpResponse]) -> Callable[..., HttpResponse]:
    """Decorate a view that changes an account by POST.

    Visitors who must sign in first, and those who open the form's URL by GET, are redirected to the account's page.
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
    """Change the password of an account, and show it if it was generated."""
    form = forms.PasswordForm(request.POST)
    if not form.is_valid():
        return _pulse_user_response(request, pulse_user, password_form=form)
    own_password = form.cleaned_data.get("password", "")
    close = form.cleaned_data["close_connections"]
    try:
        password = pulse_users.rotate_password(
            pulse_user, own_password or None, close_connections=close, by=request.user
        )
    except ValidationError as error:
        _add_error(form, error, "password")
        return _pulse_user_response(request, pulse_user, password_form=form)
    except BrokerError as error:
        trouble = _broker_trouble(request, error, "We don't know whether the password was changed. Change it again.")
        return _pulse_user_response(request, pulse_user, trouble=trouble, status=503)
    return _password_page(request, pulse_user, "" if own_password else password, closed=close)


@pulse_user_action
def pulse_user_connections(request: OwnersRequest, pulse_user: PulseUser) -> HttpResponse:
    """Close a live connection of an account."""
    try:
        pulse_users.close_connection(pulse_user, request.POST.get("close", ""), request.user)
    except NotOnBroker:
        messages.warning(request, "The connection was closed already.")
    except BrokerError as error:
        trouble = _broker_trouble(request, error, "We don't know whether the connection was closed.")
        return _pulse_user_response(request, pulse_user, trouble=trouble, status=503)
    else:
        messages.success(request, "The connection is closed. Its program may connect again at once.")
    return _redirect_to(request, pulse_user)


@pulse_user_action
def pulse_user_owners(request: OwnersRequest, pulse_user: PulseUser) -> HttpResponse:
    """Invite an owner by e-mail address, or withdraw an invitation. Operators assign owners."""
    if "withdraw" in request.POST:
        for invitation in pulse_user.invitations.open().filter(uuid__in=_uuids(request.POST["withdraw"])):
            ownership.withdraw_invitation(pulse_user, invitation.invitee, request.user)
        messages.success(request, "The invitation is withdrawn.")
        return _redirect_to(request, pulse_user)
    form = forms.OwnerForm(request.POST)
    if form.is_valid():
        try:
            [owner] = ownership.find_owners([form.cleaned_data["email"]])
            ownership.add_owner(pulse_user, owner, request.user)
        except ValidationError as error:
            _add_error(form, error, "email")
        except vouching.NotVouched as error:
            form.add_error("email", str(error))
        else:
            if pulse_user.owners.filter(pk=owner.pk).exists():
                messages.success(request, f"{owner} is an owner of {pulse_user} now.")
            else:
                messages.success(request, f"{owner} is invited, and becomes an owner of {pulse_user} after accepting.")
            return _redirect_to(request, pulse_user)
    return _pulse_user_response(request, pulse_user, owner_form=form)


@login_required
@page_with_forms
def pulse_user_owner_remove(request: OwnersRequest, username: str, uuid: UUID) -> HttpResponse:
    """Remove an owner, or leave, after confirmation. Offer a new password: the former owner may know the old one."""
    pulse_user = get_object_or_404(PulseUser.objects.seen_by(request.user), username=username)
    owner = pulse_user.owners.filter(uuid=uuid).first()
    if owner is None:
        messages.error(request, "This person is not an owner of the account any more.")
        return redirect("pulse_user", username)
    is_leaving = owner == request.user
    form = forms.RemoveOwnerForm(_form_data(request))
    if request.method != "POST" or not form.is_valid():
        context = {"pulse_user": pulse_user, "owner": owner, "is_leaving": is_leaving, "form": form}
        return render(request, "accounts/owner_remove.html", context)
    try:
        ownership.remove_owner(pulse_user, owner, request.user)
        messages.success(request, f"{owner} is no longer an owner of {pulse_user}.")
        if form.cleaned_data["new_password"] and not is_leaving:
            return _change_password(request, pulse_user)
    except (ownership.LastOwner, ownership.NotAnOwner) as error:
        messages.error(request, str(error))
    except PulseUser.DoesNotExist:
        messages.error(request, f"{username} no longer exists, or you no longer own it.")
    return _redirect_to(request, pulse_user)


def _change_password(request: OwnersRequest, pulse_user: PulseUser) -> HttpResponse:
    """Set a generated password, close the connections, and show the password."""
    try:
        password = pulse_users.rotate_password(pulse_user, close_connections=True, by=request.user)
    except ValidationError as error:
        trouble = " ".join(error.messages)
    except BrokerError as error:
        trouble = _broker_trouble(request, error, "We don't know whether the password was changed. Change it below.")
    else:
        return _password_page(request, pulse_user, password, closed=True)
    return _pulse_user_response(request, PulseUser.objects.get(pk=pulse_user.pk), trouble=trouble, status=503)


@pulse_user_action
def pulse_user_addresses(request: OwnersRequest, pulse_user: PulseUser) -> HttpResponse:
    """Add or remove a notification address of an account, or send another request to confirm it."""
    for what, do, done in (
        ("remove", addresses.remove_address, "{} gets no more notifications about {}."),
        ("again", addresses.resend_confirmation, "We sent {} another mail to confirm the notifications about {}."),
    ):
        if what not in request.POST:
            continue
        address = pulse_user.notification_addresses.filter(uuid__in=_uuids(request.POST[what])).first()
        if address is None:
            messages.error(request, "This address no longer exists.")
            return _redirect_to(request, pulse_user)
        try:
            do(address)
        except ValidationError as error:
            messages.error(request, " ".join(error.messages))
        else:
            messages.success(request, done.format(address.email, pulse_user))
        return _redirect_to(request, pulse_user)
    form = forms.AddressForm(request.POST)
    if form.is_valid():
        try:
            address = addresses.add_address(pulse_user, form.cleaned_data["email"], request.user)
        except ValidationError as error:
            _add_error(form, error, "email")
        else:
            messages.success(request, f"We sent {address.email} a mail with a link to confirm the address.")
            return _redirect_to(request, pulse_user)
    return _pulse_user_response(request, pulse_user, address_form=form)


@pulse_user_action
def pulse_user_thresholds(request: OwnersRequest, pulse_user: PulseUser) -> HttpResponse:
    """Set the thresholds of an account's queues."""
    form = forms.ThresholdsForm(request.POST)
    if form.is_valid():
        typed, confirm = typed_confirmation(request, pulse_user.username)
        warn, limit = form.cleaned_data["warn_length"], form.cleaned_data["max_length"]
        try:
            pulse_users.set_thresholds(pulse_user, warn, limit, request.user, confirm)
        except ValidationError as error:
            _add_error(form, error, "max_length")
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
            return _redirect_to(request, pulse_user)
    return _pulse_user_response(request, pulse_user, thresholds_form=form)


@pulse_user_action
def pulse_user_archives(request: OwnersRequest, pulse_user: PulseUser) -> HttpResponse:
    """Set whether the messages of an account's queues are archived."""
    form = forms.ArchivesForm(request.POST)
    form.is_valid()  # any value is
    pulse_users.set_keeps_archives(pulse_user, form.cleaned_data["keeps_archives"])
    archives = "archives" if pulse_user.keeps_archives else "no longer archives"
    messages.success(request, f"Guardian {archives} the messages of its queues before it deletes or purges them.")
    return _redirect_to(request, pulse_user)


def _redirect_to(request: OwnersRequest, pulse_user: PulseUser) -> HttpResponse:
    """Redirect to the account's page, or to the list if the visitor can't see the account any more."""
    if PulseUser.objects.seen_by(request.user).filter(pk=pulse_user.pk).exists():
        return redirect("pulse_user", pulse_user.username)
    return redirect("pulse_users")


@login_required
@page_with_forms
def pulse_user_delete(request: OwnersRequest, username: str) -> HttpResponse:
    """Show what is deleted with an account, and delete it once its name is typed."""
    pulse_user = get_object_or_404(PulseUser.objects.seen_by(request.user), username=username)
    if pulse_user.removing_since is not None:
        return redirect("pulse_user", pulse_user.username)
    form = forms.DeleteForm(_form_data(request), username=pulse_user.username)
    belongings, trouble = None, ""
    effect = queue_effects.provider().of_removal([pulse_user])
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
        trouble = _broker_trouble(request, error, "Nothing was deleted.")
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
            "number_of_queues": queue_counts.of([pulse_user.pk]).get(pulse_user.pk, 0) if trouble else None,
            "form": form,
            "trouble": trouble,
        },
        status=503 if trouble else 200,
    )


def _password_page(
    request: OwnersRequest, pulse_user: PulseUser, password: str, *, made: bool = False, closed: bool = False
) -> HttpResponse:
    """Return the page that shows how to connect, and a generated password; "" if the visitor chose the password."""
    response = render(
        request,
        "accounts/password.html",
        {
            "pulse_user": pulse_user,
            "password": password,
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


@page_with_forms
def confirm_address(request: HttpRequest, token: str) -> HttpResponse:
    """Let the recipient of a mail confirm a notification address, without signing in."""
    try:
        if request.method == "POST":
            address = addresses.confirm_address(token)
        else:
            address = addresses.address_for_token(token)
    except SignatureExpired:
        return render(request, "accounts/confirm_address.html", {"expired": True}, status=410)
    except (BadSignature, NotificationAddress.DoesNotExist):
        return render(request, "accounts/confirm_address.html", status=404)
    return render(request, "accounts/confirm_address.html", {"address": address})


# Vouching


@login_required
@page_with_forms
def vouching_page(request: OwnersRequest) -> HttpResponse:
    """Show whether the visitor is vouched for, and accept requests to be vouched for."""
    form = forms.VouchRequestForm(_form_data(request))
    if request.method == "POST" and form.is_valid():
        try:
            vouching.request_vouching(request.user, form.cleaned_data["reason"])
        except vouching.AlreadyRequested as error:
            form.add_error("reason", str(error))
        except ValidationError as error:
            _add_error(form, error, "reason")
        else:
            messages.success(request, "You requested access. You get a mail when it is approved.")
            return redirect("vouching")
    return render(
        request,
        "accounts/vouching.html",
        {
            "last": request.user.vouchings.select_related("by").first(),
            "domains": settings.GUARDIAN_VOUCHED_DOMAINS,
            "groups": settings.OIDC_VOUCHED_GROUPS if settings.OIDC_ISSUER else [],
            "owners_may_vouch": settings.GUARDIAN_OWNERS_MAY_VOUCH,
            "form": form,
        },
    )


@login_required
@page_with_forms
def owners_page(request: OwnersRequest) -> HttpResponse:
    """List requests to be vouched for (all owners for operators), and vouch for an owner by address."""
    if not vouching.may_vouch(request.user):
        raise PermissionDenied("Only owners who may approve access see the requests for it.")
    form = forms.VouchForm(_form_data(request))
    if request.method == "POST" and form.is_valid():
        owner = vouching.find_owner(form.cleaned_data["email"])
        if owner is None:
            where = settings.GUARDIAN_BASE_URL
            form.add_error(
                "email", f"Nobody has signed in with this address yet. Ask the person to sign in first, at {where}."
            )
        else:
            try:
                vouching.vouch(owner, request.user, form.cleaned_data["reason"])
            except ValidationError as error:
                _add_error(form, error, "reason")
            else:
                messages.success(request, f"{owner} has access to RabbitMQ now.")
                return redirect("owners")
    search = _search(request)
    known = vouching.listed_owners()
    owners = known.annotate(number_of_accounts=Count("pulse_users")).order_by("email")
    if search:
        owners = owners.filter(owners_matching(search))
    page = _page(request, owners if request.user.is_staff else owners.none())
    records = Vouching.objects.filter(owner__in=list(page)).select_related("by").order_by("at", "id")
    last = {record.owner_id: record for record in records}
    asking = Owner.objects.filter(vouch_requested_at__isnull=False, vouched=False, is_active=True)
    return render(
        request,
        "accounts/owners.html",
        {
            "asking": asking.order_by("vouch_requested_at")[:REQUESTS_SHOWN],
            "page": page,
            "rows": [(owner, last.get(owner.pk)) for owner in page],
            "search": search,
            "form": form,
        },
    )


@login_required
@page_with_forms
def owner_page(request: OwnersRequest, uuid: UUID) -> HttpResponse:
    """Show operators the vouching record of one owner, and withdraw the vouching."""
    if not request.user.is_staff:
        raise PermissionDenied("Only operators see who approved access, and can withdraw it.")
    owner = get_object_or_404(Owner, uuid=uuid)
    form = forms.WithdrawForm(_form_data(request))
    if request.method == "POST" and form.is_valid():
        remove, reason = form.cleaned_data["remove"], form.cleaned_data["reason"]
        typed, confirm = typed_confirmation(request, owner.email)
        try:
            withdrawal.withdraw(owner, request.user, remove=remove, reason=reason, confirm=confirm)
        except ValidationError as error:
            _add_error(form, error, "reason")
        except ConfirmationRequired as required:
            return confirm_page(
                request,
                required,
                typed,
                title="Withdraw access, and remove accounts and tokens?",
                about=f"Guardian deletes the queues of accounts now. {fate_of_messages()} "
                "The next clean-up deletes the queues of agents, without an archive.",
                back=reverse("owner", args=[owner.uuid]),
            )
        else:
            kept = "Tokens and accounts are removed" if remove else "Existing tokens and accounts keep working"
            messages.success(request, f"{owner} can't create anything on RabbitMQ any more. {kept}.")
            return redirect("owner", owner.uuid)
    accounts = PulseUser.objects.annotate(number_of_owners=Count("owners")).filter(pk__in=owner.pulse_users.all())
    return render(
        request,
        "accounts/owner.html",
        {
            "owner": owner,
            "records": owner.vouchings.select_related("by")[:RECORDS_SHOWN],
            "owned_alone": accounts.filter(number_of_owners=1).count(),
            "shared": accounts.filter(number_of_owners__gt=1).count(),
            "number_of_tokens": AuthToken.objects.filter(user=owner).count(),
            "form": form,
        },
    )


# Tokens


@login_required
@page_with_forms
def tokens_page(request: OwnersRequest) -> HttpResponse:
    """List the visitor's tokens, and create tokens. A new token is shown once."""
    if request.method != "POST":
        return _tokens_response(request, forms.TokenForm())
    form = forms.TokenForm(request.POST)
    try:
        vouching.require_vouched(request.user)
        if form.is_valid():
            wanted = (form.cleaned_data[name] for name in ("name", "days", "scope"))
            token, key = tokens.create_token(request.user, *wanted)
            path = "queues" if scopes.allows_all(token) else "agent-identities"
            address = f"{settings.GUARDIAN_BASE_URL}/api/{path}/"
            made = {"token": token, "key": key, "address": address}
            response = render(request, "accounts/token.html", made, status=201)
            response["Cache-Control"] = "no-store"
            return response
    except vouching.NotVouched as error:
        return _tokens_response(request, form, trouble=str(error), status=403)
    except limits.RateLimitExceeded as error:
        response = _tokens_response(request, form, trouble=str(error), status=429)
        response["Retry-After"] = str(error.seconds)
        return response
    except ValidationError as error:
        _add_error(form, error, "name")
    return _tokens_response(request, form)


def _tokens_response(
    request: OwnersRequest, form: forms.TokenForm, trouble: str = "", status: int = 200
) -> HttpResponse:
    return render(
        request,
        "accounts/tokens.html",
        {
            "page": _page(request, AuthToken.objects.filter(user=request.user)),
            "now": timezone.now(),
            "may_make": vouching.may_use_broker(request.user),
            "form": form,
            "trouble": trouble,
        },
        status=status,
    )


@login_required
@page_with_forms
def token_revoke(request: OwnersRequest, uuid: UUID) -> HttpResponse:
    """Revoke a token of the visitor, after confirmation."""
    token = get_object_or_404(AuthToken, user=request.user, uuid=uuid)
    if request.method == "POST":
        typed, confirm = typed_confirmation(request, token.name or request.user.email)
        try:
            tokens.revoke_confirmed([token], tokens.revocation_of([token], request.user, confirm))
        except ConfirmationRequired as required:
            return confirm_page(
                request,
                required,
                typed,
                title="Revoke your last valid token?",
                about="Without a valid token, the next clean-up deletes what your agents registered. "
                "This can't be undone.",
                back=reverse("tokens"),
            )
        messages.success(request, "The token is revoked. Programs that use it are refused.")
        return redirect("tokens")
    return render(request, "accounts/token_revoke.html", {"token": token, "now": timezone.now()})


# Helpers


def _page(request: OwnersRequest, rows: "QuerySet[Any]") -> "Page[Any]":
    """Return the requested page of a list, or the nearest existing one."""
    return Paginator(rows, PER_PAGE).get_page(request.GET.get("page"))


def _search(request: OwnersRequest) -> str:
    """Return the search text of a list, or "" if there is none or it is invalid."""
    form = forms.SearchForm(request.GET)
    return str(form.cleaned_data["search"]) if form.is_valid() else ""


def _form_data(request: OwnersRequest) -> QueryDict | None:
    """Return the submitted data, or None for a GET request."""
    return request.POST if request.method == "POST" else None


def _uuids(text: str) -> list[UUID]:
    """Return the UUID in the text as a list, empty if the text is no UUID."""
    try:
        return [UUID(text)]
    except ValueError:
        return []


def _add_error(form: forms.Form, error: ValidationError, field: str) -> None:
    """Add the errors to the fields they name, or to ``field`` if the form has no such field.

    That an owner has reached a quota is an error of the whole form.
    """
    if isinstance(error, quotas.QuotaReached):
        form.add_error(None, error)
        return
    if not hasattr(error, "error_dict"):
        form.add_error(field, error)
        return
    for name, errors in error.error_dict.items():
        form.add_error(name if name in form.fields else field, errors)


def _broker_trouble(request: OwnersRequest, error: BrokerError, outcome: str) -> str:
    """Return the message about a failed request to the broker. Only operators see the reason."""
    logger.warning("%s %s: %s", request.method, request.path, error)
    if isinstance(error, Refused):
        text = "RabbitMQ refused Guardian's request. Contact an operator."
    else:
        text = "RabbitMQ does not answer. Try again in a minute."
    return f"{text} {outcome}" + (f" For operators: {error}." if request.user.is_staff else "")
