"""A name is refused while the broker has queues or exchanges of it, unless an operator adopts them."""

import pytest

from accounts.models import AuditEntry, PulseUser
from accounts.pulse_users import namespace
from accounts.pulse_users.creation import create_pulse_user
from accounts.pulse_users.validation import NameRefused
from rabbit.errors import BrokerUnavailable
from rabbit.management import Management
from tests.support.api import Program
from tests.support.toolbox import calling_first, finish_removals, queue_lengths, queue_names

pytestmark = pytest.mark.usefixtures("guarded")


@pytest.fixture
def leftover(name, guarded, amqp):
    """Leave a queue with a message on the broker, as a Pulse user deleted there does."""
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
    with pytest.raises(NameRefused, match="ask an operator"):
        create_pulse_user(name, [alice], by=alice)
    assert name not in users_of(management)
    assert not PulseUser.objects.exists()


def test_names_that_only_begin_alike_are_not_in_use(alice, name, guarded, management):
    for other in (f"queue/{name}-2/jobs", f"queue/{name}", f"other/queue/{name}/jobs", f"queue/{name.upper()}/jobs"):
        management.declare_queue(guarded, other)
    create_pulse_user(name, [alice], by=alice)


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


def test_without_a_list_nothing_is_created(alice, name, management, broker_proxy):
    with calling_first(namespace, "used_names", lambda: broker_proxy.close_next(1000)):
        answer = Program(alice).post("pulse-users/", {"username": name})
    assert answer.status_code == 503
    assert name not in users_of(management)
    assert not PulseUser.objects.exists()


def test_a_failed_adoption_deletes_no_queue(alice, leftover, name, guarded, management, broker_proxy):
    cut = calling_first(Management, "set_permissions", lambda: broker_proxy.close_next(1000))
    with cut, pytest.raises(BrokerUnavailable):
        create_pulse_user(name, [alice], adopt_namespace=True)
    broker_proxy.close_next(0)
    finish_removals()
    assert leftover in queue_names(management, guarded)
    pulse_user, _ = create_pulse_user(name, [alice])
    assert pulse_user.ready
    assert leftover in queue_names(management, guarded)
