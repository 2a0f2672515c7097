"""The rules of queues and their messages: what can be made, posted and read, and what is said where it can't.

The API, the pages and the worker call this, and not the store. Who may is told in ``message_store.principals``.

Numbers may be given as such, or as the text that somebody sent: ``"4"``. The texts of errors are compared by clients.
"""

import re
import secrets
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal, localcontext
from typing import Any, NamedTuple, TypeVar

from django.conf import settings

from accounts.models import has_control_characters
from guardian_store import ids
from guardian_store.ids import MAX_REST, TICKS_PER_SECOND, Place
from message_store import principals
from message_store.models import MAX_NAME_LENGTH
from message_store.store import (
    MessageStore,
    NewMessage,
    NoQueue,
    QueueExists,
    StoredMessage,
    StoredQueue,
    StoreUnavailable,
    store,
)
from rabbit.names import readable

MAX_PARTITIONS = 200
TYPES = ("user", "public")
CONSISTENCIES = ("weak", "strong", "very_strong")

DEFAULT_TTL_SECONDS = 3 * 24 * 3600
MAX_TTL_SECONDS = 2**25
"""Seconds for which a message is kept, a little more than a year."""

MAX_READ = 1000
"""Messages of a partition in an answer, and queues in a list."""
MAX_BATCH = 1000
"""Messages in a batch."""
MAX_IDS = 100
"""Message ids in one address: more don't fit into the first line of a request."""
MAX_CONTENT_TYPE_LENGTH = 255
MAX_SECONDS_AHEAD = 60
"""Seconds by which an id that a client gives a message may be ahead: so far may the clock be from theirs."""

REQUIRED = "Required"

_NUMBER = re.compile(r"-?[0-9]{1,100}")
_SECONDS = re.compile(r"-?[0-9]{1,100}(?:\.[0-9]{0,100})?")
_DECIMAL_DIGITS = 250  # so many at least, for all of these to be exact
_CONTENT_TYPE = re.compile(r"[\x20-\x7e\t]*")
_MAX_ATTEMPTS = 10

T = TypeVar("T")


class Invalid(ValueError):
    """What was asked for can't be had so. ``errors``: what is wrong, by the name of the field."""

    def __init__(self, errors: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"{field}: {text}" for field, text in errors.items()))
        self.errors = dict(errors)


class MessageInput(NamedTuple):
    """A message as somebody posts it. Without a ttl it is kept for three days, without a partition one is drawn."""

    body: bytes
    ttl: int | str | None = None
    partition: int | str | None = None
    content_type: str = ""


class MessageRef(NamedTuple):
    """Where a message was put."""

    id: uuid.UUID
    partition: int


@dataclass(frozen=True, slots=True)
class Page:
    """Messages that were read. ``is_truncated``: there would have been more, but these are as many bytes as may be."""

    messages: list[StoredMessage]
    is_truncated: bool = False


# Queues


def create(
    application: str,
    name: str | None = None,
    *,
    partitions: int | str | None = None,
    type: str | None = None,  # noqa: A002 - as the store has it
    consistency: str | None = None,
    principals: str | None = None,
) -> StoredQueue:
    """Make a queue, with a name that nobody has had where none is given, and return it.

    One that is there is changed as ``change`` would, but that it keeps its partitions where it has more.

    Raises:
        Invalid: of the fields ``queue_name``, ``partitions``, ``type``, ``consistency``, ``principles``.
        StoreUnavailable: the store is away, or others make and remove it all the time.
    """
    given = _validated(1, partitions, type, consistency, principals, name=name)
    name = given.pop("name", None) or uuid.uuid4().hex
    for _ in range(_MAX_ATTEMPTS):
        try:
            return store().register(application, name, **given)
        except QueueExists:
            try:
                return store().update(application, name, **given)
            except NoQueue:
                continue
    raise StoreUnavailable(f"The queue {name} is made and removed by others at this moment.")


def update(
    queue: StoredQueue,
    *,
    partitions: int | str | None = None,
    type: str | None = None,  # noqa: A002 - as the store has it
    consistency: str | None = None,
    principals: str | None = None,
) -> StoredQueue:
    """Change what is given of a queue, and return it as it is then. An empty text of principals takes them all away.

    Raises:
        Invalid: of the fields ``partitions``, which can only grow, ``type``, ``consistency``, ``principles``.
        NoQueue: it is gone.
        StoreUnavailable: the store is away.
    """
    given = _validated(queue.partitions, partitions, type, consistency, principals)
    return store().update(queue.application, queue.name, **given)


def find(application: str, name: str) -> StoredQueue:
    """Return a queue.

    Raises:
        NoQueue: there is none of this name, or nothing can have it.
        StoreUnavailable: the store is away.
    """
    try:
        check_name(name)
    except ValueError:
        raise NoQueue(f"There is no queue {readable(name[:MAX_NAME_LENGTH])!r}.") from None
    return store().find(application, name)


def queues(application: str, *, start: str = "", limit: int | str | None = None) -> list[StoredQueue]:
    """Return the queues of an application by name, from the one that is called so, or comes next; at most 1000.

    Raises:
        Invalid: of the fields ``limit``, ``offset``.
        StoreUnavailable: the store is away.
    """
    errors: dict[str, str] = {}
    most = _collect_error(errors, "limit", lambda: MAX_READ if limit is None else parse_number(limit, 1, MAX_READ))
    if start:
        _collect_error(errors, "offset", lambda: check_name(start))
    if errors or most is None:
        raise Invalid(errors)
    return store().queues(application, start=start, limit=most)


def check_name(name: str) -> None:
    """Make sure that this can be the name of a queue, or of a consumer: it stands in addresses.

    Raises:
        ValueError: it can't; the text says why.
    """
    if not name:
        raise ValueError(REQUIRED)
    if len(name) > MAX_NAME_LENGTH:
        raise ValueError(f"Longer than maximum length {MAX_NAME_LENGTH}")
    if name in (".", "..") or "/" in name or has_control_characters(name):
        raise ValueError(f'"{readable(name)}" can\'t be a name: it could not stand in an address')


# Messages


def post(queue: StoredQueue, entry: MessageInput) -> MessageRef:
    """Put a message into a queue.

    Raises:
        Invalid: of the fields ``body``, ``ttl``, ``partition``, ``content_type``.
        NoQueue: it is gone.
        StoreUnavailable: the store is away.
    """
    return _post(queue, [_message(queue, entry)])[0]


def post_all(
    queue: StoredQueue, entries: Sequence[MessageInput | None], errors: Mapping[str, str] | None = None
) -> list[MessageRef]:
    """Put messages into a queue, all of them or none, and return where they were put, in the same order.

    ``errors`` are what is known to be wrong already, of the entries that are None.

    Raises:
        Invalid: of the fields of ``post``, with the entry's index before them: ``1.partition``; or of ``messages``.
        NoQueue: it is gone.
        StoreUnavailable: the store is away.
    """
    found = dict(errors or {})
    messages = []
    if not entries:
        found["messages"] = REQUIRED
    elif len(entries) > MAX_BATCH:
        raise Invalid({"messages": f"{len(entries)} messages are more than {MAX_BATCH}"})
    for index, entry in enumerate(entries):
        if entry is not None:
            try:
                messages.append(_message(queue, entry))
            except Invalid as invalid:
                found.update({f"{index}.{field}": text for field, text in invalid.errors.items()})
    if found:
        raise Invalid(found)
    return _post(queue, messages)


def overwrite(queue: StoredQueue, wanted: Sequence[MessageRef], entry: MessageInput) -> None:
    """Store a message under each of these ids, in place of the one that has it in its partition, or as a new one.

    A new one can't have an id of the future: whoever read it and went on from there would pass over all that is posted
    until then. One that is there may have, as the clock may have been set back since. Nothing is stored before all are
    known to be right; where the store goes away in between, the same call again does the rest.

    Raises:
        Invalid: of the fields ``body``, ``ttl``, ``partition``, ``content_type``, ``message_id``.
        NoQueue: it is gone.
        StoreUnavailable: the store is away.
    """
    messages = [_message(queue, entry._replace(partition=one.partition)) for one in wanted]
    latest = ids.now() + MAX_SECONDS_AHEAD * TICKS_PER_SECOND
    ahead = [(one.partition, one.id) for one in wanted if ids.place(one.id).ticks > latest]
    there = {(one.partition, one.id) for one in store().read_ids(queue, ahead)} if ahead else set()
    for partition, message_id in ahead:
        if (partition, message_id) not in there:
            raise Invalid({"message_id": f'"{message_id.hex}" is more than {MAX_SECONDS_AHEAD} seconds ahead'})
    for one, message in zip(wanted, messages, strict=True):
        store().overwrite(queue, one.id, message)


def read(
    queue: StoredQueue,
    partitions: Iterable[int] = (1,),
    *,
    start: Place | None = None,
    limit: int = MAX_READ,
    descending: bool = False,
    max_bytes: int | None = None,
) -> Page:
    """Return messages of these partitions, in the order in which they are given: so many of each at most.

    ``start`` is the first place that is looked at, and counts itself: see ``since``. What the store isn't to show yet
    isn't there. ``max_bytes`` bounds the bodies together, roughly: past it nothing more is read.

    Raises:
        StoreUnavailable: the store is away.
    """
    used = store()
    before, found, left, largest = visible_before(used), list[StoredMessage](), max_bytes, 1
    for partition in dict.fromkeys(partitions):
        place, to_read = start, limit
        # Where it might not all fit, first as many as are sure to; then more and more of them, if they are small.
        at_once = limit if left is None else max(1, left // settings.MESSAGE_STORE_MAX_BODY)
        while to_read > 0:
            asked = min(at_once, to_read)
            some = used.read(queue, partition, start=place, before=before, limit=asked, descending=descending)
            found += some
            to_read -= len(some)
            if left is not None:
                sizes = [len(message.body) for message in some]
                left -= sum(sizes)
                if left <= 0:
                    return Page(found, is_truncated=True)
                largest = max(largest, *sizes, 1)
                at_once = max(1, min(4 * asked, left // largest))
            if len(some) < asked:
                break
            place = (place_before if descending else ids.place_after)(some[-1].id)
    return Page(found)


def read_ids(queue: StoredQueue, wanted: Sequence[MessageRef], *, max_bytes: int | None = None) -> Page:
    """Return the messages with these ids, in the order asked, each once; those that aren't there are left out.

    ``max_bytes`` bounds the bodies together, as in ``read``.

    Raises:
        StoreUnavailable: the store is away.
    """
    used = store()
    before, found, left, largest = visible_before(used), list[StoredMessage](), max_bytes, 1
    there = [(one.partition, one.id) for one in dict.fromkeys(wanted) if one.partition <= queue.partitions]
    at_once = len(there) if left is None else max(1, left // settings.MESSAGE_STORE_MAX_BODY)
    while there:
        asked, there = there[:at_once], there[at_once:]
        all_of_them = used.read_ids(queue, asked)
        some = [message for message in all_of_them if before is None or ids.place(message.id).ticks < before]
        found += some
        if left is not None:
            sizes = [len(message.body) for message in some]
            left -= sum(sizes)
            if left <= 0:
                return Page(found, is_truncated=bool(there))
            largest = max(largest, *sizes, 1)
            at_once = max(1, min(4 * at_once, left // largest))
    return Page(found)


def delete(queue: StoredQueue, wanted: Sequence[MessageRef]) -> None:
    """Remove the messages with these ids. One that isn't there is no error.

    Raises:
        StoreUnavailable: the store is away.
    """
    there = [(one.partition, one.id) for one in dict.fromkeys(wanted) if one.partition <= queue.partitions]
    if there:
        store().delete(queue, there)


def visible_before(used: MessageStore) -> int | None:
    """Return the ticks from which on nothing is shown yet, as a store's delay has it; None: everything is."""
    return ids.now() - round(used.delay * TICKS_PER_SECOND) if used.delay else None


def place_before(message_id: uuid.UUID) -> Place:
    """Return the last place before that of this message."""
    ticks, rest = ids.place(message_id)
    return Place(ticks, rest - 1) if rest else Place(ticks - 1, MAX_REST)


# Positions


def positions(queue: StoredQueue, consumer: str) -> dict[int, uuid.UUID]:
    """Return the id of the last message that a consumer has processed, by partition.

    Raises:
        Invalid: of the field ``consumer``.
        StoreUnavailable: the store is away.
    """
    _check_consumer(consumer)
    return store().positions(queue, consumer)


def set_positions(queue: StoredQueue, consumer: str, given: Mapping[str, Any]) -> None:
    """Set how far a consumer is in these partitions, forward or back; the others stay.

    Raises:
        Invalid: of the fields ``consumer``, ``positions``, or of the partition, as it was given.
        NoQueue: it is gone.
        StoreUnavailable: the store is away.
    """
    _check_consumer(consumer)
    errors: dict[str, str] = {}
    wanted: dict[int, uuid.UUID] = {}
    if not given:
        errors["positions"] = REQUIRED
    for partition, message_id in given.items():
        try:
            wanted[parse_number(partition, 1, queue.partitions)] = parse_id(message_id)
        except ValueError as error:
            errors[readable(partition[:MAX_NAME_LENGTH])] = str(error)
            if len(errors) > MAX_PARTITIONS:
                break
    if errors:
        raise Invalid(errors)
    store().set_positions(queue, consumer, wanted)


def delete_positions(queue: StoredQueue, consumer: str) -> None:
    """Forget how far a consumer is.

    Raises:
        Invalid: of the field ``consumer``.
        StoreUnavailable: the store is away.
    """
    _check_consumer(consumer)
    store().delete_positions(queue, consumer)


# What people write


def parse_number(value: Any, least: int, most: int) -> int:
    """Return a number within these bounds, which may be given as its text.

    Raises:
        ValueError: it is none, or out of them; the text says so.
    """
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f'"{_readable(value)}" is not a number')
    if value < least:
        raise ValueError(f"{_readable(value)} is less than minimum value {least}")
    if value > most:
        raise ValueError(f"{_readable(value)} is greater than maximum value {most}")
    return value


def parse_choice(value: Any, choices: Sequence[str]) -> str:
    """Return a text that is one of these.

    Raises:
        ValueError: it isn't.
    """
    if value not in choices:
        raise ValueError(f'"{_readable(value)}" is not one of {", ".join(choices)}')
    return str(value)


def parse_partitions(text: str, most: int) -> list[int]:
    """Return the numbers of partitions that are written so, each once: ``"1,2"``.

    Raises:
        ValueError: one is none, or there is no such partition.
    """
    return list(dict.fromkeys(parse_number(part, 1, most) for part in text.split(",", MAX_PARTITIONS)))


def parse_since(text: str, *, descending: bool = False) -> Place:
    """Return where reading begins: at the message with this id, or at this time, in seconds since 1970.

    Times are compared exactly. Of one between two steps of 100 ns the next one in the direction of reading counts.

    Raises:
        ValueError: it is neither.
    """
    text = text.strip()
    if len(text) == 32:
        try:
            return ids.place(ids.parse(text))
        except ValueError:
            pass  # so many digits may be a time, too
    if not _SECONDS.fullmatch(text):
        raise ValueError(f'"{_readable(text)}" is not a timestamp or a message id')
    with localcontext(prec=_DECIMAL_DIGITS):
        seconds = Decimal(text).scaleb(7)
        exact = int(seconds.to_integral_value(ROUND_FLOOR if descending else ROUND_CEILING))
    ticks = min(max(exact, ids.MIN_TICKS), ids.MAX_TICKS)
    return Place(ticks, MAX_REST if descending else 0)


def parse_id(text: Any) -> uuid.UUID:
    """Return the message id that is written so.

    Raises:
        ValueError: it is none.
    """
    if isinstance(text, str):
        try:
            return ids.parse(text)
        except ValueError:
            pass
    raise ValueError(f'"{_readable(text)}" is not a message id')


def parse_ids(text: str) -> list[MessageRef]:
    """Return the messages that are written so: ``"1:hex,2:hex"``, or ``"hex"``, of partition 1.

    A partition may be above the queue's number: nothing is there.

    Raises:
        Invalid: of the fields ``message_id``, ``partition``.
    """
    parts = text.split(",", MAX_IDS)
    if len(parts) > MAX_IDS:
        raise Invalid({"message_id": f"More than {MAX_IDS} message ids"})
    found = []
    for part in parts:
        partition, colon, message_id = part.strip().rpartition(":")
        errors: dict[str, str] = {}
        where = _collect_error(errors, "partition", lambda: parse_number(partition, 1, 10**9) if colon else 1)  # noqa: B023
        what = _collect_error(errors, "message_id", lambda: parse_id(message_id))  # noqa: B023
        if where is None or what is None:
            raise Invalid(errors)
        found.append(MessageRef(what, where))
    return found


# In here


def _post(queue: StoredQueue, messages: list[NewMessage]) -> list[MessageRef]:
    made = store().push(queue, messages)
    return [MessageRef(message_id, message.partition) for message_id, message in zip(made, messages, strict=True)]


def _message(queue: StoredQueue, entry: MessageInput) -> NewMessage:
    """Return a message as it is stored.

    Raises:
        Invalid: it can't be.
    """
    errors: dict[str, str] = {}
    partition, ttl = 0, DEFAULT_TTL_SECONDS
    if not entry.body:
        errors["body"] = REQUIRED
    elif len(entry.body) > settings.MESSAGE_STORE_MAX_BODY:
        errors["body"] = f"{len(entry.body)} bytes are more than {settings.MESSAGE_STORE_MAX_BODY}"
    try:
        if entry.partition is None:
            partition = 1 + secrets.randbelow(queue.partitions) if queue.partitions > 1 else 1
        else:
            partition = parse_number(entry.partition, 1, queue.partitions)
    except ValueError as error:
        errors["partition"] = str(error)
    try:
        if entry.ttl is not None:
            ttl = parse_number(entry.ttl, 1, MAX_TTL_SECONDS)
    except ValueError as error:
        errors["ttl"] = str(error)
    if len(entry.content_type) > MAX_CONTENT_TYPE_LENGTH:
        errors["content_type"] = f"Longer than maximum length {MAX_CONTENT_TYPE_LENGTH}"
    elif not _CONTENT_TYPE.fullmatch(entry.content_type):
        errors["content_type"] = f'"{_readable(entry.content_type)}" is not a content type'
    if errors:
        raise Invalid(errors)
    return NewMessage(entry.body, partition, ttl, entry.content_type)


def _validated(
    least: int,
    partitions: int | str | None,
    type_: str | None,
    consistency: str | None,
    named: str | None,
    name: str | None = None,
) -> dict[str, Any]:
    """Return those of these that are given, as the store takes them.

    Raises:
        Invalid: some can't be used.
    """
    errors: dict[str, str] = {}
    checks: dict[str, tuple[str, Any, Callable[[Any], Any]]] = {
        "name": ("queue_name", name, _valid_name),
        "partitions": ("partitions", partitions, lambda value: parse_number(value, least, MAX_PARTITIONS)),
        "type": ("type", type_, lambda value: parse_choice(value, TYPES)),
        "consistency": ("consistency", consistency, lambda value: parse_choice(value, CONSISTENCIES)),
        "principals": ("principles", named, principals.parse),
    }
    given = {}
    for key, (field, value, check) in checks.items():
        if value is not None:
            try:
                given[key] = check(value)
            except ValueError as error:
                errors[field] = str(error)
    if errors:
        raise Invalid(errors)
    return given


def _valid_name(name: str) -> str:
    check_name(name)
    return name


def _check_consumer(consumer: str) -> None:
    try:
        check_name(consumer)
    except ValueError as error:
        raise Invalid({"consumer": str(error)}) from None


def _collect_error(errors: dict[str, str], field: str, check: Callable[[], T]) -> T | None:
    """Return what the check returns; None where it failed, which is then among the errors."""
    try:
        return check()
    except ValueError as error:
        errors[field] = str(error)
        return None


def _readable(value: Any) -> str:
    return readable(str(value)[:MAX_NAME_LENGTH])
