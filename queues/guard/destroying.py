"""Delete or purge a queue on one channel: recheck, archive, act.

The messages are fetched unacknowledged and stored in committed batches. Only then is the queue deleted, on the same
channel. After a crash in between, the messages are back in the queue, and the unfinished archive is discarded. After
two interrupted attempts a queue is deleted without an archive.

Returning messages may count as a delivery of a quorum queue, which drops a message that was delivered too often. After
such a return the messages are not fetched for ``FETCH_PAUSE``. The archive of a message that may have been dropped is
kept.
"""

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.db import DatabaseError, transaction
from django.db.models import QuerySet
from django.utils import timezone

from accounts.access.vouching import lock_existing
from accounts.models import Owner, PulseUser
from core import broker, locks
from core.leases import LEASE_SECONDS
from queues.archives.definitions import definition_of, quorum_queue, require_permission
from queues.archives.outcomes import Removed
from queues.archives.writing import (
    NOT_STORED,
    UNFINISHED_EXPIRES,
    TooLarge,
    confirm,
    discard_archive,
    discard_unfinished,
    expiry,
    record_failure,
    store_batch,
    unfinished_archives,
)
from queues.models import Archive, Queue
from queues.rules.thresholds import is_fetch_paused
from queues.rules.turns import MAX_ATTEMPTS, interrupted_attempts
from rabbit import deadline, snapshot
from rabbit.amqp import LEADER_TIMEOUT_SECONDS, Session
from rabbit.arguments import CLASSIC, QUORUM, passes_others_over
from rabbit.errors import BrokerError, BrokerUnavailable, NotOnBroker, Refused
from rabbit.fetching import Bounds, Fetch
from rabbit.snapshot import TYPES_WITHOUT_LENGTH, UNKNOWN_TYPE, ListedQueue

logger = logging.getLogger(__name__)

QUORUM_TICK_SECONDS = 6.0
"""Lists show a quorum queue as of its last tick, up to 5 s ago."""

ELECTION_SECONDS = 10.0
"""A quorum queue elects a new leader within 6 s. Giving up earlier would cost an attempt."""
TOO_MANY_ATTEMPTS = f"{MAX_ATTEMPTS} attempts failed"
SHARE_TAKEN = "it is larger than what the archives of one owner may take, less those being written"
PASSED_OVER = "a quorum queue with x-single-active-consumer gives its messages to the active consumer alone"
FETCH_PAUSED = (
    "they were fetched and returned less than an hour ago, and the broker drops messages that are returned too often"
)
RETURN_TIME = timedelta(minutes=2)
"""RabbitMQ 4.3 returns the messages of a consumer 60 s after its node was lost."""


@dataclass(frozen=True)
class Target:
    """A queue to delete or purge. ``held`` are about how many messages its consumers hold, as last listed.

    ``without_copy`` is the reason if the caller decided that it is not archived. Its messages are fetched for
    ``seconds`` at most, if given.
    """

    vhost: str
    name: str
    type: str
    reason: Archive.Reason
    queue_id: int | None = None
    pulse_user_id: int | None = None
    by: Owner | None = None
    is_archived: bool = True
    without_copy: str = ""
    is_auto_delete: bool = False
    held: int = 0
    seconds: float | None = None


class NotSent(BrokerUnavailable):
    """No request to delete the queue was sent. The text says why. ``is_unreachable``: there is no connection."""

    def __init__(self, text: str, *, is_unreachable: bool = False) -> None:
        super().__init__(text, never_reached=True)
        self.is_unreachable = is_unreachable


class InUse(NotSent):
    """Another request is deleting or purging the queue, or moving its messages."""


class DeclaredAgain(NotSent):
    """Another queue has the name, so an earlier request to delete the queue has had its effect."""


class WithinLimit(Exception):
    """The queue is within its limit, and keeps all its messages: ``ready``, and about ``held`` by its consumers."""

    def __init__(self, ready: int, held: int) -> None:
        super().__init__(ready, held)
        self.ready = ready
        self.held = held


@dataclass
class _Attempt:
    """One attempt to archive a queue's messages."""

    session: Session
    target: Target
    fetch: Fetch
    between: Callable[[], None]
    result: Removed = field(default_factory=Removed)
    listed: Mapping[str, Any] = field(default_factory=dict)
    attempts_before: dict[str, Any] = field(default_factory=dict)
    is_called_off: bool = False

    def archive(self, ready: int) -> None:
        """Store the ready messages, as far as the bounds allow, or say why not."""
        archive = None
        self.result.why_not = why_not(self.target)
        if passes_others_over(self.listed, self.fetch.consumers):
            self.result.why_not = PASSED_OVER
        if ready and not self.result.why_not:
            try:
                archive = self._begin()
                self.result.why_not = "" if archive else TOO_MANY_ATTEMPTS
            except DatabaseError as error:
                logger.error("%s could not be archived: %s", self.target.name, error)
                self.result.why_not = NOT_STORED
        if archive is None:
            return
        seconds = settings.GUARDIAN_ARCHIVE_SECONDS if self.target.seconds is None else self.target.seconds
        bounds = Bounds(settings.GUARDIAN_ARCHIVE_MAX_MESSAGES, settings.GUARDIAN_ARCHIVE_MAX_BYTES, seconds)
        try:
            for batch in self.fetch.batches(ready, bounds):
                if self.fetch.has_exhausted:
                    archive.state = Archive.State.FETCHED  # after a crash it may be the only copy
                store_batch(archive, batch)
                self.between()
            archive.dropped = max(0, ready - self.fetch.kept)  # so far; exact once the queue is deleted
            Archive.objects.filter(pk=archive.pk).update(
                state=Archive.State.FETCHED, dropped=archive.dropped, expires=expiry()
            )
        except TooLarge:
            self.fetch.cancel()
            self.result.why_not = SHARE_TAKEN
        except (DatabaseError, ValueError) as error:
            logger.error("%s could not be archived: %s", self.target.name, error)
            self.fetch.cancel()
            self.result.why_not = NOT_STORED
        except Refused as error:
            if self.fetch.fetched:
                raise
            self.result.why_not = error.reason
        except NotOnBroker:
            if archive.state == Archive.State.OPEN:
                discard_archive(archive)  # no later attempt would, and it takes room of other archives
            raise
        else:
            self.result.archive = archive

    def confirm(self, dropped: int) -> Removed:
        """Record that the queue is deleted or purged, and return the outcome for its messages."""
        self.result.dropped = dropped + self.fetch.excess
        if self.result.archive is None:
            self.result.dropped += self.fetch.kept
            if self.result.why_not and not why_not(self.target):
                record_failure(self.target.vhost, self.target.name, self.result)
            self._keep_earlier()
        self._write_attempts(NO_ATTEMPTS)
        return confirm(self.result)

    def call_off(self) -> None:
        """Return the fetched messages, and discard the archive unless the broker may drop one of them."""
        self.is_called_off = True
        archive, fetch, now = self.result.archive, self.fetch, timezone.now()
        counts = fetch.requeue_counts
        try:
            fetch.requeue()
        except BrokerError as error:
            logger.warning("The messages of %s are requeued when the connection closes: %s", self.target.name, error)
            self.session.close()  # which counts on every version
            counts = fetch.fetched > 0 and fetch.delivery_limit is not None
        if archive is not None and counts and fetch.has_exhausted:
            kept = {"state": Archive.State.KEPT, "reason": Archive.Reason.CALLED_OFF, "dropped": 0, "held": 0}
            Archive.objects.filter(pk=archive.pk).update(**kept, expires=now + UNFINISHED_EXPIRES)
        elif archive is not None:
            discard_archive(archive)
        returned = {"attempted_at": now, "returned_at": now} if counts else {}
        if self.attempts_before.get("fetch_attempts"):
            returned.pop("attempted_at", None)  # an interrupted attempt is forgotten a day later
        self._write_attempts(self.attempts_before | returned)

    def _begin(self) -> Archive | None:
        """Count this attempt, and return a new, open archive instead of the unfinished one, or None after the last.

        Raise NotSent if the messages were returned since the pass decided to fetch them, or the queue is another one.
        """
        target, now = self.target, timezone.now()
        declared = definition_of(target.vhost, target.name)
        unfinished = unfinished_archives(target.vhost, target.name)
        # From a deletion with an unknown outcome. A client may have declared the queue again.
        fetched = unfinished.filter(state=Archive.State.FETCHED)
        found = declared.get("type") or target.type, declared.get("auto_delete", target.is_auto_delete)
        is_known = target.reason == Archive.Reason.LENGTH and target.type != UNKNOWN_TYPE
        if is_known and found != (target.type, target.is_auto_delete):
            fetched.update(state=Archive.State.KEPT)
            raise DeclaredAgain("it was deleted and declared again in another way")
        with transaction.atomic():
            by = next(iter(lock_existing([target.by])), None) if target.by else None
            before = self._row.select_for_update().values(*NO_ATTEMPTS).first() or NO_ATTEMPTS
            if target.reason == Archive.Reason.LENGTH and is_fetch_paused(before["returned_at"], now):
                raise NotSent("its messages were returned to it by another request")
            attempts = interrupted_attempts(before["fetch_attempts"], before["attempted_at"], now)
            fetched.update(state=Archive.State.KEPT)
            if attempts >= MAX_ATTEMPTS:
                return None
            discard_unfinished(target.vhost, target.name)
            self.attempts_before = {**before, "fetch_attempts": attempts}
            returned_at = now if self.fetch.delivery_limit is not None else before["returned_at"]
            self._row.update(fetch_attempts=attempts + 1, attempted_at=now, returned_at=returned_at)
            return Archive.objects.create(
                queue_id=target.queue_id,
                pulse_user_id=target.pulse_user_id,
                vhost=target.vhost,
                queue_name=target.name,
                reason=target.reason,
                held=target.held,
                by=by,
                created=now,
                expires=now + UNFINISHED_EXPIRES,
                **declared,
            )

    def _write_attempts(self, columns: Mapping[str, Any]) -> None:
        """Write these columns of the queue, if an attempt was counted."""
        if not self.attempts_before:
            return
        try:
            self._row.update(**columns)
        except DatabaseError as error:
            logger.warning("An attempt to archive %s counts until the next day: %s", self.target.name, error)

    @property
    def _row(self) -> QuerySet[Queue]:
        """The queue's row, if a pass has listed the queue."""
        return Queue.objects.filter(vhost=self.target.vhost, name=self.target.name)

    def _keep_earlier(self) -> None:
        """Keep the archive of an earlier attempt, if no message was ready now.

        RabbitMQ 3.10 does not return the messages of a cancelled consumer while its node is down.
        """
        if self.fetch.fetched or self.result.dropped:
            return
        fetched = unfinished_archives(self.target.vhost, self.target.name).filter(state=Archive.State.FETCHED).last()
        if fetched is not None:
            self.result.archive, self.result.held = fetched, max(0, self.result.held - fetched.messages)


NO_ATTEMPTS: dict[str, Any] = {"fetch_attempts": 0, "attempted_at": None, "returned_at": None}
"""The columns of a queue whose messages were not fetched."""


def why_given_up(queue: Queue) -> str:
    """Return why its messages are not fetched again to archive them, or an empty text if they are."""
    attempts = interrupted_attempts(queue.fetch_attempts, queue.attempted_at, timezone.now())
    return TOO_MANY_ATTEMPTS if attempts >= MAX_ATTEMPTS else ""


def delete_queue(
    session: Session,
    target: Target,
    *,
    limit: int | None = None,
    unacknowledged: int = 0,
    between: Callable[[], None] = lambda: None,
    before_delete: Callable[[], None] = lambda: None,
) -> Removed:
    """Archive a queue's messages, then delete it.

    With a ``limit``, it is deleted only if it has more messages. Messages that consumers hold count, too: as listed
    before (``unacknowledged``) to decide whether to fetch, and listed again to decide about the deletion.
    ``between`` is called between two batches, and ``before_delete`` right before the request to delete the queue; it
    calls the deletion off by raising ``NotSent``.

    Raises:
        WithinLimit: the queue has no more messages than the limit; nothing changed.
        NotOnBroker: there is no such queue, or its node is down.
        NotSent: the broker did not answer in time; nothing changed.
        BrokerUnavailable: the answer to the deletion was lost. The queue may be deleted.
        BrokerError: the broker refuses; nothing changed.
    """
    with lock_messages(target.vhost, target.name) as renew_lock:

        def renew() -> None:
            renew_lock()
            between()

        attempt = _attempt(session, target, renew)
        try:
            depth = _declare(attempt.fetch)
            if limit is not None and depth + unacknowledged <= limit:
                attempt.fetch.requeue()
                raise WithinLimit(depth, unacknowledged)
            if limit is not None and target.held and _was_interrupted(target):
                raise NotSent("its messages return from an earlier attempt to archive them")
            if not why_not(target):
                require_permission(session.user, target.vhost, target.name)
            attempt.archive(depth)
            listed = _list_held(attempt, limit, depth) if limit is not None else None
            if limit is not None and attempt.fetch.misses_deletion:
                _require_same_queue(attempt)
            renew_lock()
            before_delete()
            if limit is not None:
                ready = _declare_again(attempt)
                held = _held(attempt, listed, ready)
                if attempt.fetch.fetched + ready + held <= limit:
                    attempt.call_off()
                    raise WithinLimit(attempt.fetch.fetched + ready, held)
        except (NotSent, locks.LockTaken):
            if not attempt.is_called_off:
                attempt.call_off()
            raise
        except BrokerUnavailable as error:
            raise NotSent(str(error), is_unreachable=error.never_reached) from error
        except BrokerError:
            attempt.fetch.close()
            raise
        except WithinLimit:
            raise
        except BaseException:
            session.close()  # which returns the fetched messages
            raise
        try:
            return attempt.confirm(attempt.fetch.delete_queue())
        except Refused:
            attempt.call_off()
            raise


def _list_held(attempt: _Attempt, limit: int, ready: int) -> tuple[int, int] | None:
    """List the queue's length and unacknowledged messages, if it is over its limit only with what consumers hold.

    ``ready`` is what was declared before the fetch. Raise NotSent without an answer of the broker.
    """
    fetch = attempt.fetch
    if fetch.fetched:
        ready = _declare_again(attempt)
    if fetch.fetched + ready > limit:
        return None
    listed = _list_again(attempt)
    if listed is None or listed.length is None or listed.unacknowledged is None:
        raise NotSent("the broker does not list how many messages its consumers hold")
    return listed.length, listed.unacknowledged


def _held(attempt: _Attempt, listed: tuple[int, int] | None, ready: int) -> int:
    """Return about how many of the ``listed`` messages consumers hold. Those that they returned since are ready."""
    if listed is None:
        return 0
    length, unacknowledged = listed
    attempt.result.held = max(0, min(unacknowledged, length - ready) - attempt.fetch.fetched)
    return attempt.result.held


def _require_same_queue(attempt: _Attempt) -> None:
    """Raise NotSent if the queue does not have the fetched messages: another one may have its name by now."""
    listed = _list_again(attempt)
    if listed is None or listed.unacknowledged is None or listed.unacknowledged < attempt.fetch.fetched:
        raise NotSent("it may have been deleted and declared again while its messages were fetched")


def _list_again(attempt: _Attempt) -> ListedQueue | None:
    """Return the queue as the broker lists it now, or None if it does not list it."""
    fetch, target = attempt.fetch, attempt.target
    if target.type != CLASSIC:
        listed_from = fetch.last_arrival + QUORUM_TICK_SECONDS
        while (seconds := listed_from - time.monotonic()) > 0:
            time.sleep(min(1.0, seconds))
            fetch.declare_passively()  # an answer of the broker extends the time that a page may take
            attempt.between()
    try:
        return snapshot.find(broker.management(), target.vhost, target.name)
    except BrokerError as error:
        logger.warning("%s could not be listed again: %s", target.name, error)
        return None


@contextlib.contextmanager
def lock_messages(vhost: str, name: str) -> Iterator[Callable[[], None]]:
    """Lock a queue, so that no other process fetches its messages. Yield a function that renews the lock.

    Raise InUse if another process has the lock, at first or when it is renewed.
    """
    key = hashlib.sha256(f"{vhost}\0{name}".encode("utf-8", "surrogatepass")).hexdigest()
    lock = locks.Lock(f"queue {key}", LEASE_SECONDS)  # not as long as other locks: after a kill the queue grows on
    try:
        lock.acquire()
        yield lock.renew
    except locks.LockTaken as error:
        raise InUse("another request is deleting, purging or moving its messages; try again in two minutes") from error
    finally:
        lock.release()


def delete_queue_of_pulse_user(
    session: Session, name: str, pulse_user: PulseUser, between: Callable[[], None]
) -> Removed:
    """Archive the messages of a queue that is deleted with its Pulse user, then delete it."""
    row = Queue.objects.filter(vhost=session.vhost, name=name).first()
    target = Target(
        vhost=session.vhost,
        name=name,
        type=row.type if row else UNKNOWN_TYPE,
        reason=Archive.Reason.PULSE_USER,
        queue_id=row.pk if row else None,
        pulse_user_id=pulse_user.pk,
        is_archived=pulse_user.keeps_archives,
        is_auto_delete=row is not None and row.auto_delete,
        held=(row.unacknowledged or 0) if row else 0,
    )
    return delete_queue(session, target, between=between)


def purge_queue(session: Session, target: Target) -> Removed:
    """Archive a queue's ready messages, then purge them. The errors are those of ``delete_queue``."""
    with lock_messages(target.vhost, target.name) as renew_lock:
        attempt = _attempt(session, target, renew_lock)
        attempt.archive(_declare(attempt.fetch))
        renew_lock()
        if attempt.result.archive is not None:
            # Acknowledging has no answer. After a crash the archive may be the only copy, so keep it before.
            Archive.objects.filter(pk=attempt.result.archive.pk).update(state=Archive.State.KEPT)
        return attempt.confirm(attempt.fetch.purge_queue())


def _attempt(session: Session, target: Target, between: Callable[[], None] = lambda: None) -> _Attempt:
    row = {} if target.type != QUORUM or why_not(target) else quorum_queue(target.vhost, target.name)
    limit = row.get("delivery_limit")
    fetch = Fetch(
        session, target.name, queue_type=target.type, is_auto_delete=target.is_auto_delete, delivery_limit=limit
    )
    return _Attempt(session, target, fetch, between, Removed(held=target.held), row)


def _declare(fetch: Fetch) -> int:
    depth = fetch.declare_passively()
    if depth is None:
        raise NotSent("its leader did not answer; try again")
    return depth.ready


def _declare_again(attempt: _Attempt) -> int:
    """Return the ready messages of a queue whose messages were fetched. Wait for a new leader if it has none."""
    until = time.monotonic() + deadline.seconds_left(ELECTION_SECONDS)
    while True:
        try:
            return _declare(attempt.fetch)
        except NotSent:
            if time.monotonic() > until:
                raise
        attempt.between()
        time.sleep(LEADER_TIMEOUT_SECONDS)


def why_not(target: Target) -> str:
    """Return why the messages of this queue are not archived; empty: they are, as far as the bounds allow."""
    if not settings.GUARDIAN_ARCHIVE_DAYS:
        return "archives are switched off"
    if not target.is_archived:
        return "archives are switched off for it"
    if not target.without_copy and target.type in TYPES_WITHOUT_LENGTH:
        return f"a {target.type} can't be archived"
    return target.without_copy


def _was_interrupted(target: Target) -> bool:
    """Return whether a fetch of this queue's messages was interrupted a moment ago, and may still hold them."""
    since = timezone.now() - RETURN_TIME
    return unfinished_archives(target.vhost, target.name).filter(state=Archive.State.OPEN, created__gt=since).exists()
