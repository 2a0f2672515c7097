"""The recipients of notifications: owners by mail and in their channels, added addresses, operators.

What an owner muted or deferred is in ``mutes.py`` and ``preferences.py``.

Who may see a queue and its events on the pages and over the API: ``queues/access.py``.
"""

import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import time as time_of_day
from typing import NamedTuple

from django.conf import settings

from accounts.models import NotificationAddress, Owner, PulseUser, normalize_address


class Ownership(NamedTuple):
    """The owner of a queue: a Pulse user, by the queue's name; an owner, by the vhost of their agents; or nobody."""

    pulse_user_id: int | None = None
    owner_id: int | None = None


EMAIL = "email"


class Recipient(NamedTuple):
    """A mailbox, or one of the channels of the owner with that address.

    ``quiet`` are the owner's quiet hours and time zone. An address that an owner added to a Pulse user has
    ``pulse_user`` and ``added_by``.
    """

    address: str
    channel: str = EMAIL
    quiet: tuple[time_of_day | None, time_of_day | None, str] = (None, None, "UTC")
    pulse_user: str = ""
    added_by: str = ""


def operators() -> list[str]:
    return list(dict.fromkeys(normalize_address(address) for address in settings.GUARDIAN_OPERATOR_EMAILS))


def operators_and_staff() -> list[str]:
    """Return the addresses of those who decide on requests: of the operators, and of owners who are operators here."""
    staff = Owner.objects.filter(is_staff=True, is_active=True).order_by("email").values_list("email", flat=True)
    return list(dict.fromkeys([*operators(), *staff]))


def recipients_of(queues: Iterable[Ownership]) -> dict[Ownership, list[Recipient]]:
    """Return the recipients of notifications about queues, by ownership, in at most three statements.

    A Pulse user's queues are reported to its owners, by mail and in their channels, and to confirmed added addresses.
    An agents' queue is reported to its owner.
    """
    wanted = set(queues)
    of_pulse_users = _of_pulse_users({one.pulse_user_id for one in wanted if one.pulse_user_id is not None})
    of_owners = _of_owners({one.owner_id for one in wanted if one.owner_id is not None})
    recipients = {}
    for one in wanted:
        both = {**of_pulse_users.get(one.pulse_user_id, {}), **of_owners.get(one.owner_id, {})}
        if both:
            recipients[one] = list(both)
    return recipients


RECIPIENT_FIELDS = ("email", "quiet_from", "quiet_until", "time_zone", "channels__uuid")
"""The columns of an owner that :func:`_recipients_at` takes."""

Recipients = dict[int | None, dict[Recipient, None]]


def _of_pulse_users(pulse_users: Collection[int]) -> Recipients:
    """Return the recipients for the queues of these Pulse users, by the Pulse user's id."""
    recipients: Recipients = {}
    owners = PulseUser.owners.through.objects.filter(pulseuser__in=pulse_users, owner__is_active=True)
    rows = owners.order_by("owner__email").values_list("pulseuser", *(f"owner__{name}" for name in RECIPIENT_FIELDS))
    for pulse_user, *where in rows:
        recipients.setdefault(pulse_user, {}).update(_recipients_at(*where))
    confirmed = NotificationAddress.objects.filter(pulse_user__in=pulse_users, confirmed_at__isnull=False)
    added = confirmed.order_by("email").values_list("pulse_user", "email", "pulse_user__username", "added_by__email")
    for pulse_user, address, *why in added:
        recipient = Recipient(address, pulse_user=why[0], added_by=why[1] or "")
        recipients.setdefault(pulse_user, {})[recipient] = None
    return recipients


def _of_owners(owners: Collection[int]) -> Recipients:
    """Return the recipients for the queues of these owners' agents, by the owner's id."""
    recipients: Recipients = {}
    active = Owner.objects.filter(pk__in=owners, is_active=True)
    for owner, *where in active.order_by("email").values_list("id", *RECIPIENT_FIELDS):
        recipients.setdefault(owner, {}).update(_recipients_at(*where))
    return recipients


def _recipients_at(
    address: str, quiet_from: time_of_day | None, quiet_until: time_of_day | None, zone: str, channel: uuid.UUID | None
) -> dict[Recipient, None]:
    """Return the owner's mailbox and, if given, the channel as recipients."""
    by_mail = Recipient(address, quiet=(quiet_from, quiet_until, zone))
    if channel is None:
        return {by_mail: None}
    return {by_mail: None, by_mail._replace(channel=channel.hex): None}


def has_recipients(ownership: Ownership, people: Mapping[Ownership, Sequence[Recipient]]) -> bool:
    """Return whether a message about a queue has any recipient; ``people`` is the result of ``recipients_of``."""
    return bool(settings.GUARDIAN_OPERATOR_EMAILS) or bool(people.get(ownership))
