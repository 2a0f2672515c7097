"""Deletions of subscriptions, alternating with the same deletions on the broker only. Runs in `child.py`."""

import uuid
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from accounts.models import Owner
from agents.models import EventSubscription, ObjectType, Offering, Registration, SubscriptionQueue
from core import broker
from core.models import Removal
from core.removals import MAX_PARALLEL
from queues.models import Queue
from rabbit.arguments import REGISTERED_QUEUE_ARGUMENTS
from rabbit.management import Management
from rabbit.names import subscription_queue
from tools.benchmarks.passes import counted_requests, timed

WARM_UPS = 2
COUNTED = 3
"""Deletions whose statements and requests are counted. They are not timed, since counting takes time."""

BATCHED_DELETE = 'DELETE FROM "agents_subscriptionqueue"'
"""Django deletes the rows of a cascade with a statement for each hundred."""


class Subscriber:
    """An owner who creates and deletes subscriptions with ``queues`` queues each, on the broker and in the database."""

    def __init__(self, vhost: str, queues: int) -> None:
        self._vhost = vhost
        self._owner = Owner.objects.create_user("owner@example.org", vouched=True)
        self._management: Management = broker.management()
        self._offerings = Offering.objects.bulk_create(Offering(name=f"offering {number}") for number in range(queues))

    def subscribe(self) -> EventSubscription:
        """Return a subscription with all its queues registered."""
        subscription = EventSubscription.objects.create(owner=self._owner, password_set=True)
        names = self._make(subscription.uuid)
        now = timezone.now()
        SubscriptionQueue.objects.bulk_create(
            SubscriptionQueue(
                subscription=subscription,
                offering=offering,
                object_type=ObjectType.ORDER,
                vhost=self._vhost,
                queue_name=name,
                state=Registration.READY,
            )
            for offering, name in zip(self._offerings, names, strict=True)
        )
        Queue.objects.bulk_create(
            Queue(
                vhost=self._vhost,
                name=name,
                type="classic",
                durable=True,
                auto_delete=False,
                exclusive=False,
                first_seen=now,
                last_seen=now,
            )
            for name in names
        )
        return subscription

    def cascade(self) -> float:
        """Delete a subscription and return the seconds. Check that everything of it is deleted."""
        subscription = self.subscribe()
        seconds, _ = timed(subscription.delete)
        self._check()
        return seconds

    def bare(self) -> float:
        """Return the seconds of only deleting a user and as many equal queues in parallel."""
        uuid_ = uuid.uuid4()
        names = self._make(uuid_)
        seconds, _ = timed(partial(self._delete, uuid_.hex, names))
        self._check()
        return seconds

    def _make(self, subscription: uuid.UUID) -> list[str]:
        """Create a user and its queues on the broker, and return the queues' names."""
        names = [subscription_queue(subscription.hex, offering.uuid.hex, "order") for offering in self._offerings]
        self._management.put_user(subscription.hex, "secret")
        with ThreadPoolExecutor(MAX_PARALLEL) as pool:
            list(
                pool.map(
                    lambda name: self._management.declare_queue(self._vhost, name, REGISTERED_QUEUE_ARGUMENTS), names
                )
            )
        return names

    def _delete(self, username: str, names: list[str]) -> None:
        self._management.delete_user(username)
        with broker.clients() as clients, ThreadPoolExecutor(MAX_PARALLEL) as pool:
            list(pool.map(lambda name: clients.sessions.of(self._vhost).delete_queue(name), names))

    def _check(self) -> None:
        left = self._management.list_queues(self._vhost, {"disable_stats": "true", "columns": "name"})
        if left or Removal.objects.exists() or Queue.objects.exclude(state=Queue.State.GONE).exists():
            raise AssertionError(f"{len(left)} queues and {Removal.objects.count()} removals are left")


def measure(vhost: str, queues: int, rounds: int) -> dict[str, Any]:
    """Return the seconds of alternating deletions of subscriptions and bare deletions, and counts of the former.

    ``statements`` excludes those that Django batches by hundreds; ``all_statements`` and ``requests`` are total counts.
    """
    subscriber = Subscriber(vhost, queues)
    for _ in range(WARM_UPS):
        subscriber.bare()
        subscriber.cascade()
    cascade, bare = [], []
    for number in range(rounds):
        if number % 2:
            bare.append(subscriber.bare())
        cascade.append(subscriber.cascade())
        if not number % 2:
            bare.append(subscriber.bare())
    statements, all_statements, requests = [], [], []
    for _ in range(COUNTED):
        subscription = subscriber.subscribe()
        with CaptureQueriesContext(connection) as captured, counted_requests() as sent:
            subscription.delete()
        all_statements.append(len(captured))
        statements.append(sum(not query["sql"].startswith(BATCHED_DELETE) for query in captured))
        requests.append(len(sent))
    return {
        "cascade": cascade,
        "bare": bare,
        "statements": statements,
        "all_statements": all_statements,
        "requests": requests,
    }
