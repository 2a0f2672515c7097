"""What is guarded, what happened to it, what people are to be told, and what agents registered.

The broker is the truth about what exists; these rows are the truth about what was seen and decided.
"""

import uuid
from typing import Any, Self

from django.conf import settings
from django.contrib.auth.models import AnonymousUser
from django.db import models
from django.db.models.functions import Now

from accounts.models import AuthToken, Owner, PulseUser, check_line, check_thresholds
from rabbit.permissions import Permissions, for_consumer, for_subscription

LONGEST_OFFERING_NAME = 150


def _hex() -> str:
    return uuid.uuid4().hex


class QueueQuerySet(models.QuerySet["Queue"]):
    """Queues, as different people see them."""

    def seen_by(self, visitor: Owner | AnonymousUser) -> "QueueQuerySet":
        """Return the queues that this visitor may see: an operator all, an owner their own, nobody else any."""
        if visitor.is_staff:
            return self.all()
        if not visitor.is_authenticated:
            return self.none()
        return self.filter(models.Q(pulse_user__in=visitor.pulse_users.all()) | models.Q(owner=visitor))


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
        if self.ready is None or self.unacknowledged is None:
            return None
        return self.ready + self.unacknowledged


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


class ObjectType(models.TextChoices):
    """What an event is about. These are the types that agents know."""

    CALL = "call"
    COURSE_ACCOUNT = "course_account"
    IMPORTABLE_RESOURCES = "importable_resources"
    OFFERING_RESOURCES_SYNC = "offering_resources_sync"
    OFFERING_USER = "offering_user"
    ORDER = "order"
    PROPOSAL = "proposal"
    RESOURCE = "resource"
    RESOURCE_API_KEY_ROTATION = "resource_api_key_rotation"
    RESOURCE_END_DATE_CHANGE_REQUEST = "resource_end_date_change_request"
    RESOURCE_PERIODIC_LIMITS = "resource_periodic_limits"
    SERVICE_ACCOUNT = "service_account"
    SERVICE_PROVIDER_ACCOUNT = "service_provider_account"
    SERVICE_PROVIDER_PROJECT_GROUP = "service_provider_project_group"
    USER_LIFECYCLE = "user_lifecycle"
    USER_PROFILE = "user_profile"
    USER_ROLE = "user_role"
    USER_SSH_KEY = "user_ssh_key"


class OfferingQuerySet(models.QuerySet["Offering"]):
    """Offerings, as different people may use them."""

    def subscribed_by(self, visitor: Owner | AnonymousUser) -> "OfferingQuerySet":
        """Return those whose events this visitor's agents may have: an operator all, an owner as a member."""
        if visitor.is_staff:
            return self.all()
        return self.filter(members=visitor) if visitor.is_authenticated else self.none()

    def published_by(self, visitor: Owner | AnonymousUser) -> "OfferingQuerySet":
        """Return those that this visitor may publish events of: an operator all, an owner as a publisher."""
        if visitor.is_staff:
            return self.all()
        return self.filter(publishers=visitor) if visitor.is_authenticated else self.none()

    def seen_by(self, visitor: Owner | AnonymousUser) -> "OfferingQuerySet":
        """Return those that this visitor may subscribe to or publish to."""
        if visitor.is_staff:
            return self.all()
        if not visitor.is_authenticated:
            return self.none()
        return self.filter(models.Q(members=visitor) | models.Q(publishers=visitor)).distinct()


def check_offering_name(name: str) -> None:
    """Make sure that an offering can have this name.

    Raises:
        ValidationError: it can't.
    """
    check_line(name, LONGEST_OFFERING_NAME)


class Offering(models.Model):
    """What events are about: agents subscribe to it, others publish to it."""

    uuid = models.UUIDField(default=uuid.uuid4, unique=True)
    name = models.CharField(max_length=LONGEST_OFFERING_NAME, validators=[check_offering_name])
    members = models.ManyToManyField(
        Owner, blank=True, related_name="offerings", help_text="Whose agents may have its events."
    )
    publishers = models.ManyToManyField(
        Owner, blank=True, related_name="published_offerings", help_text="Who may publish its events."
    )
    created = models.DateTimeField(auto_now_add=True)

    objects = OfferingQuerySet.as_manager()

    class Meta:
        ordering = ["name", "uuid"]

    def __str__(self) -> str:
        return self.name


class AgentVhost(models.Model):
    """The vhost of an owner's agents, named after the owner. It goes with the owner."""

    owner = models.OneToOneField(Owner, on_delete=models.CASCADE, related_name="agent_vhost")
    name = models.CharField(max_length=255, unique=True)
    ready = models.BooleanField(default=False, help_text="Whether the broker has it, with its dead-letter queue.")
    created = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return self.name


class RegisteredQuerySet(models.QuerySet[Any]):
    """What agents registered, as different people see it."""

    def seen_by(self, visitor: Owner | AnonymousUser) -> Self:
        """Return what this visitor may see: an operator all, an owner their own, nobody else any."""
        if visitor.is_staff:
            return self.all()
        return self.filter(**{self.model.OWNED_BY: visitor}) if visitor.is_authenticated else self.none()


class AgentIdentity(models.Model):
    """An agent, as it introduces itself for one offering."""

    OWNED_BY = "owner"
    """The way from it to its owner."""

    uuid = models.UUIDField(default=uuid.uuid4, unique=True, editable=False)
    owner = models.ForeignKey(Owner, on_delete=models.CASCADE, related_name="agent_identities")
    offering = models.ForeignKey(Offering, on_delete=models.CASCADE, related_name="agent_identities")
    name = models.CharField(max_length=255)
    version = models.CharField(max_length=100, blank=True)
    dependencies = models.JSONField(default=list, help_text="[{package, version}], as the agent tells them.")
    config_file_path = models.CharField(max_length=500, blank=True)
    sealed_config = models.TextField(
        blank=True, editable=False, help_text="There may be secrets in it, so it is sealed."
    )
    last_restarted = models.DateTimeField(null=True, blank=True)
    created = models.DateTimeField(auto_now_add=True)
    modified = models.DateTimeField(auto_now=True)

    objects = RegisteredQuerySet.as_manager()

    class Meta:
        ordering = ["name", "id"]
        verbose_name_plural = "agent identities"
        constraints = [
            models.UniqueConstraint(fields=["owner", "offering", "name"], name="one_identity_of_a_name_for_an_offering")
        ]

    def __str__(self) -> str:
        return self.name


class Login(models.Model):
    """What may log in to the broker to read an owner's queues: a RabbitMQ user whose password is a token."""

    token = models.ForeignKey(
        AuthToken,
        null=True,
        editable=False,
        on_delete=models.SET_NULL,
        related_name="+",
        help_text="The one that is the password, as far as is known. Empty: it has none.",
    )
    next_token = models.ForeignKey(
        AuthToken,
        null=True,
        editable=False,
        on_delete=models.SET_NULL,
        related_name="+",
        help_text="The one that is about to be the password, and may be already.",
    )
    password_set = models.BooleanField(
        default=False, editable=False, help_text="Whether the broker has that password and the permissions."
    )
    created = models.DateTimeField(auto_now_add=True)
    modified = models.DateTimeField(auto_now=True)

    class Meta:
        abstract = True


class EventSubscription(Login):
    """What an owner's agent wants to hear of. Its RabbitMQ user is named after its UUID, and reads its queues."""

    OWNED_BY = "owner"
    """The way from it to its owner."""

    uuid = models.UUIDField(default=uuid.uuid4, unique=True, editable=False)
    owner = models.ForeignKey(Owner, on_delete=models.CASCADE, related_name="event_subscriptions")
    identity = models.ForeignKey(
        AgentIdentity, null=True, blank=True, on_delete=models.CASCADE, related_name="event_subscriptions"
    )
    object_type = models.CharField(
        max_length=40, blank=True, choices=ObjectType.choices, help_text="An identity has one subscription for each."
    )
    description = models.CharField(max_length=500, blank=True)
    observable_objects = models.JSONField(default=list, help_text="[{object_type, object_id?, offering_uuid?}]")
    source_ip = models.GenericIPAddressField(null=True, blank=True, help_text="Where it was registered from.")

    objects = RegisteredQuerySet.as_manager()

    class Meta:
        ordering = ["-created", "-id"]
        constraints = [
            models.UniqueConstraint(fields=["identity", "object_type"], name="one_subscription_of_a_type_for_an_agent")
        ]

    def __str__(self) -> str:
        return self.uuid.hex

    @property
    def rmq_username(self) -> str:
        """The name of its RabbitMQ user."""
        return self.uuid.hex

    @property
    def permissions(self) -> Permissions:
        """What its RabbitMQ user may do in the vhost of its owner's agents."""
        return for_subscription(self.uuid.hex)


class Registration(models.TextChoices):
    """Whether a registered queue is on the broker."""

    CREATING = "creating", "being made"
    READY = "ready", "ready"


class SubscriptionQueue(models.Model):
    """The queue of one subscription for the events of one type about one offering."""

    OWNED_BY = "subscription__owner"
    """The way from it to its owner."""

    uuid = models.UUIDField(default=uuid.uuid4, unique=True, editable=False)
    subscription = models.ForeignKey(EventSubscription, on_delete=models.CASCADE, related_name="queues")
    offering = models.ForeignKey(Offering, on_delete=models.CASCADE, related_name="subscription_queues")
    object_type = models.CharField(max_length=40, choices=ObjectType.choices)
    vhost = models.CharField(max_length=255)
    queue_name = models.CharField(max_length=255)
    state = models.CharField(max_length=10, choices=Registration.choices, default=Registration.CREATING)
    created = models.DateTimeField(auto_now_add=True)

    objects = RegisteredQuerySet.as_manager()

    class Meta:
        ordering = ["-created", "-id"]
        constraints = [
            models.UniqueConstraint(
                fields=["subscription", "offering", "object_type"], name="one_queue_for_subscription_offering_and_type"
            ),
            models.UniqueConstraint(fields=["vhost", "queue_name"], name="one_registration_of_a_queue"),
        ]
        indexes = [models.Index(fields=["offering", "object_type"])]

    def __str__(self) -> str:
        return self.queue_name

    @property
    def owner(self) -> Owner:
        """The owner of its subscription."""
        return self.subscription.owner

    @property
    def login(self) -> EventSubscription:
        """What logs in to read it."""
        return self.subscription


class Consumer(Login):
    """The one queue of an agent that reads everything from one: its types, its RabbitMQ user, its queue."""

    OWNED_BY = "identity__owner"
    """The way from it to its owner."""

    uuid = models.UUIDField(default=uuid.uuid4, unique=True, editable=False)
    identity = models.OneToOneField(AgentIdentity, on_delete=models.CASCADE, related_name="consumer")
    object_types = models.JSONField(default=list, help_text="The types that it gets; none: all.")
    rmq_username = models.CharField(max_length=32, unique=True, default=_hex, editable=False)
    vhost = models.CharField(max_length=255)
    queue_name = models.CharField(max_length=255)
    state = models.CharField(max_length=10, choices=Registration.choices, default=Registration.CREATING)

    objects = RegisteredQuerySet.as_manager()

    class Meta:
        ordering = ["-created", "-id"]
        constraints = [models.UniqueConstraint(fields=["vhost", "queue_name"], name="one_consumer_of_a_queue")]

    def __str__(self) -> str:
        return self.queue_name

    @property
    def owner(self) -> Owner:
        """The owner of its agent."""
        return self.identity.owner

    @property
    def login(self) -> "Consumer":
        """What logs in to read it: itself."""
        return self

    @property
    def permissions(self) -> Permissions:
        """What its RabbitMQ user may do in the vhost of its owner's agents."""
        return for_consumer(self.uuid.hex)


class Removal(models.Model):
    """What is to go from the broker, since the row that stood for it is gone. Worked off in ``queues/removals.py``."""

    class Kind(models.TextChoices):
        """What is to go, in the order in which it goes."""

        PASSWORD = "password", "a RabbitMQ user's password"
        USER = "user", "a RabbitMQ user"
        VHOST = "vhost", "a vhost, with all there is in it"
        QUEUE = "queue", "a queue"

    kind = models.CharField(max_length=10, choices=Kind.choices)
    vhost = models.CharField(max_length=255, blank=True, help_text="Of a queue.")
    name = models.CharField(max_length=255)
    if_unused = models.BooleanField(default=False, help_text="Only while nobody reads from it.")
    created = models.DateTimeField(auto_now_add=True)
    due_at = models.DateTimeField(db_default=Now(), help_text="Nobody is at it, and it may be tried, from here on.")
    claim = models.UUIDField(null=True, help_text="Who is at it.")
    attempts = models.PositiveIntegerField(default=0)
    last_error = models.CharField(max_length=300, blank=True)

    class Meta:
        ordering = ["id"]
        constraints = [models.UniqueConstraint(fields=["kind", "vhost", "name"], name="one_removal_of_a_thing")]
        indexes = [models.Index(fields=["due_at"])]

    def __str__(self) -> str:
        return f"{self.get_kind_display()}: {self.name}"


class Sweep(models.Model):
    """The report of one sweep of orphans, or of one clean-up of stale subscriptions. Old ones are pruned."""

    class Kind(models.TextChoices):
        """Which."""

        ORPHANS = "orphans", "queues that no registration stands for"
        STALE = "stale", "subscriptions whose owner has no live token"

    kind = models.CharField(max_length=10, choices=Kind.choices)
    at = models.DateTimeField(help_text="When it began.")
    seen = models.PositiveIntegerField(default=0, help_text="Queues on the broker, in the agents' vhosts.")
    found = models.PositiveIntegerField(default=0, help_text="Queues to be deleted.")
    deleted = models.PositiveIntegerField(default=0, help_text="Queues.")
    kept = models.PositiveIntegerField(default=0, help_text="Orphans that somebody reads from.")
    repaired = models.PositiveIntegerField(default=0, help_text="Queues that were made again.")
    subscriptions = models.PositiveIntegerField(default=0, help_text="Stale subscriptions and consumers that went.")
    tokens = models.PositiveIntegerField(default=0, help_text="Expired tokens whose rows went.")
    brake_held = models.BooleanField(default=False)
    errors = models.JSONField(default=list, help_text="In words.")
    seconds = models.FloatField(default=0)

    class Meta:
        ordering = ["-at", "-id"]
        indexes = [models.Index(fields=["kind", "-at"])]

    def __str__(self) -> str:
        return f"{self.get_kind_display()}, {self.at:%F %T}"


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
