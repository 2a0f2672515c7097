"""The list of queues: several vhosts at once, and what is done while the broker works at it."""

import threading

import pytest

from benchmarks.passes import counted_requests
from rabbit import snapshot
from rabbit.management import Management
from rabbit.snapshot import Present


def test_several_vhosts_are_listed_side_by_side(management, vhosts, monkeypatch):
    both = threading.Barrier(2, timeout=10)
    list_queues = Management.list_queues

    def list_together(self, vhost, params):
        both.wait()
        return list_queues(self, vhost, params)

    monkeypatch.setattr(Management, "list_queues", list_together)
    found = snapshot.take(management, vhosts[:2])
    assert [(queue.vhost, queue.name) for queue in found.queues] == [(vhost, "a") for vhost in vhosts[:2]]


def test_what_is_done_meanwhile_is_done_once_in_the_thread_that_lists(management, vhosts):
    done = []
    snapshot.take(management, vhosts[:2], meanwhile=lambda: done.append(threading.current_thread()))
    assert done == [threading.current_thread()]


def test_what_goes_wrong_meanwhile_is_passed_on_and_the_next_list_is_whole(management, vhosts):
    def fail():
        raise LookupError("the database is away")

    with pytest.raises(LookupError):
        snapshot.take(management, vhosts[:2], meanwhile=fail)
    assert len(snapshot.take(management, vhosts[:2]).queues) == 2


def test_vhosts_are_listed_each_by_itself_up_to_twenty_and_else_together(management, vhosts):
    no_such = [f"no-such-vhost-{number}" for number in range(snapshot.FEW_VHOSTS - 1)]
    for others, asked in ((no_such, snapshot.FEW_VHOSTS), ([*no_such, "another"], 1)):
        with counted_requests() as sent:
            found = snapshot.present(management, [vhosts[0], *others])
        assert found == ([Present(vhosts[0], "a", "classic", exclusive=False)], {})
        assert len([one for one in sent if one.startswith("GET /api/queues")]) == asked
