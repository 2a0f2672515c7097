"""The sweep: delete agents' queues without a registration, and declare registered queues again that are missing.

The Celery task, the page and the command call ``sweep_orphans``. Its deletions are subject to the brake.
"""

from collections.abc import Collection, Sequence
from datetime import datetime
from functools import partial

from django.utils import timezone

from accounts.models import Owner
from agents.models import Consumer, Registration, SubscriptionQueue, Sweep
from agents.removal.handlers import pending
from agents.sweeps.broker_view import BrokerView, observe
from agents.sweeps.logins import reconcile_logins
from agents.sweeps.repair import repair
from agents.sweeps.reports import REGISTRATION_GRACE, Report, apply_brake, carry_out, deletion_limit, queue_as_json, run
from core import broker
from core.leases import HeldLease
from core.models import Removal
from rabbit import amqp
from rabbit.errors import BrokerError
from rabbit.names import DEAD_LETTER_QUEUE, QueueName, is_agents_queue, readable


def sweep_orphans(*, force: bool = False, dry_run: bool = False, only: Collection[QueueName] | None = None) -> Report:
    """Delete queues without a registration in the agents' vhosts, and declare missing registered queues again.

    Orphans in use are kept, and operators are notified. ``force`` deletes these too, and ignores the brake.
    ``dry_run`` changes nothing. ``only`` are the confirmed queues, by vhost and name; no others are deleted. If another
    process runs a sweep, the report says so.
    """
    confirmed = None if only is None else frozenset(only)
    return run(Report(Sweep.Kind.ORPHANS.value, timezone.now(), dry_run), partial(_sweep, only=confirmed), force)


def _sweep(report: Report, lease: HeldLease | None, force: bool, *, only: Collection[QueueName] | None) -> None:
    """Sweep under this lease. Without a lease, only report what would be done."""
    try:
        view = observe(report, lease)
        found = _orphans(view)
        orphans = [name for name in found if only is None or name in only]
        report.left_out = [queue_as_json(name) for name in found if only is not None and name not in only]
        if len(orphans) > deletion_limit(len(view.queues)) and not force:
            # A queue that was removed while it was listed looks like an orphan: it has neither a row nor a Removal. It
            # must not trigger the brake, so list again. Below the limit it only costs a DELETE that returns 404.
            view = observe(report, lease)
            orphans = sorted({*orphans}.intersection(_orphans(view)))
    except BrokerError as error:
        report.away = True
        report.add_error(str(error))
        return
    report.seen = len(view.queues)
    report.found = len(orphans)
    apply_brake(report, force)
    missing, without_dlq = _missing(view, report.at), _vhosts_without_dlq(view)
    names = []
    for vhost, name in orphans:
        queue_type = view.queues[vhost, name].type
        if force or queue_type == "classic":
            names.append((vhost, name))
        else:
            report.add_kept((vhost, name))
            report.add_error(
                f"{readable(name)} in {vhost} is a {queue_type} queue, and the broker reports its consumers too late. "
                "Check that it has none, then use --force"
            )
    if names and view.incomplete_reason:
        report.add_error(f"{view.incomplete_reason}; no queue is deleted until the next sweep")
        names = []
    if lease is None:
        _preview(report, names, force)
        report.would_repair = [queue_as_json((row.vhost, row.queue_name)) for row in missing]
        report.would_repair += [queue_as_json((vhost, DEAD_LETTER_QUEUE)) for vhost in without_dlq]
        report.repaired = len(report.would_repair)
        reconcile_logins(report, view, None, force, names)
        return
    if report.brake_held:
        report.would_delete = [queue_as_json(name) for name in names]
    else:
        kind = Removal.Kind.QUEUE
        what = [Removal(kind=kind, vhost=vhost, name=name, if_unused=not force) for vhost, name in names]
        for removed in carry_out(report, what, lease):
            report.deleted += removed
    if not report.away:
        owners = Owner.objects.filter(pk__in=[view.vhosts[vhost] for vhost in without_dlq])
        repaired = repair([*owners, *missing], view.management, lease)
        report.repaired, report.away = repaired.declared, repaired.away
        for reason in repaired.errors:
            report.add_error(reason)
    reconcile_logins(report, view, lease, force, names)


def _orphans(view: BrokerView) -> list[QueueName]:
    """Return the queues without a row, except those that are being removed already."""
    orphans = {
        name
        for name, queue in view.queues.items()
        if queue.vhost in view.vhosts and is_agents_queue(queue.name) and not queue.exclusive and name not in view.rows
    }
    return sorted(orphans - pending()) if orphans else []


def _missing(view: BrokerView, at: datetime) -> list[SubscriptionQueue | Consumer]:
    """Return the rows whose queue is missing or whose registration is unfinished, in at most two statements.

    Rows younger than ``REGISTRATION_GRACE`` are left out: their queues may have been created after the list.
    """
    if not view.nodes_unchanged:
        return []
    lacking: dict[type[SubscriptionQueue] | type[Consumer], list[int]] = {}
    for name, row in view.rows.items():
        is_lost = name not in view.queues and row.vhost in view.vhosts and row.vhost not in view.unlisted
        if is_lost or row.state == Registration.CREATING:
            lacking.setdefault(row.model, []).append(row.id)
    missing: list[SubscriptionQueue | Consumer] = []
    for model, ids in lacking.items():
        rows = model._default_manager.filter(pk__in=ids, created__lt=at - REGISTRATION_GRACE)
        missing += rows.select_related(model.OWNER_FIELD).order_by("pk")
    return missing


def _vhosts_without_dlq(view: BrokerView) -> list[str]:
    """Return the vhosts that lack their dead-letter queue, or don't exist."""
    if not view.nodes_unchanged:
        return []
    return [
        vhost for vhost in view.vhosts if vhost not in view.unlisted and (vhost, DEAD_LETTER_QUEUE) not in view.queues
    ]


def _preview(report: Report, names: Sequence[QueueName], force: bool) -> None:
    """Report which of these queues would be deleted, and which kept."""
    depths = {} if force else amqp.declare_passively(broker.amqp_url(), names)
    for name in names:
        if name in depths and depths[name].consumers:
            report.add_kept(name)
        else:
            report.would_delete.append(queue_as_json(name))
