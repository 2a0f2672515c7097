"""Removing RabbitMQ accounts with all they have, on the broker and here together.

The row is marked first, then everything goes from the broker, and the row last. What is left of that, by a crash or a
broker that went away, is finished by :func:`finish_removals`, every minute.
"""

import contextlib
import logging
import time
from collections.abc import Iterable
from typing import NamedTuple

from django.conf import settings
from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.utils import timezone

from accounts import audit, signals
from accounts.models import PulseUser
from accounts.pulse_users import may_be_made, why_nobodys
from core import broker, locks
from rabbit import names, snapshot
from rabbit.management import BrokerAway, BrokerError, Management, NotThere

logger = logging.getLogger(__name__)

REMOVES = "began to remove"
"""What the audit trail says of an account that is marked. That its row is deleted says that it is done."""

PAUSES = (0.2, 1.0)
"""Seconds between the rounds of a removal: the broker closes the connections of a deleted account in its own time."""


class GoesOn(Exception):
    """It is marked and not all gone yet, and Guardian goes on by itself. The text says what keeps it."""


class Goes(NamedTuple):
    """The names of what goes with an account when it is removed."""

    queues: list[str]
    exchanges: list[str]


def what_goes(pulse_user: PulseUser) -> Goes:
    """Return what the broker has of this account right now, which goes with it.

    Raises:
        BrokerError: the broker is away or refused.
    """
    return _what_goes(broker.management(), pulse_user.username)


def remove_pulse_user(pulse_user: PulseUser) -> None:
    """Remove an account with its queues and exchanges from the broker, and its row after them.

    The account goes first, and its connections with it, so that nothing of it comes back in the meantime.

    Raises:
        PermissionDenied: it is Guardian's own account or an administrator's by now; nothing changed.
        BrokerError: the broker is away or refused. Where that came before anything was done, nothing changed; else
            ``removing_since`` is set, and the task goes on until all is gone.
        GoesOn: ``removing_since`` is set, and the task goes on: somebody else is changing the account right now, or
            something of it is still there.
    """
    management = broker.management()
    reason = why_nobodys(pulse_user.username, _tags(management, pulse_user.username))
    if reason and pulse_user.ready:
        raise PermissionDenied(reason)
    now = timezone.now()
    with transaction.atomic():
        # Also one that is marked already: a making that fails takes its own mark back, and not this one.
        if PulseUser.objects.filter(pk=pulse_user.pk).update(removing_since=now):
            pulse_user.removing_since = now
            audit.note(None, REMOVES, pulse_user)
    try:
        left = _remove(management, pulse_user)
    except locks.Taken as error:
        raise GoesOn(f"it is being removed, and Guardian goes on by itself: {error}") from error
    if left:
        raise GoesOn(f"it is being removed, and Guardian goes on by itself. Still there: {left}")


def finish_removals() -> int:
    """Go on with all removals that were begun, past single failures, until the broker is away.

    Return how many are finished now.
    """
    return remove_marked(PulseUser.objects.filter(removing_since__isnull=False).order_by("removing_since"))


def remove_marked(marked: Iterable[PulseUser]) -> int:
    """Remove these accounts, which are marked for it, past single failures, until the broker is away.

    Return how many are gone now. What isn't is logged, and stays marked for :func:`finish_removals`; what somebody else
    is changing right now is left to them and to the next time.
    """
    gone = 0
    for pulse_user in list(marked):
        try:
            left = _remove(broker.management(), pulse_user)
        except BrokerAway as error:
            logger.warning("Removing '%s' stops here, and goes on in a minute: %s", pulse_user.username, error)
            break
        except locks.Taken:
            continue
        except BrokerError as error:
            logger.warning("'%s' can't be removed yet: %s", pulse_user.username, error)
            continue
        if left:
            logger.warning("'%s' is not removed yet; still there: %s", pulse_user.username, left)
        else:
            gone += 1
    return gone


def _remove(management: Management, pulse_user: PulseUser) -> str:
    """Remove what is marked from the broker, and then its row. Return what is left and keeps the row; empty: nothing.

    Raises:
        locks.Taken: somebody else is changing it right now, or this was so slow that somebody else went on with it.
        BrokerError: the broker is away, or refused to delete the account or to list what it has.
    """
    with locks.held(pulse_user.username) as ours:
        row = PulseUser.objects.filter(pk=pulse_user.pk, removing_since__isnull=False).first()
        if row is None:
            return ""  # somebody else was faster, and the name may be another's by now
        management = ours.renewed_by(management)
        reason = why_nobodys(row.username, _tags(management, row.username))
        if reason and row.ready:
            return f"the account itself. {reason}"
        # One that never was ready may be another's on the broker, made by hand; then only the row goes.
        is_its_own = not reason and (row.ready or may_be_made(management, row.username, begun=True))
        left = _remove_from_broker(management, row.username) if is_its_own else ""
        if not left:
            ours.renew()
            with transaction.atomic():
                row = PulseUser.objects.select_for_update().filter(pk=pulse_user.pk).first()
                if row is not None:
                    if is_its_own:
                        signals.pulse_user_removed.send(PulseUser, pulse_user=row)
                    row.delete()
        return left


def _tags(management: Management, username: str) -> frozenset[str]:
    try:
        return management.user(username).tags
    except NotThere:
        return frozenset()


def _remove_from_broker(management: Management, username: str) -> str:
    with contextlib.suppress(NotThere):
        management.delete_user(username)
    nodes = snapshot.members(management)
    goes = _what_goes(management, username)
    for pause in PAUSES:
        if not any(goes):
            break
        _delete(management, goes)
        goes = _what_goes(management, username)
        if any(goes):
            time.sleep(pause)
            goes = _what_goes(management, username)
    if any(goes):
        return ", ".join(f"'{name}'" for name in (*goes.queues, *goes.exchanges)[:5])
    if snapshot.members(management) != nodes:
        return "maybe queues of a node that has just stopped or started"  # such lists are short
    return ""


def _delete(management: Management, goes: Goes) -> None:
    """Delete these queues and exchanges, past those that the broker refuses to."""
    vhost = settings.GUARDIAN_PULSE_VHOST
    for delete, those in ((management.delete_queue, goes.queues), (management.delete_exchange, goes.exchanges)):
        for name in those:
            try:
                delete(vhost, name)
            except NotThere:  # or its node is down: the next list says which
                continue
            except BrokerAway:
                raise
            except BrokerError as error:
                logger.warning("'%s' in %s can't be deleted: %s", name, vhost, error)


def _what_goes(management: Management, username: str) -> Goes:
    vhost = settings.GUARDIAN_PULSE_VHOST
    try:
        queues = management.list_queues(vhost, {"disable_stats": "true", "columns": "name"})
        exchanges = management.exchanges(vhost)
    except NotThere as error:
        if vhost in {there.name for there in management.vhosts()}:
            raise BrokerAway(f"the vhost '{vhost}' is there and can't be listed; ask again later: {error}") from error
        return Goes([], [])
    return Goes(
        sorted(row["name"] for row in queues if names.user_of_queue(row["name"]) == username),
        sorted(exchange.name for exchange in exchanges if names.user_of_exchange(exchange.name) == username),
    )
