"""Outdated lengths: the list shows a quorum queue as of its last tick, up to 5 s ago."""

import pytest

from queues.guard import monitor, once
from queues.models import Queue
from tests.conftest import Amqp
from tests.support.toolbox import queue_events, queue_lengths, queue_names, sent, wait_until, wait_until_equal

pytestmark = pytest.mark.rabbitmq

TYPES = pytest.mark.parametrize("queue_type", ["classic", "quorum"])
LONG = {"purged", "consumed", "consumed-and-refilled", "acknowledged", "really-long"}


@TYPES
def test_a_queue_purged_just_before_the_pass_is_kept(amqp, management, guarded, queue_type):
    for name in LONG:
        amqp.queue(name, 40, arguments={"x-queue-type": queue_type})
    unacknowledged = [amqp.channel.basic_get("acknowledged") for _ in range(40)]
    wait_until_equal(lambda: queue_lengths(management, guarded), dict.fromkeys(LONG, 40))
    amqp.channel.queue_purge("purged")
    amqp.take("consumed", 40)
    amqp.take("consumed-and-refilled", 40)
    amqp.publish("consumed-and-refilled", 3)
    for method, _, _ in unacknowledged:
        amqp.channel.basic_ack(method.delivery_tag)
    assert once.run_once().deleted == 1
    assert queue_names(management, guarded) == LONG - {"really-long"}
    assert sent("ops@example.org").count("deletion") == 1
    assert "recovery" not in sent("ops@example.org")


def test_a_quorum_queue_that_only_seems_short_has_not_recovered(amqp, management, guarded):
    amqp.queue("builds", 6, arguments={"x-queue-type": "quorum"})
    wait_until_equal(lambda: queue_lengths(management, guarded), {"builds": 6})
    once.run_once()
    amqp.take("builds", 5)
    wait_until_equal(lambda: queue_lengths(management, guarded), {"builds": 1})
    amqp.publish("builds", 6)
    once.run_once()
    assert (Queue.objects.get().state, Queue.objects.get().ready) == ("warned", 7)
    assert sent("ops@example.org") == ["warning"]
    amqp.take("builds", 7)
    wait_until_equal(lambda: queue_lengths(management, guarded), {"builds": 0})
    once.run_once()
    assert sent("ops@example.org") == ["warning", "recovery"]


def test_a_quorum_queue_with_a_hanging_leader_is_neither_deleted_nor_recovered(guarded_node):
    amqp = Amqp(guarded_node.amqp_url, "/")
    for name in ("shrinking", "long"):
        amqp.queue(name, 6, arguments={"x-queue-type": "quorum"})
    management = monitor.broker.management()
    wait_until_equal(lambda: queue_lengths(management, "/"), {"shrinking": 6, "long": 6})
    once.run_once()
    amqp.take("shrinking", 6)
    amqp.publish("long", 20)
    wait_until_equal(lambda: queue_lengths(management, "/"), {"shrinking": 0, "long": 26})
    leaders = "[whereis(N) || N <- ['%2F_shrinking', '%2F_long']]"
    guarded_node.eval(f"[sys:suspend(P) || P <- {leaders}].")
    try:
        report = once.run_once()
        once.run_once()
    finally:
        guarded_node.eval(f"[sys:resume(P) || P <- {leaders}].")
    assert (report.deleted, report.recovered, report.unknown) == (0, 0, 1)
    assert queue_events("shrinking") == ["warned"]
    assert once.run_once().deleted == 1
    # While a node recovers after its start, shorter quorum queues on it are not believed.
    wait_until(lambda: once.run_once() and Queue.objects.get(name="shrinking").state == "ok")
