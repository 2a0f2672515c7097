"""Several addresses of one cluster: tried in turn, and never two clusters in one setting."""

import re
import socket
from contextlib import ExitStack

import pytest

from queues.guard import monitor, once
from queues.models import Queue, Watch
from rabbit import deadline, snapshot
from rabbit.addresses import Addresses, addresses_of, split_addresses
from rabbit.amqp import Session
from rabbit.errors import BrokerUnavailable, NotOnBroker, Refused
from rabbit.management import Management
from rabbit.publishing import Message, Publisher, Result
from tests.rabbit.test_http import Server
from tests.support.proxy import Proxy
from tests.support.toolbox import AWAY, AWAY_AMQP, raising, sent

CLUSTER_ID = b'{"value":"another"}'
ANOTHER_CLUSTER = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(CLUSTER_ID), CLUSTER_ID)


@pytest.fixture(autouse=True)
def no_memory_of_earlier_tests():
    """Begin with the first address, because all clients of a process share which one worked last."""
    addresses_of.cache_clear()


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("", []),
        ("http://a:15672", ["http://a:15672"]),
        ("http://a:15672/,https://b/rabbit", ["http://a:15672", "https://b/rabbit"]),
        ("amqp://a , amqp://b", ["amqp://a", "amqp://b"]),
        ("amqp://ann:a,b@a", ["amqp://ann:a,b@a"]),
        ("amqp://a,b", ["amqp://a,b"]),
    ],
)
def test_a_comma_separates_addresses_only_before_a_scheme(setting, expected):
    assert split_addresses(setting) == expected


def test_a_failed_address_is_the_last_to_be_tried_again():
    addresses = Addresses(["a", "b", "c"])
    for _ in range(2):  # two threads find that it failed
        addresses.move_past("a")
        assert addresses.in_turn() == ["b", "c", "a"]


@pytest.mark.parametrize(
    "clusters",
    [
        [("a", "shop"), ("b", "shop")],
        [("a", "rabbit@a"), ("b", "rabbit@b")],
        [("a", "shop"), ("b", "shop"), ("a", "bank"), ("b", "bank")],
        [("a", "rabbit@a"), ("a", "shop"), ("b", "shop")],
    ],
    ids=["with a name", "without a name", "renamed", "named before an address is used"],
)
def test_addresses_of_one_cluster_do_not_conflict(clusters):
    addresses = Addresses(["amqp://a", "amqp://b"])
    assert {addresses.conflict(f"amqp://{host}", cluster) for host, cluster in clusters} == {""}


def test_an_address_of_another_cluster_conflicts():
    addresses = Addresses(["http://ann:word@a", "http://ann:word@b"])
    addresses.conflict("http://ann:word@a", "shop")
    assert addresses.conflict("http://ann:word@b", "bank") == "http://b leads to another cluster than http://a"


def test_a_login_that_every_address_refuses_is_refused(broker):
    wrong = re.sub(":[^:@]*@", ":wrong@", broker.management_url)
    with pytest.raises(Refused, match="401"):
        Management(f"{wrong},{wrong}/").whoami()


def test_if_no_address_can_be_reached_the_error_names_each():
    with pytest.raises(BrokerUnavailable, match=r"127\.0\.0\.1:1 .*127\.0\.0\.1:2 ") as raised:
        Management(f"{AWAY},http://guest:guest@127.0.0.1:2").whoami()
    assert raised.value.never_reached


def test_a_request_that_times_out_is_not_repeated_but_the_next_one_goes_elsewhere(broker):
    with Proxy.before(broker.management_url) as proxy:
        proxy.delay(30)
        management = Management(f"{proxy.url(broker.management_url)},{broker.management_url}", read_timeout=0.2)
        with pytest.raises(BrokerUnavailable) as raised:
            management.whoami()
        assert raised.value.timed_out
        assert management.whoami().name


def test_an_address_that_drops_packets_takes_the_time_of_one_request_only(broker):
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, ExitStack() as clients:
        for _ in range(3):  # more than it queues
            client = clients.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(listener.getsockname())
        setting = f"http://guest:guest@127.0.0.1:{listener.getsockname()[1]},{broker.management_url}"
        with deadline.limit(0.5), pytest.raises(BrokerUnavailable, match="can't connect"):
            Management(setting).whoami()
        assert addresses_of(setting).in_turn()[0] == broker.management_url


def test_a_404_of_an_address_that_shuts_down_does_not_count(broker):
    body = b'{"error":"Object Not Found","reason":"Not Found"}'
    with Proxy.before(broker.management_url) as proxy:
        setting = f"{proxy.url(broker.management_url)},{broker.management_url}"
        management = Management(setting)
        management.whoami()
        proxy.answer(b"HTTP/1.1 404 Not Found\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        with pytest.raises(BrokerUnavailable, match="shutting down"):
            management.user("nobody")
        with pytest.raises(NotOnBroker):  # at the next address
            management.user("nobody")


def test_an_address_of_another_cluster_is_not_used(broker):
    with Server(ANOTHER_CLUSTER) as another:
        setting = f"{broker.management_url},http://guest:guest@127.0.0.1:{another.port}"
        management = Management(setting)
        assert management.whoami().name
        addresses_of(setting).move_past(broker.management_url)  # as after a failure there
        assert management.whoami().name
    assert [b"/api/global-parameters" in request for request in another.requests] == [True]


@pytest.fixture
def narrow(broker, create_pulse_user):
    """Return an address for AMQP whose RabbitMQ user may log in, but use no vhost."""
    return re.sub("//.*@", f"//{create_pulse_user('narrow')}:secret@", broker.amqp_url)


def test_an_address_is_used_whose_rabbitmq_user_may_use_the_vhost(broker, vhost, amqp, narrow):
    amqp.queue("a", 2)
    some, none = f"{narrow},{broker.amqp_url}", f"{narrow},{narrow}/"
    with Session(some, vhost) as session:
        assert session.declare_passively("a").ready == 2
    with Session(none, vhost) as session, pytest.raises(Refused):
        session.declare_passively("a")
    for setting, result in ((some, Result.DELIVERED), (none, Result.GONE)):
        publisher = Publisher(setting)
        assert publisher.publish([(vhost, "a")], Message("1", b"{}")) == {(vhost, "a"): result}
        publisher.close()


def test_several_addresses_share_the_time_to_connect_but_not_the_time_of_an_answer(broker, vhost, amqp):
    amqp.queue("a", 2)
    with Proxy.before(broker.amqp_url) as proxy:
        setting = ",".join([AWAY_AMQP, proxy.url(broker.amqp_url), "amqp://guest:guest@127.0.0.1:2"])
        with Session(setting, vhost, 1.5) as session:
            session.declare_passively("a")
            proxy.delay(0.8)
            assert session.declare_passively("a").ready == 2


def test_a_pass_begins_again_at_the_next_address(guarded, amqp, broker, settings, caplog):
    amqp.queue("long", 7)
    with Proxy.before(broker.management_url) as proxy:
        settings.RABBITMQ_MANAGEMENT_URL = f"{proxy.url(broker.management_url)},{broker.management_url}"
        once.run_once()
        proxy.refuse()
        proxy.close_open()
        report = once.run_once()
    assert (report.away, report.errors, report.queues) == (False, [], 1)
    assert "begins again at the next address" in caplog.text
    assert sent("ops@example.org") == ["warning"]


def test_a_pass_uses_no_address_whose_rabbitmq_user_sees_only_some_queues(
    guarded, amqp, broker, settings, create_pulse_user
):
    amqp.queue("short", 1)
    half = re.sub("//.*@", f"//{create_pulse_user('half', ['management'])}:secret@", broker.management_url)
    settings.RABBITMQ_MANAGEMENT_URL = f"{half},{broker.management_url}"
    settings.GUARDIAN_VHOSTS = ["*"]
    report = once.run_once()
    assert (report.away, report.errors) == (False, [])
    assert Queue.objects.filter(vhost=guarded).count() == 1


def test_a_queue_is_deleted_if_one_address_refuses_the_login(guarded, amqp, broker, settings):
    amqp.queue("long", 11)
    for name, url in (("RABBITMQ_MANAGEMENT_URL", broker.management_url), ("RABBIT_URL", broker.amqp_url)):
        setattr(settings, name, f"{re.sub(':[^:@]*@', ':wrong@', url)},{url}")
    report = once.run_once()
    assert (report.deleted, report.errors) == (1, [])


def test_a_frozen_address_costs_a_pass_seconds_only(guarded, amqp, broker, settings, monkeypatch):
    amqp.queue("short", 1)
    monkeypatch.setattr(monitor, "PROBE_SECONDS", 0.3)
    with Proxy.before(broker.management_url) as proxy:
        proxy.delay(60)
        settings.RABBITMQ_MANAGEMENT_URL = f"{proxy.url(broker.management_url)},{broker.management_url}"
        report = once.run_once()
    assert (report.away, report.queues) == (False, 1)
    assert report.seconds < 5


def test_after_a_list_that_hangs_the_next_pass_begins_at_another_address(guarded, amqp, broker, settings):
    amqp.queue("short", 1)
    with Proxy.before(broker.management_url) as proxy:
        setting = settings.RABBITMQ_MANAGEMENT_URL = f"{proxy.url(broker.management_url)},{broker.management_url}"
        with raising(snapshot, "take", BrokerUnavailable("no answer", timed_out=True)):
            assert once.run_once().away
        assert addresses_of(setting).in_turn()[0] == broker.management_url
    assert not once.run_once().away


def test_addresses_of_two_clusters_are_refused_before_anything_is_stored(guarded, amqp, broker, settings):
    amqp.queue("short", 1)
    Watch.objects.all().delete()
    with Server(ANOTHER_CLUSTER) as another:
        settings.RABBITMQ_MANAGEMENT_URL = f"{broker.management_url},http://guest:guest@127.0.0.1:{another.port}"
        report = once.run_once()
    assert report.away
    assert "leads to another cluster than" in report.errors[0]
    assert not Queue.objects.exists()


def test_a_list_of_another_cluster_is_refused_while_an_address_does_not_answer(guarded, amqp, broker, settings):
    amqp.queue("short", 1)
    once.run_once()
    Watch.objects.update(cluster="rabbitmq-cluster-id-of-another")
    settings.RABBITMQ_MANAGEMENT_URL = f"{AWAY},{broker.management_url}"
    report = once.run_once()
    assert report.away
    assert "another cluster than the last one, and an address does not answer" in report.errors[0]
