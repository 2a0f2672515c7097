"""Which spellings of an e-mail address are one mailbox (RFC 5321)."""

import contextlib
import re

_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_ATOMS = re.compile(r"[-!#$%&'*+/=?^_`{|}~0-9a-z]+(?:\.[-!#$%&'*+/=?^_`{|}~0-9a-z]+)*")


def unquoted(address: str) -> str:
    """Return the lower-case address without quotes and backslashes that change nothing: "fr\\ed"@… is fred@…."""
    local, at, domain = address.rpartition("@")
    quoted = _QUOTED.fullmatch(local)
    if quoted is None:
        return address
    text = re.sub(r"\\(.)", r"\1", quoted[1], flags=re.DOTALL)
    if not _ATOMS.fullmatch(text):
        text = '"' + re.sub(r'(["\\\s])', r"\\\1", text) + '"'
    return f"{text}{at}{domain}"


def mailbox(address: str) -> str:
    """Return the mailbox of an address in normal form, as the key of limits.

    Most providers deliver ann+tag@… to ann@…. The domain is in Punycode.
    """
    local, _, domain = address.rpartition("@")
    with contextlib.suppress(UnicodeError):
        domain = domain.encode("idna").decode()
    return f"{local.partition('+')[0] or local}@{domain}"
