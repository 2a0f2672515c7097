"""One pass: its report, its settings, and the state that its steps share."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings

from core.leases import HeldLease
from queues.guard import registered
from queues.guard.brake_table import Line
from queues.models import Pass, Watch
from queues.rules import thresholds
from queues.rules.rows import Rules
from queues.rules.thresholds import Thresholds
from rabbit.management import Management


@dataclass
class Report:
    """The result of one pass. The names are those of ``queues.models.Pass``, and of ``monitor_queues --json``.

    In a dry run, ``deletable`` are the queues to delete, with those whose deletion is blocked. ``would_delete`` are
    those that a recheck confirmed. ``away``: the broker was unreachable. ``decided`` are the ids of the queues whose
    deletion the pass recorded, ``pending`` the number of those that were not carried out yet.
    """

    at: datetime
    queues: int = 0
    new: int = 0
    changed: int = 0
    gone: int = 0
    unknown: int = 0
    warned: int = 0
    recovered: int = 0
    deleted: int = 0
    kept: int = 0
    brake_held: bool = False
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0
    listing_seconds: float = 0.0
    misnamed: list[str] = field(default_factory=list)
    misnamed_exchanges: list[str] = field(default_factory=list)
    unpatterned: int = 0
    dry_run: bool = False
    deletable: list[Line] = field(default_factory=list)
    would_delete: list[dict[str, str]] = field(default_factory=list)
    another_pass: bool = False
    away: bool = False
    given_up: bool = False
    notifications: int = 0
    decided: list[int] = field(default_factory=list)
    pending: int = 0

    def as_json(self) -> dict[str, Any]:
        """Return the report as ``--json`` prints it."""
        fields = asdict(self)
        del fields["deletable"], fields["decided"]
        return {**fields, "at": self.at.isoformat(), "condemned": [line._asdict() for line in self.deletable]}


def guarded_vhosts(agents: Iterable[str] | None = None, values: Mapping[str, Any] | None = None) -> list[str] | None:
    """Return the guarded vhosts; None: all. If GUARDIAN_VHOSTS has a list, it is exactly that list.

    ``agents`` are the agents' vhosts; without them, they are read from the database. ``values`` are those of
    ``DELETION_SETTINGS``, by default the current ones.
    """
    values = values or deletion_settings()
    if values["GUARDIAN_VHOSTS"] == ["*"]:
        return None
    if values["GUARDIAN_VHOSTS"]:
        return list(values["GUARDIAN_VHOSTS"])
    if agents is None:
        agents = registered.provider().vhosts()
    return list(dict.fromkeys(["/", values["GUARDIAN_PULSE_VHOST"], *agents]))


DELETION_SETTINGS = (
    "GUARDIAN_THRESHOLD_POLICY",
    "GUARDIAN_WARN_QUEUE_LENGTH",
    "GUARDIAN_MAX_QUEUE_LENGTH",
    "GUARDIAN_VHOSTS",
    "GUARDIAN_PULSE_VHOST",
    "GUARDIAN_IGNORED_QUEUES",
    "GUARDIAN_NAMESPACE_POLICY",
)
"""The settings that decide which queues are deleted."""


def deletion_settings() -> dict[str, Any]:
    """Return the values of ``DELETION_SETTINGS``, as JSON."""
    return {name: getattr(settings, name) for name in DELETION_SETTINGS}


def rules(agents: Iterable[str] | None = None, values: Mapping[str, Any] | None = None) -> Rules:
    """Return the rules of a pass over the guarded vhosts. The arguments are those of ``guarded_vhosts``."""
    values = values or deletion_settings()
    vhosts = guarded_vhosts(agents, values)
    ignored = values["GUARDIAN_IGNORED_QUEUES"]
    lengths = Thresholds(values["GUARDIAN_WARN_QUEUE_LENGTH"], values["GUARDIAN_MAX_QUEUE_LENGTH"])
    return Rules(
        policy=thresholds.POLICIES[values["GUARDIAN_THRESHOLD_POLICY"]](lengths),
        pulse_vhost=values["GUARDIAN_PULSE_VHOST"],
        vhosts=frozenset(vhosts) if vhosts is not None else None,
        ignored=re.compile(ignored) if ignored else None,
        namespace_policy=values["GUARDIAN_NAMESPACE_POLICY"],
        brake=settings.GUARDIAN_DELETE_BRAKE,
        quiet_seconds=settings.GUARDIAN_QUIET_SECONDS,
        reminder_interval=timedelta(hours=settings.GUARDIAN_REMINDER_HOURS),
    )


@dataclass(frozen=True)
class PassRun:
    """The state that the steps of one pass share. Without a lease it is a dry run, which writes nothing."""

    report: Report
    watch: Watch
    management: Management
    rules: Rules
    agents_vhosts: Mapping[str, int]
    lease: HeldLease | None
    force: bool

    @property
    def now(self) -> datetime:
        """When the pass began."""
        return self.report.at

    @property
    def vhosts(self) -> list[str] | None:
        """The vhosts to list; None: all."""
        return None if self.rules.vhosts is None else sorted(self.rules.vhosts)

    def keep_lease(self) -> None:
        """Renew the lease if it is due."""
        if self.lease is not None:
            self.lease.renew_if_due()


def save_report(report: Report) -> None:
    """Save the report as a row."""
    lists = {"misnamed": len(report.misnamed), "misnamed_exchanges": len(report.misnamed_exchanges)}
    columns = {field.name for field in Pass._meta.concrete_fields}
    Pass.objects.create(**{name: value for name, value in vars(report).items() if name in columns} | lists)
