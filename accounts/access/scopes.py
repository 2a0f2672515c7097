"""What a token may do: its scope.

An agent's token is stored on other machines, and is a password on the broker (with the permissions of
``rabbit/permissions.py``). So its scope ``agent`` allows only the requests that agents send. A token with the scope
``read`` reads what its owner may read, except tokens and messages. If it is restricted to a Pulse user, the rows are
filtered by ``accounts.models.visible_to``. A token with the scope ``all`` may do what its owner may, except manage
tokens.
"""

import re
from typing import Any

from rest_framework.permissions import BasePermission
from rest_framework.request import Request

from accounts.models import AuthToken

IDENTITIES = ("marketplace-site-agent-identities/", "agent-identities/")
"""Older agents use one prefix, newer ones another."""

AGENT_REQUESTS: dict[str, tuple[str, ...]] = {
    "version/": ("GET",),
    "users/me/": ("GET",),
    **{
        f"{identities}{path}": methods
        for identities in IDENTITIES
        for path, methods in (
            ("", ("GET", "POST")),
            ("*/", ("GET", "PUT", "DELETE")),
            ("*/register_event_subscription/", ("POST",)),
            ("*/register_queue/", ("POST",)),
            ("*/create_queue/", ("POST",)),
            ("*/register_service/", ("POST",)),
        )
    },
    "marketplace-site-agent-services/*/register_processor/": ("POST",),
    "marketplace-site-agent-services/*/set_statistics/": ("POST",),
    "event-consumers/": ("GET",),
    "event-consumers/register/": ("POST",),
    "event-consumers/*/": ("GET", "PATCH", "DELETE"),
    "event-subscriptions/": ("GET", "POST"),
    "event-subscriptions/*/": ("GET", "DELETE"),
    "event-subscriptions/*/create_queue/": ("POST",),
    "event-subscription-queues/": ("GET",),
    "event-subscription-queues/*/": ("GET", "DELETE"),
}
"""Paths under ``/api/`` with the methods that an agent's token may use. A ``*`` is any object."""

READ_OF_A_PULSE_USER = (
    "version/", "users/me/", "me/",
    "pulse-users/", "pulse-users/*/", "pulse-users/*/connections/", "pulse-users/*/notifications/",
    "pulse-users/*/belongings/",
    "queues/", "queues/*/", "queues/*/live/", "queues/*/bindings/", "queues/*/samples/", "queues/*/events/",
    "queues/*/rates/", "moves/*/",
    "archives/", "archives/*/", "archives/*/replays/", "archives/*/replays/*/",
    "exchanges/",
)  # fmt: skip
"""Paths that a token with the scope ``read`` may GET, though it is restricted to a Pulse user.

Each is a decision: nothing that contains messages or secrets, nothing that changes anything, and every row filtered by
``visible_to``.
"""

READ = (
    *READ_OF_A_PULSE_USER,
    "exchanges/traffic/",
    "invitations/", "invitations/*/", "owners/", "owners/*/", "owners/adopt/", "channels/", "channels/*/", "settings/",
    "offerings/", "offerings/*/", *(f"{identities}{path}" for identities in IDENTITIES for path in ("", "*/")),
    "marketplace-site-agent-services/", "marketplace-site-agent-services/*/",
    "marketplace-site-agent-processors/", "marketplace-site-agent-processors/*/",
    "agent-consumers/", "agent-consumers/*/", "event-consumers/", "event-consumers/*/",
    "event-subscriptions/", "event-subscriptions/*/", "event-subscription-queues/", "event-subscription-queues/*/",
)  # fmt: skip
"""Paths that a token with the scope ``read`` may GET."""

ALLOWED = {
    AuthToken.Scope.AGENT: "registering queues, as agents do",
    AuthToken.Scope.READ: "reading, but no messages and tokens",
}
NEEDS_ALL = (
    "This token has the scope '{scope}', which allows only {allowed}. "
    "Create a token with the scope 'all' on the page Tokens."
)
RESTRICTED = "This token reads only one Pulse user, with its queues, archives and exchanges. Use another token."
NEEDS_SESSION = "A token can't create or list tokens. Sign in and use the page Tokens."
ONLY_ITSELF = "A token can revoke only itself. Sign in and use the page Tokens to revoke others."


def why_refused(token: AuthToken, path: str, method: str) -> str:
    """Return why a token may not send this request, or "" if it may.

    ``path`` is below ``/api/``, as in ``AGENT_REQUESTS``.
    """
    method = "GET" if method == "HEAD" else method
    if path == "tokens/" or (path == "tokens/*/" and method != "DELETE"):
        return NEEDS_SESSION
    if allows_all(token) or path in ("tokens/current/", "tokens/*/"):
        return ""
    if token.scope == AuthToken.Scope.READ:
        if method == "GET" and path in READ:
            return RESTRICTED if token.pulse_user_id and path not in READ_OF_A_PULSE_USER else ""
    elif method in AGENT_REQUESTS.get(path, ()):
        return ""
    return needs_all(token)


def allows_all(token: AuthToken) -> bool:
    return token.scope == AuthToken.Scope.ALL


def needs_all(token: AuthToken) -> str:
    """Return why a token may not do what only the scope ``all`` allows."""
    return NEEDS_ALL.format(scope=token.scope, allowed=ALLOWED[AuthToken.Scope(token.scope)])


def allows_metrics(token: AuthToken) -> bool:
    return allows_all(token) or (token.scope == AuthToken.Scope.READ and token.pulse_user_id is None)


class TokenScope(BasePermission):
    """Refuses what a token's scope does not allow. It allows every request without a token."""

    message = ""

    def has_permission(self, request: Request, view: Any) -> bool:
        if isinstance(request.auth, AuthToken):
            self.message = why_refused(request.auth, _path(request), str(request.method))
        return not self.message

    def has_object_permission(self, request: Request, view: Any, obj: Any) -> bool:
        """Return whether the token may use this object: of all tokens, only itself."""
        if isinstance(request.auth, AuthToken) and isinstance(obj, AuthToken) and obj != request.auth:
            self.message = ONLY_ITSELF
        return not self.message


def _path(request: Request) -> str:
    """Return the path of the request's URL pattern below ``/api/``, with a ``*`` for each parameter."""
    match = request.resolver_match
    return re.sub("<[^>]+>", "*", match.route).removeprefix("api/") if match else ""
