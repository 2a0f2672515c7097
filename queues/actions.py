"""What people do to queues by hand, whether on a page or through the API: delete, empty, give other limits.

Who sees a queue at all is ``Queue.objects.seen_by``; whoever calls this has asked it before.
"""

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from amqp import AMQPError
from django.core.exceptions import PermissionDenied, ValidationError
from django.db import transaction
from django.utils import timezone

from accounts import audit, vouching
from accounts.models import UNCHANGED, Owner, PulseUser, Unchanged, check_thresholds
from core import broker
from queues import registered
from queues.models import Queue, QueueEvent
from queues.tombstones import figures, gone_fields
from rabbit import amqp
from rabbit.management import Binding, BrokerError, BrokerUnavailable, NotOnBroker, Refused, was_not_executed

logger = logging.getLogger(__name__)

LIMITS = ("unbounded", "warn_length", "max_length")

LIMITS_BATCH_SIZE = 1000
"""So many queues are given limits in one transaction: a pass waits for it."""

# The words of the audit trail.
DELETED, PURGED = "deleted on the broker", "purged"


class Gone(Exception):
    """The broker doesn't have it, or doesn't show it at the moment. The text says what, and what comes next."""


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
        Gone: the broker doesn't show it. Its row stays as it is; the next lists decide.
        BrokerError: the broker is away or refuses. Unless it ``was_not_executed``, the queue may be deleted anyway.
    """
    require_may_destroy(queue, by)
    with _intent_recorded(queue, QueueEvent.Kind.REMOVING, by), audit.audited(by, DELETED, queue):
        _delete_on_broker(queue)
    _record_deletion(queue, by)
    logger.info("%s in %s was deleted by %s", queue.name, queue.vhost, by)


def purge_queue(queue: Queue, by: Owner) -> None:
    """Remove the ready messages of a queue. What consumers hold unacknowledged stays.

    It is written down first, so that it is there whatever became of the answer.

    Raises:
        PermissionDenied: it was registered by an agent, and this isn't an operator.
        Gone: the broker doesn't show it. Its row stays as it is; the next lists decide.
        BrokerError: the broker is away or refuses. Unless it ``was_not_executed``, the queue may be empty all the same.
    """
    require_may_destroy(queue, by)
    with _intent_recorded(queue, QueueEvent.Kind.PURGED, by), audit.audited(by, PURGED, queue):
        broker.management().purge_queue(queue.vhost, queue.name)
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


def set_limits(
    queue: Queue,
    by: Owner,
    *,
    unbounded: bool | Unchanged = UNCHANGED,
    warn_length: int | Unchanged | None = UNCHANGED,
    max_length: int | Unchanged | None = UNCHANGED,
) -> None:
    """Give a queue limits of its own, in messages; None: as its Pulse user or the policy says.

    Raises:
        PermissionDenied: this isn't an operator.
        ValidationError: by these it would be deleted before anybody is warned, or one is no such number.
        Queue.DoesNotExist: its row is gone meanwhile.
    """
    asked = {"unbounded": unbounded, "warn_length": warn_length, "max_length": max_length}
    refused = set_limits_of_all([queue], by, {name: value for name, value in asked.items() if value is not UNCHANGED})
    for error in refused.values():
        raise error


def set_limits_of_all(
    queues: Collection[Queue], by: Owner, limits: Mapping[str, Any]
) -> dict[int, ValidationError | Queue.DoesNotExist]:
    """Give several queues these limits, any of ``LIMITS``, and return by primary key why some can't have them.

    It takes as many statements for a thousand queues as for one.

    Raises:
        PermissionDenied: this isn't an operator.
    """
    if not by.is_staff:
        raise PermissionDenied("Only operators set the limits of a queue.")
    refused: dict[int, ValidationError | Queue.DoesNotExist] = {}
    queues = list(queues)
    for start in range(0, len(queues), LIMITS_BATCH_SIZE):
        refused |= _set_limits(queues[start : start + LIMITS_BATCH_SIZE], by, limits)
    return refused


def _set_limits(
    queues: Collection[Queue], by: Owner, limits: Mapping[str, Any]
) -> dict[int, ValidationError | Queue.DoesNotExist]:
    refused: dict[int, ValidationError | Queue.DoesNotExist] = {}
    changes: list[audit.Change] = []
    with transaction.atomic():
        who = _lock_actor(by)
        # The rows as they stand now. The account's thresholds are what an empty field of a queue's own means.
        these = Queue.objects.filter(pk__in=[queue.pk for queue in queues]).order_by("pk")
        locked = these.select_for_update(of=("self",)).select_related("pulse_user")
        rows = {row.pk: row for row in locked}
        for queue in queues:
            if (row := rows.get(queue.pk)) is None:
                refused[queue.pk] = Queue.DoesNotExist("It is gone meanwhile.")
                continue
            before = {name: getattr(row, name) for name in LIMITS}
            try:
                for name, value in limits.items():
                    setattr(row, name, value)
                row.clean_fields(exclude={field.name for field in Queue._meta.get_fields()} - set(LIMITS))
                check_limits(row.pulse_user, row.warn_length, row.max_length)
            except ValidationError as error:
                refused[queue.pk] = error
                continue
            after = {name: getattr(row, name) for name in LIMITS}
            if after != before:
                changes.append(audit.Change(row, before, after))
        if changes:
            Queue.objects.filter(pk__in=[change.thing.pk for change in changes]).update(**limits)
            QueueEvent.objects.bulk_create(
                _new_event(rows[row.pk], QueueEvent.Kind.ADJUSTED, who, {"before": before, "after": after})
                for row, before, after in changes
            )
            audit.record_changes(by, changes)
    for queue in queues:
        if queue.pk not in refused:
            for name in LIMITS:
                setattr(queue, name, getattr(rows[queue.pk], name))
    return refused


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
        management = broker.management()
        bindings = management.queue_bindings(queue.vhost, queue.name)
        # Every queue is bound to the default exchange, which has no name, by its own name: nothing to tell.
        found = found._replace(bindings=[binding for binding in bindings if binding.source])
        arguments = management.queue(queue.vhost, queue.name).get("arguments")
        found = found._replace(arguments=arguments if isinstance(arguments, dict) else None)
    except (NotOnBroker, Refused):
        pass  # a name that can't stand in a URL, or a queue whose node is down: AMQP may know more
    except BrokerError as error:
        logger.warning("Asked about %s in %s: %s", queue.name, queue.vhost, error)
        return found
    depth = amqp.declare_passively(broker.amqp_url(), [(queue.vhost, queue.name)]).get((queue.vhost, queue.name))
    return found._replace(ready=depth.ready, consumers=depth.consumers) if depth else found


def _delete_on_broker(queue: Queue) -> None:
    try:
        broker.management().delete_queue(queue.vhost, queue.name)
    except Refused as refused:
        if refused.status:
            raise
        try:  # a name like ".." is none in a URL
            amqp.delete_queue(broker.amqp_url(), queue.vhost, queue.name)
        except AMQPError as error:
            raise Refused(f"{refused}; by AMQP: {error}", status=0, reason=str(error)) from error
        except OSError as error:
            never_reached = isinstance(error, ConnectionRefusedError)
            raise BrokerUnavailable(f"{refused}; by AMQP: {error}", never_reached=never_reached) from error


@contextmanager
def _intent_recorded(queue: Queue, kind: str, by: Owner) -> Iterator[None]:
    """Write down what is about to be asked of the broker, and take it back where that was certainly not done.

    Raises:
        Gone: the broker doesn't show the queue. It says 404 of one whose node is down, too, so that decides nothing.
    """
    with transaction.atomic():
        announced = _new_event(queue, kind, _lock_actor(by), figures(queue.ready, queue.unacknowledged))
        announced.save()
    try:
        yield
    except BrokerError as error:
        if was_not_executed(error):
            announced.delete()
        if isinstance(error, NotOnBroker):
            raise Gone(
                "The broker doesn't show the queue at the moment. If it is gone, its page says so within a few looks "
                "at the broker; if not, its node is down: try again when that runs."
            ) from error
        raise


def _record_deletion(queue: Queue, by: Owner) -> None:
    """Record that this owner deleted a queue."""
    with transaction.atomic():
        who = _lock_actor(by)
        row = Queue.objects.select_for_update().get(pk=queue.pk)
        _new_event(row, QueueEvent.Kind.REMOVED, who, figures(row.ready, row.unacknowledged)).save()
        if row.state != Queue.State.GONE:
            Queue.objects.filter(pk=row.pk).update(**gone_fields(), last_seen=timezone.now())
        if row.owner_id is not None:
            registered.provider().record_missing([(row.vhost, row.name)])  # the sweep makes a registered queue again
    queue.refresh_from_db()


def _new_event(queue: Queue, kind: str, by: Owner | None, details: dict[str, Any]) -> QueueEvent:
    return QueueEvent(
        queue=queue,
        vhost=queue.vhost,
        queue_name=queue.name,
        kind=kind,
        at=timezone.now(),
        by=by,
        details=details,
    )


def _lock_actor(by: Owner) -> Owner | None:
    """Return who does it, in a transaction of the caller's; None: they were removed meanwhile. The trail names them.

    It comes before queues are locked: whoever removes an owner goes that way, too.
    """
    return next(iter(vouching.lock_existing([by])), None)
