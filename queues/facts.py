"""The content of a message about a queue: its figures, its growth, its bindings and its consumers.

It is gathered before anything is written, and only for queues with a message due.
"""

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from core import bulk
from queues import growth
from queues.comparison import StoredQueue
from queues.models import QueueSample
from queues.thresholds import Thresholds, is_spared
from rabbit import amqp
from rabbit.arguments import DEAD_LETTER_TTL_MILLISECONDS, REGISTERED_MAX_LENGTH, TTL_MILLISECONDS
from rabbit.management import Binding, BrokerError, Management, NotOnBroker, Refused
from rabbit.names import DEAD_LETTER_QUEUE, QueueName
from rabbit.threads import ContextThreadPool

MAX_SINGLE_REQUESTS = 10
"""Up to this many queues are requested singly for their bindings. For more, one request lists a vhost's bindings."""

QUEUES_PER_SINGLE_REQUEST = 20
"""Up to one in this many of all queues is requested singly too. Each queue has at least one binding, so a list of a
vhost's bindings takes the broker longer than these requests."""

MAX_CONCURRENT_REQUESTS = 8
"""Concurrent requests for the bindings of a queue."""

BINDINGS_TIMEOUT_SECONDS = 10.0
"""The time limit for all bindings together. Later answers are left out of the messages: a pass must not wait."""

MAX_BINDINGS_SHOWN = 20

Sample = tuple[datetime, int]


class Feed(NamedTuple):
    """The number of consumers and the bindings of a queue; None: the broker did not answer."""

    consumers: int | None = None
    bindings: list[Binding] | None = None


class Facts:
    """The feeds and recent samples of some queues."""

    def __init__(self, feeds: dict[QueueName, Feed], samples: dict[int | None, list[Sample]], now: datetime) -> None:
        self._feeds = feeds
        self._samples = samples
        self._now = now

    @classmethod
    def gather(
        cls,
        management: Management,
        amqp_url: str,
        queues: Sequence[StoredQueue],
        now: datetime,
        *,
        total_queues: int = 0,
    ) -> "Facts":
        """Query the broker and the database about these queues. ``total_queues`` is the number of all queues, if known.

        Facts that the broker does not answer are None.
        """
        if not queues:
            return cls({}, {}, now)
        feeds = fetch_feeds(management, amqp_url, list({(queue.vhost, queue.name) for queue in queues}), total_queues)
        return cls(feeds, _samples([queue.id for queue in queues], now), now)

    def of(self, queue: StoredQueue, thresholds: Thresholds, folded: int = 0) -> dict[str, Any]:
        """Return the facts of a message about this queue, as JSON. Lengths are messages, times seconds."""
        samples = list(self._samples.get(queue.id, []))
        if queue.length is not None:
            samples.append((self._now, queue.length))
        growing = growth.growth(samples, thresholds.max)
        feed = self._feeds.get((queue.vhost, queue.name), Feed())
        return {
            "queue": queue.name,
            "vhost": queue.vhost,
            "state": queue.state,
            "length": queue.length,
            "ready": queue.ready,
            "unacknowledged": queue.unacknowledged,
            "warn": thresholds.warn,
            "max": thresholds.max,
            "per_second": growing.per_second if growing else None,
            "seconds_to_max": growing.seconds_to_max if growing else None,
            "spared": is_spared(queue),
            "blocked": bool(queue.block_reason),
            **_agents_facts(queue),
            "folded": folded,
            "consumers": feed.consumers,
            **_binding_facts(feed.bindings),
        }


def fetch_feeds(
    management: Management, amqp_url: str, queues: Sequence[QueueName], total_queues: int
) -> dict[QueueName, Feed]:
    """Return the feed of each of these queues. ``total_queues`` is the number of all queues."""
    with ContextThreadPool(1) as thread:  # both mostly wait for the broker
        consumers_future = thread.submit(amqp.declare_passively, amqp_url, queues)
        bindings = _fetch_bindings(
            management,
            queues,
            one_by_one=len(queues) <= max(MAX_SINGLE_REQUESTS, total_queues // QUEUES_PER_SINGLE_REQUEST),
        )
    consumers = {queue: depth.consumers for queue, depth in consumers_future.result().items()}
    return {queue: Feed(consumers.get(queue), bindings.get(queue)) for queue in queues}


def _fetch_bindings(
    management: Management, queues: Sequence[QueueName], *, one_by_one: bool
) -> dict[QueueName, list[Binding]]:
    """Return the bindings of at least these queues, as far as the broker answers in time.

    The first failure cancels all further requests: each would wait as long.
    """
    # Vhosts are listed one after the other, as each list keeps the broker busy.
    threads = ContextThreadPool(MAX_CONCURRENT_REQUESTS if one_by_one else 1)
    if one_by_one:
        requests = [threads.submit(_bindings_of_queue, management, queue) for queue in queues]
    else:
        requests = [
            threads.submit(_bindings_of_vhost, management, vhost) for vhost in sorted({one[0] for one in queues})
        ]
    answered, _ = wait(requests, BINDINGS_TIMEOUT_SECONDS, FIRST_EXCEPTION)
    threads.shutdown(wait=False, cancel_futures=True)  # do not wait for requests that hang
    bindings: dict[QueueName, list[Binding]] = {}
    for answer in answered:
        with contextlib.suppress(BrokerError):
            bindings.update(answer.result())
    return bindings


def _bindings_of_queue(management: Management, queue: QueueName) -> dict[QueueName, list[Binding]]:
    with contextlib.suppress(Refused, NotOnBroker):  # the queue is gone, or its name is invalid in a URL, such as ".."
        return {queue: management.queue_bindings(*queue)}
    return {}


def _bindings_of_vhost(management: Management, vhost: str) -> dict[QueueName, list[Binding]]:
    found = defaultdict(list)
    with contextlib.suppress(Refused, NotOnBroker):  # the vhost was just deleted
        for binding in management.bindings(vhost):
            if binding.destination_type == "queue":
                found[vhost, binding.destination].append(binding)
    return found


def _agents_facts(queue: StoredQueue) -> dict[str, Any]:
    """Return the facts of an agents' queue: the broker's limits of its length in messages, and of their age."""
    if queue.owner_id is None and not queue.registered:
        return {}
    facts: dict[str, Any] = {"agents": True, "registered": queue.registered}
    if queue.registered:
        dead_letters = queue.name == DEAD_LETTER_QUEUE
        milliseconds = DEAD_LETTER_TTL_MILLISECONDS if dead_letters else TTL_MILLISECONDS
        facts |= {"dead_letters": dead_letters, "holds": REGISTERED_MAX_LENGTH, "seconds_kept": milliseconds / 1000}
    return facts


def _binding_facts(bindings: list[Binding] | None) -> dict[str, Any]:
    if bindings is None:
        return {"bindings": None, "more_bindings": 0}
    # Every queue is bound to the default exchange, whose name is empty.
    shown = [(binding.source, binding.routing_key) for binding in bindings if binding.source]
    return {
        "bindings": [{"exchange": exchange, "routing_key": key} for exchange, key in shown[:MAX_BINDINGS_SHOWN]],
        "more_bindings": max(0, len(shown) - MAX_BINDINGS_SHOWN),
    }


def _samples(ids: Iterable[int | None], now: datetime) -> dict[int | None, list[Sample]]:
    stored = [(id_,) for id_ in ids if id_ is not None]
    if not stored:
        return {}
    rows = QueueSample.objects.filter(
        bulk.among(QueueSample, ("queue",), stored), at__gte=now - timedelta(seconds=growth.WINDOW_SECONDS)
    )
    samples: dict[int | None, list[Sample]] = {}
    for queue, at, length in rows.order_by("at").values_list("queue", "at", "length"):
        samples.setdefault(queue, []).append((at, length))
    return samples
