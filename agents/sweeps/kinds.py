"""The kinds of notification about sweeps of agents' queues."""

from django.urls import reverse

from core.formatting import counted
from core.links import absolute_url
from notifications import kinds
from notifications.content import Content, Fact, Link, as_of, operators_help
from notifications.models import Notification
from queues.mails.about_queues import queue_table


def _sweep_brake(notification: Notification) -> Content:
    facts = notification.facts
    count, seen = f"{facts['count']:,}", f"{facts['seen']:,}"
    if facts["stale"]:
        page, command = "operate_stale", "cleanup_stale_subscriptions"
        happened = (
            f"Guardian did not delete {count} of {seen} agents' queues, with their subscriptions and consumers. "
            "Their owners have no valid token, but these are more queues than the brake allows."
        )
    else:
        page, command = "operate_orphans", "cleanup_orphan_queues"
        happened = (
            f"Guardian did not delete {count} of {seen} queues in the agents' virtual hosts. "
            "No agent registered them, but these are more queues than the brake allows."
        )
    from_backup = "" if facts["stale"] else " If you restored the database from an older backup, keep them."
    in_use = "" if facts["stale"] else " This also deletes queues that clients read from."
    return Content(
        subject=f"Blocked: the deletion of {counted(facts['count'], 'queue')} of agents",
        happened=happened,
        next="Guardian deletes none of them until an operator releases them. You get this mail once.",
        advice=f"Review the queues.{from_backup} To delete them, release them on the page, or run the second command."
        f"{in_use}",
        commands=[f"manage.py {command} --dry-run --json", f"manage.py {command} --force"],
        action=Link("Review the blocked queues", absolute_url(reverse(page))),
        help=operators_help("the-brake-blocks-a-sweep"),
        facts=[Fact("Blocked", count), Fact("Agents' queues", seen), as_of(notification)],
    )


def _orphans_in_use(notification: Notification) -> Content:
    facts = notification.facts
    count = facts["count"]
    them = "it" if count == 1 else "them"
    return Content(
        subject=f"{counted(count, 'queue')} in use that no agent registered",
        happened=f"Guardian kept {counted(count, 'queue')} in the agents' virtual hosts that no agent registered. "
        f"Clients read from {them}, or the broker does not report the consumers.",
        next="The next sweep deletes those that are no longer in use. "
        "You get another mail when Guardian finds more such queues.",
        advice="Find the clients. Have their agents register, or stop the clients. This command deletes the queues at "
        "once, even while they are in use:",
        commands=["manage.py cleanup_orphan_queues --force"],
        action=Link("Review the queues", absolute_url(reverse("operate_orphans"))),
        help=operators_help("queues-in-use-that-no-agent-registered"),
        facts=[as_of(notification)],
        tables=[queue_table(facts["orphans"], facts["more"])],
    )


SWEEP_BRAKE = kinds.register("sweep-brake", "the brake blocks a sweep of agents' queues", _sweep_brake)
ORPHANS_IN_USE = kinds.register("orphans-in-use", "clients read from queues that no agent registered", _orphans_in_use)
