"""Why messages died, and where they may go back to: publishers can write any header."""

from datetime import UTC, datetime

import pytest

from guardian_consumers import _retries as retries
from queues.rules import dead_letters
from queues.rules.dead_letters import Source
from rabbit.entities import Binding

DEAD, JOBS = "queue/alice/dead", "queue/alice/jobs"
EXCHANGE = "exchange/alice/jobs"


def bound(queue, exchange, key):
    return Binding(exchange, "/", queue, "queue", key, {})


def here(source, name=DEAD, bindings=(), upstream=()):
    return dead_letters.surroundings(name, "alice", bindings, upstream, {JOBS: source}.get)


def x_death(queue=JOBS, reason="rejected", exchange=EXCHANGE, keys=("build.done",), **more):
    death = {"queue": queue, "reason": reason, "exchange": exchange, "routing-keys": list(keys), "count": 1, **more}
    return {"x-death": [death, {"queue": "queue/alice/earlier", "reason": "expired", "exchange": ""}]}


TO_DEAD = Source("", DEAD, [bound(JOBS, EXCHANGE, "build.*")])


def origin(headers, surroundings):
    return dead_letters.origin_of(dead_letters.read(headers), surroundings)


def test_the_last_death_of_a_message_is_read():
    died = datetime(2026, 1, 5, 12, tzinfo=UTC)
    headers = {**x_death(count=3, time=died.replace(tzinfo=None)), dead_letters.SENT_BACK: 2}
    letter = dead_letters.read(headers)
    assert letter[:7] == (JOBS, "rejected", EXCHANGE, "build.done", 3, died, 2)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"x-death": []},
        {"x-death": "x"},
        {"x-death": [1]},
        {"x-death": [{"queue": 1}]},
        {"x-death": [{"queue": "q"}]},
    ],
)
def test_a_message_without_a_readable_death_is_no_dead_letter(headers):
    assert dead_letters.read(headers) is None


def test_an_exchange_with_a_lone_surrogate_in_its_name_is_not_used():
    assert origin(x_death(exchange="\ud800"), here(TO_DEAD))[:2] == ("", JOBS)


@pytest.mark.parametrize("count", [-1, 2**31, "3", 1.5, True, None])
def test_a_forged_count_of_sendings_counts_as_none(count):
    assert dead_letters.sent_back_of({dead_letters.SENT_BACK: count}) == 0


def test_a_message_goes_to_its_exchange_again_if_that_reaches_the_queue_where_it_died():
    assert origin(x_death(), here(TO_DEAD))[:2] == (EXCHANGE, "build.done")


@pytest.mark.parametrize(
    ("exchange", "key"),
    [
        ("exchange/bob/jobs", "build.done"),  # the Pulse user may not publish there
        ("amq.topic", "build.done"),
        ("exchange/alice/other", "build.done"),  # the queue is not bound to it
        (EXCHANGE, "deploy.now"),  # nor for this key
        ("", DEAD),
        ("", "queue/bob/secret"),
    ],
)
def test_any_other_message_goes_straight_to_the_queue_where_it_died(exchange, key):
    bindings = [*TO_DEAD.bindings, bound(JOBS, "exchange/bob/jobs", "#"), bound(JOBS, "", JOBS)]
    found = origin(x_death(exchange=exchange, keys=[key]), here(TO_DEAD._replace(bindings=bindings)))
    assert (found.exchange, found.routing_key, found.why_not) == ("", JOBS, "")


@pytest.mark.parametrize(
    ("queue", "source"),
    [
        ("queue/bob/jobs", TO_DEAD),  # another Pulse user's
        ("queue/alicex/jobs", TO_DEAD),
        ("guardian.dlq", TO_DEAD),
        ("queue/alice/unknown", TO_DEAD),
        (JOBS, None),  # it does not dead-letter
        (JOBS, Source("", "queue/alice/elsewhere", [])),
        (JOBS, Source("", None, [])),
        (JOBS, Source("exchange/alice/dlx", None, [])),  # which does not lead here
    ],
)
def test_a_message_stays_if_its_death_cannot_be_true(queue, source):
    assert origin(x_death(queue=queue), here(source)).why_not


def test_a_dead_letter_exchange_may_lead_here_through_another_exchange():
    source = Source("exchange/alice/dlx", None, [])
    upstream = [Binding("exchange/alice/dlx", "/", "exchange/alice/all", "exchange", "#", {})]
    found = origin(x_death(), here(source, bindings=[bound(DEAD, "exchange/alice/all", "#")], upstream=upstream))
    assert (found.routing_key, found.why_not) == (JOBS, "")


@pytest.mark.parametrize(
    ("pattern", "key", "fits"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.c", False),
        ("a.*", "a.b", True),
        ("a.*", "a", False),
        ("a.*", "a.b.c", False),
        ("#", "", True),
        ("a.#", "a", True),
        ("a.#.z", "a.b.c.z", True),
        ("a.#.z", "a.b.c", False),
        ("#.#.a", "a", True),
        ("*", "", False),
        (".".join("#a" * 30), ".".join("a" * 120) + ".b", False),
    ],
)
def test_keys_fit_bindings_as_in_a_topic_exchange(pattern, key, fits):
    assert dead_letters._fits(pattern, key) is fits


PARKED = {
    retries.QUEUE: JOBS,
    retries.ERROR: "builtins.ValueError: no such book",
    retries.TRACEBACK: "Traceback …",
    retries.ATTEMPTS: 4,
    retries.EXCHANGE: EXCHANGE,
    retries.ROUTING_KEY: "build.done",
    retries.FAILED_AT: 1_767_614_400,
}


def test_a_parked_message_goes_to_its_work_queue_by_the_return_key_whatever_its_headers_say():
    name = f"{JOBS}.parked"
    parking = here(None, name=name, bindings=[bound(name, EXCHANGE, name)])
    letter = dead_letters.read(PARKED)
    assert (letter.reason, letter.attempts, letter.traceback) == ("builtins.ValueError", 4, "Traceback …")
    for headers in (PARKED, {**PARKED, retries.QUEUE: "queue/alice/other"}, x_death(queue="queue/bob/x")):
        assert origin(headers, parking)[:2] == (EXCHANGE, f"{JOBS}.again")


def test_a_parked_message_elsewhere_stays():
    assert origin(PARKED, here(TO_DEAD)).why_not == f"move them to the parking queue {JOBS}.parked first"


def test_groups_say_how_many_were_sent_back_before_and_list_what_stays_last():
    letters = [dead_letters.read({**x_death(), dead_letters.SENT_BACK: count}) for count in (0, 3, 1)]
    forged = [dead_letters.read(x_death(queue="queue/bob/x"))] * 5
    first, last = dead_letters.grouped([*forged, *letters], here(TO_DEAD))
    assert (first.messages, first.again, first.sent_back) == (3, 2, 3)
    assert (last.messages, bool(last.origin.why_not)) == (5, True)
