"""Compare the broker's list with the stored queues: which are new, changed or gone, and what to do about each.

Everything here is pure. ``guard/monitor.py`` fetches the input and writes the result.
"""

from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

from queues.models import Queue, QueueEvent
from queues.rules import last_call, reminders
from queues.rules.brake import brake_limit, groups_to_block
from queues.rules.changes import Changes, Deletable, Event, Message
from queues.rules.messages_due import Timing, with_over_unacked, with_state
from queues.rules.quiet import MessageKind
from queues.rules.rows import (
    FROM_LIST,
    FROM_LIST_FIELDS,
    GONE_FIELDS,
    Observation,
    OwnershipFields,
    Rules,
    StoredPulseUser,
    StoredQueue,
)
from queues.rules.thresholds import (
    DELETING,
    GONE,
    OK,
    UNACKED_MINIMUM,
    WARNED,
    Action,
    BrokerState,
    QueueLoad,
    Thresholds,
    is_fetch_paused,
    is_spared,
    judge,
    relief_bytes,
    resolve,
)
from rabbit.names import FEDERATION_QUEUE, NameKind, QueueName, kind_of_queue, user_of_queue
from rabbit.snapshot import CLASSIC, TYPES_WITHOUT_LENGTH, UNKNOWN_TYPE, ListedQueue, with_type

MISSES_UNTIL_GONE = 2
SHORT_LISTS_UNTIL_BELIEVED = 3

NO_PULSE_USER = StoredPulseUser(0, None, None, removing=True)
"""Stands for a Pulse user without a row: it was removed, so its queues are expected to be gone."""


def compare(observation: Observation, rules: Rules, *, now: datetime, force: bool) -> Changes:
    """Return the changes that follow from this observation.

    ``force`` releases all queues from the brake, and accepts a list that is too short.
    """
    comparison = _Comparison(observation, rules, now, force=force)
    comparison.compare_missing()
    comparison.compare_listed()
    comparison.apply_brake()
    comparison.select_deletable()
    return comparison.changes


class _Comparison:
    """One comparison. ``compare`` calls its public steps in their order here.

    ``removes_nothing``: the list is too short to remove anything.
    """

    def __init__(self, observation: Observation, rules: Rules, now: datetime, *, force: bool) -> None:
        self.observation = observation
        self.rules = rules
        self.earlier_rules = observation.earlier.rules
        self.now = now
        self.stored = observation.stored
        self.force = force
        returned_nodes = frozenset(self._returned_nodes())
        self.recovering = observation.earlier.recovering | returned_nodes
        self.listed = {
            (listed.vhost, listed.name): self._with_known_length(
                listed if listed.type != UNKNOWN_TYPE else self._with_stored_type(listed)
            )
            for listed in observation.snapshot.queues
            if not rules.ignores(listed.vhost, listed.name)
        }
        self.pulse_users: dict[int | None, StoredPulseUser] = {one.id: one for one in observation.pulse_users.values()}
        self.reminded = reminders.due(self.stored.values(), rules.reminder_interval, now)
        self.waiting: Counter[int | None] = Counter()
        unaddressable = [key for key in observation.snapshot.unaddressable if not rules.ignores(*key)]
        self.changes = Changes(listed=len(self.listed), unaddressable=unaddressable, returned_nodes=returned_nodes)

    def _with_stored_type(self, listed: ListedQueue) -> ListedQueue:
        """Return a queue whose row lacks the type with the stored one. A queue that was gone may have another type."""
        row = self.stored.get((listed.vhost, listed.name))
        return listed if row is None or row.state == GONE else with_type(listed, row.type)

    def _returned_nodes(self) -> Iterator[str]:
        """Yield the nodes of quorum queues whose length was unknown, as while their node is down, and is listed now."""
        earlier = self.observation.earlier
        for listed in self.observation.snapshot.queues:
            if listed.type != CLASSIC and listed.length is not None:
                row = self.stored.get((listed.vhost, listed.name))
                if row is not None and row.state != GONE and row.length is None:
                    yield from {listed.node} - earlier.recovering - earlier.recovered

    def _with_known_length(self, listed: ListedQueue) -> ListedQueue:
        """Return a queue with an unknown length, if its leader's node is recovering and it seems to have shrunk."""
        may_be_short = listed.node in self.recovering or (self.recovering and not listed.node)  # it has no leader
        if not may_be_short or listed.type == CLASSIC or listed.length is None:
            return listed
        row = self.stored.get((listed.vhost, listed.name))
        has_shrunk = row is not None and row.state != GONE and (row.length is None or listed.length < row.length)
        return listed._replace(ready=None, unacknowledged=None) if has_shrunk else listed

    def compare_missing(self) -> None:
        """Record the stored queues that the list lacks.

        A queue is gone when two lists in a row lack it, fetched with the same nodes running. A list that is empty, or
        lacks more queues than the brake allows, needs two more lists to confirm it. Queues that Guardian itself
        deleted (in a pass, with a Pulse user or with a registration) do not count as lacking.
        """
        earlier, changes, snapshot = self.observation.earlier, self.changes, self.observation.snapshot
        expected, missing = self._expected()
        unexplained = sum(map(self._is_unexplained, missing))
        comparable = snapshot.nodes_unchanged and snapshot.nodes == earlier.nodes
        short = unexplained > 0 and (not self.listed or unexplained > brake_limit(self.rules.brake, expected))
        changes.short = unexplained if short else 0
        changes.short_lists = (earlier.short_lists + 1 if comparable else 1) if short else 0
        self.removes_nothing = short and changes.short_lists < SHORT_LISTS_UNTIL_BELIEVED and not self.force
        needed = (1 if self.force else SHORT_LISTS_UNTIL_BELIEVED) if short else MISSES_UNTIL_GONE
        for row in missing:
            misses = row.misses + 1 if comparable else int(snapshot.nodes_unchanged)
            if misses >= needed and not self.removes_nothing and _was_sent(row):
                changes.deleted.append(row)
            elif misses >= needed and not self.removes_nothing:
                self._record_gone(row)
                if (row.vhost, row.name) in self.observation.registrations.queues:
                    changes.vanished.append(row)
            elif misses != row.misses:
                changes.missed.append(row._replace(misses=misses, over_unacked_since=None))

    def _expected(self) -> tuple[int, list[StoredQueue]]:
        """Return the number of queues that should be listed, and the missing ones.

        Queues that are no longer guarded are gone. A queue whose vhost or node cannot be listed now is not missing.
        While a node is down, lists may lack quorum queues and streams of any node.
        """
        snapshot = self.observation.snapshot
        unlisted = {*snapshot.unlisted, *self.observation.stopped_vhosts}
        expected = 0
        missing: list[StoredQueue] = []
        for key, row in self.stored.items():
            if row.state == GONE:
                continue
            if key not in self.listed and self.rules.ignores(row.vhost, row.name):
                self._record_gone(row)
                continue
            expected += 1
            if key in self.listed or row.vhost in unlisted:
                continue
            if row.node in snapshot.down or (snapshot.down and row.type != CLASSIC):
                if row.ready is not None and row.state != DELETING:
                    self.changes.missed.append(row._replace(ready=None, unacknowledged=None, over_unacked_since=None))
                continue
            missing.append(row)
        return expected, missing

    def _is_unexplained(self, row: StoredQueue) -> bool:
        """Return whether no deletion, and no removal of a Pulse user or registration, explains a missing queue."""
        if _was_sent(row):
            return False
        with_pulse_user = row.pulse_user_id is not None and self._pulse_user(row.pulse_user_id).removing
        return not with_pulse_user and not self.observation.registrations.was_unregistered(row)

    def _record_gone(self, row: StoredQueue) -> None:
        """Record that a queue is gone. It keeps its last notified state, in case it is declared again."""
        gone = row._replace(**GONE_FIELDS)
        self.changes.gone.append(gone)
        if row.misses == 0:
            self.changes.listed_last.append(gone)
        self.changes.events.append(Event(gone, QueueEvent.Kind.GONE))

    def compare_listed(self) -> None:
        """Judge each listed queue: decide to delete it, or record its state."""
        states, unknown = self._node_states(), BrokerState()
        for key, listed in self.listed.items():
            self._judge(key, listed, states.get(listed.node, unknown))

    def _node_states(self) -> dict[str, BrokerState]:
        held: dict[str, list[int]] = {node: [] for node in self.observation.memory}
        for key, size in self.observation.held.items():
            listed = self.listed.get(key)
            if listed is not None and listed.node in held and self._may_relieve(key, listed):
                held[listed.node].append(size)
        return {
            node: BrokerState(memory.share, relief_bytes(memory, held[node]))
            for node, memory in self.observation.memory.items()
        }

    def _may_relieve(self, key: QueueName, listed: ListedQueue) -> bool:
        """Return whether the policy may delete a queue: over its warning threshold, with no limit of its own."""
        row = self.stored.get(key)
        pulse_user_id, _, registered = self._ownership_of(key)
        if row is not None and (row.unbounded or row.max_length is not None or row.block_reason):
            return False
        if listed.exclusive or registered:
            return False
        has_limit = self._pulse_user(pulse_user_id).max_length is not None
        return not has_limit and listed.length is not None and listed.length > self.rules.policy.thresholds.warn

    def _judge(self, key: QueueName, listed: ListedQueue, broker: BrokerState) -> None:
        ownership = self._ownership_of(key)
        self._check_name(key, ownership)
        if listed.length is None:
            self.changes.unknown += 1
        queue = self._updated_row(key, listed, ownership)
        if queue.attempted_at is not None:
            row = self.stored[key]
            if listed.length == 0 or row.state == GONE or row.type != listed.type:
                self.changes.emptied.append(queue)
        if self._is_deleters(queue, broker):
            self._record_length(self.stored[key], listed)
            return
        thresholds = self._thresholds(queue, self.rules, broker)
        is_paused = is_fetch_paused(queue.returned_at, self.now)
        judged_by = thresholds._replace(max=2 * thresholds.max) if is_paused else thresholds
        queue = with_over_unacked(queue, judged_by, self.now)
        spared = self._is_spared(queue) or (is_paused and not self._was_over(key, judged_by))
        verdict = judge(queue.last_notified_state, listed.length, judged_by, spared=spared)
        if listed.type != CLASSIC and verdict.action in (Action.DELETE, Action.RECOVER):
            self.changes.unconfirmed.append(key)
        if verdict.action is Action.DELETE and thresholds.max < self._limit_without_pressure(queue):
            self.changes.for_memory.append(key)
        if listed.exclusive and listed.length is not None and listed.length > thresholds.max:
            self.changes.long_exclusive.append(key)
        snapshot = self.observation.snapshot
        # The figures of the nodes lack arguments; the list of each minute decides about stored queues.
        may_be_internal = key in snapshot.internal or (snapshot.lagging and key in self.stored)
        for_its_name = not self.removes_nothing and not may_be_internal and self.rules.deletes_for_its_name(queue)
        if queue.block_reason or self.earlier_rules is not None:
            queue = queue._replace(block_reason=self._block_reason(queue, thresholds, broker))
        if verdict.action is not Action.DELETE and not for_its_name:
            self._record_state(queue, verdict.state, thresholds)
        elif queue.block_reason:
            self._record_blocked(Deletable(queue, thresholds, for_its_name))
        else:
            without_copy = is_paused and not for_its_name
            self.changes.deletable.append(Deletable(queue, thresholds, for_its_name, without_copy))

    def _is_deleters(self, queue: StoredQueue, broker: BrokerState) -> bool:
        """Return whether the deleter decides about a queue: an earlier pass decided to delete it.

        A pass takes the decision back for a queue that is never deleted for its length now, for another one of the same
        name, for one that belongs to others now, and for one that the settings of the last pass, or the last broker's,
        would not delete. If the request to delete it was sent, the deleter records the outcome first.
        """
        if queue.state != DELETING or queue.delete_sent_at is not None:
            return queue.state == DELETING
        row = self.stored[queue.vhost, queue.name]
        is_another = (queue.type, queue.auto_delete, queue.ownership) != (row.type, row.auto_delete, row.ownership)
        return not is_another and not is_spared(queue) and not self._was_allowed(queue, broker)

    def _record_length(self, row: StoredQueue, listed: ListedQueue) -> None:
        """Record the length of a queue that is the deleter's, and nothing else."""
        if not row.is_released:
            self.waiting[self._group_of(row)] += 1
        queue = row._replace(ready=listed.ready, unacknowledged=listed.unacknowledged, misses=0)
        if queue != row:
            self.changes.lengths.append(queue)
        if queue.length is not None and queue.length != row.length:
            self.changes.samples.append(queue)

    def _group_of(self, queue: StoredQueue) -> int | None:
        """Return the owner with whose queues the brake blocks a queue, or None."""
        return queue.owner_id if queue.owner_id is not None else self._pulse_user(queue.pulse_user_id).owner_id

    def _pulse_user(self, id_: int | None) -> StoredPulseUser:
        return self.pulse_users.get(id_, NO_PULSE_USER)

    def _thresholds(self, queue: StoredQueue, rules: Rules, broker: BrokerState) -> Thresholds:
        pulse_user = self._pulse_user(queue.pulse_user_id)
        of_user = pulse_user.warn_length, pulse_user.max_length
        load = QueueLoad(queue.length, self.observation.held.get((queue.vhost, queue.name), 0))
        return resolve((queue.warn_length, queue.max_length), of_user, rules.policy(load, broker))

    def _block_reason(self, queue: StoredQueue, thresholds: Thresholds, broker: BrokerState) -> str:
        """Return why this queue must not be deleted until an operator releases it, or an empty text.

        A blocked queue whose length dips below the limit stays blocked until it is below the warning threshold, or
        until its limit is raised above it. A queue of unknown length may turn out to be too long.
        """
        key = (queue.vhost, queue.name)
        if is_spared(queue) or self._is_released(key):
            return ""
        has_length = queue.type not in TYPES_WITHOUT_LENGTH
        is_too_long = has_length and (queue.length is None or queue.length > thresholds.max)
        is_misnamed = self.rules.deletes_for_its_name(queue) and key not in self.observation.snapshot.internal
        if is_too_long or is_misnamed:
            return queue.block_reason or (Queue.BlockReason.SETTINGS if self._was_allowed(queue, broker) else "")
        was_raised = (
            queue.decided_limit is not None
            and thresholds.max > queue.decided_limit
            and queue.decided_for != Queue.DecidedFor.MEMORY
        )
        is_warned = queue.length is not None and queue.length >= thresholds.warn
        return queue.block_reason if is_warned and not was_raised else ""

    def _was_allowed(self, queue: StoredQueue, broker: BrokerState) -> bool:
        """Return whether the settings changed since the last pass, and the earlier ones would not delete this queue."""
        earlier = self.earlier_rules
        if earlier is None:
            return False
        if earlier.ignores(queue.vhost, queue.name):
            return True
        is_too_long = queue.length is not None and queue.length > self._thresholds(queue, earlier, broker).max
        return not is_too_long and not earlier.deletes_for_its_name(queue)

    def _is_released(self, key: QueueName) -> bool:
        return self.force or key in self.observation.released

    def _ownership_of(self, key: QueueName) -> OwnershipFields:
        """Return the Pulse user by the queue's name, the owner by its vhost, and whether it is registered."""
        vhost, name = key
        registrations = self.observation.registrations
        registered, owner_id = key in registrations.queues, registrations.owner_of(key)
        user = user_of_queue(name) if vhost == self.rules.pulse_vhost and not registered else None
        pulse_user = self.observation.pulse_users.get(user) if user is not None else None
        return pulse_user.id if pulse_user is not None else None, owner_id, registered

    def _check_name(self, key: QueueName, ownership: OwnershipFields) -> None:
        """Record a misnamed or unpatterned queue: on the Pulse vhost, and no Pulse user's."""
        pulse_user_id, _, registered = ownership
        if key[0] != self.rules.pulse_vhost or pulse_user_id is not None or registered:
            return
        kind = kind_of_queue(key[1])
        if kind is NameKind.MISNAMED:
            self.changes.misnamed.append(key[1])
        elif kind is NameKind.UNPATTERNED and not key[1].startswith(FEDERATION_QUEUE):
            self.changes.unpatterned += 1

    def _updated_row(self, key: QueueName, listed: ListedQueue, ownership: OwnershipFields) -> StoredQueue:
        """Return the row with the listed figures and the ownership."""
        queue = self.stored.get(key) or StoredQueue(None, *listed)
        found = (*listed, *ownership)
        if queue[FROM_LIST] == found and queue.misses == 0 and queue.state != GONE:
            return queue  # nearly always
        # Judge one that was gone from the last notified state, so that owners learn of any difference.
        state = queue.notified_state if queue.state == GONE else queue.state
        fields: dict[str, Any] = dict(zip(FROM_LIST_FIELDS, found, strict=True))
        updated = queue._replace(**fields, state=state, misses=0)
        if queue.state == GONE:
            self.changes.events.append(Event(updated, QueueEvent.Kind.RETURNED))
        return updated

    def _was_over(self, key: QueueName, thresholds: Thresholds) -> bool:
        """Return whether the list before this one showed the queue over this limit, too."""
        length = self.stored[key].length
        return length is not None and length > thresholds.max

    def _is_spared(self, queue: StoredQueue) -> bool:
        """Return whether a queue must not be deleted for its length now."""
        if is_spared(queue) or self.removes_nothing:
            return True
        since = queue.over_unacked_since
        # With Prometheus figures a deletion verdict only makes the pass fetch the list, so it need not wait.
        return since is not None and self.now - since < UNACKED_MINIMUM and not self.observation.snapshot.lagging

    def apply_brake(self) -> None:
        """Block the groups that exceed the brake (see ``groups_to_block``), and new queues of a blocked group.

        Those that earlier passes decided to delete, and that still wait for the deleter, count with the new ones. Those
        that an operator released do not count.
        """
        blocked = {
            self._group_of(one.queue)
            for one in self.changes.blocked
            if one.queue.block_reason == Queue.BlockReason.BRAKE
        }
        deletable, self.changes.deletable = self.changes.deletable, []
        counted: list[Deletable] = []
        for one in deletable:
            (self.changes.deletable if self._is_released(one.key) else counted).append(one)
        new = {group for one in counted if (group := self._group_of(one.queue)) not in blocked}
        sizes = Counter(group for one in counted if (group := self._group_of(one.queue)) in new)
        # Of groups of one size, those with new deletions come first: no others can be blocked.
        to_block = groups_to_block(sizes + self.waiting, brake_limit(self.rules.brake, len(self.listed)))
        newly_blocked = new.intersection(to_block)
        self.changes.newly_blocked_groups = len(newly_blocked)
        blocked |= newly_blocked
        for one in counted:
            if self._group_of(one.queue) in blocked:
                queue = one.queue._replace(block_reason=Queue.BlockReason.BRAKE)
                self._record_blocked(one._replace(queue=queue))
            else:
                self.changes.deletable.append(one)

    def _record_blocked(self, one: Deletable) -> None:
        """Record a queue whose deletion is blocked, in the state that its length gives, and when that began.

        The warning said that the queue will be deleted, so owners are notified when its deletion is blocked.
        """
        queue, row = self._decided(one), self.stored.get(one.key)
        is_new = row is None or not row.block_reason
        queue = queue._replace(decided_at=self.now) if is_new else queue
        one = one._replace(queue=queue)
        self.changes.blocked.append(one)
        self.changes.newly_blocked += is_new
        state = judge(queue.last_notified_state, queue.length, one.thresholds, spared=True).state
        knew_of_deletion = state == queue.last_notified_state == queue.notified_state == WARNED
        self._record_state(queue, state, one.thresholds, repeat_warning=is_new and knew_of_deletion)

    def select_deletable(self) -> None:
        """Record the decision to delete the deletable queues."""
        deletable, self.changes.deletable = self.changes.deletable, []
        for one in deletable:
            queue = self._decided(one)._replace(
                state=DELETING, decided_at=self.now, delete_sent_at=None, is_released=self._is_released(one.key)
            )
            self.changes.deletable.append(one._replace(queue=queue))
            self.changes.events.append(Event(queue, QueueEvent.Kind.DELETABLE))
            self._record_row(queue)

    def _decided(self, one: Deletable) -> StoredQueue:
        """Return a queue with the reason for which it is to be deleted."""
        if one.for_its_name:
            return one.queue._replace(decided_for=Queue.DecidedFor.NAME, decided_limit=None)
        for_memory = one.key in self.changes.for_memory
        reason = Queue.DecidedFor.MEMORY if for_memory else Queue.DecidedFor.LENGTH
        return one.queue._replace(decided_for=reason, decided_limit=one.thresholds.max)

    def _record_state(
        self, queue: StoredQueue, state: str, thresholds: Thresholds, *, repeat_warning: bool = False
    ) -> None:
        """Record the state of a queue that stays, and the message that is due.

        ``repeat_warning``: if none is due, the last warning is no longer true, and is sent again.
        """
        if queue.length is None:  # unknown: nothing changes, not even a deletion under way
            self._record_row(queue)
            return
        reminds = (queue.vhost, queue.name) in self.reminded
        hold_off = timedelta(minutes=self._pulse_user(queue.pulse_user_id).hold_off_minutes)
        timing = Timing(self.now, self.rules.quiet_seconds, hold_off, reminds)
        after, message = with_state(queue, state, thresholds, timing)
        if message is None and repeat_warning:
            message = Message(after, MessageKind.WARNING, thresholds)
        is_last_call = state == WARNED and self._is_last_call_due(after, thresholds)
        if is_last_call:
            limit, quiet_seconds = self._limit_without_pressure(queue), self.rules.quiet_seconds
            replaced = message.kind if message else MessageKind.NONE
            if replaced is MessageKind.SUMMARY or queue.notified_state != WARNED:
                replaced = MessageKind.WARNING
            after, message = last_call.with_last_call(after, thresholds, limit, self.now, quiet_seconds)
            message = message._replace(instead=replaced)
        if message is not None:
            self.changes.messages.append(message)
        if state != queue.last_notified_state:
            kind = QueueEvent.Kind.RECOVERED if state == OK else QueueEvent.Kind.WARNED
            self.changes.events.append(Event(after, kind))
        if is_last_call:
            self.changes.events.append(Event(after, QueueEvent.Kind.LAST_CALL))
        self._record_row(after)

    def _is_last_call_due(self, queue: StoredQueue, thresholds: Thresholds) -> bool:
        """Return whether the last call about a queue over its warning threshold is due, as far as samples show it."""
        row, length = self.stored.get((queue.vhost, queue.name)), queue.length
        if length is None or not last_call.may_be_due(queue, thresholds, self._limit_without_pressure(queue)):
            return False
        if last_call.is_near(length, thresholds):
            return True
        if row is None or row.id is None or row.length is None or length <= row.length:
            return False
        self.changes.growing.append(row.id)
        return last_call.is_soon(self.observation.samples.get(row.id, ()), length, thresholds.max, self.now)

    def _limit_without_pressure(self, queue: StoredQueue) -> int:
        return self._thresholds(queue, self.rules, BrokerState()).max

    def _record_row(self, queue: StoredQueue) -> None:
        row = self.stored.get((queue.vhost, queue.name))
        if row is None:
            self.changes.new.append(queue)
        elif queue != row:
            only_length = queue == row._replace(ready=queue.ready, unacknowledged=queue.unacknowledged)
            (self.changes.lengths if only_length else self.changes.changed).append(queue)
        if queue.length is not None and (row is None or queue.length != row.length):
            self.changes.samples.append(queue)


def _was_sent(row: StoredQueue) -> bool:
    """Return whether the deleter sent a request to delete a queue, and recorded no outcome."""
    return row.state == DELETING and row.delete_sent_at is not None
