"""The HTTP API of the message store: plain views that answer JSON."""

import base64
import logging
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from http import HTTPStatus
from typing import Any, NamedTuple, cast

import orjson
from django.conf import settings
from django.db import InterfaceError, OperationalError
from django.http import HttpRequest, HttpResponse
from django.views.decorators.csrf import csrf_exempt
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.request import Request

from accounts.access import scopes
from accounts.access.authentication import TokenAuthentication
from core import limits
from guardian_store import _ids as ids
from message_store import applications, leases, parameters, principals, queues
from message_store.http import request_parsing
from message_store.parameters import Invalid, MessageRef
from message_store.principals import ANONYMOUS, Caller
from message_store.quota import QuotaReached
from message_store.store import (
    BatchTooLarge,
    NoQueue,
    PositionsChanged,
    StoredMessage,
    StoredQueue,
    StoreUnavailable,
    store,
)

MAX_RESPONSE_BYTES = 32 * 1024 * 1024
"""The size from which a response ends early: that of its JSON, where a control character takes six bytes."""
MIN_MESSAGES = 2
"""The messages of a response of any size. A reader that continues from the last one gets that one again, first."""
RETRY_AFTER_SECONDS = "5"
WRITES = "requests that write positions or leases"
"""They have a rate limit of their own, so that posts don't keep workers from progress."""

logger = logging.getLogger(__name__)

_tokens = TokenAuthentication()

Call = Callable[..., HttpResponse]


class AccessDenied(Exception):
    def __init__(self, text: str = "Access was denied") -> None:
        super().__init__(text)


class NoApplication(Exception):
    pass


class _Problem(NamedTuple):
    """How an exception is answered: its status, the invalid field or the kind of error, and the text for it.

    Without a text, the exception's own is sent.
    """

    status: HTTPStatus
    field: str
    text: str = ""
    headers: Mapping[str, str] = {}


PROBLEMS: dict[type[Exception], _Problem] = {
    QuotaReached: _Problem(HTTPStatus.BAD_REQUEST, "quota"),
    applications.UnknownKey: _Problem(
        HTTPStatus.UNAUTHORIZED, "InvalidApplicationKey", "There is no such key", {"WWW-Authenticate": "Application"}
    ),
    AuthenticationFailed: _Problem(HTTPStatus.UNAUTHORIZED, "InvalidToken", headers={"WWW-Authenticate": "Token"}),
    AccessDenied: _Problem(HTTPStatus.FORBIDDEN, "AccessDenied"),
    NoApplication: _Problem(HTTPStatus.NOT_FOUND, "application", "There is no such application"),
    NoQueue: _Problem(HTTPStatus.NOT_FOUND, "queue_name", "There is no such queue"),
    leases.NoWorker: _Problem(HTTPStatus.NOT_FOUND, "worker"),
    request_parsing.BodyTooSlow: _Problem(HTTPStatus.REQUEST_TIMEOUT, "body"),
    request_parsing.LengthRequired: _Problem(HTTPStatus.LENGTH_REQUIRED, "body", "Content-Length is required"),
    PositionsChanged: _Problem(
        HTTPStatus.PRECONDITION_FAILED, "positions", "The positions have changed since you read them. Read them again"
    ),
    request_parsing.BodyTooLarge: _Problem(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "body"),
    BatchTooLarge: _Problem(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        "messages",
        "The messages are too large for one request. Post them in several",
    ),
    limits.RateLimitExceeded: _Problem(HTTPStatus.TOO_MANY_REQUESTS, "rate"),
    **dict.fromkeys(
        (StoreUnavailable, OperationalError, InterfaceError),
        _Problem(
            HTTPStatus.SERVICE_UNAVAILABLE,
            "storage",
            "The store is unreachable. Try again later",
            {"Retry-After": RETRY_AFTER_SECONDS},
        ),
    ),
}


def _view(**calls: Call) -> Call:
    """Return a view that dispatches on the HTTP method and turns exceptions into the API's error format."""

    @csrf_exempt
    def view(request: HttpRequest, **named: str) -> HttpResponse:
        call = calls.get("GET" if request.method == "HEAD" else str(request.method))
        if call is None:
            text = f"{request.method} is not allowed here"
            return error_answer(HTTPStatus.METHOD_NOT_ALLOWED, {"method": text}, {"Allow": ", ".join(calls)})
        try:
            return call(request, **named)
        except Invalid as invalid:
            return error_answer(HTTPStatus.BAD_REQUEST, invalid.errors)
        except tuple(PROBLEMS) as error:
            status, field, text, headers = next(PROBLEMS[kind] for kind in PROBLEMS if isinstance(error, kind))
            if isinstance(error, limits.RateLimitExceeded):
                headers = {"Retry-After": str(error.seconds)}
            if status == HTTPStatus.SERVICE_UNAVAILABLE:
                logger.error("%s %s: the store is unreachable: %s", request.method, request.path, error)
            return error_answer(status, {field: text or str(error)}, headers)

    return wraps(next(iter(calls.values())))(view)


# Queues of an application


def _list(request: HttpRequest, application: str) -> HttpResponse:
    _require_manager(request, application)
    given = request_parsing.query(request)
    details, with_count = request_parsing.flag(given, "details"), request_parsing.flag(given, "include_count")
    found = queues.queues(application, start=given.get("offset", ""), limit=given.get("limit") or None)
    listed: list[dict[str, Any]] = [_details(queue) if details else {"queue_name": queue.name} for queue in found]
    if with_count and found:
        for entry, count in zip(listed, store().count(found), strict=True):
            entry["count"] = count
    return _ok({"queues": listed})


def _create(request: HttpRequest, application: str) -> HttpResponse:
    _require_manager(request, application)
    given = request_parsing.form(request)
    created = queues.create(application, given.get("queue_name") or None, **_settings(given))
    return _ok(_settings_of(created), HTTPStatus.CREATED)


def _update(request: HttpRequest, application: str, queue: str) -> HttpResponse:
    stored = _managed_queue(request, application, queue)
    updated = queues.update(stored, **_settings(request_parsing.form(request)))
    return _ok({**_settings_of(updated), "created": updated.created.timestamp()})


def _delete(request: HttpRequest, application: str, queue: str) -> HttpResponse:
    stored = _managed_queue(request, application, queue)
    store().remove(stored.application, stored.name)
    return _ok({})


# Messages


def _read(request: HttpRequest, application: str, queue: str) -> HttpResponse:
    stored = _accessible_queue(request, application, queue, principals.may_read)
    given = request_parsing.query(request)
    errors: dict[str, str] = {}

    def parse(field: str, parser: Callable[[str], Any], default: Any) -> Any:
        text = given.get(field)
        return parameters.collect_error(errors, field, lambda: parser(text)) if text else default

    order = parse("order", lambda text: parameters.parse_choice(text, ("ascending", "descending")), "ascending")
    start = parse("since", lambda text: parameters.parse_since(text, descending=order == "descending"), None)
    limit = parse("limit", lambda text: parameters.parse_number(text, 1, queues.MAX_READ), queues.MAX_READ)
    most = parameters.MAX_NUMBER
    partitions = parse("partitions", lambda text: parameters.parse_partitions(text, 0, most), [1])
    if errors:
        raise Invalid(errors)
    is_descending = order == "descending"
    found = queues.read(
        stored, partitions, start=start, limit=limit, descending=is_descending, batch_bytes=queues.BATCH_BYTES
    )
    return _messages(found)


def _post(request: HttpRequest, application: str, queue: str) -> HttpResponse:
    stored = _accessible_queue(request, application, queue, principals.may_post)
    _limit_rate(application)
    if request.content_type == "application/json":
        posted = queues.post_all(stored, *request_parsing.batch(request))
    else:
        posted = [queues.post(stored, request_parsing.message_input(request))]
    return _ok({"messages": _posted(posted)}, HTTPStatus.CREATED)


def _read_ids(request: HttpRequest, application: str, queue: str, message_ids: str) -> HttpResponse:
    stored = _accessible_queue(request, application, queue, principals.may_read)
    return _messages(queues.read_ids(stored, parameters.parse_ids(message_ids), batch_bytes=queues.BATCH_BYTES))


def _overwrite(request: HttpRequest, application: str, queue: str, message_ids: str) -> HttpResponse:
    stored = _accessible_queue(request, application, queue, principals.may_post)
    _limit_rate(application)
    refs = parameters.parse_ids(message_ids)
    queues.overwrite(stored, refs, request_parsing.message_input(request))
    return _ok({"messages": _posted(refs)})


def _delete_ids(request: HttpRequest, application: str, queue: str, message_ids: str) -> HttpResponse:
    stored = _accessible_queue(request, application, queue, principals.may_delete)
    queues.delete(stored, parameters.parse_ids(message_ids))
    return _ok({})


# Positions


def _positions(request: HttpRequest, application: str, queue: str, consumer: str) -> HttpResponse:
    stored = _accessible_queue(request, application, queue, principals.may_use_positions)
    waiting = request_parsing.query(request).get("waiting")
    if not waiting:
        return _positions_of(stored, consumer)
    try:
        partitions = parameters.parse_partitions(waiting, 1, stored.partitions)
    except ValueError as error:
        raise Invalid({"waiting": str(error)}) from None
    return _positions_of(stored, consumer, partitions)


def _set_positions(request: HttpRequest, application: str, queue: str, consumer: str) -> HttpResponse:
    stored = _writable_positions(request, application, queue)
    queues.set_positions(stored, consumer, request_parsing.positions(request), request_parsing.versions(request))
    return _positions_of(stored, consumer)


def _writable_positions(request: HttpRequest, application: str, queue: str) -> StoredQueue:
    stored = _accessible_queue(request, application, queue, principals.may_use_positions)
    _limit_rate(application, WRITES)
    return stored


def _advance_positions(request: HttpRequest, application: str, queue: str, consumer: str) -> HttpResponse:
    stored = _writable_positions(request, application, queue)
    if request_parsing.versions(request) is not None:
        raise Invalid({"If-Match": "Use PUT or DELETE with it. POST compares each position with its from"})
    return _positions_answer(queues.advance_positions(stored, consumer, request_parsing.json_object(request)))


def _positions_of(queue: StoredQueue, consumer: str, waiting: Sequence[int] = ()) -> HttpResponse:
    positions = queues.positions(queue, consumer)
    more = {"waiting": queues.waiting(queue, positions, waiting)} if waiting else {}
    return _positions_answer(positions, **more)


def _positions_answer(positions: Mapping[int, uuid.UUID], **more: Any) -> HttpResponse:
    by_partition = {str(partition): message_id.hex for partition, message_id in sorted(positions.items())}
    response = _ok({"positions": by_partition, **more})
    response["ETag"] = f'"{queues.version_of(positions)}"'
    return response


def _delete_positions(request: HttpRequest, application: str, queue: str, consumer: str) -> HttpResponse:
    stored = _writable_positions(request, application, queue)
    queues.delete_positions(stored, consumer, request_parsing.versions(request))
    return _ok({})


# Workers of a consumer, and their leases on partitions


def _join(request: HttpRequest, application: str, consumer: str, worker: str) -> HttpResponse:
    _require_manager(request, application)
    _limit_rate(application, WRITES)
    seconds = request_parsing.form(request).get("seconds", "")
    leases.join(application, *request_parsing.worker(consumer, worker), request_parsing.lease_seconds(seconds))
    return _ok({}, HTTPStatus.CREATED)


def _renew(request: HttpRequest, application: str, consumer: str, worker: str) -> HttpResponse:
    _require_manager(request, application)
    leases.renew(application, *request_parsing.worker(consumer, worker))
    return _ok({})


def _remove_worker(request: HttpRequest, application: str, consumer: str, worker: str) -> HttpResponse:
    _require_manager(request, application)
    beats = request_parsing.beats(request_parsing.query(request).get("beats"))
    removed = leases.remove_worker(application, *request_parsing.worker(consumer, worker), beats)
    return _ok({"removed": removed})


def _lease_table(request: HttpRequest, application: str, consumer: str, worker: str) -> HttpResponse:
    _require_manager(request, application)
    request_parsing.worker(consumer, worker)
    table = leases.lease_table(application, consumer)
    by_queue: dict[str, dict[str, str]] = {}
    for (queue, number), holder in table.holders.items():
        by_queue.setdefault(queue, {})[str(number)] = holder
    workers = [{"worker": one.id, "beats": one.beats, "seconds": one.seconds} for one in table.workers]
    return _ok({"workers": workers, "leases": by_queue})


def _change_leases(request: HttpRequest, application: str, consumer: str, worker: str) -> HttpResponse:
    _require_manager(request, application)
    _limit_rate(application, WRITES)
    named = request_parsing.worker(consumer, worker)
    given = request_parsing.json_object(request)
    to_release = request_parsing.partitions(given, "release")
    to_acquire = _existing(application, request_parsing.partitions(given, "acquire"))
    leases.release(application, *named, to_release)
    by_queue: dict[str, list[int]] = {}
    for queue, number in sorted(leases.acquire(application, *named, to_acquire)):
        by_queue.setdefault(queue, []).append(number)
    return _ok({"leases": by_queue})


def _existing(application: str, partitions: Sequence[leases.QueuePartition]) -> list[leases.QueuePartition]:
    """Return which of these partitions exist. Raises Invalid for ``acquire`` if they are of too many queues."""
    names = {queue for queue, _ in partitions}
    if len(names) > queues.MAX_READ:
        raise Invalid({"acquire": f"{len(names)} queues are more than {queues.MAX_READ}"})
    numbers = {}
    for name in names:
        with suppress(NoQueue):
            numbers[name] = queues.find(application, name).partitions
    return [(queue, number) for queue, number in partitions if number <= numbers.get(queue, 0)]


def _info(request: HttpRequest, application: str, queue: str) -> HttpResponse:
    details = _details(_accessible_queue(request, application, queue, principals.may_read))
    return _ok({field: details[field] for field in ("queue_name", "partitions", "type", "consistency", "created")})


def _heartbeat(request: HttpRequest) -> HttpResponse:
    """Answer whether the store answers. The clients of the original service request it."""
    store().queues("", limit=1)
    return _ok({})


def _not_found(request: HttpRequest) -> HttpResponse:
    return error_answer(HTTPStatus.NOT_FOUND, {"path": "This address does not exist"})


application_queues = _view(GET=_list, POST=_create)
queue_messages = _view(GET=_read, POST=_post, PUT=_update, DELETE=_delete)
single_messages = _view(GET=_read_ids, PUT=_overwrite, DELETE=_delete_ids)
consumer_positions = _view(GET=_positions, POST=_advance_positions, PUT=_set_positions, DELETE=_delete_positions)
consumer_workers = _view(PUT=_join, POST=_renew, DELETE=_remove_worker)
consumer_leases = _view(GET=_lease_table, POST=_change_leases)
queue_info = _view(GET=_info)
heartbeat = _view(GET=_heartbeat)
not_found = csrf_exempt(_not_found)


# Authentication and permissions


def _caller(request: HttpRequest) -> Caller:
    """Authenticate a request by its Authorization header. Raises UnknownKey, AuthenticationFailed or AccessDenied."""
    words = str(request.META.get("HTTP_AUTHORIZATION", "")).split()
    if not words:
        return ANONYMOUS
    if words[0].lower() == "application":
        if len(words) != 2:
            raise applications.UnknownKey
        return Caller(application=applications.application_for_key(words[1]))
    found = _tokens.authenticate(cast(Request, request))  # it reads only headers
    if found is None:
        return ANONYMOUS
    owner, token = found
    request.user = owner  # for the log
    if not scopes.allows_all(token):
        raise AccessDenied(scopes.needs_all(token))
    return Caller(email=owner.email)


def _require_manager(request: HttpRequest, application: str) -> None:
    """Raise AccessDenied, or NoApplication, unless the request has this application's key."""
    caller = _caller(request)
    if not principals.may_manage(application, caller):
        if not applications.exists(application):
            raise NoApplication
        raise AccessDenied


def _managed_queue(request: HttpRequest, application: str, name: str) -> StoredQueue:
    _require_manager(request, application)
    return queues.find(application, name)


def _accessible_queue(
    request: HttpRequest, application: str, name: str, is_allowed: Callable[[StoredQueue, Caller], bool]
) -> StoredQueue:
    """Return a queue, or raise AccessDenied unless ``is_allowed`` permits the caller."""
    caller = _caller(request)
    if caller.application != application and not applications.exists(application):
        raise NoApplication
    stored = queues.find(application, name)
    if not is_allowed(stored, caller):
        raise AccessDenied
    return stored


def _limit_rate(application: str, requests: str = "requests with messages") -> None:
    limits.consume(limits.RateLimit(requests, settings.MESSAGE_STORE_POSTS_PER_MINUTE, 60), application)


# Serialization


def _settings(given: dict[str, str]) -> dict[str, Any]:
    named = {name: given.get(name) or None for name in ("partitions", "type", "consistency")}
    return {**named, "principals": given.get("principles")}


def _settings_of(queue: StoredQueue) -> dict[str, Any]:
    return {
        "queue_name": queue.name,
        "partitions": queue.partitions,
        "type": queue.type,
        "consistency": queue.consistency,
        "principles": list(queue.principals),
    }


def _details(queue: StoredQueue) -> dict[str, Any]:
    return {**_settings_of(queue), "application": queue.application, "created": queue.created.timestamp()}


def _message(message: StoredMessage) -> dict[str, Any]:
    fields = {
        "message_id": message.id.hex,
        "timestamp": ids.timestamp(message.id),
        "partition": message.partition,
        "content_type": message.content_type,
    }
    try:
        return {**fields, "body": message.body.decode()}
    except UnicodeDecodeError:
        return {**fields, "body": base64.b64encode(message.body).decode(), "encoding": request_parsing.BASE64}


def _messages(found: Iterable[StoredMessage]) -> HttpResponse:
    """Return a response with these messages, or the first of them if it would be too large."""
    encoded: list[bytes] = []
    size = 0
    for message in found:
        if size >= MAX_RESPONSE_BYTES and len(encoded) >= MIN_MESSAGES:
            return _ok({"messages": [orjson.Fragment(one) for one in encoded], "truncated": True})
        encoded.append(orjson.dumps(_message(message)))
        size += len(encoded[-1])
    return _ok({"messages": [orjson.Fragment(one) for one in encoded]})


def _posted(posted: Iterable[MessageRef]) -> list[dict[str, Any]]:
    return [{"key": one.id.hex, "timestamp": ids.timestamp(one.id), "partition": one.partition} for one in posted]


def _ok(content: dict[str, Any], status: HTTPStatus = HTTPStatus.OK) -> HttpResponse:
    return _json(status, {"status": "ok", **content})


def error_answer(status: HTTPStatus, errors: dict[str, str], headers: Mapping[str, str] | None = None) -> HttpResponse:
    """Return an error response in the message store's format."""
    return _json(status, {"status": "error", "error_msg": errors}, headers)


def _json(status: HTTPStatus, content: dict[str, Any], headers: Mapping[str, str] | None = None) -> HttpResponse:
    all_headers = {"Content-Type": "application/json", "Cache-Control": "no-store", **(headers or {})}
    return HttpResponse(orjson.dumps(content), status=status, headers=all_headers)
