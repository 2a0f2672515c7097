"""How fast messages come to a queue and leave it, from the samples that RabbitMQ keeps for a while."""

import logging
from datetime import timedelta
from typing import NamedTuple

from django.core.cache import cache

from core import broker
from queues.models import Queue
from queues.rules.charts import Span
from rabbit.entities import RateSample
from rabbit.errors import BrokerError

logger = logging.getLogger(__name__)

CACHE_SECONDS = 30
"""Pages refresh more often. RabbitMQ's samples are a minute apart."""


class Rates(NamedTuple):
    """The rates of a queue, oldest first. ``why_none`` says why there are no samples, in a sentence."""

    samples: list[RateSample]
    why_none: str = ""


NO_ANSWER = Rates([], "No rates: the broker did not answer.")
NOT_KEPT = Rates([], "RabbitMQ keeps no rates for this long.")
OFF = Rates([], "No rates: statistics are off in RabbitMQ (rates_mode or disable_metrics_collector).")
NOTHING_COUNTED = Rates([], "No rates: RabbitMQ has counted no message of this queue.")


def fetch(queue: Queue, span: Span) -> Rates:
    """Return the rates of a queue in the last part of this span, with at most two requests to the broker."""
    if not span.rate_step:
        return NOT_KEPT
    management = broker.management()
    statistics = management.statistics()
    if not statistics.has_rates:
        return OFF
    seconds = int(min(span.duration, timedelta(seconds=statistics.queue_seconds)).total_seconds())
    if seconds < span.rate_step:
        return NOT_KEPT
    samples = management.queue_rates(queue.vhost, queue.name, seconds, span.rate_step)
    return Rates(samples) if samples else NOTHING_COUNTED


def cached(queue: Queue, span: Span) -> Rates:
    """Return the same, as they were fetched within the last ``CACHE_SECONDS``."""
    key = f"rates:{queue.pk}:{span.name}"
    rates: Rates | None = cache.get(key)
    if rates is None:
        try:
            rates = fetch(queue, span)
        except BrokerError as error:
            logger.warning("Could not fetch the rates of %s in %s: %s", queue.name, queue.vhost, error)
            rates = NO_ANSWER
        cache.set(key, rates, CACHE_SECONDS)
    return rates
