"""Requests about single queues and exchanges over AMQP: exact ready counts, deletion and purging.

A passive declare returns the exact number of ready messages. It is cheap (500 take 0.1 s) and works under a resource
alarm; the management API's figures of single queues lag by 5 s or more. A name is a field of its own here, which no
proxy can change; in a URL, ``..`` or ``%2F`` may lead to another queue.

This module uses py-amqp because it has a timeout for each answer; pika waits forever if a queue's process doesn't
respond.
"""

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import groupby
from typing import Any, NamedTuple, Self
from urllib.parse import unquote, urlsplit

import amqp

from rabbit import deadline
from rabbit.addresses import addresses_of
from rabbit.decoding import undecoded_frame_handler
from rabbit.errors import BrokerError, BrokerUnavailable, ConnectionLimit, MalformedResponse, NotOnBroker, Refused
from rabbit.names import MAX_NAME_BYTES, QueueName

TIMEOUT_SECONDS = 5.0
"""For opening a connection, and for each answer."""

TOTAL_TIMEOUT_SECONDS = 20.0
"""For all queues together."""

DELETION_TIMEOUT_SECONDS = 20.0
"""While a node is down, RabbitMQ takes 5 s to delete a quorum queue, and up to 6 s to elect its leader before."""

LEADER_TIMEOUT_SECONDS = 0.25
"""The broker reports 0 messages for a quorum queue whose leader does not answer within this time."""

NOT_FOUND = 404

CONNECTION_LIMIT = "connection limit ("
"""In the broker's text about a connection that is one too many, in its vhost, of its user, or at its node."""

QUEUE_LIMIT = "queue limit"
"""In the broker's text about a queue that is one too many in its vhost."""

NODE_DOWN = "is down or inaccessible"
"""The end of the broker's text about a queue whose node is down: "home node 'rabbit@a' of durable queue 'x' …"."""


class DeclareOk(NamedTuple):
    """The answer to a declaration: ready messages, without unacknowledged ones, and consumers."""

    ready: int
    consumers: int

    @classmethod
    def after(cls, answer: Any, seconds: float) -> "DeclareOk | None":
        """Return py-amqp's answer, or None if it took ``seconds``: the queue's leader may not have answered."""
        if not answer.message_count and seconds >= LEADER_TIMEOUT_SECONDS:
            return None
        return cls(answer.message_count, answer.consumer_count)


class Session:
    """A channel in one vhost, for one thread. The first request opens it, and the next one after an error reopens it.

    ``amqp_url`` is ``amqp://user:password@host:port``, or several, separated by commas, of nodes of one cluster: the
    first that accepts the connection is used. ``seconds`` is the timeout for opening it, and for each answer; a
    deletion may take longer, unless a deadline applies. ``NotOnBroker`` also says that the vhost does not exist or that
    the queue's node is down. ``user`` is the one of the open connection.
    """

    def __init__(self, amqp_url: str, vhost: str, seconds: float = TIMEOUT_SECONDS) -> None:
        self._amqp_url = amqp_url
        self.vhost = vhost
        self.user = ""
        self._seconds = seconds
        self._connection: amqp.Connection | None = None
        self._channel: Any = None

    def declare_passively(self, name: str) -> DeclareOk | None:
        """Return a queue's ready messages and consumers, or None if its leader may not have answered.

        The user needs access to the vhost; on RabbitMQ 4.3 also a permission on the queue.
        """
        channel = self._open_channel()
        began = time.monotonic()
        answer = self.request(lambda: channel.queue_declare(name, passive=True, auto_delete=False))
        return DeclareOk.after(answer, time.monotonic() - began)

    def declare_queue(self, name: str, *, durable: bool, auto_delete: bool, arguments: Mapping[str, Any]) -> None:
        """Declare a queue. Repeating it changes nothing. Refused if it exists with another declaration."""
        channel = self._open_channel()
        self.request(
            lambda: channel.queue_declare(name, durable=durable, auto_delete=auto_delete, arguments=dict(arguments))
        )

    def bind_queue(self, name: str, exchange: str, routing_key: str, arguments: Mapping[str, Any]) -> None:
        """Bind a queue to an exchange. Repeating it changes nothing. NotOnBroker if there is no such exchange."""
        channel = self._open_channel()
        self.request(lambda: channel.queue_bind(name, exchange, routing_key, arguments=dict(arguments)))

    def delete_queue(self, name: str, *, if_empty: bool = False, if_unused: bool = False) -> int:
        """Delete a queue, and return how many ready messages it had. A queue that does not exist counts as deleted.

        The broker checks the conditions without a race, but only for classic queues. It raises Refused if one doesn't
        hold, or if the queue is exclusive to a live connection.
        """
        channel = self._open_channel()
        with self.time_for_deletion():
            return int(self.request(lambda: channel.queue_delete(name, if_unused=if_unused, if_empty=if_empty)))

    def purge_queue(self, name: str) -> int:
        """Purge the ready messages of a queue, and return their number. Unacknowledged messages stay."""
        channel = self._open_channel()
        return int(self.request(lambda: channel.queue_purge(name)))

    def declare_exchange_passively(self, name: str) -> None:
        if len(name.encode()) > MAX_NAME_BYTES:
            raise NotOnBroker(f"vhost '{self.vhost}': no exchange has a name of more than {MAX_NAME_BYTES} bytes")
        channel = self._open_channel()
        self.request(lambda: channel.exchange_declare(name, "", passive=True))

    def delete_exchange(self, name: str) -> None:
        self.declare_exchange_passively(name)  # the deletion of an exchange that does not exist succeeds, too
        channel = self._open_channel()
        self.request(lambda: channel.exchange_delete(name))

    @contextmanager
    def time_for_deletion(self) -> Iterator[None]:
        """Wait longer for answers within the ``with`` block, unless a deadline applies."""
        if self._connection is None or deadline.is_limited():
            yield
            return
        _set_answer_timeout(self._connection, max(self._seconds, DELETION_TIMEOUT_SECONDS))
        try:
            yield
        finally:
            if self._connection is not None:
                _set_answer_timeout(self._connection, self._seconds)

    def new_channel(self) -> Any:
        """Return another channel of py-amqp on the same connection, which leaves bodies undecoded."""
        connection = self._open_channel().connection
        channel = self.request(connection.channel)
        channel.auto_decode = False
        return channel

    def check(self) -> None:
        """Check that the broker answers on this connection. Open it if needed."""
        channel = self._open_channel()
        self.request(lambda: channel.connection.channel().close())

    def drain(self, channel: Any, seconds: float) -> bool:
        """Wait for a message for a consumer of this channel, or another. Return whether one arrived in time."""

        def wait() -> bool:
            try:
                channel.connection.drain_events(seconds)
            except TimeoutError:
                return False
            return True

        return bool(self.request(wait))

    @property
    def is_connected(self) -> bool:
        """Whether the connection is open. It stays open if the broker refuses a request."""
        return self._connection is not None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.collect()
        self._connection = self._channel = None

    def disconnect(self, seconds: float) -> None:
        """Close the connection by AMQP's handshake, and wait this long for the broker's answer."""
        if self._connection is not None:
            with suppress(amqp.AMQPError, OSError):
                _set_answer_timeout(self._connection, seconds)
                self._connection.close()
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_channel(self) -> Any:
        if self._channel is not None:
            return self._channel
        seconds = deadline.seconds_left(self._seconds)
        if seconds <= 0:
            raise BrokerUnavailable("an earlier request took all the time", never_reached=True)
        addresses = addresses_of(self._amqp_url)
        failure: BrokerError = BrokerUnavailable("no address of the broker is set for AMQP", never_reached=True)
        for address in addresses.in_turn():
            try:
                self._connection = new_connection(address, self.vhost, seconds / len(addresses))
                self._connection.connect()
                if conflict := addresses.conflict(address, cluster_of(self._connection)):
                    raise OSError(f"{conflict}; write only addresses of nodes of the guarded cluster")
                self._channel = self._connection.channel()
                self.user = unquote(urlsplit(address).username or "guest")
                _set_answer_timeout(self._connection, seconds)
                deadline.record_answer()
                return self._channel
            except (amqp.NotAllowed, amqp.AccessRefused) as error:  # each address may have another user
                failure = self._as_broker_error(error)
                if isinstance(failure, NotOnBroker):  # no node has the vhost
                    self.close()
                    raise failure from error
            except (amqp.AMQPError, OSError) as error:
                problem = "no answer in time" if isinstance(error, TimeoutError) else error
                failure = BrokerUnavailable(f"can't connect over AMQP: {problem}", never_reached=True)
            self.close()
            addresses.move_past(address)
        raise failure

    def request(self, request: Callable[[], Any]) -> Any:
        """Return the result of a request of py-amqp, or raise its error as a ``BrokerError``."""
        try:
            answer = request()
            if answer is not False:  # no message arrived in time
                deadline.record_answer()
            return answer
        except amqp.ChannelError as error:
            raise self._as_broker_error(error) from error  # py-amqp has reopened the channel
        except (amqp.AMQPNotImplementedError, amqp.NotAllowed) as error:
            self.close()
            raise self._as_broker_error(error) from error
        except (amqp.AMQPError, OSError) as error:
            # A connection with a missing answer is unusable.
            self.close()
            timed_out = isinstance(error, TimeoutError)
            raise BrokerUnavailable(f"no answer over AMQP: {error}", timed_out=timed_out) from error
        except (ValueError, ArithmeticError, struct.error) as error:  # such as a decimal with too many digits
            self.close()
            raise MalformedResponse(f"vhost '{self.vhost}': py-amqp can't read or write it: {error}") from error

    def _as_broker_error(self, error: amqp.AMQPError) -> BrokerError:
        text = str(error.reply_text or error)
        # A vhost that does not exist is 530, too, like one that refuses the login.
        if error.reply_code == NOT_FOUND or (isinstance(error, amqp.NotAllowed) and "not found" in text):
            return NotOnBroker(f"vhost '{self.vhost}': {text}")
        kind = ConnectionLimit if CONNECTION_LIMIT in text else Refused
        return kind(f"vhost '{self.vhost}': {text}", status=error.reply_code or 0, reason=text)


class Sessions:
    """A task's sessions, one for each vhost and thread. Leaving the context closes them."""

    def __init__(self, amqp_url: str, seconds: float = TIMEOUT_SECONDS) -> None:
        self._amqp_url = amqp_url
        self._seconds = seconds
        self._sessions: dict[tuple[int, str], Session] = {}

    def of(self, vhost: str) -> Session:
        key = (threading.get_ident(), vhost)
        if key not in self._sessions:
            self._sessions[key] = Session(self._amqp_url, vhost, self._seconds)
        return self._sessions[key]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for session in self._sessions.values():
            session.close()
        self._sessions.clear()


def declare_passively(
    amqp_url: str, queues: Iterable[QueueName], seconds: float = TOTAL_TIMEOUT_SECONDS
) -> dict[QueueName, DeclareOk]:
    """Declare queues passively, and return the ready messages and consumers of each.

    The result lacks queues that do not exist, do not answer in time, are in a vhost that refuses the login, or are not
    declared within ``seconds``. It also lacks queues reported as empty after ``LEADER_TIMEOUT_SECONDS``: their leader
    may not have answered. ``amqp_url`` is as for ``Session``.
    """
    declared: dict[QueueName, DeclareOk] = {}
    until = time.monotonic() + seconds
    for vhost, group in groupby(sorted(set(queues)), key=lambda queue: queue[0]):
        with Session(amqp_url, vhost) as session:
            for queue in group:
                if time.monotonic() >= until:
                    return declared
                try:
                    answer = session.declare_passively(queue[1])
                except BrokerUnavailable as error:
                    if error.never_reached:
                        break
                except BrokerError:
                    if not session.is_connected:
                        break  # the vhost does not exist, or refuses the login
                else:
                    if answer is not None:
                        declared[queue] = answer
    return declared


def cluster_of(connection: amqp.Connection) -> str:
    """Return the name of the cluster at an open connection, or an empty text if it has none."""
    # py-amqp sets this attribute when the broker's first frame arrives.
    properties = getattr(connection, "server_properties", None) or {}
    return str(properties.get("cluster_name", ""))


def _set_answer_timeout(connection: amqp.Connection, seconds: float) -> None:
    """Set the timeout of each answer on an open connection, as py-amqp does when it opens one."""
    whole = int(seconds)
    timeout = struct.pack("ll", whole, int((seconds - whole) * 1_000_000))
    connection.transport.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)


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
        frame_handler=undecoded_frame_handler,
    )
