"""The page that a visitor sees first."""

import re
from datetime import timedelta

import pytest
from django.utils import timezone

from accounts.models import Invitation
from queues.actions import limit_requests, notices
from queues.models import Queue, QueueSample, Watch
from tests.support.archives import store_archive
from tests.support.toolbox import stored_queue

pytestmark = pytest.mark.django_db


def new_queue(name, pulse_user, **fields):
    return stored_queue(name, pulse_user=pulse_user, **{"ready": 3, "unacknowledged": 0, "consumers": 1, **fields})


@pytest.fixture
def visit(client, alice):
    Watch.objects.create(id=1, listed_at=timezone.now())
    client.force_login(alice)
    return lambda: client.get("/")


def test_an_owner_with_nothing_sees_the_first_steps(visit):
    assert "Create a Pulse user" in visit().text


def test_an_owner_with_a_pulse_user_and_no_queue_sees_how_to_connect(visit, pulse_user):
    assert "Connect with it, and declare a queue" in visit().text


def test_healthy_queues_are_one_sentence(visit, pulse_user):
    new_queue("queue/alice/builds", pulse_user)
    page = visit().text
    assert "<h1>1 queue, healthy</h1>" in page
    assert "queue/alice/builds" not in page


def test_queues_that_need_attention_are_named_the_worst_first(visit, pulse_user):
    new_queue("queue/alice/fine", pulse_user)
    new_queue("queue/alice/long", pulse_user, ready=3_000, state=Queue.State.WARNED)
    new_queue("queue/alice/over", pulse_user, ready=9_000, state=Queue.State.DELETING)
    new_queue("queue/alice/unread", pulse_user, consumers=0)
    new_queue("queue/alice/gone", pulse_user, consumers=0, state=Queue.State.GONE)
    page = visit().text
    assert "<h1>3 of 4 queues need attention</h1>" in page
    positions = [page.index(f">queue/alice/{name}<") for name in ("over", "long", "unread")]
    assert positions == sorted(positions)
    assert "queue/alice/fine" not in page


def test_a_healthy_queue_that_fills_within_half_an_hour_comes_first_with_its_rate(visit, pulse_user):
    new_queue("queue/alice/long", pulse_user, ready=3_000, state=Queue.State.WARNED)
    queue = new_queue("queue/alice/burst", pulse_user, ready=1_000)
    new_queue("queue/alice/slow", pulse_user, ready=1_000)
    QueueSample.objects.create(queue=queue, at=timezone.now() - timedelta(seconds=100), length=100)
    page = visit().text
    assert "<h1>2 of 3 queues need attention</h1>" in page
    assert page.index(">queue/alice/burst<") < page.index("deleted in 13 min") < page.index(">queue/alice/long<")
    assert "queue/alice/slow" not in page
    assert re.search(r"\+5\d\d/min", page)
    assert '<svg class="sparkline"' in page


def test_a_queue_that_somebody_is_on_follows_the_others_and_names_the_limit_asked_for(
    visit, pulse_user, alice, operator
):
    queue = new_queue("queue/alice/taken", pulse_user, ready=7_000, state=Queue.State.WARNED)
    Queue.objects.update(warned_since=timezone.now())
    new_queue("queue/alice/other", pulse_user, ready=3_000, state=Queue.State.WARNED)
    notices.acknowledge(queue, alice)
    limit_requests.ask(queue, alice, 20_000, "a release")
    page = visit().text
    assert page.index(">queue/alice/other<") < page.index(">queue/alice/taken<") < page.index("Asked for 20,000")


def test_while_the_broker_is_down_nothing_is_predicted(visit, pulse_user):
    queue = new_queue("queue/alice/long", pulse_user, ready=3_000, state=Queue.State.WARNED)
    QueueSample.objects.create(queue=queue, at=timezone.now() - timedelta(seconds=100), length=2_800)
    Watch.objects.update(listed_at=timezone.now() - timedelta(hours=1), outage_since=timezone.now())
    page = visit().text
    assert "over threshold" in page
    assert "deleted in" not in page
    assert "/min" not in page


@pytest.fixture
def deleted(pulse_user):
    """Return a queue that Guardian deleted three hours ago."""
    queue = new_queue("queue/alice/lost", pulse_user, state=Queue.State.GONE, ready=None, unacknowledged=None)
    at = timezone.now() - timedelta(hours=3)
    details = {"length": 8_001, "ready": 8_000, "unacknowledged": 1, "max": 8_000, "per_second": 2.0, "consumers": 0}
    queue.new_event("deleted", at=at, **details).save()
    return queue


def test_a_deletion_is_shown_to_each_owner_until_they_dismiss_it(visit, deleted, client, bob):
    deleted.pulse_user.owners.add(bob)
    archive = store_archive(b"1", name=deleted.name, queue=deleted)
    page, link = visit().text, f'href="/archives/{archive.uuid}/restore/">Bring it back'
    assert link in page
    assert "8,001 messages" in page
    assert "<h1>1 queue deleted</h1>" in page
    client.get(f"/queues/{deleted.uuid}/")
    assert link in visit().text
    assert client.post(f"/queues/{deleted.uuid}/dismiss/", follow=True).text.count(link) == 0
    assert "<h1>You have no queue</h1>" in visit().text
    client.force_login(bob)
    assert link in visit().text


def test_a_deletion_makes_the_headline_no_calmer(visit, deleted, pulse_user):
    new_queue("queue/alice/long", pulse_user, ready=3_000, state=Queue.State.WARNED)
    assert "<h1>1 queue deleted; 1 of 1 queue needs attention</h1>" in visit().text
    Queue.objects.filter(state="warned").update(state="ok", ready=3)
    assert "<h1>1 queue deleted; 1 queue, healthy</h1>" in visit().text


@pytest.mark.parametrize(
    "changes",
    [{"state": "ok"}, {"first_seen": timezone.now() - timedelta(hours=1)}],
    ids=["exists again", "was deleted again, by a person"],
)
def test_a_deletion_is_no_longer_shown_if_the_queue(visit, deleted, changes):
    Queue.objects.update(**changes)
    assert "Deleted in the last 24 hours" not in visit().text


def test_further_deletions_are_counted(visit, pulse_user):
    for number in range(12):
        gone = new_queue(f"queue/alice/{number}", pulse_user, state=Queue.State.GONE)
        for minutes in (1, 2):
            at = timezone.now() - timedelta(minutes=minutes)
            gone.new_event("deleted", at=at).save()
    page = visit().text
    assert "<h1>12 queues deleted</h1>" in page
    assert re.search(r">\d more</a>", page)


def test_the_page_of_a_deleted_queue_says_how_it_was(visit, deleted, client):
    page = " ".join(re.sub("<[^>]+>", " ", client.get(f"/queues/{deleted.uuid}/").text).split())
    assert "because it had 8,001 messages and its deletion limit was 8,000" in page
    assert "Messages 8,001, of these 1 unacknowledged Consumers none Rate growing by 120 messages a minute" in page


@pytest.mark.parametrize(
    ("archive", "offered"),
    [
        ({}, True),
        ({"reason": "purged"}, False),
        ({"reason": "called_off"}, False),
        ({"created": timezone.now() - timedelta(days=2)}, False),
    ],
)
def test_only_the_archive_of_the_last_deletion_is_offered(visit, pulse_user, client, archive, offered):
    gone = new_queue("queue/alice/lost", pulse_user, state=Queue.State.GONE, ready=None, unacknowledged=None)
    gone.new_event("deleted").save()
    store_archive(b"1", name=gone.name, queue=gone, **archive)
    assert ("Bring it back…<" in visit().text) is offered
    page = client.get(f"/queues/{gone.uuid}/").text
    assert ("1 message is kept</a>" in page) is offered
    assert ("Bring it back…</a>" in page) is offered


def test_events_are_those_of_own_queues(visit, pulse_user):
    mine = new_queue("queue/alice/builds", pulse_user)
    other = new_queue("queue/bob/jobs", None)
    for queue in (mine, other):
        queue.new_event("warned").save()
    page = visit().text
    assert "queue/alice/builds" in page
    assert "queue/bob/jobs" not in page


def test_an_operator_sees_alarms_an_outage_and_blocked_deletions(client, operator):
    now = timezone.now()
    Watch.objects.create(
        id=1,
        nodes=["rabbit@a"],
        outage_since=now - timedelta(minutes=5),
        alarms=[["memory", "rabbit@a", now.isoformat()], ["node", "rabbit@b", now.isoformat()]],
    )
    new_queue("celery", None, block_reason=Queue.BlockReason.BRAKE)
    client.force_login(operator)
    page = client.get("/").text
    for sentence in (
        "The broker has not answered for 5 minutes.",
        "The broker blocks publishers: too little memory on rabbit@a.",
        "The node rabbit@b is lost.",
        "The deletion of 1 queue is blocked until you decide.",
    ):
        assert sentence in page


def test_an_operator_can_raise_the_limit_of_a_queue_about_to_be_deleted_for_its_length(client, operator, visit):
    fields = {"ready": 9_000, "state": Queue.State.DELETING}
    new_queue("long", None, decided_for=Queue.DecidedFor.LENGTH, **fields)
    new_queue("misnamed", None, decided_for=Queue.DecidedFor.NAME, **fields)
    client.force_login(operator)
    page = client.get("/").text
    assert 'Raise limit<span class="hidden-text"> long<' in page
    assert 'Open<span class="hidden-text"> misnamed<' in page


def test_an_owner_sees_what_concerns_publishers(visit, pulse_user):
    new_queue("queue/alice/jobs", pulse_user)
    alarms = [["disk", node, timezone.now().isoformat()] for node in ("rabbit@a", "rabbit@b")]
    Watch.objects.update(nodes=["rabbit@a"], alarms=[*alarms, ["node", "rabbit@c", timezone.now().isoformat()]])
    page = visit().text
    assert page.count("The broker blocks publishers: too little free disk space.") == 1
    assert "rabbit@" not in page


def test_an_invitation_is_the_first_thing_that_its_recipient_sees(client, pulse_user, bob):
    Invitation.objects.create(pulse_user=pulse_user, invitee=bob, inviter=pulse_user.owners.get())
    client.force_login(bob)
    assert "alice@example.org invites you to own" in client.get("/").text
