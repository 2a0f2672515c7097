"""The request id, which connects a request, its tasks and its requests to the broker.

Each log line and each event for Sentry contains it.
"""

import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from typing import Any

from celery import signals
from django.conf import settings
from django.http import HttpRequest, HttpResponse

from core.middleware import Middleware

HEADER = "X-Request-ID"

TASK_HEADER = "guardian_request_id"
"""The header of a task's message with the id."""

_VALID_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")

_current: ContextVar[str] = ContextVar("request_id", default="")
_running: dict[str, Token[str]] = {}  # by task id


def current() -> str:
    return _current.get()


def new_id() -> str:
    return secrets.token_hex(8)


def set_new_id() -> None:
    _current.set(new_id())


@contextmanager
def use_id(given: str = "") -> Iterator[str]:
    """Use the given id inside the ``with`` block, or a new one if it is invalid."""
    token = _current.set(_valid_or_new(given))
    try:
        yield current()
    finally:
        _current.reset(token)


class RequestId(Middleware):
    """Middleware: give each request an id, and return it in the response.

    The id is the one from the proxy, if ``GUARDIAN_PROXIES`` says there is one, otherwise a new one. Without a proxy, a
    client could use the id of another client's request in the log and the audit trail.

    This is the first middleware, so that errors in all others are logged with the id.
    """

    def __call__(self, request: HttpRequest) -> HttpResponse:
        given = request.headers.get(HEADER, "") if settings.ALLAUTH_TRUSTED_PROXY_COUNT > 0 else ""
        with use_id(given) as request_id:
            response = self.get_response(request)
            response[HEADER] = request_id
            return response


@signals.before_task_publish.connect
def attach_id(headers: dict[str, Any], **_: Any) -> None:
    """Add the id to a task's message. Tasks of beat get a new one."""
    headers[TASK_HEADER] = current() or new_id()


@signals.task_prerun.connect
def adopt_id(task_id: str, task: Any, **_: Any) -> None:
    """Use the id in a task's message. A task that runs in the caller's process keeps the caller's id."""
    _running[task_id] = _current.set(_valid_or_new(task.request.get(TASK_HEADER) or current()))


@signals.task_postrun.connect
def forget_id(task_id: str, **_: Any) -> None:
    if token := _running.pop(task_id, None):
        _current.reset(token)


def _valid_or_new(given: Any) -> str:
    return given if isinstance(given, str) and _VALID_ID.fullmatch(given) else new_id()
