"""The pages of API tokens."""

from uuid import UUID

from django.conf import settings
from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.core.exceptions import ValidationError
from django.http import HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.utils import timezone

from accounts.access import scopes, tokens, vouching
from accounts.models import AuthToken
from accounts.pages import forms
from accounts.pages.common import OwnersRequest, add_error, page_of, page_with_forms
from accounts.pages.confirmation import confirm_page, typed_confirmation
from core import limits
from core.confirmation import ConfirmationRequired


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
            wanted = (form.cleaned_data[name] for name in ("name", "days", "scope", "pulse_user"))
            token, key = tokens.create_token(request.user, *wanted)
            path = "agent-identities" if scopes.why_refused(token, "queues/", "GET") else "queues"
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
        add_error(form, error, "name")
    return _tokens_response(request, form)


def _tokens_response(
    request: OwnersRequest, form: forms.TokenForm, trouble: str = "", status: int = 200
) -> HttpResponse:
    return render(
        request,
        "accounts/tokens.html",
        {
            "page": page_of(request, AuthToken.objects.filter(user=request.user).select_related("pulse_user")),
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
