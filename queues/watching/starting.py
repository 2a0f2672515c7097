"""Start a watch: who may watch what, how many at once, and the queue that gets the copies."""

from collections.abc import Collection, Iterable
from datetime import timedelta

from django.conf import settings
from django.utils import timezone

from accounts import audit
from accounts.access import vouching
from accounts.models import Owner
from core import broker, locks
from core.refusals import Refusal
from queues.models import MessageWatch, Queue
from queues.rules.watchable import DEFAULT_EXCHANGE, why_not_watched
from queues.watching import polling
from rabbit import watch_queue
from rabbit.entities import Binding
from rabbit.errors import BrokerError
from rabbit.management import Management
from rabbit.names import MAX_NAME_BYTES, is_amqp_name, readable
from rabbit.watch_queue import Source

DURATION = timedelta(minutes=5)
MAX_OF_AN_OWNER = 2
MAX_WATCHES = 50
MAX_BINDINGS = 100
"""Each takes a request to the broker while the visitor waits."""

WATCHED = "watched messages"
"""The audit trail's entry."""

LOCK_WAIT_SECONDS = 3.0


def start_at_exchange(by: Owner, exchange: str, routing_key: str) -> MessageWatch:
    """Watch the messages of an exchange of the Pulse users' vhost that match this key.

    Raises:
        Refusal: the owner may not, or the exchange can't be watched.
        BrokerError: the broker is unreachable or refuses.
    """
    vouching.require_vouched(by)
    if not exchange:
        raise Refusal(DEFAULT_EXCHANGE, "exchange")
    if not is_amqp_name(routing_key):
        raise Refusal(f"A routing key has at most {MAX_NAME_BYTES} bytes.", "routing_key")
    vhost = settings.GUARDIAN_PULSE_VHOST
    polling.require_readable([exchange], by)
    management = broker.management()
    _require_watchable([exchange], "exchange", management, vhost, management.bindings(vhost))
    # Without arguments, a headers exchange matches every message.
    watch = MessageWatch(owner=by, vhost=vhost, exchange=exchange, routing_key=routing_key)
    return _start(watch, [Source(exchange, routing_key, {})])


def start_at_queue(by: Owner, queue: Queue) -> MessageWatch:
    """Watch the messages that match the bindings of a queue, which the owner may see.

    The errors are those of ``start_at_exchange``.
    """
    vouching.require_vouched(by)
    if queue.vhost != settings.GUARDIAN_PULSE_VHOST:
        raise Refusal("Only queues of Pulse users can be watched, not those of agents.", "queue")
    management = broker.management()
    bindings = management.bindings(queue.vhost)
    own = [one for one in bindings if one.source and one.destination_type == "queue" and one.destination == queue.name]
    if not own:
        raise Refusal(f"No exchange is bound to the queue. {DEFAULT_EXCHANGE}", "queue")
    if len(own) > MAX_BINDINGS:
        raise Refusal(f"The queue has more than {MAX_BINDINGS} bindings. Watch one of its exchanges instead.", "queue")
    sources = list(dict.fromkeys(one.source for one in own))
    polling.require_readable(sources, by, "queue")
    _require_watchable(sources, "queue", management, queue.vhost, bindings)
    watch = MessageWatch(owner=by, vhost=queue.vhost, queue=queue)
    return _start(watch, [Source(one.source, one.routing_key, one.arguments) for one in own])


def _require_watchable(
    names: Iterable[str], field: str, management: Management, vhost: str, bindings: Collection[Binding]
) -> None:
    exchanges = {one.name: one for one in management.exchanges(vhost)}
    policies = management.policies(vhost)
    for name in names:
        if name not in exchanges:
            raise Refusal(polling.NOT_READABLE, field)
        if why := why_not_watched(name, exchanges, bindings, policies):
            raise Refusal(readable(why), field)


def _start(watch: MessageWatch, sources: Iterable[Source]) -> MessageWatch:
    """Store the row, then declare the queue. After a crash in between, the row counts for a minute."""
    by = watch.owner
    watch.polled_at = timezone.now()
    watch.ends = watch.polled_at + DURATION
    try:
        with locks.lock("watches", LOCK_WAIT_SECONDS):
            _require_room(by)
            watch.save()
    except locks.LockTaken as error:
        raise Refusal("Other watches are starting. Try again in a minute.") from error
    try:
        with (
            audit.audited(by, WATCHED, watch, routing_keys=[one.routing_key for one in sources]),
            broker.session(watch.vhost) as session,
        ):
            watch_queue.declare(session, watch.uuid.hex, sources)
    except BrokerError:
        watch.delete()  # its queue expires
        raise
    return watch


def _require_room(by: Owner) -> None:
    running = MessageWatch.objects.exclude(polling.is_over())
    if running.filter(owner=by).count() >= MAX_OF_AN_OWNER:
        raise Refusal(
            f"You can run {MAX_OF_AN_OWNER} watches at once. Stop one, or wait a minute after you close its page."
        )
    if running.count() >= MAX_WATCHES:
        raise Refusal(f"{MAX_WATCHES} watches are running, which is the limit for all owners. Try again in 5 minutes.")
