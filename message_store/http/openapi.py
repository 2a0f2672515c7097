"""The message store in the OpenAPI schema. Its views are plain functions, so their description is written here."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Any

from message_store.http.request_parsing import MAX_BEATS, MAX_LEASE_SECONDS
from message_store.models import MAX_NAME_LENGTH
from message_store.parameters import MAX_NUMBER, MAX_PARTITIONS
from message_store.queues import CONSISTENCIES, DEFAULT_TTL_SECONDS, MAX_BATCH, MAX_READ, MAX_TTL_SECONDS, TYPES

Schema = dict[str, Any]

TAG = "message-store"
JSON, FORM, BYTES = "application/json", "application/x-www-form-urlencoded", "application/octet-stream"

KEY: Schema = {"applicationKey": []}
TOKEN: Schema = {"tokenAuth": []}
NOTHING: Schema = {}
READERS = (KEY, TOKEN)
"""The application, and owners whom the queue's principals name."""
ANYONE = (*READERS, NOTHING)
"""Readers, and anyone if the queue is public."""


def _text(description: str = "", **more: Any) -> Schema:
    return {"type": "string", **({"description": description} if description else {}), **more}


def _number(least: int, most: int, description: str, **more: Any) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most, "description": description, **more}


def _flag(description: str) -> Schema:
    return {"type": "boolean", "description": description}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _object(description: str, required: Mapping[str, Schema], optional: Mapping[str, Schema] = NOTHING) -> Schema:
    found: Schema = {"type": "object", "description": description, "properties": {**required, **optional}}
    return {**found, "required": list(required)} if required else found


def _map(description: str, values: Schema) -> Schema:
    return {"type": "object", "description": description, "additionalProperties": values}


def _answer(description: str, required: Mapping[str, Schema], optional: Mapping[str, Schema] = NOTHING) -> Schema:
    return _object(description, {"status": _ref("StoreStatus"), **required}, optional)


NAME = _text(maxLength=MAX_NAME_LENGTH)
ID = _text("A UUID1 in 32 hex digits.", example="3a6592301e0911e190b1002500f0fa7c")
TIMESTAMP = _text("Seconds since 1970, with 7 decimals.", example="1323085902.3310384")
PARTITION = {"type": "integer", "minimum": 1}
TTL = _number(1, MAX_TTL_SECONDS, f"Seconds until it expires; by default {DEFAULT_TTL_SECONDS}.")
SETTINGS: dict[str, Schema] = {
    "partitions": _number(1, MAX_PARTITIONS, "It can only grow."),
    "type": _text("`public`: anyone may read it.", enum=list(TYPES)),
    "consistency": _text("For stores with several levels.", enum=list(CONSISTENCIES)),
}
PRINCIPLES = _text("Who may read and delete messages, separated by commas.", example="app:shop,bid:ann@example.org")
CREATED = {"type": "number", "description": "Seconds since 1970."}
WRITABLE: dict[str, Schema] = {**SETTINGS, "principles": PRINCIPLES}
QUEUE: dict[str, Schema] = {"queue_name": NAME, **SETTINGS, "principles": _list(_text())}
POSITIONS = _map("Message ids by partition.", ID)
PARTITIONS = {"type": "object", "additionalProperties": _list(PARTITION), "example": {"orders": [1, 2]}}

COMPONENTS: dict[str, Schema] = {
    "StoreStatus": _text("Whether the request succeeded.", enum=["ok", "error"]),
    "StoreError": _answer(
        "An error of the message store.",
        {
            "error_msg": {
                **_map("A text for each invalid field, or for the kind of error.", _text()),
                "example": {"partition": "4 is greater than maximum value 1"},
            }
        },
    ),
    "StoreDone": _answer("The request succeeded.", {}),
    "StoreQueueSettings": _object("Settings of a queue. Those that are left out stay as they are.", {}, WRITABLE),
    "NewStoreQueue": {
        **_object("A queue to create.", {}, {"queue_name": {**NAME, "description": "By default a UUID."}, **WRITABLE}),
        "example": {"queue_name": "orders", "partitions": 2},
    },
    "StoreQueue": _answer("A queue of the message store.", QUEUE, {"created": CREATED}),
    "StoreQueueInfo": _answer(
        "What readers learn about a queue.", {"queue_name": NAME, **SETTINGS, "created": CREATED}
    ),
    "ListedStoreQueue": _object(
        "A queue in a list. Only `queue_name` is there without `details` and `include_count`.",
        {"queue_name": NAME},
        {
            **QUEUE,
            "application": NAME,
            "created": CREATED,
            "count": {"type": "integer", "description": "The number of its messages."},
        },
    ),
    "StoreQueues": _answer("Queues of an application.", {"queues": _list(_ref("ListedStoreQueue"))}),
    "StoredMessage": _object(
        "A message.",
        {
            "message_id": ID,
            "timestamp": TIMESTAMP,
            "partition": PARTITION,
            "content_type": _text("That of the request; empty: there was none."),
            "body": _text("The text, or base64."),
        },
        {"encoding": _text("Only if `body` is base64.", enum=["base64"])},
    ),
    "StoredMessages": _answer(
        "Messages.",
        {"messages": _list(_ref("StoredMessage"))},
        {"truncated": _flag("True if the answer ended early because of its size. Go on after its last message.")},
    ),
    "NewStoredMessage": _object(
        "A message to post.",
        {"body": _text("Text, or base64.", minLength=1, example="a book")},
        {
            "ttl": TTL,
            "partition": {**PARTITION, "description": "By default a random one."},
            "content_type": _text(),
            "encoding": _text("`base64` if `body` is base64.", enum=["base64"]),
        },
    ),
    "NewStoredMessages": _object(
        "Messages to post, all or none.",
        {"messages": {**_list(_ref("NewStoredMessage")), "minItems": 1, "maxItems": MAX_BATCH}},
    ),
    "PostedMessage": _object("Where a message is.", {"key": ID, "timestamp": TIMESTAMP, "partition": PARTITION}),
    "PostedMessages": _answer("Where the messages are, in their order.", {"messages": _list(_ref("PostedMessage"))}),
    "NewStorePositions": {**POSITIONS, "example": {"1": ID["example"]}},
    "StorePositions": _answer(
        "The ids of a consumer's last processed messages.",
        {"positions": POSITIONS},
        {"waiting": {**_list(PARTITION), "description": "Those of the partitions in `waiting` with later messages."}},
    ),
    "StoreMove": _object("A move of a position.", {"from": {**ID, "nullable": True}, "to": ID}),
    "StoreMoves": {
        **_map("Moves by partition. A position that is no longer at `from` (null: none) stays.", _ref("StoreMove")),
        "example": {"1": {"from": None, "to": ID["example"]}},
    },
    "NewStoreWorker": _object(
        "A worker that joins.",
        {"seconds": {"type": "number", "minimum": 1, "maximum": MAX_LEASE_SECONDS, "example": 15}},
    ),
    "StoreRemoval": _answer("Whether the worker was removed.", {"removed": _flag("Whether it was removed.")}),
    "StoreWorker": _object(
        "A worker of a consumer.",
        {
            "worker": _text(),
            "beats": {"type": "integer", "description": "The number of its heartbeats."},
            "seconds": {"type": "number", "description": "The duration of its leases."},
        },
    ),
    "StoreLeases": _answer(
        "The workers of a consumer, in the order of joining, and the holders of leases.",
        {
            "workers": _list(_ref("StoreWorker")),
            "leases": _map("The worker by queue and partition.", {"type": "object", "additionalProperties": _text()}),
        },
    ),
    "StoreLeaseChanges": _object("Partitions by queue.", {}, {"acquire": PARTITIONS, "release": PARTITIONS}),
    "HeldStoreLeases": _answer("The partitions of `acquire` that the worker has now.", {"leases": PARTITIONS}),
}

PATH_PARAMETERS = {
    "application": "The name of an application.",
    "queue": "The name of a queue.",
    "message_ids": "Message ids, separated by commas: `2:3a65…` (partition 2) or `3a65…` (partition 1).",
    "consumer": "The name of a consumer.",
    "worker": "A UUID in 32 hex digits, which the worker chooses when it joins.",
}


def _parameter(where: str, name: str, schema: Schema) -> Schema:
    plain = {key: value for key, value in schema.items() if key != "description"}
    return {"in": where, "name": name, "description": schema["description"], "schema": plain}


_query = partial(_parameter, "query")
_header = partial(_parameter, "header")

X_TTL = _header("X-TTL", TTL)
IF_MATCH = _header("If-Match", _text("Only if the positions still have this `ETag`."))


@dataclass(frozen=True)
class Operation:
    """A method of a path. ``body`` is a schema by media type, ``answer`` the name of a schema."""

    id: str
    summary: str
    answer: str
    description: str = ""
    parameters: tuple[Schema, ...] = ()
    body: Mapping[str, Schema] = field(default_factory=dict)
    is_body_required: bool = True
    security: tuple[Schema, ...] = (KEY,)
    status: HTTPStatus = HTTPStatus.OK

    def as_openapi(self, path: str) -> Schema:
        in_path = [
            {**_parameter("path", name, _text(PATH_PARAMETERS[name])), "required": True}
            for name in re.findall(r"{(\w+)}", path)
        ]
        success: Schema = {"description": self.status.phrase, "content": {JSON: {"schema": _ref(self.answer)}}}
        if self.answer == "StorePositions":
            success["headers"] = {"ETag": {"schema": _text("The version of the positions."), "required": True}}
        described: Schema = {
            "operationId": self.id,
            "summary": self.summary,
            "description": self.description,
            "parameters": [*in_path, *self.parameters],
            "tags": [TAG],
            "security": list(self.security),
            "responses": {str(self.status.value): success, **{str(one): ERRORS[one] for one in self._errors(path)}},
        }
        if self.body:
            content = {media_type: {"schema": schema} for media_type, schema in self.body.items()}
            described["requestBody"] = {"content": content, "required": self.is_body_required}
        return described

    def _errors(self, path: str) -> list[int]:
        if self.security == (NOTHING,):
            return [503]
        errors = {401, 403, 404, 429, 503}
        if self.body:
            errors |= {400, 408, 411, 413}
        if self.parameters or "message_ids" in path or "consumer" in path:
            errors.add(400)
        if IF_MATCH in self.parameters:
            errors.add(412)
        return sorted(errors)


def _error(description: str, headers: Mapping[str, Schema] | None = None) -> Schema:
    answer: Schema = {"description": description, "content": {JSON: {"schema": _ref("StoreError")}}}
    return {**answer, "headers": headers} if headers else answer


AUTHENTICATE = {"WWW-Authenticate": {"description": "How to authenticate.", "schema": _text(), "required": True}}
RETRY_AFTER = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer"}, "required": True}}
ERRORS = {
    400: _error("A field, a parameter or the body is invalid, or the application has no room left (`quota`)."),
    401: _error("The key or the token is unknown, revoked or expired.", AUTHENTICATE),
    403: _error("The caller may not do this."),
    404: _error("The application or the queue doesn't exist, or the worker was removed."),
    408: _error("The body timed out."),
    411: _error("The body has no Content-Length."),
    412: _error("The positions changed since they were read. Read them again."),
    413: _error("The body is too large."),
    429: _error("The application posts too often, or too many wrong keys came from your address.", RETRY_AFTER),
    503: _error("The store is unreachable. Try again later.", RETRY_AFTER),
}

PATHS: dict[str, dict[str, Operation]] = {
    "/v1/{application}": {
        "get": Operation(
            "store_list_queues",
            "List the queues of an application by name",
            "StoreQueues",
            parameters=(
                _query("limit", _number(1, MAX_NUMBER, f"By default {MAX_READ}, which is also the most.")),
                _query("offset", _text("The name of the first queue.")),
                _query("details", _flag("Return the settings, too.")),
                _query("include_count", _flag("Return the numbers of messages, too.")),
            ),
        ),
        "post": Operation(
            "store_create_queue",
            "Create a queue, or change an existing one",
            "StoreQueue",
            "The number of partitions of an existing queue never shrinks.",
            body={FORM: _ref("NewStoreQueue")},
            is_body_required=False,
            status=HTTPStatus.CREATED,
        ),
    },
    "/v1/{application}/{queue}": {
        "get": Operation(
            "store_read_messages",
            "Read the messages of a queue, partition after partition",
            "StoredMessages",
            parameters=(
                _query("since", _text("Where to begin: a message id, or a time in seconds since 1970.")),
                _query("limit", _number(1, MAX_READ, f"Of each partition; by default {MAX_READ}.")),
                _query("order", _text("By default ascending.", enum=["ascending", "descending"])),
                _query("partitions", _text("Such as `1,2`; by default 1. Those that don't exist are empty.")),
            ),
            security=ANYONE,
        ),
        "post": Operation(
            "store_post_messages",
            "Post a message, or several as JSON",
            "PostedMessages",
            "A body that is not JSON is one message.",
            parameters=(
                X_TTL,
                _header("X-Partition", {**PARTITION, "description": "Of a single message; by default a random one."}),
            ),
            body={JSON: _ref("NewStoredMessages"), BYTES: _text(format="binary")},
            status=HTTPStatus.CREATED,
        ),
        "put": Operation(
            "store_change_queue",
            "Change the settings of a queue",
            "StoreQueue",
            "An empty `principles` removes all.",
            body={FORM: _ref("StoreQueueSettings")},
            is_body_required=False,
        ),
        "delete": Operation("store_delete_queue", "Delete a queue with its messages", "StoreDone"),
    },
    "/v1/{application}/{queue}/info": {
        "get": Operation(
            "store_queue_info", "Show the settings of a queue to its readers", "StoreQueueInfo", security=ANYONE
        ),
    },
    "/v1/{application}/{queue}/positions/{consumer}": {
        "get": Operation(
            "store_positions",
            "Show how far a consumer has processed a queue",
            "StorePositions",
            parameters=(_query("waiting", _text("Partitions such as `1,2`, to learn which have later messages.")),),
            security=READERS,
        ),
        "put": Operation(
            "store_set_positions",
            "Set a consumer's positions in some partitions",
            "StorePositions",
            parameters=(IF_MATCH,),
            body={JSON: _ref("NewStorePositions")},
            security=READERS,
        ),
        "post": Operation(
            "store_move_positions",
            "Move a consumer's positions from one message to another",
            "StorePositions",
            body={JSON: _ref("StoreMoves")},
            security=READERS,
        ),
        "delete": Operation(
            "store_delete_positions",
            "Delete a consumer's positions",
            "StoreDone",
            parameters=(IF_MATCH,),
            security=READERS,
        ),
    },
    "/v1/{application}/consumers/{consumer}/workers/{worker}": {
        "put": Operation(
            "store_join_worker",
            "Add a worker to those of a consumer",
            "StoreDone",
            body={FORM: _ref("NewStoreWorker")},
            status=HTTPStatus.CREATED,
        ),
        "post": Operation("store_renew_worker", "Send a heartbeat of a worker", "StoreDone"),
        "delete": Operation(
            "store_remove_worker",
            "Remove a worker and its leases",
            "StoreRemoval",
            parameters=(_query("beats", _number(0, MAX_BEATS, "Only if it has sent this number of heartbeats.")),),
        ),
    },
    "/v1/{application}/consumers/{consumer}/leases/{worker}": {
        "get": Operation("store_leases", "List the workers and leases of a consumer", "StoreLeases"),
        "post": Operation(
            "store_change_leases",
            "Acquire and release partitions for a worker",
            "HeldStoreLeases",
            body={JSON: _ref("StoreLeaseChanges")},
        ),
    },
    "/v1/{application}/{queue}/{message_ids}": {
        "get": Operation(
            "store_read_messages_by_id",
            "Read messages by their ids",
            "StoredMessages",
            "Ids that don't exist are left out.",
            security=ANYONE,
        ),
        "put": Operation(
            "store_overwrite_messages",
            "Overwrite messages, or create them with these ids",
            "PostedMessages",
            parameters=(X_TTL,),
            body={BYTES: _text(format="binary")},
        ),
        "delete": Operation(
            "store_delete_messages",
            "Delete messages by their ids",
            "StoreDone",
            "Ids that don't exist are ignored.",
            security=READERS,
        ),
    },
    "/__heartbeat__": {
        "get": Operation("store_heartbeat", "Check that the store answers", "StoreDone", security=(NOTHING,)),
    },
}


def add_message_store(result: Schema, **kwargs: Any) -> Schema:
    """Add the message store to the schema. This is one of drf-spectacular's ``POSTPROCESSING_HOOKS``."""
    for path, operations in PATHS.items():
        result["paths"][path] = {method: one.as_openapi(path) for method, one in operations.items()}
    result["components"]["schemas"] |= COMPONENTS
    result["components"]["securitySchemes"]["applicationKey"] = {
        "type": "apiKey",
        "in": "header",
        "name": "Authorization",
        "description": "`Application`, a space, and a key of an application, which operators create.",
    }
    return result
