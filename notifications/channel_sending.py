"""Send to channels: one process at a time, to several channels concurrently."""

import logging
import time
import uuid
from concurrent.futures import FIRST_COMPLETED, Future, wait

from django.utils import timezone

from notifications import channels, claims, events, grouping, mails
from notifications.claims import (
    DeliveryCounts,
    claim,
    drop_outdated,
    postpone,
    record_sent,
    release,
    render_or_fail,
)
from notifications.events import Event
from notifications.grouping import Delivery
from notifications.models import Channel, Notification
from rabbit.threads import ContextThreadPool

logger = logging.getLogger(__name__)

MAX_SENDING_SECONDS = 30
"""The time limit of one call. With a last answer after at most 9 s it still ends before the lease expires."""

MAX_CONCURRENT_CHANNELS = 8

Message = tuple[Delivery, str, str, Event]
"""The notifications of a message, its title and its text, and the event of the first one."""


def send_to_channels(counts: DeliveryCounts) -> None:
    """Send what is due to channels, several concurrently, until nothing is due or the time is over."""
    deadline = time.monotonic() + MAX_SENDING_SECONDS
    with ContextThreadPool(MAX_CONCURRENT_CHANNELS) as pool:
        while time.monotonic() < deadline and (batch := claim(claims.MAX_CLAIMED, to_channels=True)):
            counts.claimed += len(batch)
            messages = _render_by_channel(grouping.deliveries(drop_outdated(batch)), counts)
            _send_concurrently(pool, messages, deadline, counts)


def _send_concurrently(
    pool: ContextThreadPool, waiting: dict[Channel, list[Message]], deadline: float, counts: DeliveryCounts
) -> None:
    """Send these messages to their channels, and record each outcome immediately.

    After a failed message no other is sent to that channel: each would wait as long.
    """

    def begin(channel: Channel, messages: list[Message]) -> None:
        sending[pool.submit(_send_to_one, channel, messages[0], deadline)] = channel, messages

    sending: dict[Future[bool], tuple[Channel, list[Message]]] = {}
    for channel, messages in waiting.items():
        begin(channel, messages)
    while sending:
        for future in wait(sending, return_when=FIRST_COMPLETED).done:
            channel, messages = sending.pop(future)
            try:
                was_sent = future.result()
            except channels.ChannelFailed as error:
                channels.record_result(channel, str(error))
                for delivery, *_ in messages:
                    postpone(delivery, error, counts)
                continue
            if not was_sent:
                for delivery, *_ in messages:
                    release(delivery, state=Notification.State.DUE, due_at=timezone.now())
                continue
            channels.record_result(channel)
            record_sent([messages[0][0]], counts)
            if len(messages) > 1:
                begin(channel, messages[1:])


def _render_by_channel(batch: list[Delivery], counts: DeliveryCounts) -> dict[Channel, list[Message]]:
    """Return the rendered messages by channel. Notifications to deleted channels become failed."""
    uuids = {uuid.UUID(delivery[0].channel) for delivery in batch}
    existing = {one.uuid.hex: one for one in Channel.objects.filter(uuid__in=uuids)}
    messages: dict[Channel, list[Message]] = {}
    for delivery in batch:
        channel = existing.get(delivery[0].channel)
        if channel is None:
            release(delivery, state=Notification.State.FAILED, last_error=claims.CHANNEL_REMOVED)
            continue
        for part in [[one] for one in delivery] if channels.is_for_programs(channel) else [delivery]:
            rendered = render_or_fail(part, mails.in_text, counts)
            if rendered is not None:
                messages.setdefault(channel, []).append((part, *rendered, events.of(part[0])))
    return messages


def _send_to_one(channel: Channel, message: Message, deadline: float) -> bool:
    """Send a message to its channel, and return False if the time is over. Raises ChannelFailed."""
    if time.monotonic() >= deadline:
        return False
    _, title, body, event = message
    try:
        channels.post(channel, title, body, event)
    except channels.ChannelFailed:
        raise
    except Exception as error:
        # One channel must not stop the others. Do not log the error's text, which may contain the address.
        logger.error("Could not send to channel %s: %s", channel.uuid, type(error).__name__)
        raise channels.ChannelFailed("it could not be sent") from None
    return True
