"""When beat hands tasks over."""

import time
from collections import Counter
from contextlib import contextmanager
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
def beat(tmp_path, monkeypatch):
    """Give what starts beat, on the file that it left, with something else in place of handing over."""

    @contextmanager
    def started(hand_over):
        filename = str(tmp_path / "schedule")
        scheduler = symbol_by_name(app.conf.beat_scheduler)(app, schedule_filename=filename, lazy=True)
        scheduler.setup_schedule()
        monkeypatch.setattr(scheduler, "apply_entry", hand_over)
        yield scheduler
        scheduler.close()

    return started


@pytest.fixture
def handed_over(clock, beat):
    """Give what has beat run for some minutes of the clock, and counts what it hands over."""
    sent = Counter()

    with beat(lambda entry, producer=None: sent.update([entry.name])) as scheduler:

        def run():
            sent.clear()
            for _ in range(SECONDS):
                clock.shift(1)
                while scheduler.tick() == 0:
                    pass
            return {name: sent[name] for name in OFTEN}

        yield run


@pytest.mark.parametrize("jump", [timedelta(0), timedelta(hours=-1), timedelta(days=1)], ids=str)
def test_everything_is_handed_over_as_often_when_the_clock_has_jumped(clock, handed_over, jump):
    assert settings.GUARDIAN_POLL_SECONDS == 5
    about = {name: pytest.approx(count, abs=1) for name, count in OFTEN.items()}
    assert handed_over() == about
    clock.shift(jump)
    assert handed_over() == about


def test_consumers_are_counted_between_two_passes_also_when_beat_is_late_or_began_at_another_time(clock, beat):
    at: dict[str, list[float]] = {"pass": [], "consumers": []}

    def hand_over(entry, producer=None):
        clock.shift(0.003)  # the time that it takes, by which the next one is later
        if entry.name in at:
            at[entry.name].append(time.time())

    for seconds in (100, 150, 200):
        with beat(hand_over) as scheduler:
            for _ in range(seconds * 10):
                clock.shift(0.1)
                while scheduler.tick() == 0:
                    pass
        clock.shift(4.3)  # beat is away, and no counting falls due meanwhile: it would come at once
    apart = [min(abs(one - other) for other in at["pass"]) for one in at["consumers"]]
    assert len(apart) == 8
    assert min(apart) == pytest.approx(settings.GUARDIAN_POLL_SECONDS / 2, abs=0.3)
