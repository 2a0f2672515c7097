import threading

import amqp
import pytest

from rabbit import checkup, snapshot
from rabbit.management import Management
from rabbit.snapshot import ListedName
from tests.support.counting import counted_requests

pytestmark = pytest.mark.rabbitmq


def test_several_vhosts_are_listed_concurrently(management, vhosts, monkeypatch):
    both = threading.Barrier(2, timeout=10)
    list_queues = Management.list_queues

    def list_together(self, vhost, params):
        both.wait()
        return list_queues(self, vhost, params)

    monkeypatch.setattr(Management, "list_queues", list_together)
    found = snapshot.take(management, vhosts[:2])
    assert [(queue.vhost, queue.name) for queue in found.queues] == [(vhost, "a") for vhost in vhosts[:2]]


@pytest.mark.parametrize("what", [KeyError, TypeError])
def test_an_error_of_the_callback_is_raised_and_the_next_snapshot_works(management, vhosts, what):
    called = []

    def fail():
        called.append(what)
        if len(called) > 1:  # the first call is before the lists
            raise what("an error of the callback")

    with pytest.raises(what):
        snapshot.take(management, vhosts[:2], fail)
    assert len(snapshot.take(management, vhosts[:2]).queues) == 2


def test_no_further_list_is_requested_after_an_error(management, vhosts, monkeypatch):
    many = [vhosts[0], *(f"no-such-vhost-{number}" for number in range(10))]
    monkeypatch.setattr(snapshot, "parse_row", lambda row: {}[row["name"]])
    asked, is_over = [], threading.Event()
    list_queues = Management.list_queues

    def record_and_list(self, vhost, params):
        asked.append(vhost)
        if vhost != many[0]:
            assert is_over.wait(20)
        return list_queues(self, vhost, params)

    monkeypatch.setattr(Management, "list_queues", record_and_list)
    before = set(threading.enumerate())
    with pytest.raises(KeyError) as kept:
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
        ([".."], 1),  # no path can contain it
    ],
)
def test_up_to_twenty_vhosts_are_listed_separately_and_more_together(management, vhosts, others, requests):
    with counted_requests() as sent:
        found = snapshot.list_names(management, [vhosts[0], *others])
    assert found == ([ListedName(vhosts[0], "a", "classic", exclusive=False)], {})
    assert len([one for one in sent if one.startswith("GET /api/queues")]) == requests
    assert sent.count("GET /api/vhosts") <= 1


def test_a_vhost_is_stopped_until_a_node_that_starts_runs_it(management, vhosts):
    running, _ = snapshot.members(management)
    assert not snapshot.stopped_vhosts(management, running) & set(vhosts)
    assert snapshot.stopped_vhosts(management, running | {"rabbit@starting"}) >= set(vhosts)


def test_a_vhost_given_twice_is_listed_once(management, vhosts):
    assert len(snapshot.take(management, [vhosts[0], vhosts[0]]).queues) == 1


def test_the_queues_that_test_the_broker_are_left_out(management, vhosts, broker, monkeypatch):
    listed = []

    def list_and_delete(channel, name):
        listed.extend(snapshot.take(management, vhosts[:1]).queues)
        return queue_delete(channel, name)

    queue_delete = amqp.Channel.queue_delete
    monkeypatch.setattr(amqp.Channel, "queue_delete", list_and_delete)
    checkup.check_vhost(broker.amqp_url, vhosts[0])
    assert [queue.name for queue in listed] == ["a"]
