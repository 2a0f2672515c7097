"""Speaking to a queue directly, over AMQP: how long it is right now, and deleting it where HTTP can't name it.

A passive declare gives the exact number of ready messages, is cheap (500 in a tenth of a second) and is answered under
a resource alarm. The management API's figures of single queues lag by five seconds and more. By py-amqp, which bounds
the wait for each answer; pika waits for ever when a queue's process doesn't respond.
"""

import time
from collections.abc import Iterable
from itertools import groupby
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import amqp

from rabbit.names import QueueName

TIMEOUT_SECONDS = 5.0
"""How long a connection may take to open, and one answer to come."""

TOTAL_TIMEOUT_SECONDS = 20.0
"""How long all the answers together may take. Whoever is not asked by then isn't."""

LEADER_TIMEOUT_SECONDS = 0.25
"""A quorum queue whose leader does not answer is reported with 0 messages after this long."""


class DeclareOk(NamedTuple):
    """The ready messages of a queue, without the unacknowledged ones, and its consumers."""

    ready: int
    consumers: int


def declare_passively(amqp_url: str, queues: Iterable[QueueName]) -> dict[QueueName, DeclareOk]:
    """Return the depth of each of these queues, given as (vhost, name).

    A queue that does not exist, does not answer in time, or whose vhost cannot be entered, is not in the answer. Nor is
    one that is said to be empty after ``LEADER_TIMEOUT_SECONDS``: its leader may not have answered.
    ``amqp_url`` is ``amqp://user:password@host:port``; the account needs to be allowed into each vhost, no more.
    """
    depths: dict[QueueName, DeclareOk] = {}
    until = time.monotonic() + TOTAL_TIMEOUT_SECONDS
    for vhost, group in groupby(sorted(set(queues)), key=lambda queue: queue[0]):
        names = [name for _, name in group]
        while names and time.monotonic() < until:
            # An answer that doesn't come spoils its connection; the queues behind it are asked on a fresh one.
            names = names[_ask(amqp_url, vhost, names, depths) :]
    return depths


def delete_queue(amqp_url: str, vhost: str, name: str) -> None:
    """Delete a queue; one that isn't there is no error. For names that the management API can't be asked about.

    Raises:
        OSError: the broker is away.
        amqp.AMQPError: it refused; the account needs the configure permission there.
    """
    with new_connection(amqp_url, vhost, TIMEOUT_SECONDS) as connection:
        connection.channel().queue_delete(name)


def new_connection(amqp_url: str, vhost: str, seconds: float) -> amqp.Connection:
    """Return a connection to a vhost, which is still to be opened. That may take so many seconds, and so may an answer.

    By amqps, the broker's certificate has to be one that is trusted, for the name of this host.
    """
    url = urlsplit(amqp_url)
    is_tls = url.scheme == "amqps"
    return amqp.Connection(
        f"{url.hostname}:{url.port or (5671 if is_tls else 5672)}",
        userid=unquote(url.username or "guest"),
        password=unquote(url.password or "guest"),
        virtual_host=vhost,
        # Without a name to compare with, py-amqp takes any host's certificate.
        ssl={"server_hostname": url.hostname} if is_tls else False,
        connect_timeout=seconds,
        read_timeout=seconds,
        write_timeout=seconds,
    )


def _ask(amqp_url: str, vhost: str, names: list[str], depths: dict[QueueName, DeclareOk]) -> int:
    """Ask these queues one after the other, and return how many were asked: all of them where nobody can be asked."""
    connection = new_connection(amqp_url, vhost, TIMEOUT_SECONDS)
    try:
        connection.connect()
        channel = connection.channel()
    except (amqp.AMQPError, OSError):
        connection.collect()
        return len(names)
    for asked, name in enumerate(names, start=1):
        try:
            # A queue that isn't there, or is somebody's exclusive one, makes the broker close the channel.
            channel = channel if channel.is_open else connection.channel()
            began = time.monotonic()
            answer: Any = channel.queue_declare(name, passive=True, auto_delete=False)
            if answer.message_count or time.monotonic() - began < LEADER_TIMEOUT_SECONDS:
                depths[vhost, name] = DeclareOk(answer.message_count, answer.consumer_count)
        except amqp.ChannelError:
            channel.is_open = False
        except (amqp.AMQPError, OSError):
            connection.collect()
            return asked
    connection.collect()
    return len(names)
