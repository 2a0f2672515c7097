"""Watching messages as they arrive: who may, what is shown, and how it ends."""

from datetime import timedelta

import pika
import pytest
from django.utils import timezone

from accounts.access.vouching import NotVouched
from accounts.models import AuditEntry, Owner
from core.refusals import Refusal
from queues.guard.once import run_once
from queues.models import MessageWatch, Queue
from queues.watching import polling, starting
from rabbit import watch_queue
from rabbit.errors import BrokerUnavailable
from rabbit.names import WATCH_QUEUE
from tests.support.api import Program
from tests.support.toolbox import AWAY_AMQP, queue_lengths, queue_names, stored_queue, wait_until

pytestmark = [pytest.mark.rabbitmq, pytest.mark.usefixtures("guarded", "pulse_user")]

EVENTS = "exchange/alice/events"


@pytest.fixture
def publish(amqp):
    """Return a function that publishes to Alice's topic exchange, and waits until RabbitMQ has routed it."""
    amqp.channel.exchange_declare(EVENTS, "topic", durable=True)
    amqp.channel.confirm_delivery()

    def publish(key, body=b"{}", exchange=EVENTS, **options):
        amqp.channel.basic_publish(exchange, key, body, **options)

    return publish


def caught(watch):
    return [(one.routing_key, one.body) for one in polling.poll(watch).messages]


def test_copies_of_what_matches_are_shown_once_and_in_order(publish, alice, amqp, management, vhost):
    amqp.queue("queue/alice/builds")
    amqp.channel.queue_bind("queue/alice/builds", EVENTS, "#")
    watch = starting.start_at_exchange(alice, EVENTS, "build.*")
    for key in ("build.done", "test.done", "build.failed"):
        publish(key, key.encode())
    assert caught(watch) == [("build.done", b"build.done"), ("build.failed", b"build.failed")]
    publish("build.late")
    assert polling.poll(watch).first == 3
    assert queue_lengths(management, vhost)["queue/alice/builds"] == 4
    entry = AuditEntry.objects.get(event=starting.WATCHED)
    assert (entry.actor, entry.outcome, entry.additional_data["routing_keys"]) == (alice, "done", ["build.*"])


def test_the_bindings_of_a_queue_are_watched_through_other_exchanges_too(amqp, alice, publish, vhost, pulse_user):
    amqp.channel.exchange_declare("exchange/bob/all", "fanout", durable=True)
    amqp.channel.exchange_declare("exchange/alice/typed", "headers", durable=True)
    amqp.channel.exchange_bind("exchange/bob/all", EVENTS, "build.#")
    queue = stored_queue("queue/alice/builds", vhost=vhost, pulse_user=pulse_user)
    amqp.queue(queue.name)
    amqp.channel.queue_bind(queue.name, "exchange/bob/all")
    amqp.channel.queue_bind(queue.name, "exchange/alice/typed", "", {"x-match": "any", "kind": "a", "size": 3})
    watch = starting.start_at_queue(alice, queue)
    publish("build.done")
    publish("test.done")
    for headers in ({"kind": "a"}, {"kind": "b"}, {"size": 3}):
        publish("typed", exchange="exchange/alice/typed", properties=pika.BasicProperties(headers=headers))
    assert [key for key, _ in caught(watch)] == ["build.done", "typed", "typed"]


def test_what_comes_too_fast_is_counted_as_missed(publish, alice):
    watch = starting.start_at_exchange(alice, EVENTS, "#")
    assert polling.poll(watch).missed is None
    for number in range(130):
        publish("build", str(number).encode())
    first = polling.poll(watch)
    assert [one.body for one in first.messages] == [str(number).encode() for number in range(30, 130)]
    missed = [first.missed]

    def is_counted():
        missed.append(polling.poll(watch).missed)
        return sum(one or 0 for one in missed) == 30

    wait_until(is_counted)
    assert missed[-1] == 30


@pytest.mark.parametrize(
    ("exchange", "key", "reason"),
    [
        ("", "#", "The default exchange can't be watched"),
        ("amq.topic", "#", "None of your Pulse users may read an exchange with this name, or there is none."),
        ("exchange/alice/none", "#", "None of your Pulse users may read an exchange with this name, or there is none."),
        ("exchange/alice/spare", "#", "it has an alternate exchange"),
        (EVENTS, "\N{PILE OF POO}" * 64, "at most 255 bytes"),
    ],
)
def test_an_exchange_is_refused_with_the_reason(amqp, publish, alice, exchange, key, reason):
    amqp.channel.exchange_declare("exchange/alice/spare", "topic", arguments={"alternate-exchange": EVENTS})
    with pytest.raises(Refusal, match=reason):
        starting.start_at_exchange(alice, exchange, key)
    assert not MessageWatch.objects.exists()


def test_a_queue_is_refused_with_the_reason(amqp, alice, publish, vhost, pulse_user, monkeypatch):
    monkeypatch.setattr(starting, "MAX_BINDINGS", 1)
    queue = stored_queue("queue/alice/builds", vhost=vhost, pulse_user=pulse_user)
    amqp.queue(queue.name)
    for bound_to, reason in (
        ("", "No exchange is bound to the queue"),
        ("amq.topic", "may read the exchange amq"),
        (EVENTS, "more than 1 bindings"),
    ):
        if bound_to:
            amqp.channel.queue_bind(queue.name, bound_to, "#")
        with pytest.raises(Refusal, match=reason):
            starting.start_at_queue(alice, queue)


def test_people_without_access_or_a_pulse_user_watch_nothing(publish, alice, operator):
    with pytest.raises(Refusal, match="None of your Pulse users"):
        starting.start_at_exchange(operator, EVENTS, "#")
    watch = starting.start_at_exchange(alice, EVENTS, "#")
    Owner.objects.filter(pk=alice.pk).update(vouched=False)
    watch = MessageWatch.objects.get()
    for refused in (lambda: polling.poll(watch), lambda: starting.start_at_exchange(watch.owner, EVENTS, "#")):
        with pytest.raises(NotVouched):
            refused()


def test_watches_end_when_their_owner_no_longer_owns_the_pulse_user(publish, amqp, alice, bob, vhost, pulse_user):
    queue = stored_queue("queue/alice/builds", vhost=vhost, pulse_user=pulse_user)
    amqp.queue(queue.name)
    amqp.channel.queue_bind(queue.name, EVENTS, "#")
    watches = [starting.start_at_exchange(alice, EVENTS, "#"), starting.start_at_queue(alice, queue)]
    pulse_user.owners.set([bob])
    for watch in watches:
        with pytest.raises(polling.Ended, match="may no longer see"):
            polling.poll(watch)
    assert not MessageWatch.objects.exists()


def test_an_owner_runs_two_watches_and_all_owners_fifty(publish, alice, bob, pulse_user, monkeypatch):
    for _ in range(2):
        starting.start_at_exchange(alice, EVENTS, "#")
    with pytest.raises(Refusal, match="2 watches at once"):
        starting.start_at_exchange(alice, EVENTS, "#")
    pulse_user.owners.add(bob)
    monkeypatch.setattr(starting, "MAX_WATCHES", 2)
    with pytest.raises(Refusal, match="for all owners"):
        starting.start_at_exchange(bob, EVENTS, "#")
    MessageWatch.objects.update(polled_at=timezone.now() - timedelta(seconds=61))  # their pages were closed
    starting.start_at_exchange(bob, EVENTS, "#")


def test_a_pass_lists_no_queue_of_a_watch(publish, alice, management, vhost):
    watch = starting.start_at_exchange(alice, EVENTS, "#")
    assert WATCH_QUEUE + watch.uuid.hex in queue_names(management, vhost)
    run_once()
    assert not Queue.objects.exists()


def test_a_watch_ends_when_its_time_is_over_or_its_queue_is_gone(publish, alice, management, vhost):
    watches = [starting.start_at_exchange(alice, EVENTS, "#") for _ in range(2)]
    watches[0].ends = timezone.now()
    management.delete_queue(vhost, WATCH_QUEUE + watches[1].uuid.hex)
    for watch in watches:
        with pytest.raises(polling.Ended):
            polling.poll(watch)
    assert not MessageWatch.objects.exists()
    assert queue_names(management, vhost) == set()


def test_a_sweep_deletes_queues_without_a_row_and_rows_that_nobody_polls(publish, alice, management, vhost):
    running, closed = (starting.start_at_exchange(alice, EVENTS, "#") for _ in range(2))
    MessageWatch.objects.filter(pk=closed.pk).update(polled_at=timezone.now() - timedelta(seconds=61))
    management.declare_queue(vhost, "guardian.watch.of-somebody-else")
    assert polling.sweep() == 2
    assert queue_names(management, vhost) == {WATCH_QUEUE + running.uuid.hex, "guardian.watch.of-somebody-else"}
    assert list(MessageWatch.objects.all()) == [running]


def test_the_queue_of_a_watch_expires_that_nobody_polls(publish, alice, management, vhost, monkeypatch):
    assert watch_queue.ARGUMENTS["x-expires"] == 60_000
    monkeypatch.setitem(watch_queue.ARGUMENTS, "x-expires", 2000)  # later than it is bound
    starting.start_at_exchange(alice, EVENTS, "#")
    wait_until(lambda: not queue_names(management, vhost))


def test_a_failed_start_leaves_no_row(publish, alice, settings):
    settings.RABBIT_URL = AWAY_AMQP
    with pytest.raises(BrokerUnavailable):
        starting.start_at_exchange(alice, EVENTS, "#")
    assert not MessageWatch.objects.exists()


def test_the_page_shows_messages_as_they_arrive(publish, as_alice):
    started = as_alice.post("/exchanges/watch/", {"exchange": EVENTS, "routing_key": "build.#"})
    assert "0 messages shown, missed: unknown until RabbitMQ has counted" in as_alice.get(started["Location"]).text
    publish("build.<b>", b'{"a": "<b>"}')
    page = as_alice.get(started["Location"]).text
    assert "build.&lt;b&gt;" in page
    assert "1 message shown" in page
    publish("build.late")
    update = as_alice.get(started["Location"], headers={"HX-Request": "true"}).text
    assert ("build.late" in update, "build.&lt;b&gt;" in update, "<html" in update) == (True, False, False)
    assert as_alice.post(f"{started['Location']}stop/", follow=True).redirect_chain == [("/exchanges/", 302)]
    assert "The watch has ended." in as_alice.get(started["Location"], headers={"HX-Request": "true"}).text
    assert as_alice.get(started["Location"]).status_code == 404


def test_the_page_says_why_a_watch_is_refused(as_alice):
    page = as_alice.post("/exchanges/watch/", {"exchange": "amq.topic", "routing_key": "#"}).text
    assert "None of your Pulse users may read" in page


def test_the_api_starts_reads_and_ends_a_watch(publish, alice, bob):
    program = Program(alice)
    started = program.post("watches/", {"exchange": EVENTS, "routing_key": "#"})
    assert (started.status_code, set(started.json())) == (201, {"uuid", "ends"})
    publish("build")
    path = f"watches/{started.json()['uuid']}/"
    answer = program.get(path).json()
    assert [(one["position"], one["routing_key"], one["body"]) for one in answer["messages"]] == [(1, "build", {})]
    assert answer["missed"] in (None, 0)  # RabbitMQ may have counted it already
    assert Program(bob).get(path).status_code == 404
    assert (program.delete(path).status_code, program.get(path).status_code) == (204, 404)


def test_the_api_refuses_at_the_field(alice):
    program = Program(alice)
    assert set(program.post("watches/", {"exchange": ""}).json()) == {"exchange"}
    assert set(program.post("watches/", {"queue": "0" * 32}).json()) == {"queue"}
    assert program.post("watches/", {}).json() == {"non_field_errors": ["Give either an exchange or a queue."]}
