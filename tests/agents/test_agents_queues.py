"""Agents' queues under guard, on a real broker: owners, notifications, and queues that vanish and return."""

import contextlib
from datetime import timedelta

import pytest
from django.utils import timezone
from pika.exceptions import AMQPError

from accounts.models import Owner
from agents.events import publishing
from agents.models import AgentVhost, Consumer, SubscriptionQueue
from agents.registration.queues import redeclare
from notifications.mails import compose
from notifications.models import Notification
from queues.actions import single
from queues.guard import consumer_health, deleter, monitor, once, pass_run, persistence
from queues.models import Queue
from rabbit.names import DEAD_LETTER_QUEUE
from tests.conftest import Amqp
from tests.support.agents import NewAgent
from tests.support.faults import once_before
from tests.support.toolbox import call_before, in_background, queue_events, url_for, wait_until, wait_until_blocked

pytestmark = pytest.mark.usefixtures("agents")


@pytest.fixture
def agent(agents):
    return NewAgent(agents, "alice")


@pytest.fixture
def registered(agent):
    """Return the registration of a queue of Alice's agent."""
    return agent.create_queue()[0]


@pytest.fixture
def agents_vhost(registered, guarded, settings):
    settings.GUARDIAN_VHOSTS = [guarded, registered.vhost]
    return registered.vhost


@pytest.fixture
def agents_amqp(broker, agents_vhost):
    opened = Amqp(broker.amqp_url, agents_vhost)
    yield opened
    with contextlib.suppress(AMQPError):  # it is closed with its vhost
        opened.connection.close()


def notified_queues(recipient="alice@example.org"):
    notifications = Notification.objects.filter(recipient=recipient).order_by("id")
    return list(notifications.values_list("kind", "facts__queue"))


def last_text_to(recipient="alice@example.org"):
    return compose(Notification.objects.filter(recipient=recipient).order_by("-id")[0]).body


def stored_facts(name):
    return Queue.objects.values_list("registered", "owner__email", "state").get(name=name)


# Guarded vhosts


def test_vhosts_of_agents_are_guarded_once_they_are_ready(guarded, settings):
    settings.GUARDIAN_VHOSTS = []
    settings.GUARDIAN_PULSE_VHOST = "pulse"
    for name in ("alice", "bob"):
        owner = Owner.objects.create_user(f"{name}@example.org")
        AgentVhost.objects.create(owner=owner, name=name, ready=name == "alice")
    assert pass_run.guarded_vhosts() == ["/", "pulse", "alice"]
    settings.GUARDIAN_VHOSTS = ["mine"]
    assert pass_run.guarded_vhosts() == ["mine"]
    settings.GUARDIAN_VHOSTS = ["*"]
    assert pass_run.guarded_vhosts() is None


def test_a_registered_queue_belongs_to_its_agents_owner(registered, agents_vhost, agents_amqp, amqp):
    agents_amqp.queue("subscription_of_nobody")
    amqp.queue("queue/alice/builds")
    report = once.run_once()
    assert (report.queues, report.errors, report.misnamed, report.unpatterned) == (4, [], [], 0)
    assert stored_facts(registered.queue_name) == (True, "alice@example.org", "ok")
    assert stored_facts(DEAD_LETTER_QUEUE) == (True, "alice@example.org", "ok")
    assert stored_facts("subscription_of_nobody") == (False, "alice@example.org", "ok")
    assert stored_facts("queue/alice/builds") == (False, None, "ok")
    assert once.run_once().changed == 0


def test_a_queue_that_lost_its_registration_is_no_longer_registered(registered, agents_vhost):
    once.run_once()
    SubscriptionQueue.objects.filter(pk=registered.pk)._raw_delete("default")
    assert once.run_once().changed == 1
    assert stored_facts(registered.queue_name) == (False, "alice@example.org", "ok")


# Notifications


@pytest.mark.parametrize("which", ["registered", "dead-letter"])
def test_a_registered_or_dead_letter_queue_over_the_limit_is_warned_about_but_kept(
    which, registered, agents_vhost, agents_amqp, agents
):
    name, says = {
        "registered": (registered.queue_name, "keeps at most 10,000 messages in it, each for 60 minutes"),
        "dead-letter": (DEAD_LETTER_QUEUE, "keeps its last 10,000 messages for 7 days"),
    }[which]
    once.run_once()
    agents_amqp.publish(name, 11)
    report = once.run_once()
    assert (report.warned, report.deleted, report.errors) == (1, 0, [])
    assert name in agents.queues(agents_vhost)
    assert notified_queues() == [("warning", name)] == notified_queues("ops@example.org")
    assert says in last_text_to()
    assert "delete it" not in last_text_to()


def test_an_orphan_over_the_limit_is_deleted_and_its_owner_notified(agents_vhost, agents_amqp):
    agents_amqp.queue("subscription_of_nobody", 11)
    assert once.run_once().deleted == 1
    assert notified_queues() == [("deletion", "subscription_of_nobody")] == notified_queues("ops@example.org")


def test_a_queue_that_an_agent_registers_after_the_decision_to_delete_it_stays(
    registered, agent, agents_vhost, agents_amqp, agents
):
    SubscriptionQueue.objects.filter(pk=registered.pk)._raw_delete("default")
    agents_amqp.publish(registered.queue_name, 11)
    assert len(monitor.run_pass().decided) == 1
    agent.create_queue()
    assert deleter.run().kept == 1
    assert registered.queue_name in agents.queues(agents_vhost)


def test_an_inactive_owner_is_not_notified(registered, agents_vhost, agents_amqp):
    Owner.objects.update(is_active=False)
    agents_amqp.publish(registered.queue_name, 6)
    once.run_once()
    assert (notified_queues(), notified_queues("ops@example.org")) == ([], [("warning", registered.queue_name)])


def test_an_owner_is_notified_that_a_registered_queue_has_no_consumers(registered, agents_vhost, settings):
    settings.GUARDIAN_NO_CONSUMER_MINUTES = 5
    once.run_once()

    def all_are_counted():
        consumer_health.count_consumers()
        return not Queue.objects.filter(consumers=None).exists()

    wait_until(all_are_counted)  # the broker counts a new queue's consumers after some seconds
    for queue in Queue.objects.all():
        Queue.objects.filter(pk=queue.pk).update(unattended_since=timezone.now() - timedelta(minutes=6))
    assert consumer_health.count_consumers() == 2
    assert notified_queues() == [("no-consumers", registered.queue_name)] == notified_queues("ops@example.org")
    assert "Start its agent" in last_text_to()


# Queues that vanish and return


@pytest.fixture
def consumer(agent):
    return agent.register_consumer()[0]


@pytest.fixture
def log_in(broker, agent):
    """Return a function that connects with a login of an agent."""
    opened = []

    def connect(login, vhost):
        opened.append(Amqp(url_for(broker, login.rmq_username, agent.presented.key), vhost).connection)
        return opened[-1]

    yield connect
    for one in opened:
        if one.is_open:
            one.close()


def is_closed(connection):
    with contextlib.suppress(AMQPError):
        connection.process_data_events()
    return connection.is_closed


def test_missing_registered_queues_are_declared_again_once_two_lists_lack_them(
    registered, consumer, agents_vhost, management, agent, amqp
):
    amqp.queue("another")
    once.run_once()
    names = {registered.queue_name, consumer.queue_name, DEAD_LETTER_QUEUE}
    for name in names:
        management.delete_queue(agents_vhost, name)
    found = []
    for _ in range(2):
        assert publishing.publish(agent.offering, "order", {}).gone == 2  # its errors don't delay the repair
        assert once.run_once().errors == []
        found.append(set(agent.agents.queues(agents_vhost)))
    assert found == [set(), names]
    assert {row.state for row in (SubscriptionQueue.objects.get(), Consumer.objects.get())} == {"ready"}
    once.run_once()
    assert stored_facts(registered.queue_name) == (True, "alice@example.org", "ok")
    assert queue_events(registered.queue_name) == ["skipped", "gone", "returned"]


def test_only_the_connections_of_a_lost_queues_login_are_closed(registered, consumer, agents_vhost, management, log_in):
    lost, other = log_in(consumer, agents_vhost), log_in(registered.subscription, agents_vhost)
    once.run_once()
    management.delete_queue(agents_vhost, consumer.queue_name)
    once.run_once()
    once.run_once()
    wait_until(lambda: is_closed(lost))
    assert not is_closed(other)


def test_a_queue_that_a_list_lacked_by_mistake_is_declared_without_closing_connections(
    consumer, agents_vhost, management, log_in
):
    reading = log_in(consumer, agents_vhost)
    redeclare(consumer, management)
    assert not is_closed(reading)
    Consumer.objects.update(state="creating")  # as after a crash between declaring and closing
    redeclare(Consumer.objects.get(), management)
    wait_until(lambda: is_closed(reading))


def test_a_queue_that_cannot_be_declared_again_has_the_reason_and_is_tried_again_after_a_minute(
    registered, agents_vhost, agents_amqp, management, monkeypatch
):
    once.run_once()
    management.delete_queue(agents_vhost, registered.queue_name)
    once.run_once()

    def take_the_name():
        management.declare_queue(agents_vhost, registered.queue_name)  # without the arguments
        agents_amqp.publish(registered.queue_name, 1)

    once_before(monkeypatch, "the decision", take_the_name)
    [error] = once.run_once().errors
    row = SubscriptionQueue.objects.get()
    assert "exists with other arguments" in error
    assert (row.state, "exists with other arguments" in row.last_error) == ("creating", True)
    management.delete_queue(agents_vhost, registered.queue_name)
    SubscriptionQueue.objects.update(created=timezone.now() - timedelta(hours=1))
    assert once.run_once().errors == []
    assert SubscriptionQueue.objects.get().state == "creating"
    SubscriptionQueue.objects.update(last_error_at=timezone.now() - timedelta(minutes=2))
    once.run_once()
    assert SubscriptionQueue.objects.get().state == "ready"


def test_a_queue_that_its_agent_registers_during_a_pass_is_ready(
    registered, agents_vhost, management, agent, monkeypatch
):
    once.run_once()
    management.delete_queue(agents_vhost, registered.queue_name)
    once.run_once()
    once_before(monkeypatch, "the decision", agent.create_queue)
    once.run_once()
    assert SubscriptionQueue.objects.get().state == "ready"
    once.run_once()
    assert stored_facts(registered.queue_name)[2] == "ok"


def test_queues_of_a_deleted_subscription_are_gone_without_errors(registered, agents_vhost, agent, settings):
    settings.GUARDIAN_DELETE_BRAKE = 1
    for object_type in ("resource", "user_role", "call", "user_ssh_key"):
        agent.create_queue(object_type)
    once.run_once()
    agent.subscription.delete()
    reports = [once.run_once() for _ in range(3)]
    assert [(report.errors, report.gone, report.queues) for report in reports] == [([], 0, 1)] * 3
    assert queue_events(registered.queue_name) == ["removed"]
    assert stored_facts(registered.queue_name)[2] == "gone"


def test_a_registered_queue_that_an_operator_deletes_is_to_be_created_again(registered, agents_vhost, operator, agents):
    once.run_once()
    queue = Queue.objects.get(name=registered.queue_name)
    single.purge_queue(queue, operator)
    assert SubscriptionQueue.objects.get().state == "ready"
    single.delete_queue(queue, operator)
    assert SubscriptionQueue.objects.get().state == "creating"
    assert registered.queue_name not in agents.queues(agents_vhost)


def test_an_owner_deletes_an_orphan_in_their_agents_vhost(agents_vhost, agents_amqp, agent):
    agents_amqp.queue("subscription_of_nobody", 3)
    once.run_once()
    single.delete_queue(Queue.objects.get(name="subscription_of_nobody"), agent.owner)
    assert stored_facts("subscription_of_nobody")[2] == "gone"


# Deleted owners


def test_an_owner_deleted_during_a_pass_owns_no_queue_afterwards(agent, agents_vhost, agents_amqp, monkeypatch):
    once.run_once()
    agents_amqp.queue("subscription_of_nobody", 6)
    agents_amqp.publish(DEAD_LETTER_QUEUE, 6)
    once_before(monkeypatch, "the decision", agent.owner.delete)
    assert once.run_once().errors == []
    assert not Queue.objects.exclude(owner=None).exists()
    assert notified_queues() == []


def test_deleting_an_owner_waits_while_a_pass_writes(agents_vhost, agents_amqp, agent, monkeypatch):
    agents_amqp.queue("subscription_of_nobody", 6)
    deletions = []

    def begin():
        deletions.append(in_background(agent.owner.delete))
        wait_until_blocked(deletions[0])

    call_before(monkeypatch, persistence, "_insert", begin)
    report = once.run_once()
    deletions[0].result()
    assert report.errors == []
    assert not Owner.objects.filter(email="alice@example.org").exists()
    assert not Queue.objects.exclude(owner=None).exists()


def test_a_vanished_agents_vhost_is_reported_and_created_again(registered, agents_vhost, management, amqp, agents):
    amqp.queue("another")
    once.run_once()
    management.delete_vhost(agents_vhost)
    gone = f"vhost '{agents_vhost}' of an owner's agents is gone from the broker; Guardian creates it again"
    assert [once.run_once().errors for _ in range(2)] == [[gone]] * 2
    assert set(agents.queues(agents_vhost)) == {registered.queue_name, DEAD_LETTER_QUEUE}
    assert SubscriptionQueue.objects.get().state == "ready"


def test_a_vhost_removed_with_its_owner_is_no_error(agents_vhost, agent, settings, monkeypatch):
    settings.GUARDIAN_VHOSTS = []
    settings.GUARDIAN_IGNORED_QUEUES = "^(?!subscription_|guardian)"
    once.run_once()
    once_before(monkeypatch, "the list", agent.owner.delete)
    assert once.run_once().errors == []
