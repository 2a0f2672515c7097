"""The Python clients of the message store, against a running server."""

import asyncio
import inspect
import socket
import uuid
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest

from accounts.access.tokens import create_token
from accounts.models import Owner
from guardian_store import AsyncClient, Client, ClientError, Denied, Invalid, NewMessage, NotFound, Unavailable
from message_store import applications
from message_store.database.store import DatabaseStore
from message_store.http import views
from message_store.store import StoreUnavailable
from tests.support.proxy import Proxy, http_answer
from tests.support.toolbox import raising

ODD = "odd: <b>&\"'%25 ?#é+,1:2"


@pytest.fixture
def key(live_server):
    return applications.create_key(applications.create_application("notices"))[1]


class Awaited:
    """An ``AsyncClient`` whose methods are called without ``await``."""

    def __init__(self, *args, **options):
        self._client = AsyncClient(*args, **options)
        self._runner = asyncio.Runner()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
        self._runner.close()

    def __getattr__(self, name):
        method = getattr(self._client, name)
        return lambda *args, **options: self._result(method(*args, **options))

    def _result(self, called):
        if inspect.isasyncgen(called):
            return iter(self._runner.run(as_list(called)))
        return self._runner.run(called)


async def as_list(iterated):
    return [entry async for entry in iterated]


@pytest.fixture(params=[Client, Awaited], ids=["Client", "AsyncClient"])
def connect(request):
    """Return the class of the client under test."""
    return request.param


@pytest.fixture
def client(live_server, key, connect):
    with connect(live_server.url, "notices", key=key) as opened:
        yield opened


def bodies(messages):
    return [message.text for message in messages]


# Queues


def test_queues_are_created_listed_changed_and_deleted(client):
    made = client.create_queue(
        "q1", partitions=3, consistency="weak", principals=["bid:Alice@example.org", "app:other"]
    )
    assert (made.name, made.partitions, made.type, made.consistency) == ("q1", 3, "user", "weak")
    assert made.principals == ("bid:alice@example.org", "app:other")
    for name in ("q4", "q2", "q0", "q3"):
        client.create_queue(name)
    assert len(client.create_queue().name) == 32
    client.post("q2", "hello")
    for page in (2, 3, 5, 6, 7, 100):
        listed = {queue.name: queue.count for queue in client.queues(count=True, start="q", page=page)}
        assert listed == {"q0": 0, "q1": 0, "q2": 1, "q3": 0, "q4": 0}
    first = next(client.queues(start="q1"))
    assert (first.name, first.count) == ("q1", None)
    assert abs(first.created - datetime.now(UTC)) < timedelta(minutes=1)
    changed = client.update_queue("q1", partitions=5, type="public", principals=[])
    assert (changed.partitions, changed.type, changed.consistency, changed.principals) == (5, "public", "weak", ())
    client.delete_queue("q1")
    with pytest.raises(NotFound):
        client.delete_queue("q1")
    with pytest.raises(ValueError, match="at least 2"):
        next(client.queues(page=1))


@pytest.mark.parametrize("name", [ODD, "x" * 50, "positions", "..."])
def test_any_name_reaches_the_server_unchanged(client, name):
    assert client.create_queue(name).name == name
    posted = client.post(name, "hello")
    client.set_positions(name, name, {1: posted.id})
    assert client.positions(name, name) == {1: posted.id}
    client.delete_positions(name, name)
    assert client.positions(name, name) == {}
    assert bodies(client.messages(name)) == ["hello"]
    assert name in [queue.name for queue in client.queues()]


@pytest.mark.parametrize("name", ["", ".", "..", "q/positions/mailer"])
def test_a_name_that_would_change_the_address_is_not_sent(client, name):
    client.create_queue("q")
    posted = client.post("q", "hello")
    client.set_positions("q", "mailer", {1: posted.id})
    for call in (
        lambda: client.delete_queue(name),
        lambda: client.delete_positions("q", name),
        lambda: client.post(name, "x"),
    ):
        with pytest.raises(Invalid, match="can't be a name"):
            call()
    assert client.positions("q", "mailer") == {1: posted.id}
    assert [queue.name for queue in client.queues()] == ["q"]


# Messages


def test_reading_ends_at_the_first_and_last_possible_id(client):
    client.create_queue("q")
    first = "0000000000001000" + "80" + "0" * 14
    client.overwrite("q", 1, first, "first")
    assert bodies(client.messages("q", descending=True, page=1)) == ["first"]
    assert bodies(client.messages("q", descending=True, after=first)) == []
    assert bodies(client.messages("q", after="f" * 12 + "1fffbf" + "f" * 14)) == []


@pytest.mark.parametrize("page", [1, 3, 7, 100])
def test_messages_are_read_in_pages_in_both_directions(client, page):
    client.create_queue("q", partitions=2)
    posted = client.post_many("q", [NewMessage(str(number), partition=2) for number in range(7)])
    client.post("q", "another partition's", partition=1)
    references = [one.id for one in posted]

    def read(**options):
        return "".join(bodies(client.messages("q", partition=2, page=page, **options)))

    assert read() == "0123456"
    assert read(descending=True) == "6543210"
    assert read(after=references[2]) == "3456"
    assert read(since=references[2]) == "23456"
    assert read(since=posted[2].timestamp) == "23456"
    assert read(since=posted[2].timestamp + Decimal("0.0000001")) == "3456"
    assert read(after=references[2], descending=True) == "10"
    assert read(since=str(posted[2].timestamp), descending=True) == "210"
    assert read(after=references[6]) == ""


@pytest.mark.parametrize("descending", [False, True])
def test_reading_continues_after_a_truncated_answer(client, monkeypatch, descending):
    monkeypatch.setattr(views, "MAX_RESPONSE_BYTES", 5)
    client.create_queue("q")
    client.post_many("q", [NewMessage(f"message {number}") for number in range(4)])
    expected = [f"message {number}" for number in range(4)]
    assert bodies(client.messages("q", descending=descending)) == (expected[::-1] if descending else expected)
    asked = [(1, message.id.upper()) for message in client.messages("q", descending=descending)]
    found = client.get("q", [*asked, asked[0]])
    assert bodies(found) == bodies(client.messages("q", descending=descending))


@pytest.mark.parametrize("content_type", ["image/png", "application/json; charset=utf-8"])
def test_a_body_and_its_content_type_survive_a_round_trip(client, content_type):
    client.create_queue("q")
    texts = ["é\0\r\n\u202e", '{"a": [1, 2.5]}', b"\xff\xfe\x00binary", b"\xc3\xa9"]
    for text in texts:
        client.post("q", text, content_type=content_type)
    client.post_many("q", [NewMessage(text, content_type=content_type) for text in texts])
    found = list(client.messages("q"))
    wanted = [text.encode() if isinstance(text, str) else text for text in texts]
    assert [message.body for message in found] == wanted * 2
    assert {message.content_type for message in found} == {content_type}
    assert found[1].json() == {"a": [1, 2.5]}
    assert found[3].text == "é"
    with pytest.raises(UnicodeDecodeError):
        found[2].text  # noqa: B018
    assert "binary" not in repr(found[2])


def test_messages_are_read_by_id_overwritten_and_deleted(client, monkeypatch):
    monkeypatch.setattr("guardian_store._client.MAX_IDS_PER_REQUEST", 2)
    client.create_queue("q", partitions=2)
    posted = client.post_many("q", [NewMessage(str(number), partition=1 + number % 2) for number in range(5)])
    references = [(one.partition, one.id) for one in posted]
    elsewhere = (2, posted[0].id)
    assert bodies(client.get("q", [references[3], elsewhere, references[0], references[4]])) == ["3", "0", "4"]
    assert client.get("q", []) == []
    client.overwrite("q", *references[1], "new", ttl=60, content_type="text/x-new")
    (found,) = client.get("q", [references[1]])
    assert (found.text, found.content_type, found.timestamp) == ("new", "text/x-new", posted[1].timestamp)
    made = uuid.uuid1().hex
    client.overwrite("q", 1, made, b"made")
    assert bodies(client.get("q", [(1, made)])) == ["made"]
    client.delete("q", [*references[:3], elsewhere])
    assert bodies(client.get("q", references)) == ["3", "4"]


# Access


def test_an_owners_token_reads_and_deletes_messages_only(client, connect, live_server):
    alice = Owner.objects.create_user("alice@example.org", vouched=True)
    _, token = create_token(alice, "reader", scope="all")
    client.create_queue("hers", principals=["bid:alice@example.org"])
    posted = client.post("hers", "hello")
    with connect(live_server.url, "notices", token=token) as reader:
        assert bodies(reader.messages("hers")) == ["hello"]
        with pytest.raises(Denied, match="Access was denied") as raised:
            reader.post("hers", "x")
        assert raised.value.status == 403
        reader.delete("hers", [(1, posted.id)])
        assert list(reader.messages("hers")) == []


def test_a_public_queue_is_read_without_credentials(client, connect, live_server):
    client.create_queue("news", type="public")
    client.post("news", "hello")
    with connect(live_server.url, "notices") as anybody:
        assert bodies(anybody.messages("news")) == ["hello"]
        with pytest.raises(Denied):
            anybody.post("news", "x")
    with pytest.raises(ValueError, match="not both"):
        connect(live_server.url, "notices", key="a", token="b")
    for key in ("schlüssel", "from-a-file\n"):
        with pytest.raises(ValueError, match="printable ASCII"):
            connect(live_server.url, "notices", key=key)
    with pytest.raises(ValueError, match="Port"):
        connect("http://127.0.0.1:x", "notices")


# Failures


def test_a_refusal_is_raised_with_the_servers_errors(client, connect, live_server, settings):
    settings.MESSAGE_STORE_MAX_BODY = 100
    client.create_queue("q")
    cases = [
        (lambda: client.post("q", "x", partition=4), Invalid, 400, {"partition": "4 is greater than maximum value 1"}),
        (lambda: client.post("q", "x" * 101), Invalid, 413, {"body": "More bytes than maximum value 100"}),
        (lambda: client.post("x" * 51, "x"), NotFound, 404, {"queue_name": "There is no such queue"}),
        (lambda: unknown_key.create_queue("q"), Denied, 401, {"InvalidApplicationKey": "There is no such key"}),
    ]  # fmt: skip
    with connect(live_server.url, "notices", key="0" * 64) as unknown_key:
        for do, kind, status, errors in cases:
            with pytest.raises(kind) as raised:
                do()
            assert (raised.value.status, raised.value.errors) == (status, errors)
    with raising(DatabaseStore, "push", StoreUnavailable("down")), pytest.raises(Unavailable) as raised:
        client.post("q", "x")
    assert (raised.value.status, list(raised.value.errors)) == (503, ["storage"])


def test_a_server_that_does_not_answer_is_unavailable(connect):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(Unavailable) as raised, connect(address, "notices", key="secret-key", timeout=0.1) as slow:
            slow.post("q", "x")
    assert raised.value.status is None
    assert "secret-key" not in str(raised.value)
    with pytest.raises(Unavailable), connect(address, "notices") as refused:
        refused.post("q", "x")  # the socket is closed


def test_a_truncated_or_foreign_answer_is_an_error(client, connect, live_server, key):
    client.create_queue("q")
    with Proxy.before(live_server.url) as proxy:

        def proxied_client():
            return connect(proxy.url(live_server.url), "notices", key=key)  # with its own connection

        proxy.cut_after(60)
        with pytest.raises(Unavailable), proxied_client() as cut:
            cut.post("q", "x")
        for answer, kind in (
            (http_answer("502 Bad Gateway", b"<html>"), Unavailable),
            (http_answer("200 OK", b"<html>"), Unavailable),
            (http_answer("200 OK", b""), Unavailable),
            (http_answer("200 OK", b"[]"), Unavailable),
            (http_answer("200 OK", b"{}"), Unavailable),
            (http_answer("404 Not Found", b"default backend - 404"), Unavailable),
            (http_answer("301 Moved", b"", "Location: https://elsewhere.example.org/"), ClientError),
            (http_answer("500 Error", b'{"error_msg": "odd"}'), Unavailable),
            (http_answer("429 Too Many Requests", b"<html>"), Unavailable),
        ):
            proxy.answer(answer)  # the proxy answers requests of one packet only
            with pytest.raises(ClientError) as raised, proxied_client() as odd:
                odd.get("q", [(1, "0" * 32)])
            assert type(raised.value) is kind
            assert "a body that is not from the message store" in str(raised.value)
            assert ("https://elsewhere.example.org/" in str(raised.value)) == (b"Location" in answer)
    assert bodies(client.messages("q")) == ["x"]  # the store got it, though its answer was cut
