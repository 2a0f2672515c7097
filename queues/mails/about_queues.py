"""What notifications about queues say.

Longer than 500 lines, because all of them share their sentences.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.conf import settings
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
    local_time,
    name_in_subject,
    subject_url,
)
from notifications.models import Notification
from queues.models import Queue
from queues.rules.diagnosis import ADVICE
from rabbit.names import readable

Details = Mapping[str, Any]


# About a queue

BACK_TO_NORMAL = "There is nothing to do. Guardian warns you if the queue reaches the threshold again."


def warning(notification: Notification) -> Content:
    facts = notification.facts
    length = messages(facts["length"])
    why_dead = " Agents could not get them: their queues were full, or no consumer read the messages in time."
    said = Content(
        subject=f"Warning: {_name(facts)} has {length}",
        happened=f"{_the_queue(facts)} has {length}. Its warning threshold is {facts['warn']:,}."
        + (why_dead if facts.get("dead_letters") else _diagnosed(facts)),
        next=_next(facts),
        advice=_advice(facts),
    )
    return _about_queue(notification, said)


def last_call(notification: Notification) -> Content:
    """Return the message that Guardian is about to delete a queue."""
    facts = notification.facts
    length, limit, left = messages(facts["length"]), f"{facts['max']:,}", facts["seconds_to_max"]
    if left is None:
        ending = f"has {facts['length']:,} of {limit} messages"
        when = f"when it has more than {limit}. It does not grow at the moment"
    else:
        ending = f"is deleted in {duration(left)}"
        at = local_time(notification, notification.created + timedelta(seconds=left))
        when = f"past {limit}. At its present rate, that is in {duration(left)}, at {at}"
    said = Content(
        subject=f"Last call: {_name(facts)} {ending}",
        happened=f"{_the_queue(facts)} has {length}. Guardian deletes it {when}.{_diagnosed(facts)}",
        next=" ".join(_kept_at_deletion(facts)),
        advice=f"{_advice(facts)} To get more time, ask for a higher limit on its page, or purge it.",
    )
    return _about_queue(notification, said)


def reminder(notification: Notification) -> Content:
    facts = notification.facts
    length, lasted = messages(facts["length"]), duration(facts["seconds_over"])
    said = Content(
        subject=f"Still over its threshold: {_name(facts)} has {length}",
        happened=f"{_the_queue(facts)} has been over its warning threshold of {facts['warn']:,} for {lasted}. "
        f"It has {length}.",
        next=f"{_next(facts)} Until the queue is back to normal, its owners are reminded every "
        f"{settings.GUARDIAN_REMINDER_HOURS} hours.",
        advice=f"{_advice(facts)} If you are on it, acknowledge the warning on the queue's page: that ends the "
        "reminders to all. To end your own, mute the queue there.",
    )
    return _about_queue(notification, said)


def _kept_at_deletion(facts: Details) -> list[str]:
    """Return what becomes of the messages of a queue if Guardian deletes it, in sentences."""
    if facts.get("why_not_archived"):
        return [
            "If Guardian deletes the queue, all its messages are lost: they can't be archived, because "
            f"{facts['why_not_archived']}."
        ]
    days = counted(settings.GUARDIAN_ARCHIVE_DAYS, "day")
    size = filesizeformat(settings.GUARDIAN_ARCHIVE_MAX_BYTES).replace("\N{NO-BREAK SPACE}", " ")
    kept = [
        f"Before Guardian deletes the queue, it archives the ready messages for {days}, so that you can bring them "
        f"back: up to {messages(settings.GUARDIAN_ARCHIVE_MAX_MESSAGES)} or {size}."
    ]
    if facts["unacknowledged"]:
        kept.append(
            f"It can't archive unacknowledged messages: {facts['unacknowledged']:,} at the moment. They are lost."
        )
    return kept


def recovery(notification: Notification) -> Content:
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
        f"It is {'over' if is_warned else 'below'} the threshold now, with {length}."
        + (_diagnosed(facts) if is_warned else ""),
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
    if facts.get("diagnosis"):
        why += f" The last diagnosis:{_diagnosed(facts)}"
    sentences = [f"Guardian deleted the queue {readable(facts['queue'])}.", why, *_became_of_messages(facts)]
    archive = _archive_link(notification)
    replay = " An owner of the Pulse user can bring the archived messages back." if facts.get("archive") else ""
    said = Content(
        subject=f"Deleted: {_name(facts)}{'' if length is None else f' had {messages(length)}'}",
        happened=" ".join(sentences),
        next=f"A consumer that declares the queue again gets an empty one.{'' if archive else replay}",
        advice="Make sure that a consumer reads the queue once it is declared again, and that it keeps up.",
        action=archive,
    )
    return _about_queue(notification, said)


def _archive_link(notification: Notification) -> Link | None:
    """Return the link to the archive, or None without an archive or for an added address, which can't open it."""
    facts = notification.facts
    if not facts.get("archive") or "account" in facts:
        return None
    return Link("Bring it back", absolute_url(reverse("archive_restore", args=[UUID(facts["archive"])])))


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
    facts = notification.facts
    wanted, until = messages(facts["wanted"]), facts.get("limits_until")
    page = absolute_url(reverse("queue_limits", args=[UUID(facts["uuid"])]))
    end = f"&limits_until={until[:16]}" if until else ""
    return Content(
        subject=f"{facts['asks']} asks for a limit of {wanted}: {_name(facts)}",
        happened=f"{facts['asks']} asks for a deletion limit of {wanted} for the queue {readable(facts['queue'])}.",
        next=f"Until an operator sets it, Guardian deletes the queue past {messages(facts['max'])}.",
        advice="Set the limit if the broker has the memory for it. Otherwise send the owner the reason.",
        action=Link("Decide", f"{page}?max_length={facts['wanted']}{end}"),
        facts=[
            Fact("Queue", readable(facts["queue"])),
            Fact("Virtual host", readable(facts["vhost"])),
            Fact("Messages", UNKNOWN if facts["length"] is None else f"{facts['length']:,}"),
            Fact("Deletion limit", f"{facts['max']:,}"),
            Fact("Reason", facts["reason"]),
            *([Fact("Needed until", local_time(notification, datetime.fromisoformat(until)))] if until else []),
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
    limit, until = _limit_in_words(facts["max"]), facts.get("limits_until")
    end = f" until {local_time(notification, datetime.fromisoformat(until))}" if until else " now"
    return Content(
        subject=f"New limits: {_name(facts)}",
        happened=f"{facts['by']} set the limits of the queue {queue}. It has {limit}{end}.",
        next="Guardian applies them in its next pass.",
        action=page,
        facts=shown,
        why=why,
    )


def _limit_in_words(limit: int | None) -> str:
    return "no deletion limit" if limit is None else f"a deletion limit of {messages(limit)}"


LIMITS_STEPS = {
    "announce": "its limits end within a day",
    "restore": "its earlier limits apply again",
    "keep": "over its earlier limits, so the present ones stay",
}


def limits_end(notification: Notification) -> Content:
    """Return that temporary limits of a queue end soon, have ended, or stay because the queue is too long."""
    facts = notification.facts
    queue, length, old = readable(facts["queue"]), facts["length"], facts["old"]
    until = local_time(notification, datetime.fromisoformat(facts["until"]))
    present = "keeps its present limits" if facts["spared"] else f"keeps its limit of {messages(facts['max'])}"
    stays = f"it {present} until it has been within {messages(old or 0)}. Nothing is deleted because limits end."
    again = f"{_limit_in_words(old)} again"
    advice = "Make sure that a consumer keeps the queue within its earlier limit, or ask the operators for more time."
    if facts["step"] == "announce":
        said = Content(
            subject=f"Temporary limits end: {_name(facts)}",
            happened=f"The present limits of the queue {queue} end at {until}.",
            next=f"It then has {again}." + ("" if old is None else f" If it has more messages at that time, {stays}"),
            advice="" if old is None else advice,
        )
    elif facts["step"] == "restore":
        said = Content(
            subject=f"Temporary limits have ended: {_name(facts)}",
            happened=f"The temporary limits of the queue {queue} have ended. It has {again}.",
            next="Guardian applies them from now on.",
        )
    else:
        said = Content(
            subject=f"Temporary limits stay: {_name(facts)}",
            happened=f"The temporary limits of the queue {queue} were to end at {until}, but it has "
            f"{messages(length)}. Its earlier limit is {messages(old or 0)}.",
            next=stays[0].upper() + stays[1:],
            advice=advice,
        )
    url = subject_url(notification)
    shown = [
        Fact("Queue", queue),
        Fact("Virtual host", readable(facts["vhost"])),
        Fact("Messages", UNKNOWN if length is None else f"{length:,}"),
        Fact("Deletion limit", _deletion_limit(facts)),
        as_of(notification),
    ]
    return replace(said, action=Link("Open the queue", url) if url else None, facts=shown)


def no_consumers(notification: Notification) -> Content:
    facts = notification.facts
    length = facts["length"]
    stays = "" if facts.get("registered") else "Messages that are published to it stay there. "
    said = Content(
        subject=f"No consumer: {_name(facts)}{'' if length is None else f' has {messages(length)}'}",
        happened=f"Nobody reads the queue {readable(facts['queue'])}.{_diagnosed(facts)}",
        next=f"{stays}{_next(facts)} Guardian notifies you when it has a consumer again.",
        advice=_advice({**facts, "consumers": 0}),
    )
    return _about_queue(notification, said)


def consumers_back(notification: Notification) -> Content:
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
    facts = notification.facts
    if facts.get("registered"):
        advice = "Check whether its agent hangs, and restart it."
    else:
        advice = ADVICE[(facts.get("diagnosis") or {}).get("code", Queue.Diagnosis.STALLED)]
    said = Content(
        subject=f"Stalled: {_name(facts)} has {messages(facts['length'])} waiting",
        happened=f"The consumers of the queue {readable(facts['queue'])} acknowledge nothing.{_diagnosed(facts)}",
        next=f"{_next(facts)} Guardian notifies you when they acknowledge messages again.",
        advice=advice,
    )
    return _about_queue(notification, said)


def stall_over(notification: Notification) -> Content:
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
    return counted(number, "message")


def _name(facts: Details) -> str:
    return name_in_subject(facts["queue"])


def _the_queue(facts: Details) -> str:
    return f"The queue {readable(facts['queue'])}"


def _diagnosed(facts: Details) -> str:
    """Return why a queue grows, after a space, if it was diagnosed."""
    found = facts.get("diagnosis")
    return f" {found['text']}" if found else ""


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


KEEP_UP = "Make sure that its consumer keeps up, or add one."


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
    keep_up = ADVICE.get((facts.get("diagnosis") or {}).get("code", ""), KEEP_UP)
    start = "Start its consumer: the queue has none." if has_none else keep_up
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


def queue_table(queues: Sequence[Details], more: int) -> Table:
    rows = [Row(f"{readable(one['queue'])} in {readable(one['vhost'])}") for one in queues]
    return Table(rows, "Queues", more=more)


def page_link(name: str) -> str:
    """Return the address of a page for a mail."""
    return absolute_url(reverse(name))
