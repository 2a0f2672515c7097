"""The provider of registered queues. The package that registers queues sets it, as this one must not import it."""

from collections.abc import Collection, Mapping
from typing import Protocol

from core.leases import HeldLease
from rabbit.management import Management
from rabbit.names import QueueName


class RegisteredQueues(Protocol):
    """Registered queues, as a pass reads them and reports changes in its transaction."""

    def vhosts(self) -> Mapping[str, int]:
        """Return the agents' vhosts on the broker, each with the id of its owner, in one statement."""

    def queues(self) -> Mapping[QueueName, int]:
        """Return the registered queues, each with the id of its owner, in three statements."""

    def pending_removals(self) -> Collection[QueueName]:
        """Return the queues that Guardian is about to delete, in one statement. A pass expects them to be missing."""

    def record_missing(self, names: Collection[QueueName]) -> None:
        """Record that these registered queues are missing on the broker, so that they are declared again."""

    def declare_missing(self, names: Collection[QueueName], management: Management, lease: HeldLease) -> list[str]:
        """Declare these registered queues, and others that are not ready yet, again. Return the errors."""


_providers: list[RegisteredQueues] = []


def register(provider: RegisteredQueues) -> None:
    """Set the provider."""
    _providers[:] = [provider]


def provider() -> RegisteredQueues:
    """Return the provider."""
    return _providers[0]
