"""Which spellings of an e-mail address are one mailbox (RFC 5321)."""

import re

from core.addresses import ascii_domain

_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_ATOMS = re.compile(r"[-!#$%&'*+/=?^_`{|}~0-9a-z]+(?:\.[-!#$%&'*+/=?^_`{|}~0-9a-z]+)*")


def mailbox(address: str) -> str:
    """Return the mailbox of an address in normal form, as the key of limits.

    Most providers deliver ann+tag@… to ann@….
    """
    local, _, domain = address.rpartition("@")
    return f"{local.partition('+')[0] or local}@{ascii_domain(domain)}"


def unquoted(local: str) -> str:
    """Return the lower-case local part without quotes and backslashes that change nothing: "fr\\ed" is fred."""
    quoted = _QUOTED.fullmatch(local)
    if quoted is None:
        return local
    text = re.sub(r"\\(.)", r"\1", quoted[1], flags=re.DOTALL)
    return text if _ATOMS.fullmatch(text) else '"' + re.sub(r'(["\\\s])', r"\\\1", text) + '"'
