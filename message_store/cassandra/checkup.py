"""What ``doctor`` and ``/metrics`` show of the Cassandra cluster."""

from typing import NamedTuple

from django.conf import settings

from message_store.cassandra.cluster import connections, translated
from message_store.cassandra.setup import actual_replication


class ClusterFacts(NamedTuple):
    """The cluster as this process sees it.

    ``up`` and ``down`` are the nodes of its data centre: it connects to no others. ``down`` has their addresses.
    ``clock_difference`` is in seconds.
    """

    version: str
    up: int
    down: list[str]
    replication: dict[str, int]
    clock_difference: float


def examine(wait: float = 0) -> ClusterFacts:
    """Return facts about the cluster. Wait up to ``wait`` seconds for the nodes' clocks."""
    with translated():
        connection = connections.get()
        if wait:
            connection.clock.measure(wait)
        own = settings.CASSANDRA_DATACENTER
        hosts = [host for host in connection.cluster.metadata.all_hosts() if host.datacenter == own]
        return ClusterFacts(
            version=min(str(host.release_version) for host in hosts),
            up=sum(bool(host.is_up) for host in hosts),
            down=sorted(host.address for host in hosts if not host.is_up),
            replication=actual_replication(connection.cluster) or {},
            clock_difference=connection.clock.difference(),
        )
