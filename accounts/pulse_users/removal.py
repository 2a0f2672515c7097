"""Remove Pulse users with their queues and exchanges, from the broker and from the database.

One transaction marks the row and writes a Removal. Then the Pulse user is deleted from the broker, and the row last. If
that fails or the process is killed, ``core/removals.py`` tries again. ``withdrawal.py`` decides which Pulse users
are removed with an owner, and ``agents/removal/deletions.py`` what is removed of the owner's agents.
"""

import contextlib
import logging
import time
from collections.abc import Sequence

from django.conf import settings
from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.utils import timezone

from accounts import audit, queue_effects, signals
from accounts.models import Owner, PulseUser
from accounts.pulse_users import namespace, ownership
from accounts.pulse_users.namespace import Belongings
from accounts.pulse_users.validation import is_free_on_broker, why_not_ownable
from core import broker, locks, removals
from core.broker import Clients
from core.confirmation import ConfirmableChange
from core.models import Removal
from rabbit import snapshot
from rabbit.amqp import Sessions
from rabbit.errors import BrokerError, BrokerUnavailable, NotOnBroker
from rabbit.management import Management

logger = logging.getLogger(__name__)

REMOVAL_STARTED = "started the removal"
"""The action in the audit trail when a Pulse user is marked. The deletion of the row is another entry."""

PAUSES = (0.2, 1.0)
"""Seconds between two attempts: the broker takes a moment to close the connections of a deleted user."""


class RemovalPending(Exception):
    """The removal has started, and Guardian completes it later. The text says what is left."""


class StillOnBroker(BrokerError):
    """The broker still has the Pulse user, or queues or exchanges of it. The text names them."""


def belongings_of(pulse_user: PulseUser) -> Belongings:
    """Return the Pulse user's queues and exchanges, which are removed with it."""
    return namespace.belongings_of(broker.management(), pulse_user.username)


def remove_pulse_user(pulse_user: PulseUser, change: ConfirmableChange, by: Owner | None) -> None:
    """Remove a Pulse user with its queues and exchanges from the broker, and then its row.

    The RabbitMQ user and its connections are removed first, so that no client creates further queues. ``change`` is the
    removal of this Pulse user, or of several Pulse users including this one. ``by`` is None for a command.

    After RemovalPending, Guardian continues. After any other error nothing changed: ConfirmationRequired for its
    queues, PermissionDenied if it is Guardian's own user or has become an administrator.
    """
    management = broker.management()
    reason = why_not_ownable(pulse_user.username, _tags(management, pulse_user.username))
    if reason and pulse_user.ready:
        raise PermissionDenied(reason)
    with transaction.atomic():
        locked = list(PulseUser.objects.select_for_update(no_key=True).filter(pk=pulse_user.pk))
        if locked:
            ownership.require_access(pulse_user, by)
        change.require_confirmed(queue_effects.of_removal(locked))
        ids = removals.reserve(_mark([pulse_user]))
    outcome = removals.run(ids)
    if PulseUser.objects.filter(pk=pulse_user.pk, removing_since__isnull=False).exists():
        left = "; ".join(outcome.errors) or "Another process is changing it."
        raise RemovalPending(f"The Pulse user is being removed, and Guardian continues until all is gone. {left}")


def mark_for_removal(pulse_users: Sequence[PulseUser]) -> None:
    """Mark Pulse users in the caller's transaction. They are removed after its commit, or by a task within minutes."""
    removals.write(_mark(pulse_users))


def _mark(pulse_users: Sequence[PulseUser]) -> list[Removal]:
    """Mark Pulse users, and return their removals, which are not saved."""
    now = timezone.now()
    # Also mark Pulse users with a mark. A failed creation removes a mark with its own time only, so it keeps this one.
    rows = PulseUser.objects.filter(pk__in=[pulse_user.pk for pulse_user in pulse_users])
    if rows.update(removing_since=now):
        audit.record(None, REMOVAL_STARTED, pulse_users)
    for pulse_user in pulse_users:
        pulse_user.removing_since = now
    return [Removal(kind=Removal.Kind.PULSE_USER, name=pulse_user.username) for pulse_user in pulse_users]


def register_handler() -> None:
    removals.register(Removal.Kind.PULSE_USER, removals.Handler(_remove, obsolete=_not_marked, alone=True))


def _not_marked(pulse_users: Sequence[Removal]) -> list[Removal]:
    """Return the removals without a marked Pulse user: it is deleted, created again, or its creation failed."""
    names = [removal.name for removal in pulse_users]
    marked = PulseUser.objects.filter(username__in=names, removing_since__isnull=False)
    marked_names = set(marked.values_list("username", flat=True))
    return [removal for removal in pulse_users if removal.name not in marked_names]


def _remove(clients: Clients, removal: Removal, until: float) -> None:
    """Remove a marked Pulse user from the broker, and then its row.

    Raises locks.LockTaken if another process is changing it or this one was too slow, and removals.Postponed.
    """
    try:
        _remove_locked(clients, removal.name, until)
    except NotOnBroker as error:
        # core/removals.py would take NotOnBroker for success, but the row still exists.
        raise StillOnBroker(f"The broker answered 404 during the removal: {error}") from error


def _remove_locked(clients: Clients, username: str, until: float) -> None:
    with locks.lock(username) as lock:
        row = PulseUser.objects.filter(username=username, removing_since__isnull=False).first()
        if row is None:
            return  # another process removed it, and another Pulse user may have this name now
        management = lock.renewing_client(clients.management)
        reason = why_not_ownable(row.username, _tags(management, row.username))
        if reason and row.ready:
            raise StillOnBroker(f"Still there: the Pulse user itself. {reason}")
        # If the row never was ready, another client may have created the user. Then delete only the row.
        is_its_own = not reason and (row.ready or is_free_on_broker(management, row.username, allow_unfinished=True))
        if is_its_own:
            _remove_from_broker(clients._replace(management=management), row, lock, until)
        lock.renew()
        with transaction.atomic():
            row = PulseUser.objects.select_for_update().filter(pk=row.pk).first()
            if row is not None:
                if is_its_own:
                    signals.pulse_user_removed.send(PulseUser, pulse_user=row)
                row.delete()


def _tags(management: Management, username: str) -> frozenset[str]:
    try:
        return management.user(username).tags
    except NotOnBroker:
        return frozenset()


def _remove_from_broker(clients: Clients, pulse_user: PulseUser, lock: locks.Lock, until: float) -> None:
    """Delete a user with its queues and exchanges.

    Raises StillOnBroker if the broker still lists some or a list may have been incomplete, and removals.Postponed after
    ``until``, in monotonic time.
    """
    management, username = clients.management, pulse_user.username
    with contextlib.suppress(NotOnBroker):
        management.delete_user(username)
    nodes = running, _ = snapshot.members(management)
    may_lack_queues = settings.GUARDIAN_PULSE_VHOST in snapshot.stopped_vhosts(management, running)
    belongings = namespace.belongings_of(management, username)
    for pause in PAUSES:
        if not any(belongings):
            break
        _delete(clients.sessions, pulse_user, belongings, lock, until)
        belongings = namespace.belongings_of(management, username)
        if any(belongings):
            time.sleep(pause)
            belongings = namespace.belongings_of(management, username)
    if any(belongings):
        left = ", ".join(f"'{name}'" for name in (*belongings.queues, *belongings.exchanges)[:5])
        raise StillOnBroker(f"Still there: {left}")
    if may_lack_queues or snapshot.members(management) != nodes:
        raise StillOnBroker("Still there: maybe queues of a node that has just stopped or started")


def _delete(sessions: Sessions, pulse_user: PulseUser, belongings: Belongings, lock: locks.Lock, until: float) -> None:
    """Delete these queues and exchanges. Log those that the broker refuses to delete, and continue."""
    vhost = settings.GUARDIAN_PULSE_VHOST
    session = sessions.of(vhost)

    def delete_queue(name: str) -> None:
        queue_effects.delete_queue(session, name, pulse_user, lock.renew)

    kinds = (delete_queue, belongings.queues), (session.delete_exchange, belongings.exchanges)
    for delete, names_of_kind in kinds:
        for name in names_of_kind:
            if time.monotonic() >= until:
                raise removals.Postponed
            lock.renew()
            try:
                delete(name)
            except NotOnBroker:  # or its node is down, and the next list shows it
                continue
            except BrokerUnavailable:
                raise
            except BrokerError as error:
                logger.warning("'%s' in %s can't be deleted: %s", name, vhost, error)
