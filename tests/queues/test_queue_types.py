import socket
import struct
from contextlib import contextmanager
from urllib.parse import quote

import httpx
import pytest

from queues.guard import once
from queues.models import Archive, Queue
from rabbit import snapshot
from rabbit.arguments import REGISTERED_QUEUE_ARGUMENTS
from rabbit.management import Management
from rabbit.snapshot import MQTT_QOS_0
from tests.conftest import Amqp
from tests.support.toolbox import broker_version, queue_lengths, queue_names, wait_until, wait_until_equal
from tools.processes import free_port
from tools.rabbitmq import PrivateNode

pytestmark = pytest.mark.rabbitmq

PLUGINS = ("management", "mqtt", "stream", "federation", "shovel")


@pytest.fixture(scope="module")
def own_node():
    """Give a node with these plugins; the fixture guarded_node guards its vhost "/"."""
    config = {"mqtt.listeners.tcp.1": f"127.0.0.1:{free_port()}"}
    plugins = [f"rabbitmq_{name}" for name in PLUGINS]
    with PrivateNode(plugins=plugins, config=config, quorum_tick_seconds=1) as node:
        yield node


@pytest.fixture
def management(own_node):
    client = Management(own_node.management_url)
    yield client
    client.close()


@pytest.fixture
def amqp(guarded_node):
    opened = Amqp(guarded_node.amqp_url, "/")
    yield opened
    opened.connection.close()


@pytest.fixture
def version(management):
    return broker_version(management)


@contextmanager
def mqtt_subscription(node, client_id, *, qos, clean_session):
    """Subscribe to the topic "news" over MQTT 3.1.1 until the end of the block."""

    def text(value):
        return struct.pack(">H", len(value)) + value.encode()

    def send(packet_type, body):
        connection.sendall(bytes([packet_type, len(body)]) + body)
        assert connection.recv(100)

    port = int(node.config["mqtt.listeners.tcp.1"].rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        flags = bytes([4, 0xC2 if clean_session else 0xC0])  # protocol level; user, password and session
        keep_alive = struct.pack(">H", 60)
        login = text("guardian") + text(node.password)
        send(0x10, text("MQTT") + flags + keep_alive + text(client_id) + login)
        send(0x82, struct.pack(">H", 1) + text("news") + bytes([qos]))
        yield


def put(node, path, body):
    """Send a PUT to the management API."""
    answer = httpx.put(f"{node.management_url}/api/{path}", json=body, trust_env=False)
    assert answer.status_code in (201, 204), answer.text


def federate(node, exchange):
    """Federate an exchange of the vhost "/" into another vhost. Return the name of the queue that it needs in "/"."""
    downstream, pattern = "downstream", {"pattern": f"^{exchange}$", "apply-to": "exchanges"}
    put(node, f"vhosts/{downstream}", {})
    for vhost in ("/", downstream):
        put(node, f"exchanges/{quote(vhost, safe='')}/{quote(exchange, safe='')}", {"type": "topic", "durable": True})
    put(node, f"parameters/federation-upstream/{downstream}/up", {"value": {"uri": f"{node.amqp_url}/%2F"}})
    put(node, f"policies/{downstream}/up", {**pattern, "definition": {"federation-upstream-set": "all"}})
    return f"federation: {exchange} -> "


def test_all_types_are_listed(guarded_node, management, amqp, version):
    amqp.queue("classic", 1)
    amqp.queue("quorum", 1, arguments={"x-queue-type": "quorum"})
    amqp.queue("stream", 1, arguments={"x-queue-type": "stream"})
    wait_until(lambda: queue_lengths(management, "/")["quorum"])
    with (
        mqtt_subscription(guarded_node, "clean", qos=0, clean_session=True),
        mqtt_subscription(guarded_node, "kept", qos=1, clean_session=False),
    ):
        report = once.run_once()
        names = snapshot.list_names(management, ["/"])[0]
    assert (report.away, report.errors) == (False, [])
    clean = (MQTT_QOS_0, True, True, None) if version >= (3, 12) else ("classic", False, False, 0)
    expected = {
        "classic": ("classic", True, False, 1),
        "quorum": ("quorum", True, False, 1),
        "stream": ("stream", True, False, None),
        "mqtt-subscription-keptqos1": ("classic", True, False, 0),
        "mqtt-subscription-cleanqos0": clean,
    }
    stored = {queue.name: (queue.type, queue.durable, queue.exclusive, queue.length) for queue in Queue.objects.all()}
    assert stored == expected
    assert {one.name: (one.type, one.exclusive) for one in names} == {
        name: (type_, exclusive) for name, (type_, _, exclusive, _) in expected.items()
    }


def test_where_quorum_is_the_default_type_plain_queues_are_guarded_and_those_of_agents_are_classic(
    guarded_node, management, settings, version
):
    put(guarded_node, "vhosts/quorum", {"default_queue_type": "quorum"})
    settings.GUARDIAN_VHOSTS = ["quorum"]
    try:
        management.declare_queue("quorum", "for agents", REGISTERED_QUEUE_ARGUMENTS)
        assert not management.declare_queue("quorum", "for agents", REGISTERED_QUEUE_ARGUMENTS)
        management.declare_queue("quorum", "plain")
        amqp = Amqp(guarded_node.amqp_url, "quorum")
        for name in ("plain", "for agents"):
            amqp.publish(name, 11)
        wait_until_equal(lambda: queue_lengths(management, "quorum"), {"plain": 11, "for agents": 11})
        assert once.run_once().deleted == 2
        amqp.connection.close()
    finally:
        management.delete_vhost("quorum")
    plain_type = "quorum" if version >= (4, 0) else "classic"
    assert dict(Queue.objects.values_list("name", "type")) == {"plain": plain_type, "for agents": "classic"}


def test_queues_of_federation_and_shovels_are_not_deleted_for_their_name(guarded_node, management, amqp, settings):
    settings.GUARDIAN_NAMESPACE_POLICY = "delete-unpatterned"
    prefix = federate(guarded_node, "exchange/alice/builds")
    uri = {"src-uri": guarded_node.amqp_url, "dest-uri": guarded_node.amqp_url}
    shovel = {**uri, "src-exchange": "amq.topic", "src-exchange-key": "#", "dest-queue": "queue/alice/moved"}
    put(guarded_node, "parameters/shovel/%2F/mover", {"value": shovel})
    amqp.queue("stray")
    amqp.queue("evasive", arguments={"x-internal-purpose": "federation"})  # any client may set it
    try:
        wait_until(lambda: len(queue_names(management, "/")) == 5)  # with the shovel's own queue, amq.gen-…
        kept = queue_names(management, "/") - {"stray", "evasive"}
        report = once.run_once()
        assert (report.deleted, report.unpatterned, report.errors) == (2, 2, [])
        assert queue_names(management, "/") == kept
    finally:
        management.delete_vhost("downstream")
    assert [name for name in kept if name.startswith(prefix)]


def test_a_federated_queue_is_archived_and_leaves_the_messages_at_its_upstream(guarded_node, management, amqp):
    put(guarded_node, "vhosts/upstream", {})
    put(guarded_node, "parameters/federation-upstream/%2F/up", {"value": {"uri": f"{guarded_node.amqp_url}/upstream"}})
    federated = {"pattern": "^jobs$", "apply-to": "queues", "definition": {"federation-upstream-set": "all"}}
    put(guarded_node, "policies/%2F/federated", federated)
    upstream = Amqp(guarded_node.amqp_url, "upstream")
    upstream.queue("jobs", 5)
    try:
        amqp.queue("jobs", 11)
        wait_until(lambda: "{status, running}" in guarded_node.eval("rabbit_federation_status:status()"))
        assert once.run_once().deleted == 1
        assert Archive.objects.get().messages == 11
        assert upstream.ready("jobs") == 5
    finally:
        management.delete_vhost("upstream")


def test_a_queue_of_a_stopped_vhost_keeps_its_type(guarded_node, management, settings):
    settings.GUARDIAN_VHOSTS = ["stopped"]
    management.create_vhost("stopped")
    try:
        management.declare_queue("stopped", "a")
        guarded_node.eval('rabbit_vhost_sup_sup:stop_and_delete_vhost(<<"stopped">>)')
        once.run_once()
        assert [(queue.type, queue.length) for queue in Queue.objects.all()] == [("classic", None)]
    finally:
        management.delete_vhost("stopped")


def test_a_subscription_with_qos_0_is_not_deleted_for_its_name(guarded_node, amqp, settings, version):
    if version < (3, 12):
        pytest.skip("before RabbitMQ 3.12 it is a classic queue, which the policy deletes")
    settings.GUARDIAN_NAMESPACE_POLICY = "delete-unpatterned"
    with mqtt_subscription(guarded_node, "clean", qos=0, clean_session=True):
        report = once.run_once()
    assert (report.queues, report.deleted, report.errors) == (1, 0, [])
