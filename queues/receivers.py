"""Receivers of Pulse users' signals, and the functions that tell ``accounts`` about queues."""

from collections.abc import Collection
from typing import Any

from django.db.models import Count
from django.dispatch import receiver

from accounts import queue_effects, signals
from accounts.models import PulseUser
from queues.actions import effects, tombstones
from queues.guard import destroying
from queues.models import Queue


def _count_queues(pulse_users: Collection[int]) -> dict[int, int]:
    existing = Queue.objects.filter(pulse_user__in=pulse_users).exclude(state=Queue.State.GONE).order_by()
    return dict(existing.values_list("pulse_user").annotate(Count("pk")))


queue_effects.of_thresholds = effects.of_thresholds
queue_effects.of_removal = effects.of_removal
queue_effects.of_agents = effects.of_agents
queue_effects.count = _count_queues
queue_effects.delete_queue = destroying.delete_queue_of_pulse_user


@receiver(signals.pulse_user_removed)
def forget_queues(sender: object, pulse_user: PulseUser, **_: Any) -> None:
    tombstones.forget_queues_of(pulse_user)
