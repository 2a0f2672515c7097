"""Publishing over AMQP: the result of each message, the connection pool, and failures of the broker."""

import contextlib
import gc
import os
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest

import core.broker
from rabbit import publishing
from rabbit.amqp import Session
from rabbit.errors import BrokerUnavailable, Refused
from rabbit.management import Management
from rabbit.permissions import FULL_ACCESS, NO_ACCESS
from rabbit.publishing import Message, NotPublished, OutcomeUnknown, Publisher, Result
from tests.conftest import Amqp
from tests.support.proxy import Proxy
from tests.support.toolbox import in_background, memory_alarm, queue_lengths, wait_until, wait_until_equal


def message(body=b"{}"):
    return Message(uuid.uuid4().hex, body, type="order", headers={"object_type": "order"})


def hung(node, vhosts):
    """Suspend the process of queue "a" in each of these vhosts until the ``with`` block ends."""
    names = ",".join(f'<<"{vhost}">>' for vhost in vhosts)
    each = (
        '[sys:{}(amqqueue:get_pid(element(2, rabbit_amqqueue:lookup(rabbit_misc:r(V, queue, <<"a">>))))) || V <- [{}]].'
    )
    stack = contextlib.ExitStack()
    node.eval(each.format("suspend", names))
    stack.callback(node.eval, each.format("resume", names))
    return stack


@pytest.fixture
def publisher_at(monkeypatch):
    """Return a function that returns a publisher with these limits, which is closed afterwards."""
    made = []

    def make(url, **limits):
        for name, value in limits.items():
            monkeypatch.setattr(publishing, name, value)
        made.append(Publisher(url))
        return made[-1]

    yield make
    for publisher in made:
        publisher.close()


@pytest.fixture
def publisher(broker, publisher_at):
    return publisher_at(broker.amqp_url)


@pytest.fixture
def rabbitmq_user(broker, management, vhosts):
    """Give the name and URL of a new RabbitMQ user, which only the publisher uses."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    management.put_user(name, "sekret-word")
    for vhost in vhosts:
        management.set_permissions(vhost, name, FULL_ACCESS)
    yield name, f"amqp://{name}:sekret-word@{urlsplit(broker.amqp_url).netloc.rpartition('@')[2]}"
    management.delete_user(name)


@pytest.fixture
def breakable(own_node):
    """Give a node that tests may break, with the empty queues a, b and c."""
    management = Management(own_node.management_url)
    with Session(own_node.amqp_url, "/", 10) as session:
        for name in "abc":
            management.declare_queue("/", name)
            session.purge_queue(name)
    yield own_node
    management.close()


@pytest.fixture(scope="module")
def owners(own_node):
    """Give forty vhosts, more than connections are allowed, with a queue "a" in each."""
    management = Management(own_node.management_url)
    names = [f"owner-{number}" for number in range(40)]

    def make(name):
        management.create_vhost(name)
        management.declare_queue(name, "a")

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(make, names))
    management.close()
    return names


def test_every_queue_in_every_vhost_gets_a_persistent_message(publisher, management, vhosts, broker):
    for vhost in vhosts:
        management.declare_queue(vhost, "b/ü?")
    queues = [(vhost, name) for vhost in vhosts for name in ("a", "b/ü?")]
    sent = message('{"ü": 1}'.encode())
    assert publisher.publish([*queues, queues[0]], sent) == dict.fromkeys(queues, Result.DELIVERED)
    for vhost in vhosts:
        assert queue_lengths(management, vhost) == {"a": 1, "b/ü?": 1}
    amqp = Amqp(broker.amqp_url, vhosts[3])
    _, properties, body = amqp.channel.basic_get("b/ü?", auto_ack=True)
    amqp.connection.close()
    assert body == sent.body
    assert (properties.message_id, properties.type, properties.headers) == (sent.message_id, "order", sent.headers)
    assert (properties.delivery_mode, properties.content_type) == (2, "application/json")


def test_publishing_to_no_queue_opens_no_connection(publisher):
    assert publisher.publish([], message()) == {}
    assert publisher.connections == 0


def test_a_full_queue_rejects_and_dead_letters_the_message(publisher, management, vhost):
    management.declare_queue(vhost, "dead")
    management.declare_queue(vhost, "roomy")
    arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
    management.declare_queue(vhost, "full", {"x-max-length": 1, "x-overflow": "reject-publish-dlx", **arguments})
    queues = [(vhost, "full"), (vhost, "roomy")]
    assert set(publisher.publish(queues, message()).values()) == {Result.DELIVERED}
    assert publisher.publish(queues, message()) == {queues[0]: Result.REJECTED, queues[1]: Result.DELIVERED}
    wait_until_equal(lambda: queue_lengths(management, vhost), {"dead": 1, "full": 1, "roomy": 2})
    assert publisher.connections == 1


def test_a_missing_queue_is_gone_and_the_others_get_the_message(publisher, management, vhosts):
    here = vhosts[0]
    management.declare_queue(here, "b")
    publisher.publish([(here, "a"), (here, "b")], message())
    management.delete_queue(here, "a")
    assert publisher.publish([(here, "a"), (here, "b")], message()) == {
        (here, "a"): Result.GONE, (here, "b"): Result.DELIVERED,
    }  # fmt: skip
    management.declare_queue(here, "a")
    assert publisher.publish([(here, "a")], message()) == {(here, "a"): Result.DELIVERED}


def test_a_missing_or_forbidden_vhost_is_gone_and_the_others_get_the_message(
    rabbitmq_user, management, vhosts, caplog, publisher_at
):
    name, url = rabbitmq_user
    publisher = publisher_at(url)
    gone = f"test-{uuid.uuid4().hex[:12]}"
    management.delete_permissions(vhosts[0], name)
    management.set_permissions(vhosts[1], name, NO_ACCESS)
    results = publisher.publish([(vhost, "a") for vhost in [gone, *vhosts]], message())
    assert {vhost for (vhost, _), result in results.items() if result is Result.GONE} == {gone, *vhosts[:2]}
    assert list(results.values()).count(Result.DELIVERED) == 4
    assert publisher.connections == 4
    for vhost in (gone, *vhosts[:2]):
        assert f"Guardian can't publish in the vhost {vhost}" in caplog.text
    assert "sekret-word" not in caplog.text


def test_the_queues_of_a_full_vhost_are_unreachable_and_the_others_get_the_message(publisher, management, vhosts):
    management._put("vhost-limits", vhosts[0], "max-connections", json={"value": 0})
    results = publisher.publish([(vhost, "a") for vhost in vhosts[:2]], message())
    assert results == {(vhosts[0], "a"): Result.UNREACHABLE, (vhosts[1], "a"): Result.DELIVERED}


def test_large_returned_messages_do_not_block_the_others(publisher, management, vhost):
    management.declare_queue(vhost, "there")
    queues = [(vhost, f"gone-{number}") for number in range(20)] + [(vhost, "there")]
    results = publisher.publish(queues, message(b'"' + b"x" * 1_000_000 + b'"'))
    assert list(results.values()) == [Result.GONE] * 20 + [Result.DELIVERED]


def test_the_least_recently_used_connection_is_closed(rabbitmq_user, management, vhosts, publisher_at):
    name, url = rabbitmq_user
    publisher = publisher_at(url, MAX_CONNECTIONS=2)
    a, b, c = vhosts[:3]
    for vhost in (a, b, a, c):
        assert publisher.publish([(vhost, "a")], message()) == {(vhost, "a"): Result.DELIVERED}
        assert publisher.connections == len(management.connections_of(name)) <= 2
    assert sorted(connection.vhost for connection in management.connections_of(name)) == sorted([a, c])


def test_idle_connections_are_closed_without_further_publishing(rabbitmq_user, management, vhosts, publisher_at):
    name, url = rabbitmq_user
    publisher = publisher_at(url, IDLE_SECONDS=0.3)
    publisher.publish([(vhost, "a") for vhost in vhosts], message())
    assert publisher.connections == 6
    wait_until_equal(lambda: publisher.connections, 0)
    wait_until(lambda: not management.connections_of(name))
    publisher.publish([(vhosts[0], "a")], message())
    assert publisher.connections == 1


@pytest.mark.parametrize("max_connections", [1, 3])
def test_eight_threads_publish_once_within_the_connection_limit(
    rabbitmq_user, management, vhosts, max_connections, publisher_at
):
    name, url = rabbitmq_user
    publisher = publisher_at(url, MAX_CONNECTIONS=max_connections)
    open_ = []

    def publish(number):
        results = publisher.publish([(vhosts[number % 2], "a"), (vhosts[2], "a")], message())
        open_.append(publisher.connections)
        return set(results.values())

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(publish, range(80))) == [{Result.DELIVERED}] * 80
    assert max(open_) <= max_connections
    assert len(management.connections_of(name)) <= max_connections
    assert [queue_lengths(management, vhost)["a"] for vhost in vhosts[:3]] == [40, 40, 80]


def test_waiting_for_a_busy_connection_times_out(broker, vhosts, publisher_at):
    publisher = publisher_at(broker.amqp_url, MAX_CONNECTIONS=1, CALL_SECONDS=0.5)
    busy = publisher._acquire(vhosts[0], time.monotonic() + 5)
    began = time.monotonic()
    with pytest.raises(BrokerUnavailable, match="are busy") as raised:
        publisher.publish([(vhosts[1], "a")], message())
    assert raised.value.never_reached
    assert time.monotonic() - began < 2
    waiting = in_background(publisher.publish, [(vhosts[1], "a")], message())
    wait_until(lambda: publisher._waiting)
    publisher._release(busy, True)
    assert waiting.result() == {(vhosts[1], "a"): Result.DELIVERED}


def test_a_call_to_one_vhost_is_not_delayed_by_a_call_to_many(broker, vhosts, publisher_at):
    with Proxy.before(broker.amqp_url) as proxy, ThreadPoolExecutor(1) as thread:
        publisher = publisher_at(proxy.url(broker.amqp_url), MAX_CONNECTIONS=1)
        proxy.delay(0.03)
        many = thread.submit(publisher.publish, [(vhost, "a") for vhost in vhosts[1:]], message())
        wait_until_equal(lambda: publisher.connections, 1)
        results = publisher.publish([(vhosts[0], "a")], message())
        assert results == {(vhosts[0], "a"): Result.DELIVERED}
        assert not many.done()
        assert set(many.result().values()) == {Result.DELIVERED}


def test_repeated_calls_that_time_out_reach_every_vhost(broker, management, vhosts, publisher_at):
    queues, sent = [(vhost, "a") for vhost in vhosts[:4]], message()
    with Proxy.before(broker.amqp_url) as proxy:
        publisher = publisher_at(proxy.url(broker.amqp_url), MAX_CONNECTIONS=1, CALL_SECONDS=0.6)
        proxy.delay(0.04)
        reached = set()
        for _ in range(60):
            with pytest.raises((OutcomeUnknown, BrokerUnavailable)) as raised:
                publisher.publish(queues, sent)
            reached |= set(getattr(raised.value, "results", {}))
            assert publisher.connections <= 1
            if reached == set(queues):
                break
        assert reached == set(queues)
        publisher.close()
    assert all(queue_lengths(management, vhost)["a"] for vhost, _ in queues)


def test_a_timeout_before_sending_means_not_published(broker, publisher_at):
    gone = [(f"test-{uuid.uuid4().hex[:12]}", "a") for _ in range(40)]
    with Proxy.before(broker.amqp_url) as proxy:
        publisher = publisher_at(proxy.url(broker.amqp_url), MAX_CONNECTIONS=1, CALL_SECONDS=0.6)
        proxy.delay(0.04)
        with pytest.raises(NotPublished) as raised:
            publisher.publish(gone, message())
        assert raised.value.never_reached
        assert publisher.connections == 0


def test_a_forked_process_has_its_own_connections(broker, management, vhost, settings):
    settings.RABBIT_URL = broker.amqp_url
    management.declare_queue(vhost, "a")
    core.broker._publisher.cache_clear()  # it may hold connections of other tests
    ours = core.broker.publisher()
    ours.publish([(vhost, "a")], message())
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            theirs = core.broker.publisher()
            results = theirs.publish([(vhost, "a")], message())
            code = 0 if theirs is not ours and results == {(vhost, "a"): Result.DELIVERED} else 2
            theirs.close()
        os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert core.broker.publisher() is ours
    assert ours.publish([(vhost, "a")], message()) == {(vhost, "a"): Result.DELIVERED}
    assert ours.connections == 1
    assert queue_lengths(management, vhost) == {"a": 3}
    ours.close()


def test_a_connection_is_reused_and_replaced_once_it_is_closed(rabbitmq_user, management, vhosts, publisher_at):
    name, url = rabbitmq_user
    publisher = publisher_at(url)
    for number in range(5):
        if number == 3:
            management.close_connections_of(name, "for the test")
        assert publisher.publish([(vhosts[0], "a")], message()) == {(vhosts[0], "a"): Result.DELIVERED}
        assert publisher.connections == len(management.connections_of(name)) == 1
    assert queue_lengths(management, vhosts[0]) == {"a": 5}
    publisher.close()
    assert publisher.connections == 0
    wait_until(lambda: not management.connections_of(name))


def test_a_connection_cut_before_the_confirmation_leaves_the_outcome_unknown(broker, management, vhost, publisher_at):
    management.declare_queue(vhost, "a")
    with Proxy.before(broker.amqp_url) as proxy:
        publisher = publisher_at(proxy.url(broker.amqp_url))
        publisher.publish([(vhost, "a")], message())
        proxy.cut_after(1)
        sent = message()
        with pytest.raises(OutcomeUnknown, match="connection to the broker was lost") as raised:
            publisher.publish([(vhost, "a")], sent)
        assert sent.message_id in str(raised.value)
        assert (raised.value.message_id, raised.value.results) == (sent.message_id, {})
        assert not raised.value.never_reached
        assert publisher.connections == 0
        proxy.forward()
        assert publisher.publish([(vhost, "a")], message()) == {(vhost, "a"): Result.DELIVERED}
        publisher.close()
    assert queue_lengths(management, vhost) == {"a": 3}


def test_a_timeout_after_sending_leaves_the_outcome_unknown(broker, management, vhost, publisher_at):
    management.declare_queue(vhost, "a")
    with Proxy.before(broker.amqp_url) as proxy:
        publisher = publisher_at(proxy.url(broker.amqp_url), CALL_SECONDS=0.5)
        publisher.publish([(vhost, "a")], message())
        proxy.delay(3)
        began = time.monotonic()
        with pytest.raises(OutcomeUnknown, match="1 of 1 queues: the broker did not confirm it in time"):
            publisher.publish([(vhost, "a")], message())
        assert time.monotonic() - began < 2
        assert publisher.connections == 0
        with pytest.raises(BrokerUnavailable, match="no answer in time") as raised:
            publisher.publish([(vhost, "a")], message())
        assert raised.value.never_reached
        assert time.monotonic() - began < 3.5


def test_an_answer_that_is_not_amqp_leaves_the_outcome_unknown(broker, management, vhost, publisher_at):
    management.declare_queue(vhost, "a")
    with Proxy.before(broker.amqp_url) as proxy:
        publisher = publisher_at(proxy.url(broker.amqp_url), CALL_SECONDS=1)
        publisher.publish([(vhost, "a")], message())
        proxy.answer(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 100)
        with pytest.raises(OutcomeUnknown):
            publisher.publish([(vhost, "a")], message())
        with pytest.raises(BrokerUnavailable, match="check that RabbitMQ runs there") as raised:
            publisher.publish([(vhost, "a")], message())
        assert raised.value.never_reached
        assert publisher.connections == 0
        proxy.forward()
        assert publisher.publish([(vhost, "a")], message()) == {(vhost, "a"): Result.DELIVERED}


def test_closed_connections_leave_no_file_open(broker, management, vhost, publisher_at):
    def files():
        gc.collect()
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    management.declare_queue(vhost, "a")
    with Proxy.before(broker.amqp_url) as proxy:
        publisher = publisher_at(proxy.url(broker.amqp_url), CALL_SECONDS=1)
        nowhere = publisher_at("amqp://a:b@127.0.0.1:1")

        def once():
            publisher.publish([(vhost, "a")], message())
            proxy.cut_after(1)
            with pytest.raises(OutcomeUnknown):
                publisher.publish([(vhost, "a")], message())
            publisher.publish([(vhost, "a")], message())
            publisher.close()
            with pytest.raises(BrokerUnavailable):
                nowhere.publish([(vhost, "a")], message())

        once()
        before = files()
        for _ in range(10):
            once()
        assert files() <= before + 4  # the proxy may still be closing its last ones


def test_a_refused_connection_never_reached_the_broker(publisher_at):
    publisher = publisher_at("amqp://someone:sekret-word@127.0.0.1:1")
    with pytest.raises(BrokerUnavailable, match="Connection refused") as raised:
        publisher.publish([("/", "a")], message())
    assert raised.value.never_reached
    assert not isinstance(raised.value, OutcomeUnknown)
    assert "sekret-word" not in str(raised.value) + repr(publisher)
    assert publisher.connections == 0


def test_a_wrong_password_is_refused_without_showing_it(broker, caplog, publisher_at):
    publisher = publisher_at(f"amqp://guardian:sekret-word@{urlsplit(broker.amqp_url).netloc.rpartition('@')[2]}")
    with pytest.raises(Refused, match="check the user and the password") as raised:
        publisher.publish([("/", "a"), ("/", "b")], message())
    assert raised.value.status == 403
    assert "sekret-word" not in str(raised.value) + caplog.text


@pytest.mark.parametrize(
    "url", ["", "nonsense", "http://a:sekret-word@h", "amqp://", "amqp://a:sekret-word@h:port", "amqp://a@h:0"]
)
def test_an_invalid_url_is_refused_without_the_password(url, settings):
    with pytest.raises(ValueError) as raised:
        Publisher(url)
    assert "sekret-word" not in str(raised.value)
    settings.RABBIT_URL = url
    with pytest.raises(BrokerUnavailable, match="RABBIT_URL") as raised:
        core.broker.publisher()
    assert raised.value.never_reached


def test_under_a_memory_alarm_the_outcome_is_unknown_within_a_timeout(breakable, publisher_at):
    management = Management(breakable.management_url)
    publisher = publisher_at(breakable.amqp_url, BLOCKED_SECONDS=1)
    queues = [("/", name) for name in "abc"]
    publisher.publish(queues, message())
    with memory_alarm(breakable):
        for _ in range(2):  # on a pooled connection, then on a new one
            began = time.monotonic()
            with pytest.raises(OutcomeUnknown, match="3 of 3 queues: the broker takes no messages"):
                publisher.publish(queues, message())
            assert 0.9 < time.monotonic() - began < 3
            assert publisher.connections == 0
    assert set(publisher.publish(queues, message()).values()) == {Result.DELIVERED}
    # Two messages were confirmed. The two of unknown outcome mostly arrive, but the broker may have read neither.
    found = queue_lengths(management, "/")
    assert found.keys() == {"a", "b", "c"}
    assert all(2 <= length <= 4 for length in found.values()), found


def test_closing_pooled_connections_does_not_hang_under_an_alarm(breakable, publisher_at):
    publisher = publisher_at(breakable.amqp_url)
    publisher.publish([("/", "a")], message())
    with memory_alarm(breakable):
        began = time.monotonic()
        publisher.close()
        assert time.monotonic() - began < 1.5
        assert publisher.connections == 0


def test_a_frozen_broker_times_out_and_works_again_when_resumed(breakable, publisher_at):
    publisher, idle = publisher_at(breakable.amqp_url, CALL_SECONDS=1), publisher_at(breakable.amqp_url)
    publisher.publish([("/", "a")], message())
    idle.publish([("/", "b")], message())
    breakable.suspend()
    try:
        began = time.monotonic()
        idle.close()  # sends Close and drops the connection if there is no answer
        assert time.monotonic() - began < 1.5
        assert idle.connections == 0
        began = time.monotonic()
        with pytest.raises(OutcomeUnknown):
            publisher.publish([("/", "a")], message())
        with pytest.raises(BrokerUnavailable) as raised:
            publisher.publish([("/", "a")], message())
        assert raised.value.never_reached
        assert time.monotonic() - began < 3
    finally:
        breakable.resume()
    assert publisher.publish([("/", "a")], message()) == {("/", "a"): Result.DELIVERED}


@pytest.mark.soak
def test_forty_vhosts_get_a_message_from_a_slow_broker(breakable, owners, publisher_at):
    management = Management(breakable.management_url)
    before = [queue_lengths(management, owner)["a"] for owner in owners]
    with Proxy.before(breakable.amqp_url) as proxy:
        publisher = publisher_at(proxy.url(breakable.amqp_url), CALL_SECONDS=2)
        proxy.delay(0.02)
        for _ in range(2):
            began = time.monotonic()
            results = publisher.publish([(owner, "a") for owner in owners], message())
            assert list(results.values()) == [Result.DELIVERED] * len(owners)
            assert time.monotonic() - began < 2.5
            assert publisher.connections == 32
        assert proxy.connections < 2 * len(owners)  # the second call reuses connections
        publisher.close()
    assert [queue_lengths(management, owner)["a"] for owner in owners] == [number + 2 for number in before]


@pytest.mark.parametrize(("max_connections", "seconds"), [(32, 1), pytest.param(2, 4, marks=pytest.mark.soak)])
def test_hanging_queues_in_several_vhosts_do_not_block_other_vhosts(
    breakable, owners, max_connections, seconds, publisher_at
):
    queues = [(owner, "a") for owner in owners[:12]]
    publisher = publisher_at(breakable.amqp_url, MAX_CONNECTIONS=max_connections, CALL_SECONDS=seconds)
    with hung(breakable, owners[:4]):
        for _ in range(3):
            began = time.monotonic()
            with pytest.raises(OutcomeUnknown, match="4 of 12 queues: the broker did not confirm") as raised:
                publisher.publish(queues, message())
            assert time.monotonic() - began < seconds + 0.5
            assert raised.value.results == dict.fromkeys(queues[4:], Result.DELIVERED)
            assert publisher.connections <= max_connections
    assert publisher.publish(queues, message()) == dict.fromkeys(queues, Result.DELIVERED)


def test_a_hanging_queue_does_not_block_other_queues(breakable, publisher_at):
    management = Management(breakable.management_url)
    for vhost in ("one", "two"):
        management.create_vhost(vhost)
        management.declare_queue(vhost, "a")
    publisher = publisher_at(breakable.amqp_url, CALL_SECONDS=1)
    queues = [("/", "a"), ("/", "b"), ("one", "a"), ("two", "a")]
    with hung(breakable, ["/"]), pytest.raises(OutcomeUnknown, match="1 of 4 queues") as raised:
        publisher.publish(queues, message())
    assert raised.value.results == dict.fromkeys(queues[1:], Result.DELIVERED)
    assert publisher.publish(queues, message()) == dict.fromkeys(queues, Result.DELIVERED)


def test_a_stopped_vhost_is_gone_and_the_others_get_the_message(breakable, publisher_at):
    management = Management(breakable.management_url)
    management.create_vhost("down")
    breakable.eval('rabbit_vhost_sup_sup:stop_and_delete_vhost(<<"down">>).')
    publisher = publisher_at(breakable.amqp_url)
    results = publisher.publish([("down", "a"), ("/", "a")], message())
    assert results == {("down", "a"): Result.GONE, ("/", "a"): Result.DELIVERED}
