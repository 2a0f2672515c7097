from typing import Any

from django.conf import settings
from django.http import HttpRequest
from django.urls import reverse
from django.utils.functional import SimpleLazyObject

from accounts.access import vouching
from message_store.pages.views import has_something_to_see

HELP = {
    "signin": "owners/#signing-in",
    "vouching": "owners/#signing-in",
    "pulse-users": "owners/#your-pulse-users-on-rabbitmq",
    "queues": "owners/#your-queues",
    "exchanges": "owners/#your-queues",
    "archives": "archives/",
    "subscriptions": "agents/",
    "message-store": "message-store/",
    "tokens": "owners/#the-rest-api",
    "settings": "owners/#notifications",
    "owners": "operators/#people",
}
"""The page under ``/help/`` about each section of the site."""


def navigation(request: HttpRequest) -> dict[str, Any]:
    """Return the context of all pages: how to sign in, the current section, and what the user may do."""
    section = request.path.split("/")[1]
    return {
        "oidc_name": settings.OIDC_NAME if settings.OIDC_ISSUER else "",
        "section": section,
        "help_url": reverse("help") + HELP.get(section, ""),
        # The request of a missing static file has no user.
        "may_vouch": hasattr(request, "user") and vouching.may_vouch(request.user),
        # Lazy: only the navigation of a signed-in user needs it.
        "sees_message_store": SimpleLazyObject(lambda: has_something_to_see(request.user)),
    }
