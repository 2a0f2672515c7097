"""Secrets that have to be read again, as they lie in the database: sealed with keys that come from SECRET_KEY.

Each purpose has keys of its own, so that what was sealed for one isn't opened as another's.
"""

import base64

from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from django.conf import settings

CHANNELS = "guardian: the addresses of channels"
CONFIGURATIONS = "guardian: the configurations of agents"


class CannotUnseal(ValueError):
    """It can't be opened: SECRET_KEY was changed, or it was sealed for another purpose."""


def seal(purpose: str, secret: str) -> str:
    """Return the secret so that it can be stored."""
    return _keys(purpose).encrypt(secret.encode()).decode()


def unseal(purpose: str, sealed: str) -> str:
    """Return what was sealed for this purpose, now or with one of SECRET_KEY_FALLBACKS.

    Raises:
        CannotUnseal: it can't be opened.
    """
    try:
        return _keys(purpose).decrypt(sealed.encode()).decode()
    except InvalidToken as error:
        raise CannotUnseal("Guardian's SECRET_KEY was changed, so this can't be read any more.") from error


def _keys(purpose: str) -> MultiFernet:
    """Return the keys of a purpose: the first seals, and each opens what it sealed."""
    secrets = [settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS]
    return MultiFernet([Fernet(base64.urlsafe_b64encode(_derived(purpose, secret))) for secret in secrets])


def _derived(purpose: str, secret: str) -> bytes:
    return HKDF(SHA256(), 32, salt=None, info=purpose.encode()).derive(secret.encode())
