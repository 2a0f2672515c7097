"""What notifications about queues, the broker and passes say."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from uuid import UUID

from django.template.defaultfilters import filesizeformat
from django.urls import reverse

from core.formatting import counted, duration, rate_in_words
from core.links import absolute_url
from notifications.content import (
    Content,
    Fact,
    Link,
    Row,
    Table,
    Why,
    as_of,
    name_in_subject,
    operators_help,
    subject_url,
)
from notifications.models import Notification
from rabbit.names import readable

Details = Mapping[str, Any]


# About a queue

BACK_TO_NORMAL = "There is nothing to do. Guardian warns you if the queue reaches the threshold again."


def warning(notification: Notification) -> Content:
    """Return the warning that a queue reached its warning threshold."""
    facts = notification.facts
    length = messages(facts["length"])
    why_dead = " Agents could not get them: their queues were full, or no consumer read the messages in time."
    said = Content(
        subject=f"Warning: {_name(facts)} has {length}",
        happened=f"{_the_queue(facts)} has {length}. Its warning threshold is {facts['warn']:,}."
        + (why_dead if facts.get("dead_letters") else ""),
        next=_next(facts),
        advice=_advice(facts),
    )
    return _about_queue(notification, said)


def recovery(notification: Notification) -> Content:
    """Return the message that a queue is below its warning threshold again."""
    facts = notification.facts
    length = messages(facts["length"])
    said = Content(
        subject=f"Back to normal: {_name(facts)} has {length}",
        happened=f"{_the_queue(facts)} is below its warning threshold again. It has {length}.",
        next=BACK_TO_NORMAL,
    )
    return _about_queue(notification, said)


def summary(notification: Notification) -> Content:
    """Return the message with the latest state of a queue that crossed its warning threshold several times."""
    facts = notification.facts
    length, changes = messages(facts["length"]), counted(facts["folded"], "change")
    is_warned = facts["state"] == "warned"
    times = counted(facts["folded"], "time")
    said = Content(
        subject=f"{'Warning' if is_warned else 'Back to normal'}: {_name(facts)} has {length}, after {changes}",
        happened=f"{_the_queue(facts)} crossed its warning threshold {times} since the last notification about it. "
        f"It is {'over' if is_warned else 'below'} the threshold now, with {length}.",
        next=_next(facts) if is_warned else BACK_TO_NORMAL,
        advice=_advice(facts) if is_warned else "",
    )
    return _about_queue(notification, said)


def deletion(notification: Notification) -> Content:
    """Return the message that Guardian deleted a queue, and what became of its messages."""
    facts = notification.facts
    length, limit = facts.get("length"), facts.get("max")
    if length is not None and limit is not None and length > limit:
        why = f"It had {messages(length)}, and its deletion limit is {limit:,}."
    else:
        why = "Its name does not match the required pattern, or it was over its deletion limit."
    sentences = [f"Guardian deleted the queue {readable(facts['queue'])}.", why, *_became_of_messages(facts)]
    archive = _archive_link(notification)
    replay = " An owner of the account can bring the archived messages back." if facts.get("archive") else ""
    said = Content(
        subject=f"Deleted: {_name(facts)}{'' if length is None else f' had {messages(length)}'}",
        happened=" ".join(sentences),
        next=f"A consumer that declares the queue again gets an empty one.{'' if archive else replay}",
        advice="Make sure that a consumer reads the queue once it is declared again, and that it keeps up.",
        action=archive,
    )
    return _about_queue(notification, said)


def _archive_link(notification: Notification) -> Link | None:
    """Return the link to the archive; None: there is none, or the recipient is an added address and can't open it."""
    facts = notification.facts
    if not facts.get("archive") or "account" in facts:
        return None
    return Link("Bring the messages back", absolute_url(reverse("archive", args=[UUID(facts["archive"])])))


def _became_of_messages(facts: Details) -> list[str]:
    sentences = []
    if facts.get("archived"):
        sentences.append(f"Archived until {facts['archived_until'][:10]}: {messages(facts['archived'])}.")
    if facts.get("dropped"):
        why = f", because {facts['why_not_archived']}" if facts.get("why_not_archived") else ""
        sentences.append(f"Deleted without a copy: {messages(facts['dropped'])}{why}.")
    if facts.get("held"):
        sentences.append(f"Unacknowledged and not archived: about {messages(facts['held'])}.")
    return sentences


def limit_request(notification: Notification) -> Content:
    """Return the request of an owner for a higher deletion limit."""
    facts = notification.facts
    wanted = messages(facts["wanted"])
    page = absolute_url(reverse("queue_limits", args=[UUID(facts["uuid"])]))
    return Content(
        subject=f"{facts['asks']} asks for a limit of {wanted}: {_name(facts)}",
        happened=f"{facts['asks']} asks for a deletion limit of {wanted} for the queue {readable(facts['queue'])}.",
        next=f"Until an operator sets it, Guardian deletes the queue past {messages(facts['max'])}.",
        advice="Set the limit if the broker has the memory for it. Otherwise send the owner the reason.",
        action=Link("Decide", f"{page}?max_length={facts['wanted']}"),
        facts=[
            Fact("Queue", readable(facts["queue"])),
            Fact("Virtual host", readable(facts["vhost"])),
            Fact("Messages", UNKNOWN if facts["length"] is None else f"{facts['length']:,}"),
            Fact("Deletion limit", f"{facts['max']:,}"),
            Fact("Reason", facts["reason"]),
        ],
        why=Why("You get this because you are an operator."),
    )


def limit_answer(notification: Notification) -> Content:
    """Return what operators decided about a request for a higher deletion limit."""
    facts = notification.facts
    queue, wanted = readable(facts["queue"]), messages(facts["wanted"])
    page = Link("See the queue", absolute_url(reverse("queue", args=[UUID(facts["uuid"])])))
    why = Why("You get this because you asked for a higher limit.")
    shown = [Fact("Queue", queue), Fact("Virtual host", readable(facts["vhost"])), Fact("You asked for", wanted)]
    if "declined" in facts:
        return Content(
            subject=f"Declined: a limit of {wanted} for {_name(facts)}",
            happened=f"{facts['by']} declined your request for a deletion limit of {wanted} for the queue {queue}: "
            + facts["declined"],
            next="The limit stays as it is.",
            advice="Make sure that a consumer keeps the queue below it, or talk to the operators.",
            action=page,
            facts=shown,
            why=why,
        )
    limit = "no deletion limit" if facts["max"] is None else f"a deletion limit of {messages(facts['max'])}"
    return Content(
        subject=f"New limits: {_name(facts)}",
        happened=f"{facts['by']} set the limits of the queue {queue}. It has {limit} now.",
        next="Guardian applies them in its next pass.",
        action=page,
        facts=shown,
        why=why,
    )


def no_consumers(notification: Notification) -> Content:
    """Return the message that a queue has had no consumer for some time."""
    facts = notification.facts
    length, lasted = facts["length"], duration(facts.get("seconds"))
    stays = "" if facts.get("registered") else "Messages that are published to it stay there. "
    said = Content(
        subject=f"No consumer: {_name(facts)}{'' if length is None else f' has {messages(length)}'}",
        happened=f"{_the_queue(facts)} has {f'had no consumer for {lasted}' if lasted else 'no consumer'}. "
        + ("Its length is unknown." if length is None else f"It has {messages(length)}."),
        next=f"{stays}{_next(facts)} Guardian notifies you when it has a consumer again.",
        advice=_advice({**facts, "consumers": 0}),
    )
    return _about_queue(notification, said)


def consumers_back(notification: Notification) -> Content:
    """Return the message that a queue has a consumer again."""
    facts = notification.facts
    lasted = duration(facts.get("seconds"))
    after = f", after {lasted} without" if lasted else ""
    said = Content(
        subject=f"Consumer connected again: {_name(facts)}",
        happened=f"{_the_queue(facts)} has {counted(facts['consumers'], 'consumer')} again{after}.",
        next="There is nothing to do. Guardian notifies you if the last consumer disconnects again.",
    )
    return _about_queue(notification, said)


def stalled(notification: Notification) -> Content:
    """Return the message that the consumers of a queue acknowledge nothing."""
    facts = notification.facts
    length, ready, unacknowledged = facts["length"], facts["ready"], facts["unacknowledged"]
    if facts.get("registered"):
        advice = "Check whether its agent hangs, and restart it."
    else:
        advice = (
            "Check whether its consumers hang, and restart them. The broker then delivers their unacknowledged "
            "messages again. If a message takes this long, or the consumers reject all, there is nothing to do."
        )
    said = Content(
        subject=f"Stalled: {_name(facts)} has {messages(length)} waiting",
        happened=f"The consumers of the queue {readable(facts['queue'])} have acknowledged nothing for "
        f"{duration(facts.get('seconds'))}. {messages(length)} wait{'s' if length == 1 else ''}: "
        f"{unacknowledged:,} unacknowledged, {ready:,} ready.",
        next=f"{_next(facts)} Guardian notifies you when they acknowledge messages again.",
        advice=advice,
    )
    return _about_queue(notification, said)


def stall_over(notification: Notification) -> Content:
    """Return the message that the consumers of a queue acknowledge messages again."""
    facts = notification.facts
    lasted = duration(facts.get("seconds"))
    why = "Its consumers acknowledge messages again." if facts["length"] else "No message waits in it."
    said = Content(
        subject=f"No longer stalled: {_name(facts)}",
        happened=f"{_the_queue(facts)} is no longer stalled{f', after {lasted}' if lasted else ''}. {why}",
        next="There is nothing to do. Guardian notifies you if it stalls again.",
    )
    return _about_queue(notification, said)


def messages(number: int) -> str:
    """Return a number of messages in words."""
    return counted(number, "message")


def _name(facts: Details) -> str:
    return name_in_subject(facts["queue"])


def _the_queue(facts: Details) -> str:
    return f"The queue {readable(facts['queue'])}"


def _next(facts: Details) -> str:
    """Return what Guardian or the broker does if the queue grows."""
    limit, length = facts["max"], facts["length"]
    if facts.get("dead_letters"):
        kept = duration(facts["seconds_kept"])
        return (
            "Guardian does not delete this queue for its length. "
            f"The broker keeps its last {facts['holds']:,} messages for {kept}, and drops older ones."
        )
    if facts.get("registered"):
        kept = duration(facts["seconds_kept"])
        return (
            "Guardian never deletes this queue for its length. "
            f"The broker keeps at most {facts['holds']:,} messages in it, each for {kept}. It moves excess and expired "
            "messages to the dead-letter queue, and the agent does not get them."
        )
    if facts.get("blocked") and not facts["spared"]:
        is_over = length is not None and length > limit
        deletion = "It is over its deletion limit; deletion" if is_over else "Its deletion"
        return f"{deletion} is blocked until an operator decides."
    deletes = f"If it grows past {messages(limit)}, Guardian deletes it with all its messages."
    if broker_limit := facts.get("broker_limit"):
        excess = "drops the oldest messages past that" if broker_limit["drops_oldest"] else "rejects messages past that"
        broker = f"The broker limits this queue to {_broker_limit(broker_limit)}, and {excess}."
        return broker if broker_limit["messages"] is not None or facts["spared"] else f"{broker} {deletes}"
    if facts["spared"]:
        return (
            "Guardian does not delete this queue for its length. "
            "Its messages stay on the broker until a consumer reads them."
        )
    return deletes


def _broker_limit(limit: Details) -> str:
    parts = []
    if limit["messages"] is not None:
        parts.append(messages(limit["messages"]))
    if limit["bytes"] is not None:
        parts.append(filesizeformat(limit["bytes"]))
    return " and ".join(parts)


def _advice(facts: Details) -> str:
    """Return what an owner can do about a long queue."""
    has_none = facts["consumers"] == 0
    if facts.get("dead_letters"):
        return (
            "Find the agent whose queue is long or has no consumer. Start that agent, or make sure that it keeps up. "
            "If nobody needs these messages, there is nothing to do."
        )
    if facts.get("registered"):
        start = "Start its agent: the queue has no consumer." if has_none else "Make sure that its agent keeps up."
        return f"{start} If nobody needs the queue, remove the agent's subscription. This deletes the queue, too."
    start = (
        "Start its consumer: the queue has none." if has_none else "Make sure that its consumer keeps up, or add one."
    )
    return f"{start} If nobody needs the queue, delete it."


def _about_queue(notification: Notification, said: Content) -> Content:
    """Return a message about a queue with its button and facts. Facts that the broker did not answer are unknown."""
    facts = notification.facts
    length = facts.get("length")
    rows = [
        Fact("Queue", readable(facts["queue"])),
        Fact("Virtual host", readable(facts["vhost"])),
        Fact(
            "Messages",
            UNKNOWN
            if length is None
            else f"{length:,} ({facts['ready']:,} ready, {facts['unacknowledged']:,} unacknowledged)",
        ),
    ]
    if facts.get("warn") is not None:
        rows += [Fact("Warning threshold", f"{facts['warn']:,}"), Fact("Deletion limit", _deletion_limit(facts))]
        if facts.get("broker_limit"):
            rows.append(Fact("Broker's limit", _broker_limit(facts["broker_limit"])))
    rows += [
        Fact("Rate", _rate(facts)),
        Fact("Consumers", NO_ANSWER if facts.get("consumers") is None else f"{facts['consumers'] or 'none'}"),
        Fact("Fed by", "\n".join(_fed_by(facts))),
        Fact("Owners", _owners(facts)),
        *said.facts,
        as_of(notification),
    ]
    url = subject_url(notification)
    return replace(said, action=said.action or (Link("Open the queue", url) if url else None), facts=rows)


UNKNOWN = "unknown"
NO_ANSWER = "unknown: the broker did not answer"


def _deletion_limit(facts: Details) -> str:
    if facts.get("spared"):
        return "none: never deleted for its length"
    return f"{facts['max']:,}{'; deletion is blocked until an operator decides' if facts.get('blocked') else ''}"


def _rate(facts: Details) -> str:
    rate = rate_in_words(facts.get("per_second")) or UNKNOWN
    time_to_limit = duration(facts.get("seconds_to_max"))
    if not time_to_limit or facts.get("spared"):
        return rate
    return f"{rate}; at this rate it passes its deletion limit in {time_to_limit}"


def _fed_by(facts: Details) -> list[str]:
    if facts.get("bindings") is None:
        return [NO_ANSWER]
    lines = [f"exchange {readable(one['exchange'])}, {_routing(one)}" for one in facts["bindings"]]
    if not lines:
        lines = ["no exchange: messages are published directly to the queue"]
    if facts.get("more_bindings"):
        lines.append(f"and {facts['more_bindings']:,} more")
    lines += [
        f"exchange {readable(one['to'])} is fed by exchange {readable(one['exchange'])}, {_routing(one)}"
        for one in facts.get("upstream", [])
    ]
    if facts.get("more_upstream"):
        lines.append(f"and {facts['more_upstream']:,} more")
    return lines


def _routing(binding: Details) -> str:
    key, arguments = readable(binding["routing_key"]), readable(binding.get("arguments", ""))
    keyed = f"routing key {key or '(empty)'}" if key or not arguments else ""
    return ", ".join(part for part in (keyed, arguments) if part)


def _owners(facts: Details) -> str:
    owners = ", ".join(facts.get("owners", []))
    if not owners:
        return "none: only operators are notified"
    if facts.get("dead_letters"):
        return f"{owners}, the owner of the agents"
    if facts.get("registered"):
        return f"{owners}, whose agent registered it"
    return f"{owners}, the owner of the agents' virtual host" if facts.get("agents") else owners


# About an owner's week


def weekly(notification: Notification) -> Content:
    """Return the weekly summary of an owner's queues."""
    facts = notification.facts
    queues, warned, deleted = facts["queues"], facts["warned"], facts["deleted"]
    subject = [counted(queues, "queue")]
    states = [
        f"{facts['ok']:,} within {'its' if facts['ok'] == 1 else 'their'} limits",
        f"{warned:,} over the warning threshold",
    ]
    if deleted:
        subject.append(f"{deleted:,} deleted")
    if warned:
        subject.append(f"{warned:,} over {'its' if warned == 1 else 'their'} warning threshold")
    if facts["deleting"]:
        states.append(f"{facts['deleting']:,} being deleted")
    in_words = ", ".join(states)
    unattended, more_unattended = facts["unattended"], facts["more_unattended"]
    tables = [
        Table([_happened(line) for line in facts["happened"]], "Warnings and deletions", more=facts["more_happened"]),
        Table([_long(line) for line in facts["longest"]], "Longest queues"),
        Table([Row(readable(line["queue"])) for line in unattended], "Without a consumer", more=more_unattended),
    ]
    return Content(
        subject=f"Your week: {', '.join(subject)}",
        happened=f"You have {counted(queues, 'queue')}{f': {in_words}' if queues else ''}."
        + ("" if facts["happened"] else " In the last seven days there were no warnings and no deletions."),
        next="The next summary comes in a week.",
        action=Link("Open your queues", absolute_url(reverse("queues"))),
        facts=[as_of(notification)],
        tables=[table for table in tables if table.rows],
        why=Why(
            "You get this every week because you have queues.",
            Link("Turn it off", absolute_url(reverse("settings"))),
        ),
    )


def _happened(line: Details) -> Row:
    said = []
    if line["warnings"]:
        said.append(counted(line["warnings"], "warning"))
    if line["deletions"]:
        said.append("deleted" if line["deletions"] == 1 else f"deleted {line['deletions']:,} times")
    return Row(readable(line["queue"]), (", ".join(said),))


def _long(line: Details) -> Row:
    return Row(readable(line["queue"]), (messages(line["length"]),))


# About the broker and passes, to operators


def outage(notification: Notification) -> Content:
    """Return the message that Guardian can't query the broker."""
    said = Content(
        subject="No queue is guarded: the broker can't be queried",
        happened="Guardian can't query the broker, so it guards no queue at the moment.",
        next="Guardian keeps trying, and notifies you when the broker answers again. Until then it deletes no queue.",
        advice="Check that RabbitMQ runs and that its management plugin answers.",
        facts=[Fact("Reason", notification.facts["error"])],
        help=operators_help("the-broker-cant-be-queried"),
    )
    return _to_operators(notification, said)


def outage_over(notification: Notification) -> Content:
    """Return the message that the broker answers again."""
    lasted = duration(notification.facts["seconds"])
    said = Content(
        subject="The broker answers again",
        happened=f"The broker answers again, after {lasted}.",
        next="Guardian guards its queues as before. There is nothing to do.",
        facts=[Fact("Outage", lasted)],
    )
    return _to_operators(notification, said)


def brake(notification: Notification) -> Content:
    """Return the message that the brake blocks deletions."""
    facts = notification.facts
    count, seen = facts["count"], facts["seen"]
    reasons = []
    if facts.get("brake"):
        reasons.append(Fact("More than the brake allows", counted(facts["brake"], "queue")))
    if facts.get("settings"):
        reasons.append(Fact("New settings or broker", counted(facts["settings"], "queue")))
    said = Content(
        subject=f"Blocked: the deletion of {counted(count, 'queue')}",
        happened=f"The deletion of {count:,} of {counted(seen, 'queue')} is blocked until an operator decides. "
        "The queues are over their deletion limit, or their names do not match the required pattern.",
        next="Guardian deletes none of them until an operator releases them. It warns the owners of long queues.",
        advice="Review the queues, and release all or some of them. To keep them, start their consumers, raise their "
        "limits, or make them unbounded. This command lists them, too:",
        commands=["manage.py monitor_queues --once --dry-run"],
        action=Link("Review the blocked queues", _page("operate_brake")),
        facts=reasons,
        help=operators_help("the-brake-blocks-deletions"),
    )
    return _to_operators(notification, said)


def short_list(notification: Notification) -> Content:
    """Return the message that the broker lists far fewer queues than before."""
    missing, seen = notification.facts["missing"], notification.facts["seen"]
    said = Content(
        subject=f"The broker's list lacks {counted(missing, 'queue')}",
        happened=f"The broker's list of queues lacks {missing:,} that it had before. It has {seen:,} now.",
        next="Guardian keeps what it stores about the missing queues until three lists in a row agree.",
        advice="Check that all nodes of the cluster run: a node that stops or starts shortens the list. "
        "If you removed the queues, there is nothing to do.",
        facts=[Fact("Missing", f"{missing:,}"), Fact("Listed", f"{seen:,}")],
        help=operators_help("the-brokers-list-lacks-queues"),
    )
    return _to_operators(notification, said)


def alarm(notification: Notification) -> Content:
    """Return the message that a resource alarm is raised on a node."""
    resource, node = notification.facts["resource"], notification.facts["node"]
    other = "free disk space on the node" if resource == "disk" else "check the node's connections"
    said = Content(
        subject=f"The {resource} alarm is raised on {node}",
        happened=f"The {resource} alarm is raised on the node {node}.",
        next="RabbitMQ blocks all publishers on every node of the cluster until the alarm is over. Consumers can still "
        "read. Guardian still guards, and notifies you when the alarm is over.",
        advice="Start the consumers of long queues, or purge or delete queues that nobody needs. "
        f"If queues are not the cause, {other}.",
        facts=[Fact("Node", node), Fact("Resource", resource)],
        help=operators_help("a-resource-alarm-is-raised"),
    )
    return _to_operators(notification, said)


def alarm_over(notification: Notification) -> Content:
    """Return the message that a resource alarm is over, perhaps because the node is down."""
    facts = notification.facts
    resource, node, lasted = facts["resource"], facts["node"], duration(facts["seconds"])
    said = Content(
        subject=f"The {resource} alarm is over on {node}",
        happened=f"The {resource} alarm on the node {node} is over, after {lasted}"
        f"{'' if facts['running'] else ', because the node is down'}.",
        next="Publishers can publish again, unless another alarm is raised."
        if facts["running"]
        else "The node stays down.",
        advice="" if facts["running"] else "Start the node.",
        facts=[Fact("Node", node), Fact("Resource", resource), Fact("Alarm", lasted)],
    )
    return _to_operators(notification, said)


def node_lost(notification: Notification) -> Content:
    """Return the message that a node of the cluster is down."""
    facts = notification.facts
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
    said = Content(
        subject=f"The node {node} {state}",
        happened=f"The node {node} {state}.",
        next=f"{hanging} can't reach the queues whose only copy is on that node, and Guardian can't delete them. "
        "Guardian guards the other queues, and notifies you when the node runs again.",
        advice=f"{remedy}. If it is gone permanently, remove it from the cluster. Run on another node:",
        commands=[f"rabbitmqctl forget_cluster_node {node}"],
        facts=[Fact("Node", node), Fact("Running nodes", ", ".join(facts["others"]) or "none")],
        help=operators_help("a-node-is-not-running"),
    )
    return _to_operators(notification, said)


def node_back(notification: Notification) -> Content:
    """Return the message that a node runs again, or left the cluster."""
    facts = notification.facts
    node, lasted = facts["node"], duration(facts["seconds"])
    state = "running again" if facts["running"] else "no longer in the cluster"
    said = Content(
        subject=f"The node {node} is {state}",
        happened=f"The node {node} is {state}, after {lasted}.",
        next="There is nothing to do. Guardian guards all queues of the cluster.",
        facts=[Fact("Node", node), Fact("Down for", lasted)],
    )
    return _to_operators(notification, said)


def refused(notification: Notification) -> Content:
    """Return the message that the broker refuses to delete queues."""
    count = notification.facts["count"]
    said = Content(
        subject=f"The broker refuses to delete {counted(count, 'queue')}",
        happened=f"Guardian can't delete {counted(count, 'queue')} over {'its' if count == 1 else 'their'} deletion "
        f"limit. {'It keeps' if count == 1 else 'They keep'} growing, and the owners are warned.",
        next="Guardian tries again in each pass. You get this mail once.",
        advice="Check the reason. Give Guardian's account all permissions on the virtual host, make the address in "
        "RABBIT_URL reachable, or close the connection of an exclusive queue. This sets the permissions:",
        commands=['rabbitmqctl set_permissions -p VHOST USER ".*" ".*" ".*"'],
        facts=[Fact("Reason", notification.facts["error"])],
        help=operators_help("the-broker-refuses-to-delete-a-queue"),
    )
    return _to_operators(notification, said)


def unresponsive(notification: Notification) -> Content:
    """Return the message that the process of a queue does not respond."""
    said = Content(
        subject="A queue's process does not respond",
        happened="The broker's exact list of queues hangs: the process of a queue does not respond.",
        next="Guardian uses the broker's statistics for now. It warns as usual, and rechecks a queue's length before "
        "its deletion. It notifies you when the list works again.",
        advice="Find the queue with this command. Restart its node, or delete the queue.",
        commands=["rabbitmqctl list_unresponsive_queues"],
        help=operators_help("a-queues-process-does-not-respond"),
    )
    return _to_operators(notification, said)


def responsive(notification: Notification) -> Content:
    """Return the message that all queues respond again."""
    lasted = duration(notification.facts["seconds"])
    said = Content(
        subject="All queues respond again",
        happened=f"The broker's exact list of queues works again, after {lasted}.",
        next="There is nothing to do. Guardian uses the exact list again.",
        facts=[Fact("Unresponsive for", lasted)],
    )
    return _to_operators(notification, said)


def unaddressable(notification: Notification) -> Content:
    """Return the message that queues have names that no client can use."""
    facts = notification.facts
    count = facts["count"]
    them = "it" if count == 1 else "them"
    said = Content(
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
    return _to_operators(notification, said)


def queue_table(queues: Sequence[Details], more: int) -> Table:
    """Return a table of queues with their vhosts."""
    rows = [Row(f"{readable(one['queue'])} in {readable(one['vhost'])}") for one in queues]
    return Table(rows, "Queues", more=more)


def _to_operators(notification: Notification, said: Content) -> Content:
    """Return a message about the broker with a button and the time of its facts."""
    action = said.action or Link("Open the overview", _page("admin:index"))
    return replace(said, action=action, facts=[*said.facts, as_of(notification)])


def _page(name: str) -> str:
    return absolute_url(reverse(name))
