"""Pages, actions and probes while the broker's process is suspended: it accepts connections and never answers."""

import json
import time
from functools import partial

import pytest
from django.test import Client

from queues.guard import once
from queues.models import Pass, Queue, Watch
from status import probes
from tests.support.toolbox import in_parallel

NAME = "queue/alice/builds"

PAGES = {
    "/queues/": 200,
    "/queues/{uuid}/": 200,
    "/queues/{uuid}/delete/": 200,
    "/exchanges/": 503,
    "/exchanges/exchange/?name=exchange/alice/a": 503,
    "/exchanges/delete/?name=exchange/alice/a": 503,
    "/pulse-users/alice/": 200,
    "/pulse-users/alice/delete/": 503,
    "/agents/": 200,
    "/admin/": 200,
    "/admin/operate/orphans/": 503,
    "/api/queues/{uuid}/live/": 200,
    "/api/exchanges/": 503,
}

ACTIONS = {
    "/queues/{uuid}/delete/": {"typed": NAME},
    "/exchanges/delete/?name=exchange/alice/a": {"typed": "exchange/alice/a"},
    "/pulse-users/alice/password/": {},
    "/admin/operate/pass/": {},
}


@pytest.fixture
def hanging(broker, guarded, amqp, pulse_user, operator):
    """List a queue, then suspend the broker's process until the test ends. Return the queue."""
    if broker.node is None:
        pytest.skip("nobody can suspend a broker that was named")
    amqp.queue(NAME, 3)
    amqp.channel.exchange_declare("exchange/alice/a")
    once.run_once()
    broker.node.suspend()
    yield Queue.objects.get()
    broker.node.resume()


@pytest.fixture
def ask(operator, hanging):
    """Return a function that sends an operator's requests one after another: the answers and the seconds of each."""
    client = Client()
    client.force_login(operator)
    client.get("/settings/")  # imports and templates

    def timed(method, path, data):
        began = time.monotonic()
        answer = getattr(client, method)(path.format(uuid=hanging.uuid), data)
        return answer, time.monotonic() - began

    return lambda method, requests: {path: timed(method, path, data) for path, data in requests.items()}


@pytest.mark.slow
def test_pages_answer_with_what_is_stored_and_say_so(ask):
    answers = ask("get", dict.fromkeys(PAGES))
    assert {path: answer.status_code for path, (answer, _) in answers.items()} == PAGES
    assert not {path: seconds for path, (_, seconds) in answers.items() if seconds > 1.8 + 1.5}

    def text(path):
        return answers[path][0].text

    assert "3 messages" in text("/queues/{uuid}/") or ">3<" in text("/queues/{uuid}/")
    assert "unknown: the broker did not answer" in text("/queues/{uuid}/")
    assert "The broker did not answer. The figures are from the last list" in text("/queues/{uuid}/delete/")
    assert "the Pulse user had 1 queue." in text("/pulse-users/alice/delete/")
    assert "The exchanges could not be listed, because the broker does not answer." in text("/exchanges/")
    assert json.loads(text("/api/queues/{uuid}/live/"))["ready"] is None


@pytest.mark.slow
def test_actions_answer_within_five_seconds_and_a_page_records_no_outage(ask):
    answers = ask("post", ACTIONS)
    assert {answer.status_code for answer, _ in answers.values()} == {503}
    assert not {path: seconds for path, (_, seconds) in answers.items() if seconds > 4.8 + 1.5}
    assert (Watch.objects.get().outage_since, Pass.objects.count()) == (None, 2)


def test_readyz_does_not_wait_for_the_broker_and_blocks_no_other_request(hanging, client, monkeypatch):
    monkeypatch.setattr(probes, "MAX_AGE_SECONDS", 2.0)
    began = time.monotonic()
    first, *others = in_parallel(*[partial(timed_readyz, Client()) for _ in range(4)])
    answers = sorted((first, *others), key=lambda answer: answer[1])
    assert [status for status, _, _ in answers] == [503] * 4
    assert [seconds < 1 for _, seconds, _ in answers] == [True, True, True, False]
    assert time.monotonic() - began < 2.5
    status, seconds, body = timed_readyz(client)
    assert (status, seconds < 0.5, body) == (503, True, {"database": True, "task_queue": True, "broker": False})


def timed_readyz(client):
    began = time.monotonic()
    answer = client.get("/readyz")
    return answer.status_code, time.monotonic() - began, answer.json()
