"""What owners and operators do to queues, on a page or through the API: delete, purge, set limits.

Callers check with ``Queue.objects.seen_by`` that the visitor may see the queue.
"""

import copy
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, NamedTuple

from django.core.exceptions import PermissionDenied, ValidationError
from django.db import transaction
from django.utils import timezone

from accounts import audit
from accounts.access import vouching
from accounts.models import Owner, PulseUser, check_thresholds
from core import broker, bulk
from core.confirmation import ConfirmableChange
from core.each import Results
from core.refusals import Refusal
from queues.actions import effects, limit_requests
from queues.archives.outcomes import Removed
from queues.guard import destroying, feeding, registered
from queues.guard.activity import Consuming, activity_in, consuming_in
from queues.guard.destroying import InUse, Target
from queues.models import Archive, Queue, QueueEvent, QueueSample
from queues.rules.activity import WINDOW_SECONDS, Activity
from queues.rules.rows import GONE_FIELDS, WITHOUT_COUNTS
from queues.rules.temporary_limits import END, LIMITS, recorded, set_end
from rabbit.entities import Binding, QueueRates
from rabbit.errors import BrokerError, NotOnBroker, Refused, was_not_executed
from rabbit.management import Management
from rabbit.names import readable
from rabbit.policies import LengthLimit, limit_of
from rabbit.requests.queues import rates_in
from rabbit.snapshot import STREAM

logger = logging.getLogger(__name__)

# Entries of the audit trail.
DELETED, PURGED = "deleted on the broker", "purged"

IN_USE = "Guardian or another person is deleting, purging or moving messages of this queue. Try again in two minutes."


class Gone(Refusal):
    """The broker does not list the queue or exchange now. The text says so, and what happens next."""

    status = HTTPStatus.NOT_FOUND


class Live(NamedTuple):
    """A queue's current state on the broker. None: the broker did not answer, or does not report it.

    ``ready`` counts messages. ``bindings`` lacks the one to the default exchange. ``upstream`` are the bindings between
    exchanges that lead to them. ``limit`` is the broker's own limit of the queue's length, if it has one. ``size`` are
    the bytes of its messages' bodies. ``activity`` are the figures of a diagnosis. ``why_unknown`` says why ``ready``
    and ``consumers`` are None.
    """

    ready: int | None = None
    consumers: int | None = None
    why_unknown: str = "the broker did not answer"
    bindings: list[Binding] | None = None
    arguments: Mapping[str, Any] | None = None
    upstream: list[Binding] | None = None
    limit: LengthLimit | None = None
    rates: QueueRates | None = None
    size: int | None = None
    consuming: Sequence[Consuming] | None = None
    activity: Activity | None = None


def delete_queue(queue: Queue, by: Owner, *, keep: bool = True) -> Removed:
    """Delete a queue. ``keep`` its messages in an archive, if archives are on.

    The intent is recorded first, so that a crash in between leaves a trace. After ``Gone`` the row stays, and the next
    lists decide. After a BrokerError that isn't ``was_not_executed``, the queue may be deleted.
    """
    require_may_destroy(queue, by)
    _require_possible(why_not_deleted(queue))
    with (
        _intent_recorded(queue, QueueEvent.Kind.REMOVING, by),
        audit.audited(by, DELETED, queue),
        broker.session(queue.vhost) as session,
    ):
        removed = destroying.delete_queue(session, _target(queue, by, Archive.Reason.DELETED, keep))
    _record_deletion(queue, by)
    logger.info("%s in %s was deleted by %s", queue.name, queue.vhost, by)
    return removed


def purge_queue(queue: Queue, by: Owner, *, keep: bool = True) -> Removed:
    """Purge the ready messages of a queue, and ``keep`` them in an archive. Unacknowledged messages stay.

    The event is recorded first, so that a lost answer leaves a trace. The errors are those of ``delete_queue``.
    """
    require_may_destroy(queue, by)
    _require_possible(why_not_purged(queue))
    with (
        _intent_recorded(queue, QueueEvent.Kind.PURGED, by),
        audit.audited(by, PURGED, queue),
        broker.session(queue.vhost) as session,
    ):
        removed = destroying.purge_queue(session, _target(queue, by, Archive.Reason.PURGED, keep))
    Queue.objects.filter(pk=queue.pk).update(ready=0)  # so that pages show it before the next list
    if queue.unacknowledged is not None:
        QueueSample.objects.create(queue=queue, at=timezone.now(), length=queue.unacknowledged)
    logger.info("%s in %s was purged by %s", queue.name, queue.vhost, by)
    return removed


def why_not_archived(queue: Queue, by: Owner) -> str:
    """Return why the messages of a queue can't be archived, or an empty text if they can be, within the bounds."""
    return destroying.why_not(_target(queue, by, Archive.Reason.DELETED, keep=True)) or destroying.why_given_up(queue)


def _target(queue: Queue, by: Owner, reason: Archive.Reason, keep: bool) -> Target:
    return Target(
        vhost=queue.vhost,
        name=queue.name,
        type=queue.type,
        reason=reason,
        queue_id=queue.pk,
        pulse_user_id=queue.pulse_user_id,
        by=by,
        is_archived=keep and (queue.pulse_user is None or queue.pulse_user.keeps_archives),
        is_auto_delete=queue.auto_delete,
        held=queue.unacknowledged or 0,
    )


def require_may_destroy(queue: Queue, by: Owner) -> None:
    """Require that this owner, who may see the queue, may delete and purge it."""
    if queue.registered and not by.is_staff:
        raise PermissionDenied(
            "An agent registered this queue, so Guardian would declare it again. "
            "Delete the agent's subscription instead, or ask an operator."
        )


def why_not_deleted(queue: Queue) -> str:
    """Return why the broker would refuse to delete this queue, or an empty text."""
    if not queue.exclusive:
        return ""
    return (
        "Only the connection that declared this exclusive queue can delete or purge it. The broker deletes the queue "
        "when that connection closes."
    )


def why_not_purged(queue: Queue) -> str:
    """Return why the broker would refuse to purge this queue, or an empty text."""
    if queue.type == STREAM:
        return "A stream can't be purged. Delete it, or limit its size or age with a policy."
    return why_not_deleted(queue)


def _require_possible(why_not: str) -> None:
    if why_not:
        raise Refused(why_not, status=0, reason=why_not)


def set_limits(queue: Queue, by: Owner | None, *, confirm: str = "", **limits: Any) -> None:
    """Set a queue's own limits, as ``set_limits_of_all`` does, and raise the error if that failed."""
    for _, error in set_limits_of_all([queue], by, limits, confirm).failed:
        raise error


def set_limits_of_all(
    queues: Collection[Queue], by: Owner | None, limits: Mapping[str, Any], confirm: str = ""
) -> Results[Queue]:
    """Set the own limits of several queues: ``unbounded``, and ``warn_length`` and ``max_length`` in messages.

    Limits that are left out stay. None: that of the Pulse user or the policy applies. At ``limits_until`` the limits
    before return; changed limits without it are permanent. ``by`` is None for a command. A queue fails with
    ValidationError, or with Queue.DoesNotExist if its row was deleted in the meantime.
    """
    if not vouching.acts_as_operator(by):
        raise PermissionDenied("Only operators set the limits of a queue.")
    until = limits.get("limits_until")
    values = {**limits, "limits_until": until.isoformat()} if until else limits
    change = ConfirmableChange(by, "set limits", queues, values, confirm)
    results: Results[Queue] = Results([])
    changed: list[tuple[Queue, Queue]] = []
    with transaction.atomic():
        actor = _lock_actor(by)
        rows = _lock(queues)
        for queue in queues:
            try:
                if (before := rows.get(queue.pk)) is None:
                    raise Queue.DoesNotExist("The queue was removed in the meantime.")
                after = _with_limits(before, limits)
            except (ValidationError, Queue.DoesNotExist) as error:
                results.failed.append((queue, error))
                continue
            results.succeeded.append(queue)
            rows[queue.pk] = after
            if recorded(before) != recorded(after):
                changed.append((before, after))
        change.require_confirmed(effects.of_limits(changed))
        _write_limits(changed, by, actor)
    for queue in results.succeeded:
        for name in (*LIMITS, *END):
            setattr(queue, name, getattr(rows[queue.pk], name))
    return results


def _lock(queues: Collection[Queue]) -> dict[int, Queue]:
    """Lock these queues until the transaction ends, and return their rows by primary key."""
    selected = Queue.objects.filter(pk__in=[queue.pk for queue in queues])
    # An empty limit falls back to the Pulse user's threshold, so read both rows now.
    locked = selected.select_for_update(of=("self",)).select_related("pulse_user").order_by("pk")
    return {row.pk: row for row in locked}


def _with_limits(queue: Queue, limits: Mapping[str, Any]) -> Queue:
    """Return a copy of a queue with these limits."""
    changed = copy.copy(queue)
    for name, value in limits.items():
        setattr(changed, name, value)
    changed.clean_fields(exclude={field.name for field in Queue._meta.get_fields()} - set(LIMITS))
    if {"warn_length", "max_length"} & limits.keys():  # those that stay may contradict a default that changed since
        check_limits(changed.pulse_user, changed.warn_length, changed.max_length)
    set_end(changed, queue, limits, timezone.now())
    return changed


def _write_limits(changed: Collection[tuple[Queue, Queue]], by: Owner | None, actor: Owner | None) -> None:
    """Write and record these limits. Each queue is given before and after."""
    if not changed:
        return
    changes = [audit.Change(after, recorded(before), recorded(after)) for before, after in changed]
    columns = (*LIMITS, *END)
    bulk.update(Queue, columns, [(after.pk, *(getattr(after, name) for name in columns)) for _, after in changed])
    limit_requests.answer([after for _, after in changed], by)
    origin: dict[str, Any] = {} if by else {"command": audit.command()}
    QueueEvent.objects.bulk_create(
        row.new_event(QueueEvent.Kind.ADJUSTED, actor, before=before, after=after, **origin)
        for (_, row), (_, before, after) in zip(changed, changes, strict=True)
    )
    audit.record_changes(by, changes)


def check_limits(pulse_user: PulseUser | None, warn_length: int | None, max_length: int | None) -> None:
    """Check a queue's own limits, in messages, together with those of its Pulse user."""
    if warn_length is None and max_length is None:
        return
    if pulse_user is not None:
        warn_length = warn_length if warn_length is not None else pulse_user.warn_length
        max_length = max_length if max_length is not None else pulse_user.max_length
    check_thresholds(warn_length, max_length)


def live(queue: Queue) -> Live:
    """Query the broker about a queue. After the first failure to reach it, the rest stays None."""
    state = Live()
    try:
        management = broker.management()
        bindings = management.queue_bindings(queue.vhost, queue.name)
        # Every queue is bound to the default exchange, whose name is empty.
        state = state._replace(bindings=[binding for binding in bindings if binding.source])
        row = management.queue(queue.vhost, queue.name, samples_of=WINDOW_SECONDS)
        arguments, size = row.get("arguments"), row.get("message_bytes")
        state = state._replace(
            arguments=arguments if isinstance(arguments, dict) else None,
            rates=rates_in(row),
            size=size if isinstance(size, int) else None,
        )
        (consuming,) = consuming_in(queue.vhost, [row], management)
        state = state._replace(consuming=consuming, activity=activity_in(row, consuming, timezone.now()))
        state = _with_surroundings(state, queue, management)
    except (NotOnBroker, Refused):
        pass  # the name is invalid in a URL, or the queue's node is down: AMQP may still answer
    except BrokerError as error:
        logger.warning("Could not query %s in %s: %s", queue.name, queue.vhost, error)
        return state
    try:
        with broker.session(queue.vhost) as session:
            depth = session.declare_passively(queue.name)
    except Refused as error:
        why = f"the broker refuses: {readable(error.reason)}"
        if queue.exclusive:
            why = "only the connection that declared the queue can query it"
        return state._replace(why_unknown=why)
    except BrokerError:
        return state
    if depth is None:
        return state
    activity = state.activity and state.activity._replace(consumers=depth.consumers)
    return state._replace(ready=depth.ready, consumers=depth.consumers, activity=activity)


def _with_surroundings(state: Live, queue: Queue, management: Management) -> Live:
    """Return the state with what leads to the queue's exchanges, and with the broker's own limit of its length."""

    def bindings_to(names: Collection[str]) -> dict[str, list[Binding]]:
        return {name: management.bindings_to_exchange(queue.vhost, name) for name in names}

    upstream = feeding.upstream(state.bindings or [], bindings_to)
    row = {"name": queue.name, "type": queue.type, "arguments": state.arguments}
    policies = management.policies(queue.vhost), management.operator_policies(queue.vhost)
    return state._replace(upstream=upstream, limit=limit_of(row, *policies))


@contextmanager
def _intent_recorded(queue: Queue, kind: str, by: Owner) -> Iterator[None]:
    """Record the request that follows, and delete the record if the broker certainly did not carry it out.

    Raises Gone if the broker answers 404. It does so for a queue whose node is down too, so the queue may still exist.
    Raises Refusal while another request fetches its messages.
    """
    with transaction.atomic():
        event = queue.new_event(kind, _lock_actor(by), length=queue.length)
        event.save()
    try:
        yield
    except BrokerError as error:
        if was_not_executed(error):
            event.delete()
        if isinstance(error, InUse):
            raise Refusal(IN_USE, status=HTTPStatus.CONFLICT) from error
        if isinstance(error, NotOnBroker):
            raise Gone(
                "The broker doesn't list the queue at the moment. If it is gone, its page says so after the next few "
                "lists. If not, its node is down: try again when the node is up."
            ) from error
        raise


def _record_deletion(queue: Queue, by: Owner) -> None:
    with transaction.atomic():
        actor = _lock_actor(by)
        row = Queue.objects.select_for_update().get(pk=queue.pk)
        row.new_event(QueueEvent.Kind.REMOVED, actor, length=row.length).save()
        if row.state != Queue.State.GONE:
            Queue.objects.filter(pk=row.pk).update(**GONE_FIELDS, **WITHOUT_COUNTS, last_seen=timezone.now())
        if row.owner_id is not None:
            registered.provider().record_missing([(row.vhost, row.name)])  # the next pass declares it again
    queue.refresh_from_db()


def _lock_actor(by: Owner | None) -> Owner | None:
    """Lock and return the acting owner, inside a transaction. None is a command, or the owner was removed meanwhile.

    Call it before locking queues: the removal of an owner locks in this order too.
    """
    return next(iter(vouching.lock_existing([by])), None) if by else None
