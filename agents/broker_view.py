"""What a sweep sees: the lists of the broker first, then the rows."""

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from agents import registered
from agents.models import Consumer, SubscriptionQueue
from agents.reports import Report
from core import broker
from core.leases import HeldLease
from rabbit import snapshot
from rabbit.management import Management
from rabbit.names import QueueName
from rabbit.snapshot import ListedName


class Registered(NamedTuple):
    """A registered queue, as its row says. ``model`` and ``id`` are the row's."""

    model: type[SubscriptionQueue] | type[Consumer]
    id: int
    vhost: str
    name: str
    state: str


class BrokerView(NamedTuple):
    """What a sweep sees: queues and rows. The queues were listed first, so that what came in between has its row.

    ``unlisted`` are the vhosts that could not be listed. ``incomplete_reason`` says why the list may lack queues of any vhost,
    and a queue be there that the broker says isn't; empty: no reason. ``nodes_unchanged``: the nodes were the same throughout.
    """

    management: Management
    queues: Mapping[QueueName, ListedName]
    rows: Mapping[QueueName, Registered]
    vhosts: Mapping[str, int]
    unlisted: Collection[str]
    incomplete_reason: str
    nodes_unchanged: bool


def observe(report: Report, lease: HeldLease | None) -> BrokerView:
    """List the broker, then read the rows.

    Raises:
        BrokerError: nothing could be listed, or the list can't be believed.
    """
    keep = lease.renew_if_due if lease else lambda: None
    management = broker.management()
    before = registered.agent_vhosts()
    snapshot.require_administrator(management)
    members = snapshot.members(management)
    keep()
    there, unlisted = snapshot.list_names(management, list(before), keep) if before else ([], {})
    keep()
    nodes_unchanged = snapshot.members(management) == members
    for vhost, reason in unlisted.items():
        report.add_error(f"vhost '{vhost}' could not be listed: {reason}")
    incomplete_reason = (
        "the nodes of the cluster changed meanwhile, and with them the list" if not nodes_unchanged else ""
    )
    if nodes_unchanged and members[1]:
        incomplete_reason = (
            f"a node is down ({', '.join(sorted(members[1]))}), and its queues can't be told from deleted ones"
        )
    rows = {(row.vhost, row.name): row for row in _registered_rows()}
    after = registered.agent_vhosts()
    return BrokerView(
        management,
        {(queue.vhost, queue.name): queue for queue in there},
        rows,
        {vhost: owner for vhost, owner in after.items() if vhost in before},
        unlisted,
        incomplete_reason,
        nodes_unchanged,
    )


def _registered_rows() -> Iterator[Registered]:
    """Read what stands for a queue, also where that is being made. Two statements."""
    columns = ("id", "vhost", "queue_name", "state")
    models: tuple[type[SubscriptionQueue] | type[Consumer], ...] = (SubscriptionQueue, Consumer)
    for model in models:
        for row in model._default_manager.order_by().values_list(*columns):
            yield Registered(model, *row)
