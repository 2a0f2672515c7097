"""Sending to channels: one process at a time, to several channels at once."""

import logging
import time
import uuid
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial

from django.utils import timezone

from notifications import channels, claims, mails
from notifications.claims import (
    DeliveryCounts,
    claim,
    drop_outdated,
    postpone,
    record_sent,
    release_claim,
    render_or_fail,
)
from notifications.models import Channel, Notification
from rabbit.threads import ContextThreadPool

logger = logging.getLogger(__name__)

MAX_SENDING_SECONDS = 30
"""For so long one call sends to channels. With the last answers, of 12 s at most, it ends before the lease does."""

MAX_CONCURRENT_CHANNELS = 8

Message = tuple[Notification, str, str]


def send_to_channels(counts: DeliveryCounts) -> None:
    """Send what is due to channels, several at once, until nothing is or the time is over."""
    until = time.monotonic() + MAX_SENDING_SECONDS
    with ContextThreadPool(MAX_CONCURRENT_CHANNELS) as pool:
        while time.monotonic() < until and (batch := claim(claims.MAX_CLAIMED, to_channels=True)):
            counts.claimed += len(batch)
            _send_side_by_side(pool, _render_by_channel(drop_outdated(batch), counts), until, counts)


def _send_side_by_side(
    pool: ContextThreadPool, waiting: dict[Channel, list[Message]], until: float, counts: DeliveryCounts
) -> None:
    """Send these to their channels, and write down what became of each as soon as it is known.

    The first message to a channel that fails is the last that is tried: the others would wait for it as long.
    """

    def begin(channel: Channel, messages: list[Message]) -> None:
        sending[pool.submit(_send_to_one, channel, messages[0], until)] = channel, messages

    sending: dict[Future[bool], tuple[Channel, list[Message]]] = {}
    for channel, messages in waiting.items():
        begin(channel, messages)
    while sending:
        for future in wait(sending, return_when=FIRST_COMPLETED).done:
            channel, messages = sending.pop(future)
            try:
                arrived = future.result()
            except channels.ChannelFailed as error:
                channels.record_result(channel, str(error))
                for notification, _, _ in messages:
                    postpone(notification, error, counts)
                continue
            if not arrived:
                for notification, _, _ in messages:
                    release_claim(notification, state=Notification.State.DUE, due_at=timezone.now())
                continue
            channels.record_result(channel)
            record_sent([messages[0][0]], counts)
            if len(messages) > 1:
                begin(channel, messages[1:])


def _render_by_channel(batch: list[Notification], counts: DeliveryCounts) -> dict[Channel, list[Message]]:
    """Return these in words, by the channel they go to. What goes to one that was removed is given up quietly."""
    there = {one.uuid.hex: one for one in Channel.objects.filter(uuid__in={uuid.UUID(n.channel) for n in batch})}
    found: dict[Channel, list[Message]] = {}
    for notification in batch:
        channel = there.get(notification.channel)
        if channel is None:
            release_claim(notification, state=Notification.State.FAILED, last_error="The channel was removed.")
            continue
        words = render_or_fail(notification, partial(mails.in_text, notification), counts)
        if words is not None:
            found.setdefault(channel, []).append((notification, *words))
    return found


def _send_to_one(channel: Channel, message: Message, until: float) -> bool:
    """Send a message to its channel, unless the time is over, and return whether it was sent.

    Raises:
        ChannelFailed: it did not arrive, whatever the reason.
    """
    if time.monotonic() >= until:
        return False
    _, title, body = message
    try:
        channels.post(channel, title, body)
    except channels.ChannelFailed:
        raise
    except Exception as error:
        # Nothing of one channel keeps the others from being sent to. Its text may have the address in it.
        logger.error("Channel %s can't be sent to: %s", channel.uuid, type(error).__name__)
        raise channels.ChannelFailed("it could not be sent") from None
    return True
