"""Removing from the disk what no read shows any more: expired messages, and those of queues that were removed."""

import time

from message_store.store import MessageStore

BATCH_SIZE = 1000
MAX_RUN_SECONDS = 50
"""How long one run may take: less than the minute after which the next one begins."""


def remove_expired(store: MessageStore) -> int:
    """Remove what there is, in small batches, and return how many messages went. The next run has what is left.

    Raises:
        StoreUnavailable: the store is away.
    """
    until = time.monotonic() + MAX_RUN_SECONDS
    removed = 0
    while time.monotonic() < until:
        batch = store.remove_expired(BATCH_SIZE)
        removed += batch
        if batch < BATCH_SIZE:
            break
    return removed
