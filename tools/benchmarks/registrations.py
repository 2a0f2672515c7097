"""Registrations through the REST API under gunicorn, compared to an empty request and a bare PUT of the same queue."""

import base64
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from itertools import chain
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from django.conf import settings

from accounts.models import AuthToken, Owner
from agents.models import EventSubscription, ObjectType, Offering
from agents.registration.credentials import PresentedToken
from agents.registration.queues import create_subscription
from core import broker
from rabbit.arguments import REGISTERED_QUEUE_ARGUMENTS
from rabbit.names import subscription_queue
from tools.benchmarks.figures import Figure
from tools.benchmarks.load import guardian
from tools.benchmarks.running import size

CONCURRENT = 8
QUEUES = size(1000, 24)
CONCURRENT_ROUNDS = size(36, 3)
QUEUES_PER_ROUND = 13
"""New queues of each of the concurrent agents in a round."""

WARM_UPS = 18
MAX_RATIO = 2

# A POST to this list authenticates and then answers 405. So it has the costs of every request without any work.
EMPTY = "/api/event-subscription-queues/"

DECLARED = json.dumps({"durable": True, "auto_delete": False, "arguments": dict(REGISTERED_QUEUE_ARGUMENTS)}).encode()


class Wanted(NamedTuple):
    """A queue to register: the request's path and body, and the queue's vhost and name."""

    path: str
    body: bytes
    vhost: str
    name: str


class Client:
    def __init__(self, port: int, authorization: str) -> None:
        self._connection = HTTPConnection("127.0.0.1", port, timeout=30)
        self._headers = {"Authorization": authorization, "Content-Type": "application/json"}

    def send(self, method: str, path: str, body: bytes, status: int) -> float:
        began = time.perf_counter()
        self._connection.request(method, path, body, self._headers)
        answer = self._connection.getresponse()
        text = answer.read()
        took = time.perf_counter() - began
        assert answer.status == status, f"{method} {path}: {answer.status} {text[:300]!r}"
        return took * 1000


class Agents:
    """An owner whose agents register with the server on this port."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._owner = Owner.objects.create_user("agents@example.org", vouched=True)
        # With the scope of agents, EMPTY would answer 403.
        made = AuthToken.objects.create(user=self._owner, scope=AuthToken.Scope.ALL)  # type: ignore[no-untyped-call]
        self._presented = PresentedToken(*made)

    def subscribe(self) -> EventSubscription:
        return create_subscription(self._owner, self._presented)

    def wanted(self, subscription: EventSubscription, queues: int) -> list[Wanted]:
        path = f"/api/event-subscriptions/{subscription.uuid.hex}/create_queue/"
        wanted: list[Wanted] = []
        while len(wanted) < queues:
            offering = Offering.objects.create(name="Cluster")
            offering.members.add(self._owner)
            for kind in ObjectType.values[: queues - len(wanted)]:
                body = json.dumps({"offering_uuid": offering.uuid.hex, "object_type": kind}).encode()
                name = subscription_queue(subscription.uuid.hex, offering.uuid.hex, kind)
                wanted.append(Wanted(path, body, self._owner.uuid.hex, name))
        return wanted

    def api(self) -> Client:
        return Client(self._port, f"Token {self._presented.key}")


def broker_client() -> Client:
    url = urlsplit(settings.RABBITMQ_MANAGEMENT_URL)
    assert url.port is not None
    credentials = f"{unquote(url.username or '')}:{unquote(url.password or '')}".encode()
    return Client(url.port, f"Basic {base64.b64encode(credentials).decode()}")


def registrations() -> list[Figure]:
    """Measure registrations of eight agents at once, and of one.

    The eight come first. After them all threads of the server take turns, as in a long-running server, whereas a new
    server uses its first thread and then randomly more.
    """
    with guardian({"GUARDIAN_MAX_SUBSCRIPTIONS": "0"}) as stack:
        port = urlsplit(stack.addresses["web"]).port
        assert port is not None
        agents = Agents(port)
        subscription = agents.subscribe()
        one_after_another(agents, agents.wanted(subscription, WARM_UPS), 201)
        wanted = agents.wanted(subscription, QUEUES)
        eight, eight_floor = eight_at_once(agents)
        new, new_floor = one_after_another(agents, wanted, 201)
        existing, existing_floor = one_after_another(agents, wanted, 200)
    where = "agents"
    return [
        Figure(where, "register a queue", "ms", new, new_floor, MAX_RATIO),
        Figure(where, "register a queue, eight at once", "ms", eight, eight_floor, MAX_RATIO),
        Figure(where, "register an existing queue", "ms", existing, existing_floor),
        Figure(where, "new queues a second, eight at once", "", [1000 * len(eight) / sum(eight)]),
    ]


def one_after_another(agents: Agents, wanted: Sequence[Wanted], status: int) -> tuple[list[float], list[float]]:
    """Register these queues: status 201 for new, 200 for existing ones. Return milliseconds, and those of the floor."""
    api, bare = agents.api(), broker_client()
    took, floor = [], []
    for one in wanted:
        took.append(api.send("POST", one.path, one.body, status))
        if status == 201:
            delete(one)
        # In the order of a registration: after a change the broker is idle during the request, then gets its PUT.
        floor.append(api.send("POST", EMPTY, b"", 405) + put(bare, one, 201 if status == 201 else 204))
    return took, floor


def eight_at_once(agents: Agents) -> tuple[list[float], list[float]]:
    """Return the milliseconds of each round, divided by its number of queues, and those of the floor."""
    subscriptions = [agents.subscribe() for _ in range(CONCURRENT)]
    took, floor = [], []
    with ThreadPoolExecutor(CONCURRENT) as pool:

        def all_of_them(
            client: Callable[[], Client], ask: Callable[[Client, Wanted], float], wanted: Sequence[Sequence[Wanted]]
        ) -> float:
            clients = [client() for _ in wanted]  # new ones: gunicorn closes connections after two idle seconds
            began = time.perf_counter()
            list(pool.map(lambda client, several: [ask(client, one) for one in several], clients, wanted))
            return (time.perf_counter() - began) * 1000 / sum(map(len, wanted))

        for _ in range(CONCURRENT_ROUNDS):
            wanted = [agents.wanted(subscription, QUEUES_PER_ROUND) for subscription in subscriptions]
            took.append(all_of_them(agents.api, lambda api, one: api.send("POST", one.path, one.body, 201), wanted))
            posts = all_of_them(agents.api, lambda api, _: api.send("POST", EMPTY, b"", 405), wanted)
            for one in chain.from_iterable(wanted):
                delete(one)
            floor.append(posts + all_of_them(broker_client, lambda bare, one: put(bare, one, 201), wanted))
    return took, floor


def put(bare: Client, one: Wanted, status: int) -> float:
    return bare.send("PUT", f"/api/queues/{one.vhost}/{one.name}", DECLARED, status)


def delete(one: Wanted) -> None:
    with broker.session(one.vhost) as session:
        session.delete_queue(one.name)
