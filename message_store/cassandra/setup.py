"""Create and upgrade the keyspace of the settings, and compare its replication with the settings."""

from collections.abc import Iterator

from cassandra import ConsistencyLevel
from cassandra.cluster import Cluster, Session
from cassandra.query import SimpleStatement
from django.conf import settings

from message_store.cassandra.cluster import open_cluster, translated
from message_store.cassandra.schema import GET_VERSION, SET_VERSION, TABLES, UPGRADES, VERSION
from message_store.cassandra.settings import replication

DDL_SECONDS = 60.0


class SetupError(Exception):
    """The keyspace can't be created or upgraded. The text says what to do."""


def actual_replication(cluster: Cluster) -> dict[str, int] | None:
    """Return the keyspace's replicas in each data centre, or None if there is no keyspace.

    Another strategy has none.
    """
    keyspace = cluster.metadata.keyspaces.get(settings.CASSANDRA_KEYSPACE)
    if keyspace is None:
        return None
    factors = getattr(keyspace.replication_strategy, "dc_replication_factors_info", {})
    return {name: factor.all_replicas for name, factor in factors.items()}


def set_up() -> Iterator[str]:
    """Create or upgrade the keyspace and its tables, and yield what was done. Raises SetupError."""
    with translated():
        cluster = open_cluster()
        try:
            session = cluster.connect()
            yield from _set_up(cluster, session)
        finally:
            cluster.shutdown()


def _set_up(cluster: Cluster, session: Session) -> Iterator[str]:
    name, wanted, actual = settings.CASSANDRA_KEYSPACE, replication(), actual_replication(cluster)
    strategy = str({"class": "NetworkTopologyStrategy", **{dc: str(number) for dc, number in wanted.items()}})
    if actual is None:
        for datacenter, number in wanted.items():
            nodes = sum(host.datacenter == datacenter for host in cluster.metadata.all_hosts())
            if nodes < number:
                raise SetupError(
                    f"The data centre {datacenter} has {nodes} nodes, too few for {number} replicas. Add nodes, or "
                    "lower CASSANDRA_REPLICATION."
                )
        session.execute(f'CREATE KEYSPACE IF NOT EXISTS "{name}" WITH replication = {strategy}', timeout=DDL_SECONDS)
        yield f"Created the keyspace {name} with {_readable(wanted)}."
    elif actual != wanted:
        raise SetupError(
            f"The keyspace {name} has {_readable(actual)}, but CASSANDRA_REPLICATION says {_readable(wanted)}. Correct "
            f'the setting, or run ALTER KEYSPACE "{name}" WITH replication = {strategy} in cqlsh, and then '
            f"`nodetool repair --full {name}` on every node."
        )
    session.set_keyspace(name)  # no prepared statement follows
    version = _version(cluster, session)
    if version >= VERSION:
        which = "which is current" if version == VERSION else f"of a newer Guardian. This one needs version {VERSION}"
        yield f"The tables of {name} have version {version}, {which}."
        return
    steps = TABLES if version == 0 else [step for number in range(version, VERSION) for step in UPGRADES[number + 1]]
    for step in steps:
        session.execute(step, timeout=DDL_SECONDS)
    session.execute(_at_quorum(SET_VERSION), [VERSION])
    yield f"{'Created' if version == 0 else 'Upgraded'} the tables of {name}: version {VERSION}."


def _version(cluster: Cluster, session: Session) -> int:
    """Return the version of the tables, 0 if they were not all created."""
    if "schema_version" not in cluster.metadata.keyspaces[settings.CASSANDRA_KEYSPACE].tables:
        return 0
    row = session.execute(_at_quorum(GET_VERSION)).one()
    return int(row[0]) if row else 0


def _at_quorum(cql: str) -> SimpleStatement:
    return SimpleStatement(cql.replace("keyspace.", ""), consistency_level=ConsistencyLevel.QUORUM)


def _readable(replication: dict[str, int]) -> str:
    if not replication:
        return "no NetworkTopologyStrategy"
    return ", ".join(f"{number} replicas in {name}" for name, number in sorted(replication.items()))
