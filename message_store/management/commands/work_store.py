from argparse import ArgumentParser
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, TypeVar

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

T = TypeVar("T")

_invalid = partial(CommandError, returncode=2)
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
        # Not in the "try": an error of their modules keeps its traceback.
        job = _load(options["job"])
        context = _load(options["context"]) if options["context"] else nullcontext
        failure = FAILURES.get(options["failure"]) or _load(options["failure"])
        try:
            worker = _worker(options, job, context, failure)
        except ValueError as error:
            raise _invalid(str(error)) from error
        worker.run_until_signal()


def _worker(
    options: dict[str, Any], job: Callable[..., Any], context: Callable[..., Any], failure: Callable[..., Any]
) -> Worker:
    application, names = options["application"], options["queues"] or ()
    consumer = options["consumer"] or options["job"].rpartition(":")[2]
    if not 1 <= options["batch"] <= queues.MAX_READ:
        raise ValueError(f"--batch must be from 1 to {queues.MAX_READ}")
    if not options["polls"] > 0:
        raise ValueError("--polls must be more than 0")
    if not 1 <= options["lease"] <= 3600:
        raise ValueError("--lease must be from 1 to 3600 seconds")
    for option, name in [("application", application), ("consumer", consumer), *(("queue", name) for name in names)]:
        _parse(f"--{option}", queues.check_name, name)
    with suppress(Error):  # the worker waits for an unreachable database
        if not Application.objects.filter(name=application).exists():
            raise ValueError(f"application {application} does not exist; create it with 'create_application'")
    sharing: Sharing = Leases(options["lease"])
    if options["pins"]:
        sharing = Pinned([_parse(f"--pin {pin}", _partition, pin) for pin in options["pins"]])
    elif settings.ZOOKEEPER_HOSTS:
        sharing = ZooKeeper(settings.ZOOKEEPER_HOSTS, options["lease"])
    return Worker(
        consumer,
        job,
        StoreTransport(application),
        queues=names,
        sharing=sharing,
        context=context,
        failure=failure,
        batch=options["batch"],
        polls_per_second=options["polls"],
    )


def _parse(argument: str, parse: Callable[[str], T], text: str) -> T:
    """Return the parsed text of an argument, which the text of a ValueError names."""
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"{argument}: {error}") from None


def _partition(pin: str) -> Partition:
    queue, _, number = pin.rpartition(":")
    queues.check_name(queue)
    return Partition(DEFAULT_DEPLOYMENT, queue, parameters.parse_number(number, 1, parameters.MAX_PARTITIONS))


def _load(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    if not module or not name:
        raise _invalid(f"{path!r} is not of the form MODULE:FUNCTION, such as orders.work:ship")
    try:
        found: Callable[..., Any] = import_string(f"{module}.{name}")
    except ImportError as error:
        raise _invalid(f"{path!r} can't be imported: {error}") from error
    if not callable(found):
        raise _invalid(f"{path!r} is not a function")
    return found
