from datetime import timedelta

import pytest
from django.core.exceptions import ValidationError
from django.utils import timezone

from notifications.mails import compose
from notifications.models import Notification
from queues.actions import limit_requests, single
from queues.models import Queue
from tests.support.api import Program
from tests.support.toolbox import queue_events, stored_queue

pytestmark = pytest.mark.django_db

NAME = "queue/alice/builds"


@pytest.fixture
def queue(pulse_user, settings):
    settings.GUARDIAN_OPERATOR_EMAILS = ["ops@example.org"]
    return stored_queue(NAME, pulse_user=pulse_user, ready=3, unacknowledged=0)


def test_the_operators_mail_leads_to_the_form_with_the_wanted_limit(queue, alice, operator, client):
    client.force_login(alice)
    path = f"/queues/{queue.uuid}/limits/ask/"
    assert path in client.get(f"/queues/{queue.uuid}/").text
    friday = timezone.now().replace(second=0, microsecond=0) + timedelta(days=3)
    sent = {"max_length": 50_000, "reason": "nightly import", "limits_until": f"{friday:%Y-%m-%dT%H:%M}"}
    answer = client.post(path, sent, follow=True)
    assert "The operators have your request." in answer.text
    notification = Notification.objects.get()
    mail = compose(notification)
    assert notification.recipient == "ops@example.org"
    assert "nightly import" in mail.body
    link = f"/queues/{queue.uuid}/limits/?max_length=50000&limits_until={friday:%Y-%m-%dT%H:%M}"
    assert link in mail.body
    client.force_login(operator)
    page = client.get(link)
    assert 'value="50000"' in page.text
    fields = {name: value for name, value in page.context["form"].data.items() if value != ""}
    client.post(f"/queues/{queue.uuid}/limits/", fields)
    queue.refresh_from_db()
    assert (queue.max_length, queue.warn_length, queue.unbounded) == (50_000, None, False)
    granted = Notification.objects.exclude(id=notification.id).get()
    assert granted.recipient == "alice@example.org"
    until = f"{friday:%Y-%m-%d %H:%M} UTC"
    assert f"It has a deletion limit of 50,000 messages until {until}." in compose(granted).body


def test_an_open_request_is_shown_until_operators_decide(queue, alice, operator, client):
    limit_requests.ask(queue, alice, 50_000, "nightly import")
    page = f"/queues/{queue.uuid}/"
    client.force_login(alice)
    assert "The operators have not decided yet." in client.get(page).text
    with pytest.raises(ValidationError, match="not decided about the request for 50,000"):
        limit_requests.ask(queue, alice, 60_000, "more")
    client.force_login(operator)
    assert "a deletion limit of 50,000 messages for" in client.get("/").text
    assert "nightly import" in client.get(f"{page}limits/").text
    single.set_limits(queue, operator, warn_length=1_000)
    assert "a deletion limit of 50,000" not in client.get("/").text
    assert limit_requests.open_request(queue) is None


def test_who_asked_learns_why_a_request_is_declined(queue, alice, admin):
    limit_requests.ask(queue, alice, 50_000, "nightly import")
    assert "This field is required." in admin.post(f"/queues/{queue.uuid}/limits/decline/").text
    answer = admin.post(f"/queues/{queue.uuid}/limits/decline/", {"reason": "no memory left"}, follow=True)
    assert "The request is declined." in answer.text
    declined = Notification.objects.get(kind="limit-answer")
    assert declined.recipient == "alice@example.org"
    assert "no memory left" in compose(declined).body
    assert queue_events(NAME) == ["asked", "declined"]
    again = admin.post(f"/queues/{queue.uuid}/limits/decline/", {"reason": "no memory left"}, follow=True)
    assert "No request is open" in again.text


def test_who_asked_and_no_longer_owns_the_queue_gets_no_answer(queue, pulse_user, alice, bob, operator):
    limit_requests.ask(queue, alice, 50_000, "nightly import")
    pulse_user.owners.set([bob])
    limit_requests.decline(queue, operator, "no memory left")
    assert not Notification.objects.filter(kind="limit-answer").exists()


def test_owners_ask_and_operators_decline_through_the_api(queue, alice, operator):
    program, path = Program(alice), f"queues/{queue.uuid}/limits/"
    refused = program.post(f"{path}ask/", {"max_length": 8_000, "reason": "x"})
    assert refused.json() == {"max_length": ["Enter more than 8,000, the present limit."]}
    assert program.post(f"{path}ask/", {"max_length": 50_000, "reason": "x"}).status_code == 204
    assert limit_requests.open_request(queue).details == {"wanted": 50_000, "reason": "x"}
    declining = [Program(operator).post(f"{path}decline/", {"reason": "no memory left"}) for _ in range(2)]
    assert declining[0].status_code == 204
    assert limit_requests.open_request(queue) is None
    assert declining[1].json() == {"non_field_errors": ["No request is open: it was answered in the meantime."]}


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"max_length": 8_000, "reason": "x"}, "Enter more than 8,000, the present limit."),
        ({"max_length": 2**31, "reason": "x"}, "less than or equal to"),
        ({"max_length": 50_000, "reason": ""}, "This field is required."),
        ({"max_length": 50_000, "reason": "x" * 501}, "at most 500 characters"),
        ({"max_length": 50_000, "reason": "x\u202e"}, "contains an invisible character"),
    ],
)
def test_an_invalid_request_says_what_is_wrong(queue, as_alice, body, text):
    answer = as_alice.post(f"/queues/{queue.uuid}/limits/ask/", body)
    assert text in answer.text
    assert not Notification.objects.exists()


def test_an_owner_asks_at_most_five_times_an_hour(pulse_user, queue, as_alice):
    body = {"max_length": 50_000, "reason": "x"}
    queues = [stored_queue(f"queue/alice/{number}", pulse_user=pulse_user) for number in range(6)]
    pages = [as_alice.post(f"/queues/{one.uuid}/limits/ask/", body) for one in queues]
    assert [page.status_code for page in pages] == [302] * 5 + [200]
    assert "Too many" in pages[-1].text
    assert Notification.objects.count() == 5


def test_a_queue_that_is_never_deleted_needs_no_request(queue, as_alice):
    Queue.objects.update(unbounded=True)
    assert "limits/ask/" not in as_alice.get(f"/queues/{queue.uuid}/").text
    answer = as_alice.post(f"/queues/{queue.uuid}/limits/ask/", {"max_length": 50_000, "reason": "x"})
    assert "never deletes this queue" in answer.text


def test_without_an_operator_the_page_says_to_ask_in_person(queue, alice, settings):
    settings.GUARDIAN_OPERATOR_EMAILS = []
    with pytest.raises(ValidationError, match="Ask in person"):
        limit_requests.ask(queue, alice, 50_000, "x")
