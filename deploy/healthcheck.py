"""What a container's health check runs: does the web process answer? It ends with 1 and the reason if it doesn't.

The request is plain HTTP to an IP address. ``/healthz`` accepts both, whatever ``GUARDIAN_BASE_URL`` is.
"""

import http.client
import sys

PORT = 8000
SECONDS = 4.0
"""How long to wait for the answer; the health check has five seconds, the start of this program included."""


def problem(port: int = PORT) -> str:
    """Return what is wrong with the web process on this port of the machine; empty: nothing."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    try:
        connection.request("GET", "/healthz")
        answer = connection.getresponse()
        return "" if answer.status == http.client.OK else f"/healthz answered {answer.status}"
    except (OSError, http.client.HTTPException) as error:
        return f"/healthz does not answer: {error!r}"
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(problem(*map(int, sys.argv[1:])) or 0)
