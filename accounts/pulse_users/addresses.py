"""Further notification addresses of a Pulse user. An address gets no notification until its recipient confirms it."""

import hashlib
from collections import Counter
from collections.abc import Iterable
from datetime import timedelta

from django.core import signing
from django.core.cache import cache
from django.core.exceptions import ValidationError
from django.db import transaction
from django.utils import timezone

from accounts import audit, signals
from accounts.mailboxes import mailbox
from accounts.models import NotificationAddress, Owner, PulseUser, check_address, normalize_address
from core import limits
from core.refusals import Refusal

MAX_ADDRESSES = 10

CONFIRMATION_MAX_AGE_SECONDS = 7 * 24 * 3600

MIN_REQUEST_INTERVAL = timedelta(hours=1)
"""Limits the mails to a recipient who wants nothing of a Pulse user, whatever its owners do."""

REQUEST_LIMIT = limits.RateLimit("requests to confirm this address", 20, 3600)
"""From one owner to one mailbox, with whatever Pulse users. Deleting and creating Pulse users doesn't reset it."""

_SALT = "accounts.notification-address"


def set_addresses(pulse_user: PulseUser, emails: Iterable[str], by: Owner | None) -> None:
    """Replace the Pulse user's further addresses. Each new address gets a request to confirm.

    ``by`` is None for a command. An address that got a request within the last hour is invalid. The field is
    ``notification_emails``.
    """
    with transaction.atomic():
        locked = PulseUser.objects.locked(pulse_user)
        present = {normalize_address(address.email): address for address in locked.notification_addresses.all()}
        wanted = usable_addresses(emails, locked.owners.all(), present)
        staying = [address.pk for email, address in present.items() if email in wanted]
        locked.notification_addresses.exclude(pk__in=staying).delete()
        for email in wanted:
            if email not in present:
                create_address(locked, email, by)


def add_address(pulse_user: PulseUser, email: str, by: Owner) -> NotificationAddress:
    """Add a further address and send it a request to confirm.

    An address that got a request within the last hour is invalid. The field is ``email``.
    """
    with transaction.atomic():
        locked = PulseUser.objects.locked(pulse_user)
        present = [normalize_address(address.email) for address in locked.notification_addresses.all()]
        try:
            if normalize_address(email) in present:
                raise ValidationError(f"{normalize_address(email)} is already an address of this Pulse user.")
            usable_addresses([*present, email], locked.owners.all(), present)
            return create_address(locked, normalize_address(email), by)
        except ValidationError as error:
            raise ValidationError({"email": error.messages}) from None


def remove_address(address: NotificationAddress) -> None:
    """Delete a further address, if it still exists. Confirmation links that were sent to it stop working."""
    NotificationAddress.objects.filter(pk=address.pk).delete()


def resend_confirmation(address: NotificationAddress) -> None:
    """Send another request to confirm, unless the address is confirmed or got one within the last hour (Refusal)."""
    with transaction.atomic():
        if NotificationAddress.objects.filter(pk=address.pk, confirmed_at=None).exists():
            _request_confirmation(address)


def confirmation_token(address: NotificationAddress) -> str:
    """Return the URL-safe token that confirms this address. It expires after seven days."""
    return signing.dumps([address.uuid.hex, address.email], salt=_SALT)


def address_for_token(token: str) -> NotificationAddress:
    """Return the address that this token confirms.

    Raises SignatureExpired, or BadSignature if the token is invalid or the address no longer exists.
    """
    uuid, email = signing.loads(token, salt=_SALT, max_age=CONFIRMATION_MAX_AGE_SECONDS)
    address = NotificationAddress.objects.select_related("pulse_user").filter(uuid=uuid, email=email).first()
    if address is None:
        raise signing.BadSignature("The address no longer exists.")
    return address


def confirm_address(token: str) -> NotificationAddress:
    """Confirm the address of this token, so that it gets the Pulse user's notifications. Idempotent.

    Raises the errors of ``address_for_token``.
    """
    address = address_for_token(token)
    if NotificationAddress.objects.filter(pk=address.pk, confirmed_at=None).update(confirmed_at=timezone.now()):
        audit.record(None, "confirmed", address)
    address.refresh_from_db(fields=["confirmed_at"])
    return address


def create_address(pulse_user: PulseUser, email: str, by: Owner | None) -> NotificationAddress:
    """Create a further address and request its confirmation. Call this in a transaction."""
    address = NotificationAddress.objects.create(pulse_user=pulse_user, email=email, added_by=by)
    try:
        _request_confirmation(address)
    except ValidationError as error:
        raise ValidationError({"notification_emails": error.messages}) from None
    return address


def _request_confirmation(address: NotificationAddress) -> None:
    """Request the confirmation of an address. Removing an address and adding it again doesn't reset the interval."""
    digest = hashlib.sha256(mailbox(address.email).encode()).hexdigest()
    key, now = f"asked-{address.pulse_user_id}-{digest}", timezone.now()
    if not limits.add(key, now, MIN_REQUEST_INTERVAL.total_seconds()):
        again = cache.get(key, now - MIN_REQUEST_INTERVAL) + MIN_REQUEST_INTERVAL
        raise Refusal(
            f"We sent a request to {address.email} less than an hour ago. Try again after {again:%H:%M} UTC.", "email"
        )
    try:
        limits.consume(REQUEST_LIMIT, f"{address.added_by_id}:{digest}")
    except limits.RateLimitExceeded as error:
        raise Refusal(str(error), "email") from error
    signals.address_added.send(NotificationAddress, address=address)


def usable_addresses(emails: Iterable[str], owners: Iterable[Owner], present: Iterable[str] = ()) -> list[str]:
    """Return the addresses in normal form, without duplicates. Those in ``present`` are not checked again."""
    wanted = list(dict.fromkeys(normalize_address(email) for email in emails))
    current, owner_emails = set(present), {normalize_address(owner.email) for owner in owners}
    errors = []
    new_mailboxes = Counter(mailbox(email) for email in wanted if email not in current)
    for email in wanted:
        if email in current:
            continue
        if not is_address(email):
            errors.append(f"'{email}' is not an e-mail address.")
        elif email in owner_emails:
            errors.append(f"{email} belongs to an owner, who gets all notifications anyway.")
        elif new_mailboxes[mailbox(email)] > 1:  # the second would be refused, as one that got a request already
            errors.append(f"{email} is the same mailbox as another of these addresses; give one of them.")
    if len(wanted) > MAX_ADDRESSES:
        errors = [f"A Pulse user can have {MAX_ADDRESSES} further addresses; you gave {len(wanted)}."]
    if errors:
        raise ValidationError({"notification_emails": errors})
    return wanted


def is_address(email: str) -> bool:
    try:
        check_address(email)
    except ValidationError:
        return False
    return True
