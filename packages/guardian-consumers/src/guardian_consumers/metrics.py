"""What Prometheus reads of consumers: ``--metrics [HOST:]PORT``. Nothing else here needs prometheus-client."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, Metric, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from guardian_consumers.consumer import Consumer
from guardian_consumers.errors import SettingsError
from guardian_consumers.outcomes import Outcome

HOST = "127.0.0.1"
BUCKETS = (0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10, 60, 300, 1500)
"""Seconds: from a callback that does nothing to the default time limit."""

GAUGES = {
    "waiting": ("waiting", "Messages that are here and that nobody has begun."),
    "in_hand": ("in_hand", "Messages that are being worked on."),
    "oldest_in_hand_seconds": ("oldest_in_hand_seconds", "For how long the oldest of them has been."),
    "prefetch": ("prefetch", "How many messages may be here at once."),
    "connected": ("connected", "Whether it is connected: 1 or 0."),
}
"""Of `Consumer.figures`: the metric's name after ``consumer_``, and what it says."""

COUNTERS = {
    "late": ("late", "Messages whose callback failed after they were acknowledged."),
    "void": ("void", "Messages whose connection was lost before they were dealt with; they came again."),
    "unpublished": (
        "unpublished",
        "Messages that were put back, as the broker took none for a delay or parking queue.",
    ),
    "reconnected": ("reconnects", "Times that it connected again."),
}
"""The same, of `Consumer.counts`."""


class ConsumerCollector(Collector):
    """The figures of these consumers, read when they are asked for; each is labelled with its logical queue."""

    def __init__(self, consumers: Sequence[Consumer]) -> None:
        self._consumers = [(consumer.names.queue(consumer.source.key), consumer) for consumer in consumers]

    def collect(self) -> Iterator[Metric]:
        """Give them."""
        messages = CounterMetricFamily(
            "consumer_messages",
            "Messages that were dealt with, by what became of them: done is handled, retry tried again after a delay, "
            "park parked.",
            labels=["queue", "outcome"],
        )
        last = GaugeMetricFamily(
            "consumer_last_acknowledged_timestamp_seconds",
            "When a message was last acknowledged, in seconds since 1970; where none was, when it started.",
            labels=["queue"],
        )
        counters = {
            name: CounterMetricFamily(f"consumer_{metric}", text, labels=["queue"])
            for name, (metric, text) in COUNTERS.items()
        }
        gauges = {
            name: GaugeMetricFamily(f"consumer_{metric}", text, labels=["queue"])
            for name, (metric, text) in GAUGES.items()
        }
        for queue, consumer in self._consumers:
            figures = consumer.figures()
            for outcome in Outcome:
                if outcome is not Outcome.HALT:  # such a message isn't dealt with: the consumer stops
                    messages.add_metric([queue, outcome.value], consumer.counts[outcome.value])
            last.add_metric([queue], time.time() - figures["seconds_since_acknowledged"])
            for name, counter in counters.items():
                counter.add_metric([queue], consumer.counts[name])
            for name, gauge in gauges.items():
                gauge.add_metric([queue], figures[name])
        yield from (messages, last, *counters.values(), *gauges.values())


@contextmanager
def serve_metrics(at: str, consumers: Sequence[Consumer]) -> Iterator[None]:
    """Serve the figures of these consumers at [HOST:]PORT, without HOST on 127.0.0.1, until the end of the ``with``.

    Raises SettingsError where it can't be listened there.
    """
    registry = create_registry(consumers)
    host, port = _address(at)
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise SettingsError(f"--metrics: it can't be listened at {at}: {error.strerror or error}") from None
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def create_registry(consumers: Sequence[Consumer]) -> CollectorRegistry:
    """Return the figures of these consumers and of this process, for those who serve them in another way."""
    registry = CollectorRegistry()
    registry.register(ConsumerCollector(consumers))
    ProcessCollector(registry=registry)
    seconds = Histogram("consumer_seconds", "How long callbacks took.", ["queue"], buckets=BUCKETS, registry=registry)
    for consumer in consumers:
        consumer.listeners.append(partial(_observe, seconds.labels(consumer.names.queue(consumer.source.key))))
    return registry


def _observe(histogram: Histogram, message: Any, outcome: Outcome | None, seconds: float) -> None:
    histogram.observe(seconds)


def _address(at: str) -> tuple[str, int]:
    host, _, port = at.rpartition(":")
    if not (port.isdecimal() and int(port) <= 65535):
        raise SettingsError(f"--metrics is [HOST:]PORT, like 9100 or 0.0.0.0:9100, not {at!r}")
    return host.strip("[]") or HOST, int(port)
