"""Owners ask for a higher deletion limit, and operators decide."""

import pytest
from django.core.exceptions import ValidationError

from notifications.mails import compose
from notifications.models import Notification
from queues import limit_requests
from queues.models import Queue
from tests.toolbox import stored_queue

pytestmark = pytest.mark.django_db

NAME = "queue/alice/builds"


@pytest.fixture
def queue(account, settings):
    settings.GUARDIAN_OPERATOR_EMAILS = ["ops@example.org"]
    return stored_queue(NAME, pulse_user=account, ready=3, unacknowledged=0)


def test_the_operators_mail_leads_to_the_form_with_the_wanted_limit(queue, alice, operator, client):
    client.force_login(alice)
    path = f"/queues/{queue.uuid}/limits/ask/"
    assert path in client.get(f"/queues/{queue.uuid}/").text
    answer = client.post(path, {"max_length": 50_000, "reason": "nightly import"}, follow=True)
    assert "The operators have your request." in answer.text
    notification = Notification.objects.get()
    mail = compose(notification)
    assert notification.recipient == "ops@example.org"
    assert "nightly import" in mail.body
    link = f"/queues/{queue.uuid}/limits/?max_length=50000"
    assert link in mail.body
    client.force_login(operator)
    page = client.get(link)
    assert 'value="50000"' in page.text
    fields = {name: value for name, value in page.context["form"].data.items() if value != ""}
    client.post(f"/queues/{queue.uuid}/limits/", fields)
    queue.refresh_from_db()
    assert (queue.max_length, queue.warn_length, queue.unbounded) == (50_000, None, False)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"max_length": 8_000, "reason": "x"}, "Enter more than 8,000, the present limit."),
        ({"max_length": 2**31, "reason": "x"}, "less than or equal to"),
        ({"max_length": 50_000, "reason": ""}, "This field is required."),
        ({"max_length": 50_000, "reason": "x" * 501}, "at most 500 characters"),
    ],
)
def test_an_invalid_request_says_what_is_wrong(queue, alice, client, body, text):
    client.force_login(alice)
    answer = client.post(f"/queues/{queue.uuid}/limits/ask/", body)
    assert text in answer.text
    assert not Notification.objects.exists()


def test_an_owner_asks_at_most_five_times_an_hour(queue, alice, client):
    client.force_login(alice)
    body = {"max_length": 50_000, "reason": "x"}
    pages = [client.post(f"/queues/{queue.uuid}/limits/ask/", body) for _ in range(6)]
    assert [page.status_code for page in pages] == [302] * 5 + [200]
    assert "Too many" in pages[-1].text
    assert Notification.objects.count() == 5


def test_a_queue_that_is_never_deleted_needs_no_request(queue, alice, client):
    Queue.objects.update(unbounded=True)
    client.force_login(alice)
    assert "limits/ask/" not in client.get(f"/queues/{queue.uuid}/").text
    answer = client.post(f"/queues/{queue.uuid}/limits/ask/", {"max_length": 50_000, "reason": "x"})
    assert "never deletes this queue" in answer.text


def test_without_an_operator_the_page_says_to_ask_in_person(queue, alice, settings):
    settings.GUARDIAN_OPERATOR_EMAILS = []
    with pytest.raises(ValidationError, match="Ask in person"):
        limit_requests.ask(queue, alice, 50_000, "x")
