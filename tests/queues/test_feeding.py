"""What feeds a queue, and what the broker limits: in facts, mails and on the queue's page."""

import html
import re

import pytest
from django.urls import reverse

from notifications.sending import send_due
from queues.guard import facts, feeding, once
from queues.models import Queue
from rabbit.entities import Binding


def binding(source, destination, key="", to_queue=False, **arguments):
    arguments = {name.replace("_", "-"): value for name, value in arguments.items()}
    return Binding(source, "/", destination, "queue" if to_queue else "exchange", key, arguments)


def upstream_of(bindings, graph, most=feeding.MAX_EXCHANGES):
    """Return the edges that lead to these bindings, and the exchanges looked up in each step."""
    steps = []

    def bindings_to(names):
        steps.append(list(names))
        return {name: [one for one in graph if one.destination == name] for name in names}

    return [(one.source, one.destination) for one in feeding.upstream(bindings, bindings_to, most)], steps


def test_a_path_leads_back_to_the_first_exchange():
    graph = [binding("a", "b"), binding("b", "c"), binding("x", "y")]
    found = upstream_of([binding("c", "q", to_queue=True)], graph)
    assert found == ([("b", "c"), ("a", "b")], [["c"], ["b"], ["a"]])


def test_a_cycle_ends():
    graph = [binding("a", "b"), binding("b", "a"), binding("b", "b")]
    edges, steps = upstream_of([binding("a", "q", to_queue=True)], graph)
    assert edges == [("b", "a"), ("a", "b"), ("b", "b")]
    assert steps == [["a"], ["b"]]


def test_the_number_of_exchanges_is_limited():
    graph = [binding(str(number + 1), str(number)) for number in range(100)]
    edges, steps = upstream_of([binding("0", "q", to_queue=True)], graph, most=5)
    assert (len(edges), len(steps)) == (5, 5)


def test_the_default_exchange_is_neither_shown_nor_followed():
    default = binding("", "q", "q", to_queue=True)
    assert upstream_of([default], []) == ([], [])
    assert feeding.described([default]) == []


def test_a_binding_is_described_by_its_key_and_arguments():
    headers = binding("e", "q", to_queue=True, type="order", x_match="all", last=True)
    assert feeding.described([headers, binding("a", "b", "k.#")]) == [
        {"exchange": "e", "routing_key": "", "arguments": "x-match: all, last: true, type: order"},
        {"exchange": "a", "routing_key": "k.#", "to": "b"},
    ]


NAME = "queue/alice/orders"


@pytest.fixture
def fed(amqp, guarded, pulse_user):
    """Declare a queue behind a headers exchange and two more exchanges, in a cycle, and return its name."""
    channel = amqp.channel
    for name, type_ in (("first", "topic"), ("middle", "fanout"), ("last", "headers")):
        channel.exchange_declare(f"exchange/alice/{name}", type_)
    channel.exchange_bind("exchange/alice/middle", "exchange/alice/first", "order.#")
    channel.exchange_bind("exchange/alice/last", "exchange/alice/middle", "")
    channel.exchange_bind("exchange/alice/first", "exchange/alice/last", "", {"x-match": "any", "back": 1})
    amqp.queue(NAME)
    channel.queue_bind(NAME, "exchange/alice/last", "", {"x-match": "all", "type": "order"})
    return NAME


TEXTS = (
    "exchange exchange/alice/last, x-match: all, type: order",
    "exchange exchange/alice/last is fed by exchange exchange/alice/middle, routing key (empty)",
    "exchange exchange/alice/middle is fed by exchange exchange/alice/first, routing key order.#",
    "exchange exchange/alice/first is fed by exchange exchange/alice/last, x-match: any, back: 1",
)


@pytest.mark.parametrize("singly", [True, False])
def test_a_mail_shows_header_arguments_and_the_path_to_the_first_exchange(fed, amqp, mailbox, monkeypatch, singly):
    monkeypatch.setattr(facts, "MAX_SINGLE_REQUESTS", 10 if singly else 0)
    amqp.publish(fed, 6)
    once.run_once()
    send_due()
    (mail,) = mailbox.to("alice@example.org")
    for text in (*TEXTS, f"/queues/{Queue.objects.get().uuid}/"):
        assert text in mail.text
        assert text in mail.html


def test_a_queues_page_shows_header_arguments_and_the_path_to_the_first_exchange(fed, as_alice):
    once.run_once()
    page = as_alice.get(reverse("queue", args=[Queue.objects.get().uuid])).content.decode()
    page = page.replace('<code class="name">', "").replace("</code>", "")
    assert 'exchange/alice/last</th><td class="wrap">x-match: all, type: order' in page
    assert 'exchange/alice/first to exchange/alice/middle</th><td class="wrap">order.#' in page


def limit_on_broker(management, vhost, **definition):
    definition = {name.replace("_", "-"): value for name, value in definition.items()}
    management._exchange("PUT", ("policies", vhost, "bounded"), json={"pattern": "^queue/", "definition": definition})


def test_a_warning_says_that_the_broker_limits_the_queue(amqp, guarded, pulse_user, management, mailbox):
    limit_on_broker(management, guarded, max_length=7)
    amqp.queue(NAME, 30)
    once.run_once()
    send_due()
    (mail,) = mailbox.to("alice@example.org")
    for text in (mail.text, mail.html):
        assert "The broker limits this queue to 7 messages, and drops the oldest messages past that." in text
        assert "Guardian deletes" not in text
    assert ["Broker's", "limit:", "7", "messages"] in [line.split() for line in mail.text.splitlines()]


@pytest.mark.parametrize(
    ("definition", "sentence"),
    [
        ({"max_length": 7, "overflow": "reject-publish"}, "this queue to 7 messages, and rejects messages past that."),
        ({"max_length_bytes": 7000}, "to 6.8 KB, and drops the oldest messages past that. If it grows"),
        ({"max_length": 7, "max_length_bytes": 7000}, "limits this queue to 7 messages and 6.8 KB, and drops"),
        ({"max_length": 10}, "If it grows past 10 messages, Guardian deletes it"),
    ],
)
def test_a_warning_says_what_the_broker_does_past_its_limit(
    amqp, guarded, pulse_user, management, mailbox, definition, sentence
):
    limit_on_broker(management, guarded, **definition)
    amqp.queue(NAME, 6)
    once.run_once()
    send_due()
    assert sentence in mailbox.to("alice@example.org")[0].text.replace("\N{NO-BREAK SPACE}", " ")


def test_a_queues_page_shows_the_brokers_limit(amqp, guarded, pulse_user, as_alice):
    amqp.queue(NAME, 6, arguments={"x-max-length": 7})
    once.run_once()
    page = as_alice.get(reverse("queue", args=[Queue.objects.get().uuid])).content.decode()
    assert "7 messages: the broker drops the rest, the oldest first" in page
    (refreshed,) = re.findall('hx-get="([^"]*)"', page)
    for text in (page, as_alice.get(html.unescape(refreshed), headers={"HX-Request": "true"}).content.decode()):
        assert "The broker itself limits it" in text
        assert "it is deleted" not in text
