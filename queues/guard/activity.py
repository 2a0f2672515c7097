"""Fetch the figures that a diagnosis rests on."""

import logging
from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import groupby
from typing import NamedTuple

from queues.models import Queue
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

FETCH_SECONDS = 20.0
"""The time limit of all requests of a run."""


class Consuming(NamedTuple):
    """A consumer of a queue, and the unacknowledged messages of its channel, or None if the broker doesn't report them.

    ``is_alone``: its channel has no other consumer. ``connection_name`` is the name that the client gave to its
    connection, if any.
    """

    consumer: QueueConsumer
    unacknowledged: int | None
    is_alone: bool = False
    connection_name: str = ""


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
    consumer = one.consumer
    name = one.connection_name or consumer.connection.partition(" -> ")[0]
    unacknowledged = one.unacknowledged if one.is_alone else None
    return Holder(name, consumer.user, consumer.prefetch, unacknowledged, consumer.is_active)


def fetch(management: Management, queues: Iterable[QueueName], now: datetime) -> dict[QueueName, Activity]:
    """Return the activity of these queues, as far as the broker answers in time.

    It takes a request for each queue, and two for each vhost with consumers.
    """
    found: dict[QueueName, Activity] = {}
    try:
        with deadline.limit(FETCH_SECONDS):
            for vhost, names in groupby(sorted(queues), key=lambda queue: queue[0]):
                rows = [row for _, name in names if (row := _row(management, vhost, name)) is not None]
                for row, consuming in zip(rows, consuming_in(vhost, rows, management), strict=True):
                    found[vhost, row["name"]] = activity_in(row, consuming, now)
    except BrokerError as error:
        logger.warning("Could not query all queues to diagnose: %s", error)
    return found


def store(queue: Queue, activity: Activity) -> None:
    """Store what was fetched of a queue when somebody looked at it, unless the deleter fetches its messages."""
    queue.activity = activity.after(stored_activity(queue.activity)).as_json()
    there = Queue.objects.filter(pk=queue.pk).exclude(state__in=[Queue.State.GONE, Queue.State.DELETING])
    there.update(activity=queue.activity)


def _row(management: Management, vhost: str, name: str) -> JSONObject | None:
    """Return a queue, or None if it is gone or its name is invalid in a URL."""
    try:
        return management.queue(vhost, name, samples_of=WINDOW_SECONDS)
    except (NotOnBroker, Refused):
        return None
