"""One pass of the monitor: fetch, load, compare, write, act, declare missing registered queues again.

The Celery task, the management command and the operator's button call ``run_pass``. The rules are elsewhere:
``rules/comparison.py`` decides what follows from a list, ``rules/brake.py`` has the operator's release,
``earlier_settings.py`` protects queues from a change of the settings, ``deleter.py`` deletes, ``notifications`` sends.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from http import HTTPStatus

from django.conf import settings
from django.db import transaction
from django.utils import timezone

from core import broker, leases
from core.leases import HeldLease, LeaseLost, LeaseTaken
from notifications import enqueue
from notifications.enqueue import Notice
from queues.guard import alarms, deleter, recording, registered, unguarded
from queues.guard.brake_table import LONGEST_FIRST, in_order, lines_of_pass
from queues.guard.facts import Facts, recent_samples
from queues.guard.pass_run import PassRun, Report, deletion_settings, rules, save_report
from queues.guard.persistence import Inventory, load, stored_queues, write
from queues.mails import kinds
from queues.models import Queue, QueueEvent, Watch
from queues.rules.changes import Changes
from queues.rules.comparison import compare
from queues.rules.rows import Observation, Registrations, StoredQueue, with_exact_lengths
from queues.rules.thresholds import GONE
from rabbit import amqp, deadline, snapshot
from rabbit.addresses import two_clusters
from rabbit.amqp import Session
from rabbit.errors import BrokerError, BrokerUnavailable
from rabbit.names import DEAD_LETTER_QUEUE, NameKind, QueueName, kind_of_exchange
from rabbit.prometheus import ListNeeded
from rabbit.snapshot import CLASSIC, Snapshot
from rabbit.threads import ContextThreadPool

logger = logging.getLogger(__name__)

LEASE = "pass"

INVENTORY_INTERVAL = timedelta(minutes=5)
EXACT_LIST_INTERVAL = timedelta(minutes=1)
"""Prometheus figures lag and contain only lengths, so the list is still fetched this often."""

FIGURES_LAG = timedelta(seconds=10)
"""For this long after a list the Prometheus figures may be older than it, so they must not change any length."""


PROBE_SECONDS = 3.0
"""How long one of several addresses may take for the cheapest request, which a frozen node does not answer."""

REFUSED_BACKOFF_SECONDS = 1.0

NODE_CHANGE_SECONDS = 1.0


def is_due() -> bool:
    """Return whether a pass may run now. After failures to reach the broker the interval grows."""
    next_pass_at = Watch.current().next_pass_at
    return next_pass_at is None or next_pass_at <= timezone.now()


def seconds_to_wait() -> float:
    """Return the seconds to wait after a pass: the poll interval, or more after failures to reach the broker."""
    next_pass_at = Watch.current().next_pass_at
    if next_pass_at is None:
        return float(settings.GUARDIAN_POLL_SECONDS)
    return max((next_pass_at - timezone.now()).total_seconds(), 0.0)


def run_pass(*, force: bool = False, dry_run: bool = False) -> Report:
    """Run one pass and return its report.

    ``force`` deletes blocked queues, too, and accepts a list that is too short. ``dry_run`` compares and decides,
    but changes nothing. If another process is running a pass, nothing is done, and the report says so.
    """
    report = Report(at=timezone.now(), dry_run=dry_run)
    began = time.monotonic()
    if dry_run:
        _pass(report, None, force)
        report.seconds = time.monotonic() - began
        return report
    try:
        with leases.lease(LEASE) as lease:
            report.at, began = timezone.now(), time.monotonic()  # so that no two reports overlap
            _pass(report, lease, force)
            report.seconds = time.monotonic() - began
            save_report(report)
    except LeaseTaken:
        report.another_pass = True
    except LeaseLost as error:
        report.given_up = True
        report.errors.append(str(error))
        report.seconds = time.monotonic() - began
        logger.error("The pass was aborted: %s", error)
        save_report(report)
    if report.notifications:
        enqueue.wake(report.notifications)
    if report.decided:
        deleter.wake()
    report.seconds = time.monotonic() - began
    return report


def _pass(report: Report, lease: HeldLease | None, force: bool) -> None:
    """Run one pass: fetch, load, compare, write, act. Without a lease, stop after the comparison."""
    watch = Watch.objects.get_or_create(id=1)[0] if lease else Watch.current()
    agents_vhosts = registered.provider().vhosts()
    try:
        management = broker.management()
        run = PassRun(report, watch, management, rules(agents_vhosts), agents_vhosts, lease, force)
        run, observation, changes = _observe_in_turn(run)
    except BrokerError as error:
        _record_outage(report, watch, error, lease)
        return
    inventory = _take_inventory(run, observation.snapshot)
    run.keep_lease()
    _report_counts(report, changes)
    _report_errors(report, changes, observation)
    if lease is None:
        _preview(run, changes)
        return
    queues = [message.queue for message in changes.messages]
    facts = Facts.gather_for_recipients(run.management, queues, run.now, changes.listed)
    changes.withdraw_last_calls(facts.limited(changes.last_calls))
    write(run, lease, observation, changes, facts, inventory)
    report.decided = [one.queue.id for one in changes.deletable if one.queue.id is not None]
    report.deleted = len(changes.deleted)
    report.notifications += recording.finish(changes.deleted, lease)
    if run.agents_vhosts and not deadline.is_limited():
        missing = [(queue.vhost, queue.name) for queue in changes.vanished]
        report.errors += registered.provider().declare_missing(missing, run.management, lease)


def _observe_in_turn(run: PassRun) -> tuple[PassRun, Observation, Changes]:
    """Observe through one address of the broker. If that fails, begin again at the next.

    Lists fail for a moment with a 5xx status, at all addresses, while a node starts or stops. So after the last address
    the pass begins again once.
    """
    try:
        return _observe_at_one(run)
    except BrokerUnavailable as error:
        if error.status < HTTPStatus.INTERNAL_SERVER_ERROR or deadline.is_limited():
            raise
        logger.warning("The pass begins again, because a node may be starting or stopping: %s", error)
    time.sleep(NODE_CHANGE_SECONDS)
    run.keep_lease()
    return _observe_at_one(run)


def _observe_at_one(run: PassRun) -> tuple[PassRun, Observation, Changes]:
    """Observe through the first address of the broker at which that succeeds.

    A node that is frozen makes the lists of all nodes hang, so after a timeout no other address is tried. The next pass
    begins at another one then, unless a frozen node is the cause.
    """
    failures: list[BrokerError] = []
    addresses = run.management.in_turn()
    for management in addresses:
        at_one = replace(run, management=management)
        if failures:
            logger.warning("The pass begins again at the next address of the broker: %s", failures[-1])
        try:
            if run.management.has_several_addresses:
                with deadline.limit(deadline.seconds_left(PROBE_SECONDS)):
                    snapshot.require_administrator(management)  # of this address: each may have another user
        except BrokerError as error:
            failures.append(error)
            continue
        try:
            observation, changes = _observe(at_one)
            _require_same_cluster(run, observation.snapshot)
            return at_one, observation, changes
        except BrokerError as error:
            failures.append(error)
            if isinstance(error, BrokerUnavailable) and error.timed_out:
                if frozen := _frozen_nodes(at_one):
                    raise NodesFrozen(frozen, error) from error
                next(addresses, None)
                break
    if len(failures) == 1:
        raise failures[0]
    unavailable = [error for error in failures if isinstance(error, BrokerUnavailable)]
    raise BrokerUnavailable(
        "; ".join(map(str, failures)),
        timed_out=any(error.timed_out for error in unavailable[-1:]),
        never_reached=len(unavailable) == len(failures) and all(error.never_reached for error in unavailable),
        status=max((error.status for error in unavailable), default=0),
    )


class NodesFrozen(BrokerUnavailable):
    """Nodes of the cluster do not respond, so the lists of all nodes hang until RabbitMQ drops them."""

    def __init__(self, nodes: list[str], error: BrokerError) -> None:
        names = ", ".join(nodes)
        text = f"these nodes don't respond, and lists hang until RabbitMQ drops them: {names} ({error})"
        super().__init__(text, timed_out=True)
        self.nodes = nodes


def _frozen_nodes(run: PassRun) -> list[str]:
    """Return the stored nodes that do not respond; none if no node does, because then the cause is another.

    A passive declare of a classic queue is answered by the queue's node. The management API does not tell: of every
    node it answers only once all respond.
    """
    samples = {
        node: Queue.objects.filter(node=node, type=CLASSIC).exclude(state=GONE).values_list("vhost", "name").first()
        for node in sorted(run.watch.nodes)
    }
    nodes = [node for node, sample in samples.items() if sample is not None]
    if len(nodes) < 2:
        return []
    with deadline.limit(deadline.seconds_left(2 * PROBE_SECONDS)), ContextThreadPool(len(nodes)) as threads:
        responds = list(threads.map(_responds, [samples[node] for node in nodes]))
    return [node for node, does in zip(nodes, responds, strict=True) if not does] if any(responds) else []


def _responds(queue: QueueName) -> bool:
    """Return whether the process of a queue answers in time, or the broker answers for it."""
    try:
        with Session(broker.amqp_url(), queue[0], PROBE_SECONDS) as session:
            session.declare_passively(queue[1])
    except BrokerError as error:
        return not (isinstance(error, BrokerUnavailable) and error.timed_out)
    return True


def _require_same_cluster(run: PassRun, listing: Snapshot) -> None:
    """Raise BrokerUnavailable if this list may be from another cluster, if the broker has several addresses.

    On the first pass, and if the list is of another cluster than the last one, all addresses must lead to one cluster.
    In the second case all must answer, too: one that does not may be the guarded cluster's.
    """
    is_first = run.watch.listed_at is None
    is_another = bool(run.watch.cluster and listing.cluster) and run.watch.cluster != listing.cluster
    if not run.management.has_several_addresses or not (is_first or is_another):
        return
    with deadline.limit(deadline.seconds_left(PROBE_SECONDS)):
        ids = run.management.cluster_ids()
    known = {id_: address for address, id_ in ids.items() if id_}
    if len(known) > 1:
        address, other, *_ = known.values()
        raise BrokerUnavailable(f"{two_clusters(address, other)}; write only addresses of nodes of the guarded cluster")
    if is_another and "" in ids.values():
        raise BrokerUnavailable(
            "the list is of another cluster than the last one, and an address does not answer. It may be the guarded "
            "cluster's; start its node, or remove the address"
        )


def _observe(run: PassRun) -> tuple[Observation, Changes]:
    """Fetch, load and compare, with the nodes' Prometheus figures if they are sufficient, else with the list.

    As the figures lag, a pass that would delete queues, or misses too many, fetches the list.
    """
    if _may_use_figures(run):
        stored = stored_queues()
        figures = _fetch_figures(run, stored)
        if figures is not None:
            observation, changes = _compare(run, figures, stored)
            if not (changes.deletable or changes.blocked or changes.short):
                return observation, changes
    listing = snapshot.take(run.management, run.vhosts, run.keep_lease)
    return _compare(run, listing, stored_queues())


def _compare(run: PassRun, listing: Snapshot, stored: dict[QueueName, StoredQueue]) -> tuple[Observation, Changes]:
    """Load and compare. Compare again with what is fetched for single queues only.

    These are the exact lengths of queues whose lagging or missing length matters, by passive declares, and the samples
    of growing queues.
    """
    run.report.listing_seconds = listing.seconds
    observation = load(run, listing, stored)
    changes = compare(observation, run.rules, now=run.now, force=run.force)
    uncounted = unguarded.uncounted(run.watch, listing, run.rules, run.now)
    unknown = unguarded.to_declare(uncounted, run.now)
    if changes.unconfirmed or unknown or changes.growing:
        depths = amqp.declare_passively(broker.amqp_url(), changes.unconfirmed)
        depths |= amqp.declare_passively(broker.amqp_url(), unknown, unguarded.DECLARE_SECONDS)
        listing = with_exact_lengths(listing, {*changes.unconfirmed, *unknown}, depths, observation.stored)
        samples = recent_samples(changes.growing, run.now)
        observation = replace(observation, snapshot=listing, samples=samples)
        changes = compare(observation, run.rules, now=run.now, force=run.force)
    changes.uncounted = uncounted
    return observation, changes


def _may_use_figures(run: PassRun) -> bool:
    """Return whether the nodes' Prometheus figures may replace the list.

    The list is fetched once a minute, and while something is wrong that only a list shows.
    """
    watch = run.watch
    is_wrong = watch.failures or watch.short_lists or watch.blocked or watch.unresponsive_since is not None
    is_changed = watch.deletion_settings != deletion_settings()
    if settings.GUARDIAN_SNAPSHOT != "prometheus" or run.lease is None or run.force or is_wrong or is_changed:
        return False
    return watch.exact_at is not None and timedelta(0) <= run.now - watch.exact_at < EXACT_LIST_INTERVAL


def _fetch_figures(run: PassRun, stored: Mapping[QueueName, StoredQueue]) -> Snapshot | None:
    """Return a snapshot from the nodes' Prometheus figures and the stored rows; None: fetch the list."""
    is_behind = run.watch.exact_at is not None and run.now - run.watch.exact_at < FIGURES_LAG
    arguments = run.management, run.vhosts, stored, run.rules.ignores, run.keep_lease
    try:
        return broker.prometheus().take(*arguments, keep_stored_lengths=is_behind)
    except ListNeeded as reason:
        logger.info("Fetching the list of queues, because %s.", reason)
    except BrokerError as error:
        logger.warning("Fetching the list of queues, because the Prometheus figures are not available: %s", error)
        run.report.errors.append(f"the list was fetched, because the Prometheus figures are not available: {error}")
    return None


def _preview(run: PassRun, changes: Changes) -> None:
    """Add the queues to delete to the report of a dry run, and those that a passive declare confirms."""
    report, deletable = run.report, [*changes.deletable, *changes.blocked]
    queues = [one.queue for one in deletable]
    facts = Facts.gather(run.management, broker.amqp_url(), queues, run.now, total_queues=changes.listed)
    report.deletable = in_order(lines_of_pass(deletable, facts), LONGEST_FIRST)
    depths = amqp.declare_passively(broker.amqp_url(), [one.key for one in changes.deletable])
    for one in changes.deletable:
        depth = depths.get(one.key)
        if one.for_its_name or (depth and depth.ready + (one.queue.unacknowledged or 0) > one.limit):
            report.would_delete.append({"vhost": one.queue.vhost, "queue": one.queue.name})
        elif depth:
            report.kept += 1


def _record_outage(report: Report, watch: Watch, error: BrokerError, lease: HeldLease | None) -> None:
    """Record that the broker could not be reached, and notify operators once for each outage.

    Nothing is recorded of a pass that an operator's page runs: it doesn't wait long enough to tell.
    """
    report.away = True
    report.errors.append(str(error))
    logger.error("The broker could not be queried: %s", error)
    if lease is None or deadline.is_limited():
        return
    failures = watch.failures + 1
    frozen = error.nodes if isinstance(error, NodesFrozen) else []
    raised = alarms.with_frozen(watch.alarms, frozen, report.at)
    notices = alarms.frozen_notices(watch.alarms, frozen, watch.nodes)
    outage_since = watch.outage_since
    hangs = isinstance(error, BrokerUnavailable) and error.timed_out
    is_explained = hangs and alarms.explain_hanging(raised, report.at)
    if outage_since is None and not is_explained:
        outage_since = report.at
        notices.append(Notice(kinds.OUTAGE, {"error": str(error)}))
    changes = {
        "failures": failures,
        "next_pass_at": report.at + timedelta(seconds=_backoff_seconds(failures, error, is_explained=is_explained)),
        "outage_since": outage_since,
        "alarms": raised,
    }
    with transaction.atomic():
        lease.renew()
        Watch.objects.filter(id=watch.id).update(**changes)
        if notices:
            report.notifications = enqueue.enqueue(notices, report.at)


def _backoff_seconds(failures: int, error: BrokerError, *, is_explained: bool) -> float:
    """Return the wait after this number of failures in a row. A refused connection costs the broker nothing.

    ``is_explained``: a lost node makes lists hang. It is a matter of a minute, and the pass has waited for a timeout.
    """
    if is_explained:
        return float(settings.GUARDIAN_POLL_SECONDS)
    is_refused = isinstance(error, BrokerUnavailable) and error.never_reached
    first = REFUSED_BACKOFF_SECONDS if is_refused else settings.GUARDIAN_POLL_SECONDS * 2
    maximum = max(settings.GUARDIAN_POLL_SECONDS, settings.GUARDIAN_POLL_MAX_SECONDS)
    return float(min(first * 2 ** min(failures - 1, 20), maximum))


def _take_inventory(run: PassRun, listing: Snapshot) -> Inventory | None:
    """Report the exchanges in the queues' namespace, and return them and the streams without retention.

    None: this pass takes no inventory, or the broker did not answer.
    """
    watch, report = run.watch, run.report
    report.misnamed_exchanges = watch.misnamed_exchanges
    since = run.now - watch.exchanges_listed_at if watch.exchanges_listed_at is not None else INVENTORY_INTERVAL
    if timedelta(0) <= since < INVENTORY_INTERVAL:
        return None
    try:
        exchanges = run.management.exchanges(run.rules.pulse_vhost)
        streams = unguarded.streams_without_retention(run.management, listing, run.rules)
    except BrokerError as error:
        report.errors.append(f"the exchanges and streams could not be listed: {error}")
        return None
    report.misnamed_exchanges = sorted(
        exchange.name for exchange in exchanges if kind_of_exchange(exchange.name) is NameKind.MISNAMED
    )
    return Inventory(report.misnamed_exchanges, streams)


def _report_counts(report: Report, changes: Changes) -> None:
    """Add the numbers of these changes to the report."""
    kinds = [event.kind for event in changes.events]
    returned = kinds.count(QueueEvent.Kind.RETURNED)
    report.queues = changes.listed
    report.new = len(changes.new) + returned
    report.changed = len(changes.changed) + len(changes.lengths) - returned
    report.gone = len(changes.gone)
    report.unknown = changes.unknown
    report.warned = kinds.count(QueueEvent.Kind.WARNED)
    report.recovered = kinds.count(QueueEvent.Kind.RECOVERED)
    report.brake_held = bool(changes.blocked)
    report.misnamed = changes.misnamed
    report.unpatterned = changes.unpatterned


def _report_errors(report: Report, changes: Changes, observation: Observation) -> None:
    """Add the errors of the list, and a blocking brake, to the report."""
    listing, registrations = observation.snapshot, observation.registrations
    report.errors += [f"vhost '{vhost}' could not be listed: {reason}" for vhost, reason in listing.unlisted.items()]
    report.errors += [error for vhost in listing.missing_vhosts if (error := _no_such_vhost(vhost, registrations))]
    if not listing.exact:
        report.errors.append("a queue's process does not respond; the lengths are the broker's statistics, which lag")
    if changes.short:
        report.errors.append(
            f"the list lacks {changes.short} stored queues, more than the brake allows "
            f"(list {changes.short_lists} in a row)"
        )
    if changes.blocked:
        number = len(changes.blocked)
        report.errors.append(
            f"the deletion of {number} queue{'' if number == 1 else 's'} is blocked; check them, then release them in "
            "the admin, or use --force"
        )


def _no_such_vhost(vhost: str, registrations: Registrations) -> str:
    """Return the error for a guarded vhost that is not on the broker; empty: its owner was deleted, as expected."""
    if vhost not in registrations.vhosts:
        return f"vhost '{vhost}' isn't on the broker; see GUARDIAN_VHOSTS"
    if (vhost, DEAD_LETTER_QUEUE) not in registrations.queues:
        return ""
    return f"vhost '{vhost}' of an owner's agents is gone from the broker; Guardian creates it again"
