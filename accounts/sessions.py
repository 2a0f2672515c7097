"""Sessions of browsers in the database, so that whoever reads the database can't use or read them.

What the cookie says is nowhere in it: a row is found by the digest of that, and is sealed with a key that is made of
it. A sign-in code that is waited for lies in a session, too.
"""

import base64
import hashlib
from typing import Any

from cryptography.fernet import Fernet, InvalidToken
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from django.conf import settings
from django.contrib.sessions.backends import db
from django.contrib.sessions.base_session import AbstractBaseSession
from django.utils import timezone


class SessionStore(db.SessionStore):
    """The sessions of ``SESSION_ENGINE``. Nothing here asks for them asynchronously."""

    def encode(self, session_dict: dict[str, Any]) -> str:
        """Return what is in a session as it lies in the database."""
        return self._cipher().encrypt(self.serializer().dumps(session_dict)).decode()

    def decode(self, session_data: bytes | str) -> dict[str, Any]:
        """Return what is in a session; nothing where SECRET_KEY was changed meanwhile."""
        try:
            found: dict[str, Any] = self.serializer().loads(self._cipher().decrypt(session_data))
        except (InvalidToken, ValueError):
            return {}
        return found

    def exists(self, session_key: str) -> bool:
        """Return whether there is a session that this cookie leads to."""
        return super().exists(_digest(session_key))

    def create_model_instance(self, data: dict[str, Any]) -> AbstractBaseSession:
        """Return the row of this session with this in it."""
        row = super().create_model_instance(data)
        row.session_key = _digest(row.session_key)
        return row

    def delete(self, session_key: str | None = None) -> None:
        """End the session that this cookie leads to; without one, this session."""
        if (key := session_key or self.session_key) is not None:
            super().delete(_digest(key))

    def _get_session_from_db(self) -> AbstractBaseSession | None:
        assert self.session_key is not None  # noqa: S101 - without one, Django doesn't ask
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
    """Return what a row is found by: 40 characters, as many as its column holds."""
    return hashlib.blake2b(session_key.encode(), digest_size=20).hexdigest()
