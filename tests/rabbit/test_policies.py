import pytest

from rabbit.policies import BrokerPolicy, LengthLimit, effective, length_limit, limit_of
from tests.support.toolbox import wait_until


def policy(pattern=".*", apply_to="all", priority=0, **definition):
    return BrokerPolicy(pattern, apply_to, priority, definition)


def test_the_matching_policy_with_the_highest_priority_applies():
    policies = [policy("^a", n=1), policy("a", priority=2, n=2), policy("b", priority=3, n=3)]
    assert effective(policies, "a", "classic") == {"n": 2}
    assert effective(policies, "c", "classic") == {}


@pytest.mark.parametrize(
    ("apply_to", "type_", "applies"),
    [
        ("all", "classic", True), ("queues", "quorum", True), ("exchanges", "classic", False),
        ("classic_queues", "classic", True), ("classic_queues", "quorum", False), ("quorum_queues", "quorum", True),
        ("streams", "stream", True), ("queues", "a type of a plugin", True),
    ],
)  # fmt: skip
def test_a_policy_applies_to_a_type_of_queues(apply_to, type_, applies):
    assert policy(apply_to=apply_to).applies_to("a", type_) is applies


def test_a_pattern_that_python_does_not_understand_applies_to_nothing():
    assert not policy("(?<").applies_to("a", "classic")


@pytest.mark.parametrize(
    ("arguments", "by_policy", "by_operator", "limit"),
    [
        ({}, {}, {}, None),
        ({"x-max-length": 5}, {}, {}, LengthLimit(5, None, True)),
        ({"x-max-length": 5}, {"max-length": 4}, {"max-length": 3}, LengthLimit(3, None, True)),
        ({}, {"max-length-bytes": 1000}, {"max-length": 3}, LengthLimit(3, 1000, True)),
        ({"x-max-length": 5, "x-overflow": "reject-publish"}, {}, {}, LengthLimit(5, None, False)),
        ({"x-overflow": "drop-head"}, {"max-length": 5, "overflow": "reject-publish"}, {}, LengthLimit(5, None, True)),
        ({"x-max-length": "5"}, {}, {}, None),
    ],
)
def test_the_lowest_limit_applies(arguments, by_policy, by_operator, limit):
    assert length_limit(arguments, by_policy, by_operator) == limit


DEFINITIONS = {
    "policies": {
        "low": {"pattern": "^q", "definition": {"max-length": 7, "overflow": "reject-publish"}, "priority": 1},
        "high": {"pattern": "1$", "definition": {"max-length": 90}, "priority": 2, "apply-to": "queues"},
        "none": {"pattern": "", "definition": {"alternate-exchange": "x"}, "apply-to": "exchanges", "priority": 9},
    },
    "operator-policies": {"bounds": {"pattern": "[12]$", "definition": {"max-length": 50, "max-length-bytes": 1000}}},
}


def test_the_policies_that_apply_are_those_that_the_broker_applies(management, vhost, amqp):
    for kind, definitions in DEFINITIONS.items():
        for name, definition in definitions.items():
            management._exchange("PUT", (kind, vhost, name), json=definition)
    for name in ("q0", "q1", "q2", "other2"):
        amqp.queue(name)
    policies = management.policies(vhost), management.operator_policies(vhost)
    limits = {}
    for row in management.list_arguments(vhost):
        assert management.queue_arguments(vhost, row["name"]) == row
        name = row["name"]
        limits[name] = limit_of(row, *policies)
        # The broker's own result lags by seconds.
        applied = wait_until(lambda name=name: management.queue(vhost, name).get("effective_policy_definition"))
        assert limits[name] == length_limit(row["arguments"], applied, {})
    assert limits == {
        "q0": LengthLimit(7, None, False),
        "q1": LengthLimit(50, 1000, True),
        "q2": LengthLimit(7, 1000, False),
        "other2": LengthLimit(50, 1000, True),
    }
