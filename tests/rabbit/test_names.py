import pytest
from hypothesis import given
from hypothesis import strategies as st

from rabbit.names import (
    InvalidUserName,
    NameKind,
    check_user_name,
    exchange_prefix,
    kind_of_exchange,
    kind_of_queue,
    queue_prefix,
    readable,
    user_of_exchange,
    user_of_queue,
)

user_names = st.from_regex(r"[A-Za-z][A-Za-z0-9._-]{0,99}", fullmatch=True)
anything = st.text(st.characters(exclude_categories=["Cs"]), max_size=120)


@given(user_names)
def test_every_name_of_the_pattern_is_valid(name):
    assert check_user_name(name) is None
    assert check_user_name("a" * 100) is None


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "empty"),
        ("1a", "start with a letter"),
        (".a", "start with a letter"),
        ("-", "start with a letter"),
        ("alice\n", r"'\n'"),
        ("\nalice", r"'\n'"),
        ("alice ", "' '"),
        ("a/b", "'/'"),
        ("a*", "'*'"),
        ("a\0", r"'\x00'"),
        ("zoé", r"'\xe9'"),
        ("a\N{ARABIC-INDIC DIGIT ONE}", r"'\u0661'"),
        ("\N{CYRILLIC SMALL LETTER A}lice", r"'\u0430'"),
        ("a\N{ZERO WIDTH SPACE}", r"'\u200b'"),
        ("a" * 101, "101 characters"),
    ],
)
def test_an_invalid_name_is_refused_with_the_reason(name, why):
    with pytest.raises(InvalidUserName) as refusal:
        check_user_name(name)
    assert why in str(refusal.value)


@pytest.mark.parametrize("code", [0, 0x7F, 0xA0, 0x34F, 0x115F, 0x17B4, 0x202E, 0x2800, 0x3164, 0xFE0F, 0xE0100])
def test_a_character_that_shows_nothing_is_escaped(code):
    assert int(readable(chr(code))[2:], 16) == code
    assert readable("q é ✓") == "q é ✓"


@given(anything)
def test_only_a_valid_name_in_a_queue_leads_to_a_user(name):
    try:
        check_user_name(name)
    except InvalidUserName:
        assert user_of_queue(f"queue/{name}/x") != name
    else:
        assert user_of_queue(f"queue/{name}/x") == name


@given(user_names, anything)
def test_names_of_queues_and_exchanges_lead_to_their_user(user, rest):
    queue, exchange = queue_prefix(user) + rest, exchange_prefix(user) + rest
    assert user_of_queue(queue) == user_of_exchange(exchange) == user
    assert user_of_queue(exchange) is user_of_exchange(queue) is None
    assert kind_of_queue(queue) is kind_of_exchange(exchange) is NameKind.OWNED
    assert kind_of_queue(exchange) is kind_of_exchange(queue) is NameKind.MISNAMED


@pytest.mark.parametrize(
    "name",
    [
        "queue/alice",
        "exchange/alice",
        "queue//x",
        "queue/1a/x",
        "queue/alice\n/x",
        "queue/a b/x",
        "queue/" + "a" * 101 + "/x",
        "Queue/alice/x",
        " queue/alice/x",
        "my/queue/alice/x",
        "celery",
        "amqp",
    ],
)
def test_a_name_without_pattern_has_no_user(name):
    assert user_of_queue(name) is user_of_exchange(name) is None
    assert kind_of_queue(name) is kind_of_exchange(name) is NameKind.UNPATTERNED


@pytest.mark.parametrize("name", ["amq.gen-x", "amq.topic", "amq."])
def test_amq_names_belong_to_the_system(name):
    assert kind_of_queue(name) is kind_of_exchange(name) is NameKind.SYSTEM
    assert kind_of_exchange("") is NameKind.SYSTEM
