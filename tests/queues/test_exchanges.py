import pytest

from accounts.models import AuditEntry, Owner
from core.refusals import Refusal
from queues.actions import exchanges
from queues.actions.single import Gone
from tests.support.api import Program
from tests.support.counting import counted_requests
from tests.support.toolbox import amqp_answers_lost, wait_until

pytestmark = pytest.mark.usefixtures("guarded", "pulse_user")


@pytest.fixture
def exchange_name(amqp):
    """Return the name of Alice's exchange, to which a queue and an exchange are bound, among others."""
    for name in ("exchange/alice/events", "exchange/bob/events", "queue/alice/misnamed", "exchange/alice"):
        amqp.channel.exchange_declare(name, "topic", durable=True)
    amqp.queue("queue/bob/builds")
    amqp.channel.queue_bind("queue/bob/builds", "exchange/alice/events", "build.#")
    amqp.channel.exchange_bind("exchange/bob/events", "exchange/alice/events", "test.<b>\u202e")
    return "exchange/alice/events"


def exchange_names(management, vhost):
    return {exchange.name for exchange in management.exchanges(vhost) if exchange.name.startswith("exchange/")}


def test_an_operator_sees_all_exchanges_of_pulse_users_or_those_of_the_tokens_one(exchange_name, operator, pulse_user):
    names = [exchange.name for exchange in exchanges.own_exchanges(operator)]
    assert names == ["exchange/alice/events", "exchange/bob/events"]
    operator.reads_only = pulse_user.pk
    assert [exchange.name for exchange in exchanges.own_exchanges(operator)] == [exchange_name]


def test_an_owner_without_a_pulse_user_sees_no_exchanges(client):
    bob = Owner.objects.create_user("bob@example.org", vouched=True)
    with counted_requests() as sent:
        assert exchanges.own_exchanges(bob) == []
    assert sent == []
    client.force_login(bob)
    assert "First you need a Pulse user on RabbitMQ." in client.get("/exchanges/").text


def test_the_page_lists_exchanges_and_bindings(exchange_name, as_alice):
    page = as_alice.get("/exchanges/").text
    assert "queue/bob/builds" in page
    assert "test.&lt;b&gt;\\u202e" in page
    assert 'href="/exchanges/delete/?name=exchange%2Falice%2Fevents"' in page
    assert ">exchange/bob/events</a>" not in page


def test_the_page_of_an_exchange_shows_bindings_publishers_and_unroutable_messages(exchange_name, as_alice, amqp):
    for _ in range(3):
        amqp.channel.basic_publish(exchange_name, "nowhere", b"1")
    amqp.channel.basic_publish(exchange_name, "build.done", b"1")

    def page():
        return as_alice.get("/exchanges/exchange/", {"name": exchange_name}).text

    wait_until(lambda: "Of all Pulse users, only alice may publish here." in page())
    for what in ("queue/bob/builds", "test.&lt;b&gt;\\u202e", "No open channel of alice has published."):
        assert what in page()
    assert as_alice.get("/exchanges/exchange/", {"name": "exchange/bob/events"}).status_code == 404


def test_the_api_shows_the_traffic_of_an_exchange(exchange_name, amqp, alice, management, vhost):
    amqp.channel.basic_publish(exchange_name, "build.done", b"1")
    wait_until(lambda: management.exchange_traffic(vhost, exchange_name).published is not None)
    answer = Program(alice).get("exchanges/traffic/", name=exchange_name).json()
    assert (answer["publishers"], answer["is_of_user"]) == ([], True)
    assert Program(alice).get("exchanges/traffic/", name="amq.topic").status_code == 404


@pytest.mark.parametrize(("bound", "collapsed", "more"), [(5, False, 0), (6, True, 0), (53, True, 3)])
def test_many_bindings_are_collapsed_and_the_rest_counted(amqp, as_alice, bound, collapsed, more):
    amqp.channel.exchange_declare("exchange/alice/events", "topic", durable=True)
    amqp.queue("queue/alice/builds")
    for number in range(bound):
        amqp.channel.queue_bind("queue/alice/builds", "exchange/alice/events", f"build.{number}")
    page = as_alice.get("/exchanges/").text
    assert page.count("</code> → queue") == bound - more
    assert (f"<summary>{bound} bindings</summary>" in page) is collapsed
    assert (f"and {more} more" in page) is bool(more)
    assert "<summary>" not in as_alice.get("/exchanges/delete/", {"name": "exchange/alice/events"}).text


def test_a_refusal_by_the_broker_is_not_called_an_outage(as_alice, settings, broker, create_pulse_user):
    name, host = create_pulse_user("nobody-much"), broker.management_url.rpartition("@")[2]
    settings.RABBITMQ_MANAGEMENT_URL = f"http://{name}:secret@{host}"
    answer = as_alice.get("/exchanges/")
    assert answer.status_code == 503
    assert "does not allow Guardian to do this" in answer.text
    assert "Contact an operator." in answer.text


def test_an_exchange_is_deleted_after_typing_its_name(exchange_name, as_alice, management, vhost):
    page = as_alice.get("/exchanges/delete/", {"name": exchange_name})
    assert "queue/bob/builds" in page.text
    wrong = as_alice.post(f"/exchanges/delete/?name={exchange_name}", {"typed": exchange_name + "x"})
    assert (wrong.status_code, exchange_name in exchange_names(management, vhost)) == (200, True)
    done = as_alice.post(f"/exchanges/delete/?name={exchange_name}", {"typed": exchange_name}, follow=True)
    assert done.redirect_chain == [("/exchanges/", 302)]
    assert "The exchange exchange/alice/events was deleted." in done.text
    assert exchange_name not in exchange_names(management, vhost)


def test_deleting_a_vanished_exchange_says_it_is_gone(exchange_name, alice, as_alice, management, vhost):
    management.delete_exchange(vhost, exchange_name)
    with pytest.raises(Gone):
        exchanges.delete_exchange(alice, exchange_name)
    for answer in (
        as_alice.get("/exchanges/delete/", {"name": exchange_name}, follow=True),
        as_alice.post(f"/exchanges/delete/?name={exchange_name}", {"typed": exchange_name}, follow=True),
    ):
        assert answer.redirect_chain == [("/exchanges/", 302)]
        assert "The exchange exchange/alice/events is no longer on the broker." in answer.text


def test_an_exchange_of_somebody_else_is_404(exchange_name, alice, as_alice, management, vhost):
    before = exchange_names(management, vhost)
    for name in (
        "exchange/bob/events", "amq.topic", "", "queue/alice/misnamed", "exchange/alice", "exchange/Alice/x", "\0",
    ):  # fmt: skip
        for answer in (as_alice.get("/exchanges/delete/", {"name": name}),
                       as_alice.post("/exchanges/delete/", {"typed": name}, query_params={"name": name})):  # fmt: skip
            assert answer.status_code == 404, name
        with pytest.raises(Refusal, match="You have no exchange"):
            exchanges.delete_exchange(alice, name)
    assert exchange_names(management, vhost) == before


def test_an_operator_deletes_any_pulse_users_exchange(exchange_name, operator, management, vhost):
    exchanges.delete_exchange(operator, exchange_name)
    assert exchange_names(management, vhost) == {"exchange/bob/events", "exchange/alice"}
    with pytest.raises(Refusal, match="You have no exchange"):
        exchanges.delete_exchange(operator, "amq.topic")


def test_deletions_are_recorded_with_their_outcome(
    exchange_name, alice, as_alice, broker, settings, vhost, amqp, monkeypatch
):
    with amqp_answers_lost(broker, settings, monkeypatch, "exchange_delete"):
        asked = as_alice.post(f"/exchanges/delete/?name={exchange_name}", {"typed": exchange_name})
    assert asked.status_code == 503
    assert "so the outcome is unknown" in asked.text
    with pytest.raises(Gone):
        exchanges.delete_exchange(alice, exchange_name)
    amqp.channel.exchange_declare(exchange_name, "topic")
    exchanges.delete_exchange(alice, exchange_name)
    entries = AuditEntry.objects.filter(event=exchanges.DELETED_EXCHANGE).order_by("id")
    assert [(one.actor, one.outcome) for one in entries] == [(alice, "unknown"), (alice, "not-done"), (alice, "done")]
    assert {(one.additional_data["exchange"], one.additional_data["vhost"]) for one in entries} == {
        (exchange_name, vhost)
    }
