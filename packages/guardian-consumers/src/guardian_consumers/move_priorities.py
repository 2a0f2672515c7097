"""``python -m guardian_consumers.move_priorities KEY``: move messages from the queues of former priority settings.

After a change of RABBIT_PRIORITIES it moves each message of a logical queue, in order, to the end of its new queue.
Start consumers with the new setting first: they declare and bind the new queues. Consumers with the old and the new
setting may run meanwhile.

Each message is published with a confirm and then acknowledged. So a crash can duplicate a message, with the same
message id, but never lose it. After a signal or a failure, the command finishes the messages in progress. It can be
repeated at any time. Delayed messages move after their delay: once an old queue has no consumers, its return binding is
changed to the new queues. A message with headers that can't be read is parked, as a consumer does. No queue is deleted.
"""

import logging
import os
import signal
import sys
import threading
import time
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import pika
from pika.adapters.utils.connection_workflow import AMQPConnectorException
from pika.exceptions import AMQPError, ChannelClosedByBroker

from guardian_consumers import _retries as retries
from guardian_consumers._delivery import Delivery, QueueChannel
from guardian_consumers._errors import ConsumerError, NotPublished, Refused, SettingsError, Unroutable
from guardian_consumers._link import Connection
from guardian_consumers._outcomes import Unreadable
from guardian_consumers._priority import BROKER, MAX_PRIORITY, parse_ranges, priority_of
from guardian_consumers._publisher import Publisher
from guardian_consumers._settings import Settings
from guardian_consumers.names import (
    level_queue,
    moved_exchange,
    parking_queue,
    priority_exchange,
    priority_queue,
    return_key,
    unmoved_exchange,
)

DONE, FAILED, INVALID_SETTING = 0, 1, 2

PREFETCH = 500

POLL_SECONDS = 0.1


def main(
    arguments: Sequence[str] | None = None,
    environment: Mapping[str, str] = os.environ,
    is_stopping: Callable[[], bool] = lambda: False,
) -> int:
    parser = ArgumentParser(
        prog="python -m guardian_consumers.move_priorities",
        description="Move messages from the queues of former priority settings.",
        epilog="Exit codes: 0 all moved; 1 failed, run it again; 2 a setting is invalid.",
    )
    parser.add_argument("key", help="the logical queue's key")
    parser.add_argument("--priorities", metavar="RANGES", help="the new setting, such as 0-4,5-9; or broker")
    options = parser.parse_args(arguments)
    logging.getLogger("pika").setLevel(logging.CRITICAL)
    try:
        given = {"RABBIT_PRIORITIES": options.priorities} if options.priorities else {}
        settings = Settings.from_environment({**environment, **given})
        move(settings, options.key, partial(print, file=sys.stderr), is_stopping)
    except SettingsError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return INVALID_SETTING
    except (ConsumerError, AMQPError, AMQPConnectorException) as error:
        text = str(error) if isinstance(error, ConsumerError) else f"the connection to the broker: {error!r}"
        print(text, file=sys.stderr)  # noqa: T201
        return FAILED
    return DONE


def move(
    settings: Settings,
    key: str,
    report: Callable[[str], object],
    is_stopping: Callable[[], bool] = lambda: False,
) -> int:
    """Move the messages of a logical queue to the physical queues of the settings. Return the number of messages.

    ``report`` is called with progress texts. Once ``is_stopping()`` is true, finish the messages in progress.
    Raises SettingsError without a setting of priorities, NotPublished, Refused, pika's AMQPError and
    AMQPConnectorException, and ConsumerError if it was stopped.
    """
    if not settings.priorities:
        raise SettingsError(f"RABBIT_PRIORITIES isn't set; to return to a single queue, set it to 0-{MAX_PRIORITY}")
    with pika.BlockingConnection(settings.addresses, Connection) as connection, Publisher(settings) as publisher:
        return _Move(settings, key, connection, publisher, report, is_stopping).run()


class _Move:
    """One run. Only `_on_confirmed` runs in another thread, the publisher's."""

    def __init__(
        self,
        settings: Settings,
        key: str,
        connection: Any,
        publisher: Publisher,
        report: Callable[[str], object],
        is_stopping: Callable[[], bool],
    ) -> None:
        self._names = settings.names
        self._key = key
        self._connection = connection
        self._publisher = publisher
        self._report = report
        self._is_stopping = is_stopping
        self._timeout = settings.publish_timeout
        queue = self._names.queue(key)
        self._all_queues = every = [level_queue(queue, level) for level in range(MAX_PRIORITY + 1)] + [
            priority_queue(queue)
        ]
        if settings.priorities == BROKER:
            self._targets = {every[-1]: range(MAX_PRIORITY + 1)}
        else:
            self._targets = dict(zip(every, parse_ranges(settings.priorities), strict=False))
        self._old_queues = [name for name in every if name not in self._targets]
        self._unconfirmed = 0
        self._progress_at = 0.0
        self._moved = 0
        self._parked = 0
        self._failure: ConsumerError | None = None

    def run(self) -> int:
        for name in self._targets:
            if self._queue_counts(name) is None:
                raise Refused(f"queue {name} does not exist: start a consumer with this setting first to declare it")
        for name in self._old_queues:
            standing = self._queue_counts(name)
            if standing is None:
                continue
            _, readers = standing
            moved, parked = self._moved, self._parked
            if not readers:
                self._rebind_returns(name)  # first: a delayed message that returns now must not stay in an empty queue
            self._drain(name)
            text = f"{name}: moved {self._moved - moved}"
            if self._parked > parked:
                text += f"; parked {self._parked - parked} with headers that can't be read"
            self._report(f"{text}; stop its {readers} consumers and run this again" if readers else text)
        return self._moved

    def _queue_counts(self, queue: str) -> tuple[int, int] | None:
        """Return the numbers of ready messages and of consumers, or None if the queue does not exist."""
        channel = self._connection.channel()
        try:
            answer = channel.queue_declare(queue, passive=True).method
        except ChannelClosedByBroker as closed:
            if closed.reply_code == 404:
                return None
            raise Refused(f"the queue {queue}: {closed.reply_text} ({closed.reply_code})") from closed
        channel.close()
        return answer.message_count, answer.consumer_count

    def _drain(self, queue: str) -> None:
        """Move the messages of a queue until it is empty. After a failure, ack those that the broker still confirms."""
        channel = self._connection.channel()
        channel.basic_qos(prefetch_count=PREFETCH)
        channel.basic_consume(queue, partial(self._on_message, QueueChannel(queue, 0, channel)))
        is_empty = False
        while self._unconfirmed or not (self._failure or is_empty):
            self._connection.process_data_events(time_limit=POLL_SECONDS)
            if self._is_stopping() and self._failure is None:
                self._failure = ConsumerError("stopped by a signal; run this again")
            if not self._unconfirmed:
                standing = self._queue_counts(queue)
                is_empty = standing is None or not standing[0]
                self._connection.process_data_events(time_limit=0)  # those that were delivered before the count
            elif time.monotonic() - self._progress_at > self._timeout:
                raise NotPublished(f"the broker has confirmed nothing in {self._timeout:g} s", unknown=True)
        if channel.is_open:
            channel.close()
        if self._failure is not None:
            raise self._failure

    def _on_message(self, channel: QueueChannel, _: Any, method: Any, properties: Any, body: bytes) -> None:
        if self._failure is not None:
            return  # the message stays in its queue
        delivery = Delivery(channel, method, properties, body)
        if not self._unconfirmed:
            self._progress_at = time.monotonic()
        self._unconfirmed += 1
        priority = priority_of(properties)
        target = next(name for name, numbers in self._targets.items() if priority in numbers)
        if why := _why_unreadable(delivery):
            _, moved = retries.parked(delivery, Unreadable(why), "")
            routing_key = parking_queue(target)
        else:
            moved, routing_key = retries.moved(delivery), return_key(target)
            moved.priority = priority  # for the broker's own priorities
        future = self._publisher.publish_async(routing_key, body, moved, mandatory=True)
        future.add_done_callback(partial(self._on_confirmed, delivery))

    def _on_confirmed(self, delivery: Delivery, future: Future[None]) -> None:
        """Pass the result on from the publisher's thread."""
        self._connection.add_callback_threadsafe(partial(self._settle, delivery, future.exception()))

    def _settle(self, delivery: Delivery, failure: BaseException | None) -> None:
        self._unconfirmed -= 1
        self._progress_at = time.monotonic()
        if isinstance(failure, Unroutable):
            self._failure = NotPublished(f"{failure}: start a consumer with this setting first to bind its queues")
        elif failure is not None:
            self._failure = failure if isinstance(failure, NotPublished) else NotPublished(repr(failure))
        else:
            delivery.channel.amqp.basic_ack(delivery.tag)
            if _why_unreadable(delivery):
                self._parked += 1
            else:
                self._moved += 1

    def _rebind_returns(self, old: str) -> None:
        """Bind an old queue's return key to the new queues. Each message that returns meanwhile goes to one queue.

        No exchange replaces a binding in one step. But one with an alternate exchange stops using it as soon as it has
        a binding. Until then the messages go to the old queue, which is drained afterwards.
        """
        channel, exchange, again = self._connection.channel(), self._names.exchange, return_key(old)
        moved, unmoved = moved_exchange(self._names, self._key), unmoved_exchange(self._names, self._key)
        ranked = priority_exchange(self._names, self._key)
        channel.exchange_declare(unmoved, "direct", durable=True)
        channel.queue_bind(old, unmoved, again)
        channel.exchange_declare(moved, "direct", durable=True, arguments={"alternate-exchange": unmoved})
        channel.exchange_unbind(ranked, moved, again)  # from an earlier move
        for name in self._all_queues:
            channel.queue_unbind(name, moved, again)
        channel.exchange_bind(moved, exchange, again)
        channel.queue_unbind(old, exchange, again)
        if len(self._targets) == 1:
            channel.queue_bind(*self._targets, moved, again)
        else:
            channel.exchange_bind(ranked, moved, again)
        channel.close()


def _why_unreadable(delivery: Delivery) -> str:
    return getattr(delivery.properties, "unreadable", "")


def _run() -> int:
    """Run the command until a signal. A second signal doesn't wait for the messages in progress."""
    stopping = threading.Event()

    def on_signal(number: int, _: Any) -> None:
        stopping.set()
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    return main(is_stopping=stopping.is_set)


if __name__ == "__main__":
    sys.exit(_run())
