"""Messages with properties that py-amqp can't read: they are peeked at, archived, downloaded and replayed."""

import base64
import json
import struct

import pytest
from amqp import Message, spec

from accounts.models import PulseUser
from queues.actions import single
from queues.archives import replay
from queues.guard.once import run_once
from queues.models import Archive, Queue
from rabbit.amqp import Session
from rabbit.decoding import HEADER, MAX_DEPTH
from tests.support.raw_messages import Raw, table

NAME = "queue/alice/builds"


def nested(levels):
    """Return the encoded headers of this many tables, each in the one before."""
    encoded = table(b"")
    for _ in range(levels):
        encoded = table(b"\x01aF" + encoded)
    return encoded


HUGE = table(b"\x04hugeS" + table(b"x" * 60_000))
TOO_LARGE = table(b"\x04hugeS" + table(b"x" * 131_000))
IN_MILLISECONDS = table(b"\x02atT" + struct.pack(">Q", 1_767_614_400_000))
SHALLOW, DEEP = nested(MAX_DEPTH - 1), nested(MAX_DEPTH)


ODD = {
    "nested": Raw(nested(1000)),
    "deep": Raw(DEEP),
    "shallow": Raw(SHALLOW),
    "milliseconds": Raw(IN_MILLISECONDS),
    "huge": Raw(HUGE),
    "latin": Raw(table(b"\x01aI\x00\x00\x00\x05"), b"text/\xe4"),
}


@pytest.fixture
def listed(guarded, amqp, alice, client, settings):
    """Return a queue of Alice, who is signed in, with a plain message before and after each odd one."""
    settings.GUARDIAN_MAX_QUEUE_LENGTH = 1000
    PulseUser.objects.create(username="alice", ready=True).owners.add(alice)
    amqp.queue(NAME, 1)
    for body, properties in ODD.items():
        amqp.channel.basic_publish("", NAME, body.encode(), properties)
        amqp.channel.basic_publish("", NAME, b"plain")
    run_once()
    client.force_login(alice)
    return Queue.objects.get()


@pytest.fixture
def archived(listed, alice, amqp):
    """Return the archive of the queue, which is declared again."""
    single.delete_queue(listed, alice)
    amqp.queue(NAME)
    run_once()
    return Archive.objects.get()


def encoded(raw):
    return base64.b64encode(raw[4:]).decode()


def downloaded(client, archive):
    lines = client.get(f"/archives/{archive.uuid}/download/").getvalue().splitlines()
    return {message["body"]: message for message in map(json.loads, lines) if message["body"] in ODD}


def test_a_peek_shows_messages_with_unreadable_headers(listed, client):
    page = client.post(f"/queues/{listed.uuid}/messages/", {"count": 50}).text
    assert page.count("<section") == 13
    assert page.count(HEADER) == 4
    response = client.get(f"/api/queues/{listed.uuid}/messages/?count=50")
    assert [message["body"] for message in response.json()].count("plain") == 6


def test_messages_with_unreadable_headers_are_archived_with_the_rest(archived, client):
    assert (archived.messages, archived.dropped) == (13, 0)
    found = downloaded(client, archived)
    assert {name: message["headers"] for name, message in found.items() if name != "shallow"} == {
        "nested": {HEADER: {"headers": encoded(nested(1000))}},
        "deep": {HEADER: {"headers": encoded(DEEP)}},
        "milliseconds": {HEADER: {"headers": encoded(IN_MILLISECONDS)}},
        "huge": {"huge": "x" * 60_000},
        "latin": {"a": 5, HEADER: {"content_type": base64.b64encode(b"text/\xe4").decode()}},
    }
    assert list(found["shallow"]["headers"]) == ["a"]
    for name, message in found.items():
        kind = {} if name == "latin" else {"content_type": "text/plain"}
        assert message["properties"] == {"delivery_mode": 2, "message_id": "odd", **kind}
    for position in range(1, 14):
        assert client.get(f"/archives/{archived.uuid}/messages/{position}/").status_code == 200


def test_messages_with_unreadable_headers_are_replayed(archived, alice, client):
    replay.start(archived, alice, queue=NAME)
    assert replay.run_due() == 13
    single.delete_queue(Queue.objects.get(), alice)
    again = Archive.objects.exclude(pk=archived.pk).get()
    before, after = downloaded(client, archived), downloaded(client, again)
    for message in (*before.values(), *after.values()):
        message["headers"].pop("x-guardian-replay", None)
    assert after == before


def test_a_message_with_a_routing_key_that_is_not_utf8_is_archived(listed, client, alice, broker, guarded, amqp):
    amqp.channel.exchange_declare("any", "fanout")
    amqp.channel.queue_bind(NAME, "any")
    with Session(broker.amqp_url, guarded) as session:
        channel = session.new_channel()
        channel.confirm_select()
        channel.basic_publish(Message(b"nested", type="t", application_headers={"a": 5}), "any", b"caf\xe9.au")
        channel.wait(spec.Basic.Ack)
    single.purge_queue(listed, alice)
    amqp.channel.exchange_delete("any")
    message = downloaded(client, Archive.objects.get())["nested"]
    assert (message["exchange"], message["routing_key"]) == ("any", "caf?.au")
    assert message["headers"] == {"a": 5, HEADER: {"routing_key": base64.b64encode(b"caf\xe9.au").decode()}}
    assert message["properties"] == {"type": "t"}


def test_a_replay_ends_at_a_message_with_too_long_headers_and_names_it(listed, alice, amqp):
    amqp.channel.queue_purge(NAME)
    for properties in (None, Raw(TOO_LARGE), None):
        amqp.channel.basic_publish("", NAME, b"x", properties)
    single.purge_queue(listed, alice)
    archive = Archive.objects.get()
    replay.start(archive, alice, queue=NAME)
    replay.run_due()
    ended = archive.replays.get()
    assert (ended.state, ended.error) == (
        "failed", "Message 2 was not taken: its headers are too long to be sent again. 1 later ones were.",
    )  # fmt: skip
