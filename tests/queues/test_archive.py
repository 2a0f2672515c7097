"""Archives: what is kept of a queue that is deleted or purged, and what is not."""

import os
import time
import uuid
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from urllib.parse import urlsplit

import pytest
from amqp import Message, spec
from django.db.models.functions import Now
from django.utils import timezone

from accounts.models import PulseUser
from core import broker as core_broker
from core import locks
from core.leases import LEASE_SECONDS
from core.models import Lease
from notifications.models import Notification
from queues.actions import peek, single
from queues.archives import outcomes, reading, writing
from queues.guard import destroying
from queues.guard.destroying import NotSent, Target, WithinLimit
from queues.guard.once import run_once
from queues.models import Archive, ArchiveChunk, Queue, Replay
from queues.rules import shares
from rabbit import fetching
from rabbit.amqp import Session
from rabbit.errors import BrokerUnavailable, NotOnBroker
from rabbit.fetching import Fetch, Undecoded
from rabbit.permissions import Permissions
from tests.support.archives import store_archive
from tests.support.faults import once_after
from tests.support.proxy import Proxy
from tests.support.raw_messages import MANY_HEADERS, Raw
from tests.support.toolbox import (
    Killed,
    amqp_answers_lost,
    call_after,
    call_before,
    full_disk,
    in_background,
    queue_lengths,
    queue_names,
    raising,
    sent,
    stored_queue,
    wait_until_blocked,
    wait_until_equal,
)

NAME = "queue/alice/builds"

pytestmark = pytest.mark.usefixtures("guarded", "pulse_user")


@pytest.fixture
def listed(amqp, alice):
    """Return a queue with 8 messages of Alice's Pulse user."""
    amqp.queue(NAME, 8)
    run_once()
    return Queue.objects.get()


def bodies(one):
    return [message.body for _, message in reading.messages(one)]


def target(vhost, **changes):
    return Target(**{"vhost": vhost, "name": NAME, "type": "classic", "reason": Archive.Reason.LENGTH, **changes})


@pytest.fixture
def delete(guarded):
    def delete(limit=None, unacknowledged=0, **changes):
        with core_broker.session(guarded) as session:
            return destroying.delete_queue(
                session, target(guarded, **changes), limit=limit, unacknowledged=unacknowledged
            )

    return delete


@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_messages_of_a_deleted_queue_are_archived_in_order(amqp, delete, management, guarded, kind):
    amqp.queue(NAME, 25, arguments={"x-queue-type": kind})
    removed = delete(type=kind)
    assert queue_names(management, guarded) == set()
    assert (removed.archived, removed.dropped, removed.why_not) == (25, 0, "")
    kept = Archive.objects.get()
    assert (kept.state, kept.messages, kept.queue_name, kept.vhost) == ("kept", 25, NAME, guarded)
    assert bodies(kept) == [b"%d" % number for number in range(25)]
    assert kept.bytes == sum(len(body) for body in bodies(kept))


def test_a_queue_that_others_empty_during_the_fetch_is_put_back(amqp, delete, management, guarded, monkeypatch):
    amqp.queue(NAME, 20)
    call_after(monkeypatch, Fetch, "declare_passively", lambda: amqp.take(NAME, 15))
    with pytest.raises(WithinLimit):
        delete(limit=10)
    assert not Archive.objects.exists()
    assert queue_names(management, guarded) == {NAME}
    amqp.take(NAME, 5)


def test_a_queue_that_grows_faster_than_it_is_fetched_is_archived_up_to_its_length_at_first(amqp, guarded):
    amqp.queue(NAME, 1200)
    batches = []

    def grow():
        amqp.publish(NAME, 600)
        batches.append(600)

    with core_broker.session(guarded) as session:
        removed = destroying.delete_queue(session, target(guarded), limit=1000, between=grow)
    assert (removed.archived, removed.dropped) == (1200, sum(batches))
    assert len(batches) == 3
    assert bodies(removed.archive) == [b"%d" % number for number in range(1200)]


@pytest.mark.parametrize(
    "arguments",
    [
        {"x-max-priority": 5},
        {"x-max-length": 30, "x-overflow": "reject-publish"},
        {"x-single-active-consumer": True},
        {"x-message-ttl": 600_000, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"},
    ],
    ids=lambda arguments: ",".join(arguments),
)
def test_queues_with_these_arguments_are_archived_and_nothing_is_dead_lettered(amqp, delete, arguments):
    amqp.queue("dead")
    amqp.queue(NAME, 25, arguments=arguments)
    assert delete().archived == 25
    assert amqp.ready("dead") == 0


def test_properties_and_headers_of_every_type_are_archived(amqp, delete, guarded, broker):
    at = datetime(2026, 1, 5, 12, tzinfo=UTC).replace(tzinfo=None)
    headers = {
        "bool": True, "int": -5, "long": 2**40, "float": 0.5, "text": "ö", "bytes": b"\xff", "nothing": None,
        "decimal": Decimal("1.25"), "at": at, "list": [1, "a"], "table": {"deep": {"er": 1}},
    }  # fmt: skip
    properties = {
        "content_type": "application/json", "content_encoding": "gzip", "delivery_mode": 2, "priority": 3,
        "correlation_id": "c", "reply_to": "r", "expiration": "600000", "message_id": "m",
        "timestamp": 1767614400, "type": "t", "app_id": "a",
        "user_id": urlsplit(broker.amqp_url).username,
    }  # fmt: skip
    amqp.queue(NAME)
    with Session(broker.amqp_url, guarded) as session:
        channel = session.new_channel()
        channel.confirm_select()
        message = Message(b"\x00\xff", application_headers=headers, **properties)
        channel.basic_publish(message, "", NAME)
        channel.wait(spec.Basic.Ack)
    [(_, kept)] = reading.messages(delete().archive)
    assert kept.body == b"\x00\xff"
    assert kept.headers == headers
    assert kept.properties == properties


def test_what_is_past_the_bounds_is_deleted_without_a_copy(amqp, delete, settings):
    settings.GUARDIAN_ARCHIVE_MAX_MESSAGES = 6
    amqp.queue(NAME, 10)
    removed = delete()
    assert (removed.archived, removed.dropped, Archive.objects.get().dropped) == (6, 4, 4)
    settings.GUARDIAN_ARCHIVE_MAX_BYTES = 1000
    amqp.queue(NAME, 3)
    amqp.channel.basic_publish("", NAME, b"x" * 1001)
    removed = delete()
    assert (removed.archived, removed.dropped) == (3, 1)


def test_a_connection_cut_in_the_middle_of_a_fetch_returns_the_messages(amqp, delete, settings, broker):
    amqp.queue(NAME, 1000)
    with Proxy.before(broker.amqp_url) as proxy:
        settings.RABBIT_URL = proxy.url(broker.amqp_url)
        proxy.cut_after(50_000)
        with pytest.raises(NotSent):
            delete()
    settings.RABBIT_URL = broker.amqp_url
    assert [one.state for one in Archive.objects.all()] == ["open"]
    removed = delete()
    assert (removed.archived, removed.dropped) == (1000, 0)
    assert [one.state for one in Archive.objects.all()] == ["kept"]
    assert bodies(removed.archive) == [b"%d" % number for number in range(1000)]


@pytest.mark.parametrize(
    ("settings_", "changes", "why"),
    [
        ({"GUARDIAN_ARCHIVE_DAYS": 0}, {}, "archives are switched off"),
        ({}, {"is_archived": False}, "archives are switched off for it"),
    ],
)
def test_without_archives_a_queue_is_deleted_and_counted(amqp, delete, settings, settings_, changes, why):
    for name, value in settings_.items():
        setattr(settings, name, value)
    amqp.queue(NAME, 10)
    removed = delete(**changes)
    assert (removed.archive, removed.dropped, removed.why_not) == (None, 10, why)


@pytest.mark.parametrize(("kind", "messages"), [("stream", 3), ("classic", 0)])
def test_a_stream_or_an_empty_queue_is_deleted_without_an_archive(amqp, delete, management, guarded, kind, messages):
    amqp.queue(NAME, messages, arguments={"x-queue-type": kind})
    assert delete(type=kind).archive is None
    assert (queue_names(management, guarded), Archive.objects.exists()) == (set(), False)


@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_without_permission_to_read_a_queue_is_deleted_without_an_archive(
    amqp, delete, management, guarded, settings, broker, create_pulse_user, kind
):
    name = create_pulse_user("deleter")
    management.set_permissions(guarded, name, Permissions(".*", ".*", "^$"))
    amqp.queue(NAME, 10, arguments={"x-queue-type": kind})
    settings.RABBIT_URL = f"amqp://{name}:secret@{broker.amqp_url.rpartition('@')[2]}"
    removed = delete(type=kind)
    assert (removed.archive, removed.dropped) == (None, 10)
    assert "ACCESS_REFUSED" in removed.why_not
    assert Archive.objects.get().error == removed.why_not


def test_headers_count_to_the_bounds_and_are_not_decoded(amqp, delete, settings):
    settings.GUARDIAN_ARCHIVE_MAX_BYTES = 100 * len(MANY_HEADERS)
    amqp.queue(NAME)
    for _ in range(120):
        amqp.channel.basic_publish("", NAME, b"", Raw(MANY_HEADERS))
    began = time.process_time()
    removed = delete()
    assert time.process_time() - began < 3  # decoding 100 takes 4 s
    assert (removed.archived, removed.dropped) == (99, 21)
    found = [message.headers for _, message in reading.messages(removed.archive, 50, 1)]
    assert [len(headers) for headers in found] == [16_000]


def test_a_quorum_queue_with_a_single_active_consumer_is_deleted_at_once_without_an_archive(amqp, delete):
    amqp.queue(NAME, 20, arguments={"x-queue-type": "quorum", "x-single-active-consumer": True})
    amqp.channel.basic_qos(prefetch_count=1)
    amqp.channel.basic_consume(NAME, lambda *_: None)
    wait_until_equal(lambda: amqp.ready(NAME), 19)
    began = time.monotonic()
    removed = delete(type="quorum")
    assert time.monotonic() - began < fetching.SILENCE_SECONDS
    assert (removed.archive, removed.dropped, removed.why_not) == (None, 19, destroying.PASSED_OVER)


def test_a_database_that_fails_in_the_middle_does_not_stop_the_deletion(amqp, delete, management, guarded, alice):
    amqp.queue(NAME, 700)  # two batches
    with full_disk(ArchiveChunk, rows=1):
        removed = delete()
    assert queue_names(management, guarded) == set()
    assert (removed.archive, removed.dropped, removed.why_not) == (None, 700, "the database could not store it")
    failed = Archive.objects.get()
    assert (failed.state, failed.error, failed.messages) == ("failed", "the database could not store it", 0)
    assert failed.expires > timezone.now() + timedelta(days=6)
    assert not ArchiveChunk.objects.exists()
    assert not Archive.objects.seen_by(alice).exists()


def test_after_two_failed_attempts_a_queue_is_deleted_without_an_archive(listed, delete, alice):
    assert single.why_not_archived(listed, alice) == ""
    with raising(destroying, "store_batch", Killed):
        for _ in range(destroying.MAX_ATTEMPTS):
            with pytest.raises(Killed):
                delete()
    assert single.why_not_archived(Queue.objects.get(), alice) == "2 attempts failed"  # the page says it before
    removed = delete()
    assert (removed.archive, removed.dropped, removed.why_not) == (None, 8, "2 attempts failed")
    failed = Archive.objects.get()
    assert (failed.state, failed.error, failed.dropped) == ("failed", "2 attempts failed", 8)


def test_after_a_lost_answer_the_archive_waits_for_the_next_list(listed, alice, broker, settings, monkeypatch, amqp):
    amqp.queue("another")
    run_once()
    with amqp_answers_lost(broker, settings, monkeypatch, "queue_delete"), pytest.raises(BrokerUnavailable):
        single.delete_queue(listed, alice)
    kept = Archive.objects.get()
    assert (kept.state, Archive.objects.seen_by(alice).count()) == ("fetched", 0)
    for _ in range(2):
        run_once()
    assert Archive.objects.seen_by(alice).get() == kept
    assert len(bodies(kept)) == 8


def test_a_deletion_by_an_owner_is_archived_for_the_pulse_user(listed, alice):
    removed = single.delete_queue(listed, alice)
    kept = Archive.objects.seen_by(alice).get()
    assert (kept.messages, kept.reason, kept.by, kept.queue) == (8, "deleted", alice, listed)
    assert kept.pulse_user == PulseUser.objects.get(username="alice")
    assert outcomes.outcome_in_words(removed).startswith("Archived until ")


def test_a_queue_deleted_with_its_pulse_user_is_archived_whatever_is_stored_of_other_vhosts(amqp, guarded, alice):
    stored_queue(NAME, vhost="another", type="stream")
    amqp.queue(NAME, 8)
    run_once()
    with core_broker.session(guarded) as session:
        destroying.delete_queue_of_pulse_user(session, NAME, PulseUser.objects.get(username="alice"), lambda: None)
    kept = Archive.objects.seen_by(alice).get()
    assert (kept.messages, kept.reason, kept.queue.vhost) == (8, "account", guarded)


def test_a_purge_is_archived_and_keeps_the_queue(listed, alice, amqp):
    single.purge_queue(listed, alice)
    assert amqp.ready(NAME) == 0
    assert bodies(Archive.objects.get()) == [b"%d" % number for number in range(8)]
    assert Archive.objects.get().reason == "purged"
    assert Queue.objects.get().fetch_attempts == 0


@pytest.mark.parametrize("room", [100, 10_000_000], ids=["no room", "full disk"])
def test_a_purge_empties_a_queue_whose_archive_fails_midway(listed, alice, amqp, settings, room):
    amqp.publish(NAME, 1300)
    settings.GUARDIAN_ARCHIVE_TOTAL_BYTES = shares.SHARE * room
    with full_disk(ArchiveChunk, rows=1):
        removed = single.purge_queue(listed, alice)
    assert (amqp.ready(NAME), removed.archive) == (0, None)


def test_archives_are_deleted_when_they_expire(listed, alice):
    single.delete_queue(listed, alice)
    assert writing.enforce_bounds() == 0
    Archive.objects.update(expires=timezone.now())
    writing.enforce_bounds()
    assert not Archive.objects.exists()
    assert not ArchiveChunk.objects.exists()


def test_an_expired_archive_stays_until_its_messages_are_sent(listed, alice):
    single.delete_queue(listed, alice)
    Archive.objects.update(expires=timezone.now())
    Replay.objects.create(archive=Archive.objects.get(), to_queue=NAME, first=1, last=1, created=timezone.now())
    writing.enforce_bounds()
    assert Archive.objects.exists()
    Replay.objects.update(state=Replay.State.DONE)
    writing.enforce_bounds()
    assert not Archive.objects.exists()


def test_the_oldest_archives_of_an_owner_make_room_for_new_ones(amqp, alice, settings):
    for number in range(4):
        amqp.queue(f"{NAME}/{number}", 5)
    run_once()
    for queue in Queue.objects.order_by("name"):
        single.delete_queue(queue, alice)
    size = Archive.objects.first().stored_bytes
    settings.GUARDIAN_ARCHIVE_TOTAL_BYTES = shares.SHARE * 2 * size
    writing.enforce_bounds()
    assert {one.queue_name for one in Archive.objects.all()} == {f"{NAME}/2", f"{NAME}/3"}


@pytest.mark.parametrize(("room", "promised"), [(10_000, 0), (30_000, 25_000)], ids=["too large", "promised"])
def test_a_queue_without_room_in_its_owners_share_is_deleted_without_a_copy_and_nobody_is_promised_one(
    amqp, settings, room, promised
):
    settings.GUARDIAN_ARCHIVE_TOTAL_BYTES = shares.SHARE * room
    if promised:
        store_archive(name="queue/alice/other", state="open", stored_bytes=promised)
    amqp.queue(NAME)
    for _ in range(12):
        amqp.channel.basic_publish("", NAME, os.urandom(1000))
    assert run_once().deleted == 1
    assert not Archive.objects.filter(state="kept").exists()
    facts = Notification.objects.get(kind="deletion", recipient="alice@example.org").facts
    assert (facts["archived"], facts["dropped"], facts["archive"]) == (0, 12, "")
    assert facts["why_not_archived"] == destroying.SHARE_TAKEN


def test_two_archives_of_one_owner_do_not_take_the_same_room(settings, monkeypatch):
    settings.GUARDIAN_ARCHIVE_TOTAL_BYTES = shares.SHARE * 1500
    one, other = (store_archive(name=f"{NAME}/{number}", state="open") for number in range(2))
    batch, others = [Undecoded(b"", os.urandom(1000), False)], []

    def store_other():
        others.append(in_background(writing.store_batch, other, batch))
        wait_until_blocked(others[0])

    call_after(monkeypatch, writing, "_room", store_other)
    writing.store_batch(one, batch)
    assert isinstance(others[0].exception(), writing.TooLarge)
    assert ArchiveChunk.objects.get().archive == one


def test_only_operators_see_the_archives_of_a_deleted_pulse_user_and_no_new_one_of_its_name(listed, alice, operator):
    single.delete_queue(listed, alice)
    PulseUser.objects.all().delete()
    assert Archive.objects.seen_by(alice).count() == 0
    PulseUser.objects.create(username="alice", ready=True).owners.add(alice)
    assert Archive.objects.seen_by(alice).count() == 0
    assert Archive.objects.seen_by(operator).count() == 1


def test_a_large_message_is_archived_whole(amqp, delete):
    amqp.queue(NAME)
    amqp.channel.basic_publish("", NAME, b"x" * 16_000_000)  # RabbitMQ 4.x refuses more than 16 MiB
    delete()
    assert [len(body) for body in bodies(Archive.objects.get())] == [16_000_000]


def test_a_queue_is_not_deleted_or_purged_while_it_is_deleted(amqp, delete, guarded, monkeypatch):
    amqp.queue(NAME, 10)

    def purge():
        with core_broker.session(guarded) as session:
            destroying.purge_queue(session, target(guarded))

    def destroy_meanwhile():
        for destroy in (delete, purge):
            with pytest.raises(NotSent, match="another request"):
                destroy()

    call_before(monkeypatch, destroying, "store_batch", destroy_meanwhile)
    assert delete().archived == 10
    assert len(bodies(Archive.objects.get())) == 10


def test_the_lock_of_a_queue_is_renewed_while_its_messages_are_fetched(amqp, delete, guarded, monkeypatch):
    amqp.queue(NAME, 1200)
    monkeypatch.setattr(locks, "RENEW_INTERVAL_SECONDS", 0)
    batches = []

    def renewed_since_the_last_batch():
        assert Lease.objects.filter(expires_at__gt=Now() + timedelta(seconds=LEASE_SECONDS - 30)).exists()
        Lease.objects.update(expires_at=Now() + timedelta(seconds=30))
        batches.append(1)

    with core_broker.session(guarded) as session:
        destroying.delete_queue(session, target(guarded), between=renewed_since_the_last_batch)
    assert len(batches) == 3


@pytest.mark.parametrize("step", ["fetching", "the deletion"])
def test_a_queue_whose_lock_expired_stays_with_its_messages(amqp, guarded, monkeypatch, step):
    amqp.queue(NAME, 600)

    def expire(*_):
        Lease.objects.update(holder=uuid.uuid4())  # another process has it

    if step == "the deletion":
        monkeypatch.setattr(destroying, "_declare_again", lambda attempt: expire() or 0)
    with core_broker.session(guarded) as session:
        with pytest.raises(NotSent, match="another request"):
            destroying.delete_queue(
                session, target(guarded), limit=10, between=expire if step == "fetching" else lambda: None
            )
        wait_until_equal(lambda: session.declare_passively(NAME).ready, 600)


def test_a_purge_with_a_lost_answer_keeps_the_archive(listed, alice, broker, settings, monkeypatch, amqp):
    with amqp_answers_lost(broker, settings, monkeypatch, "queue_purge"), pytest.raises(BrokerUnavailable):
        single.purge_queue(listed, alice)
    assert len(bodies(Archive.objects.seen_by(alice).get())) == 8
    amqp.publish(NAME, 3)
    single.purge_queue(listed, alice)
    assert sorted(one.messages for one in Archive.objects.seen_by(alice)) == [3, 8]


def test_an_archive_of_an_unknown_deletion_survives_a_redeclared_queue(
    listed, alice, broker, settings, monkeypatch, amqp
):
    with amqp_answers_lost(broker, settings, monkeypatch, "queue_delete"), pytest.raises(BrokerUnavailable):
        single.delete_queue(listed, alice)
    amqp.queue(NAME, 2)
    single.delete_queue(listed, alice)
    archives = Archive.objects.seen_by(alice)
    assert sorted(one.messages for one in archives) == [2, 8]
    assert min(one.expires for one in archives) > timezone.now() + timedelta(days=6)


def held_by_an_earlier_attempt(amqp, vhost, **fields):
    """Return an unfinished archive of a queue whose 10 messages an unknown channel still holds."""
    amqp.queue(NAME, 10)
    for _ in range(10):
        amqp.channel.basic_get(NAME)
    return store_archive(*[b"x"] * 10, name=NAME, vhost=vhost, **fields)


@pytest.mark.parametrize("ready", [0, 1, 6])
def test_a_queue_waits_for_the_messages_that_an_interrupted_attempt_holds(amqp, delete, guarded, ready):
    one = held_by_an_earlier_attempt(amqp, guarded, state="open")
    amqp.publish(NAME, ready)
    with pytest.raises(NotSent, match="return from an earlier attempt"):
        delete(5, unacknowledged=10, held=10)
    Archive.objects.update(created=one.created - destroying.RETURN_TIME)
    assert delete(5, unacknowledged=10, held=10).archived == ready


def test_a_queue_gets_its_messages_back_if_its_leader_is_lost_after_they_were_fetched(amqp, guarded, monkeypatch):
    amqp.queue(NAME, 20)
    declare = Fetch.declare_passively
    monkeypatch.setattr(destroying, "ELECTION_SECONDS", 0)
    monkeypatch.setattr(Fetch, "declare_passively", lambda fetch: None if fetch.fetched else declare(fetch))
    with core_broker.session(guarded) as session:
        with pytest.raises(NotSent, match="leader did not answer"):
            destroying.delete_queue(session, target(guarded), limit=10)
        wait_until_equal(lambda: session.declare_passively(NAME).ready, 20)


def test_an_archive_is_kept_if_the_attempt_that_fetched_it_still_holds_the_messages(amqp, delete, guarded):
    one = held_by_an_earlier_attempt(amqp, guarded, state="fetched")
    amqp.publish(NAME, 2)
    for _ in range(2):
        amqp.channel.basic_get(NAME)
    removed = delete(5, unacknowledged=12, held=12)
    assert (removed.archive, removed.archived, removed.held) == (one, 10, 2)
    assert Archive.objects.get().state == "kept"


@pytest.mark.parametrize(("messages", "auto_delete"), [(12, False), (600, False), (12, True)])
def test_a_queue_declared_again_while_it_is_archived_stays(amqp, guarded, messages, auto_delete):
    amqp.queue(NAME, messages, auto_delete=auto_delete)

    def declare_again():
        amqp.channel.queue_delete(NAME)
        amqp.queue(NAME, 3, auto_delete=auto_delete)

    steps = iter([declare_again])
    archived = replace(target(guarded), is_auto_delete=auto_delete)
    with core_broker.session(guarded) as session, pytest.raises((NotOnBroker, NotSent)):
        destroying.delete_queue(session, archived, limit=10, between=lambda: next(steps, bool)())
    assert amqp.ready(NAME) == 3
    assert not Archive.objects.filter(state="kept").exists()


def test_a_queue_that_is_gone_while_it_is_archived_takes_no_room_of_its_owners_archives(amqp, guarded):
    amqp.queue(NAME, 12)
    with core_broker.session(guarded) as session, pytest.raises(NotOnBroker):
        destroying.delete_queue(session, target(guarded), limit=10, between=lambda: amqp.channel.queue_delete(NAME))
    assert not Archive.objects.exists()


def test_a_queue_declared_again_after_its_archive_failed_stays(amqp, delete, monkeypatch):
    amqp.queue(NAME, 12)

    def declare_again():
        amqp.channel.queue_delete(NAME)
        amqp.queue(NAME, 3)

    call_after(monkeypatch, Fetch, "cancel", declare_again)
    with raising(destroying, "store_batch", writing.TooLarge), pytest.raises(NotSent):
        delete(10)
    assert amqp.ready(NAME) == 3


@pytest.mark.parametrize("declared", [{"arguments": {"x-queue-type": "quorum"}}, {"auto_delete": True}], ids=str)
def test_a_queue_declared_again_in_another_way_is_archived_after_a_new_decision(amqp, guarded, declared, monkeypatch):
    amqp.queue(NAME, 11)

    def declare_again():
        amqp.channel.queue_delete(NAME)
        amqp.queue(NAME, 15, **declared)
        Queue.objects.update(delete_sent_at=timezone.now() - timedelta(minutes=2))  # as after a lost answer

    once_after(monkeypatch, "the decision", declare_again)
    assert run_once().deleted == 0
    wait_until_equal(lambda: queue_lengths(core_broker.management(), guarded), {NAME: 15})
    assert run_once().deleted == 1
    assert Archive.objects.get().messages == 15


@pytest.fixture
def auto_delete(amqp, guarded):
    """Return an auto-delete queue of 150 messages that never had a consumer."""
    amqp.queue(NAME, 150, durable=False, auto_delete=True)


def test_an_auto_delete_queue_is_archived_whole_and_its_deletion_notified(auto_delete):
    report = run_once()
    assert (report.deleted, report.errors) == (1, [])
    assert Archive.objects.get().messages == 150
    assert sent("alice@example.org") == ["deletion"]


def test_an_auto_delete_queue_stays_when_its_messages_are_viewed_or_purged(auto_delete, alice, settings, amqp):
    settings.GUARDIAN_MAX_QUEUE_LENGTH = 1000
    run_once()
    assert len(peek.peek(Queue.objects.get(), alice, 5)) == 5
    wait_until_equal(lambda: amqp.ready(NAME), 150)
    assert single.purge_queue(Queue.objects.get(), alice).archived == 150
    assert amqp.ready(NAME) == 0
