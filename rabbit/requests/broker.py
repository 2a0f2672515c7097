"""Requests about the broker itself, its nodes and vhosts."""

from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any

import orjson

from rabbit.entities import Node, Statistics, User, Vhost
from rabbit.errors import NotOnBroker, Refused
from rabbit.failover import CLUSTER_ID
from rabbit.permissions import FULL_ACCESS
from rabbit.requests.parsing import as_number, parse_object, parse_rows
from rabbit.requests.sending import JSONObject, Requests, checked

NODE_COLUMNS = (
    "name,running,mem_used,mem_limit,mem_alarm,disk_free,disk_free_limit,disk_free_alarm,"
    "fd_used,fd_total,uptime,partitions"
)


class BrokerRequests(Requests):
    def overview(self) -> JSONObject:
        """Return the broker's overview: versions, totals, listeners."""
        return parse_object(self._get("overview"), rabbitmq_version=str)

    def statistics(self) -> Statistics:
        """Return which statistics the broker keeps."""
        answer = self._get("overview", params={"columns": "rates_mode,disable_stats,sample_retention_policies"})
        row = parse_object(answer)
        policies = row.get("sample_retention_policies")
        kept = policies.get("basic") if isinstance(policies, dict) else None
        ages = [seconds for seconds in map(as_number, kept if isinstance(kept, list) else []) if seconds]
        is_off = row.get("disable_stats") is True or row.get("rates_mode") == "none"
        return Statistics(not is_off, max(ages, default=0))

    def whoami(self) -> User:
        row = parse_object(self._get("whoami"), name=str, tags=list)
        return User(row["name"], frozenset(map(str, row["tags"])))

    def is_rewritten(self) -> bool:
        """Return whether something before the broker decodes %2F in addresses, so that they lead elsewhere."""
        # Decoded, this is the address of the user's list of permissions.
        return self._exchange("GET", ("users", f"{self.whoami().name}/permissions")).status == 200

    def cluster_id(self) -> str:
        """Return the id that the cluster got when it was created; empty: it has none, or the broker doesn't tell it."""
        try:
            return str(parse_object(self._get("global-parameters", CLUSTER_ID), value=str)["value"])
        except (NotOnBroker, Refused):
            return ""

    def node(self) -> str:
        """Return the name of the node that answers, or "" if it doesn't tell. No other node is queried."""
        answer = self._get("overview", params={"disable_stats": "true", "columns": "node"})
        return str(parse_object(answer).get("node", ""))

    def denied_features(self) -> set[str]:
        """Return the deprecated features that the broker denies. RabbitMQ before 4.3 doesn't report any."""
        try:
            rows = parse_rows(self._get("deprecated-features"), name=str)
        except NotOnBroker:  # before 3.13
            return set()
        return {row["name"] for row in rows if row.get("state") == "denied"}

    def clock(self) -> datetime | None:
        """Return the time on the broker's machine, in whole seconds; None: the answer has no date."""
        answer = self._exchange("GET", ("whoami",))  # a refusal has a date too
        try:
            return parsedate_to_datetime(answer.headers.get("date", ""))
        except (TypeError, ValueError):
            return None

    def nodes(self) -> list[Node]:
        """Return the nodes of the cluster, including stopped ones."""
        rows = parse_rows(self._get("nodes", params={"columns": NODE_COLUMNS}), name=str, running=bool)
        lacks_alarms = any(row["running"] and "mem_alarm" not in row for row in rows)  # without statistics
        raised = self.alarms() if lacks_alarms else ()
        return [
            Node(
                row["name"],
                row["running"],
                as_number(row.get("mem_used")),
                as_number(row.get("mem_limit")),
                row.get("mem_alarm") is True or f"memory on {row['name']}" in raised,
                as_number(row.get("disk_free")),
                as_number(row.get("disk_free_limit")),
                row.get("disk_free_alarm") is True or f"disk on {row['name']}" in raised,
                as_number(row.get("fd_used")),
                as_number(row.get("fd_total")),
                None if (milliseconds := as_number(row.get("uptime"))) is None else milliseconds / 1000,
                tuple(map(str, lost)) if isinstance(lost := row.get("partitions"), list) else (),
            )
            for row in rows
        ]

    def alarms(self) -> list[str]:
        """Return the cluster's resource alarms, such as "memory on rabbit@host"."""
        answer = self._exchange("GET", ("health", "checks", "alarms"), ok_status=503)
        if answer.status != 503:
            parse_object(checked(answer), status=str)
            return []
        # The broker answers 503 if there are alarms. A proxy may answer 503 too.
        try:
            alarms = orjson.loads(answer.body)["alarms"]
            return [f"{alarm['resource']} on {alarm['node']}" for alarm in alarms]
        except (ValueError, KeyError, TypeError):
            checked(answer)
            raise

    def vhosts(self) -> list[Vhost]:
        rows = parse_rows(self._get("vhosts", params={"columns": "name,cluster_state"}), name=str)
        return [Vhost(row["name"], _nodes_that_run(row.get("cluster_state"))) for row in rows]

    def create_vhost(self, name: str) -> bool:
        """Create a vhost, and give this client's user all permissions on it. Return whether it is new.

        The broker gives them only with a new vhost, and not if the connection is cut while it creates that.
        """
        is_new = self._put("vhosts", name)
        self.take_permissions(name)
        return is_new

    def take_permissions(self, vhost: str) -> None:
        """Give this client's user all permissions on a vhost."""
        self._put("permissions", vhost, self.whoami().name, json=FULL_ACCESS._asdict())

    def delete_vhost(self, name: str) -> None:
        """Delete a vhost with everything in it."""
        self._delete("vhosts", name)


def _nodes_that_run(states: Any) -> frozenset[str]:
    """Return the nodes on which a vhost runs, from its states. RabbitMQ 4.x writes an empty list for none."""
    if not isinstance(states, dict):
        return frozenset()
    return frozenset(node for node, state in states.items() if state == "running")
