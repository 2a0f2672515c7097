"""Which notifications an owner gets, and in which channels. All, unless they are muted.

An owner mutes topics of a Pulse user's queues, or one queue until a time. What is critical about a muted queue, such as
its deletion, is sent all the same.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db import transaction
from django.utils import timezone

from accounts.models import Owner, PulseUser
from core import bulk
from core.refusals import Refusal
from notifications.audience import Recipient
from notifications.kinds import Kind
from notifications.models import Mute, SubjectMute

LONGEST = timedelta(days=366)

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


def mute(owner: Owner, subjects: Iterable[str], until: datetime) -> None:
    """Let this owner get nothing about these subjects, given by their keys, until a time within a year."""
    now = timezone.now()
    if not now < until <= now + LONGEST:
        raise Refusal("Enter a time in the future, at most a year from now.", "until")
    rows = [SubjectMute(owner=owner, subject=subject, until=until) for subject in subjects]
    SubjectMute.objects.bulk_create(
        rows, update_conflicts=True, unique_fields=["owner", "subject"], update_fields=["until"]
    )


def unmute(owner: Owner, subjects: Collection[str]) -> None:
    SubjectMute.objects.filter(owner=owner, subject__in=subjects).delete()


def muted_until(owner: Owner, subjects: Collection[str]) -> dict[str, datetime]:
    """Return until when this owner muted these subjects, in one statement. Those that are not muted are left out."""
    current = SubjectMute.objects.filter(owner=owner.pk, subject__in=subjects, until__gt=timezone.now())
    return dict(current.values_list("subject", "until"))


@dataclass(frozen=True)
class Mutes:
    """What owners muted: topics by the Pulse user's id, the owner's address and the channel; and subjects."""

    topics: dict[tuple[int | None, str, str], set[str]]
    subjects: set[tuple[str, str]]

    def apply(self, kind: Kind, pulse_user: int | None, subject: str, to: Recipient) -> bool:
        """Return whether this recipient does not get a notification. Added addresses can't mute anything."""
        topic = topic_of(kind)
        if to.pulse_user or not topic:
            return False
        is_muted = (subject, to.address) in self.subjects and topic != DELETION
        return is_muted or topic in self.topics.get((pulse_user, to.address, to.channel), ())


def load(pulse_users: Collection[int], subjects: Collection[str], now: datetime) -> Mutes:
    """Return the mutes of these Pulse users, given by their ids, and of these subjects, in two statements."""
    topics: dict[tuple[int | None, str, str], set[str]] = defaultdict(set)
    rows = Mute.objects.filter(pulse_user__in=pulse_users)
    for pulse_user, address, channel, topic in rows.values_list("pulse_user", "owner__email", "channel", "topic"):
        topics[pulse_user, address, channel].add(topic)
    if not subjects:
        return Mutes(topics, set())
    these = bulk.among(SubjectMute, ("subject",), [(one,) for one in subjects])
    found = SubjectMute.objects.filter(these, until__gt=now).values_list("subject", "owner__email")
    return Mutes(topics, set(found))
