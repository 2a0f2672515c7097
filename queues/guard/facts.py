"""The content of a message about a queue: its figures, its growth, its bindings and its consumers.

It is gathered before anything is written, and only for queues with a message due.
"""

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from datetime import datetime, timedelta
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from django.db.models import F

from core import broker, bulk
from notifications import audience
from queues.guard import feeding
from queues.models import Queue, QueueSample, Watch
from queues.rules import diagnosis, growth
from queues.rules.changes import Message
from queues.rules.rows import StoredQueue
from queues.rules.thresholds import GONE, Thresholds, has_limit, is_spared
from rabbit import amqp
from rabbit.arguments import (
    DEAD_LETTER_TTL_MILLISECONDS,
    REGISTERED_MAX_LENGTH,
    TTL_MILLISECONDS,
    passes_others_over,
)
from rabbit.entities import Binding
from rabbit.errors import BrokerError, NotOnBroker, Refused
from rabbit.management import Management
from rabbit.names import DEAD_LETTER_QUEUE, QueueName
from rabbit.policies import LengthLimit, limit_of
from rabbit.threads import ContextThreadPool

MAX_SINGLE_REQUESTS = 10
"""Up to this many queues are requested singly, for their bindings and arguments. For more, a vhost's are listed."""

QUEUES_PER_SINGLE_REQUEST = 20
"""Up to one in this many of all queues is requested singly too. Each queue has at least one binding, so a list of a
vhost's bindings takes the broker longer than these requests."""

MAX_CONCURRENT_REQUESTS = 8
"""Concurrent requests about single queues and exchanges."""

MAX_EXCHANGES_REQUESTED = 500
"""The bindings to up to this many exchanges are requested for the messages of one pass."""

BINDINGS_TIMEOUT_SECONDS = 10.0
"""The time limit for all requests together. Later answers are left out of the messages: a pass must not wait."""

MAX_BINDINGS_SHOWN = 20

Sample = tuple[datetime, int]


class Feed(NamedTuple):
    """What the broker answers about a queue; None: it did not answer.

    ``upstream`` are the bindings between exchanges that lead to ``bindings``, nearest first. ``limit`` is None, too, if
    the broker does not limit the queue. ``declared`` is what it is declared with.
    """

    consumers: int | None = None
    bindings: list[Binding] | None = None
    upstream: Sequence[Binding] = ()
    limit: LengthLimit | None = None
    declared: Mapping[str, Any] = MappingProxyType({})


class Facts:
    """The feeds and recent samples of some queues, and what is stored for their diagnosis."""

    def __init__(
        self,
        feeds: dict[QueueName, Feed],
        samples: dict[int, list[Sample]],
        now: datetime,
        rows: Mapping[int | None, Queue] | None = None,
        counted_at: datetime | None = None,
    ) -> None:
        self._feeds = feeds
        self._samples = samples
        self._now = now
        self._rows = rows or {}
        self._counted_at = counted_at

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
        names = {(queue.vhost, queue.name): queue.registered for queue in queues}
        registered = {name for name, is_registered in names.items() if is_registered}
        feeds = fetch_feeds(management, amqp_url, list(names), total_queues, registered)
        ids = [queue.id for queue in queues if queue.id is not None]
        counted_at = Watch.objects.values_list("consumers_counted_at", flat=True).first()
        rows = Queue.objects.filter(bulk.among(Queue, ("id",), [(id_,) for id_ in ids])) if ids else ()
        return cls(feeds, recent_samples(ids, now), now, {row.pk: row for row in rows}, counted_at)

    @classmethod
    def gather_for_recipients(
        cls, management: Management, queues: Sequence[StoredQueue], now: datetime, total_queues: int
    ) -> "Facts":
        """Query about those of these queues about which somebody is notified."""
        people = audience.recipients_of(queue.ownership for queue in queues)
        with_recipients = [queue for queue in queues if audience.has_recipients(queue.ownership, people)]
        return cls.gather(management, broker.amqp_url(), with_recipients, now, total_queues=total_queues)

    def limited(self, messages: Iterable[Message]) -> set[QueueName]:
        """Return the queues of these messages that the broker itself keeps within their deletion limit."""
        keys = {(one.queue.vhost, one.queue.name): one.thresholds for one in messages}
        limits = {key: self._feeds.get(key, Feed()).limit for key in keys}
        return {key for key, limit in limits.items() if limit is not None and limit.keeps_within(keys[key].max)}

    def is_passed_over(self, queue: StoredQueue) -> bool:
        """Return whether a queue gives its messages to its active consumer alone, so that they can't be archived."""
        feed = self._feeds.get((queue.vhost, queue.name), Feed())
        return passes_others_over(feed.declared, feed.consumers)

    def of(self, queue: StoredQueue, thresholds: Thresholds, merged: int = 0) -> dict[str, Any]:
        """Return the facts of a message about this queue, as JSON. Lengths are messages, times seconds."""
        samples = list(self._samples.get(queue.id, ())) if queue.id is not None else []
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
            "seconds_over": (self._now - queue.warned_since).total_seconds() if queue.warned_since else None,
            "per_second": growing.per_second if growing else None,
            "seconds_to_max": growing.seconds_to_max if growing else None,
            "spared": is_spared(queue),
            "blocked": bool(queue.block_reason),
            **_agents_facts(queue),
            "folded": merged,
            "consumers": feed.consumers,
            "diagnosis": self._diagnosis(queue, feed.consumers, thresholds),
            "broker_limit": _limit_facts(queue, feed.limit, thresholds),
            **_binding_facts(feed),
        }

    def _diagnosis(self, queue: StoredQueue, consumers: int | None, thresholds: Thresholds) -> dict[str, Any] | None:
        """Return the diagnosis from what is stored, and the consumers and the length of now."""
        row = self._rows.get(queue.id)
        if row is None or row.state == GONE:
            return None
        row.ready, row.unacknowledged, row.state = queue.ready, queue.unacknowledged, queue.state
        limit = thresholds.max if has_limit(queue) else None
        found = diagnosis.of_row(row, self._counted_at, self._now, limit=limit, consumers=consumers)
        return found.as_json() if found else None


def fetch_feeds(
    management: Management,
    amqp_url: str,
    queues: Sequence[QueueName],
    total_queues: int,
    registered: Collection[QueueName] = frozenset(),
) -> dict[QueueName, Feed]:
    """Return the feed of each of these queues, of ``registered`` ones without their limit, which Guardian sets itself.

    ``total_queues`` is the number of all queues.
    """
    with ContextThreadPool(1) as thread:  # both mostly wait for the broker
        consumers_future = thread.submit(amqp.declare_passively, amqp_url, queues)
        singly = len(queues) <= max(MAX_SINGLE_REQUESTS, total_queues // QUEUES_PER_SINGLE_REQUEST)
        with_limit = [queue for queue in queues if queue not in registered]
        feeds = _query_management(management, queues, with_limit, singly=singly)
    consumers = {queue: depth.consumers for queue, depth in consumers_future.result().items()}
    return {queue: feed._replace(consumers=consumers.get(queue)) for queue, feed in feeds.items()}


def _query_management(
    management: Management, queues: Sequence[QueueName], with_limit: Sequence[QueueName], *, singly: bool
) -> dict[QueueName, Feed]:
    """Return the feed of each of these queues without its consumers, as far as the broker answers in time."""
    vhosts = sorted({vhost for vhost, _ in queues})
    limited_vhosts = sorted({vhost for vhost, _ in with_limit})
    # Vhosts are listed one after the other, as each list keeps the broker busy.
    requests = _Requests(MAX_CONCURRENT_REQUESTS if singly else 1)
    to_exchanges: ToExchanges = {}
    if singly:
        bindings = requests.ask(lambda queue: management.queue_bindings(*queue), queues)
        arguments = requests.ask(lambda queue: management.queue_arguments(*queue), with_limit)
    else:
        bindings, to_exchanges = _by_destination(requests.ask(management.bindings, vhosts))
        listed = requests.ask(management.list_arguments, limited_vhosts)
        arguments = {(row["vhost"], row["name"]): row for rows in listed.values() for row in rows}
    policies = requests.ask(
        lambda name: (management.policies(name), management.operator_policies(name)), limited_vhosts
    )

    def request_upstream(vhost: str, names: Collection[str]) -> dict[str, list[Binding]]:
        asked = [(vhost, name) for name in names]
        to_exchanges.update(requests.ask(lambda exchange: management.bindings_to_exchange(*exchange), asked))
        return _of_vhost(to_exchanges, vhost, names)

    if singly:
        for vhost in vhosts:
            in_vhost = [one for queue in queues if queue[0] == vhost for one in bindings.get(queue, ())]
            feeding.upstream(in_vhost, partial(request_upstream, vhost), MAX_EXCHANGES_REQUESTED)
    requests.close()

    def feed(queue: QueueName) -> Feed:
        vhost, _ = queue
        known = queue in arguments and vhost in policies
        return Feed(
            bindings=bindings.get(queue),
            upstream=feeding.upstream(bindings.get(queue, ()), partial(_of_vhost, to_exchanges, vhost)),
            limit=limit_of(arguments[queue], *policies[vhost]) if known else None,
            declared=arguments.get(queue, {}),
        )

    return {queue: feed(queue) for queue in queues}


ToExchanges = dict[QueueName, list[Binding]]
"""The bindings to exchanges, by vhost and exchange."""


def _of_vhost(to_exchanges: ToExchanges, vhost: str, names: Collection[str]) -> dict[str, list[Binding]]:
    return {name: to_exchanges.get((vhost, name), []) for name in names}


K = TypeVar("K")
V = TypeVar("V")


class _Requests:
    """Concurrent requests to the broker, with one time limit. A failure ends them: each would wait as long."""

    def __init__(self, concurrent: int) -> None:
        self._threads = ContextThreadPool(concurrent)
        self._until = time.monotonic() + BINDINGS_TIMEOUT_SECONDS
        self._failed = False

    def ask(self, request: Callable[[K], V], about: Iterable[K]) -> dict[K, V]:
        """Return the answers to these requests, as far as there are any."""
        answers: dict[K, V] = {}
        if self._failed:
            return answers

        def ask_once(one: K) -> None:
            # The queue, exchange or vhost may be gone, or its name invalid in a URL, such as "..".
            with contextlib.suppress(Refused, NotOnBroker):
                answers[one] = request(one)

        sent = [self._threads.submit(ask_once, one) for one in about]
        answered, missing = wait(sent, max(0.0, self._until - time.monotonic()), FIRST_EXCEPTION)
        self._failed = bool(missing)
        for one in answered:
            try:
                one.result()
            except BrokerError:
                self._failed = True
        if self._failed:
            self.close()
        return dict(answers)

    def close(self) -> None:
        """Cancel the requests that were not sent yet. Do not wait for those that hang."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _by_destination(
    listed: Mapping[str, list[Binding]],
) -> tuple[dict[QueueName, list[Binding]], ToExchanges]:
    """Return the bindings of these vhosts by queue, and by exchange."""
    queues: dict[QueueName, list[Binding]] = defaultdict(list)
    exchanges: ToExchanges = defaultdict(list)
    for vhost, bindings in listed.items():
        for binding in bindings:
            to = queues if binding.destination_type == "queue" else exchanges
            to[vhost, binding.destination].append(binding)
    return queues, exchanges


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


def _limit_facts(queue: StoredQueue, limit: LengthLimit | None, thresholds: Thresholds) -> dict[str, Any] | None:
    """Return the broker's limit of a queue, if it is reached before Guardian deletes the queue."""
    if limit is None or queue.registered:
        return None
    messages = limit.messages if is_spared(queue) or limit.keeps_within(thresholds.max) else None
    if messages is None and limit.size is None:
        return None
    return {"messages": messages, "bytes": limit.size, "drops_oldest": limit.drops_oldest}


def _binding_facts(feed: Feed) -> dict[str, Any]:
    upstream = feeding.described(feed.upstream)
    leading = {"upstream": upstream[:MAX_BINDINGS_SHOWN], "more_upstream": len(upstream[MAX_BINDINGS_SHOWN:])}
    if feed.bindings is None:
        return {"bindings": None, "more_bindings": 0, **leading}
    bindings = feeding.described(feed.bindings)
    return {"bindings": bindings[:MAX_BINDINGS_SHOWN], "more_bindings": len(bindings[MAX_BINDINGS_SHOWN:]), **leading}


def recent_samples(queues: Collection[int], now: datetime) -> dict[int, list[Sample]]:
    """Return the samples over which the growth of these queues is measured, oldest first, by id."""
    if not queues:
        return {}
    # As growth.since. A queue that returns in this pass is still stored as gone: all its samples are from before.
    rows = QueueSample.objects.filter(
        bulk.among(QueueSample, ("queue",), [(id_,) for id_ in queues]),
        at__gte=now - timedelta(seconds=growth.WINDOW_SECONDS),
        queue__first_seen__lte=F("at"),
    ).exclude(queue__state=GONE)
    samples: dict[int, list[Sample]] = {}
    for queue, at, length in rows.order_by("at").values_list("queue", "at", "length"):
        samples.setdefault(queue, []).append((at, length))
    return samples
