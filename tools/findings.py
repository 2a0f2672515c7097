"""The checks at the end of a chaos run (`tools/chaos.py`), with the counts that it prints. Needs Django set up."""

import contextlib
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from statistics import median
from typing import TypeVar
from urllib.parse import quote

import pika

from accounts.models import PulseUser
from notifications import audience, mail_sending
from notifications.models import Notification
from queues.archives import reading, writing
from queues.guard import deleter, destroying
from queues.models import Archive, MessageWatch, Move, Pass, Queue, QueueEvent, Replay
from rabbit.names import WATCH_QUEUE, user_of_queue
from tools import applying, careful, invariants
from tools.applying import Applying
from tools.careful import Careful
from tools.crowd import Crowd, Person
from tools.faults import RECOVERY_SECONDS, Fault, Finding, is_excused, was_down
from tools.load import LoadThread, QueueLoad, Request
from tools.production import MAX, OPERATOR, WARN, Production
from tools.unruly import Unruly, is_unruly

MAX_PASS_GAP_SECONDS = 180
"""The lease of a killed guard expires after 90 s; other faults may follow."""

MAX_DELETION_SECONDS = 30
"""The time from the decision to delete a queue of another owner than the unruly one, without faults."""

DELETING_RECOVERY_SECONDS = {"RabbitMQ": 20, "PostgreSQL": 110, "Redis": 20, "deleter": 110}
"""How long after a fault of this part deletions may wait: the leases of a killed deleter expire after 90 and 110 s."""

MAX_SLOWDOWN, SLOWDOWN_SLACK_SECONDS = 2, 0.5
"""A pass may take this many times its usual time, and this much to write more rows: the number of queues grows."""

AFTER_FAULTS = (destroying.TOO_MANY_ATTEMPTS, writing.NOT_STORED, deleter.WAITED)
"""Why another owner's queue may be deleted without an archive during a fault."""

KINDS = (
    "sign in", "look at pages", "create Pulse users", "remove Pulse users", "change passwords", "list queues",
    "delete queues", "purge queues", "watch queues", "restore queues", "move messages", "register agents", "subscribe",
    "remove agents", "publish events", "create tokens", "revoke tokens",
)  # fmt: skip
"""The kinds of requests, as `Crowd` and `Careful` name them."""

T = TypeVar("T")

CAREFUL = careful.PULSE_USER.format("")


@dataclass
class Checks:
    """The checks of one run.

    ``each``: processes of each kind. Unless the run is ``complete``, requests and events of a kind may be missing.
    ``bad_exits`` and ``swept`` are the errors of terminated processes and of the sweep at the end. ``days`` have passed
    for the queues that are over their warning threshold. ``applied`` is the last run of ``apply``.
    """

    each: int
    complete: bool
    production: Production
    crowd: Crowd
    owners: Sequence[Person]
    busy: Sequence[LoadThread]
    began: datetime = field(default_factory=lambda: datetime.now(UTC))
    faults: list[Fault] = field(default_factory=list)
    bad_exits: list[str] = field(default_factory=list)
    swept: list[str] = field(default_factory=list)
    days: int = 0
    applied: applying.Run | None = None

    def _threads(self, kind: type[T]) -> list[T]:
        return [one for one in self.busy if isinstance(one, kind)]

    def breaches(self) -> list[str]:
        """Return the breaches that the next pass or delivery may resolve."""
        return [breach for finding in (self._mails(), self._agreement(), self._queues()) for breach in finding.breaches]

    def findings(self) -> Iterator[Finding]:
        errors = [f"{one.name}: {one.error!r}" for one in self.busy if one.error]
        yield Finding("The load ran to its end", f"{len(self.busy)} threads", errors)
        yield from self._requests()
        yield self._queues()
        for unruly in self._threads(Unruly):
            yield self._others()
            if unruly.began:
                yield self._slowdown(unruly.began)
        yield self._messages()
        yield self._watches()
        yield self._mails()
        yield self._reminders()
        yield self._applied()
        yield self._pulse_users()
        yield self._agents()
        yield self._events()
        yield self._agreement()
        yield self._passes()
        yield from self._faults_done()

    def _required(self, found: object, what: str) -> list[str]:
        """Return a breach if a complete run has none of these."""
        return [] if found or not self.complete else [f"there were no {what}"]

    def _requests(self) -> Iterator[Finding]:
        by_kind: dict[str, list[Request]] = defaultdict(list)
        for person in self.owners:
            for request in person.requests:
                by_kind[request.what].append(request)
        for kind in KINDS:
            requests = by_kind[kind]
            failed = [one for one in requests if one.problem]
            breaches = [one.problem for one in failed if not is_excused(one, self.faults)]
            slowest = max((one.ended - one.began for one in requests), default=0.0)
            counts = f"{len(requests)}; {len(failed)} failed because of a fault; the slowest took {slowest:.1f} s"
            yield Finding(f"Requests to {kind}", counts, breaches + self._required(requests, "requests"))

    def _queues(self) -> Finding:
        breaches = invariants.deleted_below_maximum() + invariants.incomplete_archives()
        breaches += invariants.inconsistent_decisions()
        deleted = QueueEvent.objects.filter(kind="deleted", vhost="/").values_list("queue_name", flat=True)
        [load] = self._threads(QueueLoad)
        overflows = sum((one.overflows for one in self._threads(Careful)), load.overflows)
        for name, times in Counter(name for name in deleted if not is_unruly(name)).items():
            if times > overflows[name]:
                breaches.append(f"{name} was deleted {times} times, and was over the limit {overflows[name]} times")
        for queue in Queue.objects.filter(state__in=["ok", "warned"]):
            if queue.length is not None and queue.length > MAX and not queue.registered:
                breaches.append(f"{queue} has {queue.length} messages, and was not deleted")
            elif queue.length is not None and (queue.length >= WARN) != (queue.state == "warned"):
                breaches.append(f"{queue} has {queue.length} messages, and is {queue.state}")
        events = Counter(QueueEvent.objects.order_by().values_list("kind", flat=True))
        for kind in ("warned", "recovered", "deleted"):
            breaches += self._required(events[kind], f"queues that were {kind}")
        done = load.done
        counts = (
            f"{done['queues declared']} declared, {done['messages published']} messages published,"
            f" {done['messages consumed']} consumed; {events['warned']} warnings, {events['recovered']} recoveries;"
            f" {events['deleted']} deleted by Guardian, {events['removed']} by owners"
        )
        return Finding("Queues", counts, breaches)

    def _others(self) -> Finding:
        """Check that the unruly owner delays no other owner's deletion, and costs no archive of another owner."""
        kept = {one.uuid.hex: one.messages for one in Archive.objects.filter(state=Archive.State.KEPT)}
        decided: dict[str, datetime] = {}
        seconds, unruly, breaches = [0.0], 0, []
        for event in QueueEvent.objects.filter(vhost="/").order_by("at", "id"):
            name, at, facts = event.queue_name, event.at, event.details
            since = decided.pop(name, at)
            if event.kind == QueueEvent.Kind.DELETABLE:
                decided[name] = at
            if event.kind != QueueEvent.Kind.DELETED:
                continue
            if is_unruly(name):
                unruly += 1
                continue
            if not was_down(since, at, self.faults, DELETING_RECOVERY_SECONDS):
                seconds.append((at - since).total_seconds())
            elif facts.get("why_not_archived") in AFTER_FAULTS:
                continue
            archived = facts.get("archived", 0)
            if archived + facts.get("held", 0) <= facts["max"] or kept.get(facts.get("archive")) != archived:
                breaches.append(f"the archive of {name} is gone or not whole: {facts}")
        late = [f"a queue was deleted {one:.1f} s after the decision" for one in seconds if one > MAX_DELETION_SECONDS]
        breaches += late + self._required(seconds[1:], "deletions") + self._required(unruly, "unruly deletions")
        counts = (
            f"{len(seconds) - 1} deletions without a fault, at most {max(seconds):.1f} s after the decision;"
            f" {unruly} of the unruly owner's queues"
        )
        return Finding("Owners beside an unruly one", counts, breaches)

    def _slowdown(self, began: datetime) -> Finding:
        """Compare the passes before the first fault, with the unruly owner, to those before that owner began."""
        first_fault = min(one.back - timedelta(seconds=one.ended - one.began) for one in self.faults)
        passes = Pass.objects.filter(at__lt=first_fault, at__gt=self.began, errors=[]).values_list("seconds", flat=True)
        before, after = list(passes.filter(at__lt=began)), list(passes.filter(at__gte=began))
        name = "Passes beside an unruly owner"
        if not before or not after:
            return Finding(name, f"{len(before)} before that owner, {len(after)} afterwards", ["too few to compare"])
        usual, slower = median(before), median(after)
        counts = f"{len(after)} took {slower:.2f} s (median), and {usual:.2f} s before"
        is_slow = slower > MAX_SLOWDOWN * usual + SLOWDOWN_SLACK_SECONDS
        return Finding(name, counts, ["they are slower than allowed"] if is_slow else [])

    def _messages(self) -> Finding:
        """Check that numbered messages are where they were restored or moved to, and twice only if that was counted."""
        url, management = self.production.amqp_urls[0], self.production.management
        names = {row["name"] for row in management.find_queues("/", {"name": CAREFUL, "disable_stats": "true"})}
        found = sum((_numbers_in(url, "/", name) for name in names), Counter[int]())
        archived, lost = set[int](), 0
        for archive in Archive.objects.filter(queue_name__contains=CAREFUL):
            lost += archive.dropped + archive.held
            restored = archive.replays.filter(state=Replay.State.DONE)
            if sum(replay.sent for replay in restored) < archive.messages:
                archived |= {json.loads(message.body)["number"] for _, message in reading.messages(archive)}
        for event in QueueEvent.objects.filter(kind=QueueEvent.Kind.DELETED, queue_name__contains=CAREFUL):
            lost += 0 if event.details.get("archive") else event.details["length"]
        sendings = [
            *Replay.objects.filter(archive__queue_name__contains=CAREFUL),
            *Move.objects.filter(queue__name__contains=CAREFUL),
        ]
        breaches = [
            f"{one} of {one.created:%T} {one.state}: {one.error}"
            for one in sendings
            if one.state != Replay.State.DONE
            and not was_down(one.created, one.finished or datetime.now(UTC), self.faults, {"RabbitMQ": 20})
        ]
        missing = set.union(*(one.confirmed for one in self._threads(Careful))) - found.keys() - archived
        if len(missing) > lost:
            breaches.append(f"{len(missing)} messages are missing, and {lost} were counted as lost: {sorted(missing)}")
        repeated, twice = sum(one.repeated for one in sendings), found.total() - len(found)
        if twice > repeated:
            breaches.append(f"{twice} messages arrived twice, and {repeated} may have by what was counted")
        done = sum(one.done["queues"] for one in self._threads(Careful))
        counts = (
            f"{len(found)} in {len(names)} queues, {len(archived)} in archives only, {len(missing)} of {lost} lost,"
            f" {twice} of {repeated} twice; {len(sendings)} restores and moves; {done} queues came through all of it"
        )
        return Finding("Messages restored and moved", counts, breaches + self._required(done, "such queues"))

    def _watches(self) -> Finding:
        rows = self.production.management.find_queues(None, {"name": WATCH_QUEUE, "disable_stats": "true"})
        breaches = [f"the queue {row['name']} of a watch still exists" for row in rows]
        breaches += [f"the watch of {one} has not ended" for one in MessageWatch.objects.all()]
        breaches += [f"{row} was guarded" for row in Queue.objects.filter(name__startswith=WATCH_QUEUE)]
        breaches += itertools.chain.from_iterable(one.missed for one in self._threads(Careful))
        done = sum(one.done["watches"] for one in self._threads(Careful))
        return Finding("Watches", f"{done}", breaches + self._required(done, "watches"))

    def _reminders(self) -> Finding:
        """Check that nobody was reminded of a Pulse user's queues more than once a day."""
        times: dict[tuple[str, str], set[object]] = defaultdict(set)
        reminders = Notification.objects.filter(kind="reminder")
        for to, channel, facts, group in reminders.values_list("recipient", "channel", "facts", "group"):
            times[f"{to} {channel}", user_of_queue(facts["queue"]) or facts["queue"]].add(group)
        breaches = [
            f"{to} was reminded of the queues of {user} {len(passes)} times in {self.days} days"
            for (to, user), passes in times.items()
            if len(passes) > self.days
        ]
        counts = f"{reminders.count()} in {self.days} days, about {len({user for _, user in times})} Pulse users"
        return Finding("Reminders", counts, breaches + self._required(times, "reminders"))

    def _applied(self) -> Finding:
        """Check that the last file is applied as a whole, whatever killed earlier runs."""
        [operator], last = self._threads(Applying), self.applied
        runs = operator.runs
        killed = [run.ended for run in runs if run.code < 0]
        failed = [run for run in runs if run.code not in (0, 2) and run.code > 0]
        breaches = [
            f"apply ended with {run.code} at {run.ended:%T}: {run.output}"
            for run in failed
            if "Traceback" in run.output
            or not (
                was_down(run.began, run.ended, self.faults, dict.fromkeys(("RabbitMQ", "PostgreSQL"), 110))
                or any(run.began - at < applying.KILLED_LEASE for at in killed if at <= run.began)
            )
        ]
        if last is None or last.code or applying.NOTHING_TO_DO not in last.output:
            breaches.append(f"apply still has something to do: {last}")
        name = applying.PULSE_USER.format("")
        rows = set(PulseUser.objects.filter(username__startswith=name).values_list("username", flat=True))
        users = {user.name for user in self.production.management.users() if user.name.startswith(name)}
        if not rows == users == operator.pulse_users:
            breaches.append(f"the file has {operator.pulse_users}, Guardian {rows}, and RabbitMQ {users}")
        counts = f"{len(runs)} runs, {len(killed)} killed, {len(failed)} failed because of a fault"
        return Finding("Apply", counts, breaches + self._required(killed, "killed runs"))

    def _mails(self) -> Finding:
        mails = self.production.mail.mails
        # A sender may be interrupted after the mail server accepts a mail, before it records this. A worker has two.
        senders = {"worker": 2, "PostgreSQL": 2 * self.each, "the mail server": 2 * self.each}
        interrupted = mail_sending.MAIL_BATCH_SIZE * sum(
            senders.get(fault.part.partition("-")[0], 0) for fault in self.faults if fault.how in ("killed", "stopped")
        )
        breaches = invariants.mail_breaches(mails, interrupted=interrupted) + self._unequal_copies()
        counts = f"{len(mails)}; {invariants.count_resent_mails(mails)} of them sent again after an interruption"
        return Finding("Mails", counts, breaches + self._required(mails, "mails"))

    def _unequal_copies(self) -> list[str]:
        """Return the owners that were not notified exactly as often as the operator about a Pulse user's queue."""
        sent: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        rows = Notification.objects.filter(kind__in=invariants.QUEUE_KINDS, channel=audience.EMAIL)
        for recipient, kind, facts in rows.values_list("recipient", "kind", "facts"):
            sent[kind, facts["queue"]][recipient] += 1
        return [
            f"{owner} got {counts[owner]} notifications ({kind}, {queue}), and {OPERATOR} {counts[OPERATOR]}"
            for (kind, queue), counts in sent.items()
            for owner in self.crowd.outcome.pulse_users.get(user_of_queue(queue) or "", ())
            if counts[owner] != counts[OPERATOR]
        ]

    def _pulse_users(self) -> Finding:
        outcome = self.crowd.outcome
        rows = set(PulseUser.objects.values_list("username", flat=True))
        users = {user.name for user in self.production.management.users()}
        breaches = [f"{name} was created, and has no row" for name in outcome.pulse_users.keys() - rows]
        breaches += [f"{name} was created, and is not on the broker" for name in outcome.pulse_users.keys() - users]
        breaches += [f"{name} was removed, and still exists" for name in outcome.removed_pulse_users & (rows | users)]
        counts = f"{len(outcome.pulse_users)} created and kept, {len(outcome.removed_pulse_users)} removed"
        return Finding("Pulse users", counts, breaches + self._required(outcome.pulse_users, "Pulse users"))

    def _agents(self) -> Finding:
        outcome = self.crowd.outcome
        breaches = [*self.swept, *invariants.missing_registrations(outcome.agents)]
        breaches += [f"{queue} was answered {times} times" for queue, times in outcome.answered.items() if times > 1]
        for model in invariants.REGISTERED:
            there = outcome.removed_queues & set(model._default_manager.values_list("vhost", "queue_name"))
            breaches += [f"{name} in {vhost} was removed, and still exists" for vhost, name in there]
        counts = f"{len(outcome.agents)} registered and kept, {len(outcome.removed_queues)} removed"
        return Finding("Agents", counts, breaches + self._required(outcome.agents, "agents"))

    def _events(self) -> Finding:
        """Check that each event is in all the queues that its answer counted."""
        outcome = self.crowd.outcome
        url = self.production.amqp_urls[0]
        found = {agent.queue: _numbers_in(url, *agent.queue) for agent in outcome.agents.values()}
        expected = [
            (event.number, agent.queue)
            for event in outcome.events
            for agent in outcome.agents.values()
            if event.everywhere and event.offering == agent.offering and event.object_type in agent.types
            if agent.ready < event.began
        ]
        breaches = [
            f"event {number} is not in {queue.queue}" for number, queue in expected if number not in found[queue]
        ]
        counts = (
            f"{len(outcome.events)} published, {sum(event.delivered for event in outcome.events)} times delivered;"
            f" {sum(found.values(), Counter[int]()).total()} are in the queues of the agents that are left,"
            f" {len(expected)} have to be"
        )
        return Finding("Events", counts, breaches + self._required(expected, "events that have to be in a queue"))

    def _agreement(self) -> Finding:
        management = self.production.management
        vhosts = [vhost.name for vhost in management.vhosts()]
        return Finding("Database and broker", f"{len(vhosts)} vhosts", invariants.disagreements(management, vhosts))

    def _passes(self) -> Finding:
        passes = list(Pass.objects.order_by("at"))
        gap = max((later.at - earlier.at).total_seconds() for earlier, later in itertools.pairwise(passes))
        breaches = invariants.overlapping_passes()
        if gap > MAX_PASS_GAP_SECONDS:
            breaches.append(f"there was no pass for {gap:.1f} s")
        failed = [one for one in passes if one.errors]
        breaches += [
            f"the pass at {one.at:%T} reported: {one.errors[0]}" for one in failed if not self._may_pass_fail(one)
        ]
        counts = f"{len(passes)}, {len(failed)} failed because of a fault; the longest gap {gap:.1f} s"
        return Finding("Passes", counts, breaches)

    def _may_pass_fail(self, one: Pass) -> bool:
        """Return whether RabbitMQ or PostgreSQL was down during this pass, or shortly before."""
        recovery = {part: RECOVERY_SECONDS[part] for part in ("RabbitMQ", "PostgreSQL")}
        return was_down(one.at, one.at + timedelta(seconds=one.seconds), self.faults, recovery)

    def _faults_done(self) -> Iterator[Finding]:
        by_part: dict[tuple[str, str], list[Fault]] = defaultdict(list)
        for fault in self.faults:
            by_part[fault.part.partition("-")[0], fault.how].append(fault)
        good = list(Pass.objects.filter(errors=[]).order_by("at").values_list("at", flat=True))
        for (part, how), faults in sorted(by_part.items()):
            breaches = [f"no good pass came after {one.part} was back" for one in faults if good[-1] <= one.back]
            away = max(fault.ended - fault.began for fault in faults)
            waits = [
                next((at - one.back).total_seconds() for at in [*good, one.back] if at >= one.back) for one in faults
            ]
            counts = f"{len(faults)} times, for {away:.1f} s at most; a good pass {max(waits):.1f} s later at most"
            yield Finding(f"{part}: {how}", counts, breaches)
        yield Finding("Exit codes after SIGTERM", f"{len(self.bad_exits)} wrong", self.bad_exits)


def _numbers_in(amqp_url: str, vhost: str, queue: str) -> Counter[int]:
    """Return how often each event is in a queue, by the event's number; the events are requeued."""
    connection = pika.BlockingConnection(pika.URLParameters(f"{amqp_url}/{quote(vhost, safe='')}"))
    found: Counter[int] = Counter()
    with contextlib.closing(connection):
        channel = connection.channel()
        while (got := channel.basic_get(queue))[0] is not None:
            found[json.loads(got[2])["number"]] += 1
    return found
