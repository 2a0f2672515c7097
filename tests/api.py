"""Whoever uses the REST API in a test: a program with an owner's token."""

import json
from typing import Any

from django.test import Client

from accounts.models import AuthToken, Owner


class Program:
    """Speaks for an owner; for nobody where there is none."""

    def __init__(self, owner: Owner | None = None) -> None:
        self.owner = owner
        self.key = AuthToken.objects.create(user=owner)[1] if owner else ""
        """The token in clear."""
        headers = {"Authorization": f"Token {self.key}"} if owner else {}
        self.client = Client(headers=headers)

    def get(self, path: str, **query: Any) -> Any:
        return self.client.get(f"/api/{path}", query)

    def send(self, method: str, path: str, body: Any = None, *, raw: bytes | None = None, **headers: str) -> Any:
        """Send this body as JSON, or these bytes as they are."""
        data = raw if raw is not None else b"" if body is None else json.dumps(body).encode()
        kind = headers.pop("content_type", "application/json")
        return self.client.generic(method, f"/api/{path}", data, content_type=kind, headers=headers)

    def post(self, path: str, body: Any = None) -> Any:
        return self.send("POST", path, body)

    def put(self, path: str, body: Any = None) -> Any:
        return self.send("PUT", path, body)

    def patch(self, path: str, body: Any = None) -> Any:
        return self.send("PATCH", path, body)

    def delete(self, path: str) -> Any:
        return self.send("DELETE", path)
