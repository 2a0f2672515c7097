from typing import Any

from django.conf import settings
from django.http import HttpRequest
from django.utils.functional import SimpleLazyObject

from accounts import vouching
from message_store.views import has_something_to_see


def navigation(request: HttpRequest) -> dict[str, Any]:
    """Return the context of all pages: how to sign in, the current section, and what the user may do."""
    return {
        "oidc_name": settings.OIDC_NAME if settings.OIDC_ISSUER else "",
        "section": request.path.split("/")[1],
        # The request of a missing static file has no user.
        "may_vouch": hasattr(request, "user") and vouching.may_vouch(request.user),
        # Lazy: only the navigation of a signed-in user needs it.
        "sees_message_store": SimpleLazyObject(lambda: has_something_to_see(request.user)),
    }
