import time

import pytest

import rabbit.amqp
from rabbit.amqp import MAX_NAME_BYTES, DeclareOk, Session, Sessions
from rabbit.errors import BrokerUnavailable, NotOnBroker, Refused
from tests.support.proxy import Proxy
from tests.support.toolbox import queue_names, wait_until

ANY_NAME = ["..", "a/../../b", "%2F", "a\0b", "zoé \N{SNOWMAN}", "\N{PILE OF POO}", "'\"<b>&", "x" * MAX_NAME_BYTES]


@pytest.fixture
def session(broker, vhost):
    with Session(broker.amqp_url, vhost) as opened:
        yield opened


@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_a_queue_is_counted_purged_and_deleted(session, amqp, kind):
    amqp.queue("q", 3, arguments={"x-queue-type": kind})
    assert session.declare_passively("q") == DeclareOk(3, 0)
    assert session.purge_queue("q") == 3
    amqp.publish("q", 2)
    assert session.delete_queue("q") == 2
    with pytest.raises(NotOnBroker):
        session.declare_passively("q")


def test_a_stream_is_deleted_and_not_purged(session, amqp):
    amqp.queue("s", 1, arguments={"x-queue-type": "stream"})
    with pytest.raises(Refused, match="not supported"):
        session.purge_queue("s")
    session.delete_queue("s")
    with pytest.raises(NotOnBroker):
        session.declare_passively("s")


@pytest.mark.parametrize("name", ANY_NAME)
def test_a_queue_of_any_name_is_deleted_alone(session, amqp, management, vhost, name):
    amqp.queue("b")
    amqp.queue(name, 1)
    assert session.purge_queue(name) == 1
    session.delete_queue(name)
    assert queue_names(management, vhost) == {"b"}


def test_the_conditions_protect_a_queue_from_deletion(session, amqp, management, vhost):
    amqp.queue("q", 1, arguments={"x-queue-type": "classic"})
    with pytest.raises(Refused, match="not empty"):
        session.delete_queue("q", if_empty=True)
    session.purge_queue("q")
    amqp.channel.basic_consume("q", lambda *_: None)
    with pytest.raises(Refused, match=r"in use$"):
        session.delete_queue("q", if_unused=True)
    amqp.connection.close()
    wait_until(lambda: session.declare_passively("q") == DeclareOk(0, 0))
    session.delete_queue("q", if_empty=True, if_unused=True)
    assert queue_names(management, vhost) == set()


def test_a_quorum_queue_is_not_deleted_on_conditions(session, amqp, vhost):
    amqp.queue("q", arguments={"x-queue-type": "quorum"})
    with pytest.raises(Refused, match="not supported"):
        session.delete_queue("q", if_unused=True)
    assert session.declare_passively("q") == DeclareOk(0, 0)  # on a new connection: the broker closed the other


def test_an_exclusive_queue_is_not_deleted(session, amqp):
    amqp.channel.queue_declare("mine", exclusive=True)
    for request in (session.declare_passively, session.purge_queue, session.delete_queue):
        with pytest.raises(Refused, match="exclusive"):
            request("mine")


def test_a_missing_queue_counts_as_deleted(session):
    assert session.delete_queue("none") == 0
    for request in (session.declare_passively, session.purge_queue):
        with pytest.raises(NotOnBroker):
            request("none")


def test_an_exchange_is_deleted_once(session, amqp, management, vhost):
    amqp.channel.exchange_declare("exchange/a/é", "topic")
    session.delete_exchange("exchange/a/é")
    assert "exchange/a/é" not in {exchange.name for exchange in management.exchanges(vhost)}
    for name in ("exchange/a/é", "x" * (MAX_NAME_BYTES + 1)):
        with pytest.raises(NotOnBroker):
            session.delete_exchange(name)
    with pytest.raises(Refused):
        session.delete_exchange("amq.topic")


def test_errors_do_not_use_up_the_channels_of_a_connection(session, amqp):
    amqp.queue("q", 1)
    for _ in range(2100):  # a connection has 2,047 channels
        with pytest.raises(NotOnBroker):
            session.declare_passively("none")
    assert session.declare_passively("q") == DeclareOk(1, 0)


def test_a_missing_vhost_is_not_on_the_broker(broker):
    with Session(broker.amqp_url, "no such vhost") as session, pytest.raises(NotOnBroker):
        session.delete_queue("q")


def test_a_broker_that_is_away_was_never_reached(vhost):
    with Session("amqp://127.0.0.1:1", vhost) as session, pytest.raises(BrokerUnavailable) as outage:
        session.delete_queue("q")
    assert outage.value.never_reached


def test_a_deletion_may_take_longer_than_other_requests(broker, amqp, vhost):
    amqp.queue("q", 1)
    with Proxy.before(broker.amqp_url) as proxy, Session(proxy.url(broker.amqp_url), vhost, 0.5) as session:
        with pytest.raises(Refused):
            session.delete_queue("q", if_empty=True)
        proxy.delay(0.8)
        assert session.delete_queue("q") == 1
        with pytest.raises(BrokerUnavailable):
            session.declare_passively("q")


def test_a_lost_answer_leaves_the_outcome_unknown(broker, amqp, vhost, monkeypatch):
    monkeypatch.setattr(rabbit.amqp, "DELETION_TIMEOUT_SECONDS", 0.5)
    amqp.queue("q", 1)
    with Proxy.before(broker.amqp_url) as proxy, Session(proxy.url(broker.amqp_url), vhost, 0.5) as session:
        session.declare_passively("q")
        proxy.delay(2)
        began = time.monotonic()
        with pytest.raises(BrokerUnavailable) as outage:
            session.delete_queue("q")
        assert outage.value.timed_out
        assert time.monotonic() - began < 1.5
        proxy.forward()
        with pytest.raises(NotOnBroker):  # on a new connection
            session.declare_passively("q")


def test_a_session_is_used_again_in_its_thread(broker, vhost):
    with Sessions(broker.amqp_url) as sessions:
        assert sessions.of(vhost) is sessions.of(vhost)
        assert sessions.of(vhost) is not sessions.of("/")
