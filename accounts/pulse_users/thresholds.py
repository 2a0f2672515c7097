"""The thresholds of a Pulse user's queues, when their owners are warned, and whether they are archived."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from django.conf import settings
from django.core.exceptions import PermissionDenied, ValidationError
from django.db import transaction

from accounts import queue_effects
from accounts.access import vouching
from accounts.models import UNCHANGED, Owner, PulseUser, Unchanged, check_thresholds
from core.confirmation import ConfirmableChange


def set_thresholds(
    pulse_user: PulseUser,
    warn: int | Unchanged | None,
    limit: int | Unchanged | None,
    by: Owner | None,
    confirm: str = "",
) -> None:
    """Set the thresholds of the Pulse user's queues, in messages, or None for the policy's.

    ``by`` is None for a command.

    Raises PermissionDenied if owners may not set thresholds, ValidationError also if the limit is above what owners may
    set, and ConfirmationRequired if the next pass would delete queues and ``confirm`` does not confirm it.
    """
    if set_thresholds_of_all([pulse_user], warn, limit, by, confirm):
        raise PulseUser.DoesNotExist("The Pulse user no longer exists.")


def set_thresholds_of_all(
    pulse_users: Sequence[PulseUser],
    warn: int | Unchanged | None,
    limit: int | Unchanged | None,
    by: Owner | None,
    confirm: str = "",
) -> list[PulseUser]:
    """Set the thresholds of several Pulse users, all or none, and return the Pulse users that no longer exist.

    Raises the errors of ``set_thresholds``.
    """
    if not vouching.acts_as_operator(by) and not settings.GUARDIAN_OWNERS_MAX_QUEUE_LENGTH:
        raise PermissionDenied("Only operators set thresholds here. Ask an operator.")
    given = {"warn_length": warn, "max_length": limit}
    values = {name: value for name, value in given.items() if value is not UNCHANGED}
    change = ConfirmableChange(by, "set thresholds", pulse_users, values, confirm)
    with transaction.atomic():
        keys = [pulse_user.pk for pulse_user in pulse_users]
        before = list(PulseUser.objects.select_for_update(no_key=True).filter(pk__in=keys).order_by("pk"))
        after = {pulse_user.pk: _with_thresholds(pulse_user, values, by) for pulse_user in before}
        for pulse_user in after.values():
            pulse_user.save(update_fields=["warn_length", "max_length"])
        changed = [(pulse_user, after[pulse_user.pk]) for pulse_user in before]
        change.require_confirmed(queue_effects.of_thresholds(changed))
    for pulse_user in pulse_users:
        if pulse_user.pk in after:
            stored = after[pulse_user.pk]
            pulse_user.warn_length, pulse_user.max_length = stored.warn_length, stored.max_length
    return [pulse_user for pulse_user in pulse_users if pulse_user.pk not in after]


def _with_thresholds(pulse_user: PulseUser, values: Mapping[str, Any], by: Owner | None) -> PulseUser:
    changed = copy.copy(pulse_user)
    for name, value in values.items():
        setattr(changed, name, value)
    limit, largest = changed.max_length, settings.GUARDIAN_OWNERS_MAX_QUEUE_LENGTH
    check_thresholds(changed.warn_length, limit)
    if not vouching.acts_as_operator(by) and limit is not None and limit > largest and limit != pulse_user.max_length:
        raise ValidationError(f"Owners can set a deletion limit of at most {largest} messages. Ask an operator.")
    return changed


MAX_HOLD_OFF_MINUTES = 60


def set_options(pulse_user: PulseUser, **options: int) -> None:
    """Set ``hold_off_minutes`` and ``keeps_archives``, or one of them."""
    with transaction.atomic():
        row = PulseUser.objects.locked(pulse_user)
        for name, value in options.items():
            setattr(row, name, value)
            setattr(pulse_user, name, value)
        row.save(update_fields=options)
