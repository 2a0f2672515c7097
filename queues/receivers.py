"""What is told, forgotten, and locked when something happens to owners and their accounts.

The senders are in their transaction, so the outbox rows stand or fall with what they tell of.
"""

from typing import Any

from django.db import transaction
from django.db.models.signals import pre_delete
from django.dispatch import receiver
from django.utils import timezone

from accounts import audit, signals
from accounts.models import NotificationAddress, Owner, PulseUser
from queues import forgetting, outbox, removals  # noqa: F401 - its receivers are connected when it is imported
from queues.models import AgentVhost, Channel, Notification, Offering
from queues.outbox import Telling

audit.watch(Channel, ("owner", "name", "service"))  # where it leads to is a secret
audit.watch(Offering, ("name", "uuid"), many_to_many=("members", "publishers"))


@receiver(signals.address_added)
def ask_to_confirm(sender: object, address: NotificationAddress, **_: Any) -> None:
    """Ask an added address whether it wants to hear of the account's queues."""
    facts = {
        "address": str(address.uuid),
        "account": address.pulse_user.username,
        "added_by": address.added_by.email if address.added_by else "",
    }
    _tell(Telling(Notification.Kind.CONFIRM_ADDRESS, facts, recipients=[address.email]))


@receiver(signals.vouch_requested)
def ask_operators(sender: object, owner: Owner, reason: str, **_: Any) -> None:
    """Tell whoever runs the installation that somebody asks to be vouched for."""
    active = Owner.objects.filter(is_staff=True, is_active=True).order_by("email").values_list("email", flat=True)
    recipients = list(dict.fromkeys([*outbox.operators(), *active]))
    if recipients:
        facts = {"asks": owner.email, "reason": reason}
        _tell(Telling(Notification.Kind.VOUCH_REQUEST, facts, recipients=recipients))


@receiver(signals.vouched)
def tell_vouched(sender: object, owner: Owner, by: Owner | None, **_: Any) -> None:
    """Tell an owner who may use the broker now."""
    facts = {"by": by.email if by else ""}
    _tell(Telling(Notification.Kind.VOUCHED, facts, recipients=[owner.email]))


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


def _tell(telling: Telling) -> None:
    with transaction.atomic():
        outbox.tell([telling], timezone.now())
        transaction.on_commit(outbox.nudge, robust=True)
