"""Signing in: by a code sent to the e-mail address, by OpenID Connect, or by a link that an operator made.

django-allauth does the work; here is what differs. An owner has one address, ``Owner.email``; allauth's rows only say
whether it was proven. Every way in proves it, so nothing is to be verified afterwards. The first sign-in makes the
owner, and nobody has a password.
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
from allauth.core.exceptions import ImmediateHttpResponse, RateLimited
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
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils import timezone
from django.utils.decorators import method_decorator
from django.utils.http import urlencode
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import csrf_exempt
from requests import RequestException

from accounts import allauth_private, audit, vouching
from accounts.models import INVALID_ADDRESS, MAX_ADDRESS_LENGTH, Owner, SignInLink, check_address, normalize_address

log = logging.getLogger(__name__)

LINK_LIFETIME = timedelta(minutes=10)
VISITOR_LIFETIME = timedelta(days=1)
PROVIDER_ID = "oidc"
# In the session: who the provider says is signing in, until a code has proven the address that it doesn't vouch for.
PENDING_CLAIMS_KEY = "signin_waiting"


class MailUnavailable(Exception):
    """The mail server is away, or can't take the mail now. Nothing was sent."""


class MailRefused(Exception):
    """The mail server takes no mail for this address."""


class InvalidProviderResponse(OAuth2Error):
    """The provider answered something that isn't OpenID Connect."""


# Owners and their addresses


def valid_address(text: str) -> str:
    """Return this e-mail address in its normal form.

    Raises:
        ValidationError: it is no address that an owner could have.
    """
    address = normalize_address(text)
    check_address(address)
    return address


def get_or_create_owner(address: str) -> Owner:
    """Return the owner with this address, made when there is none: not vouched, and the address not proven."""
    owner = Owner.objects.filter(email=address).first()
    if owner is None:
        try:
            with transaction.atomic():
                owner = Owner.objects.create_user(address)
        except (IntegrityError, ValidationError):
            owner = Owner.objects.filter(email=address).first()  # somebody was quicker
            if owner is None:
                raise
    _email_address_row(owner)
    return owner


def mark_address_verified(owner: Owner) -> None:
    """Record that the owner's address is the owner's."""
    row = _email_address_row(owner)
    if not row.verified:
        row.verified = True
        row.save(update_fields=["verified"])


def _email_address_row(owner: Owner) -> EmailAddress:
    """Return allauth's row of the owner's address. What it has of an address the owner had before goes."""
    stale = Q(user=owner) & ~Q(email=owner.email) | Q(email=owner.email) & ~Q(user=owner)
    EmailAddress.objects.filter(stale).delete()
    row: EmailAddress
    row, _ = EmailAddress.objects.get_or_create(user=owner, email=owner.email, defaults={"primary": True})
    return row


def prune_visitors() -> int:
    """Remove who typed an address a day ago and never proved it, and links and sessions that have run out.

    Whoever was given anything stays: a vouching, an account, a token. So does whom operators made by hand: of an
    address that was typed to sign in there is allauth's row. Return how many owners went.
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
    while keys := list(visitors.values_list("pk", flat=True)[:500]):  # so that no transaction is long
        # Asked once more: somebody may have proven the address, or been given something, meanwhile.
        with disable_auditlog():  # who came is no entry of it either
            removed += visitors.filter(pk__in=keys).delete()[1].get(Owner._meta.label, 0)
    SignInLink.objects.filter(expires_at__lte=now).delete()
    import_module(settings.SESSION_ENGINE).SessionStore.clear_expired()
    return removed


# By a code


class AddressForm(RequestLoginCodeForm):
    """The e-mail address that a code is to be sent to."""

    email = EmailField(
        label="E-mail address",
        label_suffix="",
        max_length=MAX_ADDRESS_LENGTH,
        error_messages={"required": INVALID_ADDRESS, "invalid": INVALID_ADDRESS},
        widget=forms.EmailInput(attrs={"autocomplete": "email", "autofocus": True}),
    )

    def clean_email(self) -> str:
        """Bring the address into its normal form."""
        return valid_address(self.cleaned_data["email"])


class CodeForm(ConfirmLoginCodeForm):
    """The code that was sent."""

    code = forms.CharField(
        label="Code",
        label_suffix="",
        max_length=40,
        help_text="Eight letters. Capitals, spaces and the dash don't matter.",
        widget=forms.TextInput(attrs={"autocomplete": "one-time-code", "spellcheck": "false", "autofocus": True}),
    )


def send_code(request: HttpRequest, address: str) -> None:
    """Send a code to this address, and wait in this session for it. The code before it no longer works.

    Who gets one is the same for all to see. An owner who isn't active gets a mail that says so.

    Raises:
        RateLimited: too many codes were asked for from here, or for this address.
        MailRefused, MailUnavailable: nothing was sent.
    """
    allauth_private.count_code_request(request, address)
    owner = get_or_create_owner(address)
    try:
        if not owner.is_active:
            AccountAdapter(request).send_mail("account/email/closed", address, {})
        allauth_private.start_code(request, owner if owner.is_active else None, address)
    except SMTPRecipientsRefused as error:
        if any(code < 500 for code, _ in error.recipients.values()):
            raise MailUnavailable from error
        raise MailRefused from error
    except OSError as error:  # what smtplib raises is one, too
        log.error("No sign-in code was sent: %s", error)
        raise MailUnavailable from error


@method_decorator(never_cache, name="dispatch")
class SignInView(allauth_private.AskForAddressView):
    """Ask for an address, and send a code to it."""

    form_class = AddressForm
    template_name = "signin/signin.html"

    def form_valid(self, form: AddressForm) -> HttpResponse:
        """Send the code and go to where it is entered."""
        self.request.session.pop(PENDING_CLAIMS_KEY, None)
        try:
            send_code(self.request, form.cleaned_data["email"])
        except RateLimited:
            return too_many_codes(self.request)
        except MailRefused:
            form.add_error("email", "Our mail server can't send to this address. Check it, or use another one.")
            return self.form_invalid(form)
        except MailUnavailable:
            return self.render_to_response(self.get_context_data(form=form, mail_away=True), status=503)
        url = passthrough_next_redirect_url(self.request, reverse("account_confirm_login_code"), REDIRECT_FIELD_NAME)
        return HttpResponseRedirect(url)


@method_decorator(never_cache, name="dispatch")
class CodeView(allauth_private.EnterCodeView):
    """Take the code that was sent, or send another one."""

    form_class = CodeForm
    template_name = "signin/code.html"

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        """Begin anew where no code is waited for, or no longer."""
        if not request.user.is_authenticated and not allauth_private.expects_code(request):
            return self.restart()
        return super().dispatch(request, *args, **kwargs)

    def restart(self) -> HttpResponse:
        """Go back to where the address is entered."""
        messages.error(
            self.request,
            "No code is waited for here: a code works once, for ten minutes, in the browser that it was asked for in. "
            "Ask for a new one.",
        )
        return HttpResponseRedirect(
            passthrough_next_redirect_url(self.request, reverse("account_login"), REDIRECT_FIELD_NAME)
        )

    def post(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        """Take the code, or send another one."""
        if request.POST.get("action") != "resend":
            return super().post(request, *args, **kwargs)
        try:
            send_code(request, self.address)
        except RateLimited:
            return too_many_codes(request)
        except (MailUnavailable, MailRefused):
            page = self.get_context_data(form=CodeForm(code=""), mail_away=True)
            return self.render_to_response(page, status=503)
        messages.success(request, "A new code was sent. The one before no longer works.")
        return HttpResponseRedirect(request.get_full_path())

    def form_valid(self, form: CodeForm) -> HttpResponse:
        """Sign in, unless the owner was removed in the meantime."""
        if self.user is None:
            self.abort()
            return self.restart()
        return super().form_valid(form)


def too_many_codes(request: HttpRequest) -> HttpResponse:
    """Say that too many codes were asked for."""
    response = render(request, "signin/too-many.html", status=429)
    response["Retry-After"] = "60"
    return response


class AccountAdapter(DefaultAccountAdapter):
    """What is different here about signing in, whichever way."""

    error_messages = {
        **DefaultAccountAdapter.error_messages,
        "incorrect_code": "This isn't the code that was sent last. Compare it with the mail, or have a new one sent.",
        "too_many_login_attempts": "The code was wrong too often, so it no longer works. Ask for a new one.",
    }

    def get_client_ip(self, request: HttpRequest) -> str:
        """Return what attempts are counted by: the client's address, or nothing if the server does not know it.

        A server on a Unix socket without a proxy's header knows none. Then all clients are counted together; allauth's
        own method would refuse them all.
        """
        return allauth_private.client_address(request)

    def send_mail(self, template_prefix: str, email: str, context: dict[str, Any]) -> None:
        """Send a mail that names this installation as it is configured, whatever host the request named."""
        super().send_mail(template_prefix, email, {**context, "address": settings.GUARDIAN_BASE_URL})

    def respond_user_inactive(self, request: HttpRequest, user: Any) -> HttpResponse:
        """Say that the account is closed."""
        return render(request, "signin/closed.html", status=403)

    def login(self, request: HttpRequest, user: Any) -> None:
        """Begin a session. What was somebody else's is emptied for it, so what is needed of that is taken first."""
        self.method = allauth_private.last_method(request, user)
        self.waiting = request.session.pop(PENDING_CLAIMS_KEY, None)
        super().login(request, user)

    def post_login(self, request: HttpRequest, user: Any, **facts: Any) -> HttpResponse:
        """Record what the sign-in has proven, and have the rules about who may use the broker look at it."""
        waiting = self.waiting
        login = (facts["signal_kwargs"] or {}).get("sociallogin")
        address, groups = None, None
        if self.method == "code":
            mark_address_verified(user)
            address = user.email
            if waiting is not None and waiting["email"] == address:
                _connect_social_account(user, waiting["uid"], waiting["name"])
                groups = waiting["groups"]
        elif login is not None:
            address, groups = login.claims.proven_address, login.claims.groups
        vouching.apply_rules(user, address=address, groups=groups)
        return super().post_login(request, user, **facts)


class SignOutView(LogoutView):
    """End the session, after a question where it was asked for by a link."""

    template_name = "signin/signout.html"


# By a link


def create_link(owner: Owner) -> str:
    """Return an address that signs the owner in, once, within ten minutes. Whoever makes it knows the owner."""
    token = secrets.token_urlsafe(32)
    SignInLink.objects.create(owner=owner, digest=_digest(token), expires_at=timezone.now() + LINK_LIFETIME)
    audit.note(None, "made a sign-in link", owner)
    mark_address_verified(owner)
    return f"{settings.GUARDIAN_BASE_URL}{reverse('sign_in_link', args=[token])}"


@csrf_exempt  # a refusal would be logged, with a token in its path that still works
@never_cache
def sign_in_link(request: HttpRequest, token: str) -> HttpResponse:
    """Sign in who opens the link, unless it was opened before or has run out.

    Only a GET opens it: programs that look at links in a chat or a mail before people do send HEAD.
    """
    if request.method != "GET":
        return redirect("account_login")
    link = SignInLink.objects.select_related("owner").filter(digest=_digest(token)).first()
    # Of two who open it at once the database lets one delete the row.
    if link is None or not SignInLink.objects.filter(pk=link.pk, expires_at__gt=timezone.now()).delete()[0]:
        return render(request, "signin/link.html", status=410)
    if request.user.is_authenticated:
        AccountAdapter(request).logout(request)
    allauth_private.record_method(request, link.owner, "link")
    response: HttpResponse = perform_login(request, link.owner, email=link.owner.email)
    return response


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


# By OpenID Connect


class Claims:
    """What the provider says about who is signing in. It is used and not kept.

    ``uid`` is known for good, and another provider's isn't taken for it. ``proven_address`` is the e-mail address where
    the provider vouches for it, else None; ``address`` is the same without that.
    """

    def __init__(self, issuer: str, claims: Mapping[str, Any]) -> None:
        """Read the claims.

        Raises:
            ValueError: they don't say who it is.
        """
        if not isinstance(claims.get("sub"), str) or not claims["sub"]:
            raise ValueError("there is no sub")
        self.uid = hashlib.sha256(f"{issuer}\n{claims['sub']}".encode()).hexdigest()
        self.address = self._address(claims.get("email"))
        # Some providers say it as text; "false" is as good as nothing.
        proven = claims.get("email_verified")
        self.proven_address = self.address if proven is True or proven == "true" else None
        groups = claims.get(settings.OIDC_GROUPS_CLAIM)
        self.groups = [group for group in (groups if isinstance(groups, list) else [groups]) if isinstance(group, str)]
        name = claims.get("name") or f"{claims.get('given_name') or ''} {claims.get('family_name') or ''}"
        self.full_name = "".join(filter(str.isprintable, str(name))).strip()[:200]

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
    """The one provider. Whatever it answers that isn't OpenID Connect raises InvalidProviderResponse."""

    @property
    def openid_config(self) -> dict[str, Any]:
        """What the provider says about itself."""
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
        """Ask the provider who it is."""
        with _parsing("claims"):
            login = super().complete_login(request, app, token, **kwargs)
            told, signed = login.account.extra_data["userinfo"], login.account.extra_data.get("id_token", {})
            if signed and signed["sub"] != told["sub"]:
                raise ValueError("they are about two people")
            login.claims = Claims(self.openid_config["issuer"], {**signed, **told})
        login.account.uid, login.account.extra_data = login.claims.uid, {}
        return login


class SocialAccountAdapter(DefaultSocialAccountAdapter):
    """What is different here about signing in by OpenID Connect.

    Whom the provider's person is, is settled before allauth looks: an owner known by the provider's identifier, or the
    one whose address the provider vouches for. Where it doesn't, a code has to prove the address first, so that nobody
    takes over an owner by an address that isn't theirs.
    """

    def pre_social_login(self, request: HttpRequest, sociallogin: Any) -> None:
        """Find the owner, or make one."""
        claims = sociallogin.claims
        if not sociallogin.is_existing:
            if claims.proven_address is None:
                raise ImmediateHttpResponse(_prove_by_code(request, claims, sociallogin.get_redirect_url(request)))
            owner = get_or_create_owner(claims.proven_address)
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
        """Say what went wrong, and what to do."""
        if exception is not None:
            raise ImmediateHttpResponse(_provider_unavailable(request, exception))
        if error == AuthError.CANCELLED or request.GET.get("error") == "access_denied":  # some leave the state out
            raise ImmediateHttpResponse(_provider_page(request, "cancelled", 403))
        if not (extra_context or {}).get("state"):
            raise ImmediateHttpResponse(_provider_page(request, "stale", 400))
        log.warning("OpenID Connect: the provider answered with the error %.100r", request.GET.get("error"))
        raise ImmediateHttpResponse(_provider_page(request, "refused", 403))


@never_cache
def openid_connect_login(request: HttpRequest, provider_id: str) -> HttpResponse:
    """Go to the provider. A link does not: it would sign people in without their wish."""
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
    """Take who comes back from the provider."""
    if not settings.OIDC_ISSUER:
        raise Http404("OpenID Connect is not configured")
    try:
        view: Any = OAuth2CallbackView.adapter_view(ProviderAdapter(request, provider_id))  # type: ignore[no-untyped-call]
        response: HttpResponse = view(request)
    except (RequestException, OAuth2Error) as error:
        return _provider_unavailable(request, error)
    return response


def _prove_by_code(request: HttpRequest, claims: Claims, next_url: str | None) -> HttpResponse:
    """Have the address proven by a code; then it is known that it and the provider's person are one."""
    if claims.address is None:
        return _provider_page(request, "no-address", 403)
    try:
        send_code(request, claims.address)
    except RateLimited:
        return too_many_codes(request)
    except (MailUnavailable, MailRefused):
        return _provider_page(request, "mail-away", 503)
    request.session[PENDING_CLAIMS_KEY] = {
        "email": claims.address,
        "uid": claims.uid,
        "name": claims.full_name,
        "groups": claims.groups,
    }
    messages.info(request, f"{settings.OIDC_NAME} doesn't say whether this address is yours, so a code was sent to it.")
    query = f"?{urlencode({REDIRECT_FIELD_NAME: next_url})}" if next_url else ""
    return HttpResponseRedirect(f"{reverse('account_confirm_login_code')}{query}")


def _connect_social_account(owner: Owner, uid: str, full_name: str) -> None:
    """Know the provider's person as this owner from now on, by the provider's name where the owner has none."""
    SocialAccount.objects.get_or_create(provider=PROVIDER_ID, uid=uid, defaults={"user": owner})
    if full_name and not owner.full_name:
        owner.full_name = full_name
        owner.save(update_fields=["full_name"])


def _provider_unavailable(request: HttpRequest, error: Exception) -> HttpResponse:
    log.error("OpenID Connect: %s: %.300s", type(error).__name__, error)
    return _provider_page(request, "away", 503)


def _provider_page(request: HttpRequest, problem: str, status: int) -> HttpResponse:
    return render(request, "signin/provider.html", {"problem": problem}, status=status)


# The administration


@never_cache
def admin_login(request: HttpRequest) -> HttpResponse:
    """Lead who wants to the administration to where people sign in; refuse who is signed in and no operator."""
    if not request.user.is_authenticated:
        wanted = get_next_redirect_url(request) or reverse("admin:index")
        return HttpResponseRedirect(f"{reverse('account_login')}?{urlencode({REDIRECT_FIELD_NAME: wanted})}")
    if not request.user.is_staff:
        return render(request, "signin/operators-only.html", status=403)
    return HttpResponseRedirect(get_next_redirect_url(request) or reverse("admin:index"))
