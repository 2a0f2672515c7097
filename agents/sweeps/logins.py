"""Reconcile the logins of agents with the users of the broker, in a sweep."""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from accounts.models import PulseUser
from agents.models import Consumer, EventSubscription
from agents.sweeps.broker_view import BrokerView
from agents.sweeps.reports import Report, carry_out, deletion_limit
from core.leases import HeldLease
from core.models import Removal
from rabbit.entities import User
from rabbit.errors import BrokerError
from rabbit.names import QueueName, is_agents_login
from rabbit.permissions import Permissions, allows, for_consumer, for_subscription

_USERNAME = re.compile("[0-9a-f]{32}")

_CONSUMER_READ_PATTERN = re.compile(re.escape(for_consumer("*").read).replace(re.escape("*"), _USERNAME.pattern))


def reconcile_logins(
    report: Report, view: BrokerView, lease: HeldLease | None, force: bool, deletable: Collection[QueueName]
) -> None:
    """Delete users without a login, and record logins that the broker lacks. Without a lease, only report them.

    Logins are read before the users are listed: a login that has its password then also has its user in the list. They
    are read again after the list: every user in the list was created after its row.

    ``deletable`` are the queues selected for deletion. Users that may read other unregistered queues, or a queue that
    was kept, are not deleted.
    """
    if report.away:
        return
    logins = _logins()
    if lease is not None:
        lease.renew_if_due()
    try:
        users = view.management.users()
        permissions = view.management.all_permissions()
        _forget_passwords(report, logins, {user.name for user in users}, permissions, lease)
        kept = {(one["vhost"], one["queue"]) for one in report.in_use}
        unused = _unused_users(
            users, permissions, view.vhosts, view.queues.keys() - view.rows.keys() - (set(deletable) - kept)
        )
        if unused:
            # As for queues: users that were being removed while they were listed are gone now.
            remaining = {user.name for user in view.management.users()}
            unused = [name for name in unused if name in remaining]
    except BrokerError as error:
        report.add_error(f"the users could not be listed: {error}")
        return
    limit = deletion_limit(len(unused) + len(logins))
    if len(unused) > limit and not force:
        report.add_error(
            f"{len(unused)} RabbitMQ users have the name of an agent's login but no login here. The brake allows "
            f"{limit} deletions, so none was deleted. Check them, then use --force"
        )
    elif lease is None:
        report.users = len(unused)
    elif not report.brake_held:
        for removed in carry_out(report, [Removal(kind=Removal.Kind.USER, name=name) for name in unused], lease):
            report.users += removed


class _Login(NamedTuple):
    """A login whose password the broker should have, with its permissions in the vhost of its owner's agents."""

    model: type[EventSubscription] | type[Consumer]
    id: int
    name: str
    vhost: str
    permissions: Permissions


def _logins() -> list[_Login]:
    """Return the logins whose password the broker should have, in two statements."""
    subscribed = EventSubscription.objects.filter(password_set=True).order_by()
    consuming = Consumer.objects.filter(password_set=True).order_by()
    return [
        _Login(EventSubscription, id_, uuid.hex, owner.hex, for_subscription(uuid.hex))
        for id_, uuid, owner in subscribed.values_list("id", "uuid", "owner__uuid")
    ] + [
        _Login(Consumer, id_, name, owner.hex, for_consumer(uuid.hex))
        for id_, name, uuid, owner in consuming.values_list("id", "rmq_username", "uuid", "identity__owner__uuid")
    ]


def _forget_passwords(
    report: Report,
    logins: Iterable[_Login],
    users: Collection[str],
    permissions: Mapping[str, Mapping[str, Permissions]],
    lease: HeldLease | None,
) -> None:
    """Clear ``password_set`` of logins whose user or permissions the broker lacks. The next registration sets them."""
    lacking: dict[type[EventSubscription] | type[Consumer], list[int]] = {}
    for login in logins:
        if login.name not in users or permissions.get(login.name, {}).get(login.vhost) != login.permissions:
            lacking.setdefault(login.model, []).append(login.id)
    for model, ids in lacking.items():
        if lease is None:
            report.logins += len(ids)
        else:
            rows = model._default_manager.filter(pk__in=ids, password_set=True)
            report.logins += rows.update(password_set=False)


def _unused_users(
    users: Iterable[User],
    permissions: Mapping[str, Mapping[str, Permissions]],
    vhosts: Collection[str],
    remaining: Iterable[QueueName],
) -> list[str]:
    """Return the users that look like an agent's login and have no row, in at most four statements.

    Users without permissions are kept: they may be somebody else's, and can do nothing. Users that may read a queue in
    ``remaining`` are kept too.
    """
    names = {user.name for user in users if not user.tags and is_agents_login(user.name) and permissions.get(user.name)}
    # Exclude users with rows first. They are nearly all, and comparing patterns costs more than reading rows.
    if names:
        names -= {uuid.hex for uuid in EventSubscription.objects.order_by().values_list("uuid", flat=True)}
        names -= set(Consumer.objects.order_by().values_list("rmq_username", flat=True))
    if names:
        names -= set(PulseUser.objects.order_by().values_list("username", flat=True))
        names -= set(Removal.objects.filter(kind=Removal.Kind.USER).order_by().values_list("name", flat=True))
    to_read: dict[str, list[str]] = {}
    for vhost, queue in remaining:
        to_read.setdefault(vhost, []).append(queue)
    return sorted(
        name
        for name in names
        if all(
            vhost in vhosts and _has_login_permissions(name, granted) for vhost, granted in permissions[name].items()
        )
        and not any(
            allows(granted.read, queue)
            for vhost, granted in permissions[name].items()
            for queue in to_read.get(vhost, ())
        )
    )


def _has_login_permissions(name: str, granted: Permissions) -> bool:
    """Return whether these are the permissions of an agent's login of this name."""
    if granted == for_subscription(name):
        return True
    reads_one = _CONSUMER_READ_PATTERN.fullmatch(granted.read) is not None
    return reads_one and granted._replace(read="") == for_consumer(name)._replace(read="")
