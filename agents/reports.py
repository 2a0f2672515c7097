"""Reports of sweeps and clean-ups: one at a time, by a lease, with the brake, and notifications to operators."""

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

from agents import kinds
from agents.models import Sweep
from core import leases
from core.leases import HeldLease, LeaseLost, LeaseTaken
from notifications import enqueue
from notifications.enqueue import Notice
from notifications.models import Notification
from queues.thresholds import brake_limit
from rabbit.names import QueueName

logger = logging.getLogger(__name__)


T = TypeVar("T")


KEEP_REPORTS = timedelta(days=90)

REGISTRATION_GRACE = timedelta(minutes=1)
"""A registration younger than this may be under way, and is left to whoever is at it."""

BATCH_SIZE = 500
"""So many queues are deleted, or owners and tokens looked at, between two renewals of the lease."""

MAX_ERRORS = 50
"""Errors that the report keeps. The log has them all."""

MAX_ORPHANS_NAMED = 20
"""Orphans in use that a message names. The command names them all."""


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

    def add_error(self, error: str) -> None:
        """Keep an error, in words, and log it; once, though it may be found twice."""
        if error in self.errors:
            return
        logger.warning("%s: %s", self.kind, error)
        if len(self.errors) < MAX_ERRORS:
            self.errors.append(error)


def old_reports(now: datetime) -> QuerySet[Sweep]:
    """Return the reports that are not kept any longer."""
    return Sweep.objects.filter(at__lt=now - KEEP_REPORTS)


def run(report: Report, do: Callable[[Report, HeldLease | None, bool], None], force: bool) -> Report:
    """Run a sweep or a clean-up under its lease and store its report; a dry run needs no lease and stores none."""
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


def deletion_limit(seen: int) -> int:
    """Return how many queues, or users, may be deleted at once where so many were seen."""
    return brake_limit(settings.GUARDIAN_DELETE_BRAKE, seen)


def apply_brake(report: Report, force: bool) -> None:
    """Note whether so many queues may be deleted at once."""
    limit = deletion_limit(report.seen)
    if report.found > limit and not force:
        report.brake_held = True
        report.add_error(
            f"the brake holds: {report.found} of {report.seen} queues are to be deleted, and at most {limit} may be; "
            "look, then use --force"
        )


def save_report(report: Report) -> None:
    """Keep the report as a row, with the messages about it."""
    report.told += enqueue.enqueue(list(_new_notices(report)), report.at)
    names = [one.name for one in Sweep._meta.get_fields() if one.name != "id"]
    Sweep.objects.create(**{name: getattr(report, name) for name in names})


def _new_notices(report: Report) -> Iterator[Notice]:
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
            yield Notice(kinds.SWEEP_BRAKE, facts)
    if report.in_use and report.kind == Sweep.Kind.ORPHANS:
        names = sorted((one["vhost"], one["queue"]) for one in report.in_use)
        digest = hashlib.sha256(repr(names).encode()).hexdigest()
        told = Notification.objects.filter(kind=kinds.ORPHANS_IN_USE).order_by("-id").first()
        is_news = told is None or told.facts["digest"] != digest
        if told is not None and not is_news:
            is_news = earlier.filter(at__gt=told.created, kept=0, brake_held=False, errors=[]).exists()
        if is_news:
            facts = {
                "count": len(names),
                "orphans": report.in_use[:MAX_ORPHANS_NAMED],
                "more": max(0, len(names) - MAX_ORPHANS_NAMED),
                "digest": digest,
            }
            yield Notice(kinds.ORPHANS_IN_USE, facts)


def queue_as_json(name: QueueName) -> dict[str, str]:
    """Return a queue's name in the form that reports have."""
    return {"vhost": name[0], "queue": name[1]}


def batches(items: Sequence[T]) -> Iterator[list[T]]:
    """Return these in lists of at most ``BATCH_SIZE``."""
    rest = iter(items)
    while batch := list(islice(rest, BATCH_SIZE)):
        yield batch
