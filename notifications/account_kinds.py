"""The kinds of notification about owners and their Pulse users."""

from collections.abc import Sequence

from django.urls import reverse

from accounts.models import Invitation, NotificationAddress, PulseUser
from accounts.pulse_users import addresses
from core.links import absolute_url
from notifications import kinds
from notifications.content import Content, Fact, Link, Row, Table, Why, as_of, local_time
from notifications.models import Notification


def _confirm_address(notification: Notification) -> Content:
    """Return the request to confirm an added address.

    The link is not stored, because anybody who has it can use it.
    """
    facts = notification.facts
    address = NotificationAddress.objects.filter(uuid=facts["address"], confirmed_at=None).first()
    if address is None:
        raise kinds.Obsolete("The address was confirmed or removed in the meantime.")
    by = facts.get("added_by") or "An owner"
    link = reverse("confirm_address", args=[addresses.confirmation_token(address)])
    return Content(
        subject=f"Confirm notifications about the queues of {facts['account']}",
        happened=f"{by} added this address to the Pulse user {facts['account']}, so that it is notified when a "
        "queue of this Pulse user grows too long and when one is deleted.",
        next="You get no such mail until you confirm.",
        advice="Open this page within seven days, and press the button there. "
        "If you don't want such mails, ignore this one.",
        action=Link("Confirm this address", absolute_url(link)),
        facts=[Fact("Pulse user", facts["account"]), Fact("Added by", facts.get("added_by") or "an owner")],
        why=Why(f"You get this because {facts.get('added_by') or 'an owner'} entered your address."),
    )


def _vouch_request(notification: Notification) -> Content:
    facts = notification.facts
    return Content(
        subject=f"{facts['asks']} asks for access to the broker",
        happened=f"{facts['asks']} signed in, and asks for access to the broker.",
        next="This person has no access until an operator approves it.",
        advice="If you know this person and the purpose, approve the request.",
        action=Link("Review the request", absolute_url(reverse("owners"))),
        facts=[Fact("Address", facts["asks"]), Fact("Reason", facts["reason"] or "none given"), as_of(notification)],
        why=Why("You get this as an operator of this installation."),
    )


def _vouched(notification: Notification) -> Content:
    by = notification.facts["by"]
    return Content(
        subject="You have access to the broker",
        happened=f"{by} approved your access to the broker." if by else "Your access to the broker is approved.",
        next="You can create Pulse users, which are users of RabbitMQ. "
        "The names of a Pulse user's queues begin with queue/ and its own name.",
        action=Link("Create a Pulse user", absolute_url(reverse("pulse_users"))),
        facts=[Fact("Your address", notification.recipient), Fact("Approved by", by or "an operator")],
        why=Why("You get this because you signed in to Guardian with this address."),
    )


def _invitation(notification: Notification) -> Content:
    uuid = notification.facts["invitation"]
    invitation = Invitation.objects.open().select_related("pulse_user", "inviter").filter(uuid=uuid).first()
    if invitation is None:
        raise kinds.Obsolete("The invitation was answered or withdrawn in the meantime.")
    username, inviter = invitation.pulse_user.username, invitation.inviter.email
    expires = local_time(notification, invitation.expires_at)
    return Content(
        subject=f"{inviter} invites you to own {username}",
        happened=f"{inviter} invites you to own the Pulse user {username}. Its owners are notified about its "
        "queues. They can change everything about it: set its password, invite others, delete it.",
        next=f"Nothing changes until you accept. The invitation expires on {expires}.",
        advice=f"Sign in with this address, {notification.recipient}, and accept or decline.",
        action=Link("Answer the invitation", absolute_url(reverse("invitation", args=[invitation.uuid]))),
        facts=[Fact("Pulse user", username), Fact("Invited by", inviter), Fact("Expires", expires)],
        why=Why(f"You get this because {inviter} entered your address."),
    )


def _invitation_answered(notification: Notification) -> Content:
    facts = notification.facts
    username, invitee = facts["pulse_user"], facts["invitee"]
    if facts["accepted"]:
        subject = f"{invitee} accepted and owns {username} now"
        happened = f"{invitee} accepted your invitation to own the Pulse user {username}."
        next_ = f"{invitee} is an owner now, and is notified about its queues."
        advice = (
            "Give the new owner the password, or let them set another. You can leave the Pulse user now if you want to."
        )
    else:
        subject = f"{invitee} declined to own {username}"
        happened = f"{invitee} declined your invitation to own the Pulse user {username}."
        next_ = "Its owners stay the same."
        advice = "Ask for the reason, or invite another person."
    return Content(
        subject=subject,
        happened=happened,
        next=next_,
        advice=advice,
        action=_open_pulse_user(notification),
        facts=[Fact("Pulse user", username), Fact("Invited", invitee)],
        why=Why("You get this because you sent the invitation."),
    )


def _owner_assigned(notification: Notification) -> Content:
    """Return the message to an owner, with the Pulse users that they still own."""
    usernames = notification.facts["pulse_users"]
    owned = PulseUser.objects.filter(username__in=usernames, owners__email=notification.recipient)
    names = sorted(one.username for one in owned)
    if not names:
        raise kinds.Obsolete("The Pulse users were deleted, or have other owners.")
    pulse_users, by = _pulse_users(names), notification.facts["by"]
    its, it = ("its", "it") if len(names) == 1 else ("their", "them")
    facts = [Fact("Pulse users", "\n".join(names))]
    return Content(
        subject=f"You are now an owner of {_short(names)}",
        happened=f"{f'The operator {by}' if by else 'An operator'} assigned you as an owner of {pulse_users}.",
        next=f"You are notified about {its} queues, and can change {it}. Passwords stay as they are.",
        advice="Set a new password if others may know it. If a Pulse user is not yours, leave it, or ask the operator.",
        action=Link("Open your Pulse users", absolute_url(reverse("pulse_users"))),
        facts=[*facts, Fact("Assigned by", by)] if by else facts,
        why=Why("You get this because an operator entered your address."),
    )


def _open_pulse_user(notification: Notification) -> Link:
    """Return the link to the Pulse user's page. Only its owners may see it."""
    username = notification.facts["pulse_user"]
    if not PulseUser.objects.filter(username=username, owners__email=notification.recipient).exists():
        raise kinds.Obsolete("The Pulse user was deleted, or has other owners.")
    return Link("Open the Pulse user", _pulse_user_url(username))


def _owner_left(notification: Notification) -> Content:
    """Return the message to a removed owner, or to the other owners, some of whose passwords may be known.

    A deactivated owner gets no message.
    """
    facts = notification.facts
    usernames: list[str] = facts["pulse_users"]
    if notification.recipient in facts["left"]:
        return _removed(usernames, facts["by"] or "An operator")
    owned = list(PulseUser.objects.filter(username__in=usernames, owners__email=notification.recipient))
    if not owned:
        raise kinds.Obsolete("The Pulse users were deleted, or have other owners.")
    owned_names = [one.username for one in owned]
    pulse_users = _pulse_users(owned_names)
    left, by = facts["left"], facts["by"] or "An operator"
    names = ", ".join(left)
    if facts.get("deactivated"):
        subject = f"An owner of {_short(owned_names)} was deactivated"
        happened = f"{by} deactivated {names}, an owner of {pulse_users}."
        who, labels = names, ("Deactivated", "Deactivated by")
    else:
        no_longer = f"{names} no longer own{'s' if len(left) == 1 else ''}"
        subject = f"{no_longer} {_short(owned_names)}"
        happened = f"{no_longer} {pulse_users}{'' if by in left else f': {by} removed them'}."
        who, labels = "A former owner", ("No longer owners", "Removed by")
    exposed = any(one.password_exposed_at for one in owned)
    if exposed:
        next_ = f"{who} may know the password, and can still connect with it."
        advice = "Set a new password, and close the open connections."
    else:
        next_ = f"The password was changed since. {who} can't connect any more."
        advice = "If your clients can't connect, ask another owner for the new password, or set one."
    next_ += " The notification addresses that they added were removed."
    return Content(
        subject=f"{subject}: {'set a new password' if exposed else 'the password was changed'}",
        happened=happened,
        next=next_,
        advice=advice,
        action=_set_passwords(owned_names),
        facts=[Fact(labels[0], names), Fact(labels[1], by), as_of(notification)],
        tables=[Table([_password_row(one) for one in owned], "Passwords")],
        why=Why(f"You get this because you own {pulse_users}."),
    )


def _removed(usernames: Sequence[str], by: str) -> Content:
    pulse_users = _pulse_users(usernames)
    its, it = ("its", "it") if len(usernames) == 1 else ("their", "them")
    return Content(
        subject=f"You no longer own {_short(usernames)}",
        happened=f"{by} removed you from the owners of {pulse_users}.",
        next=f"You get no more notifications about {its} queues, and can't change {it}.",
        advice=f"If this is a mistake, ask {by if '@' in by else 'the operators'}.",
        action=Link("Open your Pulse users", absolute_url(reverse("pulse_users"))),
        facts=[Fact("Pulse users", "\n".join(usernames)), Fact("Removed by", by)],
        why=Why(f"You get this because you owned {pulse_users}."),
    )


def _set_passwords(usernames: Sequence[str]) -> Link:
    if len(usernames) == 1:
        return Link("Set a new password", f"{_pulse_user_url(usernames[0])}#password")
    return Link("Open your Pulse users", absolute_url(reverse("pulse_users")))


def _password_row(pulse_user: PulseUser) -> Row:
    state = "set a new password" if pulse_user.password_exposed_at else "changed since"
    return Row(pulse_user.username, (state,), f"{_pulse_user_url(pulse_user.username)}#password")


def _pulse_users(usernames: Sequence[str]) -> str:
    return f"the Pulse user {usernames[0]}" if len(usernames) == 1 else _short(usernames)


def _short(usernames: Sequence[str]) -> str:
    return usernames[0] if len(usernames) == 1 else f"{len(usernames)} Pulse users"


def _pulse_user_url(username: str) -> str:
    return absolute_url(reverse("pulse_user", args=[username]))


CONFIRM_ADDRESS = kinds.register("confirm-address", "an added address is asked to confirm", _confirm_address)

VOUCH_REQUEST = kinds.register("vouch-request", "a person asks for access to the broker", _vouch_request)

VOUCHED = kinds.register("vouched", "an owner has access to the broker", _vouched, needs_active_recipient=True)

INVITATION = kinds.register(
    "invitation", "a person is invited to own a Pulse user", _invitation, needs_active_recipient=True
)

INVITATION_ANSWERED = kinds.register(
    "invitation-answered", "an invitation was accepted or declined", _invitation_answered, needs_active_recipient=True
)

OWNER_ASSIGNED = kinds.register(
    "owner-assigned", "an operator assigned an owner to a Pulse user", _owner_assigned, needs_active_recipient=True
)

OWNER_LEFT = kinds.register("owner-left", "a Pulse user lost an owner", _owner_left, needs_active_recipient=True)
