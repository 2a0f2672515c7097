"""Requests as sent, answers as received, and reuse of connections."""

import socket
import threading
from contextlib import contextmanager, suppress

import httpx
import pytest

from rabbit import http
from rabbit.http import NoAnswer, PooledClient, TooLarge
from tests.support.webhooks import Webhook, make_certificate

NOTHING = b"HTTP/1.1 204 No Content\r\n\r\n"
TWO_ANSWERS = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]HTTP/1.1 500 Oh\r\nContent-Length: 1\r\n\r\n!"


class Server:
    """Answers each request with these bytes; use it in a ``with``. ``hangs_up``: close the connection afterwards.

    ``requests`` are the received bytes, ``connections`` counts accepted connections.
    """

    def __init__(self, *pieces, hangs_up=False):
        self._pieces, self._hangs_up = pieces, hangs_up
        self.requests, self.connections = [], 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]

    def answer(self, *pieces):
        self._pieces = pieces

    def __enter__(self):
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_):
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self):
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections += 1
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection):
        with connection, suppress(OSError):  # the client has read enough
            while request := connection.recv(100_000):
                self.requests.append(request)
                for piece in self._pieces:
                    connection.sendall(piece)
                if self._hangs_up:
                    return


@contextmanager
def client(port, *, scheme="http", host="127.0.0.1", read_timeout=10, credentials=None):
    pooled = PooledClient(f"{scheme}://{host}:{port}", credentials, read_timeout, 30)
    try:
        yield pooled
    finally:
        pooled.close()


@pytest.mark.parametrize(
    "target",
    [
        "/api/queues/%2F/a%2Fb",
        "/api/queues/%2f/%c3%a9%00%25%2B",
        "/api/queues/v/%2E%2E",
        "/api/queues/v/..%2F..",
        "/a/../b//./c",
        "/api/queues?columns=name%2Cvhost&x=a+b~",
    ],
)
def test_a_target_is_sent_as_encoded(target):
    with Server(NOTHING) as server, client(server.port) as pooled:
        assert pooled.send("GET", target).status == 204
    assert server.requests[0].startswith(f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n".encode())


@pytest.mark.parametrize(
    ("target", "headers"),
    [
        ("/api/a b", {}),
        ("/api/\r\nX-Other: 1", {}),
        ("/api/ü", {}),
        ("/", {"X-Reason": "one\r\nX-Other: 2"}),
        ("/", {"X-Reason": "one\nX-Other: 2"}),
        ("/", {"X-Reason": "one\rX-Other: 2"}),
    ],
)
def test_a_target_or_header_that_would_split_the_request_is_not_sent(target, headers):
    with Server(NOTHING) as server, client(server.port) as pooled:
        with pytest.raises((httpx.LocalProtocolError, UnicodeEncodeError)):
            pooled.send("GET", target, headers=headers)
        assert pooled.send("GET", "/after").status == 204
    assert [request.split()[1] for request in server.requests] == [b"/after"]


def test_credentials_are_sent_as_utf_8():
    with Server(NOTHING) as server, client(server.port, credentials=("zoé", "pa:ss")) as pooled:
        pooled.send("GET", "/")
    assert b"\r\nAuthorization: Basic em/DqTpwYTpzcw==\r\n" in server.requests[0]


@pytest.mark.parametrize("host", ["a..b", f"{'a' * 64}.example", "\N{SNOWMAN}..example"])
def test_an_invalid_host_is_refused(host):
    with pytest.raises(ValueError), client(1, host=host):
        pass


def test_over_tls_only_the_named_host_gets_the_password(tmp_path, monkeypatch):
    certificate = make_certificate(tmp_path)
    with Webhook(certificate) as server, Webhook(certificate, "127.0.0.2") as other:
        with client(server.port, scheme="https") as untrusting, pytest.raises(NoAnswer, match="VERIFY_FAILED") as error:
            untrusting.send("POST", "/", b"{}")
        assert error.value.never_reached
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        with client(server.port, scheme="https") as trusting:
            assert trusting.send("POST", "/", b"{}").body == b"ok"
        with client(other.port, scheme="https", host="127.0.0.2") as misled, pytest.raises(NoAnswer):
            misled.send("POST", "/", b"{}")
    assert (len(server.received), len(other.received)) == (1, 0)


def test_a_timed_out_request_closes_its_connection():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with client(listener.getsockname()[1], read_timeout=0.5) as pooled, pytest.raises(NoAnswer) as kept:
            pooled.send("GET", "/")
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(5)
            assert connection.recv(10_000).startswith(b"GET / ")
            assert connection.recv(1) == b"", kept


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n[{}\r\n1;a=b\r\n]\r\n0\r\nX-Late: 1\r\n\r\n"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n" + NOTHING


@pytest.mark.parametrize(
    ("text", "status", "body", "is_kept"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n[{}]", 200, b"[{}]", True),
        (CHUNKED, 200, b"[{}]", True),
        (NOTHING, 204, b"", True),
        (INTERIM, 204, b"", True),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\n[]{}", 200, b"[]", False),
        (b"HTTP/1.0 404 Nothing\r\nContent-Length: 0\r\n\r\n", 404, b"", False),
    ],
)
def test_a_connection_is_reused_if_the_answer_allows_it(text, status, body, is_kept):
    with Server(text) as server, client(server.port) as pooled:
        for _ in range(2):
            answer = pooled.send("GET", "/")
            assert (answer.status, answer.body, answer.sent_twice) == (status, body, False)
    assert server.connections == (1 if is_kept else 2)


@pytest.mark.parametrize("first", [TWO_ANSWERS, b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]{}"])
def test_bytes_after_an_answer_are_not_read_as_the_next_one(first):
    with Server(first) as server, client(server.port) as pooled:
        assert pooled.send("GET", "/").body == b"[]"
        server.answer(NOTHING)
        assert pooled.send("GET", "/").status == 204
    assert server.connections == 2


def test_a_connection_is_not_reused_after_a_refused_body():
    with Server(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n") as server, client(server.port) as pooled:
        pooled.send("GET", "/")
        pooled.send("DELETE", "/")
        assert server.connections == 1
        pooled.send("PUT", "/", b"{}")
        pooled.send("GET", "/")
    assert server.connections == 2


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n[{}",
        b"HTTP/1.1 101 Switching\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
        b"AMQP\x00\x00\x09\x01",
    ],
)
def test_a_cut_or_malformed_answer_is_no_answer(text):
    with Server(text, hangs_up=True) as server, client(server.port) as pooled:
        with pytest.raises(NoAnswer) as error:
            pooled.send("GET", "/")
        assert not error.value.never_reached
    assert server.connections == 2


@pytest.mark.parametrize("head", [b"Content-Length: 2000\r\n\r\n", b"\r\n"], ids=["with a length", "without a length"])
def test_a_body_over_the_limit_is_not_read_to_its_end(head, monkeypatch):
    monkeypatch.setattr(http, "MAX_BYTES", 1000)
    with Server(b"HTTP/1.1 200 OK\r\n" + head + b"x" * 1001) as server, client(server.port) as pooled:
        with pytest.raises(TooLarge):
            pooled.send("GET", "/")
        server.answer(NOTHING)
        assert pooled.send("GET", "/").status == 204
    assert server.connections == 2
