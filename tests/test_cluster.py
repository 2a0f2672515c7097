"""Faults of a cluster of three nodes, under a pass each second: nothing is deleted, reported or lost by mistake."""

import threading
import time
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise

import pika
import pytest

import core.broker
from agents.declaring import declare_or_replace
from notifications.models import Notification
from queues import monitor
from queues.models import Queue, QueueEvent, Watch
from rabbit import deadline
from rabbit.addresses import addresses_of
from rabbit.arguments import REGISTERED_QUEUE_ARGUMENTS, of_type
from rabbit.management import BrokerError, Management, NodeDown
from rabbit.publishing import Message, Result
from tests.conftest import Amqp
from tests.fixtures import guard
from tests.toolbox import wait_until
from tools.rabbitmq import PrivateNode

pytestmark = pytest.mark.soak

NAMES = ("one", "two", "three")
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


class Cluster:
    """Three nodes."""

    def __init__(self):
        with ExitStack() as exits:
            formation = {"cluster_formation.peer_discovery_backend": "classic_config"} | {
                f"cluster_formation.classic_config.nodes.{number}": f"{name}@localhost"
                for number, name in enumerate(NAMES, 1)
            }
            self.nodes = []
            for name in NAMES:
                peer = self.nodes[0] if self.nodes else None
                node = PrivateNode(name=name, plugins=["rabbitmq_management"], peer=peer, config=formation)
                exits.callback(node.stop)
                self.nodes.append(node)
            self.nodes[0]._start_epmd()
            with ThreadPoolExecutor(3) as threads:
                list(threads.map(lambda node: node.start(timeout=180), self.nodes))
            self.wait()
            self.close = exits.pop_all().close

    @property
    def management_url(self):
        return ",".join(node.management_url for node in self.nodes)

    @property
    def amqp_url(self):
        return ",".join(node.amqp_url for node in self.nodes)

    def wait(self):
        """Wait until all three nodes run and know each other."""

        def are_running():
            try:
                return all(
                    [one.running for one in Management(node.management_url).nodes()] == [True] * 3
                    for node in self.nodes
                )
            except BrokerError:
                return False

        wait_until(are_running, seconds=120)


@pytest.fixture(scope="module")
def nodes():
    cluster = Cluster()
    yield cluster
    cluster.close()


@pytest.fixture
def cluster(nodes, transactional_db, settings, account):
    """Guard a cluster with 120 queues: classic ones, quorum queues with three members and with one, and streams.

    Some are over their warning threshold, and some over their deletion limit but unbounded.
    """
    guard(nodes.nodes[0], settings)
    settings.RABBITMQ_MANAGEMENT_URL, settings.RABBIT_URL = nodes.management_url, nodes.amqp_url
    settings.GUARDIAN_POLL_SECONDS = 1
    addresses_of.cache_clear()
    management = Management(nodes.nodes[0].management_url)
    management.delete_vhost("/")
    management.create_vhost("/")
    for number, node in enumerate(nodes.nodes):
        amqp = Amqp(node.amqp_url, "/")
        for name, count, arguments in KINDS:
            for index in range(count):
                queue = f"queue/{account.username}/{name}-{number}-{index}"
                amqp.queue(queue, arguments=arguments)
                for _ in range(LENGTHS[index % len(LENGTHS)]):
                    amqp.channel.basic_publish("", queue, b"", PERSISTENT)
        amqp.connection.close()
    time.sleep(6)  # quorum queues are listed as of their last tick
    settings.GUARDIAN_MAX_QUEUE_LENGTH = 100
    monitor.run_pass()
    Queue.objects.update(unbounded=True)
    settings.GUARDIAN_MAX_QUEUE_LENGTH = 10
    for _ in range(3):
        assert monitor.run_pass().queues == 120
    QueueEvent.objects.all().delete()
    Notification.objects.all().delete()
    return nodes


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
            report = monitor.run_pass()
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

    passes = Passes(fault).run()
    assert mistakes() == {}, passes
    assert notices() == {"node-lost": 1, "node-back": 1}, passes
    assert passes.longest_gap < 5, passes
    assert Queue.objects.exclude(state="gone").count() == 120


def test_all_nodes_restart_in_turn(cluster):
    def fault():
        for node in cluster.nodes:
            time.sleep(2)
            node.halt()
            time.sleep(2)
            node.start()
            cluster.wait()

    passes = Passes(fault).run()
    assert mistakes() == {}, passes
    assert notices() == {"node-lost": 3, "node-back": 3}, passes
    assert passes.longest_gap < 5, passes
    assert Queue.objects.exclude(state="gone").count() == 120


def test_a_node_is_frozen_until_the_others_drop_it(cluster):
    node, *others = cluster.nodes
    dropped = []

    def fault():
        time.sleep(3)
        node.suspend()
        wait_until(lambda: all(node.name not in other.eval("nodes()") for other in others), seconds=150)
        dropped.append(time.monotonic())
        time.sleep(12)
        node.kill()  # RabbitMQ's guide recommends to restart such a node
        node.start()
        cluster.wait()

    passes = Passes(fault).run()
    assert mistakes() == {}, passes
    assert notices() == {"node-lost": 1, "node-back": 1}, passes
    assert Notification.objects.get(kind="node-lost").facts["node"] == node.name
    [since] = dropped
    first_complete = next(end for _, end, report in passes.reports if not report.away and passes.began + end > since)
    # After the drop, RabbitMQ 3.10 tries to connect to the node again, which takes 7 s.
    assert passes.began + first_complete - since < 15, passes
    assert Queue.objects.exclude(state="gone").count() == 120


@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_an_agents_queue_whose_node_is_down_is_unreachable(cluster, kind, settings):
    settings.GUARDIAN_REGISTERED_QUEUE_TYPE = kind
    node = cluster.nodes[1]
    name = f"consumer_{uuid.uuid4().hex}"
    wanted = of_type(kind, REGISTERED_QUEUE_ARGUMENTS)
    Management(node.management_url).declare_queue("/", name, wanted)
    node.kill()
    try:
        wait_until(
            lambda: monitor.run_pass() and ["node", node.name] in [one[:2] for one in Watch.objects.get().alarms]
        )
        began = time.monotonic()
        with deadline.limit(core.broker.ACTION_SECONDS, renewed=True):
            if kind == "classic":
                with pytest.raises(NodeDown, match=f"The node of the queue '{name}' is down"):
                    declare_or_replace("/", name, REGISTERED_QUEUE_ARGUMENTS, core.broker.management())
            else:
                assert not declare_or_replace("/", name, REGISTERED_QUEUE_ARGUMENTS, core.broker.management())
        assert time.monotonic() - began < 5
        [result] = core.broker.publisher().publish([("/", name)], Message("1", b"{}")).values()
        assert result in ([Result.UNREACHABLE] if kind == "classic" else [Result.DELIVERED, Result.UNREACHABLE])
    finally:
        node.start()
        cluster.wait()
