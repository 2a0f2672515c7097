"""Search the messages of an archive. A search ends after some time, and can go on from there."""

import json
import time
from collections.abc import Iterator
from datetime import datetime

from queues.archives import reading
from queues.models import Archive
from rabbit.fetching import Fetched

SECONDS = 0.8
"""A page answers within a second."""

MAX_MESSAGES = 20_000


class Search:
    """The messages from ``first`` on that have a text, and a timestamp not before ``after``.

    ``read_to`` is the position of the last message that was read. It grows while the search is iterated.
    """

    def __init__(self, archive: Archive, first: int, text: str = "", after: datetime | None = None) -> None:
        self._archive = archive
        self._text = text
        self._after = after
        self._first = first
        self.read_to = first - 1

    def __iter__(self) -> Iterator[tuple[int, Fetched]]:
        until = time.monotonic() + SECONDS
        for position, message in reading.shown(self._archive, self._first, MAX_MESSAGES):
            self.read_to = position
            if matches(message, self._text, self._after):
                yield position, message
            if time.monotonic() > until:
                return


def matches(message: Fetched, text: str = "", after: datetime | None = None) -> bool:
    """Return whether a message has the text in its routing key, headers or body, in upper or lower case.

    Its time is the ``timestamp`` property, in seconds. A message without it is not after any time.
    """
    if after is not None:
        at = message.properties.get("timestamp")
        if not isinstance(at, int) or at < after.timestamp():
            return False
    wanted = text.casefold()
    return not wanted or any(wanted in part.casefold() for part in _texts(message))


def _texts(message: Fetched) -> Iterator[str]:
    yield message.routing_key
    headers = reading.as_json(0, message._replace(body=b"", cut=0))["headers"]
    for name, value in headers.items():
        yield name
        yield value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    yield message.body.decode("utf-8", "replace")
