"""Notifications about what happens to owners and their accounts.

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

audit.watch(Channel, ("owner", "name", "service"))  # where it leads to is a secret


@receiver(signals.address_added)
def ask_to_confirm(sender: object, address: NotificationAddress, **_: Any) -> None:
    """Ask an added address whether it wants to hear of the account's queues."""
    facts = {
        "address": str(address.uuid),
        "account": address.pulse_user.username,
        "added_by": address.added_by.email if address.added_by else "",
    }
    _tell(Notice(CONFIRM_ADDRESS, facts, recipients=[address.email]))


@receiver(signals.vouch_requested)
def ask_operators(sender: object, owner: Owner, reason: str, **_: Any) -> None:
    """Tell whoever runs the installation that somebody asks to be vouched for."""
    active = Owner.objects.filter(is_staff=True, is_active=True).order_by("email").values_list("email", flat=True)
    recipients = list(dict.fromkeys([*audience.operators(), *active]))
    if recipients:
        facts = {"asks": owner.email, "reason": reason}
        _tell(Notice(VOUCH_REQUEST, facts, recipients=recipients))


@receiver(signals.vouched)
def tell_vouched(sender: object, owner: Owner, by: Owner | None, **_: Any) -> None:
    """Tell an owner who may use the broker now."""
    facts = {"by": by.email if by else ""}
    _tell(Notice(VOUCHED, facts, recipients=[owner.email]))


def _tell(notice: Notice) -> None:
    with transaction.atomic():
        enqueue.enqueue([notice], timezone.now())
        transaction.on_commit(enqueue.nudge, robust=True)
