"""The page of agents and their subscriptions, and their removal there."""

import contextlib
import html
import json
import re
from datetime import UTC, datetime

import pika
import pytest
from django.utils import timezone

from accounts.access.tokens import create_token
from accounts.models import Owner
from agents.events import delivery, publishing
from agents.models import AgentIdentity, AgentVhost, Consumer, EventSubscription, Offering, SubscriptionQueue
from agents.services import services
from core.models import Removal
from queues.models import Queue, QueueEvent
from rabbit.permissions import for_subscription
from tests.conftest import Amqp
from tests.support.agents import make_agent, make_consumer, make_subscription, store_queue_row
from tests.support.api import Program, Visitor
from tests.support.proxy import Proxy
from tests.support.toolbox import AWAY, queue_names, url_for, wait_until

pytestmark = pytest.mark.usefixtures("guarded")

ODD = "<script>alert(1)</script>\u202e\"'"


@pytest.fixture
def compute(alice, bob):
    offering = Offering.objects.create(name="Compute")
    offering.members.add(alice, bob)
    return offering


def text_of(page):
    """Return the visible text of a page in one line."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page.text)).split())


def rows_of(page):
    """Return the visible text of each row of the agents' tables."""
    tables = re.findall(r'<table class="table">\n<thead><tr><th scope="col">Events<(.*?)</table>', page.text, re.DOTALL)
    rows = [row for table in tables for row in re.findall(r"<tr>(.*?)</tr>", table, re.DOTALL)]
    return [
        " ".join(html.unescape(re.sub(r"<[^>]*>", " ", row)).split()) for row in rows if '<th scope="col"' not in row
    ]


def agents_on(page):
    return [html.unescape(name) for name in re.findall(r"<h2><bdi>(.*?)</bdi></h2>", page.text)]


# The page


def test_an_owner_sees_agents_with_types_queues_and_lengths(alice, compute):
    identity = make_agent(alice, compute, version="1.0.5", last_restarted=datetime(2026, 3, 4, 5, 6, tzinfo=UTC))
    storage = Offering.objects.create(name="Storage")
    subscription = make_subscription(alice, identity, "order", [compute, storage])
    queue = store_queue_row(subscription.queues.get(offering=compute))
    page = Visitor(alice).client.get("/agents/")
    assert agents_on(page) == ["agent-1"]
    text = text_of(page)
    assert "Offering Compute · version 1.0.5 · last restarted 2026-03-04" in text
    ours, theirs = rows_of(page)
    assert ours.startswith(f"order {queue.name} ")
    assert " 3 " in ours
    assert theirs.startswith("order of Storage subscription_")
    assert f'href="/queues/{queue.uuid}/"' in page.text
    assert "not listed yet" in theirs
    Queue.objects.filter(pk=queue.pk).update(ready=None)
    assert "unknown" in rows_of(Visitor(alice).client.get("/agents/"))[0]
    Queue.objects.filter(pk=queue.pk).update(state="gone")
    assert "not listed yet" in rows_of(Visitor(alice).client.get("/agents/"))[0]
    assert alice.email not in page.text.partition("<main")[2]


def test_subscriptions_without_an_agent_and_consumers_show_their_types(alice, compute):
    make_subscription(alice, description="By hand", offerings=[compute])
    make_subscription(alice, observable_objects=[{"object_type": "order"}, {"object_type": "resource"}, "odd"])
    make_consumer(make_agent(alice, compute, "all"))
    make_consumer(make_agent(alice, compute, "some"), ["order", "user_role"])
    page = Visitor(alice).client.get("/agents/")
    assert "By hand" in agents_on(page)
    everything, some, nothing_yet, by_hand = rows_of(page)
    assert everything.startswith("all types consumer_")
    assert some.startswith("order , user_role consumer_")
    assert nothing_yet.startswith("order , resource no queue yet")
    assert by_hand.startswith("order of Compute subscription_")


def test_a_queue_in_creation_says_so(alice, compute):
    make_subscription(alice, make_agent(alice, compute), offerings=[compute], state="creating")
    page = Visitor(alice).client.get("/agents/")
    [row] = rows_of(page)
    assert "being created" in row
    assert "not connected" in row
    assert "Guardian declares it within two minutes" in page.text
    assert f"Delivery is blocked. {delivery.NOT_ON_BROKER}" in row


def test_a_queue_shows_whether_it_is_read_and_what_happened_last(alice, compute):
    token, _ = create_token(alice, "agent")
    consumer = make_consumer(make_agent(alice, compute), token=token)
    listed = store_queue_row(consumer, consumers=0)
    at = datetime(2026, 3, 4, 5, 6, tzinfo=UTC)
    failed = {"last_error": "The queue got no event: it is full.", "last_error_at": at}
    Consumer.objects.update(**failed, last_delivered_at=at)
    [row] = rows_of(Visitor(alice).client.get("/agents/"))
    assert "no consumer: nobody reads the queue Last delivery 2026-03-04" in row
    assert "Last error 2026-03-04 : The queue got no event: it is full." in row
    assert "blocked" not in row
    Queue.objects.filter(pk=listed.pk).update(consumers=2, ready=10_000)
    [row] = rows_of(Visitor(alice).client.get("/agents/"))
    assert f"Delivery is blocked. {delivery.FULL} 2 consumers" in row


def test_an_agent_shows_its_services_and_processors(alice, compute):
    service, _ = services.register_service(make_agent(alice, compute), "orders", "order_process")
    services.register_processor(service, "slurm", "SLURM", "23.11")
    text = text_of(Visitor(alice).client.get("/agents/"))
    assert "1 service reported by the agent" in text
    assert "orders mode order_process active" in text
    assert re.search(r"slurm SLURM 23\.11 , last run (just now|\d+ s ago)", text)


def test_a_subscription_without_a_token_says_so(alice, compute):
    token, _ = create_token(alice, "agent")
    make_subscription(alice, make_agent(alice, compute, "with"), offerings=[compute], token=token)
    page = Visitor(alice).client.get("/agents/")
    assert "no valid token" not in page.text
    assert "can't connect" not in page.text
    make_subscription(alice, make_agent(alice, compute, "without"), offerings=[compute])
    page = Visitor(alice).client.get("/agents/")
    assert ["no valid token" in row for row in rows_of(page)] == [False, True]
    assert "can't connect" in page.text


def test_names_are_escaped(alice, compute):
    compute.name = ODD
    compute.save()
    identity = make_agent(alice, compute, ODD, version=ODD[:90])
    make_subscription(alice, identity, description=ODD, offerings=[compute])
    for address in (f"/agents/?search={ODD[:8]}", f"/agents/{identity.uuid}/remove/"):
        page = Visitor(alice).client.get(address)
        assert page.status_code == 200
        assert "<script>alert" not in page.text


def test_an_agent_with_many_queues_links_to_the_rest(alice, compute):
    offerings = Offering.objects.bulk_create(Offering(name=f"Offering {number:03}") for number in range(120))
    identity = make_agent(alice, compute)
    subscription = make_subscription(alice, identity, "order", offerings)
    make_subscription(alice, identity, "resource", offerings[:3])
    page = Visitor(alice).client.get("/agents/")
    rows = rows_of(page)
    assert "and 70 more queues" in rows[50]
    assert f"?search=subscription_{subscription.uuid.hex}" in page.text
    assert rows[51].startswith("resource 3 queues")


# Access and search


def test_an_owner_sees_own_agents_and_an_operator_all(alice, bob, operator, compute):
    make_agent(alice, compute, "alice's")
    make_agent(bob, compute, "bob's")
    make_subscription(bob, description="bob's other")
    assert agents_on(Visitor(alice).client.get("/agents/")) == ["alice's"]
    assert agents_on(Visitor(bob).client.get("/agents/")) == ["bob's", "bob's other"]
    page = Visitor(operator).client.get("/agents/")
    assert agents_on(page) == ["alice's", "bob's", "bob's other"]
    assert text_of(page).count("owner bob@example.org") == 2


@pytest.mark.parametrize(
    ("search", "found"),
    [
        ("ALICE", ["one", "alone"]),
        ("storage", ["two"]),
        ("user_role", ["two"]),
        ("%", []),
        ("\0", ["one", "alone", "two"]),
        ("{offering}", ["two"]),
        ("{identity}", ["two"]),
        ("{subscription}", ["two"]),
        ("{queue}", ["two"]),
        ("{consumer}", ["one"]),
        ("{user}", ["one"]),
        ("{alone}", ["alone"]),
    ],
)  # fmt: skip
def test_an_operator_searches_by_any_name_or_id(alice, bob, operator, compute, search, found):
    storage = Offering.objects.create(name="Storage")
    consumer = make_consumer(make_agent(alice, compute, "one"))
    two = make_agent(bob, storage, "two")
    subscription = make_subscription(bob, two, "user_role", [storage])
    alone = make_subscription(alice, description="alone")
    query = search.format(
        offering=storage.uuid, identity=two.uuid.hex, subscription=subscription.rmq_username,
        queue=subscription.queues.get().queue_name, consumer=consumer.queue_name, user=consumer.rmq_username,
        alone=alone.uuid,
    )  # fmt: skip
    page = Visitor(operator).client.get("/agents/", {"search": query})
    assert agents_on(page) == found
    if not found:
        assert "No agent's name, offering or queues contain" in page.text


def test_many_agents_are_paginated(alice, compute):
    for number in range(25):
        make_agent(alice, compute, f"agent-{number:02}")
    client = Visitor(alice).client
    assert agents_on(client.get("/agents/")) == [f"agent-{number:02}" for number in range(20)]
    assert agents_on(client.get("/agents/?page=2")) == [f"agent-{number:02}" for number in range(20, 25)]


# Connections


@pytest.fixture
def online(alice, compute, broker, management):
    """Give a subscription of Alice with an open connection in ``connected``."""
    vhost = alice.uuid.hex
    subscription = make_subscription(alice, make_agent(alice, compute, "online"), offerings=[compute])
    management.create_vhost(vhost)
    management.put_user(subscription.rmq_username, "a-token")
    try:
        management.set_permissions(vhost, subscription.rmq_username, for_subscription(subscription.uuid.hex))
        connected = Amqp(url_for(broker, subscription.rmq_username, "a-token"), vhost).connection
        wait_until(lambda: management.clients(vhost))  # the list is up to five seconds old
        subscription.connected = connected
        yield subscription
        with contextlib.suppress(pika.exceptions.AMQPError):  # the broker closed it with its user
            connected.close()
    finally:
        management.delete_vhost(vhost)
        if subscription.rmq_username in {user.name for user in management.users()}:
            management.delete_user(subscription.rmq_username)


def test_without_the_broker_connections_are_unknown(alice, operator, compute, settings):
    settings.RABBITMQ_MANAGEMENT_URL = AWAY
    store_queue_row(make_subscription(alice, make_agent(alice, compute), offerings=[compute]).queues.get())
    for owner in (alice, operator):
        page = Visitor(owner).client.get("/agents/")
        assert page.status_code == 200
        [row] = rows_of(page)
        assert " 3 " in row
        assert "unknown" in row
        assert "The connections could not be listed, because the broker does not answer." in text_of(page)


# Empty pages


def test_without_an_agent_the_page_explains_registration(alice, compute, settings):
    settings.GUARDIAN_BASE_URL = "https://guardian.example.org"
    page = Visitor(alice).client.get("/agents/")
    assert "No agent has registered yet." in page.text
    assert 'href="/tokens/"' in page.text
    path, body = re.search(r"https://guardian.example.org/api/(\S+) --json '(.*?)'", html.unescape(page.text)).groups()
    answer = Program(alice).post(path, json.loads(body))
    assert (answer.status_code, answer.json()["offering"]) == (201, compute.uuid.hex)
    assert "Offerings that you may subscribe to" in page.text


def test_without_an_offering_or_access_the_page_says_to_ask_for_it(guarded):
    dora = Owner.objects.create_user("dora@example.org", vouched=True)
    page = Visitor(dora).client.get("/agents/")
    assert "Ask an operator to add you to one." in page.text
    assert "Offerings that you may subscribe to" not in page.text
    Owner.objects.update(vouched=False)
    page = Visitor(dora).client.get("/agents/")
    assert "You need access before your agent can register" in page.text
    assert "curl" not in page.text


# Removal


@pytest.mark.parametrize("what", ["agent", "subscription", "consumer"])
def test_an_agent_or_subscription_without_messages_is_removed_by_one_click(alice, compute, what):
    identity = make_agent(alice, compute)
    subscription = make_subscription(alice, identity, offerings=[compute])
    consumer = make_consumer(identity)
    store_queue_row(consumer, ready=0)
    store_queue_row(subscription.queues.get(), ready=0)
    row, address = {
        "agent": (identity, f"/agents/{identity.uuid}/remove/"),
        "subscription": (subscription, f"/agents/subscriptions/{subscription.uuid}/remove/"),
        "consumer": (consumer, f"/agents/consumers/{consumer.uuid}/remove/"),
    }[what]
    client = Visitor(alice).client
    assert address in client.get("/agents/").text
    page = client.get(address)
    assert 'name="typed"' not in page.text
    if what == "agent":
        text = text_of(page)
        assert f"Queues 2 queues {consumer.queue_name} {subscription.queues.get().queue_name}" in text
        assert f"RabbitMQ users 2 users {consumer.rmq_username} {subscription.rmq_username}" in text
        assert "Connected now 0 connections" in text
    answer = client.post(address, follow=True)
    assert answer.redirect_chain == [("/agents/", 302)]
    assert "was removed, with its queues and logins." in answer.text
    assert not type(row).objects.filter(pk=row.pk).exists()
    assert AgentIdentity.objects.exists() == (what != "agent")
    assert SubscriptionQueue.objects.exists() == (what == "consumer")
    assert client.post(address).status_code == 404


@pytest.mark.parametrize("ready", [3, None])
def test_a_removal_that_may_lose_messages_needs_the_typed_name(alice, compute, ready):
    identity = make_agent(alice, compute, "my agent")
    store_queue_row(make_subscription(alice, identity, offerings=[compute]).queues.get(), ready=ready)
    address = f"/agents/{identity.uuid}/remove/"
    client = Visitor(alice).client
    page = client.get(address)
    assert ("Messages in them 3" in text_of(page)) is (ready == 3)
    assert ("Messages in them unknown" in text_of(page)) is (ready is None)
    for typed in ({}, {"typed": ""}, {"typed": "my  agent"}):
        answer = client.post(address, typed)
        assert answer.status_code == 200
        assert 'aria-invalid="true"' in answer.text
    assert AgentIdentity.objects.exists()
    assert client.post(address, {"typed": "my agent"}).status_code == 302
    assert not AgentIdentity.objects.exists()


def test_a_removal_without_the_broker_is_finished_later(alice, compute, settings):
    settings.RABBITMQ_MANAGEMENT_URL, settings.RABBIT_URL = AWAY, "amqp://guest:guest@127.0.0.1:1"
    subscription = make_subscription(alice, make_agent(alice, compute), offerings=[compute])
    client = Visitor(alice).client
    address = f"/agents/subscriptions/{subscription.uuid}/remove/"
    page = client.get(address)
    assert page.status_code == 200
    assert "You can still remove the" in page.text
    assert "Messages in them unknown" in text_of(page)
    assert client.post(address).status_code == 200
    assert EventSubscription.objects.exists()
    answer = client.post(address, {"typed": subscription.uuid.hex}, follow=True)
    assert "as soon as the broker answers" in answer.text
    assert {removal.name for removal in Removal.objects.all()} >= {subscription.rmq_username}


def test_a_subscription_shows_its_connection_which_its_removal_closes(alice, operator, compute, online, management):
    make_subscription(alice, make_agent(alice, compute, "then offline"), offerings=[compute])
    for owner in (alice, operator):
        connected, other = rows_of(Visitor(owner).client.get("/agents/"))
        assert re.search(r"connected (just now|\d+ s ago)", connected)
        assert "not connected" not in connected
        assert "not connected" in other
    queue = online.queues.get()
    management.declare_queue(queue.vhost, queue.queue_name)
    AgentVhost.objects.create(owner=alice, name=queue.vhost, ready=True)
    address, client = f"/agents/subscriptions/{online.uuid}/remove/", Visitor(alice).client
    assert "Connected now 1 connection " in text_of(client.get(address))
    answer = client.post(address, follow=True)
    assert "was removed, with its queues and logins." in answer.text
    assert queue.queue_name not in queue_names(management, queue.vhost)
    assert online.rmq_username not in {user.name for user in management.users()}
    with pytest.raises(pika.exceptions.ConnectionClosedByBroker):
        online.connected.process_data_events(time_limit=10)


def register(owner, offering, name="agent-1"):
    """Register an agent and its queue through the API, and return its identity."""
    program = Program(owner)
    identity = program.post("agent-identities/", {"offering": offering.uuid.hex, "name": name}).json()["uuid"]
    assert program.post(f"agent-identities/{identity}/register_queue/", {}).status_code == 201
    return AgentIdentity.objects.get(uuid=identity)


@pytest.mark.parametrize("stored", [None, {"ready": None}, {"ready": 0, "state": "gone"}], ids=str)
def test_the_removal_page_queries_a_length_that_is_not_stored(agents, alice, compute, broker, stored):
    consumer = register(alice, compute).consumer
    if stored:
        store_queue_row(consumer, **stored)
    address, client = f"/agents/consumers/{consumer.uuid}/remove/", Visitor(alice).client
    assert "Messages in them 0," in text_of(client.get(address))
    amqp = Amqp(broker.amqp_url, consumer.vhost)
    amqp.publish(consumer.queue_name, 3)
    amqp.connection.close()
    assert "Messages in them 3," in text_of(client.get(address))
    assert client.post(address).status_code == 200
    assert Consumer.objects.exists()


def test_the_removal_page_queries_lengths_over_one_connection(agents, alice, compute, broker, settings):
    offerings = [compute, *(agents.offering(alice) for _ in range(4))]
    subscription = EventSubscription.objects.get(uuid=Program(alice).post("event-subscriptions/", {}).json()["uuid"])
    for offering in offerings:
        body = {"offering_uuid": offering.uuid.hex, "object_type": "order"}
        assert Program(alice).post(f"event-subscriptions/{subscription.uuid}/create_queue/", body).status_code == 201
    with Proxy.before(broker.amqp_url) as proxy:
        settings.RABBIT_URL = proxy.url(broker.amqp_url)
        page = Visitor(alice).client.get(f"/agents/subscriptions/{subscription.uuid}/remove/")
    assert "Messages in them 0," in text_of(page)
    assert proxy.connections == 1


def test_the_length_of_a_consumed_queue_is_not_known(agents, alice, compute, broker):
    consumer = register(alice, compute).consumer
    address, client = f"/agents/consumers/{consumer.uuid}/remove/", Visitor(alice).client
    amqp = Amqp(broker.amqp_url, consumer.vhost)
    with contextlib.closing(amqp.connection):
        amqp.publish(consumer.queue_name, 1)
        amqp.channel.basic_consume(consumer.queue_name, lambda *_: None)
        amqp.connection.process_data_events(time_limit=1)
        page = client.get(address)
        assert "Messages in them unknown" in text_of(page)
        assert client.post(address).status_code == 200
    assert Consumer.objects.exists()


# Skipped and rejected events


def test_page_and_api_show_skipped_and_rejected_events(alice, compute):
    queue = store_queue_row(make_consumer(make_agent(alice, compute), state="creating"))
    for _ in range(3):
        assert publishing.publish(compute, "order", {}).skipped == 1
    QueueEvent.objects.create(
        queue=queue, vhost=queue.vhost, queue_name=queue.name, kind="rejected", at=timezone.now(),
        details={"count": 1, "why": publishing.FULL},
    )  # fmt: skip
    page = text_of(Visitor(alice).client.get(f"/queues/{queue.uuid}/"))
    assert re.search(r"published \(3 events: it is still being created\) (just now|\d+ s ago) Guardian", page)
    assert "full when an event was published (1 event: it is full) " in page
    listed = Program(alice).get(f"queues/{queue.uuid}/events/").json()
    assert [(event["kind"], event["by"], event["details"]) for event in listed] == [
        ("rejected", None, {"count": 1, "why": "it is full"}),
        ("skipped", None, {"count": 3, "why": "it is still being created"}),
    ]
