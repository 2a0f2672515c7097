import re
from urllib.parse import quote

import pika
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rabbit.names import exchange_prefix, queue_prefix
from rabbit.permissions import FULL_ACCESS, NO_ACCESS, Permissions, allows, for_pulse_user
from tests.conftest import Amqp
from tests.support.toolbox import can_log_in, is_refused

# Few letters, so that names are often similar.
user_names = st.from_regex(r"[ab][ab._-]{0,5}", fullmatch=True)
anything = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def test_a_plain_name_has_the_documented_permissions():
    own = "^(queue/alice/.*|exchange/alice/.*)"
    assert for_pulse_user("alice") == Permissions(own, own, "^(queue/alice/.*|exchange/.*)")


def test_dots_and_dashes_are_escaped():
    assert for_pulse_user("a.b-c_d").read == r"^(queue/a\.b\-c_d/.*|exchange/.*)"
    assert not allows(for_pulse_user("a.b").configure, "queue/axb/x")


@given(user_names, anything)
def test_a_pulse_user_may_use_its_own_names(user, rest):
    permissions = for_pulse_user(user)
    assert all(allows(pattern, queue_prefix(user) + rest) for pattern in permissions)
    assert all(allows(pattern, exchange_prefix(user) + rest) for pattern in permissions)


@given(user_names, user_names, anything)
def test_a_pulse_user_may_only_read_exchanges_of_others(user, other, rest):
    assume(user != other)
    permissions = for_pulse_user(user)
    assert not any(allows(pattern, queue_prefix(other) + rest) for pattern in permissions)
    assert not allows(permissions.configure, exchange_prefix(other) + rest)
    assert not allows(permissions.write, exchange_prefix(other) + rest)
    assert allows(permissions.read, exchange_prefix(other) + rest)


@given(user_names, anything)
def test_a_pulse_user_may_not_use_names_outside_the_pattern(user, name):
    assume(not name.startswith("exchange/"))
    assert not any(allows(pattern, name) for pattern in for_pulse_user(user))


@given(anything)
def test_no_access_allows_no_name_and_full_access_all(name):
    assert allows(NO_ACCESS.read, name) is (name in ("", "\n"))  # $ matches before a final newline
    assert allows(FULL_ACCESS.read, name)
    assert allows("", name) is allows("^$", name)


def test_a_pattern_is_searched_and_not_anchored():
    assert allows("b", "abc")
    assert not allows("^b", "abc")


@pytest.mark.parametrize(
    "pattern",
    ["[[:alpha:]]", "[[.a.]]", r"a\Z", r"\v", "a{,2}", r"\h", r"\R", r"\K", r"\Qa\E", "(?|a|b)", "a(?R)?", "(?1)(a)"],
)
def test_a_pattern_that_python_reads_otherwise_than_the_broker_is_refused(pattern):
    with pytest.raises(re.error):
        allows(pattern, "a")


@pytest.fixture
def open_as(broker, management, vhost, create_pulse_user):
    """Return a function that creates a RabbitMQ user and connects as it."""
    opened = []

    def connect(user: str) -> pika.BlockingConnection:
        management.set_permissions(vhost, create_pulse_user(user, exactly=True), for_pulse_user(user))
        address = broker.amqp_url.rpartition("@")[2]
        opened.append(Amqp(f"amqp://{quote(user, safe='')}:secret@{address}", vhost).connection)
        return opened[-1]

    yield connect
    for connection in opened:
        connection.close()


def test_the_broker_enforces_the_permissions_of_a_pulse_user(open_as, vhost):
    name = f"a.b-c_{vhost[-8:]}"
    mine, theirs = open_as(name), open_as(name.replace(".", "x"))
    for user, connection in ((name, mine), (name.replace(".", "x"), theirs)):
        queue, exchange = f"queue/{user}/q", f"exchange/{user}/e"
        assert not is_refused(connection, lambda channel, queue=queue: channel.queue_declare(queue, durable=True))
        assert not is_refused(
            connection, lambda channel, exchange=exchange: channel.exchange_declare(exchange, exchange_type="topic")
        )
        assert not is_refused(
            connection, lambda channel, queue=queue, exchange=exchange: channel.queue_bind(queue, exchange, "#")
        )
        assert not is_refused(connection, lambda channel, queue=queue: channel.basic_get(queue))
    other = name.replace(".", "x")
    my_queue = f"queue/{name}/q"
    assert is_refused(mine, lambda channel: channel.queue_declare(f"queue/{other}/new"))
    assert is_refused(mine, lambda channel: channel.basic_get(f"queue/{other}/q"))
    assert is_refused(mine, lambda channel: channel.queue_purge(f"queue/{other}/q"))
    assert is_refused(mine, lambda channel: channel.queue_delete(f"queue/{other}/q"))
    assert is_refused(mine, lambda channel: channel.exchange_delete(f"exchange/{other}/e"))
    assert is_refused(mine, lambda channel: channel.queue_declare("unpatterned"))
    assert is_refused(mine, lambda channel: publish_confirmed(channel, f"exchange/{other}/e"))
    assert is_refused(mine, lambda channel: publish_confirmed(channel, ""))
    assert not is_refused(mine, lambda channel: publish_confirmed(channel, f"exchange/{name}/e"))
    assert not is_refused(mine, lambda channel: channel.queue_bind(my_queue, f"exchange/{other}/e", "#"))


def publish_confirmed(channel, exchange: str) -> None:
    channel.confirm_delivery()
    channel.basic_publish(exchange, "key", b"body")


def test_a_pulse_user_cannot_enter_another_vhost(create_pulse_user, broker, management, vhost):
    name = create_pulse_user("alice")
    management.set_permissions(vhost, name, for_pulse_user(name))
    assert [can_log_in(broker, one, name, "secret") for one in (vhost, "/")] == [True, False]


def test_a_pulse_user_receives_from_anothers_exchange_through_a_binding(open_as, vhost):
    name, other = f"alice-{vhost[-8:]}", f"bob-{vhost[-8:]}"
    mine, theirs = open_as(name).channel(), open_as(other).channel()
    theirs.exchange_declare(f"exchange/{other}/events", "topic")
    mine.queue_declare(f"queue/{name}/events")
    mine.queue_bind(f"queue/{name}/events", f"exchange/{other}/events", "build.#")
    theirs.confirm_delivery()
    theirs.basic_publish(f"exchange/{other}/events", "build.done", b"done")
    theirs.basic_publish(f"exchange/{other}/events", "test.done", b"not for me")
    assert [mine.basic_get(f"queue/{name}/events", auto_ack=True)[2] for _ in range(2)] == [b"done", None]
