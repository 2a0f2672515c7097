"""The applications, and the keys by which they are known. A key is shown once; here is only its digest."""

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
"""How many keys an application may have, so that old ones are revoked some time."""

MAX_KEY_LENGTH = 200
"""Characters of what is looked at as a key; ours have 64."""

# At each request: for Django to write this statement takes longer than all the rest of reading a message.
_OF_DIGEST = (
    "SELECT application.name FROM message_store_applicationkey JOIN message_store_application AS application"
    " ON application.id = application_id WHERE digest = %s"
)


class UnknownKey(Exception):
    """There is no such key; it may have been revoked."""


def create_application(name: str, by: Owner | None = None) -> Application:
    """Make an application, and return it; one that is there is returned as it is.

    Raises:
        ValidationError: that can't be its name; of the field ``name``.
    """
    check_name(name)
    with transaction.atomic():
        application, made = Application.objects.get_or_create(name=name)
        if made:
            audit.note(by, audit.CREATED, application)
    return application


def check_name(name: str) -> None:
    """Make sure that this can be the name of an application.

    Raises:
        ValidationError: it can't; of the field ``name``.
    """
    if not APPLICATION_NAME.fullmatch(name):
        raise ValidationError(
            {
                "name": "The name begins with a letter or a digit, and has up to 50 of the characters a to z, "
                "A to Z, 0 to 9, '.', '_' and '-'."
            }
        )


def create_key(application: Application, by: Owner | None = None) -> tuple[ApplicationKey, str]:
    """Make a further key for an application, and return its row and the key itself.

    The key can't be had again, so this is the time to show it.

    Raises:
        ValidationError: it has as many keys as it may have.
        Application.DoesNotExist: it is gone meanwhile.
    """
    key = secrets.token_hex(32)
    with transaction.atomic():
        locked = Application.objects.select_for_update().get(pk=application.pk)
        if locked.keys.count() >= MAX_KEYS:
            raise ValidationError(f"{locked} has {MAX_KEYS} keys. Revoke one that nobody uses any more.")
        row = ApplicationKey.objects.create(application=locked, digest=digest(key), beginning=key[:8])
        audit.note(by, audit.CREATED, row, application=locked.name)
    return row, key


def revoke_key(key: ApplicationKey, by: Owner | None = None) -> None:
    """Revoke a key; one that is gone already is no error."""
    with transaction.atomic():
        found = ApplicationKey.objects.select_related("application").filter(pk=key.pk).first()
        if found is not None:
            audit.note(by, "revoked", found, application=found.application.name)
            found.delete()


def delete_application(application: Application, by: Owner | None = None) -> None:
    """Remove an application with its keys; one that is gone already is no error.

    Raises:
        ValidationError: it has queues. Whoever got its name later would have them, and what lies in them.
        StoreUnavailable: nobody can say whether it has.
    """
    if store().queues(application.name, limit=1):
        raise ValidationError(f"{application} has queues. Remove them first, or revoke its keys.")
    with transaction.atomic():
        found = Application.objects.filter(pk=application.pk).first()
        if found is not None:
            audit.note(by, audit.DELETED, found)
            found.delete()


def application_for_key(key: str) -> str:
    """Return the name of the application that has this key.

    Raises:
        UnknownKey: none has.
    """
    if len(key) <= MAX_KEY_LENGTH:
        with connection.cursor() as cursor:
            cursor.execute(_OF_DIGEST, [digest(key)])
            found = cursor.fetchone()
        if found is not None:
            return str(found[0])
    raise UnknownKey


def exists(name: str) -> bool:
    """Return whether there is an application of this name."""
    return APPLICATION_NAME.fullmatch(name) is not None and Application.objects.filter(name=name).exists()


def digest(key: str) -> str:
    """Return what is kept of a key. It is as random as a digest is long, so that it needs no salt."""
    return hashlib.sha256(key.encode()).hexdigest()
