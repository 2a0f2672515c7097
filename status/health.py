"""Whether this process is alive, and whether it can do its work. Asked by machines."""

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
    """Answer 200: the process answers."""
    return JsonResponse({"status": "ok"})


@never_cache
@require_safe
def ready(request: HttpRequest) -> JsonResponse:
    """Answer 200 when the database, the task queue and the broker answer, else 503 and which of them doesn't."""
    parts = {"database": _database, "task_queue": facts.connect_to_task_queue, "broker": _broker}
    answers = {name: _answers(name, ask) for name, ask in parts.items()}
    return JsonResponse(answers, status=200 if all(answers.values()) else 503)


def _answers(name: str, ask: Callable[[], object]) -> bool:
    try:
        ask()
    except Exception as error:  # whatever a driver raises, the answer is "no"; the reason is for the log alone
        logger.warning("Not ready: the %s does not answer: %s", name, error)
        return False
    return True


def _database() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")


def _broker() -> None:
    patience = rules.BROKER_PATIENCE_SECONDS
    _, answer = facts.time_answer(lambda: broker.management(read_timeout=patience).whoami(), patience)
    if answer.verdict.is_wrong:
        raise ConnectionError(answer.verdict.sentence)
