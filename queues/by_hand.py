"""What people do to queues by hand, whether on a page or through the API: delete, empty, give other limits.

Who sees a queue at all is ``Queue.objects.seen_by``; whoever calls this has asked it before.
"""

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from amqp import AMQPError
from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.utils import timezone

from accounts.models import Owner, PulseUser, check_thresholds
from queues import bulk
from queues.models import Queue, QueueEvent
from rabbit import connections, directly, snapshot
from rabbit.management import Binding, BrokerAway, BrokerError, NotThere, Refused

logger = logging.getLogger(__name__)

LIMITS = ("unbounded", "warn_length", "max_length")


class Gone(Exception):
    """It isn't on the broker any more. The text says what."""


class Live(NamedTuple):
    """What the broker says of a queue right now; None where it could not be asked, or doesn't say.

    ``ready`` is messages, ``consumers`` a number, ``bindings`` what feeds it beside the default exchange, and
    ``arguments`` what it was declared with.
    """

    ready: int | None = None
    consumers: int | None = None
    bindings: list[Binding] | None = None
    arguments: Mapping[str, Any] | None = None


def delete_queue(queue: Queue, by: Owner) -> None:
    """Delete a queue with all that is in it.

    That it is about to be deleted is written down first, so that a crash in between can be seen.

    Raises:
        PermissionDenied: it was registered by an agent, and this isn't an operator.
        Gone: it isn't on the broker any more, and its row says so now.
        BrokerError: the broker is away or refuses. Where it didn't answer in time, it may still delete the queue.
    """
    require_may_destroy(queue, by)
    announced = _event(queue, QueueEvent.Kind.REMOVING, by)
    try:
        _delete_on_broker(queue)
    except NotThere as error:
        _require_not_listed(queue, announced, error)
        _let_go(queue, announced, None)
        raise Gone("The queue isn't on the broker any more.") from error
    except BrokerError as error:
        if not (isinstance(error, BrokerAway) and error.timed_out):
            announced.delete()
        raise
    _let_go(queue, announced, by)
    logger.info("%s in %s was deleted by %s", queue.name, queue.vhost, by)


def purge_queue(queue: Queue, by: Owner) -> None:
    """Remove the ready messages of a queue. What consumers hold unacknowledged stays.

    Raises:
        PermissionDenied: it was registered by an agent, and this isn't an operator.
        Gone: it isn't on the broker any more, and its row says so now.
        BrokerError: the broker is away or refuses.
    """
    require_may_destroy(queue, by)
    try:
        connections.management().purge_queue(queue.vhost, queue.name)
    except NotThere as error:
        _require_not_listed(queue, None, error)
        _let_go(queue, None, None)
        raise Gone("The queue isn't on the broker any more.") from error
    _event(queue, QueueEvent.Kind.PURGED, by)
    logger.info("%s in %s was emptied by %s", queue.name, queue.vhost, by)


def require_may_destroy(queue: Queue, by: Owner) -> None:
    """Make sure that somebody who sees this queue may delete and empty it, too.

    Raises:
        PermissionDenied: it was registered by an agent, and this isn't an operator.
    """
    if queue.registered and not by.is_staff:
        raise PermissionDenied(
            "This queue belongs to an agent's registration, and would be made again. "
            "Remove the agent's subscription instead, or ask an operator."
        )


def set_limits(queue: Queue, by: Owner, *, unbounded: bool, warn_length: int | None, max_length: int | None) -> None:
    """Give a queue limits of its own, in messages; None: as its Pulse user or the policy says.

    Raises:
        PermissionDenied: this isn't an operator.
        ValidationError: by these it would be deleted before anybody is warned, or one is no such number.
    """
    if not by.is_staff:
        raise PermissionDenied("Only operators set the limits of a queue.")
    asked = {"unbounded": unbounded, "warn_length": warn_length, "max_length": max_length}
    with transaction.atomic():
        # The row as it stands now. The account's thresholds are what an empty field of the queue's own means.
        row = Queue.objects.select_for_update(of=("self",)).select_related("pulse_user").get(pk=queue.pk)
        before = {name: getattr(row, name) for name in LIMITS}
        for name, value in asked.items():
            setattr(row, name, value)
        row.clean_fields(exclude={field.name for field in Queue._meta.get_fields()} - set(LIMITS))
        after = {name: getattr(row, name) for name in LIMITS}
        check_limits(row.pulse_user, after["warn_length"], after["max_length"])
        if after != before:
            Queue.objects.filter(pk=row.pk).update(**after)
            _event(row, QueueEvent.Kind.ADJUSTED, by, {"before": before, "after": after})
    for name, value in after.items():
        setattr(queue, name, value)


def check_limits(pulse_user: PulseUser | None, warn_length: int | None, max_length: int | None) -> None:
    """Make sure that a queue of this account can have these limits of its own, in messages.

    Raises:
        ValidationError: it would be deleted before anybody is warned.
    """
    if warn_length is None and max_length is None:
        return
    if pulse_user is not None:
        warn_length = warn_length if warn_length is not None else pulse_user.warn_length
        max_length = max_length if max_length is not None else pulse_user.max_length
    check_thresholds(warn_length, max_length)


def live(queue: Queue) -> Live:
    """Ask the broker about a queue. What it doesn't answer is left out; a broker that is away isn't asked again."""
    found = Live()
    try:
        management = connections.management()
        bindings = management.queue_bindings(queue.vhost, queue.name)
        # Every queue is bound to the default exchange, which has no name, by its own name: nothing to tell.
        found = found._replace(bindings=[binding for binding in bindings if binding.source])
        arguments = management.queue(queue.vhost, queue.name).get("arguments")
        found = found._replace(arguments=arguments if isinstance(arguments, dict) else None)
    except (NotThere, Refused):
        pass  # a name that can't stand in a URL, or a queue whose node is down: AMQP may know more
    except BrokerError as error:
        logger.warning("Asked about %s in %s: %s", queue.name, queue.vhost, error)
        return found
    depth = directly.ask(connections.amqp_url(), [(queue.vhost, queue.name)]).get((queue.vhost, queue.name))
    return found._replace(ready=depth.ready, consumers=depth.consumers) if depth else found


def forget_queues_of(pulse_user: PulseUser) -> int:
    """Note that all queues of a Pulse user were deleted with it, and return their number.

    Three statements, whatever their number. So the next pass does not take the broker's list for a short one. Call it
    while the Pulse user's row is still there: with that, its queues lose their owner.
    """
    now, username = timezone.now(), pulse_user.username
    with transaction.atomic():
        rows = Queue.objects.select_for_update().filter(pulse_user=pulse_user).exclude(state=Queue.State.GONE)
        there = list(rows.order_by().values_list("id", "vhost", "name", "ready", "unacknowledged"))
        rows.update(**_as_gone(), last_seen=now)
        bulk.insert(
            QueueEvent,
            ("queue", "vhost", "queue_name", "kind", "at", "details"),
            [
                (id_, vhost, name, QueueEvent.Kind.REMOVED, now, {**_figures(ready, unacknowledged), "with": username})
                for id_, vhost, name, ready, unacknowledged in there
            ],
        )
    return len(there)


def _delete_on_broker(queue: Queue) -> None:
    try:
        connections.management().delete_queue(queue.vhost, queue.name)
    except Refused as refused:
        if refused.status:
            raise
        try:  # a name like ".." is none in a URL
            directly.delete(connections.amqp_url(), queue.vhost, queue.name)
        except AMQPError as error:
            raise Refused(f"{refused}; by AMQP: {error}", status=0, reason=str(error)) from error
        except OSError as error:
            raise BrokerAway(f"{refused}; by AMQP: {error}") from error


def _require_not_listed(queue: Queue, announced: QueueEvent | None, error: NotThere) -> None:
    """Make sure that a queue is gone: the broker says 404 of one whose node is down, too, but lists it.

    Raises:
        BrokerError: it is listed, or can't be looked for.
    """
    try:
        if (queue.vhost, queue.name) in snapshot.names(connections.management(), [queue.vhost]):
            raise BrokerAway(f"{error}; it is still listed, so its node is down: ask again when that runs") from error
    except BrokerError:
        if announced is not None:
            announced.delete()
        raise


def _let_go(queue: Queue, announced: QueueEvent | None, by: Owner | None) -> None:
    """Note that a queue is gone, by somebody's hand or without it; whoever was first has the event."""
    with transaction.atomic():
        row = Queue.objects.select_for_update().get(pk=queue.pk)
        if announced is not None and by is None:
            announced.delete()
        if by is not None:
            _event(row, QueueEvent.Kind.REMOVED, by)
        elif row.state != Queue.State.GONE:
            _event(row, QueueEvent.Kind.GONE, None)
        if row.state != Queue.State.GONE:
            Queue.objects.filter(pk=row.pk).update(**_as_gone(), last_seen=timezone.now())
    queue.refresh_from_db()


def _as_gone() -> dict[str, Any]:
    """Return what a pass writes of a queue that is gone, so that both leave the same row."""
    return {
        "state": Queue.State.GONE, "misses": 0, "ready": None, "unacknowledged": None, "delete_sent_at": None,
        "consumers": None, "unattended_since": None,
    }  # fmt: skip


def _event(queue: Queue, kind: str, by: Owner | None, details: dict[str, Any] | None = None) -> QueueEvent:
    return QueueEvent.objects.create(
        queue=queue,
        vhost=queue.vhost,
        queue_name=queue.name,
        kind=kind,
        at=timezone.now(),
        by=by,
        details=details if details is not None else _figures(queue.ready, queue.unacknowledged),
    )


def _figures(ready: int | None, unacknowledged: int | None) -> dict[str, int | None]:
    known = ready is not None and unacknowledged is not None
    return {"length": (ready or 0) + (unacknowledged or 0) if known else None}
