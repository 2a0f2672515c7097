"""Quiet hours in any time zone, and notifications deferred by them."""

import zoneinfo
from datetime import UTC, datetime, time, timedelta

import pytest
from django.core.exceptions import ValidationError
from django.utils import timezone
from hypothesis import assume, given
from hypothesis import strategies as st

from accounts.models import Owner
from core.time_zones import time_zones, zone_of
from notifications.models import Notification
from notifications.preferences import deferred_until, set_quiet_hours

ZONES = ["UTC", "Europe/Berlin", "America/New_York", "Asia/Kathmandu", "Australia/Lord_Howe", "Pacific/Apia"]

zones = st.sampled_from(ZONES)
moments = st.datetimes(datetime(2020, 1, 1), datetime(2035, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001
minutes = st.times().map(lambda value: value.replace(second=0, microsecond=0))


def at(text):
    return datetime.fromisoformat(text)


@pytest.mark.parametrize(
    ("from_", "until", "zone", "now", "end"),
    [
        # Berlin is an hour ahead of UTC in winter, two in summer.
        ("22:00", "07:00", "Europe/Berlin", "2026-01-10T20:59:59+00:00", None),
        ("22:00", "07:00", "Europe/Berlin", "2026-01-10T21:00:00+00:00", "2026-01-11T06:00:00+00:00"),
        ("22:00", "07:00", "Europe/Berlin", "2026-01-11T05:59:59+00:00", "2026-01-11T06:00:00+00:00"),
        ("22:00", "07:00", "Europe/Berlin", "2026-01-11T06:00:00+00:00", None),
        ("09:00", "17:00", "Europe/Berlin", "2026-07-10T07:00:00+00:00", "2026-07-10T15:00:00+00:00"),
        ("09:00", "17:00", "Europe/Berlin", "2026-07-10T15:00:00+00:00", None),
        # The night in which daylight saving time begins is an hour shorter, and the one in which it ends is longer.
        ("22:00", "07:00", "Europe/Berlin", "2026-03-28T22:00:00+00:00", "2026-03-29T05:00:00+00:00"),
        ("22:00", "07:00", "Europe/Berlin", "2026-10-24T21:00:00+00:00", "2026-10-25T06:00:00+00:00"),
        # 2:30 does not exist in the first of these nights.
        ("22:00", "02:30", "Europe/Berlin", "2026-03-28T23:00:00+00:00", "2026-03-29T01:30:00+00:00"),
        # A local time that is skipped is read as standard time: 2:30 becomes 3:30. A repeated one is the first.
        ("02:30", "06:00", "Europe/Berlin", "2026-03-29T01:29:59+00:00", None),
        ("02:30", "06:00", "Europe/Berlin", "2026-03-29T01:30:00+00:00", "2026-03-29T04:00:00+00:00"),
        ("22:00", "02:30", "Europe/Berlin", "2026-10-25T00:29:59+00:00", "2026-10-25T00:30:00+00:00"),
        ("22:00", "02:30", "Europe/Berlin", "2026-10-25T00:30:00+00:00", None),
        # A whole day but a minute.
        ("00:00", "23:59", "UTC", "2026-01-10T23:59:30+00:00", None),
        ("12:00", "11:59", "UTC", "2026-01-10T12:00:00+00:00", "2026-01-11T11:59:00+00:00"),
    ],
)
def test_quiet_hours_follow_the_owners_time_zone(from_, until, zone, now, end):
    expected = at(end) if end else None
    assert deferred_until(time.fromisoformat(from_), time.fromisoformat(until), zone, at(now)) == expected


@given(moments, minutes, zones)
def test_without_quiet_hours_nothing_is_deferred(now, one, zone):
    assert deferred_until(None, None, zone, now) is None
    assert deferred_until(one, None, zone, now) is None
    assert deferred_until(None, one, zone, now) is None
    assert deferred_until(one, one, zone, now) is None


@given(minutes, minutes, zones, moments)
def test_notifications_are_deferred_exactly_within_quiet_hours(from_, until, zone, now):
    assume(from_ != until)
    local = now.astimezone(zoneinfo.ZoneInfo(zone))
    # On days of a change to or from daylight saving time, some local times occur twice or never.
    offsets = {(local + timedelta(hours=hours)).astimezone(UTC) - now for hours in (-36, 36)}
    assume(offsets == {timedelta(hours=-36), timedelta(hours=36)})
    local_time = local.time()
    is_quiet = from_ <= local_time < until if from_ < until else local_time >= from_ or local_time < until
    assert (deferred_until(from_, until, zone, now) is not None) == is_quiet


@given(minutes, minutes, zones, moments)
def test_all_deferrals_of_one_quiet_period_last_under_25_hours_and_end_together(from_, until, zone, now):
    end = deferred_until(from_, until, zone, now)
    assume(end is not None)
    assert now < end < now + timedelta(hours=25)
    assert deferred_until(from_, until, zone, end) is None
    between = now + (end - now) / 2
    assert deferred_until(from_, until, zone, between) in (end, None)


def test_an_unknown_time_zone_counts_as_utc():
    assert zone_of("Mars/Olympus").key == "UTC"
    assert zone_of("../../etc/passwd").key == "UTC"
    assert deferred_until(time(0), time(12), "Mars/Olympus", at("2026-01-10T06:00:00+00:00")) == at(
        "2026-01-10T12:00:00+00:00"
    )


@pytest.mark.parametrize(
    ("from_", "until", "zone", "field"),
    [
        (time(22), None, "UTC", "quiet_until"),
        (None, time(7), "UTC", "quiet_from"),
        (time(7), time(7), "UTC", "quiet_until"),
        (time(22), time(7), "Mars/Olympus", "time_zone"),
        (None, None, "", "time_zone"),
        (None, None, "../../etc/passwd", "time_zone"),
        (None, None, "europe/berlin\n", "time_zone"),
    ],
)
def test_invalid_quiet_hours_have_an_error_at_the_field(alice, from_, until, zone, field):
    with pytest.raises(ValidationError) as caught:
        set_quiet_hours(alice, from_, until, zone)
    assert list(caught.value.message_dict) == [field]
    alice.refresh_from_db()
    assert alice.time_zone == "UTC"


def test_deferred_notifications_follow_changed_quiet_hours(alice):
    now = timezone.now()
    for recipient in ("alice@example.org", "bob@example.org"):
        Notification.objects.create(
            recipient=recipient,
            kind="warning",
            facts={},
            created=now,
            due_at=now,
            deferred_until=now + timedelta(hours=5),
        )
    later = (now + timedelta(hours=2)).time().replace(microsecond=0)
    set_quiet_hours(alice, (now - timedelta(hours=1)).time(), later, "UTC")
    deferred = Notification.objects.get(recipient="alice@example.org").deferred_until
    assert deferred.time() == later
    set_quiet_hours(alice, None, None, "UTC")
    assert Notification.objects.get(recipient="alice@example.org").deferred_until is None
    assert Notification.objects.get(recipient="bob@example.org").deferred_until == now + timedelta(hours=5)


@pytest.mark.django_db
@pytest.mark.parametrize("name", ["localtime", "posixrules", "Factory"])
def test_a_zone_that_is_no_place_is_refused(name, monkeypatch):
    monkeypatch.setattr(zoneinfo, "available_timezones", lambda: {name, "UTC"})
    time_zones.cache_clear()
    owner = Owner.objects.create_user("alice@example.org")
    try:
        with pytest.raises(ValidationError, match="is not a time zone"):
            set_quiet_hours(owner, None, None, name)
        set_quiet_hours(owner, None, None, "UTC")
    finally:
        time_zones.cache_clear()
