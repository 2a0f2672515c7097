"""``make soak STORE=cassandra``: put the message store on three Cassandra nodes under load while nodes fail.

Two web processes serve the store as in production. Their clocks are wrong by hours, and those of the nodes differ by a
third of the delay, the most that is documented. Writers post messages and batches to a queue of each level over both,
and followers read on after their last message. Meanwhile nodes are killed, paused, cut off, or run out of disk: one at
a time, then two, but of full disks only one. At the end, all is read, and compared with what was acknowledged.
"""

import contextlib
import itertools
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import httpx
from cassandra import ConsistencyLevel
from cassandra.query import SimpleStatement

from guardian_store import Client, ClientError, NewMessage, Page, Unavailable
from tools.cassandra import PrivateCassandra, PrivateRing
from tools.faults import Finding
from tools.load import ANSWER_SECONDS, LoadThread, Request
from tools.machines import Clock, Machine, machines
from tools.postgresql import PrivateCluster
from tools.processes import StartError, free_port, happens
from tools.stack import Stack, isolated
from tools.store_history import (
    BATCHES,
    FAULTS,
    POSTS,
    READS,
    Entry,
    Outage,
    Position,
    QueueHistory,
    answer_findings,
    body_of,
    outage_findings,
)

APPLICATION = "chaos"
LEVELS = ("weak", "strong", "very_strong")
PARTITIONS = 3
BATCH_SIZES = (1, 1, 1, 2, 6)

DELAY_SECONDS = 3.0
NODE_CLOCKS = (DELAY_SECONDS / 6, 0.0, -DELAY_SECONDS / 6)
WEB_CLOCKS = (3 * 3600.0, -2 * 3600.0)

NODE_SETTINGS = {
    "commitlog_sync": "batch",  # a node that was killed still has what it acknowledged
    "commitlog_sync_period": None,
    "hints_flush_period": "1s",  # so that `_hints` finds them
}

NOW = "SELECT toUnixTimestamp(now()) FROM system.local"

RECOVERY_SECONDS = 600
SETTLE_SECONDS = 60
READS_PER_POSITION = 10


class Actor(LoadThread):
    def __init__(self, name: str, client: Client, chance: random.Random, pause: float) -> None:
        super().__init__(name)
        self.requests: list[Request] = []
        self.client = client
        self.chance = chance
        self._pause = pause

    def work(self) -> None:
        while not self.ended.wait(self._pause):
            self.act()

    def act(self) -> None:
        raise NotImplementedError

    def ask(self, what: str, call: Callable[[], Any]) -> Any:
        """Return the result of a call, or None after an error."""
        began = time.monotonic()
        status, problem, result = 200, "", None
        try:
            result = call()
        except ClientError as error:
            status, problem = error.status or 0, str(error)
        self.requests.append(Request(self.name, began, time.monotonic(), problem, what, status))
        return result


class Writer(Actor):
    def __init__(self, queue: QueueHistory, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._queue = queue
        self._numbers = itertools.count()

    def act(self) -> None:
        size = self.chance.choice(BATCH_SIZES)
        batch = f"{self.name}-{next(self._numbers)}"
        messages = [
            NewMessage(body_of(batch, number, size), partition=self.chance.randint(1, PARTITIONS))
            for number in range(size)
        ]
        kind = POSTS if len({message.partition for message in messages}) == 1 else BATCHES
        posted = self.ask(f"{self._queue.level}: {kind}", lambda: self.client.post_many(self._queue.name, messages))
        for message, one in zip(messages, posted or (), strict=posted is not None):
            self._queue.acked.add(Entry(one.partition, one.id, str(message.body)))


class Follower(Actor):
    """Reads a queue on after its last messages, and stores their ids as its positions now and then."""

    def __init__(self, queue: QueueHistory, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.queue = queue
        self.position = Position()
        self._last: dict[int, str] = {}
        self._seen: list[Entry] = []
        self._reads = itertools.count(1)
        queue.followed.append(self._seen)

    def act(self) -> None:
        self.follow()
        if next(self._reads) % READS_PER_POSITION == 0 and self._last:
            positions = dict(self._last)
            self.position.unknown.append(positions)
            self.ask("positions", lambda: self.client.set_positions(self.queue.name, self.name, positions))
            if self.requests[-1].status == 200:
                self.position = Position(positions)

    def follow(self) -> bool:
        """Read the next messages of each partition, and return whether all were read to their end."""
        is_at_end = True
        for partition in range(1, PARTITIONS + 1):
            page: Page | None = self.ask(
                f"{self.queue.level}: {READS}",
                lambda: self.client.read(self.queue.name, partition=partition, after=self._last.get(partition)),  # noqa: B023
            )
            is_at_end = is_at_end and page is not None and not page.messages
            for message in page.messages if page else ():
                self._last[partition] = message.id
                self._seen.append(Entry(partition, message.id, message.text))
        return is_at_end


class Creator(Actor):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.created: dict[str, tuple[str, int]] = {}
        """The level and number of partitions of the acknowledged queues."""
        self._numbers = itertools.count()

    def act(self) -> None:
        name, level = f"{self.name}-{next(self._numbers)}", self.chance.choice(LEVELS)
        partitions = self.chance.randint(1, 9)
        if self.ask("queues", lambda: self.client.create_queue(name, consistency=level, partitions=partitions)):
            self.created[name] = (level, partitions)


class StoreChaos:
    """One run: the nodes and processes, the load, the faults and the checks."""

    def __init__(self, seconds: float, seed: int, directory: Path, say: Callable[[str], None]) -> None:
        """Prepare the run. Logs and data go under ``directory``. Each fault happens, however few the seconds."""
        self._seconds = seconds
        self._max_outage = 12.0 if seconds < 300 else 25.0
        self._chance = random.Random(seed)
        self._directory = directory
        self._say = say
        self._outages: list[Outage] = []
        self._queues = [QueueHistory(level, level) for level in LEVELS]

    def run(self) -> list[Finding]:
        """Run the chaos and return the findings. Raises StartError if a part does not start or come back."""
        self._say("Starting three nodes of Cassandra, PostgreSQL and two web processes.")
        with ExitStack() as exits:
            clock = Clock(self._directory)
            self._machines = exits.enter_context(machines(len(NODE_CLOCKS)))
            self._nodes = self._create_nodes(clock)
            ring = PrivateRing(self._nodes)
            exits.callback(ring.stop)
            exits.callback(self._keep_logs)
            ring.start(RECOVERY_SECONDS)
            database = exits.enter_context(PrivateCluster())
            self._stack = exits.enter_context(self._create_stack(clock, database.create_database("guardian")))
            self._stack.prepare()
            self._stack.manage("message_store_schema")
            self._key = self._stack.manage("create_application", APPLICATION).strip()
            self._stack.start()
            with self._client("web-1") as client:
                for queue in self._queues:
                    client.create_queue(queue.name, consistency=queue.level, partitions=PARTITIONS)
            clocks = self._clocks()
            self._say(f"Clients begin, for {self._seconds:.0f} s.")
            with self._load():
                self._do_faults()
            self._await_end()
            return [clocks, *self._findings()]

    def _create_nodes(self, clock: Clock) -> list[PrivateCassandra]:
        ports = free_port(), free_port()
        return [
            PrivateCassandra(
                address=machine.address,
                seed=self._machines[0].address,
                ports=ports,
                is_fast_to_start=False,
                disk=machine.disk,
                command=[*machine.command, *clock.shifted(shift)],
                settings=NODE_SETTINGS,
            )
            for machine, shift in zip(self._machines, NODE_CLOCKS, strict=True)
        ]

    def _keep_logs(self) -> None:
        for machine, node in zip(self._machines, self._nodes, strict=True):
            with contextlib.suppress(OSError):
                shutil.copy(node.directory / "log", self._directory / "log" / f"{machine.name}.log")

    def _create_stack(self, clock: Clock, database_url: str) -> Stack:
        settings = {
            "DATABASE_URL": database_url,
            "LOG_LEVEL": "WARNING",
            "MESSAGE_STORE": "cassandra",
            "MESSAGE_STORE_DELAY_SECONDS": str(DELAY_SECONDS),
            "CASSANDRA_HOSTS": ",".join(node.hosts for node in self._nodes),
            "RABBITMQ_MANAGEMENT_URL": "http://127.0.0.1:1",  # unused
            "EMAIL_URL": "consolemail://",
        }
        commands = {f"web-{number}": clock.shifted(shift) for number, shift in enumerate(WEB_CLOCKS, 1)}
        return Stack(
            isolated(settings),
            var=self._directory,
            say=lambda text: None,
            web=len(WEB_CLOCKS),
            workers=0,
            commands=commands,
        )

    def _client(self, web: str) -> Client:
        return Client(self._stack.addresses[web], APPLICATION, key=self._key, timeout=ANSWER_SECONDS)

    def _clocks(self) -> Finding:
        nodes = []
        for node in self._nodes:
            with node.connect() as session:
                session.execute(NOW)  # the first is slow
                asked = time.time()
                milliseconds = session.execute(NOW).one()[0]
                nodes.append(milliseconds / 1000 - (asked + time.time()) / 2)
        webs = []
        for address in self._stack.addresses.values():
            date = parsedate_to_datetime(httpx.get(f"{address}/healthz", trust_env=False).headers["date"])
            webs.append((date - datetime.now(UTC)).total_seconds())
        counts = (
            f"nodes {', '.join(f'{one:+.2f} s' for one in nodes)};"
            f" web processes {', '.join(f'{one / 3600:+.1f} h' for one in webs)}"
        )
        breaches = [
            f"a clock is wrong by {found:.2f} s instead of {expected:.2f} s"
            for found, expected in zip([*nodes, *webs], [*NODE_CLOCKS, *WEB_CLOCKS], strict=True)
            if abs(found - expected) > (0.2 if expected in NODE_CLOCKS else 2)
        ]
        return Finding("clocks", counts, breaches)

    @contextlib.contextmanager
    def _load(self) -> Iterator[None]:
        self._followers: list[Follower] = []
        self._actors: list[Actor] = []
        for web in self._stack.addresses:

            def options(kind: str, pause: float, web: str = web) -> tuple[Any, ...]:
                return f"{kind}-{web}", self._client(web), random.Random(self._chance.random()), pause

            for queue in self._queues:
                self._actors.append(Writer(queue, *options(f"writer-{queue.name}", 0.2)))
                self._followers.append(Follower(queue, *options(f"follower-{queue.name}", 0.5)))
            self._actors.append(Creator(*options("creator", 2)))
        self._actors += self._followers
        for actor in self._actors:
            actor.start()
        try:
            yield
        finally:
            for actor in self._actors:
                actor.ended.set()
            for actor in self._actors:
                actor.join(ANSWER_SECONDS)

    # Faults

    def _do_faults(self) -> None:
        """Cause faults one after the other until the time is over, in rounds of all: of one node, then of two."""
        until = time.monotonic() + self._seconds
        for number in itertools.count():
            ones, twos = self._chance.sample(FAULTS, len(FAULTS)), self._chance.sample(FAULTS[:3], 3)
            for how, count in [*((how, 1) for how in ones), *((how, 2) for how in twos)]:
                if number and time.monotonic() > until:
                    return
                time.sleep(self._chance.uniform(1, 3))
                self._do_fault(how, self._chance.sample(range(len(self._nodes)), count))

    def _do_fault(self, how: str, numbers: Sequence[int]) -> None:
        """Take nodes down, bring them back after a random time, and wait until they have what they missed."""
        began = time.monotonic()
        for number in numbers:
            self._take(how, self._machines[number], self._nodes[number])
        gone = time.monotonic()
        self._say(f"{how}: node {' and '.join(str(number + 1) for number in numbers)}.")
        time.sleep(self._chance.uniform(0.5, 1) * self._max_outage)
        until = time.monotonic()
        with ThreadPoolExecutor() as threads:  # a start takes long
            list(threads.map(lambda number: self._bring(how, self._machines[number], self._nodes[number]), numbers))
        self._outages.append(Outage(how, numbers, began, gone, until, time.monotonic()))
        self._await_recovery()

    def _take(self, how: str, machine: Machine, node: PrivateCassandra) -> None:
        match how:
            case "killed":
                node.kill()
            case "paused":
                node.pause()
            case "cut off":
                machine.cut_off()
            case "full disk":
                machine.fill_disk()

    def _bring(self, how: str, machine: Machine, node: PrivateCassandra) -> None:
        match how:
            case "killed":
                node.start(RECOVERY_SECONDS)
            case "paused":
                node.resume()
            case "cut off":
                machine.reconnect()
            case "full disk":  # an operator makes room, and restarts the node
                machine.free_disk()
                node.kill()
                node.start(RECOVERY_SECONDS)

    def _await_recovery(self) -> None:
        """Wait until each node sees all others, and no hints are left. Raises StartError."""
        if not happens(lambda: all(map(self._sees_all, self._nodes)) and not self._hints(), RECOVERY_SECONDS, 2):
            raise StartError(f"The nodes did not recover; hints: {self._hints()}")

    def _sees_all(self, node: PrivateCassandra) -> bool:
        query = SimpleStatement(
            "SELECT version FROM guardian.schema_version WHERE key = 'schema'", consistency_level=ConsistencyLevel.ALL
        )
        try:
            with node.connect() as session:
                return session.execute(query, timeout=5).one() is not None
        except Exception:  # the driver has many
            return False

    def _hints(self) -> list[str]:
        return [path.name for machine in self._machines for path in (machine.disk / "hints").glob("*.hints")]

    # The end

    def _await_end(self) -> None:
        """Let followers read to the end, and read the queues whole.

        Cassandra may still be storing the rest of a batch that got 503: that is waited for.
        """
        self._say("The load has ended. Waiting for what is under way.")
        self._await_recovery()
        time.sleep(2 * DELAY_SECONDS)
        deadline = time.monotonic() + SETTLE_SECONDS
        with self._client("web-1") as client:
            while True:
                at_end = [follower.follow() for follower in self._followers]
                with contextlib.suppress(Unavailable):
                    for queue in self._queues:
                        queue.stored = [
                            Entry(message.partition, message.id, message.text)
                            for partition in range(1, PARTITIONS + 1)
                            for message in client.messages(queue.name, partition=partition)
                        ]
                    strong = [queue for queue in self._queues if queue.level != "weak"]
                    if all(at_end) and not any(queue.partial_batches() for queue in strong):
                        return
                if time.monotonic() > deadline:
                    return
                time.sleep(1)

    def _findings(self) -> Iterator[Finding]:
        for queue in self._queues:
            yield from queue.findings()
        yield from self._positions_and_queues()
        requests = [request for actor in self._actors for request in actor.requests]
        yield from outage_findings(self._outages, requests)
        yield from answer_findings(requests)
        stopped = [f"{actor.name} stopped: {actor.error!r}" for actor in self._actors if actor.error]
        stopped += [f"{actor.name} hangs" for actor in self._actors if actor.is_alive()]
        yield Finding("clients", f"{len(self._actors)}, {len(stopped)} stopped early", stopped)

    def _positions_and_queues(self) -> Iterator[Finding]:
        created = {
            name: one for actor in self._actors if isinstance(actor, Creator) for name, one in actor.created.items()
        }
        with self._client("web-2") as client:
            found = {queue.name: (queue.consistency, queue.partitions) for queue in client.queues()}
            breaches = [
                f"{name} was created as {expected}, and is {found.get(name)}"
                for name, expected in created.items()
                if found.get(name) != expected
            ]
            yield Finding("queues", f"{len(created)} created, {len(breaches)} wrong", breaches)
            breaches = [
                breach
                for follower in self._followers
                for breach in follower.position.breaches(client.positions(follower.queue.name, follower.name))
            ]
            yield Finding("positions", f"{len(self._followers)} consumers, {len(breaches)} wrong", breaches)
