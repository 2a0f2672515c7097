"""Guardian served by gunicorn on the test's database, and requests that no client library sends."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPResponse
from pathlib import Path

import pytest
from django.db import connection, connections

from tests.support.plugin import ROOT
from tests.support.toolbox import wait_until
from tools.processes import end, free_port, port_answers, spawn


def database_url(alias: str = "default") -> str:
    """Return a database's address for DATABASE_URL."""
    database = connections.settings[alias]
    if connection.vendor == "sqlite":
        return f"sqlite:///{database['NAME']}"
    return "postgres://{USER}:{PASSWORD}@{HOST}:{PORT}/{NAME}".format(**database)


@contextmanager
def serving(application: str = "guardian_site.wsgi", threads: int = 8, **settings: str) -> Iterator[int]:
    """Serve Guardian with the command of the Procfile on the test's database, and give the port."""
    port = free_port()
    command = [sys.executable, "-m", "gunicorn", application, "--bind", f"127.0.0.1:{port}"]
    process = spawn(
        [*command, "--worker-class", "gthread", "--threads", str(threads), "--no-control-socket"],
        environment={**os.environ, "DATABASE_URL": database_url(), **settings},
        directory=ROOT,
        output=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: port_answers(port), seconds=60)
        yield port
    finally:
        end(process, timeout=20)


@pytest.fixture
def served(transactional_db: None) -> Iterator[int]:
    """Return the port of a gunicorn whose timeout for bodies is one second."""
    with serving("tests.support.impatient", 4, MESSAGE_STORE_MAX_BODY="100000") as port:
        yield port


def run_python(
    environment: dict[str, str], *arguments: str | Path, folder: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments in this environment, and return how it ended and what it printed."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)


def send_raw(port: int, head: str, *pieces: bytes | None) -> tuple[int, bytes]:
    """Send a request unchanged. Return the status and the first line of the body of the answer.

    A piece that is None closes the sending side of the connection.
    """
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connected:
        connected.sendall(head.replace("\n", "\r\n").encode() + b"\r\n\r\n")
        try:
            for piece in pieces:
                connected.sendall(piece) if piece is not None else connected.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the server has closed the connection
        with HTTPResponse(connected, method=head.partition(" ")[0]) as answer:
            answer.begin()
            return answer.status, answer.readline()
