"""Where a move publishes each message, and with which headers."""

from collections.abc import Callable, Mapping
from typing import Any

from core import broker
from queues.archives.replay import ROUTING_HEADERS, sanitized
from queues.guard import feeding
from queues.models import Move, Queue
from queues.rules import dead_letters
from queues.rules.dead_letters import DEATH_HEADERS, PARKED_HEADERS, Source, Surroundings
from rabbit.entities import Binding
from rabbit.errors import NotOnBroker, Refused
from rabbit.fetching import Fetched
from rabbit.policies import BrokerPolicy, effective
from rabbit.snapshot import CLASSIC

MAX_SOURCES = 50
"""The queues that a queue's dead letters name are looked up, up to this many."""

DEAD_LETTER_EXCHANGE, DEAD_LETTER_KEY = "dead-letter-exchange", "dead-letter-routing-key"

Route = Callable[[Fetched], Fetched | None]
"""Returns a message as it is published, with its exchange and routing key, or None if it stays in its queue."""


def route_of(move: Move) -> Route:
    return _to_origin(move) if move.to_origin else _to_target(move)


def _to_target(move: Move) -> Route:
    def route(message: Fetched) -> Fetched:
        key = move.to_queue or (message.routing_key if move.routing_key is None else move.routing_key)
        moved = sanitized(message, (*ROUTING_HEADERS, *DEATH_HEADERS))
        return moved._replace(exchange=move.to_exchange, routing_key=key)

    return route


def _to_origin(move: Move) -> Route:
    here = surroundings(move.queue)
    confirmed = None if move.groups is None else {tuple(group) for group in move.groups}

    def route(message: Fetched) -> Fetched | None:
        letter = dead_letters.read(message.headers)
        origin = letter and dead_letters.origin_of(letter, here)
        if letter is None or not origin or origin.why_not:
            return None
        if confirmed is None:  # nobody could look at the groups, so no header chooses an exchange
            origin = origin if here.parking_exchange else origin._replace(exchange="", routing_key=origin.queue)
        elif origin.key not in confirmed:
            return None
        headers = dead_letters.headers_back(message.headers, letter)
        parked = PARKED_HEADERS if letter.error else ()
        back = sanitized(message._replace(headers=headers), (*ROUTING_HEADERS, *DEATH_HEADERS, *parked))
        return back._replace(exchange=origin.exchange, routing_key=origin.routing_key)

    return route


def surroundings(queue: Queue) -> Surroundings:
    """Query the broker for what leads to a queue of a Pulse user. Other queues are looked up when they are named."""
    management, vhost = broker.management(), queue.vhost
    bindings = [one for one in management.queue_bindings(vhost, queue.name) if one.source]
    upstream = feeding.upstream(
        bindings, lambda names: {name: management.bindings_to_exchange(vhost, name) for name in names}
    )
    policies = management.policies(vhost)
    found: dict[str, Source | None] = {}

    def source(name: str) -> Source | None:
        if name not in found and len(found) < MAX_SOURCES:
            try:
                row = management.queue_arguments(vhost, name)
                found[name] = _source(row, policies, management.queue_bindings(vhost, name))
            except (NotOnBroker, Refused):  # it does not exist, or its name is invalid in a URL
                found[name] = None
        return found.get(name)

    username = queue.pulse_user.username if queue.pulse_user else ""
    return dead_letters.surroundings(queue.name, username, bindings, upstream, source)


def _source(row: Mapping[str, Any], policies: list[BrokerPolicy], bindings: list[Binding]) -> Source | None:
    """Return a queue that dead-letters, by an argument or else by policy, or None if it does not."""
    arguments = row.get("arguments")
    given = (
        {str(key).removeprefix("x-"): value for key, value in arguments.items()} if isinstance(arguments, dict) else {}
    )
    applied = {**effective(policies, row["name"], str(row.get("type", CLASSIC))), **given}
    exchange, key = applied.get(DEAD_LETTER_EXCHANGE), applied.get(DEAD_LETTER_KEY)
    if not isinstance(exchange, str):
        return None
    return Source(exchange, key if isinstance(key, str) else None, bindings)
