"""Requests about exchanges and bindings."""

from collections.abc import Iterable
from typing import Any

from rabbit.entities import Binding, Exchange, PublishedBy, Traffic
from rabbit.http import Answer
from rabbit.requests.parsing import as_number, as_text, parse_object, parse_rows, rate_in
from rabbit.requests.sending import Requests

EXCHANGE_COLUMNS = "name,vhost,type,durable,auto_delete,internal,arguments"


class ExchangeRequests(Requests):
    def exchanges(self, vhost: str) -> list[Exchange]:
        """Return the exchanges of a vhost, including the broker's own."""
        rows = parse_rows(
            self._get("exchanges", vhost, params={"columns": EXCHANGE_COLUMNS}),
            vhost,
            name=str,
            vhost=str,
            type=str,
            durable=bool,
            auto_delete=bool,
            internal=bool,
            arguments=dict,
        )
        return [Exchange(**{key: row[key] for key in Exchange._fields}) for row in rows]

    def exchange_traffic(self, vhost: str, name: str) -> Traffic:
        """Return what is published to an exchange, as counted in the last seconds."""
        row = parse_object(self._get("exchanges", vhost, name), name=str)
        incoming = row.get("incoming")
        stats = row.get("message_stats")
        return Traffic(
            rate_in(stats, "publish_in"),
            rate_in(stats, "publish_out"),
            _by_user(
                (one.get("channel_details"), one.get("stats"))
                for one in (incoming if isinstance(incoming, list) else [])
                if isinstance(one, dict)
            ),
        )

    def publishers(self, vhost: str) -> list[PublishedBy]:
        """Return what users publish to all exchanges of a vhost together."""
        rows = parse_rows(self._get("vhosts", vhost, "channels", params={"columns": "name,user,message_stats"}))
        return _by_user((row, row.get("message_stats")) for row in rows)

    def bindings(self, vhost: str) -> list[Binding]:
        """Return the bindings of a vhost, including those of the default exchange."""
        return _bindings(self._get("bindings", vhost), vhost)

    def queue_bindings(self, vhost: str, name: str) -> list[Binding]:
        """Return the bindings of a queue. The broker shows one to the default exchange even if no queue exists."""
        return _bindings(self._get("queues", vhost, name, "bindings"), vhost)

    def bindings_to_exchange(self, vhost: str, name: str) -> list[Binding]:
        """Return the bindings of an exchange to other exchanges, which feed it; none if it does not exist."""
        return _bindings(self._get("exchanges", vhost, name, "bindings", "destination"), vhost)


def _bindings(answer: Answer, vhost: str) -> list[Binding]:
    rows = parse_rows(
        answer,
        vhost,
        source=str,
        vhost=str,
        destination=str,
        destination_type=str,
        routing_key=str,
        arguments=dict,
    )
    return [Binding(**{key: row[key] for key in Binding._fields}) for row in rows]


def _by_user(channels: Iterable[tuple[Any, Any]]) -> list[PublishedBy]:
    """Return the sums of channels that published, given as an object with the user, and statistics."""
    found: dict[str, PublishedBy] = {}
    for channel, stats in channels:
        rate = rate_in(stats, "publish")
        if rate is None or not isinstance(channel, dict):
            continue
        user = as_text(channel.get("user"))
        unroutable = sum(as_number(stats.get(name)) or 0 for name in ("drop_unroutable", "return_unroutable"))
        before = found.get(user, PublishedBy(user, 0, 0))
        found[user] = PublishedBy(user, before.published + rate, before.unroutable + unroutable)
    return sorted(found.values())
