import signal
from argparse import ArgumentParser
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import Error
from django.utils.module_loading import import_string

from message_store import queues
from message_store.models import Application
from message_store.worker import BATCH, LEASE_SECONDS, Worker, keep_failure, log_failure

UNUSABLE = 2
FAILURES = {"log": log_failure, "keep": keep_failure}


class Command(BaseCommand):
    """Handle the messages of an application's queues with a function."""

    help = (
        "Call a function with each message of an application's queues, in order within a partition, and share the "
        "partitions with the other workers of the same consumer, until SIGTERM or Ctrl-C: then what is held is handed "
        "over at once. Exit codes: 0 ended by a signal; 1 what handles failures failed; 2 a name can't be used."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Take the options."""
        parser.add_argument("job", metavar="MODULE:FUNCTION", help="what is called with each message, and the context")
        parser.add_argument("--application", required=True, metavar="NAME", help="whose queues are worked on")
        parser.add_argument(
            "--queue",
            action="append",
            dest="queues",
            metavar="NAME",
            help="work on this one; may be given several times (default: on all there are and will be, but 'errors')",
        )
        parser.add_argument(
            "--consumer", metavar="NAME", help="whose positions these are; shared by its workers (default: FUNCTION)"
        )
        parser.add_argument(
            "--context",
            metavar="MODULE:FUNCTION",
            help="a context manager around all the work; what it gives is handed to the job",
        )
        parser.add_argument(
            "--failure",
            default="log",
            metavar="log|keep|MODULE:FUNCTION",
            help="what is called where the job raised: log it (the default); log it, and keep the message for 30 days "
            "in the queue 'errors'; or a function of your own",
        )
        parser.add_argument(
            "--batch", type=int, default=BATCH, metavar="N", help="messages read at once (default: %(default)s)"
        )
        parser.add_argument(
            "--lease",
            type=float,
            default=LEASE_SECONDS,
            metavar="SECONDS",
            help="a worker that isn't heard for so long is gone, and others get its share (default: %(default)g)",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        """Work until a signal comes."""
        consumer = options["consumer"] or options["job"].rpartition(":")[2]
        if not 1 <= options["batch"] <= queues.MAX_READ:
            raise CommandError(f"--batch is from 1 to {queues.MAX_READ}", returncode=UNUSABLE)
        if not 1 <= options["lease"] <= 3600:
            raise CommandError("--lease is from 1 to 3600 seconds", returncode=UNUSABLE)
        for what, name in [
            ("application", options["application"]),
            ("consumer", consumer),
            *(("queue", name) for name in options["queues"] or ()),
        ]:
            try:
                queues.check_name(name)
            except ValueError as error:
                raise CommandError(f"--{what}: {error}", returncode=UNUSABLE) from None
        with suppress(Error):  # a database that is away is waited for
            if not Application.objects.filter(name=options["application"]).exists():
                raise CommandError(
                    f"there is no application {options['application']}; 'create_application' makes one",
                    returncode=UNUSABLE,
                )
        job, failure = _load(options["job"]), FAILURES.get(options["failure"]) or _load(options["failure"])
        context = _load(options["context"]) if options["context"] else nullcontext
        try:
            worker = Worker(
                consumer,
                job,
                application=options["application"],
                queues=options["queues"] or (),
                context=context,
                failure=failure,
                batch=options["batch"],
                lease_seconds=options["lease"],
            )
        except ValueError as error:
            raise CommandError(f"ZOOKEEPER_HOSTS can't be read: {error}", returncode=UNUSABLE) from error
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: worker.stop())
        worker.run()


def _load(path: str) -> Callable[..., Any]:
    """Return the function that MODULE:FUNCTION names."""
    module, _, name = path.partition(":")
    if not module or not name:
        raise CommandError(f"{path!r} is not of the form MODULE:FUNCTION, like orders.work:ship", returncode=UNUSABLE)
    try:
        found = import_string(f"{module}.{name}")
    except ImportError as error:
        raise CommandError(f"{path!r} can't be loaded: {error}", returncode=UNUSABLE) from error
    if not callable(found):
        raise CommandError(f"{path!r} is not a function", returncode=UNUSABLE)
    function: Callable[..., Any] = found
    return function
