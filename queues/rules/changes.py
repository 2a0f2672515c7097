"""What follows from a list of queues: events, messages, deletions. Pure."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

from queues.models import QueueEvent
from queues.rules.quiet import MessageKind
from queues.rules.rows import StoredQueue
from queues.rules.thresholds import Thresholds
from rabbit.names import QueueName


class Event(NamedTuple):
    queue: StoredQueue
    kind: str


class Message(NamedTuple):
    """A message that is due. ``instead`` is what is due if a last call is withdrawn."""

    queue: StoredQueue
    kind: MessageKind
    thresholds: Thresholds
    merged: int = 0
    instead: MessageKind = MessageKind.NONE


class Deletable(NamedTuple):
    """A queue to delete, if the recheck confirms it. ``for_its_name``: whatever its length.

    ``without_copy``: its messages must not be fetched now, so it is deleted past twice its limit (see ``FETCH_PAUSE``).
    """

    queue: StoredQueue
    thresholds: Thresholds
    for_its_name: bool
    without_copy: bool = False

    @property
    def key(self) -> QueueName:
        return (self.queue.vhost, self.queue.name)

    @property
    def limit(self) -> int:
        """The length past which the queue is deleted."""
        return 2 * self.thresholds.max if self.without_copy else self.thresholds.max


@dataclass
class Changes:
    """The result of a comparison. ``lengths`` are queues of which only the length changed, or that are the deleter's;
    ``changed`` are all others.

    ``vanished`` are the gone queues that are registered, ``listed_last`` the gone ones that the previous list had.
    ``deleted`` are gone because Guardian deleted them, and the answer to its request was lost.
    ``short`` counts the queues that are missing for no known reason, if there are too many of them.
    ``blocked`` are queues to delete whose deletion is blocked; ``newly_blocked`` counts those of this pass, and
    ``newly_blocked_groups`` the groups of which the brake blocked none before.
    ``unconfirmed`` are queues that a lagging length would delete, or report as back to normal.
    ``for_memory`` are the queues over a limit that memory pressure lowered.
    ``emptied`` are queues whose attempts to archive their messages no longer matter.
    ``returned_nodes`` begin to recover, because quorum queues on them are listed again.
    ``growing`` are queues about which a last call is due if they grow fast enough.
    ``long_exclusive`` are exclusive queues over their deletion limit, ``unaddressable`` those with an unusable name.
    ``uncounted`` are quorum queues that are listed without message counts, and since when.
    """

    listed: int = 0
    new: list[StoredQueue] = field(default_factory=list)
    changed: list[StoredQueue] = field(default_factory=list)
    lengths: list[StoredQueue] = field(default_factory=list)
    missed: list[StoredQueue] = field(default_factory=list)
    gone: list[StoredQueue] = field(default_factory=list)
    vanished: list[StoredQueue] = field(default_factory=list)
    listed_last: list[StoredQueue] = field(default_factory=list)
    deleted: list[StoredQueue] = field(default_factory=list)
    samples: list[StoredQueue] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    deletable: list[Deletable] = field(default_factory=list)
    unknown: int = 0
    misnamed: list[str] = field(default_factory=list)
    unpatterned: int = 0
    short: int = 0
    short_lists: int = 0
    blocked: list[Deletable] = field(default_factory=list)
    newly_blocked: int = 0
    newly_blocked_groups: int = 0
    unconfirmed: list[QueueName] = field(default_factory=list)
    for_memory: list[QueueName] = field(default_factory=list)
    growing: list[int] = field(default_factory=list)
    emptied: list[StoredQueue] = field(default_factory=list)
    returned_nodes: frozenset[str] = frozenset()
    long_exclusive: list[QueueName] = field(default_factory=list)
    unaddressable: list[QueueName] = field(default_factory=list)
    uncounted: Mapping[QueueName, datetime] = field(default_factory=dict)

    def drop(
        self,
        gone: Collection[int | None],
        removed: Collection[int | None],
        departed: Collection[int | None] = frozenset(),
    ) -> None:
        """Drop what people changed since the list was fetched, given as ids.

        Queues in ``gone`` are not written. Queues of ``removed`` Pulse users and ``departed`` owners lose that owner.
        """

        def without_concurrent_edits(queue: StoredQueue) -> StoredQueue | None:
            if queue.id in gone:
                return None
            if queue.pulse_user_id in removed:
                queue = queue._replace(pulse_user_id=None)
            return queue._replace(owner_id=None) if queue.owner_id in departed else queue

        self.replace_queues(without_concurrent_edits)

    @property
    def last_calls(self) -> list[Message]:
        return [message for message in self.messages if message.kind is MessageKind.LAST_CALL]

    def withdraw_last_calls(self, limited: Collection[QueueName]) -> None:
        """Drop the last calls about queues that the broker itself keeps within their limit.

        Their owners get the messages that these replaced, and a warning if they had none.
        """
        messages, self.messages = self.messages, []
        for message in messages:
            queue = message.queue
            if message.kind is not MessageKind.LAST_CALL or (queue.vhost, queue.name) not in limited:
                self.messages.append(message)
                continue
            self.events.remove(Event(queue, QueueEvent.Kind.LAST_CALL))
            if message.instead is not MessageKind.NONE:
                self.messages.append(message._replace(kind=message.instead))

    def set_ids(self, ids: Mapping[QueueName, int]) -> None:
        if ids:
            self.replace_queues(
                lambda queue: queue if queue.id is not None else queue._replace(id=ids[queue.vhost, queue.name])
            )

    def replace_queues(self, replace: Callable[[StoredQueue], StoredQueue | None]) -> None:
        """Replace each queue by the result of this function, or drop it if that is None."""
        written = (self.new, self.changed, self.lengths, self.missed, self.gone, self.samples)
        for queues in (*written, self.vanished, self.listed_last):
            queues[:] = [after for queue in queues if (after := replace(queue)) is not None]
        self.events = [one._replace(queue=after) for one in self.events if (after := replace(one.queue)) is not None]
        self.messages = [
            one._replace(queue=after) for one in self.messages if (after := replace(one.queue)) is not None
        ]
        for deletable in (self.deletable, self.blocked):
            deletable[:] = [one._replace(queue=after) for one in deletable if (after := replace(one.queue)) is not None]
