"""Lengths of all queues from the nodes' Prometheus endpoints, at a tenth of the list's cost to the broker.

The lengths are statistics that lag by 5 s or more, so no deletion may rely on them. The endpoints report only names and
lengths; the rest comes from the stored rows. New and missing queues are looked up through the management API.
"""

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple
from urllib.parse import quote

from rabbit.errors import BrokerError, BrokerUnavailable, MalformedResponse, NotOnBroker
from rabbit.http import Answer, NoAnswer, PooledClient, TooLarge
from rabbit.management import Management
from rabbit.names import QueueName, is_amqp_name, is_watch_queue
from rabbit.requests.sending import Call
from rabbit.snapshot import (
    MQTT_QOS_0,
    TYPES_WITHOUT_LENGTH,
    ListedQueue,
    Snapshot,
    alarms_of,
    members,
    members_of,
    parse_row,
)
from rabbit.threads import ContextThreadPool
from rabbit.urls import read_server

PATH = "/metrics/detailed"
FAMILY = "queue_coarse_metrics"
"""The metric family with the lengths. RabbitMQ has it since 3.8.26 and 3.9.9."""

PROTOCOLS = {"http/prometheus": "http", "https/prometheus": "https"}
"""The schemes of the endpoints, by the protocol in the broker's list of listeners."""

MAX_LOOKUPS = 20
"""If more queues are new or missing, the list is cheaper than looking up each queue."""

MAX_VHOSTS_IN_QUERY = 3
"""Up to this number, the request names the guarded vhosts. For more, it requests all vhosts."""

MAX_CONCURRENT_REQUESTS = 8

READY, UNACKNOWLEDGED = "rabbitmq_detailed_queue_messages_ready", "rabbitmq_detailed_queue_messages_unacked"
SAMPLE_PATTERN = r'\{vhost="([^"\\\n]*)",queue="([^"\\\n]*)"\} (\d{1,18})(?=\n)'
SAMPLES = {name: re.compile(f"\n{name}{SAMPLE_PATTERN}") for name in (READY, UNACKNOWLEDGED)}
IDENTITY = re.compile(r'rabbitmq_identity_info\{[^\n]*?rabbitmq_node="([^"\\\n]+)"')


class ListNeeded(BrokerError):
    """The metrics are complete, but too many queues are new or missing. Fetch the list."""


class Depth(NamedTuple):
    """The messages of a queue, reported by the node of its leader."""

    ready: int
    unacknowledged: int
    node: str


class NodeMetrics(NamedTuple):
    """A node's metrics: the depths of the queues whose leader it is."""

    node: str
    depths: dict[QueueName, Depth]


def parse_metrics(text: str) -> NodeMetrics:
    """Parse a page of ``/metrics/detailed?family=queue_coarse_metrics``.

    Queues with a quote or a backslash in their name or vhost are left out. RabbitMQ 3.10 does not escape these, so the
    end of such a name is ambiguous. Raises MalformedResponse if the page is incomplete or not RabbitMQ's.
    """
    ready, unacknowledged = (SAMPLES[name].findall(text) for name in (READY, UNACKNOWLEDGED))
    # The node's name comes last, so a page that has it is complete.
    last = max(text.rfind(f"\n{name}{{") for name in (READY, UNACKNOWLEDGED))
    end = text.rfind("\nrabbitmq_identity_info{") + 1
    named = IDENTITY.match(text, end)
    if named is None or end < last or text.find("\nrabbitmq_identity_info{") + 1 != end or not text.endswith("\n"):
        raise MalformedResponse("the queues' metrics are incomplete, or not RabbitMQ's")
    node = named[1]
    lines = [text.count(f"\n{name}{{") for name in (READY, UNACKNOWLEDGED)]
    skipped = 0
    if lines[0] != len(ready):
        skipped = sum(_is_ambiguous(line) for line in text.split("\n") if line.startswith(f"{READY}{{"))
    depths = {
        (vhost, name): Depth(int(ready_count), int(unacked_count), node)
        for (vhost, name, ready_count), (vhost_2, name_2, unacked_count) in zip(ready, unacknowledged, strict=False)
        if name == name_2 and vhost == vhost_2
    }
    if lines != [len(ready) + skipped, len(unacknowledged) + skipped] or not len(depths) == len(ready) == len(
        unacknowledged
    ):
        raise MalformedResponse("the queues' metrics have another format than RabbitMQ's")
    return NodeMetrics(node, depths)


def _is_ambiguous(line: str) -> bool:
    return "\\" in line or line.count('"') != 4


def has_ambiguous_name(vhost: str, name: str) -> bool:
    """Return whether a page's lines about this queue are ambiguous."""
    return not {'"', "\\", "\n"}.isdisjoint(vhost + name)


class Endpoint:
    """The Prometheus endpoint of one node, for many threads.

    ``url`` is ``http://host:15692``, with ``user:password@`` if a proxy needs it. For the other parameters see
    ``Management``.
    """

    def __init__(self, url: str, read_timeout: float, on_call: Callable[[Call], None]) -> None:
        self._server = read_server(url, "write http://host:15692")
        self._on_call = on_call
        self._http = PooledClient(self._server.base, self._server.credentials, read_timeout, read_timeout)

    def read(self, vhosts: Sequence[str] = ()) -> NodeMetrics:
        """Return this node's metrics of the queues in these vhosts; without any, in all vhosts."""
        query = "".join(f"&vhost={quote(vhost, safe='')}" for vhost in vhosts)
        outcome: Literal["ok", "failed", "away"] = "away"
        began = time.perf_counter()
        try:
            answer = self._send(f"{self._server.path}{PATH}?family={FAMILY}{query}")
            outcome = "failed"
            page = self._parse(answer)
            outcome = "ok"
            return page
        finally:
            self._on_call(Call("GET", PATH, outcome, time.perf_counter() - began))

    def _send(self, target: str) -> Answer:
        try:
            return self._http.send("GET", target)
        except NoAnswer as error:
            raise BrokerUnavailable(
                f"{self._server.base}: {error}", timed_out=error.timed_out, never_reached=error.never_reached
            ) from error
        except TooLarge as error:
            raise MalformedResponse(f"{self._server.base}: {error}") from error

    def _parse(self, answer: Answer) -> NodeMetrics:
        if answer.status != 200:
            raise MalformedResponse(f"{self._server.base}: answered {answer.status} instead of 200")
        try:
            # RabbitMQ 3.10 accepts surrogates in a queue's name.
            return parse_metrics(answer.body.decode(errors="surrogatepass"))
        except (UnicodeDecodeError, MalformedResponse) as error:
            raise MalformedResponse(f"{self._server.base}: {error}") from error


class Scrape(NamedTuple):
    """The metrics of all running nodes, and the cluster's nodes and alarms.

    The depth of a queue is None if two nodes report it, as they do while its leader moves. ``seconds`` is the duration
    of the requests.
    """

    depths: Mapping[QueueName, Depth | None]
    nodes: frozenset[str]
    down: frozenset[str]
    seconds: float
    alarms: frozenset[tuple[str, str]] = frozenset()

    def to_snapshot(
        self,
        management: Management,
        stored: Mapping[QueueName, Any],
        is_ignored: Callable[[str, str], bool],
        between_requests: Callable[[], None],
        *,
        keep_stored_lengths: bool = False,
    ) -> Snapshot:
        """Return a snapshot from these metrics and the stored rows.

        These have the fields of ``ListedQueue``, and the number of consecutive lists that lacked them, as ``misses``.
        ``is_ignored`` returns whether Guardian ignores a queue (vhost, name). With ``keep_stored_lengths``, the stored
        lengths are newer than the metrics, and stay.

        A queue keeps its stored fields if its name is ambiguous, if two nodes report it, or if it exists without
        metrics. A queue that never has metrics is looked up if the last list lacked it. Raises ListNeeded if too many
        queues are new or missing.
        """
        new = {
            key
            for key in self.depths.keys() - stored.keys()
            if all(map(is_amqp_name, key)) and not is_watch_queue(key[1]) and not is_ignored(*key)
        }
        missing = {
            key
            for key in stored.keys() - self.depths.keys()
            if (_has_metrics(key, stored[key].type) or stored[key].misses) and not is_ignored(*key)
        }
        if not self.depths or len(new) + len(missing) > MAX_LOOKUPS:
            raise ListNeeded(f"{len(new)} queues are new, and {len(missing)} have no metrics")
        found = _look_up(management, new | missing)
        between_requests()
        gone = missing - found.keys()
        depths = {} if keep_stored_lengths else self.depths
        queues = [_with_depth(key, row, depths.get(key)) for key, row in stored.items() if key not in gone]
        queues += [_with_depth(key, found[key], self.depths[key]) for key in new if key in found]
        return Snapshot(
            queues=queues,
            unlisted={},
            nodes=self.nodes,
            down=self.down,
            nodes_unchanged=members(management) == (self.nodes, self.down),
            exact=True,
            unaddressable=[],
            missing_vhosts=[],
            seconds=self.seconds,
            lagging=True,
            alarms=self.alarms,
        )


def _has_metrics(key: QueueName, queue_type: str) -> bool:
    return queue_type != MQTT_QOS_0 and not has_ambiguous_name(*key)


def _look_up(management: Management, queues: set[QueueName]) -> dict[QueueName, ListedQueue]:
    """Return those of these queues that exist, without their lengths."""

    def look_up(key: QueueName) -> ListedQueue | None:
        try:
            return parse_row(management.queue(*key))
        except NotOnBroker:
            return None

    if not queues:
        return {}
    with ContextThreadPool(MAX_CONCURRENT_REQUESTS) as threads:
        found = list(threads.map(look_up, queues))
    return {key: one for key, one in zip(queues, found, strict=True) if one is not None}


def _with_depth(key: QueueName, row: Any, depth: Depth | None) -> ListedQueue:
    """Return a queue with its stored fields, and the length and the node from the metrics, if there are any."""
    ready, unacknowledged, node = depth or (row.ready, row.unacknowledged, row.node)
    if row.type in TYPES_WITHOUT_LENGTH:
        ready = unacknowledged = None
    return ListedQueue(*key, row.type, row.durable, row.auto_delete, row.exclusive, node, ready, unacknowledged)


class Prometheus:
    """The Prometheus endpoints of a cluster's nodes, for many threads.

    ``urls`` are the endpoints. Without any, the management API's list of listeners has their ports and nodes. Their
    host is then the node's host name, or ``host`` if the cluster has one node. For the other parameters see
    ``Management``.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        host: str,
        read_timeout: float = 20.0,
        on_call: Callable[[Call], None] = lambda call: None,
    ) -> None:
        self._host = host
        self._lock = threading.Lock()
        self._endpoints: dict[str, Endpoint] = {}
        self._found: tuple[frozenset[str], list[str]] = (frozenset(), [])
        self._endpoint = partial(Endpoint, read_timeout=read_timeout, on_call=on_call)
        self._urls = list(urls)
        self._endpoints_at(self._urls)

    def take(
        self,
        management: Management,
        vhosts: Sequence[str] | None,
        stored: Mapping[QueueName, Any],
        is_ignored: Callable[[str, str], bool],
        between_requests: Callable[[], None] = lambda: None,
        *,
        keep_stored_lengths: bool = False,
    ) -> Snapshot:
        """Return a snapshot of these vhosts, or of all, from the nodes' metrics. See ``Scrape.to_snapshot``."""
        scrape = self.scrape(management, vhosts, between_requests)
        return scrape.to_snapshot(
            management, stored, is_ignored, between_requests, keep_stored_lengths=keep_stored_lengths
        )

    def scrape(
        self,
        management: Management,
        vhosts: Sequence[str] | None,
        between_requests: Callable[[], None] = lambda: None,
    ) -> Scrape:
        """Fetch every running node's metrics of these vhosts, or of all. Call ``between_requests`` between two."""
        listed_nodes = management.nodes()
        nodes, down = members_of(listed_nodes)
        between_requests()
        try:
            endpoints = self._endpoints_at(self._urls or self._find(management, nodes))
        except ValueError as error:
            raise MalformedResponse(
                f"the address of an endpoint in the broker's list of listeners is invalid: {error}"
            ) from error
        named_vhosts = vhosts if vhosts is not None and len(vhosts) <= MAX_VHOSTS_IN_QUERY else ()
        began = time.monotonic()
        with ContextThreadPool(MAX_CONCURRENT_REQUESTS) as threads:
            answers = list(threads.map(lambda endpoint: _metrics_or_error(endpoint, named_vhosts), endpoints))
        seconds = time.monotonic() - began
        between_requests()
        # Ignore the pages of another cluster's nodes.
        pages = {answer.node: answer for answer in answers if isinstance(answer, NodeMetrics) and answer.node in nodes}
        if nodes - pages.keys():
            self._found = (frozenset(), [])  # look up the endpoints again
            errors = [str(answer) for answer in answers if isinstance(answer, BrokerError)]
            missing = ", ".join(sorted(nodes - pages.keys()))
            raise BrokerUnavailable("; ".join([f"no metrics from {missing}", *errors]))
        depths: dict[QueueName, Depth | None] = {}
        for page in pages.values():
            duplicates = depths.keys() & page.depths.keys()
            depths |= page.depths | dict.fromkeys(duplicates)
        return Scrape(depths, nodes, down, seconds, alarms_of(listed_nodes))

    def _find(self, management: Management, nodes: frozenset[str]) -> list[str]:
        found_for, found = self._found
        if found_for == nodes:
            return found
        listeners = management.overview().get("listeners")
        found = []
        for listener in listeners if isinstance(listeners, list) else ():
            scheme = PROTOCOLS.get(str(listener.get("protocol")))
            node = str(listener.get("node"))
            if scheme is not None and node in nodes:
                host = self._host if len(nodes) == 1 else node.rpartition("@")[2]
                found.append(f"{scheme}://{f'[{host}]' if ':' in host else host}:{listener.get('port')}")
        if not found:
            raise BrokerUnavailable(
                "no node tells a Prometheus endpoint; run: rabbitmq-plugins enable rabbitmq_prometheus, or set "
                "GUARDIAN_PROMETHEUS_URLS if the broker collects no statistics"
            )
        self._found = (nodes, found)
        return found

    def _endpoints_at(self, urls: Sequence[str]) -> list[Endpoint]:
        with self._lock:
            for url in urls:
                if url not in self._endpoints:
                    self._endpoints[url] = self._endpoint(url)
            return [self._endpoints[url] for url in urls]


def _metrics_or_error(endpoint: Endpoint, vhosts: Sequence[str]) -> NodeMetrics | BrokerError:
    try:
        return endpoint.read(vhosts)
    except BrokerError as error:
        return error
