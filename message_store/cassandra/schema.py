"""The tables of the store on Cassandra, and their version.

``manage.py message_store_schema`` creates and upgrades them. A process refuses to work with an older version. It works
with a newer one, because processes of the release before run until all are replaced.
"""

VERSION = 1
"""The version of ``TABLES``. Raise it with each change, and add what changes an older keyspace to ``UPGRADES``."""

UPGRADES: dict[int, tuple[str, ...]] = {}
"""The statements that bring a keyspace to each version from the one before. Each may be executed twice.

They add tables and columns. What the release before uses is removed no earlier than in the next release.
"""

DAY = 86_400
"""How long tables remember deletions that are many. Every node is repaired within this time."""

_MESSAGES = f"""
    CREATE TABLE IF NOT EXISTS messages (
        queue timeuuid, partition int, level tinyint, start bigint, ticks bigint, rest bigint,
        body blob, content_type text, expires bigint, size int,
        PRIMARY KEY ((queue, partition, level, start), ticks, rest)
    ) WITH gc_grace_seconds = {DAY}
    AND compaction = {{'class': 'TimeWindowCompactionStrategy', 'compaction_window_unit': 'HOURS',
        'compaction_window_size': '12'}}
"""
"""Messages are written in the order of time and expire: with time windows, whole files expire at once."""

TABLES = (
    # A queue, changed by lightweight transactions only. `listing` identifies its rows in `principals`.
    """
    CREATE TABLE IF NOT EXISTS queues (
        application text, name text, key timeuuid, version int, partitions int, type text, consistency text,
        principals frozen<list<text>>, listing timeuuid,
        PRIMARY KEY ((application, name))
    )
    """,
    # The names of an application's queues. A row counts only if the queue has its key.
    f"""
    CREATE TABLE IF NOT EXISTS names (
        application text, shard tinyint, name text, key timeuuid,
        PRIMARY KEY ((application, shard), name, key)
    ) WITH gc_grace_seconds = {DAY}
    """,
    # The queues that name a principal. A row counts only if the queue has its listing.
    f"""
    CREATE TABLE IF NOT EXISTS principals (
        principal text, shard tinyint, application text, name text, listing timeuuid,
        PRIMARY KEY ((principal, shard), application, name, listing)
    ) WITH gc_grace_seconds = {DAY}
    """,
    # The index of buckets: see `buckets.py`.
    f"""
    CREATE TABLE IF NOT EXISTS buckets (
        queue timeuuid, partition int, kind tinyint, edge bigint, level tinyint, lifetime int, full_at bigint,
        is_empty boolean,
        PRIMARY KEY ((queue, partition), kind, edge, level, lifetime)
    ) WITH gc_grace_seconds = {DAY}
    """,
    _MESSAGES,
    # Positions, changed by lightweight transactions only. Each changes `version`.
    """
    CREATE TABLE IF NOT EXISTS positions (
        queue timeuuid, consumer text, version timeuuid static, partition int, message_id uuid,
        PRIMARY KEY ((queue, consumer), partition)
    )
    """,
    # The names of consumers. A row counts only if the consumer has positions.
    """
    CREATE TABLE IF NOT EXISTS consumers (queue timeuuid, consumer text, PRIMARY KEY ((queue), consumer))
    """,
    "CREATE TABLE IF NOT EXISTS schema_version (key text, version int, PRIMARY KEY ((key)))",
)

GET_VERSION = "SELECT version FROM keyspace.schema_version WHERE key = 'schema'"
SET_VERSION = "INSERT INTO keyspace.schema_version (key, version) VALUES ('schema', %s)"
