"""What is guarded, what happened to it, what people are to be told, and what agents registered.

The broker is the truth about what exists; these rows are the truth about what was seen and decided.
"""

import uuid

from django.conf import settings
from django.contrib.auth.models import AnonymousUser
from django.db import models

from accounts.models import Owner, PulseUser, check_thresholds, visible_to
from rabbit.snapshot import length_of


class QueueQuerySet(models.QuerySet["Queue"]):
    """Queues, as different people see them."""

    def seen_by(self, visitor: Owner | AnonymousUser) -> "QueueQuerySet":
        """Return the queues that this visitor may see: an operator all, an owner their own, nobody else any."""
        own = models.Q(pulse_user__in=PulseUser.objects.filter(owners=visitor.pk)) | models.Q(owner=visitor.pk)
        return visible_to(self, visitor, own)


class Queue(models.Model):
    """A RabbitMQ queue as last seen. A queue that went and comes back is the same row."""

    class State(models.TextChoices):
        """Where a queue stands. The rule that moves it is ``queues.thresholds.judge``."""

        OK = "ok", "all right"
        WARNED = "warned", "over its warn length"
        DELETING = "deleting", "about to be deleted"
        GONE = "gone", "gone"

    uuid = models.UUIDField(default=uuid.uuid4, unique=True, editable=False)
    vhost = models.CharField(max_length=255)
    name = models.CharField(max_length=255)
    type = models.CharField(max_length=255)
    durable = models.BooleanField()
    auto_delete = models.BooleanField()
    exclusive = models.BooleanField()
    node = models.CharField(max_length=255, blank=True, help_text="The node that its leader was last seen on.")
    pulse_user = models.ForeignKey(
        PulseUser, null=True, blank=True, on_delete=models.SET_NULL, related_name="queues", help_text="By its name."
    )
    registered = models.BooleanField(
        default=False, help_text="Made here for an agent, with limits of its own on the broker; never deleted for it."
    )
    owner = models.ForeignKey(
        Owner,
        null=True,
        blank=True,
        on_delete=models.SET_NULL,
        related_name="agents_queues",
        help_text="By its vhost: whose agents registered it.",
    )

    ready = models.PositiveBigIntegerField(null=True, help_text="Messages; empty: unknown, which is not 0.")
    unacknowledged = models.PositiveBigIntegerField(null=True, help_text="Messages; empty: unknown, which is not 0.")
    state = models.CharField(max_length=10, choices=State.choices, default=State.OK)
    misses = models.PositiveSmallIntegerField(default=0, help_text="How many complete lists in a row lacked it.")
    delete_sent_at = models.DateTimeField(
        null=True, help_text="Set right before the broker is asked to delete it, so that a crash in between is seen."
    )

    over_unacked_since = models.DateTimeField(
        null=True,
        help_text="Since when every list shows it over its limit only with unacknowledged messages; see thresholds.",
    )

    consumers = models.PositiveIntegerField(
        null=True, help_text="At the last count, a minute ago at most; empty: unknown."
    )
    unattended_since = models.DateTimeField(null=True, help_text="Since when it is known to have no consumer.")
    unattended_told_at = models.DateTimeField(null=True, help_text="When its owners were told of that.")
    taken_out = models.PositiveBigIntegerField(
        null=True, help_text="Messages by the broker's own count, when some were waiting at the last count; else empty."
    )
    stalled_since = models.DateTimeField(
        null=True, help_text="Since when that count is the same, with messages waiting and consumers there."
    )
    stalled_told_at = models.DateTimeField(null=True, help_text="When its owners were told of that.")

    warn_length = models.PositiveIntegerField(null=True, blank=True, help_text="Its own, in messages.")
    max_length = models.PositiveIntegerField(null=True, blank=True, help_text="Its own, in messages.")
    unbounded = models.BooleanField(default=False, help_text="Warned about, never deleted.")

    said = models.CharField(
        max_length=10, choices=State.choices, default=State.OK, help_text="Where it stands by the last message sent."
    )
    quiet_until = models.DateTimeField(null=True, help_text="The end of the quiet period that a warning opened.")
    recovery_said = models.BooleanField(default=False, help_text="Whether this quiet period's one recovery went out.")
    folded = models.PositiveIntegerField(default=0, help_text="Changes in this quiet period that nobody was told of.")

    first_seen = models.DateTimeField()
    last_seen = models.DateTimeField(
        help_text="When the row was last written with the queue there. While its misses are 0 it is there now."
    )

    objects = QueueQuerySet.as_manager()

    class Meta:
        ordering = ["vhost", "name"]
        constraints = [models.UniqueConstraint(fields=["vhost", "name"], name="one_row_for_each_queue")]
        indexes = [models.Index(fields=["state"])]

    def __str__(self) -> str:
        return f"{self.name} in {self.vhost}"

    def clean(self) -> None:
        """Refuse thresholds by which it would be deleted before anybody is warned."""
        super().clean()
        check_thresholds(self.warn_length, self.max_length)

    @property
    def length(self) -> int | None:
        """Ready plus unacknowledged messages; None where either is unknown."""
        return length_of(self.ready, self.unacknowledged)


class QueueSample(models.Model):
    """The length of a queue at one moment, written when it changed. Old ones are thinned and pruned."""

    queue = models.ForeignKey(Queue, on_delete=models.CASCADE, related_name="samples", db_index=False)
    at = models.DateTimeField()
    length = models.PositiveBigIntegerField(help_text="Messages.")

    class Meta:
        indexes = [models.Index(fields=["queue", "at"]), models.Index(fields=["at"])]

    def __str__(self) -> str:
        return f"{self.length} at {self.at:%F %T}"


class QueueEvent(models.Model):
    """Something that happened to a queue. It outlives the queue's row."""

    class Kind(models.TextChoices):
        """What happened."""

        WARNED = "warned", "passed its warn length"
        RECOVERED = "recovered", "back below its warn length"
        CONDEMNED = "condemned", "passed its maximum: to be deleted after another look"
        KEPT = "kept", "kept after the second look"
        DELETED = "deleted", "deleted by Guardian"
        GONE = "gone", "no longer on the broker"
        RETURNED = "returned", "back on the broker"
        REMOVING = "removing", "about to be deleted by hand"
        REMOVED = "removed", "deleted by hand"
        PURGED = "purged", "emptied by hand"
        ADJUSTED = "adjusted", "given other limits"
        SKIPPED = "skipped", "left out when an event was published"
        REJECTED = "rejected", "full when an event was published"

    queue = models.ForeignKey(Queue, null=True, on_delete=models.SET_NULL, related_name="events")
    vhost = models.CharField(max_length=255)
    queue_name = models.CharField(max_length=255)
    kind = models.CharField(max_length=10, choices=Kind.choices)
    at = models.DateTimeField()
    by = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, help_text="Empty: Guardian itself."
    )
    details = models.JSONField(default=dict, help_text="The figures that it was decided by.")

    class Meta:
        ordering = ["-at", "-id"]
        indexes = [models.Index(fields=["queue", "-at"]), models.Index(fields=["-at"])]

    def __str__(self) -> str:
        return f"{self.queue_name} in {self.vhost}: {self.get_kind_display()}"


class Watch(models.Model):
    """What the monitor remembers from one pass to the next. There is one row."""

    id = models.PositiveSmallIntegerField(primary_key=True, default=1)
    failures = models.PositiveIntegerField(default=0, help_text="Passes in a row that could not ask the broker.")
    outage_since = models.DateTimeField(null=True, help_text="Since when it can't be listed, as operators know.")
    nodes = models.JSONField(default=list, help_text="The running nodes at the last complete list.")
    listed_at = models.DateTimeField(null=True, help_text="When the last complete list was taken.")
    exact_at = models.DateTimeField(null=True, help_text="When one was last taken with exact lengths.")
    short_lists = models.PositiveIntegerField(default=0, help_text="Lists in a row that lacked far too many queues.")
    short_told_at = models.DateTimeField(null=True, help_text="When operators last heard of a list far too short.")
    refused_since = models.DateTimeField(null=True, help_text="Since when the broker refuses to delete a queue.")
    unresponsive_since = models.DateTimeField(null=True, help_text="Since when a queue's process doesn't answer.")
    next_pass_at = models.DateTimeField(null=True, help_text="No pass before, because the broker is away.")
    brake_since = models.DateTimeField(null=True, help_text="Since when the brake on bulk deletion holds.")
    braked = models.PositiveIntegerField(default=0, db_default=0, help_text="Queues that the brake keeps.")
    released = models.JSONField(
        null=True, help_text="The queues that may go all the same, as an operator said: vhost and name of each."
    )
    released_at = models.DateTimeField(null=True, help_text="When an operator released the brake; empty: used up.")
    released_by = models.CharField(max_length=254, default="", db_default="", help_text="That operator's address.")
    exchanges_listed_at = models.DateTimeField(null=True)
    consumers_counted_at = models.DateTimeField(null=True, help_text="When consumers were last counted.")
    misnamed_exchanges = models.JSONField(default=list)
    thinned_by_minute = models.DateTimeField(null=True, help_text="Up to where samples are one a minute.")
    thinned_by_hour = models.DateTimeField(null=True, help_text="Up to where samples are one an hour.")

    def __str__(self) -> str:
        return "the monitor's memory"


class Pass(models.Model):
    """The report of one pass of the monitor. Old ones are pruned."""

    at = models.DateTimeField(help_text="When it began.")
    queues = models.PositiveIntegerField(default=0, help_text="Listed, without those that are left alone.")
    new = models.PositiveIntegerField(default=0)
    changed = models.PositiveIntegerField(default=0)
    gone = models.PositiveIntegerField(default=0)
    unknown = models.PositiveIntegerField(default=0, help_text="Of unknown length.")
    warned = models.PositiveIntegerField(default=0)
    recovered = models.PositiveIntegerField(default=0)
    deleted = models.PositiveIntegerField(default=0)
    kept = models.PositiveIntegerField(default=0, help_text="After the second look.")
    misnamed = models.PositiveIntegerField(default=0)
    unpatterned = models.PositiveIntegerField(default=0)
    misnamed_exchanges = models.PositiveIntegerField(default=0)
    brake_held = models.BooleanField(default=False)
    errors = models.JSONField(default=list, help_text="In words.")
    seconds = models.FloatField(default=0)
    listing_seconds = models.FloatField(default=0)

    class Meta:
        ordering = ["-at"]
        verbose_name_plural = "passes"
        indexes = [models.Index(fields=["-at"])]

    def __str__(self) -> str:
        return f"{self.at:%F %T}: {self.queues} queues in {self.seconds:.2f} s"
