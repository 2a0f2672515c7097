"""``python -m guardian_consumers.move_priorities KEY``: move what waits in queues that no setting names any more.

For a logical queue whose priorities were kept apart by other ranges, or by the broker, before: each message goes to the
end of the queue that RABBIT_PRIORITIES now means for it, in the order in which it waited. Start the consumers with the
new setting first: they make its queues, and lead what is published there. They may run while it moves, and so may those
with the old setting.

Each message is published with a confirmation and acknowledged then, so a crash in between leaves it twice, with one
message id, and never loses it. It can be run again at any time. What waits for its next try moves when its delay is
over: its way back is led to the new queues, once nobody reads the old one. No queue is deleted.
"""

import logging
import os
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import pika
from pika.exceptions import AMQPError, ChannelClosedByBroker

from guardian_consumers import retries
from guardian_consumers.delivery import Delivery, QueueChannel
from guardian_consumers.errors import ConsumerError, NotPublished, Refused, SettingsError, Unroutable
from guardian_consumers.names import level_queue, priority_queue, ranked_exchange, return_key
from guardian_consumers.priority import BROKER, HIGHEST, levels, priority_of
from guardian_consumers.publisher import Publisher
from guardian_consumers.settings import Settings

DONE, FAILED, UNUSABLE = 0, 1, 2
"""Exit codes: all is moved; it isn't, and can be run again; a setting can't be used."""

WINDOW = 500
"""How many messages are on their way at once."""

QUIET_SECONDS = 0.1


def main(arguments: Sequence[str] | None = None, environment: Mapping[str, str] = os.environ) -> int:
    """Move what the command line names, and return the exit code."""
    parser = ArgumentParser(
        prog="python -m guardian_consumers.move_priorities",
        description="Move what waits in queues of priorities that the settings don't name any more.",
        epilog="Exit codes: 0 all is moved; 1 it isn't, and can be run again; 2 a setting can't be used.",
    )
    parser.add_argument("key", help="the logical queue's key")
    parser.add_argument("--priorities", metavar="RANGES", help="where to, like 0-4,5-9; or broker")
    options = parser.parse_args(arguments)
    logging.getLogger("pika").setLevel(logging.CRITICAL)
    try:
        given = {"RABBIT_PRIORITIES": options.priorities} if options.priorities else {}
        settings = Settings.from_environment({**environment, **given})
        move(settings, options.key, partial(print, file=sys.stderr))
    except SettingsError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return UNUSABLE
    except (ConsumerError, AMQPError) as error:
        said = str(error) if isinstance(error, ConsumerError) else f"the connection to the broker: {error!r}"
        print(said, file=sys.stderr)  # noqa: T201
        return FAILED
    return DONE


def move(settings: Settings, key: str, say: Callable[[str], object]) -> int:
    """Move what waits in other queues of this logical queue to those of the settings; return how many messages.

    ``say`` is told what was done.
    Raises SettingsError where they name no priorities, NotPublished, Refused, and pika's AMQPError.
    """
    if not settings.priorities:
        raise SettingsError(f"RABBIT_PRIORITIES isn't set; for one queue for all, let it be 0-{HIGHEST} first")
    with pika.BlockingConnection(settings.parameters) as connection, Publisher(settings) as publisher:
        return _Move(settings, key, connection, publisher, say).all()


class _Move:
    """One run. Everything but `_confirmed` happens in the thread that called `all`."""

    def __init__(
        self, settings: Settings, key: str, connection: Any, publisher: Publisher, say: Callable[[str], object]
    ) -> None:
        self._names = settings.names
        self._key = key
        self._connection = connection
        self._publisher = publisher
        self._say = say
        self._patience = settings.publish_timeout
        queue = self._names.queue(key)
        self._every = every = [level_queue(queue, level) for level in range(HIGHEST + 1)] + [priority_queue(queue)]
        if settings.priorities == BROKER:
            self._targets = {every[-1]: range(HIGHEST + 1)}
        else:
            self._targets = dict(zip(every, levels(settings.priorities), strict=False))
        self._others = [name for name in every if name not in self._targets]
        self._in_hand = 0
        self._moved = 0
        self._failure: NotPublished | None = None

    def all(self) -> int:
        """Move all that there is, and return how many messages."""
        for name in self._targets:
            if self._standing(name) is None:
                raise Refused(f"there is no queue {name}: start a consumer with this setting first, which declares it")
        for name in self._others:
            standing = self._standing(name)
            if standing is None:
                continue
            _, readers = standing
            before = self._moved
            self._empty(name)
            if readers:
                self._say(f"{name}: moved {self._moved - before}; {readers} still read it: run this again without them")
            else:
                self._lead_back(name)
                self._say(f"{name}: moved {self._moved - before}")
        return self._moved

    def _standing(self, queue: str) -> tuple[int, int] | None:
        """Return how many messages are ready there, and how many consumers there are; None: there is no such queue."""
        channel = self._connection.channel()
        try:
            answer = channel.queue_declare(queue, passive=True).method
        except ChannelClosedByBroker as closed:
            if closed.reply_code == 404:
                return None
            raise Refused(f"the queue {queue}: {closed.reply_text} ({closed.reply_code})") from closed
        channel.close()
        return answer.message_count, answer.consumer_count

    def _empty(self, queue: str) -> None:
        channel = self._connection.channel()
        channel.basic_qos(prefetch_count=WINDOW)
        channel.basic_consume(queue, partial(self._arrived, QueueChannel(queue, 0, channel)))
        moved, since = -1, time.monotonic()
        while self._failure is None:
            self._connection.process_data_events(time_limit=QUIET_SECONDS)
            if self._moved > moved:
                moved, since = self._moved, time.monotonic()
            elif self._in_hand:
                if time.monotonic() - since > self._patience:
                    self._failure = NotPublished(
                        f"the broker has confirmed nothing in {self._patience:g} s", unknown=True
                    )
            else:
                standing = self._standing(queue)
                if standing is None or not standing[0]:
                    break
        if channel.is_open:
            channel.close()
        if self._failure is not None:
            raise self._failure

    def _arrived(self, channel: QueueChannel, _: Any, method: Any, properties: Any, body: bytes) -> None:
        if self._failure is not None:
            return  # what comes now stays where it is
        delivery = Delivery(channel, method, properties, body)
        self._in_hand += 1
        priority = priority_of(properties)
        target = next(name for name, numbers in self._targets.items() if priority in numbers)
        moved = retries.moved(delivery)
        moved.priority = priority  # by which the broker goes, where it is to
        future = self._publisher.post(return_key(target), body, moved, mandatory=True)
        future.add_done_callback(partial(self._confirmed, delivery))

    def _confirmed(self, delivery: Delivery, future: Future[None]) -> None:
        """Pass on what became of a message; this is the publisher's thread."""
        self._connection.add_callback_threadsafe(partial(self._settle, delivery, future.exception()))

    def _settle(self, delivery: Delivery, failure: BaseException | None) -> None:
        self._in_hand -= 1
        if isinstance(failure, Unroutable):
            self._failure = NotPublished(f"{failure}: start a consumer with this setting first, which binds its queues")
        elif failure is not None:
            self._failure = failure if isinstance(failure, NotPublished) else NotPublished(repr(failure))
        else:
            delivery.channel.amqp.basic_ack(delivery.tag)
            self._moved += 1

    def _lead_back(self, old: str) -> None:
        """Lead what comes back to this queue after a delay to the new ones: first there, and then no more here."""
        channel, exchange, again = self._connection.channel(), self._names.exchange, return_key(old)
        ranked = ranked_exchange(self._names, self._key)
        if len(self._targets) == 1:
            [target] = self._targets
            channel.queue_bind(target, exchange, again)
            channel.exchange_unbind(ranked, exchange, again)
        else:
            target = ""
            channel.exchange_bind(ranked, exchange, again)
        for name in self._every:
            if name != target:
                channel.queue_unbind(name, exchange, again)
        channel.close()


if __name__ == "__main__":
    sys.exit(main())
