import pytest

from queues.rules.watchable import why_not_watched
from rabbit.entities import Binding, Exchange
from rabbit.policies import BrokerPolicy


def exchange(name, kind="topic", **arguments):
    return Exchange(name, "/", kind, True, False, False, {key.replace("_", "-"): one for key, one in arguments.items()})


def bound(source, destination, kind="exchange"):
    return Binding(source, "/", destination, kind, "#", {})


def policy(definition, apply_to="all", pattern="^b$"):
    return BrokerPolicy(pattern, apply_to, 0, definition)


@pytest.mark.parametrize("kind", ["direct", "topic", "fanout", "headers"])
def test_exchanges_of_the_usual_types_may_be_watched(kind):
    others = [exchange("b", kind), exchange("other", "x-random")]
    bindings = [bound("b", "other"), bound("other", "b", "queue"), bound("a", "b"), bound("b", "a")]
    assert why(others, bindings, [policy({"alternate-exchange": "x"}, "queues")]) == ""


@pytest.mark.parametrize(
    ("leading", "policies", "reason"),
    [
        (exchange("b", "x-random"), [], "it has the type x-random"),
        (exchange("b", alternate_exchange="x"), [], "it has an alternate exchange"),
        (exchange("b"), [policy({"alternate-exchange": "x"})], "it has an alternate exchange"),
        (exchange("b"), [policy({"alternate-exchange": "x"}, "exchanges")], "it has an alternate exchange"),
        (exchange("b"), [policy({"federation-upstream-set": "all"})], "it is federated"),
        (exchange("a", "x-random"), [], "a, which leads to it, has the type x-random"),
        (exchange("a"), [policy({"alternate-exchange": "x"}, pattern="^a$")], "a, which leads to it, has an alternate"),
    ],
)
def test_exchanges_where_a_binding_changes_something_for_others_are_refused_with_the_reason(leading, policies, reason):
    bindings = [bound("middle", "b"), bound("a", "middle")]
    assert reason in why([exchange("b"), exchange("middle"), leading], bindings, policies)


def test_an_exchange_that_the_broker_would_delete_with_the_watch_is_refused():
    temporary = exchange("b")._replace(auto_delete=True)
    assert "auto-delete" in why([temporary], [bound("a", "b")], [])
    assert why([temporary], [bound("b", "q", "queue")], []) == ""


def test_the_default_exchange_is_refused():
    assert "no binding" in why_not_watched("", {}, [], [])


def why(exchanges, bindings, policies):
    return why_not_watched("b", {one.name: one for one in exchanges}, bindings, policies)
