"""Registration: agents get their queues with the right arguments, and logins that read only these queues.

The row is committed first, in state ``creating``, so that no queue of Guardian's is ever without a row. It becomes
``ready`` once the broker has the queue. After a crash the row stays ``creating``, and the next call or the sweep
finishes it. A failed registration deletes the row that it created; ``removals.py`` removes what may have reached the
broker.

The password of a login is the token presented last. Only the broker stores it; the row says which token it is. Before
the request to the broker, that token is stored as the next one, beside the current one: until the answer arrives the
password may be either, so revoking either takes the password.
"""

import contextlib
import logging
import re
import uuid as uuids
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple, TypedDict, TypeVar, Unpack

from django.core.exceptions import ObjectDoesNotExist, PermissionDenied
from django.db import IntegrityError, OperationalError, transaction
from django.db.models import Model, Q, QuerySet
from django.db.models.functions import Now
from django.utils import timezone

from accounts.models import AuthToken, Owner
from accounts.vouching import require_vouched
from agents import removals
from agents.models import (
    AgentIdentity,
    AgentVhost,
    Consumer,
    EventSubscription,
    ObjectType,
    Offering,
    Registration,
    SubscriptionQueue,
)
from core import broker, locks, sealing
from core.models import Removal
from rabbit import arguments, names
from rabbit.management import BrokerAway, BrokerError, Malformed, Management, NotEqual, NotThere, Refused

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
"""Of a registration whose row is removed at the same time, or which the database gives up for a deadlock."""

WAIT_SECONDS = 10.0
"""How long a request waits for another one that sets the same login's password, or creates the same vhost."""

REMOVED_AFTER = timedelta(minutes=1)
"""How long after a failed registration its remains are removed: by then the broker has handled a late request."""

PASSWORD = ["token", "next_token", "password_set"]
"""The fields that say which token is a login's password."""

_UUID = re.compile("[0-9a-fA-F]{32}|[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")

M = TypeVar("M", bound=Model)
T = TypeVar("T")


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
    if object_type not in ObjectType.values:
        raise NoSuchType(f"There is no such object type; there are: {', '.join(ObjectType.values)}.")
    return object_type


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
        _insert(lambda: identity.save(force_insert=True), owner)
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
    management = broker.management()
    owner = identity.owner
    for _ in range(MAX_ATTEMPTS):
        subscription, is_new = _get_or_create(
            EventSubscription.objects.select_related("owner"),
            {"owner": owner, "description": description, "source_ip": source_ip},
            owner,
            identity=identity,
            object_type=object_type,
        )
        try:
            _open(subscription, is_new, presented, management)
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
    management = broker.management()
    subscription = EventSubscription(
        owner=owner, observable_objects=list(observable_objects), description=description, source_ip=source_ip
    )
    _insert(lambda: subscription.save(force_insert=True), owner)
    _open(subscription, True, presented, management)
    return subscription


def _open(subscription: EventSubscription, is_new: bool, presented: Presented, management: Management) -> None:
    """Make the token the password of a subscription's login. If that fails, undo a new subscription."""
    try:
        _require_vhost(subscription.owner, management)
        _grant_login(subscription, presented, management)
    except (BrokerError, PermissionDenied, ObjectDoesNotExist) as error:
        if is_new:
            _undo_subscription(subscription, has_user=not _is_nothing_done(error))
        raise


def _undo_subscription(subscription: EventSubscription, *, has_user: bool) -> None:
    """Delete the subscription of a failed request, unless another request has used it since."""
    with transaction.atomic():
        # Locked, so that no queue is registered for it in between.
        rows = EventSubscription.objects.select_for_update().filter(pk=subscription.pk, token=None)
        if rows.first() is None or subscription.queues.exists():
            return
        _delete_row(EventSubscription.objects.filter(pk=subscription.pk))
        if has_user:
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
    management = broker.management()
    for _ in range(MAX_ATTEMPTS):
        queue, is_new = _get_or_create(
            SubscriptionQueue.objects.all(),
            {
                "vhost": subscription.owner.uuid.hex,
                "queue_name": names.subscription_queue(subscription.uuid.hex, offering.uuid.hex, object_type),
            },
            subscription.owner,
            subscription=subscription,
            offering=offering,
            object_type=object_type,
        )
        queue.subscription, queue.offering = subscription, offering  # spares their queries
        if _ensure(queue, is_new, management, presented):
            return queue, is_new
    raise _removed_again_and_again("The queue")


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
    management = broker.management()
    for _ in range(MAX_ATTEMPTS):
        uuid = uuids.uuid4()
        consumer, is_new = _get_or_create(
            Consumer.objects.all(),
            {
                "uuid": uuid,
                "object_types": types or [],
                "vhost": identity.owner.uuid.hex,
                "queue_name": names.consumer_queue(uuid.hex),
            },
            identity.owner,
            identity=identity,
        )
        consumer.identity = identity  # spares its query
        changes = {} if types is None else {"object_types": types}
        if _ensure(consumer, is_new, management, presented, **changes):
            return consumer, is_new
    raise _removed_again_and_again("The queue")


def make_again(row: SubscriptionQueue | Consumer, management: Management) -> None:
    """Declare a registered queue that the broker has lost or never had, and create its vhost if it is missing.

    Raises:
        Refused: the broker refuses, or has the queue with other arguments, and it is used; the text says which.
        BrokerError: the broker is away.
    """
    _ensure(row, False, management)


def _ensure(
    row: SubscriptionQueue | Consumer,
    is_new: bool,
    management: Management,
    presented: Presented | None = None,
    **changes: Any,
) -> bool:
    """Ensure the queue, its vhost and, for a presented token, its login; mark the row ready, with these changes.

    Return False if the row was removed meanwhile. If the broker refuses or is away, a new row is deleted.
    """
    has_queue = False
    try:
        if row.state == Registration.CREATING:
            has_queue = _cancel_removal(Removal.Kind.QUEUE, row.vhost, row.queue_name)
    except Busy:
        _undo(row, is_new)
        raise
    try:
        _require_vhost(row.owner, management)
        has_queue = _declare(row, management) or has_queue
        if presented is not None:
            _grant_login(row.login, presented, management)
    except Consumer.DoesNotExist:
        pass  # A consumer is its own login: the row itself was removed.
    except (BrokerError, PermissionDenied, ObjectDoesNotExist) as error:
        has_queue = has_queue or _may_be_done(error)
        _undo(row, is_new, has_queue=has_queue, has_user=has_queue or not _is_nothing_done(error))
        raise
    changes["state"] = Registration.READY
    if not type(row)._default_manager.filter(pk=row.pk).update(**changes):
        try:
            _cancel_removal(Removal.Kind.QUEUE, row.vhost, row.queue_name)
        finally:
            _undo(row, is_new, has_queue=True, has_user=True)
        return False
    for name, value in changes.items():
        setattr(row, name, value)
    return True


def _undo(row: SubscriptionQueue | Consumer, is_new: bool, *, has_queue: bool = False, has_user: bool = False) -> None:
    """Delete the row that a failed request created, unless another request has marked it ready since.

    Without a row, remove later what the broker may have: the queue, and the user of a consumer.
    """
    rows = type(row)._default_manager.filter(pk=row.pk)
    with transaction.atomic():
        if is_new:
            _delete_row(rows.filter(state=Registration.CREATING))
        if rows.exists():
            return
        if has_queue:
            _remove_later(Removal(kind=Removal.Kind.QUEUE, vhost=row.vhost, name=row.queue_name, if_unused=True))
        if has_user and isinstance(row, Consumer):
            _remove_later(Removal(kind=Removal.Kind.USER, name=row.rmq_username))


# Rows


def _get_or_create(rows: QuerySet[M], defaults: Mapping[str, Any], owner: Owner, **unique: Any) -> tuple[M, bool]:
    """Return the row with these unique fields, created if there is none, and whether it is new.

    Django's own ``get_or_create`` can't refuse to create.

    Raises:
        NotVouched: there is none, and the owner may not use the broker.
        Busy: the database gave up a deadlock several times.
        ObjectDoesNotExist: what it would belong to was removed.
    """
    for _ in range(MAX_ATTEMPTS):
        row = rows.filter(**unique).first()
        if row is not None:
            return row, False
        with contextlib.suppress(IntegrityError):  # another request created it, or what it belongs to was removed
            return _insert(lambda: rows.create(**unique, **defaults), owner), True
    raise ObjectDoesNotExist("What this was to be registered for was removed meanwhile.")


def _insert(insert: Callable[[], T], owner: Owner) -> T:
    """Insert a row of an owner who may use the broker.

    Raises:
        NotVouched: the owner may not.
        Busy: the database gave up a deadlock several times.
        ObjectDoesNotExist: the owner was removed.
        IntegrityError: there is such a row, or another one that it refers to was removed.
    """
    # The owner is not locked, as for an account: it does no harm if access is withdrawn at this moment.
    require_vouched(owner)
    for _ in range(MAX_ATTEMPTS):
        try:
            return insert()
        except IntegrityError as error:
            if Owner.objects.filter(pk=owner.pk).exists():
                raise
            raise Owner.DoesNotExist("The owner was removed meanwhile.") from error
        except OperationalError as error:
            # A deletion locks the rows that this one refers to, in another order.
            if not removals.is_deadlock(error):
                raise
    raise Busy("The database is busy with what this belongs to; ask again")


def _cancel_removal(kind: Removal.Kind, vhost: str, name: str) -> bool:
    """Cancel the pending removal of this, and return whether there was one. Its row has been committed before.

    Whoever carries a removal out commits a claim first and reads the rows then. So either they see the row, or the
    claim is seen here.

    Raises:
        Busy: it is being removed right now.
    """
    pending = Removal.objects.filter(kind=kind, vhost=vhost, name=name)
    if not pending.exists():
        return False
    pending.filter(Q(claim=None) | Q(due_at__lte=Now())).delete()
    if pending.exists():
        raise Busy(f"'{name}' is just being removed from the broker; ask again in a minute")
    return True


def _delete_row(rows: QuerySet[Any]) -> None:
    """Delete rows without signals: these would ask the broker at once, which has just failed, and wait for it again."""
    rows._raw_delete(rows.db)


def _remove_later(*what: Removal) -> None:
    """Have something removed from the broker in a while. Somebody who is just at it has to begin again then."""
    removals.write(what, due_at=timezone.now() + REMOVED_AFTER)


def _removed_again_and_again(what: str) -> Busy:
    return Busy(f"{what} was removed again and again while it was being made; ask again later")


# The broker


def _require_vhost(owner: Owner, management: Management) -> None:
    """Create the vhost of an owner's agents, unless the broker has had it already."""
    if not AgentVhost.objects.filter(owner=owner, ready=True).exists():
        _make_vhost(owner, management, again=False)


def make_vhost(owner: Owner, management: Management) -> None:
    """Create the vhost of an owner's agents and its dead-letter queue, also if the broker has had them before.

    Raises:
        BrokerError: the broker is away or refuses, or another request takes too long over it.
        NotVouched: the vhost was never created, and the owner may not use the broker.
        ObjectDoesNotExist: the owner was removed meanwhile.
    """
    _make_vhost(owner, management, again=True)


def _make_vhost(owner: Owner, management: Management, *, again: bool) -> None:
    name = owner.uuid.hex
    rows = AgentVhost.objects.filter(owner=owner)
    try:
        with locks.held(f"vhost {name}", wait=WAIT_SECONDS) as ours:
            vhost, _ = _get_or_create(rows, {"owner": owner}, owner, name=name)
            if vhost.ready and not again:
                return
            _cancel_removal(Removal.Kind.VHOST, "", name)
            renewed = ours.renewed_by(management)
            try:
                # All permissions in a lost vhost are lost. Done first, because the answer may be lost, too.
                _forget_passwords(owner)
                renewed.make_vhost(name)
                _make_dead_letter_queue(name, renewed)
                rows.update(ready=True)
            finally:
                if not rows.exists():
                    # It was removed with its owner, maybe before the broker created it.
                    _remove_later(Removal(kind=Removal.Kind.VHOST, name=name))
    except locks.Taken as error:
        raise Busy(f"The vhost '{name}' is being made by another request; ask again") from error


def _forget_passwords(owner: Owner) -> None:
    """Record that the logins of an owner lack their password, so that the next registration of each sets it."""
    logins: tuple[QuerySet[EventSubscription] | QuerySet[Consumer], ...] = (
        EventSubscription.objects.filter(owner=owner, password_set=True),
        Consumer.objects.filter(identity__owner=owner, password_set=True),
    )
    with transaction.atomic():
        for rows in logins:
            # Locked in one order, so that two requests don't deadlock.
            locked = list(rows.select_for_update(of=("self",)).order_by("pk").values_list("pk", flat=True))
            rows.model._default_manager.filter(pk__in=locked).update(password_set=False)


def _make_dead_letter_queue(vhost: str, management: Management) -> None:
    try:
        _make_or_replace(vhost, names.DEAD_LETTER_QUEUE, arguments.FOR_DEAD_LETTERS, management)
    except NotThere as error:
        raise _lost_again(vhost, error) from error
    except Refused as error:
        # It takes dead letters all the same, and no agent can do anything about it.
        logger.warning("The dead-letter queue of the vhost '%s' is not as it should be: %s", vhost, error)


def _declare(row: SubscriptionQueue | Consumer, management: Management) -> bool:
    """Declare the queue, and return whether the broker did not have it."""
    return _in_vhost(
        row.owner,
        management,
        lambda: _make_or_replace(row.vhost, row.queue_name, arguments.FOR_AGENTS, management),
    )


def _in_vhost(owner: Owner, management: Management, request: Callable[[], T]) -> T:
    """Return the answer to a request about the vhost of an owner's agents; create the vhost again if it is lost."""
    try:
        return request()
    except NotThere:
        logger.info("The broker has lost the vhost '%s', which is created again", owner.uuid.hex)
    make_vhost(owner, management)
    try:
        return request()
    except NotThere as error:
        raise _lost_again(owner.uuid.hex, error) from error


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


def _is_granted(login: EventSubscription | Consumer, presented: Presented) -> bool:
    return login.password_set and login.token_id == presented.token.pk and login.next_token_id is None


def _grant_login(login: EventSubscription | Consumer, presented: Presented, management: Management) -> None:
    """Make the presented token the password of a login, which may read its own queues and nothing else.

    Raises:
        PermissionDenied: the token was revoked meanwhile.
        ObjectDoesNotExist: the login was removed meanwhile.
        BrokerError: the broker is away or refuses, or another request takes too long over this login.
    """
    # Read now: the vhost may have been lost since, and with it all permissions there.
    login.refresh_from_db(fields=PASSWORD)
    if _is_granted(login, presented):
        return
    username = login.rmq_username
    rows = type(login)._default_manager.filter(pk=login.pk)
    try:
        with locks.held(username, wait=WAIT_SECONDS) as ours:
            login.refresh_from_db(fields=PASSWORD)
            if _is_granted(login, presented):
                return
            _note(login, presented.token)
            try:
                _put_user(login, presented, ours.renewed_by(management))
            finally:
                if not rows.exists():
                    # Its user was removed with it, maybe before the broker created it.
                    _remove_later(Removal(kind=Removal.Kind.USER, name=username))
            is_set = _confirm(rows, presented.token)
            login.refresh_from_db(fields=PASSWORD)
    except locks.Taken as error:
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


def _put_user(login: EventSubscription | Consumer, presented: Presented, management: Management) -> None:
    """Create the user of a login, with the token as its password, and its permissions."""
    username, vhost = login.rmq_username, login.owner.uuid.hex
    management.put_user(username, presented.key)
    try:
        _in_vhost(login.owner, management, lambda: management.set_permissions(vhost, username, login.permissions))
    except BrokerAway as error:
        error.never_reached = False  # the user has been created
        raise


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
