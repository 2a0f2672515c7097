"""The REST API's schema as a page to read. Swagger UI needs inline styles and pictures that the policy refuses."""

import json
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe
from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.views import SpectacularAPIView
from rest_framework.renderers import JSONRenderer
from rest_framework.request import Request
from rest_framework.response import Response

METHODS = ("get", "post", "put", "patch", "delete")

Object = dict[str, Any]


class Field(NamedTuple):
    """A parameter, or a field of a body or an answer."""

    name: str
    kind: str
    required: bool
    about: str


class Answer(NamedTuple):
    """What an endpoint can answer."""

    status: str
    about: str
    fields: list[Field]
    example: str


class Endpoint(NamedTuple):
    """A method of an address, and all that can be said of it."""

    anchor: str
    method: str
    path: str
    summary: str
    about: str
    parameters: list[Field]
    body: list[Field]
    body_example: str
    answers: list[Answer]
    errors: list[Answer]


class Chapter(NamedTuple):
    """The endpoints of one kind of thing."""

    name: str
    endpoints: list[Endpoint]


class Schema(SpectacularAPIView):
    """The schema for programs, in YAML or JSON."""

    schema = None

    def get(self, request: Request, *args: Any, **kwargs: Any) -> HttpResponse:
        """Show it. Everybody may read it: there is no secret in it."""
        renderer: Any = request.accepted_renderer
        named = {"Content-Disposition": f'inline; filename="Guardian.{renderer.format}"'}
        kind = renderer.media_type
        return HttpResponse(_rendered(kind), content_type=f"{kind}; charset=utf-8", headers=named)

    def handle_exception(self, exc: Exception) -> Response:
        """Tell what went wrong in JSON, whatever form the schema was asked for in."""
        self.request.accepted_renderer = JSONRenderer()
        self.request.accepted_media_type = JSONRenderer.media_type
        return super().handle_exception(exc)


@cache
def _rendered(kind: str) -> bytes:
    renderer = next(one for one in Schema.renderer_classes if one.media_type == kind)
    rendered: Any = renderer().render(schema(), renderer_context={})
    return bytes(rendered)


@cache
def schema() -> Object:
    """Return the schema, which is what the code says: it doesn't change while it runs."""
    described: Object = SchemaGenerator().get_schema(public=True)  # type: ignore[no-untyped-call]
    return described


@require_safe
def page(request: HttpRequest) -> HttpResponse:
    """Show the schema. Everybody may read it: there is no secret in it."""
    return render(request, "api/docs.html", {"chapters": chapters(), "section": "api"})


@cache
def chapters() -> list[Chapter]:
    """Return the endpoints in chapters, in the order of the table of contents."""
    described = schema()
    found: dict[str, list[Endpoint]] = {}
    for path, operations in described["paths"].items():
        for method in METHODS:
            if method in operations:
                operation = operations[method]
                found.setdefault(operation["tags"][0], []).append(_endpoint(described, path, method, operation))
    return [Chapter(name, endpoints) for name, endpoints in found.items()]


def _endpoint(schema: Object, path: str, method: str, operation: Object) -> Endpoint:
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    answers = [_answer(schema, status, answer) for status, answer in operation["responses"].items()]
    return Endpoint(
        operation["operationId"],
        method.upper(),
        path,
        operation.get("summary", ""),
        operation.get("description", ""),
        [
            Field(one["name"], _kind(schema, one["schema"]), one.get("required", False), one.get("description", ""))
            for one in operation.get("parameters", [])
        ],
        list(_fields(schema, body.get("schema", {}))),
        _example(body),
        [answer for answer in answers if answer.status < "4"],
        [answer for answer in answers if answer.status >= "4"],
    )


def _answer(schema: Object, status: str, answer: Object) -> Answer:
    content = answer.get("content", {}).get("application/json", {})
    return Answer(status, answer["description"], list(_fields(schema, content.get("schema", {}))), _example(content))


def _example(content: Object) -> str:
    for example in content.get("examples", {}).values():
        return json.dumps(example["value"], indent=2, ensure_ascii=False)
    return ""


def _fields(schema: Object, of: Object) -> Iterator[Field]:
    """Give the fields of an object; of an array, those of what is in it."""
    of = _resolved(schema, of)
    if of.get("type") == "array":
        of = _resolved(schema, of["items"])
    for name, field in of.get("properties", {}).items():
        about = field.get("description") or _resolved(schema, field).get("description", "")
        yield Field(name, _kind(schema, field), name in of.get("required", []), about.partition("\n")[0])


def _kind(schema: Object, of: Object) -> str:
    """Return what a value is, in a few words."""
    of = _resolved(schema, of)
    kind = of.get("format") or of.get("type", "anything")
    if "enum" in of:
        kind = " | ".join(str(value) for value in of["enum"])
    elif kind == "array":
        kind = f"list of {_kind(schema, of['items'])}"
    bounds = [f"{of[key]} {words}" for key, words in BOUNDS.items() if key in of]
    return ", ".join([kind, *bounds, *(["or null"] if of.get("nullable") else [])])


BOUNDS = {"minimum": "at least", "maximum": "at most", "maxLength": "characters at most", "maxItems": "of them at most"}


def _resolved(schema: Object, of: Object) -> Object:
    """Follow a reference, and keep what stands beside it."""
    for part in [of, *of.get("allOf", []), *of.get("oneOf", [])[:1]]:
        if "$ref" in part:
            named: Object = schema["components"]["schemas"][part["$ref"].rpartition("/")[2]]
            return {**named, **{key: value for key, value in of.items() if key in ("description", "nullable")}}
    return of
