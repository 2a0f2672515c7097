"""The names of exchanges and queues, and the routing keys: yapw's conventions, and those of a Pulse user.

yapw builds the same names inside its clients, which connect when they are made; here they are needed without.
"""

import re
from dataclasses import dataclass

from guardian_consumers.errors import SettingsError

MAX_NAME_BYTES = 255
"""Bytes: what AMQP allows for a name and for a routing key."""

_PULSE_USER = re.compile(r"[A-Za-z][A-Za-z0-9._-]*")
_PULSE_USER_BYTES = 100


@dataclass(frozen=True)
class Names:
    """The names for one exchange. ``project`` is ``{project}_{environment}``, as RABBIT_EXCHANGE_NAME says it.

    ``pulse_user``: the account, which may only use names of its own; None: any name will do.
    Raises SettingsError for a name that can't be used.
    """

    project: str
    pulse_user: str | None = None

    def __post_init__(self) -> None:
        if not self.project:
            raise SettingsError("RABBIT_EXCHANGE_NAME is empty; write {project}_{environment}, like shop_production")
        user = self.pulse_user
        if user is not None and not (_PULSE_USER.fullmatch(user) and len(user) <= _PULSE_USER_BYTES):
            raise SettingsError(
                f"RABBIT_PULSE_USER {user!r} is no Pulse user's name: it starts with a letter, has letters, digits, "
                f"'.', '_' and '-' after it, and at most {_PULSE_USER_BYTES} bytes"
            )
        _check_length(self.exchange)

    @property
    def exchange(self) -> str:
        """The exchange: ``shop_production``, or ``exchange/NAME/shop_production`` of a Pulse user."""
        return self.project if self.pulse_user is None else f"exchange/{self.pulse_user}/{self.project}"

    def routing_key(self, key: str) -> str:
        """Return the routing key as it is on the broker: yapw's, which is prefixed by the whole exchange's name."""
        return _check_length(f"{self.exchange}_{key}")

    def queue(self, key: str) -> str:
        """Return the queue's name: ``shop_production_orders``, or ``queue/NAME/shop_production_orders``."""
        name = f"{self.project}_{key}"
        return _check_length(name if self.pulse_user is None else f"queue/{self.pulse_user}/{name}")


def parking_queue(queue: str) -> str:
    """Return the name of the queue in which this queue's messages end that can't be handled; its routing key too."""
    return _check_length(f"{queue}.parked")


def delay_queue(queue: str, seconds: float) -> str:
    """Return the name of the queue in which this queue's messages wait for so long; its routing key too."""
    milliseconds = round(seconds * 1000)
    wait = f"{milliseconds}ms" if milliseconds % 1000 else f"{milliseconds // 1000}s"
    return _check_length(f"{queue}.retry.{wait}")


def return_key(queue: str) -> str:
    """Return the routing key by which messages come back to this queue, and to no other that reads the same key."""
    return _check_length(f"{queue}.again")


def level_queue(queue: str, level: int) -> str:
    """Return the name of the queue for a level of priority of this one; the lowest level is this one itself."""
    return _check_length(f"{queue}.level{level}") if level else queue


def priority_exchange(names: Names, key: str) -> str:
    """Return the name of the headers exchange through which messages of a logical queue go to their level."""
    return _check_length(f"{names.routing_key(key)}.priorities")


def priority_queue(queue: str) -> str:
    """Return the name of the queue with the broker's own priorities that stands for this one."""
    return _check_length(f"{queue}.priority")


def _check_length(name: str) -> str:
    if len(name.encode()) > MAX_NAME_BYTES:
        raise SettingsError(f"the name {name[:60]!r}… has more than {MAX_NAME_BYTES} bytes, which AMQP does not allow")
    return name
