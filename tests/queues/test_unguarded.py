"""Every name that a client can use is guarded. Operators see what Guardian can't bound, and what bounds it."""

from datetime import datetime, timedelta

import amqp as py_amqp
import pytest
from django.utils import timezone

from accounts.models import AuditEntry
from core import broker as core_broker
from notifications import mails
from notifications.models import Notification
from queues.guard import once, unguarded
from queues.models import Archive, Queue, Watch
from rabbit import amqp as rabbit_amqp
from rabbit import prometheus, streams
from rabbit.management import Management
from status import facts, overview, rules
from tests.support.counting import counted_requests
from tests.support.toolbox import broker_version, queue_names, sent, wait_until, wait_until_equal
from tools.stack import PROJECT

NUL = "queue/alice/jobs\0"
SHOWN = r"queue/alice/jobs\x00"


def found(rule):
    """Return the front page's sentence about a rule, or None if nothing is wrong."""
    (verdict,) = [one for one in facts.measure_guardian(timezone.now()).verdicts() if one.rule is rule]
    return verdict.sentence if verdict.is_wrong else None


def test_a_name_with_a_nul_is_readable_in_mails(amqp, pulse_user, guarded, alice):
    amqp.channel.exchange_declare("exchange/alice/a\0b")
    amqp.queue(NUL, 6)
    amqp.channel.queue_bind(NUL, "exchange/alice/a\0b", "key\0")
    once.run_once()
    mail = mails.compose(Notification.objects.get(recipient=alice.email))
    for text in (mail.subject, mail.body, mail.alternatives[0].content):
        assert SHOWN in text
        assert "\0" not in text
    assert r"exchange/alice/a\x00b" in mail.body
    assert r"key\x00" in mail.body


def test_a_name_with_a_nul_is_readable_on_pages_and_in_the_audit_trail_and_exact_in_the_api(
    amqp, pulse_user, guarded, admin, management
):
    amqp.queue(NUL, 6)
    once.run_once()
    queue = Queue.objects.get()
    for path in (
        "/queues/", f"/queues/{queue.uuid}/", f"/queues/{queue.uuid}/delete/", "/admin/", "/admin/queues/queue/",
        f"/admin/queues/queue/{queue.pk}/change/", "/admin/queues/queueevent/",
    ):  # fmt: skip
        text = admin.get(path).text
        assert SHOWN in text, path
        assert "\0" not in text, path
    assert admin.get(f"/api/queues/{queue.uuid}/").json()["name"] == NUL
    assert admin.post(f"/queues/{queue.uuid}/limits/", {"max_length": "50"}).status_code == 302
    assert admin.post(f"/queues/{queue.uuid}/delete/", {"typed": SHOWN}).status_code == 302
    assert queue_names(management, guarded) == set()
    entries = AuditEntry.objects.filter(content_type__model="queue", object_pk=queue.pk)
    assert {entry.object_repr for entry in entries} == {f"{SHOWN} in {guarded}"}


def test_queues_in_a_vhost_with_a_nul_in_its_name_are_guarded(guarded, settings, broker, management):
    name = f"{guarded}\0"
    management.create_vhost(name)
    settings.GUARDIAN_VHOSTS = [name]
    try:
        management.declare_queue(name, "long")
        with rabbit_amqp.new_connection(broker.amqp_url, name, 5) as connection:
            channel = connection.channel()
            for _ in range(11):
                channel.basic_publish(py_amqp.Message("x"), routing_key="long")
            wait_until(lambda: channel.queue_declare("long", passive=True).message_count == 11)
        assert once.run_once().deleted == 1
    finally:
        management.delete_vhost(name)


@pytest.fixture
def unusable(broker, management, guarded):
    """Declare a queue whose name is not valid UTF-8, as a client of RabbitMQ 3.10 can."""
    if broker_version(management) >= (4, 0):
        pytest.skip("RabbitMQ 4 refuses names that are not valid UTF-8")
    with rabbit_amqp.new_connection(broker.amqp_url, guarded, 5) as connection:
        connection.channel().queue_declare("queue/alice/\ud800", durable=True, auto_delete=False)
    return "queue/alice/" + 3 * "\N{REPLACEMENT CHARACTER}"


def test_operators_are_notified_once_of_a_queue_that_cannot_be_addressed(unusable, guarded, management):
    (listed,) = queue_names(management, guarded)
    for _ in range(2):
        report = once.run_once()
        assert (report.queues, report.errors) == (0, [])
    assert sent("ops@example.org") == ["unaddressable"]
    assert listed in mails.compose(Notification.objects.get()).body
    assert f"can't guard 1 queue with a name that no client can use: {listed} in {guarded}." in found(
        rules.UNADDRESSABLE
    )
    assert not Queue.objects.exists()


def test_the_documented_command_deletes_unaddressable_queues(unusable, amqp, guarded, broker, management):
    if broker.node is None:
        pytest.skip("nobody can run rabbitmqctl on a broker that was named")
    amqp.queue("queue/alice/\N{REPLACEMENT CHARACTER}x")
    runbook = (PROJECT / "docs/operators.md").read_text()
    (command,) = [line for line in runbook.splitlines() if line.startswith("    rabbitmqctl eval ")]
    broker.node.eval(command.partition("'")[2].rpartition("'")[0].rstrip("."))
    assert queue_names(management, guarded) == {"queue/alice/\N{REPLACEMENT CHARACTER}x"}
    assert once.run_once().queues == 1
    assert found(rules.UNADDRESSABLE) is None


def test_a_name_that_is_listed_twice_cannot_be_addressed(unusable, amqp, guarded, management):
    (listed,) = queue_names(management, guarded)
    amqp.queue(listed, 11)
    assert once.run_once().queues == 0
    assert unguarded.stored(Watch.objects.get()).unaddressable == [(guarded, listed)]


def test_prometheus_figures_are_used_beside_a_queue_that_cannot_be_addressed(
    unusable, amqp, guarded, settings, management
):
    settings.GUARDIAN_SNAPSHOT = "prometheus"
    if not any(one["protocol"] in prometheus.PROTOCOLS for one in management.overview()["listeners"]):
        pytest.skip("the broker lacks the plugin rabbitmq_prometheus")
    amqp.queue("jobs\0", 3)
    once.run_once()
    wait_until(lambda: len(core_broker.prometheus().scrape(management, [guarded]).depths) == 2)
    with counted_requests() as requests:
        report = once.run_once()
    assert (report.queues, report.errors) == (1, [])
    assert "GET /metrics/detailed" in requests
    assert unguarded.stored(Watch.objects.get()).unaddressable


def test_an_ignored_queue_that_cannot_be_addressed_is_not_reported(unusable, settings):
    settings.GUARDIAN_IGNORED_QUEUES = "^queue/alice/"
    once.run_once()
    assert found(rules.UNADDRESSABLE) is None
    assert sent("ops@example.org") == []


def set_operator_policy(management, vhost, pattern, definition):
    """Set an operator policy, which goes with the test's vhost."""
    policy = {"pattern": pattern, "definition": definition, "apply-to": "queues"}
    management._put("operator-policies", vhost, "bounded", json=policy)


def policy_of(management, vhost, name):
    return management.queue(vhost, name).get("effective_policy_definition")


def test_a_stream_that_keeps_all_messages_is_shown_until_a_policy_bounds_it(amqp, guarded, management):
    amqp.queue("endless", arguments={"x-queue-type": "stream"})
    amqp.queue("aged", arguments={"x-queue-type": "stream", "x-max-age": "1D"})
    amqp.queue("bounded", arguments={"x-queue-type": "stream"})
    set_operator_policy(management, guarded, "^bounded$", {"max-length-bytes": 1000000})
    # A new stream's policy is reported after some seconds, and until then it counts as bounded.
    wait_until_equal(lambda: policy_of(management, guarded, "bounded"), {"max-length-bytes": 1000000})
    wait_until(lambda: policy_of(management, guarded, "endless") is not None)
    once.run_once()
    assert f"Nothing bounds 1 stream by size or age: endless in {guarded}." in found(rules.STREAMS)
    every = {(guarded, name) for name in ("endless", "aged", "bounded")}
    assert streams.without_retention(management, every | {("/", f"no {number}") for number in range(20)}) == [
        (guarded, "endless")
    ]


def test_an_exclusive_queue_over_its_limit_is_shown_until_a_policy_bounds_it(amqp, guarded, management):
    amqp.queue("reply", 11, durable=False, exclusive=True)
    assert once.run_once().deleted == 0
    exclusive = "1 queue over the deletion limit, because each is exclusive to a connection"
    assert f"{exclusive}: reply in {guarded}." in found(rules.EXCLUSIVE)
    (line,) = overview.overview(timezone.now())["exclusive"].shown
    assert (line.name, line.figure) == ("reply", "11 messages")
    set_operator_policy(management, guarded, "^reply$", {"max-length": 8})
    wait_until(lambda: once.run_once() and found(rules.EXCLUSIVE) is None)
    assert Queue.objects.get().length == 8


@pytest.mark.django_db
def test_the_front_page_names_three_queues_and_the_number_of_others():
    names = [["/", f"stream {number}"] for number in range(5)]
    Watch.objects.create(unguarded={"streams": names})
    assert found(rules.STREAMS).endswith(": stream 0 in /, stream 1 in /, stream 2 in /, 2 more.")


def let_minutes_pass():
    """Move what a pass remembers of times three minutes into the past."""
    watch, past = Watch.objects.get(), timedelta(minutes=3)

    def moved(since):
        return (datetime.fromisoformat(since) - past).isoformat()

    watch.listed_at -= past
    watch.unguarded["uncounted"] = [[*key, moved(since)] for *key, since in watch.unguarded["uncounted"]]
    watch.recovering = {node: moved(since) for node, since in (watch.recovering or {}).items()}
    watch.save()


def test_a_quorum_queue_that_is_listed_without_counts_is_guarded_by_its_ready_messages(
    amqp, pulse_user, guarded, monkeypatch
):
    listed = Management.list_queues

    def without_counts(self, vhost, params):
        rows = listed(self, vhost, params)
        return [{key: value for key, value in row.items() if not key.startswith("messages")} for row in rows]

    monkeypatch.setattr(Management, "list_queues", without_counts)
    once.run_once()  # the settings of the pass before were others
    amqp.queue("queue/alice/jobs", 11, arguments={"x-queue-type": "quorum"})
    amqp.queue("queue/alice/ignored", arguments={"x-queue-type": "classic"})
    for _ in range(2):
        once.run_once()
    assert (Queue.objects.get(name="queue/alice/jobs").length, sent("ops@example.org")) == (None, [])
    let_minutes_pass()
    once.run_once()
    assert sent("ops@example.org") == ["uncounted"]
    assert "queue/alice/jobs" in mails.compose(Notification.objects.get()).body
    let_minutes_pass()  # its node counts as recovering for some seconds
    assert once.run_once().deleted == 1
    assert (sent("ops@example.org"), sent("alice@example.org")) == (["uncounted", "deletion"], ["deletion"])
    assert Archive.objects.get().messages == 11
    once.run_once()
    once.run_once()
    assert not Watch.objects.get().unguarded
