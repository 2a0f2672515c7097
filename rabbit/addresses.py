"""The addresses of a broker: one, or those of several nodes of one cluster, which are tried in turn.

A setting separates them by commas. All clients of one process with the same setting begin with the address that worked
last.
"""

import re
import threading
from collections.abc import Sequence
from functools import lru_cache

_SEPARATOR = re.compile(r"\s*,\s*(?=[a-zA-Z][a-zA-Z0-9+.-]*://)")


def split_addresses(setting: str) -> list[str]:
    """Return the addresses in a setting, without trailing slashes. Only a comma before ``scheme://`` separates them."""
    return [address.rstrip("/") for address in _SEPARATOR.split(setting.strip()) if address]


class Addresses:
    """Addresses of one cluster, for many threads."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = tuple(addresses)
        self._first = 0
        self._checked: set[str] = set()
        self._cluster = ("", "")  # the address that was used last, and the cluster there
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._addresses)

    def in_turn(self) -> list[str]:
        """Return the addresses in the order to try them: first the one that worked last."""
        return [*self._addresses[self._first :], *self._addresses[: self._first]]

    def move_past(self, address: str) -> None:
        """Begin with the next address from now on, because this one failed."""
        with self._lock:
            if self._addresses[self._first] == address:
                self._first = (self._first + 1) % len(self._addresses)

    def needs_cluster(self, address: str) -> bool:
        """Return whether the name of the cluster at an address must be checked before its first use."""
        return len(self) > 1 and address not in self._checked

    def conflict(self, address: str, cluster: str) -> str:
        """Record the id or name of the cluster at an address. Return why it can't be used, or an empty text if it can.

        An address that was used before can still be used: its cluster was renamed.
        """
        if not cluster:
            return ""
        with self._lock:
            other, known = self._cluster
            if other and address not in self._checked and are_two(known, cluster):
                return two_clusters(other, address)
            self._checked.add(address)
            self._cluster = address, cluster
        return ""


def are_two(cluster: str, other: str) -> bool:
    """Return whether these ids or names are certainly of two clusters.

    A cluster without a name is named after the node that is asked, such as "rabbit@a". So two such names say nothing.
    """
    return cluster != other and not ("@" in cluster and "@" in other)


def two_clusters(address: str, other: str) -> str:
    return f"{without_credentials(other)} leads to another cluster than {without_credentials(address)}"


def without_credentials(address: str) -> str:
    scheme, _, rest = address.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"


@lru_cache(maxsize=16)
def addresses_of(setting: str) -> Addresses:
    """Return the addresses of a setting, which all clients of this process share."""
    return Addresses(split_addresses(setting))
