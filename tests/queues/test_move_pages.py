import re

import pytest
from playwright.sync_api import expect

from guardian_consumers import _retries as retries
from queues.guard.once import run_once
from queues.models import Move, Queue
from queues.moves import moving
from tests.support.api import Program
from tests.support.chromium import sign_in
from tests.support.toolbox import wait_until_equal

DEAD, JOBS, TO = "queue/alice/dead", "queue/alice/jobs", "queue/alice/to"
DEATH = {"queue": JOBS, "reason": "rejected", "exchange": "", "routing-keys": [JOBS], "count": 2}


@pytest.fixture
def dead(guarded, pulse_user, amqp, settings):
    """Return a queue with two dead letters of one group, a forged one, and another message."""
    settings.GUARDIAN_MAX_QUEUE_LENGTH = 100
    amqp.queue(JOBS, arguments={"x-dead-letter-exchange": "", "x-dead-letter-routing-key": DEAD})
    amqp.queue(TO)
    amqp.queue(DEAD, 1)
    for death in (DEATH, DEATH, {**DEATH, "queue": "queue/bob/<b>"}):
        publish(amqp, DEAD, {"x-death": [death], "x-guardian-sent-back": 3})
    run_once()
    return Queue.objects.get(name=DEAD)


def publish(amqp, name, headers):
    amqp.channel.basic_publish("", name, b"1", retries.pika.BasicProperties(headers=headers))


def hidden(page):
    return dict(re.findall(r'<input type="hidden" name="(confirm|uuid)" value="([^"]+)"', page))


def test_a_move_is_previewed_started_once_and_shown(dead, amqp, as_alice):
    address = f"/queues/{dead.uuid}/move/"
    assert address in as_alice.get(f"/queues/{dead.uuid}/").text
    chosen = {"to": "queue", "name": TO, "count": "3"}
    preview = as_alice.get(address, chosen).text
    assert "moves the first 3 of 4 ready messages to the queue" in preview
    assert "no consumer, so the messages wait in it. Its deletion limit is 100 messages." in preview
    for _ in range(2):  # the form is sent twice
        started = as_alice.post(address, {**chosen, **hidden(preview)})
    move = Move.objects.get()
    assert started.url == f"/queues/{dead.uuid}/moves/{move.uuid}/"
    assert "0 of 3 are sent" in as_alice.get(f"/queues/{dead.uuid}/").text
    assert "It starts within some seconds" in as_alice.get(started.url).text
    moving.run_due()
    assert as_alice.get(started.url, headers={"HX-Request": "true"}).headers["HX-Refresh"] == "true"
    assert "Done: 3 messages were moved." in as_alice.get(started.url).text
    assert amqp.ready(TO) == 3


def test_a_copy_says_that_it_marks_the_messages(dead, as_alice):
    preview = as_alice.get(f"/queues/{dead.uuid}/move/", {"to": "queue", "name": TO, "copy": "on"}).text
    assert "copies all 4 ready messages" in preview
    assert "marked as redelivered" in preview


def test_a_move_that_is_refused_has_an_error_at_the_name(dead, as_alice):
    page = as_alice.get(f"/queues/{dead.uuid}/move/", {"to": "queue", "name": "queue/bob/to"})
    assert "Choose a queue whose name starts with queue/alice/" in page.text
    assert 'aria-invalid="true"' in page.text
    assert as_alice.get(f"/queues/{dead.uuid}/move/", {"to": "queue", "name": TO, "edit": "1"}).status_code == 200
    Queue.objects.update(state="deleting")
    refused = as_alice.get(f"/queues/{dead.uuid}/move/")
    assert (refused.status_code, "about to archive and delete" in refused.text) == (409, True)


def test_a_move_is_stopped_on_its_page(dead, as_alice, alice):
    move = moving.start(dead, alice, moving.Destination(queue=TO))
    page = as_alice.post(f"/queues/{dead.uuid}/moves/{move.uuid}/stop/", follow=True).text
    assert "Stopped after 0 of 4 messages." in page


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"state": "failed", "error": "No <b>."}, "No &lt;b&gt;."),
        ({"state": "done", "sent": 4, "repeated": 2}, "up to 2 messages may have arrived twice"),
        ({"state": "done", "sent": 1}, "Consumers took the other 3"),
        ({"state": "done", "sent": 1, "kept": 3, "to_origin": True}, "1 message was sent back. 3 others stayed"),
    ],
)
def test_the_result_says_what_became_of_the_messages(dead, as_alice, alice, fields, says):
    move = moving.start(dead, alice, moving.Destination(queue=TO))
    Move.objects.update(**fields)
    assert says in as_alice.get(f"/queues/{dead.uuid}/moves/{move.uuid}/").text


def test_dead_letters_are_shown_with_the_reason_and_sent_back(dead, amqp, as_alice):
    address = f"/queues/{dead.uuid}/dead-letters/"
    assert address in as_alice.get(f"/queues/{dead.uuid}/").text
    assert "sets their redelivered flag" in as_alice.get(address).text
    page = as_alice.post(address).text
    assert "rejected by a consumer, up to 2 times" in page
    assert "2 were sent back before, up to 3 times" in page
    assert "straight to the queue" in page
    assert "queue/bob/&lt;b&gt;" in page
    assert "it is not a queue of this Pulse user" in page
    assert "1 message is no dead letter, and stays here" in page
    (group,) = re.findall(r'name="group" value="([^"]+)"', page)
    none = as_alice.post(address, hidden(page))
    assert (none.status_code, "Choose at least one group" in none.text) == (400, True)
    started = as_alice.post(address, {**hidden(page), "group": group.replace("&quot;", '"')})
    moving.run_due()
    assert "Done: 2 messages were sent back. 2 others stayed" in as_alice.get(started.url).text
    assert (amqp.ready(JOBS), amqp.ready(DEAD)) == (2, 2)


def test_a_parked_message_shows_its_error_traceback_and_attempts(dead, amqp, as_alice):
    name, exchange = f"{JOBS}.parked", "exchange/alice/shop"
    amqp.channel.exchange_declare(exchange, "direct")
    amqp.queue(name)
    amqp.channel.queue_bind(name, exchange, name)
    publish(
        amqp,
        name,
        {
            retries.QUEUE: JOBS,
            retries.ERROR: "ValueError: no <book>",
            retries.TRACEBACK: "at\nline",
            retries.ATTEMPTS: 4,
        },
    )
    run_once()
    page = as_alice.post(f"/queues/{Queue.objects.get(name=name).uuid}/dead-letters/").text
    assert "4 attempts: ValueError: no &lt;book&gt;" in page
    assert "<code>at\nline</code>" in page
    assert f'{exchange}</bdi> with the key <bdi class="name">{JOBS}.again' in page


def test_a_quorum_queue_says_why_nobody_looks(dead, amqp, as_alice):
    name = "queue/alice/quorum"
    amqp.queue(name, 1, arguments={"x-queue-type": "quorum"})
    wait_until_equal(lambda: amqp.ready(name), 1)
    run_once()
    address = f"/queues/{Queue.objects.get(name=name).uuid}/dead-letters/"
    page = as_alice.get(address).text
    assert "look at the messages of a quorum queue first" in page
    started = as_alice.post(address, {**hidden(page), "count": "1"})
    moving.run_due()
    assert "Done: 0 messages were sent back. 1 other stayed" in as_alice.get(started.url).text


def test_a_program_moves_messages_and_reads_the_progress(dead, amqp, alice, bob):
    program = Program(alice)
    answer = program.post(f"queues/{dead.uuid}/move/", {"to": {"queue": TO}, "count": 2})
    assert answer.status_code == 202
    started = answer.json()
    assert {name: started[name] for name in ("queue", "to_queue", "state", "total", "sent", "copy", "by")} == {
        "queue": dead.uuid.hex, "to_queue": TO, "state": "running", "total": 2, "sent": 0, "copy": False,
        "by": "alice@example.org",
    }  # fmt: skip
    moving.run_due()
    assert program.get(f"moves/{started['uuid']}/").json()["state"] == "done"
    assert Program(bob).get(f"moves/{started['uuid']}/").status_code == 404


def test_a_program_is_asked_before_it_sends_dead_letters_back(dead, amqp, alice):
    program, path = Program(alice), f"queues/{dead.uuid}/move/"
    asked = program.post(path, {"to": "origin"})
    assert asked.status_code == 409
    groups = asked.json()["groups"]
    assert [(one["queue"], one["messages"], one["sent_back"], bool(one["why_not"])) for one in groups] == [
        (JOBS, 2, 3, False),
        ("queue/bob/<b>", 1, 3, True),
    ]
    refused = program.post(path, {"to": "origin", "confirm": asked.json()["confirm"], "groups": groups})
    assert (refused.status_code, list(refused.json())) == (400, ["groups"])
    done = program.post(path, {"to": "origin", "confirm": asked.json()["confirm"], "groups": groups[:1]})
    assert done.status_code == 202
    moving.run_due()
    assert (amqp.ready(JOBS), amqp.ready(DEAD)) == (2, 2)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "to"),
        ({"to": "elsewhere"}, "to"),
        ({"to": {}}, "to"),
        ({"to": {"queue": "queue/bob/to"}}, "to"),
        ({"to": {"queue": TO}, "count": 0}, "count"),
        ({"to": "origin", "confirm": "x"}, "confirm"),
    ],
)
def test_an_invalid_move_names_the_field(dead, alice, body, field):
    answer = Program(alice).post(f"queues/{dead.uuid}/move/", body)
    assert (answer.status_code, list(answer.json())) == (400, [field])


def test_fifty_dead_letters_go_back_in_six_clicks_from_the_front_page(page, guarded, pulse_user, amqp, alice, settings):
    settings.GUARDIAN_MAX_QUEUE_LENGTH = 100
    amqp.queue(JOBS, 50, arguments={"x-dead-letter-exchange": "", "x-dead-letter-routing-key": DEAD})
    amqp.queue(DEAD)
    while (got := amqp.channel.basic_get(JOBS))[0] is not None:
        amqp.channel.basic_reject(got[0].delivery_tag, requeue=False)
    run_once()
    sign_in(page, alice)
    page.get_by_role("link", name="Queues", exact=True).first.click()
    page.get_by_role("link", name=DEAD).click()
    page.get_by_text("More", exact=True).click()
    page.get_by_role("link", name="Dead letters").click()
    page.get_by_role("button", name="Show dead letters").click()
    expect(page.get_by_role("checkbox", name=f"Select 50 messages of {JOBS}")).to_be_checked()
    page.get_by_role("button", name="Send back").click()
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    moving.run_due()
    expect(page.get_by_role("status")).to_contain_text("Done: 50 messages were sent back.")  # it refreshes by itself
    assert (amqp.ready(JOBS), amqp.ready(DEAD)) == (50, 0)
