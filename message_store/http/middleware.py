"""Middleware of the HTTP API."""

from collections.abc import Callable

from django.http import HttpRequest, HttpResponse


class OptionalSlash:
    """Ignore one trailing slash below ``/v1/``. The clients of the original service send it, others don't."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        if request.path_info.startswith("/v1/") and request.path_info != "/v1/":
            request.path_info = request.path_info.removesuffix("/")
        return self.get_response(request)
