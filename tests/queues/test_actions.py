from functools import partial

import pytest
from django.core.exceptions import PermissionDenied, ValidationError
from django.db import connection
from django.test.utils import CaptureQueriesContext

from accounts.models import AuditEntry, PulseUser
from core.refusals import Refusal
from queues.actions import single
from queues.guard import destroying
from queues.guard.once import run_once
from queues.models import Queue, QueueEvent
from tests.support.toolbox import amqp_answers_lost, in_parallel, queue_names, stored_queue

pytestmark = pytest.mark.usefixtures("guarded", "pulse_user")


@pytest.fixture
def queue(amqp, alice):
    """Return Alice's queue with 3 messages, as stored by a pass."""
    amqp.queue("queue/alice/builds", 3)
    run_once()
    return Queue.objects.get()


def events_with_owner(queue):
    events = QueueEvent.objects.filter(queue=queue).order_by("id").select_related("by")
    return [(event.kind, event.by.email if event.by else None) for event in events]


def test_a_deletion_is_recorded_with_its_owner_and_not_reported_by_passes(queue, alice, amqp, management, vhost):
    single.delete_queue(queue, alice)
    assert queue_names(management, vhost) == set()
    queue.refresh_from_db()
    assert (queue.state, queue.length) == ("gone", None)
    reports = [run_once() for _ in range(3)]
    assert [(report.gone, report.errors) for report in reports] == [(0, [])] * 3
    assert events_with_owner(queue) == [("removing", "alice@example.org"), ("removed", "alice@example.org")]
    assert QueueEvent.objects.get(kind="removed").details == {"length": 3}
    amqp.queue("queue/alice/builds", 1)
    run_once()
    assert (Queue.objects.get(), Queue.objects.get().length) == (queue, 1)


@pytest.mark.parametrize("do", [single.delete_queue, single.purge_queue])
def test_a_404_does_not_count_a_queue_as_gone_but_two_lists_do(queue, alice, amqp, management, vhost, do):
    # A queue whose node is stopping answers 404 too, and is missing from the list for a moment.
    amqp.queue("another")
    run_once()
    management.delete_queue(vhost, queue.name)
    with pytest.raises(single.Gone, match="doesn't list the queue at the moment"):
        do(queue, alice)
    queue.refresh_from_db()
    assert (queue.state, queue.length, events_with_owner(queue)) == ("ok", 3, [])
    assert [run_once().gone for _ in range(2)] == [0, 1]
    assert events_with_owner(queue) == [("gone", None)]


def test_after_a_lost_answer_the_decision_stays_recorded(queue, settings, broker, as_alice, monkeypatch):
    with amqp_answers_lost(broker, settings, monkeypatch, "queue_purge", "queue_delete"):
        for page in ("purge", "delete"):
            asked = as_alice.post(f"/queues/{queue.uuid}/{page}/", {"typed": queue.name})
            assert asked.status_code == 503
            assert "so the outcome is unknown" in asked.text
            assert "The queue was not" not in asked.text
    assert events_with_owner(queue) == [("purged", "alice@example.org"), ("removing", "alice@example.org")]


@pytest.mark.parametrize("do", [single.delete_queue, single.purge_queue])
def test_a_queue_in_use_by_another_request_is_refused_without_blaming_the_broker(queue, alice, as_alice, do):
    with destroying.lock_messages(queue.vhost, queue.name):
        with pytest.raises(Refusal, match="is deleting, purging or moving messages") as refused:
            do(queue, alice)
        page = as_alice.post(f"/queues/{queue.uuid}/delete/", {"typed": queue.name}, follow=True)
    assert refused.value.status == 409
    assert (page.status_code, single.IN_USE in page.text) == (200, True)
    assert events_with_owner(queue) == []


def test_two_concurrent_deletions_both_report_the_truth(queue, alice, operator, management, vhost):
    def delete(by):
        try:
            single.delete_queue(Queue.objects.get(), by)
        except Refusal:  # gone, or being deleted
            return "gone"
        return "deleted"

    outcomes = in_parallel(partial(delete, alice), partial(delete, operator))
    # RabbitMQ may confirm both deletions, but never answers both with 404.
    assert "deleted" in outcomes
    assert set(outcomes) <= {"deleted", "gone"}
    assert queue_names(management, vhost) == set()
    assert Queue.objects.get().state == "gone"
    kinds = [kind for kind, _ in events_with_owner(queue)]
    assert kinds.count("removed") == outcomes.count("deleted")


def test_only_operators_purge_or_delete_a_registered_queue(queue, alice, operator, management, vhost):
    Queue.objects.update(registered=True)
    queue.refresh_from_db()
    for do in (single.delete_queue, single.purge_queue):
        with pytest.raises(PermissionDenied, match="An agent registered this queue"):
            do(queue, alice)
    assert queue_names(management, vhost) == {queue.name}
    single.delete_queue(queue, operator)
    assert queue_names(management, vhost) == set()


def test_changed_limits_are_recorded_and_omitted_ones_stay(queue, operator, alice):
    single.set_limits(queue, operator, unbounded=False, warn_length=None, max_length=None)
    with pytest.raises(PermissionDenied):
        single.set_limits(queue, alice, unbounded=True)
    assert events_with_owner(queue) == []
    single.set_limits(queue, operator, unbounded=True, warn_length=4)
    single.set_limits(queue, operator, max_length=9)
    queue.refresh_from_db()
    assert (queue.unbounded, queue.warn_length, queue.max_length) == (True, 4, 9)
    event = QueueEvent.objects.filter(kind="adjusted").earliest("id")
    assert event.by == operator
    assert event.details == {
        "before": {"unbounded": False, "warn_length": None, "max_length": None, "limits_until": None},
        "after": {"unbounded": True, "warn_length": 4, "max_length": None, "limits_until": None},
    }


@pytest.mark.parametrize(("warn", "most"), [(10, None), (5, 5), (0, 8), (None, 5), (-1, 8), (2**63, 2**63 + 1)])
def test_a_deletion_limit_below_the_warning_threshold_is_refused(queue, operator, warn, most):
    with pytest.raises(ValidationError):
        single.set_limits(queue, operator, unbounded=False, warn_length=warn, max_length=most)
    queue.refresh_from_db()
    assert (queue.warn_length, queue.max_length, events_with_owner(queue)) == (None, None, [])


def test_an_unset_limit_falls_back_to_the_pulse_users(queue, operator):
    PulseUser.objects.update(warn_length=2, max_length=4)
    with pytest.raises(ValidationError):
        single.set_limits(queue, operator, unbounded=False, warn_length=4, max_length=None)
    single.set_limits(queue, operator, unbounded=False, warn_length=3, max_length=None)
    queue.refresh_from_db()
    assert queue.warn_length == 3


def test_limits_of_many_queues_take_constant_statements_and_fail_singly(operator, pulse_user):
    def set_limits(queues, **limits):
        with CaptureQueriesContext(connection) as captured:
            results = single.set_limits_of_all(queues, operator, limits)
        return len(captured), len(results.succeeded), len(results.failed)

    queues = [stored_queue(f"queue/alice/{number}", ready=1, unacknowledged=0) for number in range(41)]
    set_limits(queues[:1], unbounded=True)
    statements = set_limits(queues[1:6], unbounded=True)[0]
    assert set_limits(queues[6:], unbounded=True) == (statements, 35, 0)
    entries = AuditEntry.objects.filter(event="changed", content_type__model="queue")
    assert {entry.object_id for entry in entries} == {queue.pk for queue in queues}
    assert {(entry.actor_email, *entry.changes["unbounded"]) for entry in entries} == {
        (operator.email, "False", "True")
    }
    PulseUser.objects.update(max_length=5)
    Queue.objects.filter(pk=queues[0].pk).update(pulse_user=pulse_user)
    assert set_limits(queues, warn_length=6)[1:] == (40, 1)


def test_setting_limits_keeps_what_a_pass_wrote_meanwhile(queue, operator):
    Queue.objects.update(state="deleting", ready=11)
    single.set_limits(queue, operator, unbounded=True, warn_length=None, max_length=None)
    queue.refresh_from_db()
    assert (queue.state, queue.ready, queue.unbounded) == ("deleting", 11, True)


def test_live_details_of_a_name_without_a_url_come_over_amqp(amqp):
    amqp.queue("..", 2)
    run_once()
    live = single.live(Queue.objects.get())
    assert (live.ready, live.consumers, live.bindings, live.arguments) == (2, 0, None, None)
