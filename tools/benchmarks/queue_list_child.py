"""The list of queues: requests, alternating with their bare SQL statements. Runs in ``tools.benchmarks.child``."""

import gc
import time
from collections.abc import Callable, Sequence
from statistics import quantiles
from typing import Any

from django.conf import settings
from django.db import connection
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from accounts.models import Owner, PulseUser
from queues.models import Queue, Watch

PULSE_USERS = 20
WARM_UPS = 5

Statement = tuple[str, Any]


def measure(vhost: str, queues: int, rounds: int) -> dict[str, Any]:
    """Return the times of the list for an owner of a twentieth of the queues, and for an operator, who sees all.

    For each visitor and kind of request: alternating milliseconds of the ``request`` and of its statements
    (``database``), the request's ``p95``, and the number of ``statements``.
    """
    owner, operator = _fill(vhost, queues)
    settings.ALLOWED_HOSTS = ["testserver"]
    return {"owner": _visit(owner, rounds), "operator": _visit(operator, rounds)}


def _fill(vhost: str, queues: int) -> tuple[Owner, Owner]:
    """Insert the rows of queues, most of them OK, evenly distributed over the Pulse users."""
    owner = Owner.objects.create_user("owner@example.org", vouched=True)
    operator = Owner.objects.create_superuser("operator@example.org")
    pulse_users = PulseUser.objects.bulk_create(
        PulseUser(username=f"user-{number:02}", ready=True) for number in range(PULSE_USERS)
    )
    pulse_users[0].owners.add(owner)
    now = timezone.now()
    Queue.objects.bulk_create(
        Queue(
            vhost=vhost,
            name=f"queue/{pulse_users[number % PULSE_USERS].username}/jobs-{number:06}",
            type="classic",
            durable=True,
            auto_delete=False,
            exclusive=False,
            node="rabbit@node-1",
            pulse_user=pulse_users[number % PULSE_USERS],
            ready=number * 7919 % 2_000 + (3_000 if number % 37 == 0 else 0),
            unacknowledged=number % 11,
            state=Queue.State.WARNED if number % 37 == 0 else Queue.State.OK,
            consumers=number % 4,
            first_seen=now,
            last_seen=now,
        )
        for number in range(queues)
    )
    Watch.objects.create(listed_at=now)
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("ANALYZE")
    return owner, operator


def _visit(visitor: Owner, rounds: int) -> dict[str, Any]:
    """Measure a visitor's list, a search, and the refresh."""
    client = Client()
    client.force_login(visitor)
    address = reverse("queues")
    page = client.get(address)
    assert page.context is None, "templates must not be watched while they are measured"
    shown = page.content.decode().partition('"shown": "')[2].partition('"')[0]
    assert shown.count(",") == 49, "the page doesn't show fifty queues"
    return {
        "list": _measured(lambda: client.get(address), rounds),
        "search": _measured(lambda: client.get(address, {"search": "jobs-000", "ordering": "-share"}), rounds),
        "refresh": _measured(lambda: client.get(address, {"shown": shown}, headers={"HX-Request": "true"}), rounds),
    }


def _measured(request: Callable[[], Any], rounds: int) -> dict[str, Any]:
    for _ in range(WARM_UPS):
        answer = request()
        assert answer.status_code == 200, answer
    statements = _statements(request)
    requests, database = [], []
    gc.collect()
    for _ in range(rounds):
        requests.append(_milliseconds(request))
        database.append(_milliseconds(lambda: _ask(statements)))
    return {
        "request": requests,
        "database": database,
        "p95": quantiles(requests, n=20)[-1],
        "statements": len(statements),
    }


def _statements(request: Callable[[], Any]) -> list[Statement]:
    """Return the statements of a request as the driver gets them."""
    noted: list[Statement] = []

    def note(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        noted.append((sql, params))
        return execute(sql, params, many, context)

    with connection.execute_wrapper(note):
        request()
    return noted


def _ask(statements: Sequence[Statement]) -> None:
    with connection.cursor() as cursor:
        for sql, params in statements:
            cursor.execute(sql, params)
            cursor.fetchall()


def _milliseconds(do: Callable[[], Any]) -> float:
    began = time.perf_counter()
    do()
    return (time.perf_counter() - began) * 1000
