"""Which versions of the agent work with this API."""

import re
from typing import NamedTuple


class Compatibility(NamedTuple):
    """Whether an agent works with Guardian, and a sentence about it."""

    status: str
    message: str


OLDEST_TESTED_VERSION = (1, 0, 5)
_VERSION = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})(?:\.([0-9]{1,9}))?(?![0-9])")


def compatibility(version: str) -> Compatibility:
    """Return whether an agent of this version works with Guardian.

    1.x versions from the oldest tested one are compatible. All others are unknown; none is known to be incompatible.
    """
    match = _VERSION.match(version)
    if match is None:
        return Compatibility("unknown", "The agent has not sent a valid version.")
    found = tuple(int(part or 0) for part in match.groups())
    if found[0] == OLDEST_TESTED_VERSION[0] and found >= OLDEST_TESTED_VERSION:
        return Compatibility("compatible", "Agents of version 1.0.5 and newer 1.x work with Guardian.")
    return Compatibility(
        "unknown", "Guardian was tested with agents of version 1.0.5 and newer 1.x, not with this one."
    )
