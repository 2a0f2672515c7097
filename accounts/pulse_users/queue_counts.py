"""The number of queues of Pulse users. The package ``queues`` registers the function that counts them."""

from collections.abc import Callable, Collection, Mapping

Count = Callable[[Collection[int]], Mapping[int, int]]
"""Returns the number of queues by the id of the Pulse user, in one statement."""

_counts: list[Count] = []


def register(count: Count) -> None:
    """Register the function that counts the queues."""
    _counts[:] = [count]


def of(pulse_users: Collection[int]) -> Mapping[int, int]:
    """Return the number of queues of each of these Pulse users, by id."""
    return _counts[0](pulse_users)
