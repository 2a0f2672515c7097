"""Notifications about what happens to owners and their accounts.

The signals are sent in the transaction of the change, so the outbox rows are committed or rolled back with it.
"""

from typing import Any

from django.db import transaction
from django.dispatch import receiver
from django.urls import reverse
from django.utils import timezone

from accounts import addresses, audit, signals
from accounts.models import NotificationAddress, Owner
from core.links import absolute
from notifications import audience, enqueue, kinds
from notifications.enqueue import Telling
from notifications.models import Channel, Notification
from rabbit.names import readable


def _confirm_link(notification: Notification) -> dict[str, Any]:
    """Return the link that confirms an added address. Whoever has it can use it, so it is stored nowhere."""
    address = NotificationAddress.objects.filter(uuid=notification.facts["address"], confirmed_at=None).first()
    if address is None:
        raise kinds.Obsolete("The address was confirmed or removed in the meantime.")
    link = reverse("confirm_address", args=[addresses.confirmation_token(address)])
    return {"confirm_url": absolute(link)}


def _request(notification: Notification) -> dict[str, Any]:
    reason = "\n".join(readable(line) for line in notification.facts["reason"].splitlines())
    return {"reason": reason, "owners_url": absolute(reverse("owners"))}


def _pulse_users_link(notification: Notification) -> dict[str, Any]:
    return {"pulse_users_url": absolute(reverse("pulse_users"))}


CONFIRM_ADDRESS = kinds.register(
    "confirm-address", "whether an address may be told of an account's queues", context=_confirm_link
)
VOUCH_REQUEST = kinds.register("vouch-request", "somebody asks to be vouched for", context=_request)
VOUCHED = kinds.register("vouched", "somebody may use the broker now", is_to_a_person=True, context=_pulse_users_link)

audit.watch(Channel, ("owner", "name", "service"))  # where it leads to is a secret


@receiver(signals.address_added)
def ask_to_confirm(sender: object, address: NotificationAddress, **_: Any) -> None:
    """Ask an added address whether it wants to hear of the account's queues."""
    facts = {
        "address": str(address.uuid),
        "account": address.pulse_user.username,
        "added_by": address.added_by.email if address.added_by else "",
    }
    _tell(Telling(CONFIRM_ADDRESS, facts, recipients=[address.email]))


@receiver(signals.vouch_requested)
def ask_operators(sender: object, owner: Owner, reason: str, **_: Any) -> None:
    """Tell whoever runs the installation that somebody asks to be vouched for."""
    active = Owner.objects.filter(is_staff=True, is_active=True).order_by("email").values_list("email", flat=True)
    recipients = list(dict.fromkeys([*audience.operators(), *active]))
    if recipients:
        facts = {"asks": owner.email, "reason": reason}
        _tell(Telling(VOUCH_REQUEST, facts, recipients=recipients))


@receiver(signals.vouched)
def tell_vouched(sender: object, owner: Owner, by: Owner | None, **_: Any) -> None:
    """Tell an owner who may use the broker now."""
    facts = {"by": by.email if by else ""}
    _tell(Telling(VOUCHED, facts, recipients=[owner.email]))


def _tell(telling: Telling) -> None:
    with transaction.atomic():
        enqueue.tell([telling], timezone.now())
        transaction.on_commit(enqueue.nudge, robust=True)
