import re

import pytest

from queues.actions.selected import MAX_SELECTED
from queues.guard.once import run_once
from queues.models import Archive, Queue, Watch
from tests.support.api import Program
from tests.support.toolbox import AWAY_AMQP, brake_counts, queue_names, stored_queue

pytestmark = pytest.mark.django_db

NAMES = ("queue/alice/a", "queue/alice/b", "queue/alice/c")


@pytest.fixture
def listed(guarded, pulse_user, amqp):
    """Return Alice's three listed queues, with three messages each."""
    for name in NAMES:
        amqp.queue(name, 3)
    run_once()
    return list(Queue.objects.order_by("name"))


def selected(queues):
    return [queue.uuid.hex for queue in queues]


def confirmation_in(page):
    return re.search(r'name="confirm" value="([^"]+)"', page.text)[1]


@pytest.mark.parametrize(("action", "left"), [("delete", {NAMES[2]}), ("purge", set(NAMES))])
def test_selected_queues_are_deleted_or_purged_after_a_confirmation(
    listed, as_alice, management, vhost, amqp, action, left
):
    body = {"action": action, "uuid": selected(listed[:2]), "list": "ordering=name&search=alice"}
    page = as_alice.post("/queues/selected/", body)
    assert f"This {action}s 2 queues with 6 messages." in page.text
    assert "you can bring these back for 7 days" in page.text
    assert queue_names(management, vhost) == set(NAMES)
    wrong = as_alice.post("/queues/selected/", {**body, "confirm": confirmation_in(page), "typed": "3 queues"})
    assert "This is not the text above" in wrong.text
    done = as_alice.post(
        "/queues/selected/", {**body, "confirm": confirmation_in(page), "typed": "2 queues"}, follow=True
    )
    assert done.request["QUERY_STRING"] == "ordering=name&search=alice"
    assert f"2 are {action}d" in done.text
    assert queue_names(management, vhost) == left
    assert Archive.objects.filter(messages=3).count() == 2
    assert amqp.ready(NAMES[2]) == 3


@pytest.mark.parametrize(("action", "left"), [("delete", {NAMES[2]}), ("purge", set(NAMES))])
def test_the_api_deletes_or_purges_selected_queues_after_a_confirmation(listed, alice, management, vhost, action, left):
    program, body = Program(alice), {"uuids": selected(listed[:2])}
    asked = program.post(f"queues/selected/{action}/", body)
    assert asked.status_code == 409
    assert f"This {action}s 2 queues with 6 messages." in asked.json()["detail"]
    assert queue_names(management, vhost) == set(NAMES)
    done = program.post(f"queues/selected/{action}/", {**body, "confirm": asked.json()["confirm"]})
    assert done.json() == {"done": body["uuids"], "failed": [], "not_tried": [], "stop_reason": ""}
    assert queue_names(management, vhost) == left
    assert Archive.objects.filter(messages=3).count() == 2


def test_the_api_names_the_selected_queue_that_failed_and_goes_on(listed, alice, management, vhost):
    program, body = Program(alice), {"uuids": selected(listed[:2])}
    confirm = program.post("queues/selected/delete/", body).json()["confirm"]
    management.delete_queue(vhost, NAMES[0])
    done = program.post("queues/selected/delete/", {**body, "confirm": confirm}).json()
    assert (done["done"], [one["uuid"] for one in done["failed"]]) == (body["uuids"][1:], body["uuids"][:1])
    assert "The broker doesn't list the queue at the moment." in done["failed"][0]["detail"]


def test_an_unavailable_broker_is_tried_once_and_the_rest_is_skipped(listed, alice, settings):
    program, body = Program(alice), {"uuids": selected(listed)}
    confirm = program.post("queues/selected/delete/", body).json()["confirm"]
    settings.RABBIT_URL = AWAY_AMQP
    done = program.post("queues/selected/delete/", {**body, "confirm": confirm}).json()
    assert (len(done["failed"]), len(done["not_tried"])) == (1, 2)
    assert done["stop_reason"] == "the broker does not answer; try again when it does"
    assert done["failed"][0]["detail"] == "not done, because the broker does not answer"  # without its address


def test_the_api_refuses_queues_of_others_and_too_many(pulse_user, bob):
    queue = stored_queue(NAMES[0], pulse_user=pulse_user, ready=3, unacknowledged=0)
    program = Program(bob)
    for uuids in (selected([queue]), ["0" * 32], ["x"], [], selected([queue]) * (MAX_SELECTED + 1)):
        answer = program.post("queues/selected/delete/", {"uuids": uuids})
        assert (answer.status_code, list(answer.json())) == (400, ["uuids"])


def test_operators_set_the_limits_of_selected_queues_through_the_api(pulse_user, operator):
    queues = [stored_queue(name, pulse_user=pulse_user, ready=3, unacknowledged=0, warn_length=1) for name in NAMES]
    program, body = Program(operator), {"uuids": selected(queues[:2]), "max_length": 2}
    asked = program.post("queues/selected/limits/", body)
    assert asked.status_code == 409
    assert "This deletes 2 queues with 6 messages." in asked.json()["detail"]
    done = program.post("queues/selected/limits/", {**body, "confirm": asked.json()["confirm"]}).json()
    assert sorted(done["done"]) == sorted(body["uuids"])
    assert [queue.max_length for queue in Queue.objects.order_by("name")] == [2, 2, None]


def test_operators_release_blocked_queues_through_the_api(pulse_user, operator):
    blocked, other = (
        stored_queue(name, pulse_user=pulse_user, ready=3, unacknowledged=0, block_reason=reason)
        for name, reason in zip(NAMES[:2], ("brake", ""), strict=True)
    )
    Watch.objects.create(id=1)
    program, body = Program(operator), {"uuids": selected([blocked, other])}
    assert [row["name"] for row in program.get("queues/?blocked=true").json()] == [blocked.name]
    asked = program.post("queues/selected/release/", body)
    assert asked.status_code == 409
    assert "This deletes 1 queue with 3 messages." in asked.json()["detail"]
    assert brake_counts() == (0, 0)
    done = program.post("queues/selected/release/", {**body, "confirm": asked.json()["confirm"]}).json()
    assert (done["done"], [one["uuid"] for one in done["failed"]]) == (body["uuids"][:1], body["uuids"][1:])
    assert (brake_counts(), Watch.objects.get().released_by) == ((0, 1), operator.email)


def test_a_confirmation_does_not_cover_a_queue_that_was_not_shown(listed, as_alice, management, vhost):
    page = as_alice.post("/queues/selected/", {"action": "delete", "uuid": selected(listed[:1])})
    body = {"action": "delete", "uuid": selected(listed), "confirm": confirmation_in(page), "typed": "3 queues"}
    again = as_alice.post("/queues/selected/", body)
    assert "for another change" in again.text
    assert queue_names(management, vhost) == set(NAMES)


def test_operators_set_the_limits_of_selected_queues(pulse_user, alice, operator, client):
    queues = [stored_queue(name, pulse_user=pulse_user, ready=3, unacknowledged=0) for name in NAMES]
    Queue.objects.update(warn_length=100)
    body = {"action": "limits", "uuid": selected(queues[:2]), "set": "1", "max_length": 20_000}
    unchanged = {"initial-warn_length": "100", "warn_length": "100"}
    client.force_login(alice)
    assert client.post("/queues/selected/", body).status_code == 403
    client.force_login(operator)
    without = {name: value for name, value in body.items() if name != "set"}
    assert 'name="warn_length" value="100"' in client.post("/queues/selected/", without).text
    Queue.objects.filter(pk=queues[0].pk).update(warn_length=50)
    client.post("/queues/selected/", {**body, **unchanged})
    limits = Queue.objects.order_by("name").values_list("warn_length", "max_length")
    assert [*limits] == [(50, 20_000), (100, 20_000), (100, None)]


def test_without_a_selection_of_own_queues_the_page_says_so(client, bob, pulse_user):
    queue = stored_queue(NAMES[0], pulse_user=pulse_user)
    client.force_login(bob)
    for uuids in ([], ["x"], ["0" * 32], selected([queue])):
        body = {"action": "delete", "uuid": uuids}
        assert "Select queues in the list first." in client.post("/queues/selected/", body, follow=True).text
