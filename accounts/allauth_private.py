"""All that Guardian uses of django-allauth's private API: what stands in ``allauth.*.internal`` or begins with ``_``.

allauth may change it in any release. ``tests/test_allauth_private.py`` fails when it does.
"""

from typing import Any

from allauth.account.internal.flows.login import get_authentication_records, record_authentication
from allauth.account.internal.flows.login_by_code import LoginCodeVerificationProcess
from allauth.account.stages import LoginByCodeStage, LoginStageController
from allauth.account.views import ConfirmLoginCodeView, RequestLoginCodeView
from allauth.core.internal import ratelimit
from allauth.core.internal.httpkit import get_client_ip
from django.contrib.auth.models import AbstractBaseUser
from django.http import HttpRequest

# Where requests come from


def client_address(request: HttpRequest) -> str:
    """Return the client's IP address as far as the trusted proxies name it; empty if the server does not know it.

    Behind a proxy it is the last of X-Forwarded-For, which that proxy adds. What a client sends in the same header
    stands before it and is not trusted (ALLAUTH_TRUSTED_PROXY_COUNT).

    Raises:
        ImproperlyConfigured: the header names fewer proxies than GUARDIAN_PROXIES.
    """
    return get_client_ip(request) or ""


def client_network(request: HttpRequest) -> str:
    """Return what a client's attempts are counted by: its IPv4 address, or the network of its IPv6 address.

    Raises:
        ImproperlyConfigured: as ``client_address``.
    """
    return str(ratelimit.get_ip(request))


# Codes


def count_code_request(request: HttpRequest, address: str) -> None:
    """Count a request for a code against the limits for this client and this e-mail address.

    Raises:
        RateLimited: there were too many.
    """
    ratelimit.consume(
        request, app="allauth.account", action="request_login_code", key=address, limit_get=True, raise_exception=True
    )


def start_code(request: HttpRequest, user: AbstractBaseUser | None, address: str) -> None:
    """Send a code to this address, and expect it in this session; without a user, expect a code that nobody has."""
    LoginCodeVerificationProcess.initiate(request=request, user=user, email=address)


def expects_code(request: HttpRequest) -> bool:
    """Return whether this session expects a code which has not expired."""
    stage = LoginStageController.enter(request, LoginByCodeStage.key)
    return stage is not None and LoginCodeVerificationProcess(stage).is_valid()


class AskForAddressView(RequestLoginCodeView):
    """The form for an address, also where a code is expected already: the next one may be for another address."""

    def _redirect_to_pending_stage(self, request: HttpRequest, stage: object) -> None:
        """Go nowhere."""


class EnterCodeView(ConfirmLoginCodeView):
    """The form for a code."""

    _process: LoginCodeVerificationProcess

    @property
    def address(self) -> str:
        """The address that the code was sent to."""
        return str(self._process.state["email"])

    @property
    def user(self) -> Any:
        """Who signs in; None if the user was deleted since."""
        return self._process.user

    def abort(self) -> None:
        """Expect the code no longer."""
        self._process.abort()


# Records of how somebody signed in


def record_method(request: HttpRequest, user: AbstractBaseUser, method: str) -> None:
    """Record in the session that this user proved their identity by this method."""
    record_authentication(request, user, method=method)


def last_method(request: HttpRequest, user: AbstractBaseUser) -> str:
    """Return the method by which this user proved their identity last, such as "code"."""
    return str(get_authentication_records(request, user)[-1]["method"])
