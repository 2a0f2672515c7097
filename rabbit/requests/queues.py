"""Requests about queues, their consumers and policies."""

from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, NamedTuple

from rabbit.arguments import differences_from_row
from rabbit.entities import ChannelLoad, QueueConsumer, QueueFlow, QueueRates, RateSample
from rabbit.errors import BrokerError, BrokerUnavailable, InequivalentArguments, Refused
from rabbit.http import Answer
from rabbit.policies import BrokerPolicy
from rabbit.requests.parsing import (
    as_number,
    as_text,
    parse_object,
    parse_rows,
    rate_in,
    require_one_line,
    require_vhost,
    validated,
)
from rabbit.requests.sending import JSONObject, Requests

ARGUMENTS_ONLY = {"disable_stats": "true", "columns": "name,vhost,type,durable,auto_delete,arguments"}
CONSUMER_COLUMNS = (
    "queue.name,channel_details.user,channel_details.connection_name,channel_details.name,consumer_tag,prefetch_count,"
    "ack_required"
)

ACK_COUNTERS = ("ack", "deliver_no_ack", "get_no_ack")
"""The broker's counters of acknowledged messages, and of those that needed none. Rejected ones are in no counter."""

FLOW_COUNTERS = ("publish", "deliver_get", "redeliver", *ACK_COUNTERS)

SAMPLE_SECONDS = 10
"""The interval of the samples that ``queue`` requests. The broker keeps one every 5 s."""

COLUMNS_WITH_SAMPLES = ",".join(
    [
        "name,vhost,arguments,effective_policy_definition,consumers,consumer_details,messages_ready",
        "messages_unacknowledged,message_bytes,messages_details.samples",
        *(f"message_stats.{name}_details.{of}" for name in FLOW_COUNTERS for of in ("rate", "samples")),
    ]
)


class QueueRequests(Requests):
    def list_queues(self, vhost: str | None, params: Mapping[str, str]) -> list[JSONObject]:
        """Return the rows of the queues in a vhost (None: in all vhosts), as the broker lists them.

        ``params`` are the query's; ``columns`` limits what a row contains.
        """
        path = ("queues",) if vhost is None else ("queues", vhost)
        columns = params.get("columns", "name,vhost").split(",")
        shape = {key: str for key in ("name", "vhost") if key in columns}
        return parse_rows(self._get(*path, params=params), vhost, **shape)

    def find_queues(self, vhost: str | None, params: Mapping[str, str]) -> list[JSONObject]:
        """Return the first 500 rows of ``list_queues`` that match ``name`` in ``params``."""
        path = ("queues",) if vhost is None else ("queues", vhost)
        answer = self._get(*path, params={**params, "page": "1", "page_size": "500"})
        page = parse_object(answer, items=list)
        rows = [validated(answer, row, {"name": str, "vhost": str}) for row in page["items"]]
        for row in rows:
            require_vhost(answer, row, row["vhost"] if vhost is None else vhost)
        return rows

    def queue(self, vhost: str, name: str, *, samples_of: int = 0) -> JSONObject:
        """Return one queue. Its lengths lag by seconds, so no decision may rely on them.

        ``samples_of``: with the samples of so many seconds, for ``flow_in``.
        """
        params = {}
        if samples_of:
            params = {"columns": COLUMNS_WITH_SAMPLES}
            for of in ("msg_rates", "lengths"):
                params |= {f"{of}_age": str(samples_of), f"{of}_incr": str(SAMPLE_SECONDS)}
        return self._queue(vhost, name, params)

    def _queue(self, vhost: str, name: str, params: Mapping[str, str]) -> JSONObject:
        answer = self._get("queues", vhost, name, params=params)
        row = parse_object(answer, name=str, vhost=str)
        require_vhost(answer, row, vhost)
        return row

    def queue_rates(self, vhost: str, name: str, seconds: int, step: int) -> list[RateSample]:
        """Return the rates of a queue in the last ``seconds``, one sample each ``step`` seconds, oldest first.

        Without a counted message the list is empty. RabbitMQ repeats its oldest counts for times of which it keeps no
        samples, so don't ask for more than ``Statistics.queue_seconds``.
        """
        params = {"msg_rates_age": str(seconds), "msg_rates_incr": str(step), "columns": "name,message_stats"}
        return _rate_samples(parse_object(self._get("queues", vhost, name, params=params)))

    def channels(self, vhost: str) -> dict[str, ChannelLoad]:
        """Return the load of each channel in a vhost, by the channel's name, as far as the broker reports it."""
        columns = "name,messages_unacknowledged,consumer_count"
        found = {}
        for row in parse_rows(self._get("vhosts", vhost, "channels", params={"columns": columns})):
            held, consumers = as_number(row.get("messages_unacknowledged")), as_number(row.get("consumer_count"))
            if held is not None and consumers is not None:
                found[str(row.get("name"))] = ChannelLoad(held, consumers)
        return found

    def consumers(self, vhost: str) -> list[QueueConsumer]:
        """Return the consumers of all queues in a vhost. The list lags by 5 s."""
        return _consumers(parse_rows(self._get("consumers", vhost, params={"columns": CONSUMER_COLUMNS})))

    def queue_arguments(self, vhost: str, name: str) -> JSONObject:
        """Return what a queue is declared with, its ``name``, ``vhost`` and ``type``, without statistics."""
        return self._queue(vhost, name, ARGUMENTS_ONLY)

    def list_arguments(self, vhost: str) -> list[JSONObject]:
        """Return the same of all queues of a vhost. The broker asks no queue's process."""
        return self.list_queues(vhost, ARGUMENTS_ONLY)

    def policies(self, vhost: str) -> list[BrokerPolicy]:
        """Return the policies of a vhost."""
        return _policies(self._get("policies", vhost), vhost)

    def operator_policies(self, vhost: str) -> list[BrokerPolicy]:
        """Return the operator policies of a vhost."""
        return _policies(self._get("operator-policies", vhost), vhost)

    def declare_queue(
        self,
        vhost: str,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        durable: bool = True,
        auto_delete: bool = False,
    ) -> bool:
        """Declare a queue. Return whether it is new.

        Raises:
            InequivalentArguments: it exists with other arguments, durability or auto-deletion.
            NotOnBroker: no such vhost.
        """
        require_one_line(name)
        declared = {"durable": durable, "auto_delete": auto_delete, "arguments": dict(arguments or {})}
        try:
            return self._put("queues", vhost, name, json=declared)
        except (Refused, BrokerUnavailable) as error:
            # A 500 may be the answer to other arguments, if an argument's value is not ASCII; see `_confirmed`.
            if error.status != 500 or not self._differs(vhost, name, declared):
                raise
            reason = "it exists with other arguments"
            raise InequivalentArguments(f"{error}; {reason}", status=500, reason=reason) from error

    def _differs(self, vhost: str, name: str, declared: Mapping[str, Any]) -> bool:
        try:
            return bool(differences_from_row(declared, self.queue(vhost, name)))
        except BrokerError:
            return False


def _policies(answer: Answer, vhost: str) -> list[BrokerPolicy]:
    rows = parse_rows(answer, vhost, **{"pattern": str, "apply-to": str, "priority": int, "definition": dict})
    return [BrokerPolicy(row["pattern"], row["apply-to"], row["priority"], row["definition"]) for row in rows]


def consumers_in(queue: JSONObject) -> list[QueueConsumer]:
    """Return the consumers of a queue that the answer of ``Management.queue`` reports."""
    details = queue.get("consumer_details")
    return _consumers([one for one in details if isinstance(one, dict)] if isinstance(details, list) else [])


def _consumers(rows: Iterable[JSONObject]) -> list[QueueConsumer]:
    """Return the consumers in these rows. A closing channel has no details."""
    found = []
    for row in rows:
        queue, channel = row.get("queue"), row.get("channel_details")
        if isinstance(queue, dict) and isinstance(channel, dict):
            found.append(
                QueueConsumer(
                    as_text(queue.get("name")),
                    as_text(channel.get("user")),
                    as_text(channel.get("connection_name")),
                    as_text(channel.get("name")),
                    as_text(row.get("consumer_tag")),
                    as_number(row.get("prefetch_count")) or 0,
                    bool(row.get("ack_required")),
                    row.get("active") is not False,
                )
            )
    return found


def rates_in(queue: JSONObject) -> QueueRates | None:
    """Return the rates of a queue in the answer of ``Management.queue``; None: the broker reports none."""
    stats = queue.get("message_stats")
    if not isinstance(stats, dict):
        return None

    return QueueRates(*(rate_in(stats, counter) or 0.0 for counter in ("publish", "deliver_get", "ack")))


def published_in(queue: JSONObject) -> int | None:
    """Return how many messages were published to a queue, by the answer of ``Management.queue``, or None if unknown."""
    stats = queue.get("message_stats")
    return as_number(stats.get("publish")) if isinstance(stats, dict) else None


RATED = {
    "published": ("publish",),
    "acknowledged": ("ack", "deliver_no_ack", "get_no_ack"),
    "redelivered": ("redeliver",),
}
"""The broker's counters of each rate of a ``RateSample``."""


def _rate_samples(queue: JSONObject) -> list[RateSample]:
    counts = {rate: _counts(queue.get("message_stats"), counters) for rate, counters in RATED.items()}
    moments = sorted({moment for one in counts.values() for moment in one})
    return [
        RateSample(
            datetime.fromtimestamp(moment, UTC),
            **{
                # A counter starts again at 0 when the queue's node does.
                rate: max(0, one.get(moment, 0) - one.get(before, 0)) / (moment - before)
                for rate, one in counts.items()
            },
        )
        for before, moment in pairwise(moments)
    ]


def _counts(stats: Any, counters: Iterable[str]) -> Counter[float]:
    """Return the sum of these counters at each moment, in seconds since 1970."""
    found: Counter[float] = Counter()
    for counter in counters:
        for sample in _samples(stats.get(f"{counter}_details") if isinstance(stats, dict) else None):
            found[sample.at] += sample.value
    return found


def flow_in(queue: JSONObject, seconds: int) -> QueueFlow | None:
    """Return what went through a queue in the last ``seconds``, or since it was declared.

    The queue is an answer of ``Management.queue`` with samples. It is None if the broker keeps none, or has none yet.
    """
    stats = queue.get("message_stats")
    if not isinstance(stats, dict):
        return None
    counts = {name: _samples(stats.get(f"{name}_details")) for name in FLOW_COUNTERS}
    lengths = _samples(queue.get("messages_details"))
    ends = [samples[0].at for samples in (*counts.values(), lengths) if samples]
    # The broker shows zeros for the time before the queue was declared.
    used = [sample.at for samples in (*counts.values(), lengths) for sample in samples if sample.value]
    if len(ends) <= len(FLOW_COUNTERS) or not used:
        return None
    ended = min(ends)
    began = max(ended - seconds, min(used) - SAMPLE_SECONDS)
    if began >= ended:
        return None

    def increase(samples: list[_Sample]) -> int:
        return _value_at(samples, ended) - _value_at(samples, began)

    return QueueFlow(
        ended - began,
        increase(counts["publish"]),
        increase(counts["deliver_get"]),
        increase(counts["redeliver"]),
        sum(increase(counts[name]) for name in ACK_COUNTERS),
        increase(lengths),
    )


class _Sample(NamedTuple):
    at: float
    value: int


def _value_at(samples: list[_Sample], at: float) -> int:
    return next((sample.value for sample in samples if sample.at <= at), 0)


def _samples(details: object) -> list[_Sample]:
    """Return the samples of a total, newest first."""
    rows = details.get("samples") if isinstance(details, dict) else None
    found = [
        _Sample(row["timestamp"] / 1000, row["sample"])
        for row in (rows if isinstance(rows, list) else [])
        if isinstance(row, dict) and as_number(row.get("timestamp")) and as_number(row.get("sample")) is not None
    ]
    return sorted(found, reverse=True)
