"""Publish an archive's messages again, to a queue or an exchange that its Pulse user may write to.

A replay is a row, which a task carries out in bounded steps. Before a batch is sent, its size and the number of
confirmed messages before it are stored, and at the end of a step the number of all. What is confirmed and recorded is
never sent again. A batch in flight at a crash is sent again: its messages may arrive twice, have the same
``x-guardian-replay`` header, and are counted.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from django.core.exceptions import ObjectDoesNotExist
from django.db import transaction
from django.db.models import Q, QuerySet
from django.utils import timezone

from accounts import audit
from accounts.models import Owner, PulseUser
from core import broker, locks
from core.refusals import Refusal
from queues.archives import declaring, reading
from queues.models import Archive, Move, Queue, QueueEvent, Replay
from queues.rules import thresholds
from rabbit.amqp import NODE_DOWN, DeclareOk, Session
from rabbit.confirmed import ConfirmedPublisher
from rabbit.errors import BrokerError, BrokerUnavailable, NotOnBroker
from rabbit.fetching import Fetched
from rabbit.names import MAX_NAME_BYTES, is_amqp_name, user_of_exchange, user_of_queue

logger = logging.getLogger(__name__)

BATCH = 100
"""Messages that are sent before their confirms are awaited."""

STEP_SECONDS = 20.0

ORIGINAL_HEADER = "x-guardian-original"
"""Headers and properties that are removed from a replayed message: they could route it elsewhere or make it expire."""

ROUTING_HEADERS = ("CC", "BCC")
MOVED_PROPERTIES = ("user_id", "expiration")

WAIT_SECONDS = 3.0
"""How long a replay waits to begin while another one to the same Pulse user's queues begins."""

NO_ACCESS = "The person who started it can no longer see the archive."

REPLAYED, RESTORED = "replayed", "restored"
STOPPED = "stopped a replay"

State = Replay.State


class ReplayRefused(Refusal):
    """The replay can't begin."""

    field = "to"


class Room(NamedTuple):
    """The ready messages, the consumers and the deletion limit of a replay's target queue.

    They are None if the target is an exchange, the queue's leader did not answer, or no limit is known. ``coming`` are
    the messages that other replays and moves are sending to it. ``exists``: the broker has the queue or exchange.
    """

    exists: bool = True
    ready: int | None = None
    consumers: int | None = None
    limit: int | None = None
    coming: int = 0

    @property
    def fits(self) -> int | None:
        """The number of messages with which the queue is at its limit, or None if it is not known."""
        return None if self.ready is None or self.limit is None else max(0, self.limit - self.ready - self.coming)


def start(
    archive: Archive,
    by: Owner,
    *,
    queue: str = "",
    exchange: str = "",
    first: int = 1,
    last: int | None = None,
    rate: int | None = None,
) -> Replay:
    """Create a replay of the messages from ``first`` to ``last``. The task carries it out.

    ``rate`` is the most messages a second. ReplayRefused also says that the target would be over its deletion limit
    again, or that the range is invalid.
    """
    replay = planned(archive, queue, exchange, first, last)
    replay.rate = rate
    with beginning(archive) as session:
        require_room(room(session, archive.vhost, archive.pulse_user, queue, exchange), replay.total)
        save(replay, by)
    return replay


@contextmanager
def beginning(archive: Archive) -> Iterator[Session]:
    """Let no other replay to queues of this Pulse user begin meanwhile, and yield a session of the broker."""
    try:
        with locks.lock(room_lock(archive.pulse_user), WAIT_SECONDS), broker.session(archive.vhost) as session:
            yield session
    except locks.LockTaken as error:
        text = "Another replay is beginning. Try again in a minute."
        raise ReplayRefused(text, status=HTTPStatus.SERVICE_UNAVAILABLE) from error


def save(replay: Replay, by: Owner) -> None:
    """Save a planned replay, so that the task carries it out, and record who started it."""
    replay.by, replay.created = by, timezone.now()
    archive, to = replay.archive, replay.to_queue or replay.to_exchange
    with transaction.atomic():
        replay.save()
        action = RESTORED if replay.is_declaring else REPLAYED
        audit.record(by, action, [archive], to=to, first=replay.first, last=replay.last)
        if replay.restore is not None and archive.queue is not None:
            figures = {"length": replay.total, "to": "" if to == archive.queue_name else to}
            kind, at = QueueEvent.Kind.RESTORED, replay.created
            QueueEvent.objects.create(
                queue=archive.queue, vhost=archive.vhost, queue_name=archive.queue_name, kind=kind, at=at, by=by,
                details=figures,
            )  # fmt: skip


def stop(replay: Replay, by: Owner) -> None:
    if finish(replay, State.STOPPED):
        audit.record(by, STOPPED, [replay.archive], sent=replay.sent)


def run_due(seconds: float = STEP_SECONDS) -> int:
    """Carry out the running replays for this time at most, and return the number of messages sent."""
    return run_sendings(Replay, _step, finish, seconds)


S = TypeVar("S", Replay, Move)


def run_sendings(
    model: type[S], step: Callable[[S, float], None], finish: Callable[[S, Replay.State, str], bool], seconds: float
) -> int:
    """Carry out steps of the running replays or moves, and return the number of messages sent."""
    sent = 0
    until = time.monotonic() + seconds
    running = list(model._default_manager.filter(state=State.RUNNING).order_by("?"))  # a slow one keeps none waiting
    if running and is_blocked():
        return 0
    for one in running:
        if time.monotonic() >= until:
            break
        before = one.sent
        try:
            step(one, until)
        except (locks.LockTaken, ObjectDoesNotExist):  # its archive may have expired, or its queue's row been pruned
            continue
        except BrokerUnavailable as error:
            logger.warning("The %s %s waits for the broker: %s", model._meta.verbose_name, one.uuid, error)
        except (Refusal, BrokerError) as error:
            finish(one, State.FAILED, str(error))
        sent += one.sent - before
    return sent


def sanitized(message: Fetched, moved_headers: Collection[str] = ROUTING_HEADERS) -> Fetched:
    """Return a message without what would send it elsewhere, make it expire, or have the broker refuse it.

    ``moved_headers`` are removed and stored in ``ORIGINAL_HEADER``, with what an earlier call stored there.
    """
    headers, properties = dict(message.headers), dict(message.properties)
    original = {name: headers.pop(name) for name in moved_headers if name in headers}
    original |= {name: properties.pop(name) for name in MOVED_PROPERTIES if name in properties}
    if original:
        earlier = headers.get(ORIGINAL_HEADER)
        headers[ORIGINAL_HEADER] = {**earlier, **original} if isinstance(earlier, dict) else original
    return message._replace(headers=headers, properties=properties)


def is_blocked() -> bool:
    """Return whether an alarm blocks publishers. What is sent then arrives after the alarm, once for each attempt."""
    try:
        alarms = broker.management().alarms()
    except BrokerError:
        return False  # AMQP may answer
    if alarms:
        logger.warning("Replays and moves wait, because publishers are blocked: %s", ", ".join(alarms))
    return bool(alarms)


def _step(replay: Replay, until: float) -> None:
    """Send batches until this monotonic time, or the end."""
    with locks.lock(f"replay {replay.pk}"):
        replay.refresh_from_db()
        if replay.state == State.RUNNING:
            _send(replay, until)


def _send(replay: Replay, until: float) -> None:
    if replay.by is None or not replay.by.is_active:
        finish(replay, State.FAILED, NO_ACCESS)
        return
    messages = reading.messages(replay.archive, replay.first + replay.sent, replay.total - replay.sent)
    with broker.session(replay.archive.vhost) as session:
        if replay.is_declaring:
            leaving = Q(archive__pulse_user__removing_since__isnull=False)  # its queues would outlive it
            if not _may_send(replay, replay.by).exclude(leaving).exists():
                finish(replay, State.FAILED, NO_ACCESS)  # unless it was stopped
                return
            if is_any_deleting(replay.archive.vhost, [replay.to_queue]):
                return  # declaring it again would hide that it was deleted
            declaring.declare(session, replay)
        publisher = ConfirmedPublisher(session)
        while replay.sent < replay.total and time.monotonic() < until:
            began = time.monotonic()
            if is_any_deleting(replay.archive.vhost, [replay.to_queue]):
                break  # what arrives while its messages are archived would be lost
            if not _send_batch(replay, replay.by, publisher, messages):
                break
            if replay.rate:
                _record_sent(replay)
                time.sleep(max(0.0, min(BATCH, replay.rate) / replay.rate - (time.monotonic() - began)))
    _record_sent(replay)
    if replay.sent >= replay.total:
        finish(replay, State.DONE)


def _send_batch(
    replay: Replay, by: Owner, publisher: ConfirmedPublisher, messages: Iterator[tuple[int, Fetched]]
) -> bool:
    """Send the next of these messages. Return False if the replay was stopped, or may not or can't go on."""
    size = min(BATCH, replay.rate or BATCH, replay.total - replay.sent)
    repeated = replay.repeated + replay.in_flight
    if not _may_send(replay, by).update(sent=replay.sent, in_flight=size, repeated=repeated):
        finish(replay, State.FAILED, NO_ACCESS)  # unless it was stopped
        return False
    replay.in_flight, replay.repeated = size, repeated
    first = replay.first + replay.sent
    batch = {
        f"{replay.archive.uuid.hex}/{position}": sanitized(message) for position, message in islice(messages, size)
    }
    refused = publisher.publish(batch, replay.to_exchange, replay.to_queue if replay.to_queue else None)
    confirmed = [key not in refused for key in batch]
    sent = confirmed.index(False) if refused else size
    # Those after the first that was refused are sent again if the replay is repeated from there.
    replay.sent += sent
    replay.in_flight = 0
    if refused:
        _record_sent(replay)
        key = list(batch)[sent]
        arrived = sum(confirmed[sent:])
        text = f"Message {first + sent} was not taken: {refused[key]}."
        if arrived:
            text += f" {arrived} later ones were."
        finish(replay, State.FAILED, text)
    return not refused


def is_any_deleting(vhost: str, names: Collection[str]) -> bool:
    """Return whether Guardian is about to delete one of these queues."""
    return Queue.objects.filter(vhost=vhost, name__in=names, state=Queue.State.DELETING).exists()


def require_not_deleting(vhost: str, queue: str) -> None:
    if is_any_deleting(vhost, [queue]):
        raise ReplayRefused("Guardian is about to delete that queue. Choose another one.", status=HTTPStatus.CONFLICT)


def _may_send(replay: Replay, by: Owner) -> QuerySet[Replay]:
    """Return the replay if it was not stopped, and the person who started it may still see the archive."""
    return Replay.objects.filter(pk=replay.pk, state=State.RUNNING, archive__in=Archive.objects.seen_by(by))


def _record_sent(replay: Replay) -> None:
    Replay.objects.filter(pk=replay.pk).update(sent=replay.sent, in_flight=replay.in_flight)


def finish(one: Replay | Move, state: Replay.State, error: str = "", **columns: Any) -> bool:
    """Record the end of a replay or move that is running, and return whether it was."""
    running = type(one)._default_manager.filter(pk=one.pk, state=State.RUNNING)
    return bool(running.update(state=state, error=error[:300], finished=timezone.now(), **columns))


def planned(archive: Archive, queue: str, exchange: str, first: int, last: int | None) -> Replay:
    """Return a replay that is not saved. Raises ReplayRefused, also if the range is invalid."""
    require_not_deleting(archive.vhost, queue)
    last = archive.messages if last is None else last
    if not 1 <= first <= last <= archive.messages:
        raise ReplayRefused(f"Choose a range of messages within 1 to {archive.messages}.", "first")
    require_writable(archive, queue, exchange)
    return Replay(archive=archive, to_queue=queue, to_exchange=exchange, first=first, last=last)


def require_writable(archive: Archive, queue: str, exchange: str, field: str = "to") -> None:
    """Raise ReplayRefused unless the target is one queue or one exchange that the archive's Pulse user may write to."""
    if bool(queue) == bool(exchange):
        raise ReplayRefused("Name either a queue or an exchange.", field)
    if not is_amqp_name(queue or exchange):
        raise ReplayRefused(f"The name is longer than {MAX_NAME_BYTES} bytes.", field)
    if archive.pulse_user is None:
        return  # only operators see it
    name = archive.pulse_user.username
    if (user_of_queue(queue) if queue else user_of_exchange(exchange)) != name:
        raise ReplayRefused(
            f"Choose a queue whose name starts with queue/{name}/, or an exchange that starts with exchange/{name}/.",
            field,
        )


def room_lock(pulse_user: PulseUser | None) -> str:
    """Return the name of the lock for starting to send messages to a Pulse user's queues."""
    return f"replays of {pulse_user.pk if pulse_user else None}"


def require_room(found: Room, total: int) -> None:
    """Require that a target exists, and that a queue would not be over its limit with these messages."""
    if not found.exists:
        raise ReplayRefused("The broker has no queue or exchange of this name. Declare it first, or restore the queue.")
    if found.fits is not None and total > found.fits:
        others_too = f", another replay or move is sending {found.coming:,} more" if found.coming else ""
        raise ReplayRefused(
            f"The queue has {found.ready:,} messages{others_too}, and with {total:,} more it would be over its "
            f"deletion limit of {found.limit:,}. Send fewer messages, or ask an operator to raise the limit."
        )


def room(session: Session, vhost: str, pulse_user: PulseUser | None, queue: str, exchange: str = "") -> Room:
    """Return the room in a queue or an exchange. A queue that does not exist has all that its limit allows.

    ``pulse_user`` is whose limits apply if the queue has no row. Raises ReplayRefused while the queue's node is down:
    then nobody knows what it has.
    """
    try:
        if exchange:
            session.declare_exchange_passively(exchange)
            return Room()
        exists, depth = True, session.declare_passively(queue)
    except NotOnBroker as error:
        if NODE_DOWN in str(error):
            text = "The node of this queue is down. Try again when it runs."
            raise ReplayRefused(text, status=HTTPStatus.SERVICE_UNAVAILABLE) from error
        if exchange:
            return Room(exists=False)
        exists, depth = False, DeclareOk(0, 0)
    row = Queue.objects.filter(vhost=vhost, name=queue).select_related("pulse_user").first()
    row = row or Queue(vhost=vhost, name=queue, pulse_user=pulse_user)
    limit = None if row.unbounded else thresholds.of_queue(row).max
    if depth is None:
        return Room(limit=limit)
    replays = Replay.objects.filter(state=State.RUNNING, archive__vhost=vhost, to_queue=queue)
    moves = Move.objects.filter(state=State.RUNNING, queue__vhost=vhost, to_queue=queue)
    coming = sum(other.total - other.sent for other in replays) + sum(other.total - other.sent for other in moves)
    return Room(exists, depth.ready, depth.consumers, limit, coming)
