"""The deleter's threads, and the connections to the broker that it keeps."""

import os
from concurrent.futures import Executor, Future
from functools import lru_cache
from typing import Any

from django.conf import settings
from django.db import connections

from core import broker
from queues.models import Watch
from rabbit.kept_sessions import KeptSessions
from rabbit.threads import ContextThreadPool


def deleter_threads() -> Executor:
    """Return an executor with a thread for each deletion, and one that gathers facts."""
    number = settings.GUARDIAN_DELETERS
    return ContextThreadPool(number + 1) if number > 1 else _SameThread()


class _SameThread(Executor):
    """Runs each call at once, in the thread that submits it."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def end_thread() -> None:
    """Close the database connections of a thread of ``deleter_threads``."""
    if settings.GUARDIAN_DELETERS > 1:
        connections.close_all()


def keep_connection() -> KeptSessions:
    """Return this process's sessions, with one open, so that a limit of connections reached later does not matter."""
    sessions = _sessions(os.getpid(), broker.amqp_url(), settings.GUARDIAN_PULSE_VHOST)
    sessions.check(Watch.current().cluster)
    return sessions


@lru_cache(maxsize=1)
def _sessions(process: int, amqp_url: str, pulse_vhost: str) -> KeptSessions:
    # The process id is in the cache's key, so that a forked worker doesn't share its parent's connections.
    return KeptSessions(amqp_url, pulse_vhost)
