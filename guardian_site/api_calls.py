"""The calls and objects of the REST API as ``/api/docs/`` shows them, read from the OpenAPI schema."""

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from django.utils.html import format_html
from django.utils.safestring import SafeString

from accounts.access.scopes import why_refused
from accounts.models import AuthToken
from guardian_site.markdown import to_html, to_inline_html

Schema = dict[str, Any]
SESSION = "a session"
NOTHING = "nothing"
KEY = "a key of the application"
JSON, BYTES = "application/json", "application/octet-stream"


@dataclass(frozen=True)
class Field:
    """A parameter, or a field of a body or of an object."""

    name: str
    kind: SafeString
    required: bool
    description: SafeString
    where: str = ""


@dataclass(frozen=True)
class Answer:
    """An answer of a call. ``kind`` is empty without a body."""

    status: str
    kind: SafeString
    description: SafeString


@dataclass(frozen=True)
class Call:
    """A method of a path. ``body`` and ``example`` are JSON, or empty.

    ``authorization`` is the header of the ``curl`` command; empty: it needs none, or a session. ``data`` are the words
    of the command that send the body. The page can try only calls of the REST API, which accept a session.
    """

    name: str
    method: str
    path: str
    summary: SafeString
    description: SafeString
    needs: str
    parameters: list[Field]
    takes_body: bool
    fields: list[Field]
    body: str
    answers: list[Answer]
    example: str
    authorization: str
    data: list[str]
    can_be_tried: bool

    def curl(self, base_url: str) -> str:
        """Return the command that sends this call, with capitals for values to replace; empty: it needs a session."""
        if self.needs == SESSION:
            return ""
        path = re.sub(r"{(\w+)}", lambda match: match[1].upper(), self.path)
        if query := [field.name for field in self.parameters if field.where == "query" and field.required]:
            path += "?" + "&".join(f"{name}={name.upper()}" for name in query)
        words = ["curl"]
        if self.method != ("POST" if self.data else "GET"):
            words.append(f"-X {self.method}")
        if self.authorization:
            words.append(f'-H "Authorization: {self.authorization}"')
        return " ".join([*words, shlex.quote(base_url.rstrip("/") + path), *self.data])


class Resource(NamedTuple):
    """The calls of one tag, and the objects that they send or answer, by name."""

    calls: list[Call]
    objects: dict[str, list[Field]]


class Reference:
    """The resources of the API by tag."""

    def __init__(self, schema: Schema) -> None:
        self._components: Schema = schema["components"]["schemas"]
        self._linked: list[str] = []
        operations: dict[str, list[tuple[str, str, Schema]]] = {}
        for path, methods in schema["paths"].items():
            for method, operation in methods.items():
                operations.setdefault(operation["tags"][0], []).append((method, path, operation))
        self.resources = {tag: self._resource(of_tag) for tag, of_tag in sorted(operations.items())}

    def _resource(self, operations: list[tuple[str, str, Schema]]) -> Resource:
        self._linked = []
        calls = [self._call(*operation) for operation in operations]
        # Fields of objects link to further objects, which are appended while the list is read.
        objects = {name: list(self._fields(self._components[name])) for name in self._linked}
        return Resource(calls, dict(sorted(objects.items())))

    def _call(self, method: str, path: str, operation: Schema) -> Call:
        parameters = [
            Field(one["name"], self._kind(one["schema"]), one.get("required", False), _paragraphs(one), one["in"])
            for one in operation.get("parameters", ())
        ]
        bodies: Schema = operation.get("requestBody", {}).get("content", {})
        media_type = next(iter(bodies), "")
        body: Schema = bodies.get(media_type, {})
        example = "" if media_type == BYTES else self._example(body)
        needs = _needs(method.upper(), path, operation["security"])
        succeeded = next(answer for status, answer in operation["responses"].items() if status < "300")
        [content] = succeeded.get("content", {}).values() or [{}]
        return Call(
            operation["operationId"],
            method.upper(),
            path,
            to_inline_html(operation.get("summary", "")),
            _paragraphs(operation),
            needs,
            sorted(parameters, key=lambda field: field.where != "path"),
            media_type == JSON,
            list(self._fields(self._resolved(body.get("schema", {})))),
            example,
            [self._answer(status, answer) for status, answer in operation["responses"].items()],
            self._example(content),
            _authorization(needs),
            _data(media_type, example),
            needs != NOTHING and "applicationKey" not in operation["security"][0],
        )

    def _answer(self, status: str, answer: Schema) -> Answer:
        schemas = [content["schema"] for content in answer.get("content", {}).values()] if status < "300" else []
        return Answer(status, self._kind(schemas[0]) if schemas else SafeString(), _paragraphs(answer))

    def _fields(self, schema: Schema) -> Iterator[Field]:
        for name, field in schema.get("properties", {}).items():
            required = name in schema.get("required", ())
            yield Field(name, self._kind(field), required, _paragraphs(field))

    def _kind(self, schema: Schema) -> SafeString:
        """Return the type of a value in words, with links to objects."""
        kind = self._kind_without_null(schema)
        return format_html("{} or null", kind) if schema.get("nullable") else kind

    def _kind_without_null(self, schema: Schema) -> SafeString:
        resolved = self._resolved(schema)
        if resolved.get("type") == "array":
            return format_html("list of {}", self._kind(resolved["items"]))
        if "properties" in resolved:
            name = self._component_name(schema)
            if name not in self._linked:
                self._linked.append(name)
            return format_html('<a href="#{0}">{0}</a>', name)
        if "enum" in resolved:
            values = [str(value) for value in resolved["enum"] if value is not None]
            return format_html("one of {}", ", ".join(values))
        limits = {
            "from {}": resolved.get("minimum"),
            "to {}": resolved.get("maximum"),
            "at most {} characters": resolved.get("maxLength"),
        }
        words = [words.format(value) for words, value in limits.items() if value is not None]
        return format_html("{}", " ".join([resolved.get("type", "any value"), *words]))

    def _component_name(self, schema: Schema) -> str:
        reference = schema.get("$ref") or schema["allOf"][0]["$ref"]
        return str(reference.rpartition("/")[2])

    def _resolved(self, schema: Schema) -> Schema:
        """Return the schema itself, or the component that it refers to."""
        while "$ref" in schema or "allOf" in schema:
            schema = self._components[self._component_name(schema)]
        return schema

    def _example(self, content: Schema) -> str:
        """Return the first example, or else the required fields with values of their types."""
        if examples := content.get("examples"):
            value = next(iter(examples.values()))["value"]
        else:
            value = self._sample(content.get("schema", {}))
        return json.dumps(value, indent=2, ensure_ascii=False) if value else ""

    def _sample(self, schema: Schema) -> Any:
        schema = self._resolved(schema)
        if "example" in schema:
            return schema["example"]
        if "enum" in schema:
            return schema["enum"][0]
        if schema.get("type") == "array":
            return [self._sample(schema["items"])]
        if "properties" in schema:
            return {name: self._sample(schema["properties"][name]) for name in schema.get("required", ())}
        by_format = {"email": "alice@example.org", "date-time": "2026-01-05T09:00:00Z", "binary": ""}
        by_type = {"integer": 1, "number": 1.0, "boolean": True, "object": {}, "string": "…"}
        return by_format.get(schema.get("format", ""), by_type.get(schema.get("type", "")))


def _needs(method: str, path: str, security: list[Schema]) -> str:
    """Return what a request has to present."""
    if {"applicationKey": []} in security:
        public = ", or nothing if the queue is public" if {} in security else ""
        return KEY + (f", or the token of a reader{public}" if {"tokenAuth": []} in security else "")
    if security == [{}]:
        return NOTHING
    pattern = re.sub("{[^}]+}", "*", path).removeprefix("/api/")
    allowed = [scope for scope in AuthToken.Scope if not why_refused(AuthToken(scope=scope), pattern, method)]
    if len(allowed) == len(AuthToken.Scope):
        return "a token of any kind, or a session"
    can = " or ".join(scope.label.lower() for scope in allowed)
    return f"a token that can {can}, or a session" if can else SESSION


def _authorization(needs: str) -> str:
    if needs.startswith(KEY):
        return "Application $KEY"
    return "" if needs in (SESSION, NOTHING) else "Token $TOKEN"


def _data(media_type: str, example: str) -> list[str]:
    """Return the words of a ``curl`` command that send a body."""
    if media_type in ("", JSON):
        return [f"--json {shlex.quote(json.dumps(json.loads(example), ensure_ascii=False))}"] if example else []
    if not example:
        return ['-H "Content-Type: text/plain"', "-d BODY"]
    return [f"-d {shlex.quote(f'{name}={value}')}" for name, value in json.loads(example).items()]


def _paragraphs(described: Schema) -> SafeString:
    return to_html(described.get("description", ""))
