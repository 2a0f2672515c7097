"""Move the messages of a live queue to another queue or exchange, or back to where they died.

A move is a row, which a task carries out in bounded steps. Messages are fetched unacknowledged on one connection and
published on another, with confirms. Then their number is recorded, and they are acknowledged. A kill returns one batch
at most to the queue. Its messages may arrive twice, then with the same header ``x-guardian-move``, and are counted.

The queue is locked during a step, so that the deleter never fetches at the same time. A queue that a pass decided to
delete is the deleter's: the move waits, and continues if the deletion is called off.
"""

import logging
import sys
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from http import HTTPStatus
from typing import Any, NamedTuple
from uuid import UUID, uuid4

from django.db import IntegrityError, transaction
from django.utils import timezone

from accounts import audit
from accounts.models import Owner, PulseUser
from core import broker, locks
from core.refusals import Refusal
from queues.actions.single import Gone, why_not_deleted
from queues.archives import replay
from queues.archives.definitions import quorum_queue
from queues.archives.replay import Room
from queues.guard.destroying import lock_messages
from queues.models import Move, Queue
from queues.moves.routes import Route, route_of
from rabbit.amqp import Session
from rabbit.arguments import QUORUM, SINGLE_ACTIVE_CONSUMER
from rabbit.confirmed import ConfirmedPublisher
from rabbit.errors import BrokerError, BrokerUnavailable, NotOnBroker, Refused
from rabbit.fetching import Bounds, Fetch, Fetched, Undecoded
from rabbit.names import MAX_NAME_BYTES, is_amqp_name, user_of_exchange, user_of_queue
from rabbit.policies import limit_of
from rabbit.snapshot import CLASSIC

logger = logging.getLogger(__name__)

BATCH = 100
"""Messages that are fetched, and published before their confirms are awaited. Also the most that are copied."""

FIRST_BATCH = 20
BATCH_BYTES = 16 * 1024 * 1024
"""The first batch of a step shows the size of messages. The others are at most about so large."""

FETCH_SECONDS = 5.0

MAX_CHANNELS = 1500
"""The channels with messages that stay, one for each batch. The broker allows about 2,000 on a connection."""

HEADER = "x-guardian-move"
"""The header with the key of each message. A consumer can drop a message whose key it has seen."""

NO_ACCESS = "The person who started it may no longer move these messages."

MOVED, COPIED, SENT_BACK = "moved messages", "copied messages", "sent messages back"
STOPPED = "stopped a move"

State = Move.State

_finish = partial(replay.finish, in_flight=0)


class MoveRefused(Refusal):
    """The messages can't be moved."""

    field = "to"


class Destination(NamedTuple):
    """A queue, or an exchange with a routing key for all messages (None: each keeps its own)."""

    queue: str = ""
    exchange: str = ""
    routing_key: str | None = None


class Plan(NamedTuple):
    """What a move would do: of ``ready`` messages send ``total``. ``room`` is in the target."""

    ready: int
    total: int
    room: Room


def plan(queue: Queue, by: Owner, to: Destination, count: int | None = None, *, is_copy: bool = False) -> Plan:
    """Return what moving or copying the first ``count`` messages would do. Raises Refusal if it would be refused."""
    require_source(queue, by)
    require_target(queue, by, to)
    replay.require_not_deleting(queue.vhost, to.queue)
    if is_copy and queue.type != CLASSIC:
        raise MoveRefused(
            "Only messages of classic queues can be copied: copying counts as a delivery of the messages of other "
            "queues, which the broker drops when they were delivered too often.",
            "copy",
        )
    with broker.session(queue.vhost) as session:
        ready = _ready(session, queue)
        total = min(count or ready, ready, BATCH if is_copy else ready)
        room = replay.room(session, queue.vhost, queue.pulse_user, to.queue, to.exchange)
    replay.require_room(room, total)
    if to.queue and room.ready is not None:
        _require_no_drop(queue.vhost, to.queue, room.ready + total)
    return Plan(ready, total, room)


def start(
    queue: Queue,
    by: Owner,
    to: Destination,
    count: int | None = None,
    *,
    is_copy: bool = False,
    uuid: UUID | None = None,
) -> Move:
    """Create a move, or a copy, of the first ``count`` messages; None: of all. The task carries it out.

    ``uuid`` is the move's, so that a form that is sent twice starts one. Raises Refusal as ``plan``.
    """
    if uuid and (started := Move.objects.filter(queue=queue, uuid=uuid).first()):
        return started
    move = Move(
        queue=queue, by=by, to_queue=to.queue, to_exchange=to.exchange, routing_key=to.routing_key, is_copy=is_copy
    )
    name = user_of_queue(to.queue) if to.queue else user_of_exchange(to.exchange)
    receiver = PulseUser.objects.filter(username=name or "").first()
    try:
        with locks.lock(replay.room_lock(receiver), replay.WAIT_SECONDS):
            move.total = plan(queue, by, to, count, is_copy=is_copy).total
            return _save(move, COPIED if is_copy else MOVED, uuid, to=to.queue or to.exchange)
    except locks.LockTaken as error:
        raise MoveRefused("Other messages are about to be sent there. Try again in a minute.") from error


def start_to_origin(
    queue: Queue, by: Owner, groups: list[list[str]] | None, count: int | None, uuid: UUID | None
) -> Move:
    """Create a move of dead letters of these groups back to where they died; None: of all groups."""
    require_source(queue, by)
    move = Move(queue=queue, by=by, to_origin=True, groups=groups)
    with broker.session(queue.vhost) as session:
        ready = _ready(session, queue)
    move.total = min(count or ready, ready)
    return _save(move, SENT_BACK, uuid, to="origin")


def _save(move: Move, action: str, uuid: UUID | None, *, to: str) -> Move:
    move.uuid, move.created = uuid or move.uuid, timezone.now()
    try:
        with transaction.atomic():
            move.save()
            audit.record(move.by, action, [move.queue], to=to, count=move.total)
    except IntegrityError:
        earlier = Move.objects.filter(queue=move.queue, uuid=move.uuid).first()
        if earlier is None:
            raise MoveRefused(
                "Messages of this queue are being moved already. Wait until that ends, or stop it.",
                status=HTTPStatus.CONFLICT,
            ) from None
        return earlier
    return move


def stop(move: Move, by: Owner) -> None:
    if _finish(move, State.STOPPED):
        audit.record(by, STOPPED, [move.queue], sent=move.sent)


def require_source(queue: Queue, by: Owner) -> None:
    """Require that this owner may move messages out of a queue now. Raises Refusal."""
    if not Queue.objects.seen_by(by).filter(pk=queue.pk).exists():
        raise MoveRefused(NO_ACCESS, status=HTTPStatus.FORBIDDEN)
    if not by.is_staff and (queue.registered or queue.pulse_user is None):
        raise MoveRefused(
            "Only operators move messages of a queue that belongs to no Pulse user.", status=HTTPStatus.FORBIDDEN
        )
    if queue.state == Queue.State.GONE:
        raise Gone("The queue is no longer on the broker.")
    if queue.state == Queue.State.DELETING:
        raise MoveRefused(
            "Guardian is about to archive and delete this queue. If it is deleted, bring its messages back from the "
            "archive; if not, try again in a minute.",
            status=HTTPStatus.CONFLICT,
        )
    if why := why_not_deleted(queue):
        raise MoveRefused(why, status=HTTPStatus.CONFLICT)
    if queue.type not in (CLASSIC, QUORUM):
        raise MoveRefused(
            f"Messages of a {queue.type} can't be moved: reading them does not remove them.", status=HTTPStatus.CONFLICT
        )


def may_move(queue: Queue, by: Owner) -> bool:
    """Return whether this owner may move messages out of a queue that they see."""
    try:
        require_source(queue, by)
    except Refusal:
        return False
    return True


def require_target(queue: Queue, by: Owner, to: Destination) -> None:
    """Require that the target belongs to an owner of the queue's Pulse user, who is ``by`` unless an operator acts."""
    if bool(to.queue) == bool(to.exchange):
        raise MoveRefused("Name either a queue or an exchange.")
    if not all(map(is_amqp_name, (to.queue, to.exchange, to.routing_key or ""))):
        raise MoveRefused(f"A name is longer than {MAX_NAME_BYTES} bytes, or not valid UTF-8.")
    if to.queue == queue.name:
        raise MoveRefused("The messages are in this queue already. Choose another one.")
    if queue.pulse_user is None:
        return  # only operators move its messages
    name = user_of_queue(to.queue) if to.queue else user_of_exchange(to.exchange)
    owners = queue.pulse_user.owners.all()
    allowed = PulseUser.objects.filter(owners__in=owners if by.is_staff else [by])
    if name != queue.pulse_user.username and not allowed.filter(username=name or "").exists():
        own = queue.pulse_user.username
        raise MoveRefused(
            f"Choose a queue whose name starts with queue/{own}/, or an exchange that starts with exchange/{own}/, or "
            "one of another Pulse user of the same owner."
        )


def _ready(session: Session, queue: Queue) -> int:
    """Return the number of ready messages. Raises Refusal if there is none."""
    try:
        depth = session.declare_passively(queue.name)
    except NotOnBroker as error:
        raise Gone("The queue is no longer on the broker, or its node is down.") from error
    if depth is None:
        raise BrokerUnavailable("the queue's leader did not answer", never_reached=True)
    if not depth.ready:
        raise MoveRefused("The queue has no ready messages now.", status=HTTPStatus.CONFLICT)
    return depth.ready


def _require_no_drop(vhost: str, name: str, length: int) -> None:
    """Require that the broker would not drop messages of a queue of this length. Other queues reject messages."""
    management = broker.management()
    with suppress(NotOnBroker, Refused):  # a name that is invalid in a URL
        row = management.queue_arguments(vhost, name)
        limit = limit_of(row, management.policies(vhost), management.operator_policies(vhost))
        if limit is not None and limit.drops_oldest and limit.messages is not None and length > limit.messages:
            raise MoveRefused(
                f"The broker keeps at most {limit.messages:,} messages in that queue and drops the oldest. Move fewer "
                "messages, or raise the queue's own limit."
            )


def run_due(seconds: float = replay.STEP_SECONDS) -> int:
    """Carry out the running moves for this time at most, and return the number of messages sent."""
    return replay.run_sendings(Move, _step, _finish, seconds)


def _step(move: Move, until: float) -> None:
    """Send batches until this monotonic time, or the end."""
    move.refresh_from_db()
    if move.state != State.RUNNING or _waits_for_deletion(move):
        return
    vhost, name, type_ = move.queue.vhost, move.queue.name, move.queue.type
    try:
        with (
            lock_messages(vhost, name) as renew_lock,
            broker.session(vhost) as source,
            broker.session(vhost) as target,
        ):
            move.refresh_from_db()  # another process may have carried out a step until now
            if move.in_flight:  # a step was killed
                _count_repeated(move, move.in_flight)
            row = quorum_queue(vhost, name) if type_ == QUORUM else {}
            step = _Step(move, source, ConfirmedPublisher(target, HEADER), route_of(move), row, FIRST_BATCH)
            is_over = False
            try:
                while not is_over and time.monotonic() < until:
                    renew_lock()
                    if _waits_for_deletion(move):
                        break
                    _judge_again(move)
                    is_over = step.send_batch()
            except BrokerError:
                _count_repeated(move, step.in_flight)
                raise
            finally:
                if source.is_connected:
                    step.return_kept()
    except NotOnBroker as error:
        raise MoveRefused("A queue or an exchange of it is no longer on the broker, or its node is down.") from error
    Move.objects.filter(pk=move.pk, state=State.RUNNING).update(in_flight=0, kept=step.kept)
    if is_over:
        _finish(move, State.DONE)


def _count_repeated(move: Move, number: int) -> None:
    """Record that this number of messages, which were sent and returned to the queue, may arrive twice."""
    move.repeated += number
    Move.objects.filter(pk=move.pk).update(in_flight=0, repeated=move.repeated)


def _waits_for_deletion(move: Move) -> bool:
    """Read the source again, and return whether Guardian is about to delete it or a target."""
    move.queue = Queue.objects.select_related("pulse_user").get(pk=move.queue_id)
    names = [move.queue.name, move.to_queue, *(queue for *_, queue in move.groups or [])]
    return replay.is_any_deleting(move.queue.vhost, names)


def _judge_again(move: Move) -> None:
    """Require that the person who started a move still may. Rights may be withdrawn midway. Raises Refusal."""
    by = None if move.by_id is None else Owner.objects.filter(pk=move.by_id, is_active=True).first()
    if by is None:
        raise MoveRefused(NO_ACCESS)
    try:
        require_source(move.queue, by)
        if not move.to_origin:
            require_target(move.queue, by, Destination(move.to_queue, move.to_exchange))
    except MoveRefused as error:
        raise MoveRefused(f"{NO_ACCESS} {error}" if str(error) != NO_ACCESS else NO_ACCESS) from error


@dataclass
class _Step:
    """The batches of one step. ``kept`` messages stay in the queue; their channels are open until the step's end.

    ``_open`` has these channels, and the messages that the broker would drop when they are returned, by position.
    ``row`` has the arguments and the delivery limit of a quorum queue. ``in_flight`` is the number of messages that are
    sent and not acknowledged.
    """

    move: Move
    source: Session
    publisher: ConfirmedPublisher
    route: Route
    row: Mapping[str, Any]
    size: int
    kept: int = 0
    in_flight: int = 0
    _open: list[tuple[Fetch, dict[int, Undecoded]]] = field(default_factory=list)

    def send_batch(self) -> bool:
        """Move the next messages. Return whether the move is over. Raises MoveRefused if some were not accepted."""
        move, queue = self.move, self.move.queue
        left = move.total - move.sent - self.kept
        if left <= 0:
            return True
        fetch = Fetch(
            self.source,
            queue.name,
            queue_type=queue.type,
            is_auto_delete=queue.auto_delete,
            delivery_limit=self.row.get("delivery_limit"),
        )
        taken = self._take(fetch, min(left, self.size))
        if not taken:
            return True
        try:
            routed = {position: message for position, one in taken.items() if (message := self.route(one.decode()))}
            if move.to_origin:
                self._require_room(routed.values())
            numbered = enumerate(routed, move.sent + 1)
            keys = {position: self._key(number, taken[position]) for number, position in numbered}
            if not Move.objects.filter(pk=move.pk, state=State.RUNNING).update(in_flight=len(routed)):  # it was stopped
                self._acknowledge(fetch, taken, [])
                return True
            self.in_flight = len(routed)
            refused = self.publisher.publish({keys[position]: message for position, message in routed.items()})
            confirmed = [position for position in routed if keys[position] not in refused]
            sent = move.sent + len(confirmed)
            Move.objects.filter(pk=move.pk).update(sent=sent, in_flight=0 if move.is_copy else len(confirmed))
        except Exception:
            self._acknowledge(fetch, taken, [])  # the end of the step returns them
            raise
        move.sent = sent
        self._acknowledge(fetch, taken, [] if move.is_copy else confirmed)
        self.in_flight = 0
        if refused:
            number = len(refused)
            why = next(iter(refused.values()))
            raise MoveRefused(f"{number:,} message{'s were' if number > 1 else ' was'} not taken: {why}.")
        self.kept += len(taken) - len(routed)
        return move.is_copy

    def _require_room(self, messages: Collection[Fetched]) -> None:
        """Require that no queue that gets messages straight would be over its deletion limit. Raises Refusal."""
        queue = self.move.queue
        straight = Counter(message.routing_key for message in messages if not message.exchange)
        for name, number in straight.items():
            replay.require_room(replay.room(self.source, queue.vhost, queue.pulse_user, name), number)

    def _take(self, fetch: Fetch, most: int) -> dict[int, Undecoded]:
        """Return the next messages by their position on the channel, the first is 1. None: the queue is empty."""
        depth = fetch.declare_passively()
        if depth is None:
            raise BrokerUnavailable("the queue's leader did not answer", never_reached=True)
        if depth.consumers and (self.row.get("arguments") or {}).get(SINGLE_ACTIVE_CONSUMER):
            raise MoveRefused("A single active consumer gets all messages of this queue. Stop it, then try again.")
        if self.move.is_copy:
            batches = fetch.batches(min(depth.ready, self.move.total), Bounds(BATCH, BATCH_BYTES, FETCH_SECONDS))
        else:
            batches = fetch.batches(min(depth.ready, most), Bounds(most, sys.maxsize, FETCH_SECONDS), most)
        taken = dict(enumerate((message for batch in batches for message in batch), 1))
        if taken:
            mean = sum(message.size for message in taken.values()) // len(taken)
            self.size = max(1, min(BATCH, BATCH_BYTES // max(1, mean)))
        else:
            again = fetch.declare_passively()
            fetch.close()
            if again is None or again.ready:
                raise BrokerUnavailable("the queue has messages, but sends none")
        return taken

    def _key(self, number: int, message: Undecoded) -> str:
        """Return the key of a message. If it is sent again, it has the same key, unless its number was recorded."""
        return f"{self.move.uuid.hex}/{number}/{blake2b(message.body, digest_size=6).hexdigest()}"

    def _acknowledge(self, fetch: Fetch, taken: dict[int, Undecoded], confirmed: Sequence[int]) -> None:
        """Acknowledge the confirmed messages. The others are kept until the end of the step, in their places."""
        if confirmed:
            fetch.acknowledge(confirmed)
        if len(confirmed) == len(taken):
            return
        if len(self._open) == MAX_CHANNELS:
            raise MoveRefused("Too many messages stay in the queue before the next one to send. Move them first.")
        left = taken.keys() - set(confirmed)
        self._open.append(
            (fetch, {position: taken[position] for position in left if fetch.is_exhausted(taken[position])})
        )

    def return_kept(self) -> None:
        """Return all messages that stay to their places. Those that the broker would drop go to the queue's end."""
        with ExitStack() as sessions:
            for fetch, exhausted in self._open:
                done: list[int] = []
                if fetch.requeue_counts and exhausted:
                    if not self.publisher.is_connected:
                        session = sessions.enter_context(broker.session(self.move.queue.vhost))
                        self.publisher = ConfirmedPublisher(session, HEADER)
                    keys = {position: uuid4().hex for position in sorted(exhausted)}  # consumers drop those they know
                    last = {key: replay.sanitized(exhausted[position].decode()) for position, key in keys.items()}
                    refused = self.publisher.publish(last, "", self.move.queue.name)
                    done = [position for position, key in keys.items() if key not in refused]
                if done:
                    fetch.acknowledge(done)
                if len(done) < fetch.fetched:
                    fetch.requeue()
        self._open.clear()
