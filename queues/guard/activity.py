"""Fetch the figures that a diagnosis rests on."""

import logging
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import NamedTuple

from queues.models import Move, Queue
from queues.rules.activity import RECENT_SECONDS, WINDOW_SECONDS, Activity, Holder, stored_activity
from rabbit import deadline
from rabbit.entities import QueueConsumer
from rabbit.errors import BrokerError, NotOnBroker, Refused
from rabbit.management import Management
from rabbit.names import QueueName
from rabbit.policies import length_limit
from rabbit.requests.parsing import as_number
from rabbit.requests.queues import consumers_in, flow_in
from rabbit.requests.sending import JSONObject

logger = logging.getLogger(__name__)

LIMIT_SECONDS = 15.0
"""The time limit of all requests of a run for queues, and of those for the consumers of the queues that answered."""


class Consuming(NamedTuple):
    """A consumer of a queue, and the unacknowledged messages of its channel, or None if the broker doesn't report them.

    ``is_alone``: its channel has no other consumer. ``connection_name`` is the name that the client gave to its
    connection, if any. ``address`` is the client's.
    """

    consumer: QueueConsumer
    unacknowledged: int | None
    is_alone: bool = False
    connection_name: str = ""

    @property
    def address(self) -> str:
        return self.consumer.connection.partition(" -> ")[0]  # then comes the node's, which only operators know


def consuming_in(vhost: str, rows: Iterable[JSONObject], management: Management) -> list[list[Consuming]]:
    """Return the consumers of each of these queues of a vhost, with two requests for all that have any."""
    consumers = [consumers_in(row) for row in rows]
    if not any(consumers):
        return consumers  # type: ignore[return-value]  # lists without elements
    loads = management.channels(vhost)
    names = {client.name: client.given_name for client in management.clients(vhost)}

    def consuming(one: QueueConsumer) -> Consuming:
        load = loads.get(one.channel)
        is_alone = load is not None and load.consumers == 1
        return Consuming(one, load.unacknowledged if load else None, is_alone, names.get(one.connection, ""))

    return [[consuming(one) for one in of_queue] for of_queue in consumers]


def activity_in(row: JSONObject, consuming: Sequence[Consuming], now: datetime) -> Activity:
    """Return the activity of a queue in an answer of ``Management.queue`` with samples."""
    arguments, policy = row.get("arguments"), row.get("effective_policy_definition")
    return Activity(
        at=now,
        consumers=as_number(row.get("consumers")),
        ready=as_number(row.get("messages_ready")),
        unacknowledged=as_number(row.get("messages_unacknowledged")),
        size=as_number(row.get("message_bytes")),
        holders=tuple(_holder(one) for one in consuming),
        recent=flow_in(row, RECENT_SECONDS),
        window=flow_in(row, WINDOW_SECONDS),
        limit=length_limit(_object(arguments), _object(policy), {}),
    )


def _object(value: object) -> JSONObject:
    return value if isinstance(value, dict) else {}


def _holder(one: Consuming) -> Holder:
    consumer, name = one.consumer, one.connection_name or one.address
    unacknowledged = one.unacknowledged if one.is_alone else None
    return Holder(name, consumer.user, consumer.prefetch, unacknowledged, consumer.is_active)


def fetch(management: Management, queues: Sequence[QueueName], now: datetime) -> dict[QueueName, Activity]:
    """Return the activity of these queues, as far as the broker answers in time.

    It takes a request for each queue, and two for each vhost with consumers.
    """
    rows: dict[str, list[JSONObject]] = defaultdict(list)
    found: dict[QueueName, Activity] = {}
    with deadline.limit(LIMIT_SECONDS):
        # In any order: a queue that takes all the time must not always cost the same others their figures.
        for vhost, name in random.sample(queues, len(queues)):
            with _skipping_errors():
                rows[vhost].append(management.queue(vhost, name, samples_of=WINDOW_SECONDS))
    with deadline.limit(LIMIT_SECONDS):
        for vhost, of_vhost in rows.items():
            with _skipping_errors():
                for row, consuming in zip(of_vhost, consuming_in(vhost, of_vhost, management), strict=True):
                    found[vhost, row["name"]] = activity_in(row, consuming, now)
    return found


@contextmanager
def _skipping_errors() -> Iterator[None]:
    try:
        yield
    except (NotOnBroker, Refused):  # the queue is gone, or its name is invalid in a URL
        pass
    except BrokerError as error:
        logger.info("Could not query a queue to diagnose: %s", error)


def store(queue: Queue, activity: Activity) -> None:
    """Store what was fetched of a queue when somebody looked at it, unless Guardian itself may consume from it."""
    figures = activity.after(stored_activity(queue.activity)).as_json()
    there = Queue.objects.filter(pk=queue.pk).exclude(state__in=[Queue.State.GONE, Queue.State.DELETING])
    if there.exclude(moves__state=Move.State.RUNNING).update(activity=figures):
        queue.activity = figures
