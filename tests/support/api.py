"""Clients of the REST API: a program with an owner's token, and a visitor with an owner's session."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.core.signals import request_finished, request_started
from django.db import close_old_connections
from django.http import HttpResponse
from django.test import Client, RequestFactory

from accounts.models import AuthToken, Owner
from guardian_site.wsgi import application


@contextmanager
def keeping_connections() -> Iterator[None]:
    """Have requests close no database connection: the test is in a transaction."""
    signals = request_started, request_finished
    for signal in signals:
        signal.disconnect(close_old_connections)
    try:
        yield
    finally:
        for signal in signals:
            signal.connect(close_old_connections)


def answer_to(**environ: Any) -> HttpResponse:
    """Return the answer to this WSGI environ, without the checks of Django's test client."""
    answer = HttpResponse()

    def start(status: str, headers: list[tuple[str, str]]) -> None:
        answer.status_code = int(status.split()[0])
        for name, value in headers:
            answer[name] = value

    with keeping_connections():
        parts = application(RequestFactory()._base_environ(**environ), start)
        answer.content = b"".join(parts)
        parts.close()
    return answer


class Program:
    """A client with a token of an owner, or without one."""

    def __init__(self, owner: Owner | None = None, scope: str = AuthToken.Scope.ALL) -> None:
        self.owner = owner
        self.key = AuthToken.objects.create(user=owner, scope=scope)[1] if owner else ""
        """The token in clear."""
        headers = {"Authorization": f"Token {self.key}"} if owner else {}
        self.client = Client(headers=headers)

    def get(self, path: str, **query: Any) -> Any:
        return self.client.get(f"/api/{path}", query)

    def send(self, method: str, path: str, body: Any = None, *, raw: bytes | None = None, **headers: str) -> Any:
        """Send this body as JSON, or these bytes unchanged."""
        data = raw if raw is not None else b"" if body is None else json.dumps(body).encode()
        kind = headers.pop("content_type", "application/json")
        return self.client.generic(method, f"/api/{path}", data, content_type=kind, headers=headers)

    def post(self, path: str, body: Any = None) -> Any:
        return self.send("POST", path, body)

    def put(self, path: str, body: Any = None) -> Any:
        return self.send("PUT", path, body)

    def patch(self, path: str, body: Any = None) -> Any:
        return self.send("PATCH", path, body)

    def delete(self, path: str, body: Any = None) -> Any:
        return self.send("DELETE", path, body)


class Visitor(Program):
    """A client with the session of an owner."""

    def __init__(self, owner: Owner) -> None:
        super().__init__()
        self.owner = owner
        self.client.force_login(owner)
