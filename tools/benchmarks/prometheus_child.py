"""Passes by the nodes' Prometheus figures, each beside the listing that they save. Runs in `child.py`."""

import time
from typing import Any

from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from accounts.models import PulseUser
from core import broker
from queues.models import Watch
from queues.monitor import FIGURES_LAG
from tools.benchmarks.load import LOAD_TIMEOUT_SECONDS, user_name
from tools.benchmarks.passes import CHANGE_EVERY, WARM_UPS, GuardedVhosts, counted_requests, timed


class PrometheusVhost(GuardedVhosts):
    """A vhost under guard by figures that lag: they are waited for before each pass."""

    def change(self) -> None:
        """Publish as ``GuardedVhosts`` does, and wait until the endpoint shows it. No list is due then."""
        super().change()
        deadline = time.monotonic() + LOAD_TIMEOUT_SECONDS
        while self._shown() != self._messages:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the endpoint shows {self._shown()} messages, not {self._messages}")
            time.sleep(0.2)
        self.defer_list()

    def scrape(self) -> float:
        """Return the seconds of the figures alone, with the client that a pass reads them with."""
        return timed(self._shown)[0]

    def defer_list(self) -> None:
        """Have the next pass be one by figures, and these newer than the list."""
        Watch.objects.update(exact_at=timezone.now() - 2 * FIGURES_LAG)

    def _shown(self) -> int:
        scrape = broker.prometheus().scrape(self.management, self.vhosts)
        return sum(depth.ready for depth in scrape.depths.values() if depth is not None)


def measure(vhost: str, queues: int, rounds: int) -> dict[str, Any]:
    """Return the seconds of passes with one queue in ten changed, of the figures alone, and of the listing.

    All by turns, in the order in which they were measured. ``statements`` and ``requests`` are numbers of a pass.
    """
    users = dict.fromkeys(user_name(number) for number in range(queues))
    PulseUser.objects.bulk_create(PulseUser(username=name, ready=True) for name in users)
    guarded = PrometheusVhost([vhost], queues)
    guarded.run_pass(new=queues)
    changing = queues // CHANGE_EVERY
    passes, listings, scrapes = [], [], []
    for number in range(WARM_UPS + rounds):
        guarded.change()
        listing = guarded.list() if number % 2 else 0.0
        guarded.defer_list()
        seconds, _ = guarded.run_pass(changed=changing)
        listing = listing or guarded.list()
        if number >= WARM_UPS:
            passes.append(seconds)
            listings.append(listing)
            scrapes.append(guarded.scrape())
    guarded.change()
    with CaptureQueriesContext(connection) as captured, counted_requests() as sent:
        guarded.run_pass(changed=changing)
    return {
        "pass": passes,
        "listing": listings,
        "scrape": scrapes,
        "statements": len(captured),
        "requests": len(sent),
    }
