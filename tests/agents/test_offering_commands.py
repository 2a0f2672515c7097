"""The commands ``create_offering`` and ``publish_event``."""

import json
import uuid

import pytest
from django.core.management import CommandError, call_command

from accounts.models import Owner
from agents.models import EventSubscription, Offering, SubscriptionQueue
from tests.conftest import Amqp

UUID = "0123456789abcdef0123456789ABCDEF"
LARGE = 123456789012345678901234567890


def run(capsys, *arguments):
    call_command(*arguments)
    out, err = capsys.readouterr()
    assert err == ""
    return out


@pytest.fixture
def owners(db):
    return [Owner.objects.create_user(f"{name}@example.org", vouched=True) for name in ("alice", "bob")]


# create_offering


@pytest.mark.django_db
def test_create_offering_prints_only_the_uuid(capsys):
    out = run(capsys, "create_offering", "Big cluster")
    offering = Offering.objects.get()
    assert out == f"{offering.uuid.hex}\n"
    assert (offering.name, offering.members.count(), offering.publishers.count()) == ("Big cluster", 0, 0)


@pytest.mark.parametrize("given", [UUID, "01234567-89ab-cdef-0123-456789abcdef"])
def test_create_offering_takes_a_uuid_members_and_publishers(capsys, owners, given):
    alice, bob = owners
    options = ("--member", "Alice@example.org", "bob@example.org", "--publisher", "bob@example.org")
    assert run(capsys, "create_offering", "Big cluster", "--uuid", given, *options) == f"{UUID.lower()}\n"
    offering = Offering.objects.get(uuid=UUID)
    assert list(offering.members.order_by("email")) == [alice, bob]
    assert list(offering.publishers.all()) == [bob]


def test_create_offering_changes_an_existing_offering_and_keeps_its_members(capsys, owners):
    alice, bob = owners
    run(capsys, "create_offering", "Cluster", "--uuid", UUID, "--member", "alice@example.org")
    run(
        capsys, "create_offering", "Big cluster", "--uuid", UUID,
        "--member", "bob@example.org", "--member", "alice@example.org", "--publisher", "alice@example.org",
    )  # fmt: skip
    offering = Offering.objects.get()
    assert offering.name == "Big cluster"
    assert list(offering.members.order_by("email")) == [alice, bob]
    assert list(offering.publishers.all()) == [alice]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["", "--member", "alice@example.org"], "is not a valid name"),
        (["x" * 151], "150 are allowed"),
        (["Cluster", "--uuid", ""], "'' is not a UUID"),
        (["Cluster", "--member", "alice@example.org", "nobody@example.org"], "no owner 'nobody@example.org'"),
        (["Cluster", "--publisher", "nobody@example.org"], "no owner 'nobody@example.org'"),
        (["Cluster", "--publisher", "carol@example.org"], "carol@example.org has no access to the broker"),
        (["Cluster", "--member", "\udcff@x"], "'.udcff@x' is not a valid address: it is not UTF-8"),
        (["\udcff"], "'.udcff' is not a valid name"),
        (["Cluster", "--member", "dave@example.org"], "dave@example.org is deactivated"),
    ],
)
def test_create_offering_names_an_invalid_value_and_creates_nothing(owners, arguments, says):
    Owner.objects.create_user("carol@example.org")
    Owner.objects.create_user("dave@example.org", vouched=True, is_active=False)
    with pytest.raises(CommandError, match=says):
        call_command("create_offering", *arguments)
    assert not Offering.objects.exists()


def test_a_refused_change_of_an_offering_changes_nothing(capsys, owners):
    run(capsys, "create_offering", "Cluster", "--uuid", UUID)
    with pytest.raises(CommandError):
        call_command(
            "create_offering", "Other", "--uuid", UUID, "--member", "alice@example.org", "--publisher", "x@example.org"
        )
    assert (Offering.objects.get().name, Offering.objects.get().members.count()) == ("Cluster", 0)


# publish_event


@pytest.fixture
def offering(guarded, management):
    """Give an offering with one queue for orders."""
    owner = Owner.objects.create_user("alice@example.org", vouched=True)
    made = Offering.objects.create(name="Big cluster")
    made.members.add(owner)
    subscription = EventSubscription.objects.create(owner=owner, object_type="order")
    management.declare_queue(guarded, "orders")
    SubscriptionQueue.objects.create(
        subscription=subscription, offering=made, object_type="order", vhost=guarded, queue_name="orders", state="ready"
    )
    return made


def test_publish_event_finds_an_offering_by_uuid_or_name_and_prints_counts(capsys, offering, broker, guarded):
    ids = []
    for name in (offering.uuid.hex, str(offering.uuid), "Big cluster"):
        out = run(capsys, "publish_event", name, "order", f'{{"order_uuid": "1", "big": {LARGE}}}')
        counts, _, id_ = out.rstrip(".\n").rpartition(" ")
        assert counts == "1 delivered, 0 skipped, 0 rejected as full, 0 unreachable, 0 gone; the message id is"
        ids.append(uuid.UUID(id_).hex)
    amqp = Amqp(broker.amqp_url, guarded)
    for id_ in ids:
        _, properties, body = amqp.channel.basic_get("orders", auto_ack=True)
        assert properties.message_id == id_
        assert (json.loads(body)["order_uuid"], json.loads(body)["big"]) == ("1", LARGE)
    amqp.connection.close()


def test_publish_event_finds_an_offering_whose_name_is_a_uuid(capsys, offering):
    Offering.objects.filter(pk=offering.pk).update(name=UUID)
    assert run(capsys, "publish_event", UUID, "order", "{}").startswith("1 delivered")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["Small cluster", "order", "{}"], "no offering 'Small cluster'"),
        (["\udcff", "order", "{}"], "'.udcff' is not a valid offering: it is not UTF-8"),
        (["Big cluster", "order", '{"\udcff": 1}'], "is not valid JSON"),
        (["Big cluster", "order", f'{{"a": {"1" * 5000}}}'], "is not valid JSON"),
        (["Big cluster", "orders", "{}"], "no such object type. Use one of: call,"),
        (["Big cluster", "order", "[]"], "must be a JSON object"),
    ],
)
def test_publish_event_names_an_invalid_value(offering, arguments, says):
    with pytest.raises(CommandError, match=says) as raised:
        call_command("publish_event", *arguments)
    assert raised.value.returncode == 1


def test_publish_event_asks_for_the_uuid_if_a_name_is_ambiguous(offering):
    Offering.objects.create(name="Big cluster")
    with pytest.raises(CommandError, match="give the UUID of one"):
        call_command("publish_event", "Big cluster", "order", "{}")


def test_publish_event_without_the_broker_exits_with_1_and_hides_the_password(offering, settings):
    settings.RABBIT_URL = "amqp://someone:sekret-word@127.0.0.1:1"
    with pytest.raises(CommandError, match="can't connect") as raised:
        call_command("publish_event", "Big cluster", "order", "{}")
    assert raised.value.returncode == 1
    assert "sekret-word" not in str(raised.value)
