"""Where the messages about an account's queues go beside its owners: nowhere, until somebody there has confirmed it."""

import hashlib
from collections.abc import Iterable
from datetime import timedelta

from django.core import signing
from django.core.cache import cache
from django.core.exceptions import ValidationError
from django.db import transaction
from django.utils import timezone

from accounts import audit, signals
from accounts.models import NotificationAddress, Owner, PulseUser, check_address, normalize_address
from core import limits

MAX_ADDRESSES = 10
"""How many further addresses an account may have."""

CONFIRMATION_MAX_AGE_SECONDS = 7 * 24 * 3600

MIN_REQUEST_INTERVAL = timedelta(hours=1)
"""Somebody at an address who wants nothing of an account is asked no more often, whatever its owners do."""

_SALT = "accounts.notification-address"


def set_addresses(pulse_user: PulseUser, emails: Iterable[str], by: Owner) -> None:
    """Make these, and no others, the account's further addresses. New ones are asked to confirm.

    Raises:
        ValidationError: one can't be used or was asked within an hour, or they are too many; of the field
            ``notification_emails``.
        PulseUser.DoesNotExist: the account is gone meanwhile.
    """
    with transaction.atomic():
        locked = PulseUser.objects.locked(pulse_user)
        present = {address.email: address for address in locked.notification_addresses.all()}
        wanted = usable_addresses(emails, locked.owners.all(), present)
        locked.notification_addresses.exclude(email__in=wanted).delete()
        for email in wanted:
            if email not in present:
                create_address(locked, email, by)


def add_address(pulse_user: PulseUser, email: str, by: Owner) -> NotificationAddress:
    """Add a further address, which gets nothing but the question until somebody there confirms it.

    Raises:
        ValidationError: it can't be used, is there already, was asked within an hour, or is one too many; of the
            field ``email``.
        PulseUser.DoesNotExist: the account is gone meanwhile.
    """
    with transaction.atomic():
        locked = PulseUser.objects.locked(pulse_user)
        present = [address.email for address in locked.notification_addresses.all()]
        try:
            if normalize_address(email) in present:
                raise ValidationError(f"{normalize_address(email)} is there already.")
            usable_addresses([*present, email], locked.owners.all(), present)
            return create_address(locked, normalize_address(email), by)
        except ValidationError as error:
            raise ValidationError({"email": error.messages}) from None


def remove_address(address: NotificationAddress) -> None:
    """Remove a further address; one that is gone already is no error. What was sent there can't confirm it any more."""
    NotificationAddress.objects.filter(pk=address.pk).delete()


def resend_confirmation(address: NotificationAddress) -> None:
    """Ask at this address once more, unless somebody there has confirmed it.

    Raises:
        ValidationError: somebody there was asked within an hour.
    """
    with transaction.atomic():
        if NotificationAddress.objects.filter(pk=address.pk, confirmed_at=None).exists():
            _request_confirmation(address)


def confirmation_token(address: NotificationAddress) -> str:
    """Return what confirms this address, within seven days: a text that can stand in a URL."""
    return signing.dumps([address.uuid.hex, address.email], salt=_SALT)


def address_for_token(token: str) -> NotificationAddress:
    """Return the address that this token confirms.

    Raises:
        django.core.signing.SignatureExpired: it is too late.
        django.core.signing.BadSignature: it is none of ours, or the address was removed meanwhile.
    """
    uuid, email = signing.loads(token, salt=_SALT, max_age=CONFIRMATION_MAX_AGE_SECONDS)
    address = NotificationAddress.objects.select_related("pulse_user").filter(uuid=uuid, email=email).first()
    if address is None:
        raise signing.BadSignature("The address was removed meanwhile.")
    return address


def confirm_address(token: str) -> NotificationAddress:
    """Have the address of this token get the account's messages from now on. Doing it again changes nothing.

    Raises:
        django.core.signing.SignatureExpired: it is too late.
        django.core.signing.BadSignature: it is none of ours, or the address was removed meanwhile.
    """
    address = address_for_token(token)
    if NotificationAddress.objects.filter(pk=address.pk, confirmed_at=None).update(confirmed_at=timezone.now()):
        audit.note(None, "confirmed", address)
    address.refresh_from_db(fields=["confirmed_at"])
    return address


def create_address(pulse_user: PulseUser, email: str, by: Owner) -> NotificationAddress:
    """Write a further address down, and have somebody there asked. In a transaction of the caller's.

    Raises:
        ValidationError: somebody there was asked within an hour; of the field ``notification_emails``.
    """
    address = NotificationAddress.objects.create(pulse_user=pulse_user, email=email, added_by=by)
    try:
        _request_confirmation(address)
    except ValidationError as error:
        raise ValidationError({"notification_emails": error.messages}) from None
    return address


def _request_confirmation(address: NotificationAddress) -> None:
    """Ask at an address of an account. An address that was removed and added anew is still the same.

    Raises:
        ValidationError: somebody there was asked within an hour.
    """
    digest = hashlib.sha256(address.email.encode()).hexdigest()
    key, now = f"asked-{address.pulse_user_id}-{digest}", timezone.now()
    if not limits.add(key, now, MIN_REQUEST_INTERVAL.total_seconds()):
        again = cache.get(key, now - MIN_REQUEST_INTERVAL) + MIN_REQUEST_INTERVAL
        raise ValidationError(
            f"Somebody at {address.email} was asked less than an hour ago. Try again after {again:%H:%M} UTC."
        )
    signals.address_added.send(NotificationAddress, address=address)


def usable_addresses(emails: Iterable[str], owners: Iterable[Owner], present: Iterable[str] = ()) -> list[str]:
    """Return the addresses in their normal form, each once.

    Raises:
        ValidationError: one that isn't present yet can't be used, or they are too many.
    """
    wanted = list(dict.fromkeys(normalize_address(email) for email in emails))
    known, owning = set(present), {owner.email for owner in owners}
    wrong = []
    for email in wanted:
        if email in known:
            continue
        if not is_address(email):
            wrong.append(f"'{email}' is not an e-mail address.")
        elif email in owning:
            wrong.append(f"{email} is an owner's, who gets all messages anyway.")
    if len(wanted) > MAX_ADDRESSES:
        wrong = [f"An account can have {MAX_ADDRESSES} further addresses, and these are {len(wanted)}."]
    if wrong:
        raise ValidationError({"notification_emails": wrong})
    return wanted


def is_address(email: str) -> bool:
    """Return whether this is an e-mail address that can be stored and written to."""
    try:
        check_address(email)
    except ValidationError:
        return False
    return True
