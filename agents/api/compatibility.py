"""Which versions of the agent work with this API."""

import re

OLDEST_TESTED_VERSION = (1, 0, 5)
_VERSION = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})(?:\.([0-9]{1,9}))?(?![0-9])")


def compatibility(version: str) -> dict[str, str]:
    """Return whether an agent of this version works with Guardian (``status``), and a sentence about it (``message``).

    1.x versions from the oldest tested one are compatible. All others are unknown; none is known to be incompatible.
    """
    match = _VERSION.match(version)
    if match is None:
        return {"status": "unknown", "message": "The agent has not sent a valid version."}
    found = tuple(int(part or 0) for part in match.groups())
    if found[0] == OLDEST_TESTED_VERSION[0] and found >= OLDEST_TESTED_VERSION:
        return {"status": "compatible", "message": "Agents of version 1.0.5 and newer 1.x work with Guardian."}
    message = "Guardian was tested with agents of version 1.0.5 and newer 1.x, not with this one."
    return {"status": "unknown", "message": message}
