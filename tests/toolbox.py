"""Functions that several test modules use. Shared fixtures are in fixtures.py."""

import time
from collections.abc import Callable
from typing import Any

from django.contrib.messages import get_messages

from queues.models import Notification, QueueEvent
from rabbit.management import Management

POLL_SECONDS = 0.02


class Killed(BaseException):
    """Stops the code under test where it is raised, as SIGKILL would: no `except Exception` catches it."""


def wait_until(condition: Callable[[], Any], seconds: float = 30) -> Any:
    """Poll the condition until it is true, and return its value. Fail after this many seconds."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"the condition is not true within {seconds} s"
        time.sleep(POLL_SECONDS)
    return value


def wait_until_equal(get: Callable[[], Any], expected: Any, seconds: float = 30) -> None:
    """Poll until the value is as expected. Fail after this many seconds, showing the last value."""
    deadline = time.monotonic() + seconds
    while (value := get()) != expected and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    assert value == expected


def sent(recipient: str) -> list[str]:
    """Return the kinds of the notifications to this recipient, oldest first."""
    return list(Notification.objects.filter(recipient=recipient).order_by("id").values_list("kind", flat=True))


def queue_events(name: str) -> list[str]:
    """Return the kinds of the events of the queues of this name, oldest first."""
    return list(QueueEvent.objects.filter(queue_name=name).order_by("id").values_list("kind", flat=True))


def messages_of(response: Any) -> list[str]:
    """Return the messages that the next page will show to the user."""
    return [str(message) for message in get_messages(response.wsgi_request)._queued_messages]


def queue_names(management: Management, vhost: str) -> set[str]:
    """Return the names of the queues that the broker lists in a vhost."""
    return {row["name"] for row in management.list_queues(vhost, {"columns": "name,vhost"})}


def queue_lengths(management: Management, vhost: str) -> dict[str, int | None]:
    """Return the length of each queue in a vhost, exact for classic queues. None: the broker does not report it."""
    rows = management.list_queues(vhost, {"disable_stats": "true", "enable_queue_totals": "true"})
    return {row["name"]: row.get("messages") for row in rows}
