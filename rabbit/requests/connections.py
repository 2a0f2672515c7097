"""Requests about connections."""

from rabbit.entities import Client, Connection
from rabbit.requests.parsing import as_text, as_time, one_line, parse_rows
from rabbit.requests.sending import JSONObject, Requests

CLIENT_COLUMNS = "user,vhost,protocol,connected_at,name,user_provided_name"


class ConnectionRequests(Requests):
    def connections_of(self, user: str) -> list[Connection]:
        """Return a user's live connections; none if it does not exist."""
        rows = parse_rows(self._get("connections", "username", user), name=str, vhost=str)
        return [
            Connection(row["name"], row["vhost"], _client_address(row), as_time(row.get("connected_at")))
            for row in rows
        ]

    def clients(self, vhost: str | None) -> list[Client]:
        """Return all connections to a vhost (None: to any vhost)."""
        path = ("connections",) if vhost is None else ("vhosts", vhost, "connections")
        rows = parse_rows(self._get(*path, params={"columns": CLIENT_COLUMNS}))
        # A connection has no user while it is opened or closed.
        return [
            Client(
                row["user"],
                row["vhost"],
                as_text(row.get("protocol")),
                as_time(row.get("connected_at")),
                as_text(row.get("name")),
                as_text(row.get("user_provided_name")),
            )
            for row in rows
            if isinstance(row.get("user"), str) and isinstance(row.get("vhost"), str)
        ]

    def close_connection(self, name: str, reason: str) -> None:
        """Close one live connection."""
        self._delete("connections", name, headers={"X-Reason": one_line(reason)})

    def close_connections_of(self, user: str, reason: str) -> None:
        """Close a user's live connections. The broker shows ``reason`` to the clients as one line of ASCII."""
        self._delete("connections", "username", user, headers={"X-Reason": one_line(reason)})


def _client_address(row: JSONObject) -> str:
    """Return ``peer_host`` or, if missing, the address in the name: "127.0.0.1:51530 -> 127.0.0.1:5672"."""
    host = row.get("peer_host")
    return host if isinstance(host, str) else str(row["name"]).partition(" -> ")[0].rpartition(":")[0]
