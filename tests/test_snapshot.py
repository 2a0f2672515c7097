"""The list of queues: several vhosts at once, and what is done while the broker works at it."""

import threading

import pytest

from rabbit import snapshot
from rabbit.management import MalformedResponse, Management
from rabbit.snapshot import ListedName
from tools.benchmarks.passes import counted_requests


def test_several_vhosts_are_listed_side_by_side(management, vhosts, monkeypatch):
    both = threading.Barrier(2, timeout=10)
    list_queues = Management.list_queues

    def list_together(self, vhost, params):
        both.wait()
        return list_queues(self, vhost, params)

    monkeypatch.setattr(Management, "list_queues", list_together)
    found = snapshot.take(management, vhosts[:2])
    assert [(queue.vhost, queue.name) for queue in found.queues] == [(vhost, "a") for vhost in vhosts[:2]]


@pytest.mark.parametrize("what", [KeyError, TypeError])
def test_what_goes_wrong_besides_is_passed_on_as_it_is_and_the_next_list_is_whole(management, vhosts, what):
    called = []

    def fail():
        called.append(what)
        if len(called) > 1:  # the first time is before the lists
            raise what("the mistake of whoever is called")

    with pytest.raises(what):
        snapshot.take(management, vhosts[:2], fail)
    assert len(snapshot.take(management, vhosts[:2]).queues) == 2


def test_nothing_more_is_asked_for_after_a_list_of_another_shape(management, vhosts, monkeypatch):
    many = [vhosts[0], *(f"no-such-vhost-{number}" for number in range(10))]
    monkeypatch.setattr(snapshot, "parse_row", lambda row: {}[row["name"]])
    asked, is_over = [], threading.Event()
    list_queues = Management.list_queues

    def list_and_note(self, vhost, params):
        asked.append(vhost)
        if vhost != many[0]:
            assert is_over.wait(20)
        return list_queues(self, vhost, params)

    monkeypatch.setattr(Management, "list_queues", list_and_note)
    before = set(threading.enumerate())
    with pytest.raises(MalformedResponse) as kept:
        snapshot.take(management, many)
    is_over.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(20)
    assert len(asked) <= 1 + snapshot.MAX_CONCURRENT_LISTS, kept


@pytest.mark.parametrize(
    ("others", "requests"),
    [
        ([f"no-such-vhost-{number}" for number in range(19)], 20),
        ([f"no-such-vhost-{number}" for number in range(20)], 1),
        ([".."], 1),  # which stands in no path
    ],
)
def test_up_to_twenty_vhosts_are_listed_each_by_itself_and_else_all_together(management, vhosts, others, requests):
    with counted_requests() as sent:
        found = snapshot.list_names(management, [vhosts[0], *others])
    assert found == ([ListedName(vhosts[0], "a", "classic", exclusive=False)], {})
    assert len([one for one in sent if one.startswith("GET /api/queues")]) == requests
    assert sent.count("GET /api/vhosts") <= 1


def test_a_vhost_that_is_named_twice_is_listed_once(management, vhosts):
    assert len(snapshot.take(management, [vhosts[0], vhosts[0]]).queues) == 1
