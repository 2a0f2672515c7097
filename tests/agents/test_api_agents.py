"""The REST API for agents: every row of the contract, and its permissions."""

import json
import re
import uuid
from urllib.parse import quote

import pytest

from accounts.models import Owner
from agents.api.compatibility import compatibility
from agents.events import delivery
from agents.models import AgentIdentity, Consumer, EventSubscription, Offering, SubscriptionQueue
from queues.models import Queue
from tests.support.agents import make_consumer, make_subscription
from tests.support.api import Program
from tests.support.toolbox import memory_alarm, stored_queue

PATHS = ["marketplace-site-agent-identities/", "agent-identities/"]
under_both = pytest.mark.parametrize("path", PATHS)
IDENTITY_FIELDS = {
    "uuid", "url", "offering", "created_by", "name", "created", "modified", "services", "compatibility", "version",
    "dependencies", "config_file_path", "config_file_content", "last_restarted",
}  # fmt: skip
MESSAGE = uuid.UUID("8d9c5b7e-f0a1-4c5f-9e0a-4f6b6f7c8d9e")


def malformed_uuids(named):
    """Return values that Python or a database would read as this UUID or another, but are not written as one."""
    text = named.hex
    return [
        1, False, 1.0, [text], {"hex": text}, f"{{{named}}}", f"urn:uuid:{text}", f"{text[:4]}-{text[4:]}",
        f" {text}", f"{named}\n", f"{text[:31]}_", text[:31], "\N{ARABIC-INDIC DIGIT ONE}" * 32, f"0x{text[2:]}",
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


def shown_at(program, data, settings):
    return program.client.get(data["url"].removeprefix(settings.GUARDIAN_BASE_URL)).json()


# Identities


@under_both
def test_an_agent_creates_its_identity(alice, offering, settings, path):
    program = Program(alice)
    body = {
        "offering": str(offering.uuid), "name": "cellar", "version": "1.0.7", "config_file_path": "/etc/agent.yaml",
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
    assert program.get(path).json() == [data]


@under_both
def test_an_identity_is_found_by_its_exact_name_by_its_owner(alice, bob, operator, offering, path):
    for owner, name in [(alice, "cellar"), (alice, "cellar 2"), (alice, " cellar"), (bob, "cellar")]:
        AgentIdentity.objects.create(owner=owner, offering=offering, name=name)
    program = Program(alice)
    for name, found in [("cellar", 1), ("cell", 0), ("CELLAR", 0), (" cellar", 1), ("", 0), ("x" * 5000, 0)]:
        answer = program.get(path, name=name)
        assert (answer.status_code, answer["X-Result-Count"]) == (200, str(found)), name
        assert [data["name"] for data in answer.json()] == [name] * found
    assert program.get(path, name="a\0").status_code == 400
    assert program.get(path)["X-Result-Count"] == "3"
    assert Program(operator).get(path)["X-Result-Count"] == "4"
    assert Program(operator).get(path, name="cellar").json() == []


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


def test_only_the_owner_sees_and_changes_an_agents_configuration(alice, operator, offering):
    body = {"offering": offering.uuid.hex, "name": "cellar", "config_file_content": "token: secret"}
    data = Program(alice).post("agent-identities/", body).json()
    path = f"agent-identities/{data['uuid']}/"
    seen = Program(operator).get(path).json()
    assert {**seen, "config_file_content": "token: secret"} == data
    assert "secret" not in json.dumps(seen)
    for changes in ({"version": "1.0.7"}, {"config_file_content": None}, {"config_file_content": "token: mine"}):
        assert Program(operator).put(path, {**seen, **changes}).status_code == 200
        assert Program(alice).get(path).json()["config_file_content"] == "token: secret"
    assert Program(alice).put(path, {**body, "config_file_content": "a: 2"}).json()["config_file_content"] == "a: 2"


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("1.0.5", "compatible"), ("1.0.10", "compatible"), ("1.2", "compatible"), ("1.0.7rc1", "compatible"),
        ("1.0.4", "unknown"), ("2.0.0", "unknown"), ("", "unknown"), ("1", "unknown"), ("main", "unknown"),
        ("1.0.5" + "0" * 90, "unknown"), ("\u0661.\u0660.\u0665", "unknown"),
    ],
)  # fmt: skip
def test_compatibility_depends_on_the_agents_version(version, status):
    assert compatibility(version)["status"] == status


# Invalid values


@pytest.mark.parametrize(
    ("field", "largest", "refused"),
    [
        ("name", "<b>\u202e'" + "x" * 248 + " \n", ["x" * 256, "   "]),
        ("version", "1" * 100, ["1" * 101]),
        ("config_file_path", "/" * 500, ["/" * 501]),
        ("config_file_content", "é" * 32_768, ["é" * 32_769]),
        (
            "dependencies", [{"package": "x" * 255, "version": ""}] * 200,
            [[{"package": "a", "version": "1"}] * 201, [1] * 200_000, [{"package": "a\0", "version": "1"}],
             [{"package": "x" * 256, "version": "1"}]],
        ),
        ("last_restarted", None, ["0001-01-01T00:00:00+14:00"]),
    ],
)  # fmt: skip
def test_larger_than_the_largest_or_malformed_identity_fields_are_refused(alice, offering, field, largest, refused):
    body = {"offering": offering.uuid.hex, "name": "a"}
    for value in refused:
        answer = Program(alice).post("agent-identities/", {**body, field: value})
        assert (answer.status_code, set(answer.json())) == (400, {field})
        assert len(answer.content) < 20_000
    assert not AgentIdentity.objects.exists()
    answer = Program(alice).post("agent-identities/", {**body, field: largest})
    assert answer.status_code == 201, answer.text
    assert answer.json()[field] == (largest or answer.json()["created"])


def bodies_that_name(named):
    """Return the paths, fields and bodies that name an offering by this value."""
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
    names = {"identity": identity.uuid.hex, "subscription": make_subscription(alice).uuid.hex}
    program = Program(alice)
    for (path, field, known), (_, _, unknown) in zip(
        bodies_that_name(theirs.uuid.hex), bodies_that_name(uuid.uuid4().hex), strict=True
    ):
        answers = [program.post(path.format(**names), body) for body in (known, unknown)]
        assert [answer.status_code for answer in answers] == [400, 400], path
        assert set(answers[0].json()) == {field}
        assert answers[0].json() == answers[1].json()
        assert "Secret" not in answers[0].text
    assert EventSubscription.objects.count() == 1


def test_invalid_object_types_are_refused(away, alice, offering, identity):
    names = {"identity": identity.uuid.hex, "subscription": make_subscription(alice).uuid.hex}
    named = offering.uuid.hex
    program = Program(alice)
    for value in [None, 1, "", "\0", "x" * 70_000, [], {}, "Order", "order\n", "orders"]:
        for path, field, body in [
            ("agent-identities/{identity}/register_event_subscription/", "observable_object_type", value),
            ("agent-identities/{identity}/create_queue/", "object_type", value),
            ("event-subscriptions/{subscription}/create_queue/", "object_type", value),
            ("agent-identities/{identity}/register_queue/", "object_types", [value]),
            ("event-subscriptions/", "observable_objects", [{"object_type": value}]),
        ]:
            answer = program.post(path.format(**names), {"offering_uuid": named, field: body})
            assert (answer.status_code, set(answer.json())) == (400, {field}), (path, value)
    for value in (None, "order", {}, [[]]):
        answer = program.post(f"agent-identities/{identity.uuid}/register_queue/", {"object_types": value})
        assert (answer.status_code, set(answer.json())) == (400, {"object_types"}), value
    assert EventSubscription.objects.count() == 1


def test_oversized_or_malformed_subscription_fields_are_refused(away, alice):
    program = Program(alice)
    for field, value in [
        ("observable_objects", [{"object_type": "order"}] * 201),
        ("observable_objects", [1] * 200_000),
        ("observable_objects", "order"),
        ("observable_objects", [None]),
        *(
            ("observable_objects", [{"object_type": "order", "object_id": value}])
            for value in (10**30, -(2**63) - 1, 1.5, "x", None, [], {}, True)
        ),
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
    subscription = make_subscription(alice, identity, "order", [offering])
    return {
        "identity": identity.uuid.hex,
        "subscription": subscription.uuid.hex,
        "queue": subscription.queues.get().uuid.hex,
        "consumer": make_consumer(identity).uuid.hex,
    }


def test_an_operator_moves_an_identity_only_to_offerings_of_its_owner(operator, identity, offering):
    elsewhere = Offering.objects.create(name="elsewhere")
    program, path = Program(operator), f"agent-identities/{identity.uuid}/"
    refused = program.put(path, {"offering": elsewhere.uuid.hex, "name": "cellar"})
    assert (refused.status_code, set(refused.json())) == (400, {"offering"})
    changed = program.put(path, {"offering": offering.uuid.hex, "name": "attic"})
    assert (changed.status_code, changed.json()["created_by"]) == (200, identity.owner.uuid.hex)


# UUIDs


def test_a_uuid_in_a_body_is_32_hex_digits_with_or_without_dashes(agents, alice, bob, offering, identity):
    subscription = make_subscription(alice)
    wrong = malformed_uuids(offering.uuid)
    Offering.objects.create(name="One", uuid=uuid.UUID(int=1)).members.add(alice)
    Offering.objects.create(name="None", uuid=uuid.UUID(int=0)).members.add(alice)
    named, needed = {"object_type": "order"}, {"name": "cellar"}
    program, publisher = Program(alice), Program(bob)
    names = {"identity": identity.uuid.hex, "subscription": subscription.uuid.hex}
    for value in wrong:
        for path, field, body in bodies_that_name(value):
            answer = program.post(path.format(**names), body)
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


def test_a_uuid_in_a_path_or_filter_is_32_hex_digits_with_or_without_dashes(alice, offering, names):
    program, names = Program(alice), {**names, "offering": offering.uuid.hex}
    for path in [*SEEN, "offerings/{offering}/"]:
        before, name, after = re.split("[{}]", path)
        one = uuid.UUID(names[name])
        for value in (one.hex, str(one), one.hex.upper()):
            assert program.get(f"{before}{value}{after}").status_code == 200, path
        for value in malformed_uuids(one):
            assert program.get(f"{before}{quote(str(value))}{after}").status_code == 404, (path, value)
    for field, name in (("offering_uuid", "offering"), ("event_subscription_uuid", "subscription")):
        for value in (names[name], str(uuid.UUID(names[name])), names[name].upper()):
            assert len(program.get("event-subscription-queues/", **{field: value}).json()) == 1
        answer = program.get("event-subscription-queues/", **{field: names[name][:31]})
        assert (answer.status_code, set(answer.json())) == (400, {field})


# Subscriptions


def test_the_user_url_of_a_subscription_shows_its_reader_the_user(alice, operator, settings):
    Owner.objects.filter(pk=alice.pk).update(full_name="Alice")
    subscription = make_subscription(alice)
    for owner in (alice, operator):
        program = Program(owner)
        data = program.get(f"event-subscriptions/{subscription.uuid}/").json()
        user = program.client.get(data["user"].removeprefix(settings.GUARDIAN_BASE_URL)).json()
        assert (user["uuid"], user["email"]) == (data["user_uuid"], data["user_username"])
        assert (data["user_username"], data["user_full_name"]) == ("alice@example.org", "Alice")


def test_a_consumer_says_whether_it_is_read_and_why_delivery_is_blocked(alice, identity, settings):
    consumer = make_consumer(identity, state="creating")
    program = Program(alice)
    data = program.get(f"agent-consumers/{consumer.uuid}/").json()
    assert data["state"] == "creating"
    assert shown_at(program, {"url": data["agent_identity"]}, settings)["uuid"] == identity.uuid.hex
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


def test_an_event_with_an_unknown_outcome_names_the_message_id_to_repeat(agents, broker, alice, bob, offering):
    if broker.node is None:
        pytest.skip("the broker that was named can't be broken")
    identity = agents.identity(alice, offering)
    Program(alice).post(f"agent-identities/{identity.uuid}/register_queue/", {})
    path, body = f"offerings/{offering.uuid}/events/", {"object_type": "order", "payload": {}}
    with memory_alarm(broker.node):
        answer = Program(bob).post(path, {**body, "message_id": str(MESSAGE)})
    assert (answer.status_code, "Retry-After" in answer) == (503, True)
    assert answer["Content-Type"] == "application/problem+json"
    assert "outcome is unknown" in answer.json()["detail"]
    assert MESSAGE.hex in answer.json()["detail"]
