"""Owners, their tokens, and their RabbitMQ accounts ("Pulse users").

The broker is the truth about which accounts exist; these rows are the truth about who owns them.
"""

import uuid
from typing import Any, ClassVar

from django.conf import settings
from django.contrib.auth.base_user import AbstractBaseUser, BaseUserManager
from django.contrib.auth.models import PermissionsMixin
from django.core.exceptions import ValidationError
from django.db import models
from django.db.models.functions import Lower
from django.utils import timezone
from knox.models import AbstractAuthToken


class OwnerQuerySet(BaseUserManager["Owner"]):
    """Owners are found and made by their e-mail address, whatever its case."""

    def get_by_natural_key(self, username: str | None) -> "Owner":
        """Return the owner with this address."""
        return self.get(email=normal_address(username or ""))

    def create_user(self, email: str, password: str | None = None, **fields: Any) -> "Owner":
        """Make an owner. Without a password there is no signing in by password, which is the rule."""
        owner = self.model(email=normal_address(email), **fields)
        owner.set_password(password)
        owner.full_clean(exclude=["password"])
        owner.save(using=self._db)
        return owner

    def create_superuser(self, email: str, password: str | None = None, **fields: Any) -> "Owner":
        """Make an operator who may do everything in the admin."""
        return self.create_user(email, password, is_staff=True, is_superuser=True, vouched=True, **fields)


def normal_address(email: str) -> str:
    """Return the form that an e-mail address is stored and compared in: trimmed and lower-cased."""
    return email.strip().lower()


def check_thresholds(warn: int | None, most: int | None) -> None:
    """Make sure that these thresholds of a queue's or an account's own, in messages, can be used.

    What is empty comes from elsewhere: the settings' is then what the other is held against.

    Raises:
        ValidationError: they can't.
    """
    warned_at = warn if warn is not None else settings.GUARDIAN_WARN_QUEUE_LENGTH
    deleted_past = most if most is not None else settings.GUARDIAN_MAX_QUEUE_LENGTH
    if warn is None and most is None:
        return
    if not 1 <= warned_at < deleted_past:
        raise ValidationError(
            f"It would be warned about at {warned_at} messages and deleted past {deleted_past}. "
            "The first has to be 1 at least, and below the second."
        )


class Owner(AbstractBaseUser, PermissionsMixin):
    """A person, known by an e-mail address, who signs in and owns RabbitMQ accounts."""

    uuid = models.UUIDField(default=uuid.uuid4, unique=True, editable=False)
    email = models.EmailField("e-mail address", unique=True, help_text="How the owner signs in, in lower case.")
    full_name = models.CharField(max_length=200, blank=True)
    vouched = models.BooleanField(default=False, help_text="Whether this owner may use the broker.")
    is_staff = models.BooleanField("operator", default=False, help_text="Whether this owner runs the installation.")
    is_active = models.BooleanField("active", default=True, help_text="Take the tick away instead of deleting.")
    date_joined = models.DateTimeField(default=timezone.now, editable=False)

    USERNAME_FIELD = "email"
    EMAIL_FIELD = "email"
    REQUIRED_FIELDS: ClassVar[list[str]] = []

    objects = OwnerQuerySet()

    class Meta:
        ordering = ["email"]
        constraints = [
            models.CheckConstraint(condition=models.Q(email=Lower("email")), name="owner_email_is_lower_case"),
        ]

    def __str__(self) -> str:
        return self.email

    def clean(self) -> None:
        """Bring the address into its normal form."""
        super().clean()
        self.email = normal_address(self.email)

    def get_full_name(self) -> str:
        """Return the name to show, which is the address where no name is known."""
        return self.full_name or self.email

    def get_short_name(self) -> str:
        """Return the part of the address before the @."""
        return self.email.partition("@")[0]


class AuthToken(AbstractAuthToken):
    """A token for the REST API. Only its digest is stored."""

    uuid = models.UUIDField(default=uuid.uuid4, unique=True, editable=False)
    name = models.CharField(max_length=100, blank=True, help_text="What the token is for, in its owner's words.")
    last_used = models.DateTimeField(null=True, blank=True, editable=False)

    class Meta:
        ordering = ["-created"]

    def __str__(self) -> str:
        return self.name or str(self.uuid)


class PulseUser(models.Model):
    """A RabbitMQ account with one or more owners. Its password is on the broker alone, never here."""

    username = models.CharField(max_length=100, unique=True, help_text="The name of the account on the broker.")
    owners = models.ManyToManyField(Owner, related_name="pulse_users")
    warn_length = models.PositiveIntegerField(
        null=True, blank=True, help_text="Messages at which owners of its queues are warned; empty: as the policy says."
    )
    max_length = models.PositiveIntegerField(
        null=True, blank=True, help_text="Messages past which its queues are deleted; empty: as the policy says."
    )
    ready = models.BooleanField(
        default=False, editable=False, help_text="Whether the broker has the account; not while it is being made."
    )
    created = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["username"]

    def __str__(self) -> str:
        return self.username

    def clean(self) -> None:
        """Refuse thresholds by which its queues would be deleted before anybody is warned."""
        super().clean()
        check_thresholds(self.warn_length, self.max_length)
