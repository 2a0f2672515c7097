"""The queues of the broker at one moment, and how much that list can be trusted."""

import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from functools import cache
from typing import Any, NamedTuple

from rabbit.management import BrokerError, BrokerUnavailable, MalformedResponse, Management, NotOnBroker, Refused
from rabbit.threads import ContextThreadPool

MAX_SEPARATE_LISTS = 20
"""Up to so many guarded vhosts are listed each by itself; more of them in one request that is filtered here.

The broker needs 2 ms for a request, and more than twice the time for a queue where the list is of everything: five
vhosts of 10,000 queues took 8.0 s in one request, and 3.3 s in five; twenty of 25 queues took 29 ms and 28 ms.
"""

MAX_CONCURRENT_LISTS = 2
"""Lists under way at once. Those five took two cores 4.9 s one after another, and by two, three, four or five at once
all the same 3.3 to 3.8 s."""

CLASSIC = "classic"
"""The queue type whose listed length is exact."""

TOTALS = {"disable_stats": "true", "enable_queue_totals": "true"}
"""The cheapest complete answer there is. Classic queues are asked for their lengths, which are exact.

Other types are shown as of their last tick: for 5 s after a publish, purge, get or ack their lengths are wrong, and
right after a change of leader they are 0.
"""

MAX_NAME_LENGTH = 255

IDENTITY = "name,vhost,type,durable,auto_delete,exclusive,state,node"
COLUMNS = IDENTITY + ",messages_ready,messages_unacknowledged"


WITHOUT_LENGTHS = {"disable_stats": "true", "columns": "name,vhost,type,exclusive"}
"""The complete list that no queue's process is asked for."""


class ListedName(NamedTuple):
    """A queue that is there, down or not. ``exclusive``: a live connection has it to itself."""

    vhost: str
    name: str
    type: str
    exclusive: bool


def length_of(ready: int | None, unacknowledged: int | None) -> int | None:
    """Return the length of a queue; None if either number of messages is unknown: unknown is not 0."""
    return None if ready is None or unacknowledged is None else ready + unacknowledged


class ListedQueue(NamedTuple):
    """One queue as listed. ``ready`` and ``unacknowledged`` are messages, None where the broker gave none."""

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
        """Ready plus unacknowledged messages; None where either is unknown."""
        return length_of(self.ready, self.unacknowledged)


class Snapshot(NamedTuple):
    """A list of queues.

    ``unlisted`` maps each vhost that could not be listed to the reason; its queues are not in the list, which says
    nothing about them. ``nodes`` are the running nodes, ``down`` the cluster's others; ``nodes_unchanged`` says that
    they were the same before and after.
    ``exact`` says that the lengths of classic queues are exact (see ``TOTALS``). It is False where a queue's process
    did not answer and the lengths are the broker's statistics, which lag by seconds. ``unreadable`` are names that
    cannot be kept in a database, ``missing_vhosts`` vhosts that were asked for and aren't there. ``seconds`` is from
    the first request to the last list. ``lagging``: the lengths are from the nodes' Prometheus endpoints
    (``prometheus.py``), and nothing may be deleted by them.
    """

    queues: list[ListedQueue]
    unlisted: dict[str, str]
    nodes: frozenset[str]
    down: frozenset[str]
    nodes_unchanged: bool
    exact: bool
    unreadable: list[str]
    missing_vhosts: list[str]
    seconds: float
    lagging: bool = False


def take(
    management: Management, vhosts: Sequence[str] | None, between_requests: Callable[[], None] = lambda: None
) -> Snapshot:
    """List the queues of these vhosts (None: of all there are). ``between`` is called between two requests.

    A vhost that could not be listed is named in the answer. One that isn't there any more counts as listed, and empty.

    Raises:
        BrokerError: nothing could be listed at all.
    """
    nodes, down = members(management)
    between_requests()
    began = time.monotonic()
    unlisted: dict[str, str] = {}
    exact = True
    try:
        exactly = iter_lists(management, vhosts, {**TOTALS, "columns": COLUMNS}, unlisted, between_requests)
        queues, unreadable, listed_at = _read(exactly)
    except BrokerUnavailable as hanging:
        # One queue process that doesn't respond makes the exact list hang. The statistics still answer then.
        if not hanging.timed_out:
            raise
        unlisted.clear()
        queues, unreadable, listed_at = _read(
            iter_lists(management, vhosts, {"columns": COLUMNS}, unlisted, between_requests)
        )
        exact = False
    seconds = listed_at - began
    if not queues:
        require_administrator(management)
    empty = set(vhosts or ()) - {queue.vhost for queue in queues} - unlisted.keys()
    no_such = sorted(empty - {vhost.name for vhost in management.vhosts()}) if empty else []
    between_requests()
    nodes_unchanged = members(management) == (nodes, down)
    return Snapshot(queues, unlisted, nodes, down, nodes_unchanged, exact, unreadable, no_such, seconds)


def list_names(
    management: Management, vhosts: Sequence[str], between_requests: Callable[[], None] = lambda: None
) -> tuple[list[ListedName], dict[str, str]]:
    """Return every queue there is in these vhosts, down ones too, without asking their processes.

    With it, each vhost that could not be listed and the reason. ``between`` is called between two requests.

    Raises:
        BrokerError: nothing could be listed at all.
    """
    unlisted: dict[str, str] = {}
    there: list[ListedName] = []
    with closing(iter_lists(management, vhosts, WITHOUT_LENGTHS, unlisted, between_requests)) as given:
        for rows in given:
            try:
                there += [
                    ListedName(row["vhost"], row["name"], _text(row["type"]), bool(row.get("exclusive")))
                    for row in rows
                ]
            except (KeyError, TypeError) as error:
                raise _of_another_shape(error) from error
    return there, unlisted


def members(management: Management) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of the cluster's running nodes, and of its others."""
    nodes = management.nodes()
    return (
        frozenset(node.name for node in nodes if node.running),
        frozenset(node.name for node in nodes if not node.running),
    )


def require_administrator(management: Management) -> None:
    """Make sure that the lists are whole: without the administrator tag the broker answers 200 and leaves queues out.

    Raises:
        Refused: the account has lost its tag.
    """
    account = management.whoami()
    if "administrator" not in account.tags:
        raise Refused(
            f"the account '{account.name}' doesn't have the administrator tag, and sees only a part of the queues; "
            f"run: rabbitmqctl set_user_tags {account.name} administrator",
            status=200,
            reason="no administrator tag",
        )


def stopped_vhosts(management: Management) -> set[str]:
    """Return the vhosts that exist and don't run everywhere, so that their queues may be missing from a list."""
    return {vhost.name for vhost in management.vhosts() if not vhost.running}


def iter_lists(
    management: Management,
    vhosts: Sequence[str] | None,
    params: Mapping[str, str],
    unlisted: dict[str, str],
    between_requests: Callable[[], None] = lambda: None,
) -> Generator[list[dict[str, Any]], None, None]:
    """Give the rows of the queues in these vhosts (None: in all), as ``params`` ask for them, list by list.

    A vhost that isn't there, or could not be listed, has an empty one.

    Several vhosts are listed side by side, and the broker works at the next ones while one is read here. Why one could
    not be listed is put into ``unlisted``, by its name. ``between`` is called between two answers.

    Raises:
        BrokerError: nothing could be listed at all, or an answer didn't come in time.
    """
    failures: list[BrokerError] = []
    where = _asked_for(vhosts)
    wanted = set(vhosts) if vhosts is not None and None in where else None
    there = cache(lambda: {vhost.name for vhost in management.vhosts()})
    threads = ContextThreadPool(MAX_CONCURRENT_LISTS)
    try:
        asked = deque((vhost, threads.submit(management.list_queues, vhost, params)) for vhost in where)
        while asked:
            vhost, listed = asked.popleft()
            between_requests()
            try:
                found = listed.result()
            except BrokerError as error:
                if vhost is None or (isinstance(error, BrokerUnavailable) and error.timed_out):
                    raise
                if not isinstance(error, NotOnBroker):
                    unlisted[vhost] = str(error)
                    failures.append(error)
                elif vhost in there():
                    unlisted[vhost] = "the broker says that it isn't there, and lists it all the same"
                found = []
            yield found if wanted is None else [row for row in found if row["vhost"] in wanted]
    finally:
        threads.shutdown(wait=False, cancel_futures=True)  # one that hangs is not waited for twice
    if failures and len(failures) == len(where):
        raise failures[0]


def _asked_for(vhosts: Sequence[str] | None) -> Sequence[str | None]:
    """Return what is listed to have the queues of these vhosts (None: of all), each in a request; None: everything."""
    # Some names a vhost may have, and a path may not.
    if vhosts is None or len(vhosts) > MAX_SEPARATE_LISTS or not {"", ".", ".."}.isdisjoint(vhosts):
        return [None]
    return list(dict.fromkeys(vhosts))


def _read(listing: Generator[list[dict[str, Any]], None, None]) -> tuple[list[ListedQueue], list[str], float]:
    """Return the queues listed, the names that cannot be kept, and when the last list came, by ``time.monotonic()``."""
    queues, unreadable = [], []
    came_at = time.monotonic()
    with closing(listing) as given:  # where it isn't read to its end, nothing more is to be asked for
        for rows in given:
            came_at = time.monotonic()
            try:
                for row in rows:
                    if not is_storable(row["name"]) or not is_storable(row["vhost"]):
                        unreadable.append(row["name"])
                    else:
                        queues.append(parse_row(row))
            except (KeyError, TypeError) as error:
                raise _of_another_shape(error) from error
    return queues, unreadable, came_at


def _of_another_shape(error: Exception) -> MalformedResponse:
    return MalformedResponse(f"the list of queues has an entry of another shape ({error!r}); is this RabbitMQ?")


def is_storable(name: str) -> bool:
    """Return whether a database keeps this name as it is: PostgreSQL takes no NUL, and a column has its length."""
    return "\0" not in name and len(name) <= MAX_NAME_LENGTH


def _messages(value: Any) -> int | None:
    """Return a number of messages. What is none, or more than a database keeps, is unknown."""
    return value if type(value) is int and 0 <= value < 2**63 else None


def parse_row(row: dict[str, Any]) -> ListedQueue:
    """Return the queue that a row of the management API tells of."""
    # A stream counts its messages otherwise: they are read without being taken away. It is never judged by them.
    stream = row["type"] == "stream"
    return ListedQueue(
        vhost=_text(row["vhost"]),
        name=row["name"],
        type=_text(row["type"]),
        durable=bool(row["durable"]),
        auto_delete=bool(row.get("auto_delete")),
        exclusive=bool(row.get("exclusive")),  # a stream has none
        node=_text(row.get("node") or ""),
        ready=None if stream else _messages(row.get("messages_ready")),
        unacknowledged=None if stream else _messages(row.get("messages_unacknowledged")),
    )


def _text(value: Any) -> str:
    if not isinstance(value, str) or not is_storable(value):
        raise TypeError(f"{value!r} is no name")
    return value
