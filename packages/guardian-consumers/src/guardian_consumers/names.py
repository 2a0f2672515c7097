"""Names of exchanges and queues, and routing keys, by the conventions of yapw and of Pulse users.

yapw computes the same names, but only in clients, which connect immediately.
"""

import re
from dataclasses import dataclass

from guardian_consumers._errors import SettingsError

__all__ = ["delay_queue", "level_queue", "parking_queue", "priority_queue", "return_key"]

MAX_NAME_BYTES = 255
"""AMQP's limit for names and routing keys."""

_PULSE_USER = re.compile(r"[A-Za-z][A-Za-z0-9._-]*")
_PULSE_USER_BYTES = 100


@dataclass(frozen=True)
class Names:
    """The names for one exchange. ``project`` is ``{project}_{environment}``, the value of RABBIT_EXCHANGE_NAME.

    ``pulse_user``: the Pulse user whose names to use; None for names without a prefix.
    Raises SettingsError for an invalid name.
    """

    project: str
    pulse_user: str | None = None

    def __post_init__(self) -> None:
        if not self.project:
            raise SettingsError("RABBIT_EXCHANGE_NAME is empty; write {project}_{environment}, such as shop_production")
        user = self.pulse_user
        if user is not None and not (_PULSE_USER.fullmatch(user) and len(user) <= _PULSE_USER_BYTES):
            raise SettingsError(
                f"RABBIT_PULSE_USER {user!r} is not a valid Pulse user: it must start with a letter, followed by "
                f"letters, digits, '.', '_' and '-', with at most {_PULSE_USER_BYTES} bytes"
            )
        _check_length(self.exchange)

    @property
    def exchange(self) -> str:
        """The exchange: ``shop_production``, or ``exchange/NAME/shop_production`` for a Pulse user."""
        return self.project if self.pulse_user is None else f"exchange/{self.pulse_user}/{self.project}"

    def routing_key(self, key: str) -> str:
        """Return the complete routing key, prefixed with the exchange's name as in yapw."""
        return _check_length(f"{self.exchange}_{key}")

    def queue(self, key: str) -> str:
        """Return the name of a queue: ``shop_production_orders``, or ``queue/NAME/shop_production_orders``."""
        name = f"{self.project}_{key}"
        return _check_length(name if self.pulse_user is None else f"queue/{self.pulse_user}/{name}")


def parking_queue(queue: str) -> str:
    """Return the name and routing key of a queue's parking queue, for messages that can't be handled."""
    return _check_length(f"{queue}.parked")


def delay_queue(queue: str, seconds: float) -> str:
    """Return the name and routing key of a queue's delay queue for this delay."""
    milliseconds = round(seconds * 1000)
    wait = f"{milliseconds}ms" if milliseconds % 1000 else f"{milliseconds // 1000}s"
    return _check_length(f"{queue}.retry.{wait}")


def return_key(queue: str) -> str:
    """Return the routing key with which delayed messages return to this queue only."""
    return _check_length(f"{queue}.again")


def level_queue(queue: str, level: int) -> str:
    """Return the name of a queue's physical queue for a level of priority. The lowest level is the queue itself."""
    return _check_length(f"{queue}.level{level}") if level else queue


def priority_exchange(names: Names, key: str) -> str:
    """Return the name of the headers exchange that routes a logical queue's messages to their levels."""
    return _check_length(f"{names.routing_key(key)}.priorities")


def moved_exchange(names: Names, key: str) -> str:
    """Return the name of the exchange that returns delayed messages of former queues to the current ones."""
    return _check_length(f"{names.routing_key(key)}.moved")


def unmoved_exchange(names: Names, key: str) -> str:
    """Return the name of its alternate exchange, which returns the other delayed messages to the former queues."""
    return _check_length(f"{names.routing_key(key)}.unmoved")


def priority_queue(queue: str) -> str:
    """Return the name of the physical queue with the broker's own priorities."""
    return _check_length(f"{queue}.priority")


def _check_length(name: str) -> str:
    if len(name.encode()) > MAX_NAME_BYTES:
        raise SettingsError(f"the name {name[:60]!r}… has more than {MAX_NAME_BYTES} bytes, which AMQP does not allow")
    return name
