"""What a message tells of a queue: its figures, how fast it grows, who fills it and who empties it.

Gathered before anything is written, and only for the queues that somebody is to be told about.
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
from queues.thresholds import Thresholds
from rabbit import amqp
from rabbit.arguments import DEAD_LETTER_TTL_MILLISECONDS, REGISTERED_MAX_LENGTH, TTL_MILLISECONDS
from rabbit.management import Binding, BrokerError, Management, NotOnBroker, Refused
from rabbit.names import DEAD_LETTER_QUEUE, QueueName
from rabbit.threads import ContextThreadPool

MAX_SINGLE_REQUESTS = 10
"""Up to so many queues are asked for one by one, and more where they are few among all that there are."""

QUEUES_PER_SINGLE_REQUEST = 20
"""Few are one in so many at most: as each queue has a binding at least, listing those of all takes the broker longer
then. Else everything is listed once for each vhost."""

MAX_CONCURRENT_REQUESTS = 8
"""Requests for the bindings of a queue under way at once."""

BINDINGS_TIMEOUT_SECONDS = 10.0
"""How long all bindings may take together. Whoever's aren't there by then are told without: a pass must not wait for
them."""

MAX_BINDINGS_SHOWN = 20

Sample = tuple[datetime, int]


class Feed(NamedTuple):
    """The consumers of a queue and the bindings that feed it; None: could not be asked."""

    consumers: int | None = None
    bindings: list[Binding] | None = None


class Facts:
    """The figures of some queues, and their surroundings as they were when they were asked for."""

    def __init__(self, feeds: dict[QueueName, Feed], samples: dict[int | None, list[Sample]], now: datetime) -> None:
        self._feeds = feeds
        self._samples = samples
        self._now = now

    @classmethod
    def gather(
        cls, management: Management, amqp_url: str, queues: Sequence[StoredQueue], now: datetime, *, among: int = 0
    ) -> "Facts":
        """Ask the broker and the database about these queues, of ``among`` that there are, where that is known.

        A broker that doesn't answer leaves gaps.
        """
        if not queues:
            return cls({}, {}, now)
        feeds = fetch_feeds(management, amqp_url, list({(queue.vhost, queue.name) for queue in queues}), among)
        return cls(feeds, _samples([queue.id for queue in queues], now), now)

    def of(self, queue: StoredQueue, thresholds: Thresholds, folded: int = 0) -> dict[str, Any]:
        """Return what a message about this queue tells, ready for the outbox. Lengths are messages, times seconds."""
        samples = list(self._samples.get(queue.id, []))
        if queue.length is not None:
            samples.append((self._now, queue.length))
        pace = growth.growth(samples, thresholds.max)
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
            "per_second": pace.per_second if pace else None,
            "seconds_to_max": pace.seconds_to_max if pace else None,
            "spared": queue.unbounded or queue.exclusive or queue.registered,
            **_agents_told(queue),
            "folded": folded,
            "consumers": feed.consumers,
            **_bindings_told(feed.bindings),
        }


def fetch_feeds(
    management: Management, amqp_url: str, queues: Sequence[QueueName], among: int
) -> dict[QueueName, Feed]:
    """Return the feed of each of these queues, given as (vhost, name), of ``among`` that there are."""
    with ContextThreadPool(1) as beside:  # each waits for the broker most of the time
        asked = beside.submit(amqp.declare_passively, amqp_url, queues)
        bindings = _ask_bindings(
            management, queues, one_by_one=len(queues) <= max(MAX_SINGLE_REQUESTS, among // QUEUES_PER_SINGLE_REQUEST)
        )
    consumers = {queue: depth.consumers for queue, depth in asked.result().items()}
    return {queue: Feed(consumers.get(queue), bindings.get(queue)) for queue in queues}


def _ask_bindings(
    management: Management, queues: Sequence[QueueName], *, one_by_one: bool
) -> dict[QueueName, list[Binding]]:
    """Return the bindings of these queues, as far as the broker answers in time, and at least theirs.

    Once it doesn't answer it isn't asked for more: the others would wait as long.
    """
    # Lists of whole vhosts are asked for one after the other, as each keeps the broker busy.
    threads = ContextThreadPool(MAX_CONCURRENT_REQUESTS if one_by_one else 1)
    if one_by_one:
        asked = [threads.submit(_bindings_of_queue, management, queue) for queue in queues]
    else:
        asked = [threads.submit(_bindings_of_vhost, management, vhost) for vhost in sorted({one[0] for one in queues})]
    answered, _ = wait(asked, BINDINGS_TIMEOUT_SECONDS, FIRST_EXCEPTION)
    threads.shutdown(wait=False, cancel_futures=True)  # what hangs is not waited for
    bindings: dict[QueueName, list[Binding]] = {}
    for answer in answered:
        with contextlib.suppress(BrokerError):
            bindings.update(answer.result())
    return bindings


def _bindings_of_queue(management: Management, queue: QueueName) -> dict[QueueName, list[Binding]]:
    with contextlib.suppress(Refused, NotOnBroker):  # gone, or one with a name that is none in a URL, such as ".."
        return {queue: management.queue_bindings(*queue)}
    return {}


def _bindings_of_vhost(management: Management, vhost: str) -> dict[QueueName, list[Binding]]:
    found = defaultdict(list)
    with contextlib.suppress(Refused, NotOnBroker):  # a vhost that has just gone, whose queues are told without
        for binding in management.bindings(vhost):
            if binding.destination_type == "queue":
                found[vhost, binding.destination].append(binding)
    return found


def _agents_told(queue: StoredQueue) -> dict[str, Any]:
    """Return what is to be told of a queue of agents: how many messages it keeps at most, and for how many seconds."""
    if queue.owner_id is None and not queue.registered:
        return {}
    told: dict[str, Any] = {"agents": True, "registered": queue.registered}
    if queue.registered:
        dead_letters = queue.name == DEAD_LETTER_QUEUE
        milliseconds = DEAD_LETTER_TTL_MILLISECONDS if dead_letters else TTL_MILLISECONDS
        told |= {"dead_letters": dead_letters, "holds": REGISTERED_MAX_LENGTH, "seconds_kept": milliseconds / 1000}
    return told


def _bindings_told(bindings: list[Binding] | None) -> dict[str, Any]:
    if bindings is None:
        return {"bindings": None, "more_bindings": 0}
    # Every queue is bound to the default exchange, which has no name, by its own name: nothing to tell.
    told = [(binding.source, binding.routing_key) for binding in bindings if binding.source]
    return {
        "bindings": [
            {"exchange": _storable(exchange), "routing_key": _storable(key)}
            for exchange, key in told[:MAX_BINDINGS_SHOWN]
        ],
        "more_bindings": max(0, len(told) - MAX_BINDINGS_SHOWN),
    }


def _storable(name: str) -> str:
    return name.replace("\0", "\N{REPLACEMENT CHARACTER}")  # PostgreSQL keeps no NUL


def _samples(ids: Iterable[int | None], now: datetime) -> dict[int | None, list[Sample]]:
    known = [(id_,) for id_ in ids if id_ is not None]
    if not known:
        return {}
    rows = QueueSample.objects.filter(
        bulk.among(QueueSample, ("queue",), known), at__gte=now - timedelta(seconds=growth.WINDOW_SECONDS)
    )
    samples: dict[int | None, list[Sample]] = {}
    for queue, at, length in rows.order_by("at").values_list("queue", "at", "length"):
        samples.setdefault(queue, []).append((at, length))
    return samples
