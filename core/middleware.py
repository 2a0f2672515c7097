from collections.abc import Callable

from django.http import HttpRequest, HttpResponse


class Middleware:
    """The base of middleware. By itself it returns the view's response."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        return self.get_response(request)
