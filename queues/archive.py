"""Archive the messages of a queue before it is deleted or purged.

The messages are fetched unacknowledged and stored in committed batches. Only then is the queue deleted, on the same
channel. After a crash in between, the messages are back in the queue, and the unfinished archive is discarded. After
two attempts a queue is deleted without an archive, because each costs a quorum queue's messages one delivery.
"""

import contextlib
import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import DatabaseError, transaction
from django.db.models import Q, QuerySet, Sum
from django.utils import timezone

from accounts.models import Owner, PulseUser
from accounts.vouching import lock_existing
from core import bulk, locks
from core.formatting import counted
from queues.archive_chunks import pack
from queues.models import Archive, ArchiveChunk, Queue
from rabbit import deadline
from rabbit.amqp import LEADER_TIMEOUT_SECONDS, Session
from rabbit.fetching import Bounds, Fetch, Fetched
from rabbit.management import BrokerError, BrokerUnavailable, Refused
from rabbit.snapshot import TYPES_WITHOUT_LENGTH, UNKNOWN_TYPE

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 2
ELECTION_SECONDS = 10.0
"""A quorum queue elects a new leader within 6 s. Giving up earlier would cost an attempt."""

NOT_STORED = "the database could not store it"
TOO_MANY_ATTEMPTS = f"{MAX_ATTEMPTS} attempts failed"

RETURN_TIME = timedelta(minutes=2)
"""RabbitMQ 4.3 returns the messages of a consumer 60 s after its node was lost."""

UNFINISHED_EXPIRES = timedelta(days=1)
"""An archive that lacks messages is not kept for longer. A fetched one may become the only copy."""

USERS_SHARE = 5
"""One Pulse user's archives may take this fraction of all archives' bytes."""


@dataclass(frozen=True)
class Target:
    """A queue to delete or purge. ``held`` are about how many messages its consumers hold, as last listed."""

    vhost: str
    name: str
    type: str
    reason: Archive.Reason
    queue_id: int | None = None
    pulse_user_id: int | None = None
    by: Owner | None = None
    is_archived: bool = True
    is_auto_delete: bool = False
    held: int = 0


@dataclass
class Removed:
    """The outcome for the messages of a deleted or purged queue.

    ``dropped`` counts ready messages that were not archived. ``why_not`` is the reason if there is no archive.
    """

    archive: Archive | None = None
    dropped: int = 0
    held: int = 0
    why_not: str = ""

    @property
    def archived(self) -> int:
        """The number of archived messages."""
        return self.archive.messages if self.archive else 0

    def as_facts(self) -> dict[str, Any]:
        """Return the facts of a notification or an event about it."""
        return {
            "archived": self.archived,
            "dropped": self.dropped,
            "held": self.held,
            "why_not_archived": self.why_not,
            "archive": self.archive.uuid.hex if self.archive else "",
            "archived_until": self.archive.expires.isoformat() if self.archive else "",
        }


def outcome_in_words(removed: Removed) -> str:
    """Return the outcome for a queue's messages, in sentences for a page."""
    sentences = []
    if removed.archive is not None and removed.archived:
        until = f"{removed.archive.expires:%-d %B %Y}"
        sentences.append(f"Archived until {until}: {counted(removed.archived, 'message')}.")
    if removed.dropped:
        why = f", because {removed.why_not}" if removed.why_not else ""
        sentences.append(f"Deleted without a copy: {counted(removed.dropped, 'message')}{why}.")
    return " ".join(sentences)


class NotSent(BrokerUnavailable):
    """No request to delete the queue was sent. The text says why. ``is_unreachable``: there is no connection."""

    def __init__(self, text: str, *, is_unreachable: bool = False) -> None:
        super().__init__(text, never_reached=True)
        self.is_unreachable = is_unreachable


class WithinLimit(Exception):
    """The queue is within its limit, and keeps all its messages."""


@dataclass
class _Attempt:
    """One attempt to archive a queue's messages."""

    session: Session
    target: Target
    fetch: Fetch
    until: float
    between: Callable[[], None]
    result: Removed = field(default_factory=Removed)

    def archive(self, ready: int) -> None:
        """Store the ready messages, as far as the bounds allow, or say why not."""
        archive = None
        self.result.why_not = why_not(self.target)
        if ready and not self.result.why_not:
            try:
                archive = _begin(self.target)
                self.result.why_not = "" if archive else TOO_MANY_ATTEMPTS
            except DatabaseError as error:
                logger.error("%s could not be archived: %s", self.target.name, error)
                self.result.why_not = NOT_STORED
        if archive is None:
            return
        seconds = min(settings.GUARDIAN_ARCHIVE_SECONDS, self.until - time.monotonic())
        bounds = Bounds(settings.GUARDIAN_ARCHIVE_MAX_MESSAGES, settings.GUARDIAN_ARCHIVE_MAX_BYTES, seconds)
        try:
            for batch in self.fetch.batches(ready, bounds):
                self.between()
                _store(archive, batch)
            archive.dropped = max(0, ready - self.fetch.kept)  # so far; exact once the queue is deleted
            Archive.objects.filter(pk=archive.pk).update(
                state=Archive.State.FETCHED, dropped=archive.dropped, expires=_expires()
            )
        except (DatabaseError, ValueError) as error:
            logger.error("%s could not be archived: %s", self.target.name, error)
            self.fetch.cancel()
            self.result.why_not = NOT_STORED
        except Refused as error:
            if self.fetch.fetched:
                raise
            self.result.why_not = error.reason
        else:
            self.result.archive = archive

    def confirm(self, dropped: int) -> Removed:
        """Record that the queue is deleted or purged, and return the outcome for its messages."""
        self.result.dropped = dropped + self.fetch.excess
        if self.result.archive is None:
            self.result.dropped += self.fetch.kept
            _record_failure(self.target, self.result)
            self._keep_earlier()
        return confirm(self.result)

    def _keep_earlier(self) -> None:
        """Keep the archive of an earlier attempt, if no message was ready now.

        RabbitMQ 3.10 does not return the messages of a cancelled consumer while its node is down.
        """
        if self.fetch.fetched or self.result.dropped:
            return
        fetched = _unfinished(self.target.vhost, self.target.name).filter(state=Archive.State.FETCHED).last()
        if fetched is not None:
            self.result.archive, self.result.held = fetched, max(0, self.result.held - fetched.messages)


def delete_queue(
    session: Session,
    target: Target,
    *,
    limit: int | None = None,
    unacknowledged: int = 0,
    until: float = math.inf,
    between: Callable[[], None] = lambda: None,
) -> Removed:
    """Archive a queue's messages, then delete it.

    With a ``limit``, it is deleted only if it has more messages; ``unacknowledged`` of other consumers count, too.
    Messages are fetched ``until`` this monotonic time at most. ``between`` is called between two batches.

    Raises:
        WithinLimit: the queue has no more messages than the limit; nothing changed.
        NotOnBroker: there is no such queue, or its node is down.
        NotSent: the broker did not answer in time; nothing changed.
        BrokerUnavailable: the answer to the deletion was lost. The queue may be deleted.
        BrokerError: the broker refuses; nothing changed.
    """
    with _locked(target) as renew_lock:

        def renew() -> None:
            renew_lock()
            between()

        try:
            attempt = _attempt(session, target, until, renew)
            depth = _declare(attempt.fetch)
            if limit is not None and depth + unacknowledged <= limit:
                attempt.fetch.requeue()
                raise WithinLimit
            if limit is not None and target.held and _was_interrupted(target):
                raise NotSent("its messages return from an earlier attempt to archive them")
            attempt.archive(depth)
            if limit is not None and attempt.fetch.fetched:
                ready = _declare_again(attempt)
                if attempt.fetch.fetched + ready + unacknowledged <= limit:
                    _cancel(attempt)
                    raise WithinLimit
            renew_lock()
        except (NotSent, locks.LockTaken):
            _requeue(attempt)
            raise
        except BrokerUnavailable as error:
            raise NotSent(str(error), is_unreachable=error.never_reached) from error
        return attempt.confirm(attempt.fetch.delete_queue())


@contextlib.contextmanager
def _locked(target: Target) -> Iterator[Callable[[], None]]:
    """Lock a queue, so that no other process fetches its messages. Yield a function that renews the lock.

    Raises:
        NotSent: another process has the lock, at first or when it is renewed.
    """
    if why_not(target):
        yield lambda: None  # nothing is fetched
        return
    key = hashlib.sha256(f"{target.vhost}\0{target.name}".encode("utf-8", "surrogatepass")).hexdigest()
    lock = locks.Lock(f"queue {key}")
    try:
        lock.acquire()
        yield lock.renew
    except locks.LockTaken as error:
        raise NotSent("another request is deleting or purging this queue; try again in a minute") from error
    finally:
        lock.release()


def delete_queue_of_account(session: Session, name: str, pulse_user: PulseUser, between: Callable[[], None]) -> Removed:
    """Archive the messages of a queue that is deleted with its account, then delete it."""
    row = Queue.objects.filter(vhost=session.vhost, name=name).first()
    target = Target(
        vhost=session.vhost,
        name=name,
        type=row.type if row else UNKNOWN_TYPE,
        reason=Archive.Reason.ACCOUNT,
        queue_id=row.pk if row else None,
        pulse_user_id=pulse_user.pk,
        is_archived=pulse_user.keeps_archives,
        is_auto_delete=row is not None and row.auto_delete,
        held=(row.unacknowledged or 0) if row else 0,
    )
    return delete_queue(session, target, between=between)


def purge_queue(session: Session, target: Target) -> Removed:
    """Archive a queue's ready messages, then purge them.

    Raises:
        NotOnBroker: there is no such queue, or its node is down.
        NotSent: another process deletes or purges the queue; nothing changed.
        BrokerError: the broker refuses, or does not answer.
    """
    with _locked(target) as renew_lock:
        attempt = _attempt(session, target, between=renew_lock)
        attempt.archive(_declare(attempt.fetch))
        renew_lock()
        if attempt.result.archive is not None:
            # Acknowledging has no answer. After a crash the archive may be the only copy, so keep it before.
            Archive.objects.filter(pk=attempt.result.archive.pk).update(state=Archive.State.KEPT)
        return attempt.confirm(attempt.fetch.purge_queue())


def confirm(removed: Removed) -> Removed:
    """Keep the archive of a queue that is deleted or purged, and delete the oldest ones past the bounds."""
    archive = removed.archive
    if archive is None:
        return removed
    archive.state, archive.expires = Archive.State.KEPT, _expires()
    archive.dropped, archive.held = removed.dropped, removed.held
    archive.save(update_fields=["state", "expires", "dropped", "held"])
    _discard_unfinished(archive.vhost, archive.queue_name)
    enforce_bounds(archive.pulse_user_id)
    return removed


def kept_since(sent: Mapping[int, datetime]) -> dict[int, Archive]:
    """Return the kept archives of queues, by id, that were created after a request to delete each was recorded."""
    if not sent:
        return {}
    kept = Archive.objects.filter(
        bulk.among(Archive, ("queue",), [(id_,) for id_ in sent]), state=Archive.State.KEPT
    ).exclude(reason=Archive.Reason.PURGED)
    return {
        archive.queue_id: archive
        for archive in kept.order_by("id")
        if archive.queue_id is not None and archive.created >= sent[archive.queue_id]
    }


def keep_fetched(queues: Sequence[int]) -> dict[int, Archive]:
    """Keep the fetched archives of queues, by id, that were deleted by a request without an answer."""
    if not queues:
        return {}
    fetched = Archive.objects.filter(
        bulk.among(Archive, ("queue",), [(id_,) for id_ in queues]), state=Archive.State.FETCHED
    )
    found = {archive.queue_id: archive for archive in fetched if archive.queue_id is not None}
    if found:
        expires = _expires()
        Archive.objects.filter(pk__in=[archive.pk for archive in found.values()]).update(
            state=Archive.State.KEPT, expires=expires
        )
        for archive in found.values():
            archive.expires = expires
    return found


def enforce_bounds(pulse_user_id: int | None = None) -> int:
    """Delete expired archives, and the oldest ones past the bounds. Return the number of deleted archives."""
    deleted = Archive.objects.filter(expires__lte=timezone.now()).delete()[0]
    total = settings.GUARDIAN_ARCHIVE_TOTAL_BYTES
    if pulse_user_id is not None:
        deleted += _delete_oldest(Q(pulse_user=pulse_user_id), total // USERS_SHARE)
    return deleted + _delete_oldest(Q(), total)


def _delete_oldest(of: Q, most: int) -> int:
    kept = Archive.objects.filter(of, state=Archive.State.KEPT)
    excess = (kept.aggregate(sum=Sum("stored_bytes"))["sum"] or 0) - most
    oldest = []
    if excess > 0:
        for pk, size in kept.order_by("created", "id").values_list("id", "stored_bytes"):
            oldest.append(pk)
            excess -= size
            if excess <= 0:
                break
    return Archive.objects.filter(pk__in=oldest).delete()[0] if oldest else 0


def _attempt(
    session: Session, target: Target, until: float = math.inf, between: Callable[[], None] = lambda: None
) -> _Attempt:
    fetch = Fetch(session, target.name, queue_type=target.type, is_auto_delete=target.is_auto_delete)
    return _Attempt(session, target, fetch, until, between, Removed(held=target.held))


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
    if target.type in TYPES_WITHOUT_LENGTH:
        return f"a {target.type} can't be archived"
    return ""


def _begin(target: Target) -> Archive | None:
    """Return a new, open archive instead of the unfinished one; None: there were enough attempts."""
    now = timezone.now()
    with transaction.atomic():
        unfinished = _unfinished(target.vhost, target.name).select_for_update()
        attempts = max((archive.attempt for archive in unfinished), default=0)
        # A fetched one is from a deletion with an unknown outcome. A client may have declared the queue again since.
        unfinished.filter(state=Archive.State.FETCHED).update(state=Archive.State.KEPT)
        if attempts >= MAX_ATTEMPTS:
            return None
        _discard_unfinished(target.vhost, target.name)
        by = next(iter(lock_existing([target.by])), None) if target.by else None
        return Archive.objects.create(
            queue_id=target.queue_id,
            pulse_user_id=target.pulse_user_id,
            vhost=target.vhost,
            queue_name=target.name,
            reason=target.reason,
            attempt=attempts + 1,
            held=target.held,
            by=by,
            created=now,
            expires=now + UNFINISHED_EXPIRES,
        )


def _store(archive: Archive, batch: Sequence[Fetched]) -> None:
    data = pack(batch)
    with transaction.atomic():
        ArchiveChunk.objects.create(archive=archive, first=archive.messages + 1, count=len(batch), data=data)
        archive.messages += len(batch)
        archive.bytes += sum(len(message.body) for message in batch)
        archive.stored_bytes += len(data)
        archive.save(update_fields=["messages", "bytes", "stored_bytes"])


def _cancel(attempt: _Attempt) -> None:
    """Requeue the fetched messages, and discard the archive."""
    if attempt.result.archive is not None:
        _discard(attempt.result.archive)
    _requeue(attempt)


def _requeue(attempt: _Attempt) -> None:
    """Requeue the fetched messages."""
    try:
        attempt.fetch.requeue()
    except BrokerError as error:
        logger.warning("The messages of %s are requeued when the connection closes: %s", attempt.target.name, error)
        attempt.session.close()


def _discard(archive: Archive) -> None:
    try:
        archive.delete()
    except DatabaseError as error:
        logger.warning("An unfinished archive stays until it expires: %s", error)


def _record_failure(target: Target, removed: Removed) -> None:
    """Delete the messages of an archive that was not completed, and keep its row for operators."""
    if not removed.why_not or why_not(target):
        return
    failed = _unfinished(target.vhost, target.name).filter(state=Archive.State.OPEN)
    try:
        with transaction.atomic():
            ArchiveChunk.objects.filter(archive__in=failed).delete()
            failed.update(
                state=Archive.State.FAILED,
                error=removed.why_not[:300],
                messages=0,
                bytes=0,
                stored_bytes=0,
                dropped=removed.dropped,
                expires=_expires(),
            )
    except DatabaseError as error:
        logger.warning("An unfinished archive stays until it expires: %s", error)


def _unfinished(vhost: str, name: str) -> QuerySet[Archive]:
    return Archive.objects.filter(vhost=vhost, queue_name=name, state__in=[Archive.State.OPEN, Archive.State.FETCHED])


def _was_interrupted(target: Target) -> bool:
    """Return whether a fetch of this queue's messages was interrupted a moment ago, and may still hold them."""
    since = timezone.now() - RETURN_TIME
    return _unfinished(target.vhost, target.name).filter(state=Archive.State.OPEN, created__gt=since).exists()


def _discard_unfinished(vhost: str, name: str) -> None:
    _unfinished(vhost, name).delete()


def _expires() -> datetime:
    return timezone.now() + timedelta(days=settings.GUARDIAN_ARCHIVE_DAYS)
