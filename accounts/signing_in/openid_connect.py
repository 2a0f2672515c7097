"""Sign-in by OpenID Connect."""

import hashlib
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from allauth.account.utils import get_next_redirect_url, passthrough_next_redirect_url
from allauth.core.exceptions import ImmediateHttpResponse
from allauth.socialaccount.adapter import DefaultSocialAccountAdapter
from allauth.socialaccount.adapter import get_adapter as social_adapter
from allauth.socialaccount.models import SocialToken
from allauth.socialaccount.providers.base.constants import AuthError, AuthProcess
from allauth.socialaccount.providers.oauth2.client import OAuth2Error
from allauth.socialaccount.providers.oauth2.views import OAuth2CallbackView
from allauth.socialaccount.providers.openid_connect.views import OpenIDConnectOAuth2Adapter
from django.conf import settings
from django.contrib import messages
from django.contrib.auth import REDIRECT_FIELD_NAME
from django.core.exceptions import ImproperlyConfigured, ValidationError
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import render
from django.urls import reverse
from django.utils.http import urlencode
from django.views.decorators.cache import never_cache
from requests import RequestException, Session

from accounts.signing_in.codes import (
    PENDING_CLAIMS_KEY,
    PROVIDER_ID,
    MailRefused,
    MailUnavailable,
    connect_social_account,
    send_code,
    too_many_codes,
)
from accounts.signing_in.owners import get_or_create_owner, mark_address_verified, valid_address
from core import bounded_requests
from core.limits import RateLimitExceeded

log = logging.getLogger(__name__)

MAX_EXCHANGES = 2
"""How many threads of a process may wait for the provider at the start of sign-ins, and how many at their end.

Anybody can start a sign-in, and a provider may be slow.
"""

BUSY_RETRY_SECONDS = 10

CONFIGURATION_SECONDS = 300
"""How long a process uses the provider's configuration before it fetches it again."""

_starts = threading.BoundedSemaphore(MAX_EXCHANGES)
_callbacks = threading.BoundedSemaphore(MAX_EXCHANGES)

configurations: dict[str, tuple[float, dict[str, Any]]] = {}
"""The provider's configuration by its URL, with the time of its expiry."""


class InvalidProviderResponse(OAuth2Error):
    """The provider's response is not valid OpenID Connect."""


class ProviderBusy(Exception):
    """``MAX_EXCHANGES`` threads wait for the provider already."""


class AddressUnverified(Exception):
    """The provider did not verify the address of the person who signs in."""

    def __init__(self, claims: "Claims", next_url: str | None) -> None:
        super().__init__()
        self.claims = claims
        self.next_url = next_url


@contextmanager
def _exchange(slots: threading.BoundedSemaphore) -> Iterator[None]:
    """Begin the requests of a sign-in to the provider. Raises ProviderBusy."""
    if not slots.acquire(blocking=False):
        raise ProviderBusy
    with bounded_requests.exchange() as exchange:
        try:
            yield
        finally:
            exchange.call_when_idle(slots.release)


class Claims:
    """The provider's claims about the person who signs in. They are not stored.

    ``uid`` is stable and unique across providers. ``address`` is the e-mail address; ``verified_address`` is the same
    if the provider says that it is verified, else None.
    """

    def __init__(self, issuer: str, userinfo: Mapping[str, Any], id_token: Mapping[str, Any]) -> None:
        """Read the claims of both documents. A claim of the user info takes precedence.

        Raises ValueError if they contain no valid ``sub``, or different ones.
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
    # A token is a text in the answer, so its JSON may be nested deeper than the answer's.
    except (AttributeError, ImproperlyConfigured, KeyError, RecursionError, TypeError, ValueError) as error:
        raise InvalidProviderResponse(f"the {what}: {error!r}") from error


class ProviderAdapter(OpenIDConnectOAuth2Adapter):
    """The OpenID Connect provider. Raises InvalidProviderResponse for invalid responses."""

    @property
    def openid_config(self) -> dict[str, Any]:
        url = self.get_provider().server_url  # type: ignore[no-untyped-call]
        expires_at, config = configurations.get(url, (0.0, {}))
        if time.monotonic() >= expires_at:
            config = self._fetch_configuration()
            configurations[url] = time.monotonic() + CONFIGURATION_SECONDS, config
        return config

    def _fetch_configuration(self) -> dict[str, Any]:
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
        with _parsing("answer to the code"):
            return super().get_access_token_data(*args, **kwargs)

    def parse_token(self, data: Any) -> Any:
        with _parsing("token"):
            return super().parse_token(data)  # type: ignore[no-untyped-call]

    def complete_login(self, request: HttpRequest, app: Any, token: SocialToken, **kwargs: Any) -> Any:
        with _parsing("claims"):
            login = super().complete_login(request, app, token, **kwargs)
            userinfo, id_token = (
                login.account.extra_data["userinfo"],
                login.account.extra_data.get("id_token", {}),
            )
            login.claims = Claims(self.openid_config["issuer"], userinfo, id_token)
        login.account.uid, login.account.extra_data = login.claims.uid, {}
        return login


def check_provider() -> None:
    """Fetch the provider's configuration. Raises RequestException, or OAuth2Error if it is invalid."""
    with bounded_requests.exchange():
        ProviderAdapter(HttpRequest(), PROVIDER_ID)._fetch_configuration()


class SocialAccountAdapter(DefaultSocialAccountAdapter):
    """Customizes sign-in by OpenID Connect.

    The owner is determined before allauth does it: the owner connected to the provider's identifier, else the one with
    the verified address. If the provider did not verify the address, a code must verify it first, so that nobody takes
    over another person's account.
    """

    def get_requests_session(self) -> Session:
        return bounded_requests.Session()

    def pre_social_login(self, request: HttpRequest, sociallogin: Any) -> None:
        claims = sociallogin.claims
        if not sociallogin.is_existing:
            if claims.verified_address is None:
                raise AddressUnverified(claims, sociallogin.get_redirect_url(request))
            owner = get_or_create_owner(claims.verified_address)
            if owner.is_active:
                mark_address_verified(owner)
                connect_social_account(owner, claims.uid, claims.full_name)
            sociallogin.user = owner

    def on_authentication_error(
        self,
        request: HttpRequest,
        provider: Any,
        error: str | None = None,
        exception: Exception | None = None,
        extra_context: dict[str, Any] | None = None,
    ) -> None:
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
        with _exchange(_starts):
            response: HttpResponse = provider.redirect(request, process=AuthProcess.LOGIN, next_url=next_url)
    except ProviderBusy:
        return _provider_busy(request)
    except (RequestException, OAuth2Error) as error:
        return _provider_unavailable(request, error)
    return response


@never_cache
def openid_connect_callback(request: HttpRequest, provider_id: str) -> HttpResponse:
    if not settings.OIDC_ISSUER:
        raise Http404("OpenID Connect is not configured")
    try:
        view: Any = OAuth2CallbackView.adapter_view(ProviderAdapter(request, provider_id))  # type: ignore[no-untyped-call]
        with _exchange(_callbacks):
            response: HttpResponse = view(request)
    except ProviderBusy:
        return _provider_busy(request)
    except AddressUnverified as error:
        return _verify_by_code(request, error.claims, error.next_url)
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


def _provider_unavailable(request: HttpRequest, error: Exception) -> HttpResponse:
    log.error("OpenID Connect: %s: %.300s", type(error).__name__, error)
    return _provider_page(request, "unreachable", 503)


def _provider_busy(request: HttpRequest) -> HttpResponse:
    response = _provider_page(request, "busy", 503)
    response["Retry-After"] = str(BUSY_RETRY_SECONDS)
    return response


def _provider_page(request: HttpRequest, problem: str, status: int) -> HttpResponse:
    return render(request, "signin/provider.html", {"problem": problem}, status=status)
