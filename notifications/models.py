"""The outbox, and the channels of owners."""

import uuid

from django.conf import settings
from django.db import models
from django.utils.functional import cached_property

from accounts.models import PulseUser
from core.fields import BrokerJSONField
from notifications import kinds, subjects


class Notification(models.Model):
    """The outbox: one message to one recipient through one channel, kept until it is delivered."""

    class State(models.TextChoices):
        DUE = "due", "to be sent"
        SENDING = "sending", "being sent"
        SENT = "sent", "sent"
        FAILED = "failed", "given up"

    uuid = models.UUIDField("UUID", default=uuid.uuid4, unique=True, editable=False)
    kind = models.CharField(max_length=20, choices=kinds.choices)
    about = models.CharField(
        max_length=40,
        help_text="The subject's key, such as “queue 7”. Messages about one subject reach one recipient in order.",
    )
    channel = models.CharField(max_length=40, default="email", help_text="email, or the hex UUID of a channel.")
    recipient = models.CharField(max_length=254)
    facts = BrokerJSONField(help_text="The content of the message, as of its creation.")
    state = models.CharField(max_length=10, choices=State.choices, default=State.DUE)
    created = models.DateTimeField()
    due_at = models.DateTimeField()
    attempts = models.PositiveSmallIntegerField(default=0)
    claim = models.UUIDField(null=True, help_text="The UUID of the sender's claim.")
    sent_at = models.DateTimeField(null=True)
    last_error = models.TextField(blank=True)
    deferred_until = models.DateTimeField(null=True, help_text="The end of its recipient's quiet hours.")
    group = models.UUIDField(
        null=True, help_text="Shared by the notifications of one pass: many to one recipient are sent as one message."
    )

    class Meta:
        ordering = ["id"]
        indexes = [
            models.Index(fields=["state", "due_at"]),
            # Not a partial index: SQLite uses none if its condition's states are query parameters.
            models.Index(fields=["recipient", "about"], name="notification_about"),
        ]

    def __str__(self) -> str:
        return f"{self.kind} to {self.recipient}"

    @cached_property
    def subject(self) -> subjects.Subject | None:
        """The current subject, or None if it has no page or no longer exists."""
        return subjects.look_up({self.about}).get(self.about)


class Channel(models.Model):
    """A destination of an owner's notifications besides e-mail. Its address is a secret, sealed with ``SECRET_KEY``."""

    uuid = models.UUIDField("UUID", default=uuid.uuid4, unique=True, editable=False)
    owner = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="channels")
    name = models.CharField(max_length=100)
    service = models.CharField(max_length=100, editable=False, help_text="The service and host, as pages show them.")
    sealed_url = models.TextField(editable=False)
    sealed_secret = models.TextField(
        default="", db_default="", editable=False, help_text="The key that signs messages; empty: they are not signed."
    )
    created = models.DateTimeField(auto_now_add=True)
    last_sent_at = models.DateTimeField(null=True, editable=False)
    last_error = models.CharField(max_length=300, blank=True, editable=False)

    class Meta:
        ordering = ["name"]
        constraints = [models.UniqueConstraint(fields=["owner", "name"], name="one_channel_of_a_name_for_an_owner")]

    def __str__(self) -> str:
        return self.name


class Mute(models.Model):
    """An owner's choice not to get one topic's notifications about the queues of a Pulse user, in one channel."""

    owner = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="+")
    pulse_user = models.ForeignKey(PulseUser, on_delete=models.CASCADE, related_name="+")
    channel = models.CharField(max_length=40, help_text="email, or the hex UUID of a channel.")
    topic = models.CharField(max_length=20)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["owner", "pulse_user", "channel", "topic"], name="one_mute_for_each_choice")
        ]
        indexes = [models.Index(fields=["pulse_user"])]

    def __str__(self) -> str:
        return f"{self.owner} gets no {self.topic} of {self.pulse_user} by {self.channel}"


class SubjectMute(models.Model):
    """An owner's choice not to be notified about one subject, such as a queue, until a time."""

    owner = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="+")
    subject = models.CharField(max_length=40, help_text="The subject's key, as in Notification.about.")
    until = models.DateTimeField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["owner", "subject"], name="one_mute_of_a_subject")]
        indexes = [models.Index(fields=["subject"])]

    def __str__(self) -> str:
        return f"{self.owner} gets nothing about {self.subject} until {self.until:%F}"
