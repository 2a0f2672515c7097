"""Store fetched messages in an archive, and delete archives past their bounds."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta

from django.conf import settings
from django.db import DatabaseError, transaction
from django.db.models import Case, F, QuerySet, When
from django.utils import timezone

from accounts.models import PulseUser
from queues.archives.chunks import pack, split
from queues.archives.outcomes import Removed
from queues.models import Archive, ArchiveChunk, Queue, Replay
from queues.rules import shares
from queues.rules.shares import Kept
from rabbit.fetching import Undecoded

logger = logging.getLogger(__name__)

NOT_STORED = "the database could not store it"

UNKNOWN_OUTCOME = timedelta(hours=1)
"""After this time, an archive is kept although it is unknown whether its queue was deleted."""

UNFINISHED_EXPIRES = timedelta(days=1)
"""An archive that lacks messages is not kept for longer. A fetched one may become the only copy."""


class TooLarge(Exception):
    """With an archive, those of one owner would take more than they may."""


def confirm(removed: Removed) -> Removed:
    """Keep the archive of a queue that is deleted or purged, and delete the oldest ones past the bounds."""
    archive = removed.archive
    if archive is None:
        return removed
    archive.state, archive.expires = Archive.State.KEPT, expiry()
    archive.dropped, archive.held = removed.dropped, removed.held
    archive.save(update_fields=["state", "expires", "dropped", "held"])
    discard_unfinished(archive.vhost, archive.queue_name)
    enforce_bounds(new=archive)
    return removed


def kept_since(decided: Mapping[int, datetime]) -> dict[int, Archive]:
    """Return the kept archives of queues, by id, that were created after the decision to delete each."""
    kept = Archive.objects.of_deletions().filter(queue__in=list(decided), state=Archive.State.KEPT)
    return {
        archive.queue_id: archive
        for archive in kept.order_by("id")
        if archive.queue_id is not None and archive.created >= decided[archive.queue_id]
    }


def keep_fetched(queues: Sequence[int]) -> dict[int, Archive]:
    """Keep the fetched archives of queues, by id, that were deleted by a request without an answer."""
    fetched = Archive.objects.filter(queue__in=queues, state=Archive.State.FETCHED)
    found = {archive.queue_id: archive for archive in fetched if archive.queue_id is not None}
    if found:
        expires = expiry()
        Archive.objects.filter(pk__in=[archive.pk for archive in found.values()]).update(
            state=Archive.State.KEPT, expires=expires
        )
        for archive in found.values():
            archive.expires = expires
    return found


def enforce_bounds(new: Archive | None = None) -> int:
    """Delete expired archives, and those past the bounds but the ``new`` one. Return the number of deleted rows.

    An expired archive stays while a replay sends its messages.
    """
    now = timezone.now()
    # The process that fetched these ended before it knew the outcome.
    interrupted = Archive.objects.filter(state=Archive.State.FETCHED, created__lt=now - UNKNOWN_OUTCOME)
    of_live_queues = interrupted.filter(queue__isnull=False).exclude(queue__state=Queue.State.GONE)
    of_live_queues.update(
        state=Archive.State.KEPT, reason=Archive.Reason.CALLED_OFF, expires=F("created") + UNFINISHED_EXPIRES
    )
    interrupted.update(state=Archive.State.KEPT)
    sending = Replay.objects.filter(state=Replay.State.RUNNING).values("archive")
    deleted = Archive.objects.filter(expires__lte=now).exclude(id__in=sending).delete()[0]
    past = shares.to_delete(_kept(), settings.GUARDIAN_ARCHIVE_TOTAL_BYTES, new.pk if new else None)
    return deleted + (Archive.objects.filter(pk__in=past).delete()[0] if past else 0)


def _kept() -> Iterator[Kept]:
    """Return the kept archives in the order in which a group loses them: those of queues that stay, then the oldest.

    The messages of a queue that stays are most likely still in it.
    """
    of_live_queue = Case(When(reason=Archive.Reason.CALLED_OFF, then=0), default=1)
    return _with_groups(Archive.objects.filter(state=Archive.State.KEPT).order_by(of_live_queue, "created", "id"))


def _room(archive: Archive) -> int:
    """Return the bytes that an archive may take, so that the next one that is kept does not push it out at once.

    The other unfinished archives are locked, so that two do not take the same room.
    """
    unfinished = Archive.objects.filter(state__in=[Archive.State.OPEN, Archive.State.FETCHED])
    unfinished = unfinished.select_for_update(of=("self",)).order_by("id")
    return shares.room(_with_groups(unfinished), settings.GUARDIAN_ARCHIVE_TOTAL_BYTES, archive.pk)


def _with_groups(archives: QuerySet[Archive]) -> Iterator[Kept]:
    owners = PulseUser.objects.longest_owners()
    for pk, size, pulse_user, owner in archives.values_list("id", "stored_bytes", "pulse_user", "queue__owner"):
        yield Kept(pk, owners.get(pulse_user) if pulse_user else owner, size)


def store_batch(archive: Archive, batch: Sequence[Undecoded]) -> None:
    """Add fetched messages to the archive, in one transaction. Past its owner's share, empty it and raise TooLarge."""
    packed = [(part, pack(part)) for part in split(batch)]
    try:
        with transaction.atomic():
            most = _room(archive)
            for part, data in packed:
                if archive.stored_bytes + len(data) > most:
                    raise TooLarge
                ArchiveChunk.objects.create(archive=archive, first=archive.messages + 1, count=len(part), data=data)
                archive.messages += len(part)
                archive.bytes += sum(len(message.body) for message in part)
                archive.stored_bytes += len(data)
            archive.save(update_fields=["state", "messages", "bytes", "stored_bytes"])
    except TooLarge:
        # So that other archives of the owner have room. One that is marked as fetched may be the only copy.
        _remove_messages(Archive.objects.filter(pk=archive.pk, state=Archive.State.OPEN))
        raise


def record_failure(vhost: str, name: str, removed: Removed) -> None:
    """Delete the messages of a queue's archive that was not completed, and keep its row for operators."""
    failed = unfinished_archives(vhost, name).filter(state=Archive.State.OPEN)
    try:
        with transaction.atomic():
            _remove_messages(failed)
            failed.update(
                state=Archive.State.FAILED,
                error=removed.why_not[:300],
                dropped=removed.dropped,
                expires=expiry(),
            )
    except DatabaseError as error:
        logger.warning("An unfinished archive stays until it expires: %s", error)


def _remove_messages(archives: QuerySet[Archive]) -> None:
    """Delete the messages of archives, and keep their rows."""
    ArchiveChunk.objects.filter(archive__in=archives).delete()
    archives.update(messages=0, bytes=0, stored_bytes=0)


def discard_archive(archive: Archive) -> None:
    """Delete an unfinished archive. If the database fails, the archive stays until it expires."""
    try:
        archive.delete()
    except DatabaseError as error:
        logger.warning("An unfinished archive stays until it expires: %s", error)


def unfinished_archives(vhost: str, name: str) -> QuerySet[Archive]:
    """Return the archives of a queue whose deletion has not been confirmed."""
    return Archive.objects.filter(vhost=vhost, queue_name=name, state__in=[Archive.State.OPEN, Archive.State.FETCHED])


def discard_unfinished(vhost: str, name: str) -> None:
    unfinished_archives(vhost, name).delete()


def expiry() -> datetime:
    return timezone.now() + timedelta(days=settings.GUARDIAN_ARCHIVE_DAYS)
