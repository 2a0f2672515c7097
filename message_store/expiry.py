"""Free the disk space of expired messages and of messages of deleted queues."""

import time

from message_store.store import MessageStore

BATCH_SIZE = 1000
MAX_RUN_SECONDS = 50
"""Less than the minute between runs."""


def remove_expired(store: MessageStore) -> int:
    """Remove expired messages in small batches and return how many. The next run continues after a time-out."""
    until = time.monotonic() + MAX_RUN_SECONDS
    removed = 0
    while time.monotonic() < until:
        batch = store.remove_expired(BATCH_SIZE)
        removed += batch
        if batch < BATCH_SIZE:
            break
    return removed
