"""When beat hands tasks over."""

from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest
import time_machine
from celery.utils.imports import symbol_by_name
from django.conf import settings

from guardian_site.celery import app

NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)
SECONDS = 180
OFTEN = {"pass": 36, "notifications": 6, "removals": 3, "consumers": 3}
"""How often some tasks are handed over in that time."""


@pytest.fixture
def clock():
    with time_machine.travel(NOON, tick=False) as traveller:
        yield traveller


@pytest.fixture
def handed_over(clock, tmp_path, monkeypatch):
    """Give what has beat run for some minutes of the clock, and counts what it hands over."""
    scheduler = symbol_by_name(app.conf.beat_scheduler)(app, schedule_filename=str(tmp_path / "schedule"), lazy=True)
    scheduler.setup_schedule()
    sent = Counter()
    monkeypatch.setattr(scheduler, "apply_entry", lambda entry, producer=None: sent.update([entry.name]))

    def run():
        sent.clear()
        for _ in range(SECONDS):
            clock.shift(1)
            while scheduler.tick() == 0:
                pass
        return {name: sent[name] for name in OFTEN}

    yield run
    scheduler.close()


@pytest.mark.parametrize("jump", [timedelta(0), timedelta(hours=-1), timedelta(days=1)], ids=str)
def test_everything_is_handed_over_as_often_when_the_clock_has_jumped(clock, handed_over, jump):
    assert settings.GUARDIAN_POLL_SECONDS == 5
    about = {name: pytest.approx(count, abs=1) for name, count in OFTEN.items()}
    assert handed_over() == about
    clock.shift(jump)
    assert handed_over() == about


def test_consumers_are_counted_between_two_passes_and_not_beside_one():
    passes, counting = settings.CELERY_BEAT_SCHEDULE["pass"], settings.CELERY_BEAT_SCHEDULE["consumers"]
    assert counting["schedule"] % passes["schedule"] == 0, "they aren't handed over together, and this test is blind"
    assert counting["options"]["countdown"] == passes["schedule"] / 2
    assert counting["options"]["countdown"] < counting["options"]["expires"]
