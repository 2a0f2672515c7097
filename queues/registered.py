"""Which queues are registered, as the package that registers them says. This one does not know who does."""

from collections.abc import Collection, Mapping
from typing import Protocol

from rabbit.names import QueueName


class RegisteredQueues(Protocol):
    """What a pass has to know of registered queues, and what it reports back in its transaction."""

    def vhosts(self) -> Mapping[str, int]:
        """Return the vhosts of agents that the broker has, and the id of each one's owner. One statement."""

    def queues(self) -> Mapping[QueueName, int]:
        """Return the registered queues, and the id of each one's owner, whatever their number in three statements."""

    def pending_removals(self) -> Collection[QueueName]:
        """Return the queues that are about to be removed, so that a pass does not miss them. One statement."""

    def record_missing(self, names: Collection[QueueName]) -> None:
        """Record that the broker has these registered queues no longer. They are declared again."""

    def record_returned(self, names: Collection[QueueName]) -> None:
        """Record that the broker has these registered queues again."""


_providers: list[RegisteredQueues] = []


def register(provider: RegisteredQueues) -> None:
    """Have this provider answer which queues are registered."""
    _providers[:] = [provider]


def provider() -> RegisteredQueues:
    """Return who knows which queues are registered."""
    return _providers[0]
