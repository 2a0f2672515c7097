"""Fixtures for agents: rows needed for a registration, and a broker that is restored afterwards."""

import contextlib
import itertools
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cached_property
from typing import Any

import pika
import pytest
from django.utils import timezone

from accounts.models import AuthToken, Owner
from agents.models import AgentIdentity, Consumer, EventSubscription, Offering, SubscriptionQueue
from agents.registration import queues as registration
from agents.registration.credentials import PresentedToken
from agents.registration.identities import create_identity
from core import removals
from core.models import Removal
from rabbit import names
from rabbit.errors import NotOnBroker
from rabbit.management import Management
from tests.support.toolbox import stored_queue

_numbers = itertools.count(1)


def make_removals_due() -> None:
    # A second ago, since SQLite's clock has only milliseconds and may read the present as the future.
    Removal.objects.update(due_at=timezone.now() - timedelta(seconds=1))


def run_removals() -> int:
    """Carry out all removals as if they were due, and return how many succeeded."""
    make_removals_due()
    return removals.run_due(50)


class Agents:
    """Creates owners, tokens, offerings and identities, and lists what is on the broker."""

    def __init__(self, management: Management) -> None:
        self.management = management

    def owner(self, name: str = "", **fields: Any) -> Owner:
        """Create an owner with access, ``name@example.org``, with a generated name by default."""
        email = f"{name or f'owner-{next(_numbers)}'}@example.org"
        return Owner.objects.create_user(email, **{"vouched": True, "last_login": timezone.now(), **fields})

    def token(self, owner: Owner, scope: str = AuthToken.Scope.AGENT) -> PresentedToken:
        """Create a token of this owner as presented with a request: its row and its key."""
        token, key = AuthToken.objects.create(user=owner, scope=scope)
        return PresentedToken(token, key)

    def offering(self, *members: Owner, name: str = "", publishers: tuple[Owner, ...] = ()) -> Offering:
        """Create an offering that these owners' agents may subscribe to."""
        offering = Offering.objects.create(name=name or f"Offering {next(_numbers)}")
        offering.members.set(members)
        offering.publishers.set(publishers)
        return offering

    def identity(self, owner: Owner, offering: Offering | None = None, name: str = "") -> AgentIdentity:
        """Create an identity of this owner, for a new offering by default."""
        return create_identity(owner, offering or self.offering(owner), name or f"agent-{next(_numbers)}")

    def queues(self, vhost: str) -> dict[str, dict[str, Any]]:
        """Return the arguments of the queues in a vhost, by name."""
        rows = self.management.list_queues(vhost, {"disable_stats": "true", "enable_queue_totals": "true"})
        return {row["name"]: row["arguments"] for row in rows}

    def users(self) -> set[str]:
        return {user.name for user in self.management.users()}

    def vhosts(self) -> set[str]:
        return {vhost.name for vhost in self.management.vhosts()}


class NewAgent:
    """An owner whose agent has an identity and a token, and has registered nothing yet."""

    def __init__(self, agents, name):
        self.agents = agents
        self.owner = agents.owner(name)
        self.offering = agents.offering(self.owner)
        self.identity = agents.identity(self.owner, self.offering)
        self.presented = agents.token(self.owner)
        self.vhost = self.owner.uuid.hex

    @cached_property
    def subscription(self):
        return self.subscribe()[0]

    @property
    def queue_name(self):
        return names.subscription_queue(self.subscription.uuid.hex, self.offering.uuid.hex, "order")

    def subscribe(self, object_type="order"):
        return registration.register_subscription(self.identity, object_type, self.presented)

    def create_queue(self, object_type="order", *, presented=None):
        return registration.create_queue(self.subscription, self.offering, object_type, presented or self.presented)

    def register_consumer(self, object_types=None):
        return registration.register_consumer(self.identity, self.presented, object_types)


class RegisteredAgent(NewAgent):
    """An owner whose agent registered one subscription queue and one consumer queue five minutes ago."""

    def __init__(self, agents, name):
        super().__init__(agents, name)
        self.queue, _ = self.create_queue()
        self.consumer, _ = self.register_consumer([])
        backdate_registrations()

    def orphan(self, name="subscription_orphan", **declared):
        self.agents.management.declare_queue(self.vhost, name, **declared)
        return {"vhost": self.vhost, "queue": name}

    @property
    def names(self):
        return set(self.agents.queues(self.vhost))

    @property
    def registered(self):
        return {self.queue.queue_name, self.consumer.queue_name, "guardian.dlq"}


def backdate_registrations():
    """Backdate all registrations by five minutes, so that none counts as in progress."""
    for model in (SubscriptionQueue, Consumer):
        model.objects.update(created=timezone.now() - timedelta(minutes=5))


def lose_registrations(agent, number):
    """Register this number of queues and delete only their rows, as after a restore of the database."""
    types = ["call", "resource", "user_role", "proposal", "user_profile"][:number]
    for object_type in types:
        agent.create_queue(object_type)
    newer = SubscriptionQueue.objects.filter(object_type__in=types)
    names = set(newer.values_list("queue_name", flat=True))
    newer._raw_delete("default")
    return names


def make_agent(owner, offering, name="agent-1", **fields):
    return AgentIdentity.objects.create(owner=owner, offering=offering, name=name, **fields)


def make_subscription(owner, identity=None, object_type="order", offerings=(), *, token=None, state="ready", **fields):
    """Create a subscription with a queue for each of these offerings."""
    made = EventSubscription.objects.create(
        owner=owner, identity=identity, object_type=object_type if identity else "", token=token, **fields
    )
    SubscriptionQueue.objects.bulk_create(
        SubscriptionQueue(
            subscription=made, offering=offering, object_type=object_type, vhost=owner.uuid.hex, state=state,
            queue_name=names.subscription_queue(made.uuid.hex, offering.uuid.hex, object_type),
        )
        for offering in offerings
    )  # fmt: skip
    return made


def make_consumer(identity, object_types=(), *, token=None, state="ready"):
    made = Consumer(identity=identity, object_types=list(object_types), token=token, state=state)
    made.vhost, made.queue_name = identity.owner.uuid.hex, names.consumer_queue(made.uuid.hex)
    made.save()
    return made


def store_queue_row(row, **fields):
    """Create the monitor's row of a registered queue."""
    given = {"registered": True, "ready": 3, "unacknowledged": 0}
    owner = Owner.objects.get(uuid=row.vhost)
    return stored_queue(row.queue_name, vhost=row.vhost, owner=owner, **{**given, **fields})


@contextlib.contextmanager
def broker_restored(management: Management) -> Iterator[None]:
    """Delete from the broker every vhost and RabbitMQ user that an agent's registration creates inside."""
    made = Agents(management)
    vhosts, users = made.vhosts(), made.users()
    yield
    for name in made.users() - users:
        if _is_hex(name):
            with contextlib.suppress(NotOnBroker):
                management.delete_user(name)
    for name in made.vhosts() - vhosts:
        if _is_hex(name):
            with contextlib.suppress(NotOnBroker):
                management.delete_vhost(name)


@pytest.fixture
def agents(guarded: str, management: Management) -> Iterator[Agents]:
    """Guard the broker. Delete the vhosts and RabbitMQ users of agents from it afterwards."""
    with broker_restored(management):
        yield Agents(management)


@pytest.fixture
def agent(agents: Agents) -> RegisteredAgent:
    """Return an owner whose agent has one subscription queue and one consumer queue."""
    return RegisteredAgent(agents, "alice")


@pytest.fixture
def reader(agent: RegisteredAgent, broker: Any) -> Iterator[Callable[[str], Any]]:
    """Return a function that consumes from a queue of the agent's vhost until the end of the test."""
    opened = pika.BlockingConnection(pika.URLParameters(f"{broker.amqp_url}/{agent.vhost}"))
    channel = opened.channel()
    yield lambda name: channel.basic_consume(name, lambda *_: None)
    if opened.is_open:
        opened.close()


def _is_hex(name: str) -> bool:
    # Others may use an external broker at the same time. Names of agents' vhosts and logins are UUIDs.
    try:
        return uuid.UUID(name).hex == name
    except ValueError:
        return False
