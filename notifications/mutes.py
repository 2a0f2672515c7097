"""Which notifications about a Pulse user's queues an owner gets, and in which channels. All, unless they are muted."""

from collections import defaultdict
from collections.abc import Collection

from django.db import transaction

from accounts.models import Owner, PulseUser
from notifications.kinds import Kind
from notifications.models import Mute

DELETION = "deletion"

TOPICS = {
    "length": "Warnings, and the end of a warning",
    DELETION: "Deletions, and the last call before one",
    "consumers": "Queues without consumers",
    "progress": "Stalled consumers",
}
"""The topics that an owner chooses from, with their labels."""

Choice = tuple[str, str]
"""A topic and a channel: "email", or the hex UUID of a channel."""

Mutes = dict[tuple[int, str, str], set[str]]
"""The muted topics by the Pulse user's id, the owner's address and the channel."""


def topic_of(kind: Kind) -> str:
    """Return the topic by which a kind of notification is chosen, or an empty text if it can't be muted."""
    topic = DELETION if kind.is_critical else kind.topic
    return topic if topic in TOPICS else ""


def muted(owner: Owner, pulse_user: PulseUser) -> set[Choice]:
    """Return what this owner does not get about the Pulse user's queues."""
    return set(Mute.objects.filter(owner=owner, pulse_user=pulse_user).values_list("topic", "channel"))


def set_muted(owner: Owner, pulse_user: PulseUser, choices: Collection[Choice]) -> None:
    with transaction.atomic():
        Mute.objects.filter(owner=owner, pulse_user=pulse_user).delete()
        Mute.objects.bulk_create(
            [Mute(owner=owner, pulse_user=pulse_user, topic=topic, channel=channel) for topic, channel in choices],
            ignore_conflicts=True,
        )


def of_pulse_users(pulse_users: Collection[int]) -> Mutes:
    """Return the mutes of these Pulse users, given by their ids, in one statement."""
    found: Mutes = defaultdict(set)
    rows = Mute.objects.filter(pulse_user__in=pulse_users)
    for pulse_user, address, channel, topic in rows.values_list("pulse_user", "owner__email", "channel", "topic"):
        found[pulse_user, address, channel].add(topic)
    return found
