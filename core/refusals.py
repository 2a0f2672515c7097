"""Refusals: you may not do this, because of a rule."""

from http import HTTPStatus

from django.core.exceptions import ValidationError


class Refusal(ValidationError):
    """A rule refuses what a client asks for. The text says why, and what to do.

    Forms, serializers and the admin show it as they show any ValidationError. ``field`` is the name of the wrong field
    in the REST API; empty: the caller names it. ``status`` is the status of the REST API's response.
    """

    field = ""
    status = HTTPStatus.BAD_REQUEST

    def __init__(self, text: str, field: str = "", status: HTTPStatus | None = None) -> None:
        super().__init__(text)
        self.field = field or self.field
        self.status = status or self.status

    def __str__(self) -> str:
        return str(self.message)
