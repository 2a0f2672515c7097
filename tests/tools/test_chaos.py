"""``make soak``: a short run, which requests may fail during a fault, and what the message store may lose."""

import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest

from guardian_store._ids import Place, message_id
from tests.support.plugin import ROOT
from tools.faults import Fault, is_excused, was_down
from tools.load import Request
from tools.store_history import (
    FAULTS,
    Entry,
    Outage,
    Position,
    QueueHistory,
    answer_findings,
    body_of,
    longest_gap,
    outage_findings,
)

pytestmark = pytest.mark.slow


@pytest.mark.soak
def test_a_short_chaos_run_breaks_no_invariant(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tools.chaos", "--seconds", "3", "--directory", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "guard: killed" in done.stdout
    assert "All invariants hold." in done.stdout


def fault(part, how="killed"):
    return Fault(part, how, began=10.0, gone=11.0, ended=20.0, back=datetime.now(UTC))


@pytest.mark.parametrize(
    ("fault_", "request_", "may_fail"),
    [
        (fault("web-1"), Request("web-1", 9.0, 10.5, "reset", "look at pages", 0), True),
        (fault("web-1", "ended"), Request("web-1", 9.0, 10.5, "reset", "look at pages", 0), False),
        (fault("web-1"), Request("web-1", 11.5, 12.0, "reset", "look at pages", 0), False),
        (fault("web-1"), Request("web-2", 9.0, 10.5, "reset", "look at pages", 0), False),
        (fault("web-1"), Request("web-1", 9.0, 10.5, "error", "look at pages", 500), False),
        (fault("web-2"), Request("web-1", 15.0, 16.0, "error", "create Pulse users", 503), True),
        (fault("RabbitMQ"), Request("web-1", 15.0, 16.0, "error", "create Pulse users", 503), True),
        (fault("RabbitMQ"), Request("web-1", 15.0, 16.0, "error", "create Pulse users", 500), False),
        (fault("RabbitMQ"), Request("web-1", 41.0, 42.0, "error", "create Pulse users", 503), False),
        (fault("PostgreSQL"), Request("web-1", 41.0, 42.0, "error", "create Pulse users", 503), True),
        (fault("the mail server"), Request("web-1", 15.0, 16.0, "error", "sign in", 503), True),
        (fault("the mail server"), Request("web-1", 15.0, 16.0, "error", "create Pulse users", 503), False),
        (fault("Redis"), Request("web-1", 15.0, 16.0, "error", "create Pulse users", 503), False),
        (fault("guard-1"), Request("web-1", 15.0, 16.0, "error", "create Pulse users", 503), False),
        (fault("Redis"), Request("web-1", 1.0, 2.0, "error", "sign in", 429), True),
    ],
)
def test_a_request_may_fail_only_if_a_fault_explains_it(fault_, request_, may_fail):
    assert is_excused(request_, [fault_]) == may_fail


@pytest.mark.parametrize(
    ("part", "since", "until", "down"),
    [
        ("deleter-1", 0, 9, False),
        ("deleter-1", 0, 11, True),
        ("deleter-2", 24, 60, True),
        ("deleter-2", 26, 60, False),
        ("web-1", 0, 60, False),
    ],
)
def test_a_part_is_down_until_it_has_recovered(part, since, until, down):
    start = datetime(2026, 11, 28, tzinfo=UTC)
    since, until = (start + timedelta(seconds=seconds) for seconds in (since, until))
    fault_ = fault(part)._replace(back=start + timedelta(seconds=20))
    assert was_down(since, until, [fault_], {"deleter": 5}) == down


# The message store


def entry(ticks, *, partition=1, batch="a", number=0, size=1):
    return Entry(partition, message_id(Place(ticks, 1 << 63)).hex, body_of(batch, number, size))


ONE, TWO, THREE = entry(1, batch="one"), entry(2, batch="two"), entry(3, batch="three")
PAIR = [entry(4, batch="pair", size=2), entry(5, batch="pair", number=1, size=2, partition=2)]
WHOLE = [ONE, TWO, THREE, *PAIR]


def breaches_of(level="strong", *, acked=WHOLE, seen=WHOLE, stored=WHOLE):
    """Return the kinds of findings with breaches."""
    history = QueueHistory("queue", level, set(acked), [list(seen)], list(stored))
    return {finding.what.partition(": ")[2] for finding in history.findings() if finding.breaches}


@pytest.mark.parametrize("level", ["weak", "strong", "very_strong"])
def test_a_history_without_a_loss_has_no_breach(level):
    assert breaches_of(level) == set()


@pytest.mark.parametrize("level", ["strong", "very_strong"])
def test_an_acknowledged_message_must_be_stored(level):
    assert breaches_of(level, stored=[ONE, TWO, *PAIR]) == {"messages"}


@pytest.mark.parametrize("level", ["strong", "very_strong"])
def test_a_follower_must_see_each_acknowledged_message(level):
    assert breaches_of(level, seen=[ONE, THREE, *PAIR]) == {"followers"}


def test_an_acknowledged_message_must_be_unchanged():
    assert breaches_of(stored=[ONE._replace(body="other 0 1"), TWO, THREE, *PAIR]) == {"messages"}


def test_a_weak_queue_may_lose_messages_and_parts_of_batches():
    assert breaches_of("weak", seen=[ONE, *PAIR], stored=[ONE, TWO, PAIR[0]]) == set()


def test_a_message_without_an_acknowledgement_may_be_missed_and_may_be_stored():
    assert breaches_of(acked=[ONE, THREE, *PAIR], seen=[ONE, THREE, *PAIR]) == set()


@pytest.mark.parametrize("level", ["weak", "strong"])
@pytest.mark.parametrize("seen", [[ONE, ONE, TWO, THREE, *PAIR], [TWO, ONE, THREE, *PAIR]])
def test_a_follower_must_see_each_message_once_and_in_order(level, seen):
    assert breaches_of(level, seen=seen) == {"followers"}


def test_a_message_must_be_stored_once():
    assert breaches_of(stored=[*WHOLE, entry(6, batch="one")]) == {"messages"}


def test_of_a_batch_all_or_nothing_must_be_stored():
    assert breaches_of(acked=[ONE], stored=WHOLE[:-1]) == {"batches"}


def test_a_run_without_messages_followers_or_batches_proves_nothing():
    history = QueueHistory("queue", "strong")
    assert all(finding.breaches for finding in history.findings())


def test_positions_are_those_set_last_or_sent_since():
    position = Position({1: "b"}, [{1: "c"}, {1: "d"}])
    assert [found for found in "abcd" if not position.breaches({1: found})] == ["b", "c", "d"]


def request(what, began, ended, status=200):
    return Request("web-1", began, ended, "", what, status)


def test_an_answer_other_than_success_and_503_is_a_breach():
    answers = [request("queues", 1, 2, status) for status in (200, 503, 500, 0)]
    (finding,) = answer_findings(answers)
    assert [breach.partition(":")[0] for breach in finding.breaches] == ["500", "0"]


def outages():
    """Return each fault once, from 10 to 20 seconds."""
    ones = [Outage(how, [0], 10, 10, 20, 20) for how in FAULTS]
    return ones + [Outage(how, [0, 1], 10, 10, 20, 20) for how in FAULTS[:3]]


ANSWERS = [
    *(
        request(f"{level}: {kind}", at, at + 0.5)
        for at in (9, 21)
        for level in ("weak", "strong")
        for kind in ("posts", "reads", "batches")
    ),
    *(request(f"weak: {kind}", at, at + 0.5) for at in range(10, 20) for kind in ("posts", "reads")),
    request("strong: posts", 12, 13, 503),
]


def broken(outages, requests):
    return [finding.what for finding in outage_findings(outages, requests) if finding.breaches]


def strong_posts(*times):
    return [request("strong: posts", at, at + 0.1) for at in times]


ONE_AWAY = [f"one node: {how}" for how in FAULTS]
TWO_AWAY = [f"two nodes: {how}" for how in FAULTS[:3]]


def test_each_fault_must_have_happened():
    assert broken([], ANSWERS) == ONE_AWAY + TWO_AWAY


def test_strong_posts_must_go_on_with_one_node_away():
    ones = outages()[:4]
    assert set(ONE_AWAY) <= set(broken(ones, ANSWERS))
    assert not set(ONE_AWAY) & set(broken(ones, [*ANSWERS, *strong_posts(15)]))


def test_strong_requests_must_fail_and_weak_ones_succeed_with_two_nodes_away():
    twos = outages()[4:]
    assert not set(TWO_AWAY) & set(broken(twos, ANSWERS))
    assert set(TWO_AWAY) <= set(broken(twos, [*ANSWERS, *strong_posts(15)]))
    assert set(TWO_AWAY) <= set(broken(twos, [one for one in ANSWERS if one.status == 200]))
    assert set(TWO_AWAY) <= set(
        broken(twos, [one for one in ANSWERS if not (one.what == "weak: reads" and 9 < one.began < 21)])
    )


def test_a_gap_lasts_from_the_last_success_before_a_fault_to_the_first_after_it():
    outage = Outage("killed", [0], 10, 10, 20, 20)
    assert longest_gap(strong_posts(7, 9, 22, 29), "strong: posts", outage) == pytest.approx(13)
    assert longest_gap(strong_posts(7, 9, 14, 22), "strong: posts", outage) == pytest.approx(8)
    assert longest_gap([], "strong: posts", outage) == 10
