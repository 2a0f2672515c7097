"""Whether this thread is applying a file."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from accounts import audit

_applying: ContextVar[bool] = ContextVar("applying", default=False)


def is_applying() -> bool:
    return _applying.get()


@contextmanager
def applying(source: str) -> Iterator[None]:
    """Name the file in the audit trail, and record what is created, inside the ``with`` block."""
    token = _applying.set(True)
    try:
        with audit.by_command(f"apply, from {source}"):
            yield
    finally:
        _applying.reset(token)
