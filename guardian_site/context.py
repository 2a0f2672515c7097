from typing import Any

from django.conf import settings
from django.http import HttpRequest
from django.utils.functional import SimpleLazyObject

from accounts import vouching
from message_store.views import has_something_to_see


def navigation(request: HttpRequest) -> dict[str, Any]:
    """Return what every page needs: how one may sign in, where the reader is, and what the reader may do."""
    return {
        "oidc_name": settings.OIDC_NAME if settings.OIDC_ISSUER else "",
        "section": request.path.split("/")[1],
        # A static file that isn't there has a request without anybody.
        "may_vouch": hasattr(request, "user") and vouching.may_vouch(request.user),
        # Looked up only by the navigation, and there only for somebody who is signed in.
        "sees_message_store": SimpleLazyObject(lambda: has_something_to_see(request.user)),
    }
