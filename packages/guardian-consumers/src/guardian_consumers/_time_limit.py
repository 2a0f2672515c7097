"""The time limit of callbacks, checked by the thread that waits for the consumer."""

import logging
import threading
import time
from collections.abc import Hashable
from typing import TYPE_CHECKING

from guardian_consumers._errors import Hung
from guardian_consumers._handler import Handler
from guardian_consumers._message import Message
from guardian_consumers._outcomes import TimeLimitExceeded

if TYPE_CHECKING:
    from guardian_consumers._consumer import Consumer

logger = logging.getLogger(__name__)


class TimeLimit:
    """Settles messages whose callbacks exceed the settings' ``time_limit``, and stops the consumer.

    A thread can't be stopped from outside, so the process must be restarted. A task is cancelled, and the consumer goes
    on. Without this limit the broker's ack timeout (30 minutes) would close the channel, and the next callback would
    hang on the same message. Each such message is settled in its own thread: this blocks while the broker accepts no
    messages.
    """

    def __init__(self, consumer: "Consumer", handler: Handler) -> None:
        self.threads: dict[Message, threading.Thread] = {}
        """The threads that settle messages past the limit, by message."""
        self._consumer = consumer
        self._handler = handler
        self._name = consumer.source.key

    def check(self) -> None:
        now, seconds = time.monotonic(), self._consumer.settings.time_limit
        for key, (message, since) in list(self._handler.running.items()):
            if not seconds or now - since < seconds or not message._claim():
                continue
            error = TimeLimitExceeded(f"the callback did not return or acknowledge within {seconds:g} s")
            name = f"{self._name}-hung-{len(self.threads) + 1}"
            settling = threading.Thread(target=self._settle, args=(key, message, error), name=name, daemon=True)
            self.threads[message] = settling
            settling.start()

    def _settle(self, key: Hashable, message: Message, error: TimeLimitExceeded) -> None:
        try:
            trace, has_ended = self._handler.interrupt(key)
            logger.error("%s: %r: %s; it is at:\n%s", self._name, message, error, trace)
            self._handler.failed(message, error, trace)
            if has_ended:
                del self.threads[message]
                return
            self._handler.transfers.wait(message)
        except Exception as failure:
            logger.exception("%s: %r can't be settled", self._name, message)
            self._handler.worker_failed(failure)
        self._consumer.fail(Hung(f"{self._name}: {message!r}: {error}; restart the process"))

    def all_running_settled(self) -> bool:
        """Check, and return whether callbacks run and all of their messages are settled for exceeding the limit."""
        self.check()
        threads = [self.threads.get(message) for message, _ in list(self._handler.running.values())]
        return bool(threads) and all(thread is not None and not thread.is_alive() for thread in threads)
