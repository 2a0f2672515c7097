"""The client of RabbitMQ's management API, and what can go wrong with it.

One :class:`Management` is shared by all threads of a process. Its methods answer with plain values, or raise a
:class:`BrokerError` whose text says what was asked, what happened and what to do next.
"""

import re
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Literal, NamedTuple
from urllib.parse import quote, unquote, urlencode, urlsplit

import orjson

from rabbit.arguments import parse_inequivalent
from rabbit.http import NoAnswer, PooledClient, TooLarge
from rabbit.permissions import Permissions
from rabbit.urls import split_url

Row = dict[str, Any]

MAX_RESPONSE_BYTES = 512 * 1024 * 1024
"""The largest body that is read. The full list of ten thousand queues has some 14 MB."""

BODY_READ_TIMEOUTS = 3
"""An answer that trickles in may take this many read timeouts in all."""

MAX_REASON_LENGTH = 300

MAX_TARGET_BYTES = 65_536
"""What is longer than a broker reads of a request's first line isn't sent: it would hang up in the middle."""

NODE_COLUMNS = (
    "name,running,mem_used,mem_limit,mem_alarm,disk_free,disk_free_limit,disk_free_alarm,"
    "fd_used,fd_total,uptime,partitions"
)
EXCHANGE_COLUMNS = "name,vhost,type,durable,auto_delete,internal"
CLIENT_COLUMNS = "user,vhost,protocol,connected_at"

_SHAPES = {
    "bindings": ("bindings", "{vhost}", "e", "{exchange}", "q", "{queue}"),
    "connections": ("connections", "username", "{user}"),
    "exchanges": ("exchanges", "{vhost}", "{name}"),
    "permissions": ("permissions", "{vhost}", "{user}"),
    "queues": ("queues", "{vhost}", "{name}"),
    "users": ("users", "{name}"),
    "vhosts": ("vhosts", "{name}"),
}
"""Where names stand in a path, by its first part. What comes after these is the API's own word again."""


class BrokerError(Exception):
    """The broker did not do what it was asked to."""

    def __init__(self, text: str) -> None:
        # A NUL in what the broker said would keep the text out of PostgreSQL.
        super().__init__(text.replace("\0", "\N{REPLACEMENT CHARACTER}"))


class BrokerUnavailable(BrokerError):
    """Nobody answered, or a 5xx did. Whether anything was done is unknown, so ask again later.

    ``timed_out``: the connection stood, and the answer did not come in time. ``never_reached``: no connection came
    about, so that nothing was done.
    """

    def __init__(self, text: str, *, timed_out: bool = False, never_reached: bool = False) -> None:
        super().__init__(text)
        self.timed_out = timed_out
        self.never_reached = never_reached


class Refused(BrokerError):
    """The broker won't: 401, 403 or another 4xx. Asking again changes nothing.

    ``status`` is the HTTP status, 0 where the request could not even be sent; ``reason`` is the broker's.
    """

    def __init__(self, text: str, *, status: int, reason: str) -> None:
        super().__init__(text)
        self.status = status
        self.reason = reason


class InequivalentArguments(Refused):
    """It exists with other arguments, or durable where this isn't.

    ``argument``, and its values ``found`` on the broker and ``wanted`` here; None: not set, or not told.
    """

    def __init__(self, text: str, *, status: int, reason: str) -> None:
        super().__init__(text, status=status, reason=reason)
        difference = parse_inequivalent(reason)
        self.argument: str | None = difference.argument if difference else None
        self.found: Any = difference.found if difference else None
        self.wanted: Any = difference.wanted if difference else None


class NotOnBroker(BrokerError):
    """The broker has no such thing. It says the same of a queue whose node is down."""


class MalformedResponse(BrokerError):
    """An answer that isn't one of the management API: no JSON, another shape, a redirect, too large."""


def was_not_executed(error: BrokerError) -> bool:
    """Return whether what was asked of the broker was certainly not done. Else the answer is missing, and it may be."""
    return isinstance(error, Refused | NotOnBroker) or (isinstance(error, BrokerUnavailable) and error.never_reached)


class Account(NamedTuple):
    """Whom the broker takes this client for."""

    name: str
    tags: frozenset[str]


class Vhost(NamedTuple):
    """A virtual host. ``running``: on every node; where it isn't, lists of its queues are short."""

    name: str
    running: bool


class Binding(NamedTuple):
    """What carries messages from the exchange ``source`` (empty: the default one) to a queue or an exchange."""

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
    """A live connection. RabbitMQ 3.10 does not tell when it was made: ``connected_at`` is None then."""

    name: str
    vhost: str
    client_address: str
    connected_at: datetime | None


class Client(NamedTuple):
    """What is connected, as a list of all connections tells it; that lags by five seconds.

    ``protocol`` is in the broker's words, such as "Web STOMP 1.2" or "AMQP 0-9-1".
    """

    user: str
    vhost: str
    protocol: str
    connected_at: datetime | None


class Node(NamedTuple):
    """A node of the cluster. Figures are bytes; None where a node doesn't tell: it is stopped, or just started.

    ``fd_used`` and ``fd_total`` are file descriptors, ``uptime`` is seconds, ``partitions`` the nodes it lost.
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
    """A request that was made. ``path`` has no names in it, such as ``/api/queues/{vhost}/{name}``, and no query.

    ``outcome``: ``ok``; ``refused``: a 4xx, as for what isn't there; ``failed``: a 5xx, or no answer of the management
    API; ``away``: no answer at all. ``seconds`` is how long it took, with a second attempt if there was one.
    """

    method: str
    path: str
    outcome: Literal["ok", "refused", "failed", "away"]
    seconds: float


class _Answer(NamedTuple):
    what: str  # method and path, for the texts of errors
    status: int
    headers: Mapping[str, str]
    body: bytes
    sent_twice: bool = False


class Management:
    """A client of the management API, for many threads.

    ``url`` is ``http://user:password@host:15672``, user and password percent-encoded, with the path of a reverse proxy
    if there is one. ``connect_timeout`` and ``read_timeout`` are seconds, the second for each read; a whole answer
    may take three times as long, and its body have ``max_bytes``. ``on_call`` is told of each request when it is over,
    in the thread that made it; ``request_id`` says what to send as ``X-Request-ID``, if it isn't empty.

    Every method raises BrokerUnavailable, Refused or MalformedResponse, and what its docstring adds. A request whose
    connection dies is retried once on a fresh one: all requests are idempotent, and RabbitMQ 4 drops idle connections
    without notice.

    Raises:
        ValueError: the URL isn't one.
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
        self._base, credentials = _read_url(url)
        self._most_bytes = max_bytes
        self._on_call = on_call
        self._request_id = request_id
        self._prefix = urlsplit(self._base).path
        self._http = PooledClient(
            self._base,
            credentials,
            connect_timeout=connect_timeout,
            read_timeout=read_timeout,
            answer_timeout=BODY_READ_TIMEOUTS * read_timeout,
            max_bytes=max_bytes,
        )

    def __repr__(self) -> str:
        return f"<Management {self._base}>"

    def close(self) -> None:
        """Close the pooled connections."""
        self._http.close()

    # The broker itself

    def overview(self) -> Row:
        """Return the broker's overview of itself: versions, totals, listeners."""
        return _object(self._get("overview"), rabbitmq_version=str)

    def whoami(self) -> Account:
        """Return the account that this client works as."""
        answer = self._get("whoami")
        row = _object(answer, name=str)
        return Account(row["name"], _tags(answer, row))

    def clock(self) -> datetime | None:
        """Return the time that the broker's machine has, to the second; None: it doesn't tell."""
        answer = self._exchange("GET", ("whoami",))  # even a refusal has a date
        try:
            return parsedate_to_datetime(answer.headers.get("date", ""))
        except (TypeError, ValueError):
            return None

    def nodes(self) -> list[Node]:
        """Return the nodes of the cluster, stopped ones too."""
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
        """Return the resource alarms in effect in the cluster, like "memory on rabbit@host"; empty: none."""
        answer = self._exchange("GET", ("health", "checks", "alarms"), is_fine=503)
        if answer.status != 503:
            _object(_checked(answer), status=str)
            return []
        # Here a 503 is an answer, if it is the broker's own.
        try:
            alarms = orjson.loads(answer.body)["alarms"]
            return [f"{alarm['resource']} on {alarm['node']}" for alarm in alarms]
        except (ValueError, KeyError, TypeError):
            _checked(answer)
            raise

    # Vhosts

    def vhosts(self) -> list[Vhost]:
        """Return all vhosts."""
        rows = _rows(self._get("vhosts", params={"columns": "name,cluster_state"}), name=str, cluster_state=dict)
        return [
            Vhost(row["name"], bool(states := row["cluster_state"]) and set(states.values()) == {"running"})
            for row in rows
        ]

    def create_vhost(self, name: str) -> bool:
        """Make a vhost, on which this client's account gets all permissions. Return whether it is new."""
        return self._put("vhosts", name)

    def delete_vhost(self, name: str) -> None:
        """Delete a vhost and all there is in it.

        Raises:
            NotOnBroker: there is none.
        """
        self._delete("vhosts", name)

    # Queues

    def list_queues(self, vhost: str | None, params: Mapping[str, str]) -> list[Row]:
        """Return the rows of the queues in a vhost (None: in all), as the broker lists them.

        ``params`` are the query's; where they have ``columns``, the rows have no others. Each row has the queue's
        ``name`` and ``vhost``, if these are among the columns.

        Raises:
            NotOnBroker: no such vhost.
        """
        path = ("queues",) if vhost is None else ("queues", vhost)
        columns = params.get("columns", "name,vhost").split(",")
        shape = {key: str for key in ("name", "vhost") if key in columns}
        return _rows(self._get(*path, params=params), **shape)

    def queue(self, vhost: str, name: str) -> Row:
        """Return one queue as the broker knows it. Its lengths lag by seconds: decide nothing by them.

        Raises:
            NotOnBroker: there is none, or its node is down.
        """
        return _object(self._get("queues", vhost, name), name=str, vhost=str)

    def declare_queue(
        self,
        vhost: str,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        durable: bool = True,
        auto_delete: bool = False,
    ) -> bool:
        """Make a queue, or see that it is there just so. Return whether it is new.

        Raises:
            InequivalentArguments: it is there with other arguments, durability or auto-deletion.
            NotOnBroker: no such vhost.
        """
        _require_one_line(name)
        declared = {"durable": durable, "auto_delete": auto_delete, "arguments": dict(arguments or {})}
        return self._put("queues", vhost, name, json=declared)

    def delete_queue(self, vhost: str, name: str, *, if_empty: bool = False, if_unused: bool = False) -> bool:
        """Delete a queue. With a condition the broker decides, without a race, and for classic queues only.

        Return whether the broker says that it did. If not, an answer was lost, and the queue isn't there any more, or
        its node is down.

        Raises:
            NotOnBroker: there is none, or its node is down.
            Refused: a condition doesn't hold, or a live connection has the queue to itself.
        """
        conditions = {"if-empty": if_empty, "if-unused": if_unused}
        return self._delete("queues", vhost, name, params={key: "true" for key, set_ in conditions.items() if set_})

    def purge_queue(self, vhost: str, name: str) -> None:
        """Remove the ready messages of a queue. Unacknowledged ones stay.

        Raises:
            NotOnBroker: there is none, or its node is down.
        """
        self._delete("queues", vhost, name, "contents")

    # Exchanges and bindings

    def exchanges(self, vhost: str) -> list[Exchange]:
        """Return the exchanges of a vhost, the broker's own too.

        Raises:
            NotOnBroker: no such vhost.
        """
        rows = _rows(
            self._get("exchanges", vhost, params={"columns": EXCHANGE_COLUMNS}),
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
        type: str = "topic",  # noqa: A002 - what everybody calls it
        *,
        durable: bool = True,
        auto_delete: bool = False,
        internal: bool = False,
        arguments: Mapping[str, Any] | None = None,
    ) -> bool:
        """Make an exchange. Return whether it is new. One that differs in type alone is noticed by the broker.

        Raises:
            InequivalentArguments: it is there with another type.
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

    def delete_exchange(self, vhost: str, name: str) -> None:
        """Delete an exchange.

        Raises:
            NotOnBroker: there is none.
        """
        self._delete("exchanges", vhost, name)

    def bindings(self, vhost: str) -> list[Binding]:
        """Return the bindings of a vhost, those to the default exchange too.

        Raises:
            NotOnBroker: no such vhost.
        """
        return _bindings(self._get("bindings", vhost))

    def queue_bindings(self, vhost: str, name: str) -> list[Binding]:
        """Return what feeds a queue. One that isn't there is shown as bound to the default exchange all the same."""
        return _bindings(self._get("queues", vhost, name, "bindings"))

    def exchange_bindings(self, vhost: str, name: str) -> list[Binding]:
        """Return where an exchange's messages go. One that isn't there has no bindings."""
        return _bindings(self._get("exchanges", vhost, name or "amq.default", "bindings", "source"))

    def bind_queue(
        self, vhost: str, exchange: str, queue: str, routing_key: str, arguments: Mapping[str, Any] | None = None
    ) -> None:
        """Bind a queue to an exchange. Binding it the same way again changes nothing.

        Raises:
            NotOnBroker: no such vhost, exchange or queue.
        """
        json = {"routing_key": routing_key, "arguments": dict(arguments or {})}
        answer = self._exchange("POST", ("bindings", vhost, "e", exchange, "q", queue), json=json)
        _require_written(self._believed(answer))

    # Users and permissions

    def users(self) -> list[User]:
        """Return all accounts."""
        answer = self._get("users", params={"columns": "name,tags"})
        return [User(row["name"], _tags(answer, row)) for row in _rows(answer, name=str)]

    def user(self, name: str) -> User:
        """Return one account.

        Raises:
            NotOnBroker: there is none.
        """
        answer = self._get("users", name)
        row = _object(answer, name=str)
        return User(row["name"], _tags(answer, row))

    def put_user(self, name: str, password: str | None, tags: Iterable[str] = ()) -> bool:
        """Make an account, or replace the password and the tags of one. Return whether it is new.

        ``password`` None: it can't log in with one. An account that is there keeps its permissions and connections.
        """
        credentials = {"password_hash": ""} if password is None else {"password": password}
        return self._put("users", name, json={**credentials, "tags": ",".join(tags)})

    def delete_user(self, name: str) -> None:
        """Delete an account. The broker closes its connections.

        Raises:
            NotOnBroker: there is none.
        """
        self._delete("users", name)

    def permissions_of(self, user: str) -> dict[str, Permissions]:
        """Return an account's permissions, by vhost.

        Raises:
            NotOnBroker: no such account.
        """
        rows = _rows(self._get("users", user, "permissions"), vhost=str, configure=str, write=str, read=str)
        return {row["vhost"]: Permissions(row["configure"], row["write"], row["read"]) for row in rows}

    def all_permissions(self) -> dict[str, dict[str, Permissions]]:
        """Return the permissions of all accounts that have any: by account, and of each by vhost."""
        found: dict[str, dict[str, Permissions]] = {}
        for row in _rows(self._get("permissions"), user=str, vhost=str, configure=str, write=str, read=str):
            of_user = found.setdefault(row["user"], {})
            of_user[row["vhost"]] = Permissions(row["configure"], row["write"], row["read"])
        return found

    def set_permissions(self, vhost: str, user: str, permissions: Permissions) -> None:
        """Give an account these permissions on a vhost, in place of those that it has there.

        Raises:
            NotOnBroker: no such vhost or account.
        """
        self._put("permissions", vhost, user, json=permissions._asdict())

    def delete_permissions(self, vhost: str, user: str) -> None:
        """Take an account's permissions on a vhost away, so that it can't enter.

        Raises:
            NotOnBroker: no such vhost or account, or it has none there.
        """
        self._delete("permissions", vhost, user)

    # Connections

    def connections_of(self, user: str) -> list[Connection]:
        """Return an account's live connections. An account that isn't there has none."""
        rows = _rows(self._get("connections", "username", user), name=str, vhost=str)
        return [
            Connection(row["name"], row["vhost"], _client_address(row), _moment(row.get("connected_at")))
            for row in rows
        ]

    def clients(self, vhost: str | None) -> list[Client]:
        """Return what is connected to a vhost (None: to any), whoever it is.

        Raises:
            NotOnBroker: no such vhost.
        """
        path = ("connections",) if vhost is None else ("vhosts", vhost, "connections")
        rows = _rows(self._get(*path, params={"columns": CLIENT_COLUMNS}))
        # One that is just being opened or closed has no user there.
        return [
            Client(row["user"], row["vhost"], _text(row.get("protocol")), _moment(row.get("connected_at")))
            for row in rows
            if isinstance(row.get("user"), str) and isinstance(row.get("vhost"), str)
        ]

    def close_connections_of(self, user: str, reason: str) -> None:
        """Close an account's live connections. ``reason`` is one line that the client is shown, best in ASCII."""
        one_line = " ".join(reason.split())[:200].encode("ascii", "replace").decode()
        self._delete("connections", "username", user, headers={"X-Reason": one_line})

    # How it is asked

    def _get(self, *path: str, params: Mapping[str, str] | None = None) -> _Answer:
        return self._believed(self._exchange("GET", path, params=params))

    def _put(self, *path: str, json: Mapping[str, Any] | None = None) -> bool:
        answer = self._believed(self._exchange("PUT", path, json=json or {}))
        _require_written(answer)
        return answer.status == 201

    def _delete(
        self, *path: str, params: Mapping[str, str] | None = None, headers: Mapping[str, str] | None = None
    ) -> bool:
        """Return whether the broker says that it did it; else the first request may have, whose answer was lost."""
        answer = self._exchange("DELETE", path, params=params, headers=headers)
        try:
            _require_written(self._believed(answer))
        except NotOnBroker:
            if not answer.sent_twice:
                raise
            return False
        return True

    def _believed(self, answer: _Answer) -> _Answer:
        """Return the answer if it is a 2xx, and raise what its status means if not.

        While RabbitMQ shuts down, it answers everything with its own 404. So a 404 is believed only if something that
        is always there is there right after it.
        """
        try:
            return _checked(answer)
        except NotOnBroker as error:
            try:
                _checked(self._exchange("GET", ("whoami",)))
            except (NotOnBroker, BrokerUnavailable) as reason:
                raise BrokerUnavailable(
                    f"{answer.what}: answered with a 404, as everything is, or not at all ({reason}): the broker is "
                    "shutting down; ask again later, and see that the URL leads to its management API"
                ) from error
            raise

    def _exchange(
        self,
        method: str,
        path: tuple[str, ...],
        *,
        params: Mapping[str, str] | None = None,
        json: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        is_fine: int | None = None,
    ) -> _Answer:
        """Send a request, tell who listens of it, and return the answer, whatever its status.

        ``is_fine``: a status of which it isn't told as a failure.
        """
        where = _path(method, path)
        headers = dict(headers or {})
        if self._request_id is not None and (request_id := self._request_id()):
            headers["X-Request-ID"] = request_id
        if self._on_call is None:
            return self._send(method, where, params, json, headers)
        outcome: Literal["ok", "refused", "failed", "away"] = "away"
        began = time.perf_counter()
        try:
            answer = self._send(method, where, params, json, headers)
            if answer.status < 300 or answer.status == is_fine:
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
            self._on_call(Call(method, _shape(path), outcome, time.perf_counter() - began))

    def _send(
        self,
        method: str,
        where: str,
        params: Mapping[str, str] | None,
        json: Mapping[str, Any] | None,
        headers: Mapping[str, str],
    ) -> _Answer:
        what = f"{method} {where}"
        query = f"?{urlencode(params)}" if params else ""
        target = f"{self._prefix}{where}{query}"
        if len(target) > MAX_TARGET_BYTES:
            raise Refused(
                f"{what[:MAX_REASON_LENGTH]}: not sent, since its URL would be too long; use a shorter name",
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
            if error.timed_out:
                remedy = "the broker is busy, or a queue's process doesn't respond: ask again later"
            elif error.never_reached:
                remedy = "see that RabbitMQ runs there with its management plugin"
            else:
                remedy = "ask again later, and see that the URL has the management API's port"
            raise BrokerUnavailable(
                f"{what}: {error}; {remedy}", timed_out=error.timed_out, never_reached=error.never_reached
            ) from error
        except TooLarge as error:
            raise MalformedResponse(
                f"{what}: the answer has more than {self._most_bytes} bytes; ask for less at once"
            ) from error
        if answer.headers.get("content-encoding", "identity") not in ("", "identity"):
            raise MalformedResponse(f"{what}: the answer is packed, and is not unpacked here; {_IS_IT_IT}")
        return _Answer(what, *answer)


_IS_IT_IT = "see that the URL leads to RabbitMQ's management API"


def _read_url(url: str) -> tuple[str, tuple[str, str] | None]:
    """Return the address without credentials and without a slash at its end, and the user and the password."""
    parts = split_url(url, ("http", "https"), _URL_FORM)
    host = parts.hostname
    if not host or re.search(r"[\s%]", host):
        raise ValueError("it names no host; " + _URL_FORM)
    if parts.port == 0:
        raise ValueError("its port is no number from 1 to 65535; " + _URL_FORM)
    if parts.query or parts.fragment or "@" in parts.path:
        raise ValueError("it has a '?', a '#' or an '@' after the host; in a password these are %3F, %23 and %40")
    if re.search(r"[^!-~]", parts.path):
        raise ValueError("its path has a character that can't stand in a path; percent-encode it")
    address = parts.netloc.rpartition("@")[2]
    credentials = None
    if parts.username is not None:
        credentials = unquote(parts.username), unquote(parts.password or "")
        try:
            "".join(credentials).encode()
        except UnicodeEncodeError:
            raise ValueError("its user or password is not written in UTF-8; percent-encode them") from None
    base = f"{parts.scheme}://{address}{parts.path.rstrip('/')}"
    try:
        host.encode("idna")
    except UnicodeError:
        raise ValueError("its host can't be one; " + _URL_FORM) from None
    return base, credentials


_URL_FORM = "write http://user:password@host:15672, with the user and the password percent-encoded"


def _path(method: str, segments: tuple[str, ...]) -> str:
    path = "/api/" + "/".join(quote(segment, safe="", errors="replace") for segment in segments)
    for segment in segments:
        if segment in ("", ".", ".."):
            # The broker decodes first and folds dots then: to it, /api/queues/a/%2E%2E is /api/queues.
            raise Refused(
                f"{method} {path}: not sent, since the management API can't be asked about the name '{segment}'; "
                "use AMQP or rabbitmqctl",
                status=0,
                reason=f"the name '{segment}' can't stand in a path",
            )
    return path


def _shape(path: tuple[str, ...]) -> str:
    named = _SHAPES.get(path[0], ())
    return "/api/" + "/".join(named[: len(path)] + path[len(named) :])


def _require_one_line(name: str) -> None:
    """The broker makes something of another name: it strips line breaks, and where nothing is left, invents one."""
    if "\r" in name or "\n" in name:
        reason = "a name can't have a line break in it"
        raise Refused(f"{name!a} was not made: {reason}; choose another name", status=0, reason=reason)


def _checked(answer: _Answer) -> _Answer:
    """Return the answer if it is a 2xx, and raise what its status means if not."""
    what, status = answer.what, answer.status
    if 200 <= status < 300:
        return answer
    if status < 400:
        to = re.sub(r"//[^/@]*@", "//", answer.headers.get("location", ""))[:MAX_REASON_LENGTH]
        raise MalformedResponse(
            f"{what}: answered with a redirect ({status}) to '{to}', which isn't followed; {_IS_IT_IT}"
        )
    error = _error_in(answer.body)
    reason = _reason(error) if error else f"HTTP {status}"
    if status >= 500:
        raise BrokerUnavailable(f"{what}: answered {status} ({reason}); ask again later, and see the broker's log")
    if status == 404 or reason == "vhost_or_user_not_found":
        if error is None:
            # Somebody else's 404 must not pass for "it's gone".
            raise MalformedResponse(f"{what}: answered with a 404 that isn't RabbitMQ's; {_IS_IT_IT}")
        raise NotOnBroker(f"{what}: not there ({reason}); see that names and vhost are right, and that its node runs")
    if status in (401, 403):
        raise Refused(
            f"{what}: refused with {status} ({reason}); see the account's password, tags and permissions",
            status=status,
            reason=reason,
        )
    if status == 400 and "inequivalent arg" in reason:
        raise InequivalentArguments(
            f"{what}: it is there, and not the same ({reason}); delete it first, or ask for it as it is",
            status=status,
            reason=reason,
        )
    raise Refused(f"{what}: refused with {status} ({reason}); change what is asked for", status=status, reason=reason)


def _error_in(body: bytes) -> Row | None:
    """Return the broker's own words about an error; None where the body isn't of its making."""
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
        raise MalformedResponse(f"{answer.what}: answered {answer.status} where 201 or 204 is due; {_IS_IT_IT}")


def _parsed(answer: _Answer) -> Any:
    try:
        return orjson.loads(answer.body)
    except orjson.JSONDecodeError as error:
        raise MalformedResponse(f"{answer.what}: the answer isn't JSON ({error}); {_IS_IT_IT}") from error


def _object(answer: _Answer, **shape: type) -> Row:
    return _of_shape(answer, _parsed(answer), shape)


def _rows(answer: _Answer, **shape: type) -> list[Row]:
    rows = _parsed(answer)
    if not isinstance(rows, list):
        raise MalformedResponse(f"{answer.what}: the answer isn't a list; {_IS_IT_IT}")
    return [_of_shape(answer, row, shape) for row in rows]


def _of_shape(answer: _Answer, row: Any, shape: Mapping[str, type]) -> Row:
    if not isinstance(row, dict):
        raise MalformedResponse(f"{answer.what}: the answer has something else where an object is due; {_IS_IT_IT}")
    for key, kind in shape.items():
        if not isinstance(row.get(key), kind):
            raise MalformedResponse(f"{answer.what}: the answer has no '{key}' of type {kind.__name__}; {_IS_IT_IT}")
    return row


def _tags(answer: _Answer, row: Row) -> frozenset[str]:
    """The tags of an account: a list, and before RabbitMQ 3.9 a text with commas."""
    tags = row.get("tags")
    if isinstance(tags, str):
        tags = tags.split(",")
    if not isinstance(tags, list):
        raise MalformedResponse(f"{answer.what}: the answer has no 'tags'; {_IS_IT_IT}")
    return frozenset(str(tag).strip() for tag in tags) - {""}


def _bindings(answer: _Answer) -> list[Binding]:
    rows = _rows(
        answer,
        source=str,
        vhost=str,
        destination=str,
        destination_type=str,
        routing_key=str,
        arguments=dict,
        properties_key=str,
    )
    return [Binding(**{key: row[key] for key in Binding._fields}) for row in rows]


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _moment(milliseconds: Any) -> datetime | None:
    known = _number(milliseconds)
    return None if known is None else datetime.fromtimestamp(known / 1000, UTC)


def _client_address(row: Row) -> str:
    """The client's address. It stands in the name, "127.0.0.1:51530 -> 127.0.0.1:5672", where not told by itself."""
    told = row.get("peer_host")
    return told if isinstance(told, str) else str(row["name"]).partition(" -> ")[0].rpartition(":")[0]
