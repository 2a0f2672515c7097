"""Steady passes, each beside the listing requests that it makes, and no more. Runs in ``benchmarks.child``."""

from typing import Any

from accounts.models import PulseUser
from benchmarks.load import user_name
from benchmarks.passes import ONE_IN, Guarded


def measure(vhost: str, vhosts: list[str], queues: int, rounds: int) -> dict[str, Any]:
    """Return the seconds of the first pass, of passes with one queue in ten changed, and of listings, by turns.

    ``vhost`` is the one whose queues are Pulse users'; ``vhosts`` are all.
    """
    users = dict.fromkeys(user_name(number) for number in range(queues))
    PulseUser.objects.bulk_create(PulseUser(username=name, ready=True) for name in users)
    guarded = Guarded(vhosts, queues)
    first, _ = guarded.look(new=queues)
    changing = queues // ONE_IN
    passes, listings = [], []
    for number in range(1 + rounds):
        guarded.change()
        listing = guarded.list() if number % 2 else 0.0
        seconds, _ = guarded.look(changed=changing)
        listing = listing or guarded.list()
        if number:  # the first warms up
            passes.append(seconds)
            listings.append(listing)
    return {"first": first, "pass": passes, "listing": listings}
