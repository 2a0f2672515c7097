"""Offerings, agents, and the subscriptions and queues that agents registered."""

import uuid
from typing import Any, Self

from django.contrib.auth.models import AnonymousUser
from django.db import models

from accounts.models import AuthToken, Owner, visible_to
from agents import access
from core.fields import BrokerJSONField, BrokerNameField
from core.texts import check_line
from rabbit.permissions import Permissions, for_consumer, for_subscription

MAX_OFFERING_NAME_LENGTH = 150


def _hex() -> str:
    return uuid.uuid4().hex


class ObjectType(models.TextChoices):
    """The object types of events that released agents know."""

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
    def subscribed_by(self, visitor: Owner | AnonymousUser) -> "OfferingQuerySet":
        """Return the offerings that this visitor's agents may subscribe to: all for operators, else as a member."""
        return visible_to(self, visitor, access.may_register(visitor))

    def published_by(self, visitor: Owner | AnonymousUser) -> "OfferingQuerySet":
        """Return the offerings that this visitor may publish to: all for operators, else as a publisher."""
        return visible_to(self, visitor, access.may_publish(visitor))

    def seen_by(self, visitor: Owner | AnonymousUser) -> "OfferingQuerySet":
        """Return the offerings that this visitor may subscribe or publish to."""
        found = visible_to(self, visitor, access.may_register(visitor) | access.may_publish(visitor))
        return found if visitor.is_staff else found.distinct()


def may_subscribe(owner: str, offering: str) -> "models.ExpressionWrapper[models.Q]":
    """Return ``OfferingQuerySet.subscribed_by`` as an expression for the rows of a query, or as a condition.

    ``owner`` and ``offering`` are the rows' lookups.
    """
    members = Offering.members.through.objects.filter(
        offering=models.OuterRef(f"{offering}_id"), owner=models.OuterRef(f"{owner}_id")
    )
    may = models.Q(**{f"{owner}__is_active": True}) & (
        models.Q(**{f"{owner}__is_staff": True}) | models.Q(models.Exists(members))
    )
    return models.ExpressionWrapper(may, output_field=models.BooleanField())


def check_offering_name(name: str) -> None:
    check_line(name, MAX_OFFERING_NAME_LENGTH)


class Offering(models.Model):
    """A topic of events. Agents of its members subscribe to it; its publishers publish to it."""

    uuid = models.UUIDField("UUID", default=uuid.uuid4, unique=True)
    name = models.CharField(max_length=MAX_OFFERING_NAME_LENGTH, validators=[check_offering_name])
    members = models.ManyToManyField(
        Owner, blank=True, related_name="offerings", help_text="Owners whose agents may subscribe to its events."
    )
    publishers = models.ManyToManyField(
        Owner, blank=True, related_name="published_offerings", help_text="Owners who may publish its events."
    )
    created = models.DateTimeField(auto_now_add=True)

    objects = OfferingQuerySet.as_manager()

    class Meta:
        ordering = ["name", "uuid"]

    def __str__(self) -> str:
        return self.name


class AgentVhost(models.Model):
    """The vhost of an owner's agents, named after the owner's UUID. It is deleted with the owner."""

    OWNER_FIELD = "owner"

    owner = models.OneToOneField(Owner, on_delete=models.CASCADE, related_name="agent_vhost")
    name = models.CharField(max_length=255, unique=True)
    ready = models.BooleanField(default=False, help_text="Whether the broker has the vhost and its dead-letter queue.")
    created = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return self.name


class RegisteredQuerySet(models.QuerySet[Any]):
    def seen_by(self, visitor: Owner | AnonymousUser) -> Self:
        return visible_to(self, visitor, access.own_rows(self.model.OWNER_FIELD, visitor))


class AgentIdentity(models.Model):
    """An agent's identity for one offering."""

    OWNER_FIELD = "owner"

    uuid = models.UUIDField("UUID", default=uuid.uuid4, unique=True, editable=False)
    owner = models.ForeignKey(Owner, on_delete=models.CASCADE, related_name="agent_identities")
    offering = models.ForeignKey(Offering, on_delete=models.CASCADE, related_name="agent_identities")
    name = models.CharField(max_length=255)
    version = models.CharField(max_length=100, blank=True)
    dependencies = models.JSONField(default=list, help_text="[{package, version}], as sent by the agent.")
    config_file_path = models.CharField(max_length=500, blank=True)
    sealed_config = models.TextField(blank=True, editable=False, help_text="Encrypted, because it may contain secrets.")
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


class AgentService(models.Model):
    """A part of an agent, such as one that processes orders, as the agent reports it."""

    class State(models.TextChoices):
        """The states that agents know."""

        ACTIVE = "Active", "active"
        IDLE = "Idle", "idle"
        ERROR = "Error", "error"

    OWNER_FIELD = "identity__owner"

    uuid = models.UUIDField(default=uuid.uuid4, unique=True, editable=False)
    identity = models.ForeignKey(AgentIdentity, on_delete=models.CASCADE, related_name="services")
    name = models.CharField(max_length=255)
    mode = models.CharField(max_length=100, blank=True)
    state = models.CharField(max_length=10, choices=State.choices, default=State.ACTIVE)
    statistics = models.JSONField(default=dict, help_text="As sent by the agent.")
    created = models.DateTimeField(auto_now_add=True)
    modified = models.DateTimeField(auto_now=True)

    objects = RegisteredQuerySet.as_manager()

    class Meta:
        ordering = ["name", "id"]
        constraints = [models.UniqueConstraint(fields=["identity", "name"], name="one_service_of_a_name_for_an_agent")]

    def __str__(self) -> str:
        return self.name


class AgentProcessor(models.Model):
    """What a service of an agent runs on, as the agent reports it."""

    OWNER_FIELD = "service__identity__owner"

    uuid = models.UUIDField(default=uuid.uuid4, unique=True, editable=False)
    service = models.ForeignKey(AgentService, on_delete=models.CASCADE, related_name="processors")
    name = models.CharField(max_length=255)
    backend_type = models.CharField(max_length=100)
    backend_version = models.CharField(max_length=100, blank=True)
    last_run = models.DateTimeField(help_text="When the agent registered it last.")
    created = models.DateTimeField(auto_now_add=True)
    modified = models.DateTimeField(auto_now=True)

    objects = RegisteredQuerySet.as_manager()

    class Meta:
        ordering = ["name", "id"]
        constraints = [
            models.UniqueConstraint(fields=["service", "name"], name="one_processor_of_a_name_for_a_service")
        ]

    def __str__(self) -> str:
        return self.name


class Login(models.Model):
    """A RabbitMQ user that reads an owner's queues. Its password is a token of the owner."""

    token = models.ForeignKey(
        AuthToken,
        null=True,
        editable=False,
        on_delete=models.SET_NULL,
        related_name="+",
        help_text="The token that is the password, as far as known. Empty: there is no password.",
    )
    next_token = models.ForeignKey(
        AuthToken,
        null=True,
        editable=False,
        on_delete=models.SET_NULL,
        related_name="+",
        help_text="The token that is being set as the password. The broker may have it already.",
    )
    password_set = models.BooleanField(
        default=False, editable=False, help_text="Whether the broker has the password and the permissions."
    )
    created = models.DateTimeField(auto_now_add=True)
    modified = models.DateTimeField(auto_now=True)

    class Meta:
        abstract = True


class EventSubscription(Login):
    """A subscription of an owner's agent. Its RabbitMQ user is named after its UUID, and reads its queues."""

    OWNER_FIELD = "owner"

    uuid = models.UUIDField("UUID", default=uuid.uuid4, unique=True, editable=False)
    owner = models.ForeignKey(Owner, on_delete=models.CASCADE, related_name="event_subscriptions")
    identity = models.ForeignKey(
        AgentIdentity, null=True, blank=True, on_delete=models.CASCADE, related_name="event_subscriptions"
    )
    object_type = models.CharField(
        max_length=40,
        blank=True,
        choices=ObjectType.choices,
        help_text="An identity has one subscription for each type.",
    )
    description = models.CharField(max_length=500, blank=True)
    observable_objects = models.JSONField(default=list, help_text="[{object_type, object_id?, offering_uuid?}]")
    source_ip = models.GenericIPAddressField(
        "source IP", null=True, blank=True, help_text="The client's address at registration."
    )

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
        return self.uuid.hex

    @property
    def permissions(self) -> Permissions:
        return for_subscription(self.uuid.hex)


class Registration(models.TextChoices):
    """Whether a registered queue exists on the broker."""

    CREATING = "creating", "being created"
    READY = "ready", "ready"


MAX_ERROR_LENGTH = 500


class RegisteredQueue(models.Model):
    """A queue that an agent registered, and the last outcomes of publishing to it and of declaring it again."""

    vhost = BrokerNameField(max_length=255)
    queue_name = BrokerNameField(max_length=255)
    state = models.CharField(max_length=10, choices=Registration.choices, default=Registration.CREATING)
    last_delivered_at = models.DateTimeField(null=True, editable=False, help_text="When an event reached the queue.")
    last_error = models.CharField(
        max_length=MAX_ERROR_LENGTH,
        blank=True,
        db_default="",
        default="",
        editable=False,
        help_text="Why an event did not reach the queue, or why the queue could not be declared again.",
    )
    last_error_at = models.DateTimeField(null=True, editable=False)

    class Meta:
        abstract = True


class SubscriptionQueue(RegisteredQueue):
    """The queue of one subscription for events of one type about one offering."""

    OWNER_FIELD = "subscription__owner"

    uuid = models.UUIDField("UUID", default=uuid.uuid4, unique=True, editable=False)
    subscription = models.ForeignKey(EventSubscription, on_delete=models.CASCADE, related_name="queues")
    offering = models.ForeignKey(Offering, on_delete=models.CASCADE, related_name="subscription_queues")
    object_type = models.CharField(max_length=40, choices=ObjectType.choices)
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
        return str(self.queue_name)

    @property
    def owner(self) -> Owner:
        return self.subscription.owner

    @property
    def login(self) -> EventSubscription:
        return self.subscription


class Consumer(Login, RegisteredQueue):
    """An agent that reads all its events from one queue: its object types, its RabbitMQ user and its queue."""

    OWNER_FIELD = "identity__owner"

    uuid = models.UUIDField("UUID", default=uuid.uuid4, unique=True, editable=False)
    identity = models.OneToOneField(AgentIdentity, on_delete=models.CASCADE, related_name="consumer")
    object_types = models.JSONField(default=list, help_text="The types of its events. Empty: all types.")
    rmq_username = models.CharField("RabbitMQ user", max_length=32, unique=True, default=_hex, editable=False)

    objects = RegisteredQuerySet.as_manager()

    class Meta:
        ordering = ["-created", "-id"]
        constraints = [models.UniqueConstraint(fields=["vhost", "queue_name"], name="one_consumer_of_a_queue")]

    def __str__(self) -> str:
        return str(self.queue_name)

    @property
    def owner(self) -> Owner:
        return self.identity.owner

    @property
    def login(self) -> "Consumer":
        return self

    @property
    def permissions(self) -> Permissions:
        return for_consumer(self.uuid.hex)


REGISTERED: tuple[type[SubscriptionQueue] | type[Consumer], ...] = (SubscriptionQueue, Consumer)
"""The models of registered queues."""


class Sweep(models.Model):
    """The report of a sweep of orphans or a clean-up of stale subscriptions. Old reports are pruned."""

    class Kind(models.TextChoices):
        ORPHANS = "orphans", "orphaned queues"
        STALE = "stale", "stale subscriptions"

    kind = models.CharField(max_length=10, choices=Kind.choices)
    at = models.DateTimeField("started", help_text="When it started.")
    seen = models.PositiveIntegerField("queues", default=0, help_text="Queues in the agents' vhosts on the broker.")
    found = models.PositiveIntegerField("to delete", default=0, help_text="Queues to delete.")
    deleted = models.PositiveIntegerField(default=0, help_text="Deleted queues.")
    kept = models.PositiveIntegerField(default=0, help_text="Orphans in use, which were kept.")
    repaired = models.PositiveIntegerField("declared again", default=0, help_text="Queues that were declared again.")
    subscriptions = models.PositiveIntegerField(default=0, help_text="Removed stale subscriptions and consumers.")
    tokens = models.PositiveIntegerField(default=0, help_text="Removed expired tokens.")
    brake_held = models.BooleanField("deletions blocked", default=False)
    errors = BrokerJSONField(default=list, help_text="Error messages.")
    seconds = models.FloatField("duration (s)", default=0)

    class Meta:
        ordering = ["-at", "-id"]
        indexes = [models.Index(fields=["kind", "-at"])]

    def __str__(self) -> str:
        return f"{self.get_kind_display()}, {self.at:%F %T}"
