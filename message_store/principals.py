"""Permissions on queues.

A principal is an application, ``app:NAME``, or an owner, ``bid:EMAIL``. A queue names the principals that may read and
delete its messages. By default only its application may. Only the application may post.
"""

import re
from dataclasses import dataclass

from django.core.exceptions import ValidationError

from accounts.models import check_address, comparable, normalize_address
from message_store.store import StoredQueue

MAX_PRINCIPALS = 100
"""Principals per queue."""

APPLICATION_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,49}")
"""Names must be safe in URLs and comma-separated lists."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request: an application, an owner, or neither (anonymous)."""

    application: str | None = None
    email: str | None = None

    @property
    def principal(self) -> str | None:
        if self.application is not None:
            return f"app:{self.application}"
        return None if self.email is None else f"bid:{self.email}"


ANONYMOUS = Caller()


def may_manage(application: str, caller: Caller) -> bool:
    return caller.application == application


def may_post(queue: StoredQueue, caller: Caller) -> bool:
    return caller.application == queue.application


def may_delete(queue: StoredQueue, caller: Caller) -> bool:
    named = queue.principals or (f"app:{queue.application}",)
    return caller.principal is not None and _comparable(caller.principal) in map(_comparable, named)


def may_read(queue: StoredQueue, caller: Caller) -> bool:
    return queue.type == "public" or may_delete(queue, caller)


def may_use_positions(queue: StoredQueue, caller: Caller) -> bool:
    """Return whether the caller may read and set consumers' positions: all who may post or delete."""
    return may_post(queue, caller) or may_delete(queue, caller)


def _comparable(principal: str) -> str:
    """Return a stored principal with its address as it is compared. An address outside ASCII is in an older form."""
    return principal if principal.isascii() else f"bid:{comparable(principal.removeprefix('bid:'))}"


def parse(text: str) -> tuple[str, ...]:
    """Parse a comma-separated list of principals. Drop duplicates and normalize e-mail addresses.

    Raises ValueError if a principal is invalid or there are too many.
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
