from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError
from django.db import Error
from django.utils.module_loading import import_string

from guardian_store import (
    DEFAULT_DEPLOYMENT,
    Leases,
    Partition,
    Pinned,
    Sharing,
    Worker,
    ZooKeeper,
    keep_failure,
    log_failure,
)
from guardian_store._worker import BATCH, LEASE_SECONDS, POLLS_PER_SECOND
from message_store import parameters, queues
from message_store.models import Application
from message_store.worker import StoreTransport

INVALID_ARGUMENT = 2
FAILURES = {"log": log_failure, "keep": keep_failure}


class Command(BaseCommand):
    help = (
        "Call a function with each message of an application's queues, in order within a partition. Share the "
        "partitions with the other workers of the same consumer. SIGTERM or Ctrl-C releases them immediately. "
        "Exit codes: 0 stopped by a signal; 1 the failure handler failed; 2 an argument is invalid."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("job", metavar="MODULE:FUNCTION", help="called with each message and the context")
        parser.add_argument("--application", required=True, metavar="NAME", help="the application that owns the queues")
        parser.add_argument(
            "--queue",
            action="append",
            dest="queues",
            metavar="NAME",
            help="a queue to process; repeatable (default: all current and future queues except 'errors')",
        )
        parser.add_argument(
            "--consumer", metavar="NAME", help="the consumer, whose workers share positions (default: FUNCTION)"
        )
        parser.add_argument(
            "--context",
            metavar="MODULE:FUNCTION",
            help="a context manager for the worker's lifetime; the job gets its value",
        )
        parser.add_argument(
            "--failure",
            default="log",
            metavar="log|keep|MODULE:FUNCTION",
            help="called if the job raises: 'log' logs the error (default); 'keep' also keeps the message for 30 days "
            "in the queue 'errors'",
        )
        parser.add_argument(
            "--pin",
            action="append",
            dest="pins",
            metavar="QUEUE:NUMBER",
            help="a partition to process, whatever other workers do; repeatable (default: share all partitions)",
        )
        parser.add_argument(
            "--batch", type=int, default=BATCH, metavar="N", help="messages per read (default: %(default)s)"
        )
        parser.add_argument(
            "--polls",
            type=float,
            default=POLLS_PER_SECOND,
            metavar="N",
            help="polls of idle queues a second, in all (default: %(default)g)",
        )
        parser.add_argument(
            "--lease",
            type=float,
            default=LEASE_SECONDS,
            metavar="SECONDS",
            help="time without a heartbeat after which others get a worker's share (default: %(default)g)",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        consumer = options["consumer"] or options["job"].rpartition(":")[2]
        if not 1 <= options["batch"] <= queues.MAX_READ:
            raise CommandError(f"--batch must be from 1 to {queues.MAX_READ}", returncode=INVALID_ARGUMENT)
        if not options["polls"] > 0:
            raise CommandError("--polls must be more than 0", returncode=INVALID_ARGUMENT)
        if not 1 <= options["lease"] <= 3600:
            raise CommandError("--lease must be from 1 to 3600 seconds", returncode=INVALID_ARGUMENT)
        for what, name in [
            ("application", options["application"]),
            ("consumer", consumer),
            *(("queue", name) for name in options["queues"] or ()),
        ]:
            try:
                queues.check_name(name)
            except ValueError as error:
                raise CommandError(f"--{what}: {error}", returncode=INVALID_ARGUMENT) from None
        pins = _partitions(options["pins"] or ())
        with suppress(Error):  # the worker waits for an unreachable database
            if not Application.objects.filter(name=options["application"]).exists():
                raise CommandError(
                    f"application {options['application']} does not exist; create it with 'create_application'",
                    returncode=INVALID_ARGUMENT,
                )
        job, failure = _load(options["job"]), FAILURES.get(options["failure"]) or _load(options["failure"])
        context = _load(options["context"]) if options["context"] else nullcontext
        sharing: Sharing = Leases(options["lease"])
        if pins:
            sharing = Pinned(pins)
        elif settings.ZOOKEEPER_HOSTS:
            sharing = ZooKeeper(settings.ZOOKEEPER_HOSTS, options["lease"])
        try:
            worker = Worker(
                consumer,
                job,
                StoreTransport(options["application"]),
                queues=options["queues"] or (),
                sharing=sharing,
                context=context,
                failure=failure,
                batch=options["batch"],
                polls_per_second=options["polls"],
            )
        except ValueError as error:
            raise CommandError(f"ZOOKEEPER_HOSTS is malformed: {error}", returncode=INVALID_ARGUMENT) from error
        worker.run_until_signal()


def _partitions(pins: Sequence[str]) -> list[Partition]:
    found = []
    for pin in pins:
        queue, _, number = pin.rpartition(":")
        try:
            queues.check_name(queue)
            parsed = parameters.parse_number(number, 1, parameters.MAX_PARTITIONS)
        except ValueError as error:
            raise CommandError(f"--pin {pin}: {error}", returncode=INVALID_ARGUMENT) from None
        found.append(Partition(DEFAULT_DEPLOYMENT, queue, parsed))
    return found


def _load(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    if not module or not name:
        raise CommandError(
            f"{path!r} is not of the form MODULE:FUNCTION, such as orders.work:ship", returncode=INVALID_ARGUMENT
        )
    try:
        found = import_string(f"{module}.{name}")
    except ImportError as error:
        raise CommandError(f"{path!r} can't be imported: {error}", returncode=INVALID_ARGUMENT) from error
    if not callable(found):
        raise CommandError(f"{path!r} is not a function", returncode=INVALID_ARGUMENT)
    function: Callable[..., Any] = found
    return function
