"""What a container's health check runs: does the web process answer? It ends with 1 and the reason where it doesn't.

It is asked by the name that people reach Guardian by, since any other is refused, and by plain HTTP, which it takes for
this alone where ``GUARDIAN_BASE_URL`` is an https address.
"""

import http.client
import os
import sys
from urllib.parse import urlsplit

PORT = 8000
SECONDS = 4.0
"""How long to wait for the answer; the health check has five seconds, the start of this program included."""


def problem(port: int = PORT) -> str:
    """Return what is wrong with the web process on this port of the machine; empty: nothing."""
    host = urlsplit(os.environ.get("GUARDIAN_BASE_URL", "")).hostname or "127.0.0.1"
    host = f"[{host}]" if ":" in host else host  # an IPv6 address
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    try:
        connection.request("GET", "/healthz", headers={"Host": host})
        answer = connection.getresponse()
        return "" if answer.status == http.client.OK else f"/healthz answered {answer.status} to the name {host}"
    except (OSError, http.client.HTTPException) as error:
        return f"/healthz does not answer: {error!r}"
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(problem(*map(int, sys.argv[1:])) or 0)
