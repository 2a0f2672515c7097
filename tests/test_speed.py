"""The pages about speed: what was measured stands in them, and where nothing was, they say so."""

import json
import xml.etree.ElementTree as ET

import pytest

from benchmarks.figures import Figure
from local import speed

MACHINE = {"cores": "2", "RabbitMQ": "3.10.8"}


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Give a function that writes what a benchmark measured, and have the pages read from there."""
    monkeypatch.setattr(speed, "MEASURED", tmp_path)
    monkeypatch.setattr(speed, "KEPT", tmp_path / "kept" / "speed.json")
    (tmp_path / "kept").mkdir()

    def write(name, *figures):
        content = {"at": "2026-11-21T10:00:00+00:00", "machine": MACHINE, "figures": [one.as_json() for one in figures]}
        (tmp_path / f"{name}.json").write_text(json.dumps(content))

    passes = [
        Figure(f"{queues:,} queues, {database}", "1 in 10 changed", "s", [queues / 10_000], [queues / 20_000])
        for queues in (1_000, 50_000)
        for database in ("SQLite", "PostgreSQL")
    ]
    own = Figure("50,000 queues, PostgreSQL", "without its listing", "s", [2.5])
    write("growth", *passes, own)
    return write


def test_the_last_figures_of_each_benchmark_are_taken_over_and_others_stay(measured, capsys):
    measured("memory", Figure("SQLite", "50,000 queues", "MB", [612.0], most=500))
    speed.main()
    (speed.MEASURED / "memory.json").unlink()
    measured("deleting", Figure("500 of 10,000 queues, SQLite", "a pass", "s", [3.0, 2.0, 4.0], [2.5], most=1.2))
    speed.main()
    page = speed.speed_page()
    assert "- 2026-11-21: cores 2, RabbitMQ 3.10.8\n" in page
    assert "| 50,000 queues | 612 MB |  |  |  | ≤ 500 MB, missed |" in page
    assert "| a pass | 3.000 s | 2.000 to 4.000 | 2.500 s | 1.20 | ≤ 1.2 |" in page
    assert "`make bench ONLY=prometheus` measures it" in page


def test_the_chart_has_a_line_for_each_database_and_one_for_the_list(measured, capsys):
    speed.main()
    drawn = ET.fromstring(speed.chart())
    lines = drawn.findall("{http://www.w3.org/2000/svg}polyline")
    assert [len(line.get("points").split()) for line in lines] == [2, 2, 2]


def test_what_a_million_takes_is_worked_out_from_the_largest_size(measured, capsys):
    measured("memory", Figure("SQLite", "50,000 queues", "MB", [400.0]))
    measured("prometheus", Figure("10,000 queues, SQLite", "the figures alone", "s", [0.06]))
    speed.main()
    page = speed.million_page()
    assert "| the list, two vhosts at once, which keeps both cores busy | 2.50 s for 50,000 | 50 s |" in page
    assert "| a pass without its list, of a worker's time | 2.50 s for 50,000 | 50 s |" in page
    assert "| 400 MB for 50,000 | 8 GB |" in page
    assert "| 0.06 s for 10,000 | 6 s |" in page
    assert "With 1,000 vhosts of 1,000 queues, a pass over one takes 0.10 s" in page
