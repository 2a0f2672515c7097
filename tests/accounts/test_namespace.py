"""A name is refused while the broker has queues or exchanges of it, unless an operator adopts them."""

import uuid

import pytest
from django.core.exceptions import PermissionDenied
from django.test import Client

from accounts import pulse_users
from accounts.models import AuditEntry, PulseUser
from accounts.pulse_users import NamespaceInUse, create_pulse_user
from rabbit.management import BrokerUnavailable, Management
from tests.support.api import Program
from tests.support.toolbox import finish_removals, queue_lengths, queue_names

pytestmark = pytest.mark.usefixtures("guarded")


@pytest.fixture
def name(management):
    """Return an unused name, and delete its RabbitMQ user afterwards."""
    name = f"legacy-{uuid.uuid4().hex[:8]}"
    yield name
    if name in {user.name for user in management.users()}:
        management.delete_user(name)


@pytest.fixture
def leftover(name, guarded, amqp):
    """Leave a queue with a message on the broker, as an account deleted there does."""
    queue = f"queue/{name}/jobs"
    amqp.queue(queue, messages=1)
    return queue


def users_of(management):
    return {user.name for user in management.users()}


@pytest.mark.parametrize("kind", ["queue", "exchange"])
@pytest.mark.parametrize("prefix", ["queue", "exchange"])
def test_a_name_in_use_on_the_broker_is_refused(alice, name, guarded, management, kind, prefix):
    declare = management.declare_queue if kind == "queue" else management.declare_exchange
    declare(guarded, f"{prefix}/{name}/jobs")
    with pytest.raises(NamespaceInUse, match="ask an operator"):
        create_pulse_user(name, [alice], by=alice)
    assert name not in users_of(management)
    assert not PulseUser.objects.exists()


def test_names_that_only_begin_alike_are_not_in_use(alice, name, guarded, management):
    for other in (f"queue/{name}-2/jobs", f"queue/{name}", f"other/queue/{name}/jobs", f"queue/{name.upper()}/jobs"):
        management.declare_queue(guarded, other)
    create_pulse_user(name, [alice], by=alice)


def test_an_owner_sees_whom_to_ask_and_no_names(alice, leftover, name):
    client = Client()
    client.force_login(alice)
    page = client.post("/pulse-users/", {"username": name})
    assert page.status_code == 200
    assert "ask an operator, who can adopt them" in page.text
    assert leftover not in page.text
    answer = Program(alice).post("pulse-users/", {"username": name})
    assert answer.status_code == 400
    assert "ask an operator" in answer.json()["username"][0]
    assert leftover not in answer.text


def test_an_owner_cannot_adopt_a_namespace(alice, leftover, name, management):
    answer = Program(alice).post("pulse-users/", {"username": name, "adopt_namespace": True})
    assert answer.status_code == 403
    client = Client()
    client.force_login(alice)
    client.post("/pulse-users/", {"username": name, "adopt_namespace": "on"})
    with pytest.raises(PermissionDenied):
        create_pulse_user(name, [alice], by=alice, adopt_namespace=True)
    assert name not in users_of(management)
    assert not PulseUser.objects.exists()


def test_an_operator_adopts_a_namespace_on_the_page(admin, alice, leftover, name, guarded, management):
    form = {"username": name, "owners": "alice@example.org"}
    refused = admin.post("/pulse-users/", form)
    assert leftover in refused.text
    assert not PulseUser.objects.exists()
    created = admin.post("/pulse-users/", {**form, "adopt_namespace": "on"})
    assert created.status_code == 201
    assert queue_lengths(management, guarded)[leftover] == 1
    assert alice in PulseUser.objects.get().owners.all()
    entry = AuditEntry.objects.get(event="adopted")
    assert entry.additional_data["queues"] == [leftover]


def test_an_operator_adopts_a_namespace_with_the_api(operator, alice, leftover, name, guarded, management):
    program = Program(operator)
    body = {"username": name, "owners": ["alice@example.org"]}
    refused = program.post("pulse-users/", body)
    assert (refused.status_code, leftover in refused.json()["username"][0]) == (400, True)
    created = program.post("pulse-users/", {**body, "adopt_namespace": True})
    assert (created.status_code, created.json()["owners"]) == (201, ["alice@example.org"])
    assert queue_lengths(management, guarded)[leftover] == 1


def cut_after(monkeypatch, place, function, proxy):
    """Cut the connection to the broker after this function's first call."""
    real = getattr(place, function)

    def call(*arguments, **options):
        result = real(*arguments, **options)
        proxy.close_next(1000)
        return result

    monkeypatch.setattr(place, function, call)


def test_without_a_list_nothing_is_created(alice, name, management, broker_proxy, monkeypatch):
    cut_after(monkeypatch, pulse_users, "is_free_on_broker", broker_proxy)
    answer = Program(alice).post("pulse-users/", {"username": name})
    assert answer.status_code == 503
    assert name not in users_of(management)
    assert not PulseUser.objects.exists()


def test_a_failed_adoption_deletes_no_queue(alice, leftover, name, guarded, management, broker_proxy, monkeypatch):
    with monkeypatch.context() as patched:
        cut_after(patched, Management, "put_user", broker_proxy)
        with pytest.raises(BrokerUnavailable):
            create_pulse_user(name, [alice], adopt_namespace=True)
    broker_proxy.close_next(0)
    finish_removals()
    assert leftover in queue_names(management, guarded)
    pulse_user, _ = create_pulse_user(name, [alice])
    assert pulse_user.ready
    assert leftover in queue_names(management, guarded)
