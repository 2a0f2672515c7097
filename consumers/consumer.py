"""The consumer: one connection that reads, one that publishes, threads that work, and what happens to each message.

Three kinds of thread, and what each may touch. The link's thread has the channels: it declares, reads, and sends what
was settled. Workers take from what waits, call the callback, claim the message by `_claim`, and say what became of it
by `_settle`. Whoever called `run` waits, watches the time limit, and ends it all; a message whose callback took too
long has a thread of its own, since dealing with it may take as long as the broker takes no messages.

A message is claimed once, before anything is published for it or said about it, by the callback's thread or on behalf
of the time limit: so it is never both done and delayed, or parked twice.

yapw's clients are not used for this. They acknowledge one by one, through a callback for each; have one channel; stop
for good when a queue is deleted or a channel closed; and stop at a body that can't be decoded. What is the same are the
names, the exchange, the encoding of bodies, and the meanings of halt and discard, so that publishers and consumers with
yapw and with this can be mixed.
"""

import logging
import random
import signal
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from pika.exceptions import ChannelClosedByBroker

from consumers import retries
from consumers.decoding import DECODERS, Decoder, decode
from consumers.delivery import Delivery, Intake, Verdict
from consumers.errors import ConsumerError, Halted, Hung, NotPublished, Unroutable
from consumers.link import GOODBYE_SECONDS, Link, Steps, open_channel
from consumers.message import Message
from consumers.names import delay_queue, parking_queue, return_key
from consumers.outcomes import Decision, Outcome, TookTooLong, Unreadable, decide
from consumers.publisher import Publisher, declare_exchange
from consumers.settings import Settings
from consumers.source import (
    OVERDUE_SECONDS,
    Binding,
    Exchange,
    Limiter,
    PhysicalQueue,
    Preferring,
    Routed,
    Source,
    Waiting,
)
from consumers.workers import RateLimited, Workers, joined

logger = logging.getLogger(__name__)

Callback = Callable[[Message], object]
Listener = Callable[[Message, Outcome | None, float], None]
"""Is told of each message: what became of it, and how many seconds the callback took. None: it failed after it was
acknowledged."""

REQUEUE_SECONDS = (1.0, 5.0)
"""How long a worker waits, at random between these, before it gives back a message that couldn't be published on."""

HURRIED_SECONDS = 0.5
"""How long the broker has to answer a goodbye after a second signal."""

WATCH_SECONDS = 0.5
"""How often it is looked whether a callback has taken too long."""


class Consumer:
    """Reads a source, and calls the callback with each message, in threads.

    ``source`` is a queue's key, plain or with priorities as the settings say, or a `Source`. `run` it, or several with
    `run_all`.
    ``figures`` and ``counts`` say how it does; ``listeners`` are called in the worker's thread after each message.
    """

    def __init__(
        self,
        settings: Settings,
        source: Source | str,
        callback: Callback,
        *,
        limiter: Limiter | None = None,
        decoders: Mapping[str, Decoder] | None = None,
        publisher: Publisher | None = None,
        listeners: Sequence[Listener] = (),
    ) -> None:
        self.settings = settings
        self.names = settings.names
        self.source: Source = settings.source(source) if isinstance(source, str) else source
        self.publisher = publisher or Publisher(settings)
        self.counts: Counter[str] = Counter()
        """How many messages by what became of them (`Outcome`'s values); and "late": failed after they were
        acknowledged; "void": their connection was lost before, so that they come again; "unpublished": put back, as the
        broker took no message for a delay or the parking queue; "reconnected"."""
        self.listeners = list(listeners)
        self._own_publisher = publisher is None
        self._callback = callback
        self._decoders = DECODERS if decoders is None else {**DECODERS, **decoders}
        self._limiter = limiter or settings.limiter(self.names.queue(self.source.key))
        self._name = self.source.key
        self._waiting = self.source.waiting()
        self._in_a_row = 0
        self._grown = settings.grown_prefetch <= settings.young_prefetch
        self._link = Link(settings.parameters, f"consumer of {self._name}", self._set_up, self._lost, self.fail)
        self._intakes: list[Intake] = []
        self._reading = self._starting = False
        self._resting = False
        self._restored: list[threading.Event] = []
        self._together = 1
        self._settled: deque[tuple[Delivery, Verdict, Outcome]] = deque()
        self._flushing = False
        self._held = False
        self._in_hand: dict[int, tuple[Message, float]] = {}
        self._settling = threading.Lock()
        self._counting = threading.Lock()
        self._hung: dict[Message, threading.Thread] = {}
        self._ended: SimpleQueue[ConsumerError | None] = SimpleQueue()
        self._stopping = threading.Event()
        self._last_acknowledged = time.monotonic()
        prefetches = [queue.prefetch for queue in self.source.queues(self.names, settings.grown_prefetch)]
        spare = max(1, min(prefetches) // 2) if len(prefetches) > 1 else 0
        threads = settings.threads or min(prefetches) + spare
        waiting: Waiting | RateLimited = self._waiting
        if self._limiter is not None:
            waiting = RateLimited(self._waiting, self._limiter, settings.hold_seconds, self._hold, self._read_on)
        self._workers = Workers(threads, waiting, self._handle, self._name, self._broke)

    # What people call

    def run(self, *, signals: bool = True) -> None:
        """Consume until SIGTERM or SIGINT, finish what is in hand, and return; a second signal returns at once.

        Signals are handled in the main thread alone. Raises Refused, Halted or Hung, after the same.
        """
        run_all([self], signals=signals)

    def start(self) -> None:
        """Connect and consume, in threads of its own."""
        self._link.start()

    def stop(self) -> None:
        """Ask for the end: `wait` then returns. Any thread, and a signal's handler, may call this."""
        self._ended.put(None)

    def fail(self, error: ConsumerError) -> None:
        """Ask for the end, because of this error, which `wait` then gives."""
        self._ended.put(error)

    def wait(self, timeout: float | None = None) -> tuple[bool, ConsumerError | None]:
        """Wait until it is to end; return whether it is, and the error if one is why. `close` it then."""
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            left = WATCH_SECONDS if until is None else min(WATCH_SECONDS, until - time.monotonic())
            try:
                return True, self._ended.get(timeout=max(left, 0.001))
            except Empty:
                self._look_for_the_hung()
                self._look_for_the_overdue()
                if until is not None and time.monotonic() >= until:
                    return False, None

    def close(self, *, hurry: Callable[[], bool] = lambda: False) -> bool:
        """Take no more, finish what is in hand, and close the connections; what was not begun goes back to the broker.

        Return whether all that was in hand was finished within the settings' ``grace``, and before ``hurry()``.
        """
        self._stopping.set()
        self._link.call(self._stop_reading)
        self._workers.end()
        grace = self.settings.grace
        until = None if grace is None else time.monotonic() + grace
        finished = self._workers.wait(until, lambda: hurry() or self._only_the_hung_are_left())
        finished = joined(list(self._hung.values()), until, hurry) and finished
        if self._own_publisher:
            self.publisher.close(HURRIED_SECONDS if hurry() else GOODBYE_SECONDS)
        self._link.call(self._flush)
        self._link.call(self._void)
        self._link.close(HURRIED_SECONDS if hurry() else GOODBYE_SECONDS)
        if not finished:
            logger.warning("%s: ended with %d callbacks unfinished", self._name, len(self._in_hand))
        return finished

    @property
    def connected(self) -> bool:
        """Whether it is connected and set up."""
        return self._link.ready

    def figures(self) -> dict[str, float]:
        """Return how it stands: messages waiting and in hand here, seconds since one was acknowledged (or since the
        start) and since the oldest in hand was begun, the prefetch, and whether it is connected."""
        now = time.monotonic()
        begun = [since for _, since in list(self._in_hand.values())]
        return {
            "connected": float(self._link.ready),
            "waiting": float(len(self._waiting)),
            "in_hand": float(len(begun)),
            "oldest_in_hand_seconds": now - min(begun) if begun else 0.0,
            "seconds_since_acknowledged": now - self._last_acknowledged,
            "prefetch": float(sum(intake.prefetch for intake in self._intakes)),
        }

    # The link's thread

    def _queues(self) -> Sequence[PhysicalQueue]:
        """Return the physical queues with the prefetch of this moment.

        A limiter says how many messages are worth holding on top of those in hand: the slower the callbacks are, the
        more of them run at once, before the next is begun as soon as it may be.
        """
        prefetch = self.settings.grown_prefetch if self._grown else self.settings.young_prefetch
        if self._limiter is not None:
            prefetch = min(prefetch, self._together + self._limiter.prefetch(prefetch))
        return self.source.queues(self.names, prefetch)

    def _make_room(self, together: int) -> None:
        """Note that so many callbacks run at once, and hold more messages where the limiter has less held."""
        if together > self._together:
            self._together = 2 * together
            self._read_anew()

    def _set_up(self, link: Link, connection: Any) -> Steps:
        exchange = self.names.exchange
        intakes = []
        for number, queue in enumerate(self._queues()):
            channel = yield open_channel(connection)
            link.watch(channel)
            if not number:
                link.doing = f"the exchange {exchange}"
                yield declare_exchange(channel, exchange)
            yield from self._declare(channel, queue)
            intakes.append(Intake(queue.name, queue.level, queue.prefetch, channel))
        yield from self._routes(intakes[0].channel)
        if link.connects:
            self._count("reconnected")
        self._intakes = intakes
        for intake in intakes:
            intake.channel.add_on_cancel_callback(partial(self._cancelled, intake))
        self._reading = self._starting = False
        yield from self._read_all()

    def _declare(self, channel: Any, queue: PhysicalQueue) -> Steps:
        """Declare a queue, its parking queue and its delay queues, and bind them."""
        kind, names, name = self.settings.queue_type, self.names, queue.name
        parking = parking_queue(name)
        yield from self._queue(channel, parking, {"x-queue-type": kind}, [parking])
        arguments = {**retries.work_queue_arguments(kind, names, name), **queue.arguments}
        yield from self._queue(channel, name, arguments, [*queue.routing_keys, return_key(name)])
        for delay in self.settings.policy.delays:
            waiting = delay_queue(name, delay)
            arguments = retries.delay_queue_arguments(kind, names, name, delay)
            yield from self._queue(channel, waiting, arguments, [waiting])

    def _queue(self, channel: Any, name: str, arguments: dict[str, Any], routing_keys: Sequence[str]) -> Steps:
        self._link.doing = f"the queue {name}"
        yield partial(channel.queue_declare, name, durable=True, arguments=arguments)
        for key in routing_keys:
            yield partial(channel.queue_bind, name, self.names.exchange, key)

    def _routes(self, channel: Any) -> Steps:
        """Declare a source's exchanges, and make and take away its bindings."""
        if isinstance(self.source, Routed):
            for step in self.source.routes(self.names):
                yield self._routing(channel, step)

    def _routing(self, channel: Any, step: Exchange | Binding) -> Callable[..., Any]:
        """Return the step that declares a source's exchange, or makes or takes away a binding."""
        if isinstance(step, Exchange):
            self._link.doing = f"the exchange {step.name}"
            return partial(channel.exchange_declare, step.name, step.kind, durable=True, arguments=step.arguments)
        self._link.doing = f"the binding of {step.to} to {step.exchange}"
        kind = "exchange" if step.to_exchange else "queue"
        do = getattr(channel, f"{kind}_{'bind' if step.there else 'unbind'}")
        return partial(do, step.to, step.exchange, step.key, arguments=step.arguments)

    def _read_all(self) -> Steps:
        """Start reading all queues, with the prefetch of this moment; those that are read already, anew."""
        if self._starting or self._stopping.is_set() or self._held:
            return
        self._reading = self._starting = True
        self._resting = False
        for intake, queue in zip(self._intakes, self._queues(), strict=True):
            if intake.consumer_tag:
                tag, intake.consumer_tag = intake.consumer_tag, ""
                yield partial(intake.channel.basic_cancel, tag)
            intake.prefetch = queue.prefetch
            # It holds for consumers that are made afterwards: hence a new consumer for another prefetch.
            yield partial(intake.channel.basic_qos, prefetch_count=queue.prefetch)
            yield from self._read(intake)
        self._started_reading()

    def _read(self, intake: Intake) -> Steps:
        answer = yield partial(intake.channel.basic_consume, intake.queue, self._arrivals(intake))
        intake.consumer_tag = answer.method.consumer_tag

    def _started_reading(self) -> None:
        self._starting = False
        if self._stopping.is_set() or self._held:
            self._stop_reading()
        else:
            self._read_anew()

    def _read_anew(self) -> None:
        """Read again what isn't read as it should be: with another prefetch by now, or not any more."""
        if not self._reading or self._starting or self._restored:  # the last step of either of these calls this
            return
        if any(
            intake.prefetch != queue.prefetch or not (intake.consumer_tag or self._resting)
            for intake, queue in zip(self._intakes, self._queues(), strict=True)
        ):
            self._link.take_steps(self._read_all())

    def _arrivals(self, intake: Intake) -> Callable[..., None]:
        """Return what pika calls with each message of a channel."""
        put, wake = self._waiting.put, self._workers.wake

        def arrived(_: Any, method: Any, properties: Any, body: bytes) -> None:
            intake.arrived(method.delivery_tag)
            put(Delivery(intake, method, properties, body))
            wake()

        return arrived

    def _cancelled(self, intake: Intake, _: Any) -> None:
        """The broker has cancelled the reading: the queue was deleted, or lost its node. It is declared again."""
        logger.warning("%s: the queue %s is gone; it is declared again", self._name, intake.queue)
        intake.consumer_tag = ""
        self._restore(threading.Event())

    def _restore(self, done: threading.Event) -> None:
        """Declare all queues again, say when that is done, and read those on that aren't read any more.

        It has a channel of its own, which the broker may close; what is in hand stays so.
        """
        if not self._intakes:
            done.set()  # the next connection has all declared
            return
        self._restored.append(done)
        if len(self._restored) == 1:
            self._link.take_steps(self._declare_all())

    def _declare_all(self) -> Steps:
        channel = yield open_channel(self._intakes[0].channel.connection)
        channel.add_on_close_callback(self._not_restored)
        for queue in self._queues():
            yield from self._declare(channel, queue)
        yield from self._routes(channel)
        channel.close()
        self._are_restored()
        self._read_anew()

    def _not_restored(self, _: Any, reason: Any) -> None:
        if isinstance(reason, ChannelClosedByBroker):
            # The next connection finds out whether that is for good.
            self._link.drop(f"{self._link.doing}: {reason.reply_text} ({reason.reply_code})")

    def _are_restored(self) -> None:
        while self._restored:
            self._restored.pop().set()

    def _stop_reading(self) -> None:
        """Read nothing more, and give back what no worker has taken."""
        if not self._starting:  # else the last step of that calls this
            for intake in self._intakes:
                if intake.channel.is_open and intake.consumer_tag:
                    intake.channel.basic_cancel(intake.consumer_tag)
                    intake.consumer_tag = ""
            self._reading = False
        while (delivery := self._waiting.take()) is not None:
            _give_back(delivery)

    def _rest(self, overdue: Sequence[Delivery]) -> None:
        """Give back what has waited too long, and read no more from where it came."""
        self._resting = True
        for delivery in overdue:
            intake = delivery.intake
            if intake.channel.is_open and intake.consumer_tag:
                logger.info("%s: %s rests: what came from it has waited too long", self._name, intake.queue)
                intake.channel.basic_cancel(intake.consumer_tag)
                intake.consumer_tag = ""
            _give_back(delivery)

    def _rested(self) -> None:
        self._resting = False
        self._read_anew()

    def _go_on_reading(self) -> None:
        if self._link.ready and not self._reading:
            self._link.take_steps(self._read_all())

    def _grow(self) -> None:
        """Read with the grown prefetch from now on."""
        self._grown = True
        logger.info("%s: grown, after %d messages in a row without an error", self._name, self._in_a_row)
        self._read_anew()

    def _void(self) -> None:
        """Have nothing settled any more: it would not go out."""
        for intake in self._intakes:
            intake.open = False

    def _lost(self, reason: str) -> None:
        self._void()
        self._intakes = []
        self._reading = self._starting = False
        self._are_restored()
        # The broker has put them back. What is settled from here on is left out in `_flush`, by `open`.
        while self._waiting.take() is not None:
            self._count("void")

    def _flush(self) -> None:
        """Tell the broker what was settled since the last time."""
        self._flushing = False
        settled = self._settled
        by_intake: dict[Intake, tuple[list[int], list[int]]] = {}
        while settled:
            delivery, verdict, outcome = settled.popleft()
            intake = delivery.intake
            if not intake.open or not intake.channel.is_open:
                self._count("void")
                continue
            self._count(outcome.value)
            self._in_a_row = self._in_a_row + 1 if outcome is Outcome.DONE else 0
            tags = by_intake.get(intake)
            if tags is None:
                tags = by_intake[intake] = ([], [])
            tags[verdict is Verdict.REQUEUE].append(delivery.tag)
        for intake, (acked, requeued) in by_intake.items():
            intake.settle(acked, requeued)
            if acked:
                self._last_acknowledged = time.monotonic()
        if not self._grown and self._in_a_row >= self.settings.grows_after:
            self._grow()

    def _count(self, what: str) -> None:
        with self._counting:
            self.counts[what] += 1

    # The workers' threads

    def _hold(self) -> None:
        """Give back what waits for the limiter, and read nothing until `_read_on`."""
        logger.info("%s: no message may be worked on for a while: what waits goes back to the broker", self._name)
        self._held = True
        self._link.call(self._stop_reading)

    def _read_on(self) -> None:
        self._held = False
        self._link.call(self._go_on_reading)

    def _claim(self, message: Message) -> bool:
        """Take it upon oneself to say what becomes of a message; False where somebody else has."""
        with self._settling:
            if message._settled:
                return False
            message._settled = True
            return True

    def _settle(self, message: Message, verdict: Verdict, outcome: Outcome) -> None:
        """Say what becomes of a message that one has claimed."""
        self._settled.append((message._delivery, verdict, outcome))
        if not self._flushing:
            self._flushing = True
            self._link.call(self._flush)

    def _acknowledge(self, message: Message) -> bool:
        if not self._claim(message):
            return False
        self._settle(message, Verdict.ACK, Outcome.DONE)
        return message._delivery.intake.open

    def _handle(self, delivery: Delivery) -> None:
        if not delivery.intake.open:
            self._count("void")
            return
        message = Message(self, delivery, None)
        thread = threading.get_ident()
        begun = time.monotonic()
        self._in_hand[thread] = message, begun
        if self._limiter is not None and (together := len(self._in_hand)) > self._together:
            self._link.call(partial(self._make_room, together))
        outcome: Outcome | None = Outcome.DONE
        try:
            properties = delivery.properties
            if why := getattr(properties, "unreadable", ""):
                raise Unreadable(why)
            message.body = decode(delivery.body, properties.content_type, properties.content_encoding, self._decoders)
            self._callback(message)
        except BaseException as error:
            # Claimed first of all: the time limit is the callback's, and publishing may take long.
            took, outcome = time.monotonic() - begun, None
            if self._claim(message):
                outcome = self._failed(message, error, "".join(traceback.format_exception(error)))
            else:
                self._failed_late(message, error)
        else:
            took = time.monotonic() - begun
            self._acknowledge(message)
        finally:
            self._in_hand.pop(thread, None)
        for listener in self.listeners:
            try:
                listener(message, outcome, took)
            except Exception:
                logger.exception("%s: a listener failed; the message was dealt with", self._name)

    def _decide(self, message: Message, error: BaseException) -> Decision:
        return decide(error, self.settings.policy, message.attempts, message._delivery.redelivered)

    def _failed_late(self, message: Message, error: BaseException) -> None:
        """Note that a callback failed after its message was acknowledged, or dealt with after the time limit."""
        logger.error("%s: %r failed after it was acknowledged", self._name, message, exc_info=error)
        self._count("late")
        if self._decide(message, error).outcome is Outcome.HALT:
            self._halt(message, error)

    def _failed(self, message: Message, error: BaseException, trace: str) -> Outcome:
        """Do with a message that one has claimed what its exception means; return what that was."""
        decision = self._decide(message, error)
        level = logging.WARNING if decision.outcome is Outcome.RETRY else logging.ERROR
        logger.log(level, "%s: %r failed: %s", self._name, message, _WORDS[decision.outcome], exc_info=error)
        if decision.outcome is Outcome.HALT:
            self._halt(message, error)
        elif decision.outcome is Outcome.DISCARD:
            self._settle(message, Verdict.ACK, Outcome.DISCARD)
        elif decision.outcome is Outcome.REQUEUE:
            self._settle(message, Verdict.REQUEUE, Outcome.REQUEUE)
        elif not self._send_on(message, error, trace, decision):
            return Outcome.REQUEUE
        return decision.outcome

    def _halt(self, message: Message, error: BaseException) -> None:
        halted = Halted(f"{self._name}: stopped by {message!r}: {retries.in_words(error)}")
        halted.__cause__ = error
        self.fail(halted)

    def _send_on(self, message: Message, error: BaseException, trace: str, decision: Decision) -> bool:
        """Publish a message to a delay queue or the parking queue, and acknowledge it then; False: it was put back.

        A crash between the two leaves it in both, with the same message id. While the broker takes no messages, it is
        kept in hand: put back, it would come again at once, and its callback would be called time after time. Where its
        connection is lost it comes again anyway, and isn't published besides.
        """
        delivery = message._delivery
        if decision.outcome is Outcome.RETRY:
            routing_key, properties = retries.delayed(delivery, self.names, error, decision.delay)
        else:
            routing_key, properties = retries.parked(delivery, self.names, error, trace)
        declared = False
        while delivery.intake.open:
            try:
                self.publisher.send(
                    routing_key, delivery.body, properties, mandatory=True, patient=lambda: self._may_keep(delivery)
                )
            except NotPublished as failure:
                if self._may_keep(delivery):
                    if self.publisher.blocked and not failure.unknown:
                        logger.warning("%s: %r is kept: %s", self._name, message, failure)
                        continue
                    if isinstance(failure, Unroutable) and not declared:
                        logger.warning("%s: %s; its queue is declared again", self._name, failure)
                        declared = True
                        done = threading.Event()
                        self._link.call(partial(self._restore, done))
                        done.wait(self.settings.publish_timeout)
                        continue
                self._put_back(message, failure)
                return False
            self._settle(message, Verdict.ACK, decision.outcome)
            return True
        self._settle(message, Verdict.REQUEUE, Outcome.REQUEUE)  # it is void, and counted so
        return False

    def _put_back(self, message: Message, failure: NotPublished) -> None:
        logger.error("%s: %r is put back into its queue: %s", self._name, message, failure)
        self._count("unpublished")
        if isinstance(failure.__cause__, ConsumerError):
            self.fail(failure.__cause__)
        # Put back at once it would come at once, and again.
        self._stopping.wait(random.uniform(*REQUEUE_SECONDS))  # noqa: S311
        self._settle(message, Verdict.REQUEUE, Outcome.REQUEUE)

    def _may_keep(self, delivery: Delivery) -> bool:
        """Whether a message may be kept in hand: it isn't the end, and the broker's timeout for it is some way off."""
        if self._stopping.is_set() or not delivery.intake.open:
            return False
        limit = self.settings.time_limit
        return not limit or time.monotonic() - delivery.since < limit + OVERDUE_SECONDS

    def _broke(self, error: BaseException) -> None:
        """End, as a worker failed: its message isn't acknowledged, and comes again."""
        broken = ConsumerError(f"{self._name}: a worker failed: {retries.in_words(error)}")
        broken.__cause__ = error
        self.fail(broken)

    # The thread that waits

    def _look_for_the_hung(self) -> None:
        """Have messages dealt with whose callbacks take longer than the time limit, and the end asked for then.

        A thread can't be stopped from outside, so the process has to be started anew. Without this the broker's own
        timeout (30 minutes) would close the channel, and the next thread would hang on the same message.
        """
        limit = self.settings.time_limit
        if not limit:
            return
        now = time.monotonic()
        for thread, (message, since) in list(self._in_hand.items()):
            if now - since < limit or not self._claim(message):
                continue
            frame = sys._current_frames().get(thread)
            trace = "".join(traceback.format_stack(frame)) if frame else ""
            error = TookTooLong(f"the callback did not return or acknowledge within {limit:g} s")
            logger.error("%s: %r: %s; it is at:\n%s", self._name, message, error, trace)
            name = f"{self._name}-hung-{len(self._hung) + 1}"
            self._hung[message] = threading.Thread(
                target=self._deal_with_hung, args=(message, error, trace), name=name, daemon=True
            )
            self._hung[message].start()

    def _deal_with_hung(self, message: Message, error: TookTooLong, trace: str) -> None:
        try:
            self._failed(message, error, trace)
        except Exception as failure:
            logger.exception("%s: %r can't be dealt with", self._name, message)
            self._broke(failure)
        self.fail(Hung(f"{self._name}: {message!r}: {error}; start the process anew"))

    def _look_for_the_overdue(self) -> None:
        if not isinstance(self._waiting, Preferring):
            return
        overdue = self._waiting.overdue()
        if overdue:
            self._link.call(partial(self._rest, overdue))
        elif self._resting and not len(self._waiting) and len(self._in_hand) < self._workers.threads:
            self._link.call(self._rested)

    def _only_the_hung_are_left(self) -> bool:
        self._look_for_the_hung()
        dealing = [self._hung.get(message) for message, _ in list(self._in_hand.values())]
        return bool(dealing) and all(thread is not None and not thread.is_alive() for thread in dealing)


def _give_back(delivery: Delivery) -> None:
    """Have the broker put back what was not begun; the link's thread calls this."""
    if delivery.intake.open and delivery.intake.channel.is_open:
        delivery.intake.settle([], [delivery.tag])


_WORDS = {
    Outcome.HALT: "the consumer stops",
    Outcome.DISCARD: "discarded",
    Outcome.REQUEUE: "put back into its queue, once",
    Outcome.RETRY: "tried again later",
    Outcome.PARK: "parked",
}


def run_all(consumers: Sequence[Consumer], *, signals: bool = True) -> None:
    """Run several consumers until a signal comes, or one of them fails, and end all of them; see `Consumer.run`."""
    received: list[int] = []

    def on_signal(number: int, _: Any) -> None:
        received.append(number)
        for consumer in consumers:
            consumer.stop()

    signals = signals and threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT) if signals}
    try:
        try:
            for consumer in consumers:
                consumer.start()
            error = _wait_for_one(consumers)
            if received:
                logger.info("Received %s: finishing what is in hand.", signal.Signals(received[0]).name)
        finally:
            threads = [
                threading.Thread(target=partial(consumer.close, hurry=lambda: len(received) > 1))
                for consumer in consumers
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        error = error or _first_error(consumers)
        if error is not None:
            raise error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait_for_one(consumers: Sequence[Consumer]) -> ConsumerError | None:
    seconds = None if len(consumers) == 1 else WATCH_SECONDS / len(consumers)
    while True:
        for consumer in consumers:
            ended, error = consumer.wait(seconds)
            if ended:
                return error


def _first_error(consumers: Sequence[Consumer]) -> ConsumerError | None:
    """Return what went wrong while they finished what was in hand, if anything did."""
    for consumer in consumers:
        while not consumer._ended.empty():
            if (error := consumer._ended.get()) is not None:
                return error
    return None
