"""The notification settings of an owner: quiet hours, their time zone, and the weekly summary."""

from datetime import UTC, datetime, time, timedelta

from django.core.exceptions import ValidationError
from django.db import transaction
from django.utils import timezone

from accounts.models import UNCHANGED, Owner, Unchanged
from core.time_zones import time_zones, zone_of
from notifications.models import Notification


def set_quiet_hours(
    owner: Owner,
    from_: time | Unchanged | None = UNCHANGED,
    until: time | Unchanged | None = UNCHANGED,
    time_zone: str | Unchanged = UNCHANGED,
) -> None:
    """Set the quiet hours and their time zone. Two times of None end the quiet hours.

    Notifications that are already deferred are deferred to the end of the new quiet hours, or released. Raises
    ValidationError, with the keys ``quiet_from``, ``quiet_until`` and ``time_zone``, if the time zone does not exist,
    one time is missing, or both are the same.
    """
    with transaction.atomic():
        row = Owner.objects.select_for_update(no_key=True).get(pk=owner.pk)
        from_ = row.quiet_from if from_ is UNCHANGED else from_
        until = row.quiet_until if until is UNCHANGED else until
        time_zone = row.time_zone if time_zone is UNCHANGED else time_zone
        _check_quiet_hours(from_, until, time_zone)
        owner.quiet_from, owner.quiet_until, owner.time_zone = from_, until, time_zone
        owner.save(update_fields=["quiet_from", "quiet_until", "time_zone"])
        deferred = Notification.objects.filter(
            recipient=owner.email, deferred_until__isnull=False, state=Notification.State.DUE
        )
        deferred.update(deferred_until=deferred_until(from_, until, time_zone, timezone.now()))


def _check_quiet_hours(from_: time | None, until: time | None, time_zone: str) -> None:
    errors = {}
    if time_zone not in time_zones():
        errors["time_zone"] = f"'{time_zone[:64]}' is not a time zone; enter one such as Europe/Berlin."
    if (from_ is None) != (until is None):
        missing = "quiet_from" if from_ is None else "quiet_until"
        errors[missing] = "Enter both the start and the end of the quiet hours, or leave both empty for none."
    elif from_ is not None and from_ == until:
        errors["quiet_until"] = "Enter an end that differs from the start, or leave both empty for no quiet hours."
    if errors:
        raise ValidationError(errors)


def set_weekly_summary(owner: Owner, wanted: bool) -> None:
    owner.weekly_summary = wanted
    owner.save(update_fields=["weekly_summary"])


def deferred_until(quiet_from: time | None, quiet_until: time | None, time_zone: str, now: datetime) -> datetime | None:
    """Return the end of the quiet hours if ``now`` is in them, else None.

    Quiet hours may cross midnight. A time skipped by daylight saving is read as before the change: if 2:00 becomes
    3:00, 2:30 is 3:30. Of a repeated time the first counts.
    """
    if quiet_from is None or quiet_until is None or quiet_from == quiet_until:
        return None
    zone = zone_of(time_zone)
    local = now.astimezone(zone)
    for day in (local.date() - timedelta(days=1), local.date()):
        ends_on = day if quiet_from < quiet_until else day + timedelta(days=1)
        begin = datetime.combine(day, quiet_from, zone).astimezone(UTC)
        end = datetime.combine(ends_on, quiet_until, zone).astimezone(UTC)
        if begin <= now < end:
            return end
    return None
