"""Registrations, alternating with an empty request and a bare PUT. Runs in ``tools.benchmarks.child``."""

import base64
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.client import HTTPConnection
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from django.conf import settings

from accounts.models import AuthToken, Owner
from agents.models import AgentIdentity, AgentVhost, EventSubscription, ObjectType, Offering
from agents.registration.credentials import PresentedToken
from agents.registration.queues import create_subscription
from core import broker
from rabbit.arguments import REGISTERED_QUEUE_ARGUMENTS
from rabbit.names import subscription_queue
from tools.benchmarks.serving import served

CONCURRENT = 8
NEW_AGENTS = 20
WARM_UPS = 18

CONCURRENT_ROUNDS_FACTOR = 8
"""Concurrent registrations have more rounds, since their times vary by up to a third between rounds."""

# A POST to this list authenticates and then answers 405. So it has the costs of every request without any work.
EMPTY = "/api/event-subscription-queues/"

DECLARED = json.dumps({"durable": True, "auto_delete": False, "arguments": dict(REGISTERED_QUEUE_ARGUMENTS)}).encode()


class Wanted(NamedTuple):
    """A queue to register: the request's path and body, and the queue's vhost and name."""

    path: str
    body: bytes
    vhost: str
    name: str


class _Client:
    """A persistent connection to a server. A time-out fails the benchmark."""

    def __init__(self, port: int, authorization: str) -> None:
        self._connection = HTTPConnection("127.0.0.1", port, timeout=30)
        self._headers = {"Authorization": authorization, "Content-Type": "application/json"}

    def milliseconds(self, method: str, path: str, body: bytes, status: int) -> float:
        """Send a request, check the status, and return its duration."""
        began = time.perf_counter()
        self._connection.request(method, path, body, self._headers)
        answer = self._connection.getresponse()
        text = answer.read()
        took = time.perf_counter() - began
        assert answer.status == status, f"{method} {path}: {answer.status} {text[:300]!r}"
        return took * 1000


class _Agents:
    """An owner whose agents register with the server on this port."""

    def __init__(self, port: int, email: str) -> None:
        self._port = port
        self.owner = Owner.objects.create_user(email, vouched=True)
        self._presented = PresentedToken(*AuthToken.objects.create(user=self.owner))  # type: ignore[no-untyped-call]

    def subscribe(self) -> EventSubscription:
        """Create a subscription with its login."""
        return create_subscription(self.owner, self._presented)

    def wanted(self, subscription: EventSubscription, queues: int) -> list[Wanted]:
        """Return new queues for this subscription."""
        path = f"/api/event-subscriptions/{subscription.uuid.hex}/create_queue/"
        wanted: list[Wanted] = []
        while len(wanted) < queues:
            offering = self.offering()
            for kind in ObjectType.values[: queues - len(wanted)]:
                body = json.dumps({"offering_uuid": offering.uuid.hex, "object_type": kind}).encode()
                name = subscription_queue(subscription.uuid.hex, offering.uuid.hex, kind)
                wanted.append(Wanted(path, body, self.owner.uuid.hex, name))
        return wanted

    def offering(self) -> Offering:
        """Create an offering that these agents may subscribe to."""
        offering = Offering.objects.create(name="Cluster")
        offering.members.add(self.owner)
        return offering

    def api(self) -> _Client:
        """Return a client of the REST API with the token."""
        return _Client(self._port, f"Token {self._presented.key}")


def measure(vhost: str, queues: int, rounds: int) -> dict[str, Any]:
    """Return the milliseconds of registrations, of an empty ``post``, and of a bare ``put`` of the same queue.

    ``eight``: eight existing agents register ``queues`` new queues concurrently, in ``CONCURRENT_ROUNDS_FACTOR`` times
    ``rounds`` rounds; each time is divided by the number of queues. ``one``: an existing agent registers ``queues`` new
    queues one by one in ``rounds`` rounds, alternating with the floor. ``again``: the same queues again. ``agents``:
    new agents, from the request for a subscription to the answer about the queue.

    The eight come first. After them all threads of the server take turns, as in a long-running server, whereas a new
    server uses its first thread and then randomly more.
    """
    with ExitStack() as stack:
        port = stack.enter_context(served())
        stack.callback(_clean_up)
        agents = _Agents(port, "agents@example.org")
        subscription = agents.subscribe()
        _one_after_another(agents, agents.wanted(subscription, WARM_UPS), 201)
        wanted = agents.wanted(subscription, rounds * queues)
        return {
            "eight": _eight_at_once(agents, queues, CONCURRENT_ROUNDS_FACTOR * rounds),
            "one": _one_after_another(agents, wanted, 201),
            "again": _one_after_another(agents, wanted, 200),
            "agents": [_new_agent(port, number) for number in range(NEW_AGENTS)],
        }


def _one_after_another(agents: _Agents, wanted: Sequence[Wanted], status: int) -> dict[str, list[float]]:
    """Register these queues, and check the status: 201 for new, 200 for existing ones."""
    api, broker = agents.api(), _broker()
    times: dict[str, list[float]] = {"registration": [], "post": [], "put": []}
    for one in wanted:
        times["registration"].append(_register(api, one, status))
        if status == 201:
            _delete(one)
        # In the order of a registration: after a change the broker is idle during the request, then gets its PUT.
        times["post"].append(_post_nothing(api))
        times["put"].append(_put(broker, one, 201 if status == 201 else 204))
    return times


def _eight_at_once(agents: _Agents, queues: int, rounds: int) -> dict[str, list[float]]:
    subscriptions = [agents.subscribe() for _ in range(CONCURRENT)]
    times: dict[str, list[float]] = {"registration": [], "post": [], "put": []}
    with ThreadPoolExecutor(CONCURRENT) as pool:

        def all_of_them(
            client: Callable[[], _Client], ask: Callable[[_Client, Wanted], float], wanted: Sequence[Sequence[Wanted]]
        ) -> float:
            clients = [client() for _ in wanted]  # new ones: gunicorn closes connections after two idle seconds
            began = time.perf_counter()
            list(pool.map(lambda client, several: [ask(client, one) for one in several], clients, wanted))
            return (time.perf_counter() - began) * 1000 / sum(map(len, wanted))

        for _ in range(rounds):
            wanted = [agents.wanted(subscription, queues // CONCURRENT) for subscription in subscriptions]
            times["registration"].append(all_of_them(agents.api, lambda api, one: _register(api, one, 201), wanted))
            times["post"].append(all_of_them(agents.api, lambda api, one: _post_nothing(api), wanted))
            for several in wanted:
                for one in several:
                    _delete(one)
            times["put"].append(all_of_them(_broker, lambda broker, one: _put(broker, one, 201), wanted))
    return times


def _new_agent(port: int, number: int) -> float:
    """Return the milliseconds of a new agent's registration, with its vhost, user, permissions and queue."""
    agents = _Agents(port, f"agent-{number}@example.org")
    identity = AgentIdentity.objects.create(owner=agents.owner, offering=agents.offering(), name="agent")
    api = agents.api()
    subscribe = f"/api/agent-identities/{identity.uuid.hex}/register_event_subscription/"
    took = api.milliseconds("POST", subscribe, b'{"observable_object_type": "order"}', 201)
    subscription = EventSubscription.objects.get(identity=identity)
    return took + _register(api, agents.wanted(subscription, 1)[0], 201)


def _register(api: _Client, one: Wanted, status: int) -> float:
    return api.milliseconds("POST", one.path, one.body, status)


def _post_nothing(api: _Client) -> float:
    return api.milliseconds("POST", EMPTY, b"", 405)


def _put(broker: _Client, one: Wanted, status: int) -> float:
    return broker.milliseconds("PUT", f"/api/queues/{one.vhost}/{one.name}", DECLARED, status)


def _delete(one: Wanted) -> None:
    with broker.session(one.vhost) as session:
        session.delete_queue(one.name)


def _broker() -> _Client:
    url = urlsplit(settings.RABBITMQ_MANAGEMENT_URL)
    assert url.port is not None
    credentials = f"{unquote(url.username or '')}:{unquote(url.password or '')}".encode()
    return _Client(url.port, f"Basic {base64.b64encode(credentials).decode()}")


def _clean_up() -> None:
    """Delete everything from the broker."""
    management = broker.management()
    for subscription in EventSubscription.objects.all():
        management.delete_user(subscription.rmq_username)
    for vhost in AgentVhost.objects.all():
        management.delete_vhost(vhost.name)
