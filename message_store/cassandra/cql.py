"""The statements of the store on Cassandra, for any keyspace. `cassandra_schema.py` has the tables."""

import re

from message_store.cassandra import buckets

REMOVED_SECONDS = 864_000
"""How long a removed queue is remembered, for those who still have a reference to it."""

START, END, REMOVED = 0, 1, 2
"""Kinds of entries of the index: a bucket's first ticks, the first after it, and that the queue was removed."""

_QUEUE = "SELECT name, key, version, partitions, type, consistency, principals, listing FROM keyspace.queues"
_IN_BUCKET = "queue = ? AND partition = ? AND level = ? AND start = ?"
_RANGE = f"WHERE {_IN_BUCKET} AND (ticks, rest) >= (?, ?) AND (ticks, rest) < (?, ?)"
_MESSAGE = "SELECT ticks, rest, expires, body, content_type FROM keyspace.messages"
_ENTRY = "SELECT kind, edge, level, lifetime, full_at, is_empty FROM keyspace.buckets WHERE queue = ? AND partition = ?"

FIND_QUEUE = f"{_QUEUE} WHERE application = ? AND name = ?"
CREATE_QUEUE = """
    INSERT INTO keyspace.queues (application, name, key, version, partitions, type, consistency, principals, listing)
    VALUES (?, ?, ?, 1, ?, ?, ?, ?, ?) IF NOT EXISTS
"""
UPDATE_QUEUE = """
    UPDATE keyspace.queues SET version = ?, partitions = ?, type = ?, consistency = ?, principals = ?, listing = ?
    WHERE application = ? AND name = ? IF key = ? AND version = ?
"""
DELETE_QUEUE = "DELETE FROM keyspace.queues WHERE application = ? AND name = ? IF key = ? AND version = ?"

ADD_NAME = "INSERT INTO keyspace.names (application, shard, name, key) VALUES (?, ?, ?, ?)"
DELETE_NAME = "DELETE FROM keyspace.names WHERE application = ? AND shard = ? AND name = ? AND key = ?"
LIST_NAMES = "SELECT application, name, key FROM keyspace.names WHERE application = ? AND shard = ? AND name >= ?"
ADD_PRINCIPAL = "INSERT INTO keyspace.principals (principal, shard, application, name, listing) VALUES (?, ?, ?, ?, ?)"
DELETE_PRINCIPAL = (
    "DELETE FROM keyspace.principals WHERE principal = ? AND shard = ? AND application = ? AND name = ? AND listing = ?"
)
LIST_PRINCIPAL = (
    "SELECT application, name, listing FROM keyspace.principals "
    "WHERE principal = ? AND shard = ? AND (application, name) >= (?, ?)"
)

_COVERING = ", ".join(f"({START}, ?, {level})" for level in buckets.LEVELS)
COVERING = f"{_ENTRY} AND (kind, edge, level) IN ({_COVERING}, ({REMOVED}, 0, 0))"
FOLLOWING = f"{_ENTRY} AND kind = {START} AND edge > ? AND edge < ?"
PRECEDING = (
    f"{_ENTRY} AND kind = {END} AND edge > ? AND edge <= ? ORDER BY kind DESC, edge DESC, level DESC, lifetime DESC"
)
ADD_ENTRY = (
    "INSERT INTO keyspace.buckets (queue, partition, kind, edge, level, lifetime, is_empty) "
    "VALUES (?, ?, ?, ?, ?, ?, false) USING TTL ?"
)
MARK_FULL = (
    "UPDATE keyspace.buckets USING TTL ? SET full_at = ? "
    f"WHERE queue = ? AND partition = ? AND kind = {START} AND edge = ? AND level = ? AND lifetime = ?"
)
MARK_EMPTY = (
    "UPDATE keyspace.buckets USING TTL ? AND TIMESTAMP ? SET is_empty = true "
    "WHERE queue = ? AND partition = ? AND kind = ? AND edge = ? AND level = ? AND lifetime = ?"
)
DELETE_ENTRY = (
    "DELETE FROM keyspace.buckets USING TIMESTAMP ? WHERE queue = ? AND partition = ? "
    "AND kind = ? AND edge = ? AND level = ?"
)
DELETE_ENTRIES = f"DELETE FROM keyspace.buckets WHERE queue = ? AND partition = ? AND kind >= {START} AND kind <= {END}"
MARK_REMOVED = (
    "INSERT INTO keyspace.buckets (queue, partition, kind, edge, level, lifetime) "
    f"VALUES (?, ?, {REMOVED}, 0, 0, 0) USING TTL {REMOVED_SECONDS}"
)
IS_REMOVED = f"SELECT kind FROM keyspace.buckets WHERE queue = ? AND partition = 1 AND kind = {REMOVED}"

ADD_MESSAGE = """
    INSERT INTO keyspace.messages (queue, partition, level, start, ticks, rest, body, content_type, expires, size)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) USING TTL ?
"""
READ_UP = f"{_MESSAGE} {_RANGE}"
READ_DOWN = f"{_MESSAGE} {_RANGE} ORDER BY ticks DESC, rest DESC"
SIZE_UP = f"SELECT ticks, rest, expires, size FROM keyspace.messages {_RANGE}"
SIZE_DOWN = f"{SIZE_UP} ORDER BY ticks DESC, rest DESC"
READ_ONE = f"{_MESSAGE} WHERE {_IN_BUCKET} AND ticks = ? AND rest = ?"
FIND_ANY = f"SELECT ticks FROM keyspace.messages WHERE {_IN_BUCKET} LIMIT 1"
MEASURE = f"SELECT expires, size FROM keyspace.messages WHERE {_IN_BUCKET}"
DELETE_MESSAGE = f"DELETE FROM keyspace.messages WHERE {_IN_BUCKET} AND ticks = ? AND rest = ?"
DELETE_BUCKET = f"DELETE FROM keyspace.messages WHERE {_IN_BUCKET}"

GET_POSITIONS = "SELECT version, partition, message_id FROM keyspace.positions WHERE queue = ? AND consumer = ?"
CHANGE_VERSION = "UPDATE keyspace.positions SET version = ? WHERE queue = ? AND consumer = ? IF version = ?"
SET_POSITION = "UPDATE keyspace.positions SET message_id = ? WHERE queue = ? AND consumer = ? AND partition = ?"
DELETE_POSITIONS = "DELETE FROM keyspace.positions WHERE queue = ? AND consumer = ?"
DELETE_POSITION = "DELETE FROM keyspace.positions WHERE queue = ? AND consumer = ? AND partition = ?"
ADD_CONSUMER = "INSERT INTO keyspace.consumers (queue, consumer) VALUES (?, ?)"
LIST_CONSUMERS = "SELECT consumer FROM keyspace.consumers WHERE queue = ?"
DELETE_CONSUMERS = "DELETE FROM keyspace.consumers WHERE queue = ?"

ALL = tuple(text for name, text in list(globals().items()) if isinstance(text, str) and re.match("[A-Z]", name))
