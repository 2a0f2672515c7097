"""No faster than so many a second: a token bucket, for one process or, through Redis, for many.

A bucket gains ``rate`` tokens a second and holds at most ``burst``; each message takes one. So in no stretch of ``t``
seconds are more than ``rate * t + burst`` taken. That is kept to whatever happens: a bucket begins empty, since nobody
knows what was taken a moment before, by a process that ended or from a Redis that lost it. What is in doubt makes it
slower, and never faster.
"""

import logging
import math
import random
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from guardian_consumers.errors import SettingsError

logger = logging.getLogger(__name__)

BURST_SECONDS = 0.1
"""The burst is the rate's tokens of so long, where it isn't given: no ten seconds then see more than 1 % above it."""

PREFETCH_SECONDS = 1.0
"""Messages for so long are held here, beside those in hand: enough to hide the way to the broker, and few that another
could work on."""

MIN_SLEEP_SECONDS = 0.005
"""For how long a taker sleeps at least, where the burst lets it find the tokens of that time afterwards."""

MAX_TOKEN_AGE_SECONDS = 0.1
"""For how long, at most, a token may be on its way from the bucket to its use: a thread that has just taken one may
have to wait for the processor, and a process takes several together from Redis. A bucket holds fewer than the burst, by
what comes in during that time: used late or not, they keep to rate and burst."""

MIN_TOKEN_AGE_SECONDS = 0.005
"""With a burst so small that they could be kept for less than this, the bucket holds all of it, and they are taken from
Redis one by one."""

REPLY_SECONDS = 1.0
"""How long Redis has to answer."""

MIN_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.5, 10.0
"""Seconds until Redis is tried again. They double each time; what is waited is a half to all of it, at random."""

WARNING_INTERVAL_SECONDS = 60.0
"""How often it is said that Redis is away."""

WAIT = "wait"
"""What happens while Redis is away: nothing is taken."""

IDLE_EXPIRY_SECONDS = 7 * 86400
MAX_EXPIRY_SECONDS = 400 * 86400
"""A bucket in Redis expires so long after it would be full, and at the latest so long after it was last used."""

MAX_RATE = 1_000_000.0
MAX_BURST = 1_000_000_000.0


class Bucket:
    """The tokens, and no clock: the caller passes the time, in seconds of a monotonic clock. Not thread-safe."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self.rate = rate
        self.burst = burst
        self._level = 0.0
        self._at = now

    def take(self, now: float) -> bool:
        """Take a token, if there is one."""
        self._level = min(self.burst, self._level + (now - self._at) * self.rate)
        self._at = now
        if self._level < 1:
            return False
        self._level -= 1
        return True

    def give_back(self) -> None:
        """Put back a token that was taken and not used."""
        self._level = min(self.burst, self._level + 1)

    @property
    def wait_seconds(self) -> float:
        """In how many seconds after the last `take` there is a token."""
        return max(0.0, (1 - self._level) / self.rate)


class TokenBucket:
    """A limiter for one process; threads and consumers of it may share one.

    ``rate`` is in tokens a second. ``burst`` is how many may be taken at once after a pause; None: as many as come in a
    tenth of a second, and at least one. ``clock`` and ``sleep`` are as `time.monotonic` and `time.sleep`.
    Raises SettingsError for what can't be used.
    """

    def __init__(
        self,
        rate: float,
        burst: float | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.rate, self.burst = validate_rate(rate, burst)
        self._clock = clock
        self._sleep = sleep
        self._min_sleep = min(MIN_SLEEP_SECONDS, (self.burst - 1) / self.rate / 4)
        self._lock = threading.Lock()
        self.max_token_age = max_token_age(self.rate, self.burst)
        self._bucket = Bucket(self.rate, self.burst - self.rate * self.max_token_age, clock())

    def prefetch(self, most: int) -> int:
        """Return how many messages are worth holding here beside those in hand, from 1 to ``most``."""
        return prefetch(self.rate, most)

    def take(self, timeout: float) -> float:
        """Take a token, and wait for at most ``timeout`` seconds until there is one.

        Return 0 where it was taken, and else in how many seconds there may be one.
        """
        until = self._clock() + timeout
        while True:
            with self._lock:
                now = self._clock()
                if self._bucket.take(now):
                    return 0.0
                seconds = self._bucket.wait_seconds
            if now >= until:
                return seconds
            self._sleep(_sleep_seconds(max(seconds, self._min_sleep), until - now))

    def give_back(self) -> None:
        """Put back a token that was taken and not used."""
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
"""`Bucket`, in Redis, in one step and by Redis's own clock. If that is set back, the level stays.

A Redis that was started again may have lost the last second, or is another one that lagged behind: by its run id the
bucket knows, and begins anew, empty."""


class SharedTokenBucket:
    """A limiter for all processes, on all machines, that give the same ``name``, ``rate`` and ``burst``.

    ``rate`` and ``burst`` are as `TokenBucket`'s. ``redis_url`` is redis://…, rediss://… or unix://…: one server, or a
    name that leads to the one which may be written to.

    Asking Redis for each token would cost each process a good part of a core at thousands a second. So it takes several
    together, as many as it used lately, keeps them for ``life`` seconds at most, and puts the others back.

    While Redis is away: "wait" takes nothing, and says so in the log once a minute; a number lets each process take so
    many a second by itself. Redis is tried again after half a second at first and 10 s at most.
    Raises SettingsError for what can't be used; nothing is connected to yet.
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
        self.rate, self.burst = validate_rate(rate, burst)
        self.name = name
        if not name:
            raise SettingsError("a rate that is shared needs a name (RABBIT_RATE_NAME)")
        self._redis, self._errors, self._where = _redis_client(redis_url)
        self._script = self._redis.register_script(SCRIPT)
        self.max_token_age = max_token_age(self.rate, self.burst)
        self._capacity = self.burst - self.rate * self.max_token_age
        self._max_batch = max(1, int(self.rate * self.max_token_age / 2))
        self._min_sleep = min(MIN_SLEEP_SECONDS, (self._capacity - 1) / self.rate / 4)
        full = self._capacity / self.rate
        self._expires = int(min(full + IDLE_EXPIRY_SECONDS, MAX_EXPIRY_SECONDS))
        self._lock = threading.Lock()
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
        """Whether Redis did not answer the last time."""
        return self._away_since is not None

    def prefetch(self, most: int) -> int:
        """Return how many messages are worth holding here beside those in hand, from 1 to ``most``."""
        return prefetch(self.rate, most)

    def take(self, timeout: float) -> float:
        """Take a token, and wait for at most ``timeout`` seconds, and for Redis's answer, until there is one.

        Return 0 where it was taken, and else in how many seconds there may be one.
        """
        until = time.monotonic() + timeout
        while True:
            with self._lock:
                seconds = self._take()
            now = time.monotonic()
            if seconds <= 0 or now >= until:
                return seconds
            time.sleep(_sleep_seconds(max(seconds, self._min_sleep), until - now))

    def give_back(self) -> None:
        """Put back a token that was taken and not used: for this process, or in a while for all."""
        with self._lock:
            self._tokens += 1

    def _take(self) -> float:
        """Take a token that is here, or ask for some; return 0, or in how many seconds to ask again."""
        now = time.monotonic()
        if self._tokens and now < self._fetched_at + self.max_token_age:
            self._tokens -= 1
            return 0.0
        if now >= self._next_fetch_at and self._fetch(now):
            return 0.0
        if self._fallback is not None:
            return 0.0 if self._fallback.take(time.monotonic()) else max(0.000001, self._fallback.wait_seconds)
        return max(0.000001, self._next_fetch_at - time.monotonic())

    def _fetch(self, now: float) -> bool:
        """Take tokens out of Redis; return whether there was one, and else set when to ask again."""
        if self._tokens:  # those whose time is over: as many as were used of that lump are enough
            self._batch = max(1, self._fetched - self._tokens)
            self._unused, self._tokens = self._unused + self._tokens, 0
        elif self._fetched and now < self._fetched_at + self.max_token_age / 2:
            self._batch = min(self._max_batch, self._batch * 2)
        unused, self._unused = self._unused, 0  # what becomes of them in a call that fails, nobody knows
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
            # It is empty now. To ask again for every single token would be to ask all the time.
            self._next_fetch_at = time.monotonic() + (max(1, self._batch / 2) - float(left)) / self.rate
        if not taken:
            return False
        self._fetched, self._tokens, self._fetched_at = taken, taken - 1, now
        return True

    def _on_error(self, error: Exception) -> None:
        now = time.monotonic()
        self._redis.connection_pool.disconnect()  # by a new connection it may find another server
        if self._away_since is None:
            self._away_since, self._last_warning_at = now, -math.inf
            if self._fallback_rate:
                burst = max(1.0, self.burst / self.rate * self._fallback_rate)
                self._fallback = Bucket(self._fallback_rate, burst, now)
        if now - self._last_warning_at >= WARNING_INTERVAL_SECONDS:
            self._last_warning_at = now
            what = (
                f"this process takes {self._fallback_rate:g} a second by itself" if self._fallback else "messages wait"
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
    """Return rate and burst, of which the second may be left out. Raises SettingsError for what can't be used."""
    if not 0 < rate <= MAX_RATE:
        raise SettingsError(f"a rate (RABBIT_RATE) is a number of messages a second, above 0 and up to {MAX_RATE:.0f}")
    if burst is None:
        burst = max(1.0, rate * BURST_SECONDS)
    if not 1 <= burst <= MAX_BURST:
        raise SettingsError(f"a burst (RABBIT_BURST) is a number of messages, from 1 to {MAX_BURST:.0f}")
    return float(rate), float(burst)


def max_token_age(rate: float, burst: float) -> float:
    """Return for how many seconds a token may be on its way to its use; 0: the burst is too small for that."""
    seconds = min(MAX_TOKEN_AGE_SECONDS, burst / 4 / rate, (burst - 1) / rate)
    return seconds if seconds >= MIN_TOKEN_AGE_SECONDS else 0.0


def prefetch(rate: float, most: int) -> int:
    """Return how many messages are worth holding at this rate beside those in hand, from 1 to ``most``."""
    return max(1, min(most, math.ceil(rate * PREFETCH_SECONDS)))


def _sleep_seconds(seconds: float, left: float) -> float:
    return max(0.000001, min(seconds, left))  # so that no rounding makes a loop of no time at all


def _parse_fallback_rate(away: str | float) -> float:
    if away == WAIT:
        return 0.0
    try:
        rate = float(away)
    except ValueError:
        rate = math.nan
    if not 0 < rate <= MAX_RATE:
        raise SettingsError("while Redis is away (RABBIT_RATE_AWAY): wait, or a number of messages a second above 0")
    return rate


def _redis_client(url: str) -> tuple[Any, tuple[type[Exception], ...], str]:
    """Return a client, the roots of its errors, and where the server is, for people: without the password."""
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
            retry=Retry(NoBackoff(), 0),  # a call that may have taken tokens isn't made twice
        )
    except ValueError:
        # The error's text may have the password in it.
        raise SettingsError("RABBIT_RATE_REDIS_URL can't be used; write redis://:password@host:6379/0") from None
    # The last is a host's name that can't be one: found out when it is connected to.
    return client, (redis.RedisError, OSError, UnicodeError), where
