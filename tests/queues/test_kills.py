"""SIGKILL after each effect of a pass, sender, registration, deletion, replay, move or sweep: the next run finishes it.

A test repeats one action, and kills it after its first effect, after its second one, and so on to its end.
"""

from collections import Counter
from functools import partial

import pika
import pytest

from agents.models import Consumer, Registration, SubscriptionQueue
from agents.registration import queues, vhosts
from agents.removal import deletions
from agents.sweeps import sweep
from notifications import mail_sending, sending
from notifications.models import Notification
from queues.actions import single
from queues.archives import reading, replay
from queues.guard import once
from queues.models import Archive, Queue, QueueEvent
from queues.moves import moving
from rabbit.names import DEAD_LETTER_QUEUE
from tests.conftest import Amqp
from tests.support.faults import killed_after, let_time_pass, run_scheduled_work
from tests.support.toolbox import queue_names, wait_until_equal
from tools.invariants import breaches, count_resent_mails

pytestmark = [pytest.mark.usefixtures("guarded", "pulse_user"), pytest.mark.slow]


ARCHIVE_UPDATED = 'UPDATE "queues_archive" SET'
"""The effect right before and right after a queue is deleted."""


class Agent:
    """An agent of a new owner, with nothing on the broker yet."""

    def __init__(self, agents):
        self.owner = agents.owner()
        self.vhost = self.owner.uuid.hex
        self.presented = agents.token(self.owner)
        self.offering = agents.offering(self.owner)
        self.identity = agents.identity(self.owner, self.offering)

    def subscribe(self):
        subscription, _ = queues.register_subscription(self.identity, "order", self.presented)
        return queues.create_queue(subscription, self.offering, "order", self.presented)[0]

    def consume(self):
        return queues.register_consumer(self.identity, self.presented, None)[0]

    def can_read(self, broker, username, queue):
        address = broker.amqp_url.rpartition("@")[2]
        as_agent = Amqp(f"amqp://{username}:{self.presented.key}@{address}", self.vhost)
        try:
            as_agent.channel.basic_get(queue)
        except pika.exceptions.ChannelClosedByBroker:
            return False
        finally:
            as_agent.connection.close()
        return True


def archived(name):
    """Return the bodies of the messages of each kept archive of a queue, the oldest first."""
    kept = Archive.objects.filter(queue_name=name, state=Archive.State.KEPT).order_by("id")
    return [[int(message.body) for _, message in reading.messages(one)] for one in kept]


def kill_after_each_effect(do, prepare, check):
    """Kill ``do`` after one effect, after two, and so on, and check what follows. Return the number of kills.

    ``do`` gets the value that ``prepare`` returns; ``check`` gets that value and how the process ended.
    """
    kills = 0
    while True:
        prepared = prepare(kills)
        death = killed_after(kills + 1, partial(do, prepared))
        let_time_pass()
        run_scheduled_work()
        check(prepared, death)
        if not death.killed:
            return kills
        kills += 1


def test_a_killed_pass_is_finished_by_the_next_and_notified_once(amqp, guarded, management, mailbox):
    def prepare(number):
        amqp.queue(f"going-{number}")
        once.run_once()
        amqp.channel.queue_delete(f"going-{number}")
        amqp.queue(f"queue/alice/warned-{number}", 6)
        amqp.queue(f"queue/alice/long-{number}", 11)
        return f"queue/alice/long-{number}"

    def check(prepared, death):
        assert breaches(management, [guarded], mailbox.mails) == [], death.effects
        # Once an archive is complete, its queue may have been deleted, so that the next pass keeps it for a day.
        is_complete = ARCHIVE_UPDATED in death.effects and "AMQP queue_delete" not in death.effects
        assert archived(prepared) == [list(range(11))] * (1 + is_complete), death.effects

    kills = kill_after_each_effect(lambda _: once.run_once(), prepare, check)
    assert kills >= 8
    notified = Notification.objects.filter(recipient="alice@example.org").values_list("kind", "facts")
    wanted = [("warning", f"queue/alice/warned-{number}") for number in range(kills + 1)]
    wanted += [("deletion", f"queue/alice/long-{number}") for number in range(kills + 1)]
    assert sorted((kind, facts["queue"]) for kind, facts in notified) == sorted(wanted)
    assert QueueEvent.objects.filter(kind="gone").count() == kills + 1


@pytest.mark.parametrize("do", [single.delete_queue, single.purge_queue])
def test_a_killed_deletion_or_purge_by_a_person_loses_no_message(do, amqp, alice, guarded, management):
    def prepare(number):
        amqp.queue(f"queue/alice/{number}", 5)
        once.run_once()
        return Queue.objects.get(name=f"queue/alice/{number}")

    def check(queue, death):
        kept = [body for one in archived(queue.name) for body in one]
        left = amqp.numbers(queue.name) if queue.name in queue_names(management, guarded) else []
        assert sorted({*kept, *left}) == list(range(5)), death.effects
        assert kept in ([], list(range(5))), death.effects
        if do is single.delete_queue:
            assert not (kept and left), death.effects

    assert kill_after_each_effect(lambda queue: do(queue, alice), prepare, check) >= 8


def test_a_killed_replay_is_finished_and_reports_what_it_repeated(amqp, alice, monkeypatch):
    monkeypatch.setattr(replay, "BATCH", 2)
    name = "queue/alice/jobs"
    amqp.queue(name, 5)
    once.run_once()
    archive = single.delete_queue(Queue.objects.get(name=name), alice).archive
    amqp.queue(name)

    def check(started, death):
        started.refresh_from_db()
        assert (started.state, started.sent, started.in_flight) == ("done", 5, 0), death.effects
        arrived = amqp.numbers(name)
        assert list(dict.fromkeys(arrived)) == list(range(5)), death.effects
        assert len(arrived) - 5 <= started.repeated <= replay.BATCH, death.effects

    kills = kill_after_each_effect(
        lambda _: replay.run_due(), lambda _: replay.start(archive, alice, queue=name), check
    )
    assert kills >= 10


@pytest.mark.parametrize("type_", ["classic", "quorum"])
def test_a_killed_move_is_finished_and_loses_no_message(type_, amqp, alice, monkeypatch):
    monkeypatch.setattr(moving, "BATCH", 2)
    monkeypatch.setattr(moving, "FIRST_BATCH", 2)

    def prepare(number):
        names = f"queue/alice/from-{number}", f"queue/alice/to-{number}"
        for name in names:
            amqp.queue(name, arguments={"x-queue-type": type_})
        amqp.publish(names[0], 5)
        wait_until_equal(lambda: amqp.ready(names[0]), 5)
        once.run_once()
        return names, moving.start(Queue.objects.get(name=names[0]), alice, moving.Destination(queue=names[1]))

    def check(prepared, death):
        (source, target), move = prepared
        move.refresh_from_db()
        assert (move.state, move.error, move.in_flight) == ("done", "", 0), death.effects
        arrived, left = amqp.numbers(target), amqp.numbers(source)
        assert sorted({*arrived, *left}) == list(range(5)), death.effects
        assert len(arrived) + len(left) - 5 <= move.repeated <= moving.BATCH, death.effects
        assert len(left) <= move.repeated, death.effects

    assert kill_after_each_effect(lambda _: moving.run_due(), prepare, check) >= 15


@pytest.mark.parametrize(("together", "mails"), [(1, 3), pytest.param(8, 12, marks=pytest.mark.soak)])
def test_a_killed_sender_repeats_only_mails_it_had_not_recorded(
    settings, guarded, management, mailbox, monkeypatch, together, mails
):
    monkeypatch.setattr(mail_sending, "MAIL_BATCH_SIZE", together)
    settings.GUARDIAN_OPERATOR_EMAILS = [f"op{number}@example.org" for number in range(mails)]
    interrupted = 0

    def prepare(number):
        settings.RABBITMQ_MANAGEMENT_URL = "http://guest:guest@127.0.0.1:1"
        once.run_once()  # an outage, which is notified to all of them
        settings.RABBITMQ_MANAGEMENT_URL = management_url

    def check(prepared, death):
        nonlocal interrupted
        interrupted += death.killed_after_mail if together == 1 else together
        assert breaches(management, [guarded], mailbox.mails, interrupted=interrupted) == [], death.effects

    management_url = settings.RABBITMQ_MANAGEMENT_URL
    kills = kill_after_each_effect(lambda _: sending.send_due(), prepare, check)
    assert kills >= 6
    if together == 1:
        assert count_resent_mails(mailbox.mails) == interrupted == 3
    kinds = Counter(Notification.objects.values_list("kind", "recipient"))
    assert set(kinds.values()) == {kills + 1}


def test_a_killed_registration_is_finished_when_the_agent_repeats_it(agents, broker, management, mailbox):
    def check(agent, death):
        assert breaches(management, [agent.vhost], mailbox.mails) == [], death.effects
        queue = agent.subscribe()
        assert queue.state == Registration.READY
        assert set(agents.queues(agent.vhost)) == {queue.queue_name, DEAD_LETTER_QUEUE}, death.effects
        assert agent.can_read(broker, queue.subscription.rmq_username, queue.queue_name), death.effects

    assert kill_after_each_effect(Agent.subscribe, lambda _: Agent(agents), check) >= 10


def test_a_killed_consumer_registration_is_finished_when_repeated(agents, broker, management, mailbox):
    def prepare(number):
        agent = Agent(agents)
        vhosts.create_vhost(agent.owner, management)
        return agent

    def check(agent, death):
        assert breaches(management, [agent.vhost], mailbox.mails) == [], death.effects
        consumer = agent.consume()
        assert consumer.state == Registration.READY
        assert set(agents.queues(agent.vhost)) == {consumer.queue_name, DEAD_LETTER_QUEUE}, death.effects
        assert agent.can_read(broker, consumer.rmq_username, consumer.queue_name), death.effects

    assert kill_after_each_effect(Agent.consume, prepare, check) >= 6


def test_a_killed_deletion_is_finished_by_the_task(agents, management, mailbox):
    def prepare(number):
        agent = Agent(agents)
        agent.subscribe()
        agent.consume()
        return agent

    def check(agent, death):
        assert breaches(management, [agent.vhost], mailbox.mails) == [], death.effects
        rows = [*SubscriptionQueue.objects.filter(vhost=agent.vhost), *Consumer.objects.filter(vhost=agent.vhost)]
        assert set(agents.queues(agent.vhost)) == {DEAD_LETTER_QUEUE, *(row.queue_name for row in rows)}
        assert len(rows) in (0, 2), death.effects  # all of it, or nothing

    assert kill_after_each_effect(lambda agent: deletions.delete(agent.identity), prepare, check) >= 6


def test_a_killed_sweep_is_finished_by_removals_and_the_next_sweep(agents, management, mailbox):
    agent = Agent(agents)
    queue = agent.subscribe()

    def prepare(number):
        management.declare_queue(agent.vhost, f"subscription_orphan_{number}")
        management.delete_queue(agent.vhost, queue.queue_name)
        let_time_pass()

    def check(prepared, death):
        assert breaches(management, [agent.vhost], mailbox.mails) == [], death.effects
        assert set(agents.queues(agent.vhost)) == {queue.queue_name, DEAD_LETTER_QUEUE}, death.effects

    assert kill_after_each_effect(lambda _: sweep.sweep_orphans(), prepare, check) >= 4
