"""Bring a deleted queue back: declare it as it was, bind it, and send its messages.

``queues/rules/restoring.py`` plans it. The plan is stored with the replay of the messages, whose task declares the
queue first (``declaring.py``). If the queue exists, only messages are sent.
"""

from collections.abc import Collection
from http import HTTPStatus
from typing import NamedTuple
from uuid import UUID

from django.db.models import F, Max

from accounts.models import Owner
from core import broker
from core.confirmation import ConfirmableChange, ConfirmationRequired
from core.refusals import Refusal
from queues.archives import replay
from queues.archives.replay import ReplayRefused, Room
from queues.models import Archive, Replay
from queues.rules import restoring
from queues.rules.restoring import Definition, Load, Plan, Policies, RestoreEffect
from rabbit.amqp import Session
from rabbit.arguments import differences
from rabbit.errors import NotOnBroker, Refused
from rabbit.names import NameKind, kind_of_queue
from rabbit.permissions import FULL_ACCESS, for_pulse_user
from rabbit.policies import effective

UNKNOWN = (
    "This archive does not say how its queue was declared. Declare the queue first, for example by starting its "
    "consumer. Then bring its messages back."
)
RESERVED = "RabbitMQ reserves names that start with amq. for itself. Choose another name."
BEING_REMOVED = "The Pulse user is being removed, so its queues can't be restored."


class Wanted(NamedTuple):
    """What to send, and where to. An empty ``queue``: the one that the messages are from.

    ``fitting``: without a range, choose the last messages that fit below the deletion limit, or go on after an earlier
    replay. ``without`` are arguments to leave out.
    """

    queue: str = ""
    exchange: str = ""
    first: int | None = None
    last: int | None = None
    rate: int | None = None
    without: Collection[str] = ()
    fitting: bool = False


class Restore(NamedTuple):
    """A restore that can begin. ``question``: what must be confirmed before, if anything."""

    replay: Replay
    plan: Plan
    room: Room
    effect: RestoreEffect
    question: ConfirmationRequired | None = None


def look(archive: Archive, by: Owner, wanted: Wanted, confirm: str = "") -> Restore:
    """Return what a restore would do now. The errors are those of ``start``."""
    with broker.session(archive.vhost) as session:
        return _look(session, archive, by, wanted, confirm)


def start(archive: Archive, by: Owner, wanted: Wanted, *, confirm: str = "", uuid: UUID | None = None) -> Replay:
    """Start a restore. The task carries it out.

    ``uuid`` is the replay's: a form that is sent twice starts one.

    Raises:
        ReplayRefused: the archive's Pulse user may not write to the target, or the target can't be declared.
        ConfirmationRequired: messages would be lost, or the queue would be over its deletion limit.
    """
    with replay.beginning(archive) as session:
        if uuid and (started := Replay.objects.filter(uuid=uuid).first()):
            return started
        found = _look(session, archive, by, wanted, confirm)
        if found.question is not None:
            raise found.question
        found.replay.uuid = uuid or found.replay.uuid
        replay.save(found.replay, by)
    return found.replay


def _look(session: Session, archive: Archive, by: Owner, wanted: Wanted, confirm: str) -> Restore:
    queue = wanted.queue or ("" if wanted.exchange else archive.queue_name)
    replay.require_writable(archive, queue, wanted.exchange, "queue")
    room = replay.room(session, archive.vhost, archive.pulse_user, queue, wanted.exchange)
    first, last = wanted.first, wanted.last
    if wanted.fitting and first is last is None:
        first, last = _fitting(archive, queue, room)
    one = replay.planned(archive, queue, wanted.exchange, first or 1, last)
    one.rate = wanted.rate
    if wanted.exchange:
        if not room.exists:
            raise ReplayRefused("The broker has no exchange of this name. Declare it first.")
        return Restore(one, Plan(), room, RestoreEffect((), one.total))
    plan = _plan(archive, one, room, wanted.without)
    one.restore = plan.as_json()
    effect = RestoreEffect(plan.losses, one.total, room.limit, room.fits)
    values = [queue, one.first, one.last, sorted(wanted.without), plan.declares]
    change = ConfirmableChange(by, "restore", [archive], {"values": values}, confirm)
    return Restore(one, plan, room, effect, change.question(effect))


def _fitting(archive: Archive, queue: str, room: Room) -> tuple[int, int]:
    """Return the first and the last message of the part to send: the last that fit, or those after an earlier one.

    If none fits, it is all.
    """
    fits, end = room.fits or archive.messages, archive.messages
    begin = archive.replays.filter(to_queue=queue, sent__gt=0).aggregate(to=Max(F("first") + F("sent")))["to"] or 1
    if 1 < begin <= end:
        return begin, min(end, begin - 1 + fits)
    return max(1, end - fits + 1), end


def _plan(archive: Archive, one: Replay, room: Room, without: Collection[str]) -> Plan:
    vhost, name = archive.vhost, one.to_queue
    if not room.exists:
        _require_declarable(archive, name)
    management = broker.management()
    was = _definition(archive)
    try:
        row = management.queue_arguments(vhost, name) if room.exists else {}
    except (NotOnBroker, Refused):  # its name is invalid in a URL
        row = {}
    type_ = str(row.get("type") or (was.type if was else ""))
    policies = Policies(
        *(effective(found, name, type_) for found in (management.policies(vhost), management.operator_policies(vhost)))
    )
    # About as much as its share of all messages.
    size = archive.bytes * one.total // archive.messages
    load = Load(one.total, size, (room.ready or 0) + room.coming)
    if room.exists or was is None:
        arguments = row.get("arguments")
        found = arguments if isinstance(arguments, dict) else {}
        others = differences(was.arguments, found) if was and row else []
        return Plan(differences=others, losses=restoring.losses(found, policies, load))
    rights = for_pulse_user(archive.pulse_user.username) if archive.pulse_user else FULL_ACCESS
    exchanges = {exchange.name for exchange in management.exchanges(vhost)} if was.bindings else set()
    return restoring.planned(was, rights, exchanges, policies, load, without)


def _definition(archive: Archive) -> Definition | None:
    """Return how the archive's queue was declared and bound, or None if that is not known."""
    if archive.type is None or archive.arguments is None:
        return None
    durable, auto_delete = archive.durable is not False, bool(archive.auto_delete)
    return Definition(archive.type, durable, auto_delete, archive.arguments, archive.bindings)


def _require_declarable(archive: Archive, name: str) -> None:
    if _definition(archive) is None:
        raise Refusal(UNKNOWN, "queue", HTTPStatus.CONFLICT)
    if kind_of_queue(name) == NameKind.SYSTEM:
        raise Refusal(RESERVED, "queue")
    if archive.pulse_user is not None and archive.pulse_user.removing_since is not None:
        raise Refusal(BEING_REMOVED, "queue", HTTPStatus.CONFLICT)
