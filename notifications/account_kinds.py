"""The kinds of notification about owners and their accounts."""

from typing import Any

from django.urls import reverse

from accounts import addresses
from accounts.models import NotificationAddress
from core.links import absolute_url
from notifications import kinds
from notifications.models import Notification
from rabbit.names import readable


def _confirm_link(notification: Notification) -> dict[str, Any]:
    """Return the link that confirms an added address. It is not stored, as anybody who has it can use it."""
    address = NotificationAddress.objects.filter(uuid=notification.facts["address"], confirmed_at=None).first()
    if address is None:
        raise kinds.Obsolete("The address was confirmed or removed in the meantime.")
    link = reverse("confirm_address", args=[addresses.confirmation_token(address)])
    return {"confirm_url": absolute_url(link)}


def _request(notification: Notification) -> dict[str, Any]:
    reason = "\n".join(readable(line) for line in notification.facts["reason"].splitlines())
    return {"reason": reason, "owners_url": absolute_url(reverse("owners"))}


def _pulse_users_link(notification: Notification) -> dict[str, Any]:
    return {"pulse_users_url": absolute_url(reverse("pulse_users"))}


CONFIRM_ADDRESS = kinds.register(
    "confirm-address", "whether an address may be told of an account's queues", context=_confirm_link
)

VOUCH_REQUEST = kinds.register("vouch-request", "somebody asks to be vouched for", context=_request)

VOUCHED = kinds.register(
    "vouched", "somebody may use the broker now", needs_active_recipient=True, context=_pulse_users_link
)
