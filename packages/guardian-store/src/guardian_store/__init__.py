"""Clients and a worker of Guardian's message store. They need httpx, but not Django."""

from guardian_store._async_client import AsyncClient
from guardian_store._client import Client
from guardian_store._partition_sharing import DEFAULT_DEPLOYMENT, Partition
from guardian_store._protocol import (
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
from guardian_store._transport import HTTPTransport, LeaseTable, Progress, Transport, WorkerState, WorkQueue
from guardian_store._worker import Failure, Job, Leases, Pinned, Sharing, Worker, ZooKeeper, keep_failure, log_failure

__all__ = [
    "DEFAULT_DEPLOYMENT",
    "AsyncClient",
    "Client",
    "ClientError",
    "Denied",
    "Failure",
    "HTTPTransport",
    "Invalid",
    "Job",
    "LeaseTable",
    "Leases",
    "Message",
    "NewMessage",
    "NotFound",
    "Page",
    "Partition",
    "Pinned",
    "Posted",
    "Progress",
    "Queue",
    "RetryLater",
    "Sharing",
    "Transport",
    "Unavailable",
    "WorkQueue",
    "Worker",
    "WorkerState",
    "ZooKeeper",
    "keep_failure",
    "log_failure",
]
