"""The pages on which a Pulse user's owners and notification addresses change."""

from uuid import UUID

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.core.exceptions import ValidationError
from django.core.signing import BadSignature, SignatureExpired
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render

from accounts.models import NotificationAddress, PulseUser
from accounts.pages import forms
from accounts.pages.common import OwnersRequest, add_error, form_data, page_with_forms, uuids_in
from accounts.pages.pulse_users import change_password, pulse_user_action, pulse_user_response, redirect_to
from accounts.pulse_users import addresses, ownership
from core.refusals import Refusal


@pulse_user_action
def pulse_user_owners(request: OwnersRequest, pulse_user: PulseUser) -> HttpResponse:
    """Invite an owner by e-mail address, or withdraw an invitation. Operators assign owners."""
    if "withdraw" in request.POST:
        for invitation in pulse_user.invitations.open().filter(uuid__in=uuids_in(request.POST["withdraw"])):
            ownership.withdraw_invitation(pulse_user, invitation.invitee, request.user)
        messages.success(request, "The invitation is withdrawn.")
        return redirect_to(request, pulse_user)
    form = forms.OwnerForm(request.POST)
    if form.is_valid():
        try:
            [owner] = ownership.find_owners([form.cleaned_data["email"]])
            ownership.add_owner(pulse_user, owner, request.user)
        except ValidationError as error:
            add_error(form, error, "email")
        else:
            if pulse_user.owners.filter(pk=owner.pk).exists():
                messages.success(request, f"{owner} is an owner of {pulse_user} now.")
            else:
                messages.success(request, f"{owner} is invited, and becomes an owner of {pulse_user} after accepting.")
            return redirect_to(request, pulse_user)
    return pulse_user_response(request, pulse_user, owner_form=form)


@login_required
@page_with_forms
def pulse_user_owner_remove(request: OwnersRequest, username: str, uuid: UUID) -> HttpResponse:
    """Remove an owner, or leave, after confirmation. Offer a new password: the former owner may know the old one."""
    pulse_user = get_object_or_404(PulseUser.objects.seen_by(request.user), username=username)
    owner = pulse_user.owners.filter(uuid=uuid).first()
    if owner is None:
        messages.error(request, "This person is not an owner of the Pulse user any more.")
        return redirect("pulse_user", username)
    is_leaving = owner == request.user
    form = forms.RemoveOwnerForm(form_data(request))
    if request.method != "POST" or not form.is_valid():
        context = {"pulse_user": pulse_user, "owner": owner, "is_leaving": is_leaving, "form": form}
        return render(request, "accounts/owner_remove.html", context)
    try:
        ownership.remove_owner(pulse_user, owner, request.user)
        messages.success(request, f"{owner} is no longer an owner of {pulse_user}.")
        if form.cleaned_data["new_password"] and not is_leaving:
            return change_password(request, pulse_user)
    except Refusal as error:
        messages.error(request, str(error))
    except PulseUser.DoesNotExist:
        messages.error(request, f"{username} no longer exists, or you no longer own it.")
    return redirect_to(request, pulse_user)


@pulse_user_action
def pulse_user_addresses(request: OwnersRequest, pulse_user: PulseUser) -> HttpResponse:
    """Add or remove a notification address of a Pulse user, or send another request to confirm it."""
    for what, do, done in (
        ("remove", addresses.remove_address, "{} gets no more notifications about {}."),
        ("again", addresses.resend_confirmation, "We sent {} another mail to confirm the notifications about {}."),
    ):
        if what not in request.POST:
            continue
        address = pulse_user.notification_addresses.filter(uuid__in=uuids_in(request.POST[what])).first()
        if address is None:
            messages.error(request, "This address no longer exists.")
            return redirect_to(request, pulse_user)
        try:
            do(address)
        except ValidationError as error:
            messages.error(request, " ".join(error.messages))
        else:
            messages.success(request, done.format(address.email, pulse_user))
        return redirect_to(request, pulse_user)
    form = forms.AddressForm(request.POST)
    if form.is_valid():
        try:
            address = addresses.add_address(pulse_user, form.cleaned_data["email"], request.user)
        except ValidationError as error:
            add_error(form, error, "email")
        else:
            messages.success(request, f"We sent {address.email} a mail with a link to confirm the address.")
            return redirect_to(request, pulse_user)
    return pulse_user_response(request, pulse_user, address_form=form)


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
