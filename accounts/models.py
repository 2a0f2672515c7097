"""Owners, their tokens, and their RabbitMQ accounts ("Pulse users").

The broker is the truth about which accounts exist; these rows are the truth about who owns them.
"""

import enum
import unicodedata
import uuid
from typing import Any, ClassVar, Final, TypeVar

from auditlog.models import AbstractLogEntry
from django.conf import settings
from django.contrib.auth.base_user import AbstractBaseUser, BaseUserManager
from django.contrib.auth.models import AnonymousUser, PermissionsMixin
from django.core.exceptions import ValidationError
from django.core.validators import EmailValidator
from django.db import models
from django.db.models.functions import Lower
from django.utils import timezone
from knox.models import AbstractAuthToken

MAX_ADDRESS_LENGTH = 254

INVALID_ADDRESS = "Enter an e-mail address, such as you@example.org."


class OwnerManager(BaseUserManager["Owner"]):
    """Owners are found and made by their e-mail address, whatever its case."""

    def get_by_natural_key(self, username: str | None) -> "Owner":
        """Return the owner with this address."""
        return self.get(email=normalize_address(username or ""))

    def create_user(self, email: str, password: str | None = None, **fields: Any) -> "Owner":
        """Make an owner. Without a password there is no signing in by password, which is the rule."""
        owner = self.model(email=normalize_address(email), **fields)
        owner.set_password(password)
        owner.full_clean(exclude=["password"])
        owner.save(using=self._db)
        return owner

    def create_superuser(self, email: str, password: str | None = None, **fields: Any) -> "Owner":
        """Make an operator."""
        return self.create_user(email, password, is_staff=True, is_superuser=True, vouched=True, **fields)


class Unchanged(enum.Enum):
    """Says of a field that it stays as the database has it, where None says something else."""

    UNCHANGED = enum.auto()


UNCHANGED: Final = Unchanged.UNCHANGED


def owners_matching(text: str) -> models.Q:
    """Return the condition that an owner has this in the address or the name."""
    return models.Q(email__icontains=text) | models.Q(full_name__icontains=text)


def normalize_address(email: str) -> str:
    """Return the form that an e-mail address is stored and compared in: trimmed and lower-cased."""
    return email.strip().lower()


def check_address(email: str) -> None:
    """Make sure that this is an e-mail address, in its normal form, and looks like no other than it is.

    Refused are invisible characters, marks that turn the direction of the text, and letters of other widths, which a
    mail server would take for the plain ones.

    Raises:
        ValidationError: it isn't.
    """
    EmailValidator(INVALID_ADDRESS)(email)
    is_plain = email.isprintable() and unicodedata.normalize("NFKC", email) == email
    if len(email) > MAX_ADDRESS_LENGTH or not is_plain:
        raise ValidationError(INVALID_ADDRESS)


def check_line(text: str, most: int) -> None:
    """Make sure that this is a line of text as a person types it: not empty, and at most so many characters.

    All of them can be seen.

    Raises:
        ValidationError: it isn't.
    """
    if not text.strip():
        raise ValidationError("It is empty; write something.")
    if len(text) > most:
        raise ValidationError(f"It is {len(text)} characters long; {most} are allowed.")
    if has_control_characters(text):
        raise ValidationError("It has a character in it that can't be typed, such as a line break.")
    if any(unicodedata.category(character) == "Cf" for character in text):
        raise ValidationError("It has a character in it that can't be seen, such as a mark for right-to-left text.")


def has_control_characters(text: str) -> bool:
    """Return whether this has line breaks, NULs or other control characters in it, or what is no character at all."""
    return any(unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") for character in text)


MAX_THRESHOLD = 2**31 - 1
"""The largest value of an integer column on PostgreSQL, and so of a threshold in messages."""


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
    if max(warn or 0, most or 0) > MAX_THRESHOLD:
        raise ValidationError(f"No threshold can be above {MAX_THRESHOLD} messages.")


class Owner(AbstractBaseUser, PermissionsMixin):
    """A person, known by an e-mail address, who signs in and owns RabbitMQ accounts."""

    uuid = models.UUIDField(default=uuid.uuid4, unique=True, editable=False)
    email = models.EmailField("e-mail address", unique=True, help_text="How the owner signs in, in lower case.")
    full_name = models.CharField(max_length=200, blank=True)
    vouched = models.BooleanField(default=False, help_text="Whether this owner may use the broker.")
    is_staff = models.BooleanField("operator", default=False, help_text="Whether this owner runs the installation.")
    is_active = models.BooleanField("active", default=True, help_text="Take the tick away instead of deleting.")
    date_joined = models.DateTimeField(default=timezone.now, editable=False)

    vouch_requested_at = models.DateTimeField(null=True, blank=True, editable=False)
    vouch_request = models.CharField(max_length=500, blank=True, help_text="Why, in the owner's words.")

    time_zone = models.CharField(max_length=64, default="UTC", help_text="Such as Europe/Berlin.")
    quiet_from = models.TimeField(null=True, blank=True, help_text="In the owner's time zone; empty: no quiet hours.")
    quiet_until = models.TimeField(null=True, blank=True, help_text="In the owner's time zone.")
    weekly_summary = models.BooleanField(default=True, help_text="Whether a summary is sent every week.")
    weekly_summary_at = models.DateTimeField(null=True, editable=False, help_text="When the last one was written.")

    USERNAME_FIELD = "email"
    EMAIL_FIELD = "email"
    REQUIRED_FIELDS: ClassVar[list[str]] = []

    objects = OwnerManager()

    class Meta:
        ordering = ["email"]
        constraints = [
            models.CheckConstraint(condition=models.Q(email=Lower("email")), name="owner_email_is_lower_case"),
        ]

    def __str__(self) -> str:
        return self.email

    def clean(self) -> None:
        """Bring the address into its normal form, and refuse one that looks like another than it is."""
        email = normalize_address(self.email)
        try:
            check_address(email)
        except ValidationError as error:
            raise ValidationError({"email": error.messages}) from None
        super().clean()  # which would make another of such an address
        self.email = email

    def has_perm(self, perm: str, obj: models.Model | None = None) -> bool:
        """Return whether this owner may do this in the administration: an operator anything, and nobody else."""
        return self.is_active and self.is_staff

    def has_module_perms(self, app_label: str) -> bool:
        """Return whether this owner may see anything of an app in the administration, as ``has_perm`` says."""
        return self.is_active and self.is_staff

    def get_full_name(self) -> str:
        """Return the name to show, which is the address where no name is known."""
        return self.full_name or self.email

    def get_short_name(self) -> str:
        """Return the part of the address before the @."""
        return self.email.partition("@")[0]


class Vouching(models.Model):
    """The record that somebody was vouched for, or that it was withdrawn. The last one of an owner holds."""

    owner = models.ForeignKey(Owner, on_delete=models.CASCADE, related_name="vouchings")
    vouched = models.BooleanField()
    by = models.ForeignKey(
        Owner,
        null=True,
        on_delete=models.SET_NULL,
        related_name="+",
        help_text="Empty: a rule, which the reason names.",
    )
    reason = models.CharField(max_length=300, blank=True)
    at = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering = ["-at", "-id"]

    def __str__(self) -> str:
        return f"{self.owner} {'vouched for' if self.vouched else 'no longer vouched for'}"


class SignInLink(models.Model):
    """A link that signs its owner in once. Only its secret's digest is stored, and the row goes when it is used."""

    owner = models.ForeignKey(Owner, on_delete=models.CASCADE, related_name="+")
    digest = models.CharField(max_length=64, unique=True)
    expires_at = models.DateTimeField()

    def __str__(self) -> str:
        return f"for {self.owner} until {self.expires_at:%F %T}"


class AuthToken(AbstractAuthToken):
    """A token for the REST API. Only its digest is stored."""

    uuid = models.UUIDField(default=uuid.uuid4, unique=True, editable=False)
    name = models.CharField(max_length=100, blank=True, help_text="What the token is for, in its owner's words.")
    last_used = models.DateTimeField(null=True, blank=True, editable=False)

    class Meta:
        ordering = ["-created"]

    def __str__(self) -> str:
        return self.name or str(self.uuid)


Rows = TypeVar("Rows", bound=models.QuerySet[Any])


def visible_to(rows: Rows, visitor: Owner | AnonymousUser, own: models.Q) -> Rows:
    """Return the rows that this visitor may see: an operator all, an owner their ``own``, nobody else any."""
    if visitor.is_staff:
        return rows.all()
    return rows.filter(own) if visitor.is_authenticated else rows.none()


class PulseUserQuerySet(models.QuerySet["PulseUser"]):
    """RabbitMQ accounts, as different people see them."""

    def seen_by(self, visitor: Owner | AnonymousUser) -> "PulseUserQuerySet":
        """Return the accounts that this visitor may see: an operator all, an owner their own, nobody else any."""
        return visible_to(self, visitor, models.Q(owners=visitor.pk))

    def search(self, text: str) -> "PulseUserQuerySet":
        """Return the accounts with this in their name, or in an owner's address."""
        owned = PulseUser.objects.filter(owners__email__icontains=text)
        return self.filter(models.Q(username__icontains=text) | models.Q(pk__in=owned))

    def locked(self, pulse_user: "PulseUser") -> "PulseUser":
        """Return this account as the database has it, and keep others from changing it until the commit."""
        return self.select_for_update(no_key=True).get(pk=pulse_user.pk)


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
    removing_since = models.DateTimeField(
        null=True, editable=False, help_text="Since when it is being removed; what a crash leaves of that is finished."
    )

    objects = PulseUserQuerySet.as_manager()

    class Meta:
        ordering = ["username"]

    def __str__(self) -> str:
        return self.username

    def clean(self) -> None:
        """Refuse thresholds by which its queues would be deleted before anybody is warned."""
        super().clean()
        check_thresholds(self.warn_length, self.max_length)


class NotificationAddress(models.Model):
    """Where the messages about an account's queues go beside its owners: nowhere, until somebody there confirms."""

    uuid = models.UUIDField(default=uuid.uuid4, unique=True, editable=False)
    pulse_user = models.ForeignKey(PulseUser, on_delete=models.CASCADE, related_name="notification_addresses")
    email = models.EmailField("e-mail address")
    added_by = models.ForeignKey(Owner, null=True, on_delete=models.SET_NULL, related_name="+")
    created = models.DateTimeField(auto_now_add=True)
    confirmed_at = models.DateTimeField(null=True, blank=True, editable=False)

    class Meta:
        ordering = ["email"]
        verbose_name_plural = "notification addresses"
        constraints = [models.UniqueConstraint(fields=["pulse_user", "email"], name="one_address_once_for_an_account")]

    def __str__(self) -> str:
        return f"{self.email} for {self.pulse_user}"


class AuditEntry(AbstractLogEntry):
    """Who did what to what, and when. Written in ``accounts/audit.py``; it outlives the thing and the person."""

    class Outcome(models.TextChoices):
        """What became of it."""

        DONE = "done", "done"
        UNKNOWN = "unknown", "unknown"
        NOT_DONE = "not-done", "not done"

    content_type = models.ForeignKey(  # type: ignore[assignment]  # auditlog's own has to be of a thing
        "contenttypes.ContentType",
        null=True,
        on_delete=models.SET_NULL,
        related_name="+",
        verbose_name="kind of thing",
        help_text="Empty: it was done to no one thing.",
    )
    # Whoever does something may be removed before it is written down, by somebody else or by themselves: then the
    # address says who it was.
    actor = models.ForeignKey(
        Owner,
        null=True,
        blank=True,
        on_delete=models.SET_NULL,
        db_constraint=False,
        related_name="+",
    )
    deed = models.CharField(max_length=60, db_index=True, help_text="What was done, in words.")
    outcome = models.CharField(
        max_length=10,
        choices=Outcome.choices,
        default=Outcome.DONE,
        help_text="Unknown: it was asked of the broker, and no answer came. It may be done.",
    )

    class Meta:
        ordering = ["-timestamp", "-id"]
        verbose_name = "entry of the audit trail"
        verbose_name_plural = "audit trail"

    def __str__(self) -> str:
        return f"{self.deed}: {self.object_repr}" if self.object_repr else self.deed
