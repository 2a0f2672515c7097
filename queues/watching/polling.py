"""Fetch what a watch has caught since the last time, and end watches."""

import logging
from collections.abc import Iterable
from datetime import timedelta
from http import HTTPStatus
from typing import NamedTuple

from django.db.models import F, Q
from django.utils import timezone

from accounts.access import vouching
from accounts.models import Owner, PulseUser
from core import broker
from core.refusals import Refusal
from queues.archives.reading import MAX_HEADER_VALUES
from queues.models import MessageWatch, Queue
from rabbit import permissions, watch_queue
from rabbit.errors import BrokerError, NotOnBroker
from rabbit.fetching import Fetched
from rabbit.names import WATCH_QUEUE, is_watch_queue, readable
from rabbit.requests.queues import published_in

logger = logging.getLogger(__name__)

NOT_READABLE = "None of your Pulse users may read an exchange with this name, or there is none."


class Ended(Refusal):
    """The watch has ended."""

    status = HTTPStatus.NOT_FOUND


class Caught(NamedTuple):
    """The messages since the last poll, oldest first, and how many were missed since then, at least.

    ``first`` is the position of the first one in the watch. ``missed`` is None if it is not known: RabbitMQ counts
    every 5 s, if its statistics are on.
    """

    first: int
    messages: list[Fetched]
    missed: int | None


def is_over() -> Q:
    """Return the condition that a watch has no time left, or was not polled for so long that its queue has expired."""
    now = timezone.now()
    return Q(ends__lte=now) | Q(polled_at__lte=now - timedelta(seconds=watch_queue.EXPIRES_SECONDS))


def require_readable(exchanges: Iterable[str], by: Owner, field: str = "exchange") -> None:
    """Require that a Pulse user of this owner may read these exchanges, by the permissions that it was created with."""
    usernames = PulseUser.objects.filter(owners=by, ready=True, removing_since=None).values_list("username", flat=True)
    patterns = [permissions.for_pulse_user(username).read for username in usernames]
    for name in exchanges:
        if not any(permissions.allows(pattern, name) for pattern in patterns):
            reason = NOT_READABLE
            if field == "queue":
                reason = (
                    f"None of your Pulse users may read the exchange {readable(name)}, which the queue is bound to."
                )
            raise Refusal(reason, field)


def _may_go_on(watch: MessageWatch) -> bool:
    """Return whether the owner may still see what is watched: Pulse users may be deleted, or lose the owner."""
    if watch.queue_id is not None:
        return Queue.objects.seen_by(watch.owner).filter(pk=watch.queue_id).exists()
    try:
        require_readable([watch.exchange], watch.owner)
    except Refusal:
        return False
    return True


def poll(watch: MessageWatch) -> Caught:
    """Return the messages since the last poll. Nothing else stores them.

    Raises:
        NotVouched: the owner lost access.
        Ended: its time is over, its queue is gone, or its owner may no longer see it. The watch is deleted.
        BrokerError: the broker is unreachable or refuses.
    """
    vouching.require_vouched(watch.owner)
    if watch.ends <= timezone.now():
        stop(watch)
        raise Ended("The watch has ended, as each does after 5 minutes. Start another one.")
    if not _may_go_on(watch):
        stop(watch)
        raise Ended("The watch has ended, because you may no longer see what it watches.")
    try:
        with broker.session(watch.vhost) as session:
            messages = watch_queue.take(session, watch.uuid.hex, MAX_HEADER_VALUES)
    except NotOnBroker as error:
        watch.delete()
        raise Ended("The watch has ended, because its queue is gone. Start another one.") from error
    watch.fetched += len(messages)
    missed = _missed(watch)
    new = None if missed is None else max(0, missed - (watch.missed or 0))
    watch.missed = watch.missed if missed is None else max(missed, watch.missed or 0)
    MessageWatch.objects.filter(pk=watch.pk).update(
        fetched=F("fetched") + len(messages), missed=watch.missed, polled_at=timezone.now()
    )
    return Caught(watch.fetched - len(messages) + 1, messages, new)


def _missed(watch: MessageWatch) -> int | None:
    """Return how many messages of a watch its full queue has dropped, at least, or None if it is not known.

    The broker's count is up to 5 s old, so it lacks messages but never counts too many.
    """
    try:
        published = published_in(broker.management().queue(watch.vhost, WATCH_QUEUE + watch.uuid.hex))
    except BrokerError as error:
        logger.warning("Could not count the messages of a watch: %s", error)
        return None
    return None if published is None else max(0, published - watch.fetched)


def stop(watch: MessageWatch) -> None:
    """End a watch. If the broker does not answer, its queue expires within a minute."""
    watch.delete()
    _delete_queue(watch.vhost, WATCH_QUEUE + watch.uuid.hex)


def sweep() -> int:
    """Delete the rows of watches that nobody polls, and queues of watches without a row. Return the number of both.

    The broker is listed first, so every listed queue already has its row.
    """
    try:
        rows = broker.management().find_queues(None, {"name": WATCH_QUEUE, "disable_stats": "true"})
    except BrokerError as error:
        logger.warning("The queues of watches could not be listed: %s", error)
        rows = []
    deleted, _ = MessageWatch.objects.filter(is_over()).delete()
    running = {uuid.hex for uuid in MessageWatch.objects.values_list("uuid", flat=True)}
    left = [row for row in rows if is_watch_queue(row["name"]) and row["name"].removeprefix(WATCH_QUEUE) not in running]
    for row in left:
        _delete_queue(row["vhost"], row["name"])
    return deleted + len(left)


def _delete_queue(vhost: str, name: str) -> None:
    try:
        with broker.session(vhost) as session:
            session.delete_queue(name)
    except BrokerError as error:
        logger.warning("The queue of a watch was not deleted, and expires: %s", error)
