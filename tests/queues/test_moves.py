"""Moves: messages go from a live queue to another queue, to an exchange, or back to where they died."""

from types import SimpleNamespace

import pika
import pytest
from django.utils import timezone

from accounts.models import Owner, PulseUser
from core.broker import session
from core.refusals import Refusal
from guardian_consumers import _retries as retries
from queues.archives.replay import ORIGINAL_HEADER
from queues.guard import activity, consumer_health, deleter, destroying, monitor
from queues.guard.once import run_once
from queues.models import Move, Queue
from queues.moves import moving, sending_back
from queues.moves.moving import HEADER, Destination, MoveRefused
from queues.moves.sending_back import GroupsUnconfirmed
from queues.rules.activity import Activity, Holder
from queues.rules.dead_letters import SENT_BACK
from rabbit.confirmed import ConfirmedPublisher
from rabbit.errors import BrokerUnavailable
from rabbit.fetching import Bounds, Fetch
from tests.support.proxy import Proxy
from tests.support.toolbox import AWAY_AMQP, call_after, call_before, raising, wait_until, wait_until_equal

FROM, TO = "queue/alice/from", "queue/alice/to"
EXCHANGE = "exchange/alice/jobs"
TYPES = ["classic", "quorum"]


@pytest.fixture(autouse=True)
def small_batches(guarded, pulse_user, settings, monkeypatch):
    settings.GUARDIAN_MAX_QUEUE_LENGTH = 10_000
    monkeypatch.setattr(moving, "BATCH", 10)
    monkeypatch.setattr(moving, "FIRST_BATCH", 10)


@pytest.fixture
def queue(amqp):
    """Return a function that declares a queue with messages, and returns its row."""

    def declare(name, messages=0, type_="classic", **arguments):
        amqp.queue(name, messages, arguments={"x-queue-type": type_, **arguments})
        if type_ == "quorum":
            wait_until_equal(lambda: amqp.ready(name), messages)
        run_once()
        return Queue.objects.get(name=name)

    return declare


def moved(move, *, sent=None, state="done"):
    """Run the task, and check the outcome of the move."""
    moving.run_due()
    move.refresh_from_db()
    assert (move.state, move.error) == (state, "") if state == "done" else move.state == state, move.error
    if sent is not None:
        assert move.sent == sent
    return move


@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize("count", [None, 15])
def test_messages_move_in_their_order(amqp, alice, queue, type_, count):
    source = queue(FROM, 25, type_)
    queue(TO, 0, type_)
    move = moving.start(source, alice, Destination(queue=TO), count)
    assert move.total == (count or 25)
    moved(move, sent=move.total)
    wait_until_equal(lambda: amqp.ready(TO), move.total)
    assert amqp.numbers(TO) == list(range(move.total))
    assert amqp.numbers(FROM) == list(range(move.total, 25))


def test_properties_and_headers_move_along_without_what_routes_or_expires(amqp, alice, queue):
    queue("queue/bob/secret")
    source, _ = queue(FROM), queue(TO)
    death = {"queue": "q", "reason": "expired", "exchange": "", "count": 1}
    headers = {"CC": ["queue/bob/secret"], "n": 1, "x-death": [death], ORIGINAL_HEADER: {"user_id": "guest"}}
    properties = pika.BasicProperties(headers=headers, expiration="60000", message_id="m", delivery_mode=2)
    amqp.channel.basic_publish("", FROM, b"7", properties)
    amqp.taken("queue/bob/secret")
    move = moved(moving.start(source, alice, Destination(queue=TO)), sent=1)
    [(_, got, body)] = amqp.taken(TO)
    assert (body, got.expiration, got.message_id, got.headers["n"]) == (b"7", None, "m", 1)
    assert got.headers[ORIGINAL_HEADER] == {
        "CC": ["queue/bob/secret"], "expiration": "60000", "x-death": [death], "user_id": "guest",
    }  # fmt: skip
    assert got.headers[HEADER].startswith(f"{move.uuid.hex}/1/")
    assert set(got.headers) == {"n", ORIGINAL_HEADER, HEADER}
    assert amqp.taken("queue/bob/secret") == []


@pytest.mark.parametrize("key", [None, "all"])
def test_messages_move_to_an_exchange_with_their_routing_keys_or_another_one(amqp, alice, queue, key):
    source = queue(FROM, 2)
    amqp.channel.exchange_declare(EXCHANGE, "topic")
    amqp.queue("other")
    amqp.channel.queue_bind("other", EXCHANGE, "#")
    moved(moving.start(source, alice, Destination(exchange=EXCHANGE, routing_key=key)), sent=2)
    assert [method.routing_key for method, _, _ in amqp.taken("other")] == [key or FROM] * 2


def test_large_messages_move_in_small_batches(amqp, alice, queue, monkeypatch):
    monkeypatch.setattr(moving, "BATCH_BYTES", 250_000)
    source, _ = queue(FROM), queue(TO)
    for number in range(15):
        amqp.channel.basic_publish("", FROM, str(number).encode().ljust(100_000))
    sizes = []
    real = ConfirmedPublisher.publish
    monkeypatch.setattr(
        ConfirmedPublisher, "publish", lambda self, batch, *to: sizes.append(len(batch)) or real(self, batch, *to)
    )
    moved(moving.start(source, alice, Destination(queue=TO)), sent=15)
    assert sizes == [10, 2, 2, 1]
    assert amqp.numbers(TO) == list(range(15))


def test_a_copy_leaves_the_messages_marked_as_redelivered(amqp, alice, queue):
    source, _ = queue(FROM, 25), queue(TO)
    move = moving.start(source, alice, Destination(queue=TO), is_copy=True)
    moved(move, sent=10)
    assert amqp.numbers(TO) == list(range(10))
    left = amqp.taken(FROM)
    assert [int(body) for _, _, body in left] == list(range(25))
    assert left[0][0].redelivered


def test_a_move_is_refused_with_the_reason(amqp, alice, bob, operator, queue, settings):
    source = queue(FROM, 20)
    queue("queue/alice/empty")
    queue("queue/alice/short", **{"x-max-length": 5})
    quorum = queue("queue/alice/quorum", 1, "quorum")
    PulseUser.objects.create(username="bob", ready=True).owners.add(bob)
    queue("queue/bob/to")
    for of, by, to, why in (
        (source, alice, Destination(queue=FROM), "in this queue already"),
        (source, alice, Destination(queue="queue/bob/to"), "starts with queue/alice/"),
        (source, operator, Destination(queue="queue/bob/to"), "starts with queue/alice/"),
        (source, alice, Destination(exchange="amq.topic"), "starts with queue/alice/"),
        (source, alice, Destination(queue="queue/alice/none"), "no queue or exchange of this name"),
        (source, alice, Destination(), "either a queue or an exchange"),
        (source, alice, Destination(queue="queue/alice/" + "é" * 128), "longer than 255 bytes"),
        (source, alice, Destination(queue="queue/alice/short"), "keeps at most 5 messages in that queue and drops"),
        (source, bob, Destination(queue="queue/alice/empty"), "may no longer move"),
        (Queue.objects.get(name="queue/alice/empty"), alice, Destination(queue=FROM), "no ready messages"),
    ):
        with pytest.raises(Refusal, match=why):
            moving.start(of, by, to)
    with pytest.raises(MoveRefused, match="Only messages of classic queues can be copied"):
        moving.start(quorum, alice, Destination(queue=FROM), is_copy=True)
    settings.GUARDIAN_MAX_QUEUE_LENGTH = 15
    with pytest.raises(Refusal, match="over its deletion limit of 15"):
        moving.start(source, alice, Destination(queue="queue/alice/empty"))
    assert not Move.objects.exists()
    moving.start(source, alice, Destination(queue="queue/alice/empty"), 15)
    with pytest.raises(MoveRefused, match="being moved already"):
        moving.start(source, alice, Destination(queue="queue/alice/short"), 1)


def test_messages_move_to_another_pulse_user_of_the_same_owner(amqp, alice, queue):
    PulseUser.objects.create(username="alice-2", ready=True).owners.add(alice)
    source, _ = queue(FROM, 1), queue("queue/alice-2/to")
    moved(moving.start(source, alice, Destination(queue="queue/alice-2/to")), sent=1)


@pytest.mark.parametrize("type_", TYPES)
def test_a_full_target_ends_a_move_and_loses_nothing(amqp, alice, queue, type_):
    source = queue(FROM, 20, type_)
    queue(TO, 0, **{"x-max-length": 5, "x-overflow": "reject-publish"})
    move = moved(moving.start(source, alice, Destination(queue=TO)), state="failed")
    assert "the queue is full" in move.error
    there, left = amqp.numbers(TO), None
    wait_until_equal(lambda: amqp.ready(FROM), 20 - len(there))
    left = amqp.numbers(FROM)
    assert (sorted(there + left), len(there)) == (list(range(20)), move.sent)
    assert move.sent >= 5


@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize("to", [Destination(queue=TO), Destination(exchange=EXCHANGE)])
def test_a_target_deleted_meanwhile_ends_a_move(amqp, alice, queue, type_, to):
    source = queue(FROM, 20, type_)
    queue(TO)
    amqp.channel.exchange_declare(EXCHANGE, "fanout")
    move = moving.start(source, alice, to)
    amqp.channel.queue_delete(TO)
    amqp.channel.exchange_delete(EXCHANGE)
    moved(move, sent=0, state="failed")
    assert "no queue is bound for it" in move.error or "no longer on the broker" in move.error
    wait_until_equal(lambda: amqp.ready(FROM), 20)
    assert amqp.numbers(FROM) == list(range(20))


@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize(
    "withdraw",
    [
        lambda: PulseUser.objects.get().owners.clear(),
        lambda: Owner.objects.filter(email="alice@example.org").update(is_active=False),
    ],
)
def test_a_move_ends_when_rights_are_withdrawn_midway(amqp, alice, queue, monkeypatch, type_, withdraw):
    source, _ = queue(FROM, 25, type_), queue(TO)
    move = moving.start(source, alice, Destination(queue=TO))
    call_after(monkeypatch, ConfirmedPublisher, "publish", withdraw)
    moved(move, sent=10, state="failed")
    assert move.error == moving.NO_ACCESS
    wait_until_equal(lambda: amqp.ready(FROM), 15)
    assert amqp.numbers(TO) == list(range(10))


def test_a_move_is_stopped_and_sends_nothing_more(amqp, alice, queue, monkeypatch):
    source, _ = queue(FROM, 25), queue(TO)
    move = moving.start(source, alice, Destination(queue=TO))
    call_before(monkeypatch, ConfirmedPublisher, "publish", lambda: moving.stop(move, alice))
    moved(move, sent=10, state="stopped")
    assert (amqp.numbers(TO), amqp.numbers(FROM)) == (list(range(10)), list(range(10, 25)))


def test_a_step_ends_in_time_and_the_next_one_continues(amqp, alice, queue):
    source, _ = queue(FROM, 25), queue(TO)
    move = moving.start(source, alice, Destination(queue=TO))
    assert moving.run_due(0.0) == 0
    moved(move, sent=25)
    assert move.repeated == 0


@pytest.mark.parametrize("type_", TYPES)
def test_lost_confirms_repeat_one_batch_with_the_same_keys(amqp, alice, queue, settings, broker, monkeypatch, type_):
    source, _ = queue(FROM, 25, type_), queue(TO)
    move = moving.start(source, alice, Destination(queue=TO))
    with Proxy.before(broker.amqp_url) as proxy:
        settings.RABBIT_URL = proxy.url(broker.amqp_url)
        call_before(monkeypatch, ConfirmedPublisher, "publish", lambda: proxy.cut_after(0))
        moving.run_due()
    settings.RABBIT_URL = broker.amqp_url
    wait_until_equal(lambda: amqp.ready(FROM), 25)
    assert moved(move, sent=25).repeated == 10
    arrived = amqp.taken(TO)
    assert len({properties.headers[HEADER] for _, properties, _ in arrived}) == 25
    assert sorted({int(body) for _, _, body in arrived}) == list(range(25))


@pytest.mark.parametrize("type_", TYPES)
def test_lost_acknowledgements_repeat_one_batch(amqp, alice, queue, settings, broker, monkeypatch, type_):
    source, _ = queue(FROM, 25, type_), queue(TO)
    move = moving.start(source, alice, Destination(queue=TO))
    with Proxy.before(broker.amqp_url) as proxy:
        settings.RABBIT_URL = proxy.url(broker.amqp_url)
        call_after(monkeypatch, ConfirmedPublisher, "publish", lambda: proxy.cut_after(0))
        moving.run_due()
    settings.RABBIT_URL = broker.amqp_url
    wait_until_equal(lambda: amqp.ready(FROM) + amqp.ready(TO) >= 25, True)
    moving.run_due()
    move.refresh_from_db()
    assert (move.state, move.repeated) == ("done", 10)
    arrived = amqp.taken(TO)
    bodies = [int(body) for _, _, body in arrived]
    assert sorted({*bodies, *amqp.numbers(FROM)}) == list(range(25))
    assert len(bodies) - len({*bodies}) <= 10


def test_without_the_broker_a_move_waits(amqp, alice, queue, settings, broker):
    source, _ = queue(FROM, 5), queue(TO)
    move = moving.start(source, alice, Destination(queue=TO))
    settings.RABBIT_URL = AWAY_AMQP
    assert moving.run_due() == 0
    settings.RABBIT_URL = broker.amqp_url
    assert moved(move, sent=5).repeated == 0


def test_consumers_share_the_queue_with_a_move(amqp, alice, queue):
    source, _ = queue(FROM, 25), queue(TO)
    move = moving.start(source, alice, Destination(queue=TO))
    amqp.take(FROM, 20)
    moved(move, sent=5)


def test_a_single_active_consumer_of_a_quorum_queue_gets_all_messages(amqp, alice, queue):
    source = queue(FROM, 5, "quorum", **{"x-single-active-consumer": True})
    queue(TO)
    amqp.channel.basic_qos(prefetch_count=1)
    amqp.channel.basic_consume(FROM, lambda *_: None)
    move = moving.start(source, alice, Destination(queue=TO))
    moved(move, sent=0, state="failed")
    assert "A single active consumer gets all messages" in move.error


def test_an_auto_delete_queue_is_there_after_a_move(amqp, alice, queue):
    amqp.queue(FROM, 5, auto_delete=True)
    run_once()
    queue(TO)
    moved(moving.start(Queue.objects.get(name=FROM), alice, Destination(queue=TO)), sent=5)
    assert amqp.ready(FROM) == 0


def deliver_once(amqp, source, headers=None):
    """Put two messages into a quorum queue, and return them to it after a first delivery."""
    for _ in range(2):
        amqp.channel.basic_publish("", source.name, b"7", pika.BasicProperties(headers=headers))
    wait_until_equal(lambda: amqp.ready(source.name), 2)
    with session(source.vhost) as opened:
        list(Fetch(opened, source.name, queue_type="quorum").batches(2, Bounds(2, 1000, 2)))
    wait_until_equal(lambda: amqp.ready(source.name), 2)


@pytest.mark.parametrize("lost", [(ConfirmedPublisher, "publish"), (moving._Step, "_key")])
def test_messages_at_their_last_delivery_outlive_a_failure(amqp, alice, queue, lost):
    source, _ = queue(FROM, 0, "quorum", **{"x-delivery-limit": 1}), queue(TO)
    deliver_once(amqp, source)
    move = moving.start(source, alice, Destination(queue=TO))
    real, errors = getattr(*lost), [BrokerUnavailable("the connection was lost")]

    def fail_once(*arguments):
        if errors:
            raise errors.pop()
        return real(*arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(*lost, fail_once)
        moving.run_due()
    wait_until_equal(lambda: amqp.ready(FROM), 2)
    moved(move, sent=2)


def test_a_message_that_goes_to_the_queues_end_is_routed_nowhere_else_and_has_a_key_of_its_own(amqp, alice, queue):
    source = queue(FROM, 0, "quorum", **{"x-delivery-limit": 1})
    queue("queue/bob/secret")
    queue(TO, **{"x-max-length": 0, "x-overflow": "reject-publish"})
    deliver_once(amqp, source, {"CC": ["queue/bob/secret"]})
    amqp.taken("queue/bob/secret")
    moved(moving.start(source, alice, Destination(queue=TO), 1), sent=0, state="failed")
    moved(moving.start(source, alice, Destination(queue=TO), 1), sent=0, state="failed")
    wait_until_equal(lambda: amqp.ready(FROM), 2)
    assert amqp.taken("queue/bob/secret") == []
    keys = [got.headers[HEADER] for _, got, _ in amqp.taken(FROM)]
    assert len(set(keys)) == 2


def test_a_step_goes_on_where_another_process_just_ended_its_step(amqp, alice, queue, monkeypatch):
    source, _ = queue(FROM, 25), queue(TO)
    move = moving.start(source, alice, Destination(queue=TO), 10)
    call_before(monkeypatch, moving, "lock_messages", lambda: Move.objects.update(sent=7))
    moved(move, sent=10)
    assert amqp.ready(TO) == 3


def test_a_queue_about_to_be_deleted_waits_for_the_deleter(amqp, alice, queue):
    source, _ = queue(FROM, 25), queue(TO)
    move = moving.start(source, alice, Destination(queue=TO))
    Queue.objects.filter(name=FROM).update(max_length=20)
    monitor.run_pass()
    with pytest.raises(MoveRefused, match="about to archive and delete"):
        moving.start(Queue.objects.get(name=FROM), alice, Destination(queue=TO), 1)
    with raising(moving, "lock_messages", AssertionError("the deleter needs the lock")):
        assert moving.run_due() == 0
    assert deleter.run().deleted == 1
    run_once()
    moved(move, sent=0, state="failed")
    assert move.error == "The queue is no longer on the broker."


def test_a_move_continues_after_a_deletion_that_was_called_off(amqp, alice, queue):
    source, _ = queue(FROM, 25), queue(TO)
    move = moving.start(source, alice, Destination(queue=TO))
    Queue.objects.filter(name=FROM).update(max_length=20)
    monitor.run_pass()
    amqp.take(FROM, 10)
    assert moving.run_due() == 0
    assert deleter.run().kept == 1
    moved(move, sent=15)


def test_a_move_and_the_deleter_never_fetch_at_the_same_time(amqp, alice, queue, monkeypatch):
    source, _ = queue(FROM, 25), queue(TO)
    moving.start(source, alice, Destination(queue=TO))
    Queue.objects.filter(name=FROM).update(max_length=20)
    outcomes = []

    def decide_and_delete():
        monitor.run_pass()
        outcomes.append(deleter.run().deleted)

    call_before(monkeypatch, ConfirmedPublisher, "publish", decide_and_delete)
    moving.run_due()
    assert outcomes == [0]
    assert Queue.objects.get(name=FROM).state == "deleting"
    assert deleter.run().kept == 1  # 10 of 25 were moved
    with destroying.lock_messages(source.vhost, FROM):
        assert moving.run_due() == 0


def test_the_consumer_of_a_move_is_nobodys(alice, queue):
    source, _ = queue(FROM, 5), queue(TO)
    before = len(consumer_health._stored_states())
    moving.start(source, alice, Destination(queue=TO))
    assert len(consumer_health._stored_states()) == before - 1
    earlier = source.activity
    activity.store(source, Activity(timezone.now(), holders=(Holder("127.0.0.1:1", "guest", 10, 5),)))
    assert Queue.objects.get(pk=source.pk).activity == earlier


DEAD, JOBS = "queue/alice/dead", "queue/alice/jobs"


@pytest.fixture
def dead(request, amqp, queue, management, guarded):
    """Return the row of a queue with five messages that were rejected and three that expired in another queue."""
    lettering = {"dead-letter-exchange": "", "dead-letter-routing-key": DEAD}
    by_argument = getattr(request, "param", "argument") == "argument"
    amqp.channel.exchange_declare(EXCHANGE, "topic")
    queue(JOBS, **({f"x-{name}": value for name, value in lettering.items()} if by_argument else {}))
    if not by_argument:
        put_policy(management, guarded, lettering)
    queue(DEAD)
    amqp.channel.queue_bind(JOBS, EXCHANGE, "build.*")
    for number in range(8):
        if number == 5:
            die(amqp)
        properties = pika.BasicProperties(expiration="1" if number >= 5 else None, headers={"n": number})
        amqp.channel.basic_publish(EXCHANGE, "build.done", str(number).encode(), properties)
    wait_until_equal(lambda: amqp.ready(DEAD), 8)
    run_once()
    return Queue.objects.get(name=DEAD)


def put_policy(management, vhost, definition):
    body = {"pattern": "/jobs$", "apply-to": "queues", "definition": definition}
    management._put("policies", vhost, "dead-letters", json=body)
    wait_until(lambda: management.queue(vhost, JOBS).get("policy"))


def die(amqp):
    """Reject the messages of the work queue that do not expire."""
    while (got := amqp.channel.basic_get(JOBS))[0] is not None:
        amqp.channel.basic_reject(got[0].delivery_tag, requeue=False)


def confirmed(queue, by, *chosen, **options):
    """Send these groups back, all if none is given, as a person who was asked."""
    with pytest.raises(GroupsUnconfirmed) as asked:
        sending_back.send_back(queue, by, **options)
    groups = [asked.value.looked.groups[index].origin.key for index in chosen] or None
    return sending_back.send_back(queue, by, confirm=asked.value.looked.confirm, groups=groups, **options)


@pytest.mark.parametrize("dead", ["argument", "policy"], indirect=True)
def test_dead_letters_are_grouped_and_a_confirmed_group_goes_back(amqp, alice, dead):
    looked = sending_back.look(dead, alice)
    assert [(group.origin.key, group.messages) for group in looked.groups] == [
        ((EXCHANGE, "build.done", "rejected", JOBS), 5),
        ((EXCHANGE, "build.done", "expired", JOBS), 3),
    ]
    move = moved(confirmed(dead, alice, 0), sent=5)
    assert move.kept == 3
    back = amqp.taken(JOBS)
    assert [(method.routing_key, int(body)) for method, _, body in back] == [("build.done", n) for n in range(5)]
    for _, properties, body in back:
        assert {*properties.headers} == {"n", SENT_BACK, HEADER, ORIGINAL_HEADER}
        assert (properties.headers["n"], properties.headers[SENT_BACK]) == (int(body), 1)
        assert properties.headers[ORIGINAL_HEADER]["x-death"][0]["reason"] == "rejected"
    assert sorted(amqp.numbers(DEAD)) == [5, 6, 7]


def test_messages_that_die_again_are_counted(amqp, alice, dead):
    for _ in range(2):
        moved(confirmed(dead, alice), sent=8)
        wait_until_equal(lambda: amqp.ready(JOBS), 8)
        die(amqp)
        wait_until_equal(lambda: amqp.ready(DEAD), 8)
    (group,) = sending_back.look(dead, alice).groups
    assert (group.messages, group.again, group.sent_back, group.origin.reason) == (8, 8, 2, "rejected")


def test_a_strangers_forged_death_sends_nothing_where_the_stranger_chose(amqp, alice, queue):
    """Bob publishes to an exchange of his, to which Alice's dead-letter queue is bound as well."""
    queue(JOBS, **{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": DEAD})
    queue(DEAD)
    queue("queue/bob/secret")
    for name in ("exchange/bob/jobs", EXCHANGE, "exchange/alice/admin"):
        amqp.channel.exchange_declare(name, "topic")
        amqp.queue(f"at {name}")
        amqp.channel.queue_bind(f"at {name}", name, "#")
    amqp.channel.queue_bind(DEAD, "exchange/bob/jobs", "#")
    amqp.channel.queue_bind(JOBS, "exchange/bob/jobs", "never")
    amqp.channel.queue_bind(JOBS, EXCHANGE, "build.*")
    for died_in, exchange, key in (
        ("queue/bob/secret", "", "queue/bob/secret"),
        (JOBS, "", "queue/bob/secret"),
        (JOBS, "exchange/bob/jobs", "never"),
        (JOBS, "exchange/alice/admin", "drop.all"),
        (JOBS, EXCHANGE, "deploy.now"),
    ):
        death = {"queue": died_in, "reason": "rejected", "exchange": exchange, "routing-keys": [key], "count": 1}
        properties = pika.BasicProperties(headers={"x-death": [death], "CC": ["queue/bob/secret"]})
        amqp.channel.basic_publish("exchange/bob/jobs", "x", b"1", properties)
    for name in ("queue/bob/secret", "at exchange/bob/jobs"):
        amqp.taken(name)
    run_once()
    moved(confirmed(Queue.objects.get(name=DEAD), alice), sent=4)
    assert [len(amqp.taken(name)) for name in (JOBS, DEAD)] == [4, 1]  # straight to the queue; the first one stays
    for name in ("queue/bob/secret", "at exchange/bob/jobs", f"at {EXCHANGE}", "at exchange/alice/admin"):
        assert amqp.taken(name) == [], name


def test_a_confirmation_is_for_one_queue_one_person_and_its_groups(alice, operator, dead, queue):
    other = queue("queue/alice/other", 1)
    confirm = sending_back.look(dead, alice).confirm
    unknown = ("exchange/alice/admin", "x", "rejected", JOBS)
    for of, by, groups, text, why in (
        (dead, alice, None, confirm[:-1], "is invalid"),
        (other, alice, None, confirm, "for another queue"),
        (dead, operator, None, confirm, "another person"),
        (dead, alice, [unknown], confirm, "no such group"),
        (dead, alice, [], confirm, "at least one group"),
    ):
        with pytest.raises(MoveRefused, match=why):
            sending_back.send_back(of, by, confirm=text, groups=groups)
    assert not Move.objects.exists()


def test_sending_back_more_than_the_limit_allows_is_refused(alice, dead, settings):
    settings.GUARDIAN_MAX_QUEUE_LENGTH = 7
    with pytest.raises(Refusal, match="over its deletion limit of 7"):
        confirmed(dead, alice)


def test_a_quorum_queue_is_sent_back_whole_or_by_its_first_messages(amqp, alice, queue):
    queue(JOBS, 0, "quorum", **{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": DEAD})
    source = queue(DEAD, 0, "quorum")
    amqp.publish(JOBS, 5)
    wait_until_equal(lambda: amqp.ready(JOBS), 5)
    die(amqp)
    wait_until_equal(lambda: amqp.ready(DEAD), 5)
    amqp.publish(DEAD, 1)  # no dead letter
    wait_until_equal(lambda: amqp.ready(DEAD), 6)
    with pytest.raises(GroupsUnconfirmed, match="can't look at the messages of a quorum queue"):
        sending_back.send_back(source, alice)
    moved(confirmed(source, alice, count=2), sent=2)
    move = moved(confirmed(source, alice), sent=3)
    assert move.kept == 1
    wait_until_equal(lambda: (amqp.ready(JOBS), amqp.ready(DEAD)), (5, 1))


def test_a_quorum_queue_is_not_sent_back_past_the_limit_of_the_queue_in_which_its_messages_died(amqp, alice, queue):
    jobs = queue(JOBS, 0, **{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": DEAD})
    source = queue(DEAD, 0, "quorum")
    amqp.publish(JOBS, 15)
    die(amqp)
    wait_until_equal(lambda: amqp.ready(DEAD), 15)
    Queue.objects.filter(pk=jobs.pk).update(max_length=12)
    move = moved(confirmed(source, alice), sent=10, state="failed")
    assert "over its deletion limit of 12" in move.error
    wait_until_equal(lambda: (amqp.ready(JOBS), amqp.ready(DEAD)), (10, 5))


def test_parked_messages_go_to_their_work_queue_with_all_their_retries(amqp, alice, queue):
    parking = f"{JOBS}.parked"
    queue(JOBS)
    source = queue(parking)
    amqp.channel.exchange_declare(EXCHANGE, "direct")
    amqp.channel.queue_bind(JOBS, EXCHANGE, f"{JOBS}.again")
    amqp.channel.queue_bind(parking, EXCHANGE, parking)
    headers = {
        retries.QUEUE: JOBS, retries.ERROR: "ValueError: no such book", retries.TRACEBACK: "Traceback",
        retries.ATTEMPTS: 4, retries.EXCHANGE: "exchange/bob/shop", retries.ROUTING_KEY: "orders", "n": 1,
    }  # fmt: skip
    amqp.channel.basic_publish(EXCHANGE, parking, b"7", pika.BasicProperties(headers=headers))
    moved(confirmed(source, alice), sent=1)
    [(method, got, _)] = amqp.taken(JOBS)
    original = got.headers[ORIGINAL_HEADER]
    assert (original[retries.ATTEMPTS], original[retries.ERROR]) == (4, "ValueError: no such book")
    assert {*got.headers} & {retries.ERROR, retries.TRACEBACK, retries.QUEUE} == set()
    # As the toolkit's next consumer reads it:
    delivery = SimpleNamespace(properties=got, exchange=method.exchange, routing_key=method.routing_key)
    assert retries.attempts_of(got.headers) == 0
    assert retries.first_published(delivery) == ("exchange/bob/shop", "orders")
