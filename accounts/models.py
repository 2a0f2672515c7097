"""Owners, their tokens, and their Pulse users.

The broker is the truth about which Pulse users exist; these rows are the truth about who owns them.
"""

import enum
import uuid
from collections.abc import Iterable
from datetime import datetime, timedelta
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

from accounts.mailboxes import unquoted
from core.addresses import ascii_domain
from core.fields import BrokerJSONField

MAX_ADDRESS_LENGTH = 254

INVITATION_LIFETIME = timedelta(days=7)

INVALID_ADDRESS = "Enter an e-mail address, such as you@example.org."

OTHER_ALPHABET = "xn--"
"""Part of a domain in ASCII that is written in another alphabet."""
NOT_ASCII = r"[^ -~]"
"""Matches addresses that were stored before domains had one form."""


class OwnerManager(BaseUserManager["Owner"]):
    """Finds and creates owners by e-mail address, in whatever form it is written."""

    def get_by_natural_key(self, username: str | None) -> "Owner":
        if (owner := owner_with_address(username or "")) is None:
            raise Owner.DoesNotExist
        return owner

    def create_user(self, email: str, password: str | None = None, **fields: Any) -> "Owner":
        """Create an owner. Without a password, which is the rule, signing in by password is impossible."""
        owner = self.model(email=normalize_address(email), **fields)
        owner.set_password(password)
        owner.full_clean(exclude=["password"])
        owner.save(using=self._db)
        return owner

    def create_superuser(self, email: str, password: str | None = None, **fields: Any) -> "Owner":
        return self.create_user(email, password, is_staff=True, is_superuser=True, vouched=True, **fields)


class Unchanged(enum.Enum):
    """The value of an argument that leaves a field unchanged, where None has another meaning."""

    UNCHANGED = enum.auto()


UNCHANGED: Final = Unchanged.UNCHANGED


def owners_matching(text: str) -> models.Q:
    """Return the condition that an owner's address or name contains the text."""
    return models.Q(email__icontains=text) | models.Q(full_name__icontains=text)


def normalize_address(email: str) -> str:
    """Return the e-mail address as it is stored and compared.

    It is stripped, in lower case, quoted only if needed, and has its domain in IDNA's ASCII form. A local part outside
    ASCII and a domain without an ASCII form stay as they are: no owner can have them.
    """
    local, at, domain = email.strip().rpartition("@")
    if not at:
        return domain.lower()
    if local.isascii():  # some letters outside ASCII have lower-case letters in ASCII, and are other mailboxes
        local = unquoted(local.lower())
    return f"{local}@{ascii_domain(domain)}"


def comparable(stored: str) -> str:
    """Return a stored address in normal form, unless its domain had another ASCII form before.

    Domains were stored in Unicode, and mails went to their form by IDNA 2003. If that is another domain, as it is for
    straße.de, it is unknown whose address was verified. So the address stays as it is and matches no other. A domain
    that IDNA 2008 forbids, such as ♥.com, has its form of 2003.
    """
    local, at, domain = stored.rpartition("@")
    if not at:
        return normalize_address(stored)
    try:
        mailed = domain.encode("idna").decode()
    except UnicodeError:
        return stored
    current = ascii_domain(domain)
    if current.isascii() and current != mailed:
        return stored
    return normalize_address(f"{local}@{mailed}")


def owners_by_address(emails: Iterable[str], among: "models.QuerySet[Owner] | None" = None) -> "dict[str, Owner]":
    """Return the owners with these addresses, by address in normal form, in one query.

    An address that was stored before domains had one form counts too. If two owners have the same address, the one who
    signed in last is returned.
    """
    wanted = {normalize_address(email) for email in emails}
    stored = models.Q(email__in=wanted)
    if any(OTHER_ALPHABET in address for address in wanted):
        stored |= models.Q(email__regex=NOT_ASCII)
    owners = (Owner.objects.all() if among is None else among).filter(stored)
    in_order = owners.order_by(models.F("last_login").asc(nulls_first=True), "-pk")
    return {address: owner for owner in in_order if (address := comparable(owner.email)) in wanted}


def owner_with_address(email: str, among: "models.QuerySet[Owner] | None" = None) -> "Owner | None":
    """Return the owner with this address, or None; see :func:`owners_by_address`."""
    return next(iter(owners_by_address([email], among).values()), None)


def check_address(email: str) -> None:
    """Check that this is an e-mail address in normal form, which has only visible ASCII. Raises ValidationError."""
    EmailValidator(INVALID_ADDRESS)(email)  # accepts a dotless i, too
    if len(email) > MAX_ADDRESS_LENGTH or not email.isascii() or not email.isprintable():
        raise ValidationError(INVALID_ADDRESS)


MAX_THRESHOLD = 2**31 - 1
"""In messages: the largest value of an integer column on PostgreSQL."""


def check_thresholds(warn: int | None, limit: int | None) -> None:
    """Check the warning threshold and the deletion limit of a queue or a Pulse user, in messages.

    None means the policy's value. A given value is compared with the settings' value of the other. Raises
    ValidationError unless both are in range and the warning threshold is below the deletion limit.
    """
    warned_at = warn if warn is not None else settings.GUARDIAN_WARN_QUEUE_LENGTH
    deleted_past = limit if limit is not None else settings.GUARDIAN_MAX_QUEUE_LENGTH
    if warn is None and limit is None:
        return
    if not 1 <= warned_at < deleted_past:
        raise ValidationError(
            f"The warning threshold would be {warned_at} messages and the deletion limit {deleted_past}. "
            "The warning threshold must be at least 1 and below the deletion limit."
        )
    if max(warn or 0, limit or 0) > MAX_THRESHOLD:
        raise ValidationError(f"A threshold can be at most {MAX_THRESHOLD} messages.")


class Owner(AbstractBaseUser, PermissionsMixin):
    """A person, identified by an e-mail address, who signs in and owns Pulse users."""

    uuid = models.UUIDField("UUID", default=uuid.uuid4, unique=True, editable=False)
    email = models.EmailField(
        "e-mail address", unique=True, help_text="The owner signs in with this address. Lower case."
    )
    full_name = models.CharField(max_length=200, blank=True)
    vouched = models.BooleanField("access", default=False, help_text="Whether this owner may use the broker.")
    is_staff = models.BooleanField("operator", default=False, help_text="Whether this owner runs the installation.")
    is_active = models.BooleanField("active", default=True, help_text="Deactivate an owner instead of deleting it.")
    date_joined = models.DateTimeField(default=timezone.now, editable=False)

    vouch_requested_at = models.DateTimeField("access requested at", null=True, blank=True, editable=False)
    vouch_request = models.CharField(
        "request for access", max_length=500, blank=True, help_text="Why, in the owner's words."
    )

    time_zone = models.CharField(max_length=64, default="UTC", help_text="A time zone such as Europe/Berlin.")
    quiet_from = models.TimeField(null=True, blank=True, help_text="In the owner's time zone; empty: no quiet hours.")
    quiet_until = models.TimeField(null=True, blank=True, help_text="In the owner's time zone.")
    weekly_summary = models.BooleanField(default=True, help_text="Whether a summary is sent every week.")
    weekly_summary_at = models.DateTimeField(null=True, editable=False, help_text="When the last summary was written.")

    reads_only: int | None = None
    """The primary key of the only Pulse user that this request's token may read, or None. Not stored."""

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
        """Normalize the address, and refuse one that can be mistaken for another."""
        email = normalize_address(self.email)
        try:
            check_address(email)
            if not (self._state.adding or self.email.isascii()) and comparable(self.email) == self.email:
                raise ValidationError(
                    "It is unknown which domain this means. Ask the owner, and enter the domain in its ASCII form."
                )
            # Uniqueness is checked for the stored form only, which may be an older one.
            if (
                OTHER_ALPHABET in email
                and not Owner.objects.filter(pk=self.pk, email=self.email).exists()  # the address changes
                and owner_with_address(email, Owner.objects.exclude(pk=self.pk)) is not None
            ):
                raise ValidationError("An owner with this address exists.")
        except ValidationError as error:
            raise ValidationError({"email": error.messages}) from None
        super().clean()  # this would normalize the address differently
        self.email = email

    def has_perm(self, perm: str, obj: models.Model | None = None) -> bool:
        """Return whether this owner is an active operator, who has all permissions in the admin."""
        return self.is_active and self.is_staff

    def has_module_perms(self, app_label: str) -> bool:
        return self.is_active and self.is_staff


class Vouching(models.Model):
    """A record that an owner was vouched for, or that the vouching was withdrawn. An owner's last record is valid."""

    owner = models.ForeignKey(Owner, on_delete=models.CASCADE, related_name="vouchings")
    vouched = models.BooleanField("access")
    by = models.ForeignKey(
        Owner,
        null=True,
        on_delete=models.SET_NULL,
        related_name="+",
        help_text="Empty: by a rule, which the reason names.",
    )
    reason = models.CharField(max_length=300, blank=True)
    at = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering = ["-at", "-id"]
        verbose_name = "access record"

    def __str__(self) -> str:
        return f"{self.owner}: access {'approved' if self.vouched else 'withdrawn'}"


class SignInLink(models.Model):
    """A link that signs its owner in once. Only a digest of its secret is stored. Using it deletes the row."""

    owner = models.ForeignKey(Owner, on_delete=models.CASCADE, related_name="+")
    digest = models.CharField(max_length=64, unique=True)
    expires_at = models.DateTimeField()

    def __str__(self) -> str:
        return f"for {self.owner} until {self.expires_at:%F %T}"


class AuthToken(AbstractAuthToken):
    """A token for the REST API. Only its digest is stored."""

    class Scope(models.TextChoices):
        """What a token may do. ``accounts/access/scopes.py`` decides it."""

        AGENT = "agent", "Register queues"
        READ = "read", "Read"
        ALL = "all", "Do everything"

    uuid = models.UUIDField("UUID", default=uuid.uuid4, unique=True, editable=False)
    name = models.CharField(max_length=100, blank=True, help_text="What the token is for, in its owner's words.")
    last_used = models.DateTimeField(null=True, blank=True, editable=False)
    scope = models.CharField(
        max_length=10, choices=Scope.choices, default=Scope.AGENT, db_default=Scope.AGENT, editable=False
    )
    # Deleted with the Pulse user: a token must never read more than before.
    pulse_user = models.ForeignKey(
        "PulseUser", models.CASCADE, null=True, blank=True, editable=False, related_name="+",
        help_text="The only Pulse user that the token may read; empty: all of its owner's.",
    )  # fmt: skip

    class Meta:
        ordering = ["-created"]
        verbose_name = "token"

    def __str__(self) -> str:
        return self.name or str(self.uuid)


Rows = TypeVar("Rows", bound=models.QuerySet[Any])


def visible_to(
    rows: Rows, visitor: Owner | AnonymousUser, own: models.Q, *, pulse_user_field: str | None = None
) -> Rows:
    """Return the rows that this visitor may see: all for operators, ``own`` for owners, none for others.

    A token that is restricted to a Pulse user sees only those whose ``pulse_user_field`` is that Pulse user.
    """
    if not visitor.is_authenticated:
        return rows.none()
    if visitor.reads_only is not None:
        if pulse_user_field is None:
            return rows.none()
        rows = rows.filter((pulse_user_field, visitor.reads_only))
    return rows.all() if visitor.is_staff else rows.filter(own)


class PulseUserQuerySet(models.QuerySet["PulseUser"]):
    def seen_by(self, visitor: Owner | AnonymousUser) -> "PulseUserQuerySet":
        return visible_to(self, visitor, models.Q(owners=visitor.pk), pulse_user_field="pk")

    def search(self, text: str) -> "PulseUserQuerySet":
        """Return the Pulse users whose name, or an owner's address, contains the text."""
        owned = PulseUser.objects.filter(owners__email__icontains=text)
        return self.filter(models.Q(username__icontains=text) | models.Q(pk__in=owned))

    def with_people(self) -> "PulseUserQuerySet":
        """Fetch the owners, the open invitations and the notification addresses too, in one query each."""
        return self.prefetch_related(
            "owners",
            models.Prefetch("invitations", Invitation.objects.open().select_related("invitee", "inviter")),
            models.Prefetch("notification_addresses", NotificationAddress.objects.select_related("added_by")),
        )

    def longest_owners(self) -> dict[int, int]:
        """Return the owner who has had each of all Pulse users longest, as primary keys, in one statement."""
        owned = PulseUser.owners.through.objects.order_by("-id")
        return dict(owned.values_list("pulseuser", "owner"))

    def locked(self, pulse_user: "PulseUser") -> "PulseUser":
        """Return the Pulse user from the database, locked until the transaction ends."""
        return self.select_for_update(no_key=True).get(pk=pulse_user.pk)


class PulseUser(models.Model):
    """A Pulse user with one or more owners. Only the broker stores its password."""

    username = models.CharField(max_length=100, unique=True, help_text="The name of the Pulse user on the broker.")
    owners = models.ManyToManyField(Owner, related_name="pulse_users")
    warn_length = models.PositiveIntegerField(
        "warning threshold", null=True, blank=True, help_text="Of its queues, in messages. Empty: the default applies."
    )
    max_length = models.PositiveIntegerField(
        "deletion limit", null=True, blank=True, help_text="Of its queues, in messages. Empty: the default applies."
    )
    ready = models.BooleanField(
        default=False,
        editable=False,
        help_text="Whether the broker has the Pulse user. False while it is being created.",
    )
    created = models.DateTimeField(auto_now_add=True)
    removing_since = models.DateTimeField(
        null=True, editable=False, help_text="When its removal started. An interrupted removal is resumed."
    )
    keeps_archives = models.BooleanField(
        "archive messages",
        default=True,
        db_default=True,
        help_text="Keep the messages of deleted and purged queues for a while. Switch it off for confidential data.",
    )
    hold_off_minutes = models.PositiveSmallIntegerField(
        default=0,
        db_default=0,
        help_text="Minutes over its warning threshold after which the owners of a queue are warned.",
    )
    password_exposed_at = models.DateTimeField(
        null=True,
        editable=False,
        help_text="When the Pulse user lost an owner who may know the password: the owner left, was removed or was "
        "deactivated. Empty: there is none, or the password was changed since.",
    )

    objects = PulseUserQuerySet.as_manager()

    class Meta:
        ordering = ["username"]

    def __str__(self) -> str:
        return self.username

    def clean(self) -> None:
        """Refuse thresholds that would delete queues before their owners are warned."""
        super().clean()
        check_thresholds(self.warn_length, self.max_length)


class InvitationQuerySet(models.QuerySet["Invitation"]):
    def open(self) -> "InvitationQuerySet":
        """Return the invitations that can be accepted: neither answered nor expired, of an owner who has access."""
        return self.filter(
            models.Q(inviter__vouched=True) | models.Q(inviter__is_staff=True),
            inviter__pulse_users=models.F("pulse_user"),
            inviter__is_active=True,
            pulse_user__removing_since=None,
            closed_at=None,
            created__gt=timezone.now() - INVITATION_LIFETIME,
        )

    def received_by(self, visitor: Owner | AnonymousUser) -> "InvitationQuerySet":
        return self.open().filter(invitee=visitor.pk).select_related("pulse_user", "inviter", "invitee")


class Invitation(models.Model):
    """An invitation to own a Pulse user. It is deleted when it is accepted."""

    uuid = models.UUIDField("UUID", default=uuid.uuid4, unique=True, editable=False)
    pulse_user = models.ForeignKey(PulseUser, on_delete=models.CASCADE, related_name="invitations")
    invitee = models.ForeignKey(Owner, on_delete=models.CASCADE, related_name="invitations")
    inviter = models.ForeignKey(Owner, on_delete=models.CASCADE, related_name="+")
    created = models.DateTimeField(default=timezone.now)
    closed_at = models.DateTimeField(null=True, help_text="When it was declined or withdrawn; empty: it was not.")

    objects = InvitationQuerySet.as_manager()

    class Meta:
        ordering = ["created", "id"]
        constraints = [
            models.UniqueConstraint(fields=["pulse_user", "invitee"], name="one_invitation_of_an_owner_to_an_account")
        ]

    def __str__(self) -> str:
        return f"{self.invitee} to {self.pulse_user}"

    @property
    def expires_at(self) -> datetime:
        return self.created + INVITATION_LIFETIME


class NotificationAddress(models.Model):
    """A further notification address of a Pulse user. It gets no notification until its recipient confirms it."""

    uuid = models.UUIDField("UUID", default=uuid.uuid4, unique=True, editable=False)
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
    """An entry of the audit trail, written by ``accounts/audit.py``. It outlives the actor and the changed thing."""

    class Outcome(models.TextChoices):
        DONE = "done", "done"
        UNKNOWN = "unknown", "unknown"
        NOT_DONE = "not-done", "not done"

    additional_data = BrokerJSONField("additional data", blank=True, null=True)
    content_type = models.ForeignKey(  # type: ignore[assignment]  # auditlog's own is not nullable
        "contenttypes.ContentType",
        null=True,
        on_delete=models.SET_NULL,
        related_name="+",
        verbose_name="kind of thing",
        help_text="Empty: the action was not about one thing.",
    )
    # No constraint: the actor may be deleted before the entry is written. Then actor_email says who it was.
    actor = models.ForeignKey(
        Owner,
        null=True,
        blank=True,
        on_delete=models.SET_NULL,
        db_constraint=False,
        related_name="+",
    )
    event = models.CharField(max_length=60, db_index=True, help_text="The action, in words.")
    outcome = models.CharField(
        max_length=10,
        choices=Outcome.choices,
        default=Outcome.DONE,
        help_text="Unknown: the broker did not answer, so the action may be done.",
    )

    class Meta:
        ordering = ["-timestamp", "-id"]
        verbose_name = "audit entry"
        verbose_name_plural = "audit entries"

    def __str__(self) -> str:
        return f"{self.event}: {self.object_repr}" if self.object_repr else self.event
