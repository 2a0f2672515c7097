"""What comes from the environment, by yapw's and the handbook's names."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import pika

from guardian_consumers.errors import SettingsError
from guardian_consumers.names import Names
from guardian_consumers.outcomes import Outcome, Policy
from guardian_consumers.priority import BROKER, source_for
from guardian_consumers.rate import WAIT, SharedTokenBucket, TokenBucket
from guardian_consumers.source import Limiter, Source

YOUNG_PREFETCH, GROWN_PREFETCH = 1, 20
"""The prefetch of a consumer that is young, and of one that has grown."""

QUEUE_TYPES = ("classic", "quorum")


@dataclass(frozen=True)
class Settings:
    """Where the broker is, what things are called there, and how a consumer behaves unless told otherwise.

    ``url`` is amqp(s)://user:password@host:port/vhost. ``exchange`` is ``{project}_{environment}``. ``pulse_user``: the
    account, where it may only use names of its own.
    ``prefetch`` is "young" (1), "grown" (20), "growing" (1 until ``grows_after`` messages in a row were handled without
    an error, 20 from then on), or a number.
    ``threads``: how many callbacks run at once; None: as many as the prefetch, and with ranges of priority half as many
    again, and two at least.
    ``priorities``: the ranges of priority that are kept apart, as "0-4,5-9"; "broker": by the broker's own priorities;
    empty: all are alike. ``priority_ageing``: with ranges, after how many seconds of waiting a message counts as one
    level higher; None: never.
    ``time_limit``: for how many seconds a callback may have a message that it hasn't acknowledged; 0: for ever.
    ``grace``: how many seconds callbacks have to finish when the consumer is to stop; None: as long as they take.
    ``hold_seconds``: for how long messages may wait here for a limiter before they are given back to the broker.
    ``publish_timeout``: how many seconds the broker has to confirm a message.
    ``rate``: how many messages are worked on in a second; None: as many as can be. ``burst``: how many at once after a
    pause; None: those of a tenth of a second. ``rate_redis_url``: where processes share the rate; None: each has its
    own. ``rate_name``: those who give the same share one rate; None: those of one queue do. ``rate_away``: "wait" while
    Redis is away, or how many a second each process works on by itself.
    Raises SettingsError for what can't be used.
    """

    url: str = field(repr=False)
    exchange: str
    pulse_user: str | None = None
    prefetch: str | int = "growing"
    grows_after: int = 100
    threads: int | None = None
    policy: Policy = Policy()  # noqa: RUF009  # it is frozen
    queue_type: str = "classic"
    priorities: str = ""
    priority_ageing: float | None = None
    time_limit: float = 1500
    grace: float | None = None
    hold_seconds: float = 5
    publish_timeout: float = 30
    rate: float | None = None
    burst: float | None = None
    rate_redis_url: str | None = field(default=None, repr=False)
    rate_name: str | None = None
    rate_away: str | float = WAIT

    def __post_init__(self) -> None:
        _ = self.names, self.parameters
        if not (self.prefetch in ("young", "grown", "growing") or (isinstance(self.prefetch, int) and self.prefetch)):
            raise SettingsError("RABBIT_PREFETCH is young, grown, growing or a number from 1")
        if isinstance(self.prefetch, int) and not 1 <= self.prefetch <= 65535:
            raise SettingsError("RABBIT_PREFETCH: a number is from 1 to 65535")
        if self.threads is not None and self.threads < 1:
            raise SettingsError("RABBIT_THREADS is a number from 1")
        if self.queue_type not in QUEUE_TYPES:
            raise SettingsError(f"RABBIT_QUEUE_TYPE is one of {', '.join(QUEUE_TYPES)}")
        self.source("any")
        if self.priorities == BROKER and self.queue_type != "classic":
            raise SettingsError("RABBIT_PRIORITIES: the broker's own priorities need RABBIT_QUEUE_TYPE=classic")
        if not all(0.001 <= delay <= 7 * 86400 for delay in self.policy.delays):
            raise SettingsError("RABBIT_RETRY_DELAYS are seconds, from 0.001 to 604800 (a week), with commas")
        if self.rate is None and (self.burst is not None or self.rate_redis_url):
            raise SettingsError("RABBIT_RATE isn't set, and something else about the rate is")
        if self.rate_redis_url is None and (self.rate_name or self.rate_away != WAIT):
            raise SettingsError("RABBIT_RATE_NAME and RABBIT_RATE_AWAY are for a rate shared by RABBIT_RATE_REDIS_URL")
        self.limiter("any")

    @property
    def names(self) -> Names:
        """The names of exchanges and queues."""
        return Names(self.exchange, self.pulse_user)

    @property
    def parameters(self) -> "pika.ConnectionParameters":
        """What pika connects with. It has the password in it: never log it."""
        try:
            parts = urlsplit(self.url)
            if parts.scheme not in ("amqp", "amqps") or not parts.hostname:
                raise ValueError("no AMQP URL")
            parameters = pika.URLParameters(self.url)
        except Exception:
            # The error's text may have the password in it, and so may its cause.
            raise SettingsError("RABBIT_URL can't be used; write amqp://user:password@host:5672/vhost") from None
        if parts.path in ("", "/"):
            parameters.virtual_host = "/"
        parameters.connection_attempts = 1  # the link tries again by itself
        return parameters

    def source(self, key: str, routing_keys: Sequence[str] = ()) -> Source:
        """Return the logical queue of this key: a plain one, or with priorities."""
        return source_for(key, routing_keys, self.priorities, self.priority_ageing)

    @property
    def young_prefetch(self) -> int:
        """The prefetch with which the consumer starts."""
        return {"young": YOUNG_PREFETCH, "growing": YOUNG_PREFETCH, "grown": GROWN_PREFETCH}.get(
            str(self.prefetch)
        ) or int(self.prefetch)

    @property
    def grown_prefetch(self) -> int:
        """The largest prefetch that it comes to."""
        return {"young": YOUNG_PREFETCH, "growing": GROWN_PREFETCH, "grown": GROWN_PREFETCH}.get(
            str(self.prefetch)
        ) or int(self.prefetch)

    def limiter(self, name: str) -> Limiter | None:
        """Return a new limiter for the ``rate``, by this name where none is set; None: there is no limit."""
        if self.rate is None:
            return None
        if self.rate_redis_url is None:
            return TokenBucket(self.rate, self.burst)
        return SharedTokenBucket(
            self.rate, self.burst, name=self.rate_name or name, redis_url=self.rate_redis_url, away=self.rate_away
        )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Settings":
        """Read RABBIT_URL and RABBIT_EXCHANGE_NAME, and what there is of the others, each RABBIT_ and the field's name
        in capitals; of the policy, RABBIT_ON_ERROR and RABBIT_RETRY_DELAYS.

        Raises SettingsError, which names the variable.
        """
        named = {name: value.strip() for name, value in environment.items() if name.startswith("RABBIT_")}
        given = {name.removeprefix("RABBIT_"): value for name, value in named.items() if value}
        for name in ("URL", "EXCHANGE_NAME"):
            if name not in given:
                raise SettingsError(f"RABBIT_{name} isn't set")
        prefetch = given.get("PREFETCH", cls.prefetch)
        if isinstance(prefetch, str) and prefetch.isdecimal():
            prefetch = int(prefetch)
        try:
            default = Outcome(given.get("ON_ERROR", Policy.default.value))
        except ValueError:
            raise SettingsError(f"RABBIT_ON_ERROR is one of {', '.join(ON_ERROR)}") from None
        if default is Outcome.DONE:
            raise SettingsError(f"RABBIT_ON_ERROR is one of {', '.join(ON_ERROR)}")
        delays = given.get("RETRY_DELAYS")
        return cls(
            url=given["URL"],
            exchange=given["EXCHANGE_NAME"],
            pulse_user=given.get("PULSE_USER"),
            prefetch=prefetch,
            grows_after=int(_number(given, "GROWS_AFTER", cls.grows_after)),
            threads=int(_number(given, "THREADS", 0)) if "THREADS" in given else None,
            policy=Policy(default, delays=Policy.delays if delays is None else _numbers(delays)),
            queue_type=given.get("QUEUE_TYPE", cls.queue_type),
            priorities=given.get("PRIORITIES", cls.priorities),
            priority_ageing=_number(given, "PRIORITY_AGEING", 0) if "PRIORITY_AGEING" in given else None,
            time_limit=_number(given, "TIME_LIMIT", cls.time_limit),
            grace=_number(given, "GRACE", 0) if "GRACE" in given else None,
            hold_seconds=_number(given, "HOLD_SECONDS", cls.hold_seconds),
            publish_timeout=_number(given, "PUBLISH_TIMEOUT", cls.publish_timeout),
            rate=_number(given, "RATE", 0) if "RATE" in given else None,
            burst=_number(given, "BURST", 0) if "BURST" in given else None,
            rate_redis_url=given.get("RATE_REDIS_URL"),
            rate_name=given.get("RATE_NAME"),
            rate_away=given.get("RATE_AWAY", cls.rate_away),
        )


ON_ERROR = [outcome.value for outcome in Outcome if outcome is not Outcome.DONE]
"""What may be chosen for an exception that nobody foresaw."""


def _number(given: Mapping[str, str], name: str, default: float) -> float:
    try:
        value = float(given.get(name, default))
    except ValueError:
        value = -1
    if not 0 <= value < float("inf"):
        raise SettingsError(f"RABBIT_{name} is a number from 0")
    return value


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise SettingsError("RABBIT_RETRY_DELAYS are seconds with commas between them, like 10,60,600") from None
