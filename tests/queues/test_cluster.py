"""Faults of a cluster of three nodes, under a pass each second: nothing is deleted, reported or lost by mistake."""

import threading
import time
import uuid
from collections import Counter
from itertools import pairwise

import pika
import pytest
from django.utils import timezone

import core.broker
from agents.registration.declaring import declare_or_replace
from core import removals
from core.models import Removal
from notifications.models import Notification
from queues.guard import once
from queues.models import Archive, Queue, QueueEvent, Watch
from rabbit import deadline
from rabbit.addresses import addresses_of
from rabbit.amqp import NODE_DOWN, Session
from rabbit.arguments import REGISTERED_QUEUE_ARGUMENTS, of_type
from rabbit.errors import BrokerError, BrokerUnavailable, NodeDown, NotOnBroker
from rabbit.fetching import FIRST_MESSAGES
from rabbit.management import Management
from rabbit.publishing import Message, Publisher, Result
from tests.conftest import Amqp
from tests.support.faults import once_after, once_before
from tests.support.fixtures import guard
from tests.support.toolbox import wait_until
from tools.rabbitmq import ControlError
from tools.rabbitmq_cluster import RabbitCluster

pytestmark = [pytest.mark.soak, pytest.mark.slow]

KINDS = (
    ("classic", 16, {"x-queue-type": "classic"}),
    ("quorum", 8, {"x-queue-type": "quorum"}),
    ("single", 8, {"x-queue-type": "quorum", "x-quorum-initial-group-size": 1}),
    ("stream", 8, {"x-queue-type": "stream"}),
)
"""The queues whose leader is on each node: their names, how many there are, and their arguments."""
LENGTHS = (0, 2, 7, 20)
PERSISTENT = pika.BasicProperties(delivery_mode=2)
SECONDS_AFTER = 15
"""Passes go on for this time after a fault, so that late consequences are counted too."""


@pytest.fixture(scope="module")
def nodes():
    with RabbitCluster() as cluster:
        yield cluster


@pytest.fixture
def empty_cluster(nodes, transactional_db, settings, pulse_user):
    """Guard a cluster without queues."""
    guard(nodes.nodes[0], settings)
    settings.RABBITMQ_MANAGEMENT_URL, settings.RABBIT_URL = nodes.management_url, nodes.amqp_url
    settings.GUARDIAN_POLL_SECONDS = 1
    addresses_of.cache_clear()
    management = Management(nodes.nodes[0].management_url)
    management.delete_vhost("/")
    management.create_vhost("/")
    yield nodes
    for node in nodes.nodes:
        if node.running:
            node.resume()
        else:
            node.start()
    nodes.wait()


@pytest.fixture
def cluster(empty_cluster, settings, pulse_user):
    """Guard a cluster with 120 queues: classic ones, quorum queues with three members and with one, and streams.

    Some are over their warning threshold, and some over their deletion limit but unbounded.
    """
    for number, node in enumerate(empty_cluster.nodes):
        amqp = Amqp(node.amqp_url, "/")
        for name, count, arguments in KINDS:
            for index in range(count):
                queue = f"queue/{pulse_user.username}/{name}-{number}-{index}"
                amqp.queue(queue, arguments=arguments)
                for _ in range(LENGTHS[index % len(LENGTHS)]):
                    amqp.channel.basic_publish("", queue, b"", PERSISTENT)
        amqp.connection.close()
    time.sleep(6)  # quorum queues are listed as of their last tick
    settings.GUARDIAN_MAX_QUEUE_LENGTH = 100
    once.run_once()
    Queue.objects.update(unbounded=True)
    settings.GUARDIAN_MAX_QUEUE_LENGTH = 10
    for _ in range(3):
        assert once.run_once().queues == 120
    QueueEvent.objects.all().delete()
    Notification.objects.all().delete()
    return empty_cluster


class Passes:
    """Passes, one each second, while a fault happens in another thread."""

    def __init__(self, fault):
        self.reports = []
        self._fault = fault
        self._error = None
        self.began = time.monotonic()

    def run(self):
        fault = threading.Thread(target=self._run_fault)
        fault.start()
        last = None
        while last is None or time.monotonic() < last + SECONDS_AFTER:
            began = time.monotonic()
            report = once.run_once()
            self.reports.append((began - self.began, time.monotonic() - self.began, report))
            if last is None and not fault.is_alive():
                last = time.monotonic()
            time.sleep(max(0, began + 1 - time.monotonic()))
        if self._error is not None:
            raise self._error
        return self

    def _run_fault(self):
        try:
            self._fault()
        except Exception as error:
            self._error = error

    @property
    def longest_gap(self):
        """The longest time in seconds from the end of a complete pass to the end of the next."""
        ends = [0.0, *(end for _, end, report in self.reports if not report.away)]
        return max(after - before for before, after in pairwise(ends))

    def __repr__(self):
        lines = [
            f"{began:7.2f} {end - began:5.2f} {report.queues} queues, {report.unknown} unknown, {report.gone} gone, "
            f"{report.warned} warned, {report.recovered} recovered; {'; '.join(report.errors)[:200]}"
            for began, end, report in self.reports
        ]
        events = [f"{event.kind} {event.queue_name}" for event in QueueEvent.objects.order_by("id")]
        return "\n".join(["", *lines, f"longest gap {self.longest_gap:.1f} s", f"{events}, {notices()}"])


def run_passes_during(fault):
    """Run passes during a fault, in which no queue changes and none is gone."""
    passes = Passes(fault).run()
    assert mistakes() == {}, passes
    assert Queue.objects.exclude(state="gone").count() == 120, passes
    return passes


def have_dropped(others, node):
    """Return whether the other nodes have dropped this one."""
    try:
        return all(node.name not in other.eval("nodes()") for other in others)
    except ControlError:  # erl_call sometimes can't connect meanwhile
        return False


def mistakes():
    """Return the numbers of events of queues: each is a mistake, because nobody changed a queue."""
    return dict(Counter(QueueEvent.objects.values_list("kind", flat=True)))


def notices():
    return dict(Counter(Notification.objects.values_list("kind", flat=True)))


@pytest.mark.parametrize("number", [0, 1])
def test_a_node_is_killed_and_comes_back(cluster, number):
    node = cluster.nodes[number]

    def fault():
        time.sleep(3)
        node.kill()
        time.sleep(10)
        node.start()
        cluster.wait()

    passes = run_passes_during(fault)
    assert notices() == {"node-lost": 1, "node-back": 1}, passes
    assert passes.longest_gap < 5, passes


def test_all_nodes_restart_in_turn(cluster):
    def fault():
        for node in cluster.nodes:
            time.sleep(2)
            node.halt()
            time.sleep(2)
            node.start()
            cluster.wait()

    passes = run_passes_during(fault)
    assert notices() == {"node-lost": 3, "node-back": 3}, passes
    assert passes.longest_gap < 5, passes


def test_a_node_is_frozen_until_the_others_drop_it(cluster):
    node, *others = cluster.nodes
    dropped = []

    def fault():
        time.sleep(3)
        node.suspend()
        wait_until(lambda: have_dropped(others, node), seconds=150)
        dropped.append(time.monotonic())
        time.sleep(12)
        node.kill()  # RabbitMQ's guide recommends to restart such a node
        node.start()
        cluster.wait()

    passes = run_passes_during(fault)
    assert notices() == {"node-lost": 1, "node-back": 1}, passes
    assert Notification.objects.get(kind="node-lost").facts["node"] == node.name
    [since] = dropped
    first_complete = next(end for _, end, report in passes.reports if not report.away and passes.began + end > since)
    # After the drop, RabbitMQ 3.10 tries to connect to the node again, which takes 7 s.
    assert passes.began + first_complete - since < 15, passes


def test_two_of_three_nodes_are_killed_and_come_back(cluster):
    def fault():
        time.sleep(3)
        for node in cluster.nodes[:2]:
            node.kill()
        time.sleep(15)
        for node in cluster.nodes[:2]:
            node.start()
        cluster.wait()

    passes = run_passes_during(fault)
    assert notices().keys() <= {"node-lost", "node-back", "outage", "outage-over"}, passes
    assert notices()["node-lost"] == notices()["node-back"] == 2, passes


def test_a_cluster_is_split(cluster):
    """One node is frozen until the others drop it, then the others while it runs again. So both sides run alone."""
    node, *others = cluster.nodes

    def fault():
        node.suspend()
        wait_until(lambda: have_dropped(others, node), seconds=150)
        for other in others:
            other.suspend()
        node.resume()
        time.sleep(15)
        for other in others:
            other.resume()
        time.sleep(15)
        node.kill()
        node.start()
        cluster.wait()

    passes = run_passes_during(fault)
    assert notices().keys() <= {"node-lost", "node-back", "outage", "outage-over"}, passes
    assert not passes.reports[-1][2].away, passes


@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_an_agents_queue_whose_node_is_down_is_unreachable(cluster, kind, settings):
    settings.GUARDIAN_REGISTERED_QUEUE_TYPE = kind
    node = cluster.nodes[1]
    name = f"consumer_{uuid.uuid4().hex}"
    wanted = of_type(kind, REGISTERED_QUEUE_ARGUMENTS)
    Management(node.management_url).declare_queue("/", name, wanted)
    node.kill()
    try:
        wait_until(lambda: once.run_once() and ["node", node.name] in [one[:2] for one in Watch.objects.get().alarms])
        began = time.monotonic()
        with deadline.limit(core.broker.ACTION_SECONDS, renewed=True):
            if kind == "classic":
                with pytest.raises(NodeDown, match=f"queue '{name}' .*node|node of the queue '{name}'"):
                    declare_or_replace("/", name, REGISTERED_QUEUE_ARGUMENTS, core.broker.management())
            else:
                assert not declare_or_replace("/", name, REGISTERED_QUEUE_ARGUMENTS, core.broker.management())
        assert time.monotonic() - began < 5
        [result] = core.broker.publisher().publish([("/", name)], Message("1", b"{}")).values()
        assert result in ([Result.UNREACHABLE] if kind == "classic" else [Result.DELIVERED, Result.UNREACHABLE])
    finally:
        node.start()
        cluster.wait()


def test_a_session_uses_a_node_on_which_the_vhost_runs(empty_cluster):
    first, second, _ = empty_cluster.nodes
    management = Management(second.management_url)
    management.create_vhost("half")
    try:
        client = Amqp(second.amqp_url, "half")
        client.queue("q", 1)
        client.connection.close()
        first.eval('rabbit_vhost_sup_sup:stop_and_delete_vhost(<<"half">>)')
        with Session(empty_cluster.amqp_url, "half") as session:
            assert session.declare_passively("q").ready == 1
        addresses_of.cache_clear()
        publisher = Publisher(empty_cluster.amqp_url)
        assert publisher.publish([("half", "q")], Message("1", b"{}")) == {("half", "q"): Result.DELIVERED}
        publisher.close()
    finally:
        management.delete_vhost("half")


def test_a_queue_whose_node_was_down_is_removed(empty_cluster):
    first, lost, _ = empty_cluster.nodes
    name = f"consumer_{uuid.uuid4().hex}"
    Management(lost.management_url).declare_queue("/", name, {"x-queue-type": "classic"})
    lost.kill()
    with Session(first.amqp_url, "/") as session:
        wait_until(lambda: is_down(session, name))
    removals.write([Removal(kind=Removal.Kind.QUEUE, vhost="/", name=name, if_unused=True)])
    lost.start()
    empty_cluster.wait()
    Removal.objects.update(due_at=timezone.now())
    removals.run_due()
    assert not Removal.objects.exists()
    with Session(first.amqp_url, "/") as session, pytest.raises(NotOnBroker, match="no queue"):
        session.declare_passively(name)


def is_down(session, name):
    try:
        session.declare_passively(name)
    except BrokerError as error:  # RabbitMQ 4.3 gives no answer
        return isinstance(error, BrokerUnavailable) or NODE_DOWN in str(error)
    return False


def declare(node, name, kind, messages):
    """Declare a queue whose leader is on this node, with persistent messages."""
    arguments = next(arguments for one, _, arguments in KINDS if one == kind)
    client = Amqp(node.amqp_url, "/")
    client.queue(name, arguments=arguments)
    client.connection.close()
    publish(node, name, messages)
    return name


def publish(node, name, messages):
    client = Amqp(node.amqp_url, "/")
    for number in range(messages):
        client.channel.basic_publish("", name, str(number).encode(), PERSISTENT)
    client.connection.close()


def run_passes_until(condition, seconds=240):
    """Run a pass each second until this is true."""

    def is_true_after_a_pass():
        time.sleep(1)
        once.run_once()
        return condition()

    wait_until(is_true_after_a_pass, seconds)


def archived():
    """Return the number of messages in the archive of each deleted queue."""
    return dict(Archive.objects.filter(state="kept", dropped=0).values_list("queue_name", "messages"))


def deletions():
    """Return how often the deletion of each queue was recorded."""
    return dict(Counter(QueueEvent.objects.filter(kind="deleted").values_list("queue_name", flat=True)))


def test_a_queue_over_its_limit_is_deleted_once_its_leader_answers(empty_cluster):
    first, _, lost = empty_cluster.nodes
    unreachable = [declare(lost, f"queue/alice/{kind}-lost", kind, 2) for kind in ("classic", "single")]
    reachable = [
        declare(first, "queue/alice/classic", "classic", 2),
        declare(first, "queue/alice/quorum", "quorum", 2),
        declare(lost, "queue/alice/quorum-moved", "quorum", 2),
    ]
    run_passes_until(lambda: Queue.objects.filter(ready=2).count() == 5)
    for name in unreachable:
        publish(lost, name, 10)
    lost.kill()
    with Session(first.amqp_url, "/") as session:
        wait_until(lambda: session.declare_passively("queue/alice/quorum-moved") == (2, 0))
    for name in reachable:
        publish(first, name, 10)
    run_passes_until(lambda: len(deletions()) == 3)
    assert archived() == dict.fromkeys(reachable, 12)
    for _ in range(5):
        once.run_once()
    assert archived() == dict.fromkeys(reachable, 12)
    lost.start()
    empty_cluster.wait()
    run_passes_until(lambda: len(deletions()) == 5)
    assert archived() == dict.fromkeys([*reachable, *unreachable], 12)
    assert set(deletions().values()) == {1}
    assert mistakes() == {"condemned": 5, "deleted": 5}
    assert notices().keys() == {"deletion", "node-lost", "node-back"}


@pytest.mark.parametrize(
    ("once", "step"),
    [(once_after, "the recheck"), (once_after, "the first batch"), (once_before, "the deletion")],
    ids=["after the recheck", "after the first batch", "before the deletion"],
)
@pytest.mark.parametrize("connection", ["leader's node", "another node"])
def test_a_queue_whose_leader_dies_during_its_deletion_is_archived_and_deleted_once(
    empty_cluster, settings, monkeypatch, once, step, connection
):
    first, leader, last = empty_cluster.nodes
    messages = 5000
    name = declare(leader, "queue/alice/long", "quorum", 0)
    client = Amqp(leader.amqp_url, "/")
    channel = client.connection.channel()  # without confirms, which would take 2 ms each
    for _ in range(messages):
        channel.basic_publish("", name, b"x" * 500, PERSISTENT)
    wait_until(lambda: client.channel.queue_declare(name, passive=True).method.message_count == messages)
    client.connection.close()
    connected = leader if connection == "leader's node" else first
    settings.RABBIT_URL = ",".join(node.amqp_url for node in (connected, last))
    once(monkeypatch, step, leader.kill)
    run_passes_until(deletions)
    assert not leader.running
    assert deletions() == {name: 1}
    [details] = QueueEvent.objects.filter(kind="deleted").values_list("details", flat=True)
    if connection == "leader's node":  # messages may have been returned as a delivery: they are not fetched again
        assert details["archived"] == 0
        assert details["dropped"] + details["held"] == messages
        assert archived() == ({name: messages} if step == "the deletion" else {})
    else:
        assert archived() == {name: details["archived"]}
        # RabbitMQ 3.10 returns no messages of a cancelled consumer whose node is down.
        assert (details["archived"] + details["held"], details["dropped"]) == (messages, 0)
        assert details["held"] <= FIRST_MESSAGES
    assert notices()["deletion"] == 2  # the owner's and the operators'
    with Session(first.amqp_url, "/") as session, pytest.raises(NotOnBroker):
        session.declare_passively(name)
