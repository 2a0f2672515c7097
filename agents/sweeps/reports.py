"""Sweeps and clean-ups: their lease, the brake, their reports, and notifications to operators."""

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from itertools import islice
from typing import Any, TypeVar

from django.conf import settings
from django.db import transaction
from django.db.models import QuerySet

from agents.models import Sweep
from agents.sweeps import kinds
from core import leases, removals
from core.leases import HeldLease, LeaseLost, LeaseTaken
from core.models import Removal
from notifications import enqueue
from notifications.enqueue import Notice
from notifications.models import Notification
from queues.rules.brake import brake_limit
from rabbit.names import QueueName

logger = logging.getLogger(__name__)


T = TypeVar("T")


KEEP_REPORTS = timedelta(days=90)

REGISTRATION_GRACE = timedelta(minutes=1)
"""A younger registration may still be in progress, and is left alone."""

BATCH_SIZE = 500
"""Queues, subscriptions or tokens that are removed between two renewals of the lease."""

MAX_ERRORS = 50
"""Errors in the report. The log has them all."""

MAX_ORPHANS_NAMED = 20
"""Orphans in use that a notification names. The command names them all."""


@dataclass
class Report:
    """The report of a sweep or clean-up. Its fields are those of ``agents.models.Sweep`` and of ``--json``.

    In a dry run the numbers say what would be done. ``in_use``: orphans that were kept, because they have consumers or
    the broker can't tell. ``logins``: logins whose user or permissions the broker lacked; the next registration
    creates them. ``users``: deleted RabbitMQ users without a login. ``stale``: stale subscriptions and consumers, by
    their UUIDs in hex. ``left_out``: queues that would be deleted too, but were not confirmed. ``away``: the broker
    became unreachable.
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
    notifications: int = 0

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "at": self.at.isoformat()}

    def add_error(self, error: str) -> None:
        """Add an error, a sentence, and log it. Ignore duplicates."""
        if error in self.errors:
            return
        logger.warning("%s: %s", self.kind, error)
        if len(self.errors) < MAX_ERRORS:
            self.errors.append(error)

    def add_kept(self, name: QueueName) -> None:
        self.kept += 1
        self.in_use.append(queue_as_json(name))


def old_reports(now: datetime) -> QuerySet[Sweep]:
    return Sweep.objects.filter(at__lt=now - KEEP_REPORTS)


def run(report: Report, do: Callable[[Report, HeldLease | None, bool], None], force: bool) -> Report:
    """Run a sweep or a clean-up under its lease and store its report. A dry run takes no lease and stores no report."""
    began = time.monotonic()
    if report.dry_run:
        do(report, None, force)
    else:
        try:
            with leases.lease(report.kind) as lease:
                do(report, lease, force)
                report.seconds = time.monotonic() - began
                with transaction.atomic():
                    lease.renew()
                    save_report(report)
        except LeaseTaken:
            report.another_sweep = True
        except LeaseLost as error:
            report.given_up = True
            report.add_error(str(error))
            report.seconds = time.monotonic() - began
            save_report(report)
        if report.notifications:
            enqueue.wake(report.notifications)
    report.seconds = time.monotonic() - began
    if not report.another_sweep:
        logger.info(
            "%s%s: %d queues listed, %d to delete, %d deleted, %d kept, %d declared again, %d errors, in %.1f s",
            report.kind,
            " (dry run)" if report.dry_run else "",
            *(report.seen, report.found, report.deleted, report.kept, report.repaired),
            *(len(report.errors), report.seconds),
        )
    return report


def deletion_limit(seen: int) -> int:
    """Return how many of this number of queues, or users, the brake allows to delete."""
    return brake_limit(settings.GUARDIAN_DELETE_BRAKE, seen)


def apply_brake(report: Report, force: bool) -> None:
    """Set ``brake_held`` and add an error if the brake blocks the deletion."""
    limit = deletion_limit(report.seen)
    if report.found > limit and not force:
        report.brake_held = True
        report.add_error(
            f"the brake blocks the deletion of {report.found} of {report.seen} queues; at most {limit} are allowed. "
            "Check them, then use --force"
        )


def save_report(report: Report) -> None:
    """Store the report and the notifications about it."""
    report.notifications += enqueue.enqueue(list(_new_notices(report)), report.at)
    names = [one.name for one in Sweep._meta.get_fields() if one.name != "id"]
    Sweep.objects.create(**{name: getattr(report, name) for name in names})


def _new_notices(report: Report) -> Iterator[Notice]:
    """Yield notices to operators if the brake newly blocks, or other orphans than before are in use."""
    # Ignore reports without queues: the broker was unreachable.
    earlier = Sweep.objects.filter(kind=report.kind).exclude(seen=0)
    if report.brake_held:
        before = earlier.first()
        if before is None or not before.brake_held:
            facts: dict[str, Any] = {
                "count": report.found,
                "seen": report.seen,
                "stale": report.kind == Sweep.Kind.STALE,
            }
            yield Notice(kinds.SWEEP_BRAKE, facts)
    if report.in_use and report.kind == Sweep.Kind.ORPHANS:
        names = sorted((one["vhost"], one["queue"]) for one in report.in_use)
        digest = hashlib.sha256(repr(names).encode()).hexdigest()
        last = Notification.objects.filter(kind=kinds.ORPHANS_IN_USE).order_by("-id").first()
        is_new = last is None or last.facts["digest"] != digest
        if last is not None and not is_new:
            # The orphans were gone in a complete sweep since, and are back.
            is_new = earlier.filter(at__gt=last.created, kept=0, brake_held=False, errors=[]).exists()
        if is_new:
            facts = {
                "count": len(names),
                "orphans": report.in_use[:MAX_ORPHANS_NAMED],
                "more": max(0, len(names) - MAX_ORPHANS_NAMED),
                "digest": digest,
            }
            yield Notice(kinds.ORPHANS_IN_USE, facts)


def carry_out(report: Report, what: Sequence[Removal], lease: HeldLease) -> Iterator[int]:
    """Record these removals, then carry them out, in batches. A crash keeps the records.

    Yield after each batch how many succeeded, so that the caller counts them even if the lease is lost later.
    """
    for batch in batches(what):
        with transaction.atomic():
            lease.renew()
            ids = removals.reserve(batch)
        outcome = removals.run(ids)
        yield outcome.removed
        for name in outcome.kept:
            report.add_kept(name)
        for error in outcome.errors:
            report.add_error(error)
        if outcome.unreachable:
            report.away = True
            break


def queue_as_json(name: QueueName) -> dict[str, str]:
    return {"vhost": name[0], "queue": name[1]}


def batches(items: Sequence[T]) -> Iterator[list[T]]:
    """Yield the items in lists of at most ``BATCH_SIZE``."""
    rest = iter(items)
    while batch := list(islice(rest, BATCH_SIZE)):
        yield batch
