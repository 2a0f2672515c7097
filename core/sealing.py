"""Encryption of secrets in the database and in forms, with keys derived from SECRET_KEY.

Each purpose has its own keys, so that a secret sealed for one purpose can't be unsealed for another.
"""

import base64

from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from django.conf import settings
from django.utils.encoding import force_bytes

CHANNELS = "guardian: the addresses of channels"
SIGNING = "guardian: what messages to webhooks are signed with"
CONFIGURATIONS = "guardian: the configurations of agents"
PASSWORDS = "guardian: passwords that are set later"


class CannotUnseal(ValueError):
    """SECRET_KEY was changed, or the secret was sealed for another purpose or too long ago."""


def seal(purpose: str, secret: str) -> str:
    return _keys(purpose).encrypt(secret.encode()).decode()


def unseal(purpose: str, sealed: str, max_age_seconds: int | None = None) -> str:
    """Return the secret that was sealed for this purpose with SECRET_KEY or one of SECRET_KEY_FALLBACKS.

    Raises CannotUnseal if no key fits, or it was sealed longer than ``max_age_seconds`` ago.
    """
    try:
        return _keys(purpose).decrypt(sealed.encode(), max_age_seconds).decode()
    except InvalidToken as error:
        raise CannotUnseal("Guardian has another key now, so this can't be read any more.") from error


def _keys(purpose: str) -> MultiFernet:
    secrets = [settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS]
    return MultiFernet([Fernet(base64.urlsafe_b64encode(_derive(purpose, secret))) for secret in secrets])


def _derive(purpose: str, secret: str | bytes) -> bytes:
    return HKDF(SHA256(), 32, salt=None, info=purpose.encode()).derive(force_bytes(secret))
