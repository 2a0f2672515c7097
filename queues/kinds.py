"""The kinds of notification about queues, the broker and passes."""

from typing import Any

from django.conf import settings
from django.urls import reverse

from notifications import kinds
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


WARNING = kinds.register("warning", "a queue passed its warn length")
RECOVERY = kinds.register("recovery", "a queue is back to normal")
SUMMARY = kinds.register("summary", "what a queue did during its quiet period")
DELETION = kinds.register("deletion", "a queue was deleted", is_final=True)
OUTAGE = kinds.register("outage", "the broker can't be asked")
OUTAGE_OVER = kinds.register("outage-over", "the broker answers again")
BRAKE = kinds.register("brake", "the brake on bulk deletion holds")
SHORT_LIST = kinds.register("short-list", "the broker lists far fewer queues than before")
REFUSED = kinds.register("refused", "the broker refuses to delete a queue")
UNRESPONSIVE = kinds.register("unresponsive", "a queue's process doesn't answer")
RESPONSIVE = kinds.register("responsive", "all queues answer again")
UNADDRESSABLE = kinds.register("unaddressable", "a queue has a name that no client can use", context=_shown_queues)
NO_CONSUMERS = kinds.register("no-consumers", "a queue has no consumer")
CONSUMERS_BACK = kinds.register("consumers-back", "a queue has a consumer again")
STALLED = kinds.register("stalled", "a queue's consumers acknowledge nothing")
STALL_OVER = kinds.register("stall-over", "a queue's consumers are at work again")
WEEKLY = kinds.register("weekly", "an owner's week", needs_active_recipient=True, context=_weekly_context)
