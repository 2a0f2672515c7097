"""Slow clients before the proxy of docker-compose.yml occupy no thread of Guardian. nginx and gunicorn are real."""

import re
import shlex
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.message_store.test_message_store_api import Program
from tests.support.recorder import Recorder
from tests.support.served import serving
from tests.support.toolbox import wait_until
from tools.nginx import PrivateNginx

pytestmark = pytest.mark.slow

PROJECT = Path(__file__).resolve().parents[2]
FOLDER = PROJECT / "deploy" / "nginx"

CLIENTS = 12
"""More than gunicorn has threads."""

HEAD = "POST /signin/ HTTP/1.1\r\nHost: 127.0.0.1\r\n"
FORM = "Content-Type: application/x-www-form-urlencoded\r\n"


def compose_proxy(port):
    """Return a private nginx with the configuration of docker-compose.yml, before a web process on this port."""
    text = (FOLDER / "default.conf").read_text()
    [lines] = re.findall(r"^server {\n(.+)^}$", text, re.M | re.S)
    for written, here in (("listen 8080;", ""), ("/etc/nginx/conf.d", str(FOLDER)), ("web:8000", f"127.0.0.1:{port}")):
        assert written in lines
        lines = lines.replace(written, here)
    return PrivateNginx(lines)


@pytest.fixture
def site(transactional_db):
    """Give the address of Guardian behind the proxy."""
    procfile = (PROJECT / "Procfile").read_text()
    words = shlex.split(re.search("^web: (.+)$", procfile, re.M)[1])
    threads = int(words[words.index("--threads") + 1])
    assert threads < CLIENTS
    with serving(threads=threads) as port, compose_proxy(port) as proxy:
        yield proxy


@pytest.fixture
def large_answer(transactional_db):
    """Return the path of an answer of 12 MB, which fits into no buffer of a socket."""
    program = Program()
    program.ok("POST", "", "queue_name=large&type=public")
    for _ in range(2):
        program.post("/large", "\0" * 1_000_000)
    return "/v1/shop/large"


def connect(stack, proxy, text):
    """Open a connection that sends this text and nothing more, and reads nothing, until the test ends."""
    client = stack.enter_context(socket.socket())
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", proxy.port))
    client.sendall(text.encode())


@pytest.mark.parametrize("kind", ["no end of headers", "no body", "a part of the body", "nothing is read"])
def test_slow_clients_do_not_stop_the_pages(site, large_answer, kind):
    text = {
        "no end of headers": HEAD,
        "no body": f"{HEAD}{FORM}Content-Length: 100\r\n\r\n",
        "a part of the body": f"{HEAD}{FORM}Content-Length: 100\r\n\r\nemail=",
        "nothing is read": f"GET {large_answer} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    }[kind]
    with ExitStack() as stack:
        for _ in range(CLIENTS):
            connect(stack, site, text)
        time.sleep(1)  # until a thread would have begun with each
        for path in ("/signin/", "/", "/healthz"):
            answer = httpx.get(f"{site.url}{path}", trust_env=False, timeout=10)
            assert answer.status_code == 200


FORGED = {"X-Forwarded-For": "192.0.2.1", "X-Forwarded-Proto": "https", "X-Request-ID": "the-request"}


def received(proxy, upstream):
    """Return the request that reaches this upstream for a request with these headers."""
    httpx.get(f"{proxy.url}/v1/no%2Fsuch//address", headers={**FORGED, "Host": "other.example"}, trust_env=False)
    return upstream.received[-1]


def test_the_proxy_passes_on_the_address_and_what_the_proxy_before_it_says():
    with Recorder() as upstream, compose_proxy(upstream.port) as proxy:
        request = received(proxy, upstream)
    assert request.path == "/v1/no%2Fsuch//address"
    assert request.headers.items() >= {**FORGED, "Host": "other.example"}.items()


def test_a_proxy_that_clients_connect_to_appends_their_address():
    """The lines at the top of the file are those that an operator copies."""
    lines = re.findall(r"^#   (set .+;)$", (FOLDER / "guardian.inc").read_text(), re.M)
    assert len(lines) == 4
    with Recorder() as upstream:
        before = "\n".join(lines).replace("127.0.0.1:8000", f"127.0.0.1:{upstream.port}")
        with PrivateNginx(f"{before}\ninclude {FOLDER}/guardian.inc;") as proxy:
            found = received(proxy, upstream).headers
    assert found["X-Forwarded-For"] == "192.0.2.1, 127.0.0.1"
    assert found["X-Forwarded-Proto"] == "http"
    assert found["X-Request-ID"] != FORGED["X-Request-ID"]


def test_a_large_message_reaches_guardian(site, transactional_db):
    program = Program("large")
    program.ok("POST", "", "queue_name=q")
    headers = {"Authorization": program.authorization, "Content-Type": "text/plain"}
    for size, status in ((1_048_576, 201), (1_048_577, 413)):
        answer = httpx.post(f"{site.url}/v1/large/q", content=b"x" * size, headers=headers, trust_env=False)
        assert (answer.status_code, answer.json()["status"]) == (status, "ok" if status == 201 else "error")


def test_a_web_process_that_is_away_is_502(transactional_db):
    with compose_proxy(1) as proxy:
        wait_until(lambda: httpx.get(proxy.url, trust_env=False).status_code == 502, seconds=10)
