"""The kinds of notification about queues, the broker and passes."""

from collections.abc import Callable

from core.formatting import counted, duration
from notifications import kinds
from notifications.content import Content
from notifications.kinds import Brief, Severity
from queues.mails import about_broker, about_queues
from queues.mails.about_queues import Details

WARNED, NEAR_LIMIT, NORMAL = "over the warning threshold", "near the deletion limit", "back to normal"
STILL = "still over the warning threshold"


def _still_over(facts: Details) -> str:
    return f"{STILL}, for {duration(facts['seconds_over'])}"


def _summary(facts: Details) -> Brief:
    state = WARNED if facts.get("state") == "warned" else NORMAL
    return Brief(f"{state}, after {counted(facts.get('folded', 0), 'change')}", state)


def _last_call(facts: Details) -> Brief:
    left = duration(facts["seconds_to_max"])
    return Brief(f"{NEAR_LIMIT}, {left} left" if left else NEAR_LIMIT, NEAR_LIMIT)


def _deletion(facts: Details) -> Brief:
    archived = facts.get("archived", 0)
    lost = facts["dropped"] + facts["held"] if "dropped" in facts else facts.get("length")
    texts = ["deleted"]
    if archived:
        texts.append(f"{about_queues.messages(archived)} archived")
    if lost or (lost == 0 and not archived):
        texts.append(f"{about_queues.messages(lost)} lost")
    return Brief(", ".join(texts), "deleted")


def _lasting(text: str, counted_as: str, facts: Details) -> Brief:
    lasted = duration(facts.get("seconds"))
    return Brief(f"{text} for {lasted}" if lasted else text, counted_as)


def _to_operators(name: str, text: str, say: Callable[[Details], Content]) -> str:
    return kinds.register(name, text, about_broker.to_operators(say))


LENGTH, CONSUMERS, PROGRESS = "length", "consumers", "progress"
"""The topics of notifications about a queue."""

WARNING = kinds.register(
    "warning",
    "a queue reached its warning threshold",
    about_queues.warning,
    topic=LENGTH,
    severity=Severity.WARNING,
    brief=lambda facts: Brief(WARNED, WARNED),
)
LAST_CALL = kinds.register(
    "last-call",
    "a queue is about to reach its deletion limit",
    about_queues.last_call,
    topic=LENGTH,
    severity=Severity.CRITICAL,
    brief=_last_call,
)
REMINDER = kinds.register(
    "reminder",
    "a queue is still over its warning threshold",
    about_queues.reminder,
    topic=LENGTH,
    severity=Severity.WARNING,
    brief=lambda facts: Brief(_still_over(facts), STILL),
)
RECOVERY = kinds.register(
    "recovery",
    "a queue is back to normal",
    about_queues.recovery,
    topic=LENGTH,
    severity=Severity.NORMAL,
    brief=lambda facts: Brief(NORMAL, NORMAL),
)
SUMMARY = kinds.register(
    "summary",
    "a queue crossed its warning threshold several times",
    about_queues.summary,
    topic=LENGTH,
    severity=None,
    brief=_summary,
)
DELETION = kinds.register(
    "deletion",
    "Guardian deleted a queue",
    about_queues.deletion,
    topic=LENGTH,
    severity=Severity.CRITICAL,
    is_final=True,
    brief=_deletion,
)
LIMIT_REQUEST = kinds.register("limit-request", "an owner asks for a higher deletion limit", about_queues.limit_request)
LIMIT_ANSWER = kinds.register(
    "limit-answer", "operators decided about a higher deletion limit", about_queues.limit_answer
)
LIMITS_END = kinds.register(
    "limits-end",
    "limits of a queue end",
    about_queues.limits_end,
    topic="limits",
    brief=lambda facts: Brief(about_queues.LIMITS_STEPS[facts["step"]], "with temporary limits"),
)
OUTAGE = _to_operators("outage", "the broker can't be queried", about_broker.outage)
OUTAGE_OVER = _to_operators("outage-over", "the broker answers again", about_broker.outage_over)
BRAKE = _to_operators("brake", "the brake blocks deletions", about_broker.brake)
SHORT_LIST = _to_operators("short-list", "the broker lists far fewer queues than before", about_broker.short_list)
ALARM = _to_operators("alarm", "a resource alarm is raised", about_broker.alarm)
ALARM_OVER = _to_operators("alarm-over", "a resource alarm is over", about_broker.alarm_over)
NODE_LOST = _to_operators("node-lost", "a node of the cluster is down", about_broker.node_lost)
NODE_BACK = _to_operators("node-back", "a node of the cluster is no longer down", about_broker.node_back)
REFUSED = _to_operators("refused", "the broker refuses to delete a queue", about_broker.refused)
LATE = _to_operators("late", "recorded deletions wait for too long", about_broker.late)
UNRESPONSIVE = _to_operators("unresponsive", "a queue's process does not respond", about_broker.unresponsive)
RESPONSIVE = _to_operators("responsive", "all queues respond again", about_broker.responsive)
UNADDRESSABLE = _to_operators("unaddressable", "a queue has a name that no client can use", about_broker.unaddressable)
UNCOUNTED = _to_operators("uncounted", "the broker lists no message counts", about_broker.uncounted)
NO_CONSUMERS = kinds.register(
    "no-consumers",
    "a queue has no consumer",
    about_queues.no_consumers,
    topic=CONSUMERS,
    severity=Severity.WARNING,
    brief=lambda facts: _lasting("no consumer", "without a consumer", facts),
)
CONSUMERS_BACK = kinds.register(
    "consumers-back",
    "a queue has a consumer again",
    about_queues.consumers_back,
    topic=CONSUMERS,
    severity=Severity.NORMAL,
    brief=lambda facts: Brief("has a consumer again", "with a consumer again"),
)
STALLED = kinds.register(
    "stalled",
    "a queue's consumers acknowledge nothing",
    about_queues.stalled,
    topic=PROGRESS,
    severity=Severity.WARNING,
    brief=lambda facts: _lasting("nothing acknowledged", "stalled", facts),
)
STALL_OVER = kinds.register(
    "stall-over",
    "a queue's consumers acknowledge messages again",
    about_queues.stall_over,
    topic=PROGRESS,
    severity=Severity.NORMAL,
    brief=lambda facts: Brief("no longer stalled", "no longer stalled"),
)
WEEKLY = kinds.register("weekly", "an owner's weekly summary", about_queues.weekly, needs_active_recipient=True)
