"""Applications and their keys. A key is shown once; only its digest is stored."""

import hashlib
import secrets

from django.core.exceptions import ValidationError
from django.db import connection, transaction

from accounts import audit
from accounts.models import Owner
from message_store.models import Application, ApplicationKey
from message_store.principals import APPLICATION_NAME
from message_store.store import store

MAX_KEYS = 20
"""Keys per application. The limit makes owners revoke old keys."""

MAX_KEY_LENGTH = 200
"""Longer keys are rejected without a query. Guardian's keys have 64 characters."""

# Raw SQL: each request runs this, and building the query with the ORM takes longer than the rest of reading a message.
_OF_DIGEST = (
    "SELECT application.name FROM message_store_applicationkey JOIN message_store_application AS application"
    " ON application.id = application_id WHERE digest = %s"
)


class UnknownKey(Exception):
    """The key does not exist or was revoked."""


def create_application(name: str, by: Owner | None = None) -> Application:
    """Return the application with this name, creating it if needed."""
    check_name(name)
    with transaction.atomic():
        application, is_new = Application.objects.get_or_create(name=name)
        if is_new:
            audit.record(by, audit.CREATED, application)
    return application


def check_name(name: str) -> None:
    """Raise ValidationError, for the field ``name``, unless this is a valid name of an application."""
    if not APPLICATION_NAME.fullmatch(name):
        raise ValidationError(
            {
                "name": "The name begins with a letter or a digit, and has up to 50 of the characters a to z, "
                "A to Z, 0 to 9, '.', '_' and '-'."
            }
        )


def create_key(application: Application, by: Owner | None = None) -> tuple[ApplicationKey, str]:
    """Create a key for an application, and return its row and the key, which cannot be retrieved later.

    Raises ValidationError if it has ``MAX_KEYS`` keys, and Application.DoesNotExist if it was deleted.
    """
    key = secrets.token_hex(32)
    with transaction.atomic():
        locked = Application.objects.select_for_update().get(pk=application.pk)
        if locked.keys.count() >= MAX_KEYS:
            raise ValidationError(f"{locked} has {MAX_KEYS} keys. Revoke one that nobody uses any more.")
        row = ApplicationKey.objects.create(application=locked, digest=digest(key), beginning=key[:8])
        audit.record(by, audit.CREATED, row, application=locked.name)
    return row, key


def revoke_key(key: ApplicationKey, by: Owner | None = None) -> None:
    with transaction.atomic():
        found = ApplicationKey.objects.select_related("application").filter(pk=key.pk).first()
        if found is not None:
            audit.record(by, "revoked", found, application=found.application.name)
            found.delete()


def delete_application(application: Application, by: Owner | None = None) -> None:
    """Delete an application and its keys if it still exists.

    Raises ValidationError if it has queues: a later application of the same name would get them.
    """
    if store().queues(application.name, limit=1):
        raise ValidationError(f"{application} has queues. Remove them first, or revoke its keys.")
    with transaction.atomic():
        found = Application.objects.filter(pk=application.pk).first()
        if found is not None:
            audit.record(by, audit.DELETED, found)
            found.delete()


def application_for_key(key: str) -> str:
    """Return the name of the application with this key, or raise UnknownKey."""
    if len(key) <= MAX_KEY_LENGTH:
        with connection.cursor() as cursor:
            cursor.execute(_OF_DIGEST, [digest(key)])
            found = cursor.fetchone()
        if found is not None:
            return str(found[0])
    raise UnknownKey


def exists(name: str) -> bool:
    return APPLICATION_NAME.fullmatch(name) is not None and Application.objects.filter(name=name).exists()


def digest(key: str) -> str:
    """Return the digest to store for a key. A key has 256 random bits, so it needs no salt."""
    return hashlib.sha256(key.encode()).hexdigest()
