"""Actions on several rows."""

import time

from core import each


def test_rows_for_which_an_action_has_no_time_left_are_reported(monkeypatch):
    monkeypatch.setattr(each, "ACTION_TIMEOUT_SECONDS", 0.05)
    results = each.try_each(["first", "second"], lambda _: time.sleep(0.1))
    assert (results.succeeded, results.left) == (["first"], ["second"])
    assert results.stop_reason == "the action took longer than 0.05 s; select them again"
