"""A client of Guardian's message store. It needs httpx, and no Django."""

from guardian_store.client import (
    Away,
    Client,
    ClientError,
    Denied,
    Invalid,
    Message,
    NewMessage,
    NotFound,
    Posted,
    Queue,
)

__all__ = [
    "Away",
    "Client",
    "ClientError",
    "Denied",
    "Invalid",
    "Message",
    "NewMessage",
    "NotFound",
    "Posted",
    "Queue",
]
