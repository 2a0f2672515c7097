import pytest

from queues.rules.restoring import Definition, Load, Loss, Policies, RestoreEffect, losses, planned
from rabbit.permissions import FULL_ACCESS, for_pulse_user

NO_POLICY = Policies({}, {})
LOAD = Load(messages=10, size=1000)


def binding(exchange, key="#"):
    return {"exchange": exchange, "routing_key": key, "arguments": {}}


def plan_of(arguments=(), bindings=(), rights=None, exchanges=("exchange/alice/jobs",), without=()):
    was = Definition("classic", True, False, dict(arguments), bindings)
    return planned(was, rights or for_pulse_user("alice"), exchanges, NO_POLICY, LOAD, without)


def test_a_queue_is_declared_with_its_type_and_arguments():
    assert plan_of({"x-max-priority": 3}).arguments == {"x-max-priority": 3, "x-queue-type": "classic"}
    assert plan_of({"x-queue-type": "quorum"}).arguments == {"x-queue-type": "quorum"}


@pytest.mark.parametrize(
    ("exchange", "rights", "why"),
    [
        ("exchange/alice/jobs", None, ""),
        ("exchange/bob/jobs", None, "the exchange does not exist"),
        ("amq.topic", None, "the Pulse user may not read from it"),
        ("amq.topic", FULL_ACCESS, "the exchange does not exist"),
    ],
)
def test_a_queue_is_bound_where_its_pulse_user_may(exchange, rights, why):
    plan = plan_of(bindings=[binding(exchange)], rights=rights)
    assert [one.why for one in plan.left_out] == [why] * bool(why)
    assert len(plan.bindings) == (not why)


def test_bindings_that_are_not_known_are_listed_as_left_out():
    assert plan_of(bindings=None).left_out == [("its bindings", "the archive does not have them")]
    assert plan_of(bindings=[]).left_out == []


@pytest.mark.parametrize(
    ("exchange", "is_kept"), [("exchange/alice/dead", True), ("exchange/bob/dead", False), ("", False)]
)
def test_a_queue_dead_letters_only_where_its_pulse_user_may_publish(exchange, is_kept):
    dead = {"x-dead-letter-exchange": exchange, "x-dead-letter-routing-key": "k"}
    plan = plan_of({**dead, "x-max-priority": 3})
    kept = {name for name in plan.arguments if name.startswith("x-dead")}
    assert kept == (set(dead) if is_kept else set())
    assert [one.what for one in plan.left_out] == [f"the dead-letter exchange {exchange or '(default)'}"] * (
        not is_kept
    )
    assert plan_of(dead, rights=FULL_ACCESS).left_out == []


@pytest.mark.parametrize(
    ("arguments", "lost"),
    [
        ({}, ""),
        ({"x-message-ttl": 60_000}, "nobody has consumed after 60 seconds (argument x-message-ttl)."),
        ({"x-expires": 500}, "no client has used it for 500 milliseconds (argument x-expires)."),
        ({"x-max-length": 10}, ""),
        ({"x-max-length": 9}, "The queue holds 9 messages, and RabbitMQ drops the oldest messages past that"),
        ({"x-max-length": 9, "x-overflow": "reject-publish"}, "refuses messages past that, which ends the restore"),
        ({"x-max-length-bytes": 999}, "The queue holds 999 bytes"),
        ({"x-max-length-bytes": 1000}, ""),
    ],
)
def test_settings_that_would_drop_messages_are_shown_and_can_be_left_out(arguments, lost):
    found = plan_of(arguments).losses
    assert [lost in one.text for one in found] == [True] * bool(lost)
    left = plan_of(arguments, without=[one.argument for one in found])
    assert left.losses == []
    assert [one.why for one in left.left_out] == ["you chose so"] * len(found)


def test_a_policy_is_shown_but_cannot_be_left_out():
    found = losses(
        {"x-max-length": 5}, Policies({"max-length": 3, "overflow": "reject-publish"}, {"message-ttl": 5}), LOAD
    )
    assert [(one.code, one.argument) for one in found] == [
        ("operator policy message-ttl", ""), ("argument x-max-length", ""), ("policy max-length", ""),
    ]  # fmt: skip
    assert "refuses messages" in found[1].text


def test_only_arguments_that_drop_messages_can_be_left_out():
    plan = plan_of({"x-max-priority": 3}, without=["x-max-priority"])
    assert "x-max-priority" in plan.arguments
    assert plan.left_out == []


@pytest.mark.parametrize(("fits", "keys"), [(None, set()), (10, set()), (9, {"limit"})])
def test_more_than_the_deletion_limit_allows_needs_a_confirmation(fits, keys):
    effect = RestoreEffect([], messages=10, limit=9, fits=fits)
    assert effect.keys == keys
    assert ("over its deletion limit of 9" in effect.sentence) is bool(keys)
    assert RestoreEffect([Loss("a", "lost.")], 10).keys == {"a"}
