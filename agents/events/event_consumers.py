"""Event consumers: queues for the events of an offering, registered without introducing an agent first.

Such a queue is the consumer of an identity with a name of its own, so everything that holds for agents' consumers holds
for it.
"""

from collections.abc import Sequence

from django.utils import timezone

from accounts.models import Owner
from agents.models import AgentIdentity, Consumer, Offering
from agents.registration import queues
from agents.registration.credentials import PresentedToken
from agents.registration.records import get_or_create
from agents.removal import deletions

IDENTITY_NAME = "event-consumer"


def register(
    owner: Owner, offering: Offering, presented: PresentedToken, object_types: Sequence[str] | None
) -> tuple[Consumer, bool]:
    """Return the owner's event consumer for an offering, and whether it is new. The token becomes its password."""
    rows = AgentIdentity.objects.filter(owner=owner).select_related("owner")
    identity, is_new = get_or_create(rows, {"owner": owner}, owner, offering=offering, name=IDENTITY_NAME)
    try:
        return queues.register_consumer(identity, presented, object_types)
    except Exception:
        if is_new:
            deletions.delete(AgentIdentity.objects.filter(pk=identity.pk, consumer=None, event_subscriptions=None))
        raise


def set_object_types(consumer: Consumer, object_types: Sequence[str]) -> None:
    rows = Consumer.objects.filter(pk=consumer.pk)
    if not rows.update(object_types=list(object_types), modified=timezone.now()):
        raise Consumer.DoesNotExist("The consumer no longer exists.")


def remove(consumer: Consumer) -> None:
    """Remove a consumer with its queue and login; of an event consumer, its identity, too."""
    identity = consumer.identity
    is_used = identity.event_subscriptions.exists() or identity.services.exists()
    deletions.delete(consumer if is_used or identity.name != IDENTITY_NAME else identity)
