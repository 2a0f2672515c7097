"""What is audited of offerings, and what happens when an owner goes whose agents have a vhost."""

from typing import Any

from django.db.models.signals import pre_delete
from django.dispatch import receiver

from accounts import audit
from accounts.models import Owner
from agents.models import AgentVhost, Offering

audit.watch(Offering, ("name", "uuid"), many_to_many=("members", "publishers"))


@receiver(pre_delete, sender=AgentVhost)
def lock_owner(sender: object, instance: AgentVhost, **_: Any) -> None:
    """Lock an owner whose agents' vhost is going, which it does with the owner, before what is theirs is changed.

    A pass locks owners first, too, and then the queues that it writes down as theirs: neither waits for the other, and
    no queue comes to belong to an owner who is gone.
    """
    Owner.objects.select_for_update().filter(pk=instance.owner_id).first()
