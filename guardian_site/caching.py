from collections.abc import Callable

from django.http import HttpRequest, HttpResponse
from django.utils.cache import patch_cache_control


class KeepPagesPrivate:
    """Middleware: what is shown to somebody who is signed in is kept nowhere, so that "back" shows nothing later."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        """Pass on, and mark the answer."""
        response = self.get_response(request)
        # A page that didn't ask who is there, such as /healthz, shows nobody's, and needs no database.
        shows_whose_it_is = request.session.accessed and request.user.is_authenticated
        if shows_whose_it_is and not response.has_header("Cache-Control"):
            patch_cache_control(response, private=True, no_store=True)
        return response
