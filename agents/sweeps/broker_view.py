"""The snapshot that a sweep works on: lists of the broker, then rows of the database."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from agents.models import REGISTERED, Consumer, SubscriptionQueue
from agents.sweeps import registered
from agents.sweeps.reports import Report
from core import broker
from core.leases import HeldLease
from rabbit import snapshot
from rabbit.management import Management
from rabbit.names import QueueName
from rabbit.snapshot import ListedName


class Registered(NamedTuple):
    """The row of a registered queue. ``model`` and ``id`` identify the row."""

    model: type[SubscriptionQueue] | type[Consumer]
    id: int
    vhost: str
    name: str
    state: str


class BrokerView(NamedTuple):
    """The queues on the broker and the rows. The rows are read after the list, so every listed queue has its row.

    ``unlisted`` are the vhosts that could not be listed. ``incomplete_reason`` says why the list may lack queues of any
    vhost, and why the broker may wrongly answer that a queue doesn't exist; "" if the list is complete.
    ``nodes_unchanged``: the same nodes were running before and after listing.
    """

    management: Management
    queues: Mapping[QueueName, ListedName]
    rows: Mapping[QueueName, Registered]
    vhosts: Mapping[str, int]
    unlisted: Collection[str]
    incomplete_reason: str
    nodes_unchanged: bool


def observe(report: Report, lease: HeldLease | None) -> BrokerView:
    """List the broker, then read the rows."""
    renew = lease.renew_if_due if lease else lambda: None
    management = broker.management()
    before = registered.vhosts()
    snapshot.require_administrator(management)
    members = snapshot.members(management)
    renew()
    listed, unlisted = snapshot.list_names(management, list(before), renew) if before else ([], {})
    renew()
    nodes_unchanged = snapshot.members(management) == members
    for vhost, reason in unlisted.items():
        report.add_error(f"vhost '{vhost}' could not be listed: {reason}")
    incomplete_reason = "the nodes of the cluster changed while the queues were listed" if not nodes_unchanged else ""
    if nodes_unchanged and members[1]:
        incomplete_reason = (
            f"a node is down ({', '.join(sorted(members[1]))}), so its queues can't be distinguished from deleted ones"
        )
    rows = {
        (vhost, name): Registered(model, pk, vhost, name, state)
        for model in REGISTERED
        for pk, vhost, name, state in model._default_manager.order_by().values_list(
            "id", "vhost", "queue_name", "state"
        )
    }
    after = registered.vhosts()
    return BrokerView(
        management,
        {(queue.vhost, queue.name): queue for queue in listed},
        rows,
        {vhost: owner for vhost, owner in after.items() if vhost in before},
        unlisted,
        incomplete_reason,
        nodes_unchanged,
    )
