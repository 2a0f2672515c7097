"""The sweep of orphans, and the clean-up of subscriptions of owners without a live token."""

import itertools
import uuid
from datetime import timedelta

import pytest
from django.db import transaction
from django.utils import timezone

from accounts.access.tokens import create_token
from accounts.models import AuthToken, PulseUser
from agents import tasks
from agents.models import AgentIdentity, AgentVhost, Consumer, EventSubscription, SubscriptionQueue, Sweep
from agents.registration import queues, records
from agents.sweeps import reports, stale, sweep
from agents.sweeps.stale import clean_up_stale
from agents.sweeps.sweep import sweep_orphans
from core import locks, removals
from core.models import Lease, Removal
from notifications.mails import compose
from notifications.models import Notification
from queues.guard.pruning import prune
from queues.models import Queue, QueueEvent
from rabbit import snapshot
from rabbit.amqp import Session
from rabbit.errors import BrokerUnavailable
from rabbit.management import Management
from rabbit.permissions import FULL_ACCESS, for_consumer, for_subscription
from tests.conftest import Amqp
from tests.support.agents import RegisteredAgent, backdate_registrations, lose_registrations, run_removals
from tests.support.counting import counted_requests
from tests.support.proxy import http_answer
from tests.support.toolbox import (
    AWAY,
    AWAY_AMQP,
    Killed,
    call_after,
    call_before,
    in_background,
    raising,
    stored_queue,
    wait_until_blocked,
)


def notifications(kind):
    return list(Notification.objects.filter(kind=kind).order_by("id"))


# What a sweep deletes and keeps


def test_a_sweep_deletes_orphans_with_their_messages_only(agent, amqp, vhost, broker):
    agent.orphan("subscription_empty")
    agent.orphan("consumer_full")
    foreign = {"somebody's own", "subscriptions", "a_subscription_", "CONSUMER_1"}
    for name in foreign:
        agent.orphan(name)
    amqp.queue("subscription_elsewhere")
    stored_queue("subscription_empty", vhost=agent.vhost)
    inside = Amqp(broker.amqp_url, agent.vhost)
    inside.publish("consumer_full", 3)
    inside.connection.close()
    report = sweep_orphans()
    assert (report.found, report.deleted, report.kept, report.repaired, report.errors) == (2, 2, 0, 0, [])
    assert report.seen == 9
    assert agent.names == agent.registered | foreign
    assert "subscription_elsewhere" in agent.agents.queues(vhost)
    row = Sweep.objects.get()
    assert (row.kind, row.seen, row.found, row.deleted, row.kept, row.repaired) == ("orphans", 9, 2, 2, 0, 0)
    assert (row.brake_held, row.errors, row.seconds > 0) == (False, [], True)
    assert Queue.objects.get().state == "gone"
    assert QueueEvent.objects.get(queue_name="subscription_empty").kind == "removed"
    again = sweep_orphans()
    assert (again.found, again.deleted, again.repaired, again.logins, again.errors) == (0, 0, 0, 0, [])


def test_a_dry_run_reports_deletions_and_changes_nothing(agent, reader, management):
    orphan, used = agent.orphan(), agent.orphan("subscription_used")
    reader("subscription_used")
    management.delete_queue(agent.vhost, agent.queue.queue_name)
    report = sweep_orphans(dry_run=True)
    assert report.would_delete == [orphan]
    assert report.in_use == [used]
    assert report.would_repair == [{"vhost": agent.vhost, "queue": agent.queue.queue_name}]
    assert agent.names == {"subscription_orphan", "subscription_used", "guardian.dlq", agent.consumer.queue_name}
    for model in (Sweep, Removal, Notification):
        assert not model.objects.exists()
    assert {one["queue"] for one in sweep_orphans(dry_run=True, force=True).would_delete} == {
        orphan["queue"], used["queue"],
    }  # fmt: skip


@pytest.mark.parametrize("force", [False, True])
def test_a_sweep_of_confirmed_queues_deletes_no_others(agent, management, force):
    shown = agent.orphan("subscription_shown")
    management.delete_queue(agent.vhost, "subscription_shown")
    still_there, other = agent.orphan("subscription_too"), agent.orphan("subscription_other")
    agreed = [(one["vhost"], one["queue"]) for one in (shown, still_there)]
    preview = sweep_orphans(dry_run=True, only=agreed, force=force)
    assert (preview.would_delete, preview.left_out) == ([still_there], [other])
    report = sweep_orphans(only=agreed, force=force)
    assert (report.found, report.deleted, report.left_out, report.errors) == (1, 1, [other], [])
    assert agent.names == agent.registered | {"subscription_other"}
    assert sweep_orphans(only=[]).deleted == 0


def test_the_brake_counts_confirmed_queues_only(agent, settings):
    settings.GUARDIAN_DELETE_BRAKE = 1
    sweep = [agent.orphan(f"subscription_{number}") for number in range(4)]
    agreed = [(one["vhost"], one["queue"]) for one in sweep[:2]]
    assert sweep_orphans(only=agreed).brake_held
    assert sweep_orphans(only=agreed[:1]).deleted == 1


def test_queues_of_a_vhost_in_creation_are_not_swept(agent):
    agent.orphan()
    AgentVhost.objects.update(ready=False)
    assert sweep_orphans().found == 0
    assert "subscription_orphan" in agent.names


def test_a_queue_registered_during_the_sweep_is_not_deleted(agent, monkeypatch):
    call_before(monkeypatch, snapshot, "list_names", lambda: agent.create_queue("call"))
    call_after(monkeypatch, snapshot, "list_names", lambda: agent.create_queue("resource"))
    report = sweep_orphans()
    assert (report.found, report.repaired) == (0, 0)
    assert len(agent.names) == 5


def test_a_queue_with_a_pending_removal_is_not_an_orphan(agent, settings, broker, reader):
    reader(agent.queue.queue_name)
    settings.RABBIT_URL = AWAY_AMQP
    agent.queue.delete()
    settings.RABBIT_URL = broker.amqp_url
    assert sweep_orphans().found == 0
    assert Removal.objects.get(kind="queue").if_unused is False


def test_an_owner_deleted_during_the_sweep_leaves_no_orphans(agent, monkeypatch):
    agent.orphan()
    call_after(monkeypatch, snapshot, "list_names", agent.owner.delete)
    report = sweep_orphans()
    assert (report.found, report.errors) == (0, [])


# In use


def test_an_orphan_in_use_is_notified_once_and_deleted_only_by_force(agent, reader):
    used = agent.orphan()
    reader("subscription_orphan")
    for _ in range(3):
        report = sweep_orphans()
        assert (report.deleted, report.kept, report.in_use) == (0, 1, [used])
    (message,) = notifications("orphans-in-use")
    assert message.recipient == "ops@example.org"
    assert "subscription_orphan" in compose(message).body
    assert "subscription_orphan" in agent.names
    agent.orphan("subscription_too")
    reader("subscription_too")
    sweep_orphans()
    assert [message.facts["count"] for message in notifications("orphans-in-use")] == [1, 2]
    assert sweep_orphans(force=True).deleted == 2
    assert agent.names == agent.registered


def test_orphans_in_use_are_notified_again_after_a_sweep_without_any(agent, broker):
    for _ in range(2):
        agent.orphan()
        opened = Amqp(broker.amqp_url, agent.vhost)
        opened.channel.basic_consume("subscription_orphan", lambda *_: None)
        sweep_orphans()
        opened.connection.close()
        assert sweep_orphans().deleted == 1
    assert len(notifications("orphans-in-use")) == 2


def test_an_orphan_of_another_type_is_deleted_only_by_force(agent):
    agent.orphan("subscription_quorum", arguments={"x-queue-type": "quorum"})
    agent.orphan("subscription_classic")
    report = sweep_orphans()
    assert (report.found, report.deleted, report.kept) == (2, 1, 1)
    assert "is a quorum queue" in report.errors[0]
    assert sweep_orphans(force=True).deleted == 1


def test_an_exclusive_queue_is_not_an_orphan(agent, broker):
    opened = Amqp(broker.amqp_url, agent.vhost)
    opened.channel.queue_declare("subscription_exclusive", exclusive=True)
    assert (sweep_orphans().found, sweep_orphans(force=True).found) == (0, 0)
    opened.connection.close()


def test_an_orphan_with_a_nul_in_its_name_is_deleted(agent):
    agent.orphan("subscription_\0")
    report = sweep_orphans()
    assert (report.found, report.deleted, report.errors) == (1, 1, [])
    assert sweep_orphans().found == 0


# Brake


def test_a_restored_older_database_deletes_no_queues_and_missing_ones_are_redeclared(agent, settings, management):
    settings.GUARDIAN_DELETE_BRAKE = 4
    newer = lose_registrations(agent, 5)
    management.delete_queue(agent.vhost, agent.queue.queue_name)
    report = sweep_orphans()
    assert (report.found, report.deleted, report.brake_held, report.repaired) == (5, 0, True, 1)
    assert {one["queue"] for one in report.would_delete} == newer
    assert agent.names == newer | agent.registered
    assert not Removal.objects.exists()
    assert Sweep.objects.get().brake_held


def test_the_brake_is_notified_once_until_a_sweep_passes_it(agent, settings, broker):
    settings.GUARDIAN_DELETE_BRAKE = 4
    lose_registrations(agent, 5)
    sweep_orphans()
    settings.RABBITMQ_MANAGEMENT_URL = AWAY
    assert sweep_orphans().away
    settings.RABBITMQ_MANAGEMENT_URL = broker.management_url
    sweep_orphans()
    assert len(notifications("sweep-brake")) == 1
    assert sweep_orphans(force=True).deleted == 5
    lose_registrations(agent, 5)
    sweep_orphans()
    assert len(notifications("sweep-brake")) == 2
    assert "cleanup_orphan_queues --force" in compose(notifications("sweep-brake")[0]).body


# Repair


@pytest.mark.parametrize("lost", ["queues", "vhost"])
def test_lost_queues_are_redeclared_unchanged(agent, management, lost):
    before = agent.agents.queues(agent.vhost)
    if lost == "vhost":
        management.delete_vhost(agent.vhost)
    else:
        for name in agent.registered:
            management.delete_queue(agent.vhost, name)
    assert sweep_orphans().repaired == 3
    assert agent.agents.queues(agent.vhost) == before


def test_queues_are_removed_from_a_vhost_on_which_guardian_lacks_permissions(agent, management):
    management._delete("permissions", agent.vhost, management.whoami().name)
    removals.write([Removal(kind=Removal.Kind.QUEUE, vhost=agent.vhost, name="consumer_lost")])
    assert run_removals() == 1


def test_an_interrupted_registration_is_finished_after_a_while(agent, management):
    management.delete_queue(agent.vhost, agent.queue.queue_name)
    SubscriptionQueue.objects.update(state="creating", created=timezone.now())
    assert sweep_orphans().repaired == 0
    backdate_registrations()
    assert sweep_orphans().repaired == 1
    agent.queue.refresh_from_db()
    assert (agent.queue.state, agent.queue.queue_name in agent.names) == ("ready", True)


def test_a_failed_redeclaration_does_not_stop_the_others(agent, management, reader):
    name = agent.consumer.queue_name
    management.delete_queue(agent.vhost, name)
    management.delete_queue(agent.vhost, agent.queue.queue_name)
    management.declare_queue(agent.vhost, agent.queue.queue_name)
    reader(agent.queue.queue_name)
    SubscriptionQueue.objects.update(state="creating")
    report = sweep_orphans()
    assert report.repaired == 1
    assert "could not be declared again" in report.errors[0]
    assert name in agent.names


def test_a_lost_login_is_recreated_by_the_next_registration(agent, management):
    for name in (agent.subscription.rmq_username, agent.consumer.rmq_username):
        management.delete_user(name)
    assert sweep_orphans().logins == 2
    queues.create_queue(EventSubscription.objects.get(), agent.offering, "order", agent.presented)
    assert agent.subscription.rmq_username in agent.agents.users()
    assert not Consumer.objects.get().password_set
    assert EventSubscription.objects.get().password_set


def test_a_login_with_wrong_permissions_is_reset_by_the_next_registration(agent, management):
    username = agent.subscription.rmq_username
    management.delete_permissions(agent.vhost, username)
    management.set_permissions(agent.vhost, agent.consumer.rmq_username, FULL_ACCESS)
    assert sweep_orphans(dry_run=True).logins == 2
    assert EventSubscription.objects.filter(password_set=True).exists()
    report = sweep_orphans()
    assert (report.repaired, report.logins, report.users, report.errors) == (0, 2, 0, [])
    assert management.permissions_of(username) == {}
    queues.create_queue(EventSubscription.objects.get(), agent.offering, "order", agent.presented)
    assert management.permissions_of(username) == {agent.vhost: for_subscription(username)}
    agent.register_consumer()
    assert sweep_orphans().logins == 0


def test_a_locked_vhost_does_not_stop_the_repair_of_others(agent, agents, management, monkeypatch):
    bob = RegisteredAgent(agents, "bob")
    for one in (agent, bob):
        management.delete_queue(one.vhost, one.queue.queue_name)
    AgentVhost.objects.filter(owner=agent.owner).update(ready=False)
    SubscriptionQueue.objects.filter(vhost=agent.vhost).update(state="creating")
    monkeypatch.setattr(records, "WAIT_SECONDS", 0.1)
    with locks.lock(f"vhost {agent.vhost}"):
        report = sweep_orphans()
    assert (report.away, report.repaired, len(report.errors)) == (False, 1, 1)
    assert bob.names == bob.registered


@pytest.mark.parametrize("timeouts", [2, 3])
def test_three_timeouts_end_the_repair(agent, management, monkeypatch, timeouts):
    created = [agent.queue, *(agent.create_queue(one)[0] for one in ("call", "resource", "user_role"))]
    backdate_registrations()
    for one in created:
        management.delete_queue(one.vhost, one.queue_name)
    asked = []
    redeclare = queues.redeclare

    def too_slow(row, management):
        asked.append(row)
        if len(asked) <= timeouts:
            raise BrokerUnavailable("PUT: no answer within 20 s", timed_out=True)
        redeclare(row, management)

    monkeypatch.setattr(queues, "redeclare", too_slow)
    report = sweep_orphans()
    assert (report.away, len(asked), report.repaired) == ((False, 4, 2) if timeouts == 2 else (True, 3, 0))


def test_an_owner_deleted_during_the_repair_does_not_stop_the_others(agent, agents, management, monkeypatch):
    bob = RegisteredAgent(agents, "bob")
    for one in (agent, bob):
        management.delete_vhost(one.vhost)
    call_before(monkeypatch, sweep, "repair", agent.owner.delete)
    report = sweep_orphans()
    assert (report.repaired, report.away) == (3, False)
    assert bob.names == bob.registered


# Users


def login_names(agent):
    return {agent.subscription.rmq_username, agent.consumer.rmq_username}


def test_a_sweep_deletes_users_of_removed_logins_only(agent, management, settings):
    names = [f"{number:x}" * 32 for number in range(1, 10)]
    for name in names:
        management.put_user(name, "secret", tags=["management"] if name == names[0] else ())
    management.set_permissions(agent.vhost, names[1], for_subscription(names[1]))
    management.set_permissions(agent.vhost, names[2], for_consumer(names[3]))
    # Kept: without permissions, another user's permissions, another vhost too, full access, a Pulse user's name.
    management.set_permissions(agent.vhost, names[4], for_subscription(names[5]))
    management.set_permissions(agent.vhost, names[6], for_subscription(names[6]))
    management.set_permissions(settings.GUARDIAN_PULSE_VHOST, names[6], for_subscription(names[6]))
    management.set_permissions(agent.vhost, names[7], FULL_ACCESS)
    PulseUser.objects.create(username=names[8])
    management.put_user(f"{names[1]}0", "secret")
    try:
        before = agent.agents.users()
        dry = sweep_orphans(dry_run=True)
        assert (dry.users, agent.agents.users()) == (2, before)
        report = sweep_orphans()
        assert (report.users, report.found, report.errors) == (2, 0, [])
        assert before - agent.agents.users() == {names[1], names[2]}
        assert login_names(agent) < agent.agents.users()
        assert sweep_orphans().users == 0
        assert not Removal.objects.exists()
    finally:
        management.delete_user(f"{names[1]}0")


@pytest.mark.parametrize("force", [False, True])
def test_a_restored_older_database_deletes_users_only_by_force(agent, management, settings, force):
    settings.GUARDIAN_DELETE_BRAKE = 2
    names = {uuid.uuid4().hex for _ in range(5)}
    for name in names:
        management.put_user(name, "secret")
        management.set_permissions(agent.vhost, name, for_subscription(name))
    report = sweep_orphans(force=force)
    assert (report.users, len(report.errors)) == ((5, 0) if force else (0, 1))
    assert names.isdisjoint(agent.agents.users()) == force


def test_a_login_created_and_removed_during_the_sweep_is_kept(agent, monkeypatch):
    other = agent.agents.identity(agent.owner, agent.offering)
    call_before(monkeypatch, Management, "users", lambda: queues.register_subscription(other, "order", agent.presented))
    call_after(monkeypatch, Management, "users", lambda: EventSubscription.objects.get(identity=other).delete())
    report = sweep_orphans()
    assert (report.users, report.errors) == (0, [])
    assert login_names(agent) < agent.agents.users()


def test_subscriptions_deleted_during_the_sweep_do_not_trigger_the_brake(agent, settings, monkeypatch):
    settings.GUARDIAN_DELETE_BRAKE = 1
    for object_type in ("call", "resource", "user_role"):
        agent.create_queue(object_type)
    agent.orphan()
    call_after(monkeypatch, snapshot, "list_names", EventSubscription.objects.all().delete)
    report = sweep_orphans()
    assert (report.brake_held, report.found, report.deleted, report.errors) == (False, 1, 1, [])
    assert not Removal.objects.exists()


# Failures of the broker


@pytest.mark.parametrize(
    "answer",
    [
        http_answer("200 OK", b"[]"),
        http_answer("200 OK", b'[{"name": "subscription_orphan", "vhost": "/"}]'),
        b"HTTP/1.1 200 OK\r\nContent-Length: 9000\r\n\r\n[{",
    ],
    ids=["empty", "rows of another shape", "cut"],
)
def test_a_malformed_list_removes_nothing(agent, broker_proxy, answer):
    agent.orphan()
    before = list(SubscriptionQueue.objects.values()) + list(Consumer.objects.values())
    broker_proxy.answer(answer)
    assert sweep_orphans().away
    assert sweep_orphans(force=True).away
    assert all(row.errors for row in Sweep.objects.all())
    assert list(SubscriptionQueue.objects.values()) + list(Consumer.objects.values()) == before
    assert "subscription_orphan" in agent.names
    assert not Removal.objects.exists()


def test_a_sweep_without_the_administrator_tag_deletes_nothing(agent, settings, broker, management):
    agent.orphan()
    name = f"test-{uuid.uuid4().hex[:8]}"
    management.put_user(name, "word", ["monitoring"])
    try:
        host = broker.management_url.rpartition("@")[2]
        settings.RABBITMQ_MANAGEMENT_URL = f"http://{name}:word@{host}"
        report = sweep_orphans()
    finally:
        management.delete_user(name)
    assert report.away
    assert "administrator tag" in report.errors[0]
    assert "subscription_orphan" in agent.names


def test_a_vhost_that_cannot_be_listed_is_skipped(agent, agents, monkeypatch):
    bob = RegisteredAgent(agents, "bob")
    agent.orphan()
    bob.orphan()
    listed = Management.list_queues

    def list_queues(self, vhost, *arguments):
        if vhost == agent.vhost:
            raise BrokerUnavailable("GET /api/queues: answered 500")
        return listed(self, vhost, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(Management, "list_queues", list_queues)
        report = sweep_orphans()
    assert (report.deleted, report.repaired) == (1, 0)
    assert f"vhost '{agent.vhost}' could not be listed" in report.errors[0]
    assert "subscription_orphan" in agent.names
    assert bob.names == bob.registered


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize("what", ["changed", "down"])
def test_a_sweep_deletes_nothing_while_a_node_stops_or_is_down(agent, monkeypatch, what, dry_run):
    agent.orphan()
    answers = [(frozenset({"a", "b"}), frozenset()), (frozenset({"a"}), frozenset({"b"}))]
    seen = itertools.cycle(answers if what == "changed" else answers[1:])
    with monkeypatch.context() as patched:
        patched.setattr(snapshot, "members", lambda _: next(seen))
        report = sweep_orphans(dry_run=dry_run)
    assert (report.found, report.deleted, report.would_delete) == (1, 0, [])
    assert "no queue is deleted" in report.errors[0]
    assert "subscription_orphan" in agent.names
    assert sweep_orphans().deleted == 1


def test_removals_of_an_interrupted_or_killed_sweep_are_done_later(agent, management):
    for number in range(3):
        agent.orphan(f"subscription_{number}")
    management.delete_queue(agent.vhost, agent.queue.queue_name)
    with raising(Session, "delete_queue", BrokerUnavailable("DELETE: can't connect", never_reached=True)):
        report = sweep_orphans()
    assert (report.away, report.deleted, report.repaired) == (True, 0, 0)
    agent.orphan()
    with raising(removals, "run", Killed), pytest.raises(Killed):
        sweep_orphans()
    assert sweep_orphans().found == 0
    assert run_removals() == 4
    assert agent.names == agent.registered


def test_a_sweep_that_lost_its_lease_deletes_nothing(agent, monkeypatch):
    agent.orphan()
    past = timezone.now() - timedelta(seconds=1)
    call_after(monkeypatch, snapshot, "list_names", lambda: Lease.objects.update(expires_at=past))
    report = sweep_orphans()
    assert (report.given_up, report.deleted) == (True, 0)
    assert "subscription_orphan" in agent.names
    assert "expired while it was in use" in Sweep.objects.get().errors[0]


def test_a_sweep_that_loses_its_lease_between_two_batches_reports_what_it_deleted(agent, monkeypatch):
    monkeypatch.setattr(reports, "BATCH_SIZE", 1)
    for number in range(2):
        agent.orphan(f"subscription_{number}")
    past = timezone.now() - timedelta(seconds=1)
    call_after(monkeypatch, removals, "run", lambda: Lease.objects.update(expires_at=past))
    assert sweep_orphans().given_up
    assert Sweep.objects.get().deleted == 1


@pytest.mark.parametrize("do", [sweep_orphans, clean_up_stale])
def test_one_sweep_or_clean_up_runs_at_a_time(agent, do):
    Lease.objects.create(
        name="orphans" if do is sweep_orphans else "stale",
        holder=uuid.uuid4(),
        expires_at=timezone.now() + timedelta(seconds=60),
    )
    agent.orphan()
    report = do()
    assert (report.another_sweep, report.deleted) == (True, 0)
    assert not Sweep.objects.exists()
    assert "subscription_orphan" in agent.names


def test_many_vhosts_are_listed_in_one_request(agent, agents, monkeypatch):
    monkeypatch.setattr(snapshot, "MAX_SEPARATE_LISTS", 4)
    others = [RegisteredAgent(agents, f"owner-{number}") for number in range(4)]
    for one in (agent, *others):
        one.orphan()
    with counted_requests() as sent:
        assert sweep_orphans().deleted == 5
    assert [request for request in sent if request.startswith("GET /api/queues")] == ["GET /api/queues"]
    assert len(sent) == 5 + 6


# Clean-up of stale subscriptions


def test_the_clean_up_removes_subscriptions_and_consumers_of_owners_without_token(agent, agents):
    bob = RegisteredAgent(agents, "bob")
    AuthToken.objects.filter(user=agent.owner).delete()
    report = clean_up_stale()
    assert (report.subscriptions, report.found, report.deleted, report.owners) == (2, 2, 2, ["alice@example.org"])
    assert agent.names == {"guardian.dlq"}
    assert not {agent.subscription.rmq_username, agent.consumer.rmq_username} & agents.users()
    assert AgentIdentity.objects.count() == 2
    assert bob.names == bob.registered
    assert (EventSubscription.objects.get(), Consumer.objects.get()) == (bob.subscription, bob.consumer)
    row = Sweep.objects.get()
    assert (row.kind, row.seen, row.subscriptions, row.deleted) == ("stale", 4, 2, 2)


def test_an_owner_who_is_not_active_has_no_live_token(agent):
    type(agent.owner).objects.update(is_active=False)
    report = clean_up_stale()
    assert (report.subscriptions, report.deleted, report.tokens) == (2, 2, 1)
    assert agent.names == {"guardian.dlq"}
    assert not AuthToken.objects.exists()


def test_the_clean_up_deletes_expired_tokens(agent, agents):
    spare = agents.token(agent.owner).token
    now = timezone.now()
    AuthToken.objects.filter(pk=agent.presented.token.pk).update(expiry=now - timedelta(seconds=1))
    AuthToken.objects.filter(pk=spare.pk).update(expiry=now + timedelta(seconds=60))
    report = clean_up_stale()
    assert (report.tokens, report.subscriptions) == (1, 0)
    assert AuthToken.objects.get() == spare
    assert agent.names == agent.registered
    assert not EventSubscription.objects.get().password_set


def test_a_clean_up_of_confirmed_subscriptions_removes_no_others(agent, agents):
    AuthToken.objects.update(expiry=timezone.now() - timedelta(seconds=1))
    report = clean_up_stale(dry_run=True)
    shown = report.stale
    assert (report.subscriptions, report.tokens, report.deleted) == (2, 1, 0)
    assert {one["queue"] for one in report.would_delete} == {agent.queue.queue_name, agent.consumer.queue_name}
    assert (AuthToken.objects.exists(), Sweep.objects.exists(), agent.names) == (True, False, agent.registered)
    assert sorted(shown) == sorted([agent.subscription.uuid.hex, agent.consumer.uuid.hex])
    bob = RegisteredAgent(agents, "bob")
    AuthToken.objects.update(expiry=timezone.now() - timedelta(seconds=1))
    preview = clean_up_stale(dry_run=True, only=shown)
    assert (preview.subscriptions, preview.found, sorted(preview.stale)) == (2, 2, sorted(shown))
    report = clean_up_stale(only=[agent.consumer.uuid.hex])
    assert (report.subscriptions, report.found, report.deleted, report.errors) == (1, 1, 1, [])
    assert {one["queue"] for one in report.left_out} == (agent.registered | bob.registered) - {
        "guardian.dlq",
        agent.consumer.queue_name,
    }
    assert (EventSubscription.objects.count(), Consumer.objects.get()) == (2, bob.consumer)
    assert clean_up_stale(only=[]).subscriptions == 0
    assert bob.names == bob.registered


def test_the_brake_counts_the_queues_of_stale_subscriptions(agent, settings):
    settings.GUARDIAN_DELETE_BRAKE = 1
    AuthToken.objects.update(expiry=timezone.now() - timedelta(seconds=1))
    for _ in range(2):
        report = clean_up_stale()
        assert (report.brake_held, report.found, report.subscriptions) == (True, 2, 0)
    assert agent.names == agent.registered
    (message,) = notifications("sweep-brake")
    assert "cleanup_stale_subscriptions --force" in compose(message).body
    assert clean_up_stale(force=True).deleted == 2
    assert agent.names == {"guardian.dlq"}


def test_a_token_created_during_the_clean_up_keeps_its_owners_subscriptions(agent, monkeypatch):
    AuthToken.objects.all().delete()
    call_after(monkeypatch, stale, "apply_brake", lambda: create_token(agent.owner, "new"))
    report = clean_up_stale()
    assert (report.found, report.deleted, report.subscriptions) == (2, 0, 0)
    assert agent.names == agent.registered


def test_an_uncommitted_token_keeps_its_owners_subscriptions(agent):
    AuthToken.objects.all().delete()
    with transaction.atomic():
        create_token(agent.owner, "new")
        cleaning_up = in_background(clean_up_stale)
        wait_until_blocked(cleaning_up)
    assert cleaning_up.result().subscriptions == 0
    assert agent.names == agent.registered


def test_the_clean_up_without_the_broker_deletes_queues_later(agent, settings, broker):
    AuthToken.objects.all().delete()
    settings.RABBITMQ_MANAGEMENT_URL = AWAY
    assert clean_up_stale().subscriptions == 2
    settings.RABBITMQ_MANAGEMENT_URL = broker.management_url
    Removal.objects.update(due_at=timezone.now() - timedelta(seconds=1), claim=None)
    removals.run_due(50)
    assert agent.names == {"guardian.dlq"}


# Tasks and schedule


def test_the_tasks_sweep_and_clean_up(agent):
    agent.orphan()
    tasks.sweep_orphans()
    tasks.clean_up_stale()
    assert agent.names == agent.registered
    assert sorted(Sweep.objects.values_list("kind", flat=True)) == ["orphans", "stale"]


def test_reports_of_sweeps_are_kept_for_90_days(agent):
    for days in (91, 89):
        Sweep.objects.create(kind="orphans", at=timezone.now() - timedelta(days=days))
    prune()
    assert Sweep.objects.get().at > timezone.now() - timedelta(days=90)
