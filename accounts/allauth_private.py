"""The only use of django-allauth's private API: ``allauth.*.internal`` and names that begin with ``_``.

allauth may change it in any release. ``tests/accounts/test_allauth_private.py`` fails when it does.
"""

import ipaddress
from typing import Any

from allauth.account.internal.flows.login import get_authentication_records, record_authentication
from allauth.account.internal.flows.login_by_code import LoginCodeVerificationProcess
from allauth.account.stages import LoginByCodeStage, LoginStageController
from allauth.account.views import ConfirmLoginCodeView, RequestLoginCodeView
from allauth.core.internal import ratelimit
from allauth.core.internal.httpkit import get_client_ip
from django.contrib.auth.models import AbstractBaseUser
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest

# Client addresses


def client_address(request: HttpRequest) -> str:
    """Return the client's IP address as reported by the trusted proxies, without an interface, or "" if it is unknown.

    A proxy appends the address to X-Forwarded-For. Entries before those of the trusted proxies come from the client and
    are ignored (ALLAUTH_TRUSTED_PROXY_COUNT). The address is unknown if the header has fewer entries than there are
    trusted proxies.
    """
    try:
        found = get_client_ip(request)
    except ImproperlyConfigured:
        return ""
    # A socket that listens for both versions of IP reports an IPv4 address as ::ffff:192.0.2.1.
    address = ipaddress.ip_address(found.partition("%")[0]) if found else None
    return str(getattr(address, "ipv4_mapped", None) or address or "")


def client_network(request: HttpRequest) -> str:
    """Return the rate-limit key of a client: its IPv4 address, or the network of its IPv6 address."""
    return str(ratelimit.get_ip(request))


# Codes


def start_code(request: HttpRequest, user: AbstractBaseUser | None, address: str) -> None:
    """Send a code to this address and expect it in this session. Without a user, no code is valid."""
    LoginCodeVerificationProcess.initiate(request=request, user=user, email=address)


def expects_code(request: HttpRequest) -> bool:
    """Return whether this session expects a code that has not expired."""
    stage = LoginStageController.enter(request, LoginByCodeStage.key)
    return stage is not None and LoginCodeVerificationProcess(stage).is_valid()


class AskForAddressView(RequestLoginCodeView):
    """The form for an address. It is also shown while a code is pending: the user may want another address."""

    def _redirect_to_pending_stage(self, request: HttpRequest, stage: object) -> None:
        """Stay on this page."""


class EnterCodeView(ConfirmLoginCodeView):
    _process: LoginCodeVerificationProcess

    @property
    def address(self) -> str:
        return str(self._process.state["email"])

    @property
    def user(self) -> Any:
        """The user who signs in, or None if the user no longer exists."""
        return self._process.user

    def abort(self) -> None:
        self._process.abort()


# Authentication methods


def record_method(request: HttpRequest, user: AbstractBaseUser, method: str) -> None:
    """Record in the session that this user proved their identity by this method."""
    record_authentication(request, user, method=method)


def last_method(request: HttpRequest, user: AbstractBaseUser) -> str:
    """Return the last method by which this user proved their identity, such as "code"."""
    return str(get_authentication_records(request, user)[-1]["method"])
