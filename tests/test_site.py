"""The pages and the health checks."""

import pytest
from django.test import Client
from django.utils import timezone

from accounts.models import Owner, PulseUser
from queues.admin import QueueAdmin
from queues.mails import compose
from queues.models import Notification, Queue, QueueEvent


@pytest.mark.django_db
def test_the_front_page_says_what_this_is(client):
    page = client.get("/")
    assert page.status_code == 200
    assert "RabbitMQ" in page.text


def test_static_files_are_served_without_a_collecting_step(client):
    sheet = client.get("/static/guardian.css")
    assert sheet.status_code == 200
    assert sheet["Content-Type"].startswith("text/css")


def test_alive_needs_nothing(client):
    assert client.get("/healthz").json() == {"status": "ok"}


def test_ready_when_database_task_queue_and_broker_answer(guarded, client):
    answer = client.get("/readyz")
    assert (answer.status_code, answer.json()) == (200, {"database": True, "task_queue": True, "broker": True})


def test_not_ready_without_the_broker_and_the_password_is_not_told(guarded, client, settings, caplog):
    settings.RABBITMQ_MANAGEMENT_URL = "http://guest:secret-word@127.0.0.1:1"
    answer = client.get("/readyz")
    assert (answer.status_code, answer.json()["broker"]) == (503, False)
    assert "secret-word" not in answer.text + caplog.text


@pytest.mark.django_db
@pytest.mark.parametrize("page", ["accounts/owner", "accounts/pulseuser", "queues/queue", "queues/queueevent",
                                  "queues/notification", "queues/pass"])  # fmt: skip
def test_operators_see_everything_in_the_administration_and_nobody_else_does(page):
    visitor = Client()
    assert visitor.get(f"/admin/{page}/").status_code == 302
    owner = Owner.objects.create_user("alice@example.org", vouched=True)
    visitor.force_login(owner)
    assert visitor.get(f"/admin/{page}/").status_code == 302
    operator = Owner.objects.create_superuser("ops@example.org")
    visitor.force_login(operator)
    assert visitor.get(f"/admin/{page}/").status_code == 200


@pytest.fixture
def alices_queue(db):
    owner = Owner.objects.create_user("alice@example.org")
    account = PulseUser.objects.create(username="alice", ready=True)
    account.owners.add(owner)
    now = timezone.now()
    queue = Queue.objects.create(
        vhost="/", name="queue/alice/<b>\u202e", type="classic", durable=True, auto_delete=False, exclusive=False,
        ready=2100, unacknowledged=4, state="warned", pulse_user=account, first_seen=now, last_seen=now,
    )  # fmt: skip
    QueueEvent.objects.create(
        queue=queue, vhost="/", queue_name=queue.name, kind="warned", at=now, details={"length": 7}
    )
    return queue


@pytest.mark.parametrize(
    ("visitor", "status"),
    [(None, 302), ("alice@example.org", 200), ("bob@example.org", 404), ("ops@example.org", 200)],
)
def test_the_page_of_a_queue_is_there_for_its_owners_and_for_operators(alices_queue, client, visitor, status):
    Owner.objects.create_user("bob@example.org", vouched=True)
    Owner.objects.create_superuser("ops@example.org")
    if visitor:
        client.force_login(Owner.objects.get(email=visitor))
    assert client.get(f"/queues/{alices_queue.uuid}/").status_code == status


def test_the_page_of_a_queue_says_how_it_stands(alices_queue, client):
    client.force_login(Owner.objects.get(email="alice@example.org"))
    page = client.get(f"/queues/{alices_queue.uuid}/").text
    for what in ("over its warn length", "2,104", "8,000", "warned at 2,000", "alice@example.org", "passed its warn"):
        assert what in page
    assert "queue/alice/&lt;b&gt;\\u202e" in page


def test_a_mail_links_to_the_page_of_its_queue(alices_queue, client, settings):
    settings.GUARDIAN_BASE_URL = "https://guardian.example.org"
    notification = Notification(kind="recovery", recipient="alice@example.org", facts={"length": 1}, queue=alices_queue)
    path = f"/queues/{alices_queue.uuid}/"
    assert f"https://guardian.example.org{path}" in compose(notification).body
    client.force_login(Owner.objects.get(email="alice@example.org"))
    assert client.get(path).status_code == 200


@pytest.mark.parametrize(("warn", "most"), [("2000", "0"), ("9000", ""), ("", "100"), ("0", "10")])
def test_thresholds_that_delete_before_they_warn_are_refused_in_the_administration(alices_queue, client, warn, most):
    client.force_login(Owner.objects.create_superuser("ops@example.org"))
    page = client.post(f"/admin/queues/queue/{alices_queue.id}/change/", {"warn_length": warn, "max_length": most})
    assert page.status_code == 200
    assert "below the second" in page.text
    alices_queue.refresh_from_db()
    assert (alices_queue.warn_length, alices_queue.max_length) == (None, None)


def test_the_administration_writes_nothing_but_what_was_changed(alices_queue, client, monkeypatch):
    client.force_login(Owner.objects.create_superuser("ops@example.org"))
    save = QueueAdmin.save_model

    def save_after_a_pass(self, request, queue, form, change):
        Queue.objects.update(state="deleting", said="warned")
        save(self, request, queue, form, change)

    monkeypatch.setattr(QueueAdmin, "save_model", save_after_a_pass)
    client.post(f"/admin/queues/queue/{alices_queue.id}/change/", {"warn_length": "10", "max_length": "20"})
    alices_queue.refresh_from_db()
    assert (alices_queue.state, alices_queue.said, alices_queue.max_length) == ("deleting", "warned", 20)


@pytest.mark.django_db
def test_two_owners_cannot_share_an_address_in_another_case():
    from django.core.exceptions import ValidationError
    from django.db import IntegrityError

    Owner.objects.create_user("alice@example.org")
    with pytest.raises(ValidationError):
        Owner.objects.create_user("Alice@Example.org")
    with pytest.raises(IntegrityError):
        Owner.objects.bulk_create([Owner(email="Bob@Example.org")])
