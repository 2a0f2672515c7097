"""Token buckets that limit the rate of messages, for one process or, through Redis, for many.

A bucket gains ``rate`` tokens a second and has at most ``burst``; each message takes one. So in any ``t`` seconds at
most ``rate * t + burst`` tokens are taken. Failures never break this limit: a bucket starts empty, since an earlier
process, or a Redis that lost its data, may just have used all tokens.
"""

import logging
import math
import random
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from guardian_consumers._errors import SettingsError

logger = logging.getLogger(__name__)

BURST_SECONDS = 0.1
"""The default burst is the tokens of this time, so that no ten seconds exceed the rate by more than 1 %."""

PREFETCH_SECONDS = 1.0
"""The prefetch in seconds of work: enough to hide the network latency, yet few messages that others could handle."""

MIN_SLEEP_SECONDS = 0.005
"""The shortest sleep of a waiting thread, if the burst can store the tokens of this time."""

SHORTEST_SECONDS = 0.000001
"""Never 0, so that rounding can't cause a busy loop."""

MAX_TOKEN_AGE_SECONDS = 0.1
"""The longest time between taking a token and using it: threads wait for the processor, and processes take batches from
Redis. The bucket's capacity is the burst minus the tokens of this time, so that late use keeps to rate and burst."""

MIN_TOKEN_AGE_SECONDS = 0.005
"""If the burst only permits a shorter age than this, the capacity is the burst, and tokens are fetched one by one."""

REPLY_SECONDS = 1.0
"""Timeout of requests to Redis."""

MIN_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.5, 10.0
"""The backoff of retries doubles with each failure. A random half of it is jitter."""

WARNING_INTERVAL_SECONDS = 60.0
"""The interval of warnings while Redis is unreachable."""

WAIT = "wait"
"""The setting to take nothing while Redis is unreachable."""

IDLE_EXPIRY_SECONDS = 7 * 86400
MAX_EXPIRY_SECONDS = 400 * 86400
"""A bucket in Redis expires the first after it would be full, but at most the second after its last use."""

MAX_RATE = 1_000_000.0
MAX_BURST = 1_000_000_000.0


class Bucket:
    """A token bucket without a clock: the caller passes the time in monotonic seconds. Not thread-safe."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self.rate = rate
        self.burst = burst
        self._level = 0.0
        self._at = now

    def take(self, now: float) -> bool:
        self._level = min(self.burst, self._level + (now - self._at) * self.rate)
        self._at = now
        if self._level < 1:
            return False
        self._level -= 1
        return True

    def give_back(self) -> None:
        self._level = min(self.burst, self._level + 1)

    @property
    def wait_seconds(self) -> float:
        return max(SHORTEST_SECONDS, (1 - self._level) / self.rate)


class _TokenLimiter:
    """What both limiters share: the rate and its limits, and waiting for a token. ``_take`` returns as `take` does."""

    def __init__(
        self, rate: float, burst: float | None, clock: Callable[[], float], sleep: Callable[[float], None]
    ) -> None:
        self.rate, self.burst = validate_rate(rate, burst)
        self.max_token_age = max_token_age(self.rate, self.burst)
        self._capacity = self.burst - self.rate * self.max_token_age
        self._min_sleep = min(MIN_SLEEP_SECONDS, (self._capacity - 1) / self.rate / 4)
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()

    def prefetch(self, most: int) -> int:
        return max(1, min(most, math.ceil(self.rate * PREFETCH_SECONDS)))

    def take(self, timeout: float) -> float:
        """Take a token, waiting up to ``timeout`` seconds, and for Redis's answer if it is shared.

        Return 0 if a token was taken, otherwise the seconds until there may be one.
        """
        until = self._clock() + timeout
        while True:
            with self._lock:
                seconds = self._take()
            now = self._clock()
            if seconds <= 0 or now >= until:
                return seconds
            self._sleep(max(SHORTEST_SECONDS, min(max(seconds, self._min_sleep), until - now)))

    def _take(self) -> float:
        raise NotImplementedError


class TokenBucket(_TokenLimiter):
    """A limiter for one process, whose threads and consumers may share it.

    ``rate`` is in tokens per second. ``burst`` is the number of tokens available at once after a pause, by default
    those of a tenth of a second, but at least one. ``clock`` and ``sleep`` replace `time.monotonic` and `time.sleep`.
    Raises SettingsError for invalid values.
    """

    def __init__(
        self,
        rate: float,
        burst: float | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(rate, burst, clock, sleep)
        self._bucket = Bucket(self.rate, self._capacity, clock())

    def _take(self) -> float:
        return 0.0 if self._bucket.take(self._clock()) else self._bucket.wait_seconds

    def give_back(self) -> None:
        with self._lock:
            self._bucket.give_back()


SCRIPT = """
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local rate, most, wanted, unused = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local server = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)') or ''
local was = redis.call('HMGET', KEYS[1], 'level', 'at', 'server')
local level = 0
if was[3] == server then
  level = math.min(most, was[1] + math.max(0, now - was[2]) * rate / 1000000 + unused)
end
local taken = math.min(wanted, math.floor(level))
local left = string.format('%.17g', level - taken)
redis.call('HSET', KEYS[1], 'level', left, 'at', string.format('%.0f', now), 'server', server)
redis.call('EXPIRE', KEYS[1], ARGV[5])
return {taken, left}
"""
"""`Bucket` as an atomic script that uses Redis's clock. If the clock is set back, the level stays.

A changed run id means that Redis was restarted or failed over, and may have lost recent writes. Then the bucket
restarts empty."""


class SharedTokenBucket(_TokenLimiter):
    """A limiter shared by all processes, on all machines, with the same ``name``, ``rate`` and ``burst``.

    ``rate`` and ``burst`` are as in `TokenBucket`. ``redis_url`` is redis://…, rediss://… or unix://… and must lead to
    a writable server.

    A request to Redis for each token would cost much of a core at thousands per second. So the limiter fetches batches
    sized by the recent use, keeps tokens for at most ``max_token_age`` seconds, and returns unused ones.

    ``away`` applies while Redis is unreachable: "wait" takes nothing and logs a warning every minute; a number is the
    rate of each process on its own. Retries begin after half a second and back off to 10 s.
    Raises SettingsError for invalid values. It doesn't connect yet.
    """

    def __init__(
        self,
        rate: float,
        burst: float | None = None,
        *,
        name: str,
        redis_url: str,
        away: str | float = WAIT,
    ) -> None:
        super().__init__(rate, burst, time.monotonic, time.sleep)
        self.name = name
        if not name:
            raise SettingsError("a shared rate needs a name (RABBIT_RATE_NAME)")
        self._redis, self._errors, self._where = _redis_client(redis_url)
        self._script = self._redis.register_script(SCRIPT)
        self._max_batch = max(1, int(self.rate * self.max_token_age / 2))
        full = self._capacity / self.rate
        self._expires = int(min(full + IDLE_EXPIRY_SECONDS, MAX_EXPIRY_SECONDS))
        self._batch = 1
        self._tokens = self._fetched = 0
        self._fetched_at = 0.0
        self._next_fetch_at = -math.inf
        self._unused = 0
        self._failures = 0
        self._away_since: float | None = None
        self._last_warning_at = 0.0
        self._fallback_rate = _parse_fallback_rate(away)
        self._fallback: Bucket | None = None

    @property
    def away(self) -> bool:
        """Whether the last request to Redis failed."""
        return self._away_since is not None

    def give_back(self) -> None:
        """Return an unused token, to this process first and later to all."""
        with self._lock:
            self._tokens += 1

    def _take(self) -> float:
        """Take a local token or fetch some. Return 0, or the seconds until the next attempt."""
        now = time.monotonic()
        if self._tokens and now < self._fetched_at + self.max_token_age:
            self._tokens -= 1
            return 0.0
        if now >= self._next_fetch_at and self._fetch(now):
            return 0.0
        if self._fallback is not None:
            return 0.0 if self._fallback.take(time.monotonic()) else self._fallback.wait_seconds
        return max(SHORTEST_SECONDS, self._next_fetch_at - time.monotonic())

    def _fetch(self, now: float) -> bool:
        """Fetch tokens from Redis, and return whether there was one; otherwise set the time of the next attempt."""
        if self._tokens:  # they are too old: shrink the batch to the number of used ones
            self._batch = max(1, self._fetched - self._tokens)
            self._unused, self._tokens = self._unused + self._tokens, 0
        elif self._fetched and now < self._fetched_at + self.max_token_age / 2:
            self._batch = min(self._max_batch, self._batch * 2)
        unused, self._unused = self._unused, 0  # a failed call may or may not have returned them
        self._fetched = 0
        try:
            key = f"consumers:rate:{self.name}"
            taken, left = self._script([key], [self.rate, self._capacity, self._batch, unused, self._expires])
        except self._errors as error:
            self._on_error(error)
            return False
        if self._away_since is not None:
            self._on_recovery()
        if taken < self._batch:
            # The bucket is empty. Wait until there may be half a batch, instead of asking for each token.
            self._next_fetch_at = time.monotonic() + (max(1, self._batch / 2) - float(left)) / self.rate
        if not taken:
            return False
        self._fetched, self._tokens, self._fetched_at = taken, taken - 1, now
        return True

    def _on_error(self, error: Exception) -> None:
        now = time.monotonic()
        self._redis.connection_pool.disconnect()  # a new connection may find another server
        if self._away_since is None:
            self._away_since, self._last_warning_at = now, -math.inf
            if self._fallback_rate:
                burst = max(1.0, self.burst / self.rate * self._fallback_rate)
                self._fallback = Bucket(self._fallback_rate, burst, now)
        if now - self._last_warning_at >= WARNING_INTERVAL_SECONDS:
            self._last_warning_at = now
            what = (
                f"this process is limited to {self._fallback_rate:g}/s on its own"
                if self._fallback
                else "messages wait"
            )
            logger.warning("rate %s: no token from Redis at %s (%s): %s", self.name, self._where, error, what)
        delay = min(MIN_BACKOFF_SECONDS * 2**self._failures, MAX_BACKOFF_SECONDS) * random.uniform(0.5, 1)  # noqa: S311
        self._failures = min(self._failures + 1, 16)
        self._next_fetch_at = now + delay

    def _on_recovery(self) -> None:
        seconds = time.monotonic() - (self._away_since or 0)
        logger.info("rate %s: Redis at %s answers again, after %.0f s", self.name, self._where, seconds)
        self._away_since = self._fallback = None
        self._failures = 0


def validate_rate(rate: float, burst: float | None) -> tuple[float, float]:
    """Return rate and burst with the default filled in. Raises SettingsError for invalid values."""
    if not 0 < rate <= MAX_RATE:
        raise SettingsError(f"a rate (RABBIT_RATE) must be above 0 and up to {MAX_RATE:.0f} messages per second")
    if burst is None:
        burst = max(1.0, rate * BURST_SECONDS)
    if not 1 <= burst <= MAX_BURST:
        raise SettingsError(f"a burst (RABBIT_BURST) must be from 1 to {MAX_BURST:.0f} messages")
    return float(rate), float(burst)


def max_token_age(rate: float, burst: float) -> float:
    """Return the seconds within which a token must be used, or 0 if the burst is too small to allow any."""
    seconds = min(MAX_TOKEN_AGE_SECONDS, burst / 4 / rate, (burst - 1) / rate)
    return seconds if seconds >= MIN_TOKEN_AGE_SECONDS else 0.0


def _parse_fallback_rate(away: str | float) -> float:
    if away == WAIT:
        return 0.0
    try:
        rate = float(away)
    except ValueError:
        rate = math.nan
    if not 0 < rate <= MAX_RATE:
        raise SettingsError("RABBIT_RATE_AWAY must be wait, or a number of messages per second above 0")
    return rate


def _redis_client(url: str) -> tuple[Any, tuple[type[Exception], ...], str]:
    """Return a client, the base classes of its errors, and the server's address without the password."""
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ModuleNotFoundError:
        raise SettingsError("RABBIT_RATE_REDIS_URL needs redis: install guardian-consumers[redis]") from None
    try:
        parts = urlsplit(url)
        where = f"{parts.hostname}:{parts.port or 6379}" if parts.hostname else parts.path
        client = redis.Redis.from_url(
            url,
            socket_timeout=REPLY_SECONDS,
            socket_connect_timeout=REPLY_SECONDS,
            retry=Retry(NoBackoff(), 0),  # a repeated call could take tokens twice
        )
    except ValueError:
        # The error's text may contain the password.
        raise SettingsError("RABBIT_RATE_REDIS_URL is invalid; write redis://:password@host:6379/0") from None
    # UnicodeError: connecting to an invalid host name.
    return client, (redis.RedisError, OSError, UnicodeError), where
