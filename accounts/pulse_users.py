"""RabbitMQ accounts: making and removing them, on the broker and here together.

The row comes first, not ready yet, so that no account made here is ever without one; it is ready when the broker has
the account. What a crash leaves in between is not ready: the same owner making it again finishes it.
"""

import contextlib
import secrets
from collections.abc import Sequence

from django.conf import settings
from django.db import IntegrityError, transaction

from accounts.models import Owner, PulseUser
from rabbit import connections, names, permissions
from rabbit.management import BrokerError, Management, NotThere


class NameTaken(ValueError):
    """The name belongs to an account already, here or on the broker."""


def make_pulse_user(username: str, owners: Sequence[Owner], password: str | None = None) -> tuple[PulseUser, str]:
    """Make a RabbitMQ account that may use its own names, and return its row and its password.

    Without a password one is generated. It is on the broker alone afterwards, so this is the time to show it.

    Raises:
        rabbit.names.BadName: the name can't be used; the text says why.
        NameTaken: somebody has it.
        BrokerError: the broker is away or refused; nothing was made.
    """
    names.check_user_name(username)
    management = connections.management()
    unfinished = PulseUser.objects.filter(username=username, ready=False, owners__in=owners).first()
    if unfinished is None and _is_on_broker(management, username):
        raise NameTaken(f"'{username}' is an account on the broker already; choose another name.")
    pulse_user = unfinished or _new_row(username, owners)
    password = password if password is not None else secrets.token_urlsafe(24)
    try:
        management.put_user(username, password)
        management.set_permissions(settings.GUARDIAN_PULSE_VHOST, username, permissions.for_pulse_user(username))
    except BrokerError:
        _unmake(management, pulse_user)
        raise
    pulse_user.ready = True
    pulse_user.save(update_fields=["ready"])
    return pulse_user, password


def remove_pulse_user(pulse_user: PulseUser) -> None:
    """Remove an account with its queues and exchanges from the broker, and its row after them.

    The account goes first, and its connections with it, so that nothing of it comes back in the meantime.

    Raises:
        BrokerError: the broker is away or refused. The row is still there, and doing it again goes on from here.
    """
    management = connections.management()
    vhost, username = settings.GUARDIAN_PULSE_VHOST, pulse_user.username
    with contextlib.suppress(NotThere):
        management.delete_user(username)
    for row in management.list_queues(vhost, {"disable_stats": "true", "columns": "name"}):
        if names.user_of_queue(row["name"]) == username:
            with contextlib.suppress(NotThere):
                management.delete_queue(vhost, row["name"])
    for exchange in management.exchanges(vhost):
        if names.user_of_exchange(exchange.name) == username:
            with contextlib.suppress(NotThere):
                management.delete_exchange(vhost, exchange.name)
    pulse_user.delete()


def _is_on_broker(management: Management, username: str) -> bool:
    try:
        management.user(username)
    except NotThere:
        return False
    return True


def _new_row(username: str, owners: Sequence[Owner]) -> PulseUser:
    try:
        with transaction.atomic():
            pulse_user = PulseUser.objects.create(username=username)
            pulse_user.owners.set(owners)
    except IntegrityError as error:
        raise NameTaken(f"'{username}' is taken; choose another name.") from error
    return pulse_user


def _unmake(management: Management, pulse_user: PulseUser) -> None:
    """Take back what was begun. Where the broker can't be asked, the row stays, not ready, and says so."""
    try:
        management.delete_user(pulse_user.username)
    except NotThere:
        pass
    except BrokerError:
        return
    pulse_user.delete()
