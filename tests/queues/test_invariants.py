"""The invariants that `make soak` and the tests of faults check: each violation is found."""

from datetime import timedelta

import pytest
from django.utils import timezone

from agents.models import SubscriptionQueue
from core.mails import AUTOMATIC_HEADERS
from core.models import Removal
from notifications import claims, retries, sending
from notifications.models import Notification
from queues.guard import once
from queues.models import Pass, Queue, QueueEvent
from rabbit.permissions import FULL_ACCESS
from tools import invariants
from tools.mail import Mail

OPERATOR = "ops@example.org"
LONG = [("queue/alice/long", 7), ("queue/alice/too-long", 12), ("queue/alice/short", 1)]


@pytest.fixture
def after_pass(guarded, amqp, mailbox):
    """Return a vhost in which one queue was warned about, one deleted and one kept, with all mails sent."""
    for name, messages in LONG:
        amqp.queue(name, messages)
    once.run_once()
    sending.send_due()
    return guarded


def violations(management, after_pass, mailbox):
    return invariants.breaches(management, [after_pass], mailbox.mails)


def notification(**values):
    now = timezone.now()
    about = {"kind": "outage", "about": "the broker", "recipient": OPERATOR, "facts": {}}
    return Notification.objects.create(**{**about, "created": now, "due_at": now, **values})


def deliver_again(mailbox, mail):
    mailbox._mails.append(mail)


def test_a_good_run_breaks_no_invariant(after_pass, management, mailbox):
    assert violations(management, after_pass, mailbox) == []
    assert len(mailbox.mails) == 2
    assert QueueEvent.objects.filter(kind="deleted").count() == 1


DAY = timedelta(days=1)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("values", "breach"),
    [
        ({}, "is still due after 0 attempts (no error)"),
        ({"due_at": timezone.now() + DAY, "attempts": 1, "last_error": "451"}, "is still due after 1 attempts"),
        ({"deferred_until": timezone.now() + DAY}, None),
        ({"state": "failed", "last_error": claims.REPLACED}, None),
        ({"state": "failed", "attempts": retries.MIN_ATTEMPTS, "created": timezone.now() - 2 * DAY}, None),
        ({"state": "failed", "last_error": "KeyError('queue')", "attempts": 1}, "was given up after 1 attempts: K"),
    ],
    ids=["unsent", "retried", "deferred by quiet hours", "replaced", "tried for a day", "given up for a wrong reason"],
)
def test_a_lost_notification_is_found(after_pass, values, breach):
    notification(**values)
    found = invariants.missing_notifications()
    assert [one.startswith(f"the outage to {OPERATOR} {breach}") for one in found] == [True] * bool(breach)
    if "due_at" in values:
        assert invariants.missing_notifications(settled=False) == []


def test_a_deletion_or_warning_without_its_notification_is_found(after_pass):
    Notification.objects.all().delete()
    deletion, warning = sorted(invariants.missing_notifications(), reverse=True)
    assert warning.startswith(
        f"queue/alice/too-long in {after_pass} was deleted 1 times, but {OPERATOR} has 0 notifications"
    )
    assert deletion == (
        f"the notified state of queue/alice/long in {after_pass} is warned, but {OPERATOR}'s last notification is none"
    )


@pytest.mark.soak
def test_a_merged_change_that_was_never_notified_is_found(after_pass):
    queues = Queue.objects.filter(name="queue/alice/long")
    queues.update(state="ok", merged=1)
    assert invariants.missing_notifications() == []  # its quiet period continues
    queues.update(quiet_until=timezone.now() - timedelta(seconds=1))
    assert len(invariants.missing_notifications()) == 1
    assert invariants.missing_notifications(settled=False) == []


def test_mails_that_arrived_twice_or_never_or_have_no_notification_are_found(after_pass, mailbox):
    notification(state="sent")
    assert invariants.undelivered_mails(mailbox.mails) == [
        f"the outage to {OPERATOR} is recorded as sent, but was never accepted"
    ]
    headers = "".join(f"{name}: {value}\n" for name, value in AUTOMATIC_HEADERS.items())
    for _ in range(2):  # other mails may arrive any number of times
        content = f"Subject: Your code\n{headers}\nBCDF-GHJK\n".encode()
        deliver_again(mailbox, Mail("guardian@localhost", (OPERATOR,), content))
    assert invariants.duplicate_mails(mailbox.mails) == []
    deliver_again(mailbox, mailbox.mails[0])
    [breach] = invariants.duplicate_mails(mailbox.mails)
    assert breach.endswith(f"was accepted 2 times for {OPERATOR}")
    assert invariants.duplicate_mails(mailbox.mails, interrupted=1) == []
    assert invariants.count_resent_mails(mailbox.mails) == 1
    Notification.objects.all().delete()
    assert any(breach.endswith("has no notification") for breach in invariants.duplicate_mails(mailbox.mails))


@pytest.mark.soak
@pytest.mark.parametrize(
    ("details", "why"),
    [
        ({"length": 10, "max": 10}, "was deleted with 10 messages, and its limit is 10"),
        ({"length": 11, "max": 10, "spared": True}, "was deleted with 11 messages, though it must never be deleted"),
        ({}, "was deleted, but its length or limit is not recorded"),
    ],
)
def test_a_deletion_that_was_not_due_is_found(after_pass, details, why):
    QueueEvent.objects.filter(kind="deleted").update(details=details)
    [breach] = invariants.deleted_below_maximum()
    assert why in breach


@pytest.mark.soak
def test_a_deletion_for_its_name_follows_the_policy(after_pass, settings):
    QueueEvent.objects.filter(kind="deleted").update(queue_name="exchange/alice/q", details={"length": 0, "max": 10})
    assert len(invariants.deleted_below_maximum()) == 1
    settings.GUARDIAN_NAMESPACE_POLICY = "delete-misnamed"
    assert invariants.deleted_below_maximum() == []


def test_a_row_that_differs_from_the_broker_is_found_unless_its_queue_is_ignored(
    after_pass, management, amqp, settings
):
    settings.GUARDIAN_IGNORED_QUEUES = "^ignored"
    amqp.queue("ignored")
    assert invariants.disagreements(management, [after_pass]) == []
    amqp.queue("queue/alice/new")
    amqp.publish("queue/alice/long", 2)
    management.delete_queue(after_pass, "queue/alice/short")
    assert sorted(invariants.disagreements(management, [after_pass])) == [
        f"queue/alice/long in {after_pass} has 9 messages, but 7 by its row",
        f"queue/alice/new in {after_pass} is on the broker, but has no row",
        f"queue/alice/short in {after_pass} is ok, but not on the broker",
    ]


LOGIN = "0f1e2d3c4b5a49788796a5b4c3d2e1f0"


def create_login(management, queue):
    management.put_user(LOGIN, "secret")
    management.set_permissions(queue.vhost, LOGIN, FULL_ACCESS)


def create_removal(management, queue):
    Removal.objects.create(kind="queue", vhost=queue.vhost, name="subscription_old", last_error="away")


DIFFERENCES = {
    "{queue} in {vhost} is registered, but not on the broker": lambda broker, queue: broker.delete_queue(
        queue.vhost, queue.queue_name
    ),
    "{queue} in {vhost} is registered, but still creating": lambda *_: SubscriptionQueue.objects.update(
        state="creating"
    ),
    "subscription_orphan in {vhost} is on the broker, but not registered": lambda broker, queue: broker.declare_queue(
        queue.vhost, "subscription_orphan"
    ),
    "vhost {vhost} lacks its dead-letter queue": lambda broker, queue: broker.delete_queue(queue.vhost, "guardian.dlq"),
    f"the RabbitMQ user {LOGIN} has permissions in {{vhost}}, but no row": create_login,
    "is still to be removed (away)": create_removal,
}


@pytest.mark.soak
@pytest.mark.parametrize("expected", DIFFERENCES)
def test_a_registration_that_differs_on_the_broker_is_found(agent, management, expected):
    vhost, queue = agent.vhost, agent.queue.queue_name
    assert invariants.disagreements(management, [vhost]) + invariants.missing_registrations([(vhost, queue)]) == []
    DIFFERENCES[expected](management, agent.queue)
    [breach] = invariants.disagreements(management, [vhost])
    assert breach.endswith(expected.format(queue=queue, vhost=vhost))
    assert len(invariants.missing_registrations([(vhost, queue)])) == ("still creating" in expected)


@pytest.mark.soak
def test_overlapping_passes_are_found(db):
    now = timezone.now()
    Pass.objects.create(at=now, seconds=2)
    Pass.objects.create(at=now + timedelta(seconds=3), seconds=2)
    assert invariants.overlapping_passes() == []
    Pass.objects.create(at=now + timedelta(seconds=4), seconds=2)
    assert len(invariants.overlapping_passes()) == 1
