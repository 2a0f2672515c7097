"""Who is notified of something: owners by mail and in their channels, added addresses, operators."""

import uuid
from collections.abc import Iterable, Mapping, Sequence
from datetime import time as time_of_day
from typing import NamedTuple

from django.conf import settings

from accounts.models import NotificationAddress, Owner, PulseUser, normal_address
from core import bulk


class Whose(NamedTuple):
    """Whose a queue is: the owners' of a Pulse user, by its name; an owner's, by its vhost; or nobody's."""

    pulse_user_id: int | None = None
    owner_id: int | None = None


EMAIL = "email"


class Recipient(NamedTuple):
    """Where a message goes: an address by mail, or one of the channels of the owner who has that address.

    ``quiet`` are the owner's quiet hours and their time zone. ``account`` and ``added_by`` are there for an address
    that an owner added to a RabbitMQ account.
    """

    address: str
    channel: str = EMAIL
    quiet: tuple[time_of_day | None, time_of_day | None, str] = (None, None, "UTC")
    account: str = ""
    added_by: str = ""


def operators() -> list[str]:
    """Return the addresses that get a copy of everything."""
    return list(dict.fromkeys(normal_address(address) for address in settings.GUARDIAN_OPERATOR_EMAILS))


def recipients_of(queues: Iterable[Whose]) -> dict[Whose, list[Recipient]]:
    """Return who is told of queues, by whose they are. Three statements at most, whatever their number.

    Of a Pulse user's queues its owners are told, by mail and in their channels, and the addresses that owners added and
    somebody confirmed; of an agents' queue its owner.
    """
    wanted = set(queues)
    of_accounts = _of_accounts([(one.pulse_user_id,) for one in wanted if one.pulse_user_id is not None])
    of_owners = _of_owners([(one.owner_id,) for one in wanted if one.owner_id is not None])
    told = {}
    for one in wanted:
        both = {**of_accounts.get(one.pulse_user_id, {}), **of_owners.get(one.owner_id, {})}
        if both:
            told[one] = list(both)
    return told


WHERE_TOLD = ("email", "quiet_from", "quiet_until", "time_zone", "channels__uuid")
"""What of an owner says where, and when not, they are told."""

Told = dict[int | None, dict[Recipient, None]]


def _of_accounts(accounts: Sequence[tuple[int]]) -> Told:
    """Return who is told of the queues of these Pulse users, by the Pulse user's id."""
    told: Told = {}
    if not accounts:
        return told
    through = PulseUser.owners.through
    owners = through.objects.filter(bulk.among(through, ("pulseuser",), accounts), owner__is_active=True)
    rows = owners.order_by("owner__email").values_list("pulseuser", *(f"owner__{name}" for name in WHERE_TOLD))
    for pulse_user, *where in rows:
        told.setdefault(pulse_user, {}).update(_places(*where))
    these = bulk.among(NotificationAddress, ("pulse_user",), accounts)
    added = NotificationAddress.objects.filter(these, confirmed_at__isnull=False).order_by("email")
    for pulse_user, address, *why in added.values_list(
        "pulse_user", "email", "pulse_user__username", "added_by__email"
    ):
        recipient = Recipient(address, account=why[0], added_by=why[1] or "")
        told.setdefault(pulse_user, {})[recipient] = None
    return told


def _of_owners(owners: Sequence[tuple[int]]) -> Told:
    """Return who is told of the queues of these owners' agents, by the owner's id."""
    told: Told = {}
    if not owners:
        return told
    active = Owner.objects.filter(bulk.among(Owner, ("id",), owners), is_active=True)
    for owner, *where in active.order_by("email").values_list("id", *WHERE_TOLD):
        told.setdefault(owner, {}).update(_places(*where))
    return told


def _places(
    address: str, quiet_from: time_of_day | None, quiet_until: time_of_day | None, zone: str, channel: uuid.UUID | None
) -> dict[Recipient, None]:
    """Return where an owner with one of their channels is told."""
    by_mail = Recipient(address, quiet=(quiet_from, quiet_until, zone))
    if channel is None:
        return {by_mail: None}
    return {by_mail: None, by_mail._replace(channel=channel.hex): None}


def is_anybody_told(whose: Whose, people: Mapping[Whose, Sequence[Recipient]]) -> bool:
    """Return whether a message about a queue has a recipient at all; ``people`` are those told of queues."""
    return bool(settings.GUARDIAN_OPERATOR_EMAILS) or bool(people.get(whose))
