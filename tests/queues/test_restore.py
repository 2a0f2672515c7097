"""Restores: a deleted queue comes back as it was, with its messages."""

import re

import pika
import pytest

from accounts.models import AuditEntry, PulseUser
from core.confirmation import ConfirmationRequired
from core.refusals import Refusal
from queues.actions import single
from queues.archives import replay, restore
from queues.archives.restore import Wanted
from queues.guard import once
from queues.models import Archive, Queue, Replay
from rabbit.confirmed import KEY_HEADER
from tests.queues.test_kills import kill_after_each_effect
from tests.support.archives import store_archive
from tests.support.toolbox import AWAY, in_parallel

NAME, NEW, EXCHANGE = "queue/alice/builds", "queue/alice/again", "exchange/alice/jobs"


@pytest.fixture(autouse=True)
def world(guarded, pulse_user, amqp, settings):
    settings.GUARDIAN_MAX_QUEUE_LENGTH = 100
    amqp.channel.exchange_declare(EXCHANGE, "topic", durable=True)
    amqp.channel.exchange_declare("exchange/alice/headers", "headers", durable=True)


@pytest.fixture
def deleted(amqp, alice):
    """Return the archive of a queue that alice deleted, declared with these arguments, and bound."""

    def deleted(messages=5, arguments=None, bind=(), **declared):
        amqp.queue(NAME, messages, arguments=arguments, **declared)
        for exchange in bind:
            amqp.channel.queue_bind(NAME, exchange, "build.#")
        once.run_once()
        return single.delete_queue(Queue.objects.get(name=NAME), alice).archive

    return deleted


def bindings(management, vhost, name=NAME):
    return sorted(
        (one.source, one.routing_key, dict(one.arguments))
        for one in management.queue_bindings(vhost, name)
        if one.source
    )


def restored(archive, by, **wanted):
    """Restore an archive to the end, and return its replay."""
    started = restore.start(archive, by, Wanted(**wanted))
    replay.run_due()
    started.refresh_from_db()
    return started


@pytest.mark.rabbitmq
@pytest.mark.parametrize("type_", ["classic", "quorum"])
def test_a_queue_comes_back_as_it_was(amqp, alice, guarded, management, type_):
    arguments = {"x-queue-type": type_, "x-dead-letter-exchange": "exchange/alice/dead"}
    amqp.queue(NAME, arguments=arguments)
    amqp.channel.queue_bind(NAME, EXCHANGE, "build.#")
    headers = {"x-match": "all", "kind": "build", "attempt": 1}
    amqp.channel.queue_bind(NAME, "exchange/alice/headers", "", headers)
    sent = [bytes(range(number, 256)) for number in range(20)]
    properties = pika.BasicProperties(
        content_type="application/x", delivery_mode=2, priority=1, correlation_id="c", reply_to="r", message_id="m",
        timestamp=1_700_000_000, type="t", app_id="a", headers={"n": 1, "text": "ü", "deep": {"list": [1, "2"]}},
    )  # fmt: skip
    for body in sent:
        amqp.channel.basic_publish(EXCHANGE, "build.done", body, properties)
    once.run_once()
    bound = bindings(management, guarded)
    archive = single.delete_queue(Queue.objects.get(name=NAME), alice).archive
    one = restored(archive, alice)
    assert (one.state, one.sent, one.restore["left_out"]) == ("done", 20, [])
    found = management.queue_arguments(guarded, NAME)
    assert (found["type"], found["durable"], found["auto_delete"], found["arguments"]) == (
        type_,
        True,
        False,
        arguments,
    )
    assert bindings(management, guarded) == bound
    arrived = amqp.taken(NAME)
    assert [body for _, _, body in arrived] == sent
    for _, got, _ in arrived:
        headers = {name: value for name, value in got.headers.items() if name not in (KEY_HEADER, "x-delivery-count")}
        assert {**vars(got), "headers": headers} == vars(properties)
    matching = pika.BasicProperties(headers={"kind": "build", "attempt": 1})
    amqp.channel.basic_publish("exchange/alice/headers", "", b"1", matching)
    assert amqp.numbers(NAME) == [1]


def test_an_archive_says_how_its_queue_was_declared_and_bound(deleted, guarded, as_alice):
    archive = deleted(arguments={"x-max-priority": 3}, bind=[EXCHANGE])
    shown = as_alice.get(f"/api/archives/{archive.uuid.hex}/").json()
    assert (shown["type"], shown["durable"], shown["auto_delete"]) == ("classic", True, False)
    assert shown["arguments"]["x-max-priority"] == 3
    assert shown["bindings"] == [{"exchange": EXCHANGE, "routing_key": "build.#", "arguments": {}}]
    page = as_alice.get(f"/archives/{archive.uuid}/").text
    assert '<code class="name">x-max-priority: 3</code>' in page
    assert f"<bdi>{EXCHANGE} with the routing key build.#</bdi>" in page
    older = as_alice.get(f"/archives/{store_archive(b'1').uuid}/").text
    assert "not known: declare the queue before you bring its messages back" in older


def test_a_queue_is_archived_even_if_nobody_says_how_it_was_declared(amqp, alice, settings):
    amqp.queue(NAME, 5)
    once.run_once()
    settings.RABBITMQ_MANAGEMENT_URL = AWAY
    archive = single.delete_queue(Queue.objects.get(name=NAME), alice).archive
    assert (archive.messages, archive.type, archive.arguments, archive.bindings) == (5, None, None, None)


def test_an_archive_without_a_declaration_restores_only_messages(amqp, alice, guarded):
    archive = store_archive(b"0", b"1", vhost=guarded)
    with pytest.raises(Refusal, match="does not say how its queue was declared"):
        restore.start(archive, alice, Wanted())
    amqp.queue(NAME)
    assert restored(archive, alice).state == "done"
    assert amqp.numbers(NAME) == [0, 1]


def test_a_queue_that_exists_again_gets_only_messages(deleted, amqp, alice, guarded, management):
    archive = deleted(arguments={"x-max-priority": 3}, bind=[EXCHANGE])
    amqp.queue(NAME, arguments={"x-max-priority": 5})
    one = restored(archive, alice)
    assert (one.state, one.restore["declares"]) == ("done", False)
    assert one.restore["differences"] == [{"argument": "x-max-priority", "found": 5, "wanted": 3}]
    assert amqp.numbers(NAME) == [0, 1, 2, 3, 4]
    assert bindings(management, guarded) == []


def test_a_queue_declared_otherwise_after_the_restore_was_started_ends_it(deleted, amqp, alice):
    archive = deleted(arguments={"x-max-priority": 3})
    started = restore.start(archive, alice, Wanted())
    amqp.queue(NAME)
    replay.run_due()
    started.refresh_from_db()
    assert (started.state, started.sent) == ("failed", 0)
    assert started.error.startswith("Nothing was sent, because the queue could not be declared.")
    assert restored(archive, alice).state == "done"


def test_an_exchange_that_is_gone_is_listed_whenever_it_went(deleted, amqp, alice, guarded, management):
    archive = deleted(bind=[EXCHANGE, "exchange/alice/headers"])
    amqp.channel.exchange_delete("exchange/alice/headers")
    started = restore.start(archive, alice, Wanted())
    amqp.channel.exchange_delete(EXCHANGE)
    replay.run_due()
    started.refresh_from_db()
    assert started.state == "done"
    assert started.restore["bindings"] == []
    assert [one["what"] for one in started.restore["left_out"]] == [
        f"the binding to {exchange} with the routing key build.#" for exchange in ("exchange/alice/headers", EXCHANGE)
    ]
    assert {one["why"] for one in started.restore["left_out"]} == {"the exchange does not exist"}


def test_what_the_pulse_user_may_not_do_guardian_does_not_do_either(deleted, amqp, alice, guarded, management):
    archive = deleted(arguments={"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "q"}, bind=["amq.topic"])
    one = restored(archive, alice)
    assert [left["what"] for left in one.restore["left_out"]] == [
        "the dead-letter exchange (default)", "the binding to amq.topic with the routing key build.#",
    ]  # fmt: skip
    assert management.queue_arguments(guarded, NAME)["arguments"] == {"x-queue-type": "classic"}
    assert bindings(management, guarded) == []
    assert len(amqp.numbers(NAME)) == 5


def test_a_queue_without_a_pulse_user_is_restored_by_operators_as_it_was(amqp, alice, operator, guarded, management):
    amqp.queue("unpatterned", 3, arguments={"x-dead-letter-exchange": ""})
    amqp.channel.queue_bind("unpatterned", "amq.topic", "#")
    once.run_once()
    archive = single.delete_queue(Queue.objects.get(name="unpatterned"), operator).archive
    assert archive not in Archive.objects.seen_by(alice)
    assert restored(archive, operator).restore["left_out"] == []
    assert bindings(management, guarded, "unpatterned") == [("amq.topic", "#", {})]
    assert amqp.numbers("unpatterned") == [0, 1, 2]


def test_no_queue_of_a_pulse_user_that_is_being_removed_is_restored(deleted, alice):
    archive = deleted()
    PulseUser.objects.update(removing_since=archive.created)
    archive.pulse_user.refresh_from_db()
    with pytest.raises(Refusal, match="is being removed"):
        restore.start(archive, alice, Wanted())


def test_more_than_the_limit_allows_or_a_loss_needs_a_confirmation_for_exactly_that(deleted, amqp, alice, settings):
    archive = deleted(10, arguments={"x-message-ttl": 60_000})
    settings.GUARDIAN_MAX_QUEUE_LENGTH = 8
    with pytest.raises(ConfirmationRequired) as first:
        restore.start(archive, alice, Wanted(last=7))
    assert [one.argument for one in first.value.effect.losses] == ["x-message-ttl"]
    assert not first.value.effect.is_over_limit
    with pytest.raises(ConfirmationRequired) as second:  # for another range
        restore.start(archive, alice, Wanted(), confirm=first.value.confirm)
    assert (second.value.effect.limit, second.value.effect.fits, second.value.effect.is_over_limit) == (8, 8, True)
    assert restore.start(archive, alice, Wanted(), confirm=second.value.confirm).total == 10


def test_the_part_that_fits_is_the_last_and_the_rest_goes_on_after_an_earlier_replay(deleted, amqp, alice, settings):
    archive = deleted(10)
    assert restore.look(archive, alice, Wanted(fitting=True)).replay.first == 1
    settings.GUARDIAN_MAX_QUEUE_LENGTH = 4
    found = restore.look(archive, alice, Wanted(fitting=True))
    assert (found.replay.first, found.replay.last) == (7, 10)
    restored(archive, alice, last=3)
    found = restore.look(archive, alice, Wanted(fitting=True))
    assert (found.replay.first, found.replay.last) == (4, 4)


def test_a_restore_that_is_sent_twice_begins_once(deleted, alice):
    archive, uuid = deleted(60), Replay().uuid
    started = in_parallel(*[lambda: restore.start(archive, alice, Wanted(), uuid=uuid)] * 2)
    assert {one.uuid for one in started} == {uuid}
    assert Replay.objects.count() == 1


def test_a_restore_is_recorded(deleted, alice, as_alice):
    archive = deleted()
    restored(archive, alice, queue=NEW)
    event = archive.queue.events.get(kind="restored")
    assert (event.by, event.details) == (alice, {"length": 5, "to": NEW})
    assert AuditEntry.objects.filter(event="restored").count() == 1
    page = as_alice.get(f"/queues/{archive.queue.uuid}/").text
    assert f"restore started (to {NEW})" in page


def test_a_restore_declares_nothing_once_its_owner_lost_access(deleted, alice, amqp):
    started = restore.start(deleted(), alice, Wanted())
    PulseUser.objects.get().owners.clear()
    replay.run_due()
    started.refresh_from_db()
    assert (started.state, started.error) == ("failed", replay.NO_ACCESS)
    with pytest.raises(pika.exceptions.ChannelClosedByBroker):
        amqp.channel.queue_declare(NAME, passive=True)


@pytest.mark.slow
@pytest.mark.rabbitmq
@pytest.mark.parametrize("type_", ["classic", "quorum"])
def test_a_restore_killed_at_any_step_is_finished_once(amqp, alice, guarded, management, monkeypatch, type_):
    monkeypatch.setattr(replay, "BATCH", 2)
    arguments = {"x-queue-type": type_}
    amqp.queue(NAME, 5, arguments=arguments)
    amqp.channel.queue_bind(NAME, EXCHANGE, "build.#")
    once.run_once()
    archive = single.delete_queue(Queue.objects.get(name=NAME), alice).archive

    def begin_and_run(uuid):
        restore.start(archive, alice, Wanted(), uuid=uuid)
        replay.run_due()

    def check(uuid, death):
        begin_and_run(uuid)  # by a person: the form has the same UUID
        started = Replay.objects.get(uuid=uuid)
        assert (started.state, started.sent) == ("done", 5), death.effects
        assert bindings(management, guarded) == [(EXCHANGE, "build.#", {})], death.effects
        arrived = amqp.numbers(NAME)
        assert list(dict.fromkeys(arrived)) == list(range(5)), death.effects
        assert len(arrived) - 5 <= started.repeated <= replay.BATCH, death.effects
        amqp.channel.queue_delete(NAME)

    assert kill_after_each_effect(begin_and_run, lambda _: Replay().uuid, check) >= 9


def page_of(archive, client, **query):
    return client.get(f"/archives/{archive.uuid}/restore/", query)


def sent_again(page):
    """Return the fields of the form that a page confirms."""
    return dict(
        re.findall(r'type="hidden" name="([a-z]*)" value="([^"]*)"', page[page.index('method="post" class="form"') :])
    )


def test_a_queue_is_restored_on_one_page(deleted, as_alice, alice, amqp):
    archive = deleted(arguments={"x-max-priority": 3}, bind=[EXCHANGE, "amq.topic"])
    assert (
        f'href="/archives/{archive.uuid}/restore/">Bring it back' in as_alice.get(f"/queues/{archive.queue.uuid}/").text
    )
    page = page_of(archive, as_alice).text
    words = " ".join(re.sub("<[^>]*>", "", page).split())
    for what in (
        f"Guardian declares the durable queue {NAME} as it was, with x-",
        "x-max-priority: 3",
        f"It binds the queue to: {EXCHANGE} with the routing key build.#",
        "Guardian sends 5 messages to the queue",
        "Its deletion limit is 100 messages",
        "Without the binding to amq.topic with the routing key build.#: the Pulse user may not read from it.",
    ):
        assert what in words
    answer = as_alice.post(f"/archives/{archive.uuid}/restore/", sent_again(page), follow=True)
    one = Replay.objects.get()
    assert answer.redirect_chain == [(f"/archives/{archive.uuid}/replays/{one.uuid}/", 302)]
    assert "Guardian declares the queue within some seconds" in answer.text
    assert "without <bdi" in answer.text
    replay.run_due()
    assert "declared " in as_alice.get(f"/archives/{archive.uuid}/replays/{one.uuid}/").text
    assert len(amqp.numbers(NAME)) == 5


def test_the_page_offers_the_part_that_fits_and_a_higher_limit(deleted, as_alice, settings):
    archive = deleted(10)
    settings.GUARDIAN_MAX_QUEUE_LENGTH = 4
    page = page_of(archive, as_alice).text
    assert "4 messages, 7 to 10 of 10," in page
    assert f"/queues/{archive.queue.uuid}/limits/ask/" in page
    over = page_of(archive, as_alice, first=1, last=10).text
    assert "Choose the last 4" in over
    assert "Bring the queue back</button>" not in over
    assert as_alice.post(f"/archives/{archive.uuid}/restore/", {"first": 1, "last": 10}).status_code == 409
    assert not Replay.objects.exists()


def test_the_page_confirms_a_loss_or_leaves_its_argument_out(deleted, as_alice, settings):
    archive = deleted(arguments={"x-message-ttl": 60_000})
    address = f"/archives/{archive.uuid}/restore/"
    page = page_of(archive, as_alice).text
    assert "RabbitMQ drops messages that nobody has consumed after 60 seconds" in page
    fields = sent_again(page)
    assert as_alice.post(address, {**fields, "confirm": ""}).status_code == 409
    changed = as_alice.post(address, {**fields, "last": "3"})
    assert (changed.status_code, "for another change" in changed.text) == (409, True)
    leave_out = re.search(r'href="(\?[^"]*)">Leave <code', page)[1].replace("&amp;", "&")
    assert "Messages can be lost" not in as_alice.get(f"{address}{leave_out}").text
    assert as_alice.post(address, fields).status_code == 302


@pytest.mark.parametrize(
    ("query", "error"),
    [
        ({"to": "queue", "name": "queue/bob/builds"}, "starts with queue/alice/"),
        ({"to": "exchange"}, "Enter the name."),
        ({"to": "exchange", "name": "exchange/alice/none"}, "no exchange of this name"),
        ({"last": 4}, "The archive has 3 messages."),
        ({"first": 3, "last": 2}, "Enter 2 or less."),
        ({"to": "queue", "name": "queue/alice/\0"}, "Null characters"),
        ({}, "does not say how its queue was declared"),
    ],
)
def test_the_page_says_what_is_wrong_at_its_field(as_alice, query, error):
    page = page_of(store_archive(b"1", b"2", b"3"), as_alice, **query).text
    assert error in page
    assert 'aria-invalid="true"' in page
    assert "<details open>" in page


def test_without_the_broker_the_page_says_so(deleted, as_alice, settings):
    archive = deleted()
    settings.RABBIT_URL = "amqp://guest:guest@127.0.0.1:1"
    page = page_of(archive, as_alice)
    assert page.status_code == 503
    assert "because the broker does not answer" in page.text


def test_the_api_restores_and_asks_first_if_messages_would_be_lost(deleted, as_alice, amqp):
    archive = deleted(arguments={"x-message-ttl": 60_000}, bind=[EXCHANGE])
    address = f"/api/archives/{archive.uuid.hex}/restore/"
    asked = as_alice.post(address, {}, content_type="application/json")
    assert asked.status_code == 409
    assert asked.json()["effect"]["losses"][0]["argument"] == "x-message-ttl"
    answer = as_alice.post(address, {"confirm": asked.json()["confirm"]}, content_type="application/json")
    assert answer.status_code == 202
    assert answer.json()["restore"]["bindings"] == [{"exchange": EXCHANGE, "routing_key": "build.#", "arguments": {}}]
    replay.run_due()
    assert len(amqp.numbers(NAME)) == 5


def test_the_api_refuses_another_namespace(deleted, as_alice):
    address = f"/api/archives/{deleted().uuid.hex}/restore/"
    answer = as_alice.post(address, {"queue": "queue/bob/builds"}, content_type="application/json")
    assert answer.status_code == 400
    assert "starts with queue/alice/" in answer.json()["queue"][0]
