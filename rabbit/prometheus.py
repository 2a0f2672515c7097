"""The lengths of all queues from the Prometheus endpoints of the nodes: a tenth of what the list costs the broker.

They are statistics, which lag by five seconds and more, and say nothing of a queue but its name and its length. So they
complete what is known of it; names that are new or gone are looked up through the management API; and nothing may be
deleted by them.
"""

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple, Protocol
from urllib.parse import quote, unquote, urlsplit

from rabbit.http import Answer, NoAnswer, PooledClient, TooLarge
from rabbit.management import (
    MAX_RESPONSE_BYTES,
    BrokerError,
    BrokerUnavailable,
    Call,
    MalformedResponse,
    Management,
    NotOnBroker,
)
from rabbit.names import QueueName
from rabbit.snapshot import ListedQueue, Snapshot, is_storable, members, parse_row
from rabbit.threads import ContextThreadPool

PATH = "/metrics/detailed"
FAMILY = "queue_coarse_metrics"
"""The family of figures that has the lengths. RabbitMQ has it since 3.8.26 and 3.9.9."""

PROTOCOLS = {"http/prometheus": "http", "https/prometheus": "https"}
"""What the broker calls these endpoints among its listeners, and the schemes of their addresses."""

MAX_LOOKUPS = 20
"""So many names that are new or gone are looked up one by one. More of them, and the list is the cheaper answer."""

MAX_VHOSTS_IN_QUERY = 3
"""So many guarded vhosts are named in the request; of more, the figures are asked for as a whole and filtered here."""

MAX_CONCURRENT_REQUESTS = 8

READY, UNACKNOWLEDGED = "rabbitmq_detailed_queue_messages_ready", "rabbitmq_detailed_queue_messages_unacked"
PLAIN = r'\{vhost="([^"\\\n]*)",queue="([^"\\\n]*)"\} (\d{1,18})(?=\n)'
SAMPLES = {name: re.compile(f"\n{name}{PLAIN}") for name in (READY, UNACKNOWLEDGED)}
IDENTITY = re.compile(r'rabbitmq_identity_info\{[^\n]*?rabbitmq_node="([^"\\\n]+)"')


class ListNeeded(BrokerError):
    """The figures are complete, but not enough for a snapshot; fetch the list."""


class QueueFields(Protocol):
    """What is known of a queue. The fields are those of ``ListedQueue``."""

    @property
    def type(self) -> str:
        """The kind of queue."""

    @property
    def durable(self) -> bool:
        """Whether it outlives the broker's restart."""

    @property
    def auto_delete(self) -> bool:
        """Whether it goes with its last consumer."""

    @property
    def exclusive(self) -> bool:
        """Whether a live connection has it to itself."""

    @property
    def node(self) -> str:
        """Where it is."""

    @property
    def ready(self) -> int | None:
        """Messages that wait."""

    @property
    def unacknowledged(self) -> int | None:
        """Messages that were handed out."""


class StoredQueue(QueueFields, Protocol):
    """What is known of a queue from before."""

    @property
    def misses(self) -> int:
        """How many lists in a row it was missing from."""


class Depth(NamedTuple):
    """What a node says of a queue that it leads. The numbers are messages."""

    ready: int
    unacknowledged: int
    node: str


class Page(NamedTuple):
    """What one node says: its own name, and the depths of the queues that it leads.

    ``odd`` is how many names of queues or vhosts have a quote or a backslash in them. RabbitMQ 3.10 writes these as
    they are, and one can't tell then where a name ends; so they are left out.
    """

    node: str
    depths: dict[QueueName, Depth]
    odd: int


def parse_page(text: str) -> Page:
    """Return what a page of ``/metrics/detailed?family=queue_coarse_metrics`` says.

    Raises:
        MalformedResponse: it isn't one, or not all of it.
    """
    ready, unacknowledged = (SAMPLES[name].findall(text) for name in (READY, UNACKNOWLEDGED))
    # The node's own name comes last, so that it is there only where the rest is.
    last = max(text.rfind(f"\n{name}{{") for name in (READY, UNACKNOWLEDGED))
    end = text.rfind("\nrabbitmq_identity_info{") + 1
    named = IDENTITY.match(text, end)
    if named is None or end < last or text.find("\nrabbitmq_identity_info{") + 1 != end or not text.endswith("\n"):
        raise MalformedResponse("the figures of the queues are not whole, or not RabbitMQ's")
    node = named[1]
    lines = [text.count(f"\n{name}{{") for name in (READY, UNACKNOWLEDGED)]
    odd = 0
    if lines[0] != len(ready):
        odd = sum(_is_odd(line) for line in text.split("\n") if line.startswith(f"{READY}{{"))
    depths = {
        (vhost, name): Depth(int(waiting), int(out), node)
        for (vhost, name, waiting), (vhost_again, name_again, out) in zip(ready, unacknowledged, strict=False)
        if name == name_again and vhost == vhost_again
    }
    if lines != [len(ready) + odd, len(unacknowledged) + odd] or not len(depths) == len(ready) == len(unacknowledged):
        raise MalformedResponse("the figures of the queues have another shape than RabbitMQ's")
    return Page(node, depths, odd)


def _is_odd(line: str) -> bool:
    return "\\" in line or line.count('"') != 4


def has_ambiguous_name(vhost: str, name: str) -> bool:
    """Return whether a page can't say which queue this is."""
    return not {'"', "\\", "\n"}.isdisjoint(vhost + name)


class Endpoint:
    """The Prometheus endpoint of one node, for many threads.

    ``url`` is ``http://host:15692``, with ``user:password@`` where a proxy asks for them. The rest is as with
    ``Management``.

    Raises:
        ValueError: the URL isn't one.
    """

    def __init__(
        self, url: str, *, connect_timeout: float, read_timeout: float, on_call: Callable[[Call], None] | None
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            raise ValueError("write http://host:15692")
        if re.search(r"[^!-~]", parts.path):
            raise ValueError("its path has a character that can't stand in a path; percent-encode it")
        self._where = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        self._prefix = parts.path.rstrip("/")
        credentials = None
        if parts.username is not None:
            credentials = unquote(parts.username), unquote(parts.password or "")
        self._on_call = on_call
        self._http = PooledClient(
            self._where,
            credentials,
            connect_timeout=connect_timeout,
            read_timeout=read_timeout,
            answer_timeout=read_timeout,
            max_bytes=MAX_RESPONSE_BYTES,
        )

    def read(self, vhosts: Sequence[str] = ()) -> Page:
        """Return what this node says of the queues that it leads: of these vhosts; without any, of all.

        Raises:
            BrokerUnavailable: it doesn't answer.
            MalformedResponse: its answer isn't RabbitMQ's, or not whole.
        """
        query = "".join(f"&vhost={quote(vhost, safe='')}" for vhost in vhosts)
        outcome: Literal["ok", "failed", "away"] = "away"
        began = time.perf_counter()
        try:
            answer = self._send(f"{self._prefix}{PATH}?family={FAMILY}{query}")
            outcome = "failed"
            page = self._page(answer)
            outcome = "ok"
            return page
        finally:
            if self._on_call is not None:
                self._on_call(Call("GET", PATH, outcome, time.perf_counter() - began))

    def _send(self, target: str) -> Answer:
        try:
            return self._http.send("GET", target)
        except NoAnswer as error:
            raise BrokerUnavailable(
                f"{self._where}: {error}", timed_out=error.timed_out, never_reached=error.never_reached
            ) from error
        except TooLarge as error:
            raise MalformedResponse(f"{self._where}: the figures have more than {MAX_RESPONSE_BYTES} bytes") from error

    def _page(self, answer: Answer) -> Page:
        if answer.status != 200:
            raise MalformedResponse(f"{self._where}: answered {answer.status} where its figures are due")
        try:
            return parse_page(answer.body.decode())
        except (UnicodeDecodeError, MalformedResponse) as error:
            raise MalformedResponse(f"{self._where}: {error}") from error


class Scrape(NamedTuple):
    """What the running nodes said together, and which these are.

    A queue that two of them say they lead, as while its leader moves, has None. ``seconds`` is what it took.
    """

    depths: Mapping[QueueName, Depth | None]
    nodes: frozenset[str]
    down: frozenset[str]
    seconds: float

    def to_snapshot(
        self,
        management: Management,
        stored: Mapping[QueueName, StoredQueue],
        is_ignored: Callable[[str, str], bool],
        between_requests: Callable[[], None],
        *,
        keep_stored_lengths: bool = False,
    ) -> Snapshot:
        """Return the queues, by these figures and by what is known of each that was there.

        ``is_ignored`` says of a vhost and a name whether nobody looks at that queue. With ``keep_stored_lengths`` what
        is known of a length is newer than its figures, and stays.
        What can't be told by these figures stays as it is stored: a queue with an odd name, one that two nodes say they
        lead, and one that is there and has no figures. An odd name that the last list lacked is looked up.

        Raises:
            ListNeeded: too many queues are new or gone, so that the list has to be asked for.
            BrokerError: a queue could not be looked up.
        """
        new = {key for key in self.depths.keys() - stored.keys() if all(map(is_storable, key)) and not is_ignored(*key)}
        gone = {
            key
            for key in stored.keys() - self.depths.keys()
            if (not has_ambiguous_name(*key) or stored[key].misses) and not is_ignored(*key)
        }
        if not self.depths or len(new) + len(gone) > MAX_LOOKUPS:
            raise ListNeeded(f"{len(new)} queues are new, and {len(gone)} have no figures")
        found = _look_up(management, new | gone)
        between_requests()
        lost = gone - found.keys()
        depths = {} if keep_stored_lengths else self.depths
        queues = [_measured(key, row, depths.get(key)) for key, row in stored.items() if key not in lost]
        queues += [_measured(key, found[key], self.depths[key]) for key in new if key in found]
        nodes_unchanged = members(management) == (self.nodes, self.down)
        return Snapshot(queues, {}, self.nodes, self.down, nodes_unchanged, True, [], [], self.seconds, lagging=True)


def _look_up(management: Management, queues: set[QueueName]) -> dict[QueueName, ListedQueue]:
    """Return those of these queues that are there, without their lengths."""

    def look_up(key: QueueName) -> ListedQueue | None:
        try:
            return parse_row(management.queue(*key))
        except NotOnBroker:
            return None
        except (KeyError, TypeError) as error:
            raise MalformedResponse(f"a queue is told of in another shape ({error!r}); is this RabbitMQ?") from error

    if not queues:
        return {}
    with ContextThreadPool(MAX_CONCURRENT_REQUESTS) as threads:
        found = list(threads.map(look_up, queues))
    return {key: one for key, one in zip(queues, found, strict=True) if one is not None}


def _measured(key: QueueName, row: QueueFields, depth: Depth | None) -> ListedQueue:
    """Return a queue as it is stored, with its length and its node by the figures where there are any."""
    ready, unacknowledged, node = depth or (row.ready, row.unacknowledged, row.node)
    if row.type == "stream":
        ready = unacknowledged = None
    return ListedQueue(*key, row.type, row.durable, row.auto_delete, row.exclusive, node, ready, unacknowledged)


class Prometheus:
    """The Prometheus endpoints of a cluster's nodes, for many threads.

    ``urls`` are their addresses; where there are none, the management API is asked for them. It knows their ports and
    the names of their nodes; the host is the node's, and ``host`` where there is but one. The rest is as with
    ``Management``.

    Raises:
        ValueError: an address isn't one.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        host: str,
        connect_timeout: float = 2.0,
        read_timeout: float = 20.0,
        on_call: Callable[[Call], None] | None = None,
    ) -> None:
        self._host = host
        self._lock = threading.Lock()
        self._endpoints: dict[str, Endpoint] = {}
        self._found: tuple[frozenset[str], list[str]] = (frozenset(), [])
        self._endpoint = partial(Endpoint, connect_timeout=connect_timeout, read_timeout=read_timeout, on_call=on_call)
        self._urls = list(urls)
        self._endpoints_at(self._urls)

    def take(
        self,
        management: Management,
        vhosts: Sequence[str] | None,
        stored: Mapping[QueueName, StoredQueue],
        is_ignored: Callable[[str, str], bool],
        between_requests: Callable[[], None] = lambda: None,
        *,
        keep_stored_lengths: bool = False,
    ) -> Snapshot:
        """Return the queues of these vhosts (None: of all) by the nodes' figures. See ``Scrape.complete``.

        Raises:
            ListNeeded: too many queues are new or gone, so that the list has to be fetched.
            BrokerError: a node has no figures, or the management API doesn't answer.
        """
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
        """Ask every running node for its figures: of these vhosts (None: of all).

        ``between`` is called between two requests.

        Raises:
            BrokerError: one of them has none, or the management API doesn't answer.
        """
        nodes, down = members(management)
        between_requests()
        try:
            endpoints = self._endpoints_at(self._urls or self._find(management, nodes))
        except ValueError as error:
            raise MalformedResponse(
                f"the broker's own word for where its figures are is no address: {error}"
            ) from error
        few = vhosts if vhosts is not None and len(vhosts) <= MAX_VHOSTS_IN_QUERY else ()
        began = time.monotonic()
        with ContextThreadPool(MAX_CONCURRENT_REQUESTS) as threads:
            answers = list(threads.map(lambda endpoint: _page_or_error(endpoint, few), endpoints))
        seconds = time.monotonic() - began
        between_requests()
        # What another broker's node says is of other queues, by whatever names.
        pages = {answer.node: answer for answer in answers if isinstance(answer, Page) and answer.node in nodes}
        if nodes - pages.keys():
            self._found = (frozenset(), [])  # whoever moved is looked for again
            errors = [str(answer) for answer in answers if isinstance(answer, BrokerError)]
            missing = ", ".join(sorted(nodes - pages.keys()))
            raise BrokerUnavailable("; ".join([f"no figures of the queues on {missing}", *errors]))
        depths: dict[QueueName, Depth | None] = {}
        for page in pages.values():
            twice = depths.keys() & page.depths.keys()
            depths |= page.depths | dict.fromkeys(twice)
        return Scrape(depths, nodes, down, seconds)

    def _find(self, management: Management, nodes: frozenset[str]) -> list[str]:
        """Return the addresses of these nodes' endpoints, as the management API has them."""
        before, found = self._found
        if before == nodes:
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
            raise BrokerUnavailable("no node serves figures; run: rabbitmq-plugins enable rabbitmq_prometheus")
        self._found = (nodes, found)
        return found

    def _endpoints_at(self, urls: Sequence[str]) -> list[Endpoint]:
        with self._lock:
            for url in urls:
                if url not in self._endpoints:
                    self._endpoints[url] = self._endpoint(url)
            return [self._endpoints[url] for url in urls]


def _page_or_error(endpoint: Endpoint, vhosts: Sequence[str]) -> Page | BrokerError:
    try:
        return endpoint.read(vhosts)
    except BrokerError as error:
        return error
