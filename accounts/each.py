"""Do one thing to each of several rows, and report the results as messages of the next page."""

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from django.contrib import messages
from django.core.exceptions import ObjectDoesNotExist, PermissionDenied, ValidationError
from django.http import HttpRequest

from rabbit.management import BrokerError, BrokerUnavailable, Refused, was_not_executed
from rabbit.names import readable

ACTION_TIMEOUT_SECONDS = 20
"""The operator waits for the response. An action that takes longer leaves the remaining rows."""
MAX_ROWS_SHOWN = 100
"""Rows named on a confirmation page and in a message."""


def apply_to_each(
    request: HttpRequest,
    rows: Iterable[Any],
    do: Callable[[Any], object],
    done: str,
    refusals: tuple[type[Exception], ...] = (),
) -> None:
    """Call ``do`` for each row, continue after single failures, and report the results.

    ``done`` completes the success message, as in "are deleted". ``refusals`` are further expected exceptions. Stop if
    the broker is unreachable or after ``ACTION_TIMEOUT_SECONDS``, and report how many rows were not tried.
    """
    expected: tuple[type[Exception], ...] = (ValidationError, PermissionDenied, ObjectDoesNotExist, *refusals)
    left, succeeded, deadline = list(rows), [], time.monotonic() + ACTION_TIMEOUT_SECONDS
    failed: list[tuple[str, Exception]] = []
    stop_reason = ""
    while left and not stop_reason:
        if time.monotonic() >= deadline:
            stop_reason = f"the action took longer than {ACTION_TIMEOUT_SECONDS} s; select them again"
            break
        row = left.pop(0)
        try:
            do(row)
        except expected as error:
            failed.append((str(row), error))
        except BrokerError as error:
            failed.append((str(row), error))
            if isinstance(error, BrokerUnavailable):
                stop_reason = "the broker does not answer; try again when it does"
        else:
            succeeded.append(str(row))
    if succeeded or failed or not left:
        report_results(request, succeeded, done, failed)
    if left:
        text = f"{number_of(left)} not tried, because {stop_reason}: {join_names([str(row) for row in left])}"
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
    """Return why an action failed, or that its outcome is unknown."""
    if isinstance(error, ValidationError):
        return " ".join(error.messages)
    if isinstance(error, ObjectDoesNotExist):
        return "it was removed meanwhile"
    if isinstance(error, Refused):
        return f"not done, because the broker refuses: {readable(error.reason)}"
    if isinstance(error, BrokerError) and not was_not_executed(error):
        return f"the broker gave no clear answer, so the outcome is unknown: {readable(str(error))}"
    return readable(str(error))


def number_of(things: Collection[object]) -> str:
    """Return "1 is", "2 are" and so on, as the beginning of a sentence."""
    return f"{len(things):,} {'is' if len(things) == 1 else 'are'}"


def join_names(names: Sequence[str]) -> str:
    """Return the names as a readable list, shortened to ``MAX_ROWS_SHOWN``."""
    more = len(names) - MAX_ROWS_SHOWN
    return ", ".join(map(readable, names[:MAX_ROWS_SHOWN])) + (f", and {more:,} more." if more > 0 else ".")
