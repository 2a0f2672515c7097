"""What the broker reports of a queue's messages and consumers, as stored with its time. Pure."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

from rabbit.entities import QueueFlow
from rabbit.policies import LengthLimit

RECENT_SECONDS = 30
WINDOW_SECONDS = 300


class Holder(NamedTuple):
    """A consumer of a queue. ``prefetch`` 0 is unlimited. ``name`` is that of its connection, or its address.

    ``unacknowledged`` is None if the broker does not report it, or if its channel has another consumer: then these
    messages may be another queue's. ``is_active`` is false for one that waits for a single active consumer to end.
    """

    name: str
    user: str
    prefetch: int
    unacknowledged: int | None
    is_active: bool = True


class Seen(NamedTuple):
    """The last consumer of a queue that Guardian saw, and when."""

    name: str
    user: str
    at: datetime


class Activity(NamedTuple):
    """The broker's figures of a queue; None: not reported.

    ``recent`` and ``window`` are the flow over ``RECENT_SECONDS`` and ``WINDOW_SECONDS``. ``limit`` is the broker's own
    limit of the queue's length, ``size`` the bytes of its messages.
    """

    at: datetime
    consumers: int | None = None
    ready: int | None = None
    unacknowledged: int | None = None
    size: int | None = None
    holders: tuple[Holder, ...] = ()
    recent: QueueFlow | None = None
    window: QueueFlow | None = None
    limit: LengthLimit | None = None
    last_consumer: Seen | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the activity as ``Queue.activity`` stores it."""
        values = {name: value for name, value in self._asdict().items() if value not in (None, ())}
        last = self.last_consumer and {**self.last_consumer._asdict(), "at": self.last_consumer.at.isoformat()}
        return {**values, "at": self.at.isoformat(), **({"last_consumer": last} if last else {})}

    def after(self, before: "Activity | None") -> "Activity":
        """Return the activity with the last consumer: one of its own, or the one that was stored before."""
        if self.holders:
            return self._replace(last_consumer=Seen(self.holders[0].name, self.holders[0].user, self.at))
        return self._replace(last_consumer=before.last_consumer if before else None)


def stored_activity(stored: Mapping[str, Any] | None) -> Activity | None:
    """Return the activity that ``Activity.as_json`` stored."""
    if not stored:
        return None
    last = stored.get("last_consumer")
    return Activity(
        **{
            **stored,
            "at": datetime.fromisoformat(stored["at"]),
            "holders": tuple(Holder(*one) for one in stored.get("holders", ())),
            "recent": QueueFlow(*stored["recent"]) if "recent" in stored else None,
            "window": QueueFlow(*stored["window"]) if "window" in stored else None,
            "limit": LengthLimit(*stored["limit"]) if "limit" in stored else None,
            "last_consumer": Seen(**{**last, "at": datetime.fromisoformat(last["at"])}) if last else None,
        }
    )
