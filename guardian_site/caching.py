from collections.abc import Callable

from django.db import DatabaseError
from django.http import HttpRequest, HttpResponse
from django.utils.cache import patch_cache_control


class KeepPagesPrivate:
    """Middleware: forbid caching of pages of signed-in users, so that "back" shows nothing after signing out."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        response = self.get_response(request)
        # A view that did not access the session, such as /healthz, shows nothing private. Don't read the user for it.
        may_be_private = request.session.accessed and _is_signed_in(request)
        if may_be_private and not response.has_header("Cache-Control"):
            patch_cache_control(response, private=True, no_store=True)
        return response


def _is_signed_in(request: HttpRequest) -> bool:
    """Return whether the user is signed in, also if the database can't tell."""
    try:
        return request.user.is_authenticated
    except DatabaseError:
        return True
