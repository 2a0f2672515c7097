"""Nodes that have just come back, whose quorum queues may look shorter than they are."""

from datetime import UTC, datetime, timedelta

import pytest

from queues.guard import recovering
from tests.queues.test_comparison import NODES, InMemoryMonitor, listed_queue, snapshot

A, B = "rabbit@a", "rabbit@b"
NOW = datetime(2026, 1, 5, 12, tzinfo=UTC)


def later(nodes):
    """Return when these nodes began to recover, given in seconds after the first."""
    return {node: (NOW + timedelta(seconds=seconds)).isoformat() for node, seconds in nodes.items()}


@pytest.mark.parametrize(
    ("earlier", "nodes", "listed", "seconds", "expected"),
    [
        ({}, [A, B], [A, B], 0, {}),
        ({}, [], [A, B], 0, {}),
        ({}, [A], [A, B], 0, {B: 0}),
        ({B: 0}, [A, B], [A, B], 14, {B: 0}),
        ({B: 0}, [A, B], [A, B], 15, {}),
        ({B: 0}, [A], [A, B], 10, {B: 10}),
        ({B: 0}, [A, B], [A], 1, {A: 1}),
    ],
    ids=["same nodes", "first list", "came back", "a moment ago", "a while ago", "came back again", "another is lost"],
)
def test_a_node_recovers_for_a_while(earlier, nodes, listed, seconds, expected):
    now = NOW + timedelta(seconds=seconds)
    found = recovering.after(later(earlier), nodes, snapshot(nodes=frozenset(listed)), now, was_outage=False)
    assert found == later(expected)


@pytest.mark.parametrize(("was_outage", "nodes_unchanged"), [(True, True), (False, False)])
def test_all_nodes_recover_if_any_may_have_been_restarted(was_outage, nodes_unchanged):
    listing = snapshot(nodes=frozenset([A, B]), nodes_unchanged=nodes_unchanged)
    assert recovering.after(None, [A, B], listing, NOW, was_outage=was_outage).keys() == {A, B}


@pytest.fixture
def monitor():
    """Return a monitor that has warned about a long quorum queue and a long classic one."""
    return InMemoryMonitor().after(snapshot(listed_queue("q", 7, type="quorum"), listed_queue("c", 7)))


def run_recovering(monitor, **lengths):
    monitor.earlier = monitor.earlier._replace(recovering=NODES)
    kinds = {"q": "quorum", "c": "classic", "new": "quorum"}
    return monitor.run(snapshot(*(listed_queue(name, size, type=kinds[name]) for name, size in lengths.items())))


def test_a_quorum_queue_that_shrinks_while_its_node_recovers_has_an_unknown_length(monitor):
    changes = run_recovering(monitor, q=0, c=7)
    assert (changes.unknown, changes.messages, changes.events, changes.unconfirmed) == (1, [], [], [])
    assert monitor.row("q").state == "warned"


def test_a_quorum_queue_without_a_leader_has_an_unknown_length_while_a_node_recovers(monitor):
    monitor.earlier = monitor.earlier._replace(recovering=NODES)
    changes = monitor.run(snapshot(listed_queue("q", 0, type="quorum", node=""), listed_queue("c", 7)))
    assert (changes.unknown, changes.messages, changes.events) == (1, [], [])


def test_a_quorum_queue_is_judged_again_when_its_node_has_recovered(monitor):
    run_recovering(monitor, q=0, c=7)
    monitor.earlier = monitor.earlier._replace(recovered=NODES)
    changes = monitor.run(snapshot(listed_queue("q", 0, type="quorum"), listed_queue("c", 7)))
    assert [message.kind.value for message in changes.messages] == ["recovery"]


def test_a_queue_that_grows_or_is_classic_or_new_is_judged_while_its_node_recovers(monitor):
    changes = run_recovering(monitor, q=8, c=0, new=0)
    assert (changes.unknown, monitor.row("q").length) == (0, 8)
    assert [message.queue.name for message in changes.messages] == ["c"]
    assert [row.length for row in changes.new] == [0]


def test_a_quorum_queue_that_is_missing_while_a_node_is_down_has_an_unknown_length(monitor):
    changes = monitor.run(snapshot(listed_queue("c", 7), down=frozenset({"rabbit@two"})))
    assert (changes.gone, changes.events, monitor.row("q").length) == ([], [], None)


def test_a_node_recovers_anew_when_its_quorum_queues_come_back_later_than_itself(monitor):
    monitor.run(snapshot(listed_queue("c", 7), down=frozenset({"rabbit@two"})))
    empty = snapshot(listed_queue("q", 0, type="quorum"), listed_queue("c", 7))
    changes = monitor.run(empty)
    assert (changes.returned_nodes, changes.unknown, changes.events) == (NODES, 1, [])
    monitor.earlier = monitor.earlier._replace(recovering=NODES, recovered=NODES)
    assert monitor.run(empty).returned_nodes == frozenset()
    monitor.earlier = monitor.earlier._replace(recovered=NODES)
    changes = monitor.run(empty)
    assert [message.kind.value for message in changes.messages] == ["recovery"]
