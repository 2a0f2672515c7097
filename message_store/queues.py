"""Create, post to and read queues, with validation, limits and error texts.

The API, the pages and the worker call these functions instead of the store. ``principals.py`` has the permissions.
Numbers may be given as text: ``"4"``. Clients compare the error texts.
"""

import hashlib
import re
import secrets
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypedDict, Unpack, cast

from django.conf import settings

from core.texts import has_control_characters
from guardian_store import _ids as ids
from guardian_store._ids import TICKS_PER_SECOND, Place
from message_store import principals, quota
from message_store.models import MAX_NAME_LENGTH
from message_store.parameters import (
    GIVEN_TWICE,
    MAX_NUMBER,
    MAX_PARTITIONS,
    REQUIRED,
    Invalid,
    MessageRef,
    T,
    collect_error,
    parse_choice,
    parse_id,
    parse_number,
    readable_text,
)
from message_store.store import (
    MAX_SECONDS_AHEAD,
    MessageStore,
    NewMessage,
    NoQueue,
    PositionsChanged,
    QueueExists,
    QueueSettings,
    StoredMessage,
    StoredQueue,
    StoreUnavailable,
    store,
)
from rabbit.names import readable

TYPES = ("user", "public")
CONSISTENCIES = ("weak", "strong", "very_strong")

DEFAULT_TTL_SECONDS = 3 * 24 * 3600
MAX_TTL_SECONDS = 2**25
"""A little more than a year."""

MAX_READ = 1000
"""Messages per partition in a response, and queues in a list."""
MAX_CONSUMERS = 1000
"""Consumers with positions in a queue. Concurrent requests may exceed it by their number."""
MAX_BATCH = 1000
"""Messages per POST."""
BATCH_BYTES = 24 * 1024 * 1024
"""The size of the bodies that are fetched together."""
MAX_CONTENT_TYPE_LENGTH = 255
_CONTENT_TYPE = re.compile(r"[\x20-\x7e\t]*")
_MAX_ATTEMPTS = 10


class MessageInput(NamedTuple):
    """A message to post. The default ttl is three days, the default partition random."""

    body: bytes
    ttl: int | str | None = None
    partition: int | str | None = None
    content_type: str = ""


class SettingsInput(TypedDict, total=False):
    """Settings of a queue. None is as if it was not given."""

    partitions: int | str | None
    type: str | None
    consistency: str | None
    principals: str | None


# Queues


def create(application: str, name: str | None = None, **given: Unpack[SettingsInput]) -> StoredQueue:
    """Create a queue, by default with a random name, and return it.

    If it exists, apply the given settings, except a smaller number of partitions.
    """
    errors: dict[str, str] = {}
    if name is not None:
        collect_error(errors, "queue_name", partial(check_name, name))
    settings = _validated(given, 1, errors)
    name = name or uuid.uuid4().hex
    for _ in range(_MAX_ATTEMPTS):
        try:
            return store().register(application, name, **settings)
        except QueueExists:
            try:
                return store().update(application, name, **settings)
            except NoQueue:
                continue
    raise StoreUnavailable(f"Other clients keep creating and deleting the queue {name}.")


def update(queue: StoredQueue, **given: Unpack[SettingsInput]) -> StoredQueue:
    """Change the given settings of a queue and return it. Partitions can't shrink. "" removes all principals."""
    return store().update(queue.application, queue.name, **_validated(given, queue.partitions, {}))


def find(application: str, name: str) -> StoredQueue:
    """Return a queue. Raises NoQueue also if the name is invalid."""
    try:
        check_name(name)
    except ValueError:
        raise NoQueue(f"There is no queue {readable(name[:MAX_NAME_LENGTH])!r}.") from None
    return store().find(application, name)


def queues(application: str, *, start: str = "", limit: int | str | None = None) -> list[StoredQueue]:
    """Return up to 1000 queues of an application, sorted by name, from the name ``start`` on.

    A larger ``limit`` counts as 1000: the original service had no largest one.
    """
    errors: dict[str, str] = {}
    wanted = MAX_READ if limit is None else limit
    most = collect_error(errors, "limit", lambda: min(parse_number(wanted, 1, MAX_NUMBER), MAX_READ))
    if start:
        collect_error(errors, "offset", lambda: check_name(start))
    if errors or most is None:
        raise Invalid(errors)
    return store().queues(application, start=start, limit=most)


def check_name(name: str) -> None:
    """Raise ValueError unless this is a valid name of a queue or consumer, which must be usable in a URL."""
    if not name:
        raise ValueError(REQUIRED)
    if len(name) > MAX_NAME_LENGTH:
        raise ValueError(f"Longer than maximum length {MAX_NAME_LENGTH}")
    if name in (".", "..") or "/" in name or has_control_characters(name):
        raise ValueError(f'"{readable(name)}" can\'t be a name: it is not usable in a URL')


# Messages


def post(queue: StoredQueue, entry: MessageInput) -> MessageRef:
    return _post(queue, [_message(queue, entry)])[0]


def post_all(
    queue: StoredQueue, entries: Sequence[MessageInput | None], errors: Mapping[str, str] | None = None
) -> list[MessageRef]:
    """Post all of the messages or none, and return their addresses in the same order.

    ``errors`` has the earlier errors of the entries that are None. The fields of Invalid follow the entry's index:
    ``1.partition``.
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


def overwrite(queue: StoredQueue, refs: Sequence[MessageRef], entry: MessageInput) -> None:
    """Create or replace the messages at these addresses.

    A new message can't have a future id: a reader that continues after it would miss all messages posted until then. An
    existing message may have one, since the clock may have been set back. All messages are validated before the first
    is stored. If the store fails midway, repeat the call.
    """
    messages = [_message(queue, entry._replace(partition=ref.partition)) for ref in refs]
    latest = store().now() + MAX_SECONDS_AHEAD * TICKS_PER_SECOND
    ahead = [ref for ref in refs if ids.place(ref.id).ticks > latest]
    existing = [(one.partition, one.id) for one in store().read_ids(queue, ahead)] if ahead else []
    for ref in ahead:
        if ref not in existing:
            raise Invalid({"message_id": f'"{ref.id.hex}" is more than {MAX_SECONDS_AHEAD} seconds ahead'})
    with quota.reserved(queue.application, messages):
        for ref, message in zip(refs, messages, strict=True):
            store().overwrite(queue, ref.id, message)


def read(
    queue: StoredQueue,
    partitions: Iterable[int] = (1,),
    *,
    start: Place | None = None,
    limit: int = MAX_READ,
    descending: bool = False,
    batch_bytes: int | None = None,
) -> Iterator[StoredMessage]:
    """Yield up to ``limit`` messages of each of these partitions, partition after partition.

    Reading begins at ``start``, inclusive. The store's delay applies. With ``batch_bytes``, messages are fetched in
    batches of at most this size, and one message more, so that a caller may stop early.
    """
    used = store()
    options: Any = {"before": visible_before(used), "max_bytes": batch_bytes, "descending": descending}
    for partition in dict.fromkeys(partitions):
        if not _has(queue, partition):
            continue
        place, to_read = start, limit
        while to_read > 0:
            some = used.read(queue, partition, start=place, limit=to_read, **options)
            yield from some
            if not some or batch_bytes is None or sum(message.size for message in some) < batch_bytes:
                break
            to_read -= len(some)
            last = ids.place(some[-1].id)
            place = last.previous if descending else last.next


def read_ids(
    queue: StoredQueue, refs: Sequence[MessageRef], *, batch_bytes: int | None = None
) -> Iterator[StoredMessage]:
    """Yield the existing messages at these addresses, in this order.

    With ``batch_bytes``, no more are fetched at once than fit if all are as large as allowed.
    """
    used = store()
    before = visible_before(used)
    waiting = [ref for ref in refs if _has(queue, ref.partition)]
    batch = len(waiting) if batch_bytes is None else max(1, batch_bytes // settings.MESSAGE_STORE_MAX_BODY)
    while waiting:
        asked, waiting = waiting[:batch], waiting[batch:]
        some = used.read_ids(queue, asked)
        yield from (message for message in some if before is None or ids.place(message.id).ticks < before)


def _has(queue: StoredQueue, partition: int) -> bool:
    return 1 <= partition <= queue.partitions


def delete(queue: StoredQueue, refs: Sequence[MessageRef]) -> None:
    """Delete the messages at these addresses, ignoring those that don't exist."""
    store().delete(queue, [ref for ref in refs if _has(queue, ref.partition)])


def visible_before(used: MessageStore) -> int | None:
    """Return the ticks from which on the store's delay hides messages, or None without a delay."""
    return used.now() - round(used.delay * TICKS_PER_SECOND) if used.delay else None


# Positions


def positions(queue: StoredQueue, consumer: str) -> dict[int, uuid.UUID]:
    """Return the id of a consumer's last processed message by partition."""
    _check_consumer(consumer)
    return store().positions(queue, consumer)


def version_of(positions: Mapping[int, uuid.UUID]) -> str:
    """Return a text that differs for different positions."""
    named = ",".join(f"{partition}:{message_id.hex}" for partition, message_id in sorted(positions.items()))
    return hashlib.sha256(named.encode()).hexdigest()[:32]


def waiting(queue: StoredQueue, positions: Mapping[int, uuid.UUID], partitions: Iterable[int]) -> list[int]:
    """Return which of these partitions have messages after these positions. The store's delay applies."""
    used = store()
    starts = {one: ids.place(positions[one]).next if one in positions else None for one in partitions}
    return used.waiting(queue, starts, before=visible_before(used)) if starts else []


def advance_positions(queue: StoredQueue, consumer: str, given: Mapping[str, Any]) -> dict[int, uuid.UUID]:
    """Move a consumer's positions in these partitions ``from`` one message ``to`` another. Return all positions.

    A position that is no longer at ``from`` (None: no position) stays, whatever happens to the others. One that was
    moved is returned as moved, even if it was deleted since: else the caller would take its move for refused.
    """
    _check_consumer(consumer)
    moves = _by_partition(queue, given, _parse_move)
    if any(at is None for at, _ in moves.values()):
        _require_room(queue, consumer)
    moved = store().advance_positions(queue, consumer, moves)
    return {**store().positions(queue, consumer), **{partition: moves[partition][1] for partition in moved}}


def _require_room(queue: StoredQueue, consumer: str) -> None:
    """Raise QuotaReached if the queue has ``MAX_CONSUMERS`` other consumers, and this one has no positions yet."""
    if store().positions(queue, consumer):
        return
    if len(list(islice(store().consumers(queue), MAX_CONSUMERS))) == MAX_CONSUMERS:
        raise quota.QuotaReached(f"The queue has positions of {MAX_CONSUMERS} consumers. Delete those of some")


def _parse_move(move: Any) -> tuple[uuid.UUID | None, uuid.UUID]:
    if not isinstance(move, dict) or move.keys() != {"from", "to"}:
        raise ValueError("Must be an object with from and to")
    at = move["from"]
    return None if at is None else parse_id(at), parse_id(move["to"])


def _by_partition(queue: StoredQueue, given: Mapping[str, Any], parse: Callable[[Any], T]) -> dict[int, T]:
    """Return the parsed values by partition. Raises Invalid for ``positions``, or the given partition."""
    errors: dict[str, str] = {} if given else {"positions": REQUIRED}
    parsed: dict[int, T] = {}
    for partition, value in given.items():
        try:
            number = parse_number(partition, 1, queue.partitions)
            if number in parsed:  # such as by 1 and 01
                raise ValueError(GIVEN_TWICE)
            parsed[number] = parse(value)
        except ValueError as error:
            errors[readable(partition[:MAX_NAME_LENGTH])] = str(error)
            if len(errors) > MAX_PARTITIONS:
                break
    if errors:
        raise Invalid(errors)
    return parsed


def set_positions(
    queue: StoredQueue, consumer: str, given: Mapping[str, Any], versions: Collection[str] | None = None
) -> None:
    """Set a consumer's positions in these partitions only, forward or back.

    With ``versions``, raise PositionsChanged unless all its positions still have one of these versions.
    """
    _check_consumer(consumer)
    new = _by_partition(queue, given, parse_id)
    _require_room(queue, consumer)
    store().set_positions(queue, consumer, new, unchanged=_unchanged(queue, consumer, versions))


def delete_positions(queue: StoredQueue, consumer: str, versions: Collection[str] | None = None) -> None:
    """Delete a consumer's positions. ``versions`` works as in ``set_positions``."""
    _check_consumer(consumer)
    store().delete_positions(queue, consumer, unchanged=_unchanged(queue, consumer, versions))


def _unchanged(queue: StoredQueue, consumer: str, versions: Collection[str] | None) -> dict[int, uuid.UUID] | None:
    if versions is None:
        return None
    found = store().positions(queue, consumer)
    if version_of(found) not in versions:
        raise PositionsChanged
    return found


# Helpers


def _post(queue: StoredQueue, messages: list[NewMessage]) -> list[MessageRef]:
    with quota.reserved(queue.application, messages):
        new_ids = store().push(queue, messages)
    return [MessageRef(message.partition, message_id) for message_id, message in zip(new_ids, messages, strict=True)]


def _message(queue: StoredQueue, entry: MessageInput) -> NewMessage:
    """Validate a message and fill in its defaults. Raises Invalid."""
    errors: dict[str, str] = {}
    body, partition, ttl, kind = entry.body, entry.partition, entry.ttl, entry.content_type
    if not body:
        errors["body"] = REQUIRED
    elif len(body) > settings.MESSAGE_STORE_MAX_BODY:
        errors["body"] = f"{len(body)} bytes are more than {settings.MESSAGE_STORE_MAX_BODY}"
    if partition is None:
        partition = 1 + secrets.randbelow(queue.partitions)
    if ttl is None:
        ttl = DEFAULT_TTL_SECONDS
    where = collect_error(errors, "partition", lambda: parse_number(partition, 1, queue.partitions))
    seconds = collect_error(errors, "ttl", lambda: parse_number(ttl, 1, MAX_TTL_SECONDS))
    if len(kind) > MAX_CONTENT_TYPE_LENGTH:
        errors["content_type"] = f"Longer than maximum length {MAX_CONTENT_TYPE_LENGTH}"
    elif not _CONTENT_TYPE.fullmatch(kind):
        errors["content_type"] = f'"{readable_text(kind)}" is not a content type'
    if errors or where is None or seconds is None:
        raise Invalid(errors)
    return NewMessage(body, where, seconds, kind)


def _validated(given: SettingsInput, least: int, errors: dict[str, str]) -> QueueSettings:
    """Return the given settings, parsed for the store. Raises Invalid with these and further errors."""
    parsers: dict[str, Callable[[Any], Any]] = {
        "partitions": lambda value: parse_number(value, least, MAX_PARTITIONS),
        "type": lambda value: parse_choice(value, TYPES),
        "consistency": lambda value: parse_choice(value, CONSISTENCIES),
        "principals": principals.parse,
    }
    parsed: Any = {}
    for name, value in given.items():
        if value is not None:
            field = "principles" if name == "principals" else name
            parsed[name] = collect_error(errors, field, partial(parsers[name], value))
    if errors:
        raise Invalid(errors)
    return cast(QueueSettings, parsed)


def _check_consumer(consumer: str) -> None:
    try:
        check_name(consumer)
    except ValueError as error:
        raise Invalid({"consumer": str(error)}) from None
