"""Serve Guardian as in production. Runs in ``tools.benchmarks.child``."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tools.benchmarks.services import PROJECT
from tools.processes import free_port, kill, port_answers, spawn

START_TIMEOUT_SECONDS = 60


@contextmanager
def served() -> Iterator[int]:
    """Serve Guardian as in production, and yield the port."""
    port = free_port()
    log = Path(os.environ["GUARDIAN_VAR_DIR"]) / "gunicorn.log"
    command = [sys.executable, "-m", "gunicorn", "guardian_site.wsgi", "--bind", f"127.0.0.1:{port}"]
    with log.open("wb") as output:
        server = spawn(
            [*command, "--worker-class", "gthread", "--threads", "8"],
            environment=os.environ,
            directory=PROJECT,
            output=output,
        )
        try:
            until = time.monotonic() + START_TIMEOUT_SECONDS
            while not port_answers(port):
                assert server.poll() is None, log.read_text(errors="replace")[-2000:]
                assert time.monotonic() < until, "gunicorn doesn't answer"
                time.sleep(0.1)
            yield port
        finally:
            kill(server)
