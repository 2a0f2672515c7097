"""Sessions of several threads, of which one stays open."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rabbit.amqp import Session
from rabbit.errors import BrokerError, ConnectionLimit


class KeptSessions:
    """Sessions for a process that must work when the broker accepts no further connections to ``vhost``.

    Call ``check`` before a run, and ``trim`` after it: one session of this vhost stays open in between. Sessions of
    other vhosts are closed after each use.
    """

    def __init__(self, amqp_url: str, vhost: str) -> None:
        self._amqp_url = amqp_url
        self._vhost = vhost
        self._cluster = ""
        self._idle: list[Session] = []
        self._in_use = 0
        self._changed = threading.Condition()

    @contextmanager
    def session(self, vhost: str) -> Iterator[Session]:
        """Yield an open session in a vhost. Wait for another thread's if the broker accepts no further connection.

        Raises:
            ConnectionLimit: it accepts none, and this process has none.
            BrokerError: the broker does not answer, or refuses.
        """
        if vhost != self._vhost:
            with Session(self._amqp_url, vhost) as other:
                yield other
            return
        session = self._take()
        try:
            yield session
        finally:
            with self._changed:
                self._in_use -= 1
                if session.is_connected:
                    self._idle.append(session)
                self._changed.notify_all()

    def check(self, cluster: str) -> None:
        """Close the sessions that the broker no longer answers, and open one if possible if there is none.

        Close all if the address leads to another ``cluster`` now, by its id. An empty id is unknown.
        """
        if cluster and self._cluster and cluster != self._cluster:
            self.close()
        self._cluster = cluster or self._cluster
        self._idle = self._idle or [Session(self._amqp_url, self._vhost)]
        for session in self._idle:
            with suppress(BrokerError):
                session.check()
        self._idle = [session for session in self._idle if session.is_connected]

    def trim(self) -> None:
        while len(self._idle) > 1:
            self._idle.pop().disconnect(1.0)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _take(self) -> Session:
        with self._changed:
            if self._idle:
                self._in_use += 1
                return self._idle.pop()
        session = Session(self._amqp_url, self._vhost)
        try:
            session.check()
        except ConnectionLimit:
            with self._changed:
                self._changed.wait_for(lambda: self._idle or not self._in_use)
                if not self._idle:
                    raise
                self._in_use += 1
                return self._idle.pop()
        with self._changed:
            self._in_use += 1
        return session
