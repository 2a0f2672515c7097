"""The filters of templates: times, and names in one line."""

from datetime import UTC, datetime, timedelta

import pytest
import time_machine

from core.templatetags.components import ago, cut

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


def test_a_long_name_can_be_cut_in_the_middle_and_a_short_one_is_whole():
    assert cut("queue/<b>") == '<span class="cut" title="queue/&lt;b&gt;">queue/&lt;b&gt;</span>'
    name = "queue/alice/" + "x" * 30 + "/linux64-debug"
    assert cut(name) == f'<span class="cut" title="{name}"><span>{name[:-14]}</span><span>/linux64-debug</span></span>'
