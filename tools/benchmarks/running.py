"""Run each benchmark in a process of its own, with Django, an empty database and a new RabbitMQ.

So a benchmark uses Guardian as any of its modules does, its peak memory is its own, and it need not clean up.
"""

import importlib
import os
import secrets
import tempfile
from contextlib import ExitStack
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import django
from django.core.management import call_command

from tools.benchmarks.figures import Figure
from tools.postgresql import PrivateCluster
from tools.processes import end_with_parent
from tools.rabbitmq import PrivateNode
from tools.stack import isolated

STOP_SECONDS = 60
SMALL = "BENCH_SMALL"

_fork = get_context("fork")


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
        environment = isolated(
            {
                "DJANGO_SETTINGS_MODULE": "guardian_site.settings",
                "LOG_LEVEL": "ERROR",
                "SECRET_KEY": secrets.token_hex(32),
                "GUARDIAN_VAR_DIR": str(directory),
                "DATABASE_URL": address,
                "RABBITMQ_MANAGEMENT_URL": node.management_url,
                "RABBIT_URL": node.amqp_url,
                "GUARDIAN_VHOSTS": "/",
                SMALL: "yes" if small else "",
            }
        )
        result, its_result = _fork.Pipe(duplex=False)
        child = _fork.Process(target=_run, args=(its_result, environment, module, name))
        child.start()
        its_result.close()
        try:
            figures: list[Figure] = result.recv()
            child.join(STOP_SECONDS)
        finally:
            child.terminate()
            child.join(STOP_SECONDS)
            child.kill()
        return figures


def _run(result: Connection, environment: dict[str, str], module: str, name: str) -> None:
    end_with_parent()
    os.environ.clear()
    os.environ.update(environment)
    django.setup()
    call_command("migrate", verbosity=0)
    result.send(getattr(importlib.import_module(f"tools.benchmarks.{module}"), name)())
