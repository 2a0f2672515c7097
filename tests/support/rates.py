"""How exactly token buckets keep a rate."""

import time
from multiprocessing import get_context

from guardian_consumers import SharedTokenBucket


def taken(processes, seconds, **bucket):
    """Take tokens of one shared bucket in some processes.

    Return the sorted monotonic times of all tokens, and each process's processor seconds per second.
    """
    with get_context("spawn").Pool(processes) as pool:
        found = pool.starmap(_take, [(seconds, bucket)] * processes, chunksize=1)
    return sorted(moment for times, _ in found for moment in times), [processor for _, processor in found]


def _take(seconds, bucket):
    limiter = SharedTokenBucket(**bucket)
    begun, until = time.process_time(), time.monotonic() + seconds
    times = []
    while time.monotonic() < until:
        if limiter.take(0.5) <= 0:
            times.append(time.monotonic())
    return times, (time.process_time() - begun) / seconds


def rate_deviation(times, rate, seconds):
    """Return the relative deviation from the rate in ``seconds`` after a second of warming up."""
    begin = times[0] + 1
    count = sum(begin <= moment < begin + seconds for moment in times)
    return abs(count / (rate * seconds) - 1)


def max_excess(times, rate):
    """Return the largest excess over the rate in any interval."""
    lowest, most = float("inf"), 0.0
    for number, moment in enumerate(times):
        behind = number - rate * moment
        lowest = min(lowest, behind)
        most = max(most, behind + 1 - lowest)
    return most
