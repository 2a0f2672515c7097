"""Passes with the nodes' Prometheus metrics, alternating with the listing that they save. Runs in `child.py`."""

import time
from typing import Any

from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from accounts.models import PulseUser
from core import broker
from queues.guard.monitor import FIGURES_LAG
from queues.models import Watch
from tools.benchmarks.load import LOAD_TIMEOUT_SECONDS, user_name
from tools.benchmarks.passes import CHANGE_EVERY, WARM_UPS, GuardedVhosts, counted_requests, timed


class PrometheusVhost(GuardedVhosts):
    """A vhost guarded by metrics, which lag: each pass waits for them first."""

    def change(self) -> None:
        """Publish as ``GuardedVhosts`` does, wait until the endpoint shows it, and defer the list."""
        super().change()
        deadline = time.monotonic() + LOAD_TIMEOUT_SECONDS
        while self._shown() != self._messages:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the endpoint shows {self._shown()} messages, not {self._messages}")
            time.sleep(0.2)
        self.defer_list()

    def scrape(self) -> float:
        """Return the seconds of fetching the metrics only, with a pass's client."""
        return timed(self._shown)[0]

    def defer_list(self) -> None:
        """Make the next pass use metrics, newer than the list."""
        Watch.objects.update(exact_at=timezone.now() - 2 * FIGURES_LAG)

    def _shown(self) -> int:
        scrape = broker.prometheus().scrape(self.management, self.vhosts)
        return sum(depth.ready for depth in scrape.depths.values() if depth is not None)


def measure(vhost: str, queues: int, rounds: int) -> dict[str, Any]:
    """Return the seconds of passes with a tenth of the queues changed, of the metrics only, and of the listing.

    They alternate, in the order of measurement. ``statements`` and ``requests`` are counts of a pass.
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
