"""The one id of what is being done: from a request through the tasks that it hands over to the calls to the broker.

Every line of the log has it, and every event that is sent to Sentry.
"""

import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from typing import Any

from celery import signals
from django.conf import settings
from django.http import HttpRequest, HttpResponse

HEADER = "X-Request-ID"

TASK_HEADER = "guardian_request_id"
"""What the id is called among the headers of a task's message."""

_VALID_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")

_current: ContextVar[str] = ContextVar("request_id", default="")
_running: dict[str, Token[str]] = {}  # by the id of the task


def current() -> str:
    """Return the id of what is being done; empty where nothing was begun."""
    return _current.get()


def new_id() -> str:
    """Return an id that nobody has had before."""
    return secrets.token_hex(8)


def set_new_id() -> None:
    """Do all that this process does from here on under a new id."""
    _current.set(new_id())


@contextmanager
def use_id(given: str = "") -> Iterator[str]:
    """Do what is inside under the id that is given, or under a new one where that can't be used."""
    token = _current.set(_valid_or_new(given))
    try:
        yield current()
    finally:
        _current.reset(token)


class RequestId:
    """Middleware: each request has an id, the one that a proxy in front gave it or a new one, and is answered with it.

    Where there is no proxy, as ``GUARDIAN_PROXIES`` says, the id is a new one: whoever asks could otherwise do so under
    the id of somebody else's request, in the log and in the audit trail.

    It stands first, so that whatever goes wrong behind it is logged with the id.
    """

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        """Pass on, and mark the answer."""
        given = request.headers.get(HEADER, "") if settings.ALLAUTH_TRUSTED_PROXY_COUNT > 0 else ""
        with use_id(given) as request_id:
            response = self.get_response(request)
            response[HEADER] = request_id
            return response


@signals.before_task_publish.connect
def attach_id(headers: dict[str, Any], **_: Any) -> None:
    """Put the id into the message that hands over a task. What beat hands over begins with a new one."""
    headers[TASK_HEADER] = current() or new_id()


@signals.task_prerun.connect
def adopt_id(task_id: str, task: Any, **_: Any) -> None:
    """Run a task under the id that its message has; one that is called where it is handed over has that already."""
    _running[task_id] = _current.set(_valid_or_new(task.request.get(TASK_HEADER) or current()))


@signals.task_postrun.connect
def forget_id(task_id: str, **_: Any) -> None:
    """Forget the id of a task that has ended."""
    if token := _running.pop(task_id, None):
        _current.reset(token)


def _valid_or_new(given: Any) -> str:
    return given if isinstance(given, str) and _VALID_ID.fullmatch(given) else new_id()
