"""Alarms and lost nodes: operators are notified once at the start and once at the end of each."""

from datetime import UTC, datetime, timedelta

import pytest

from notifications.models import Notification
from notifications.sending import send_due
from queues.guard import alarms, once
from queues.models import Watch
from rabbit.snapshot import Snapshot
from tests.conftest import Amqp
from tests.support.fixtures import guard
from tests.support.toolbox import disk_alarm, memory_alarm, sent, wait_until
from tools.rabbitmq import PrivateNode
from tools.rabbitmq_cluster import joining

NOW = datetime(2026, 1, 5, 12, tzinfo=UTC)


def snapshot(nodes=("rabbit@a", "rabbit@b"), down=(), raised=()):
    return Snapshot([], {}, frozenset(nodes), frozenset(down), True, True, [], [], 0.0, alarms=frozenset(raised))


def run_passes_until(kinds):
    """Run passes until operators were sent these kinds: the broker's list of nodes lags by seconds."""

    def is_notified():
        assert once.run_once().errors == []
        return sent("ops@example.org") == kinds

    wait_until(is_notified)


def test_alarms_are_notified_once_at_their_start_and_once_at_their_end(guarded_node, mailbox):
    once.run_once()
    with memory_alarm(guarded_node), disk_alarm(guarded_node):
        run_passes_until(["alarm"] * 2)
        once.run_once()
    run_passes_until(["alarm"] * 2 + ["alarm-over"] * 2)
    once.run_once()
    send_due()
    mails = mailbox.to("ops@example.org")
    assert sorted(mail.subject for mail in mails) == [
        f"[Guardian] The {resource} alarm is {state} on {guarded_node.name}"
        for resource in ("disk", "memory")
        for state in ("over", "raised")
    ]
    assert "RabbitMQ blocks all publishers" in mails[0].text


def test_an_alarm_raised_for_a_minute_is_over_after_a_minute():
    raised = alarms.after(None, snapshot(raised=[("memory", "rabbit@a")]), NOW)
    later = alarms.after(raised, snapshot(raised=[("memory", "rabbit@a")]), NOW + timedelta(seconds=30))
    (over,) = alarms.notices(later, snapshot(), NOW + timedelta(seconds=60))
    assert (over.kind, over.facts["seconds"]) == ("alarm-over", 60)
    assert alarms.after(later, snapshot(), NOW + timedelta(seconds=60)) == []


def test_each_alarm_of_each_node_is_notified():
    raised = [("memory", "rabbit@a"), ("memory", "rabbit@b"), ("disk", "rabbit@a")]
    started = alarms.notices([["memory", "rabbit@a", NOW.isoformat()]], snapshot(raised=raised), NOW)
    assert [(one.kind, one.facts["resource"], one.facts["node"]) for one in started] == [
        ("alarm", "disk", "rabbit@a"),
        ("alarm", "memory", "rabbit@b"),
    ]


def test_an_alarm_that_ends_with_its_node_says_so():
    earlier = [["memory", "rabbit@b", NOW.isoformat()]]
    lost, over = alarms.notices(earlier, snapshot(nodes=["rabbit@a"], down=["rabbit@b"]), NOW)
    assert (lost.kind, lost.facts["others"]) == ("node-lost", ["rabbit@a"])
    assert (over.kind, over.facts["running"]) == ("alarm-over", False)


def test_a_node_that_was_removed_from_the_cluster_is_no_longer_lost():
    earlier = [["node", "rabbit@b", NOW.isoformat()]]
    (back,) = alarms.notices(earlier, snapshot(nodes=["rabbit@a"]), NOW + timedelta(hours=1))
    assert (back.kind, back.facts["running"]) == ("node-back", False)


def test_an_outage_ends_no_alarm(guarded, amqp, settings):
    once.run_once()
    Watch.objects.update(alarms=[["memory", "rabbit@a", NOW.isoformat()]])
    settings.RABBITMQ_MANAGEMENT_URL = "http://guest:guest@127.0.0.1:1"
    once.run_once()
    assert sent("ops@example.org") == ["outage"]
    assert Watch.objects.get().alarms == [["memory", "rabbit@a", NOW.isoformat()]]


def test_a_frozen_node_is_notified_once_and_counts_as_lost():
    frozen = alarms.with_frozen(None, ["rabbit@b"], NOW)
    (notice,) = alarms.frozen_notices(None, ["rabbit@b"], ["rabbit@a", "rabbit@b"])
    assert (notice.kind, notice.facts["node"], notice.facts["others"]) == ("node-lost", "rabbit@b", ["rabbit@a"])
    assert alarms.frozen_notices(frozen, ["rabbit@b"], ["rabbit@a", "rabbit@b"]) == []
    assert alarms.with_frozen(frozen, ["rabbit@b"], NOW + timedelta(seconds=20)) == frozen


def test_a_frozen_node_that_is_dropped_is_not_notified_again():
    frozen = alarms.with_frozen(None, ["rabbit@b"], NOW)
    dropped = snapshot(nodes=["rabbit@a"], down=["rabbit@b"])
    assert alarms.notices(frozen, dropped, NOW) == []
    assert alarms.after(frozen, dropped, NOW + timedelta(minutes=1)) == frozen


def test_a_frozen_node_is_not_back_if_it_is_dropped_during_the_list():
    frozen = alarms.with_frozen(None, ["rabbit@b"], NOW)
    hanging = snapshot()._replace(nodes_unchanged=False)
    assert alarms.notices(frozen, hanging, NOW) == []
    assert alarms.after(frozen, hanging, NOW) == frozen


def test_a_lost_node_explains_for_some_minutes_that_lists_hang():
    frozen = alarms.with_frozen(None, ["rabbit@b"], NOW)
    assert alarms.explain_hanging(frozen, NOW + timedelta(minutes=2))
    assert not alarms.explain_hanging(frozen, NOW + timedelta(minutes=4))
    assert not alarms.explain_hanging([["memory", "rabbit@a", NOW.isoformat()]], NOW)


@pytest.mark.soak
def test_a_lost_node_is_notified_once_at_its_start_and_once_at_its_end(transactional_db, settings):
    with (
        PrivateNode(name="first", plugins=["rabbitmq_management"]) as first,
        PrivateNode(name="second", plugins=["rabbitmq_management"], peer=first, config=joining(first.name)) as second,
    ):
        guard(first, settings)
        Amqp(first.amqp_url, "/").queue("short", 1)
        once.run_once()
        second.kill()
        run_passes_until(["node-lost"])
        once.run_once()
        second.start()
        run_passes_until(["node-lost", "node-back"])
        once.run_once()
        assert sent("ops@example.org") == ["node-lost", "node-back"]
    lost = Notification.objects.get(kind="node-lost").facts
    assert (lost["node"], lost["others"]) == (second.name, [first.name])
