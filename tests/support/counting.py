from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from rabbit.amqp import Session
from rabbit.fetching import Fetch
from rabbit.http import PooledClient


@contextmanager
def counted_requests() -> Iterator[list[str]]:
    """Yield a list of the requests to the management API, as method and path, and of deletions over AMQP."""
    sent: list[str] = []
    send, delete, delete_fetched = PooledClient.send, Session.delete_queue, Fetch.delete_queue

    def recorded(client, method, target, *arguments, **options):
        sent.append(f"{method} {target.partition('?')[0]}")
        return send(client, method, target, *arguments, **options)

    def recorded_deletion(session, name, **conditions):
        sent.append(f"DELETE {name} in {session.vhost}")
        return delete(session, name, **conditions)

    def recorded_archived_deletion(fetch):
        sent.append(f"DELETE {fetch.name} in {fetch.vhost}")
        return delete_fetched(fetch)

    with (
        mock.patch.object(PooledClient, "send", recorded),
        mock.patch.object(Session, "delete_queue", recorded_deletion),
        mock.patch.object(Fetch, "delete_queue", recorded_archived_deletion),
    ):
        yield sent
