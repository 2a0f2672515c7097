"""The queues that a change to Pulse users or owners deletes. The package ``queues`` sets the provider."""

from collections.abc import Sequence
from typing import Protocol

from accounts.models import Owner, PulseUser
from core.confirmation import ConfirmableChange, Effect


class QueueEffects(Protocol):
    """What a change deletes, by the lengths as last listed."""

    def of_thresholds(self, changed: Sequence[tuple[PulseUser, PulseUser]]) -> Effect:
        """Return the queues that new thresholds let the next pass delete. Each Pulse user is given before and after."""

    def of_removal(self, pulse_users: Sequence[PulseUser]) -> Effect:
        """Return the queues that are deleted with these Pulse users. A Pulse user that is being removed has none."""

    def of_agents(self, owner: Owner) -> Effect:
        """Return the registered queues that the next clean-up deletes if this owner has no valid token."""


_providers: list[QueueEffects] = []


def register(provider: QueueEffects) -> None:
    """Set the provider."""
    _providers[:] = [provider]


def provider() -> QueueEffects:
    """Return the provider."""
    return _providers[0]


def removal_of(pulse_users: Sequence[PulseUser], by: Owner, confirm: str = "") -> ConfirmableChange:
    return ConfirmableChange(by, "remove Pulse users", pulse_users, {}, confirm)
