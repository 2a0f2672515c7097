"""When and how often an owner wants to be told: quiet hours, the time zone they are in, and the weekly summary."""

import zoneinfo
from datetime import UTC, datetime, time, timedelta
from functools import cache

from django.core.exceptions import ValidationError
from django.db import transaction
from django.utils import timezone

from accounts.models import UNCHANGED, Owner, Unchanged
from notifications.models import Notification

# Files that lie among the time zones and are no place's: what this machine is set to, and what stands for nothing set.
EXCLUDED_ZONES = {"Factory", "localtime", "posixrules"}


@cache
def time_zones() -> frozenset[str]:
    """Return the names of the time zones that there are."""
    return frozenset(zoneinfo.available_timezones() - EXCLUDED_ZONES)


def set_quiet_hours(
    owner: Owner,
    from_: time | Unchanged | None = UNCHANGED,
    until: time | Unchanged | None = UNCHANGED,
    time_zone: str | Unchanged = UNCHANGED,
) -> None:
    """Set between which times of the day, in which time zone, this owner is not to be told; both None: never.

    What is held back already is held until the end of the new ones, or no longer.

    Raises:
        ValidationError: no such time zone, one time without the other, or both the same. Its keys are those of the
            settings page: ``quiet_from``, ``quiet_until`` and ``time_zone``.
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
        errors["time_zone"] = f"'{time_zone[:64]}' is no time zone; write one such as Europe/Berlin."
    if (from_ is None) != (until is None):
        missing = "quiet_from" if from_ is None else "quiet_until"
        errors[missing] = "Quiet hours have a beginning and an end; leave both empty for none."
    elif from_ is not None and from_ == until:
        errors["quiet_until"] = "Quiet hours end at another time than they begin; leave both empty for none."
    if errors:
        raise ValidationError(errors)


def set_weekly_summary(owner: Owner, wanted: bool) -> None:
    """Set whether this owner gets a summary every week."""
    owner.weekly_summary = wanted
    owner.save(update_fields=["weekly_summary"])


def deferred_until(quiet_from: time | None, quiet_until: time | None, time_zone: str, now: datetime) -> datetime | None:
    """Return the end of the quiet hours that ``now`` is in, or None where it is in none.

    They may cross midnight. A time that the clocks skip is read as if they had not been put forward yet: where 2:00
    becomes 3:00, 2:30 is 3:30. One that comes twice is its first.
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


def zone_of(name: str) -> zoneinfo.ZoneInfo:
    """Return the time zone of this name; UTC where it is none any more, as after an update of the system's."""
    try:
        return zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        return zoneinfo.ZoneInfo("UTC")
