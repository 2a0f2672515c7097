"""Declare a consumer's exchange, queues, delay and parking queues, and bindings."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from guardian_consumers import _retries as retries
from guardian_consumers._link import Link, Steps
from guardian_consumers._publisher import declare_exchange
from guardian_consumers._settings import Settings
from guardian_consumers._source import Binding, Exchange, PhysicalQueue, Routed, Source
from guardian_consumers.names import delay_queue, parking_queue, return_key


def declare(link: Link, channel: Any, settings: Settings, source: Source, queues: Sequence[PhysicalQueue]) -> Steps:
    names = settings.names
    link.current_step = f"the exchange {names.exchange}"
    yield declare_exchange(channel, names.exchange)
    for queue in queues:
        for name, arguments, routing_keys in _with_delays(settings, queue):
            link.current_step = f"the queue {name}"
            yield partial(channel.queue_declare, name, durable=True, arguments=arguments)
            for key in routing_keys:
                yield partial(channel.queue_bind, name, names.exchange, key)
    if isinstance(source, Routed):
        for route in source.routes(names):
            link.current_step, step = _routing(channel, route)
            yield step


def _with_delays(settings: Settings, queue: PhysicalQueue) -> Iterator[tuple[str, dict[str, Any], Sequence[str]]]:
    """Return the name, arguments and routing keys of a queue, of its parking queue and of its delay queues."""
    kind, names, name = settings.queue_type, settings.names, queue.name
    parking = parking_queue(name)
    yield parking, {"x-queue-type": kind}, [parking]
    arguments = {**retries.work_queue_arguments(kind, names, name), **queue.arguments}
    yield name, arguments, [*queue.routing_keys, return_key(name)]
    for delay in settings.policy.delays:
        delaying = delay_queue(name, delay)
        yield delaying, retries.delay_queue_arguments(kind, names, name, delay), [delaying]


def _routing(channel: Any, route: Exchange | Binding) -> tuple[str, Callable[..., Any]]:
    """Return a description and the step that adds an exchange, or adds or removes a binding."""
    if isinstance(route, Exchange):
        step = partial(channel.exchange_declare, route.name, route.kind, durable=True, arguments=route.arguments)
        return f"the exchange {route.name}", step
    kind = "exchange" if route.to_exchange else "queue"
    method = getattr(channel, f"{kind}_{'bind' if route.present else 'unbind'}")
    step = partial(method, route.to, route.exchange, route.key, arguments=route.arguments)
    return f"the binding of {route.to} to {route.exchange}", step
