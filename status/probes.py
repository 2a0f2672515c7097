"""``/healthz`` and ``/readyz``: is this process alive, and can it work?"""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait

from django.conf import settings
from django.db import connection
from django.http import HttpRequest, JsonResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from core import broker
from core.masking import mask_secrets, text_of
from message_store.store import store
from rabbit import checkup
from status import facts, rules

logger = logging.getLogger(__name__)

MAX_AGE_SECONDS = 2.0
"""How long ``/readyz`` repeats an answer."""

TIMEOUT_SECONDS = 1.8
"""How long ``/readyz`` waits for the parts, so that it answers within two seconds."""


@never_cache
@require_safe
def alive(request: HttpRequest) -> JsonResponse:
    return JsonResponse({"status": "ok"})


@never_cache
@require_safe
def ready(request: HttpRequest) -> JsonResponse:
    """Answer 200 if the database, the task queue, the broker and the message store work, otherwise 503.

    Each is written to, except the message store. The body says which work, and the log why the others don't. A message
    store in the database is not listed.
    """
    answers = readiness.answers()
    return JsonResponse(answers, status=200 if all(answers.values()) else 503)


class Readiness:
    """Which parts work, checked at most once in ``MAX_AGE_SECONDS``.

    Each part is checked in a thread of its own. A part that hangs is not checked again until that thread has ended.
    Only one request at a time waits for the checks; others get the last answers, so that they block no worker.
    """

    def __init__(self, parts: Mapping[str, Callable[[], object]]) -> None:
        self._parts = parts
        self._lock = threading.Lock()
        self._running: dict[str, Future[bool]] = {}
        self._answers = dict.fromkeys(parts, False)
        self._checked_at = -math.inf

    def answers(self) -> dict[str, bool]:
        """Return for each part whether it works."""
        if self._lock.acquire(blocking=False):
            try:
                if time.monotonic() - self._checked_at >= MAX_AGE_SECONDS:
                    self._answers = self._check()
                    self._checked_at = time.monotonic()
            finally:
                self._lock.release()
        return self._answers

    def _check(self) -> dict[str, bool]:
        for name, check in self._parts.items():
            if name not in self._running or self._running[name].done():
                self._running[name] = _in_thread(name, check)
        done, _ = wait(self._running.values(), TIMEOUT_SECONDS)
        answers = {name: future in done and future.result() for name, future in self._running.items()}
        for name in self._parts:
            if self._running[name] not in done:
                logger.warning("Not ready: the %s does not answer within %g s", name, TIMEOUT_SECONDS)
        return answers


def _in_thread(name: str, check: Callable[[], object]) -> "Future[bool]":
    """Call a check in a daemon thread, which doesn't keep the process from ending."""
    future: Future[bool] = Future()
    threading.Thread(
        target=lambda: future.set_result(_succeeds(name, check)), name=f"check {name}", daemon=True
    ).start()
    return future


def _succeeds(name: str, check: Callable[[], object]) -> bool:
    try:
        check()
    except Exception as error:  # drivers raise errors of any type; only the log has the reason
        logger.warning("Not ready: the %s does not work: %s", name, mask_secrets(text_of(error)))
        return False
    return True


def _database() -> None:
    try:
        facts.write_to_database()
    finally:
        connection.close()


def _broker() -> None:
    timeout = rules.BROKER_TIMEOUT_SECONDS
    _, answer = facts.time_answer(lambda: broker.management(read_timeout=timeout).whoami(), timeout)
    if answer.verdict.is_wrong:
        raise ConnectionError(answer.verdict.sentence)
    if settings.RABBIT_URL:
        checkup.check_vhost(broker.amqp_url(), settings.GUARDIAN_PULSE_VHOST, timeout)


def _message_store() -> None:
    store().queues("", limit=1)


PARTS: dict[str, Callable[[], object]] = {
    "database": _database,
    "task_queue": facts.write_to_task_queue,
    "broker": _broker,
}
if settings.MESSAGE_STORE != "database":
    PARTS["message_store"] = _message_store

readiness = Readiness(PARTS)
