"""What a pass knows of each queue: the stored row, the settings, the registrations. Pure."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from notifications.audience import Ownership
from queues.models import Queue
from queues.rules.growth import Sample
from queues.rules.quiet import QuietPeriod
from queues.rules.thresholds import DELETING, GONE, OK, Policy, is_spared
from rabbit.amqp import DeclareOk
from rabbit.memory import NodeMemory
from rabbit.names import NameKind, QueueName, kind_of_queue
from rabbit.snapshot import UNKNOWN_TYPE, ListedQueue, Snapshot, length_of


class StoredQueue(NamedTuple):
    """The columns of ``queues.models.Queue`` that a pass reads and writes. Those of ``ListedQueue`` follow the id."""

    id: int | None
    vhost: str
    name: str
    type: str
    durable: bool
    auto_delete: bool
    exclusive: bool
    node: str
    ready: int | None
    unacknowledged: int | None
    pulse_user_id: int | None = None
    owner_id: int | None = None
    registered: bool = False
    state: str = OK
    misses: int = 0
    delete_sent_at: datetime | None = None
    decided_at: datetime | None = None
    decided_for: str = ""
    decided_limit: int | None = None
    is_released: bool = False
    notified_state: str = OK
    quiet_until: datetime | None = None
    recovery_notified: bool = False
    merged: int = 0
    warned_since: datetime | None = None
    reminded_at: datetime | None = None
    last_call_limit: int | None = None
    over_unacked_since: datetime | None = None
    block_reason: str = ""
    unbounded: bool = False
    warn_length: int | None = None
    max_length: int | None = None
    attempted_at: datetime | None = None
    returned_at: datetime | None = None
    acknowledged_at: datetime | None = None

    @property
    def length(self) -> int | None:
        """Ready plus unacknowledged messages, or None if either is unknown."""
        return length_of(self.ready, self.unacknowledged)

    @property
    def last_notified_state(self) -> str:
        """The state that owners know: for a queue about to be deleted, that of the last message."""
        return self.notified_state if self.state == DELETING else self.state

    @property
    def ownership(self) -> Ownership:
        """The Pulse user or owner that the queue belongs to."""
        return Ownership(self.pulse_user_id, self.owner_id)

    @property
    def quiet_period(self) -> QuietPeriod:
        """The messages already sent about the queue."""
        return QuietPeriod(self.notified_state, self.quiet_until, self.recovery_notified, self.merged)

    def with_quiet_period(self, after: QuietPeriod) -> "StoredQueue":
        """Return the queue after a message. After one that it is back to normal, the last call may be due again."""
        return self._replace(
            last_call_limit=self.last_call_limit if after.notified_state != OK else None,
            notified_state=after.notified_state,
            quiet_until=after.until,
            recovery_notified=after.recovery_sent,
            merged=after.merged,
        )


GONE_FIELDS: Mapping[str, Any] = {
    "state": GONE,
    "misses": 0,
    "ready": None,
    "unacknowledged": None,
    "delete_sent_at": None,
    "warned_since": None,
    "over_unacked_since": None,
    "block_reason": "",
    "last_call_limit": None,
}
"""The columns of a queue that is gone."""

WITHOUT_COUNTS: Mapping[str, Any] = {
    "bytes": None,
    "consumers": None,
    "unattended_since": None,
    "acknowledged_total": None,
    "stalled_since": None,
    "diagnosis": "",
    "diagnosis_since": None,
    "activity": None,
}
"""The columns that the count of consumers fills, of a queue that is gone.

When owners were notified stays, so that they learn of a consumer when the queue is declared again.
"""

OwnershipFields = tuple[int | None, int | None, bool]

FROM_LIST = slice(StoredQueue._fields.index("vhost"), StoredQueue._fields.index("state"))
"""The fields that each list replaces: those of ``ListedQueue`` and the ownership."""

FROM_LIST_FIELDS = StoredQueue._fields[FROM_LIST]


class StoredPulseUser(NamedTuple):
    """A Pulse user and the thresholds of its queues, in messages. ``removing``: they are being removed.

    ``owner_id`` is the owner who has had it longest. ``hold_off_minutes`` is how long warnings wait.
    """

    id: int
    warn_length: int | None
    max_length: int | None
    removing: bool = False
    owner_id: int | None = None
    hold_off_minutes: int = 0


@dataclass(frozen=True)
class Registrations:
    """The queues that agents registered, and the agents' vhosts, each with the id of its owner.

    ``pending_removals`` are queues without a registration that Guardian is about to delete.
    """

    queues: Mapping[QueueName, int] = field(default_factory=dict)
    vhosts: Mapping[str, int] = field(default_factory=dict)
    pending_removals: Collection[QueueName] = frozenset()

    def owner_of(self, queue: QueueName) -> int | None:
        """Return the owner of an agents' queue, by its registration or its vhost, or None for any other queue."""
        return self.queues.get(queue, self.vhosts.get(queue[0]))

    def was_unregistered(self, queue: StoredQueue) -> bool:
        """Return whether this queue lost its registration, so that it is expected to be gone."""
        name = (queue.vhost, queue.name)
        return name in self.pending_removals or (queue.registered and name not in self.queues)


@dataclass(frozen=True)
class Rules:
    """The settings of a comparison. ``vhosts`` are the guarded vhosts, or None for all.

    ``reminder_interval`` of 0: there are no reminders.
    """

    policy: Policy
    pulse_vhost: str
    vhosts: frozenset[str] | None
    ignored: re.Pattern[str] | None
    namespace_policy: str
    brake: int
    quiet_seconds: int
    reminder_interval: timedelta = timedelta(0)

    def ignores(self, vhost: str, name: str) -> bool:
        if self.vhosts is not None and vhost not in self.vhosts:
            return True
        return self.ignored is not None and self.ignored.search(name) is not None

    def deletes_for_its_name(self, queue: StoredQueue | Queue) -> bool:
        """Return whether the namespace policy requires this queue to be deleted, whatever its length."""
        if self.namespace_policy == "report" or queue.vhost != self.pulse_vhost or queue.type == UNKNOWN_TYPE:
            return False
        if is_spared(queue):
            return False
        kind = kind_of_queue(queue.name)
        if self.namespace_policy == "delete-unpatterned":
            return kind in (NameKind.MISNAMED, NameKind.UNPATTERNED)
        return self.namespace_policy == "delete-misnamed" and kind is NameKind.MISNAMED


NO_REGISTRATIONS = Registrations()


class Earlier(NamedTuple):
    """The running nodes at the last complete list, and how many lists in a row were too short.

    ``rules`` are those of the last pass, if they differ from the present ones. ``recovering`` are the nodes that came
    back a moment ago (see ``guard/recovering.py``), ``recovered`` those for which that has just ended.
    """

    nodes: frozenset[str]
    short_lists: int
    rules: Rules | None = None
    recovering: frozenset[str] = frozenset()
    recovered: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Observation:
    """The input of a comparison: the snapshot, and the rows that were read after it was fetched.

    ``stored`` has the queues that are not gone, and the gone ones that are listed again, by (vhost, name).
    ``memory`` has the running nodes, if the policy needs it, and ``held`` the bytes of memory that each queue holds, if
    a node is under pressure. Queues of ``stopped_vhosts`` never count as missing. Queues that an operator ``released``
    are not blocked. ``samples`` are the recent lengths of growing queues, by id.
    """

    snapshot: Snapshot
    stored: Mapping[QueueName, StoredQueue]
    pulse_users: Mapping[str, StoredPulseUser]
    registrations: Registrations
    earlier: Earlier
    memory: Mapping[str, NodeMemory] = field(default_factory=dict)
    held: Mapping[QueueName, int] = field(default_factory=dict)
    stopped_vhosts: frozenset[str] = frozenset()
    released: frozenset[QueueName] = frozenset()
    samples: Mapping[int, Sequence[Sample]] = field(default_factory=dict)


def with_ready(queue: ListedQueue, ready: int) -> ListedQueue:
    """Return a queue, listed as of its last tick, with its exact ready count.

    Messages that are no longer ready are unacknowledged, acknowledged or purged; only the next tick shows which.
    So the total stays as listed, unless more messages are ready.
    """
    total = (queue.ready or 0) + (queue.unacknowledged or 0)
    return queue._replace(ready=ready, unacknowledged=max(0, total - ready))


def with_exact_lengths(
    snapshot: Snapshot,
    unconfirmed: Collection[QueueName],
    depths: Mapping[QueueName, DeclareOk],
    stored: Mapping[QueueName, StoredQueue],
) -> Snapshot:
    """Return the snapshot with the exact ready counts of the unconfirmed queues, from passive declares.

    If a queue gives no answer, and its stored length was larger or unknown, its length becomes unknown. Other queues
    stay as listed. Of a queue that is listed without counts, only the ready messages count.
    """

    def corrected(listed: ListedQueue) -> ListedQueue:
        key = (listed.vhost, listed.name)
        if key not in unconfirmed:
            return listed
        depth, row = depths.get(key), stored.get(key)
        if depth is not None:
            return with_ready(listed, depth.ready)
        if listed.ready is None or listed.unacknowledged is None:
            return listed
        may_have_shrunk = row is not None and (row.length is None or listed.ready + listed.unacknowledged < row.length)
        return listed._replace(ready=None) if may_have_shrunk else listed

    return snapshot._replace(queues=[corrected(listed) for listed in snapshot.queues])
