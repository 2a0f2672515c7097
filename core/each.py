"""Do one thing to each of several rows, and report the results."""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from django.contrib import messages
from django.core.exceptions import ObjectDoesNotExist, PermissionDenied, ValidationError
from django.http import HttpRequest

from rabbit.errors import BrokerError, BrokerUnavailable, NotOnBroker, Refused, was_not_executed
from rabbit.names import readable

logger = logging.getLogger(__name__)

ACTION_TIMEOUT_SECONDS = 20
"""The operator waits for the response. An action that takes longer leaves the remaining rows."""
MAX_ROWS_SHOWN = 100
"""Rows named on a confirmation page and in a message."""


Row = TypeVar("Row")


@dataclass
class Results(Generic[Row]):
    """What became of each row. Those ``left`` were not tried, for the ``stop_reason``."""

    left: list[Row]
    succeeded: list[Row] = field(default_factory=list)
    failed: list[tuple[Row, Exception]] = field(default_factory=list)
    stop_reason: str = ""


def try_each(
    rows: Iterable[Row], do: Callable[[Row], object], refusals: tuple[type[Exception], ...] = ()
) -> Results[Row]:
    """Call ``do`` for each row, and continue after single failures. ``refusals`` are further expected exceptions.

    Stop if the broker is unreachable or after ``ACTION_TIMEOUT_SECONDS``.
    """
    expected: tuple[type[Exception], ...] = (ValidationError, PermissionDenied, ObjectDoesNotExist, *refusals)
    results, deadline = Results(list(rows)), time.monotonic() + ACTION_TIMEOUT_SECONDS
    while results.left and not results.stop_reason:
        if time.monotonic() >= deadline:
            results.stop_reason = f"the action took longer than {ACTION_TIMEOUT_SECONDS} s; select them again"
            break
        row = results.left.pop(0)
        try:
            do(row)
        except expected as error:
            results.failed.append((row, error))
        except BrokerError as error:
            results.failed.append((row, error))
            if isinstance(error, BrokerUnavailable):
                results.stop_reason = "the broker does not answer; try again when it does"
        else:
            results.succeeded.append(row)
    return results


def apply_to_each(
    request: HttpRequest,
    rows: Iterable[Any],
    do: Callable[[Any], object],
    done: str,
    refusals: tuple[type[Exception], ...] = (),
) -> None:
    """Call ``do`` for each row, and report the results as messages of the next page; see :func:`try_each`.

    ``done`` completes the success message, as in "are deleted".
    """
    report_attempts(request, try_each(rows, do, refusals), done)


def report_attempts(request: HttpRequest, results: Results[Any], done: str) -> None:
    """Show messages with the results, and how many rows were not tried."""
    if results.succeeded or results.failed or not results.left:
        failed = [(str(row), error) for row, error in results.failed]
        report_results(request, [str(row) for row in results.succeeded], done, failed)
    if results.left:
        names = join_names([str(row) for row in results.left])
        text = f"{number_of(results.left)} not tried, because {results.stop_reason}: {names}"
        messages.warning(request, text)


def report_results(
    request: HttpRequest,
    succeeded: Sequence[str],
    done: str,
    failed: Sequence[tuple[str, Exception]],
) -> None:
    """Show messages with the names of the rows that succeeded and failed, and the reasons of the failures."""

    def show(level: int, text: str) -> None:
        messages.add_message(request, level, text)

    for name, error in failed[:MAX_ROWS_SHOWN]:
        show(messages.ERROR, f"'{readable(name)}': {describe_error(error)}")
    if more := [name for name, _ in failed[MAX_ROWS_SHOWN:]]:
        show(messages.ERROR, f"{len(more):,} more failed: {join_names(more)}")
    if succeeded:
        show(messages.SUCCESS, f"{number_of(succeeded)} {done}: {join_names(succeeded)}")
    if not succeeded and not failed:
        show(messages.WARNING, "None of these exists any more.")


def describe_error(error: Exception) -> str:
    """Return why an action failed, or that its outcome is unknown. Only the log names the broker's address."""
    if isinstance(error, ValidationError):
        return " ".join(error.messages)
    if isinstance(error, ObjectDoesNotExist):
        return "it no longer exists"
    if not isinstance(error, BrokerError):
        return readable(str(error))
    logger.warning("One of several actions failed: %s", error)
    if isinstance(error, Refused):
        return f"not done, because the broker refuses: {readable(error.reason)}"
    if isinstance(error, NotOnBroker):
        return "it is not on the broker"
    if was_not_executed(error):
        return "not done, because the broker does not answer"
    return "the broker gave no clear answer, so the outcome is unknown"


def number_of(things: Collection[object]) -> str:
    """Return "1 is", "2 are" and so on, as the beginning of a sentence."""
    return f"{len(things):,} {'is' if len(things) == 1 else 'are'}"


def join_names(names: Sequence[str]) -> str:
    """Return the names as a readable list, shortened to ``MAX_ROWS_SHOWN``."""
    more = len(names) - MAX_ROWS_SHOWN
    return ", ".join(map(readable, names[:MAX_ROWS_SHOWN])) + (f", and {more:,} more." if more > 0 else ".")
