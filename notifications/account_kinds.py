"""The kinds of notification about owners and their accounts."""

from collections.abc import Sequence
from datetime import UTC
from typing import Any

from django.urls import reverse

from accounts import addresses
from accounts.models import Invitation, NotificationAddress, PulseUser
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


def _invitation(notification: Notification) -> dict[str, Any]:
    """Return what the invitation says now."""
    uuid = notification.facts["invitation"]
    invitation = Invitation.objects.open().select_related("pulse_user", "inviter").filter(uuid=uuid).first()
    if invitation is None:
        raise kinds.Obsolete("The invitation was answered or withdrawn in the meantime.")
    return {
        "pulse_user": invitation.pulse_user.username,
        "inviter": invitation.inviter.email,
        "invitee": notification.recipient,
        "expires": f"{invitation.expires_at.astimezone(UTC):%Y-%m-%d %H:%M} UTC",
        "invitation_url": absolute_url(reverse("invitation", args=[invitation.uuid])),
    }


def _pulse_user_link(notification: Notification) -> dict[str, Any]:
    username = notification.facts["pulse_user"]
    if not PulseUser.objects.filter(username=username, owners__email=notification.recipient).exists():
        raise kinds.Obsolete("The account was deleted, or has other owners.")
    return {"pulse_user_url": _pulse_user_url(username)}


def _assignment(notification: Notification) -> dict[str, Any]:
    """Return the accounts that the recipient still owns, with links."""
    owned = PulseUser.objects.filter(
        username__in=notification.facts["pulse_users"], owners__email=notification.recipient
    )
    accounts = [{"name": one.username, "url": _pulse_user_url(one.username)} for one in owned]
    if not accounts:
        raise kinds.Obsolete("The accounts were deleted, or have other owners.")
    return {"accounts": accounts, "what": _what([one.username for one in owned])}


def _departure(notification: Notification) -> dict[str, Any]:
    """Return the accounts with links, and whether their passwords were changed since."""
    facts = notification.facts
    if notification.recipient in facts["left"]:
        return {"was_removed": True, "what": _what(facts["pulse_users"])}
    owned = PulseUser.objects.filter(username__in=facts["pulse_users"], owners__email=notification.recipient)
    accounts = [
        {"name": one.username, "url": f"{_pulse_user_url(one.username)}#password", "exposed": one.password_exposed_at}
        for one in owned
    ]
    if not accounts:
        raise kinds.Obsolete("The accounts were deleted, or have other owners.")
    return {
        "accounts": accounts,
        "what": _what([one.username for one in owned]),
        "exposed": any(one.password_exposed_at for one in owned),
    }


def _what(usernames: Sequence[str]) -> str:
    return usernames[0] if len(usernames) == 1 else f"{len(usernames)} RabbitMQ accounts"


def _pulse_user_url(username: str) -> str:
    return absolute_url(reverse("pulse_user", args=[username]))


CONFIRM_ADDRESS = kinds.register(
    "confirm-address", "whether an address may be told of an account's queues", context=_confirm_link
)

VOUCH_REQUEST = kinds.register("vouch-request", "somebody asks to be vouched for", context=_request)

VOUCHED = kinds.register(
    "vouched", "somebody may use the broker now", needs_active_recipient=True, context=_pulse_users_link
)

INVITATION = kinds.register(
    "invitation", "whether somebody will own an account", needs_active_recipient=True, context=_invitation
)

INVITATION_ANSWERED = kinds.register(
    "invitation-answered",
    "somebody accepted or declined an invitation",
    needs_active_recipient=True,
    context=_pulse_user_link,
)

OWNER_ASSIGNED = kinds.register(
    "owner-assigned",
    "an operator made somebody an owner of an account",
    needs_active_recipient=True,
    context=_assignment,
)

OWNER_LEFT = kinds.register("owner-left", "an account lost an owner", needs_active_recipient=True, context=_departure)
