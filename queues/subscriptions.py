"""Registering: how agents get their queues, with the right arguments, and logins that read these alone.

The row comes first, being made, so that no queue made here is ever without one; it is ready when the broker has the
queue. What a crash leaves in between is being made: the next call or the sweep finishes it. A registration that fails
takes its row back; what of it may have come to the broker is left to ``removals.py``.

The password of a login is the token last presented. It is on the broker alone; here is which token it is. Before the
broker is asked, it is written down as the next one, beside the one that is the password still: until the answer is here
it may be either, and whichever is revoked takes the password along.
"""

import logging
import re
import uuid as uuids
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple, TypedDict, TypeVar, Unpack

from django.core.exceptions import ObjectDoesNotExist, PermissionDenied
from django.db import IntegrityError, OperationalError, connection, transaction
from django.db.models import Q, QuerySet
from django.db.models.functions import Now
from django.utils import timezone

from accounts import hold, vouching
from accounts.models import AuthToken, Owner
from queues import bulk, removals, sealing
from queues.models import (
    AgentIdentity,
    AgentVhost,
    Consumer,
    EventSubscription,
    ObjectType,
    Offering,
    Registration,
    Removal,
    SubscriptionQueue,
)
from rabbit import arguments, connections, names, permissions
from rabbit.management import BrokerAway, BrokerError, Malformed, Management, NotEqual, NotThere, Refused
from rabbit.permissions import Permissions

logger = logging.getLogger(__name__)

ROUNDS = 3
"""So often is a registration begun again whose row somebody removes meanwhile."""

WAIT_SECONDS = 10.0
"""So long does one request wait for another that sets the same login's password, or makes the same vhost."""

OBJECT_TYPES = frozenset(ObjectType.values)

SURE_FOR = timedelta(minutes=1)
"""So long after its row was inserted a queue may be said to be there by the quick way; RemovedQueues stay longer."""

REMOVED_AFTER = timedelta(minutes=1)
"""When what may be left of a failed registration is removed: by then the broker has done what it was asked late."""

NOT_USABLE = "There is no such offering, or your agents may not have its events."

PASSWORD = ["token", "next_token", "password_set"]
"""The fields that say which token is a login's password."""

NOTHING_NEW: Mapping[str, Any] = {}

_MAY_SUBSCRIBE = """(%s OR EXISTS (
            SELECT 1 FROM queues_offering_members member
            WHERE member.offering_id = offering.id AND member.owner_id = subscription.owner_id
        ))"""
"""Whether the owner of a subscription may subscribe to an offering; its parameter: whether that is an operator."""

_REGISTER_QUEUE = f"""
    INSERT INTO queues_subscriptionqueue
        (uuid, subscription_id, offering_id, object_type, vhost, queue_name, created, state)
    SELECT %s, subscription.id, offering.id, %s, %s, %s, %s, '{Registration.CREATING}'
    FROM queues_eventsubscription subscription, queues_offering offering
    WHERE subscription.uuid = %s AND subscription.owner_id = %s
        AND subscription.token_id = %s AND subscription.next_token_id IS NULL AND subscription.password_set
        AND offering.uuid = %s AND {_MAY_SUBSCRIBE}
    ON CONFLICT DO NOTHING
"""  # noqa: S608 - all values are parameters

_MARK_QUEUE = f"""
    UPDATE queues_subscriptionqueue SET state = '{Registration.READY}'
    WHERE uuid = %s
        AND NOT EXISTS (
            SELECT 1 FROM queues_removal WHERE kind = '{Removal.Kind.QUEUE}' AND vhost = %s AND name = %s
        )
        AND NOT EXISTS (SELECT 1 FROM queues_removedqueue WHERE vhost = %s AND name = %s)
"""  # noqa: S608 - all values are parameters

_UUID = re.compile("[0-9a-fA-F]{32}|[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")

Row = TypeVar("Row", SubscriptionQueue, Consumer)
Made = TypeVar("Made", EventSubscription, SubscriptionQueue, Consumer)


class Presented(NamedTuple):
    """The token that a request came with. ``key`` is the token itself, and secret."""

    token: AuthToken
    key: str

    def __repr__(self) -> str:
        return f"<Presented {self.token.uuid}>"


class NoSuchOffering(ValueError):
    """There is no such offering, or it isn't one that the owner's agents may subscribe to."""


class NoSuchType(ValueError):
    """Events have no such object type."""


class TakenName(ValueError):
    """The owner has an identity of that name for that offering."""


class Busy(BrokerAway):
    """The broker is there, and this one thing can't be done right now: another request is at it, or its node is down.

    Whether anything was done is unknown, so ask again later.
    """


class Introduction(TypedDict, total=False):
    """What an agent tells of itself beside its name and its offering."""

    version: str
    dependencies: Sequence[dict[str, str]]
    config_file_path: str
    config_file_content: str
    last_restarted: datetime | None


class Introduced(Introduction, total=False):
    """All that an agent can change of its identity."""

    name: str
    offering: Offering


# What is asked for


def read_uuid(text: Any) -> uuids.UUID:
    """Return the UUID that this text is: 32 hex digits, with the four dashes in their places or without any.

    Python and Django take numbers, braces, a prefix and dashes anywhere, too, by which a mistake names something else.

    Raises:
        ValueError: it is anything else.
    """
    if not isinstance(text, str) or _UUID.fullmatch(text) is None:
        raise ValueError("A UUID is 32 hex digits, with or without its four dashes.")
    return uuids.UUID(text)


def usable_offering(owner: Owner, uuid: str | uuids.UUID) -> Offering:
    """Return the offering with this UUID, with or without dashes.

    Raises:
        NoSuchOffering: it isn't there, or isn't the owner's to subscribe to.
    """
    try:
        wanted = uuid if isinstance(uuid, uuids.UUID) else read_uuid(uuid)
    except ValueError as error:
        raise _no_such_offering() from error
    offering = Offering.objects.subscribed_by(owner).filter(uuid=wanted).first()
    if offering is None:
        raise _no_such_offering()
    return offering


def _no_such_offering() -> NoSuchOffering:
    return NoSuchOffering("There is no such offering, or your agents may not have its events.")


def check_type(object_type: str) -> str:
    """Return this object type.

    Raises:
        NoSuchType: it isn't one.
    """
    if object_type not in OBJECT_TYPES:
        raise NoSuchType(f"There is no such object type; there are: {', '.join(ObjectType.values)}.")
    return object_type


class Asked(NamedTuple):
    """A queue that is asked for.

    ``offering`` None: there is no such offering, or the subscription's owner may not subscribe to it.
    """

    subscription: EventSubscription
    offering: Offering | None
    object_type: str


def look_up(
    visitor: Owner, subscription: str, offering_uuid: uuids.UUID | None = None, object_type: str = ""
) -> Asked | None:
    """Return what is known of the queue of a subscription for an offering and a type; None: no such subscription.

    What the visitor doesn't see isn't there. One statement, written by hand: composing three costs as much as the rest
    of a registration.
    """
    try:
        wanted = read_uuid(subscription)
    except ValueError:
        return None
    uuid = EventSubscription._meta.get_field("uuid")
    found = EventSubscription.objects.raw(
        f"""
        SELECT subscription.*, offering.id AS offering_pk, offering.name AS offering_name
        FROM queues_eventsubscription subscription
        LEFT JOIN queues_offering offering ON offering.uuid = %s AND {_MAY_SUBSCRIBE}
        WHERE subscription.uuid = %s AND (%s OR subscription.owner_id = %s)
        """,  # noqa: S608 - all values are parameters
        [
            uuid.get_db_prep_value(offering_uuid, connection),
            visitor.is_staff,
            uuid.get_db_prep_value(wanted, connection),
            visitor.is_staff,
            visitor.pk,
        ],
    )
    for row in found:
        more = vars(row)  # the columns that are no fields of it
        offering = None
        if offering_uuid is not None and more["offering_pk"] is not None:
            offering = Offering(pk=more["offering_pk"], uuid=offering_uuid, name=more["offering_name"])
        return Asked(row, offering, object_type)
    return None


# Identities


def make_identity(owner: Owner, offering: Offering, name: str, **introduction: Unpack[Introduction]) -> AgentIdentity:
    """Make an identity of an agent of this owner's, which introduces itself for this offering.

    Raises:
        NotVouched: the owner may not use the broker.
        TakenName: they have one of that name for that offering.
        NoSuchOffering: the offering was removed meanwhile.
        ObjectDoesNotExist: the owner was.
    """
    identity = AgentIdentity(owner=owner, offering=offering, name=name, **_stored(introduction))
    try:
        _insert(identity, owner)
    except IntegrityError as error:
        raise _taken(identity) from error
    return identity


def change_identity(identity: AgentIdentity, **introduced: Unpack[Introduced]) -> None:
    """Change what was told of an agent; what is not given stays.

    Raises:
        TakenName: the owner has another one of that name for that offering.
        NoSuchOffering: the offering was removed meanwhile.
        ObjectDoesNotExist: the identity was.
    """
    changed = {**_stored(introduced), "modified": timezone.now()}
    for name, value in changed.items():
        setattr(identity, name, value)
    try:
        with transaction.atomic():
            if not AgentIdentity.objects.filter(pk=identity.pk).update(**changed):
                raise AgentIdentity.DoesNotExist("The identity was removed meanwhile.")
    except IntegrityError as error:
        raise _taken(identity) from error


def config_of(identity: AgentIdentity) -> str:
    """Return the agent's configuration file; empty where there is none, or it can't be opened any more."""
    if not identity.sealed_config:
        return ""
    try:
        return sealing.unseal(sealing.CONFIGURATIONS, identity.sealed_config)
    except sealing.Unreadable as error:
        logger.warning("The configuration of the agent %s is lost: %s", identity.uuid.hex, error)
        return ""


def _stored(told: Introduced | Introduction) -> dict[str, Any]:
    """Return what was told as the fields that it is stored in."""
    fields: dict[str, Any] = dict(told)
    if "config_file_content" in fields:
        content = fields.pop("config_file_content")
        fields["sealed_config"] = sealing.seal(sealing.CONFIGURATIONS, content) if content else ""
    if "dependencies" in fields:
        fields["dependencies"] = list(fields["dependencies"])
    return fields


def _taken(identity: AgentIdentity) -> TakenName | NoSuchOffering:
    """Return why the database has no place for an identity."""
    if Offering.objects.filter(pk=identity.offering_id).exists():
        return TakenName(f"You have an agent '{identity.name}' for this offering already; choose another name.")
    return _no_such_offering()


# Subscriptions


def register_subscription(
    identity: AgentIdentity,
    object_type: str,
    presented: Presented,
    *,
    description: str = "",
    source_ip: str | None = None,
) -> tuple[EventSubscription, bool]:
    """Return the agent's subscription to a type, which the presented token logs in to; and whether it is new.

    Raises:
        NoSuchType: the type isn't one.
        NotVouched: it would be new, and the owner may not use the broker.
        PermissionDenied: the token was revoked meanwhile.
        ObjectDoesNotExist: the identity was removed meanwhile.
        BrokerError: the broker is away or refused; nothing was registered.
    """
    check_type(object_type)
    management = connections.management()
    owner = _owner(identity, presented)
    for _ in range(ROUNDS):
        subscription, is_new = _row(
            lambda: EventSubscription.objects.filter(identity=identity, object_type=object_type),
            lambda: EventSubscription(
                owner=owner,
                identity=identity,
                object_type=object_type,
                description=description,
                source_ip=source_ip,
            ),
            owner,
        )
        try:
            _open(subscription, is_new, owner, presented, management)
        except EventSubscription.DoesNotExist:
            continue
        return subscription, is_new
    raise _removed_again_and_again("The subscription")


def make_subscription(
    owner: Owner,
    presented: Presented,
    *,
    observable_objects: Sequence[dict[str, Any]] = (),
    description: str = "",
    source_ip: str | None = None,
) -> EventSubscription:
    """Make a subscription that belongs to no identity, which the presented token logs in to.

    Raises:
        NotVouched: the owner may not use the broker.
        PermissionDenied: the token was revoked meanwhile.
        ObjectDoesNotExist: the owner, or the subscription, was removed meanwhile.
        BrokerError: the broker is away or refused; nothing was made.
    """
    management = connections.management()
    subscription = EventSubscription(
        owner=owner, observable_objects=list(observable_objects), description=description, source_ip=source_ip
    )
    _insert(subscription, owner)
    _open(subscription, True, owner, presented, management)
    return subscription


def _open(
    subscription: EventSubscription, is_new: bool, owner: Owner, presented: Presented, management: Management
) -> None:
    """Let the token log in to a subscription. Where that fails, a new one is taken back."""
    try:
        if not _is_in(subscription, presented):
            _require_vhost(owner, management)
            _let_in(subscription, owner, presented, management)
    except (BrokerError, PermissionDenied, ObjectDoesNotExist) as error:
        if is_new:
            _take_back(subscription, may_be_there=not _is_nothing_done(error))
        raise


def _take_back(subscription: EventSubscription, *, may_be_there: bool) -> None:
    """Take back the subscription of a request that failed, where no other request has made anything of it since."""
    with transaction.atomic():
        # Locked, so that no queue is registered for it in between.
        rows = EventSubscription.objects.select_for_update().filter(pk=subscription.pk, token=None)
        if rows.first() is None or subscription.queues.exists():
            return
        # Not by delete(), which would try to remove its user from the broker at once, and wait for it again.
        EventSubscription.objects.filter(pk=subscription.pk)._raw_delete("default")
        if may_be_there:
            _remove_later(Removal(kind=Removal.Kind.USER, name=subscription.rmq_username))


# Queues


def create_queue(
    subscription: EventSubscription,
    offering: Offering,
    object_type: str,
    presented: Presented,
) -> tuple[SubscriptionQueue, bool]:
    """Return the queue of a subscription for the events of a type about an offering; and whether it is new.

    The broker has it, just as it should be, and the presented token reads it.

    Raises:
        NoSuchType: the type isn't one.
        NotVouched: it would be new, and the owner may not use the broker.
        PermissionDenied: the token was revoked meanwhile.
        ObjectDoesNotExist: the subscription or the offering was removed meanwhile.
        Refused: the broker refuses, or has the queue with other arguments, and it is used; the text says which.
        BrokerError: the broker is away; a queue that would be new is not registered.
    """
    check_type(object_type)
    owner = _owner(subscription, presented)
    return _create(subscription, offering, object_type, owner, presented)


def _create(
    subscription: EventSubscription,
    offering: Offering,
    object_type: str,
    owner: Owner,
    presented: Presented,
    first: SubscriptionQueue | None = None,
    is_made: bool = False,
) -> tuple[SubscriptionQueue, bool]:
    return _register(
        lambda: SubscriptionQueue.objects.filter(subscription=subscription, offering=offering, object_type=object_type),
        lambda: SubscriptionQueue(
            subscription=subscription,
            offering=offering,
            object_type=object_type,
            vhost=owner.uuid.hex,
            queue_name=names.subscription_queue(subscription.uuid.hex, offering.uuid.hex, object_type),
        ),
        lambda row: subscription,
        owner,
        presented,
        first=first,
        is_made=is_made,
    )


class Known(NamedTuple):
    """A row of which this alone is known."""

    uuid: uuids.UUID


class NewQueue(NamedTuple):
    """What is told of a queue, as a :class:`SubscriptionQueue` has it, whose row was inserted and not read."""

    uuid: uuids.UUID
    subscription: Known
    offering: Known
    object_type: str
    vhost: str
    queue_name: str
    created: datetime


def create_new(
    owner: Owner, subscription: str, offering_uuid: uuids.UUID, object_type: str, presented: Presented
) -> SubscriptionQueue | NewQueue | None:
    """Return the new queue of a subscription that the token is in already; None: it can't be had so.

    Who may have it is asked by the very statement that inserts its row, and what is pending to remove it by the one
    that says that it is there, so that a registration without a hitch takes two, and reads nothing. What stands in the
    way, or is to be done besides, is for :func:`look_up` and :func:`create_asked`.

    Raises:
        What :func:`create_queue` does.
    """
    try:
        vouching.require_vouched(owner)
        wanted, object_type = read_uuid(subscription), check_type(object_type)
    except (ValueError, vouching.NotVouched):
        return None
    try:
        new = _insert_allowed(owner, wanted, offering_uuid, object_type, presented.token)
    except IntegrityError:  # what it would belong to was just removed
        return None
    except OperationalError as error:
        if not removals.is_deadlock(error):
            raise
        return None
    if new is None:
        return None
    is_made = False
    try:
        is_made = connections.management().make_queue(new.vhost, new.queue_name, arguments.FOR_AGENTS)
        if _mark_unless_removed(new):
            return new
    except (NotEqual, NotThere):  # it is there with other arguments, or not even its vhost is
        pass
    except BrokerError as error:
        _give_up(new, is_ours=True, may_be_there=_may_be_done(error))
        raise
    row = SubscriptionQueue.objects.select_related("subscription", "offering").filter(uuid=new.uuid).first()
    if row is not None:
        return _create(row.subscription, row.offering, object_type, owner, presented, first=row, is_made=is_made)[0]
    if is_made:  # else whoever removed the row looks after the queue, too
        try:
            _drop_removal(Removal.Kind.QUEUE, new.vhost, new.queue_name)
        finally:
            _give_up(new, is_ours=False, may_be_there=True)
    return None


def _insert_allowed(
    owner: Owner, subscription: uuids.UUID, offering: uuids.UUID, object_type: str, token: AuthToken
) -> NewQueue | None:
    """Insert the row of a queue, if it may be and the token is in already, and return it."""
    new = NewQueue(
        uuids.uuid4(),
        Known(subscription),
        Known(offering),
        object_type,
        owner.uuid.hex,
        names.subscription_queue(subscription.hex, offering.hex, object_type),
        timezone.now(),
    )
    created = SubscriptionQueue._meta.get_field("created").get_db_prep_value
    with connection.cursor() as cursor:
        # Nothing is returned: SQLite would stay locked for all others until that is fetched.
        bulk.execute_planned(
            cursor,
            "register_queue",
            _REGISTER_QUEUE,
            [
                # The UUIDs in hex: that is what SQLite has, and psycopg2 takes longer for the objects.
                *(new.uuid.hex, object_type, new.vhost, new.queue_name, created(new.created, connection)),
                *(subscription.hex, owner.pk, token.pk, offering.hex, owner.is_staff),
            ],
        )
        return new if cursor.rowcount > 0 else None


def create_asked(asked: Asked, presented: Presented) -> tuple[SubscriptionQueue, bool]:
    """Return the queue that is asked for, as :func:`create_queue` does.

    Raises:
        NoSuchOffering: it isn't there, or isn't the owner's to subscribe to; and what that one raises.
    """
    if asked.offering is None:
        raise NoSuchOffering(NOT_USABLE)
    return create_queue(asked.subscription, asked.offering, asked.object_type, presented)


def register_consumer(
    identity: AgentIdentity, presented: Presented, object_types: Sequence[str] | None
) -> tuple[Consumer, bool]:
    """Return the one queue of an agent for everything about its offering; and whether it is new.

    ``object_types`` are those that it gets from now on; none: all. None leaves it as it is, all where it is new. The
    broker has the queue, just as it should be, and the presented token reads it.

    Raises:
        NoSuchType: a type isn't one.
        NotVouched: it would be new, and the owner may not use the broker.
        PermissionDenied: the token was revoked meanwhile.
        ObjectDoesNotExist: the identity was removed meanwhile.
        Refused: the broker refuses, or has the queue with other arguments, and it is used; the text says which.
        BrokerError: the broker is away; a queue that would be new is not registered.
    """
    types = None if object_types is None else list(dict.fromkeys(check_type(one) for one in object_types))
    owner = _owner(identity, presented)

    def new() -> Consumer:
        uuid = uuids.uuid4()
        return Consumer(
            uuid=uuid,
            identity=identity,
            object_types=types or [],
            vhost=owner.uuid.hex,
            queue_name=names.consumer_queue(uuid.hex),
        )

    news = {} if types is None else {"object_types": types}
    return _register(
        lambda: Consumer.objects.filter(identity=identity), new, lambda row: row, owner, presented, news=news
    )


def make_again(row: SubscriptionQueue | Consumer, management: Management) -> None:
    """Make a registered queue again that the broker has lost, or never had; with its vhost where that is missing.

    Raises:
        Refused: the broker refuses, or has the queue with other arguments, and it is used; the text says which.
        BrokerError: the broker is away.
    """
    owner = row.subscription.owner if isinstance(row, SubscriptionQueue) else row.identity.owner
    try:
        _require_vhost(owner, management)
        put = _make_queue(row, owner, management)
    except BrokerError as error:
        _give_up(row, is_ours=False, may_be_there=_may_be_done(error))
        raise
    if not _mark(row, put.is_new):
        _give_up(row, is_ours=False, may_be_there=True)


def _register(
    find: Callable[[], QuerySet[Row]],
    new: Callable[[], Row],
    login_of: Callable[[Row], EventSubscription | Consumer],
    owner: Owner,
    presented: Presented,
    *,
    first: Row | None = None,
    is_made: bool = False,
    news: Mapping[str, Any] = NOTHING_NEW,
) -> tuple[Row, bool]:
    """Register a queue: the row, the queue, the login, the mark; and return the row and whether it is new.

    ``first``: the row, where it was just inserted, and nobody has looked yet for what is pending to remove it.
    ``is_made``: the broker has its queue since, and had none before.
    """
    management = connections.management()
    is_looked_for = first is None
    for _ in range(ROUNDS):
        row, is_new = (first, True) if first is not None else _row(find, new, owner)
        first = None
        login = login_of(row)
        put = Put(is_new=False)
        try:
            if not _is_in(login, presented):
                _require_vhost(owner, management)
            put = _make_queue(row, owner, management)
            if put.had_no_vhost or (put.is_new and not is_new):
                # The broker had lost it, maybe with the vhost and all permissions there.
                login.refresh_from_db(fields=PASSWORD)
            if not _is_in(login, presented):
                _let_in(login, owner, presented, management)
        except Consumer.DoesNotExist:
            _give_up(row, is_ours=is_new, may_be_there=True)
            continue
        except (BrokerError, PermissionDenied, ObjectDoesNotExist) as error:
            may_be_there = is_made or put.is_new or _may_be_done(error)
            _give_up(
                row,
                is_ours=is_new,
                may_be_there=may_be_there,
                may_have_user=may_be_there or not _is_nothing_done(error),
            )
            raise
        is_made = is_made or put.is_new
        if not is_looked_for:
            is_looked_for = True
            try:
                # What was to be removed and is not any more is ours to remove, where this fails.
                is_made = _drop_what_removes(row) or is_made
            except Busy:
                _give_up(row, is_ours=False, may_be_there=True)
                raise
            first = row  # and once more: it may have been removed after it was made
            continue
        if _mark(row, put.is_new, news):
            return row, is_new
        # Somebody removed it meanwhile. The row of the next round takes this back.
        _give_up(row, is_ours=False, may_be_there=True)
    raise _removed_again_and_again("The queue")


def _mark(row: SubscriptionQueue | Consumer, is_made: bool, news: Mapping[str, Any] = NOTHING_NEW) -> bool:
    """Say that the broker has the queue, and return whether the row is still there.

    It isn't looked at where there is nothing to say: then the queue was there before it, and goes with it.
    """
    changed = {name: value for name, value in news.items() if getattr(row, name) != value}
    if row.state == Registration.READY and not changed and not is_made:
        return True
    if not changed:
        return bulk.update_one(row, "state", Registration.READY)
    changed["state"] = Registration.READY
    if not type(row)._default_manager.filter(pk=row.pk).update(**changed):
        return False
    for name, value in changed.items():
        setattr(row, name, value)
    return True


def _mark_unless_removed(new: NewQueue) -> bool:
    """Say that the broker has a new queue, unless it may have been removed since its row was inserted.

    Whoever removed it, and did not see the row, claimed its Removal before; that is there still, or a RemovedQueue is
    in its place. False also for a row that is gone, or that was inserted too long ago to be sure of that.
    """
    if abs(timezone.now() - new.created) > SURE_FOR:
        return False
    with connection.cursor() as cursor:
        bulk.execute_planned(
            cursor,
            "mark_queue",
            _MARK_QUEUE,
            [new.uuid.hex, new.vhost, new.queue_name, new.vhost, new.queue_name],
        )
        is_marked: bool = cursor.rowcount > 0
    return is_marked


def _give_up(
    row: SubscriptionQueue | Consumer | NewQueue, *, is_ours: bool, may_be_there: bool, may_have_user: bool = True
) -> None:
    """Take back the row of a request that failed, where it was that request's and nobody has made the queue since.

    Where no row stands for what may be on the broker, it is removed later: the queue, and a consumer's user.
    """
    model = Consumer if isinstance(row, Consumer) else SubscriptionQueue
    rows = model._default_manager.filter(uuid=row.uuid)
    with transaction.atomic():
        if is_ours:
            # As in _take_back().
            rows.filter(state=Registration.CREATING)._raw_delete("default")
        what = []
        if may_be_there:
            what.append(Removal(kind=Removal.Kind.QUEUE, vhost=row.vhost, name=row.queue_name, if_unused=True))
        if may_have_user and isinstance(row, Consumer):
            what.append(Removal(kind=Removal.Kind.USER, name=row.rmq_username))
        if what and not rows.exists():
            _remove_later(*what)


# Rows


def _row(find: Callable[[], QuerySet[Made]], new: Callable[[], Made], owner: Owner) -> tuple[Made, bool]:
    """Return the row, made where there is none, and whether it is new. Of several requests one makes it.

    Raises:
        NotVouched: it would be new, and the owner may not use the broker.
        Busy: what it stood for before is being removed right now.
        ObjectDoesNotExist: what it would belong to was removed.
    """
    for _ in range(ROUNDS):
        for row in find().order_by():
            if isinstance(row, SubscriptionQueue) and row.state == Registration.CREATING:
                # Whoever made it may not have looked yet.
                _drop_removal(Removal.Kind.QUEUE, row.vhost, row.queue_name)
            return row, False
        row = new()
        try:
            _insert(row, owner)
        except IntegrityError:
            continue
        return row, True
    # Neither is there one, nor can there be.
    raise ObjectDoesNotExist("What this was to be registered for was removed meanwhile.")


def _insert(row: AgentIdentity | EventSubscription | SubscriptionQueue | Consumer | AgentVhost, owner: Owner) -> None:
    """Insert a row, of an owner who may use the broker; and drop what is pending to remove what it stands for.

    Raises:
        NotVouched: the owner may not.
        Busy: it is being removed right now, or the database is at so much that the row doesn't get in.
        ObjectDoesNotExist: the owner is gone.
        IntegrityError: there is such a row, or what else it belongs to is gone.
    """
    # Not locked as for an account: who is withdrawn from right now keeps what they have, this or that way.
    vouching.require_vouched(owner)
    _save(row, owner)
    _drop_what_removes(row)


def _drop_what_removes(row: AgentIdentity | EventSubscription | SubscriptionQueue | Consumer | AgentVhost) -> bool:
    """Drop what is pending to remove what this new row stands for; where that is under way, take the row back.

    Return whether there was anything.

    Raises:
        Busy: it is.
    """
    try:
        if isinstance(row, SubscriptionQueue):  # the others have names that never were before
            return _drop_removal(Removal.Kind.QUEUE, row.vhost, row.queue_name)
        if isinstance(row, AgentVhost):
            return _drop_removal(Removal.Kind.VHOST, "", row.name)
    except Busy:
        if isinstance(row, SubscriptionQueue):
            # As in _give_up(): who has made it ready since has looked after this, and found nothing any more.
            SubscriptionQueue.objects.filter(pk=row.pk, state=Registration.CREATING)._raw_delete("default")
        else:
            type(row)._default_manager.filter(pk=row.pk)._raw_delete("default")
        raise
    return False


def _save(row: AgentIdentity | EventSubscription | SubscriptionQueue | Consumer | AgentVhost, owner: Owner) -> None:
    """Insert a row; raises as :func:`_insert` does."""
    for number in range(1, ROUNDS + 1):
        try:
            bulk.insert_one(row)
        except IntegrityError as error:
            if Owner.objects.filter(pk=owner.pk).exists():
                raise
            raise Owner.DoesNotExist("The owner was removed meanwhile.") from error
        except OperationalError as error:
            # What it points at is just being removed, and that waits for what this one has locked.
            if not removals.is_deadlock(error):
                raise
            if number == ROUNDS:
                raise Busy("The database is busy with what this belongs to; ask again") from error
        else:
            return


def _drop_removal(kind: Removal.Kind, vhost: str, name: str) -> bool:
    """Drop what is pending to remove this, once its row is committed, and return whether there was anything.

    Whoever carries it out writes a claim, and then looks whether anything stands for it: one sees the other.

    Raises:
        Busy: it is being removed right now.
    """
    with connection.cursor() as cursor:  # by hand, since there is hardly ever one
        cursor.execute(
            "SELECT id FROM queues_removal WHERE kind = %s AND vhost = %s AND name = %s", [kind, vhost, name]
        )
        found = cursor.fetchone()
    if found is None:
        return False
    pending = Removal.objects.filter(pk=found[0])
    pending.filter(Q(claim=None) | Q(due_at__lte=Now())).delete()
    if pending.exists():
        raise Busy(f"'{name}' is just being removed from the broker; ask again in a minute")
    return True


def _remove_later(*what: Removal) -> None:
    """Have something removed from the broker in a while. Somebody who is just at it has to begin again then."""
    removals.write(what, due_at=timezone.now() + REMOVED_AFTER)


def _owner(row: AgentIdentity | EventSubscription, presented: Presented) -> Owner:
    """Return whose it is. A token comes with its owner, who is mostly the one."""
    user: Owner = presented.token.user
    return user if user.pk == row.owner_id else row.owner


def _removed_again_and_again(what: str) -> Busy:
    return Busy(f"{what} was removed again and again while it was being made; ask again later")


# The broker


def _require_vhost(owner: Owner, management: Management) -> None:
    """Make the vhost of an owner's agents where it was never made to the end."""
    if not _vhost_of(owner).filter(ready=True).exists():
        _make_vhost(owner, management, is_known=False)


def make_vhost(owner: Owner, management: Management) -> None:
    """Make the vhost of an owner's agents and its dead-letter queue; where they are there, nothing changes.

    Raises:
        BrokerError: the broker is away or refuses, or another request is at it for too long.
        NotVouched: it was never made, and the owner may not use the broker.
        ObjectDoesNotExist: the owner was removed meanwhile.
    """
    _make_vhost(owner, management, is_known=True)


def _make_vhost(owner: Owner, management: Management, *, is_known: bool) -> None:
    """Make the vhost; ``is_known``: also where one was made before."""
    name = owner.uuid.hex
    rows = _vhost_of(owner)
    try:
        with hold.held(f"vhost {name}", wait=WAIT_SECONDS) as ours:
            vhost = rows.first()
            if vhost is None:
                _insert(AgentVhost(owner=owner, name=name), owner)
            elif vhost.ready and not is_known:
                return
            try:
                renewed = ours.renewed_by(management)
                # Where it was lost, all permissions in it were. Before: the answer may be lost, too.
                _forget_passwords(owner)
                renewed.make_vhost(name)
                _make_dead_letter_queue(name, renewed)
                rows.update(ready=True)
            finally:
                if not rows.exists():
                    # It was removed with its owner, maybe before it was made here.
                    _remove_later(Removal(kind=Removal.Kind.VHOST, name=name))
    except (hold.Taken, IntegrityError) as error:  # the second: it was held for too long, and is there by now
        raise Busy(f"The vhost '{name}' is being made by another request; ask again") from error


def _forget_passwords(owner: Owner) -> None:
    """Note that the logins of an owner have to be let in anew, each when it is registered next."""
    logins: tuple[QuerySet[EventSubscription] | QuerySet[Consumer], ...] = (
        EventSubscription.objects.filter(owner=owner, password_set=True),
        Consumer.objects.filter(identity__owner=owner, password_set=True),
    )
    with transaction.atomic():
        for rows in logins:
            # Locked in one order, so that two that change the same don't wait for each other.
            keys = [(login.pk,) for login in rows.select_for_update(of=("self",)).order_by("pk")]
            if keys:
                model = rows.model
                model._default_manager.filter(bulk.among(model, ("id",), keys)).update(password_set=False)


def _vhost_of(owner: Owner) -> QuerySet[AgentVhost]:
    return AgentVhost.objects.filter(owner=owner)


def _make_dead_letter_queue(vhost: str, management: Management) -> None:
    try:
        _make_or_replace(vhost, names.DEAD_LETTER_QUEUE, arguments.FOR_DEAD_LETTERS, management)
    except NotThere as error:
        raise _lost_again(vhost, error) from error
    except Refused as error:
        # It takes dead letters all the same, and no agent can do anything about it.
        logger.warning("The dead-letter queue of the vhost '%s' is not as it should be: %s", vhost, error)


class Put(NamedTuple):
    """What the broker said to a queue: whether it is new there, and whether not even its vhost was there."""

    is_new: bool
    had_no_vhost: bool = False


def _make_queue(row: SubscriptionQueue | Consumer, owner: Owner, management: Management) -> Put:
    """Make sure of the queue on the broker, and of its vhost where that is missing."""
    try:
        return Put(_make_or_replace(row.vhost, row.queue_name, arguments.FOR_AGENTS, management))
    except NotThere:
        logger.info("The broker has lost the vhost '%s', which is made again", row.vhost)
    make_vhost(owner, management)
    try:
        is_new = _make_or_replace(row.vhost, row.queue_name, arguments.FOR_AGENTS, management)
    except NotThere as error:
        raise _lost_again(row.vhost, error) from error
    return Put(is_new, had_no_vhost=True)


def _make_or_replace(vhost: str, name: str, wanted: Any, management: Management) -> bool:
    """Make a queue; one that is there with other arguments is replaced where it is empty and nobody uses it.

    Raises:
        Refused: it can't be replaced; the text says which argument is what, and what it should be.
        NotThere: no such vhost.
    """
    try:
        return management.make_queue(vhost, name, wanted)
    except NotEqual as error:
        different = error
    try:
        management.delete_queue(vhost, name, if_empty=True, if_unused=True)
    except NotThere:
        logger.info("The queue '%s' in '%s' went by itself", name, vhost)
    except Refused as error:
        raise _not_replaced(vhost, name, wanted, different, error, management) from error
    else:
        logger.info("The queue '%s' in '%s' had other arguments, was empty and unused, and is made anew", name, vhost)
    return management.make_queue(vhost, name, wanted)


def _not_replaced(
    vhost: str, name: str, wanted: Any, different: NotEqual, kept: Refused, management: Management
) -> Refused:
    try:
        found = management.queue(vhost, name)
    except BrokerError:
        found = {}
    differences = arguments.differences(wanted, found.get("arguments") or {}) if found else []
    differences += [
        arguments.Difference(field, found[field], value)
        for field, value in (("durable", True), ("auto_delete", False))
        if found.get(field, value) != value
    ]
    if not differences and different.argument is not None:
        differences = [arguments.Difference(different.argument, different.found, different.wanted)]
    how = "; ".join(f"{one.argument} is {_shown(one.found)} and should be {_shown(one.wanted)}" for one in differences)
    reason = (
        f"the queue '{name}' is there with other arguments: {how or different.reason}. It is not replaced, since it "
        f"has messages or is used ({kept.reason}); delete it there, or stop what uses it, and ask again"
    )
    return Refused(f"vhost '{vhost}': {reason}", status=different.status, reason=reason)


def _shown(value: Any) -> str:
    return "not set" if value is None else repr(value)


# Logins


def _is_in(login: EventSubscription | Consumer, presented: Presented) -> bool:
    return login.password_set and login.token_id == presented.token.pk and login.next_token_id is None


def _let_in(login: EventSubscription | Consumer, owner: Owner, presented: Presented, management: Management) -> None:
    """Make the presented token the password of a login, which may read its own queues and nothing else.

    Raises:
        PermissionDenied: the token was revoked meanwhile.
        ObjectDoesNotExist: the login was removed meanwhile.
        BrokerError: the broker is away or refuses, or another request is at it for too long.
    """
    username = login.rmq_username
    if isinstance(login, EventSubscription):
        allowed = permissions.for_subscription(login.uuid.hex)
    else:
        allowed = permissions.for_consumer(login.uuid.hex)
    rows = type(login)._default_manager.filter(pk=login.pk)
    try:
        with hold.held(username, wait=WAIT_SECONDS) as ours:
            login.refresh_from_db(fields=PASSWORD)
            if _is_in(login, presented):
                return
            _note(login, presented.token)
            try:
                _put_user(username, allowed, owner, presented, ours.renewed_by(management))
            finally:
                if not rows.exists():
                    # Its user was removed with it, maybe before it was made here.
                    _remove_later(Removal(kind=Removal.Kind.USER, name=username))
            is_set = _confirm(rows, presented.token)
            login.refresh_from_db(fields=PASSWORD)
    except hold.Taken as error:
        raise Busy(f"The login '{username}' is being changed by another request; ask again") from error
    if not is_set:
        if AuthToken.objects.filter(pk=presented.token.pk).exists():
            raise Busy(f"The login '{username}' was changed by another request; ask again")
        raise _revoked()


def _note(login: EventSubscription | Consumer, token: AuthToken) -> None:
    """Write down which token is about to be the password, so that revoking it from now on takes the password along.

    The one that is the password stays written down until the broker has the next one.
    """
    with transaction.atomic():
        if not _lock(token):
            raise _revoked()
        type(login)._default_manager.filter(pk=login.pk).update(next_token=token)
        if login.next_token_id not in (None, token.pk):
            # Nobody knows whether the broker has that one, which is written down nowhere from now on.
            removals.doubt(login.rmq_username)


def _confirm(rows: QuerySet[Any], token: AuthToken) -> bool:
    """Write down that this token is the password now; False where it was revoked or has expired meanwhile."""
    with transaction.atomic():
        _lock(token)
        return bool(rows.filter(next_token=token).update(token=token, next_token=None, password_set=True))


def _lock(token: AuthToken) -> bool:
    """Lock a token before the logins that it is given to, so that it isn't revoked in between; False: it is gone."""
    return AuthToken.objects.select_for_update(no_key=True).filter(pk=token.pk).first() is not None


def _put_user(username: str, allowed: Permissions, owner: Owner, presented: Presented, management: Management) -> None:
    vhost = owner.uuid.hex
    management.put_user(username, presented.key)
    try:
        _allow(vhost, username, allowed, owner, presented, management)
    except BrokerAway as error:
        error.never_reached = False  # the user is there, whatever became of the rest
        raise


def _allow(
    vhost: str, username: str, allowed: Permissions, owner: Owner, presented: Presented, management: Management
) -> None:
    """Give a user its permissions in the vhost, which is made again, and the user with it, where one was lost."""
    try:
        management.set_permissions(vhost, username, allowed)
        return
    except NotThere:
        logger.info("The broker has lost the vhost '%s' or the account '%s', which are made again", vhost, username)
    make_vhost(owner, management)
    management.put_user(username, presented.key)
    try:
        management.set_permissions(vhost, username, allowed)
    except NotThere as error:
        raise _lost_again(vhost, error) from error


def _revoked() -> PermissionDenied:
    return PermissionDenied("The token was revoked meanwhile. Make another on the page Tokens.")


def _lost_again(vhost: str, error: NotThere) -> Busy:
    return Busy(f"The broker has lost the vhost '{vhost}' again, or its node is down; ask again later: {error}")


def _may_be_done(error: Exception) -> bool:
    """Return whether the broker may have done what failed so."""
    return isinstance(error, Malformed) or (isinstance(error, BrokerAway) and not error.never_reached)


def _is_nothing_done(error: Exception) -> bool:
    """Return whether the broker has certainly got nothing of what failed so, not even a part."""
    return isinstance(error, BrokerAway) and error.never_reached


# What is registered


def registered() -> dict[tuple[str, str], int]:
    """Return the queues that agents registered, as (vhost, name), and whose they are, by the owner's id.

    The dead-letter queues of their vhosts are among them. In three statements.
    """
    queues = SubscriptionQueue.objects.order_by().values_list("vhost", "queue_name", "subscription__owner_id")
    consumers = Consumer.objects.order_by().values_list("vhost", "queue_name", "identity__owner_id")
    found = {(vhost, name): owner for rows in (queues, consumers) for vhost, name, owner in rows}
    return found | {(vhost, names.DEAD_LETTER_QUEUE): owner for vhost, owner in agent_vhosts().items()}


def agent_vhosts() -> dict[str, int]:
    """Return the vhosts of agents that the broker has, and whose they are, by the owner's id. In one statement."""
    return dict(AgentVhost.objects.filter(ready=True).values_list("name", "owner_id"))


def mark_vanished(names: Collection[tuple[str, str]]) -> None:
    """Note that the broker has these registered queues, given as (vhost, name), no longer. In two statements.

    They are being made again, by the agent's next call or the sweep.
    """
    _move(names, Registration.READY, Registration.CREATING)


def mark_returned(names: Collection[tuple[str, str]]) -> None:
    """Note that the broker has these registered queues, given as (vhost, name), again. In two statements."""
    _move(names, Registration.CREATING, Registration.READY)


def _move(names: Collection[tuple[str, str]], before: Registration, after: Registration) -> None:
    if not names:
        return
    for model in (SubscriptionQueue, Consumer):
        these = bulk.among(model, ("vhost", "queue_name"), list(names))
        model._default_manager.filter(these, state=before).update(state=after)
