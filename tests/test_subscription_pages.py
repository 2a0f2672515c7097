"""The page of agents and what they subscribed to, and taking it away there."""

import contextlib
import html
import json
import re
from datetime import UTC, datetime

import pika
import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from accounts.models import Owner
from accounts.tokens import create_token
from agents import events
from agents.models import AgentIdentity, AgentVhost, Consumer, EventSubscription, Offering, SubscriptionQueue
from core.models import Removal
from queues.models import Queue, QueueEvent
from rabbit import names
from rabbit.permissions import for_subscription
from tests.api import Program
from tests.conftest import Amqp
from tests.proxy import Proxy
from tests.toolbox import AWAY, queue_names, stored_queue, wait_until

pytestmark = pytest.mark.usefixtures("guarded")

ODD = "<script>alert(1)</script>\u202e\"'"


@pytest.fixture
def compute(alice, bob):
    offering = Offering.objects.create(name="Compute")
    offering.members.add(alice, bob)
    return offering


def signed_in(owner):
    client = Client()
    client.force_login(owner)
    return client


def make_agent(owner, offering, name="agent-1", **fields):
    return AgentIdentity.objects.create(owner=owner, offering=offering, name=name, **fields)


def make_subscription(owner, identity=None, object_type="order", offerings=(), *, token=None, state="ready", **fields):
    """Make a subscription with a queue for each of these offerings."""
    made = EventSubscription.objects.create(
        owner=owner, identity=identity, object_type=object_type if identity else "", token=token, **fields
    )
    SubscriptionQueue.objects.bulk_create(
        SubscriptionQueue(
            subscription=made, offering=offering, object_type=object_type, vhost=owner.uuid.hex, state=state,
            queue_name=names.subscription_queue(made.uuid.hex, offering.uuid.hex, object_type),
        )
        for offering in offerings
    )  # fmt: skip
    return made


def make_consumer(identity, object_types=(), *, token=None, state="ready"):
    made = Consumer(identity=identity, object_types=list(object_types), token=token, state=state)
    made.vhost, made.queue_name = identity.owner.uuid.hex, names.consumer_queue(made.uuid.hex)
    made.save()
    return made


def see(row, **fields):
    """Make the monitor's row of a registered queue."""
    given = {"registered": True, "ready": 3, "unacknowledged": 0}
    owner = Owner.objects.get(uuid=row.vhost)
    return stored_queue(row.queue_name, vhost=row.vhost, owner=owner, **{**given, **fields})


def text_of(page):
    """Return what a reader of the page sees, in one line."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page.text)).split())


def rows_of(page):
    """Return the rows of the agents' tables, as read."""
    tables = re.findall(r'<table class="cards subscriptions">(.*?)</table>', page.text, re.DOTALL)
    rows = [row for table in tables for row in re.findall(r"<tr>(.*?)</tr>", table, re.DOTALL)]
    return [
        " ".join(html.unescape(re.sub(r"<[^>]*>", " ", row)).split()) for row in rows if '<th scope="col"' not in row
    ]


def agents_on(page):
    return [html.unescape(name) for name in re.findall(r"<h2><bdi>(.*?)</bdi></h2>", page.text)]


# What is shown


def test_an_owner_sees_an_agent_its_types_its_queues_and_their_lengths(alice, compute):
    identity = make_agent(alice, compute, version="1.0.5", last_restarted=datetime(2026, 3, 4, 5, 6, tzinfo=UTC))
    storage = Offering.objects.create(name="Storage")
    subscription = make_subscription(alice, identity, "order", [compute, storage])
    queue = see(subscription.queues.get(offering=compute))
    page = signed_in(alice).get("/subscriptions/")
    assert agents_on(page) == ["agent-1"]
    text = text_of(page)
    assert "Offering Compute · version 1.0.5 · last restarted 2026-03-04 05:06 UTC" in text
    ours, theirs = rows_of(page)
    assert ours.startswith(f"order {queue.name} 3")
    assert theirs.startswith("order of Storage subscription_")
    assert f'href="/queues/{queue.uuid}/"' in page.text
    assert "not looked at yet" in theirs
    assert alice.email not in page.text.partition("<main")[2]


def test_a_consumer_shows_its_types_or_that_it_gets_all(alice, compute):
    make_consumer(make_agent(alice, compute, "all"))
    make_consumer(make_agent(alice, compute, "some"), ["order", "user_role"])
    everything, some = rows_of(signed_in(alice).get("/subscriptions/"))
    assert everything.startswith("all types consumer_")
    assert some.startswith("order , user_role consumer_")


def test_a_subscription_without_an_agent_is_shown_with_its_description(alice, compute):
    make_subscription(alice, description="By hand", offerings=[compute])
    make_subscription(alice, observable_objects=[{"object_type": "order"}, {"object_type": "resource"}, "odd"])
    page = signed_in(alice).get("/subscriptions/")
    assert "By hand" in agents_on(page)
    nothing_yet, by_hand = rows_of(page)
    assert nothing_yet.startswith("order , resource no queue yet")
    assert by_hand.startswith("order of Compute subscription_")


def test_an_agent_that_subscribed_to_nothing_says_so(alice, compute):
    make_agent(alice, compute)
    assert "It subscribed to nothing yet." in signed_in(alice).get("/subscriptions/").text


def test_a_queue_that_is_being_made_says_so_and_what_that_means(alice, compute):
    make_subscription(alice, make_agent(alice, compute), offerings=[compute], state="creating")
    page = signed_in(alice).get("/subscriptions/")
    [row] = rows_of(page)
    assert "being made" in row
    assert "Guardian makes it within six hours" in page.text


def test_what_has_lost_its_token_says_so_and_what_to_do(alice, compute):
    token, _ = create_token(alice, "agent")
    make_subscription(alice, make_agent(alice, compute, "with"), offerings=[compute], token=token)
    page = signed_in(alice).get("/subscriptions/")
    assert "its token is gone" not in page.text
    assert "can't connect" not in page.text
    make_subscription(alice, make_agent(alice, compute, "without"), offerings=[compute])
    page = signed_in(alice).get("/subscriptions/")
    assert ["its token is gone" in row for row in rows_of(page)] == [False, True]
    assert "can't connect" in page.text


def test_an_unknown_length_is_shown_as_unknown_and_one_that_is_gone_as_not_looked_at(alice, compute):
    unknown = make_subscription(alice, make_agent(alice, compute, "a"), offerings=[compute]).queues.get()
    gone = make_subscription(alice, make_agent(alice, compute, "b"), offerings=[compute]).queues.get()
    see(unknown, ready=None)
    see(gone, state="gone")
    first, second = rows_of(signed_in(alice).get("/subscriptions/"))
    assert "unknown" in first
    assert "not looked at yet" in second


def test_names_are_shown_and_never_run(alice, compute):
    compute.name = ODD
    compute.save()
    identity = make_agent(alice, compute, ODD, version=ODD[:90])
    make_subscription(alice, identity, offerings=[compute])
    make_subscription(alice, description=ODD, offerings=[compute])
    for client in (signed_in(alice), signed_in(Owner.objects.create_superuser("ops@example.org"))):
        for address in ("/subscriptions/", f"/subscriptions/?search={ODD[:8]}", *_removals(identity)):
            page = client.get(address)
            assert page.status_code == 200
            assert "<script>alert" not in page.text


def _removals(identity):
    return [f"/subscriptions/agents/{identity.uuid}/remove/"]


def test_an_agent_with_hundreds_of_queues_shows_some_and_says_where_the_rest_are(alice, compute):
    offerings = Offering.objects.bulk_create(Offering(name=f"Offering {number:03}") for number in range(120))
    identity = make_agent(alice, compute)
    subscription = make_subscription(alice, identity, "order", offerings)
    make_subscription(alice, identity, "resource", offerings[:3])
    page = signed_in(alice).get("/subscriptions/")
    rows = rows_of(page)
    assert "and 70 more queues" in rows[50]
    assert f"?search=subscription_{subscription.uuid.hex}" in page.text
    assert rows[51].startswith("resource 3 queues")


# Who sees what


def test_an_owner_sees_their_own_and_an_operator_all_with_the_owner_named(alice, bob, operator, compute):
    make_agent(alice, compute, "alice's")
    make_agent(bob, compute, "bob's")
    make_subscription(bob, description="bob's other")
    assert agents_on(signed_in(alice).get("/subscriptions/")) == ["alice's"]
    assert agents_on(signed_in(bob).get("/subscriptions/")) == ["bob's", "bob's other"]
    page = signed_in(operator).get("/subscriptions/")
    assert agents_on(page) == ["alice's", "bob's", "bob's other"]
    assert text_of(page).count("of bob@example.org") == 2


def test_whoever_is_not_signed_in_signs_in_first(client):
    answer = client.get("/subscriptions/")
    assert (answer.status_code, answer["Location"]) == (302, "/signin/?next=/subscriptions/")


@pytest.mark.parametrize(
    ("search", "found"),
    [
        ("ALICE", ["one", "alone"]),
        ("two", ["two"]),
        ("storage", ["two"]),
        ("alone", ["alone"]),
        ("user_role", ["two"]),
        ("%", []),
        ("'; --", []),
        ("\0", ["one", "alone", "two"]),
        ("x" * 1000, []),
        ("{offering}", ["two"]),
        ("{identity}", ["two"]),
        ("{subscription}", ["two"]),
        ("{queue}", ["two"]),
        ("{consumer}", ["one"]),
        ("{user}", ["one"]),
        ("{alone}", ["alone"]),
    ],
)  # fmt: skip
def test_an_operator_searches_by_whatever_is_known(alice, bob, operator, compute, search, found):
    storage = Offering.objects.create(name="Storage")
    consumer = make_consumer(make_agent(alice, compute, "one"))
    two = make_agent(bob, storage, "two")
    subscription = make_subscription(bob, two, "user_role", [storage])
    alone = make_subscription(alice, description="alone")
    told = search.format(
        offering=storage.uuid, identity=two.uuid.hex, subscription=subscription.rmq_username,
        queue=subscription.queues.get().queue_name, consumer=consumer.queue_name, user=consumer.rmq_username,
        alone=alone.uuid,
    )  # fmt: skip
    page = signed_in(operator).get("/subscriptions/", {"search": told})
    assert agents_on(page) == found
    if not found:
        assert "Nothing here has" in page.text


@pytest.mark.parametrize("page", ["0", "x", "99999999999999999999", "2"])
def test_a_page_that_is_not_there_is_no_error(alice, compute, page):
    make_agent(alice, compute)
    assert agents_on(signed_in(alice).get("/subscriptions/", {"page": page})) == ["agent-1"]


def test_many_agents_have_pages(alice, compute):
    for number in range(25):
        make_agent(alice, compute, f"agent-{number:02}")
    client = signed_in(alice)
    assert agents_on(client.get("/subscriptions/")) == [f"agent-{number:02}" for number in range(20)]
    assert agents_on(client.get("/subscriptions/?page=2")) == [f"agent-{number:02}" for number in range(20, 25)]


def test_statements_and_requests_do_not_grow_with_the_rows(alice, bob, operator, compute, settings, broker):
    def ask(owner):
        client = signed_in(owner)
        with Proxy.before(broker.management_url) as proxy:
            settings.RABBITMQ_MANAGEMENT_URL = proxy.url(broker.management_url)
            with CaptureQueriesContext(
                connection,
            ) as captured:
                assert client.get("/subscriptions/").status_code == 200
            return len(captured), proxy.requests

    def fill(owner, numbers):
        for number in numbers:
            identity = make_agent(owner, compute, f"agent-{number}")
            see(make_subscription(owner, identity, "order", [compute]).queues.get())
            see(make_subscription(owner, identity, "resource", [compute]).queues.get())
            see(make_consumer(identity))
            see(make_subscription(owner, description=f"alone {number}", offerings=[compute]).queues.get())

    fill(alice, [1])
    few = ask(alice), ask(operator)
    fill(alice, range(2, 8))
    fill(bob, range(8))
    assert (ask(alice), ask(operator)) == few
    # Alice's vhost isn't there, and no 404 is believed without a second request; operators ask for the whole broker.
    assert (few[0][1], few[1][1]) == (2, 1)
    assert max(few[0][0], few[1][0]) <= 11


# What is connected


@pytest.fixture
def online(alice, compute, broker, management):
    """Give a subscription of Alice's whose user is ``connected``, in her vhost on the broker."""
    vhost = alice.uuid.hex
    subscription = make_subscription(alice, make_agent(alice, compute, "online"), offerings=[compute])
    management.create_vhost(vhost)
    management.put_user(subscription.rmq_username, "a-token")
    try:
        management.set_permissions(vhost, subscription.rmq_username, for_subscription(subscription.uuid.hex))
        address = f"amqp://{subscription.rmq_username}:a-token@{broker.amqp_url.rpartition('@')[2]}"
        connected = Amqp(address, vhost).connection
        wait_until(lambda: management.clients(vhost))  # which lags by five seconds
        subscription.connected = connected
        yield subscription
        with contextlib.suppress(pika.exceptions.AMQPError):  # closed by the broker, with its user
            connected.close()
    finally:
        management.delete_vhost(vhost)
        if subscription.rmq_username in {user.name for user in management.users()}:
            management.delete_user(subscription.rmq_username)


def test_what_is_connected_says_so_and_since_when(alice, operator, compute, online):
    make_subscription(alice, make_agent(alice, compute, "then offline"), offerings=[compute])
    for owner in (alice, operator):
        connected, other = rows_of(signed_in(owner).get("/subscriptions/"))
        assert re.search(rf"connected since {timezone.now():%F} \d\d:\d\d UTC", connected)
        assert "not connected" not in connected
        assert "not connected" in other


def test_the_page_of_its_removal_says_how_many_are_connected(alice, online):
    page = signed_in(alice).get(f"/subscriptions/{online.uuid}/remove/")
    assert "Connected now 1 connection " in text_of(page)


def test_without_a_vhost_on_the_broker_nobody_is_connected(alice, compute):
    make_subscription(alice, make_agent(alice, compute), offerings=[compute])
    [row] = rows_of(signed_in(alice).get("/subscriptions/"))
    assert "not connected" in row


def test_with_the_broker_away_all_else_is_shown(alice, operator, compute, settings):
    settings.RABBITMQ_MANAGEMENT_URL = AWAY
    see(make_subscription(alice, make_agent(alice, compute), offerings=[compute]).queues.get())
    for owner in (alice, operator):
        page = signed_in(owner).get("/subscriptions/")
        assert page.status_code == 200
        [row] = rows_of(page)
        assert " 3 " in row
        assert "not known" in row
        assert "Who is connected could not be asked, since the broker doesn't answer." in text_of(page)


# Where there is nothing yet


def test_without_an_agent_the_page_says_how_one_registers(alice, compute, settings):
    settings.GUARDIAN_BASE_URL = "https://guardian.example.org"
    page = signed_in(alice).get("/subscriptions/")
    assert "No agent has registered yet." in page.text
    assert 'href="/tokens/"' in page.text
    path, body = re.search(r"https://guardian.example.org/api/(\S+) --json '(.*?)'", html.unescape(page.text)).groups()
    answer = Program(alice).post(path, json.loads(body))
    assert (answer.status_code, answer.json()["offering"]) == (201, compute.uuid.hex)
    assert "Offerings that you may subscribe to" in page.text


def test_without_an_offering_the_page_says_whom_to_ask(guarded):
    dora = Owner.objects.create_user("dora@example.org", vouched=True)
    page = signed_in(dora).get("/subscriptions/")
    assert "Ask an operator to make you one." in page.text
    assert "Offerings that you may subscribe to" not in page.text


def test_whom_nobody_vouched_for_is_told_so(guarded):
    dora = Owner.objects.create_user("dora@example.org")
    page = signed_in(dora).get("/subscriptions/")
    assert "as soon as somebody has vouched for you" in page.text
    assert "curl" not in page.text


def test_many_offerings_are_not_all_listed(alice, settings):
    settings.GUARDIAN_BASE_URL = "https://guardian.example.org"
    made = Offering.objects.bulk_create(Offering(name=f"Offering {number:02}") for number in range(51))
    alice.offerings.set(made)
    page = signed_in(alice).get("/subscriptions/")
    assert "Offering 49" in page.text
    assert "Offering 50" not in page.text
    assert "https://guardian.example.org/api/offerings/" in page.text


# Removing


def test_the_page_of_a_removal_says_what_goes(alice, compute):
    identity = make_agent(alice, compute)
    subscription = make_subscription(alice, identity, offerings=[compute])
    consumer = make_consumer(identity)
    see(consumer, ready=0)
    see(subscription.queues.get(), ready=0)
    page = signed_in(alice).get(f"/subscriptions/agents/{identity.uuid}/remove/")
    text = text_of(page)
    assert "Remove this agent?" in text
    assert f"Queues 2 queues {consumer.queue_name} {subscription.queues.get().queue_name}" in text
    assert f"RabbitMQ users 2 users {consumer.rmq_username} {subscription.rmq_username}" in text
    assert "Connected now 0 connections" in text
    assert 'name="typed"' not in page.text


@pytest.mark.parametrize("what", ["agent", "subscription", "consumer"])
def test_what_has_no_messages_is_removed_by_one_click(alice, compute, what):
    identity = make_agent(alice, compute)
    subscription = make_subscription(alice, identity, offerings=[compute])
    consumer = make_consumer(identity)
    see(consumer, ready=0)
    see(subscription.queues.get(), ready=0)
    row, address = {
        "agent": (identity, f"/subscriptions/agents/{identity.uuid}/remove/"),
        "subscription": (subscription, f"/subscriptions/{subscription.uuid}/remove/"),
        "consumer": (consumer, f"/subscriptions/consumers/{consumer.uuid}/remove/"),
    }[what]
    client = signed_in(alice)
    assert address in client.get("/subscriptions/").text
    answer = client.post(address, follow=True)
    assert answer.redirect_chain == [("/subscriptions/", 302)]
    assert "is gone, and what it had on the broker." in answer.text
    assert not type(row).objects.filter(pk=row.pk).exists()
    assert AgentIdentity.objects.exists() == (what != "agent")
    assert SubscriptionQueue.objects.exists() == (what == "consumer")
    assert client.post(address).status_code == 404


@pytest.mark.parametrize("ready", [3, None])
def test_where_messages_may_be_lost_the_name_is_typed_first(alice, compute, ready):
    identity = make_agent(alice, compute, "my agent")
    see(make_subscription(alice, identity, offerings=[compute]).queues.get(), ready=ready)
    address = f"/subscriptions/agents/{identity.uuid}/remove/"
    client = signed_in(alice)
    page = client.get(address)
    assert ("Messages in them 3" in text_of(page)) is (ready == 3)
    assert ("Messages in them not known" in text_of(page)) is (ready is None)
    for typed in ({}, {"typed": ""}, {"typed": "my  agent"}):
        answer = client.post(address, typed)
        assert answer.status_code == 200
        assert 'aria-invalid="true"' in answer.text
    assert AgentIdentity.objects.exists()
    assert client.post(address, {"typed": "my agent"}).status_code == 302
    assert not AgentIdentity.objects.exists()


def test_with_the_broker_away_it_is_removed_here_and_said_to_go_later(alice, compute, settings):
    settings.RABBITMQ_MANAGEMENT_URL, settings.RABBIT_URL = AWAY, "amqp://guest:guest@127.0.0.1:1"
    subscription = make_subscription(alice, make_agent(alice, compute), offerings=[compute])
    client = signed_in(alice)
    address = f"/subscriptions/{subscription.uuid}/remove/"
    page = client.get(address)
    assert page.status_code == 200
    assert "You can remove it all the same." in page.text
    assert "Messages in them not known" in text_of(page)
    assert client.post(address).status_code == 200
    assert EventSubscription.objects.exists()
    answer = client.post(address, {"typed": subscription.uuid.hex}, follow=True)
    assert "goes as soon as the broker answers" in answer.text
    assert {removal.name for removal in Removal.objects.all()} >= {subscription.rmq_username}


def test_nobody_removes_what_is_somebody_elses_but_an_operator_does(alice, bob, operator, compute):
    identity = make_agent(alice, compute)
    subscription = make_subscription(alice, identity, offerings=[compute])
    consumer = make_consumer(identity)
    see(consumer, ready=0)
    see(subscription.queues.get(), ready=0)
    addresses = [
        f"/subscriptions/{subscription.uuid}/remove/",
        f"/subscriptions/consumers/{consumer.uuid}/remove/",
        f"/subscriptions/agents/{identity.uuid}/remove/",
    ]
    for address in addresses:
        assert signed_in(bob).get(address).status_code == 404
        assert signed_in(bob).post(address).status_code == 404
    assert (AgentIdentity.objects.count(), EventSubscription.objects.count(), Consumer.objects.count()) == (1, 1, 1)
    for address in addresses:
        assert alice.email in signed_in(operator).get(address).text
        assert signed_in(operator).post(address).status_code == 302
    assert not AgentIdentity.objects.exists()


def test_what_is_removed_is_gone_from_the_broker_with_whoever_was_connected(alice, compute, online, management):
    queue = online.queues.get()
    management.declare_queue(queue.vhost, queue.queue_name)
    AgentVhost.objects.create(owner=alice, name=queue.vhost, ready=True)
    answer = signed_in(alice).post(f"/subscriptions/{online.uuid}/remove/", follow=True)
    assert "is gone, and what it had on the broker." in answer.text
    assert queue.queue_name not in queue_names(management, queue.vhost)
    assert online.rmq_username not in {user.name for user in management.users()}
    with pytest.raises(pika.exceptions.ConnectionClosedByBroker):
        online.connected.process_data_events(time_limit=10)


def register(owner, offering, name="agent-1"):
    """Introduce an agent and give it a queue, as it does itself. Return it."""
    program = Program(owner)
    identity = program.post("agent-identities/", {"offering": offering.uuid.hex, "name": name}).json()["uuid"]
    assert program.post(f"agent-identities/{identity}/register_queue/", {}).status_code == 201
    return AgentIdentity.objects.get(uuid=identity)


def test_a_length_that_no_pass_has_seen_is_asked_for(agents, alice, compute, broker):
    identity = register(alice, compute)
    consumer = identity.consumer
    address, client = f"/subscriptions/agents/{identity.uuid}/remove/", signed_in(alice)
    assert "Messages in them 0," in text_of(client.get(address))
    amqp = Amqp(broker.amqp_url, consumer.vhost)
    amqp.publish(consumer.queue_name, 3)
    amqp.connection.close()
    assert not Queue.objects.exists()
    page = client.get(address)
    assert "Messages in them 3," in text_of(page)
    assert client.post(address).status_code == 200
    assert AgentIdentity.objects.exists()
    assert client.post(address, {"typed": "agent-1"}).status_code == 302
    assert not AgentIdentity.objects.exists()


@pytest.mark.parametrize("known", [None, "gone"])
def test_a_length_that_the_last_pass_could_not_tell_is_asked_for(agents, alice, compute, known):
    consumer = register(alice, compute).consumer
    see(consumer, **({"ready": None} if known is None else {"ready": 0, "state": known}))
    address, client = f"/subscriptions/consumers/{consumer.uuid}/remove/", signed_in(alice)
    assert "Messages in them 0," in text_of(client.get(address))
    assert client.post(address).status_code == 302
    assert not Consumer.objects.exists()


def test_lengths_are_asked_for_by_one_connection(agents, alice, compute, broker, settings):
    offerings = [compute, *(agents.offering(alice) for _ in range(4))]
    subscription = EventSubscription.objects.get(uuid=Program(alice).post("event-subscriptions/", {}).json()["uuid"])
    for offering in offerings:
        body = {"offering_uuid": offering.uuid.hex, "object_type": "order"}
        assert Program(alice).post(f"event-subscriptions/{subscription.uuid}/create_queue/", body).status_code == 201
    with Proxy.before(broker.amqp_url) as proxy:
        settings.RABBIT_URL = proxy.url(broker.amqp_url)
        page = signed_in(alice).get(f"/subscriptions/{subscription.uuid}/remove/")
    assert "Messages in them 0," in text_of(page)
    assert proxy.connections == 1


def test_a_queue_that_somebody_reads_may_hold_what_was_not_acknowledged(agents, alice, compute, broker):
    consumer = register(alice, compute).consumer
    address, client = f"/subscriptions/consumers/{consumer.uuid}/remove/", signed_in(alice)
    amqp = Amqp(broker.amqp_url, consumer.vhost)
    with contextlib.closing(amqp.connection):
        amqp.publish(consumer.queue_name, 1)
        amqp.channel.basic_consume(consumer.queue_name, lambda *_: None)
        amqp.connection.process_data_events(time_limit=1)
        page = client.get(address)
        assert "Messages in them not known" in text_of(page)
        assert client.post(address).status_code == 200
    assert Consumer.objects.exists()


def test_without_any_answer_the_name_is_asked_for(agents, alice, compute, settings):
    identity = register(alice, compute)
    settings.RABBIT_URL = "amqp://guest:guest@127.0.0.1:1"
    address, client = f"/subscriptions/agents/{identity.uuid}/remove/", signed_in(alice)
    page = client.get(address)
    assert "Messages in them not known" in text_of(page)
    assert 'name="typed"' in page.text
    assert client.post(address).status_code == 200
    assert client.post(address, {"typed": "agent-1"}).status_code == 302
    assert not AgentIdentity.objects.exists()


# What did not reach a queue


def test_a_queues_page_and_the_api_tell_what_did_not_reach_it_how_often_and_why(alice, compute):
    queue = see(make_consumer(make_agent(alice, compute), state="creating"))
    for _ in range(3):
        assert events.publish(compute, "order", {}).skipped == 1
    QueueEvent.objects.create(
        queue=queue, vhost=queue.vhost, queue_name=queue.name, kind="rejected", at=timezone.now(),
        details={"count": 1, "why": events.FULL},
    )  # fmt: skip
    page = text_of(signed_in(alice).get(f"/queues/{queue.uuid}/"))
    assert "left out when an event was published (3 events: it is still being created) Guardian" in page
    assert "full when an event was published (1 event: it is full) Guardian" in page
    told = Program(alice).get(f"queues/{queue.uuid}/events/").json()
    assert [(event["kind"], event["by"], event["details"]) for event in told] == [
        ("rejected", None, {"count": 1, "why": "it is full"}),
        ("skipped", None, {"count": 3, "why": "it is still being created"}),
    ]
