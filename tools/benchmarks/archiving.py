"""Archives and replays, compared to a bare consumer and to bare publishing with confirms. Queues are classic."""

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from functools import partial

import amqp
import pika
from django.utils import timezone

from accounts.models import Owner
from core import broker
from queues.archives import replay
from queues.archives.outcomes import Removed
from queues.guard import destroying
from queues.guard.destroying import Target
from queues.models import Archive, Replay
from tools.benchmarks import load
from tools.benchmarks.figures import Figure, in_turn, peak_megabytes, seconds
from tools.benchmarks.running import size

NAME = "queue/bench/jobs"
MESSAGES = size(10_000, 500)
BYTES = 1000
ROUNDS = size(7, 2)
MAX_ARCHIVE_RATIO = 2.5
MAX_REPLAY_RATIO = 1.5

LARGE_MESSAGES = size(20_000, 500)
LARGE_BYTES = 64 * 1024
MAX_MEGABYTES = 150

DRAIN_SECONDS = 10.0


def archiving() -> list[Figure]:
    # Before the rest, for its peak memory.
    fill(NAME, LARGE_MESSAGES, LARGE_BYTES)
    archive_and_delete()
    peak = peak_megabytes()
    found = in_turn(ROUNDS, archive=archive_one, consume=consume_one, replay=replay_one, publish=publish_one)
    where = f"{MESSAGES:,} messages of {BYTES:,} bytes"
    return [
        Figure(where, "archive, and delete the queue", "s", found["archive"], found["consume"], MAX_ARCHIVE_RATIO),
        Figure(where, "replay", "s", found["replay"], found["publish"], MAX_REPLAY_RATIO),
        Figure(
            f"archive from {LARGE_MESSAGES:,} messages of {LARGE_BYTES // 1024} kB", "peak memory", "MB", [peak],
            limit=MAX_MEGABYTES,
        ),
    ]  # fmt: skip


def fill(name: str, messages: int, size: int) -> None:
    """Declare a queue, publish persistent messages to it, and wait until the broker counts them."""
    with load.amqp_connection() as connection:
        channel = connection.channel()
        # Lazy: on RabbitMQ 3.10 a gigabyte of messages would raise its memory alarm.
        channel.queue_declare(name, durable=True, arguments={"x-queue-mode": "lazy"})
        persistent = pika.BasicProperties(delivery_mode=2, content_type="application/json")
        for body in bodies(messages, size):
            channel.basic_publish("", name, body, persistent)
    with broker.session("/") as session:
        while (depth := session.declare_passively(name)) is None or depth.ready < messages:
            time.sleep(0.1)


def bodies(messages: int, size: int) -> Iterator[bytes]:
    """Yield bodies that compress to about half."""
    for number in range(messages):
        head = json.dumps({"number": number, "state": "done", "log": ""})[:-2]
        yield f'{head}{secrets.token_hex(size // 2)[: size - len(head) - 2]}"}}'.encode()


def archive_and_delete() -> Removed:
    target = Target(vhost="/", name=NAME, type="classic", reason=Archive.Reason.LENGTH)
    with broker.session("/") as session:
        return destroying.delete_queue(session, target)


def archive_one() -> float:
    Archive.objects.all().delete()
    fill(NAME, MESSAGES, BYTES)
    took = seconds(archive_and_delete)
    assert Archive.objects.get().messages == MESSAGES
    return took


def consume_one() -> float:
    """Return the seconds to consume a queue with py-amqp, and discard the messages."""
    fill(NAME, MESSAGES, BYTES)
    left = MESSAGES

    def count(_: amqp.Message) -> None:
        nonlocal left
        left -= 1

    def consume() -> None:
        with broker.session("/") as session:
            channel = session.new_channel()
            channel.basic_consume(NAME, no_ack=True, callback=count)
            while left:
                assert session.drain(channel, DRAIN_SECONDS)

    took = seconds(consume)
    delete_queue(0)
    return took


def delete_queue(messages: int) -> None:
    with broker.session("/") as session:
        assert session.delete_queue(NAME) == messages


def replay_one() -> float:
    fill(NAME, MESSAGES, BYTES)
    archive_and_delete()
    fill(NAME, 0, BYTES)
    operator, _ = Owner.objects.get_or_create(email="operator@example.org", is_staff=True)
    Replay.objects.create(
        archive=Archive.objects.latest("id"), to_queue=NAME, first=1, last=MESSAGES, by=operator, created=timezone.now()
    )
    took = seconds(lambda: replay.run_due(600))
    delete_queue(MESSAGES)
    return took


def publish_one() -> float:
    """Return the seconds to publish with py-amqp, in batches as large as those of a replay, each confirmed."""
    fill(NAME, 0, BYTES)
    took = seconds(partial(publish_bare, list(bodies(MESSAGES, BYTES))))
    delete_queue(MESSAGES)
    return took


def publish_bare(bodies: Sequence[bytes]) -> None:
    confirmed: set[int] = set()

    def confirm(tag: int, multiple: bool) -> None:
        confirmed.update(range(1, tag + 1) if multiple else (tag,))

    with broker.session("/") as session:
        channel = session.new_channel()
        channel.confirm_select()
        channel.events["basic_ack"].add(confirm)
        for number, body in enumerate(bodies, 1):
            message = amqp.Message(body, delivery_mode=2, content_type="application/json")
            channel.basic_publish(message, "", NAME, mandatory=True)
            while not number % replay.BATCH and len(confirmed) < number:
                assert session.drain(channel, DRAIN_SECONDS)
