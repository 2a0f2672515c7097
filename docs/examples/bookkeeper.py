"""A worker of the message store to copy: it books each order once. See docs/message-store-workers.md.

    GUARDIAN=https://guardian.example.org KEY=... python bookkeeper.py

GUARDIAN is Guardian's address, KEY a key of the application APPLICATION (shop), QUEUE the queue to process (orders),
and BOOKS the database (books.sqlite3). A message is JSON: {"customer": "Ann", "cents": 1250}.
"""

import logging
import os
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager

from guardian_store import ClientError, HTTPTransport, Message, RetryLater, Worker, WorkQueue, keep_failure

LOCK_TIMEOUT_SECONDS = 5.0
"""A job without a timeout would block all partitions of this worker."""

INVALID_SETTINGS = 2
"""The exit code when starting again is useless. A supervisor should not restart the worker then."""


@contextmanager
def books() -> Iterator[sqlite3.Connection]:
    """Open the database for the worker's lifetime."""
    with closing(sqlite3.connect(os.environ.get("BOOKS", "books.sqlite3"), timeout=LOCK_TIMEOUT_SECONDS)) as connection:
        with connection:
            connection.execute("CREATE TABLE IF NOT EXISTS orders (id TEXT PRIMARY KEY, customer TEXT, cents INTEGER)")
        yield connection


def book(message: Message, connection: sqlite3.Connection) -> None:
    """Book an order. The message's id is the row's key: a message that comes again changes nothing."""
    order = message.json()
    row = (message.id, str(order["customer"]), int(order["cents"]))
    with connection:  # one transaction
        connection.execute("INSERT INTO orders VALUES (?, ?, ?) ON CONFLICT (id) DO NOTHING", row)


def failed(message: Message, connection: sqlite3.Connection, queue: WorkQueue, exception: Exception) -> None:
    """Wait if the database is the cause. Otherwise keep the message in the queue `errors`, and go on."""
    if isinstance(exception, sqlite3.OperationalError):
        raise RetryLater(f"the books are not available: {exception}") from exception
    keep_failure(message, connection, queue, exception)


def main() -> int:
    """Run until SIGTERM or Ctrl-C, and return the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs each request
    missing = [name for name in ("GUARDIAN", "KEY") if not os.environ.get(name)]
    if missing:
        print(f"Set {' and '.join(missing)}.", file=sys.stderr)
        return INVALID_SETTINGS
    application, queue = os.environ.get("APPLICATION", "shop"), os.environ.get("QUEUE", "orders")
    try:
        transport = HTTPTransport(os.environ["GUARDIAN"], application, key=os.environ["KEY"])
        worker = Worker("bookkeeper", book, transport, queues=[queue], context=books, failure=failed)
        worker.run_until_signal()
    except ValueError as error:
        print(f"GUARDIAN: {error}", file=sys.stderr)
        return INVALID_SETTINGS
    except ClientError as error:  # the worker itself waits while Guardian is unavailable
        print(f"Guardian refuses this worker. Check GUARDIAN, KEY and APPLICATION: {error}", file=sys.stderr)
        return INVALID_SETTINGS
    return 0


if __name__ == "__main__":
    sys.exit(main())
