"""Notifications about owners and their accounts.

The signals are sent in the transaction of the change, so the outbox rows are committed or rolled back with it.
"""

from typing import Any

from django.db import transaction
from django.dispatch import receiver
from django.utils import timezone

from accounts import audit, signals
from accounts.models import NotificationAddress, Owner
from notifications import audience, enqueue
from notifications.account_kinds import CONFIRM_ADDRESS, VOUCH_REQUEST, VOUCHED
from notifications.enqueue import Notice
from notifications.models import Channel

audit.watch(Channel, ("owner", "name", "service"))  # the address is a secret


@receiver(signals.address_added)
def ask_to_confirm(sender: object, address: NotificationAddress, **_: Any) -> None:
    """Ask an added address to confirm notifications about the account's queues."""
    facts = {
        "address": str(address.uuid),
        "account": address.pulse_user.username,
        "added_by": address.added_by.email if address.added_by else "",
    }
    _enqueue(Notice(CONFIRM_ADDRESS, facts, recipients=[address.email]))


@receiver(signals.vouch_requested)
def ask_operators(sender: object, owner: Owner, reason: str, **_: Any) -> None:
    """Notify the operators of an owner's request to be vouched for."""
    active = Owner.objects.filter(is_staff=True, is_active=True).order_by("email").values_list("email", flat=True)
    recipients = list(dict.fromkeys([*audience.operators(), *active]))
    if recipients:
        facts = {"asks": owner.email, "reason": reason}
        _enqueue(Notice(VOUCH_REQUEST, facts, recipients=recipients))


@receiver(signals.vouched)
def notify_vouched(sender: object, owner: Owner, by: Owner | None, **_: Any) -> None:
    """Notify an owner who was vouched for."""
    facts = {"by": by.email if by else ""}
    _enqueue(Notice(VOUCHED, facts, recipients=[owner.email]))


def _enqueue(notice: Notice) -> None:
    with transaction.atomic():
        enqueue.enqueue([notice], timezone.now())
        transaction.on_commit(enqueue.nudge, robust=True)
