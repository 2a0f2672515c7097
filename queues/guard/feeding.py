"""The exchanges that feed a queue: its bindings, and those of their exchanges, back to the first ones."""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from rabbit.entities import Binding

MAX_EXCHANGES = 20
"""The bindings to up to this many exchanges are followed from one queue."""

BindingsTo = Callable[[Collection[str]], Mapping[str, list[Binding]]]
"""Returns the bindings to each of these exchanges. Unknown ones may be missing."""


def upstream(bindings: Iterable[Binding], bindings_to: BindingsTo, most: int = MAX_EXCHANGES) -> list[Binding]:
    """Return the bindings between exchanges that lead to these bindings, nearest first.

    Each exchange is followed once, so that a cycle ends, and up to ``most`` of them. ``bindings_to`` is called once for
    each step away.
    """
    found: dict[str, list[Binding]] = {}
    nearest = list(bindings)
    while nearest:
        # Nothing can be bound to the default exchange, whose name is empty.
        sources = dict.fromkeys(one.source for one in nearest if one.source and one.source not in found)
        names = list(sources)[: most - len(found)]
        answered = bindings_to(names) if names else {}
        found.update((name, answered.get(name, [])) for name in names)
        nearest = [one for name in names for one in found[name]]
    return [one for leading in found.values() for one in leading]


def described(bindings: Iterable[Binding]) -> list[dict[str, str]]:
    """Return bindings as texts, with ``to`` for the exchange that an exchange is bound to.

    The binding to the default exchange, which every queue has, is left out.
    """
    return [_described(binding) for binding in bindings if binding.source]


def _described(binding: Binding) -> dict[str, str]:
    texts = {"exchange": binding.source, "routing_key": binding.routing_key}
    if binding.arguments:
        in_order = sorted(binding.arguments.items(), key=lambda one: (one[0] != "x-match", one[0]))
        texts["arguments"] = ", ".join(f"{name}: {_as_text(value)}" for name, value in in_order)
    if binding.destination_type == "exchange":
        texts["to"] = binding.destination
    return texts


def _as_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
