"""The audited fields of offerings, and a lock for the deletion of an owner with an agents' vhost."""

from typing import Any

from django.db.models.signals import pre_delete
from django.dispatch import receiver

from accounts import audit
from accounts.models import Owner
from agents.models import AgentVhost, Offering

audit.watch(Offering, ("name", "uuid"), many_to_many=("members", "publishers"))


@receiver(pre_delete, sender=AgentVhost)
def lock_owner(sender: object, instance: AgentVhost, **_: Any) -> None:
    """Lock the owner before the rows that are deleted with the owner, of which the vhost is one.

    A pass also locks owners first, and then the queues that it assigns to them. The same order prevents deadlocks, and
    the lock prevents a queue from being assigned to a deleted owner.
    """
    Owner.objects.select_for_update().filter(pk=instance.owner_id).first()
