"""``make soak``: a hundred owners and their agents, while parts are killed, cut off and restarted at random.

It starts Guardian as it runs in production, on servers of its own. Owners sign in, look at pages, make accounts; their
queues grow and shrink over both lengths; agents register, hear of events and are removed. Meanwhile one of Guardian's
processes after the other is killed (SIGKILL, with its children), and one after the other of what it rests on goes away
for a while: Redis, RabbitMQ, PostgreSQL, the mail server. Then all is there again, and what has to follow follows.

In the end every invariant is checked against the broker, the mail server and what was answered. It prints the counts
and ends with 1 where something is not as it should be.
"""

import argparse
import contextlib
import itertools
import json
import random
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import httpx
import pika

from local.crowd import Actor, Crowd, Person
from local.load import Busy, Request, Tides
from local.processes import StartError
from local.trial import (
    Finding,
    Production,
    Say,
    await_pass,
    command,
    give_free_what_nobody_holds,
    hold,
    sweep,
)

WARN, MAX = 20, 60
"""The lengths, in messages, at which queues are warned about and deleted here."""

SETTINGS = {
    "GUARDIAN_WARN_QUEUE_LENGTH": str(WARN),
    "GUARDIAN_MAX_QUEUE_LENGTH": str(MAX),
    "GUARDIAN_QUIET_SECONDS": "15",
}

BACK_SECONDS = 20
"""For so long after a server is there again, requests may be answered as if it were away: connections are pooled."""

HELD_SECONDS = 110
"""For so long what a web process held stays held that was killed, or lost the database: `accounts/hold.py`."""

NEEDED = {
    "RabbitMQ": BACK_SECONDS,
    "the mail server": BACK_SECONDS,
    "PostgreSQL": HELD_SECONDS,
    "web-1": HELD_SECONDS,
    "web-2": HELD_SECONDS,
}
"""What a request may need, and for how many seconds after it is there again it may still be answered with 503."""

INTERRUPTING = {("PostgreSQL", "stopped"), ("the mail server", "stopped")}
"""What may come between the mail server's "accepted" and the sender's note of it, beside the sender's end."""

KINDS = (
    "sign in",
    "look at pages",
    "make accounts",
    "remove accounts",
    "change passwords",
    "look at queues",
    "delete queues",
    "empty queues",
    "register agents",
    "subscribe",
    "remove agents",
    "publish events",
    "make tokens",
    "revoke tokens",
)
"""What is asked for, as `Crowd` calls it."""

LONG_SECONDS = 300
"""From here on what a killed process had claimed runs out by itself."""


@dataclass(frozen=True)
class Plan:
    """How many there are, and how long it all takes.

    ``actors``: how many owners and agents are at something at once. ``pause``: seconds between two deeds of each.
    ``lull``: seconds between two mistreatments, at most; ``away``: how long something is away, at most. ``settle``: for
    what is to follow. Without ``patience``, what a killed process had claimed is given free by hand; with it, it runs
    out by itself: a lease after 90 seconds, a sender's claim after 300.
    """

    seconds: float
    owners: int
    offerings: int
    actors: int
    pause: float
    lull: float
    away: float
    settle: float
    patience: bool


def plan_of(seconds: float) -> Plan:
    """Give the plan for so many seconds of load."""
    if seconds < LONG_SECONDS:
        return Plan(seconds, 12, 2, 3, pause=0.1, lull=2, away=3, settle=120, patience=False)
    return Plan(seconds, 100, 10, 8, pause=0.1, lull=20, away=10, settle=600, patience=True)


class Fault(NamedTuple):
    """What was done to which part, from when to when by the monotonic clock, and when it was back by the other.

    ``gone`` is when it was away for certain.
    """

    part: str
    how: str
    began: float
    gone: float
    ended: float
    back: datetime


class Soak:
    """The whole of it: what runs, the load, what is done to the parts, and the count."""

    def __init__(self, plan: Plan, seed: int, directory: Path, say: Say) -> None:
        """Choose; nothing runs yet. The logs and all data go under ``directory``."""
        self._plan = plan
        self._chance = random.Random(seed)
        self._directory = directory
        self._say = say
        self._faults: list[Fault] = []
        self._swept: list[str] = []
        self._over = threading.Event()

    def run(self) -> list[Finding]:
        """Do it, and give what was found; raises StartError where something didn't start, or didn't come back."""
        self._say("Starting PostgreSQL, Redis, RabbitMQ, a mail server, two of each of Guardian's processes, and beat.")
        with Production(self._directory, SETTINGS, lambda name, line: None) as self._production:
            self._crowd = Crowd(self._make_people(), self._production.mail)
            self._say(f"{self._plan.owners} owners and their agents begin, for {self._plan.seconds:.0f} s.")
            with self._load():
                self._mistreat()
            self._settle()
            return list(self._count())

    def _make_people(self) -> list[Person]:
        emails = [f"owner{number}@example.org" for number in range(self._plan.owners)]
        for email in emails:
            command("create_owner", email, "--vouched")
        offerings = {}
        for number in range(self._plan.offerings):
            members = emails[number :: self._plan.offerings]
            options = [part for email in members for part in ("--member", email, "--publisher", email)]
            offerings.update(dict.fromkeys(members, command("create_offering", f"Offering {number}", *options)))
        people = []
        for email in emails:
            answer = httpx.get(command("login_link", email), trust_env=False)
            if "sessionid" not in answer.cookies:
                raise StartError(f"{email} could not sign in: {answer.status_code} {answer.text!r}")
            session = answer.cookies["sessionid"]
            token = command("create_token", email)
            people.append(Person(email, token, session, offerings[email], self._production.stack.addresses))
        return people

    @contextlib.contextmanager
    def _load(self) -> Iterator[None]:
        """Keep Guardian busy meanwhile."""

        def chance() -> random.Random:
            return random.Random(self._chance.random())

        names = chance()
        self._tides = Tides(
            self._production.node.amqp_url,
            lambda number: self._crowd.name_of_queue(number, names),
            warn=WARN,
            most=MAX,
            pause=self._plan.pause,
            chance=chance(),
        )
        actors = [Actor(f"actor {n}", self._crowd, self._plan.pause, chance()) for n in range(self._plan.actors)]
        self._busy: list[Busy] = [self._tides, *actors]
        for one in self._busy:
            one.start()
        try:
            yield
        finally:
            for one in self._busy:
                one.ended.set()
            for one in self._busy:
                one.end()

    # What is done to the parts

    def _mistreat(self) -> None:
        """Do things to Guardian's processes, and side by side to what it rests on, until the time is over.

        Each thing is done once at least, however long that takes.
        """
        until = time.monotonic() + self._plan.seconds
        processes = [partial(self._kill, kind) for kind in ("web", "guard", "worker", "beat")]
        servers = [partial(self._take_away, *what) for what in self._servers()]
        with ThreadPoolExecutor(3) as side_by_side:
            chances = [random.Random(self._chance.random()) for _ in range(2)]
            lanes = [
                side_by_side.submit(self._go_through, deeds, chance, until)
                for deeds, chance in zip((processes, servers), chances, strict=True)
            ]
            lanes.append(side_by_side.submit(self._stand_by))
            try:
                wait(lanes[:2], return_when=FIRST_EXCEPTION)
            finally:
                self._over.set()
            for lane in lanes:
                lane.result()

    def _go_through(
        self, deeds: Sequence[Callable[[random.Random], None]], chance: random.Random, until: float
    ) -> None:
        for number in itertools.count():
            for deed in chance.sample(deeds, len(deeds)):
                if self._over.wait(chance.uniform(0.3, 1) * self._plan.lull) or (number and time.monotonic() > until):
                    return
                deed(chance)

    def _stand_by(self) -> None:
        """Say how it goes, and have what a killed process held run out, where that isn't waited for."""
        while not self._over.wait(10):
            if not self._plan.patience:
                _of_the_database(partial(give_free_what_nobody_holds, seconds=8), None)
            asked = sum(len(person.requests) for person in self._crowd.people)
            messages = self._tides.done["messages published"]
            self._say(f"{asked} requests, {messages} messages, {len(self._production.mail.mails)} mails so far.")

    def _servers(self) -> list[tuple[str, str, Callable[[], object], Callable[[], object]]]:
        """Give what Guardian rests on, what becomes of it, how that is done, and how it is over."""
        redis, node, cluster, mail = (
            self._production.redis,
            self._production.node,
            self._production.cluster,
            self._production.mail,
        )
        return [
            ("Redis", "killed", redis.kill, redis.start),
            ("Redis", "emptied", redis.empty, lambda: None),
            ("RabbitMQ", "stopped", node.halt, node.start),
            ("RabbitMQ", "frozen", node.suspend, node.resume),
            ("PostgreSQL", "stopped", cluster.halt, cluster.start),
            ("the mail server", "puts everybody off", lambda: mail.refuse(True), lambda: mail.refuse(False)),
            ("the mail server", "stopped", mail.stop, mail.start),
        ]

    def _kill(self, kind: str, chance: random.Random) -> None:
        stack = self._production.stack
        name = kind if kind == "beat" else chance.choice((f"{kind}-1", f"{kind}-2"))

        def start() -> None:
            stack.start_process(name)
            if kind == "web":
                stack.wait_for_web(name)

        self._take_away(name, "killed", partial(stack.kill_process, name), start, chance)

    def _take_away(
        self, part: str, how: str, take: Callable[[], object], bring: Callable[[], object], chance: random.Random
    ) -> None:
        """Take a part away, and bring it back after a while."""
        began = time.monotonic()
        take()
        gone = time.monotonic()
        self._say(f"{part}: {how}.")
        time.sleep(chance.uniform(0.3, 1) * self._plan.away)
        bring()
        self._faults.append(Fault(part, how, began, gone, time.monotonic(), datetime.now(UTC)))

    # The end

    def _settle(self) -> None:
        """Wait until everything that is to follow has happened."""
        from django.db import connections

        connections.close_all()  # they were cut off
        self._say("All is there again. Waiting for what is to follow.")
        self._production.stack.check()
        deadline = time.monotonic() + self._plan.settle
        if not self._plan.patience:
            give_free_what_nobody_holds(seconds=8)
        await_pass()
        self._wait_while(self._to_be_done, deadline)
        self._say("Sweeping.")
        self._swept = sweep(patience=self._plan.patience)
        await_pass()
        self._wait_while(self._breaches, min(deadline, time.monotonic() + self._plan.settle / 4))

    def _wait_while(self, left: Callable[[], list[str]], deadline: float) -> None:
        """Wait until nothing is left, or ``deadline``, and say what is."""
        told = time.monotonic()
        while (found := left()) and time.monotonic() < deadline:
            if not self._plan.patience:
                self._hurry()
            if time.monotonic() > told:
                self._say("; ".join(found[:3]) + (f"; and {len(found) - 3} more" if len(found) > 3 else ""))
                told = time.monotonic() + 10
            time.sleep(1)

    def _to_be_done(self) -> list[str]:
        from accounts.models import PulseUser
        from queues.models import Notification, Removal

        unsent = Notification.objects.filter(state__in=["due", "sending"]).count()
        left = [f"{unsent} notifications are not sent"] if unsent else []
        removals = Removal.objects.count() + PulseUser.objects.filter(removing_since__isnull=False).count()
        return left + ([f"{removals} removals are not done"] if removals else [])

    def _hurry(self) -> None:
        """Let come what would come by itself within minutes: the end of a claim, the next attempt."""
        from django.utils import timezone

        from accounts import removal
        from queues import outbox, removals
        from queues.models import Notification, Removal

        give_free_what_nobody_holds(seconds=8)
        if Notification.objects.filter(state="due", due_at__gt=timezone.now()).update(due_at=timezone.now()):
            outbox.nudge()
        if Removal.objects.update(due_at=timezone.now()):
            removals.finish()
        removal.finish_removals()

    # The count

    def _breaches(self) -> list[str]:
        return [wrong for finding in (self._mails(), self._agreement(), self._queues()) for wrong in finding.wrong]

    def _count(self) -> Iterator[Finding]:
        errors = [f"{one.name}: {one.error!r}" for one in self._busy if one.error]
        yield Finding("The load went on to its end", f"{len(self._busy)} at once", errors)
        yield from self._requests()
        yield self._queues()
        yield self._mails()
        yield self._accounts()
        yield self._agents()
        yield self._events()
        yield self._agreement()
        yield self._passes()
        yield from self._mistreated()

    def _requests(self) -> Iterator[Finding]:
        by_kind: dict[str, list[Request]] = defaultdict(list)
        for person in self._crowd.people:
            for request in person.requests:
                by_kind[request.what].append(request)
        for kind in KINDS:
            of_kind = by_kind[kind]
            failed = [one for one in of_kind if one.problem]
            wrong = [one.problem for one in failed if not is_excused(one, self._faults)]
            slowest = max((one.ended - one.began for one in of_kind), default=0.0)
            figures = f"{len(of_kind)}; {len(failed)} failed while something was away; the slowest took {slowest:.1f} s"
            yield Finding(f"Requests to {kind}", figures, wrong if of_kind else ["there were none"])

    def _queues(self) -> Finding:
        from local import invariants
        from queues.models import Queue, QueueEvent

        events = Counter(QueueEvent.objects.order_by().values_list("kind", flat=True))
        wrong = invariants.deleted_below_maximum()
        for name in QueueEvent.objects.filter(kind="deleted", vhost="/").values_list("queue_name", flat=True):
            if (most := self._tides.most_in[name]) <= MAX:
                wrong.append(f"{name} was deleted, and {most} messages at most were ever in it at once")
        for queue in Queue.objects.filter(state__in=["ok", "warned"]):
            if queue.length is not None and queue.length > MAX and not queue.registered:
                wrong.append(f"{queue} has {queue.length} messages, and is there")
            elif queue.length is not None and (queue.length >= WARN) != (queue.state == "warned"):
                wrong.append(f"{queue} has {queue.length} messages, and is {queue.state}")
        wrong += [f"no queue was {kind}" for kind in ("warned", "recovered", "deleted") if not events[kind]]
        done = self._tides.done
        figures = (
            f"{done['queues made']} made, {done['messages published']} messages put in, {done['messages taken']} taken"
            f" out; {events['warned']} warnings, {events['recovered']} recoveries; {events['deleted']} deleted by"
            f" Guardian, {events['removed']} by hand"
        )
        return Finding("Queues", figures, wrong)

    def _mails(self) -> Finding:
        from local import invariants
        from queues import outbox

        mails = self._production.mail.mails
        # Between the mail server's "accepted" and the sender's note of it comes what was done to either, or to the
        # database: for each of the processes that send, which are two to a worker.
        interrupted = outbox.MAILS_TOGETHER * sum(
            2 if fault.part.startswith("worker") else 4
            for fault in self._faults
            if fault.part.startswith("worker") or (fault.part, fault.how) in INTERRUPTING
        )
        again = invariants.sent_again(mails)
        figures = f"{len(mails)}; {again} of them sent again, since their sender was interrupted"
        wrong = invariants.broken_mails(mails, interrupted=interrupted)
        return Finding("Mails", figures, wrong if mails else [*wrong, "there were none"])

    def _accounts(self) -> Finding:
        from accounts.models import PulseUser

        outcome = self._crowd.outcome
        rows = set(PulseUser.objects.values_list("username", flat=True))
        users = {user.name for user in self._production.management.users()}
        wrong = [f"{name} was made, and has no row" for name in outcome.accounts - rows]
        wrong += [f"{name} was made, and is not on the broker" for name in outcome.accounts - users]
        wrong += [f"{name} was removed, and is there" for name in outcome.removed_accounts & (rows | users)]
        figures = f"{len(outcome.accounts)} answered as made and kept, {len(outcome.removed_accounts)} as removed"
        return Finding("Accounts", figures, wrong if outcome.accounts else [*wrong, "there are none"])

    def _agents(self) -> Finding:
        from local import invariants

        outcome = self._crowd.outcome
        wrong = [*self._swept, *invariants.forgotten(outcome.agents)]
        for model in invariants.REGISTERED:
            there = outcome.removed_queues & set(model._default_manager.values_list("vhost", "queue_name"))
            wrong += [f"{name} in {vhost} was removed, and is there" for vhost, name in there]
        figures = f"{len(outcome.agents)} answered as registered and kept, {len(outcome.removed_queues)} as removed"
        return Finding("Agents", figures, wrong if outcome.agents else [*wrong, "there are none"])

    def _events(self) -> Finding:
        """Look whether each event is in all the queues that it was answered to be in."""
        outcome = self._crowd.outcome
        found = {
            agent.queue: _numbers_in(self._production.node.amqp_url, *agent.queue) for agent in outcome.agents.values()
        }
        to_be_there = [
            (event.number, agent.queue)
            for event in outcome.events
            for agent in outcome.agents.values()
            if event.everywhere and event.offering == agent.offering and event.object_type in agent.types
            if agent.ready < event.began
        ]
        wrong = [
            f"event {number} is not in {queue.queue}" for number, queue in to_be_there if number not in found[queue]
        ]
        times = sum(found.values(), Counter[int]())
        figures = (
            f"{len(outcome.events)} answered as published, {sum(event.delivered for event in outcome.events)} times"
            f" delivered; {times.total()} are in the queues of the agents that are left, {len(to_be_there)} have to be"
        )
        return Finding("Events", figures, wrong if to_be_there else [*wrong, "there were none"])

    def _agreement(self) -> Finding:
        from local import invariants

        management = self._production.management
        vhosts = [vhost.name for vhost in management.vhosts()]
        wrong = invariants.disagreements(management, vhosts)
        return Finding("Database and broker", f"{len(vhosts)} vhosts", wrong)

    def _passes(self) -> Finding:
        from local import invariants
        from queues.models import Pass

        passes = list(Pass.objects.order_by("at").values_list("at", "errors"))
        gap = max((later - earlier).total_seconds() for (earlier, _), (later, _) in itertools.pairwise(passes))
        failed = sum(bool(errors) for _, errors in passes)
        figures = f"{len(passes)}, {failed} of them with something to complain of; the longest wait for one {gap:.1f} s"
        return Finding("Passes", figures, invariants.overlapping_passes())

    def _mistreated(self) -> Iterator[Finding]:
        from queues.models import Pass

        by_part: dict[tuple[str, str], list[Fault]] = defaultdict(list)
        for fault in self._faults:
            by_part[fault.part.partition("-")[0], fault.how].append(fault)
        good = list(Pass.objects.filter(errors=[]).order_by("at").values_list("at", flat=True))
        for (part, how), faults in sorted(by_part.items()):
            after = [[at - fault.back for at in good if at > fault.back] for fault in faults]
            away = max(fault.ended - fault.began for fault in faults)
            later = max((waits[0].total_seconds() for waits in after if waits), default=0.0)
            figures = f"{len(faults)} times, for {away:.1f} s at most; a good pass {later:.1f} s later at most"
            wrong = [
                f"no good pass came after {fault.part} was back"
                for fault, waits in zip(faults, after, strict=True)
                if not waits
            ]
            yield Finding(f"{part}: {how}", figures, wrong)


def is_excused(request: Request, faults: Collection[Fault]) -> bool:
    """Whether a request may have failed as it did: it was cut, or what it needs was away, or it was one too many."""
    if request.status == 429:
        return request.what == "sign in"  # all of them come from one address
    for fault in faults:
        is_meanwhile = request.began <= fault.gone and fault.began <= request.ended
        if request.status == 0 and fault.part == request.process and is_meanwhile:
            return True
        is_needed = fault.part in NEEDED and (fault.part != "the mail server" or request.what == "sign in")
        is_felt = is_needed and fault.began <= request.ended and request.began <= fault.ended + NEEDED[fault.part]
        if request.status == 503 and is_felt:
            return True
    return False


def _of_the_database(ask: Callable[[], Any], otherwise: Any) -> Any:
    """Return what the database answers; where it is away, ``otherwise``."""
    from django.db import Error, connections

    try:
        return ask()
    except Error:
        return otherwise
    finally:
        connections.close_all()


def _numbers_in(amqp_url: str, vhost: str, queue: str) -> Counter[int]:
    """Give the numbers of the events in a queue, which stay there, and how often each is."""
    connection = pika.BlockingConnection(pika.URLParameters(f"{amqp_url}/{quote(vhost, safe='')}"))
    found: Counter[int] = Counter()
    with contextlib.closing(connection):
        channel = connection.channel()
        while (got := channel.basic_get(queue))[0] is not None:
            found[json.loads(got[2])["number"]] += 1
    return found


def main() -> int:
    """Do it, print the table, and give the exit code: 1 where something is not as it should be, 2 without a result."""
    parser = argparse.ArgumentParser(prog="python -m local.soak", description="A long run with everything failing.")
    parser.add_argument("--seconds", type=float, default=600, help="how long the load goes on (default: 600)")
    return hold(
        parser,
        lambda wanted, seed, directory, say: Soak(plan_of(wanted.seconds), seed, directory, say).run(),
        "Everything that has to hold does.",
    )


if __name__ == "__main__":
    sys.exit(main())
