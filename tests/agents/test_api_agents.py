"""The REST API for agents: every row of the contract, and its permissions."""

import json
import random
import re
import threading
import time
import uuid
from collections import Counter
from urllib.parse import quote

import pytest
from django.db import connection

from accounts.models import Owner
from agents.api.compatibility import compatibility
from agents.events import delivery
from agents.models import AgentIdentity, Consumer, EventSubscription, Offering, SubscriptionQueue
from queues.models import Queue
from tests.support.api import Program
from tests.support.toolbox import memory_alarm, stored_queue, wait_until

PATHS = ["marketplace-site-agent-identities/", "agent-identities/"]
under_both = pytest.mark.parametrize("path", PATHS)
IDENTITY_FIELDS = {
    "uuid", "url", "offering", "created_by", "name", "created", "modified", "services", "compatibility", "version",
    "dependencies", "config_file_path", "config_file_content", "last_restarted",
}  # fmt: skip
SUBSCRIPTION_FIELDS = {
    "uuid", "url", "user", "user_uuid", "user_username", "user_full_name", "created", "modified", "source_ip",
    "description", "observable_objects",
}  # fmt: skip
QUEUE_FIELDS = {
    "uuid", "url", "event_subscription", "event_subscription_uuid", "offering_uuid", "object_type", "queue_name",
    "vhost", "created",
}  # fmt: skip
CONSUMER_FIELDS = {
    "uuid", "url", "agent_identity", "agent_identity_uuid", "offering_uuid", "rmq_username", "queue_name", "vhost",
    "observable_object_types", "state", "consumers", "delivery_blocked_reason", "last_delivered_at", "last_error",
    "last_error_at", "created",
}  # fmt: skip
MESSAGE = uuid.UUID("8d9c5b7e-f0a1-4c5f-9e0a-4f6b6f7c8d9e")
JUNK = [None, True, 0, -1, 10**30, 1.5, "", " ", "\0", "x" * 70_000, [], [[]], {}, {"a": []}, ["\0"], [None], [{}]]


def malformed_uuids(named):
    """Return values that Python or a database would read as this UUID or another, but are not written as one."""
    text = named.hex
    return [
        1, True, False, 0, 1.0, [text], {"hex": text}, f"{{{named}}}", f"urn:uuid:{named}", f"urn:uuid:{text}",
        f"{text[:4]}-{text[4:]}", f"{text}-", f" {text}", f"{text}\n", f"{named}\n", f"{text[:31]}_", text[:31],
        str(named).replace("-", "", 1), "\N{ARABIC-INDIC DIGIT ONE}" * 32, f"0x{text[2:]}",
    ]  # fmt: skip


@pytest.fixture
def offering(alice, bob):
    created = Offering.objects.create(name="Cluster")
    created.members.add(alice)
    created.publishers.add(bob)
    return created


@pytest.fixture
def identity(alice, offering):
    return AgentIdentity.objects.create(owner=alice, offering=offering, name="cellar", version="1.0.7")


def subscription_of(owner, **facts):
    return EventSubscription.objects.create(owner=owner, **facts)


def queue_of(subscription, offering, object_type="order"):
    hexes = (subscription.uuid.hex, offering.uuid.hex)
    return SubscriptionQueue.objects.create(
        subscription=subscription, offering=offering, object_type=object_type, vhost=subscription.owner.uuid.hex,
        queue_name="subscription_{}_offering_{}_{}".format(*hexes, object_type), state="ready",
    )  # fmt: skip


def consumer_of(identity, **facts):
    created = uuid.uuid4()
    return Consumer.objects.create(
        uuid=created, identity=identity, vhost=identity.owner.uuid.hex, queue_name=f"consumer_{created.hex}", **facts
    )


def shown_at(program, data, settings):
    return program.client.get(data["url"].removeprefix(settings.GUARDIAN_BASE_URL)).json()


# Identities


@under_both
@pytest.mark.parametrize("spelling", [lambda offering: offering.uuid.hex, lambda offering: str(offering.uuid)])
def test_an_agent_creates_its_identity(alice, offering, settings, path, spelling):
    program = Program(alice)
    body = {
        "offering": spelling(offering), "name": "cellar", "version": "1.0.7", "config_file_path": "/etc/agent.yaml",
        "dependencies": [{"package": "waldur-api-client", "version": "8.1.2"}], "config_file_content": " secret: a\n",
        "last_restarted": "2026-01-05T12:00:00", "of no field": [1],
    }  # fmt: skip
    answer = program.post(path, body)
    data = answer.json()
    assert answer.status_code == 201, answer.text
    assert set(data) == IDENTITY_FIELDS
    for name in ("name", "version", "config_file_path", "dependencies", "config_file_content"):
        assert data[name] == body[name]
    assert (data["offering"], data["created_by"]) == (offering.uuid.hex, alice.uuid.hex)
    assert (data["services"], data["compatibility"]["status"]) == ([], "compatible")
    assert data["last_restarted"] == "2026-01-05T12:00:00Z"
    assert data["url"] == answer["Location"]
    assert shown_at(program, data, settings) == data
    identity = AgentIdentity.objects.get()
    assert data["uuid"] == identity.uuid.hex
    assert "secret" not in identity.sealed_config
    for written in (identity.uuid.hex, str(identity.uuid), str(identity.uuid).upper()):
        assert program.get(f"{path}{written}/").json() == data
    assert program.get(path).json() == [data]


@under_both
def test_an_identity_is_found_by_its_exact_name(alice, bob, offering, path):
    for owner, name in [(alice, "cellar"), (alice, "cellar 2"), (alice, " cellar"), (bob, "cellar")]:
        AgentIdentity.objects.create(owner=owner, offering=offering, name=name)
    program = Program(alice)
    for name, found in [("cellar", 1), ("cell", 0), ("CELLAR", 0), (" cellar", 1), ("", 0), ("x" * 5000, 0)]:
        answer = program.get(path, name=name)
        assert (answer.status_code, answer["X-Result-Count"]) == (200, str(found)), name
        assert [data["name"] for data in answer.json()] == [name] * found
    assert program.get(path, name="a\0").status_code == 400
    assert program.get(path)["X-Result-Count"] == "3"


def test_a_name_filter_finds_only_the_operators_own_identities(operator, identity):
    program = Program(operator)
    assert program.get("agent-identities/").json()[0]["name"] == "cellar"
    assert program.get("agent-identities/", name="cellar").json() == []


@pytest.mark.django_db(transaction=True)
def test_a_second_identity_of_the_same_name_is_refused(alice, offering, identity):
    answer = Program(alice).post("agent-identities/", {"offering": offering.uuid.hex, "name": identity.name})
    assert (answer.status_code, set(answer.json())) == (400, {"name"})
    other = Offering.objects.create(name="another")
    other.members.add(alice)
    same_name = {"offering": other.uuid.hex, "name": identity.name}
    assert Program(alice).post("agent-identities/", same_name).status_code == 201
    answer = Program(alice).put(f"agent-identities/{identity.uuid}/", same_name)
    assert (answer.status_code, set(answer.json())) == (400, {"name"})


@under_both
def test_an_agent_updates_its_identity_and_omitted_fields_stay(alice, offering, path):
    program = Program(alice)
    needed = {"offering": offering.uuid.hex, "name": "cellar"}
    data = program.post(path, {
        **needed, "version": "1.0.5", "config_file_content": "a: 1", "config_file_path": "/etc/a",
        "dependencies": [{"package": "a", "version": "1"}], "last_restarted": "2026-01-05T12:00:00+02:00",
    }).json()  # fmt: skip
    place = f"{path}{data['uuid']}/"
    answer = program.put(place, {**needed, "version": "1.0.7"})
    assert answer.status_code == 200
    changed = answer.json()
    assert {**changed, "modified": None} == {**data, "modified": None, "version": "1.0.7"}
    assert changed["modified"] > data["modified"]
    assert changed["last_restarted"] == "2026-01-05T10:00:00Z"
    emptied = program.put(place, {**needed, "version": None, "config_file_content": "", "dependencies": []}).json()
    assert (emptied["version"], emptied["config_file_content"], emptied["dependencies"]) == ("", "", [])
    assert emptied["config_file_path"] == "/etc/a"
    assert program.put(place, {**needed, "name": "attic"}).json()["name"] == "attic"
    for missing in needed:
        answer = program.put(place, {name: value for name, value in needed.items() if name != missing})
        assert (answer.status_code, set(answer.json())) == (400, {missing})
    assert program.patch(place, needed).status_code == 405


def test_only_the_owner_sees_an_agents_configuration(alice, operator, offering):
    body = {"offering": offering.uuid.hex, "name": "cellar", "config_file_content": "token: secret"}
    data = Program(alice).post("agent-identities/", body).json()
    assert data["config_file_content"] == "token: secret"
    seen = Program(operator).get(f"agent-identities/{data['uuid']}/").json()
    assert {**seen, "config_file_content": "token: secret"} == data
    assert "secret" not in json.dumps(seen)


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("1.0.5", "compatible"), ("1.0.7", "compatible"), ("1.0.10", "compatible"), ("1.2", "compatible"),
        ("1.0.7rc1", "compatible"), ("1.0.4", "unknown"), ("0.9.9", "unknown"), ("2.0.0", "unknown"), ("", "unknown"),
        ("1", "unknown"), ("main", "unknown"), ("1.0.5" + "0" * 90, "unknown"), ("\u0661.\u0660.\u0665", "unknown"),
    ],
)  # fmt: skip
def test_compatibility_depends_on_the_agents_version(version, status):
    assert compatibility(version).status == status
    assert compatibility(version).message.endswith(".")


# Invalid values


@pytest.mark.parametrize("field", ["offering", "name", "version", "dependencies", "config_file_path",
                                   "config_file_content", "last_restarted"])  # fmt: skip
def test_strange_values_of_identity_fields_are_accepted_or_refused(alice, offering, field):
    program = Program(alice)
    for value in JUNK:
        answer = program.post("agent-identities/", {"offering": offering.uuid.hex, "name": "cellar", field: value})
        assert answer.status_code in (201, 400), (value, answer.text)
        if answer.status_code == 400:
            assert set(answer.json()) == {field}, value
        AgentIdentity.objects.all().delete()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "x" * 256),
        ("name", "   "),
        ("version", "1" * 101),
        ("config_file_path", "/" * 501),
        ("config_file_content", "é" * 32_769),
        ("dependencies", [{"package": "a", "version": "1"}] * 201),
        ("dependencies", [1] * 200_000),
        ("dependencies", [{"package": "a"}]),
        ("dependencies", [{"package": "a\0", "version": "1"}]),
        ("dependencies", [{"package": "x" * 256, "version": "1"}]),
        ("dependencies", {"package": "a", "version": "1"}),
        ("last_restarted", "yesterday"),
        ("last_restarted", "0001-01-01T00:00:00+14:00"),
        ("last_restarted", 1767614400),
    ],
)
def test_too_large_or_malformed_identity_fields_are_refused(alice, offering, field, value):
    answer = Program(alice).post("agent-identities/", {"offering": offering.uuid.hex, "name": "a", field: value})
    assert (answer.status_code, set(answer.json())) == (400, {field})
    assert len(answer.content) < 20_000
    assert not AgentIdentity.objects.exists()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "x" * 255),
        ("name", "<b>\u202e' \n"),
        ("version", "1" * 100),
        ("config_file_path", "/" * 500),
        ("config_file_content", "é" * 32_768),
        ("dependencies", [{"package": "x" * 255, "version": ""}] * 200),
        ("last_restarted", None),
    ],
)
def test_the_largest_valid_identity_fields_are_accepted(alice, offering, field, value):
    answer = Program(alice).post("agent-identities/", {"offering": offering.uuid.hex, "name": "a", field: value})
    assert answer.status_code == 201, answer.text
    assert answer.json()[field] == (value or answer.json()["created"])


def bodies_that_name(offering):
    """Return the paths, fields and bodies that name this offering."""
    named = offering if isinstance(offering, str) else offering.uuid.hex
    queue = {"offering_uuid": named, "object_type": "order"}
    return [
        ("agent-identities/", "offering", {"offering": named, "name": "other"}),
        ("agent-identities/{identity}/create_queue/", "offering_uuid", queue),
        ("event-subscriptions/{subscription}/create_queue/", "offering_uuid", queue),
        (
            "event-subscriptions/",
            "observable_objects",
            {"observable_objects": [{"object_type": "order", "offering_uuid": named}]},
        ),
    ]


def test_an_unknown_offering_and_one_of_others_get_the_same_error(away, alice, bob, identity):
    theirs = Offering.objects.create(name="Secret")
    theirs.members.add(bob)
    theirs.publishers.add(alice)  # a publisher may not subscribe
    names = {"identity": identity.uuid.hex, "subscription": subscription_of(alice).uuid.hex}
    program = Program(alice)
    for (path, field, known), (_, _, unknown) in zip(
        bodies_that_name(theirs), bodies_that_name(uuid.uuid4().hex), strict=True
    ):
        answers = [program.post(path.format(**names), body) for body in (known, unknown)]
        assert [answer.status_code for answer in answers] == [400, 400], path
        assert set(answers[0].json()) == {field}
        assert answers[0].json() == answers[1].json()
        assert "Secret" not in answers[0].text
    assert EventSubscription.objects.count() == 1


def test_invalid_object_types_are_refused(away, alice, offering, identity):
    names = {"identity": identity.uuid.hex, "subscription": subscription_of(alice).uuid.hex}
    named = offering.uuid.hex
    program = Program(alice)
    for value in [*(junk for junk in JUNK if junk != []), "Order", "order\n", "orders", []]:
        for path, field, body in [
            ("agent-identities/{identity}/register_event_subscription/", "observable_object_type", value),
            ("agent-identities/{identity}/create_queue/", "object_type", value),
            ("event-subscriptions/{subscription}/create_queue/", "object_type", value),
            ("agent-identities/{identity}/register_queue/", "object_types", [value]),
            ("event-subscriptions/", "observable_objects", [{"object_type": value}]),
        ]:
            answer = program.post(path.format(**names), {"offering_uuid": named, field: body})
            assert (answer.status_code, set(answer.json())) == (400, {field}), (path, value)
    assert EventSubscription.objects.count() == 1


@pytest.mark.parametrize("value", [junk for junk in JUNK if junk != []])
def test_the_object_types_of_a_consumer_must_be_a_list(away, alice, identity, value):
    answer = Program(alice).post(f"agent-identities/{identity.uuid}/register_queue/", {"object_types": value})
    assert (answer.status_code, set(answer.json())) == (400, {"object_types"})


@pytest.mark.parametrize("junk", [10**30, -(2**63) - 1, 1.5, "x", None, [], {}, True])
def test_invalid_object_ids_are_refused(away, alice, junk):
    body = {"observable_objects": [{"object_type": "order"}, {"object_type": "order", "object_id": junk}]}
    answer = Program(alice).post("event-subscriptions/", body)
    assert (answer.status_code, set(answer.json())) == (400, {"observable_objects"})
    assert set(answer.json()["observable_objects"]) == {"1"}


def test_oversized_or_malformed_subscription_fields_are_refused(away, alice):
    program = Program(alice)
    for field, value in [
        ("observable_objects", [{"object_type": "order"}] * 201),
        ("observable_objects", [1] * 200_000),
        ("observable_objects", "order"),
        ("observable_objects", [None]),
        ("description", "x" * 501),
        ("description", "\0"),
        ("description", []),
    ]:
        answer = program.post("event-subscriptions/", {field: value})
        assert (answer.status_code, set(answer.json())) == (400, {field}), str(value)[:20]


# Permissions


SEEN = ["agent-identities/{identity}/", "marketplace-site-agent-identities/{identity}/",
        "event-subscriptions/{subscription}/", "event-subscription-queues/{queue}/",
        "agent-consumers/{consumer}/"]  # fmt: skip


@pytest.fixture
def names(alice, offering, identity):
    """Return the UUID of one row of each kind, all Alice's."""
    subscription = subscription_of(alice, identity=identity, object_type="order")
    return {
        "identity": identity.uuid.hex,
        "subscription": subscription.uuid.hex,
        "queue": queue_of(subscription, offering).uuid.hex,
        "consumer": consumer_of(identity).uuid.hex,
    }


def test_lists_show_registrations_to_their_owner_and_operators_only(alice, bob, operator, names):
    for path in SEEN:
        everything = path.partition("/")[0] + "/"
        for owner, count in [(alice, "1"), (operator, "1"), (bob, "0")]:
            assert Program(owner).get(everything)["X-Result-Count"] == count, (path, owner)


def test_a_registration_without_the_broker_answers_503_and_leaves_nothing(away, alice, offering, names):
    program, body = Program(alice), {"object_type": "call", "offering_uuid": offering.uuid.hex}
    for path in ("agent-identities/{identity}/create_queue/", "event-subscriptions/{subscription}/create_queue/"):
        answer = program.post(path.format(**names), body)
        assert (answer.status_code, "Retry-After" in answer) == (503, True)
    assert (EventSubscription.objects.count(), SubscriptionQueue.objects.count()) == (1, 1)


def test_an_operator_moves_an_identity_only_to_offerings_of_its_owner(operator, identity, offering):
    elsewhere = Offering.objects.create(name="elsewhere")
    program, path = Program(operator), f"agent-identities/{identity.uuid}/"
    refused = program.put(path, {"offering": elsewhere.uuid.hex, "name": "cellar"})
    assert (refused.status_code, set(refused.json())) == (400, {"offering"})
    changed = program.put(path, {"offering": offering.uuid.hex, "name": "attic"})
    assert (changed.status_code, changed.json()["created_by"]) == (200, identity.owner.uuid.hex)


def test_an_operators_update_keeps_the_owners_configuration(alice, operator, offering):
    body = {"offering": offering.uuid.hex, "name": "cellar", "config_file_content": "token: secret"}
    path = f"agent-identities/{Program(alice).post('agent-identities/', body).json()['uuid']}/"
    for changes in ({"version": "1.0.7"}, {"config_file_content": None}, {"config_file_content": "token: mine"}):
        seen = Program(operator).get(path).json()
        assert Program(operator).put(path, {**seen, **changes}).status_code == 200
        assert Program(alice).get(path).json()["config_file_content"] == "token: secret"
    assert Program(alice).get(path).json()["version"] == "1.0.7"
    assert Program(alice).put(path, {**body, "config_file_content": "a: 2"}).json()["config_file_content"] == "a: 2"


# UUIDs


def test_a_uuid_in_a_body_is_32_hex_digits_with_or_without_dashes(agents, alice, bob, offering, identity):
    subscription = subscription_of(alice)
    wrong = malformed_uuids(offering.uuid)
    Offering.objects.create(name="One", uuid=uuid.UUID(int=1)).members.add(alice)
    Offering.objects.create(name="None", uuid=uuid.UUID(int=0)).members.add(alice)
    named, needed = {"object_type": "order"}, {"name": "cellar"}
    program, publisher = Program(alice), Program(bob)
    for value in wrong:
        for method, path, field, body in [
            ("POST", "agent-identities/", "offering", needed | {"offering": value}),
            ("PUT", f"agent-identities/{identity.uuid.hex}/", "offering", needed | {"offering": value}),
            ("POST", f"agent-identities/{identity.uuid.hex}/create_queue/", "offering_uuid",
             named | {"offering_uuid": value}),
            ("POST", f"event-subscriptions/{subscription.uuid.hex}/create_queue/", "offering_uuid",
             named | {"offering_uuid": value}),
            ("POST", "event-subscriptions/", "observable_objects",
             {"observable_objects": [named | {"offering_uuid": value}]}),
        ]:  # fmt: skip
            answer = program.send(method, path, body)
            assert (answer.status_code, set(answer.json())) == (400, {field}), (path, value, answer.text)
        event = {**named, "payload": {}, "message_id": value}
        answer = publisher.post(f"offerings/{offering.uuid.hex}/events/", event)
        assert (answer.status_code, set(answer.json())) == (400, {"message_id"}), (value, answer.text)
    for value in (offering.uuid.hex, str(offering.uuid), offering.uuid.hex.upper(), str(offering.uuid).upper()):
        data = program.put(f"agent-identities/{identity.uuid.hex}/", needed | {"offering": value})
        assert (data.status_code, data.json()["offering"]) == (200, offering.uuid.hex)
        body = {"observable_objects": [named | {"offering_uuid": value}]}
        created = program.post("event-subscriptions/", body).json()
        assert created["observable_objects"] == [{"object_type": "order", "offering_uuid": offering.uuid.hex}]


def test_a_uuid_in_a_path_is_32_hex_digits_with_or_without_dashes(alice, offering, names):
    program, names = Program(alice), {**names, "offering": offering.uuid.hex}
    for path in [*SEEN, "offerings/{offering}/"]:
        before, name, after = re.split("[{}]", path)
        one = uuid.UUID(names[name])
        for value in (one.hex, str(one), one.hex.upper()):
            assert program.get(f"{before}{value}{after}").status_code == 200, path
        for value in malformed_uuids(one):
            assert program.get(f"{before}{quote(str(value))}{after}").status_code == 404, (path, value)
            assert program.delete(f"{before}{quote(str(value))}{after}").status_code in (404, 405), (path, value)


def test_a_uuid_in_a_filter_is_32_hex_digits_with_or_without_dashes(alice, offering, names):
    program, names = Program(alice), {**names, "offering": offering.uuid.hex}
    for field, name in (("offering_uuid", "offering"), ("event_subscription_uuid", "subscription")):
        one = uuid.UUID(names[name])
        for value in (one.hex, str(one), one.hex.upper()):
            assert len(program.get("event-subscription-queues/", **{field: value}).json()) == 1
        for value in malformed_uuids(one):
            answer = program.get("event-subscription-queues/", **{field: str(value)})
            assert (answer.status_code, set(answer.json())) == (400, {field}), value


# Subscriptions


def test_the_user_url_of_a_subscription_shows_its_reader_the_user(alice, operator, settings):
    Owner.objects.filter(pk=alice.pk).update(full_name="Alice")
    subscription = subscription_of(alice)
    for owner in (alice, operator):
        program = Program(owner)
        data = program.get(f"event-subscriptions/{subscription.uuid}/").json()
        user = program.client.get(data["user"].removeprefix(settings.GUARDIAN_BASE_URL)).json()
        assert (user["uuid"], user["email"]) == (data["user_uuid"], data["user_username"])
        assert (data["user_username"], data["user_full_name"]) == ("alice@example.org", "Alice")


def test_subscription_queues_are_filtered(alice, offering):
    other = Offering.objects.create(name="another")
    first, second = subscription_of(alice), subscription_of(alice)
    queue_of(first, offering)
    queue_of(first, other, "resource")
    queue_of(second, other)
    program = Program(alice)

    def count(**query):
        return program.get("event-subscription-queues/", **query)["X-Result-Count"]

    assert count() == "3"
    for written in (first.uuid.hex, str(first.uuid)):
        assert count(event_subscription_uuid=written) == "2"
    assert count(offering_uuid=other.uuid.hex) == "2"
    assert count(object_type="order") == "2"
    assert count(object_type="order", offering_uuid=other.uuid.hex) == "1"
    assert count(object_type="proposal") == count(offering_uuid=uuid.uuid4().hex) == "0"


def test_a_consumer_is_shown_with_all_its_fields(alice, identity, settings):
    consumer = consumer_of(identity, object_types=["order"])
    data = Program(alice).get(f"agent-consumers/{consumer.uuid}/").json()
    assert set(data) == CONSUMER_FIELDS
    assert (data["agent_identity_uuid"], data["offering_uuid"]) == (identity.uuid.hex, identity.offering.uuid.hex)
    assert (data["observable_object_types"], data["state"]) == (["order"], "creating")
    assert shown_at(Program(alice), data, settings) == data
    assert shown_at(Program(alice), {"url": data["agent_identity"]}, settings)["uuid"] == identity.uuid.hex


def test_a_consumer_says_whether_it_is_read_and_why_delivery_is_blocked(alice, identity):
    consumer = consumer_of(identity)
    program = Program(alice)
    figures = {"consumers": 2, "ready": 10_000, "unacknowledged": 0}
    listed = stored_queue(consumer.queue_name, vhost=consumer.vhost, **figures)

    def shown():
        found = program.get(f"agent-consumers/{consumer.uuid}/").json()
        return found["consumers"], found["delivery_blocked_reason"]

    assert shown() == (2, delivery.NOT_ON_BROKER)
    Consumer.objects.update(state="ready")
    assert shown() == (2, delivery.FULL)
    Queue.objects.filter(pk=listed.pk).update(ready=None)
    assert shown() == (2, delivery.NO_LENGTH)
    Queue.objects.filter(pk=listed.pk).update(ready=9_999)
    assert shown() == (2, delivery.LOGIN_REFUSED)
    Consumer.objects.update(token=alice.auth_token_set.get())
    assert shown() == (2, None)
    identity.offering.members.clear()
    assert shown() == (2, delivery.NOT_ALLOWED)
    Queue.objects.all().delete()
    assert shown()[0] is None


# On the broker


@under_both
def test_the_older_path_creates_a_missing_subscription(agents, alice, identity, offering, path):
    program = Program(alice)
    body = {"offering_uuid": str(offering.uuid), "object_type": "user_role"}
    answers = [program.post(f"{path}{identity.uuid.hex}/create_queue/", body) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [201, 200], answers[0].text
    assert answers[0].json() == answers[1].json()
    subscription = EventSubscription.objects.get()
    assert (subscription.identity, subscription.object_type) == (identity, "user_role")
    assert answers[0].json()["event_subscription_uuid"] == subscription.uuid.hex


def test_a_subscription_without_an_identity_has_queues_of_any_type(agents, alice, offering, settings):
    program = Program(alice)
    observed = [
        {"object_type": "order", "object_id": 2**63 - 1},
        {"object_type": "resource", "offering_uuid": str(offering.uuid), "junk": 1},
    ]
    answer = program.post("event-subscriptions/", {"description": "mine", "observable_objects": observed})
    data = answer.json()
    assert (answer.status_code, set(data)) == (201, SUBSCRIPTION_FIELDS), answer.text
    assert data["observable_objects"] == [
        observed[0],
        {"object_type": "resource", "offering_uuid": offering.uuid.hex},
    ]
    assert answer["Location"] == data["url"]
    body = {"offering_uuid": offering.uuid.hex, "object_type": "user_ssh_key"}
    queue = program.post(f"event-subscriptions/{data['uuid']}/create_queue/", body)
    assert (queue.status_code, set(queue.json())) == (201, QUEUE_FIELDS)
    assert shown_at(program, queue.json(), settings) == queue.json()
    assert program.delete(f"event-subscriptions/{data['uuid']}/").status_code == 204
    assert not SubscriptionQueue.objects.exists()


@pytest.mark.parametrize(("forwarded", "recorded"), [("fe80::1%eth0", "fe80::1"), ("unknown", None)])
def test_a_subscription_records_the_clients_address(agents, alice, settings, forwarded, recorded):
    settings.ALLAUTH_TRUSTED_PROXY_COUNT = 1
    program = Program(alice)
    program.client.defaults["HTTP_X_FORWARDED_FOR"] = forwarded
    answer = program.post("event-subscriptions/", {})
    assert (answer.status_code, answer.json()["source_ip"]) == (201, recorded)


def test_a_queue_with_other_arguments_answers_409(agents, management, alice, offering):
    program = Program(alice)
    subscription = program.post("event-subscriptions/", {}).json()
    name = f"subscription_{subscription['uuid']}_offering_{offering.uuid.hex}_order"
    management.declare_queue(alice.uuid.hex, name, {"x-queue-type": "quorum"})
    body = {"offering_uuid": offering.uuid.hex, "object_type": "order"}
    answer = program.post(f"event-subscriptions/{subscription['uuid']}/create_queue/", body)
    assert answer.status_code == 409
    assert answer["Content-Type"] == "application/problem+json"
    assert "quorum" in answer.json()["detail"]
    assert agents.queues(alice.uuid.hex)[name] == {"x-queue-type": "quorum"}
    assert not SubscriptionQueue.objects.exists()


# Offerings


def test_members_publishers_and_operators_see_an_offering(alice, bob, operator, offering, settings):
    fields = {"uuid", "url", "name", "may_subscribe", "may_publish", "members", "publishers"}
    for owner, subscribes, publishes in [(alice, True, False), (bob, False, True), (operator, True, True)]:
        program = Program(owner)
        [data] = program.get("offerings/").json()
        assert (data["may_subscribe"], data["may_publish"]) == (subscribes, publishes)
        assert (data["uuid"], data["name"]) == (offering.uuid.hex, "Cluster")
        assert shown_at(program, data, settings) == data
        assert set(data) == fields
        assert (data["members"] is None) == (data["publishers"] is None) == (owner != operator)
    assert (data["members"], data["publishers"]) == (["alice@example.org"], ["bob@example.org"])
    assert Program(Owner.objects.create_user("carol@example.org", vouched=True)).get("offerings/").json() == []


def test_an_event_is_published_to_registered_queues(agents, management, alice, bob, offering):
    program = Program(alice)
    identity = program.post("agent-identities/", {"offering": offering.uuid.hex, "name": "cellar"}).json()
    program.post(f"agent-identities/{identity['uuid']}/register_queue/", {})
    program.post(
        f"agent-identities/{identity['uuid']}/create_queue/",
        {"offering_uuid": offering.uuid.hex, "object_type": "order"},
    )
    body = {"object_type": "order", "payload": {"order_uuid": "1"}, "message_id": str(MESSAGE)}
    answer = Program(bob).post(f"offerings/{offering.uuid}/events/", body)
    assert answer.status_code == 200, answer.text
    data = answer.json()
    assert (data["message_id"], data["delivered"], data["skipped"], data["rejected"]) == (MESSAGE.hex, 2, 0, 0)
    assert Program(bob).post(f"offerings/{offering.uuid}/events/", {**body, "object_type": "call"}).json()[
        "delivered"
    ] == 1  # fmt: skip


def test_an_event_with_an_unknown_outcome_names_the_message_id_to_repeat(
    agents, broker, management, alice, bob, offering
):
    if broker.node is None:
        pytest.skip("the broker that was named can't be broken")
    identity = agents.identity(alice, offering)
    Program(alice).post(f"agent-identities/{identity.uuid}/register_queue/", {})
    path, body = f"offerings/{offering.uuid}/events/", {"object_type": "order", "payload": {}}
    with memory_alarm(broker.node):
        answer = Program(bob).post(path, {**body, "message_id": str(MESSAGE)})
    # The list of nodes lags behind, and the pass of another test would find the alarm.
    wait_until(lambda: not any(node.mem_alarm for node in management.nodes()))
    assert (answer.status_code, "Retry-After" in answer) == (503, True)
    assert answer["Content-Type"] == "application/problem+json"
    assert "outcome is unknown" in answer.json()["detail"]
    assert MESSAGE.hex in answer.json()["detail"]


@pytest.mark.parametrize("field", ["object_type", "payload", "message_id"])
def test_strange_values_of_event_fields_cause_no_server_error(away, bob, offering, field):
    for value in JUNK:
        body = {"object_type": "order", "payload": {}, field: value}
        answer = Program(bob).post(f"offerings/{offering.uuid}/events/", body)
        assert answer.status_code in (200, 400, 503), (value, answer.text)
        if answer.status_code == 400:
            assert set(answer.json()) == {field}, value


@pytest.mark.parametrize("at_least", [2, pytest.param(10, marks=pytest.mark.soak)])
def test_concurrent_registrations_and_deletions_cause_no_server_error(agents, at_least):
    owner = agents.owner()
    program = Program(owner)
    program.client.raise_request_exception = False
    offerings = [agents.offering(owner) for _ in range(3)]
    answers = Counter()
    began = time.monotonic()

    def is_over():
        """Return whether the time is up and a queue was created, which is slow on a busy machine."""
        seconds = time.monotonic() - began
        return seconds > 30 or (seconds > at_least and answers["create_queue", 201] > 0)

    def count_answer(what, answer):
        answers[what, answer.status_code] += 1
        return answer

    def register():
        found = program.get("agent-identities/").json()
        if not found:
            new = {"name": "agent", "offering": offerings[0].uuid.hex}
            found = [count_answer("identity", program.post("agent-identities/", new)).json()]
        if "uuid" not in found[0]:
            return
        agent = f"agent-identities/{found[0]['uuid']}"
        wanted = {"observable_object_type": "order"}
        subscribed = count_answer("subscribe", program.post(f"{agent}/register_event_subscription/", wanted))
        if subscribed.status_code < 300:
            for offering in offerings:
                queue = {"offering_uuid": offering.uuid.hex, "object_type": "order"}
                path = f"event-subscriptions/{subscribed.json()['uuid']}/create_queue/"
                count_answer("create_queue", program.post(path, queue))
        count_answer("register_queue", program.post(f"{agent}/register_queue/", {}))

    def remove():
        time.sleep(random.random() / 2)  # slower than a registration, which is refused if its rows are deleted
        path = random.choice(["event-subscriptions", "agent-identities", "event-subscription-queues"])
        found = program.get(f"{path}/").json()
        if found:
            count_answer("DELETE", program.delete(f"{path}/{found[0]['uuid']}/"))

    def repeat(do):
        try:
            while not is_over():
                do()
        finally:
            connection.close()

    threads = [threading.Thread(target=repeat, args=(do,)) for do in (register, remove) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    broken = {key: number for key, number in answers.items() if key[1] >= 500 and key[1] != 503}
    assert broken == {}
    assert {status for what, status in answers if what == "DELETE"} <= {204, 404}
    assert answers["DELETE", 204]
    assert answers["create_queue", 201]
