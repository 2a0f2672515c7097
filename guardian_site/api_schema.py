"""The REST API's description in OpenAPI."""

from http import HTTPStatus
from typing import Any

from drf_spectacular.extensions import OpenApiAuthenticationExtension, OpenApiSerializerExtension
from drf_spectacular.openapi import AutoSchema
from drf_spectacular.plumbing import build_bearer_security_scheme_object
from rest_framework.permissions import AllowAny

from core.confirmation import MAX_EXAMPLES, AffectedQueue, ConfirmationRequired, Effect
from core.rest import PROBLEM, confirmation_details, problem_details

PROBLEM_SCHEMA = {
    "type": "object",
    "description": "An error as problem details (RFC 9457).",
    "properties": {
        "type": {"type": "string", "format": "uri-reference"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "instance": {"type": "string", "format": "uri-reference"},
    },
    "required": ["type", "title", "status", "detail", "instance"],
}
CONFIRMATION_REQUIRED_SCHEMA = {
    "description": "The change deletes queues or messages. To confirm it, repeat it within 10 minutes with `confirm`.",
    "allOf": [
        {"$ref": "#/components/schemas/Problem"},
        {
            "type": "object",
            "properties": {
                "effect": {
                    "type": "object",
                    "description": "Of a restore: messages, limit, fits and losses. Of other changes: the first three.",
                    "properties": {
                        "queues": {"type": "integer", "description": "The number of queues that are deleted."},
                        "messages": {
                            "type": "integer",
                            "description": "Messages in queues of known length, as last listed; those to restore.",
                        },
                        "examples": {
                            "type": "array",
                            "description": f"The longest queues, at most {MAX_EXAMPLES}.",
                            "items": {
                                "type": "object",
                                "properties": {
                                    "name": {"type": "string"},
                                    "vhost": {"type": "string"},
                                    "messages": {"type": "integer", "nullable": True},
                                },
                                "required": ["name", "vhost", "messages"],
                            },
                        },
                        "limit": {"type": "integer", "nullable": True, "description": "The queue's deletion limit."},
                        "fits": {
                            "type": "integer",
                            "nullable": True,
                            "description": "Messages with which the queue reaches its deletion limit; null: unknown.",
                        },
                        "losses": {
                            "type": "array",
                            "description": "Settings with which the broker drops messages.",
                            "items": {
                                "type": "object",
                                "properties": {
                                    "text": {"type": "string"},
                                    "argument": {
                                        "type": "string",
                                        "nullable": True,
                                        "description": "For `without`; null: it can't be left out.",
                                    },
                                },
                                "required": ["text", "argument"],
                            },
                        },
                    },
                    "required": ["messages"],
                },
                "confirm": {"type": "string", "description": "For this change by this user and these queues."},
            },
            "required": ["effect", "confirm"],
        },
    ],
}
MESSAGES = {"type": "array", "items": {"type": "string"}}
FIELD_ERRORS_SCHEMA = {
    "type": "object",
    "description": (
        "The errors of each field or parameter. The errors of a list are keyed by position, and those of objects in a "
        "list by position and field."
    ),
    "additionalProperties": {
        "oneOf": [
            MESSAGES,
            {
                "type": "object",
                "additionalProperties": {
                    "oneOf": [MESSAGES, {"type": "object", "additionalProperties": MESSAGES}],
                },
            },
        ]
    },
    "example": {"owners": ["Nobody with this address can own Pulse users here: carol@example.org"]},
}


def add_errors(result: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
    """Add the schemas of errors. This is one of drf-spectacular's ``POSTPROCESSING_HOOKS``."""
    result["components"]["schemas"] |= {
        "ConfirmationRequired": CONFIRMATION_REQUIRED_SCHEMA,
        "FieldErrors": FIELD_ERRORS_SCHEMA,
        "Problem": PROBLEM_SCHEMA,
    }
    return result


METHODS = ("get", "post", "put", "patch", "delete")


def order_methods(result: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
    """Sort the methods of each path. drf-spectacular's order is random."""
    for path, operations in result["paths"].items():
        result["paths"][path] = {method: operations[method] for method in METHODS if method in operations}
    return result


ERRORS = {
    400: ("The body, a field or a parameter is invalid.", "The body isn't JSON: unexpected end of data."),
    401: ("There is no token and no session, or the token is unknown, revoked or expired.", "Invalid token."),
    403: (
        "You may not do this: you have no access to the broker, it is for operators, it needs a token instead of a "
        "session or a session instead of a token, the token's scope does not allow it, or a session's request has no "
        "CSRF token.",
        "carol@example.org has no access to the broker yet, so nothing can be created there.",
    ),
    404: ("It does not exist, or is not yours.", "There is nothing at this URL."),
    408: ("The body timed out.", "The body timed out."),
    409: ("It conflicts with the current state; the detail says why.", "The broker refuses this: the queue is in use."),
    411: ("The body is chunked, without a Content-Length.", "Send the body with a Content-Length, not in chunks."),
    413: ("The body is too large.", "The body is too large."),
    415: ("The body isn't declared as application/json.", 'Unsupported media type "text/plain" in request.'),
    429: (
        "You exceeded a rate limit, or too many wrong tokens came from your address.",
        "Too many wrong tokens and keys: the limit is 30 within a minute. Wait 34 seconds.",
    ),
    503: (
        "Guardian can't reach the broker; try again later. The detail says if the outcome is unknown.",
        "Guardian can't reach the broker at the moment.",
    ),
}

RESULT_COUNT = {"description": "The number of results on all pages.", "schema": {"type": "integer"}, "required": True}
LINK = {
    "description": "Links to other pages (RFC 8288): first, prev, next and last.",
    "schema": {"type": "string"},
    "required": True,
}
NO_STORE = {
    "description": "no-store: the response contains a secret, which is shown only once.",
    "schema": {"type": "string", "enum": ["no-store"]},
    "required": True,
}
RETRY_AFTER = {"description": "Seconds to wait.", "schema": {"type": "integer"}, "required": True}
AUTHENTICATE = {
    "description": "How to sign in.",
    "schema": {"type": "string", "example": "Token"},
    "required": True,
}


STANDARD_ACTIONS = {"list", "create", "retrieve", "update", "partial_update", "destroy"}


class EndpointSchema(AutoSchema):
    """The description of an endpoint.

    The summary and the description are the docstring. Statuses of errors that follow from the endpoint's permissions,
    parameters and pagination are added to those of ``extend_schema``. All errors have the same schemas, so
    ``extend_schema`` names only their statuses, except for ``ConfirmationRequired``.
    """

    def get_operation_id(self) -> str:
        """Return the resource and the action, such as ``queues_purge``: drf-spectacular's would be ``…_create``."""
        action = getattr(self.view, "action", None)
        if action is None:
            return str(super().get_operation_id()).removesuffix("_create")
        if action in STANDARD_ACTIONS:
            return str(super().get_operation_id())
        resource = self.path.removeprefix("/api/").partition("/")[0].replace("-", "_")
        return f"{resource}_{action}"

    def get_summary(self) -> str | None:
        return self._docstring()[0]

    def get_description(self) -> str:  # type: ignore[override]  # as drf-spectacular has it
        return self._docstring()[1]

    def _docstring(self) -> tuple[str, str]:
        summary, _, rest = super().get_description().partition("\n\n")
        return summary.replace("\n", " ").rstrip("."), " ".join(rest.split())

    def _get_response_bodies(self, direction: Any = "response") -> dict[str, Any]:
        responses = super()._get_response_bodies(direction)
        for status in self._implied_errors():
            responses.setdefault(str(status), self._error(str(status)))
        return dict(sorted(responses.items()))

    def _implied_errors(self) -> list[int]:
        statuses = []
        if AllowAny not in self.view.permission_classes:
            statuses += [401, 403, 429]
        if self._get_request_body():
            statuses += [400, 408, 411, 413, 415]
        parameters = self._get_parameters()
        if any(parameter["in"] == "query" for parameter in parameters):
            statuses.append(400)
        if any(parameter["in"] == "path" for parameter in parameters) or self._is_paged():
            statuses.append(404)
        return statuses

    def _is_paged(self) -> bool:
        return bool(self._is_list_view() and self._get_paginator())  # type: ignore[no-untyped-call]

    def _get_response_for_code(
        self, serializer: Any, status_code: str, media_types: Any = None, direction: Any = "response"
    ) -> dict[str, Any]:
        if serializer is ConfirmationRequired:
            return self._confirmation_required(status_code)
        if int(status_code) >= 400:
            return self._error(status_code)
        response: dict[str, Any] = super()._get_response_for_code(  # type: ignore[no-untyped-call]
            serializer, status_code, media_types, direction
        )
        response["description"] = response["description"] or HTTPStatus(int(status_code)).phrase
        return response

    def _error(self, status: str) -> dict[str, Any]:
        description, detail = ERRORS[int(status)]
        example = problem_details(HTTPStatus(int(status)), detail, self.path)
        content: dict[str, Any] = {}
        if status == "400":  # the usual one comes first: generated clients read only that
            content["application/json"] = {"schema": {"$ref": "#/components/schemas/FieldErrors"}}
        content[PROBLEM] = {"schema": {"$ref": "#/components/schemas/Problem"}, "example": example}
        headers = self._get_response_headers_for_code(status)
        return {"description": description, "content": content, **({"headers": headers} if headers else {})}

    def _confirmation_required(self, status: str) -> dict[str, Any]:
        response = self._error(status)
        effect = Effect([AffectedQueue(1, "/", "queue/alice/builds", 420)])
        example = confirmation_details(ConfirmationRequired(effect, "eyJjaGFuZ2Ui…", ""), self.path)
        schemas = [{"$ref": f"#/components/schemas/{name}"} for name in ("ConfirmationRequired", "Problem")]
        response["content"][PROBLEM] = {"schema": {"anyOf": schemas}, "example": example}
        response["description"] = f"It deletes queues or messages and is not confirmed. Or: {response['description']}"
        return response

    def _get_request_body(self, direction: Any = "request") -> Any:
        if self.method == "DELETE" and isinstance(serializer := self.get_request_serializer(), type):
            # drf-spectacular describes no bodies of DELETE.
            content = {"schema": self.resolve_serializer(serializer, direction).ref}
            return {"content": {"application/json": content}}
        return super()._get_request_body(direction)  # type: ignore[no-untyped-call]

    def _get_response_headers_for_code(self, status_code: str, direction: Any = "response") -> dict[str, Any]:
        headers: dict[str, Any] = super()._get_response_headers_for_code(status_code, direction)
        if status_code == "200" and self._is_paged():
            headers |= {"X-Result-Count": RESULT_COUNT, "Link": LINK}
        if status_code in ("200", "201") and getattr(self.view, "action", "") in getattr(
            self.view, "tells_secrets", ()
        ):
            headers["Cache-Control"] = NO_STORE
        if status_code == "401":
            headers["WWW-Authenticate"] = AUTHENTICATE
        if status_code in ("429", "503"):
            headers["Retry-After"] = RETRY_AFTER
        return headers


class PartialUser(OpenApiSerializerExtension):  # type: ignore[no-untyped-call]
    """The user as ``users/me/`` shows it: with ``field``, other fields are missing."""

    target_class = "agents.api.services.UserSerializer"

    def map_serializer(self, auto_schema: AutoSchema, direction: Any) -> dict[str, Any]:
        schema: dict[str, Any] = auto_schema._map_serializer(self.target, direction, bypass_extensions=True)  # type: ignore[no-untyped-call]
        return {name: value for name, value in schema.items() if name != "required"}


class TokenScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]
    target_class = "accounts.access.authentication.TokenAuthentication"
    name = "tokenAuth"
    priority = 1

    def get_security_definition(self, auto_schema: AutoSchema) -> dict[str, Any]:
        definition: dict[str, Any] = build_bearer_security_scheme_object("Authorization", "Token")
        definition["description"] = (
            "`Token`, a space, and a token from `/tokens/` or POST `/api/tokens/`. Agents need the scope `agent`; "
            "`read` suffices for most GET requests; everything else needs `all`."
        )
        return definition
