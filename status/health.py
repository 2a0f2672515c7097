"""Whether this process is alive, and whether it can do its work. Asked by machines."""

import logging
from collections.abc import Callable

from celery import current_app
from django.db import connection
from django.http import HttpRequest, JsonResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from core import broker

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
    parts = {"database": _database, "task_queue": _task_queue, "broker": _broker}
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


def _task_queue() -> None:
    with current_app.connection_for_write(connect_timeout=2) as celery_connection:
        celery_connection.ensure_connection(max_retries=1, timeout=2)


def _broker() -> None:
    broker.management().whoami()
