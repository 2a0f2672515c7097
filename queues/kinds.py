"""The kinds of notification about queues, the broker and passes."""

from collections.abc import Mapping
from typing import Any

from django.conf import settings
from django.urls import reverse

from core.formatting import duration
from notifications import kinds
from notifications.kinds import Brief
from notifications.models import Notification
from rabbit.names import readable


def _weekly_context(notification: Notification) -> dict[str, Any]:
    context: dict[str, Any] = {"queues_url": f"{settings.GUARDIAN_BASE_URL}{reverse('queues')}"}
    for name in ("longest", "unattended", "happened"):
        context[name] = [{**line, "queue": readable(line["queue"])} for line in notification.facts[name]]
    return context


def _shown_queues(notification: Notification) -> dict[str, Any]:
    shown = notification.facts["shown"]
    return {"shown": [{name: readable(value) for name, value in one.items()} for one in shown]}


Details = Mapping[str, Any]

WARNED, NORMAL = "over the warning threshold", "back to normal"


def _summary(facts: Details) -> Brief:
    state = WARNED if facts.get("state") == "warned" else NORMAL
    folded = facts.get("folded", 0)
    return Brief(f"{state}, after {folded} change{'' if folded == 1 else 's'}", state)


def _deletion(facts: Details) -> Brief:
    archived = facts.get("archived", 0)
    lost = facts["dropped"] + facts["held"] if "dropped" in facts else facts.get("length")
    texts = ["deleted"]
    if archived:
        texts.append(f"{archived:,} message{'' if archived == 1 else 's'} archived")
    if lost or (lost == 0 and not archived):
        texts.append(f"{lost:,} message{'' if lost == 1 else 's'} lost")
    return Brief(", ".join(texts), "deleted")


def _lasting(text: str, counted_as: str, facts: Details) -> Brief:
    lasted = duration(facts.get("seconds"))
    return Brief(f"{text} for {lasted}" if lasted else text, counted_as)


LENGTH, CONSUMERS, PROGRESS = "length", "consumers", "progress"
"""The topics of notifications about a queue."""

WARNING = kinds.register(
    "warning", "a queue passed its warn length", topic=LENGTH, brief=lambda facts: Brief(WARNED, WARNED)
)
RECOVERY = kinds.register(
    "recovery", "a queue is back to normal", topic=LENGTH, brief=lambda facts: Brief(NORMAL, NORMAL)
)
SUMMARY = kinds.register("summary", "what a queue did during its quiet period", topic=LENGTH, brief=_summary)
DELETION = kinds.register("deletion", "a queue was deleted", topic=LENGTH, is_final=True, brief=_deletion)
OUTAGE = kinds.register("outage", "the broker can't be asked")
OUTAGE_OVER = kinds.register("outage-over", "the broker answers again")
BRAKE = kinds.register("brake", "the brake on bulk deletion holds")
SHORT_LIST = kinds.register("short-list", "the broker lists far fewer queues than before")
ALARM = kinds.register("alarm", "a resource alarm is raised")
ALARM_OVER = kinds.register("alarm-over", "a resource alarm is over")
NODE_LOST = kinds.register("node-lost", "a node of the cluster is down")
NODE_BACK = kinds.register("node-back", "a node of the cluster is no longer down")
REFUSED = kinds.register("refused", "the broker refuses to delete a queue")
UNRESPONSIVE = kinds.register("unresponsive", "a queue's process doesn't answer")
RESPONSIVE = kinds.register("responsive", "all queues answer again")
UNADDRESSABLE = kinds.register("unaddressable", "a queue has a name that no client can use", context=_shown_queues)
NO_CONSUMERS = kinds.register(
    "no-consumers",
    "a queue has no consumer",
    topic=CONSUMERS,
    brief=lambda facts: _lasting("no consumer", "without a consumer", facts),
)
CONSUMERS_BACK = kinds.register(
    "consumers-back",
    "a queue has a consumer again",
    topic=CONSUMERS,
    brief=lambda facts: Brief("has a consumer again", "with a consumer again"),
)
STALLED = kinds.register(
    "stalled",
    "a queue's consumers acknowledge nothing",
    topic=PROGRESS,
    brief=lambda facts: _lasting("nothing acknowledged", "stalled", facts),
)
STALL_OVER = kinds.register(
    "stall-over",
    "a queue's consumers are at work again",
    topic=PROGRESS,
    brief=lambda facts: Brief("no longer stalled", "no longer stalled"),
)
WEEKLY = kinds.register("weekly", "an owner's week", needs_active_recipient=True, context=_weekly_context)
