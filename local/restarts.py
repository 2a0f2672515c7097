"""``make restarts``: processes of each kind are killed and restarted under load; is anything lost, or done twice?

It starts Guardian as it runs in production, on PostgreSQL and Redis with a RabbitMQ and a mail server, all of its own:
two web processes, two guards, two workers and beat. While people look at pages, agents register and queues grow, one of
each kind is killed (SIGKILL, with its children), and the other one asked to end (SIGTERM); each is started again. Redis
is killed too, and for a while there are two beats. In the end it counts, and ends with 1 where something is not as it
should be.
"""

import argparse
import contextlib
import itertools
import random
import re
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import httpx

from local.load import Busy, Client, Messages, Registrar, Request, Viewer
from local.processes import StartError
from local.trial import (
    OPERATOR,
    Finding,
    Production,
    Say,
    await_pass,
    command,
    give_free_what_nobody_holds,
    happens,
    hold,
    last_pass,
    sweep,
)

WARN, MAX = 20, 60
"""The lengths, in messages, at which queues are warned about and deleted here."""

OWNERS = ("alice@example.org", "bob@example.org")
TOLD = {*OWNERS, OPERATOR}
ACCOUNT = "shop"
OFFERING = "Compute"
SETTINGS = {
    "GUARDIAN_WARN_QUEUE_LENGTH": str(WARN),
    "GUARDIAN_MAX_QUEUE_LENGTH": str(MAX),
    "GUARDIAN_QUIET_SECONDS": "0",  # nothing is folded, so that each change is one message
}
TASK_OF = {"guard": "queues.tasks.monitor_queues", "worker": "queues.tasks.send_notifications"}
"""What a process is to have in hand when it is ended, where it can."""


@dataclass(frozen=True)
class Plan:
    """How long it all takes.

    ``rounds``: how often each kind of process is restarted. ``pause``: seconds between two of these, at most. ``work``:
    how long to wait until a process has something in hand. ``queues_pause``, ``agents_pause``: between two queues that
    grow, and two agents that register. ``settle``: for what is to follow. ``gap``: the longest wait between two passes
    that is all right, beside how long Redis is away: that what a killed guard held is free, and for the start of
    another. Without ``patience``, what a killed process
    had claimed is given free by hand; with it, it runs out by itself: a lease after 90 seconds, a sender's claim after
    300.
    """

    rounds: int
    pause: float
    work: float
    queues_pause: float
    agents_pause: float
    settle: float
    gap: float
    patience: bool


LONG = Plan(rounds=3, pause=10, work=15, queues_pause=0.7, agents_pause=0.5, settle=420, gap=120, patience=True)
SHORT = Plan(rounds=1, pause=3, work=5, queues_pause=0.8, agents_pause=0.5, settle=60, gap=60, patience=False)


class Deed(NamedTuple):
    """What was done to one process. The times are of the monotonic clock; ``code`` is its exit code."""

    process: str
    how: str
    at: float
    seconds: float
    code: int
    in_hand: int
    finished: int


class TwoBeats(NamedTuple):
    """What the two beats asked for while there were two, and how many passes were on record meanwhile."""

    seconds: float
    first: int
    second: int
    passes: int


class Logs:
    """What the processes say: which tasks a worker has begun and not ended, and when beat has asked for something."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._in_hand: dict[str, dict[str, str]] = defaultdict(dict)
        self._asked: Counter[str] = Counter()
        self._changed = threading.Condition()

    def read(self, name: str, line: str) -> None:
        """Take note of a line that this process wrote."""
        said = re.search(r"Task ([\w.]+)\[([0-9a-f-]{36})\] (received|succeeded|raised)", line)
        discarded = re.search(r"Discarding revoked task: ([\w.]+)\[([0-9a-f-]{36})\]", line)
        # What was taken and not begun goes back to the task queue when a worker ends.
        given_back = re.search(r"Restoring (\d+) unacknowledged message", line)
        with self._changed:
            if said and said[3] == "received":
                self._in_hand[name][said[2]] = said[1]
            elif ended := said or discarded:
                self._in_hand[name].pop(ended[2], None)
            elif given_back:
                for id_ in list(self._in_hand[name])[-int(given_back[1]) :]:
                    del self._in_hand[name][id_]
            self._asked[name] += "Sending due task" in line
            self._changed.notify_all()

    def in_hand(self, name: str) -> set[str]:
        """Give the ids of the tasks that this process has taken, and neither ended nor given back."""
        with self._changed:
            return set(self._in_hand[name])

    def asked(self, name: str) -> int:
        """Give how often this beat has asked for something."""
        with self._changed:
            return self._asked[name]

    def forget(self, name: str) -> None:
        """Begin anew with this process, which has ended."""
        with self._changed:
            self._in_hand[name].clear()

    def wait_for_task(self, name: str, task: str, timeout: float) -> None:
        """Return when this process takes this task; or after ``timeout`` seconds, without."""
        with self._changed:
            before = set(self._in_hand[name])
            self._changed.wait_for(
                lambda: any(one == task and id_ not in before for id_, one in self._in_hand[name].items()), timeout
            )

    def wait_for_beat(self, name: str, timeout: float = 60) -> None:
        """Return when this beat asks for something; raises StartError where it doesn't within ``timeout`` seconds."""
        with self._changed:
            before = self._asked[name]
            if not self._changed.wait_for(lambda: self._asked[name] > before, timeout):
                raise StartError(f"{name} asked for nothing within {timeout:.0f} s")


class Restarts:
    """The whole of it: what runs, the load, what is done to the processes, and the count."""

    def __init__(self, plan: Plan, seed: int, directory: Path, say: Say) -> None:
        """Choose; nothing runs yet. The logs and all data go under ``directory``."""
        self._plan = plan
        self._chance = random.Random(seed)
        self._say = say
        self._directory = directory
        self._logs = Logs()
        self._deeds: list[Deed] = []
        self._redis_away: list[tuple[float, float, float]] = []
        self._two_beats: list[TwoBeats] = []
        self._clients: list[Client] = []
        self._viewers: list[Viewer] = []
        self._registrars: list[Registrar] = []

    def run(self) -> list[Finding]:
        """Do it, and give what was found; raises StartError where something didn't start."""
        self._say("Starting PostgreSQL, Redis, RabbitMQ, a mail server, two of each of Guardian's processes, and beat.")
        with Production(self._directory, SETTINGS, self._logs.read) as self._production:
            self._stack = self._production.stack
            headers = self._make_people()
            with self._load(headers):
                self._restart_everything()
            self._settle()
            return list(self._count())

    # What stands before the load

    def _make_people(self) -> tuple[dict[str, str], dict[str, str]]:
        """Make the owners, an account of theirs and an offering; give the headers of a visitor and of an agent."""
        for owner in OWNERS:
            command("create_owner", owner, "--vouched")
        self._offering = command("create_offering", OFFERING, "--member", OWNERS[0])
        agent = {"Authorization": f"Token {command('create_token', OWNERS[0])}"}
        link = command("login_link", OWNERS[0])
        name, address = next(iter(self._stack.addresses.items()))
        visitor = {"Cookie": f"sessionid={httpx.get(link, trust_env=False).cookies['sessionid']}"}
        Client(name, address, agent).ask("POST", "/api/pulse-users/", {"username": ACCOUNT, "owners": list(OWNERS)})
        return visitor, agent

    @contextlib.contextmanager
    def _load(self, headers: tuple[dict[str, str], dict[str, str]]) -> Iterator[None]:
        """Keep Guardian busy meanwhile."""
        visitor, agent = headers
        addresses = self._stack.addresses
        for name, address in addresses.items():
            self._viewers.append(Viewer(self._client(name, address, visitor)))
            others = [one for one in addresses if one != name]
            asked = [self._client(one, addresses[one], agent) for one in (name, *others)]
            self._registrars.append(Registrar(name, asked, self._offering, self._plan.agents_pause))
        self._messages = Messages(
            self._production.node.amqp_url,
            lambda number: f"queue/{ACCOUNT}/{number:04}",
            warn=WARN,
            most=MAX,
            pause=self._plan.queues_pause,
            chance=random.Random(self._chance.random()),
        )
        self._busy: list[Busy] = [*self._viewers, *self._registrars, self._messages]
        for one in self._busy:
            one.start()
        try:
            yield
        finally:
            for one in self._busy:
                one.end()

    def _client(self, name: str, address: str, headers: dict[str, str]) -> Client:
        self._clients.append(Client(name, address, headers))
        return self._clients[-1]

    # What is done to the processes

    def _restart_everything(self) -> None:
        """Go through the kinds of processes side by side, and of each kind restart one after the other."""
        lanes: list[list[Callable[[], None]]] = [[lambda: self._kill("beat"), self._have_two_beats], [self._kill_redis]]
        for kind in ("web", "guard", "worker"):
            first, second = self._chance.sample([f"{kind}-1", f"{kind}-2"], 2)
            lanes.append([partial(self._kill, first), partial(self._end, second)])
        with ThreadPoolExecutor(len(lanes)) as side_by_side:
            chances = [random.Random(self._chance.random()) for _ in lanes]
            for done in [side_by_side.submit(self._go_through, *lane) for lane in zip(lanes, chances, strict=True)]:
                done.result()

    def _go_through(self, deeds: list[Callable[[], None]], chance: random.Random) -> None:
        for _ in range(self._plan.rounds):
            chance.shuffle(deeds)
            for deed in deeds:
                time.sleep(chance.uniform(0.3, 1) * self._plan.pause)
                deed()

    def _kill(self, name: str) -> None:
        self._await_work(name)
        happens(lambda: bool(self._in_hand(name)) and _is_claimed(name), self._plan.work, every=0.001)
        in_hand = self._in_hand(name)
        at = time.monotonic()
        self._stack.kill_process(name)
        self._deeds.append(Deed(name, "SIGKILL", at, time.monotonic() - at, -9, len(in_hand), 0))
        self._say(f"Killed {name} with {_in_words(in_hand)} in hand.")
        self._logs.forget(name)
        time.sleep(0.2 * self._plan.pause)
        self._start(name)
        if name.startswith("guard"):
            self._await_passes()

    def _end(self, name: str) -> None:
        in_hand = self._await_work(name)
        at = time.monotonic()
        code = self._stack.end_process(name)
        finished = in_hand - self._in_hand(name)
        self._deeds.append(Deed(name, "SIGTERM", at, time.monotonic() - at, code, len(in_hand), len(finished)))
        self._say(f"Asked {name} to end with {_in_words(in_hand)} in hand: {time.monotonic() - at:.1f} s.")
        self._logs.forget(name)
        self._start(name)

    def _await_work(self, name: str) -> set[str]:
        """Wait until this process takes something in hand, where that can be seen, and give what it has."""
        task = TASK_OF.get(name.partition("-")[0])
        if task is not None:
            self._logs.wait_for_task(name, task, timeout=self._plan.work)
        elif name in self._stack.addresses:
            happens(lambda: bool(self._in_hand(name)), self._plan.work, every=0.001)
        return self._in_hand(name)

    def _in_hand(self, name: str) -> set[str]:
        """Give what this process has in hand: tasks that it has begun, or requests that it was sent."""
        waiting = {str(len(client.requests)) for client in self._clients if client.process == name and client.waiting}
        return waiting | self._logs.in_hand(name)

    def _start(self, name: str) -> None:
        self._stack.start_process(name)
        if name in self._stack.addresses:
            self._stack.wait_for_web(name)
        elif name == "beat":
            self._logs.wait_for_beat(name)

    def _have_two_beats(self) -> None:
        """Replace beat as a careful operator does: the new one is there before the old one ends."""
        self._stack.add_beat("beat-2")
        self._logs.wait_for_beat("beat-2")
        at, passes = time.monotonic(), _passes()
        first, second = self._logs.asked("beat"), self._logs.asked("beat-2")
        time.sleep(self._plan.pause)
        # While Redis is away, neither can.
        happens(lambda: self._logs.asked("beat") > first and self._logs.asked("beat-2") > second, 60)
        self._two_beats.append(
            TwoBeats(
                time.monotonic() - at,
                self._logs.asked("beat") - first,
                self._logs.asked("beat-2") - second,
                _passes() - passes,
            )
        )
        self._end("beat")
        self._stack.end_process("beat-2")

    def _kill_redis(self) -> None:
        away = time.monotonic()
        self._production.redis.kill()
        self._say("Killed Redis.")
        time.sleep(self._plan.pause)
        self._production.redis.start()
        back = time.monotonic()
        last = last_pass()
        if not happens(lambda: last_pass() != last, 120):
            raise StartError("there was no pass for two minutes after Redis came back")
        self._redis_away.append((away, back, time.monotonic()))

    def _await_passes(self) -> None:
        """Wait until there are passes again, after a guard was killed: its lease may have to run out."""
        last = last_pass()
        if not self._plan.patience and not happens(lambda: last_pass() != last, 5):
            give_free_what_nobody_holds(seconds=5)
        if not happens(lambda: last_pass() != last, 120):
            raise StartError("there was no pass for two minutes after a guard was killed")

    # The end

    def _settle(self) -> None:
        """Wait until everything that is to follow has happened."""
        self._say("Waiting for what is to follow.")
        deadline = time.monotonic() + self._plan.settle
        while (left := self._left()) and time.monotonic() < deadline:
            if not self._plan.patience:
                give_free_what_nobody_holds(seconds=10)
            time.sleep(0.5)
        self._unsettled = left

    def _left(self) -> list[str]:
        """Give what has yet to happen, in words."""
        from queues.models import Notification, Queue, QueueEvent

        states = dict(Queue.objects.values_list("name", "state"))
        left = [f"{name} is {states.get(name)}" for name in self._messages.too_long if states.get(name) != "gone"]
        left += [f"{name} is {states.get(name)}" for name in self._messages.long if states.get(name) != "warned"]
        unsent = Notification.objects.filter(state__in=["due", "sending"]).count()
        if unsent:
            left.append(f"{unsent} notifications are not sent")
        deleted = QueueEvent.objects.filter(kind="deleted").count()
        if deleted < len(self._messages.too_long):
            left.append(f"{deleted} queues are deleted")
        return left

    # The count

    def _count(self) -> Iterator[Finding]:
        yield Finding("Everything that was to follow has happened", "", self._unsettled)
        yield Finding(
            "The load went on to its end",
            f"{len(self._messages.long) + len(self._messages.too_long)} queues",
            [f"{one.name}: {one.error!r}" for one in self._busy if one.error],
        )
        yield self._passes()
        yield from self._queues()
        yield self._mails()
        yield self._registrations()
        yield self._agreement()
        yield from self._requests()
        yield from self._ended()
        yield self._redis_found()
        yield self._beats()

    def _passes(self) -> Finding:
        from local import invariants
        from queues.models import Pass

        passes = list(Pass.objects.order_by("at"))
        gap = max((b.at - a.at).total_seconds() for a, b in itertools.pairwise(passes))
        failed = [f"a pass said: {error}" for one in passes for error in one.errors]
        figures = f"{len(passes)} on record, none at the same time as another; the longest wait for one {gap:.1f} s"
        return Finding("Passes", figures, [*invariants.overlapping_passes(), *failed, *self._waited_too_long(gap)])

    def _waited_too_long(self, gap: float) -> list[str]:
        most = self._plan.gap + max((back - away for away, back, _ in self._redis_away), default=0.0)
        return [f"there was no pass for {gap:.1f} s, and {most:.0f} s are all right"] if gap > most else []

    def _beats(self) -> Finding:
        """Count what two beats did. That nothing was done twice meanwhile, the other findings tell."""
        figures = [
            f"for {one.seconds:.1f} s, asking for {one.first} and {one.second} tasks; {one.passes} passes meanwhile"
            for one in self._two_beats
        ]
        wrong = [] if self._two_beats else ["there never were two"]
        for one in self._two_beats:
            if not one.first or not one.second:
                wrong.append(f"one of them asked for nothing in {one.seconds:.1f} s")
        return Finding("Two beats", "; ".join(figures), wrong)

    def _queues(self) -> Iterator[Finding]:
        from queues.models import QueueEvent

        events = Counter(QueueEvent.objects.filter(vhost="/").values_list("queue_name", "kind"))
        there = {row["name"] for row in self._production.management.list_queues("/", {"disable_stats": "true"})}
        wrong = [
            f"{n} was deleted {events[n, 'deleted']} times"
            for n in self._messages.too_long
            if events[n, "deleted"] != 1
        ]
        wrong += [f"{name} is still on the broker" for name in self._messages.too_long if name in there]
        yield Finding("Queues past their maximum", f"{len(self._messages.too_long)}, each deleted once", wrong)
        wrong = [
            f"{n} was warned of {events[n, 'warned']} times" for n in self._messages.long if events[n, "warned"] != 1
        ]
        wrong += [f"{name} is not on the broker" for name in self._messages.long if name not in there]
        wrong += [f"{name} was deleted" for name in self._messages.long if events[name, "deleted"]]
        yield Finding(
            "Queues past their warn length", f"{len(self._messages.long)}, each warned of once and kept", wrong
        )

    def _mails(self) -> Finding:
        from local import invariants
        from queues import outbox
        from queues.models import Notification, QueueEvent

        kinds = {"warned": "warning", "deleted": "deletion"}
        happened = QueueEvent.objects.filter(kind__in=kinds).values_list("queue_name", "kind")
        expected = Counter((to, kinds[kind], name) for name, kind in happened for to in TOLD)
        of_these = Notification.objects.filter(kind__in=kinds.values()).values_list("recipient", "kind", "facts")
        told = Counter((to, kind, facts["queue"]) for to, kind, facts in of_these)
        wrong = [
            f"{key} was to be told {expected[key]} times, and is {told[key]} times in the outbox"
            for key in told | expected
            if told[key] != expected[key]
        ]
        out_of_date = Notification.objects.filter(state="failed", last_error=invariants.OUT_OF_DATE).count()
        mails = self._production.mail.mails
        # A worker that is killed between the mail server's "accepted" and its own note of it, with its two processes.
        # What goes out again has the same Message-ID, by which a mail program shows one.
        kills = sum(deed.process.startswith("worker") for deed in self._deeds if deed.how == "SIGKILL")
        figures = (
            f"{len(mails)} for {expected.total()} things to tell, each once; {out_of_date} warnings out of date"
            f" before they were sent; {invariants.sent_again(mails)} mails sent again because of a kill, with the same"
            " Message-ID"
        )
        return Finding(
            "Mails", figures, [*wrong, *invariants.broken_mails(mails, interrupted=2 * outbox.MAILS_TOGETHER * kills)]
        )

    def _registrations(self) -> Finding:
        from local import invariants

        answered = [one for registrar in self._registrars for one in registrar.registered]
        wrong = [f"{one} was answered {count} times" for one, count in Counter(answered).items() if count > 1]
        by = ", ".join(f"{len(registrar.registered)} by {registrar.name}" for registrar in self._registrars)
        wrong += invariants.forgotten(answered)
        return Finding("Registrations answered", f"{by}; each has its queue", wrong)

    def _agreement(self) -> Finding:
        from local import invariants

        swept = sweep(patience=self._plan.patience)
        await_pass()
        management = self._production.management
        vhosts = [vhost.name for vhost in management.vhosts()]
        wrong = [*swept, *invariants.deleted_below_maximum(), *invariants.disagreements(management, vhosts)]
        return Finding("Database and broker", f"agree on {len(vhosts)} vhosts", wrong)

    def _requests(self) -> Iterator[Finding]:
        requests = [one for client in self._clients for one in client.requests]
        for name in self._stack.addresses:
            kills = [deed.at for deed in self._deeds if deed.process == name and deed.how == "SIGKILL"]
            mine = [one for one in requests if one.process == name]
            failed = [one for one in mine if one.problem]
            cut = [one for one in failed if _is_cut(one, kills)]
            wrong = [one.problem for one in failed if one not in cut]
            longest = max(one.ended - one.began for one in mine)
            figures = f"{len(mine)}; {len(cut)} cut by a SIGKILL, none else failed; the slowest took {longest:.1f} s"
            yield Finding(f"Requests to {name}", figures, wrong)

    def _ended(self) -> Iterator[Finding]:
        for deed in self._deeds:
            wrong = []
            figures = f"{deed.how} with {deed.in_hand} in hand"
            if deed.how == "SIGTERM":
                figures += f", {deed.finished} of them finished or given back; ended after {deed.seconds:.1f} s"
                if deed.code != 0:
                    wrong.append(f"it ended with {deed.code}")
                if deed.finished < deed.in_hand:
                    wrong.append("what it had in hand was not finished")
            yield Finding(deed.process, figures, wrong)

    def _redis_found(self) -> Finding:
        meanwhile = [
            one
            for client in self._clients
            for one in client.requests
            for away, back, _ in self._redis_away
            if away <= one.began <= back
        ]
        times = ", ".join(
            f"{back - away:.1f} s, and passes again {again - back:.1f} s later"
            for away, back, again in self._redis_away
        )
        wrong = [] if meanwhile else ["nobody asked for anything meanwhile"]
        figures = f"for {times}; {len(meanwhile)} requests meanwhile"
        return Finding("Redis was killed", figures, wrong)


def _is_cut(request: Request, kills: list[float]) -> bool:
    """Whether a request was under way when its process was killed. Later ones wait for it to be back."""
    return any(request.began <= at <= request.ended for at in kills)


def _is_claimed(name: str) -> bool:
    """Whether a process of this kind holds what nobody else may have meanwhile: the lease, or notifications."""
    from queues.models import Lease, Notification

    if name.startswith("guard"):
        return Lease.objects.filter(name="pass").exclude(holder=None).exists()
    return not name.startswith("worker") or Notification.objects.filter(state="sending").exists()


def _passes() -> int:
    from queues.models import Pass

    return Pass.objects.count()


def _in_words(in_hand: set[str]) -> str:
    return "1 thing" if len(in_hand) == 1 else f"{len(in_hand)} things"


def main() -> int:
    """Do it, print the table, and give the exit code: 1 where something is not as it should be, 2 without a result."""
    parser = argparse.ArgumentParser(prog="python -m local.restarts", description="Restart processes under load.")
    parser.add_argument("--short", action="store_true", help="each process once, in less than a minute")
    return hold(
        parser,
        lambda wanted, seed, directory, say: Restarts(SHORT if wanted.short else LONG, seed, directory, say).run(),
        "Nothing was lost, and nothing done twice.",
    )


if __name__ == "__main__":
    sys.exit(main())
