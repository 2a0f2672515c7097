"""Prometheus metrics of consumers: ``--metrics [HOST:]PORT``. Only this module needs prometheus-client."""

import threading
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Metric, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from guardian_consumers._consumer import Consumer
from guardian_consumers._errors import SettingsError
from guardian_consumers._outcomes import Outcome

__all__ = ["create_registry", "serve_metrics"]

HOST = "127.0.0.1"
BUCKETS = (0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10.0, 60.0, 300.0, 1500.0)
"""Seconds, from an empty callback to the default time limit."""

GAUGES = {
    "waiting": "Messages that wait in memory for a callback.",
    "in_hand": "Messages whose callbacks run.",
    "kept": "Failed messages that wait until their delay or parking queue accepts them.",
    "oldest_in_hand_seconds": "Age of the oldest running callback.",
    "prefetch": "Total prefetch of the consumer's queues.",
    "connected": "1 if connected, else 0.",
}
"""The help text by key of `Consumer.figures`, which is the metric's name after ``consumer_``."""

COUNTERS = {
    "late": ("late", "Messages whose callback failed after they were acknowledged."),
    "void": ("void", "Messages redelivered since their connection was lost before they were settled."),
    "unpublished": ("unpublished", "Messages requeued since no delay or parking queue accepted them in time."),
    "reconnected": ("reconnects", "Reconnections."),
}
"""By key of `Consumer.counts`: the metric's name after ``consumer_``, and its help text."""


class Durations:
    """A histogram, in memory. In a project with prometheus-client's multiprocess mode, its own would be in files."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = [0] * (len(BUCKETS) + 1)
        self._sum = 0.0

    def observe(self, message: Any, outcome: Outcome | None, seconds: float) -> None:
        with self._lock:
            self._numbers[bisect_left(BUCKETS, seconds)] += 1
            self._sum += seconds

    def add_to(self, family: HistogramMetricFamily, queue: str) -> None:
        with self._lock:
            numbers, total = accumulate(self._numbers), self._sum
            family.add_metric([queue], list(zip([*map(str, BUCKETS), "+Inf"], numbers, strict=True)), total)


class ConsumerCollector(Collector):
    """Collects the metrics of consumers, labelled with their logical queues."""

    def __init__(self, consumers: Sequence[Consumer]) -> None:
        self._consumers = [(one.names.queue(one.source.key), one, Durations()) for one in consumers]
        for _, consumer, durations in self._consumers:
            consumer.listeners.append(durations.observe)

    def collect(self) -> Iterator[Metric]:
        messages = CounterMetricFamily(
            "consumer_messages",
            "Settled messages by outcome: done (acknowledged), retry (delayed), park, requeue or discard.",
            labels=["queue", "outcome"],
        )
        last = GaugeMetricFamily(
            "consumer_last_acknowledged_timestamp_seconds",
            "Time of the last acknowledgement, or else of the start, in seconds since 1970.",
            labels=["queue"],
        )
        counters = {
            name: CounterMetricFamily(f"consumer_{metric}", text, labels=["queue"])
            for name, (metric, text) in COUNTERS.items()
        }
        gauges = {name: GaugeMetricFamily(f"consumer_{name}", text, labels=["queue"]) for name, text in GAUGES.items()}
        seconds = HistogramMetricFamily("consumer_seconds", "Duration of callbacks.", labels=["queue"])
        for queue, consumer, durations in self._consumers:
            durations.add_to(seconds, queue)
            figures = consumer.figures()
            for outcome in Outcome:
                if outcome is not Outcome.HALT:  # such a message isn't settled
                    messages.add_metric([queue, outcome.value], consumer.counts[outcome.value])
            last.add_metric([queue], time.time() - figures["seconds_since_acknowledged"])
            for name, counter in counters.items():
                counter.add_metric([queue], consumer.counts[name])
            for name, gauge in gauges.items():
                gauge.add_metric([queue], figures[name])
        yield from (messages, last, seconds, *counters.values(), *gauges.values())


@contextmanager
def serve_metrics(at: str, consumers: Sequence[Consumer]) -> Iterator[None]:
    """Serve the metrics of consumers at [HOST:]PORT within the ``with`` block. The default host is 127.0.0.1.

    Raises SettingsError if the address is invalid or in use.
    """
    registry = create_registry(consumers)
    host, port = _address(at)
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise SettingsError(f"--metrics: can't listen at {at}: {error.strerror or error}") from None
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def create_registry(consumers: Sequence[Consumer]) -> CollectorRegistry:
    """Return a registry with the metrics of consumers and this process, to serve it in another way."""
    registry = CollectorRegistry()
    registry.register(ConsumerCollector(consumers))
    ProcessCollector(registry=registry)
    return registry


def _address(at: str) -> tuple[str, int]:
    host, _, port = at.rpartition(":")
    if not (port.isdecimal() and int(port) <= 65535):
        raise SettingsError(f"--metrics must be [HOST:]PORT, such as 9100 or 0.0.0.0:9100, not {at!r}")
    return host.strip("[]") or HOST, int(port)
