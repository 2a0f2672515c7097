"""A client of Guardian's message store. It needs httpx, but not Django."""

from guardian_store.client import (
    Client,
    ClientError,
    Denied,
    Invalid,
    Message,
    NewMessage,
    NotFound,
    Posted,
    Queue,
    Unavailable,
)

__all__ = [
    "Client",
    "ClientError",
    "Denied",
    "Invalid",
    "Message",
    "NewMessage",
    "NotFound",
    "Posted",
    "Queue",
    "Unavailable",
]
