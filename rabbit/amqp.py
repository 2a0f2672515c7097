"""Requests about single queues over AMQP: exact ready counts, and deletion of queues that HTTP can't name.

A passive declare returns the exact number of ready messages. It is cheap (500 take 0.1 s) and works under a resource
alarm. The management API's figures of single queues lag by 5 s or more. This module uses py-amqp because it has a
timeout for each answer; pika waits forever if a queue's process doesn't respond.
"""

import time
from collections.abc import Iterable
from itertools import groupby
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import amqp

from rabbit.names import QueueName

TIMEOUT_SECONDS = 5.0
"""For opening a connection, and for each answer."""

TOTAL_TIMEOUT_SECONDS = 20.0
"""For all queues together. Queues that are not declared by then are left out."""

LEADER_TIMEOUT_SECONDS = 0.25
"""The broker reports 0 messages for a quorum queue whose leader does not answer within this time."""


class DeclareOk(NamedTuple):
    """The answer to a declaration: ready messages, without unacknowledged ones, and consumers."""

    ready: int
    consumers: int


def declare_passively(amqp_url: str, queues: Iterable[QueueName]) -> dict[QueueName, DeclareOk]:
    """Declare queues passively, and return the ready messages and consumers of each.

    The result lacks queues that do not exist, do not answer in time, or are in a vhost that refuses the login. It also
    lacks queues reported as empty after ``LEADER_TIMEOUT_SECONDS``: their leader may not have answered.
    ``amqp_url`` is ``amqp://user:password@host:port``. The account needs access to each vhost; on RabbitMQ 4.3 also
    a permission on the queue.
    """
    declared: dict[QueueName, DeclareOk] = {}
    until = time.monotonic() + TOTAL_TIMEOUT_SECONDS
    for vhost, group in groupby(sorted(set(queues)), key=lambda queue: queue[0]):
        names = [name for _, name in group]
        while names and time.monotonic() < until:
            # A connection with a missing answer is unusable, so the remaining queues get a new one.
            names = names[_declare_in(vhost, names, amqp_url, declared) :]
    return declared


def delete_queue(amqp_url: str, vhost: str, name: str) -> None:
    """Delete a queue, if it exists. Use this for names that cannot be in a URL of the management API.

    Raises:
        OSError: the broker can't be reached.
        amqp.AMQPError: the broker refused; the account needs the configure permission.
    """
    with new_connection(amqp_url, vhost, TIMEOUT_SECONDS) as connection:
        connection.channel().queue_delete(name)


def new_connection(amqp_url: str, vhost: str, seconds: float) -> amqp.Connection:
    """Return an unopened connection to a vhost. ``seconds`` is the timeout for opening it and for each answer.

    With ``amqps`` the broker needs a trusted certificate for this host name.
    """
    url = urlsplit(amqp_url)
    is_tls = url.scheme == "amqps"
    return amqp.Connection(
        f"{url.hostname}:{url.port or (5671 if is_tls else 5672)}",
        userid=unquote(url.username or "guest"),
        password=unquote(url.password or "guest"),
        virtual_host=vhost,
        # Without server_hostname, py-amqp accepts a certificate of any host.
        ssl={"server_hostname": url.hostname} if is_tls else False,
        connect_timeout=seconds,
        read_timeout=seconds,
        write_timeout=seconds,
    )


def _declare_in(vhost: str, names: list[str], amqp_url: str, declared: dict[QueueName, DeclareOk]) -> int:
    """Declare queues of a vhost one after another, and return how many are done: all if the vhost can't be entered."""
    connection = new_connection(amqp_url, vhost, TIMEOUT_SECONDS)
    try:
        connection.connect()
        channel = connection.channel()
    except (amqp.AMQPError, OSError):
        connection.collect()
        return len(names)
    for done, name in enumerate(names, start=1):
        try:
            # The broker closes the channel if the queue does not exist or is exclusive to another connection.
            channel = channel if channel.is_open else connection.channel()
            began = time.monotonic()
            answer: Any = channel.queue_declare(name, passive=True, auto_delete=False)
            if answer.message_count or time.monotonic() - began < LEADER_TIMEOUT_SECONDS:
                declared[vhost, name] = DeclareOk(answer.message_count, answer.consumer_count)
        except amqp.ChannelError:
            channel.is_open = False
        except (amqp.AMQPError, OSError):
            connection.collect()
            return done
    connection.collect()
    return len(names)
