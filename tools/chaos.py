"""``make soak``: put Guardian under load, kill and stop its parts at random, and check that all invariants hold.

Guardian runs as in production, on private servers. Owners sign in, look at pages and create Pulse users; their agents
register; events are published; queues grow and shrink past both thresholds. An unruly owner keeps the deleter busy. A
careful one watches, restores and moves numbered messages. An operator applies files. Days pass, so reminders are due.
Meanwhile Guardian's processes are killed (SIGKILL, with their children) or terminated (SIGTERM), and Redis, RabbitMQ,
PostgreSQL and the mail server are down for a while. Then everything runs again, and pending work can finish.

At the end every invariant is checked against the broker, the mail server and the answers. The program prints a table of
counts, and exits with 1 if an invariant is broken, with 2 if it could not run.
"""

import argparse
import contextlib
import itertools
import os
import random
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rabbit.errors import BrokerError
from tools.applying import KILLED_LEASE, Applying
from tools.careful import Careful
from tools.crowd import Actor, Crowd, Person
from tools.faults import Fault
from tools.load import ANSWER_SECONDS, Failed, LoadThread, QueueLoad
from tools.processes import StartError, end_with_parent, happens
from tools.production import MAX, WARN, Production, await_pass, command, expire_abandoned, let_a_day_pass, sweep
from tools.stack import turn_signals_into_interrupts
from tools.store_chaos import StoreChaos

if TYPE_CHECKING:
    from tools.faults import Finding

WORK_SECONDS = 5
"""How long a kill waits for the process to hold the lease, or to claim notifications."""

KOMBU_ENDED_IT = "restore_unacked"
"""In the traceback of a worker that lost Redis while it acknowledged a message: kombu 5.7 fails when it reconnects."""

Say = Callable[[str], None]
DoFault = Callable[[random.Random], None]


@dataclass(frozen=True)
class Plan:
    """The size of a run, and its pauses in seconds.

    ``each``: processes of each kind. ``actors``: owners that act concurrently, with ``pause`` between two actions of
    each. ``max_gap``: the longest time between two faults; ``max_outage``: the longest fault. ``settle``: the time for
    pending work at the end. ``expire_after``: the time after which the run expires leases and claims of killed
    processes; None: wait minutes for their normal expiry. Unless it is ``complete``, only guards are killed, and some
    kinds of requests and events may be missing. ``calm``: the time until the unruly owner begins, and a quarter of the
    time until faults do.
    """

    seconds: float
    each: int
    owners: int
    offerings: int
    actors: int
    max_gap: float
    max_outage: float
    settle: float
    expire_after: float | None
    complete: bool
    calm: float = 15
    pause: float = 0.1


def plan_of(seconds: float) -> Plan:
    if seconds < 30:
        return Plan(seconds, 1, 2, 1, 2, max_gap=2, max_outage=0.5, settle=60, expire_after=2, complete=False, calm=0)
    if seconds < 300:
        return Plan(seconds, 2, 12, 2, 3, max_gap=2, max_outage=3, settle=120, expire_after=12, complete=True)
    return Plan(seconds, 2, 100, 10, 8, max_gap=20, max_outage=10, settle=600, expire_after=None, complete=True)


class Chaos:
    """One run: the servers and processes, the load, the faults and the checks."""

    def __init__(self, plan: Plan, seed: int, directory: Path, say: Say, *, clustered: bool) -> None:
        """Prepare the run. Logs and data go under ``directory``. ``clustered``: RabbitMQ has three nodes."""
        self._plan = plan
        self._clustered = clustered
        self._chance = random.Random(seed)
        self._directory = directory
        self._say = say
        self._over = threading.Event()

    def run(self) -> "list[Finding]":
        """Run the chaos and return the findings. Raises StartError if a part does not start or come back."""
        self._say("Starting PostgreSQL, Redis, RabbitMQ, a mail server and Guardian's processes.")
        plan = self._plan
        with Production(self._directory, each=plan.each, clustered=self._clustered) as self._production:
            from tools.findings import Checks
            from tools.unruly import Unruly

            unruly, careful, *people = self._create_people()
            self._crowd = Crowd(people, self._production.mail)
            self._unruly = Unruly(self._production.amqp_urls, unruly, plan.calm)
            self._careful = careful
            await_pass()  # the first pass over a broker blocks the deletion of what is there
            self._say(f"{plan.owners} owners and their agents begin, for {plan.seconds:.0f} s.")
            with self._load() as busy:
                owners, production = [careful, *people], self._production
                self._checks = Checks(plan.each, plan.complete, production, self._crowd, owners, busy)
                time.sleep(4 * plan.calm)
                await_pass()  # on a busy machine this takes longer
                self._do_faults()
            self._settle()
            return list(self._checks.findings())

    def _create_people(self) -> list[Person]:
        names = "unruly", "careful", *(f"owner{number}" for number in range(self._plan.owners))
        emails = [f"{name}@example.org" for name in names]
        for email in emails:
            command("create_owner", email, "--vouched")
        offerings = {}
        for number in range(self._plan.offerings):
            members = emails[number :: self._plan.offerings]
            options = [part for email in members for part in ("--member", email, "--publisher", email)]
            offerings.update(dict.fromkeys(members, command("create_offering", f"Offering {number}", *options)))
        people = []
        for email in emails:
            with httpx.Client(trust_env=False) as browser:
                link = command("login_link", email)
                browser.get(link)
                answer = browser.post(link, data={"csrfmiddlewaretoken": browser.cookies["csrftoken"]})
                if "sessionid" not in browser.cookies:
                    raise StartError(f"{email} could not sign in: {answer.status_code} {answer.text!r}")
                session, token = browser.cookies["sessionid"], command("create_token", email, "--scope", "all")
            people.append(Person(email, token, session, offerings[email], self._production.stack.addresses))
        return people

    @contextlib.contextmanager
    def _load(self) -> Iterator[list[LoadThread]]:
        def chance() -> random.Random:
            return random.Random(self._chance.random())

        pause, names = self._plan.pause, chance()
        self._queue_load = QueueLoad(
            self._production.amqp_urls,
            lambda number: self._crowd.name_of_queue(number, names),
            warn=WARN,
            most=MAX,
            pause=pause,
            chance=chance(),
        )
        actors = [Actor(f"actor {number}", self._crowd, pause, chance()) for number in range(self._plan.actors)]
        urls, owner = self._production.amqp_urls, self._careful
        careful = [Careful(number, urls, owner, chance()) for number in range(1, 1 + self._plan.each)]
        self._applying = Applying(self._production.stack, owner.email, 30 * pause, chance())
        busy = [self._queue_load, *actors, *careful, self._applying]
        if self._plan.complete:
            busy.append(self._unruly)
        for one in busy:
            one.start()
        try:
            yield busy
        finally:
            for one in busy:
                one.ended.set()
            for one in busy:
                one.join(ANSWER_SECONDS)

    # Faults

    def _do_faults(self) -> None:
        """Cause faults of Guardian's processes and, in parallel, of the servers, until the time is over."""
        until = time.monotonic() + self._plan.seconds - 4 * self._plan.calm
        lanes: list[list[DoFault]] = [[partial(self._stop_process, "guard", self._kill)]]
        if self._plan.complete:
            lanes = [self._faults_of_processes(), self._faults_of_servers()]
        with ThreadPoolExecutor(3) as threads:
            chances = [random.Random(self._chance.random()) for _ in lanes]
            running = [
                threads.submit(self._repeat_faults, faults, chance, until)
                for faults, chance in zip(lanes, chances, strict=True)
            ]
            watching = threads.submit(self._watch)
            try:
                wait(running, return_when=FIRST_EXCEPTION)
            finally:
                self._over.set()
            for one in [*running, watching]:
                one.result()

    def _repeat_faults(self, faults: Sequence[DoFault], chance: random.Random, until: float) -> None:
        """Repeat these faults in random order. The first round is always complete."""
        for number in itertools.count():
            for fault in chance.sample(faults, len(faults)):
                if self._over.wait(chance.uniform(0.3, 1) * self._plan.max_gap) or (
                    number and time.monotonic() > until
                ):
                    return
                fault(chance)

    def _faults_of_processes(self) -> list[DoFault]:
        ways = itertools.product(("web", "guard", "deleter", "worker", "beat"), (self._kill, self._end))
        return [partial(self._stop_process, kind, stop) for kind, stop in ways]

    def _faults_of_servers(self) -> list[DoFault]:
        stack, redis = self._production.stack, self._production.redis
        cluster, mail = self._production.cluster, self._production.mail
        faults: list[tuple[str, str, Callable[[], object], Callable[[], object]]] = [
            ("Redis", "killed", redis.kill, redis.start),
            ("Redis", "emptied", redis.flush, lambda: None),
            *(("RabbitMQ", "stopped", node.halt, node.start) for node in self._production.nodes),
            *(("RabbitMQ", "frozen", node.suspend, node.resume) for node in self._production.nodes),
            ("PostgreSQL", "stopped", cluster.halt, cluster.start),
            ("the mail server", "refused everything", lambda: mail.refuse(True), lambda: mail.refuse(False)),
            ("the mail server", "stopped", mail.stop, mail.start),
            ("beat", "doubled", lambda: stack.add_beat("beat-2"), lambda: self._end("beat-2")),
        ]
        return [partial(self._do_fault, *fault) for fault in faults]

    def _stop_process(self, kind: str, stop: Callable[[str], object], chance: random.Random) -> None:
        stack = self._production.stack
        name = chance.choice(stack.names(kind))

        def start() -> None:
            stack.start_process(name)
            if kind == "web":
                stack.wait_for_web(name)

        happens(lambda: _query(partial(_is_at_work, kind), False), WORK_SECONDS)
        how = "killed" if stop == self._kill else "ended"
        self._do_fault(name, how, partial(stop, name), start, chance)

    def _kill(self, name: str) -> None:
        self._production.stack.kill_process(name)

    def _end(self, name: str) -> None:
        code = self._production.stack.end_process(name)
        # -SIGTERM: it had not yet installed its signal handlers. 1: beat had saved its schedule, and sent a task.
        allowed = (0, -signal.SIGTERM, 1) if name.startswith("beat") else (0, -signal.SIGTERM)
        if code not in allowed:
            self._checks.bad_exits.append(f"{name} exited with {code} after SIGTERM")

    def _do_fault(
        self, part: str, how: str, take: Callable[[], object], bring: Callable[[], object], chance: random.Random
    ) -> None:
        """Take a part down, and bring it back after a random time."""
        began = time.monotonic()
        take()
        gone = time.monotonic()
        self._say(f"{part}: {how}.")
        time.sleep(chance.uniform(0.3, 1) * self._plan.max_outage)
        bring()
        self._checks.faults.append(Fault(part, how, began, gone, time.monotonic(), datetime.now(UTC)))

    def _watch(self) -> None:
        """Report progress, and expire leases and claims of killed processes."""
        while not self._over.wait(10):
            self._restart_ended()
            if self._plan.expire_after is not None:
                _query(partial(expire_abandoned, self._plan.expire_after), None)
            self._checks.days += 1
            _query(let_a_day_pass, None)
            requests = sum(len(person.requests) for person in self._crowd.people)
            messages = self._queue_load.done["messages published"]
            self._say(f"{requests} requests, {messages} messages, {len(self._production.mail.mails)} mails so far.")

    def _restart_ended(self) -> None:
        """Start the processes that kombu ended, as a supervisor does. Raises StartError if one ended otherwise."""
        stack = self._production.stack
        for name, error in stack.unexpected_ends().items():
            if KOMBU_ENDED_IT not in error:
                raise StartError(error)
            stack.start_process(name)
            self._say(f"{name}: started again, because kombu ended it.")

    # The end

    def _settle(self) -> None:
        from django.db import connections

        connections.close_all()  # PostgreSQL's stop broke them
        self._say("All parts run again. Waiting for pending work.")
        self._restart_ended()
        deadline = time.monotonic() + self._plan.settle
        if self._plan.expire_after is not None:
            expire_abandoned(self._plan.expire_after)
        await_pass()
        self._checks.applied = self._applying.finish(2 * KILLED_LEASE.total_seconds())
        self._wait_while(self._under_way, deadline)
        self._say("Sweeping.")
        self._checks.swept = sweep(patience=self._plan.expire_after is None)
        await_pass()
        self._wait_while(self._checks.breaches, min(deadline, time.monotonic() + self._plan.settle / 4))

    def _wait_while(self, left: Callable[[], list[str]], deadline: float) -> None:
        """Wait until nothing is left or until ``deadline``. Report what is left."""
        reported = time.monotonic()
        while (found := left()) and time.monotonic() < deadline:
            if self._plan.expire_after is not None:
                self._expire_waits(self._plan.expire_after)
            if time.monotonic() > reported:
                self._say("; ".join(found[:3]) + (f"; and {len(found) - 3} more" if len(found) > 3 else ""))
                reported = time.monotonic() + 10
            time.sleep(1)

    def _under_way(self) -> list[str]:
        from core.models import Removal
        from notifications.models import Notification
        from queues.models import Move, Queue, Replay

        counts = {
            "recorded deletions": Queue.objects.filter(state=Queue.State.DELETING).count(),
            "restores and moves": sum(model.objects.filter(state="running").count() for model in (Move, Replay)),
            "unsent notifications": Notification.objects.filter(state__in=["due", "sending"]).count(),
            "removals": Removal.objects.count(),
        }
        return [f"{count} {what}" for what, count in counts.items() if count]

    def _expire_waits(self, expire_after: float) -> None:
        """Expire claims and make the next attempts due now instead of in minutes."""
        from django.db.models import Q
        from django.utils import timezone

        from core import removals
        from core.models import Removal
        from notifications import enqueue
        from notifications.models import Notification

        expire_abandoned(expire_after)
        now = timezone.now()
        waiting = Notification.objects.filter(Q(due_at__gt=now) | Q(deferred_until__gt=now), state="due")
        if waiting.update(due_at=now, deferred_until=None):
            enqueue.wake()
        if Removal.objects.update(due_at=now):
            removals.run_due(removals.SECONDS_OF_TASK)


def _is_at_work(kind: str) -> bool:
    """Return whether a process of this kind has work in progress: its lease, or claimed notifications."""
    from core.models import Lease
    from notifications.models import Notification

    if lease := {"guard": "pass", "deleter": "deleter"}.get(kind):
        return Lease.objects.filter(name=lease).exclude(holder=None).exists()
    return kind != "worker" or Notification.objects.filter(state="sending").exists()


def _query(query: Callable[[], Any], otherwise: Any) -> Any:
    """Return the result of a query, or ``otherwise`` if the database is down."""
    from django.db import Error, connections

    try:
        return query()
    except Error:
        return otherwise
    finally:
        connections.close_all()


def _show(console: Console, findings: "list[Finding]") -> None:
    table = Table(show_lines=False)
    for column in ("", "what", "counts"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        table.add_row("broken" if finding.breaches else "ok", finding.what, finding.counts)
    console.print(table)
    for finding in findings:
        for breach in finding.breaches[:20]:
            console.print(f"{finding.what}: {breach}", style="red", markup=False, soft_wrap=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.chaos", description="Run Guardian while its parts fail.")
    parser.add_argument("--seconds", type=float, default=600, help="duration of the load (default: 600)")
    parser.add_argument("--seed", type=int, help="seed of all random choices (default: random)")
    parser.add_argument("--cluster", action="store_true", help="run three nodes of RabbitMQ instead of one")
    parser.add_argument("--store", choices=["cassandra"], help="run the message store alone, on three nodes")
    parser.add_argument("--directory", type=Path, help="where to keep logs (default: kept after a failure only)")
    options = parser.parse_args()
    if "MAKELEVEL" in os.environ:  # make forwards no signal
        end_with_parent()
    turn_signals_into_interrupts()
    seed = secrets.randbelow(1_000_000) if options.seed is None else options.seed
    directory = options.directory or Path(tempfile.mkdtemp(prefix="guardian-chaos-"))
    console = Console(highlight=False, soft_wrap=True)
    began = time.monotonic()

    def say(text: str) -> None:
        console.print(f"[dim]{time.monotonic() - began:6.1f} s[/]  {escape(text)}")
        sys.stdout.flush()

    say(f"The seed is {seed}; SEED={seed} repeats its random choices.")
    code = 2
    try:
        if options.store:
            findings = StoreChaos(options.seconds, seed, directory, say).run()
        else:
            findings = Chaos(plan_of(options.seconds), seed, directory, say, clustered=options.cluster).run()
        code = int(any(finding.breaches for finding in findings))
        _show(console, findings)
        say(f"An invariant is broken (seed {seed})." if code else "All invariants hold.")
    except KeyboardInterrupt:
        code = 130
    except (StartError, BrokerError, Failed) as error:
        console.print(str(error), style="red", markup=False)
    finally:
        if code in (1, 2) or options.directory:
            say(f"The logs are in {directory / 'log'}.")
        else:
            shutil.rmtree(directory, ignore_errors=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
