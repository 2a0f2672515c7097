"""The positions of consumers in Cassandra."""

import uuid
from collections.abc import Callable, Iterator, Mapping
from itertools import islice

from cassandra import ConsistencyLevel

from message_store.cassandra import cql
from message_store.cassandra.cluster import CONCURRENCY, batch, translated
from message_store.cassandra.names import MAX_ATTEMPTS, QueueTables
from message_store.store import (
    PositionsChanged,
    StoredQueue,
    StoreUnavailable,
)

_Changes = Mapping[int, uuid.UUID | None]
_Change = Callable[[dict[int, uuid.UUID]], _Changes]


def _if_still(unchanged: Mapping[int, uuid.UUID] | None, change: _Change) -> _Change:
    """Return a change that raises PositionsChanged if the positions no longer are ``unchanged``."""

    def checked(known: dict[int, uuid.UUID]) -> _Changes:
        if unchanged is not None and known != unchanged:
            raise PositionsChanged
        return change(known)

    return checked


class PositionTables(QueueTables):
    def positions(self, queue: StoredQueue, consumer: str) -> dict[int, uuid.UUID]:
        with translated():
            if self._is_removed(queue):
                return {}
            return self._positions(queue, consumer)[1]

    def set_positions(
        self,
        queue: StoredQueue,
        consumer: str,
        positions: Mapping[int, uuid.UUID],
        *,
        unchanged: Mapping[int, uuid.UUID] | None = None,
    ) -> None:
        if positions:
            with translated():
                self._require(queue)
                self._change_positions(queue, consumer, _if_still(unchanged, lambda known: positions))

    def advance_positions(
        self, queue: StoredQueue, consumer: str, moves: Mapping[int, tuple[uuid.UUID | None, uuid.UUID]]
    ) -> set[int]:
        def change(known: dict[int, uuid.UUID]) -> _Changes:
            return {partition: to for partition, (at, to) in moves.items() if known.get(partition) == at}

        if not moves:
            return set()
        with translated():
            self._require(queue)
            return set(self._change_positions(queue, consumer, change))

    def delete_positions(
        self, queue: StoredQueue, consumer: str, *, unchanged: Mapping[int, uuid.UUID] | None = None
    ) -> None:
        with translated():
            self._change_positions(queue, consumer, _if_still(unchanged, dict.fromkeys))

    def consumers(self, queue: StoredQueue) -> Iterator[str]:
        with translated():
            if self._is_removed(queue):
                return
            bind = self._connection.bind
            names = iter(self._connection.execute(bind(cql.LIST_CONSUMERS, [queue.key])))
            while some := [name for (name,) in islice(names, CONCURRENCY)]:
                reads = self._connection.execute_all(bind(cql.GET_POSITIONS, [queue.key, name]) for name in some)
                for name, rows in zip(some, reads, strict=True):
                    if any(message_id is not None for _, _, message_id in rows):
                        yield name

    def _positions(self, queue: StoredQueue, consumer: str) -> tuple[uuid.UUID | None, dict[int, uuid.UUID]]:
        rows = list(self._connection.execute(self._connection.bind(cql.GET_POSITIONS, [queue.key, consumer])))
        version = rows[0][0] if rows else None
        return version, {partition: message_id for _, partition, message_id in rows if message_id is not None}

    def _change_positions(self, queue: StoredQueue, consumer: str, change: _Change) -> _Changes:
        """Make the changes that ``change`` returns for the current positions, where None deletes one. Return them."""
        bind, key = self._connection.bind, [queue.key, consumer]
        for _ in range(MAX_ATTEMPTS):
            version, known = self._positions(queue, consumer)
            changes = change(known)
            if not changes:
                return changes
            if not known:
                self._connection.execute(bind(cql.ADD_CONSUMER, key))
            statements = [bind(cql.CHANGE_VERSION, [self._new_id(), *key, version])]
            for partition, message_id in changes.items():
                if message_id is None:
                    statements.append(bind(cql.DELETE_POSITION, [*key, partition]))
                else:
                    statements.append(bind(cql.SET_POSITION, [message_id, *key, partition]))
            if self._transact(batch(statements, ConsistencyLevel.LOCAL_QUORUM)):
                return changes
        raise StoreUnavailable(f"Others keep changing the positions of {consumer}.")
