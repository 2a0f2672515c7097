"""What this package needs to know of queues. The package ``queues`` above sets these functions (``receivers.py``)."""

from collections.abc import Callable, Collection, Mapping, Sequence

from accounts.models import Owner, PulseUser
from core.confirmation import ConfirmableChange, Effect
from rabbit.amqp import Session

of_thresholds: Callable[[Sequence[tuple[PulseUser, PulseUser]]], Effect]
"""Return the queues that new thresholds let the next pass delete. Each Pulse user is given before and after."""

of_removal: Callable[[Sequence[PulseUser]], Effect]
"""Return the queues that are deleted with these Pulse users. A Pulse user that is being removed has none."""

of_agents: Callable[[Owner], Effect]
"""Return the registered queues that the next clean-up deletes if this owner has no valid token."""

count: Callable[[Collection[int]], Mapping[int, int]]
"""Return the number of queues by the id of the Pulse user, in one statement."""

delete_queue: Callable[[Session, str, PulseUser, Callable[[], None]], object]
"""Archive and delete a queue of a Pulse user, given its name. The last argument renews the caller's lock."""


def removal_of(pulse_users: Sequence[PulseUser], by: Owner | None, confirm: str = "") -> ConfirmableChange:
    return ConfirmableChange(by, "remove Pulse users", pulse_users, {}, confirm)
