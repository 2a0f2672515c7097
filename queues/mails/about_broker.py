"""What notifications to operators about the broker and passes say. ``to_operators`` completes each."""

from collections.abc import Callable
from dataclasses import replace

from core.formatting import counted, duration
from notifications.content import Content, Fact, Link, as_of, operators_help
from notifications.models import Notification
from queues.mails.about_queues import Details, page_link, queue_table
from rabbit.amqp import CONNECTION_LIMIT


def to_operators(say: Callable[[Details], Content]) -> Callable[[Notification], Content]:
    """Return the content of a notification that says this, with a button and the time of its facts."""

    def content(notification: Notification) -> Content:
        said = say(notification.facts)
        action = said.action or Link("Open the overview", page_link("admin:index"))
        return replace(said, action=action, facts=[*said.facts, as_of(notification)])

    return content


def outage(facts: Details) -> Content:
    return Content(
        subject="No queue is guarded: the broker can't be queried",
        happened="Guardian can't query the broker, so it guards no queue at the moment.",
        next="Guardian keeps trying, and notifies you when the broker answers again. Until then it deletes no queue.",
        advice="Check that RabbitMQ runs and that its management plugin answers.",
        facts=[Fact("Reason", facts["error"])],
        help=operators_help("the-broker-cant-be-queried"),
    )


def outage_over(facts: Details) -> Content:
    lasted = duration(facts["seconds"])
    return Content(
        subject="The broker answers again",
        happened=f"The broker answers again, after {lasted}.",
        next="Guardian guards its queues as before. There is nothing to do.",
        facts=[Fact("Outage", lasted)],
    )


def brake(facts: Details) -> Content:
    """Return the message that the brake blocks deletions."""
    count, seen = facts["count"], facts["seen"]
    reasons = []
    if facts.get("brake"):
        reasons.append(Fact("More than the brake allows", counted(facts["brake"], "queue")))
    if facts.get("settings"):
        reasons.append(Fact("New settings or broker", counted(facts["settings"], "queue")))
    return Content(
        subject=f"Blocked: the deletion of {counted(count, 'queue')}",
        happened=f"The deletion of {count:,} of {counted(seen, 'queue')} is blocked until an operator decides. "
        "The queues are over their deletion limit, or their names do not match the required pattern.",
        next="Guardian deletes none of them until an operator releases them. It warns the owners of long queues.",
        advice="Review the queues, and release all or some of them. To keep them, start their consumers, raise their "
        "limits, or make them unbounded. This command lists them, too:",
        commands=["manage.py monitor_queues --once --dry-run"],
        action=Link("Review the blocked queues", page_link("operate_brake")),
        facts=reasons,
        help=operators_help("the-brake-blocks-deletions"),
    )


def short_list(facts: Details) -> Content:
    missing, seen = facts["missing"], facts["seen"]
    return Content(
        subject=f"The broker's list lacks {counted(missing, 'queue')}",
        happened=f"The broker's list of queues lacks {missing:,} that it had before. It has {seen:,} now.",
        next="Guardian keeps what it stores about the missing queues until three lists in a row agree.",
        advice="Check that all nodes of the cluster run: a node that stops or starts shortens the list. "
        "If you removed the queues, there is nothing to do.",
        facts=[Fact("Missing", f"{missing:,}"), Fact("Listed", f"{seen:,}")],
        help=operators_help("the-brokers-list-lacks-queues"),
    )


def alarm(facts: Details) -> Content:
    resource, node = facts["resource"], facts["node"]
    other = "free disk space on the node" if resource == "disk" else "check the node's connections"
    return Content(
        subject=f"The {resource} alarm is raised on {node}",
        happened=f"The {resource} alarm is raised on the node {node}.",
        next="RabbitMQ blocks all publishers on every node of the cluster until the alarm is over. Consumers can still "
        "read. Guardian still guards, and notifies you when the alarm is over.",
        advice="Start the consumers of long queues, or purge or delete queues that nobody needs. "
        f"If queues are not the cause, {other}.",
        facts=[Fact("Node", node), Fact("Resource", resource)],
        help=operators_help("a-resource-alarm-is-raised"),
    )


def alarm_over(facts: Details) -> Content:
    """Return the message that a resource alarm is over, perhaps because the node is down."""
    resource, node, lasted = facts["resource"], facts["node"], duration(facts["seconds"])
    return Content(
        subject=f"The {resource} alarm is over on {node}",
        happened=f"The {resource} alarm on the node {node} is over, after {lasted}"
        f"{'' if facts['running'] else ', because the node is down'}.",
        next="Publishers can publish again, unless another alarm is raised."
        if facts["running"]
        else "The node stays down.",
        advice="" if facts["running"] else "Start the node.",
        facts=[Fact("Node", node), Fact("Resource", resource), Fact("Alarm", lasted)],
    )


def node_lost(facts: Details) -> Content:
    node = facts["node"]
    is_frozen = facts.get("is_frozen", False)
    state = "does not respond" if is_frozen else "is down"
    hanging = (
        "RabbitMQ drops the node after a minute. Until then its lists hang, so Guardian guards no queue. Then clients"
        if is_frozen
        else "Clients"
    )
    remedy = (
        "Its process hangs, or the network to it is cut: check its machine, and restart it"
        if is_frozen
        else "Start the node"
    )
    return Content(
        subject=f"The node {node} {state}",
        happened=f"The node {node} {state}.",
        next=f"{hanging} can't reach the queues whose only copy is on that node, and Guardian can't delete them. "
        "Guardian guards the other queues, and notifies you when the node runs again.",
        advice=f"{remedy}. If it is gone permanently, remove it from the cluster. Run on another node:",
        commands=[f"rabbitmqctl forget_cluster_node {node}"],
        facts=[Fact("Node", node), Fact("Running nodes", ", ".join(facts["others"]) or "none")],
        help=operators_help("a-node-is-not-running"),
    )


def node_back(facts: Details) -> Content:
    node, lasted = facts["node"], duration(facts["seconds"])
    state = "running again" if facts["running"] else "no longer in the cluster"
    return Content(
        subject=f"The node {node} is {state}",
        happened=f"The node {node} is {state}, after {lasted}.",
        next="There is nothing to do. Guardian guards all queues of the cluster.",
        facts=[Fact("Node", node), Fact("Down for", lasted)],
    )


def refused(facts: Details) -> Content:
    count, error = facts["count"], facts["error"]
    if CONNECTION_LIMIT in error:
        advice = (
            "Guardian deletes over AMQP, and the broker accepts no further connection. Close connections, or raise the "
            "limit that the reason names, with room for Guardian. These commands show the limits:"
        )
        commands = ["rabbitmqctl list_vhost_limits --global", "rabbitmqctl list_user_limits --global"]
    else:
        advice = (
            "Check the reason. Give Guardian's user all permissions on the virtual host, make the address in "
            "RABBIT_URL reachable, or close the connection of an exclusive queue. This sets the permissions:"
        )
        commands = ['rabbitmqctl set_permissions -p VHOST USER ".*" ".*" ".*"']
    return Content(
        subject=f"The broker refuses to delete {counted(count, 'queue')}",
        happened=f"Guardian can't delete {counted(count, 'queue')} over {'its' if count == 1 else 'their'} deletion "
        f"limit. {'It keeps' if count == 1 else 'They keep'} growing, and the owners are warned.",
        next="Guardian tries again every few seconds. You get this mail once.",
        advice=advice,
        commands=commands,
        facts=[Fact("Reason", error)],
        help=operators_help("the-broker-refuses-to-delete-a-queue"),
    )


def late(facts: Details) -> Content:
    """Return the message that recorded deletions wait for too long."""
    number, waited = counted(facts["count"], "queue"), duration(facts["seconds"])
    if facts["running"]:
        advice = (
            "Many queues may be over their limit at once, or the broker may be slow. The log of the deleter says more."
        )
        commands = []
    else:
        advice = "No deleter runs. Start one, beside the worker for the queue guarding:"
        commands = ["celery -A guardian_site worker --queues deleting --concurrency 1 --hostname deleter@%h"]
    return Content(
        subject=f"The deletion of {number} is late",
        happened=f"{number} over {'its' if facts['count'] == 1 else 'their'} deletion limit "
        f"{'waits' if facts['count'] == 1 else 'wait'} to be deleted, the oldest for {waited}.",
        next="Guardian deletes them as soon as it can. You get this mail once.",
        advice=advice,
        commands=commands,
        help=operators_help("deletions-are-late"),
    )


def unresponsive(facts: Details) -> Content:
    return Content(
        subject="A queue's process does not respond",
        happened="The broker's exact list of queues hangs: the process of a queue does not respond.",
        next="Guardian uses the broker's statistics for now. It warns as usual, and rechecks a queue's length before "
        "its deletion. It notifies you when the list works again.",
        advice="Find the queue with this command. Restart its node, or delete the queue.",
        commands=["rabbitmqctl list_unresponsive_queues"],
        help=operators_help("a-queues-process-does-not-respond"),
    )


def responsive(facts: Details) -> Content:
    lasted = duration(facts["seconds"])
    return Content(
        subject="All queues respond again",
        happened=f"The broker's exact list of queues works again, after {lasted}.",
        next="There is nothing to do. Guardian uses the exact list again.",
        facts=[Fact("Unresponsive for", lasted)],
    )


def unaddressable(facts: Details) -> Content:
    count = facts["count"]
    them = "it" if count == 1 else "them"
    return Content(
        subject=f"{counted(count, 'queue')} can't be guarded",
        happened=f"The broker has {counted(count, 'queue')} with a name that no client can use. "
        "The name is not valid UTF-8, or is longer than 255 bytes.",
        next=f"Guardian can't warn about {them} or delete {them}. "
        "You get this mail once, until all such queues are gone.",
        advice=f"Delete {them} with 'rabbitmqctl eval', or bound {them} with an operator policy. "
        "The help has both commands.",
        tables=[queue_table(facts["shown"], facts["more"])],
        help=operators_help("a-queue-cant-be-addressed"),
    )


def uncounted(facts: Details) -> Content:
    """Return the message that the broker lists quorum queues without message counts."""
    queues = counted(facts["count"], "quorum queue")
    return Content(
        subject=f"The broker does not count the messages of {queues}",
        happened=f"For minutes, the broker has listed {queues} without message counts. Their node is down, they lost "
        "their majority, or the broker has a bug: some versions lose the counts of quorum queues.",
        next="Guardian asks for their ready messages in each pass, and judges them by these alone. It does not see "
        "unacknowledged messages, and it does not guard a queue that gives no answer. You get this mail once, until "
        "all queues are counted again.",
        advice="Start the nodes that are down, or upgrade RabbitMQ. This command shows the state of the queues:",
        commands=["rabbitmqctl list_queues name state messages"],
        tables=[queue_table(facts["shown"], facts["more"])],
        help=operators_help("lengths-are-unknown"),
    )
