"""Sign-in by a code that is sent to the e-mail address.

This package adapts django-allauth. An owner has one address, ``Owner.email``; allauth's rows only record whether it is
verified. Every way to sign in verifies it. The first sign-in creates the owner. Nobody has a password.
"""

import logging
from smtplib import SMTPRecipientsRefused
from typing import Any

from allauth.account.adapter import DefaultAccountAdapter
from allauth.account.fields import EmailField
from allauth.account.forms import ConfirmLoginCodeForm, RequestLoginCodeForm
from allauth.account.utils import get_next_redirect_url, passthrough_next_redirect_url
from allauth.socialaccount.models import SocialAccount
from django import forms
from django.conf import settings
from django.contrib import messages
from django.contrib.auth import REDIRECT_FIELD_NAME
from django.core.mail import EmailMessage
from django.http import HttpRequest, HttpResponse, HttpResponseBase, HttpResponseRedirect
from django.shortcuts import render
from django.urls import reverse
from django.utils.decorators import method_decorator
from django.utils.http import urlencode
from django.views.decorators.cache import never_cache

from accounts import allauth_private
from accounts.access import vouching
from accounts.models import INVALID_ADDRESS, MAX_ADDRESS_LENGTH, Owner, comparable
from accounts.signing_in import code_limits
from accounts.signing_in.owners import get_or_create_owner, mark_address_verified, valid_address
from core import time_zones
from core.limits import RateLimitExceeded
from core.mails import AUTOMATIC_HEADERS

log = logging.getLogger(__name__)
PROVIDER_ID = "oidc"
# In the session: the provider's claims, until a code has verified an address that the provider did not verify.
PENDING_CLAIMS_KEY = "signin_waiting"


class MailUnavailable(Exception):
    """The mail server is unreachable or can't accept the mail now. Nothing was sent."""


class MailRefused(Exception):
    """The mail server refuses mails to this address."""


class AddressForm(RequestLoginCodeForm):
    email = EmailField(
        label="E-mail address",
        label_suffix="",
        max_length=MAX_ADDRESS_LENGTH,
        error_messages={"required": INVALID_ADDRESS, "invalid": INVALID_ADDRESS},
        widget=forms.EmailInput(attrs={"autocomplete": "email", "autofocus": True}),
    )

    def clean_email(self) -> str:
        return valid_address(self.cleaned_data["email"])


class CodeForm(ConfirmLoginCodeForm):
    code = forms.CharField(
        label="Code",
        label_suffix="",
        max_length=40,
        help_text="Eight letters, in upper or lower case, with or without the dash.",
        widget=forms.TextInput(attrs={"autocomplete": "one-time-code", "spellcheck": "false", "autofocus": True}),
    )


def send_code(request: HttpRequest, address: str) -> None:
    """Send a code to this address and expect it in this session. Earlier codes become invalid.

    The response doesn't reveal whether an owner exists. A deactivated owner gets a mail that says so. Raises
    RateLimitExceeded for this client or mailbox, MailRefused or MailUnavailable.
    """
    code_limits.count_code(request, address)
    owner = get_or_create_owner(address)
    try:
        if not owner.is_active:
            AccountAdapter(request).send_mail("account/email/closed", address, {})
        allauth_private.start_code(request, owner if owner.is_active else None, address)
    except SMTPRecipientsRefused as error:
        if any(code < 500 for code, _ in error.recipients.values()):
            raise MailUnavailable from error
        raise MailRefused from error
    except OSError as error:  # includes the exceptions of smtplib
        log.error("Could not send a sign-in code: %s", error)
        raise MailUnavailable from error


@method_decorator(never_cache, name="dispatch")
class SignInView(allauth_private.AskForAddressView):
    form_class = AddressForm
    template_name = "signin/signin.html"

    def form_valid(self, form: AddressForm) -> HttpResponse:
        self.request.session.pop(PENDING_CLAIMS_KEY, None)
        try:
            send_code(self.request, form.cleaned_data["email"])
        except RateLimitExceeded as error:
            return too_many_codes(self.request, error)
        except MailRefused:
            form.add_error("email", "Our mail server can't send to this address. Check it, or use another one.")
            return self.form_invalid(form)
        except MailUnavailable:
            return self.render_to_response(self.get_context_data(form=form, mail_unavailable=True), status=503)
        url = passthrough_next_redirect_url(self.request, reverse("account_confirm_login_code"), REDIRECT_FIELD_NAME)
        return HttpResponseRedirect(url)


@method_decorator(never_cache, name="dispatch")
class CodeView(allauth_private.EnterCodeView):
    form_class = CodeForm
    template_name = "signin/code.html"

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        """Restart if no valid code is pending."""
        if not request.user.is_authenticated and not allauth_private.expects_code(request):
            return self.restart()
        return super().dispatch(request, *args, **kwargs)

    def restart(self) -> HttpResponse:
        messages.error(
            self.request,
            "There is no valid code for this browser. A code works once, for ten minutes, in the browser in which you "
            "requested it. Request a new one.",
        )
        return HttpResponseRedirect(
            passthrough_next_redirect_url(self.request, reverse("account_login"), REDIRECT_FIELD_NAME)
        )

    def post(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        if request.POST.get("action") != "resend":
            return super().post(request, *args, **kwargs)
        try:
            send_code(request, self.address)
        except RateLimitExceeded as error:
            return too_many_codes(request, error)
        except (MailUnavailable, MailRefused):
            page = self.get_context_data(form=CodeForm(code=""), mail_unavailable=True)
            return self.render_to_response(page, status=503)
        messages.success(request, "We sent a new code. The previous one no longer works.")
        return HttpResponseRedirect(request.get_full_path())

    def form_valid(self, form: CodeForm) -> HttpResponse:
        """Sign in, unless the owner no longer exists or has another address now, which the code does not prove."""
        if self.user is None or comparable(self.user.email) != comparable(self.address):
            self.abort()
            return self.restart()
        return super().form_valid(form)


def too_many_codes(request: HttpRequest, error: RateLimitExceeded) -> HttpResponse:
    response = render(request, "signin/too-many.html", {"minutes": -(-error.seconds // 60)}, status=429)
    response["Retry-After"] = str(error.seconds)
    return response


class AccountAdapter(DefaultAccountAdapter):
    error_messages = {
        **DefaultAccountAdapter.error_messages,
        "incorrect_code": "This is not the code that we sent last. Compare it with the mail, or request a new one.",
        "too_many_login_attempts": "You entered wrong codes too often, so the code is invalid now. Request a new one.",
    }

    def get_client_ip(self, request: HttpRequest) -> str:
        """Return the client's address for rate limits, or "" if it is unknown.

        It is unknown if the server listens on a Unix socket and no proxy sends a header. Then all clients share one
        rate limit; allauth's own method would refuse them all.
        """
        return allauth_private.client_address(request)

    def send_mail(self, template_prefix: str, email: str, context: dict[str, Any]) -> None:
        """Send a mail with GUARDIAN_BASE_URL instead of the request's host."""
        super().send_mail(template_prefix, email, {**context, "address": settings.GUARDIAN_BASE_URL})

    def render_mail(
        self,
        template_prefix: str,
        email: str | list[str],
        context: dict[str, Any],
        headers: dict[str, str] | None = None,
    ) -> EmailMessage:
        """Return the mail with the headers of all mails. allauth builds each of its mails here."""
        return super().render_mail(template_prefix, email, context, {**AUTOMATIC_HEADERS, **(headers or {})})

    def respond_user_inactive(self, request: HttpRequest, user: Any) -> HttpResponse:
        return render(request, "signin/closed.html", status=403)

    def login(self, request: HttpRequest, user: Any) -> None:
        """Start a session. This may clear the previous session, so save the method and the pending claims first.

        The first sign-in sets the owner's time zone to the browser's.
        """
        self.method = allauth_private.last_method(request, user)
        self.pending_claims = request.session.pop(PENDING_CLAIMS_KEY, None)
        if user.last_login is None and user.time_zone == "UTC":
            user.time_zone = time_zones.of_browser(request)
            user.save(update_fields=["time_zone"])
        super().login(request, user)

    def post_login(self, request: HttpRequest, user: Any, **facts: Any) -> HttpResponse:
        """Record the verified address and apply the vouching rules."""
        pending = self.pending_claims
        login = (facts["signal_kwargs"] or {}).get("sociallogin")
        address, groups = None, None
        if self.method == "code":
            mark_address_verified(user)
            address = comparable(user.email)
            if pending is not None and pending["email"] == address:
                connect_social_account(user, pending["uid"], pending["name"])
                groups = pending["groups"]
        elif login is not None:
            address, groups = login.claims.verified_address, login.claims.groups
        vouching.apply_rules(user, address=address, groups=groups)
        return super().post_login(request, user, **facts)


def connect_social_account(owner: Owner, uid: str, full_name: str) -> None:
    """Connect the provider's identifier to this owner. Copy the full name if the owner has none."""
    SocialAccount.objects.get_or_create(provider=PROVIDER_ID, uid=uid, defaults={"user": owner})
    if full_name and not owner.full_name:
        owner.full_name = full_name
        owner.save(update_fields=["full_name"])


@never_cache
def admin_login(request: HttpRequest) -> HttpResponse:
    """Redirect anonymous visitors of the admin to the sign-in page, and refuse owners who are no operators."""
    if not request.user.is_authenticated:
        wanted = get_next_redirect_url(request) or reverse("admin:index")
        return HttpResponseRedirect(f"{reverse('account_login')}?{urlencode({REDIRECT_FIELD_NAME: wanted})}")
    if not request.user.is_staff:
        return render(request, "signin/operators-only.html", status=403)
    return HttpResponseRedirect(get_next_redirect_url(request) or reverse("admin:index"))
