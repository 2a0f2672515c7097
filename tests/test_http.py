"""Requests as they leave, and what is left of one that failed."""

import socket
import threading

import pytest

from rabbit.http import Connections

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

    def connect(base=None):
        port = server.getsockname()[1]
        options = {"connect_timeout": 2, "read_timeout": 0.5, "answer_seconds": 5, "most_bytes": 1000}
        made.append(Connections(base or f"http://127.0.0.1:{port}", **options))
        made[-1]._host, made[-1]._port = "127.0.0.1", port
        return made[-1]

    yield connect
    for connections in made:
        connections.close()


def sent(server, connections, *request):
    """Send a request, answer it, and return its bytes."""
    heard = []

    def answer():
        connection, _ = server.accept()
        with connection:
            heard.append(connection.recv(10_000))
            connection.sendall(NOTHING)

    thread = threading.Thread(target=answer)
    thread.start()
    assert connections.send(*request).status == 204
    thread.join()
    return heard[0]


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
        connect().send("GET", "/", {})
    connection, _ = server.accept()
    with connection:
        connection.settimeout(5)
        assert connection.recv(10_000).startswith(b"GET / ")
        assert connection.recv(1) == b"", kept
