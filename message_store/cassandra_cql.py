"""The statements of the store on Cassandra. `cassandra_schema.py` has the tables."""

from message_store import buckets

REMOVED_SECONDS = 864_000
"""How long a removed queue is remembered, for those who still have a reference to it."""

START, END, REMOVED = 0, 1, 2
"""Kinds of entries of the index: a bucket's first ticks, the first after it, and that the queue was removed."""

_QUEUE = "SELECT name, key, version, partitions, type, consistency, principals, listing FROM queues"
_IN_BUCKET = "queue = ? AND partition = ? AND level = ? AND start = ?"
_RANGE = f"WHERE {_IN_BUCKET} AND (ticks, rest) >= (?, ?) AND (ticks, rest) < (?, ?)"
_MESSAGE = "SELECT ticks, rest, expires, body, content_type FROM messages"
_ENTRY = "SELECT kind, edge, level, lifetime, full_at, is_empty FROM buckets WHERE queue = ? AND partition = ?"

FIND_QUEUE = f"{_QUEUE} WHERE application = ? AND name = ?"
CREATE_QUEUE = """
    INSERT INTO queues (application, name, key, version, partitions, type, consistency, principals, listing)
    VALUES (?, ?, ?, 1, ?, ?, ?, ?, ?) IF NOT EXISTS
"""
UPDATE_QUEUE = """
    UPDATE queues SET version = ?, partitions = ?, type = ?, consistency = ?, principals = ?, listing = ?
    WHERE application = ? AND name = ? IF key = ? AND version = ?
"""
DELETE_QUEUE = "DELETE FROM queues WHERE application = ? AND name = ? IF key = ? AND version = ?"

ADD_NAME = "INSERT INTO names (application, shard, name, key) VALUES (?, ?, ?, ?)"
DELETE_NAME = "DELETE FROM names WHERE application = ? AND shard = ? AND name = ? AND key = ?"
LIST_NAMES = "SELECT application, name, key FROM names WHERE application = ? AND shard = ? AND name >= ?"
ADD_PRINCIPAL = "INSERT INTO principals (principal, shard, application, name, listing) VALUES (?, ?, ?, ?, ?)"
DELETE_PRINCIPAL = (
    "DELETE FROM principals WHERE principal = ? AND shard = ? AND application = ? AND name = ? AND listing = ?"
)
LIST_PRINCIPAL = (
    "SELECT application, name, listing FROM principals "
    "WHERE principal = ? AND shard = ? AND (application, name) >= (?, ?)"
)

_COVERING = ", ".join(f"({START}, ?, {level})" for level in buckets.LEVELS)
COVERING = f"{_ENTRY} AND (kind, edge, level) IN ({_COVERING}, ({REMOVED}, 0, 0))"
FOLLOWING = f"{_ENTRY} AND kind = {START} AND edge > ? AND edge < ?"
PRECEDING = (
    f"{_ENTRY} AND kind = {END} AND edge > ? AND edge <= ? ORDER BY kind DESC, edge DESC, level DESC, lifetime DESC"
)
ADD_ENTRY = (
    "INSERT INTO buckets (queue, partition, kind, edge, level, lifetime, is_empty) "
    "VALUES (?, ?, ?, ?, ?, ?, false) USING TTL ?"
)
MARK_FULL = (
    "UPDATE buckets USING TTL ? SET full_at = ? "
    f"WHERE queue = ? AND partition = ? AND kind = {START} AND edge = ? AND level = ? AND lifetime = ?"
)
MARK_EMPTY = (
    "UPDATE buckets USING TTL ? AND TIMESTAMP ? SET is_empty = true "
    "WHERE queue = ? AND partition = ? AND kind = ? AND edge = ? AND level = ? AND lifetime = ?"
)
DELETE_ENTRY = (
    "DELETE FROM buckets USING TIMESTAMP ? WHERE queue = ? AND partition = ? AND kind = ? AND edge = ? AND level = ?"
)
DELETE_ENTRIES = f"DELETE FROM buckets WHERE queue = ? AND partition = ? AND kind >= {START} AND kind <= {END}"
MARK_REMOVED = (
    "INSERT INTO buckets (queue, partition, kind, edge, level, lifetime) "
    f"VALUES (?, ?, {REMOVED}, 0, 0, 0) USING TTL {REMOVED_SECONDS}"
)
IS_REMOVED = f"SELECT kind FROM buckets WHERE queue = ? AND partition = 1 AND kind = {REMOVED}"

ADD_MESSAGE = """
    INSERT INTO messages (queue, partition, level, start, ticks, rest, body, content_type, expires, size)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) USING TTL ?
"""
READ_UP = f"{_MESSAGE} {_RANGE}"
READ_DOWN = f"{_MESSAGE} {_RANGE} ORDER BY ticks DESC, rest DESC"
READ_ONE = f"{_MESSAGE} WHERE {_IN_BUCKET} AND ticks = ? AND rest = ?"
FIND_ANY = f"SELECT ticks FROM messages WHERE {_IN_BUCKET} LIMIT 1"
MEASURE = f"SELECT expires, size FROM messages WHERE {_IN_BUCKET}"
DELETE_MESSAGE = f"DELETE FROM messages WHERE {_IN_BUCKET} AND ticks = ? AND rest = ?"
DELETE_BUCKET = f"DELETE FROM messages WHERE {_IN_BUCKET}"

GET_POSITIONS = "SELECT version, partition, message_id FROM positions WHERE queue = ? AND consumer = ?"
CHANGE_VERSION = "UPDATE positions SET version = ? WHERE queue = ? AND consumer = ? IF version = ?"
SET_POSITION = "UPDATE positions SET message_id = ? WHERE queue = ? AND consumer = ? AND partition = ?"
DELETE_POSITION = "DELETE FROM positions WHERE queue = ? AND consumer = ? AND partition = ?"
ADD_CONSUMER = "INSERT INTO consumers (queue, consumer) VALUES (?, ?)"
LIST_CONSUMERS = "SELECT consumer FROM consumers WHERE queue = ?"
DELETE_CONSUMERS = "DELETE FROM consumers WHERE queue = ?"
