"""The settings of the store on Cassandra, read from their text. This imports no driver, so that checks may use it."""

import re
from urllib.parse import urlsplit

from django.conf import settings

DEFAULT_PORT = 9042

MAX_BODY = 8 * 1024 * 1024
"""The largest message, in bytes. Cassandra accepts requests of 16 MiB."""

KEYSPACE = re.compile(r"[a-z][a-z0-9_]{0,47}")
"""Names that need no quotes in CQL."""


def contact_points() -> list[tuple[str, int]]:
    """Return the hosts and ports of CASSANDRA_HOSTS. Raises ValueError for none, or if one isn't host or host:port."""
    found = []
    for entry in settings.CASSANDRA_HOSTS:
        parts = urlsplit(f"//{entry}")
        if not parts.hostname or parts.netloc != entry or "@" in entry:
            raise ValueError(f"'{entry}' is neither a host nor host:port")
        found.append((parts.hostname, parts.port or DEFAULT_PORT))
    if not found:
        raise ValueError("it is empty")
    return found


def replication() -> dict[str, int]:
    """Return the replicas in each data centre, from CASSANDRA_REPLICATION.

    Raises ValueError unless it is a number or a list such as ``dc1:3,dc2:3`` that includes CASSANDRA_DATACENTER.
    """
    text, own = settings.CASSANDRA_REPLICATION, settings.CASSANDRA_DATACENTER
    pairs = [("", "", text)] if ":" not in text else [part.strip().rpartition(":") for part in text.split(",")]
    found = {}
    for name, _, number in pairs:
        if not re.fullmatch(r"[1-9][0-9]?", number):
            raise ValueError(f"'{number}' is not a number of replicas")
        found[name or own] = int(number)
    if own not in found:
        raise ValueError(f"it leaves out CASSANDRA_DATACENTER ({own})")
    return found
