"""Guarded queues, their lengths and events, and the state and reports of the monitor.

The broker is the truth about what exists; these rows are the truth about what was listed and decided.
Longer than 500 lines, because Django looks for all models of an app in one module.
"""

import uuid
from datetime import datetime
from typing import Any

from django.conf import settings
from django.contrib.auth.models import AnonymousUser
from django.db import models
from django.utils import timezone

from accounts.models import Owner, PulseUser, check_thresholds, visible_to
from core.fields import BrokerJSONField, BrokerNameField
from queues.access import own_archives, own_queues
from rabbit.names import readable
from rabbit.snapshot import length_of

IS_BLOCKED = ~models.Q(block_reason="") & models.Q(unbounded=False)
"""Queues whose deletion waits for an operator. One that is kept keeps its ``block_reason`` until the next pass."""


class QueueQuerySet(models.QuerySet["Queue"]):
    def seen_by(self, visitor: Owner | AnonymousUser) -> "QueueQuerySet":
        """Return the queues that this visitor may see: all for an operator, their own for an owner, else none."""
        return visible_to(self, visitor, own_queues(visitor), pulse_user_field="pulse_user")

    def blocked(self) -> "QueueQuerySet":
        return self.filter(IS_BLOCKED)


class Queue(models.Model):
    """A RabbitMQ queue as last listed. A queue that is deleted and declared again keeps its row."""

    class State(models.TextChoices):
        """The state of a queue. ``queues.rules.thresholds.judge`` decides it."""

        OK = "ok", "healthy"
        WARNED = "warned", "over warning threshold"
        DELETING = "deleting", "about to be deleted"
        GONE = "gone", "gone"

    class DecidedFor(models.TextChoices):
        """Why a pass decided to delete a queue."""

        LENGTH = "length", "over its deletion limit"
        MEMORY = "memory", "over the limit that memory pressure lowered"
        NAME = "name", "its name breaks the namespace policy"

    class BlockReason(models.TextChoices):
        BRAKE = "brake", "too many at once"
        SETTINGS = "settings", "new settings or new broker"

    class LimitsPhase(models.TextChoices):
        ANNOUNCED = "announced", "their end was announced"
        KEPT = "kept", "kept after their end, because the queue is over the old ones"

    class Diagnosis(models.TextChoices):
        """Why a queue grows, or that nothing is wrong. ``queues.rules.diagnosis.diagnose`` decides it."""

        UNKNOWN = "unknown", "cause unknown"
        NO_CONSUMER = "no_consumer", "no consumers"
        REDELIVERING = "redelivering", "redelivering"
        HELD_BY_ONE = "held_by_one", "held by one"
        STALLED = "stalled", "stalled"
        LIMITED_BY_BROKER = "limited_by_broker", "dropping"
        CONSUMERS_TOO_SLOW = "consumers_too_slow", "too slow"
        DRAINING = "draining", "draining"
        HEALTHY = "healthy", "healthy"

    uuid = models.UUIDField("UUID", default=uuid.uuid4, unique=True, editable=False)
    vhost = BrokerNameField(max_length=255)
    name = BrokerNameField(max_length=255)
    type = models.CharField(max_length=255)
    durable = models.BooleanField()
    auto_delete = models.BooleanField()
    exclusive = models.BooleanField()
    node = models.CharField(max_length=255, blank=True, help_text="The node of the queue's leader, as last listed.")
    pulse_user = models.ForeignKey(
        PulseUser,
        null=True,
        blank=True,
        on_delete=models.SET_NULL,
        related_name="queues",
        help_text="Derived from the queue's name.",
    )
    registered = models.BooleanField(
        default=False,
        help_text="Declared for an agent. The broker limits its length; Guardian never deletes it for that.",
    )
    owner = models.ForeignKey(
        Owner,
        null=True,
        blank=True,
        on_delete=models.SET_NULL,
        related_name="agents_queues",
        help_text="Derived from the vhost: the owner whose agents registered the queue.",
    )

    ready = models.PositiveBigIntegerField(null=True, help_text="Messages; empty: unknown, which is not 0.")
    unacknowledged = models.PositiveBigIntegerField(null=True, help_text="Messages; empty: unknown, which is not 0.")
    state = models.CharField(max_length=10, choices=State.choices, default=State.OK)
    misses = models.PositiveSmallIntegerField(
        default=0, help_text="The number of complete lists in a row that lacked the queue."
    )
    delete_sent_at = models.DateTimeField(
        "deletion sent at",
        null=True,
        help_text="Set right before the delete request is sent, so that a crash in between is detected.",
    )

    decided_at = models.DateTimeField(null=True, help_text="When a pass last decided to delete the queue.")
    decided_for = models.CharField(
        max_length=10, choices=DecidedFor.choices, blank=True, default="", db_default="", help_text="Why it did."
    )
    decided_limit = models.PositiveIntegerField(null=True, help_text="The deletion limit by which it did, in messages.")
    is_released = models.BooleanField(
        default=False,
        db_default=False,
        help_text="Whether an operator released that deletion, so that the brake does not count it.",
    )
    outcome_at = models.DateTimeField(
        null=True, help_text="When the deleter last recorded an outcome. Lists that were begun before say nothing."
    )

    over_unacked_since = models.DateTimeField(
        null=True,
        help_text="Since when all lists show the queue over its limit only with unacknowledged messages.",
    )

    # Written before the first message is fetched, so that a crash counts.
    fetch_attempts = models.PositiveSmallIntegerField(
        default=0, db_default=0, help_text="Attempts to archive its messages that are under way or were interrupted."
    )
    attempted_at = models.DateTimeField(null=True, help_text="When the last attempt to archive its messages began.")
    returned_at = models.DateTimeField(
        null=True, help_text="When fetched messages were last returned to it, if that counts as a delivery."
    )

    block_reason = models.CharField(
        max_length=10,
        choices=BlockReason.choices,
        blank=True,
        default="",
        db_default="",
        help_text="Why Guardian does not delete it until an operator releases it; empty: its deletion is not blocked.",
    )

    bytes = models.PositiveBigIntegerField(
        null=True, help_text="Of the messages' bodies, as counted every minute; empty: unknown."
    )
    consumers = models.PositiveIntegerField(null=True, help_text="As counted every minute; empty: unknown.")
    unattended_since = models.DateTimeField(
        "without consumers since", null=True, help_text="When a count first found no consumer."
    )
    unattended_notified_at = models.DateTimeField(null=True, help_text="When the owners were notified of it.")
    acknowledged_total = models.PositiveBigIntegerField(
        null=True,
        help_text="The broker's count of acknowledged messages; empty: the queue had no messages.",
    )
    stalled_since = models.DateTimeField(
        null=True, help_text="Since when that count has not risen, with messages and consumers present."
    )
    stalled_notified_at = models.DateTimeField(null=True, help_text="When the owners were notified of it.")

    diagnosis = models.CharField(
        max_length=20,
        choices=Diagnosis.choices,
        blank=True,
        default="",
        db_default="",
        help_text="As of the last count of consumers; empty: not diagnosed.",
    )
    diagnosis_since = models.DateTimeField(null=True, help_text="Since when that has been the diagnosis.")
    activity = BrokerJSONField(
        null=True, help_text="The broker's figures that the diagnosis rests on, with their time, and the last consumer."
    )

    warn_length = models.PositiveIntegerField(
        "warning threshold", null=True, blank=True, help_text="In messages. Empty: the default applies."
    )
    max_length = models.PositiveIntegerField(
        "deletion limit", null=True, blank=True, help_text="In messages. Empty: the default applies."
    )
    unbounded = models.BooleanField(default=False, help_text="Warned about, never deleted for its length.")
    limits_until = models.DateTimeField(
        "limits end", null=True, blank=True, help_text="When its own limits end; empty: they don't."
    )
    limits_before = models.JSONField(null=True, help_text="Its own limits before. They return at that end.")
    limits_phase = models.CharField(
        max_length=10, choices=LimitsPhase.choices, blank=True, default="", db_default="", help_text="Of that end."
    )

    notified_state = models.CharField(
        max_length=10, choices=State.choices, default=State.OK, help_text="The state that the last message reported."
    )
    quiet_until = models.DateTimeField(null=True, help_text="The end of the quiet period that a warning opened.")
    recovery_notified = models.BooleanField(
        default=False, help_text="Whether this quiet period's one recovery was sent."
    )
    merged = models.PositiveIntegerField(
        db_column="folded", default=0, help_text="The changes in this quiet period that no message reported."
    )
    warned_since = models.DateTimeField(
        "over its warning threshold since", null=True, help_text="Empty: it is not over it."
    )
    reminded_at = models.DateTimeField(null=True, help_text="When owners were last reminded that it still is.")
    acknowledged_at = models.DateTimeField(
        null=True, help_text="When a warning was last acknowledged. One from before the present warning counts no more."
    )
    acknowledged_by = models.ForeignKey(Owner, null=True, on_delete=models.SET_NULL, related_name="+", db_index=False)

    last_call_limit = models.PositiveIntegerField(
        null=True, help_text="The deletion limit of the last call, in messages; empty: none was sent."
    )

    first_seen = models.DateTimeField()  # of the present queue: anew when it is declared after it was gone
    last_seen = models.DateTimeField(
        help_text="When the row was last written while the queue existed. With 0 misses the queue exists now."
    )

    objects = QueueQuerySet.as_manager()

    class Meta:
        ordering = ["vhost", "name"]
        constraints = [models.UniqueConstraint(fields=["vhost", "name"], name="one_row_for_each_queue")]
        indexes = [models.Index(fields=["state"])]

    def __str__(self) -> str:
        return f"{readable(self.name)} in {readable(self.vhost)}"

    @property
    def is_blocked(self) -> bool:
        return bool(self.block_reason) and not self.unbounded

    def clean(self) -> None:
        """Refuse a deletion limit below the warning threshold."""
        super().clean()
        check_thresholds(self.warn_length, self.max_length)

    @property
    def length(self) -> int | None:
        """Ready plus unacknowledged messages, or None if either is unknown."""
        return length_of(self.ready, self.unacknowledged)

    def new_event(self, kind: str, by: Owner | None = None, at: datetime | None = None, **details: Any) -> "QueueEvent":
        """Return an event of this queue, not yet saved, of now or this time."""
        at = at or timezone.now()
        return QueueEvent(queue=self, vhost=self.vhost, queue_name=self.name, kind=kind, at=at, by=by, details=details)


class QueueSample(models.Model):
    """The length of a queue from one moment on, written when it changes. Old samples are thinned and pruned."""

    queue = models.ForeignKey(Queue, on_delete=models.CASCADE, related_name="samples", db_index=False)
    at = models.DateTimeField()
    length = models.PositiveBigIntegerField(help_text="Messages.")

    class Meta:
        indexes = [models.Index(fields=["queue", "at"]), models.Index(fields=["at"])]

    def __str__(self) -> str:
        return f"{self.length} at {self.at:%F %T}"


class QueueEvent(models.Model):
    """An event in the life of a queue. It is kept when the queue's row is deleted."""

    class Kind(models.TextChoices):
        WARNED = "warned", "reached its warning threshold"
        LAST_CALL = "last_call", "last call before its deletion"
        RECOVERED = "recovered", "back to normal"
        DELETABLE = "condemned", "over its deletion limit"
        KEPT = "kept", "kept after a recheck"
        DELETED = "deleted", "deleted by Guardian"
        GONE = "gone", "no longer on the broker"
        RETURNED = "returned", "back on the broker"
        REMOVING = "removing", "deletion requested"
        REMOVED = "removed", "deleted"
        PURGED = "purged", "purged"
        ADJUSTED = "adjusted", "limits changed"
        RESTORED = "restored", "restore started"
        LIMITS_ENDED = "ended", "temporary limits ended"
        LIMITS_KEPT = "prolonged", "temporary limits kept, as it is over the old ones"
        ASKED = "asked", "higher limit requested"
        DECLINED = "declined", "higher limit declined"
        ACKNOWLEDGED = "acked", "warning acknowledged"
        SKIPPED = "skipped", "skipped when an event was published"
        REJECTED = "rejected", "full when an event was published"

    queue = models.ForeignKey(Queue, null=True, on_delete=models.SET_NULL, related_name="events")
    vhost = BrokerNameField(max_length=255)
    queue_name = BrokerNameField(max_length=255)
    kind = models.CharField(max_length=10, choices=Kind.choices)
    at = models.DateTimeField()
    by = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, help_text="Empty: Guardian itself."
    )
    details = BrokerJSONField(default=dict, help_text="The figures behind the decision.")
    dismissed_by = models.ManyToManyField(
        settings.AUTH_USER_MODEL, related_name="+", help_text="The owners whose front page no longer shows a deletion."
    )

    class Meta:
        ordering = ["-at", "-id"]
        indexes = [models.Index(fields=["queue", "-at"]), models.Index(fields=["-at"])]

    def __str__(self) -> str:
        return f"{readable(self.queue_name)} in {readable(self.vhost)}: {self.get_kind_display()}"


class ArchiveQuerySet(models.QuerySet["Archive"]):
    def seen_by(self, visitor: Owner | AnonymousUser) -> "ArchiveQuerySet":
        """Return the kept archives that this visitor may see: all for an operator, their own for an owner."""
        kept = self.filter(state=Archive.State.KEPT)
        return visible_to(kept, visitor, own_archives(visitor), pulse_user_field="pulse_user")

    def of_deletions(self) -> "ArchiveQuerySet":
        """Return the archives of queues that were deleted, not purged or kept."""
        return self.exclude(reason__in=[Archive.Reason.PURGED, Archive.Reason.CALLED_OFF])

    def of_last_deletion(self) -> "ArchiveQuerySet":
        """Return the archives of the last deletions of queues that are gone, not of earlier ones."""
        return self.of_deletions().filter(queue__state=Queue.State.GONE, created__gte=models.F("queue__first_seen"))


class Archive(models.Model):
    """The messages of a queue that was deleted, purged or fetched to be deleted, kept for its owners for a while."""

    class Reason(models.TextChoices):
        LENGTH = "length", "over its deletion limit"
        NAME = "name", "deleted for its name"
        PULSE_USER = "account", "deleted with its Pulse user"
        DELETED = "deleted", "deleted by a person"
        PURGED = "purged", "purged by a person"
        CALLED_OFF = "called_off", "its deletion was called off"

    class State(models.TextChoices):
        """The states of an archive. Only a kept one is shown."""

        OPEN = "open", "being written"
        FETCHED = "fetched", "complete, and the queue not yet deleted"
        KEPT = "kept", "kept"
        FAILED = "failed", "failed; it has no messages"

    uuid = models.UUIDField("UUID", default=uuid.uuid4, unique=True, editable=False)
    queue = models.ForeignKey(Queue, null=True, on_delete=models.SET_NULL, related_name="archives")
    pulse_user = models.ForeignKey(
        PulseUser,
        null=True,
        on_delete=models.SET_NULL,
        related_name="archives",
        help_text="Its owners may see it; empty: only operators.",
    )
    vhost = BrokerNameField(max_length=255)
    queue_name = BrokerNameField(max_length=255)
    reason = models.CharField(max_length=10, choices=Reason.choices)
    state = models.CharField(max_length=10, choices=State.choices, default=State.OPEN)
    messages = models.PositiveIntegerField(default=0)
    bytes = models.PositiveBigIntegerField(default=0, help_text="Of the bodies.")
    stored_bytes = models.PositiveBigIntegerField(default=0, help_text="Of the compressed chunks.")
    dropped = models.PositiveBigIntegerField(default=0, help_text="Ready messages that were deleted without a copy.")
    held = models.PositiveBigIntegerField(
        default=0, help_text="About how many messages were held by consumers, and deleted without a copy."
    )
    error = models.CharField(max_length=300, blank=True, db_default="", default="", help_text="Why it failed.")
    type = models.CharField(max_length=255, null=True, help_text="Of the queue; empty, like the next four: unknown.")  # noqa: DJ001 - unknown is no type
    durable = models.BooleanField(null=True)
    auto_delete = models.BooleanField(null=True)
    arguments = BrokerJSONField(null=True)
    bindings = BrokerJSONField(
        null=True, help_text="Exchange, routing key and arguments of each, without that to the default exchange."
    )
    by = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, help_text="Empty: Guardian itself."
    )
    created = models.DateTimeField()
    expires = models.DateTimeField()

    objects = ArchiveQuerySet.as_manager()

    class Meta:
        ordering = ["-created", "-id"]
        indexes = [models.Index(fields=["vhost", "queue_name"]), models.Index(fields=["expires"])]

    def __str__(self) -> str:
        return f"{self.messages} messages of {readable(self.queue_name)} in {readable(self.vhost)}"


class ArchiveChunk(models.Model):
    """Some consecutive messages of an archive, as ``queues.archives.chunks`` packs them."""

    archive = models.ForeignKey(Archive, on_delete=models.CASCADE, related_name="chunks")
    first = models.PositiveIntegerField(help_text="The position of its first message; the archive's first is 1.")
    count = models.PositiveIntegerField()
    data = models.BinaryField()

    class Meta:
        ordering = ["archive", "first"]
        constraints = [models.UniqueConstraint(fields=["archive", "first"], name="one_chunk_at_a_position")]

    def __str__(self) -> str:
        return f"{self.count} messages from {self.first} on"


class Sending(models.Model):
    """Messages that are published to a queue or an exchange. A task carries it out in steps."""

    class State(models.TextChoices):
        RUNNING = "running", "running"
        DONE = "done", "done"
        STOPPED = "stopped", "stopped"
        FAILED = "failed", "failed"

    uuid = models.UUIDField("UUID", default=uuid.uuid4, unique=True, editable=False)
    to_queue = BrokerNameField(max_length=255, blank=True)
    to_exchange = BrokerNameField(max_length=255, blank=True)
    state = models.CharField(max_length=10, choices=State.choices, default=State.RUNNING)
    sent = models.PositiveIntegerField(default=0, help_text="Messages that the broker confirmed.")
    in_flight = models.PositiveIntegerField(
        default=0, help_text="The size of the batch that is being sent. After a crash these may arrive twice."
    )
    repeated = models.PositiveIntegerField(default=0, help_text="Messages that may have arrived twice.")
    error = models.CharField(max_length=300, blank=True)
    by = models.ForeignKey(settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL)
    created = models.DateTimeField()
    finished = models.DateTimeField(null=True)

    class Meta:
        abstract = True
        ordering = ["-created", "-id"]
        indexes = [models.Index(fields=["state"])]


class Replay(Sending):
    """The publication of an archive's messages."""

    archive = models.ForeignKey(Archive, on_delete=models.CASCADE, related_name="replays")
    first = models.PositiveIntegerField(help_text="The position of the first message to send.")
    last = models.PositiveIntegerField(help_text="The position of the last message to send.")
    rate = models.PositiveIntegerField(null=True, help_text="Messages a second; empty: as fast as possible.")
    restore = BrokerJSONField(
        null=True, help_text="What a restore declares, and what it leaves out; empty: only messages are sent."
    )
    declared_at = models.DateTimeField(null=True, help_text="When a restore had declared and bound its queue.")

    def __str__(self) -> str:
        return f"{self.sent} of {self.total} messages to {readable(self.to_queue or self.to_exchange)}"

    @property
    def total(self) -> int:
        return self.last - self.first + 1

    @property
    def is_declaring(self) -> bool:
        """Whether its queue is to be declared before the first message."""
        return bool(self.restore and self.restore["declares"] and self.declared_at is None)


class Move(Sending):
    """Messages of a live queue on their way to a target, or back to where they died."""

    queue = models.ForeignKey(Queue, on_delete=models.CASCADE, related_name="moves", help_text="The source.")
    routing_key = BrokerNameField(
        max_length=255, null=True, help_text="For the exchange; empty: each message keeps its own."
    )
    to_origin = models.BooleanField(default=False, help_text="Whether each message goes back to where it died.")
    groups = BrokerJSONField(
        null=True, help_text="The confirmed groups: exchange, routing key, reason and queue of each; empty: all."
    )
    is_copy = models.BooleanField(default=False, help_text="Whether the messages stay in the source, too.")
    total = models.PositiveIntegerField(help_text="At most the messages that were ready when it began.")
    kept = models.PositiveIntegerField(default=0, help_text="Messages that stay, because they are in no sent group.")

    class Meta(Sending.Meta):
        constraints = [
            models.UniqueConstraint(
                fields=["queue"], condition=models.Q(state="running"), name="one_running_move_of_a_queue"
            )
        ]

    def __str__(self) -> str:
        return f"{self.sent} of {self.total} messages"


class MessageWatch(models.Model):
    """Copies of messages that an owner watches: of an exchange, or of a queue's bindings. No message is stored."""

    uuid = models.UUIDField("UUID", default=uuid.uuid4, unique=True, editable=False)
    owner = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="+")
    vhost = BrokerNameField(max_length=255)
    exchange = BrokerNameField(max_length=255, blank=True)
    routing_key = BrokerNameField(max_length=255, blank=True)
    queue = models.ForeignKey(Queue, null=True, on_delete=models.CASCADE, related_name="+")
    ends = models.DateTimeField()
    polled_at = models.DateTimeField()
    fetched = models.PositiveBigIntegerField(default=0, help_text="Messages that were shown.")
    missed = models.PositiveBigIntegerField(null=True, help_text="Messages that were dropped; empty: unknown.")

    def __str__(self) -> str:
        return str(self.queue) if self.queue else f"{readable(self.exchange)} in {readable(self.vhost)}"


class Watch(models.Model):
    """The state that the monitor keeps between passes: a single row."""

    id = models.PositiveSmallIntegerField(primary_key=True, default=1)
    failures = models.PositiveIntegerField(default=0, help_text="Passes in a row that could not reach the broker.")
    outage_since = models.DateTimeField(null=True, help_text="When the reported outage of the broker began.")
    nodes = models.JSONField(default=list, help_text="The running nodes at the last complete list.")
    cluster = models.CharField(
        max_length=255, default="", db_default="", help_text="The id of the cluster that was last listed."
    )
    listed_at = models.DateTimeField(null=True, help_text="When the last complete list was fetched.")
    exact_at = models.DateTimeField(null=True, help_text="When a list with exact lengths was last fetched.")
    short_lists = models.PositiveIntegerField(default=0, help_text="Lists in a row that lacked too many queues.")
    short_notified_at = models.DateTimeField(
        null=True, help_text="When operators were last notified of a list that is too short."
    )
    refused_since = models.DateTimeField(null=True, help_text="When the broker began to refuse to delete a queue.")
    deleter_since = models.DateTimeField(null=True, help_text="Since when the deleter has run without a gap.")
    deleter_seen_at = models.DateTimeField(null=True, help_text="When the deleter last ran.")
    late_since = models.DateTimeField(null=True, help_text="Since when a recorded deletion has waited for too long.")
    unresponsive_since = models.DateTimeField(null=True, help_text="When a queue's process stopped responding.")
    next_pass_at = models.DateTimeField(
        null=True, help_text="The earliest time of the next pass, after the broker could not be reached."
    )
    deletion_settings = BrokerJSONField(
        null=True, help_text="The settings that decide which queues are deleted, as of the last complete list."
    )
    brake_since = models.DateTimeField(null=True, help_text="Since when deletions are blocked.")
    blocked = models.PositiveIntegerField(
        db_column="braked",
        default=0,
        db_default=0,
        help_text="The number of queues to delete whose deletion is blocked.",
    )
    released = BrokerJSONField(null=True, help_text="The queues that an operator released: vhost and name of each.")
    released_at = models.DateTimeField(
        null=True, help_text="When an operator released the brake; empty: no release is open."
    )
    released_by = models.CharField(
        max_length=254, default="", db_default="", help_text="The operator's e-mail address."
    )
    alarms = models.JSONField(
        null=True, help_text="The raised alarms and the lost nodes: resource, node, and since when."
    )
    recovering = models.JSONField(
        db_column="settling", null=True, help_text="The nodes that came back a moment ago, and when."
    )
    exchanges_listed_at = models.DateTimeField(null=True)
    consumers_counted_at = models.DateTimeField(null=True, help_text="When consumers were last counted.")
    misnamed_exchanges = BrokerJSONField(default=list)
    unguarded = BrokerJSONField(
        default=dict, db_default={}, help_text="The queues that Guardian can't bound, by the reason."
    )
    relieved_at = models.DateTimeField(null=True, help_text="When queues were last deleted for their memory.")
    thinned_by_minute = models.DateTimeField(
        null=True, help_text="Samples before this time are thinned to one a minute."
    )
    thinned_by_hour = models.DateTimeField(null=True, help_text="Samples before this time are thinned to one an hour.")

    class Meta:
        verbose_name = verbose_name_plural = "monitor state"

    def __str__(self) -> str:
        return "the monitor's state"

    @classmethod
    def current(cls) -> "Watch":
        """Return the stored state, or the initial one before the first pass."""
        return cls.objects.filter(id=1).first() or cls()


class Pass(models.Model):
    """The report of one pass of the monitor. Old ones are pruned."""

    at = models.DateTimeField("started", help_text="When the pass started.")
    queues = models.PositiveIntegerField(default=0, help_text="Listed queues, without the ignored ones.")
    new = models.PositiveIntegerField(default=0)
    changed = models.PositiveIntegerField(default=0)
    gone = models.PositiveIntegerField(default=0)
    unknown = models.PositiveIntegerField(default=0, help_text="Queues of unknown length.")
    warned = models.PositiveIntegerField(default=0)
    recovered = models.PositiveIntegerField(default=0)
    deleted = models.PositiveIntegerField(default=0)
    kept = models.PositiveIntegerField(default=0, help_text="Kept after the recheck.")
    misnamed = models.PositiveIntegerField(default=0)
    unpatterned = models.PositiveIntegerField(default=0)
    misnamed_exchanges = models.PositiveIntegerField(default=0)
    brake_held = models.BooleanField("deletions blocked", default=False)
    errors = BrokerJSONField(default=list, help_text="Error messages.")
    seconds = models.FloatField("duration (s)", default=0)
    listing_seconds = models.FloatField("duration of the list (s)", default=0)

    class Meta:
        ordering = ["-at"]
        verbose_name_plural = "passes"
        indexes = [models.Index(fields=["-at"])]

    def __str__(self) -> str:
        return f"{self.at:%F %T}: {self.queues} queues in {self.seconds:.2f} s"
