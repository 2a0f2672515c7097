import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rabbit.arguments import Difference, differences, parse_inequivalent
from rabbit.errors import InequivalentArguments

pytestmark = pytest.mark.rabbitmq

plain = st.text(st.characters(codec="utf-8", exclude_characters="'\0\r\n"), min_size=1, max_size=20)
values = st.one_of(st.booleans(), st.integers(-(2**31), 2**31), plain)
arguments = st.dictionaries(st.sampled_from(["x-a", "x-b", "x-message-ttl", "x-expires"]), values)


@given(arguments, arguments)
def test_differences_are_symmetric(wanted, found):
    back = [Difference(one.argument, one.wanted, one.found) for one in differences(found, wanted)]
    assert differences(wanted, found) == back


@given(arguments, arguments)
def test_correcting_every_difference_leaves_none(wanted, found):
    corrected = dict(found)
    for one in differences(wanted, found):
        corrected[one.argument] = one.wanted
    assert differences(wanted, corrected) == []


def test_a_difference_has_the_value_found_and_the_value_wanted():
    assert differences({"x-expires": 5, "x-new": "a"}, {"x-expires": 6, "x-old": True}) == [
        Difference("x-expires", found=6, wanted=5),
        Difference("x-new", found=None, wanted="a"),
        Difference("x-old", found=True, wanted=None),
    ]


def test_a_missing_queue_type_equals_classic():
    assert differences({"x-queue-type": "classic"}, {}) == differences({}, {"x-queue-type": "classic"}) == []
    assert differences({"x-queue-type": "classic"}, {"x-queue-type": "quorum"}) == [
        Difference("x-queue-type", found="quorum", wanted=None)
    ]


def test_a_number_equals_neither_a_boolean_nor_a_string():
    assert len(differences({"a": 1, "b": 1, "c": 1}, {"a": True, "b": "1", "c": 1.0})) == 3


def reason_for(management, vhost, name, first, second):
    """Declare a queue twice, with different arguments, and return the broker's error for the second."""
    management.declare_queue(vhost, name, **first)
    with pytest.raises(InequivalentArguments) as refusal:
        management.declare_queue(vhost, name, **second)
    management.delete_queue(vhost, name)
    return refusal.value.reason


TTL, LENGTH, EXCHANGE = "x-message-ttl", "x-max-length", "x-dead-letter-exchange"
SINGLE = "x-single-active-consumer"


@pytest.mark.parametrize(
    ("first", "second", "difference"),
    [
        ({TTL: 1}, {"arguments": {TTL: 2}}, Difference(TTL, found="1", wanted="2")),
        ({TTL: 1}, {}, Difference(TTL, found=1, wanted=None)),
        ({}, {"arguments": {LENGTH: 5}}, Difference(LENGTH, found=None, wanted=5)),
        ({}, {"arguments": {SINGLE: True}}, Difference(SINGLE, found=None, wanted=True)),
        ({EXCHANGE: "5"}, {"arguments": {EXCHANGE: "it's 6"}}, Difference(EXCHANGE, found="5", wanted="it's 6")),
        ({EXCHANGE: "5"}, {}, Difference(EXCHANGE, found="5", wanted=None)),
        ({}, {"durable": False}, Difference("durable", found="true", wanted="false")),
        ({}, {"auto_delete": True}, Difference("auto_delete", found="false", wanted="true")),
    ],
)
def test_the_brokers_error_for_another_declaration_is_parsed(management, vhost, first, second, difference):
    assert parse_inequivalent(reason_for(management, vhost, "q", {"arguments": first}, second)) == difference


@pytest.mark.parametrize("name", ["it's", "a' in vhost 'b': received '1' but current is '2", "x' for queue 'y"])
def test_quotes_in_the_queues_name_do_not_confuse_the_parser(management, vhost, name):
    reason = reason_for(management, vhost, name, {}, {"durable": False})
    assert parse_inequivalent(reason) == Difference("durable", found="true", wanted="false")
    difference = parse_inequivalent(reason_for(management, vhost, name, {}, {"arguments": {"x-queue-type": "quorum"}}))
    assert (difference.argument, difference.wanted) == ("x-queue-type", "quorum")


def is_decoded_twice(text):
    """Return whether RabbitMQ 4.3 names another text in an error: one whose bytes in Latin-1 are UTF-8."""
    try:
        return text.encode("latin-1").decode() != text
    except UnicodeError:
        return False


readable = plain.filter(lambda text: not is_decoded_twice(text))


@given(readable, readable)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_survives_in_the_brokers_error(management, vhost, first, second):
    argument = "x-dead-letter-routing-key"
    for_all = {"x-dead-letter-exchange": "amq.topic"}
    if first == second:
        second += "x"
    reason = reason_for(
        management, vhost, "q", {"arguments": for_all | {argument: first}}, {"arguments": for_all | {argument: second}}
    )
    assert parse_inequivalent(reason) == Difference(argument, found=first, wanted=second)


@pytest.mark.parametrize("reason", ["", "Not Found", "invalid arg 'x-message-ttl' for queue 'q' in vhost '/': \"no\""])
def test_an_unrelated_error_is_no_difference(reason):
    assert parse_inequivalent(reason) is None
