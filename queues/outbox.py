"""What people are to be told: written with the state that caused it, claimed by one sender, retried for a day.

No correctness rests on a task being delivered: a task is a nudge, the row is the truth, and ``send_due`` finds it.
Two senders never send one row at once, as each claims its rows by a conditional update, and takes others where some are
just being claimed. A sender that is killed between the mail server's "accepted" and its own note of it makes the few
mails that it had not noted go out again, with the same Message-ID: ``MAILS_TOGETHER`` at most.

A call of ``send_due`` is over within a minute or so, however much is due, and the next one goes on. Mails go first.
Channels have one sender at a time, which sends to several side by side: services that don't answer hold one worker
at most.
"""

import logging
import smtplib
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import astuple, dataclass, field
from datetime import datetime, timedelta
from datetime import time as time_of_day
from functools import partial
from typing import Any, NamedTuple, TypeVar

from celery import current_app
from django.conf import settings
from django.core.mail import EmailMessage, get_connection
from django.core.mail.backends.base import BaseEmailBackend
from django.db import transaction
from django.db.models import Exists, F, OuterRef, Q, Value
from django.db.models.lookups import Exact
from django.utils import timezone

from accounts import audit
from accounts.models import NotificationAddress, Owner, PulseUser, normal_address
from core import bulk
from core.leases import LeaseTaken, lease
from queues import channels, mails
from queues.comparison import Whose
from queues.models import Channel, Notification
from queues.preferences import held_until
from rabbit.threads import Threads

logger = logging.getLogger(__name__)

BATCH = 50
"""Notifications that one claim takes at most: so few that two senders share what one pass tells evenly."""

CLAIM_SECONDS = 300
"""How long a sender may take over a batch. It stops before; what is left is claimed by the next."""

RETRY_FIRST_SECONDS = 15
RETRY_MOST_SECONDS = 900
GIVE_UP_AFTER = timedelta(hours=24)
GIVE_UP_ATTEMPTS = 100
"""So many attempts take a day. Both have to be over: a clock that jumps a day ahead is no day of trying."""

EMAIL = "email"
MAIL_SECONDS = 30
"""For so long one call sends mails. What is due after that is the next one's."""

MAILS_AT_ONCE = 4
"""Connections to the mail server at most, on which one call sends side by side."""

MAILS_TOGETHER = 16
"""Mails that one call puts into words, sends and notes together. The mail server may have accepted as many of them at
most that are not noted yet."""

LEASE = "channels"
CHANNEL_SECONDS = 30
"""For so long one call sends to channels. With the last answers, of 12 s at most, it ends before the lease does."""

CHANNELS_AT_ONCE = 8

TO_AN_OWNER = (Notification.Kind.WEEKLY, Notification.Kind.VOUCHED)
"""What is about a person, and not about a queue or the broker."""

FIELDS = (
    "uuid", "recipient", "channel", "kind", "queue", "about", "facts", "held_until", "state", "created", "due_at",
    "attempts", "last_error",
)  # fmt: skip
T = TypeVar("T")
Unsent = Q(state__in=[Notification.State.DUE, Notification.State.SENDING])


@dataclass(frozen=True)
class Telling:
    """One thing to tell, before it is known whom.

    Whoever is to hear of the queues of ``pulse_user_id`` is told, or the owner ``owner_id`` of the agents whose it is,
    and operators get a copy of everything. Where ``recipients`` are given, these addresses alone are told instead, by
    mail, once ``held_until`` is over.
    ``facts`` is what the message says.
    """

    kind: str
    facts: dict[str, Any]
    queue_id: int | None = None
    pulse_user_id: int | None = None
    owner_id: int | None = None
    recipients: Sequence[str] = ()
    held_until: datetime | None = None

    @property
    def whose(self) -> Whose:
        """Whose the queue is that it is about."""
        return Whose(self.pulse_user_id, self.owner_id)

    @property
    def about(self) -> str:
        """What it is about: messages about one thing reach one recipient in order."""
        if self.queue_id is not None:
            return f"queue {self.queue_id}"
        return self.kind if self.recipients else "the broker"


class Recipient(NamedTuple):
    """Where a message goes: an address by mail, or one of the channels of the owner who has that address.

    ``quiet`` are the owner's quiet hours and their time zone. ``account`` and ``added_by`` are there for an address
    that an owner added to a RabbitMQ account.
    """

    address: str
    channel: str = EMAIL
    quiet: tuple[time_of_day | None, time_of_day | None, str] = (None, None, "UTC")
    account: str = ""
    added_by: str = ""


@dataclass
class Delivery:
    """What became of the notifications that were due, as numbers of them.

    What was ``claimed`` and is nothing of the rest was given up quietly, or is still due as the time was over.
    """

    claimed: int = 0
    sent: int = 0
    postponed: int = 0
    failed: int = 0

    def __add__(self, other: "Delivery") -> "Delivery":
        """Return what became of both."""
        return Delivery(*map(sum, zip(astuple(self), astuple(other), strict=True)))


def operators() -> list[str]:
    """Return the addresses that get a copy of everything."""
    return list(dict.fromkeys(normal_address(address) for address in settings.GUARDIAN_OPERATOR_EMAILS))


def recipients_of(queues: Iterable[Whose]) -> dict[Whose, list[Recipient]]:
    """Return who is told of queues, by whose they are. Three statements at most, whatever their number.

    Of a Pulse user's queues its owners are told, by mail and in their channels, and the addresses that owners added and
    somebody confirmed; of an agents' queue its owner.
    """
    wanted = set(queues)
    of_accounts = _of_accounts([(one.pulse_user_id,) for one in wanted if one.pulse_user_id is not None])
    of_owners = _of_owners([(one.owner_id,) for one in wanted if one.owner_id is not None])
    told = {}
    for one in wanted:
        both = {**of_accounts.get(one.pulse_user_id, {}), **of_owners.get(one.owner_id, {})}
        if both:
            told[one] = list(both)
    return told


WHERE_TOLD = ("email", "quiet_from", "quiet_until", "time_zone", "channels__uuid")
"""What of an owner says where, and when not, they are told."""

Told = dict[int | None, dict[Recipient, None]]


def _of_accounts(accounts: Sequence[tuple[int]]) -> Told:
    """Return who is told of the queues of these Pulse users, by the Pulse user's id."""
    told: Told = {}
    if not accounts:
        return told
    through = PulseUser.owners.through
    owners = through.objects.filter(bulk.among(through, ("pulseuser",), accounts), owner__is_active=True)
    rows = owners.order_by("owner__email").values_list("pulseuser", *(f"owner__{name}" for name in WHERE_TOLD))
    for pulse_user, *where in rows:
        told.setdefault(pulse_user, {}).update(_places(*where))
    these = bulk.among(NotificationAddress, ("pulse_user",), accounts)
    added = NotificationAddress.objects.filter(these, confirmed_at__isnull=False).order_by("email")
    for pulse_user, address, *why in added.values_list(
        "pulse_user", "email", "pulse_user__username", "added_by__email"
    ):
        recipient = Recipient(address, account=why[0], added_by=why[1] or "")
        told.setdefault(pulse_user, {})[recipient] = None
    return told


def _of_owners(owners: Sequence[tuple[int]]) -> Told:
    """Return who is told of the queues of these owners' agents, by the owner's id."""
    told: Told = {}
    if not owners:
        return told
    active = Owner.objects.filter(bulk.among(Owner, ("id",), owners), is_active=True)
    for owner, *where in active.order_by("email").values_list("id", *WHERE_TOLD):
        told.setdefault(owner, {}).update(_places(*where))
    return told


def _places(
    address: str, quiet_from: time_of_day | None, quiet_until: time_of_day | None, zone: str, channel: uuid.UUID | None
) -> dict[Recipient, None]:
    """Return where an owner with one of their channels is told."""
    by_mail = Recipient(address, quiet=(quiet_from, quiet_until, zone))
    if channel is None:
        return {by_mail: None}
    return {by_mail: None, by_mail._replace(channel=channel.hex): None}


def is_anybody_told(whose: Whose, people: Mapping[Whose, Sequence[Recipient]]) -> bool:
    """Return whether a message about a queue has a recipient at all; ``people`` are those told of queues."""
    return bool(settings.GUARDIAN_OPERATOR_EMAILS) or bool(people.get(whose))


def tell(tellings: Sequence[Telling], now: datetime) -> int:
    """Write the outbox rows of these, one for each recipient, and return their number.

    Call it in the transaction that writes the state that caused them, and ``nudge`` once that is committed.
    """
    people = recipients_of(telling.whose for telling in tellings)
    copies = operators()
    rows: list[tuple[Any, ...]] = []
    brought_forward = []
    for telling in tellings:
        told = people.get(telling.whose, [])
        owners = [one.address for one in told if one.channel == EMAIL and not one.account]
        is_deletion = telling.kind == Notification.Kind.DELETION
        for to in _recipients(telling, told, copies):
            held = telling.held_until
            if not is_deletion and (to.channel != EMAIL or to.address not in copies):
                held = held or held_until(*to.quiet, now)
            facts = {**telling.facts, "owners": owners}
            if to.account:
                facts |= {"account": to.account, "added_by": to.added_by}
            common = (telling.kind, telling.queue_id, telling.about, facts, held)
            state = (Notification.State.DUE, now, now, 0, "")
            rows.append((uuid.uuid4(), to.address, to.channel, *common, *state))
            if is_deletion:
                brought_forward.append((telling.about, to.address, to.channel))
    if brought_forward:
        _release(brought_forward)
    bulk.insert(Notification, FIELDS, rows)
    return len(rows)


def _recipients(telling: Telling, told: list[Recipient], copies: list[str]) -> list[Recipient]:
    """Return where this goes, each place once: an owner is told as an owner, whatever else the address stands for."""
    if telling.recipients:
        return [Recipient(address) for address in dict.fromkeys(telling.recipients)]
    places: dict[tuple[str, str], Recipient] = {}
    for recipient in [*told, *map(Recipient, copies)]:
        places.setdefault((recipient.address, recipient.channel), recipient)
    return list(places.values())


def _release(keys: Sequence[tuple[str, str, str]]) -> None:
    """Hold nothing back any more about these things, given with recipient and channel: what follows can't wait."""
    these = bulk.among(Notification, ("about", "recipient", "channel"), keys)
    # What is just being sent is past its hold. Its sender notes several at once, and would wait for this in a circle.
    held = Notification.objects.filter(these, state=Notification.State.DUE, held_until__isnull=False)
    held.update(held_until=None)


def send_again(picked: Collection[int]) -> int:
    """Have those of these that were given up sent as if they were new, and return their number.

    Left out is what a later message about the same thing to the same recipient has made untrue: one that was sent, or
    was given up too and isn't among these. Two who ask for it at once have it sent once.
    """
    states = Notification.State
    later = Notification.objects.filter(
        Q(state=states.SENT) | (Q(state=states.FAILED) & ~Q(pk__in=picked)),
        about=OuterRef("about"),
        recipient=OuterRef("recipient"),
        channel=OuterRef("channel"),
        id__gt=OuterRef("id"),
    ).exclude(kind=F("about"))  # a letter about nothing else, such as an owner's week
    given_up = Notification.objects.filter(~Exists(later), pk__in=picked, state=states.FAILED)
    with transaction.atomic():
        again = list(given_up.select_for_update().order_by("pk"))
        if again:
            Notification.objects.filter(pk__in=[one.pk for one in again]).update(
                state=states.DUE, attempts=0, due_at=timezone.now(), claim=None, held_until=None, last_error=""
            )
            audit.note(None, "had sent again", again)
            transaction.on_commit(nudge, robust=True)
    return len(again)


def nudge(written: int = 1) -> None:
    """Ask a worker to send what is due, and another one to help where more was written than one claim takes.

    It is the processor that mails cost most. When the task queue is away, the sweep does it later.
    """
    try:
        for _ in range(2 if written > BATCH else 1):
            current_app.send_task("queues.tasks.send_notifications", expires=60, retry=False)
    except Exception as error:  # whatever the transport raises: nothing depends on it
        logger.warning("The task queue is away (%s); the sweep will send what is due.", error)


def send_due() -> Delivery:
    """Send what is due now, mails first, and return what became of it. Where the time is over, the rest stays due.

    It stops early where the mail server can't be reached: everything stays in the outbox, to be tried again. Channels
    are left to whoever is sending to them already.
    """
    delivery = Delivery()
    _send_mails(delivery)
    try:
        with lease(LEASE):
            _send_to_channels(delivery)
    except LeaseTaken:
        logger.debug("Another process is sending to channels.")
    return delivery


def claim(limit: int, *, to_channels: bool = False) -> list[Notification]:
    """Claim up to so many mails, or messages to channels, that are due, oldest first, and return them.

    A notification waits for the earlier ones about the same thing to the same recipient, so that the last message that
    a person has is the last one that was written. Only a deletion doesn't wait for what is held: ``tell`` releases
    that, but can't see what another process has written and not committed.
    """
    now = timezone.now()
    is_free = Q(held_until=None) | Q(held_until__lte=now)
    is_before_deletion = Q(Exact(OuterRef("kind"), Value(Notification.Kind.DELETION.value)))
    wanted = Unsent & (~Q(channel=EMAIL) if to_channels else Q(channel=EMAIL))
    earlier = Notification.objects.filter(
        Unsent,
        is_free | ~is_before_deletion,
        about=OuterRef("about"),
        recipient=OuterRef("recipient"),
        channel=OuterRef("channel"),
        id__lt=OuterRef("id"),
    )
    is_due = Q(due_at__lte=now) & is_free
    due = Notification.objects.filter(wanted, is_due, ~Exists(earlier)).order_by("id")
    mine = uuid.uuid4()
    with transaction.atomic():
        bulk.compare_by_hash()  # what has just become due is in no statistics
        ids = list(due.select_for_update(skip_locked=True).values_list("id", flat=True)[:limit])
        if not ids:
            return []
        Notification.objects.filter(Unsent, is_due, id__in=ids).update(
            state=Notification.State.SENDING, claim=mine, due_at=now + timedelta(seconds=CLAIM_SECONDS)
        )
    of_mine = Notification.objects.filter(claim=mine, state=Notification.State.SENDING)
    return list(of_mine.select_related("queue").order_by("id"))


def _still_to_tell(batch: list[Notification]) -> list[Notification]:
    """Return those of these whose recipients still are to hear of it. The others are given up quietly.

    Messages can be held for hours, and meanwhile somebody is taken off an account, or can't sign in any more. What
    operators get as such is sent, and so is a deletion of a queue whose account or owner went with it.
    """
    whose = {one.queue: Whose(one.queue.pulse_user_id, one.queue.owner_id) for one in batch if one.queue}
    told = {
        (owned, recipient.address, recipient.channel)
        for owned, recipients in recipients_of(whose.values()).items()
        for recipient in recipients
    }
    owners = dict(Owner.objects.filter(email__in={one.recipient for one in batch}).values_list("email", "is_active"))
    copies = operators()
    still = []
    for one in batch:
        if one.channel == EMAIL and one.recipient in copies:
            still.append(one)
        elif not owners.get(one.recipient, one.kind not in TO_AN_OWNER):
            _finish(one, state=Notification.State.FAILED, last_error="The recipient can't sign in any more.")
        elif (
            one.queue is None
            or (one.kind == Notification.Kind.DELETION and whose[one.queue] == Whose())
            or (whose[one.queue], one.recipient, one.channel) in told
        ):
            still.append(one)
        else:
            _finish(one, state=Notification.State.FAILED, last_error="The recipient is not told of it any more.")
    return still


def _send_mails(delivery: Delivery) -> None:
    """Send the mails that are due, several at once, until none is, the time is over or the mail server is away."""
    until = time.monotonic() + MAIL_SECONDS
    connections: list[BaseEmailBackend] = [get_connection() for _ in range(MAILS_AT_ONCE)]
    usable = Usable(standing=set(), spare=set(connections))
    with Threads(MAILS_AT_ONCE) as pool:
        try:
            while time.monotonic() < until and (batch := claim(BATCH)):
                delivery.claimed += len(batch)
                if not _send(pool, usable, _still_to_tell(batch), until, delivery):
                    break
        finally:
            list(pool.map(_close, connections))


class Usable(NamedTuple):
    """Connections to the mail server that may be sent over: ``standing`` are those that were, ``spare`` the others."""

    standing: set[BaseEmailBackend]
    spare: set[BaseEmailBackend]

    def first(self, number: int) -> list[BaseEmailBackend]:
        """Return so many at most, those that stand before others."""
        return [*self.standing, *self.spare][:number]

    def note(self, tried: Collection[BaseEmailBackend], failed: Collection[BaseEmailBackend]) -> None:
        """Do without those that failed, and then without the spare ones: a server may want no more of them."""
        self.standing.update(tried)
        self.standing.difference_update(failed)
        self.spare.difference_update(tried)
        if failed:
            self.spare.clear()


@dataclass
class Mailbag:
    """Mails that wait for a connection, in words, and what became of those that were sent over one."""

    waiting: deque[tuple[Notification, EmailMessage]]
    arrived: list[Notification] = field(default_factory=list)
    failed: list[tuple[Notification, Exception]] = field(default_factory=list)


def _send(pool: Threads, usable: Usable, batch: list[Notification], until: float, delivery: Delivery) -> bool:
    """Send these as long as there is time, and return whether the mail server can still be reached.

    Several are put into words first, and then sent side by side: beside threads that send, everything else waits for
    its turn. No two of a batch are about one thing to one recipient.
    """
    left = deque(batch)
    away: Exception = ConnectionError("there is no connection to it")
    while any(usable) and left and time.monotonic() < until:
        bag = Mailbag(_next_in_words(left, until, delivery))
        trying = usable.first(len(bag.waiting))
        sending = [pool.submit(_send_over, connection, bag, until) for connection in trying]
        try:
            reasons = [future.result() for future in sending]
        finally:
            wait(sending)  # nobody closes a connection that is in use
            _note_sent(bag.arrived, delivery)
        for notification, error in bag.failed:
            _postpone(notification, error, delivery)
        left.extendleft(notification for notification, _ in reversed(bag.waiting))
        failed = {connection: reason for connection, reason in zip(trying, reasons, strict=True) if reason}
        usable.note(trying, failed)
        away = next(iter(failed.values()), away)
    if any(usable):
        for notification in left:
            _finish(notification, state=Notification.State.DUE, due_at=timezone.now())
        return True
    # Each of the others would wait for it as long, and passes for a free worker.
    logger.warning("The mail server can't be reached (%s); %d notifications wait.", away, len(left))
    for notification in left:
        _postpone(notification, away, delivery)
    return False


def _next_in_words(
    left: deque[Notification], until: float, delivery: Delivery
) -> deque[tuple[Notification, EmailMessage]]:
    """Take the next of these, ``MAILS_TOGETHER`` at most, and return in words what is still to be said of them."""
    found: deque[tuple[Notification, EmailMessage]] = deque()
    while left and len(found) < MAILS_TOGETHER and time.monotonic() < until:
        notification = left.popleft()
        message = _in_words(notification, partial(mails.compose, notification), delivery)
        if message is not None:
            found.append((notification, message))
    return found


def _send_over(connection: BaseEmailBackend, bag: Mailbag, until: float) -> Exception | None:
    """Send what waits over this connection, one at least, and return why it is of no more use, or None.

    Runs beside others, without the database.
    """
    while True:
        try:
            notification, message = bag.waiting.popleft()
        except IndexError:
            return None
        try:
            _send_one(message, connection)
        except _NotOpened as reason:
            bag.waiting.appendleft((notification, message))
            return reason.error
        except OSError as error:
            bag.failed.append((notification, error))
            return error
        except _NotSent as reason:
            bag.failed.append((notification, reason.error))
        except Exception as error:  # of this mail alone: the others must not wait for it
            logger.exception("Notification %s can't be sent.", notification.uuid)
            bag.failed.append((notification, error))
        else:
            bag.arrived.append(notification)
        if time.monotonic() >= until:
            return None


class _NotSent(Exception):
    """The mail server refuses this mail; others may go. ``error`` is its reason."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class _NotOpened(_NotSent):
    """A connection didn't come about, so that nothing was sent over it."""


def _send_one(message: EmailMessage, connection: BaseEmailBackend) -> None:
    """Send a mail over its connection, which is opened where it isn't open. Runs beside others, without the database.

    Raises:
        _NotOpened: the mail server can't be reached, or wants no further connection.
        _NotSent: it refuses this mail.
        OSError: the connection was cut.
    """
    try:
        connection.open()
    except (OSError, ValueError) as error:  # ValueError: a host name that is none
        raise _NotOpened(error) from error
    try:
        connection.send_messages([message])
    except smtplib.SMTPHeloError as error:
        _close(connection)
        raise _NotOpened(error) from error
    except (smtplib.SMTPResponseException, smtplib.SMTPRecipientsRefused, ValueError) as error:
        _close(connection)  # the next one opens it anew
        raise _NotSent(error) from error


def _note_sent(sent: Sequence[Notification], delivery: Delivery) -> None:
    """Note that these, which were claimed together, arrived. In one statement, and one before it for each deletion."""
    if not sent:
        return
    for deletion in sent:
        if deletion.kind != Notification.Kind.DELETION:
            continue
        # Held until after it, as ``claim`` tells: it would not be true any more.
        before = Notification.objects.filter(
            state=Notification.State.DUE,
            about=deletion.about,
            recipient=deletion.recipient,
            channel=deletion.channel,
            id__lt=deletion.id,
        )
        before.update(state=Notification.State.FAILED, last_error="The queue was deleted in the meantime.")
    Notification.objects.filter(id__in=[one.id for one in sent], claim=sent[0].claim).update(
        claim=None, state=Notification.State.SENT, sent_at=timezone.now(), last_error=""
    )
    delivery.sent += len(sent)


def _in_words(notification: Notification, words: Callable[[], T], delivery: Delivery) -> T | None:
    """Return what ``words`` does, or None where there is nothing to send any more, which is written down."""
    try:
        return words()
    except mails.Obsolete as error:
        _finish(notification, state=Notification.State.FAILED, last_error=str(error))
    except Exception as error:  # a template that can't be filled in never will be; the others must not wait for it
        logger.exception("Notification %s can't be put into words.", notification.uuid)
        _finish(notification, state=Notification.State.FAILED, last_error=repr(error)[:1000])
        delivery.failed += 1
    return None


Message = tuple[Notification, str, str]


def _send_to_channels(delivery: Delivery) -> None:
    """Send what is due to channels, several at once, until nothing is or the time is over."""
    until = time.monotonic() + CHANNEL_SECONDS
    with Threads(CHANNELS_AT_ONCE) as pool:
        while time.monotonic() < until and (batch := claim(BATCH, to_channels=True)):
            delivery.claimed += len(batch)
            _send_side_by_side(pool, _by_channel(_still_to_tell(batch), delivery), until, delivery)


def _send_side_by_side(pool: Threads, waiting: dict[Channel, list[Message]], until: float, delivery: Delivery) -> None:
    """Send these to their channels, and write down what became of each as soon as it is known.

    The first message to a channel that fails is the last that is tried: the others would wait for it as long.
    """

    def begin(channel: Channel, messages: list[Message]) -> None:
        sending[pool.submit(_send_to_one, channel, messages[0], until)] = channel, messages

    sending: dict[Future[bool], tuple[Channel, list[Message]]] = {}
    for channel, messages in waiting.items():
        begin(channel, messages)
    while sending:
        for future in wait(sending, return_when=FIRST_COMPLETED).done:
            channel, messages = sending.pop(future)
            try:
                arrived = future.result()
            except channels.ChannelFailed as error:
                channels.note(channel, str(error))
                for notification, _, _ in messages:
                    _postpone(notification, error, delivery)
                continue
            if not arrived:
                for notification, _, _ in messages:
                    _finish(notification, state=Notification.State.DUE, due_at=timezone.now())
                continue
            channels.note(channel)
            _note_sent([messages[0][0]], delivery)
            if len(messages) > 1:
                begin(channel, messages[1:])


def _by_channel(batch: list[Notification], delivery: Delivery) -> dict[Channel, list[Message]]:
    """Return these in words, by the channel they go to. What goes to one that was removed is given up quietly."""
    there = {one.uuid.hex: one for one in Channel.objects.filter(uuid__in={uuid.UUID(n.channel) for n in batch})}
    found: dict[Channel, list[Message]] = {}
    for notification in batch:
        channel = there.get(notification.channel)
        if channel is None:
            _finish(notification, state=Notification.State.FAILED, last_error="The channel was removed.")
            continue
        words = _in_words(notification, partial(mails.in_text, notification), delivery)
        if words is not None:
            found.setdefault(channel, []).append((notification, *words))
    return found


def _send_to_one(channel: Channel, message: Message, until: float) -> bool:
    """Send a message to its channel, unless the time is over, and return whether it was sent.

    Raises:
        ChannelFailed: it did not arrive, whatever the reason.
    """
    if time.monotonic() >= until:
        return False
    _, title, body = message
    try:
        channels.post(channel, title, body)
    except channels.ChannelFailed:
        raise
    except Exception as error:
        # Nothing of one channel keeps the others from being sent to. Its text may have the address in it.
        logger.error("Channel %s can't be sent to: %s", channel.uuid, type(error).__name__)
        raise channels.ChannelFailed("it could not be sent") from None
    return True


def _postpone(notification: Notification, error: Exception, delivery: Delivery) -> None:
    now = timezone.now()
    attempts = notification.attempts + 1
    if now - notification.created >= GIVE_UP_AFTER and attempts >= GIVE_UP_ATTEMPTS:
        logger.error("Notification %s to %s given up: %s", notification.uuid, notification.recipient, error)
        _finish(notification, state=Notification.State.FAILED, attempts=attempts, last_error=str(error)[:1000])
        delivery.failed += 1
        return
    _finish(
        notification,
        state=Notification.State.DUE,
        attempts=attempts,
        due_at=now + timedelta(seconds=retry_seconds(attempts)),
        last_error=str(error)[:1000],
    )
    delivery.postponed += 1


def _finish(notification: Notification, **values: Any) -> None:
    Notification.objects.filter(id=notification.id, claim=notification.claim).update(claim=None, **values)


def retry_seconds(attempts: int) -> int:
    """Return how long to wait after so many failed attempts: twice as long each time, up to a quarter of an hour."""
    return min(RETRY_MOST_SECONDS, RETRY_FIRST_SECONDS << min(attempts - 1, 10))


def _close(connection: BaseEmailBackend) -> None:
    try:
        connection.close()
    except (OSError, smtplib.SMTPException):
        logger.debug("The mail server went before it was left.")
