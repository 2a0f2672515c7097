"""The brake on bulk deletion and its release, on a real broker."""

import pytest
from django.core.management import call_command
from django.utils import timezone

from accounts.models import AuditEntry
from notifications.models import Notification
from queues import brake, monitor, persistence
from queues.deletion import Deletion
from queues.models import Queue, Watch
from rabbit.management import Management
from tests.toolbox import Killed, queue_names


def other_notifications():
    return list(Notification.objects.exclude(about__startswith="queue ").order_by("id").values_list("kind", flat=True))


@pytest.fixture
def blocked(guarded, amqp, settings):
    """Let the brake block three queues."""
    settings.GUARDIAN_DELETE_BRAKE = 2
    for number in range(3):
        amqp.queue(f"long-{number}", 11)
    assert monitor.run_pass().brake_held
    return guarded


def long_queues(guarded, queues=3, prefix="long"):
    return [(guarded, f"{prefix}-{number}") for number in range(queues)]


def test_a_release_lets_the_next_pass_delete_the_named_queues_once(blocked, amqp, operator):
    brake.release_brake(operator, long_queues(blocked))
    report = monitor.run_pass()
    assert (report.deleted, report.brake_held) == (3, False)
    assert brake.brake() == brake.Brake()
    for number in range(3):
        amqp.queue(f"long-{number}", 11)
    assert monitor.run_pass().brake_held
    assert other_notifications() == ["brake", "brake"]


def test_a_release_deletes_only_the_queues_it_names(blocked, amqp, operator, management):
    brake.release_brake(operator, long_queues(blocked))
    for number in range(3):
        amqp.channel.queue_purge(f"long-{number}")
        amqp.queue(f"precious-{number}", 11)
    report = monitor.run_pass()
    assert (report.deleted, report.brake_held) == (0, True)
    assert len(queue_names(management, blocked)) == 6


def test_the_brake_still_blocks_other_queues_during_a_release(blocked, amqp, operator):
    brake.release_brake(operator, long_queues(blocked))
    for number in range(3):
        amqp.queue(f"more-{number}", 11)
    report = monitor.run_pass()
    assert (report.deleted, report.brake_held) == (3, True)
    assert (brake.brake().queues, brake.brake().released) == (3, 0)
    assert other_notifications() == ["brake", "brake"]
    Queue.objects.filter(name="more-0").update(unbounded=True)
    assert monitor.run_pass().deleted == 2


def test_a_few_other_queues_are_deleted_along_with_released_ones(blocked, amqp, operator):
    brake.release_brake(operator, long_queues(blocked))
    for number in range(2):
        amqp.queue(f"more-{number}", 11)
    assert monitor.run_pass().deleted == 5


def test_a_release_that_is_no_longer_needed_is_used_up(blocked, amqp, operator):
    brake.release_brake(operator, long_queues(blocked))
    amqp.channel.queue_purge("long-0")
    assert monitor.run_pass().deleted == 2
    for number in range(3):
        amqp.queue(f"long-{number}", 11)
    assert monitor.run_pass().brake_held


def test_a_release_is_valid_for_ten_minutes(blocked, operator):
    brake.release_brake(operator, long_queues(blocked))
    Watch.objects.update(released_at=timezone.now() - brake.RELEASE_VALID_FOR)
    assert brake.brake().released == 0
    assert monitor.run_pass().brake_held


def kill(*arguments, **options):
    raise Killed


@pytest.mark.parametrize("step", ["the decision", "the deletion"])
def test_a_release_survives_a_killed_pass(blocked, operator, monkeypatch, step):
    brake.release_brake(operator, long_queues(blocked))
    with monkeypatch.context() as patch:
        patch.setattr(
            *((persistence, "_update_watch", kill) if step == "the decision" else (Deletion, "carry_out", kill))
        )
        with pytest.raises(Killed):
            monitor.run_pass()
    assert brake.brake().released == (3 if step == "the decision" else 0)
    report = monitor.run_pass()
    assert (report.deleted, report.brake_held) == (3, False)
    assert other_notifications() == ["brake"]


def test_a_release_given_during_a_pass_applies_to_the_next_one(blocked, operator, monkeypatch):
    brake.release_brake(operator, long_queues(blocked, 1))
    remember = persistence._update_watch

    def release_another(*arguments):
        brake.release_brake(operator, long_queues(blocked))
        remember(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(persistence, "_update_watch", release_another)
        assert monitor.run_pass().deleted == 3  # the brake allows the other two
    assert brake.brake().released == 3


def test_an_unconfirmed_released_queue_is_deleted_by_a_later_pass(blocked, amqp, operator, monkeypatch):
    amqp.queue("unsure", 11)
    for _ in range(11):
        amqp.channel.basic_get("unsure", auto_ack=False)
    take = monitor.snapshot.take
    with monkeypatch.context() as patch:
        patch.setattr(monitor.snapshot, "take", lambda *arguments: take(*arguments)._replace(exact=False))
        look = monitor.run_pass(dry_run=True)
        condemned = {(one["vhost"], one["queue"]) for one in look.condemned}
        assert condemned == {*long_queues(blocked), (blocked, "unsure")}
        brake.release_brake(operator, condemned)
        report = monitor.run_pass()
        assert (report.deleted, report.kept, report.brake_held) == (3, 1, False)
    assert monitor.run_pass().deleted == 1
    assert brake.brake() == brake.Brake()


def test_a_dry_run_lists_the_blocked_queues(blocked):
    report = monitor.run_pass(dry_run=True)
    assert [(one["vhost"], one["queue"]) for one in report.condemned] == long_queues(blocked)
    assert (report.would_delete, report.brake_held) == ([], True)


def test_a_release_is_recorded_with_its_operator(blocked, operator):
    brake.release_brake(operator, long_queues(blocked))
    entry = AuditEntry.objects.get(event="released the brake")
    assert (entry.actor, entry.additional_data["queues"]) == (operator, 3)


def test_without_a_blocked_deletion_there_is_nothing_to_release(guarded, amqp, operator):
    assert brake.brake() == brake.Brake()
    amqp.queue("short", 1)
    monitor.run_pass()
    brake.release_brake(operator, [(guarded, "short")])
    assert brake.brake() == brake.Brake()
    assert not AuditEntry.objects.filter(event="released the brake").exists()


def test_a_release_must_name_a_queue(blocked, operator):
    with pytest.raises(ValueError, match="name the queues"):
        brake.release_brake(operator, [])


def test_a_shrunken_list_does_not_lift_the_brake(blocked, operator, monkeypatch):
    since = brake.brake().since
    brake.release_brake(operator, long_queues(blocked))
    monitor.run_pass(dry_run=True)
    with monkeypatch.context() as patch:
        patch.setattr(Management, "list_queues", lambda *_: [])
        assert not monitor.run_pass().brake_held
    assert (brake.brake().since, brake.brake().queues, brake.brake().released) == (since, 3, 3)
    Watch.objects.update(**brake.NO_RELEASE)
    assert monitor.run_pass().brake_held
    assert other_notifications().count("brake") == 1


def test_the_brake_mail_links_to_its_release(blocked, settings, mailbox):
    settings.GUARDIAN_BASE_URL = "https://guardian.example.org"
    call_command("send_notifications", "--once")
    (mail,) = [mail for mail in mailbox.mails if "brake" in mail.subject]
    assert "https://guardian.example.org/admin/" in mail.text
    assert "3 of 3 queues" in mail.text
