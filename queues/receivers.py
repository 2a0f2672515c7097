"""What is told, forgotten, and locked when something happens to owners and their accounts.

The senders are in their transaction, so the outbox rows stand or fall with what they tell of.
"""

from typing import Any

from django.db.models.signals import pre_delete
from django.dispatch import receiver

from accounts import audit, signals
from accounts.models import Owner, PulseUser
from notifications import sending  # noqa: F401 - its receivers are connected when it is imported
from queues import forgetting
from queues.models import AgentVhost, Offering

audit.watch(Offering, ("name", "uuid"), many_to_many=("members", "publishers"))


@receiver(signals.pulse_user_removed)
def forget_queues(sender: object, pulse_user: PulseUser, **_: Any) -> None:
    """Forget the queues that went with an account."""
    forgetting.forget_queues_of(pulse_user)


@receiver(pre_delete, sender=AgentVhost)
def lock_owner(sender: object, instance: AgentVhost, **_: Any) -> None:
    """Lock an owner whose agents' vhost is going, which it does with the owner, before what is theirs is changed.

    A pass locks owners first, too, and then the queues that it writes down as theirs: neither waits for the other, and
    no queue comes to belong to an owner who is gone.
    """
    Owner.objects.select_for_update().filter(pk=instance.owner_id).first()
