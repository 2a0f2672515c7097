"""Home and the list of 10,000 queues, and the list's refresh, for an owner of 500 queues and for an operator."""

from functools import partial
from statistics import quantiles

from django.conf import settings
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from accounts.models import Owner, PulseUser
from queues.models import Queue, Watch
from tools.benchmarks.figures import Figure, in_turn, timed
from tools.benchmarks.passes import vacuum
from tools.benchmarks.running import size

QUEUES = size(10_000, 1_000)
PULSE_USERS = 20
ROUNDS = size(100, 10)

MAX_MILLISECONDS = 100


def queue_list() -> list[Figure]:
    owner, operator = _fill()
    settings.ALLOWED_HOSTS = ["testserver"]
    return [*_visit("an owner", owner), *_visit("an operator", operator, refresh=True)]


def _fill() -> tuple[Owner, Owner]:
    """Insert the rows of queues, most of them OK, evenly distributed over the Pulse users."""
    owner = Owner.objects.create_user("owner@example.org", vouched=True)
    operator = Owner.objects.create_superuser("operator@example.org")
    users = PulseUser.objects.bulk_create(PulseUser(username=f"user-{number:02}") for number in range(PULSE_USERS))
    users[0].owners.add(owner)
    now = timezone.now()
    Queue.objects.bulk_create(
        Queue(
            vhost="/", name=f"queue/{users[number % PULSE_USERS].username}/jobs-{number:06}", type="classic",
            durable=True, auto_delete=False, exclusive=False, node="rabbit@node-1",
            pulse_user=users[number % PULSE_USERS],
            ready=number * 7919 % 2_000 + (3_000 if number % 37 == 0 else 0), unacknowledged=number % 11,
            state=Queue.State.WARNED if number % 37 == 0 else Queue.State.OK, consumers=number % 4,
            first_seen=now, last_seen=now,
        )
        for number in range(QUEUES)
    )  # fmt: skip
    Watch.objects.create(listed_at=now)
    vacuum()
    return owner, operator


def _visit(who: str, visitor: Owner, *, refresh: bool = False) -> list[Figure]:
    client = Client()
    client.force_login(visitor)
    page = client.get(reverse("queues"))
    assert page.context is None, "templates must not be watched while they are measured"
    assert page.text.count('<tr id="') == 50, "the page doesn't show fifty queues"

    def milliseconds(page: str, **headers: str) -> float:
        took, answer = timed(lambda: client.get(reverse(page), headers=headers))
        assert answer.status_code == 200, answer
        return took * 1000

    requests = {
        f"{who}'s home": partial(milliseconds, "home"),
        f"{who}'s list of queues": partial(milliseconds, "queues"),
    }
    if refresh:
        requests["the list's refresh"] = partial(milliseconds, "queues", **{"HX-Request": "true"})
    where = f"pages, {QUEUES:,} queues, 95th percentile"
    return [
        Figure(where, what, "ms", [quantiles(times, n=20)[-1]], limit=MAX_MILLISECONDS)
        for what, times in in_turn(ROUNDS, warm_ups=5, **requests).items()
    ]
