"""Failures of everything around Guardian: nothing is lost or repeated, and the right people are notified."""

import uuid
from contextlib import ExitStack
from datetime import timedelta

import pika
import pytest
from django.utils import timezone

import rabbit.amqp
from accounts.models import PulseUser
from core import broker
from core.models import Lease
from notifications import mails
from notifications.models import Notification
from queues import tasks
from queues.actions import rates, single
from queues.archives import reading, replay
from queues.archives.definitions import require_permission
from queues.guard import monitor, once
from queues.models import Archive, Pass, Queue, Watch
from queues.rules import charts
from rabbit import confirmed, snapshot
from rabbit.errors import BrokerUnavailable, NotOnBroker, Refused
from rabbit.fetching import Fetch
from rabbit.management import Management
from rabbit.permissions import FULL_ACCESS
from tests.conftest import Amqp
from tests.support.faults import STEPS, let_time_pass, once_after, once_before, run_scheduled_work
from tests.support.proxy import Proxy, http_answer
from tests.support.toolbox import (
    AWAY_AMQP,
    amqp_answers_lost,
    call_before,
    calling_first,
    disk_alarm,
    login_without_configure,
    memory_alarm,
    queue_events,
    queue_names,
    queue_row,
    raising,
    sent,
    wait_until,
    wait_until_equal,
)
from tools.invariants import breaches

pytestmark = pytest.mark.usefixtures("guarded", "pulse_user")


@pytest.fixture
def builds(guarded, pulse_user, amqp):
    """Declare a queue of Alice's that is over its limit, and return its name."""
    amqp.queue("queue/alice/builds", 11)
    return "queue/alice/builds"


def test_an_outage_is_notified_once_at_its_start_and_once_at_its_end(settings, broker, caplog):
    settings.RABBITMQ_MANAGEMENT_URL = "http://guest:secret-word@127.0.0.1:1"
    for _ in range(3):
        assert once.run_once().away
    assert sent("ops@example.org") == ["outage"]
    assert "could not be queried" in caplog.text
    assert "secret-word" not in caplog.text + str(Notification.objects.get().facts)
    settings.RABBITMQ_MANAGEMENT_URL = broker.management_url
    assert not once.run_once().away
    once.run_once()
    assert sent("ops@example.org") == ["outage", "outage-over"]


def test_during_an_outage_the_task_waits_and_the_backoff_grows_to_its_maximum(settings):
    settings.RABBITMQ_MANAGEMENT_URL = "http://guest:guest@127.0.0.1:1"
    waits = []
    for _ in range(6):
        once.run_once()
        waits.append(round(monitor.seconds_to_wait() + 0.5))  # the pass took a part of the time
    assert waits == [1, 2, 4, 8, 16, 32]
    tasks.monitor_queues()
    assert Pass.objects.count() == 6


def test_queues_of_an_unlisted_vhost_stay_and_the_others_are_judged(vhosts, broker, settings, monkeypatch):
    listed, broken_vhost = Management.list_queues, vhosts[0]
    settings.GUARDIAN_VHOSTS = vhosts[:2]
    once.run_once()
    before = list(Queue.objects.filter(vhost=broken_vhost).values())

    def fail(self, vhost, params):
        if vhost == broken_vhost:
            raise BrokerUnavailable("no answer")
        return listed(self, vhost, params)

    monkeypatch.setattr(Management, "list_queues", fail)
    Amqp(broker.amqp_url, vhosts[1]).publish("a", 11)
    reports = [once.run_once() for _ in range(2)]
    assert [report.errors for report in reports] == [[f"vhost '{broken_vhost}' could not be listed: no answer"]] * 2
    assert list(Queue.objects.filter(vhost=broken_vhost).values()) == before
    assert Queue.objects.get(vhost=vhosts[1]).state == "gone"


@pytest.mark.parametrize(
    "answer",
    [
        http_answer("200 OK", b"<html>maintenance</html>"),
        http_answer("200 OK", b'[{"name": "a"}]'),
        http_answer("200 OK", b""),
        http_answer("500 Internal Server Error", b'{"error": "internal_error", "reason": "bad\\u0000match"}'),
        b"HTTP/1.1 200 OK\r\nContent-Length: 9000\r\n\r\n[{",
    ],
    ids=["html", "incomplete rows", "an empty body", "a 500 with a NUL", "a truncated answer"],
)
def test_an_answer_that_is_no_list_of_queues_removes_nothing(amqp, broker_proxy, management, guarded, answer):
    amqp.queue("queue/alice/builds", 3)
    amqp.queue("long", 3)
    once.run_once()
    before = list(Queue.objects.order_by("id").values())
    amqp.publish("long", 10)
    broker_proxy.answer(answer)
    for _ in range(4):
        assert once.run_once().away
    assert list(Queue.objects.order_by("id").values()) == before
    assert queue_names(management, guarded) == {"long", "queue/alice/builds"}
    assert sent("ops@example.org") == ["outage"]


def test_a_queue_consumed_since_the_list_is_kept(builds, amqp, monkeypatch, management, guarded):
    once_after(monkeypatch, "the list", lambda: amqp.take(builds, 4))
    report = once.run_once()
    assert (report.deleted, report.kept) == (0, 1)
    assert queue_names(management, guarded) == {builds}
    assert Queue.objects.get().state == "warned"
    (warning,) = Notification.objects.filter(recipient="alice@example.org")
    assert (warning.kind, warning.facts["length"]) == ("warning", 7)


def test_a_queue_deleted_by_somebody_else_is_gone_but_not_reported_as_deleted(builds, amqp, monkeypatch):
    amqp.queue("another")
    once_before(monkeypatch, "the recheck", lambda: amqp.channel.queue_delete(builds))
    report = once.run_once()
    assert report.deleted == 0
    assert [once.run_once().gone for _ in range(2)] == [0, 1]
    assert sent("alice@example.org") == []
    assert queue_events(builds) == ["condemned", "gone"]


@pytest.mark.parametrize(
    ("model", "limit"),
    [(Queue, {"max_length": 20}), (PulseUser, {"max_length": 20}), (Queue, {"unbounded": True})],
    ids=["the queue's limit", "the Pulse user's limit", "unbounded"],
)
def test_a_queue_spared_while_others_are_deleted_stays(amqp, monkeypatch, management, guarded, model, limit):
    for name, length in (("first", 12), ("second", 11)):
        amqp.queue(f"queue/alice/{name}", length)
    PulseUser.objects.update(max_length=10)
    once_before(monkeypatch, "the deletion", lambda: model.objects.update(**limit))
    report = once.run_once()
    assert (report.deleted, report.kept, report.errors) == (1, 1, [])
    assert once.run_once().deleted == 0
    assert queue_names(management, guarded) == {"queue/alice/second"}
    assert Queue.objects.get(name="queue/alice/second").state == "warned"
    assert sorted(sent("alice@example.org")) == ["deletion", "warning"]


def test_a_queue_redeclared_right_after_its_deletion_counts_as_deleted(builds, guarded, monkeypatch, management):
    once_after(monkeypatch, "the deletion", lambda: management.declare_queue(guarded, builds))
    assert once.run_once().deleted == 1
    once.run_once()
    assert sent("alice@example.org") == ["deletion"]
    assert Queue.objects.get().state == "ok"
    assert queue_events(builds) == ["condemned", "deleted", "returned"]


def test_a_deletion_with_a_lost_answer_is_notified_once_the_list_lacks_the_queue(
    builds, amqp, monkeypatch, settings, broker
):
    amqp.queue("another")
    with amqp_answers_lost(broker, settings, monkeypatch, "queue_delete"):
        report = once.run_once()
        assert (report.deleted, len(report.errors), sent("alice@example.org")) == (0, 1, [])
        assert [once.run_once().deleted for _ in range(2)] == [0, 1]
    assert sent("alice@example.org") == ["deletion"]
    facts = Notification.objects.get(kind="deletion", recipient="alice@example.org").facts
    assert (facts["archived"], facts["dropped"]) == (11, 0)


@pytest.mark.parametrize("step", ["the recheck", "the deletion"])
def test_a_deletion_carried_out_after_its_timeout_is_notified_once(builds, amqp, monkeypatch, step):
    amqp.queue("another")
    with raising(Fetch, "delete_queue", BrokerUnavailable("no answer", timed_out=True)):
        assert once.run_once().deleted == 0
    once_before(monkeypatch, step, lambda: amqp.channel.queue_delete(builds))
    assert sum(once.run_once().deleted for _ in range(4)) == 1
    assert sent("alice@example.org") == ["deletion"]


def test_a_refused_deletion_is_notified_to_operators_once_and_the_owner_warned(
    amqp, settings, broker, management, guarded
):
    with login_without_configure(management, guarded, broker) as settings.RABBIT_URL:
        amqp.queue("queue/alice/builds", 11)
        reports = [once.run_once() for _ in range(3)]
        Queue.objects.update(delete_sent_at=timezone.now() - timedelta(minutes=1))
        reports.append(once.run_once())
    assert Queue.objects.get().delete_sent_at  # a request without an answer may still be carried out
    assert all("no permission to delete" in report.errors[0] for report in reports)
    assert sent("alice@example.org") == ["warning"]
    assert sent("ops@example.org") == ["warning", "refused"]
    assert queue_events("queue/alice/builds") == ["condemned"]
    settings.RABBIT_URL = broker.amqp_url
    assert once.run_once().deleted == 1
    assert Archive.objects.get().messages == 11


@pytest.mark.parametrize("pattern", ["^[[:lower:]]+/", None], ids=["only PCRE reads it", "another backend"])
def test_a_permission_that_is_uncertain_is_left_to_the_broker(management, guarded, create_pulse_user, pattern):
    user = create_pulse_user("deleter")
    if pattern:
        management.set_permissions(guarded, user, FULL_ACCESS._replace(configure=pattern))
    require_permission(user, guarded, "queue/alice/builds")


def test_a_deletion_that_is_refused_after_the_fetch_leaves_the_messages_and_no_archive(builds, amqp, monkeypatch):
    refused = Refused("locked", status=405, reason="locked")
    with raising(Fetch, "delete_queue", refused):
        for _ in range(3):
            assert "locked" in once.run_once().errors[0]
    assert amqp.ready(builds) == 11
    assert not Archive.objects.exists()
    assert once.run_once().deleted == 1
    assert Archive.objects.get().messages == 11


def test_a_full_vhost_is_named_to_operators_with_the_remedy(amqp, guarded, management):
    amqp.queue("queue/alice/builds", 11)
    management._put("vhost-limits", guarded, "max-connections", json={"value": 1})
    try:
        once.run_once()
    finally:
        management._delete("vhost-limits", guarded, "max-connections")
    assert sent("ops@example.org") == ["warning", "refused"]
    mail = mails.compose(Notification.objects.get(kind="refused")).body
    assert "connection limit (1) is reached" in mail
    assert "raise the limit that the reason names, with room for Guardian" in " ".join(mail.split())
    assert "permissions" not in mail
    assert once.run_once().deleted == 1
    assert Watch.objects.get().refused_since is None


def test_intermittent_short_lists_confirm_no_deletion_and_are_notified_once_an_hour(amqp, settings, monkeypatch):
    settings.GUARDIAN_DELETE_BRAKE = 2
    for number in range(12):
        amqp.queue(f"q{number}")
    once.run_once()
    Queue.objects.filter(name="q11").update(state="deleting", delete_sent_at=timezone.now())  # by a killed pass
    listed = Management.list_queues
    for _ in range(3):
        with monkeypatch.context() as patched:
            patched.setattr(Management, "list_queues", lambda *arguments: listed(*arguments)[:4])
            report = once.run_once()
            assert (report.deleted, "more than the brake allows" in report.errors[0]) == (0, True)
        once.run_once()
    assert sent("ops@example.org") == ["short-list"]


def expire_lease():
    Lease.objects.update(expires_at=timezone.now() - timedelta(seconds=1))


def test_invalid_columns_are_unknown_and_their_queues_are_guarded_like_the_others(
    guarded, amqp, management, monkeypatch
):
    lengths = [{"messages_ready": length} for length in ("7", -3, 2**70, True)]
    others = [
        {"type": None}, {"type": 5}, {"type": "x" * 300}, {"durable": None}, {"node": 3}, {"arguments": None},
    ]  # fmt: skip
    wrong = {f"q{number}": changed for number, changed in enumerate([*lengths, *others])}
    for name in (*wrong, "right"):
        amqp.queue(name, 11)
    listed = Management.list_queues

    def list_wrong_columns(*arguments):
        return [{**row, **wrong.get(row["name"], {})} for row in listed(*arguments)]

    with monkeypatch.context() as patched:
        patched.setattr(Management, "list_queues", list_wrong_columns)
        report = once.run_once()
    assert (report.queues, report.unknown, report.deleted, report.errors) == (11, 4, 7, [])
    assert queue_names(management, guarded) == {"q0", "q1", "q2", "q3"}


def test_a_missing_guarded_vhost_is_an_error_in_the_report(amqp, guarded, settings):
    settings.GUARDIAN_VHOSTS = [guarded, "no-such-vhost"]
    amqp.queue("a")
    report = once.run_once()
    assert report.queues == 1
    assert report.errors == ["vhost 'no-such-vhost' isn't on the broker; see GUARDIAN_VHOSTS"]


@pytest.mark.parametrize(("status", "is_away"), [(503, False), (0, True)])
def test_a_pass_begins_again_once_if_the_list_fails_as_while_a_node_starts(monkeypatch, status, is_away):
    def fail():
        raise BrokerUnavailable("the list failed", status=status)

    monkeypatch.setattr(monitor, "NODE_CHANGE_SECONDS", 0)
    call_before(monkeypatch, snapshot, "take", fail)
    assert once.run_once().away == is_away


def test_without_amqp_nothing_is_deleted_and_operators_are_notified(amqp, settings, broker):
    settings.RABBIT_URL = AWAY_AMQP
    amqp.queue("queue/alice/builds", 11)
    for _ in range(2):
        report = once.run_once()
        assert (report.deleted, "can't connect over AMQP" in report.errors[0]) == (0, True)
    assert sent("ops@example.org") == ["warning", "refused"]
    settings.RABBIT_URL = broker.amqp_url
    assert once.run_once().deleted == 1


@pytest.mark.parametrize("step", ["the list", "the recheck"])
def test_a_pass_that_lost_its_lease_deletes_nothing_and_says_so(builds, monkeypatch, management, guarded, step):
    once_after(monkeypatch, step, expire_lease)
    report = once.run_once()
    assert report.deleted == 0
    assert "lease" in report.errors[-1]
    assert queue_names(management, guarded) == {builds}


def test_a_pass_that_lost_its_lease_records_no_outage():
    with raising(snapshot, "take", BrokerUnavailable("away")), calling_first(snapshot, "take", expire_lease):
        assert "lease" in once.run_once().errors[-1]
    assert Watch.objects.get().outage_since is None


def test_a_pass_that_lost_its_lease_does_not_record_a_missing_queue(builds):
    gone = raising(Fetch, "delete_queue", NotOnBroker("no such queue"))
    with gone, calling_first(Fetch, "delete_queue", expire_lease):
        assert once.run_once().deleted == 0
    assert Queue.objects.get().state == "deleting"


def test_messages_published_after_a_purge_survive_a_slow_network(
    builds, amqp, monkeypatch, settings, broker, management
):
    def purge_and_publish():
        amqp.channel.queue_purge(builds)
        amqp.publish(builds, 1)

    with Proxy.before(broker.amqp_url) as proxy:
        settings.RABBIT_URL = proxy.url(broker.amqp_url)
        proxy.delay(0.1)
        once_after(monkeypatch, "the recheck", purge_and_publish)
        report = once.run_once()
    assert (report.deleted, report.kept, report.errors) == (0, 1, [])
    assert amqp.ready(builds) == 1
    assert once.run_once().deleted == 0
    assert Queue.objects.get().state == "ok"
    assert sent("alice@example.org") == []


@pytest.mark.parametrize("step", STEPS)
def test_a_vhost_deleted_during_a_pass_is_not_reported_as_guardians_deletion(
    amqp, guarded, settings, management, mailbox, broker, monkeypatch, step
):
    other = f"{guarded}-other"
    settings.GUARDIAN_VHOSTS = [guarded, other]
    management.create_vhost(other)
    there = Amqp(broker.amqp_url, other)
    there.queue("short", 1)
    there.queue("long", 11)
    amqp.queue("queue/alice/builds", 6)

    def delete():
        there.connection.close()
        management.delete_vhost(other)

    once_after(monkeypatch, step, delete)
    assert once.run_once().deleted == (step == "the deletion")
    assert other not in {one.name for one in management.vhosts()}
    let_time_pass()
    run_scheduled_work()
    assert breaches(management, [guarded], mailbox.mails) == []
    assert set(Queue.objects.filter(vhost=other).values_list("state", flat=True)) <= {"gone"}
    assert Notification.objects.filter(kind="deletion").count() == (step == "the deletion")
    assert sent("alice@example.org") == ["warning"]


@pytest.fixture
def guardians_user(guarded, settings, broker, management):
    """Let Guardian use a RabbitMQ user of its own, with password ``first``, and return its name."""
    name = f"guardian-{uuid.uuid4().hex[:8]}"
    management.put_user(name, "first", ["administrator"])
    management.set_permissions(guarded, name, FULL_ACCESS)
    for setting in ("RABBITMQ_MANAGEMENT_URL", "RABBIT_URL"):
        scheme, _, rest = getattr(settings, setting).partition("://")
        setattr(settings, setting, f"{scheme}://{name}:first@{rest.rpartition('@')[2]}")
    yield name
    management.delete_user(name)


@pytest.mark.parametrize("what", ["its permissions", "itself"])
def test_guardians_rabbitmq_user_that_is_restored_on_the_broker_lost_nothing(
    guardians_user, amqp, guarded, management, mailbox, what
):
    amqp.queue("queue/alice/short", 1)
    once.run_once()
    amqp.queue("queue/alice/builds", 11)
    if what == "its permissions":
        management.delete_permissions(guarded, guardians_user)
    else:
        management.delete_user(guardians_user)
    reports = [once.run_once() for _ in range(3)]
    assert all("401" in report.errors[0] or "refused" in report.errors[0] for report in reports)
    assert queue_names(management, guarded) == {"queue/alice/builds", "queue/alice/short"}
    assert Queue.objects.get(name="queue/alice/short").misses == 0
    assert len([kind for kind in sent("ops@example.org") if kind in ("outage", "refused")]) == 1
    management.put_user(guardians_user, "first", ["administrator"])
    management.set_permissions(guarded, guardians_user, FULL_ACCESS)
    run_scheduled_work()
    assert breaches(management, [guarded], mailbox.mails) == []
    assert queue_names(management, guarded) == {"queue/alice/short"}
    assert sent("alice@example.org")[-1] == "deletion"


def test_a_hung_queue_is_notified_to_operators_and_others_are_guarded(guarded_node, settings, monkeypatch):
    settings.GUARDIAN_BROKER_TIMEOUT_SECONDS = 2
    monkeypatch.setattr(rabbit.amqp, "TIMEOUT_SECONDS", 1)
    amqp = Amqp(guarded_node.amqp_url, "/")
    amqp.queue("hung")
    amqp.queue("long", 7)
    once.run_once()
    pid = 'amqqueue:get_pid(element(2, rabbit_amqqueue:lookup(rabbit_misc:r(<<"/">>, queue, <<"hung">>))))'
    amqp.publish("hung", 12)
    amqp.publish("long", 8)
    statistics = broker.management().queue  # statistics lag by seconds
    wait_until_equal(lambda: statistics("/", "hung").get("messages"), 12)
    wait_until_equal(lambda: statistics("/", "long").get("messages"), 15)
    guarded_node.eval(f"sys:suspend({pid}).")
    report = once.run_once()
    assert any("does not respond" in error for error in report.errors)
    assert report.deleted == 1
    assert "unresponsive" in sent("ops@example.org")
    hung = Notification.objects.filter(facts__queue="hung", recipient="ops@example.org")
    assert [notification.kind for notification in hung] == ["warning"]
    guarded_node.eval(f"sys:resume({pid}).")
    report = once.run_once()
    assert report.errors == []
    assert sent("ops@example.org").count("unresponsive") == sent("ops@example.org").count("responsive") == 1
    assert (report.deleted, Queue.objects.get(name="hung").state) == (1, "gone")


def test_a_broker_without_statistics_has_no_rates(guarded_node):
    guarded_node.eval("application:set_env(rabbitmq_management, rates_mode, none)")
    found = rates.fetch(queue_row("q"), charts.SPANS["hour"])
    guarded_node.eval("application:set_env(rabbitmq_management, rates_mode, basic)")
    assert "statistics are off in RabbitMQ" in found.why_none


def test_an_alarm_of_a_broker_without_statistics_is_notified(guarded_node):
    guarded_node.eval("application:set_env(rabbitmq_management, disable_management_stats, true)")
    with memory_alarm(guarded_node):
        once.run_once()
    guarded_node.eval("application:unset_env(rabbitmq_management, disable_management_stats)")
    assert sent("ops@example.org") == ["alarm"]


def test_a_broker_stopped_and_started_during_passes_loses_nothing(guarded_node):
    amqp = Amqp(guarded_node.amqp_url, "/")
    for number in range(20):
        amqp.queue(f"q{number}", 1)
    once.run_once()
    guarded_node.eval("mnesia:sync_log()")  # write the declared queues to disk
    guarded_node.kill()
    assert once.run_once().away
    guarded_node.start()
    report = once.run_once()
    assert (report.gone, report.away) == (0, False)
    wait_until(lambda: once.run_once().queues == 20)  # RabbitMQ 4 lists no queues in the moment after its start
    assert not Queue.objects.filter(state="gone").exists()
    assert [kind for kind in sent("ops@example.org") if kind != "short-list"] == ["outage", "outage-over"]


@pytest.mark.parametrize("alarm", ["memory", "disk"])
def test_queues_are_guarded_during_an_alarm(guarded_node, mailbox, alarm):
    amqp = Amqp(guarded_node.amqp_url, "/")
    amqp.queue("long", 11)
    management = broker.management()
    with memory_alarm(guarded_node) if alarm == "memory" else disk_alarm(guarded_node):
        assert any(alarm in one for one in management.alarms())
        assert once.run_once().deleted == 1
    run_scheduled_work()
    assert breaches(management, ["/"], mailbox.mails) == []
    assert Archive.objects.get().messages == 11


def test_a_broker_that_restarts_in_the_middle_of_a_fetch_loses_no_message(guarded_node, mailbox, monkeypatch):
    publish(guarded_node, "long", 600, pika.BasicProperties(delivery_mode=2))
    once_after(monkeypatch, "the first batch", guarded_node.restart)
    once.run_once()  # after a slow restart it tries again at once
    run_scheduled_work()
    assert breaches(broker.management(), ["/"], mailbox.mails) == []
    [kept] = Archive.objects.filter(state="kept")
    assert [int(message.body) for _, message in reading.messages(kept)] == list(range(600))


@pytest.fixture
def start_replay(guarded_node, alice):
    """Return a function that starts a replay of seven messages to an empty queue."""

    def start():
        publish(guarded_node, "queue/alice/jobs", 7)
        once.run_once()
        archive = single.delete_queue(Queue.objects.get(), alice).archive
        Amqp(guarded_node.amqp_url, "/").queue("queue/alice/jobs")
        return replay.start(archive, alice, queue="queue/alice/jobs")

    return start


def publish(node, name, messages, properties=None):
    amqp = Amqp(node.amqp_url, "/")
    amqp.queue(name)
    without_confirms = amqp.connection.channel()
    for number in range(messages):
        without_confirms.basic_publish("", name, b"%d" % number, properties)
    amqp.connection.close()


@pytest.mark.parametrize("alarm", [memory_alarm, disk_alarm])
def test_a_replay_waits_for_the_end_of_an_alarm(guarded_node, start_replay, alarm):
    started = start_replay()
    with alarm(guarded_node):
        assert replay.run_due() == 0
    started.refresh_from_db()
    assert (started.state, started.sent, started.in_flight) == ("running", 0, 0)
    assert replay.run_due() == 7
    assert Amqp(guarded_node.amqp_url, "/").numbers("queue/alice/jobs") == list(range(7))


def test_an_alarm_in_the_middle_of_a_replay_repeats_one_batch(guarded_node, start_replay, monkeypatch):
    monkeypatch.setattr(confirmed, "CONFIRM_SECONDS", 0.5)
    monkeypatch.setattr(replay, "BATCH", 2)
    started = start_replay()
    with ExitStack() as alarm:
        once_after(monkeypatch, "the first batch of a replay", lambda: alarm.enter_context(memory_alarm(guarded_node)))
        for _ in range(3):
            replay.run_due()
        started.refresh_from_db()
        assert (started.state, started.sent, started.in_flight, started.repeated) == ("running", 2, 2, 0)
    assert replay.run_due() == 5
    started.refresh_from_db()
    assert (started.state, started.sent, started.repeated) == ("done", 7, 2)
    arrived = Amqp(guarded_node.amqp_url, "/").numbers("queue/alice/jobs")
    assert list(dict.fromkeys(arrived)) == list(range(7))
    assert len(arrived) <= 9


def test_statistics_reset_during_a_pass_change_nothing(guarded_node, mailbox, monkeypatch):
    amqp = Amqp(guarded_node.amqp_url, "/")
    amqp.queue("short", 1)
    amqp.queue("long", 6)
    once.run_once()
    amqp.publish("long", 5)
    once_after(monkeypatch, "the decision", lambda: guarded_node.eval("rabbit_mgmt_storage:reset_all()."))
    assert once.run_once().deleted == 1
    reports = [once.run_once() for _ in range(2)]
    assert [(report.queues, report.unknown, report.gone, report.errors) for report in reports] == [(1, 0, 0, [])] * 2
    run_scheduled_work()
    assert breaches(broker.management(), ["/"], mailbox.mails) == []
    assert sent("ops@example.org") == ["warning", "deletion"]


def test_a_deletion_carried_out_by_a_thawed_broker_is_notified_once(guarded_node, mailbox, settings, monkeypatch):
    settings.GUARDIAN_BROKER_TIMEOUT_SECONDS = 1
    amqp = Amqp(guarded_node.amqp_url, "/")
    amqp.queue("short", 1)
    amqp.queue("long", 11)
    once_after(monkeypatch, "the announcement", guarded_node.suspend)
    assert once.run_once().deleted == 0
    guarded_node.resume()
    settings.GUARDIAN_BROKER_TIMEOUT_SECONDS = 10
    run_scheduled_work()
    assert breaches(broker.management(), ["/"], mailbox.mails) == []
    assert sent("ops@example.org").count("deletion") == 1
    assert queue_names(broker.management(), "/") == {"short"}


@pytest.mark.soak
def test_a_queue_that_lost_its_messages_in_a_crash_is_not_deleted(guarded_node, mailbox, monkeypatch):
    Amqp(guarded_node.amqp_url, "/").queue("long", 11)  # its messages are in memory only
    guarded_node.eval("mnesia:sync_log().")  # but the queue is on disk
    once_after(monkeypatch, "the announcement", guarded_node.kill)
    assert once.run_once().deleted == 0
    guarded_node.start()
    run_scheduled_work()
    assert breaches(broker.management(), ["/"], mailbox.mails) == []
    assert "deletion" not in sent("ops@example.org")
