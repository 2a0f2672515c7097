"""A list of the broker's queues at one moment, and how far to trust it."""

import re
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import closing
from functools import cache
from typing import Any, NamedTuple

from rabbit.entities import Node
from rabbit.errors import AnotherVhost, BrokerError, BrokerUnavailable, NotOnBroker, Refused
from rabbit.management import Management
from rabbit.names import FEDERATION_QUEUE, PROBE_QUEUE, QueueName, is_amqp_name, is_watch_queue
from rabbit.threads import ContextThreadPool

MAX_SEPARATE_LISTS = 20
"""Up to this number of vhosts, each gets a request of its own. For more, one request lists all vhosts of the broker.

A request costs the broker 2 ms, but a queue costs more than twice as much in a list of all vhosts. Five vhosts of
10,000 queues took 8.0 s in one request and 3.3 s in five; twenty vhosts of 25 queues took 29 ms and 28 ms.
"""

MAX_CONCURRENT_LISTS = 2
"""On two cores, five vhosts of 10,000 queues took 4.9 s one at a time, and 3.3 to 3.8 s with two to five at a time."""

CLASSIC = "classic"
"""The queue type whose listed length is exact."""

STREAM = "stream"

MQTT_QOS_0 = "MQTT QoS 0"
"""The queue type of an MQTT subscription with QoS 0 since RabbitMQ 3.12. It is its client's connection, and stores
nothing. Only that client can delete it."""

_MODULES = {
    "rabbit_classic_queue": CLASSIC,
    "rabbit_quorum_queue": "quorum",
    "rabbit_stream_queue": STREAM,
    "rabbit_mqtt_qos0_queue": MQTT_QOS_0,
}
"""The names of types in lists while a vhost or a node is stopped, and of the last one in all lists but the cheapest."""

TYPES_WITHOUT_LENGTH = (STREAM, MQTT_QOS_0)
"""Queue types without a length: readers remove nothing from a stream."""

UNKNOWN_TYPE = "unknown"

TOTALS = {"disable_stats": "true", "enable_queue_totals": "true"}
"""Parameters of the cheapest complete list with lengths.

The broker asks each classic queue, so their lengths are exact. Lengths of other types are as of the queue's last tick:
wrong for up to 5 s after a publish, purge, get or ack, and 0 right after a change of leader.
"""

MAX_TEXT_LENGTH = 255
"""Characters of a queue's type and of a node's name."""

MAX_LOOKUPS = 100
"""Names with U+FFFD that one list may look up. Further ones count as unaddressable."""

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

IDENTITY = "name,vhost,type,durable,auto_delete,exclusive,state,node"
COLUMNS = IDENTITY + ",arguments,messages_ready,messages_unacknowledged"

INTERNAL_PURPOSE = "x-internal-purpose"
"""The argument of a queue that federation declares for itself."""

NAMES_ONLY = {"disable_stats": "true", "columns": "name,vhost,type,exclusive"}
"""Parameters of a complete list for which the broker asks no queue's process."""


class ListedName(NamedTuple):
    """A queue that exists, down or not. ``exclusive``: it belongs to one live connection."""

    vhost: str
    name: str
    type: str
    exclusive: bool


def length_of(ready: int | None, unacknowledged: int | None) -> int | None:
    """Return ready plus unacknowledged messages, or None if either is unknown: unknown is not 0."""
    return None if ready is None or unacknowledged is None else ready + unacknowledged


class ListedQueue(NamedTuple):
    """A queue as listed. ``ready`` and ``unacknowledged`` are messages, or None if the broker doesn't report them."""

    vhost: str
    name: str
    type: str
    durable: bool
    auto_delete: bool
    exclusive: bool
    node: str
    ready: int | None
    unacknowledged: int | None

    @property
    def length(self) -> int | None:
        return length_of(self.ready, self.unacknowledged)


class Snapshot(NamedTuple):
    """A list of queues, and how far to trust it.

    - ``unlisted``: the reason for each vhost that could not be listed. Its queues are missing here, but not gone.
    - ``nodes``, ``down``: the cluster's running nodes and its other nodes.
    - ``nodes_unchanged``: the nodes were the same before and after the list.
    - ``exact``: lengths of classic queues are exact (see ``TOTALS``). If a queue's process does not answer, all lengths
      are the broker's statistics, which lag by seconds.
    - ``unaddressable``: queues whose listed name no client can use (see ``_drop_unaddressable``).
    - ``missing_vhosts``: requested vhosts that do not exist.
    - ``seconds``: the time from the first request to the last list.
    - ``lagging``: the lengths are from the nodes' Prometheus endpoints, so no deletion may rely on them.
    - ``internal``: queues that federation declared. Empty if ``lagging``.
    - ``alarms``: the raised resource alarms, as resource and node: ("memory", "rabbit@a").
    - ``cluster``: the cluster's id. Empty if it has none, or ``lagging``.
    """

    queues: list[ListedQueue]
    unlisted: dict[str, str]
    nodes: frozenset[str]
    down: frozenset[str]
    nodes_unchanged: bool
    exact: bool
    unaddressable: list[QueueName]
    missing_vhosts: list[str]
    seconds: float
    lagging: bool = False
    internal: frozenset[QueueName] = frozenset()
    alarms: frozenset[tuple[str, str]] = frozenset()
    cluster: str = ""


def take(
    management: Management, vhosts: Sequence[str] | None, between_requests: Callable[[], None] = lambda: None
) -> Snapshot:
    """List the queues of these vhosts, or of all. Call ``between_requests`` between two requests.

    The snapshot names each vhost that could not be listed. Only if none could, raise the error. A vhost that does not
    exist counts as listed and empty.
    """
    listed_nodes = management.nodes()
    nodes, down = members_of(listed_nodes)
    between_requests()
    began = time.monotonic()
    unlisted: dict[str, str] = {}
    exact = True
    try:
        exactly = iter_lists(management, vhosts, {**TOTALS, "columns": COLUMNS}, unlisted, between_requests)
        rows = _read(exactly)
    except BrokerUnavailable as hanging:
        # The exact list hangs if one queue's process doesn't respond. The list of statistics still works then.
        if not hanging.timed_out:
            raise
        unlisted.clear()
        rows = _read(iter_lists(management, vhosts, {"columns": COLUMNS}, unlisted, between_requests))
        exact = False
    if not rows.queues:
        require_administrator(management)
    empty = set(vhosts or ()) - {queue.vhost for queue in rows.queues} - unlisted.keys()
    no_such = sorted(empty - {vhost.name for vhost in management.vhosts()}) if empty else []
    between_requests()
    queues, unaddressable = _drop_unaddressable(management, rows.queues, down)
    nodes_unchanged = members(management) == (nodes, down)
    return Snapshot(
        queues=queues,
        unlisted=unlisted,
        nodes=nodes,
        down=down,
        nodes_unchanged=nodes_unchanged,
        exact=exact,
        unaddressable=unaddressable,
        missing_vhosts=no_such,
        seconds=rows.received_at - began,
        internal=frozenset(rows.internal),
        alarms=alarms_of(listed_nodes),
        cluster=management.cluster_id(),
    )


def list_names(
    management: Management, vhosts: Sequence[str], between_requests: Callable[[], None] = lambda: None
) -> tuple[list[ListedName], dict[str, str]]:
    """Return all queues of these vhosts, those that are down too, and the reason for each vhost that can't be listed.

    Call ``between_requests`` between two requests. The broker does not ask the queues' processes.
    """
    unlisted: dict[str, str] = {}
    listed: list[ListedName] = []
    with closing(iter_lists(management, vhosts, NAMES_ONLY, unlisted, between_requests)) as given:
        for rows in given:
            listed += [ListedName(row["vhost"], row["name"], type_of(row), _is_exclusive(row)) for row in rows]
    return listed, unlisted


def find(management: Management, vhost: str, name: str) -> ListedQueue | None:
    """Return one queue from the cheapest list, filtered by its name, or None if it is not listed. See ``TOTALS``.

    The broker ignores the filter without ``page``. Its regular expressions ignore case, so others may match, too.
    """
    pattern = re.escape(name).replace("\0", r"\x00")
    filters = {"name": f"^{pattern}$", "use_regex": "true"}
    rows = management.find_queues(_vhosts_to_request([vhost])[0], {**TOTALS, "columns": COLUMNS, **filters})
    return next((parse_row(row) for row in rows if (row["vhost"], row["name"]) == (vhost, name)), None)


def members(management: Management) -> tuple[frozenset[str], frozenset[str]]:
    return members_of(management.nodes())


def members_of(nodes: Sequence[Node]) -> tuple[frozenset[str], frozenset[str]]:
    return (
        frozenset(node.name for node in nodes if node.running),
        frozenset(node.name for node in nodes if not node.running),
    )


def alarms_of(nodes: Sequence[Node]) -> frozenset[tuple[str, str]]:
    """Return the raised alarms of these nodes, as in :class:`Snapshot`."""
    raised = [("memory", node.name) for node in nodes if node.mem_alarm]
    return frozenset([*raised, *(("disk", node.name) for node in nodes if node.disk_alarm)])


def require_administrator(management: Management) -> None:
    """Raise Refused unless the user has the administrator tag. Without it the broker leaves queues out of its lists."""
    user = management.whoami()
    if "administrator" not in user.tags:
        raise Refused(
            f"the user '{user.name}' doesn't have the administrator tag, and sees only a part of the queues; "
            f"run: rabbitmqctl set_user_tags {user.name} administrator",
            status=200,
            reason="no administrator tag",
        )


def stopped_vhosts(management: Management, running: frozenset[str]) -> set[str]:
    """Return the vhosts that don't run on every one of the running nodes. Lists may lack their queues.

    No vhost runs on a node that has just started. A list with lengths is empty then, or lacks the node's queues.
    """
    return {vhost.name for vhost in management.vhosts() if not running <= vhost.nodes}


def iter_lists(
    management: Management,
    vhosts: Sequence[str] | None,
    params: Mapping[str, str],
    unlisted: dict[str, str],
    between_requests: Callable[[], None] = lambda: None,
) -> Generator[list[dict[str, Any]], None, None]:
    """Yield lists of rows of the queues in these vhosts, or in all vhosts, with the query's ``params``.

    The list of a vhost that does not exist, or could not be listed, is empty. The reason for the latter is added to
    ``unlisted``. If none can be listed, or an answer timed out, raise the error. Requests overlap: the broker prepares
    the next lists while the caller reads one. Call ``between_requests`` before each list. Queues of watches are left
    out.
    """
    failures: list[BrokerError] = []
    requests = _vhosts_to_request(vhosts)
    wanted = set(vhosts) if vhosts is not None and None in requests else None
    existing = cache(lambda: {vhost.name for vhost in management.vhosts()})
    threads = ContextThreadPool(MAX_CONCURRENT_LISTS)
    try:
        pending = deque((vhost, threads.submit(management.list_queues, vhost, params)) for vhost in requests)
        while pending:
            vhost, listed = pending.popleft()
            between_requests()
            try:
                found = listed.result()
            except BrokerError as error:
                if vhost is None or isinstance(error, AnotherVhost):
                    raise
                if isinstance(error, BrokerUnavailable) and error.timed_out:
                    raise
                if not isinstance(error, NotOnBroker):
                    unlisted[vhost] = str(error)
                    failures.append(error)
                elif vhost in existing():
                    unlisted[vhost] = "the broker answers 404, but lists the vhost"
                found = []
            yield [
                row for row in found if (wanted is None or row["vhost"] in wanted) and not is_watch_queue(row["name"])
            ]
    finally:
        threads.shutdown(wait=False, cancel_futures=True)  # a request that hangs has been waited for already
    if failures and len(failures) == len(requests):
        raise failures[0]


def _vhosts_to_request(vhosts: Sequence[str] | None) -> Sequence[str | None]:
    """Return the vhost of each request. None stands for a request of all vhosts."""
    # A vhost may have these names, but a URL's path may not contain them.
    if vhosts is None or len(vhosts) > MAX_SEPARATE_LISTS or not {"", ".", ".."}.isdisjoint(vhosts):
        return [None]
    return list(dict.fromkeys(vhosts))


class _Rows(NamedTuple):
    """The rows of all lists. ``received_at`` is the monotonic time of the last list."""

    queues: list[ListedQueue]
    internal: list[QueueName]
    received_at: float


def _read(listing: Generator[list[dict[str, Any]], None, None]) -> _Rows:
    queues, internal = [], []
    received_at = time.monotonic()
    with closing(listing) as given:  # after an error, send no further requests
        for rows in given:
            received_at = time.monotonic()
            for row in rows:
                if row["name"].startswith(PROBE_QUEUE) and _is_exclusive(row):
                    continue
                queues.append(parse_row(row))
                if _is_internal(row):
                    internal.append((row["vhost"], row["name"]))
    return _Rows(queues, internal, received_at)


def _drop_unaddressable(
    management: Management, listed: list[ListedQueue], down: Collection[str]
) -> tuple[list[ListedQueue], list[QueueName]]:
    """Return the queues without the unaddressable ones, and the names of these.

    RabbitMQ 3.10 accepts UTF-8 with surrogates in a name, and lists each byte of them as U+FFFD. Such a queue is not
    found by its listed name, unless another queue has just this name; then the list has the name twice. While a node
    is down, its queues are not found either, so none is looked up.
    """
    invalid = {(queue.vhost, queue.name) for queue in listed if not _is_addressable(queue)}
    replaced = Counter((queue.vhost, queue.name) for queue in listed if REPLACEMENT in queue.vhost + queue.name)
    once = sorted(key for key, times in replaced.items() if times == 1 and key not in invalid)
    found = once if down else [key for key in once[:MAX_LOOKUPS] if _is_found(management, key)]
    unaddressable = invalid | replaced.keys() - set(found)
    if not unaddressable:
        return listed, []
    return [queue for queue in listed if (queue.vhost, queue.name) not in unaddressable], sorted(unaddressable)


def _is_addressable(queue: ListedQueue) -> bool:
    return is_amqp_name(queue.name) and is_amqp_name(queue.vhost)


def _is_found(management: Management, key: QueueName) -> bool:
    try:
        management.queue(*key)
    except NotOnBroker:
        return False
    except Refused:  # a vhost like ".." is invalid in a URL
        return True
    return True


def _is_internal(row: dict[str, Any]) -> bool:
    """Return whether federation declared this queue, or may have: the row lacks its arguments.

    The name counts, too: a client may set the argument, but no Pulse user may declare such a name.
    """
    arguments = row.get("arguments")
    if arguments is None:
        return True
    purpose = arguments.get(INTERNAL_PURPOSE) if isinstance(arguments, dict) else None
    return purpose == "federation" and row["name"].startswith(FEDERATION_QUEUE)


def _messages(value: Any) -> int | None:
    """Return a number of messages, or None if the value is no number or too large for the database."""
    return value if type(value) is int and 0 <= value < 2**63 else None


def parse_row(row: dict[str, Any]) -> ListedQueue:
    """Return the queue in a row of the management API. All columns but its name and vhost may be missing."""
    has_length = type_of(row) not in TYPES_WITHOUT_LENGTH
    return ListedQueue(
        vhost=row["vhost"],
        name=row["name"],
        type=type_of(row),
        durable=bool(row.get("durable")),
        auto_delete=bool(row.get("auto_delete")),
        exclusive=_is_exclusive(row),
        node=_text(row.get("node")),
        ready=_messages(row.get("messages_ready")) if has_length else None,
        unacknowledged=_messages(row.get("messages_unacknowledged")) if has_length else None,
    )


def with_type(queue: ListedQueue, type_: str) -> ListedQueue:
    """Return a queue whose row lacks the type with this one, and with what follows from it."""
    if type_ in TYPES_WITHOUT_LENGTH:
        queue = queue._replace(ready=None, unacknowledged=None)
    return queue._replace(type=type_, exclusive=queue.exclusive or type_ == MQTT_QOS_0)


def type_of(row: dict[str, Any]) -> str:
    """Return the queue type in a row of the management API, or ``UNKNOWN_TYPE``."""
    type_ = _text(row.get("type")) or UNKNOWN_TYPE
    return _MODULES.get(type_, type_)


def _is_exclusive(row: dict[str, Any]) -> bool:
    # The cheapest list has no value for other types than classic.
    return bool(row.get("exclusive")) or type_of(row) == MQTT_QOS_0


def _text(value: Any) -> str:
    """Return the value if it is a text that the database can store, or an empty text."""
    return value if isinstance(value, str) and len(value) <= MAX_TEXT_LENGTH and "\0" not in value else ""
