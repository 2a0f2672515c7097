"""One look at the broker against what is known: what is new, changed, gone, and what follows for each queue.

Everything here is pure. ``monitor.py`` fetches what goes in, and writes down what comes out.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from operator import itemgetter
from types import MappingProxyType
from typing import NamedTuple

from queues import quiet
from queues.models import QueueEvent
from queues.quiet import Quiet, Say
from queues.thresholds import (
    DELETING,
    GONE,
    NO_OWN,
    OK,
    UNACKED_MINIMUM,
    Action,
    BrokerState,
    Policy,
    Thresholds,
    brake_limit,
    judge,
    long_length,
    over_unacked_since,
    resolve,
)
from rabbit.directly import Depth
from rabbit.names import Kind, kind_of_queue, user_of_queue
from rabbit.snapshot import CLASSIC, QueueSeen, Snapshot

LISTS_TO_BE_GONE = 2
SHORT_LISTS_TO_BELIEVE = 3

QueueName = tuple[str, str]

name_of: Callable[[QueueSeen], QueueName] = itemgetter(0, 1)
vhost_of: Callable[[QueueSeen], str] = itemgetter(0)


class Whose(NamedTuple):
    """Whose a queue is: the owners' of a Pulse user, by its name; an owner's, by its vhost; or nobody's."""

    pulse_user_id: int | None = None
    owner_id: int | None = None


class Known(NamedTuple):
    """A queue's row, as far as a pass reads and writes it. The fields are those of ``queues.models.Queue``."""

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
    pulse_user_id: int | None
    owner_id: int | None
    registered: bool
    state: str
    misses: int
    delete_sent_at: datetime | None
    said: str
    quiet_until: datetime | None
    recovery_said: bool
    folded: int
    over_unacked_since: datetime | None
    unbounded: bool
    warn_length: int | None
    max_length: int | None

    @property
    def length(self) -> int | None:
        """Ready plus unacknowledged messages; None where either is unknown."""
        if self.ready is None or self.unacknowledged is None:
            return None
        return self.ready + self.unacknowledged

    @property
    def stood(self) -> str:
        """Where it stood as far as people know: a queue about to be deleted is where the last message put it."""
        return self.said if self.state == DELETING else self.state

    @property
    def whose(self) -> Whose:
        """Whose it is."""
        return Whose(self.pulse_user_id, self.owner_id)

    @property
    def quiet(self) -> Quiet:
        """What is remembered of its messages."""
        return Quiet(self.said, self.quiet_until, self.recovery_said, self.folded)

    def with_quiet(self, after: Quiet) -> "Known":
        """Return it with this remembered of its messages."""
        return self._replace(
            said=after.said, quiet_until=after.until, recovery_said=after.recovery_said, folded=after.folded
        )


CALM = (OK, 0, None, OK, None)
"""``state`` to ``quiet_until`` of a queue about which nothing is open."""

Belongs = tuple[int | None, int | None, bool]
"""``pulse_user_id``, ``owner_id`` and ``registered``."""


class PulseAccount(NamedTuple):
    """A Pulse user's row, as far as a pass needs it; the lengths are its queues' thresholds, in messages.

    ``removing``: it is being removed, and its queues with it.
    """

    id: int
    warn_length: int | None
    max_length: int | None
    removing: bool = False


@dataclass(frozen=True)
class Agents:
    """What agents registered: the owners, by their ids, of these queues, and of all queues in the agents' vhosts.

    ``leaving`` are queues that Guardian itself is about to remove, since no registration stands for them.
    """

    queues: Mapping[QueueName, int] = field(default_factory=dict)
    vhosts: Mapping[str, int] = field(default_factory=dict)
    leaving: Collection[QueueName] = frozenset()

    def owner_of(self, queue: QueueName) -> int | None:
        """Return whose agents have this queue, by its registration or its vhost; None: no agents do."""
        return self.queues.get(queue, self.vhosts.get(queue[0]))

    def let_go(self, queue: Known) -> bool:
        """Return whether it is no wonder that this queue is gone: no registration stands for it any more."""
        name = (queue.vhost, queue.name)
        return name in self.leaving or (queue.registered and name not in self.queues)


@dataclass(frozen=True)
class Rules:
    """The settings that a comparison goes by. ``vhosts`` are the guarded ones; None: all."""

    policy: Policy
    pulse_vhost: str
    vhosts: frozenset[str] | None
    ignored: re.Pattern[str] | None
    namespace_policy: str
    brake: int
    quiet_seconds: int

    def leaves_alone(self, vhost: str, name: str) -> bool:
        """Return whether Guardian leaves this queue alone entirely."""
        if self.vhosts is not None and vhost not in self.vhosts:
            return True
        return self.ignored is not None and self.ignored.search(name) is not None

    def guarded(self, queues: Sequence[QueueSeen]) -> Sequence[QueueSeen]:
        """Return those that Guardian doesn't leave alone, nearly always at a glance."""
        if self.ignored is None and (self.vhosts is None or self.vhosts.issuperset(map(vhost_of, queues))):
            return queues
        return [seen for seen in queues if not self.leaves_alone(seen.vhost, seen.name)]

    def deletes_for_its_name(self, queue: Known) -> bool:
        """Return whether the namespace policy has this queue deleted, whatever its length."""
        if self.namespace_policy == "report" or queue.vhost != self.pulse_vhost:
            return False
        if queue.exclusive or queue.registered or queue.unbounded:
            return False
        kind = kind_of_queue(queue.name)
        if self.namespace_policy == "delete-unpatterned":
            return kind in (Kind.MISNAMED, Kind.UNPATTERNED)
        return self.namespace_policy == "delete-misnamed" and kind is Kind.MISNAMED


NO_AGENTS = Agents()


class Earlier(NamedTuple):
    """What was remembered of the last complete list: the running nodes, and how many lists in a row were far short."""

    nodes: frozenset[str]
    short_lists: int


class Event(NamedTuple):
    """Something that happened to a queue, to be written down."""

    queue: Known
    kind: str


class Message(NamedTuple):
    """Something to be told about a queue."""

    queue: Known
    say: Say
    thresholds: Thresholds
    folded: int = 0


class Condemned(NamedTuple):
    """A queue that is to go, unless a second look says otherwise. ``for_its_name``: whatever its length."""

    queue: Known
    thresholds: Thresholds
    for_its_name: bool

    @property
    def key(self) -> QueueName:
        """Its vhost and name."""
        return (self.queue.vhost, self.queue.name)


@dataclass
class Changes:
    """What follows from one look. ``lengths`` are queues of which only the length changed, ``changed`` all others.

    ``vanished`` are those of the gone ones that are registered, ``listed_last`` those that the last list still had;
    ``returned`` are registered ones that were gone.
    ``short`` is how many known queues the list lacks for no known reason, where that is too many. ``kept`` are the
    queues that the brake keeps.
    ``unconfirmed`` are the queues that would be deleted, or reported as back to normal, by a length that lags.
    """

    seen: int = 0
    new: list[Known] = field(default_factory=list)
    changed: list[Known] = field(default_factory=list)
    lengths: list[Known] = field(default_factory=list)
    missed: list[Known] = field(default_factory=list)
    gone: list[Known] = field(default_factory=list)
    vanished: list[Known] = field(default_factory=list)
    listed_last: list[Known] = field(default_factory=list)
    returned: list[Known] = field(default_factory=list)
    deleted: list[Known] = field(default_factory=list)
    samples: list[Known] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    condemned: list[Condemned] = field(default_factory=list)
    unknown: int = 0
    misnamed: list[str] = field(default_factory=list)
    unpatterned: int = 0
    short: int = 0
    short_lists: int = 0
    kept: list[QueueName] = field(default_factory=list)
    unconfirmed: list[QueueName] = field(default_factory=list)

    @property
    def braked(self) -> int:
        """How many queues the brake keeps."""
        return len(self.kept)

    def leave_out(
        self,
        gone: Collection[int | None],
        removed: Collection[int | None],
        departed: Collection[int | None] = frozenset(),
    ) -> None:
        """Leave out what people took in hand since the list was taken: the queues, accounts and owners of these ids.

        Of ``gone`` queues nothing is written; ``removed`` accounts and ``departed`` owners have none any more.
        """

        def now(queue: Known) -> Known:
            if queue.pulse_user_id in removed:
                queue = queue._replace(pulse_user_id=None)
            return queue._replace(owner_id=None) if queue.owner_id in departed else queue

        written = (self.new, self.changed, self.lengths, self.missed, self.gone, self.samples)
        for queues in (*written, self.vanished, self.listed_last, self.returned):
            queues[:] = [now(queue) for queue in queues if queue.id not in gone]
        self.events = [one._replace(queue=now(one.queue)) for one in self.events if one.queue.id not in gone]
        self.messages = [one._replace(queue=now(one.queue)) for one in self.messages if one.queue.id not in gone]
        self.condemned = [one._replace(queue=now(one.queue)) for one in self.condemned if one.queue.id not in gone]


def from_seen(seen: QueueSeen) -> Known:
    """Return the row of a queue that is seen for the first time."""
    return Known(
        None, *seen, pulse_user_id=None, owner_id=None, registered=False, state=OK, misses=0,
        delete_sent_at=None, said=OK, quiet_until=None, recovery_said=False, folded=0, over_unacked_since=None,
        unbounded=False, warn_length=None, max_length=None,
    )  # fmt: skip


def confirmed(
    snapshot: Snapshot,
    unconfirmed: Collection[QueueName],
    depths: Mapping[QueueName, Depth],
    known: Mapping[QueueName, Known],
) -> Snapshot:
    """Return the snapshot with the exact ready counts of these queues, as passive declares gave them.

    Without an answer, the length of a queue that seems to have shrunk is unknown, and others stay as listed.
    """

    def corrected(seen: QueueSeen) -> QueueSeen:
        key = name_of(seen)
        if key not in unconfirmed or seen.ready is None or seen.unacknowledged is None:
            return seen
        depth, row = depths.get(key), known.get(key)
        if depth is not None:
            # What became ready since the last tick may have been unacknowledged: it must not count twice.
            requeued = max(0, depth.ready - seen.ready)
            return seen._replace(ready=depth.ready, unacknowledged=max(0, seen.unacknowledged - requeued))
        has_shrunk = row is not None and row.length is not None and seen.ready + seen.unacknowledged < row.length
        return seen._replace(ready=None) if has_shrunk else seen

    return snapshot._replace(queues=[corrected(seen) for seen in snapshot.queues])


def undisturbed(
    known: Mapping[QueueName, Known], accounts: Mapping[str, PulseAccount], agents: Agents, rules: Rules
) -> dict[QueueSeen, bool]:
    """Return the known queues that need no look where a list shows them just so, as it would show them.

    That is nearly all of them in nearly every pass, and can be told while the broker works at the list: nothing is open
    about them, they are below their thresholds, and whose they are is written down. With each, whether its name may
    follow no pattern: that is counted all the same.
    """
    if rules.namespace_policy != "report":
        return {}  # that goes by what the list is like, too
    least = min(rules.policy.thresholds)
    lowest = Thresholds(least, least)  # that the policy has for any queue, whatever the broker is like
    limits = _limits(accounts)
    return {
        QueueSeen._make(row[1:10]): _may_be_stray(key, whose, rules)
        for key, row in known.items()
        if row[13:18] == CALM
        and (length := row.length) is not None
        and row[10:13] == (whose := _whose(key, accounts, agents, rules))
        and length < min(resolve((row.warn_length, row.max_length), limits.get(whose[0], NO_OWN), lowest))
    }


def compare(
    snapshot: Snapshot,
    known: Mapping[QueueName, Known],
    accounts: Mapping[str, PulseAccount],
    rules: Rules,
    earlier: Earlier,
    *,
    memory: float,
    now: datetime,
    force: bool,
    stopped_vhosts: frozenset[str] = frozenset(),
    agents: Agents = NO_AGENTS,
    let_go: Collection[QueueName] = frozenset(),
    as_before: Mapping[QueueSeen, bool] = MappingProxyType({}),
) -> Changes:
    """Return what follows from this snapshot.

    ``known`` has the rows of all queues that aren't gone, by (vhost, name), and of gone ones that are back; ``agents``
    is what was registered when the list was there already; ``memory`` is the use of the fullest node as a fraction of
    its watermark; ``stopped_vhosts`` don't run, so that nothing is missing from them. The brake does not count the
    queues that an operator ``let_go``, or those that were condemned before. With ``force`` neither the brake nor a list
    that is far too short holds anything back. ``as_before`` are the ``undisturbed`` ones of these rows; without them it
    comes to the same, and takes longer.
    """
    changes = Changes()
    guarded = rules.guarded(snapshot.queues)
    present = dict(zip(map(name_of, guarded), guarded, strict=True))
    changes.seen = len(present)
    limits = _limits(accounts)
    staying = {account.id for account in accounts.values() if not account.removing}
    held = _absent(changes, present, known, staying, snapshot, rules, earlier, stopped_vhosts, agents, force)

    lengths = [seen.length for seen in present.values()] if rules.policy.needs_memory else []
    broker = BrokerState(memory, long_length([length for length in lengths if length is not None]))
    judges_names = rules.namespace_policy != "report" and not held
    for key, seen in present.items():
        may_be_stray = as_before.get(seen)
        if may_be_stray is not None:
            if may_be_stray:
                _note_kind(changes, seen.name)
            continue
        row = known.get(key)
        length = seen.length
        if length is None:
            changes.unknown += 1
        whose = _whose(key, accounts, agents, rules)
        if _may_be_stray(key, whose, rules):
            _note_kind(changes, seen.name)
        own = (row.warn_length, row.max_length) if row is not None else NO_OWN
        thresholds = resolve(own, limits.get(whose[0], NO_OWN), rules.policy(length, broker))
        before = row if row is not None else from_seen(seen)
        if before.state == GONE:
            # It is judged from where the last message put it, so that the message stays true.
            before = before._replace(state=before.said)
            changes.events.append(Event(before, QueueEvent.Kind.RETURNED))
            if key in agents.queues:
                changes.returned.append(before)
        after = _brought_up_to_date(before, seen, whose)
        lags = seen.type != CLASSIC
        if lags or after.over_unacked_since is not None:
            after = _with_over_unacked(after, thresholds, now)
        spared = after.unbounded or after.exclusive or after.registered or held
        # Figures of Prometheus only have the list fetched, which decides.
        waits = after.over_unacked_since is not None and now - after.over_unacked_since < UNACKED_MINIMUM
        spared = spared or (waits and not snapshot.lagging)
        verdict = judge(after.stood, length, thresholds, spared=spared)
        if lags and verdict.action in (Action.DELETE, Action.RECOVER):
            changes.unconfirmed.append(key)
        for_its_name = judges_names and rules.deletes_for_its_name(after)
        if verdict.action is Action.DELETE or for_its_name:
            changes.condemned.append(Condemned(after, thresholds, for_its_name))
        else:
            _settle(changes, row, after, verdict.state, thresholds, rules, now)

    limit = brake_limit(rules.brake, len(present))
    asked_for = [one for one in changes.condemned if one.key not in let_go]
    if len(asked_for) > limit and not force:
        kept = [one for one in asked_for if one.queue.state != DELETING]
        changes.kept = [one.key for one in kept]
        for queue, thresholds, _ in kept:
            verdict = judge(queue.stood, queue.length, thresholds, spared=True)
            _settle(changes, known.get((queue.vhost, queue.name)), queue, verdict.state, thresholds, rules, now)
        held_back = set(changes.kept)
        changes.condemned = [one for one in changes.condemned if one.key not in held_back]
    for number, condemned in enumerate(changes.condemned):
        row = known.get(condemned.key)
        queue = condemned.queue._replace(state=DELETING)
        changes.condemned[number] = condemned._replace(queue=queue)
        if row is None or row.state != DELETING:
            changes.events.append(Event(queue, QueueEvent.Kind.CONDEMNED))
        _keep(changes, row, queue)
    return changes


def settled(queue: Known, thresholds: Thresholds, rules: Rules, now: datetime) -> tuple[Known, Message | None]:
    """Return where a queue stands that was condemned and stays, and what is to be said of it."""
    state = judge(queue.stood, queue.length, thresholds, spared=True).state
    return _stays(queue, state, thresholds, rules, now)


def _stays(
    queue: Known, state: str, thresholds: Thresholds, rules: Rules, now: datetime
) -> tuple[Known, Message | None]:
    """Return a queue that stays, in its new state, and what is to be said of it."""
    stood = queue.stood
    after = queue
    if state != queue.state or queue.delete_sent_at is not None:
        after = queue._replace(state=state, delete_sent_at=None)
    if state == stood and not quiet.is_over(queue.quiet_until, now):
        return after, None
    remembered, due = quiet.say(queue.quiet, state, changed=state != stood, now=now, quiet_seconds=rules.quiet_seconds)
    after = after.with_quiet(remembered)
    if due is Say.NOTHING:
        return after, None
    return after, Message(after, due, thresholds, queue.folded + (state != stood) if due is Say.SUMMARY else 0)


def _settle(
    changes: Changes, row: Known | None, queue: Known, state: str, thresholds: Thresholds, rules: Rules, now: datetime
) -> None:
    """Note the state of a queue that stays, and what is to be said of it."""
    if queue.length is None:  # nothing is known, so nothing changes, a deletion under way included
        _keep(changes, row, queue)
        return
    after, message = _stays(queue, state, thresholds, rules, now)
    if message is not None:
        changes.messages.append(message)
    if state != queue.stood:
        changes.events.append(Event(after, QueueEvent.Kind.RECOVERED if state == OK else QueueEvent.Kind.WARNED))
    _keep(changes, row, after)


def _keep(changes: Changes, row: Known | None, queue: Known) -> None:
    """Note what has to be written of a queue."""
    if row is None:
        changes.new.append(queue)
    elif queue is not row and queue != row:
        only_length = queue[:8] == row[:8] and queue[10:] == row[10:]
        (changes.lengths if only_length else changes.changed).append(queue)
    if queue.length is not None and (row is None or row.state == GONE or queue.length != row.length):
        changes.samples.append(queue)


def _limits(accounts: Mapping[str, PulseAccount]) -> dict[int | None, tuple[int | None, int | None]]:
    """Return the thresholds of the Pulse users' queues, by the ids of these."""
    return {account.id: (account.warn_length, account.max_length) for account in accounts.values()}


def _whose(key: QueueName, accounts: Mapping[str, PulseAccount], agents: Agents, rules: Rules) -> Belongs:
    """Return whom a queue belongs to by its name or its vhost."""
    vhost, name = key
    pulse_user_id = owner_id = None
    registered = False
    if agents.vhosts or agents.queues:
        registered, owner_id = key in agents.queues, agents.owner_of(key)
    if vhost == rules.pulse_vhost and not registered:
        user = user_of_queue(name)
        account = accounts.get(user) if user is not None else None
        if account is not None:
            pulse_user_id = account.id
    return pulse_user_id, owner_id, registered


def _may_be_stray(key: QueueName, whose: Belongs, rules: Rules) -> bool:
    """Return whether a queue's name may follow no pattern: it is on the Pulse vhost, and no Pulse user's."""
    pulse_user_id, _, registered = whose
    return key[0] == rules.pulse_vhost and pulse_user_id is None and not registered


def _note_kind(changes: Changes, name: str) -> None:
    """Note a name that follows no pattern."""
    kind = kind_of_queue(name)
    if kind is Kind.MISNAMED:
        changes.misnamed.append(name)
    elif kind is Kind.UNPATTERNED:
        changes.unpatterned += 1


def _brought_up_to_date(queue: Known, seen: QueueSeen, whose: Belongs) -> Known:
    """Return the queue with what was seen of it, and with whom it belongs to."""
    if queue[1:13] == (*seen, *whose) and queue.misses == 0:
        return queue  # a copy would cost as much as comparing them
    return Known._make((queue.id, *seen, *whose, queue.state, 0, *queue[15:]))


def _with_over_unacked(queue: Known, thresholds: Thresholds, now: datetime) -> Known:
    """Return the queue with the time since when it is over its limit only with its unacknowledged messages."""
    since = None
    if queue.type != CLASSIC and queue.ready is not None and queue.length is not None:
        since = over_unacked_since(queue.over_unacked_since, queue.ready, queue.length, thresholds.max, now)
    return queue if since == queue.over_unacked_since else queue._replace(over_unacked_since=since)


def _absent(
    changes: Changes,
    present: Mapping[QueueName, QueueSeen],
    known: Mapping[QueueName, Known],
    staying: Collection[int],
    snapshot: Snapshot,
    rules: Rules,
    earlier: Earlier,
    stopped_vhosts: frozenset[str],
    agents: Agents,
    force: bool,
) -> bool:
    """Note which known queues the list lacks, and return whether it is so short that nothing may be removed by it.

    A queue is gone when two lists in a row lack it that were taken with the same nodes running. A list that lacks more
    than the brake allows, or has nothing left at all, has to be confirmed by two more. What Guardian deletes itself is
    not counted: by a decision of its own, or with an account that isn't among those that stay, or with a registration.
    """
    missing: list[Known] = []
    deleted: list[Known] = []
    unexplained = 0
    there = 0
    for key, row in known.items():
        if row.state == GONE:
            continue
        if key in present:
            there += 1
            continue
        if rules.leaves_alone(row.vhost, row.name):
            _let_go(changes, row)  # the settings changed: it is no longer looked at
            continue
        there += 1
        elsewhere = row.vhost in snapshot.unlisted or row.vhost in stopped_vhosts
        if elsewhere or row.node in snapshot.down:
            continue
        if row.state == DELETING and row.delete_sent_at is not None:
            deleted.append(row)
        else:
            missing.append(row)
            with_account = row.pulse_user_id is not None and row.pulse_user_id not in staying
            unexplained += not with_account and not agents.let_go(row)
    comparable = snapshot.steady and snapshot.nodes == earlier.nodes
    short = unexplained > 0 and (not present or unexplained > brake_limit(rules.brake, there))
    changes.short = unexplained if short else 0
    changes.short_lists = (earlier.short_lists + 1 if comparable else 1) if short else 0
    held = short and changes.short_lists < SHORT_LISTS_TO_BELIEVE and not force
    if comparable and not held:
        changes.deleted = deleted
    needed = (1 if force else SHORT_LISTS_TO_BELIEVE) if short else LISTS_TO_BE_GONE
    for row in missing:
        misses = row.misses + 1 if comparable else int(snapshot.steady)
        if misses >= needed and not held:
            _let_go(changes, row)
            if (row.vhost, row.name) in agents.queues:
                changes.vanished.append(row)
        elif misses != row.misses:
            changes.missed.append(row._replace(misses=misses))
    return held


def _let_go(changes: Changes, row: Known) -> None:
    """Note that a queue is gone. What was last said of it is remembered, in case it comes back."""
    gone = row._replace(
        state=GONE, misses=0, ready=None, unacknowledged=None, delete_sent_at=None, over_unacked_since=None
    )
    changes.gone.append(gone)
    if row.misses == 0:
        changes.listed_last.append(gone)
    changes.events.append(Event(gone, QueueEvent.Kind.GONE))
