"""Settings, read from environment variables with the names of yapw and its handbook."""

import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any
from urllib.parse import urlsplit

import pika

from guardian_consumers._errors import SettingsError
from guardian_consumers._outcomes import Outcome, Policy
from guardian_consumers._priority import BROKER, source_for
from guardian_consumers._rate import WAIT, SharedTokenBucket, TokenBucket
from guardian_consumers._source import Limiter, Source
from guardian_consumers.names import Names

logger = logging.getLogger(__name__)

OF_KUBERNETES = re.compile(r"RABBIT_(SERVICE_(HOST|PORT\w*)|PORT(_\d+_\w+)?)")
"""Variables that Kubernetes sets if a service is called rabbit."""

PREFETCHES = {"young": (1, 1), "growing": (1, 20), "grown": (20, 20)}
"""The first and the last prefetch."""

QUEUE_TYPES = ("classic", "quorum")


@dataclass(frozen=True)
class Settings:
    """Settings of the broker, names and consumers. Raises SettingsError for invalid ones.

    - ``url``: amqp(s)://user:password@host:port/vhost; or several, separated by commas, of nodes of one cluster.
    - ``exchange``: any name; by convention ``{project}_{environment}``.
    - ``pulse_user``: the Pulse user, if it may only use its own names.
    - ``prefetch``: "young" (1), "grown" (20), "growing" (1 until ``grows_after`` messages in a row succeed, then 20) or
      a number.
    - ``threads``: concurrent callbacks. The default is the prefetch; with ranges of priorities one and a half times the
      prefetch, and at least two.
    - ``priorities``: ranges with their own queues, such as "0-4,5-9"; "broker" for the broker's own; empty for none.
    - ``priority_ageing``: with ranges, the seconds after which a waiting message rises one level, or None for never.
    - ``time_limit``: the seconds that a callback may take before it returns or acknowledges, or 0 for no limit.
    - ``grace``: the seconds for callbacks to finish at shutdown, or None for no limit.
    - ``hold_seconds``: how long messages may wait in memory for a limiter before they are requeued.
    - ``publish_timeout``: the seconds to wait for a confirm.
    - ``rate``: messages per second, or None for no limit.
    - ``burst``: messages at once after a pause, or None for those of a tenth of a second.
    - ``rate_redis_url``: the Redis through which processes share the rate, or None if each has its own.
    - ``rate_name``: processes with the same name share a rate. The default is the queue's name.
    - ``rate_away``: while Redis is unreachable, "wait" or the rate of each process on its own.
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
        _ = self.names, self.addresses
        if self.prefetch not in (range(1, 65536) if isinstance(self.prefetch, int) else PREFETCHES):
            raise SettingsError("RABBIT_PREFETCH must be young, grown, growing or a number from 1 to 65535")
        if self.threads is not None and self.threads < 1:
            raise SettingsError("RABBIT_THREADS must be a number from 1")
        if self.queue_type not in QUEUE_TYPES:
            raise SettingsError(f"RABBIT_QUEUE_TYPE must be one of {', '.join(QUEUE_TYPES)}")
        self.source("any")
        if self.priorities == BROKER and self.queue_type != "classic":
            raise SettingsError("RABBIT_PRIORITIES: the broker's own priorities need RABBIT_QUEUE_TYPE=classic")
        if not all(0.001 <= delay <= 7 * 86400 for delay in self.policy.delays):
            raise SettingsError(
                "RABBIT_RETRY_DELAYS must be comma-separated seconds, each from 0.001 to 604800 (a week)"
            )
        if self.rate is None and (self.burst is not None or self.rate_redis_url):
            raise SettingsError("RABBIT_RATE isn't set, but RABBIT_BURST or RABBIT_RATE_REDIS_URL needs it")
        if self.rate_redis_url is None and (self.rate_name or self.rate_away != WAIT):
            raise SettingsError("RABBIT_RATE_NAME and RABBIT_RATE_AWAY need RABBIT_RATE_REDIS_URL")
        self.limiter("any")

    @property
    def names(self) -> Names:
        return Names(self.exchange, self.pulse_user)

    @property
    def addresses(self) -> "list[pika.ConnectionParameters]":
        """pika's parameters for each address. They contain the password: never log them."""
        found = [_parameters(url) for url in re.split(r"\s*,\s*(?=amqps?://)", self.url)]
        if len({one.virtual_host for one in found}) > 1:
            raise SettingsError("RABBIT_URL names two vhosts; write the same vhost in each address")
        return found

    def source(self, key: str, routing_keys: Sequence[str] = ()) -> Source:
        return source_for(key, routing_keys, self.priorities, self.priority_ageing)

    @property
    def young_prefetch(self) -> int:
        """The initial prefetch."""
        return PREFETCHES[self.prefetch][0] if isinstance(self.prefetch, str) else self.prefetch

    @property
    def grown_prefetch(self) -> int:
        """The final prefetch."""
        return PREFETCHES[self.prefetch][1] if isinstance(self.prefetch, str) else self.prefetch

    def limiter(self, name: str) -> Limiter | None:
        """Return a new limiter for the ``rate``, or None without a rate. ``name`` is the default for ``rate_name``."""
        if self.rate is None:
            return None
        if self.rate_redis_url is None:
            return TokenBucket(self.rate, self.burst)
        return SharedTokenBucket(
            self.rate, self.burst, name=self.rate_name or name, redis_url=self.rate_redis_url, away=self.rate_away
        )

    @staticmethod
    def variables() -> frozenset[str]:
        """Return the names of the environment variables that `from_environment` reads."""
        return VARIABLES

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Settings":
        """Read the settings from environment variables: RABBIT_ and the field's name in capitals.

        RABBIT_URL and RABBIT_EXCHANGE_NAME are required. RABBIT_ON_ERROR and RABBIT_RETRY_DELAYS set the policy.
        Raises SettingsError, which names the variable. An unknown name that begins with RABBIT_ is logged.
        """
        named = {name: value.strip() for name, value in environment.items() if name.startswith("RABBIT_")}
        for name in sorted(named.keys() - VARIABLES):
            if not OF_KUBERNETES.fullmatch(name):
                nearest = get_close_matches(name, VARIABLES, n=1, cutoff=0.8)
                hint = f" Did you mean {nearest[0]}?" if nearest else ""
                logger.warning("%s is not a setting, so it has no effect.%s", name, hint)
        given = {name.removeprefix("RABBIT_"): value for name, value in named.items() if value}
        for name in ("URL", "EXCHANGE_NAME"):
            if name not in given:
                raise SettingsError(f"RABBIT_{name} isn't set")
        read: dict[str, Any] = {name: given[name.upper()] for name in _READ_FIELDS if name.upper() in given}
        for name in read.keys() & _NUMBERS:
            read[name] = _number(name, read[name])
        for name in read.keys() & {"grows_after", "threads"}:
            read[name] = int(read[name])
        if read.get("prefetch", "").isdecimal():
            read["prefetch"] = int(read["prefetch"])
        return cls(exchange=given["EXCHANGE_NAME"], policy=_policy(given), **read)


_READ_FIELDS = [one.name for one in fields(Settings) if one.name not in ("exchange", "policy")]
_NUMBERS = {
    "grows_after", "threads", "priority_ageing", "time_limit", "grace", "hold_seconds", "publish_timeout", "rate",
    "burst",
}  # fmt: skip
VARIABLES = frozenset(f"RABBIT_{name.upper()}" for name in [*_READ_FIELDS, "exchange_name", "on_error", "retry_delays"])
"""The environment variables that `Settings.from_environment` reads."""


def _parameters(url: str) -> "pika.ConnectionParameters":
    try:
        parts = urlsplit(url)
        if parts.scheme not in ("amqp", "amqps") or not parts.hostname:
            raise ValueError("no AMQP URL")
        parameters = pika.URLParameters(url)
    except Exception:
        # The error's text and cause may contain the password.
        raise SettingsError("RABBIT_URL is invalid; write amqp://user:password@host:5672/vhost") from None
    if parts.path in ("", "/"):
        parameters.virtual_host = "/"
    parameters.connection_attempts = 1  # Link retries
    return parameters


ON_ERROR = [outcome.value for outcome in Outcome if outcome is not Outcome.DONE]
"""The choices for RABBIT_ON_ERROR, the outcome of exceptions by default."""


def _policy(given: Mapping[str, str]) -> Policy:
    default, delays = given.get("ON_ERROR", Policy.default.value), given.get("RETRY_DELAYS")
    if default not in ON_ERROR:
        raise SettingsError(f"RABBIT_ON_ERROR must be one of {', '.join(ON_ERROR)}")
    return Policy(Outcome(default), delays=Policy.delays if delays is None else _numbers(delays))


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1
    if not 0 <= value < float("inf"):
        raise SettingsError(f"RABBIT_{name.upper()} must be a number from 0")
    return value


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise SettingsError("RABBIT_RETRY_DELAYS must be comma-separated seconds, such as 10,60,600") from None
