"""Passes of the monitor, compared to the listing requests that they send."""

import time

from django.db import connection
from django.test import override_settings
from django.utils import timezone

from accounts.models import PulseUser
from core import broker
from queues.guard.monitor import FIGURES_LAG, run_pass
from queues.models import Queue, QueueSample, Watch
from rabbit import snapshot
from rabbit.snapshot import COLUMNS, TOTALS
from tools.benchmarks import load
from tools.benchmarks.figures import Figure, in_turn, peak_megabytes, seconds, timed
from tools.benchmarks.running import size
from tools.processes import happens

QUEUES = size(10_000, 200)
ROUNDS = size(7, 2)

GROWTH = [size(queues, queues // 50) for queues in (1_000, 5_000, 10_000, 20_000, 50_000)]
GROWTH_ROUNDS = size(5, 2)

QUEUES_PER_VHOST = size(10_000, 200)
"""RabbitMQ 3.10 lists larger vhosts slowly."""

CHANGE_EVERY = 10
"""A tenth of the queues change between two passes."""

REST_SECONDS = size(7, 0)
"""A list wakes the process of every queue. About five seconds later the broker hibernates them in a burst: 2.7 s of
work for 50,000 queues. An immediate second list takes about 20 % longer with 50,000 queues, and 15 % less with 10,000.
"""

NEW_QUEUES_PER_LIST = 1_500
"""New queues for each list that lets the broker settle. After declaring 30,000 queues, lists of all 50,000 took twice
as long, 4 to 7 s, for about two minutes. After three minutes of rest, the first two or three lists still did."""

MAX_RATIO = 1.35
MAX_RATIO_NEW = 2.0
MAX_RATIO_PROMETHEUS = 0.5
MAX_GROWTH = 5.5
MAX_MEGABYTES, MAX_MEGABYTES_GROWN = 250, 500


class Guarded:
    """Guarded vhosts, whose queues grow on demand. Those of the first one belong to Pulse users."""

    def __init__(self, *vhosts: str) -> None:
        self.vhosts = vhosts
        self.queues = 0
        self.rest_seconds = 0
        self.own_seconds: list[float] = []
        self.messages = 0
        self._turn = 0

    def grow(self, queues: int) -> None:
        """Declare queues until there are so many, and store them in a first pass."""
        new = queues - self.queues
        print(f"declaring {new:,} queues", flush=True)
        users = {load.user_name(number) for number in range(self.queues, min(queues, QUEUES_PER_VHOST))}
        PulseUser.objects.bulk_create([PulseUser(username=name, ready=True) for name in users], ignore_conflicts=True)
        for start in range(self.queues, queues, QUEUES_PER_VHOST // 2):
            numbers = range(start, min(start + QUEUES_PER_VHOST // 2, queues))
            load.declare_queues(self.vhosts[start // QUEUES_PER_VHOST], numbers)
        self.queues = queues
        load.wait_for_messages(*self.vhosts, queues=queues, messages=self.messages)
        self.run_pass(new=new)

    def change(self) -> None:
        self._turn += 1
        for number, vhost in enumerate(self.vhosts):
            first, end = number * QUEUES_PER_VHOST, min((number + 1) * QUEUES_PER_VHOST, self.queues)
            names = [load.queue_name(one) for one in range(first + self._turn % CHANGE_EVERY, end, CHANGE_EVERY)]
            load.publish_one_each(vhost, names)
            self.messages += len(names)
        load.wait_for_messages(*self.vhosts, queues=self.queues, messages=self.messages)

    def run_pass(self, new: int = 0, changed: int = 0) -> float:
        """Return the seconds of a pass. Check its report."""
        time.sleep(self.rest_seconds)
        took, report = timed(run_pass)
        found = (report.queues, report.new, report.changed, report.gone, report.unknown, report.warned)
        if report.another_pass or report.errors or found != (self.queues, new, changed, 0, 0, 0):
            raise AssertionError(f"unexpected report of a pass: {report}")
        self.own_seconds.append(took - report.listing_seconds)
        return took

    def changed_pass(self) -> float:
        return self.run_pass(changed=self.queues // CHANGE_EVERY)

    def new_pass(self) -> float:
        QueueSample.objects.all()._raw_delete("default")
        Queue.objects.all()._raw_delete("default")
        return self.run_pass(new=self.queues)

    def list(self) -> float:
        """Return the seconds of a pass's listing requests, sent in the same way."""
        params = {**TOTALS, "columns": COLUMNS}
        time.sleep(self.rest_seconds)
        return seconds(lambda: list(snapshot.iter_lists(broker.management(), self.vhosts, params, {})))


def passes() -> list[Figure]:
    """Measure passes over 10,000 queues of which a tenth, none or all have changed."""
    guarded = Guarded("/")
    guarded.grow(QUEUES)
    new = in_turn(ROUNDS, a_pass=guarded.new_pass, listing=guarded.list)
    vacuum()
    changed = in_turn(2 * ROUNDS, warm_ups=2, before=guarded.change, a_pass=guarded.changed_pass, listing=guarded.list)
    own = guarded.own_seconds[-2 * ROUNDS :]
    unchanged = in_turn(2 * ROUNDS, a_pass=guarded.run_pass, listing=guarded.list)
    where = f"a pass over {QUEUES:,} queues"
    return [
        Figure(where, "1 in 10 changed", "s", changed["a_pass"], changed["listing"], MAX_RATIO),
        Figure(where, "nothing changed", "s", unchanged["a_pass"], unchanged["listing"], MAX_RATIO),
        Figure(where, "all of them new", "s", new["a_pass"], new["listing"], MAX_RATIO_NEW),
        Figure(where, "without its list", "s", own, changed["listing"]),
        Figure(where, "peak memory", "MB", [peak_megabytes()], limit=MAX_MEGABYTES),
    ]


def vacuum() -> None:
    """Vacuum dead rows, and count the rows for the planner, as PostgreSQL's autovacuum does over time."""
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("VACUUM ANALYZE")


class GuardedByFigures(Guarded):
    """A vhost that is guarded by the lengths of the Prometheus endpoint, which lag."""

    def change(self) -> None:
        super().change()
        if not happens(lambda: self._shown() == self.messages, load.TIMEOUT_SECONDS):
            raise TimeoutError(f"the endpoint shows {self._shown()} messages, not {self.messages}")

    def run_pass(self, new: int = 0, changed: int = 0) -> float:
        """Return the seconds of a pass that uses the figures, because the last list is old enough."""
        Watch.objects.update(exact_at=timezone.now() - 2 * FIGURES_LAG)
        return super().run_pass(new, changed)

    def _shown(self) -> int:
        scrape = broker.prometheus().scrape(broker.management(), self.vhosts)
        return sum(depth.ready for depth in scrape.depths.values() if depth is not None)


@override_settings(GUARDIAN_SNAPSHOT="prometheus")
def prometheus() -> list[Figure]:
    """Measure passes with lengths from the Prometheus endpoint. The floor is the list that they save."""
    guarded = GuardedByFigures("/")
    guarded.grow(QUEUES)
    found = in_turn(ROUNDS, warm_ups=2, before=guarded.change, a_pass=guarded.changed_pass, listing=guarded.list)
    where = f"a pass over {QUEUES:,} queues, GUARDIAN_SNAPSHOT=prometheus"
    return [Figure(where, "1 in 10 changed", "s", found["a_pass"], found["listing"], MAX_RATIO_PROMETHEUS)]


def growth() -> list[Figure]:
    """Measure passes over 1,000 to 50,000 queues, a tenth of them changed.

    With many queues each measurement begins after a rest. So the growth is smaller than for a guard that polls every
    five seconds; docs/speed.md has the difference.
    """
    vhosts = ["/", *(f"bench-{number}" for number in range(1, max(GROWTH) // QUEUES_PER_VHOST))]
    for vhost in vhosts[1:]:
        broker.management().create_vhost(vhost)
    guarded = Guarded(*vhosts)
    found: dict[int, dict[str, list[float]]] = {}
    figures = []
    where = "a pass over more queues, 1 in 10 changed"
    with override_settings(GUARDIAN_VHOSTS=vhosts):
        for queues in GROWTH:
            new = queues - guarded.queues
            guarded.grow(queues)
            vacuum()
            guarded.rest_seconds = REST_SECONDS if queues >= QUEUES_PER_VHOST else 0
            for _ in range(new // NEW_QUEUES_PER_LIST):
                guarded.list()
            found[queues] = in_turn(
                GROWTH_ROUNDS, before=guarded.change, a_pass=guarded.changed_pass, listing=guarded.list
            )
            a_pass, listing = found[queues].values()
            figures.append(Figure(where, f"{queues:,} queues", "s", a_pass, listing))
    most = f"{max(GROWTH):,} queues"
    many, few = found[max(GROWTH)]["a_pass"], found[QUEUES_PER_VHOST]["a_pass"]
    return [
        *figures,
        Figure(where, f"{most}, divided by {QUEUES_PER_VHOST:,} queues", "s", many, few, MAX_GROWTH),
        Figure(where, f"{most}, peak memory", "MB", [peak_megabytes()], limit=MAX_MEGABYTES_GROWN),
    ]
