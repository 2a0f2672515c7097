"""Which exchanges may be watched: those to which a binding changes nothing for others. Pure."""

from collections.abc import Collection, Iterable, Mapping

from rabbit.entities import Binding, Exchange
from rabbit.policies import EXCHANGE, BrokerPolicy, effective

TYPES = ("direct", "topic", "fanout", "headers")

ALTERNATE = "alternate-exchange"
FEDERATED = ("federation-upstream", "federation-upstream-set")

DEFAULT_EXCHANGE = "The default exchange can't be watched: RabbitMQ allows no binding to it."


def why_not_watched(
    name: str, exchanges: Mapping[str, Exchange], bindings: Collection[Binding], policies: Collection[BrokerPolicy]
) -> str:
    """Return why an exchange can't be watched, or an empty text. The other arguments are of its whole vhost."""
    if not name:
        return DEFAULT_EXCHANGE
    watched = exchanges.get(name)
    if watched is not None and watched.auto_delete and not any(one.source == name for one in bindings):
        return (
            f"The exchange {name} can't be watched: it is auto-delete and nothing is bound to it, so the broker would "
            "delete it when the watch ends. Bind a queue to it first."
        )
    for leading in _leading_to(name, bindings):
        # A deleted exchange loses its bindings, so all but the first exist, unless a list is older than the other.
        exchange = exchanges.get(leading)
        if exchange is not None and (reason := _reason(exchange, policies)):
            which = "it" if leading == name else f"{leading}, which leads to it,"
            return f"The exchange {name} can't be watched: {which} {reason}."
    return ""


def _leading_to(name: str, bindings: Iterable[Binding]) -> Iterable[str]:
    """Return an exchange and all that lead to it, each once."""
    sources: dict[str, list[str]] = {}
    for one in bindings:
        if one.destination_type == "exchange":
            sources.setdefault(one.destination, []).append(one.source)
    found, nearest = {name: None}, [name]
    while nearest:
        nearest = [source for one in nearest for source in sources.get(one, ()) if source not in found]
        found.update(dict.fromkeys(nearest))
    return found


def _reason(exchange: Exchange, policies: Collection[BrokerPolicy]) -> str:
    policy = effective(policies, exchange.name, EXCHANGE)
    if exchange.type not in TYPES:
        return f"has the type {exchange.type}, in which a binding changes where other messages go"
    if ALTERNATE in exchange.arguments or ALTERNATE in policy:
        return "has an alternate exchange, which would no longer get the messages that the watch matches"
    if any(key in policy for key in FEDERATED):
        return "is federated, so a binding fetches messages from another broker"
    return ""
