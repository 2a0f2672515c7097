"""Look at the first messages of a live queue. They stay in it, marked as redelivered."""

from http import HTTPStatus
from typing import NamedTuple

from accounts import audit
from accounts.models import Owner
from core import broker
from core.refusals import Refusal
from queues.actions.single import Gone
from queues.archives.reading import LOOKED_AT, MAX_HEADER_VALUES
from queues.models import Queue
from rabbit.errors import NotOnBroker
from rabbit.fetching import Bounds, Fetch, Fetched
from rabbit.snapshot import CLASSIC

MAX_MESSAGES = 50
MAX_BYTES = 1024 * 1024
SECONDS = 2.0


class Looked(NamedTuple):
    """The first messages of a queue with this many ready ones."""

    messages: list[Fetched]
    ready: int


def require_classic(queue: Queue) -> None:
    """Require that a queue is classic. Each look would cost a quorum queue's messages one of their deliveries.

    Raises:
        Refusal: the queue is of another type.
    """
    if queue.type != CLASSIC:
        raise Refusal(
            f"You can view the messages of classic queues only. This is a {queue.type} queue.",
            status=HTTPStatus.CONFLICT,
        )


def peek(queue: Queue, by: Owner, count: int) -> list[Fetched]:
    """Return at most ``count`` of the first ready messages of a queue, up to ``MAX_BYTES``. Raises as ``look``."""
    return look(queue, by, Bounds(min(count, MAX_MESSAGES), MAX_BYTES, SECONDS)).messages


def look(queue: Queue, by: Owner, bounds: Bounds) -> Looked:
    """Return the first ready messages of a queue, within the bounds.

    Raises:
        Refusal: the queue is of another type.
        Gone: the broker has no such queue.
        BrokerError: the broker is unreachable or refuses.
    """
    require_classic(queue)
    with broker.session(queue.vhost) as session:
        fetch = Fetch(session, queue.name, queue_type=CLASSIC, is_auto_delete=queue.auto_delete)
        try:
            depth = fetch.declare_passively()
        except NotOnBroker as error:
            raise Gone("The queue is no longer on the broker.") from error
        ready = depth.ready if depth else 0
        batches = fetch.batches(min(ready, bounds.messages), bounds)
        found = [message.decode(MAX_HEADER_VALUES) for batch in batches for message in batch]
        fetch.requeue()
    audit.record(by, LOOKED_AT, [queue], count=len(found))
    return Looked(found, ready)
