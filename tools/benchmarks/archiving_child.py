"""Archives and replays, alternating with bare consuming and publishing. Runs in ``tools.benchmarks.child``."""

import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from urllib.parse import quote

import amqp
import pika
from django.utils import timezone

from accounts.models import Owner, PulseUser
from core import broker
from queues.archives import reading, replay
from queues.archives.outcomes import Removed
from queues.guard import destroying
from queues.guard.destroying import Target
from queues.guard.monitor import run_pass
from queues.models import Archive, Replay
from tools.benchmarks.passes import timed

NAME = "queue/bench/jobs"
OTHER = "queue/other/jobs"
USERS = 10
WARM_UPS = 1
DRAIN_SECONDS = 10.0


def measure(vhost: str, part: str, **arguments: Any) -> dict[str, Any]:
    """Return the figures of one part: ``one_queue``, ``large_messages`` or ``many_queues``."""
    parts: dict[str, Callable[..., dict[str, Any]]] = {
        "one_queue": one_queue,
        "large_messages": large_messages,
        "many_queues": many_queues,
    }
    return parts[part](vhost, **arguments)


def one_queue(vhost: str, messages: int, size: int, rounds: int) -> dict[str, Any]:
    """Return the seconds to archive a queue's messages and to replay them, and of the same with bare py-amqp.

    ``consume`` throws the messages away; ``publish`` sends the same messages in batches, each confirmed.
    """
    operator = Owner.objects.create_superuser("operator@example.org")
    took: dict[str, list[float]] = {"consume": [], "archive": [], "publish": [], "replay": []}
    for number in range(WARM_UPS + rounds):
        Archive.objects.all().delete()
        fill(vhost, NAME, messages, size)
        consume, _ = timed(lambda: consume_bare(vhost, messages))
        fill(vhost, NAME, messages, size)
        archiving, removed = timed(lambda: delete(vhost))
        kept = removed.archive
        if kept is None or kept.messages != messages:
            raise AssertionError(f"not all messages were archived: {removed}")
        fill(vhost, NAME, 0, size)
        Replay.objects.create(archive=kept, to_queue=NAME, first=1, last=messages, by=operator, created=timezone.now())
        replaying, sent = timed(lambda: replay.run_due(600))
        if sent != messages:
            raise AssertionError(f"{sent} messages were replayed")
        bodies = [message.body for _, message in reading.messages(kept)]
        publish, _ = timed(partial(publish_bare, vhost, bodies))
        with broker.session(vhost) as session:
            assert session.delete_queue(NAME) == 2 * messages
        if number >= WARM_UPS:
            for what, seconds in zip(took, (consume, archiving, publish, replaying), strict=True):
                took[what].append(seconds)
    return took


def large_messages(vhost: str, messages: int, size: int) -> dict[str, Any]:
    """Archive a queue of large messages. The caller adds the peak memory."""
    fill(vhost, NAME, messages, size)
    removed = delete(vhost)
    return {"archived": removed.archived, "dropped": removed.dropped}


def many_queues(vhost: str, queues: int, messages: int, size: int) -> dict[str, Any]:
    """Return the ``seconds`` of passes until all queues over their limit are deleted.

    Another queue grows past its warning threshold during the first; ``warned`` is what the second pass warns about.
    """
    owner = Owner.objects.create_user("owner@example.org", vouched=True)
    for user in ("other", *(f"bench-{number}" for number in range(USERS))):
        PulseUser.objects.create(username=user, ready=True).owners.add(owner)
    names = [f"queue/bench-{number % USERS}/{number}" for number in range(queues)]
    for name in (OTHER, *names):
        fill(vhost, name, 0, size)
    run_pass()
    for name in names:
        fill(vhost, name, messages, size)
    seconds, deleted, warned = [], 0, 0
    while deleted < queues:
        took, report = timed(run_pass)
        seconds.append(took)
        deleted += report.deleted
        if not report.deleted:
            raise AssertionError(f"a pass deleted nothing: {report}")
        if len(seconds) == 1:
            fill(vhost, OTHER, messages // 2, size)
        elif len(seconds) == 2:
            warned = report.warned
    archived = sum(Archive.objects.values_list("messages", flat=True))
    if archived != queues * messages:
        raise AssertionError(f"{archived} of {queues * messages} messages were archived")
    return {"seconds": seconds, "warned": warned}


def bodies_of(messages: int, size: int) -> Iterator[bytes]:
    """Yield bodies that compress to about half."""
    for number in range(messages):
        head = json.dumps({"number": number, "state": "done", "log": ""})[:-2]
        yield f'{head}{secrets.token_hex(size // 2)[: size - len(head) - 2]}"}}'.encode()


def fill(vhost: str, name: str, messages: int, size: int) -> None:
    """Declare a queue, publish this number of messages to it, and wait until the broker counts them."""
    with pika.BlockingConnection(pika.URLParameters(f"{broker.amqp_url()}/{quote(vhost, safe='')}")) as connection:
        channel = connection.channel()
        # Lazy: on RabbitMQ 3.10 a gigabyte of messages would raise its memory alarm.
        channel.queue_declare(name, durable=True, arguments={"x-queue-mode": "lazy"})
        persistent = pika.BasicProperties(delivery_mode=2, content_type="application/json")
        for body in bodies_of(messages, size):
            channel.basic_publish("", name, body, persistent)
    with broker.session(vhost) as session:
        while (depth := session.declare_passively(name)) is None or depth.ready < messages:
            time.sleep(0.1)


def delete(vhost: str) -> Removed:
    """Archive the queue, and delete it."""
    target = Target(vhost=vhost, name=NAME, type="classic", reason=Archive.Reason.LENGTH)
    with broker.session(vhost) as session:
        return destroying.delete_queue(session, target)


def consume_bare(vhost: str, messages: int) -> None:
    """Consume the queue with py-amqp, and throw the messages away."""
    left = messages

    def count(_: amqp.Message) -> None:
        nonlocal left
        left -= 1

    with broker.session(vhost) as session:
        channel = session.new_channel()
        channel.basic_consume(NAME, no_ack=True, callback=count)
        while left:
            assert session.drain(channel, DRAIN_SECONDS)


def publish_bare(vhost: str, bodies: Sequence[bytes]) -> None:
    """Publish to the queue with py-amqp, in batches as large as those of a replay, each confirmed."""
    confirmed: set[int] = set()

    def confirm(tag: int, multiple: bool) -> None:
        confirmed.update(range(1, tag + 1) if multiple else (tag,))

    with broker.session(vhost) as session:
        channel = session.new_channel()
        channel.confirm_select()
        channel.events["basic_ack"].add(confirm)
        for number, body in enumerate(bodies, 1):
            message = amqp.Message(body, delivery_mode=2, content_type="application/json")
            channel.basic_publish(message, "", NAME, mandatory=True)
            while not number % replay.BATCH and len(confirmed) < number:
                assert session.drain(channel, DRAIN_SECONDS)
