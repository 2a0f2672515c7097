"""Who may do what with a queue (pure).

A principal is an application, ``app:NAME``, or an owner, ``bid:EMAIL``. A queue names those who may read it and delete
from it; where it names none, its application may. Messages are put in by its application alone, whomever it names.
"""

import re
from dataclasses import dataclass

from django.core.exceptions import ValidationError

from accounts.models import check_address, normalize_address
from message_store.store import StoredQueue

MAX_PRINCIPALS = 100
"""How many a queue may name."""

APPLICATION_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,49}")
"""What the name of an application looks like: it stands in addresses, and between commas."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: an application or an owner, or nobody that is known."""

    application: str | None = None
    email: str | None = None

    @property
    def principal(self) -> str | None:
        """What a queue calls them; None: nobody."""
        if self.application is not None:
            return f"app:{self.application}"
        return None if self.email is None else f"bid:{self.email}"


ANONYMOUS = Caller()


def may_manage(application: str, caller: Caller) -> bool:
    """Return whether they may list, make, change and remove the queues of this application."""
    return caller.application == application


def may_post(queue: StoredQueue, caller: Caller) -> bool:
    """Return whether they may put messages into a queue, and overwrite those in it."""
    return caller.application == queue.application


def may_delete(queue: StoredQueue, caller: Caller) -> bool:
    """Return whether they may delete messages of a queue."""
    return caller.principal in (queue.principals or (f"app:{queue.application}",))


def may_read(queue: StoredQueue, caller: Caller) -> bool:
    """Return whether they may read a queue."""
    return queue.type == "public" or may_delete(queue, caller)


def may_use_positions(queue: StoredQueue, caller: Caller) -> bool:
    """Return whether they may see and say how far consumers are: whoever works with the messages, and their source."""
    return may_post(queue, caller) or may_delete(queue, caller)


def parse(text: str) -> tuple[str, ...]:
    """Return the principals that are written so, with commas between them: each once, an address in its normal form.

    Raises:
        ValueError: one is none, or they are too many; the text says which.
    """
    found = dict.fromkeys(_principal(part.strip()) for part in text.split(",") if part.strip())
    if len(found) > MAX_PRINCIPALS:
        raise ValueError(f"{len(found)} principals are more than {MAX_PRINCIPALS}")
    return tuple(found)


def _principal(text: str) -> str:
    kind, _, name = text.partition(":")
    if kind == "app" and APPLICATION_NAME.fullmatch(name):
        return text
    if kind == "bid":
        try:
            check_address(normalize_address(name))
        except ValidationError:
            pass
        else:
            return f"bid:{normalize_address(name)}"
    raise ValueError(f'"{text[:100]}" is not a principal, such as app:NAME or bid:EMAIL')
