"""``/healthz`` and ``/readyz``: is this process alive, and can it work?"""

import logging
from collections.abc import Callable

from django.db import connection
from django.http import HttpRequest, JsonResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from core import broker
from status import facts, rules

logger = logging.getLogger(__name__)


@never_cache
@require_safe
def alive(request: HttpRequest) -> JsonResponse:
    """Answer 200."""
    return JsonResponse({"status": "ok"})


@never_cache
@require_safe
def ready(request: HttpRequest) -> JsonResponse:
    """Answer 200 if the database, the task queue and the broker answer, otherwise 503. The body says which do."""
    parts = {"database": _database, "task_queue": facts.connect_to_task_queue, "broker": _broker}
    answers = {name: _answers(name, check) for name, check in parts.items()}
    return JsonResponse(answers, status=200 if all(answers.values()) else 503)


def _answers(name: str, check: Callable[[], object]) -> bool:
    try:
        check()
    except Exception as error:  # drivers raise errors of any type; only the log has the reason
        logger.warning("Not ready: the %s does not answer: %s", name, error)
        return False
    return True


def _database() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")


def _broker() -> None:
    timeout = rules.BROKER_TIMEOUT_SECONDS
    _, answer = facts.time_answer(lambda: broker.management(read_timeout=timeout).whoami(), timeout)
    if answer.verdict.is_wrong:
        raise ConnectionError(answer.verdict.sentence)
