"""What the management API lists, as plain values."""

from collections.abc import Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Any, NamedTuple


class Vhost(NamedTuple):
    """A virtual host. ``nodes`` are those on which it runs. Lists may lack the queues of other nodes."""

    name: str
    nodes: frozenset[str]


class Binding(NamedTuple):
    """A binding to a queue or an exchange. An empty ``source`` is the default exchange."""

    source: str
    vhost: str
    destination: str
    destination_type: str
    routing_key: str
    arguments: Mapping[str, Any]


class Exchange(NamedTuple):
    name: str
    vhost: str
    type: str
    durable: bool
    auto_delete: bool
    internal: bool
    arguments: Mapping[str, Any] = MappingProxyType({})


class PublishedBy(NamedTuple):
    """The messages a second of a RabbitMQ user, and how many messages of its open channels no queue got."""

    user: str
    published: float
    unroutable: int


class Traffic(NamedTuple):
    """Messages a second into an exchange and out of it, a copy for each destination; None: not counted.

    ``publishers`` are known only if the broker's ``rates_mode`` is detailed.
    """

    published: float | None
    routed: float | None
    publishers: list[PublishedBy]


class User(NamedTuple):
    name: str
    tags: frozenset[str]


class Connection(NamedTuple):
    """A live connection. ``connected_at`` is None if the broker doesn't report it, such as RabbitMQ 3.10."""

    name: str
    vhost: str
    client_address: str
    connected_at: datetime | None


class Client(NamedTuple):
    """A connection in the list of all connections, which lags by 5 s.

    ``protocol`` is the broker's name for it, such as "Web STOMP 1.2" or "AMQP 0-9-1". ``given_name`` is the
    ``connection_name`` in the client's properties, or empty.
    """

    user: str
    vhost: str
    protocol: str
    connected_at: datetime | None
    name: str
    given_name: str


class QueueConsumer(NamedTuple):
    """A consumer of a queue. A ``prefetch`` of 0 is unlimited. Its ``connection`` is a ``Connection.name``.

    ``is_active`` is false for one that waits until the queue's single active consumer ends.
    """

    queue: str
    user: str
    connection: str
    channel: str
    tag: str
    prefetch: int
    acknowledges: bool
    is_active: bool = True


class ChannelLoad(NamedTuple):
    """The unacknowledged messages and the consumers of a channel."""

    unacknowledged: int
    consumers: int


class QueueFlow(NamedTuple):
    """The messages that went through a queue in these seconds, and by how many it became longer.

    ``acknowledged`` includes those that needed no acknowledgement, but no rejected ones: the broker counts these
    nowhere. ``redelivered`` are among the ``delivered``.
    """

    seconds: float
    published: int
    delivered: int
    redelivered: int
    acknowledged: int
    growth: int

    def rate(self, messages: int) -> float:
        return messages / self.seconds


class QueueRates(NamedTuple):
    """Messages a second over the last seconds."""

    published: float
    delivered: float
    acknowledged: float


class RateSample(NamedTuple):
    """Messages a second of a queue since the sample before. What needs no acknowledgement counts as acknowledged."""

    at: datetime
    published: float
    acknowledged: float
    redelivered: float


class Statistics(NamedTuple):
    """Which statistics the broker keeps. ``queue_seconds`` is for how long it keeps samples of a queue's rates."""

    has_rates: bool
    queue_seconds: int


class Node(NamedTuple):
    """A node of the cluster. Figures are in bytes, or None if the node is stopped or has just started.

    ``fd_used`` and ``fd_total`` are file descriptors, ``uptime`` is seconds. ``partitions`` are the nodes that this
    node has lost contact with.
    """

    name: str
    running: bool
    mem_used: int | None
    mem_limit: int | None
    mem_alarm: bool
    disk_free: int | None
    disk_free_limit: int | None
    disk_alarm: bool
    fd_used: int | None = None
    fd_total: int | None = None
    uptime: float | None = None
    partitions: tuple[str, ...] = ()
