"""The sweep of queues that no registration stands for, and the clean-up of subscriptions whose owner is gone.

``sweep_orphans`` and ``clean_up_stale`` are what the Celery tasks and the management commands call. Both delete under
the brake, and each leaves a row that says what it did.
"""

import hashlib
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from functools import partial
from itertools import chain, islice
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

from django.conf import settings
from django.core.exceptions import ObjectDoesNotExist, PermissionDenied
from django.db import transaction
from django.db.models import Exists, OuterRef, QuerySet
from django.utils import timezone

from accounts.models import AuthToken, Owner, PulseUser
from agents import registered, registration, removals
from agents.models import Consumer, EventSubscription, Registration, SubscriptionQueue, Sweep
from core import broker, bulk
from core.leases import HeldLease, LeaseLost, LeaseTaken, lease
from core.models import Removal
from notifications import enqueue
from notifications.enqueue import Telling
from notifications.models import Notification
from queues.thresholds import brake_limit
from rabbit import directly, snapshot
from rabbit.management import BrokerAway, BrokerError, Management, User
from rabbit.names import DEAD_LETTER_QUEUE, is_agents_login, is_agents_queue, readable
from rabbit.permissions import Permissions, allows, for_consumer, for_subscription
from rabbit.snapshot import Present

logger = logging.getLogger(__name__)

T = TypeVar("T")
QueueName = tuple[str, str]

KEEP_REPORTS = timedelta(days=90)

UNDER_WAY = timedelta(minutes=1)
"""A registration younger than this may be under way, and is left to whoever is at it."""

BATCH = 500
"""So many queues are deleted, or owners and tokens looked at, between two renewals of the lease."""

MOST_ERRORS = 50
"""Errors that the report keeps. The log has them all."""

MOST_NAMED = 20
"""Orphans in use that a message names. The command names them all."""

MOST_TIMEOUTS = 3
"""After so many repairs that the broker didn't answer in time, it is away."""

_USERNAME = re.compile("[0-9a-f]{32}")
_READS_A_CONSUMERS = re.compile(re.escape(for_consumer("*").read).replace(re.escape("*"), _USERNAME.pattern))


@dataclass
class Report:
    """What one sweep or clean-up did. The names are those of ``agents.models.Sweep``, and of ``--json``.

    Of a dry run the numbers are what would be done. ``in_use`` are the orphans that were kept: somebody reads from
    them, or the broker can't tell. ``logins`` is how many the broker lacked, or their permissions; the next
    registration makes them. ``users`` is how many RabbitMQ users went that no login stands for. ``stale`` are the
    subscriptions and consumers that are to go, by their UUIDs in hex. ``left_out`` are queues that are to go too and
    were not agreed to.
    """

    kind: str
    at: datetime
    dry_run: bool = False
    seen: int = 0
    found: int = 0
    deleted: int = 0
    kept: int = 0
    repaired: int = 0
    logins: int = 0
    users: int = 0
    subscriptions: int = 0
    tokens: int = 0
    brake_held: bool = False
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0
    would_delete: list[dict[str, str]] = field(default_factory=list)
    would_repair: list[dict[str, str]] = field(default_factory=list)
    in_use: list[dict[str, str]] = field(default_factory=list)
    owners: list[str] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    left_out: list[dict[str, str]] = field(default_factory=list)
    another_sweep: bool = False
    away: bool = False
    given_up: bool = False
    told: int = 0

    def as_json(self) -> dict[str, Any]:
        """Return it in the form that ``--json`` prints."""
        return {**asdict(self), "at": self.at.isoformat()}

    def note(self, error: str) -> None:
        """Keep an error, in words, and log it; once, though it may be found twice."""
        if error in self.errors:
            return
        logger.warning("%s: %s", self.kind, error)
        if len(self.errors) < MOST_ERRORS:
            self.errors.append(error)


class Registered(NamedTuple):
    """A registered queue, as its row says. ``model`` and ``id`` are the row's."""

    model: type[SubscriptionQueue] | type[Consumer]
    id: int
    vhost: str
    name: str
    state: str


class Look(NamedTuple):
    """What a sweep sees: queues and rows. The queues were listed first, so that what came in between has its row.

    ``unlisted`` are the vhosts that could not be listed. ``stopped`` says why the list may lack queues of any vhost,
    and a queue be there that the broker says isn't; empty: no reason. ``steady``: the nodes were the same throughout.
    """

    management: Management
    queues: Mapping[QueueName, Present]
    rows: Mapping[QueueName, Registered]
    vhosts: Mapping[str, int]
    unlisted: Collection[str]
    stopped: str
    steady: bool


def old_reports(now: datetime) -> QuerySet[Sweep]:
    """Return the reports that are not kept any longer."""
    return Sweep.objects.filter(at__lt=now - KEEP_REPORTS)


def sweep_orphans(*, force: bool = False, dry_run: bool = False, only: Collection[QueueName] | None = None) -> Report:
    """Delete the queues in the agents' vhosts that no registration stands for, and make again what is missing there.

    An orphan that somebody reads from is kept, and the operators hear of it. ``force`` deletes that too, and lifts the
    brake; ``dry_run`` looks, and changes nothing. ``only`` are the queues, by vhost and name, that somebody has agreed
    to: no other is deleted. Where another process is at it, the report says so.
    """
    agreed = None if only is None else frozenset(only)
    return _run(Report(Sweep.Kind.ORPHANS.value, timezone.now(), dry_run), partial(_sweep, only=agreed), force)


def clean_up_stale(*, force: bool = False, dry_run: bool = False, only: Collection[str] | None = None) -> Report:
    """Remove the subscriptions and consumers of owners without a live token, and the tokens that have expired.

    Identities stay. What goes from the broker goes as with any other removal. ``force`` lifts the brake; ``dry_run``
    looks, and changes nothing. ``only`` are the subscriptions and consumers, by their UUIDs in hex, that somebody has
    agreed to: no other is removed. Expired tokens go anyhow. Where another process is at it, the report says so.
    """
    agreed = None if only is None else frozenset(only)
    return _run(Report(Sweep.Kind.STALE.value, timezone.now(), dry_run), partial(_clean_up, only=agreed), force)


def _run(report: Report, do: Callable[[Report, HeldLease | None, bool], None], force: bool) -> Report:
    began = time.monotonic()
    if report.dry_run:
        do(report, None, force)
    else:
        try:
            with lease(report.kind) as held:
                do(report, held, force)
                report.seconds = time.monotonic() - began
                with transaction.atomic():
                    held.renew()
                    _file(report)
        except LeaseTaken:
            report.another_sweep = True
        except LeaseLost as error:
            report.given_up = True
            report.note(str(error))
            report.seconds = time.monotonic() - began
            _file(report)
        if report.told:
            enqueue.nudge(report.told)
    report.seconds = time.monotonic() - began
    if not report.another_sweep:
        logger.info(
            "%s%s: %d queues seen, %d to be deleted, %d deleted, %d kept, %d made again, %d errors, in %.1f s",
            report.kind,
            " (dry run)" if report.dry_run else "",
            *(report.seen, report.found, report.deleted, report.kept, report.repaired),
            *(len(report.errors), report.seconds),
        )
    return report


# The sweep


def _sweep(report: Report, held: HeldLease | None, force: bool, *, only: Collection[QueueName] | None) -> None:
    """Sweep under this lease; without one, look and decide only."""
    try:
        look = _look(report, held)
        orphans = _agreed(report, _orphans(report, look), only)
        if len(orphans) > _most(len(look.queues)) and not force:
            # What was removed while it was listed was there, and has neither a row nor a Removal any more. It is gone
            # by now, and no reason for the brake to hold. Under the brake it costs a DELETE that is answered 404.
            look = _look(report, held)
            at_first = {(queue.vhost, queue.name) for queue in orphans}
            orphans = [queue for queue in _orphans(report, look) if (queue.vhost, queue.name) in at_first]
    except BrokerError as error:
        report.away = True
        report.note(str(error))
        return
    report.seen = len(look.queues)
    report.found = len(orphans)
    _hold_the_brake(report, force)
    missing, bare = _missing(look, report.at), _without_dead_letters(look)
    names = []
    for queue in orphans:
        if force or queue.type == "classic":
            names.append((queue.vhost, queue.name))
        else:
            _keep(report, (queue.vhost, queue.name))
            report.note(
                f"{readable(queue.name)} in {queue.vhost} is a {queue.type} queue, of which the broker can't tell in "
                "time whether anybody reads from it; see for yourself, then use --force"
            )
    if names and look.stopped:
        report.note(f"{look.stopped}; nothing is deleted, the next sweep looks again")
        names = []
    if held is None:
        _foresee(report, names, force)
        report.would_repair = [_named((row.vhost, row.queue_name)) for row in missing]
        report.would_repair += [_named((vhost, DEAD_LETTER_QUEUE)) for vhost in bare]
        report.repaired = len(report.would_repair)
        _settle_logins(report, look, None, force, names)
        return
    if report.brake_held:
        report.would_delete = [_named(name) for name in names]
    else:
        _remove(report, names, held, force)
    if not report.away:
        _repair(report, look, missing, bare, held)
    _settle_logins(report, look, held, force, names)


def _look(report: Report, held: HeldLease | None) -> Look:
    """List the broker, then read the rows.

    Raises:
        BrokerError: nothing could be listed, or the list can't be believed.
    """
    keep = held.keep if held else lambda: None
    management = broker.management()
    before = registered.agent_vhosts()
    snapshot.require_administrator(management)
    members = snapshot.members(management)
    keep()
    there, unlisted = snapshot.present(management, list(before), keep) if before else ([], {})
    keep()
    steady = snapshot.members(management) == members
    for vhost, reason in unlisted.items():
        report.note(f"vhost '{vhost}' could not be listed: {reason}")
    stopped = "the nodes of the cluster changed meanwhile, and with them the list" if not steady else ""
    if steady and members[1]:
        stopped = f"a node is down ({', '.join(sorted(members[1]))}), and its queues can't be told from deleted ones"
    rows = {(row.vhost, row.name): row for row in _registered()}
    after = registered.agent_vhosts()
    return Look(
        management,
        {(queue.vhost, queue.name): queue for queue in there},
        rows,
        {vhost: owner for vhost, owner in after.items() if vhost in before},
        unlisted,
        stopped,
        steady,
    )


def _registered() -> Iterator[Registered]:
    """Read what stands for a queue, also where that is being made. Two statements."""
    columns = ("id", "vhost", "queue_name", "state")
    models: tuple[type[SubscriptionQueue] | type[Consumer], ...] = (SubscriptionQueue, Consumer)
    for model in models:
        for row in model._default_manager.order_by().values_list(*columns):
            yield Registered(model, *row)


def _orphans(report: Report, look: Look) -> list[Present]:
    """Return the queues that no row stands for. What is being removed already has its reason to be there."""
    orphans = [
        queue
        for name, queue in look.queues.items()
        if queue.vhost in look.vhosts and is_agents_queue(queue.name) and not queue.exclusive and name not in look.rows
    ]
    pending = removals.pending() if orphans else set()
    for queue in orphans:
        if "\0" in queue.name:  # which no database keeps
            report.note(f"{readable(queue.name)} in {queue.vhost} can't be deleted from here; use rabbitmqctl")
    return sorted(queue for queue in orphans if "\0" not in queue.name and (queue.vhost, queue.name) not in pending)


def _agreed(report: Report, orphans: list[Present], only: Collection[QueueName] | None) -> list[Present]:
    """Return those of them that somebody has agreed to; None: all. The others are noted."""
    if only is None:
        return orphans
    report.left_out = [_named((queue.vhost, queue.name)) for queue in orphans if (queue.vhost, queue.name) not in only]
    return [queue for queue in orphans if (queue.vhost, queue.name) in only]


def _missing(look: Look, at: datetime) -> list[SubscriptionQueue | Consumer]:
    """Return what is ready without its queue, and what was left in the making: whole rows, in two statements at most.

    What came in after the list was taken isn't in that, and is too young to be among these.
    """
    if not look.steady:
        return []
    lacking: dict[type[SubscriptionQueue] | type[Consumer], list[tuple[int]]] = {}
    for name, row in look.rows.items():
        is_lost = name not in look.queues and row.vhost in look.vhosts and row.vhost not in look.unlisted
        if is_lost or row.state == Registration.CREATING:
            lacking.setdefault(row.model, []).append((row.id,))
    missing: list[SubscriptionQueue | Consumer] = []
    for model, ids in lacking.items():
        owner = "subscription__owner" if model is SubscriptionQueue else "identity__owner"
        rows = model._default_manager.filter(bulk.among(model, ("id",), ids), created__lt=at - UNDER_WAY)
        missing += rows.select_related(owner).order_by("pk")
    return missing


def _without_dead_letters(look: Look) -> list[str]:
    """Return the vhosts that lack their dead-letter queue, or aren't there at all."""
    if not look.steady:
        return []
    return [
        vhost for vhost in look.vhosts if vhost not in look.unlisted and (vhost, DEAD_LETTER_QUEUE) not in look.queues
    ]


def _most(seen: int) -> int:
    """Return how many queues, or users, may be deleted at once where so many were seen."""
    return brake_limit(settings.GUARDIAN_DELETE_BRAKE, seen)


def _hold_the_brake(report: Report, force: bool) -> None:
    """Note whether so many queues may be deleted at once."""
    limit = _most(report.seen)
    if report.found > limit and not force:
        report.brake_held = True
        report.note(
            f"the brake holds: {report.found} of {report.seen} queues are to be deleted, and at most {limit} may be; "
            "look, then use --force"
        )


def _foresee(report: Report, names: Sequence[QueueName], force: bool) -> None:
    """Say which of these would be deleted, and which kept."""
    depths = {} if force else directly.ask(broker.amqp_url(), names)
    for name in names:
        if name in depths and depths[name].consumers:
            _keep(report, name)
        else:
            report.would_delete.append(_named(name))


def _remove(report: Report, names: Sequence[QueueName], held: HeldLease, force: bool) -> None:
    """Delete these: decided and written first, so that what a crash leaves is finished as any other removal."""
    for batch in _batches(names):
        with transaction.atomic():
            held.renew()
            removals.write(
                [
                    Removal(kind=Removal.Kind.QUEUE, vhost=vhost, name=name, if_unused=not force)
                    for vhost, name in batch
                ],
                due_at=timezone.now() + UNDER_WAY,
            )
            written = Removal.objects.filter(bulk.among(Removal, ("vhost", "name"), batch), kind=Removal.Kind.QUEUE)
            ids = list(written.values_list("id", flat=True))
        outcome = removals.carry_out(ids)
        report.deleted += outcome.deleted
        for name in outcome.kept:
            _keep(report, name)
        for error in outcome.errors:
            report.note(error)
        if outcome.away:
            report.away = True
            return


def _keep(report: Report, name: QueueName) -> None:
    report.kept += 1
    report.in_use.append(_named(name))


def _repair(
    report: Report, look: Look, missing: Sequence[SubscriptionQueue | Consumer], bare: Sequence[str], held: HeldLease
) -> None:
    """Make again what the broker lacks. One that fails doesn't stop the others; a broker that is away does."""
    timeouts = 0
    steps: Iterable[tuple[str, Callable[[], None]]] = chain(
        (
            (f"{DEAD_LETTER_QUEUE} in {owner.uuid.hex}", _dead_letters(owner, look.management))
            for owner in Owner.objects.filter(pk__in=[look.vhosts[vhost] for vhost in bare])
        ),
        ((f"{row.queue_name} in {row.vhost}", _again(row, look.management)) for row in missing),
    )
    for what, make in steps:
        held.keep()
        try:
            make()
        except (BrokerError, PermissionDenied, ObjectDoesNotExist) as error:
            # The latter two: its owner may not use the broker any more, or is gone.
            report.note(f"{what} could not be made again: {error}")
            if isinstance(error, BrokerAway):
                # Else one vhost alone is busy, or doesn't run.
                timeouts += error.timed_out
                if error.never_reached or timeouts == MOST_TIMEOUTS:
                    report.away = True
                    return
        else:
            report.repaired += 1
            logger.info("%s was made again", what)


def _again(row: SubscriptionQueue | Consumer, management: Management) -> Callable[[], None]:
    return lambda: registration.make_again(row, management)


def _dead_letters(owner: Owner, management: Management) -> Callable[[], None]:
    return lambda: registration.make_vhost(owner, management)


def _settle_logins(
    report: Report, look: Look, held: HeldLease | None, force: bool, going: Collection[QueueName]
) -> None:
    """Hold the logins against the broker's users, both ways; without a lease, look and decide only.

    The rows are read first of all, for what they lack: what has its password then has its user and its permission
    afterwards. They are read again after the list, for what stands for a user: it has its row before it is made.

    ``going`` are the queues that were to be deleted. Whoever reads from another one that no registration stands for,
    or from one that was kept, keeps the user to read it by.
    """
    if report.away:
        return
    logins = _logins()
    if held is not None:
        held.keep()
    try:
        users = look.management.users()
        permissions = look.management.all_permissions()
        _forget_passwords(report, logins, {user.name for user in users}, permissions, held)
        kept = {(one["vhost"], one["queue"]) for one in report.in_use}
        spare = _spare(users, permissions, look.vhosts, look.queues.keys() - look.rows.keys() - (set(going) - kept))
        if spare:
            # As for queues: what was removed meanwhile is gone by now.
            there = {user.name for user in look.management.users()}
            spare = [name for name in spare if name in there]
    except BrokerError as error:
        report.note(f"the users could not be listed: {error}")
        return
    limit = _most(len(spare) + len(logins))
    if len(spare) > limit and not force:
        report.note(
            f"{len(spare)} RabbitMQ users are named as an agent's login and have none here, which is more than the "
            f"brake allows ({limit}), so none was deleted; look, then use --force"
        )
    elif held is None:
        report.users = len(spare)
    elif not report.brake_held:
        _remove_users(report, spare, held)


class _Login(NamedTuple):
    """A login whose password is said to be on the broker, and what it may do in the vhost of its owner's agents."""

    model: type[EventSubscription] | type[Consumer]
    id: int
    name: str
    vhost: str
    permissions: Permissions


def _logins() -> list[_Login]:
    """Return the logins whose password the broker has, as far as is known. Two statements."""
    subscribed = EventSubscription.objects.filter(password_set=True).order_by()
    consuming = Consumer.objects.filter(password_set=True).order_by()
    return [
        _Login(EventSubscription, id_, uuid.hex, owner.hex, for_subscription(uuid.hex))
        for id_, uuid, owner in subscribed.values_list("id", "uuid", "owner__uuid")
    ] + [
        _Login(Consumer, id_, name, owner.hex, for_consumer(uuid.hex))
        for id_, name, uuid, owner in consuming.values_list("id", "rmq_username", "uuid", "identity__owner__uuid")
    ]


def _forget_passwords(
    report: Report,
    logins: Iterable[_Login],
    users: Collection[str],
    permissions: Mapping[str, Mapping[str, Permissions]],
    held: HeldLease | None,
) -> None:
    """Note of each login that the broker lacks its user or its permission: the next registration makes these anew."""
    lacking: dict[type[EventSubscription] | type[Consumer], list[tuple[int]]] = {}
    for login in logins:
        if login.name not in users or permissions.get(login.name, {}).get(login.vhost) != login.permissions:
            lacking.setdefault(login.model, []).append((login.id,))
    for model, ids in lacking.items():
        if held is None:
            report.logins += len(ids)
        else:
            rows = model._default_manager.filter(bulk.among(model, ("id",), ids), password_set=True)
            report.logins += rows.update(password_set=False)


def _spare(
    users: Iterable[User],
    permissions: Mapping[str, Mapping[str, Permissions]],
    vhosts: Collection[str],
    staying: Iterable[QueueName],
) -> list[str]:
    """Return the users that look as a login's do, and that nothing stands for. Four statements at most.

    One without any permission may be somebody else's, and can do nothing. One that may read from a queue that is
    ``staying`` is needed for that.
    """
    names = {user.name for user in users if not user.tags and is_agents_login(user.name) and permissions.get(user.name)}
    # First what a row stands for, which is nearly all of them: a comparison of patterns costs more than a row.
    if names:
        names -= {uuid.hex for uuid in EventSubscription.objects.order_by().values_list("uuid", flat=True)}
        names -= set(Consumer.objects.order_by().values_list("rmq_username", flat=True))
    if names:
        names -= set(PulseUser.objects.order_by().values_list("username", flat=True))
        names -= set(Removal.objects.filter(kind=Removal.Kind.USER).order_by().values_list("name", flat=True))
    to_read: dict[str, list[str]] = {}
    for vhost, queue in staying:
        to_read.setdefault(vhost, []).append(queue)
    return sorted(
        name
        for name in names
        if all(vhost in vhosts and _is_a_logins(name, granted) for vhost, granted in permissions[name].items())
        and not any(
            allows(granted.read, queue)
            for vhost, granted in permissions[name].items()
            for queue in to_read.get(vhost, ())
        )
    )


def _is_a_logins(name: str, granted: Permissions) -> bool:
    """Return whether these permissions are of the shape that a login of this name has."""
    if granted == for_subscription(name):
        return True
    reads_one = _READS_A_CONSUMERS.fullmatch(granted.read) is not None
    return reads_one and granted._replace(read="") == for_consumer(name)._replace(read="")


def _remove_users(report: Report, names: Sequence[str], held: HeldLease) -> None:
    """Delete these users, decided and written first, as with queues."""
    for batch in _batches(names):
        with transaction.atomic():
            held.renew()
            removals.write(
                [Removal(kind=Removal.Kind.USER, name=name) for name in batch], due_at=timezone.now() + UNDER_WAY
            )
            written = Removal.objects.filter(kind=Removal.Kind.USER, name__in=batch)
            ids = list(written.values_list("id", flat=True))
        outcome = removals.carry_out(ids)
        report.users += outcome.deleted
        for error in outcome.errors:
            report.note(error)
        if outcome.away:
            report.away = True
            return


# The clean-up


def _clean_up(report: Report, held: HeldLease | None, force: bool, *, only: Collection[str] | None) -> None:
    """Clean up under this lease; without one, look and decide only."""
    owners = list(_stale().values_list("email", flat=True))
    subscribed = SubscriptionQueue.objects.filter(subscription__owner__in=_stale())
    consuming = Consumer.objects.filter(identity__owner__in=_stale())
    queues: list[tuple[QueueName, str]] = [
        ((vhost, name), uuid.hex)
        for vhost, name, uuid in chain(
            subscribed.values_list("vhost", "queue_name", "subscription__uuid"),
            consuming.values_list("vhost", "queue_name", "uuid"),
        )
    ]
    stale = {
        uuid.hex: owner
        for uuid, owner in chain(
            EventSubscription.objects.filter(owner__in=_stale()).values_list("uuid", "owner"),
            consuming.values_list("uuid", "identity__owner"),
        )
        if only is None or uuid.hex in only
    }
    names = sorted(name for name, uuid in queues if uuid in stale)
    report.left_out = [_named(name) for name, uuid in sorted(queues) if uuid not in stale] if only is not None else []
    report.seen = SubscriptionQueue.objects.count() + Consumer.objects.count()
    report.found = len(names)
    report.owners = sorted(owners)
    report.stale = sorted(stale)
    _hold_the_brake(report, force)
    expired = AuthToken.objects.filter(removals.is_over())
    if held is None or report.brake_held:
        report.would_delete = [_named(name) for name in names]
    if held is None:
        report.subscriptions = len(stale)
        report.tokens = expired.count()
        return
    if not report.brake_held:
        for batch in _batches(sorted(stale.items(), key=itemgetter(1))):
            _remove_subscriptions(report, dict(batch), held)
    for batch in _batches(list(expired.order_by("pk").values_list("pk", flat=True))):
        with transaction.atomic():
            held.renew()
            gone = AuthToken.objects.filter(removals.is_over(), pk__in=batch).delete()[1]
            report.tokens += gone.get(AuthToken._meta.label, 0)


def _without_token() -> QuerySet[Owner]:
    """Return the owners that no token in force speaks for."""
    in_force = AuthToken.objects.filter(user=OuterRef("pk")).exclude(removals.is_over())
    return Owner.objects.filter(~Exists(in_force))


def _stale() -> QuerySet[Owner]:
    """Return those of them who have subscriptions or consumers."""
    subscribed = EventSubscription.objects.filter(owner=OuterRef("pk"))
    consuming = Consumer.objects.filter(identity__owner=OuterRef("pk"))
    return _without_token().filter(Exists(subscribed) | Exists(consuming))


def _remove_subscriptions(report: Report, these: Mapping[str, int], held: HeldLease) -> None:
    """Remove these subscriptions and consumers, given as UUIDs with their owners, unless one has a token by now."""
    gone: Counter[str] = Counter()
    with transaction.atomic():
        held.renew()
        # Whoever makes a token locks its owner, too. Looked at in a statement of its own: on PostgreSQL the one that
        # waits for a lock doesn't see what was written meanwhile.
        locked = list(
            Owner.objects.select_for_update(no_key=True)
            .filter(pk__in=set(these.values()))
            .order_by("pk")
            .values_list("pk", flat=True)
        )
        stale = list(_without_token().filter(pk__in=locked).values_list("pk", flat=True))
        gone.update(removals.delete(EventSubscription.objects.filter(uuid__in=these, owner__in=stale)))
        gone.update(removals.delete(Consumer.objects.filter(uuid__in=these, identity__owner__in=stale)))
    report.subscriptions += gone[EventSubscription._meta.label] + gone[Consumer._meta.label]
    report.deleted += gone[SubscriptionQueue._meta.label] + gone[Consumer._meta.label]


# What both leave behind


def _file(report: Report) -> None:
    """Keep the report as a row, with the messages about it."""
    report.told += enqueue.tell(list(_news(report)), report.at)
    names = [one.name for one in Sweep._meta.get_fields() if one.name != "id"]
    Sweep.objects.create(**{name: getattr(report, name) for name in names})


def _news(report: Report) -> Iterator[Telling]:
    """Return what the operators have not been told yet: that the brake holds, and that orphans are in use."""
    # One that saw nothing says nothing: the broker was away.
    earlier = Sweep.objects.filter(kind=report.kind).exclude(seen=0)
    if report.brake_held:
        before = earlier.first()
        if before is None or not before.brake_held:
            facts: dict[str, Any] = {
                "count": report.found,
                "seen": report.seen,
                "stale": report.kind == Sweep.Kind.STALE,
            }
            yield Telling(Notification.Kind.SWEEP_BRAKE, facts)
    if report.in_use and report.kind == Sweep.Kind.ORPHANS:
        names = sorted((one["vhost"], one["queue"]) for one in report.in_use)
        digest = hashlib.sha256(repr(names).encode()).hexdigest()
        told = Notification.objects.filter(kind=Notification.Kind.ORPHANS_IN_USE).order_by("-id").first()
        is_news = told is None or told.facts["digest"] != digest
        if told is not None and not is_news:
            is_news = earlier.filter(at__gt=told.created, kept=0, brake_held=False, errors=[]).exists()
        if is_news:
            facts = {
                "count": len(names),
                "orphans": report.in_use[:MOST_NAMED],
                "more": max(0, len(names) - MOST_NAMED),
                "digest": digest,
            }
            yield Telling(Notification.Kind.ORPHANS_IN_USE, facts)


def _named(name: QueueName) -> dict[str, str]:
    return {"vhost": name[0], "queue": name[1]}


def _batches(items: Sequence[T]) -> Iterator[list[T]]:
    rest = iter(items)
    while batch := list(islice(rest, BATCH)):
        yield batch
