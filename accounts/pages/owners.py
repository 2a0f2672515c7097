"""The pages of owners and their access, for operators."""

from uuid import UUID

from django.conf import settings
from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.core.exceptions import PermissionDenied, ValidationError
from django.db.models import Count
from django.http import HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse

from accounts.access import vouching
from accounts.models import AuthToken, Owner, Vouching, owners_matching
from accounts.pages import forms
from accounts.pages.common import OwnersRequest, add_error, form_data, page_of, page_with_forms, search_text
from accounts.pages.confirmation import confirm_page, fate_of_messages, typed_confirmation
from accounts.pages.pulse_users import RECORDS_SHOWN
from accounts.pulse_users import withdrawal
from core.confirmation import ConfirmationRequired

REQUESTS_SHOWN = 100


@login_required
@page_with_forms
def vouching_page(request: OwnersRequest) -> HttpResponse:
    """Show whether the visitor is vouched for, and accept requests to be vouched for."""
    form = forms.VouchRequestForm(form_data(request))
    if request.method == "POST" and form.is_valid():
        try:
            vouching.request_vouching(request.user, form.cleaned_data["reason"])
        except ValidationError as error:
            add_error(form, error, "reason")
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
    form = forms.VouchForm(form_data(request))
    if request.method == "POST" and form.is_valid():
        email = form.cleaned_data["email"]
        try:
            vouching.vouch_for_address(email, request.user, form.cleaned_data["reason"])
        except ValidationError as error:
            add_error(form, error, "reason")
        else:
            condition = "if they have signed in with this address, and no operator withdrew it"
            text = f"{email} has access to RabbitMQ now"
            messages.success(request, f"{text}." if request.user.is_staff else f"{text}, {condition}.")
            return redirect("owners")
    search = search_text(request)
    known = vouching.listed_owners()
    owners = known.annotate(number_of_pulse_users=Count("pulse_users")).order_by("email")
    if search:
        owners = owners.filter(owners_matching(search))
    page = page_of(request, owners if request.user.is_staff else owners.none())
    records = Vouching.objects.filter(owner__in=list(page)).select_related("by").order_by("at", "id")
    last = {record.owner_id: record for record in records}
    return render(
        request,
        "accounts/owners.html",
        {
            "asking": vouching.open_requests()[:REQUESTS_SHOWN],
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
    form = forms.WithdrawForm(form_data(request))
    if request.method == "POST" and form.is_valid():
        remove, reason = form.cleaned_data["remove"], form.cleaned_data["reason"]
        typed, confirm = typed_confirmation(request, owner.email)
        is_declined = bool(owner.vouch_request) and not remove
        try:
            withdrawal.withdraw(owner, request.user, remove=remove, reason=reason, confirm=confirm)
        except ValidationError as error:
            add_error(form, error, "reason")
        except ConfirmationRequired as required:
            return confirm_page(
                request,
                required,
                typed,
                title="Withdraw access, and remove Pulse users and tokens?",
                about=f"Guardian deletes the queues of Pulse users now. {fate_of_messages()} "
                "The next clean-up deletes the queues of agents, without an archive.",
                back=reverse("owner", args=[owner.uuid]),
            )
        else:
            kept = "Tokens and Pulse users are removed" if remove else "Existing tokens and Pulse users keep working"
            outcome = f"{owner} can't create anything on RabbitMQ any more. {kept}."
            messages.success(request, f"The request of {owner} is declined." if is_declined else outcome)
            return redirect("owner", owner.uuid)
    shared = withdrawal.shared_pulse_users(owner).count()
    return render(
        request,
        "accounts/owner.html",
        {
            "owner": owner,
            "records": owner.vouchings.select_related("by")[:RECORDS_SHOWN],
            "owned_alone": owner.pulse_users.count() - shared,
            "shared": shared,
            "number_of_tokens": AuthToken.objects.filter(user=owner).count(),
            "form": form,
        },
    )
