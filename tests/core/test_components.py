"""The filters of templates: times, and names in one line."""

from datetime import UTC, datetime, timedelta

import pytest
import time_machine

from core.templatetags.components import ago, cut, with_figures

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "just now"), (42, "42 s ago"), (89, "89 s ago"), (90, "2 min ago"), (3 * 3600, "3 h ago"),
        (6 * 86_400, "6 d ago"), (-6 * 86_400, "in 6 d"), (31 * 86_400, "2026-01-29"),
    ],
)  # fmt: skip
@time_machine.travel(NOW, tick=False)
def test_a_time_is_relative_and_its_tooltip_exact(seconds, words):
    at = NOW - timedelta(seconds=seconds)
    assert ago(at) == f'<time datetime="{at.isoformat()}" title="{at:%Y-%m-%d %H:%M:%S} UTC">{words}</time>'


def test_no_time_is_empty():
    assert ago(None) == ""


def test_a_very_long_name_is_cut_in_the_middle_and_others_are_whole():
    assert cut("queue/<b>") == '<span class="cut" title="queue/&lt;b&gt;">queue/&lt;b&gt;</span>'
    name = "a" * 60 + "b" * 60
    assert cut(name) == f'<span class="cut" title="{name}">{"a" * 32}…{"b" * 32}</span>'


def test_the_columns_of_an_admins_list_with_figures_only_are_marked():
    rows = [
        ["<td>1,234</td>", "<td>1.5\N{NO-BREAK SPACE}KB</td>", "<td>none</td>", "<td>7 of 9</td>", "<th>1</th>"],
        ["<td>none</td>", "<td></td>", "<td>none</td>", "<td>7</td>", "<th>2</th>"],
    ]
    headers = with_figures([{"text": ""} for _ in rows[0]], rows)
    assert [header["has_figures"] for header in headers] == [True, True, False, False, False]
