"""Encrypted sessions in the database. A reader of the database can neither use nor read them.

The session key in the cookie is not stored. Rows are found by its digest and encrypted with a key derived from it.
Sessions also contain pending sign-in codes.
"""

import base64
import hashlib
from typing import Any

from cryptography.fernet import Fernet, InvalidToken
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from django.conf import settings
from django.contrib.sessions.backends import db
from django.contrib.sessions.backends.base import UpdateError
from django.contrib.sessions.base_session import AbstractBaseSession
from django.db import InterfaceError, InternalError, OperationalError
from django.utils import timezone


class SessionStore(db.SessionStore):
    """The session store of ``SESSION_ENGINE``. It supports only synchronous access."""

    def encode(self, session_dict: dict[str, Any]) -> str:
        return self._cipher().encrypt(self.serializer().dumps(session_dict)).decode()

    def decode(self, session_data: bytes | str) -> dict[str, Any]:
        """Return the decrypted session, or {} if SECRET_KEY has changed."""
        try:
            found: dict[str, Any] = self.serializer().loads(self._cipher().decrypt(session_data))
        except (InvalidToken, ValueError):
            return {}
        return found

    def exists(self, session_key: str) -> bool:
        return super().exists(_digest(session_key))

    def create_model_instance(self, data: dict[str, Any]) -> AbstractBaseSession:
        row = super().create_model_instance(data)
        row.session_key = _digest(row.session_key)
        return row

    def save(self, must_create: bool = False) -> None:
        """Save the session. An unavailable database raises its own error: Django takes it for a deleted session."""
        try:
            super().save(must_create)
        except UpdateError as error:
            if isinstance(error.__context__, OperationalError | InterfaceError | InternalError):
                raise error.__context__ from None
            raise

    def delete(self, session_key: str | None = None) -> None:
        if (key := session_key or self.session_key) is not None:
            super().delete(_digest(key))

    def _get_session_from_db(self) -> AbstractBaseSession | None:
        assert self.session_key is not None  # noqa: S101 - Django calls this only with a key
        row = self.model.objects.filter(session_key=_digest(self.session_key), expire_date__gt=timezone.now()).first()
        if row is None:
            self._session_key = None
        return row

    def _cipher(self) -> Fernet:
        secret = f"{settings.SECRET_KEY}{self.session_key}".encode()
        return Fernet(
            base64.urlsafe_b64encode(HKDF(SHA256(), 32, salt=None, info=b"guardian: sessions").derive(secret))
        )


def _digest(session_key: str) -> str:
    """Return the key of a row. It has 40 characters, the length of the column."""
    return hashlib.blake2b(session_key.encode(), digest_size=20).hexdigest()
