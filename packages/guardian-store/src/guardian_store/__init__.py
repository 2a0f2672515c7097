"""A client and a worker of Guardian's message store. They need httpx, but not Django."""

from guardian_store.client import (
    Client,
    ClientError,
    Denied,
    Invalid,
    Message,
    NewMessage,
    NotFound,
    Page,
    Posted,
    Queue,
    RetryLater,
    Unavailable,
)
from guardian_store.partition_sharing import DEFAULT_DEPLOYMENT, Partition
from guardian_store.transport import HTTPTransport, Transport, WorkQueue
from guardian_store.worker import Leases, Pinned, Sharing, Worker, ZooKeeper, keep_failure, log_failure

__all__ = [
    "DEFAULT_DEPLOYMENT",
    "Client",
    "ClientError",
    "Denied",
    "HTTPTransport",
    "Invalid",
    "Leases",
    "Message",
    "NewMessage",
    "NotFound",
    "Page",
    "Partition",
    "Pinned",
    "Posted",
    "Queue",
    "RetryLater",
    "Sharing",
    "Transport",
    "Unavailable",
    "WorkQueue",
    "Worker",
    "ZooKeeper",
    "keep_failure",
    "log_failure",
]
