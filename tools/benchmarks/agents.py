"""Deleting a subscription, sweeping orphans and publishing an event, compared to the bare requests to the broker."""

import uuid
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product

import orjson
import pika
from django.utils import timezone

from accounts.models import Owner
from agents.events.publishing import publish
from agents.models import AgentVhost, EventSubscription, Offering, Registration, SubscriptionQueue
from agents.sweeps.sweep import sweep_orphans
from core import broker
from core.models import Removal
from core.removals import MAX_PARALLEL
from queues.models import Queue
from rabbit import snapshot
from rabbit.arguments import DEAD_LETTER_QUEUE_ARGUMENTS, REGISTERED_QUEUE_ARGUMENTS
from rabbit.names import DEAD_LETTER_QUEUE, QueueName, subscription_queue
from rabbit.permissions import for_subscription
from rabbit.snapshot import NAMES_ONLY
from tools.benchmarks import load
from tools.benchmarks.figures import Figure, in_turn, seconds, timed
from tools.benchmarks.running import size

TYPE = "order"

CASCADE_QUEUES = size(500, 20)
CASCADE_ROUNDS = size(9, 2)
MAX_CASCADE_RATIO = 1.5

SWEPT_QUEUES = size(10_000, 200)
SWEPT_VHOSTS = 10
QUEUES_PER_SUBSCRIPTION = 10
ORPHANS = size(100, 20)
SWEEP_ROUNDS = size(9, 2)
MAX_SWEEP_RATIO = 1.6

EVENT_QUEUES = 100
EVENT_ROUNDS = size(30, 3)
MAX_EVENT_RATIO = 1.25
PAYLOAD = {"order_uuid": "0" * 32, "state": "executing", "comment": "x" * 200}


def register(subscribed: Iterable[tuple[EventSubscription, Offering]], vhost: str) -> list[QueueName]:
    """Declare a queue for each offering of each subscription, and insert the rows of a complete registration."""
    rows = [
        SubscriptionQueue(
            subscription=subscription, offering=offering, object_type=TYPE, vhost=vhost,
            queue_name=subscription_queue(subscription.uuid.hex, offering.uuid.hex, TYPE), state=Registration.READY,
        )
        for subscription, offering in subscribed
    ]  # fmt: skip
    SubscriptionQueue.objects.bulk_create(rows)
    names = [(vhost, row.queue_name) for row in rows]
    declare(names)
    store(names)
    return names


def declare(names: Iterable[QueueName]) -> None:
    load.import_definitions(
        {"queues": [load.queue_definition(*name, dict(REGISTERED_QUEUE_ARGUMENTS)) for name in names]}
    )


def store(names: Iterable[QueueName]) -> None:
    now = timezone.now()
    Queue.objects.bulk_create(
        Queue(
            vhost=vhost, name=name, type="classic", durable=True, auto_delete=False, exclusive=False, ready=0,
            unacknowledged=0, registered=True, first_seen=now, last_seen=now,
        )
        for vhost, name in names
    )  # fmt: skip


def delete_bare(names: Sequence[QueueName]) -> None:
    """Delete queues with as many threads as Guardian uses."""
    with broker.clients() as clients, ThreadPoolExecutor(MAX_PARALLEL) as pool:
        list(pool.map(lambda name: clients.sessions.of(name[0]).delete_queue(name[1]), names))


def cascade() -> list[Figure]:
    owner = Owner.objects.create_user("owner@example.org", vouched=True)
    offerings = Offering.objects.bulk_create(Offering(name=f"offering {number}") for number in range(CASCADE_QUEUES))

    def delete_subscription() -> float:
        subscription = EventSubscription.objects.create(owner=owner, password_set=True)
        broker.management().put_user(subscription.uuid.hex, "secret")
        register([(subscription, offering) for offering in offerings], "/")
        took = seconds(subscription.delete)
        left = broker.management().list_queues("/", {"disable_stats": "true", "columns": "name"})
        assert not left, left
        assert not Removal.objects.exists()
        return took

    def bare() -> float:
        username = uuid.uuid4().hex
        broker.management().put_user(username, "secret")
        names = [("/", subscription_queue(username, offering.uuid.hex, TYPE)) for offering in offerings]
        declare(names)
        return seconds(partial(broker.management().delete_user, username)) + seconds(partial(delete_bare, names))

    found = in_turn(CASCADE_ROUNDS, warm_ups=2, cascade=delete_subscription, bare=bare)
    what = f"delete a subscription with {CASCADE_QUEUES} queues"
    return [Figure("agents", what, "s", found["cascade"], found["bare"], MAX_CASCADE_RATIO)]


def orphan_sweep() -> list[Figure]:
    """Measure sweeps of 100 orphans beside 10,000 registered queues. The floor is the listing, and bare deletions."""
    print(f"declaring {SWEPT_QUEUES:,} agents' queues in {SWEPT_VHOSTS} vhosts", flush=True)
    offerings = Offering.objects.bulk_create(
        Offering(name=f"offering {number}") for number in range(QUEUES_PER_SUBSCRIPTION)
    )
    vhosts = [_owner_with_queues(f"owner-{number}@example.org", offerings) for number in range(SWEPT_VHOSTS)]

    def orphans() -> list[QueueName]:
        names = [
            (vhosts[number % SWEPT_VHOSTS], f"subscription_{uuid.uuid4().hex}_{number}") for number in range(ORPHANS)
        ]
        declare(names)
        return names

    def sweep() -> float:
        store(orphans())
        took, report = timed(sweep_orphans)
        found = (report.found, report.deleted, report.kept, report.repaired, report.logins)
        if report.another_sweep or report.errors or found != (ORPHANS, ORPHANS, 0, 0, 0):
            raise AssertionError(f"unexpected report of a sweep: {report}")
        return took

    def bare() -> float:
        names = orphans()
        listing = seconds(lambda: list(snapshot.iter_lists(broker.management(), vhosts, NAMES_ONLY, {})))
        return listing + seconds(lambda: delete_bare(names))

    found = in_turn(SWEEP_ROUNDS, sweep=sweep, bare=bare)
    what = f"sweep {SWEPT_QUEUES:,} queues, {ORPHANS} orphans"
    return [Figure("agents", what, "s", found["sweep"], found["bare"], MAX_SWEEP_RATIO)]


def _owner_with_queues(email: str, offerings: Sequence[Offering]) -> str:
    """Create an owner with subscriptions and their queues, and return the owner's vhost."""
    owner = Owner.objects.create_user(email, vouched=True)
    vhost = owner.uuid.hex
    AgentVhost.objects.create(owner=owner, name=vhost, ready=True)
    broker.management().create_vhost(vhost)
    broker.management().declare_queue(vhost, DEAD_LETTER_QUEUE, DEAD_LETTER_QUEUE_ARGUMENTS)
    subscriptions = [
        EventSubscription(owner=owner, password_set=True)
        for _ in range(SWEPT_QUEUES // SWEPT_VHOSTS // QUEUES_PER_SUBSCRIPTION)
    ]
    EventSubscription.objects.bulk_create(subscriptions)
    users = [one.uuid.hex for one in subscriptions]
    permissions = [{"user": one, "vhost": vhost, **for_subscription(one)._asdict()} for one in users]
    load.import_definitions(
        {"users": [{"name": one, "password_hash": "", "tags": ""} for one in users], "permissions": permissions}
    )
    register(product(subscriptions, offerings), vhost)
    return vhost


def publishing() -> list[Figure]:
    """Measure events to 100 queues. The floor is a connection of pika that confirms one message after the other."""
    owner = Owner.objects.create_user("owner@example.org", vouched=True)
    offering = Offering.objects.create(name="Benchmark")
    offering.members.add(owner)
    subscriptions = EventSubscription.objects.bulk_create(EventSubscription(owner=owner) for _ in range(EVENT_QUEUES))
    names = register(product(subscriptions, [offering]), "/")
    added = {"object_type": TYPE, "offering_uuid": offering.uuid.hex, "schema_version": 1}
    body = orjson.dumps({**PAYLOAD, **added})

    def event() -> None:
        published = publish(offering, TYPE, PAYLOAD)
        assert published.delivered == EVENT_QUEUES, published

    with load.amqp_connection() as connection:
        channel = connection.channel()
        channel.confirm_delivery()

        def bare() -> None:
            properties = pika.BasicProperties(
                content_type="application/json", delivery_mode=2, message_id=uuid.uuid4().hex, type=TYPE,
                headers={"object_type": TYPE},
            )  # fmt: skip
            for _, name in names:
                channel.basic_publish("", name, body, properties, mandatory=True)

        found = in_turn(EVENT_ROUNDS, warm_ups=3, event=lambda: seconds(event), bare=lambda: seconds(bare))
    events, floor = ([one * 1e6 / EVENT_QUEUES for one in found[name]] for name in ("event", "bare"))
    what = f"publish an event to {EVENT_QUEUES} queues, for each message"
    return [Figure("agents", what, "µs", events, floor, MAX_EVENT_RATIO)]
