"""Requests as they leave, answers as they come, and what is left of a request that failed."""

import contextlib
import gc
import socket
import threading
import time

import pytest
from httptools import HttpParserCallbackError

from rabbit.http import MOST_BESIDE_BODY, Answer, Connections, TooLarge, _Reading

NOTHING = b"HTTP/1.1 204 No Content\r\n\r\n"


@pytest.fixture
def server():
    """A socket that a client can connect to."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(10)
        yield listening


@pytest.fixture
def connect(server):
    """Give a function that makes connections to that server, which is known to them by this base."""
    made = []

    def connect(base=None, read_timeout=10):
        port = server.getsockname()[1]
        options = {"connect_timeout": 2, "read_timeout": read_timeout, "answer_seconds": 30, "most_bytes": 1000}
        made.append(Connections(base or f"http://127.0.0.1:{port}", **options))
        made[-1]._host, made[-1]._port = "127.0.0.1", port
        return made[-1]

    yield connect
    for connections in made:
        connections.close()


class Answering(threading.Thread):
    """Answers one request with these pieces, each sent by itself, and then hangs up; ``heard`` is the request.

    ``stays``: it waits for the client to hang up.
    """

    def __init__(self, server, *pieces, stays=False):
        super().__init__()
        self._server, self._pieces, self._stays = server, pieces, stays
        self.heard = b""

    def run(self):
        connection, _ = self._server.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.heard = connection.recv(10_000)
            with contextlib.suppress(OSError):  # the client has heard enough
                for piece in self._pieces:
                    connection.sendall(piece)
                    time.sleep(0.001)  # so that the next one isn't read together with it
                if self._stays:
                    connection.recv(1)

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.join()


def sent(server, connections, *request):
    """Send a request, answer it, and return its bytes."""
    with Answering(server, NOTHING) as answering:
        assert connections.send(*request).status == 204
    return answering.heard


def answered(server, connections, *pieces, stays=False):
    """Answer a request with these pieces, and return what is made of them."""
    with Answering(server, *pieces, stays=stays):
        return connections.send("GET", "/", {})


def in_bytes(text):
    return [text[at : at + 1] for at in range(len(text))]


def test_a_request_is_sent_in_one_piece(server, connect):
    assert sent(server, connect("http://rabbit.example:15672"), "PUT", "/api/a", {"X-One": "1"}, b"{}") == (
        b"PUT /api/a HTTP/1.1\r\nHost: rabbit.example:15672\r\nX-One: 1\r\nContent-Length: 2\r\n\r\n{}"
    )


@pytest.mark.parametrize(
    ("method", "length"), [("PUT", b"Content-Length: 0"), ("POST", b"Content-Length: 0"), ("GET", None)]
)
def test_what_could_have_a_body_says_that_it_has_none(server, connect, method, length):
    head = sent(server, connect(), method, "/", {}).split(b"\r\n")
    assert [line for line in head if line.startswith(b"Content-Length")] == ([length] if length else [])


@pytest.mark.parametrize(
    ("base", "host"),
    [
        ("http://rabbit.example", "rabbit.example"),
        ("http://rabbit.example:80/prefix", "rabbit.example:80"),
        ("https://user:secret@rabbit.example:15671", "rabbit.example:15671"),
        ("http://[::1]:15672", "[::1]:15672"),
        ("http://[fe80::1%25eth0]:15672", "[fe80::1]:15672"),
        ("http://bücher.example.рф:15672", "xn--bcher-kva.example.xn--p1ai:15672"),
        (f"http://a.{'b' * 63}:15672", f"a.{'b' * 63}:15672"),
    ],
)
def test_the_host_header_names_the_server_and_its_port(server, connect, base, host):
    connections = connect(base)
    connections._tls = None
    assert f"\r\nHost: {host}\r\n".encode() in sent(server, connections, "GET", "/", {})


@pytest.mark.parametrize(
    ("target", "headers"),
    [
        ("/api/a b", {}),
        ("/api/\r\nX-Other: 1", {}),
        ("/api/ü", {}),
        ("", {}),
        ("/", {"X-Reason": "one\r\nX-Other: 2"}),
        ("/", {"X-Reason": "one\nX-Other: 2"}),
        ("/", {"X-Reason": "one\rX-Other: 2"}),
    ],
)
def test_what_would_be_read_as_another_request_is_not_sent(server, connect, target, headers):
    with pytest.raises(ValueError, match=r"path without blanks|one line"):
        connect().send("GET", target, headers)
    server.settimeout(0)
    with pytest.raises(BlockingIOError):
        server.accept()


def test_a_request_that_failed_hangs_up_while_its_error_is_kept(server, connect):
    with pytest.raises(TimeoutError) as kept:
        connect(read_timeout=0.5).send("GET", "/", {})
    connection, _ = server.accept()
    with connection:
        connection.settimeout(5)
        assert connection.recv(10_000).startswith(b"GET / ")
        assert connection.recv(1) == b"", kept


# Answers

ANSWERS = {
    "with a length": (
        b"HTTP/1.1 200 OK\r\nServer: Cowboy\r\nContent-Length: 4\r\n\r\n[{}]",
        Answer(200, {"server": "Cowboy", "content-length": "4"}, b"[{}]"),
    ),
    "in chunks": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n[{}\r\n1;a=b\r\n]\r\n0\r\nX-Late: 1\r\n\r\n",
        Answer(200, {"transfer-encoding": "chunked"}, b"[{}]"),
    ),
    "to the end of the connection": (
        b"HTTP/1.1 200 OK\r\nServer: Cowboy\r\n\r\n[{}]",
        Answer(200, {"server": "Cowboy"}, b"[{}]"),
    ),
    "of HTTP/1.0": (b"HTTP/1.0 404 Nothing\r\nContent-Length: 0\r\n\r\n", Answer(404, {"content-length": "0"}, b"")),
    "without a body": (NOTHING, Answer(204, {}, b"")),
    "after interim ones": (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n"
        b"HTTP/1.1 201 Created\r\ncontent-length: 0\r\n\r\n",
        Answer(201, {"content-length": "0"}, b""),
    ),
    "with one header twice": (
        b"HTTP/1.1 301 Moved\r\nLocation: /a\r\nLOCATION: /b\r\nX-Name: \xfc\r\nContent-Length: 0\r\n\r\n",
        Answer(301, {"location": "/a", "x-name": "ü", "content-length": "0"}, b""),
    ),
    "with more after it": (
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]HTTP/1.1 100 Continue\r\n\r\n"
        b"HTTP/1.1 500 Oh\r\nX-Two: 2\r\nContent-Length: 1\r\n\r\n!",
        Answer(200, {"content-length": "2"}, b"[]"),
    ),
    "with a body where none may be": (
        b"HTTP/1.1 204 No Content\r\nContent-Length: 2\r\n\r\n{}",
        Answer(204, {"content-length": "2"}, b""),
    ),
    "with more after its end": (
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\n[]{}",
        Answer(200, {"connection": "close", "content-length": "2"}, b"[]"),
    ),
}

MORE = {"with more after it", "with a body where none may be", "with more after its end"}


@pytest.mark.parametrize("how", ANSWERS)
def test_an_answer_is_read_as_it_was_meant(server, connect, how):
    text, meant = ANSWERS[how]
    assert answered(server, connect(), text) == meant


@pytest.mark.parametrize("how", sorted(ANSWERS.keys() - MORE))
def test_an_answer_that_comes_byte_by_byte_is_the_same(server, connect, how):
    text, meant = ANSWERS[how]
    assert answered(server, connect(), *in_bytes(text)) == meant


@pytest.mark.parametrize(
    ("text", "is_kept"),
    [
        (NOTHING, True),
        (ANSWERS["in chunks"][0], True),
        (ANSWERS["after interim ones"][0], True),
        *((ANSWERS[how][0], False) for how in sorted(MORE)),
        (ANSWERS["to the end of the connection"][0], False),
        (ANSWERS["of HTTP/1.0"][0], False),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n", False),
    ],
)
def test_a_connection_is_used_again_where_the_answer_leaves_it_open_and_has_an_end(server, connect, text, is_kept):
    connections = connect()
    answered(server, connections, text)
    assert bool(connections._idle) == is_kept


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"HTTP/1.1 200",
        b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n[{}",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n[{}\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n[]",
        b"HTTP/1.1 101 Switching\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
        b"AMQP\x00\x00\x09\x01",
        b"SSH-2.0-OpenSSH_9.2\r\n",
    ],
)
def test_an_answer_that_is_cut_or_is_none_is_no_answer(server, connect, text):
    connections = connect()
    with pytest.raises(ConnectionError):
        answered(server, connections, text)
    assert not connections._idle


@pytest.mark.parametrize(
    "text",
    [
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 3 * MOST_BESIDE_BODY,
        b"HTTP/1.1 100 Go on\r\n\r\n" * 10_000,
        ANSWERS["in chunks"][0].partition(b"Late: 1")[0] + b"x" * 3 * MOST_BESIDE_BODY,
    ],
    ids=["headers", "interim answers", "what follows the body"],
)
def test_what_has_no_end_is_not_read_on_and_on(server, connect, text):
    with pytest.raises(ConnectionError, match="65536 bytes brought nothing"):
        answered(server, connect(), text)


@pytest.mark.parametrize("head", [b"Content-Length: 2000\r\n\r\n", b"\r\n"], ids=["told", "not told"])
def test_a_body_of_too_many_bytes_is_not_read_on(server, connect, head):
    with pytest.raises(TooLarge):
        answered(server, connect(), b"HTTP/1.1 200 OK\r\n" + head + b"x" * 1001, stays=True)


def test_what_a_signals_handler_raises_meanwhile_is_raised(server, connect, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(_Reading, "on_body", interrupt)
    with pytest.raises(KeyboardInterrupt):
        answered(server, connect(), ANSWERS["with a length"][0])
    try:
        raise ConnectionError("the first attempt's")
    except ConnectionError:
        with pytest.raises(HttpParserCallbackError):  # the parser lost it, and it is nobody's mistake at the other end
            answered(server, connect(), ANSWERS["with a length"][0])


def test_what_was_read_is_not_left_to_the_collector_of_garbage(server, connect):
    connections = connect()
    gc.collect()
    gc.disable()
    try:
        answered(server, connections, ANSWERS["with a length"][0])
        connections.close()
        assert not [one for one in gc.get_objects() if type(one).__name__ == "_Reading"]
    finally:
        gc.enable()
