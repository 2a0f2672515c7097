"""Steady passes, alternating with their listing requests. Runs in ``tools.benchmarks.child``."""

import time
from typing import Any

from accounts.models import PulseUser
from tools.benchmarks.load import MAX_QUEUES_PER_VHOST, REST_SECONDS, user_name
from tools.benchmarks.passes import CHANGE_EVERY, GuardedVhosts


def measure(vhost: str, vhosts: list[str], queues: int, rounds: int) -> dict[str, Any]:
    """Return the seconds of the first pass, and of alternating passes with a tenth of the queues changed and listings.

    ``own`` is the time of each pass without its list. ``vhost`` has the queues of Pulse users; ``vhosts`` are all. With
    many queues, each measurement begins after ``REST_SECONDS`` without requests. This makes the growth smaller than for
    a guard with an interval of five seconds; docs/speed.md has the difference.
    """
    users = dict.fromkeys(user_name(number) for number in range(queues))
    PulseUser.objects.bulk_create(PulseUser(username=name, ready=True) for name in users)
    guarded = GuardedVhosts(vhosts, queues)
    first, _ = guarded.run_pass(new=queues)
    changing = queues // CHANGE_EVERY
    rest = REST_SECONDS if queues >= MAX_QUEUES_PER_VHOST else 0
    times: dict[str, list[float]] = {"pass": [], "listing": [], "own": []}
    for number in range(1 + rounds):
        guarded.change()
        for what in ("listing", "pass") if number % 2 else ("pass", "listing"):
            time.sleep(rest)
            if what == "listing":
                found = {"listing": guarded.list()}
            else:
                seconds, report = guarded.run_pass(changed=changing)
                found = {"pass": seconds, "own": seconds - report.listing_seconds}
            if number:  # the first warms up
                for name, seconds in found.items():
                    times[name].append(seconds)
    return {"first": first, **times}
