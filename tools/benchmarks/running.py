"""Run each benchmark in a process of its own, with Django, an empty database and a new RabbitMQ.

So a benchmark uses Guardian as any of its modules does, its peak memory is its own, and it need not clean up.
"""

import importlib
import os
import re
import secrets
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import django
from django.core.management import call_command

from tools.benchmarks.figures import Figure
from tools.postgresql import PrivateCluster
from tools.processes import end_with_parent
from tools.rabbitmq import PrivateNode

PROJECT = Path(__file__).resolve().parents[2]
STOP_SECONDS = 60
SMALL = "BENCH_SMALL"

_spawn = get_context("spawn")


def size(full: int, small: int) -> int:
    """Return a number of queues, messages or rounds: ``full``, or ``small`` to only try the benchmarks."""
    return small if os.environ.get(SMALL) else full


def measure(module: str, name: str, database: str, *, small: bool) -> list[Figure]:
    """Return the figures of the function ``name`` in a module of this package.

    Raises:
        StartError: RabbitMQ or PostgreSQL isn't installed or doesn't start.
        EOFError: the benchmark failed. Its process has written the traceback.
    """
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="guardian-bench-")))
        node = stack.enter_context(PrivateNode(name="bench"))
        if database == "PostgreSQL":
            address = stack.enter_context(PrivateCluster()).database_url()
        else:
            address = f"sqlite:///{directory / 'guardian.sqlite3'}"
        environment = {
            **_documented_defaults(),  # override this machine's .env
            "PATH": "/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "DJANGO_SETTINGS_MODULE": "guardian_site.settings",
            "LOG_LEVEL": "ERROR",
            "SECRET_KEY": secrets.token_hex(32),
            "GUARDIAN_VAR_DIR": str(directory),
            "DATABASE_URL": address,
            "RABBITMQ_MANAGEMENT_URL": node.management_url,
            "RABBIT_URL": node.amqp_url,
            "GUARDIAN_VHOSTS": "/",
            "GUARDIAN_PULSE_VHOST": "/",
            "GUARDIAN_IGNORED_QUEUES": "",
            "GUARDIAN_OPERATOR_EMAILS": "",
            SMALL: "yes" if small else "",
        }
        figures: list[Figure] = stack.enter_context(process(_benchmark, environment, module, name)).recv()
        return figures


def _documented_defaults() -> dict[str, str]:
    lines = (PROJECT / ".env.example").read_text().splitlines()
    return {match[1]: match[2] for line in lines if (match := re.fullmatch(r"# ([A-Z_]+)=(.+)", line))}


def _benchmark(connection: Connection, environment: dict[str, str], module: str, name: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    django.setup()
    call_command("migrate", verbosity=0)
    connection.send(getattr(importlib.import_module(f"tools.benchmarks.{module}"), name)())


@contextmanager
def process(function: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """Call ``function(connection, *arguments)`` in a new process, and yield the other end of the connection.

    Afterwards wait for the process to end. After an exception, terminate it.
    """
    connection, its_connection = _spawn.Pipe()
    child = _spawn.Process(target=_call, args=(function, its_connection, *arguments))
    child.start()
    its_connection.close()
    try:
        yield connection
        child.join(STOP_SECONDS)
    finally:
        child.terminate()
        child.join(STOP_SECONDS)
        child.kill()


def _call(function: Callable[..., None], connection: Connection, *arguments: Any) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # runs the clean-up
    end_with_parent()
    function(connection, *arguments)
