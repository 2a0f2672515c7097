"""The client of RabbitMQ's management API, and its errors.

All threads of a process share one :class:`Management`. Its methods return plain values or raise a
:class:`BrokerError`. The error's text names the request, the problem and the remedy.
"""

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Literal, NamedTuple
from urllib.parse import quote, unquote, urlencode

import orjson

from rabbit.arguments import Difference, differences_from_row, inequivalent_reason, parse_inequivalent
from rabbit.failover import CLUSTER_ID, FailoverClient, Server
from rabbit.http import NoAnswer, TooLarge
from rabbit.permissions import Permissions
from rabbit.policies import BrokerPolicy
from rabbit.urls import split_url

Row = dict[str, Any]

MAX_RESPONSE_BYTES = 512 * 1024 * 1024
"""The full list of 10,000 queues has about 14 MB."""

BODY_READ_TIMEOUTS = 3
"""The timeout of a whole answer, in read timeouts."""

MAX_REASON_LENGTH = 300

MAX_TARGET_BYTES = 65_536
"""The broker closes the connection during a longer request line."""

NODE_COLUMNS = (
    "name,running,mem_used,mem_limit,mem_alarm,disk_free,disk_free_limit,disk_free_alarm,"
    "fd_used,fd_total,uptime,partitions"
)
ARGUMENTS_ONLY = {"disable_stats": "true", "columns": "name,vhost,type,arguments"}
EXCHANGE_COLUMNS = "name,vhost,type,durable,auto_delete,internal"
CLIENT_COLUMNS = "user,vhost,protocol,connected_at,name,user_provided_name"
CONSUMER_COLUMNS = (
    "queue.name,channel_details.user,channel_details.connection_name,channel_details.name,consumer_tag,prefetch_count,"
    "ack_required"
)

_PATH_TEMPLATES = {
    "bindings": ("bindings", "{vhost}", "e", "{exchange}", "q", "{queue}"),
    "connections": ("connections", "username", "{user}"),
    "consumers": ("consumers", "{vhost}"),
    "exchanges": ("exchanges", "{vhost}", "{name}"),
    "operator-policies": ("operator-policies", "{vhost}"),
    "permissions": ("permissions", "{vhost}", "{user}"),
    "policies": ("policies", "{vhost}"),
    "queues": ("queues", "{vhost}", "{name}"),
    "users": ("users", "{name}"),
    "vhosts": ("vhosts", "{name}"),
}
"""The segments of a path that are names, by its first segment. Segments after these are literal."""


class BrokerError(Exception):
    """A request to the broker failed."""

    def __init__(self, text: str) -> None:
        # PostgreSQL can't store a NUL from the broker's answer.
        super().__init__(text.replace("\0", "\N{REPLACEMENT CHARACTER}"))


class BrokerUnavailable(BrokerError):
    """The broker did not answer, or answered 5xx. It may have executed the request, so retry later.

    ``timed_out``: the request was sent, and the answer timed out. ``never_reached``: there was no connection, so the
    request was not executed. ``status`` is the HTTP status; 0: there was no answer.
    """

    def __init__(self, text: str, *, timed_out: bool = False, never_reached: bool = False, status: int = 0) -> None:
        super().__init__(text)
        self.timed_out = timed_out
        self.never_reached = never_reached
        self.status = status


class NodeDown(BrokerUnavailable):
    """The node of a queue is down. The text contains no address, so it may be shown to everybody."""


class Refused(BrokerError):
    """The broker refused with 401, 403 or another 4xx, or with a 500 without a reason. A retry does not help.

    ``status`` is the HTTP status; 0: the request was not sent. ``reason`` is the broker's.
    """

    def __init__(self, text: str, *, status: int, reason: str) -> None:
        super().__init__(text)
        self.status = status
        self.reason = reason


class InequivalentArguments(Refused):
    """The queue or exchange exists with other arguments, durability or auto-deletion.

    ``argument`` is the one that differs, ``found`` its value on the broker, ``wanted`` the value in the request. None:
    the value is not set, or the broker doesn't name it.
    """

    def __init__(self, text: str, *, status: int, reason: str) -> None:
        super().__init__(text, status=status, reason=reason)
        difference = parse_inequivalent(reason)
        self.argument: str | None = difference.argument if difference else None
        self.found: Any = difference.found if difference else None
        self.wanted: Any = difference.wanted if difference else None


class NotOnBroker(BrokerError):
    """The broker has no object of this name. It gives the same answer for a queue whose node is down."""


class MalformedResponse(BrokerError):
    """The answer is not the management API's: not JSON, unexpected fields, a redirect, or too large."""


class AnotherVhost(MalformedResponse):
    """The answer is about another vhost than the request: something before the broker rewrites addresses."""


def was_not_executed(error: BrokerError) -> bool:
    """Return whether the broker certainly did not execute the request. If False, the outcome is unknown."""
    if isinstance(error, BrokerUnavailable):
        return error.never_reached
    # A 500 without a reason may also be a crash after the request was executed.
    return isinstance(error, NotOnBroker) or (isinstance(error, Refused) and error.status != 500)


class Account(NamedTuple):
    """The account that this client is logged in as."""

    name: str
    tags: frozenset[str]


class Vhost(NamedTuple):
    """A virtual host. ``nodes`` are those on which it runs. Lists may lack the queues of other nodes."""

    name: str
    nodes: frozenset[str]


class Binding(NamedTuple):
    """A binding from the exchange ``source`` (empty: the default exchange) to a queue or an exchange."""

    source: str
    vhost: str
    destination: str
    destination_type: str
    routing_key: str
    arguments: Mapping[str, Any]
    properties_key: str


class Exchange(NamedTuple):
    """An exchange as listed."""

    name: str
    vhost: str
    type: str
    durable: bool
    auto_delete: bool
    internal: bool


class User(NamedTuple):
    """A RabbitMQ account."""

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
    ``connection_name`` in the client's properties; empty: none.
    """

    user: str
    vhost: str
    protocol: str
    connected_at: datetime | None
    name: str
    given_name: str


class QueueConsumer(NamedTuple):
    """A consumer of a queue. A ``prefetch`` of 0 is unlimited. Its ``connection`` is a ``Connection.name``."""

    queue: str
    user: str
    connection: str
    channel: str
    tag: str
    prefetch: int
    acknowledges: bool


class QueueRates(NamedTuple):
    """Messages a second over the last seconds."""

    published: float
    delivered: float
    acknowledged: float


class Node(NamedTuple):
    """A node of the cluster. Figures are in bytes; None: the node is stopped, or has just started.

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


class Call(NamedTuple):
    """A finished request. ``path`` has placeholders for names and no query: ``/api/queues/{vhost}/{name}``.

    ``outcome``: ``ok``; ``refused``: a 4xx; ``failed``: a 5xx, or an answer that is not the management API's;
    ``away``: no answer. ``seconds`` includes the retry, if there was one.
    """

    method: str
    path: str
    outcome: Literal["ok", "refused", "failed", "away"]
    seconds: float


class _Answer(NamedTuple):
    request: str  # method and path, for the texts of errors
    status: int
    headers: Mapping[str, str]
    body: bytes
    sent_twice: bool = False
    address: str = ""


class Management:
    """A client of the management API, for many threads.

    - ``url``: ``http://user:password@host:15672``, user and password percent-encoded, with a reverse proxy's path; or
      several, separated by commas, of nodes of one cluster, which are tried in turn.
    - ``connect_timeout``, ``read_timeout``: seconds. The second limits each read, and ``BODY_READ_TIMEOUTS`` times that
      a whole answer.
    - ``max_bytes``: the limit of an answer's body.
    - ``on_call``: called with each finished request, in the thread that made it.
    - ``request_id``: returns the ``X-Request-ID`` header; empty: none is sent.

    Every method may raise BrokerUnavailable, Refused or MalformedResponse; docstrings name further errors. A request
    whose connection dies is retried once on a new one: all requests are idempotent, and RabbitMQ 4 drops idle
    connections without notice.

    Raises:
        ValueError: the URL is invalid.
    """

    def __init__(
        self,
        url: str,
        *,
        connect_timeout: float = 2.0,
        read_timeout: float = 20.0,
        max_bytes: int = MAX_RESPONSE_BYTES,
        on_call: Callable[[Call], None] | None = None,
        request_id: Callable[[], str] | None = None,
    ) -> None:
        self._max_bytes = max_bytes
        self._on_call = on_call
        self._request_id = request_id
        self._http = FailoverClient(
            url,
            _read_url,
            connect_timeout=connect_timeout,
            read_timeout=read_timeout,
            answer_timeout=BODY_READ_TIMEOUTS * read_timeout,
            max_bytes=max_bytes,
        )

    def __repr__(self) -> str:
        return f"<Management {self._http.where}>"

    def close(self) -> None:
        """Close the pooled connections."""
        self._http.close()

    def in_turn(self) -> Iterator["Management"]:
        """Return a client of each address alone, for work that must not change the node halfway.

        Ask for the next one only if the work failed: then all clients of this process begin with another address.
        """
        return map(self._through, self._http.in_turn())

    @property
    def has_several_addresses(self) -> bool:
        """Whether the broker has several addresses."""
        return self._http.number > 1

    def cluster_ids(self) -> dict[str, str]:
        """Return the id of the cluster at each address; empty: there is no answer."""
        return self._http.cluster_ids()

    def _through(self, http: FailoverClient) -> "Management":
        one = copy(self)
        one._http = http
        return one

    # The broker itself

    def overview(self) -> Row:
        """Return the broker's overview: versions, totals, listeners."""
        return _object(self._get("overview"), rabbitmq_version=str)

    def whoami(self) -> Account:
        """Return the account that this client is logged in as."""
        answer = self._get("whoami")
        row = _object(answer, name=str)
        return Account(row["name"], _tags(answer, row))

    def is_rewritten(self) -> bool:
        """Return whether something before the broker decodes %2F in addresses, so that they lead elsewhere."""
        # Decoded, this is the address of the account's list of permissions.
        return self._exchange("GET", ("users", f"{self.whoami().name}/permissions")).status == 200

    def cluster_id(self) -> str:
        """Return the id that the cluster got when it was created; empty: it has none, or the broker doesn't tell it."""
        try:
            return str(_object(self._get("global-parameters", CLUSTER_ID), value=str)["value"])
        except (NotOnBroker, Refused):
            return ""

    def denied_features(self) -> set[str]:
        """Return the deprecated features that the broker denies. RabbitMQ before 4.3 doesn't report any."""
        try:
            rows = _rows(self._get("deprecated-features"), name=str)
        except NotOnBroker:  # before 3.13
            return set()
        return {row["name"] for row in rows if row.get("state") == "denied"}

    def clock(self) -> datetime | None:
        """Return the time on the broker's machine, in whole seconds; None: the answer has no date."""
        answer = self._exchange("GET", ("whoami",))  # a refusal has a date too
        try:
            return parsedate_to_datetime(answer.headers.get("date", ""))
        except (TypeError, ValueError):
            return None

    def nodes(self) -> list[Node]:
        """Return the nodes of the cluster, including stopped ones."""
        rows = _rows(self._get("nodes", params={"columns": NODE_COLUMNS}), name=str, running=bool)
        return [
            Node(
                row["name"],
                row["running"],
                _number(row.get("mem_used")),
                _number(row.get("mem_limit")),
                row.get("mem_alarm") is True,
                _number(row.get("disk_free")),
                _number(row.get("disk_free_limit")),
                row.get("disk_free_alarm") is True,
                _number(row.get("fd_used")),
                _number(row.get("fd_total")),
                None if (milliseconds := _number(row.get("uptime"))) is None else milliseconds / 1000,
                tuple(map(str, lost)) if isinstance(lost := row.get("partitions"), list) else (),
            )
            for row in rows
        ]

    def alarms(self) -> list[str]:
        """Return the cluster's resource alarms, such as "memory on rabbit@host"."""
        answer = self._exchange("GET", ("health", "checks", "alarms"), ok_status=503)
        if answer.status != 503:
            _object(_checked(answer), status=str)
            return []
        # The broker answers 503 if there are alarms. A proxy may answer 503 too.
        try:
            alarms = orjson.loads(answer.body)["alarms"]
            return [f"{alarm['resource']} on {alarm['node']}" for alarm in alarms]
        except (ValueError, KeyError, TypeError):
            _checked(answer)
            raise

    # Vhosts

    def vhosts(self) -> list[Vhost]:
        """Return all vhosts."""
        rows = _rows(self._get("vhosts", params={"columns": "name,cluster_state"}), name=str)
        return [Vhost(row["name"], _nodes_that_run(row.get("cluster_state"))) for row in rows]

    def create_vhost(self, name: str) -> bool:
        """Create a vhost, on which this client's account gets all permissions. Return whether it is new."""
        return self._put("vhosts", name)

    def delete_vhost(self, name: str) -> None:
        """Delete a vhost with everything in it.

        Raises:
            NotOnBroker: it does not exist.
        """
        self._delete("vhosts", name)

    # Queues

    def list_queues(self, vhost: str | None, params: Mapping[str, str]) -> list[Row]:
        """Return the rows of the queues in a vhost (None: in all vhosts), as the broker lists them.

        ``params`` are the query's; ``columns`` limits what a row contains.

        Raises:
            NotOnBroker: no such vhost.
        """
        path = ("queues",) if vhost is None else ("queues", vhost)
        columns = params.get("columns", "name,vhost").split(",")
        shape = {key: str for key in ("name", "vhost") if key in columns}
        return _rows(self._get(*path, params=params), vhost, **shape)

    def find_queues(self, vhost: str | None, params: Mapping[str, str]) -> list[Row]:
        """Return the first 500 rows of ``list_queues`` that match ``name`` in ``params``.

        Raises:
            NotOnBroker: no such vhost.
        """
        path = ("queues",) if vhost is None else ("queues", vhost)
        answer = self._get(*path, params={**params, "page": "1", "page_size": "500"})
        page = _object(answer, items=list)
        rows = [_validated(answer, row, {"name": str, "vhost": str}) for row in page["items"]]
        for row in rows:
            _require_vhost(answer, row, row["vhost"] if vhost is None else vhost)
        return rows

    def queue(self, vhost: str, name: str) -> Row:
        """Return one queue. Its lengths lag by seconds, so no decision may rely on them.

        Raises:
            NotOnBroker: it does not exist, or its node is down.
        """
        answer = self._get("queues", vhost, name)
        row = _object(answer, name=str, vhost=str)
        _require_vhost(answer, row, vhost)
        return row

    def unacknowledged_of_channels(self, vhost: str) -> dict[str, int]:
        """Return the number of unacknowledged messages of each channel in a vhost, by the channel's name."""
        rows = _rows(self._get("vhosts", vhost, "channels", params={"columns": "name,messages_unacknowledged"}))
        counts = {str(row.get("name")): _number(row.get("messages_unacknowledged")) for row in rows}
        return {name: count for name, count in counts.items() if count is not None}

    def consumers(self, vhost: str) -> list[QueueConsumer]:
        """Return the consumers of all queues in a vhost. The list lags by 5 s."""
        return _consumers(_rows(self._get("consumers", vhost, params={"columns": CONSUMER_COLUMNS})))

    def queue_arguments(self, vhost: str, name: str) -> Row:
        """Return a queue's ``name``, ``vhost``, ``type`` and ``arguments``, without its lagging statistics.

        Raises:
            NotOnBroker: it does not exist, or its node is down.
        """
        answer = self._get("queues", vhost, name, params=ARGUMENTS_ONLY)
        row = _object(answer, name=str, vhost=str)
        _require_vhost(answer, row, vhost)
        return row

    def list_arguments(self, vhost: str) -> list[Row]:
        """Return the same of all queues of a vhost. The broker asks no queue's process.

        Raises:
            NotOnBroker: no such vhost.
        """
        return self.list_queues(vhost, ARGUMENTS_ONLY)

    def policies(self, vhost: str) -> list[BrokerPolicy]:
        """Return the policies of a vhost.

        Raises:
            NotOnBroker: no such vhost.
        """
        return _policies(self._get("policies", vhost), vhost)

    def operator_policies(self, vhost: str) -> list[BrokerPolicy]:
        """Return the operator policies of a vhost.

        Raises:
            NotOnBroker: no such vhost.
        """
        return _policies(self._get("operator-policies", vhost), vhost)

    def declare_queue(
        self,
        vhost: str,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        durable: bool = True,
        auto_delete: bool = False,
    ) -> bool:
        """Declare a queue. Return whether it is new.

        Raises:
            InequivalentArguments: it exists with other arguments, durability or auto-deletion.
            NotOnBroker: no such vhost.
        """
        _require_one_line(name)
        declared = {"durable": durable, "auto_delete": auto_delete, "arguments": dict(arguments or {})}
        try:
            return self._put("queues", vhost, name, json=declared)
        except (Refused, BrokerUnavailable) as error:
            if error.status != 500:
                raise
            # It may be the answer to other arguments, if an argument's value is not ASCII; see `_confirmed`.
            difference = self._find_difference(vhost, name, declared)
            if difference is None:
                raise
            reason = inequivalent_reason(vhost, name, difference)
            raise _inequivalent(f"PUT {_path('PUT', ('queues', vhost, name))}", 500, reason) from error

    def _find_difference(self, vhost: str, name: str, declared: Mapping[str, Any]) -> Difference | None:
        try:
            return next(iter(differences_from_row(declared, self.queue(vhost, name))), None)
        except BrokerError:
            return None

    # Exchanges and bindings

    def exchanges(self, vhost: str) -> list[Exchange]:
        """Return the exchanges of a vhost, including the broker's own.

        Raises:
            NotOnBroker: no such vhost.
        """
        rows = _rows(
            self._get("exchanges", vhost, params={"columns": EXCHANGE_COLUMNS}),
            vhost,
            name=str,
            vhost=str,
            type=str,
            durable=bool,
            auto_delete=bool,
            internal=bool,
        )
        return [Exchange(**{key: row[key] for key in Exchange._fields}) for row in rows]

    def declare_exchange(
        self,
        vhost: str,
        name: str,
        type: str = "topic",  # noqa: A002 - AMQP's name
        *,
        durable: bool = True,
        auto_delete: bool = False,
        internal: bool = False,
        arguments: Mapping[str, Any] | None = None,
    ) -> bool:
        """Declare an exchange. Return whether it is new. Of an existing one, the broker compares only the type.

        Raises:
            InequivalentArguments: it exists with another type.
            NotOnBroker: no such vhost.
        """
        _require_one_line(name)
        declared = {
            "type": type,
            "durable": durable,
            "auto_delete": auto_delete,
            "internal": internal,
            "arguments": dict(arguments or {}),
        }
        return self._put("exchanges", vhost, name, json=declared)

    def bindings(self, vhost: str) -> list[Binding]:
        """Return the bindings of a vhost, including those of the default exchange.

        Raises:
            NotOnBroker: no such vhost.
        """
        return _bindings(self._get("bindings", vhost), vhost)

    def queue_bindings(self, vhost: str, name: str) -> list[Binding]:
        """Return the bindings of a queue. The broker shows one to the default exchange even if no queue exists."""
        return _bindings(self._get("queues", vhost, name, "bindings"), vhost)

    def bindings_to_exchange(self, vhost: str, name: str) -> list[Binding]:
        """Return the bindings of an exchange to other exchanges, which feed it; none if it does not exist."""
        return _bindings(self._get("exchanges", vhost, name, "bindings", "destination"), vhost)

    def exchange_bindings(self, vhost: str, name: str) -> list[Binding]:
        """Return the bindings from an exchange; none if it does not exist."""
        return _bindings(self._get("exchanges", vhost, name or "amq.default", "bindings", "source"), vhost)

    def bind_queue(
        self, vhost: str, exchange: str, queue: str, routing_key: str, arguments: Mapping[str, Any] | None = None
    ) -> None:
        """Bind a queue to an exchange. Repeating it changes nothing.

        Raises:
            NotOnBroker: no such vhost, exchange or queue.
        """
        json = {"routing_key": routing_key, "arguments": dict(arguments or {})}
        answer = self._exchange("POST", ("bindings", vhost, "e", exchange, "q", queue), json=json)
        _require_written(self._confirmed(answer))

    # Users and permissions

    def users(self) -> list[User]:
        """Return all accounts."""
        answer = self._get("users", params={"columns": "name,tags"})
        return [User(row["name"], _tags(answer, row)) for row in _rows(answer, name=str)]

    def user(self, name: str) -> User:
        """Return one account.

        Raises:
            NotOnBroker: it does not exist.
        """
        answer = self._get("users", name)
        row = _object(answer, name=str)
        return User(row["name"], _tags(answer, row))

    def put_user(self, name: str, password: str | None, tags: Iterable[str] = ()) -> bool:
        """Create an account, or replace its password and tags. Return whether it is new.

        With ``password`` None, the account can't log in with a password. An existing account keeps its permissions and
        connections.
        """
        credentials = {"password_hash": ""} if password is None else {"password": password}
        return self._put("users", name, json={**credentials, "tags": ",".join(tags)})

    def delete_user(self, name: str) -> None:
        """Delete an account. The broker closes its connections.

        Raises:
            NotOnBroker: it does not exist.
        """
        self._delete("users", name)

    def permissions_of(self, user: str) -> dict[str, Permissions]:
        """Return an account's permissions by vhost.

        Raises:
            NotOnBroker: no such account.
        """
        rows = _rows(self._get("users", user, "permissions"), vhost=str, configure=str, write=str, read=str)
        return {row["vhost"]: Permissions(row["configure"], row["write"], row["read"]) for row in rows}

    def all_permissions(self) -> dict[str, dict[str, Permissions]]:
        """Return the permissions of all accounts that have any, by account and vhost."""
        found: dict[str, dict[str, Permissions]] = {}
        for row in _rows(self._get("permissions"), user=str, vhost=str, configure=str, write=str, read=str):
            of_user = found.setdefault(row["user"], {})
            of_user[row["vhost"]] = Permissions(row["configure"], row["write"], row["read"])
        return found

    def set_permissions(self, vhost: str, user: str, permissions: Permissions) -> None:
        """Set an account's permissions on a vhost.

        Raises:
            NotOnBroker: no such vhost or account.
        """
        self._put("permissions", vhost, user, json=permissions._asdict())

    def delete_permissions(self, vhost: str, user: str) -> None:
        """Delete an account's permissions on a vhost, so that it can't connect there.

        Raises:
            NotOnBroker: no such vhost, account or permissions.
        """
        self._delete("permissions", vhost, user)

    # Connections

    def connections_of(self, user: str) -> list[Connection]:
        """Return an account's live connections; none if it does not exist."""
        rows = _rows(self._get("connections", "username", user), name=str, vhost=str)
        return [
            Connection(row["name"], row["vhost"], _client_address(row), _time(row.get("connected_at"))) for row in rows
        ]

    def clients(self, vhost: str | None) -> list[Client]:
        """Return all connections to a vhost (None: to any vhost).

        Raises:
            NotOnBroker: no such vhost.
        """
        path = ("connections",) if vhost is None else ("vhosts", vhost, "connections")
        rows = _rows(self._get(*path, params={"columns": CLIENT_COLUMNS}))
        # A connection has no user while it is opened or closed.
        return [
            Client(
                row["user"],
                row["vhost"],
                _text(row.get("protocol")),
                _time(row.get("connected_at")),
                _text(row.get("name")),
                _text(row.get("user_provided_name")),
            )
            for row in rows
            if isinstance(row.get("user"), str) and isinstance(row.get("vhost"), str)
        ]

    def close_connection(self, name: str, reason: str) -> None:
        """Close one live connection.

        Raises:
            NotOnBroker: there is none of this name.
        """
        self._delete("connections", name, headers={"X-Reason": _one_line(reason)})

    def close_connections_of(self, user: str, reason: str) -> None:
        """Close an account's live connections. The broker shows ``reason`` to the clients as one line of ASCII."""
        self._delete("connections", "username", user, headers={"X-Reason": _one_line(reason)})

    # Requests

    def _get(self, *path: str, params: Mapping[str, str] | None = None) -> _Answer:
        return self._confirmed(self._exchange("GET", path, params=params))

    def _put(self, *path: str, json: Mapping[str, Any] | None = None) -> bool:
        answer = self._confirmed(self._exchange("PUT", path, json=json or {}))
        _require_written(answer)
        return answer.status == 201

    def _delete(self, *path: str, headers: Mapping[str, str] | None = None) -> None:
        answer = self._exchange("DELETE", path, headers=headers)
        try:
            _require_written(self._confirmed(answer))
        except NotOnBroker:
            if not answer.sent_twice:
                raise

    def _confirmed(self, answer: _Answer) -> _Answer:
        """Return a 2xx answer, or raise the error for its status.

        While RabbitMQ shuts down, it answers every request with its own 404. So a 404 counts only if ``whoami``, which
        always exists, still answers right after it at the same address.

        RabbitMQ 4 answers with an empty 500 instead of a 400 or 404 if the reason contains a character outside ASCII.
        Reasons contain the names in the request.
        """
        is_write = not answer.request.startswith("GET ")
        if answer.status == 500 and not answer.body and is_write and not unquote(answer.request).isascii():
            self._require_running(answer)
            raise Refused(
                f"{answer.request}: refused with 500 and without a reason, because its name is not ASCII; see the "
                "broker's log for the reason",
                status=500,
                reason="the broker gave no reason, because the name is not ASCII; see its log",
            )
        try:
            return _checked(answer)
        except NotOnBroker:
            self._require_running(answer)
            raise
        except BrokerUnavailable:
            self._http.move_past(answer.address)
            raise

    def _require_running(self, answer: _Answer) -> None:
        try:
            _checked(self._through(self._http.at(answer.address))._exchange("GET", ("whoami",)))
        except (NotOnBroker, BrokerUnavailable) as reason:
            self._http.move_past(answer.address)
            raise BrokerUnavailable(
                f"{answer.request}: the broker answers every request with 404 or not at all ({reason}), so it is "
                f"shutting down; retry later, and {_CHECK_URL}"
            ) from reason

    def _exchange(
        self,
        method: str,
        path: tuple[str, ...],
        *,
        params: Mapping[str, str] | None = None,
        json: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        ok_status: int | None = None,
    ) -> _Answer:
        """Send a request, report it to ``on_call``, and return the answer of any status.

        An answer with ``ok_status`` counts as ``ok``.
        """
        url_path = _path(method, path)
        headers = dict(headers or {})
        if self._request_id is not None and (request_id := self._request_id()):
            headers["X-Request-ID"] = request_id
        if self._on_call is None:
            return self._send(method, url_path, params, json, headers)
        outcome: Literal["ok", "refused", "failed", "away"] = "away"
        began = time.perf_counter()
        try:
            answer = self._send(method, url_path, params, json, headers)
            if answer.status < 300 or answer.status == ok_status:
                outcome = "ok"
            else:
                outcome = "refused" if 400 <= answer.status < 500 else "failed"
            return answer
        except Refused:
            outcome = "refused"
            raise
        except MalformedResponse:
            outcome = "failed"
            raise
        finally:
            self._on_call(Call(method, _path_template(path), outcome, time.perf_counter() - began))

    def _send(
        self,
        method: str,
        url_path: str,
        params: Mapping[str, str] | None,
        json: Mapping[str, Any] | None,
        headers: Mapping[str, str],
    ) -> _Answer:
        request = f"{method} {url_path}"
        query = f"?{urlencode(params)}" if params else ""
        target = f"{url_path}{query}"
        if len(target) > MAX_TARGET_BYTES:
            raise Refused(
                f"{request[:MAX_REASON_LENGTH]}: not sent, because the URL is too long; use a shorter name",
                status=0,
                reason="the name is too long",
            )
        body = None
        if json is not None:
            body = orjson.dumps(json)
            headers = {**headers, "Content-Type": "application/json"}
        try:
            answer = self._http.send(method, target, body, headers)
        except NoAnswer as error:
            if error.is_another_cluster:
                remedy = "write only addresses of nodes of the guarded cluster"
            elif error.timed_out:
                remedy = "the broker is busy, or a queue's process doesn't respond; retry later"
            elif error.never_reached:
                remedy = "check that RabbitMQ runs there with its management plugin"
            else:
                remedy = "retry later, and check that the URL has the management API's port"
            raise BrokerUnavailable(
                f"{request}: {error}; {remedy}", timed_out=error.timed_out, never_reached=error.never_reached
            ) from error
        except TooLarge as error:
            raise MalformedResponse(
                f"{request}: the answer has more than {self._max_bytes} bytes; request a smaller list"
            ) from error
        if answer.headers.get("content-encoding", "identity") not in ("", "identity"):
            raise MalformedResponse(f"{request}: the answer is compressed, and is not unpacked here; {_CHECK_URL}")
        return _Answer(request, *answer)


_CHECK_URL = "check that the URL leads to RabbitMQ's management API"

REWRITTEN = (
    "a proxy before the broker decodes %2F in addresses; set it up to pass the address on unchanged (nginx: proxy_pass "
    "without a path, merge_slashes off)"
)


def _read_url(url: str) -> Server:
    """Return the URL without credentials and trailing slash, and the user and the password."""
    parts = split_url(url, ("http", "https"), _URL_FORM)
    host = parts.hostname
    if not host or re.search(r"[\s%]", host):
        raise ValueError("it has no host; " + _URL_FORM)
    if parts.port == 0:
        raise ValueError("its port is not a number from 1 to 65535; " + _URL_FORM)
    if parts.query or parts.fragment or "@" in parts.path:
        raise ValueError("it has a '?', a '#' or an '@' after the host; in a password these are %3F, %23 and %40")
    if re.search(r"[^!-~]", parts.path):
        raise ValueError("its path has a character that is not allowed there; percent-encode it")
    address = parts.netloc.rpartition("@")[2]
    credentials = None
    if parts.username is not None:
        credentials = unquote(parts.username), unquote(parts.password or "")
        try:
            "".join(credentials).encode()
        except UnicodeEncodeError:
            raise ValueError("its user or password is not UTF-8; percent-encode them as UTF-8") from None
    base = f"{parts.scheme}://{address}{parts.path.rstrip('/')}"
    try:
        host.encode("idna")
    except UnicodeError:
        raise ValueError("its host name is invalid; " + _URL_FORM) from None
    return Server(base, parts.path.rstrip("/"), credentials)


_URL_FORM = "write http://user:password@host:15672, with the user and the password percent-encoded"


def _path(method: str, segments: tuple[str, ...]) -> str:
    path = "/api/" + "/".join(quote(segment, safe="", errors="replace") for segment in segments)
    for segment in segments:
        if segment in ("", ".", ".."):
            # The broker decodes a path before it resolves dots, so it reads /api/queues/a/%2E%2E as /api/queues.
            raise Refused(
                f"{method} {path}: not sent, because a URL of the management API can't contain the name '{segment}'; "
                "use AMQP or rabbitmqctl",
                status=0,
                reason=f"the name '{segment}' can't be part of a URL",
            )
    return path


def _path_template(path: tuple[str, ...]) -> str:
    template = _PATH_TEMPLATES.get(path[0], ())
    return "/api/" + "/".join(template[: len(path)] + path[len(template) :])


def _require_one_line(name: str) -> None:
    """Refuse line breaks: the broker strips them from a name, and invents a name if nothing is left."""
    if "\r" in name or "\n" in name:
        reason = "a name can't contain a line break"
        raise Refused(f"{name!a} was not declared: {reason}; choose another name", status=0, reason=reason)


def _checked(answer: _Answer) -> _Answer:
    """Return a 2xx answer, or raise the error for its status."""
    request, status = answer.request, answer.status
    if 200 <= status < 300:
        return answer
    if status < 400:
        to = re.sub(r"//[^/@]*@", "//", answer.headers.get("location", ""))[:MAX_REASON_LENGTH]
        raise MalformedResponse(
            f"{request}: answered with a redirect ({status}) to '{to}', which Guardian doesn't follow; {_CHECK_URL}"
        )
    error = _error_in(answer.body)
    reason = _reason(error) if error else f"HTTP {status}"
    if status >= 500:
        raise BrokerUnavailable(
            f"{request}: answered {status} ({reason}); retry later, and see the broker's log", status=status
        )
    if status == 404 or reason == "vhost_or_user_not_found":
        if error is None:
            # A 404 of a proxy or another server must not mean "the queue is gone".
            raise MalformedResponse(f"{request}: answered with a 404 that isn't RabbitMQ's; {_CHECK_URL}")
        raise NotOnBroker(f"{request}: not found ({reason}); check the name and the vhost, and that its node runs")
    if status in (401, 403):
        raise Refused(
            f"{request}: refused with {status} ({reason}); check the account's password, tags and permissions",
            status=status,
            reason=reason,
        )
    if status == 400 and "inequivalent arg" in reason:
        raise _inequivalent(request, status, reason)
    raise Refused(f"{request}: refused with {status} ({reason}); change the request", status=status, reason=reason)


def _inequivalent(request: str, status: int, reason: str) -> InequivalentArguments:
    return InequivalentArguments(
        f"{request}: it exists with other arguments ({reason}); delete it first, or declare it as it is",
        status=status,
        reason=reason,
    )


def _error_in(body: bytes) -> Row | None:
    """Return the broker's error object; None if the body has none."""
    try:
        error = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return error if isinstance(error, dict) and "error" in error else None


def _reason(error: Row) -> str:
    reason = error.get("reason") or error.get("error")
    text = reason if isinstance(reason, str) else orjson.dumps(reason).decode()
    return text.strip()[:MAX_REASON_LENGTH]


def _require_written(answer: _Answer) -> None:
    if answer.status not in (201, 204):
        raise MalformedResponse(f"{answer.request}: answered {answer.status} instead of 201 or 204; {_CHECK_URL}")


def _parsed(answer: _Answer) -> Any:
    try:
        return orjson.loads(answer.body)
    except orjson.JSONDecodeError as error:
        raise MalformedResponse(f"{answer.request}: the answer isn't JSON ({error}); {_CHECK_URL}") from error


def _object(answer: _Answer, **shape: type) -> Row:
    return _validated(answer, _parsed(answer), shape)


def _rows(answer: _Answer, of_vhost: str | None = None, /, **shape: type) -> list[Row]:
    rows = _parsed(answer)
    if not isinstance(rows, list):
        raise MalformedResponse(f"{answer.request}: the answer isn't a list; {_CHECK_URL}")
    found = [_validated(answer, row, shape) for row in rows]
    if of_vhost is not None:
        for row in found:
            _require_vhost(answer, row, of_vhost)
    return found


def _require_vhost(answer: _Answer, row: Row, vhost: str) -> None:
    """Check that a row is of the requested vhost, unless it lacks this column."""
    if (found := row.get("vhost", vhost)) != vhost:
        raise AnotherVhost(f"{answer.request}: the answer is about the vhost '{found}'; {REWRITTEN}")


def _validated(answer: _Answer, row: Any, shape: Mapping[str, type]) -> Row:
    if not isinstance(row, dict):
        raise MalformedResponse(f"{answer.request}: the answer has an entry that isn't an object; {_CHECK_URL}")
    for key, kind in shape.items():
        if not isinstance(row.get(key), kind):
            raise MalformedResponse(
                f"{answer.request}: the answer has no '{key}' of type {kind.__name__}; {_CHECK_URL}"
            )
    return row


def _nodes_that_run(states: Any) -> frozenset[str]:
    """Return the nodes on which a vhost runs, from its states. RabbitMQ 4.x writes an empty list for none."""
    if not isinstance(states, dict):
        return frozenset()
    return frozenset(node for node, state in states.items() if state == "running")


def _tags(answer: _Answer, row: Row) -> frozenset[str]:
    """Return an account's tags: a list, before RabbitMQ 3.9 a text with commas."""
    tags = row.get("tags")
    if isinstance(tags, str):
        tags = tags.split(",")
    if not isinstance(tags, list):
        raise MalformedResponse(f"{answer.request}: the answer has no 'tags'; {_CHECK_URL}")
    return frozenset(str(tag).strip() for tag in tags) - {""}


def _bindings(answer: _Answer, vhost: str) -> list[Binding]:
    rows = _rows(
        answer,
        vhost,
        source=str,
        vhost=str,
        destination=str,
        destination_type=str,
        routing_key=str,
        arguments=dict,
        properties_key=str,
    )
    return [Binding(**{key: row[key] for key in Binding._fields}) for row in rows]


def _policies(answer: _Answer, vhost: str) -> list[BrokerPolicy]:
    rows = _rows(answer, vhost, **{"pattern": str, "apply-to": str, "priority": int, "definition": dict})
    return [BrokerPolicy(row["pattern"], row["apply-to"], row["priority"], row["definition"]) for row in rows]


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _one_line(reason: str) -> str:
    return " ".join(reason.split())[:200].encode("ascii", "replace").decode()


def consumers_in(queue: Row) -> list[QueueConsumer]:
    """Return the consumers of a queue that the answer of ``Management.queue`` reports."""
    details = queue.get("consumer_details")
    return _consumers([one for one in details if isinstance(one, dict)] if isinstance(details, list) else [])


def _consumers(rows: Iterable[Row]) -> list[QueueConsumer]:
    """Return the consumers in these rows. A closing channel has no details."""
    found = []
    for row in rows:
        queue, channel = row.get("queue"), row.get("channel_details")
        if isinstance(queue, dict) and isinstance(channel, dict):
            found.append(
                QueueConsumer(
                    _text(queue.get("name")),
                    _text(channel.get("user")),
                    _text(channel.get("connection_name")),
                    _text(channel.get("name")),
                    _text(row.get("consumer_tag")),
                    _number(row.get("prefetch_count")) or 0,
                    bool(row.get("ack_required")),
                )
            )
    return found


def rates_in(queue: Row) -> QueueRates | None:
    """Return the rates of a queue in the answer of ``Management.queue``; None: the broker reports none."""
    stats = queue.get("message_stats")
    if not isinstance(stats, dict):
        return None

    def rate(name: str) -> float:
        details = stats.get(f"{name}_details")
        value = details.get("rate") if isinstance(details, dict) else None
        return float(value) if isinstance(value, int | float) else 0.0

    return QueueRates(rate("publish"), rate("deliver_get"), rate("ack"))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _time(milliseconds: Any) -> datetime | None:
    known = _number(milliseconds)
    return None if known is None else datetime.fromtimestamp(known / 1000, UTC)


def _client_address(row: Row) -> str:
    """Return ``peer_host`` or, if missing, the address in the name: "127.0.0.1:51530 -> 127.0.0.1:5672"."""
    host = row.get("peer_host")
    return host if isinstance(host, str) else str(row["name"]).partition(" -> ")[0].rpartition(":")[0]
