"""Settings of consumers on the tests' broker, and what their queues contain."""

import asyncio
import contextlib
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

import pika

from guardian_consumers import AsyncConsumer, AsyncMessage, AsyncPublisher, Policy, Publisher, Settings
from tests.support.toolbox import wait_until

QUEUE = "shop_test_orders"
PARKED = f"{QUEUE}.parked"


def settings_at(amqp_url, vhost="/", **changes):
    """Return the settings of a consumer in this vhost, with the grown prefetch and short delays."""
    url = f"{amqp_url}/{quote(vhost, safe='')}"
    policy = changes.pop("policy", Policy(delays=(0.05, 0.2)))
    return Settings(**{"url": url, "exchange": "shop_test", "prefetch": "grown", "policy": policy, **changes})


def without_django():
    """Return the environment without pytest's DJANGO_SETTINGS_MODULE, with which the command sets Django up."""
    return {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"}


@contextlib.contextmanager
def consuming(consumer):
    """Consume until the end of the ``with``."""
    consumer.start()
    try:
        wait_until(lambda: consumer.connected)
        yield consumer
    finally:
        consumer.close()


def length(amqp, queue):
    return amqp.channel.queue_declare(queue, passive=True).method.message_count


def take(amqp, queue):
    """Take one message from a queue and return its properties and body."""
    wait_until(lambda: length(amqp, queue))
    _, properties, body = amqp.channel.basic_get(queue, auto_ack=True)
    return properties, body


def publish_raw(amqp, body=b"{}", queue=QUEUE, **properties):
    """Publish like a client without this package, as soon as the queue is bound."""
    made = pika.BasicProperties(**{"content_type": "application/json", **properties})

    def is_routed():
        try:
            amqp.channel.basic_publish("shop_test", queue, body, made, mandatory=True)
        except pika.exceptions.UnroutableError:
            return False
        return True

    wait_until(is_routed)


def queue_exists(amqp, queue):
    channel = amqp.connection.channel()
    try:
        channel.queue_declare(queue, passive=True)
    except pika.exceptions.ChannelClosedByBroker:
        return False
    channel.close()
    return True


class BlockingMessage(AsyncMessage):
    """The message of a coroutine, for a plain callback in another thread."""

    __slots__ = ()

    def publish(self, *arguments, **options):
        loop = self._consumer._handler._loop
        asyncio.run_coroutine_threadsafe(super().publish(*arguments, **options), loop).result()


class InTasks(AsyncConsumer):
    """An `AsyncConsumer` that is used as a `Consumer`: its coroutine calls a plain callback in a thread."""

    _publisher_class = Publisher

    def __init__(self, settings, source, callback, **options):
        super().__init__(settings, source, self._called_in_thread, **options)
        self._plain_callback = callback
        self._threads = ThreadPoolExecutor(100)

    async def _called_in_thread(self, message):
        message.__class__ = BlockingMessage
        await asyncio.get_running_loop().run_in_executor(self._threads, self._plain_callback, message)

    def run(self, **options):
        asyncio.run(super().run(**options))


class InLoop(InTasks):
    """Calls a plain callback in the event loop, which it blocks."""

    async def _called_in_thread(self, message):
        self._plain_callback(message)


class PublisherInLoops(AsyncPublisher):
    """An `AsyncPublisher` that is used as a `Publisher`: each call is a coroutine in an event loop of its own."""

    def publish(self, *arguments, **options):
        asyncio.run(super().publish(*arguments, **options))


class InMilliseconds(pika.BasicProperties):
    """Properties with a timestamp header in milliseconds, as some clients write it."""

    SECONDS = 1_700_000_000

    def encode(self):
        seconds, milliseconds = (struct.pack(">cQ", b"T", self.SECONDS * factor) for factor in (1, 1000))
        return [b"".join(super().encode()).replace(seconds, milliseconds)]
