"""Sign-in: by a code sent to the e-mail address, by OpenID Connect, or by a link that an operator created.

This module adapts django-allauth. An owner has one address, ``Owner.email``; allauth's rows only record whether it is
verified. Every way to sign in verifies it. The first sign-in creates the owner. Nobody has a password.
"""

import hashlib
import logging
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from smtplib import SMTPRecipientsRefused
from typing import Any

from allauth.account.adapter import DefaultAccountAdapter
from allauth.account.fields import EmailField
from allauth.account.forms import ConfirmLoginCodeForm, RequestLoginCodeForm
from allauth.account.models import EmailAddress
from allauth.account.utils import get_next_redirect_url, passthrough_next_redirect_url, perform_login
from allauth.account.views import LogoutView
from allauth.core.exceptions import ImmediateHttpResponse
from allauth.socialaccount.adapter import DefaultSocialAccountAdapter
from allauth.socialaccount.adapter import get_adapter as social_adapter
from allauth.socialaccount.models import SocialAccount, SocialToken
from allauth.socialaccount.providers.base.constants import AuthError, AuthProcess
from allauth.socialaccount.providers.oauth2.client import OAuth2Error
from allauth.socialaccount.providers.oauth2.views import OAuth2CallbackView
from allauth.socialaccount.providers.openid_connect.views import OpenIDConnectOAuth2Adapter
from auditlog.context import disable_auditlog
from django import forms
from django.conf import settings
from django.contrib import messages
from django.contrib.auth import REDIRECT_FIELD_NAME
from django.core.exceptions import ImproperlyConfigured, ValidationError
from django.db import IntegrityError, transaction
from django.db.models import Q
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase, HttpResponseRedirect
from django.shortcuts import render
from django.urls import reverse
from django.utils import timezone
from django.utils.decorators import method_decorator
from django.utils.http import urlencode
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods
from requests import RequestException, Session

from accounts import allauth_private, audit
from accounts.access import vouching
from accounts.models import INVALID_ADDRESS, MAX_ADDRESS_LENGTH, Owner, SignInLink, check_address, normalize_address
from accounts.signing_in import code_limits
from core import time_zones
from core.certificates import SystemTrust
from core.limits import RateLimitExceeded

log = logging.getLogger(__name__)

LINK_LIFETIME = timedelta(minutes=10)
VISITOR_LIFETIME = timedelta(days=1)
PROVIDER_ID = "oidc"
# In the session: the provider's claims, until a code has verified an address that the provider did not verify.
PENDING_CLAIMS_KEY = "signin_waiting"


class MailUnavailable(Exception):
    """The mail server is unreachable or can't accept the mail now. Nothing was sent."""


class MailRefused(Exception):
    """The mail server refuses mails to this address."""


class InvalidProviderResponse(OAuth2Error):
    """The provider's response is not valid OpenID Connect."""


# Owners and their addresses


def valid_address(text: str) -> str:
    """Return this e-mail address in normal form.

    Raises:
        ValidationError: the address is invalid.
    """
    address = normalize_address(text)
    check_address(address)
    return address


def get_or_create_owner(address: str) -> Owner:
    """Return the owner with this address. A new owner is not vouched for, and the address is not verified."""
    owner = Owner.objects.filter(email=address).first()
    if owner is None:
        try:
            with transaction.atomic():
                owner = Owner.objects.create_user(address)
        except (IntegrityError, ValidationError):
            owner = Owner.objects.filter(email=address).first()  # another request created it
            if owner is None:
                raise
    _email_address_row(owner)
    return owner


def mark_address_verified(owner: Owner) -> None:
    """Record that the owner's address is verified."""
    row = _email_address_row(owner)
    if not row.verified:
        row.verified = True
        row.save(update_fields=["verified"])


def _email_address_row(owner: Owner) -> EmailAddress:
    """Return allauth's row of the owner's address. Delete its rows of previous addresses and previous owners."""
    stale = Q(user=owner) & ~Q(email=owner.email) | Q(email=owner.email) & ~Q(user=owner)
    EmailAddress.objects.filter(stale).delete()
    row: EmailAddress
    row, _ = EmailAddress.objects.get_or_create(user=owner, email=owner.email, defaults={"primary": True})
    return row


def prune_visitors() -> int:
    """Delete owners who never verified their address, and expired links and sessions. Return the number of owners.

    An owner is deleted a day after the first sign-in attempt. Owners with a vouching record, an account or a token
    stay. So do owners that an operator created manually: allauth has a row only of addresses typed on the sign-in page.
    """
    now = timezone.now()
    visitors = Owner.objects.filter(
        last_login=None,
        date_joined__lt=now - VISITOR_LIFETIME,
        is_active=True,
        is_staff=False,
        vouched=False,
        vouchings=None,
        pulse_users=None,
        auth_token_set=None,
        emailaddress__isnull=False,
    ).exclude(emailaddress__verified=True)
    removed = 0
    while keys := list(visitors.values_list("pk", flat=True)[:500]):  # keeps transactions short
        # Filtered again: an owner may have verified the address, or been vouched for, since the first query.
        with disable_auditlog():  # the creation of these owners was not audited, either
            removed += visitors.filter(pk__in=keys).delete()[1].get(Owner._meta.label, 0)
    SignInLink.objects.filter(expires_at__lte=now).delete()
    import_module(settings.SESSION_ENGINE).SessionStore.clear_expired()
    return removed


# By a code


class AddressForm(RequestLoginCodeForm):
    """The e-mail address to send a code to."""

    email = EmailField(
        label="E-mail address",
        label_suffix="",
        max_length=MAX_ADDRESS_LENGTH,
        error_messages={"required": INVALID_ADDRESS, "invalid": INVALID_ADDRESS},
        widget=forms.EmailInput(attrs={"autocomplete": "email", "autofocus": True}),
    )

    def clean_email(self) -> str:
        """Return the address in normal form."""
        return valid_address(self.cleaned_data["email"])


class CodeForm(ConfirmLoginCodeForm):
    """The code from the mail."""

    code = forms.CharField(
        label="Code",
        label_suffix="",
        max_length=40,
        help_text="Eight letters, in upper or lower case, with or without the dash.",
        widget=forms.TextInput(attrs={"autocomplete": "one-time-code", "spellcheck": "false", "autofocus": True}),
    )


def send_code(request: HttpRequest, address: str) -> None:
    """Send a code to this address and expect it in this session. Earlier codes become invalid.

    The response doesn't reveal whether an owner exists. A deactivated owner gets a mail that says so.

    Raises:
        RateLimitExceeded: too many codes were requested by this client or for this mailbox.
        MailRefused, MailUnavailable: nothing was sent.
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
    """Ask for an address and send a code to it."""

    form_class = AddressForm
    template_name = "signin/signin.html"

    def form_valid(self, form: AddressForm) -> HttpResponse:
        """Send the code and redirect to the page for entering it."""
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
    """Accept the code, or send another one."""

    form_class = CodeForm
    template_name = "signin/code.html"

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        """Restart if no valid code is pending."""
        if not request.user.is_authenticated and not allauth_private.expects_code(request):
            return self.restart()
        return super().dispatch(request, *args, **kwargs)

    def restart(self) -> HttpResponse:
        """Redirect to the page for entering the address."""
        messages.error(
            self.request,
            "There is no valid code for this browser. A code works once, for ten minutes, in the browser in which you "
            "requested it. Request a new one.",
        )
        return HttpResponseRedirect(
            passthrough_next_redirect_url(self.request, reverse("account_login"), REDIRECT_FIELD_NAME)
        )

    def post(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        """Check the code, or send another one."""
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
        """Sign in, unless the owner no longer exists."""
        if self.user is None:
            self.abort()
            return self.restart()
        return super().form_valid(form)


def too_many_codes(request: HttpRequest, error: RateLimitExceeded) -> HttpResponse:
    """Return the page that says that too many codes were requested."""
    response = render(request, "signin/too-many.html", {"minutes": -(-error.seconds // 60)}, status=429)
    response["Retry-After"] = str(error.seconds)
    return response


class AccountAdapter(DefaultAccountAdapter):
    """Customizes all ways of signing in."""

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

    def respond_user_inactive(self, request: HttpRequest, user: Any) -> HttpResponse:
        """Return the page that says that the account is closed."""
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
            address = user.email
            if pending is not None and pending["email"] == address:
                _connect_social_account(user, pending["uid"], pending["name"])
                groups = pending["groups"]
        elif login is not None:
            address, groups = login.claims.verified_address, login.claims.groups
        vouching.apply_rules(user, address=address, groups=groups)
        return super().post_login(request, user, **facts)


class SignOutView(LogoutView):
    """End the session. A GET request shows a page that asks first."""

    template_name = "signin/signout.html"


# By a link


def create_link(owner: Owner) -> str:
    """Return a URL that signs the owner in once, within ten minutes. This also verifies the owner's address."""
    token = secrets.token_urlsafe(32)
    SignInLink.objects.create(owner=owner, digest=_digest(token), expires_at=timezone.now() + LINK_LIFETIME)
    audit.record(None, "created a sign-in link", owner)
    mark_address_verified(owner)
    return f"{settings.GUARDIAN_BASE_URL}{reverse('sign_in_link', args=[token])}"


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
def sign_in_link(request: HttpRequest, token: str) -> HttpResponse:
    """Show a button for a valid link. The button's POST signs in the owner and uses the link up.

    A GET changes nothing, because the link previews of chats and mail programs request links.
    """
    link = SignInLink.objects.select_related("owner").filter(digest=_digest(token), expires_at__gt=timezone.now())
    found = link.first()
    if found is not None and request.method != "POST":
        return render(request, "signin/link.html", {"owner": found.owner})
    # Of two concurrent requests, only one deletes the row.
    if found is None or not link.delete()[0]:
        return render(request, "signin/link-used.html", status=410)
    if request.user.is_authenticated:
        AccountAdapter(request).logout(request)
    allauth_private.record_method(request, found.owner, "link")
    response: HttpResponse = perform_login(request, found.owner, email=found.owner.email)
    return response


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


# By OpenID Connect


class Claims:
    """The provider's claims about the person who signs in. They are not stored.

    ``uid`` is stable and unique across providers. ``address`` is the e-mail address; ``verified_address`` is the same
    if the provider says that it is verified, else None.
    """

    def __init__(self, issuer: str, userinfo: Mapping[str, Any], id_token: Mapping[str, Any]) -> None:
        """Read the claims of both documents. A claim of the user info takes precedence.

        Raises:
            ValueError: they contain no valid ``sub``, or different ones.
        """
        if id_token and id_token["sub"] != userinfo["sub"]:
            raise ValueError("the sub of the ID token and of the user info differ")
        claims = {**id_token, **userinfo}
        if not isinstance(claims.get("sub"), str) or not claims["sub"]:
            raise ValueError("there is no sub")
        self.uid = hashlib.sha256(f"{issuer}\n{claims['sub']}".encode()).hexdigest()
        self.address = self._address(claims.get("email"))
        # email_verified is about the address of its own document. The other document may have another address.
        is_verified = any(self._verified_address(document) == self.address for document in (userinfo, id_token))
        self.verified_address = self.address if is_verified else None
        groups = claims.get(settings.OIDC_GROUPS_CLAIM)
        self.groups = [group for group in (groups if isinstance(groups, list) else [groups]) if isinstance(group, str)]
        name = claims.get("name") or f"{claims.get('given_name') or ''} {claims.get('family_name') or ''}"
        self.full_name = "".join(filter(str.isprintable, str(name))).strip()[:200]

    @classmethod
    def _verified_address(cls, document: Mapping[str, Any]) -> str | None:
        # Some providers send the boolean as a string.
        verified = document.get("email_verified")
        return cls._address(document.get("email")) if verified is True or verified == "true" else None

    @staticmethod
    def _address(text: object) -> str | None:
        try:
            return valid_address(text) if isinstance(text, str) else None
        except ValidationError:
            return None


@contextmanager
def _parsing(what: str) -> Iterator[None]:
    try:
        yield
    except (AttributeError, ImproperlyConfigured, KeyError, TypeError, ValueError) as error:
        raise InvalidProviderResponse(f"the {what}: {error!r}") from error


class ProviderAdapter(OpenIDConnectOAuth2Adapter):
    """The OpenID Connect provider. Raises InvalidProviderResponse for invalid responses."""

    @property
    def openid_config(self) -> dict[str, Any]:
        """The provider's configuration."""
        with _parsing("configuration"):
            config: dict[str, Any] = super().openid_config
            for name in ("issuer", "authorization_endpoint", "token_endpoint", "userinfo_endpoint"):
                if not isinstance(config[name], str):
                    raise TypeError(name)
            config["token_endpoint_auth_methods_supported"] = list(
                config.get("token_endpoint_auth_methods_supported", ["client_secret_basic"])
            )
        return config

    def get_access_token_data(self, *args: Any, **kwargs: Any) -> Any:
        """Exchange the code for a token."""
        with _parsing("answer to the code"):
            return super().get_access_token_data(*args, **kwargs)

    def parse_token(self, data: Any) -> Any:
        """Read the token."""
        with _parsing("token"):
            return super().parse_token(data)  # type: ignore[no-untyped-call]

    def complete_login(self, request: HttpRequest, app: Any, token: SocialToken, **kwargs: Any) -> Any:
        """Fetch the claims about the person who signs in."""
        with _parsing("claims"):
            login = super().complete_login(request, app, token, **kwargs)
            userinfo, id_token = login.account.extra_data["userinfo"], login.account.extra_data.get("id_token", {})
            login.claims = Claims(self.openid_config["issuer"], userinfo, id_token)
        login.account.uid, login.account.extra_data = login.claims.uid, {}
        return login


def check_provider() -> None:
    """Fetch the provider's configuration.

    Raises:
        RequestException, OAuth2Error: it can't be fetched, or is invalid.
    """
    _ = ProviderAdapter(HttpRequest(), PROVIDER_ID).openid_config


class SocialAccountAdapter(DefaultSocialAccountAdapter):
    """Customizes sign-in by OpenID Connect.

    The owner is determined before allauth does it: the owner connected to the provider's identifier, else the one with
    the verified address. If the provider did not verify the address, a code must verify it first, so that nobody takes
    over another person's account.
    """

    def get_requests_session(self) -> Session:
        """Return a session for requests to the provider."""
        session: Session = super().get_requests_session()  # type: ignore[no-untyped-call]
        session.mount("https://", SystemTrust())
        return session

    def pre_social_login(self, request: HttpRequest, sociallogin: Any) -> None:
        """Find or create the owner."""
        claims = sociallogin.claims
        if not sociallogin.is_existing:
            if claims.verified_address is None:
                raise ImmediateHttpResponse(_verify_by_code(request, claims, sociallogin.get_redirect_url(request)))
            owner = get_or_create_owner(claims.verified_address)
            if owner.is_active:
                mark_address_verified(owner)
                _connect_social_account(owner, claims.uid, claims.full_name)
            sociallogin.user = owner

    def on_authentication_error(
        self,
        request: HttpRequest,
        provider: Any,
        error: str | None = None,
        exception: Exception | None = None,
        extra_context: dict[str, Any] | None = None,
    ) -> None:
        """Return a page that says what went wrong and what to do."""
        if exception is not None:
            raise ImmediateHttpResponse(_provider_unavailable(request, exception))
        if error == AuthError.CANCELLED or request.GET.get("error") == "access_denied":  # some providers omit the state
            raise ImmediateHttpResponse(_provider_page(request, "cancelled", 403))
        if not (extra_context or {}).get("state"):
            raise ImmediateHttpResponse(_provider_page(request, "stale", 400))
        log.warning("OpenID Connect: the provider returned the error %.100r", request.GET.get("error"))
        raise ImmediateHttpResponse(_provider_page(request, "refused", 403))


@never_cache
def openid_connect_login(request: HttpRequest, provider_id: str) -> HttpResponse:
    """Redirect to the provider. GET requests are not redirected: a link could sign people in against their will."""
    if not settings.OIDC_ISSUER:
        raise Http404("OpenID Connect is not configured")
    next_url = get_next_redirect_url(request)
    if request.method != "POST":
        return HttpResponseRedirect(
            passthrough_next_redirect_url(request, reverse("account_login"), REDIRECT_FIELD_NAME)
        )
    provider = social_adapter(request).get_provider(request, provider_id)
    provider.oauth2_adapter_class = ProviderAdapter
    try:
        response: HttpResponse = provider.redirect(request, process=AuthProcess.LOGIN, next_url=next_url)
    except (RequestException, OAuth2Error) as error:
        return _provider_unavailable(request, error)
    return response


@never_cache
def openid_connect_callback(request: HttpRequest, provider_id: str) -> HttpResponse:
    """Sign in the person who returns from the provider."""
    if not settings.OIDC_ISSUER:
        raise Http404("OpenID Connect is not configured")
    try:
        view: Any = OAuth2CallbackView.adapter_view(ProviderAdapter(request, provider_id))  # type: ignore[no-untyped-call]
        response: HttpResponse = view(request)
    except (RequestException, OAuth2Error) as error:
        return _provider_unavailable(request, error)
    return response


def _verify_by_code(request: HttpRequest, claims: Claims, next_url: str | None) -> HttpResponse:
    """Send a code to the claimed address. Entering it verifies that the address belongs to this person."""
    if claims.address is None:
        return _provider_page(request, "no-address", 403)
    try:
        send_code(request, claims.address)
    except RateLimitExceeded as error:
        return too_many_codes(request, error)
    except (MailUnavailable, MailRefused):
        return _provider_page(request, "mail-unavailable", 503)
    request.session[PENDING_CLAIMS_KEY] = {
        "email": claims.address,
        "uid": claims.uid,
        "name": claims.full_name,
        "groups": claims.groups,
    }
    messages.info(request, f"{settings.OIDC_NAME} doesn't confirm that this address is yours, so we sent a code to it.")
    query = f"?{urlencode({REDIRECT_FIELD_NAME: next_url})}" if next_url else ""
    return HttpResponseRedirect(f"{reverse('account_confirm_login_code')}{query}")


def _connect_social_account(owner: Owner, uid: str, full_name: str) -> None:
    """Connect the provider's identifier to this owner. Copy the full name if the owner has none."""
    SocialAccount.objects.get_or_create(provider=PROVIDER_ID, uid=uid, defaults={"user": owner})
    if full_name and not owner.full_name:
        owner.full_name = full_name
        owner.save(update_fields=["full_name"])


def _provider_unavailable(request: HttpRequest, error: Exception) -> HttpResponse:
    log.error("OpenID Connect: %s: %.300s", type(error).__name__, error)
    return _provider_page(request, "unreachable", 503)


def _provider_page(request: HttpRequest, problem: str, status: int) -> HttpResponse:
    return render(request, "signin/provider.html", {"problem": problem}, status=status)


# The administration


@never_cache
def admin_login(request: HttpRequest) -> HttpResponse:
    """Redirect anonymous visitors of the admin to the sign-in page, and refuse owners who are no operators."""
    if not request.user.is_authenticated:
        wanted = get_next_redirect_url(request) or reverse("admin:index")
        return HttpResponseRedirect(f"{reverse('account_login')}?{urlencode({REDIRECT_FIELD_NAME: wanted})}")
    if not request.user.is_staff:
        return render(request, "signin/operators-only.html", status=403)
    return HttpResponseRedirect(get_next_redirect_url(request) or reverse("admin:index"))
