import uuid
from datetime import timedelta

import pytest
from django.contrib.admin.models import ADDITION, LogEntry
from django.utils import timezone

from accounts.models import AuditEntry, Owner
from core.models import Lease
from notifications.models import Notification
from queues.guard import pruning
from queues.guard.pruning import prune
from queues.models import Pass, Queue, QueueEvent, QueueSample
from tests.site.test_docs import DOCS
from tests.support.toolbox import stored_queue

pytestmark = pytest.mark.django_db


def ago(**delta):
    return timezone.now() - timedelta(**delta)


def create_queue(name, **fields):
    return stored_queue(name, **{"first_seen": ago(days=100), **fields})


def test_samples_of_each_queue_are_thinned_once_by_age():
    queue = create_queue("q")
    for base in (timedelta(hours=1), timedelta(hours=20), timedelta(days=3), timedelta(days=9)):
        start = (timezone.now() - base).replace(minute=10, second=0, microsecond=0)
        QueueSample.objects.bulk_create(
            QueueSample(queue=queue, at=start + timedelta(seconds=10 * number), length=number) for number in range(12)
        )
    other = create_queue("other")
    QueueSample.objects.create(queue=other, at=ago(hours=20), length=2)
    prune()
    assert prune() == 0
    assert other.samples.count() == 1
    spans = ((0, 2.5), (10, 30), (60, 80), (200, 230))
    kept = [
        queue.samples.filter(at__lt=ago(hours=older), at__gte=ago(hours=newer)).values_list("length", flat=True)
        for older, newer in spans
    ]
    assert [sorted(lengths) for lengths in kept] == [list(range(12)), [5, 11], [11], []]


def test_a_queue_gone_for_31_days_is_deleted_and_its_events_stay():
    gone = create_queue("gone", state="gone", last_seen=ago(days=31))
    QueueEvent.objects.create(queue=gone, vhost="/", queue_name="gone", kind="gone", at=ago(days=31))
    create_queue("recently gone", state="gone", last_seen=ago(days=29))
    create_queue("existing", last_seen=ago(days=400))
    prune()
    assert set(Queue.objects.values_list("name", flat=True)) == {"recently gone", "existing"}
    assert QueueEvent.objects.get().queue_name == "gone"


def test_old_reports_and_finished_notifications_are_deleted():
    Pass.objects.create(at=ago(days=8))
    Pass.objects.create(at=ago(days=6))
    for state in ("sent", "failed", "due"):
        Notification.objects.create(
            kind="outage", about="the broker", recipient="a@example.org", facts={}, state=state,
            created=ago(days=100), due_at=ago(days=100),
        )  # fmt: skip
    prune()
    assert Pass.objects.count() == 1
    assert [notification.state for notification in Notification.objects.all()] == ["due"]


def test_events_and_audit_entries_are_kept_for_a_year():
    owner = Owner.objects.create_superuser("ops@example.org")
    AuditEntry.objects.all().delete()
    for days in (366, 364):
        entry = AuditEntry.objects.create(event="purged", action=AuditEntry.Action.ACCESS, object_repr=str(days))
        AuditEntry.objects.filter(pk=entry.pk).update(timestamp=ago(days=days))
        LogEntry.objects.create(user=owner, object_repr=str(days), action_flag=ADDITION, action_time=ago(days=days))
        QueueEvent.objects.create(vhost="/", queue_name=str(days), kind="gone", at=ago(days=days))
    prune()
    assert [entry.object_repr for entry in AuditEntry.objects.all()] == ["364"]
    assert [entry.object_repr for entry in LogEntry.objects.all()] == ["364"]
    assert [event.queue_name for event in QueueEvent.objects.all()] == ["364"]


def test_the_docs_state_every_retention_period():
    text = (DOCS / "operators.md").read_text()
    kept = text[text.index("## What is kept") : text.index("## The front page")]
    for days in (
        pruning.KEEP_SAMPLES, pruning.KEEP_PASSES, pruning.KEEP_NOTIFICATIONS, pruning.KEEP_EVENTS, pruning.KEEP_AUDIT,
    ):  # fmt: skip
        assert f"{days.days} days" in kept


def test_a_lock_left_by_a_crash_is_deleted_and_a_lease_is_kept(db):
    now = timezone.now()
    for name, ago in (("lock alice", 2), ("lock bob", 0), ("pass", 2)):
        Lease.objects.create(name=name, holder=uuid.uuid4(), expires_at=now - timedelta(hours=ago))
    prune()
    assert set(Lease.objects.values_list("name", flat=True)) >= {"lock bob", "pass"}
    assert not Lease.objects.filter(name="lock alice").exists()
