"""Connections to the guarded broker: this process's management client and publisher, and the URL for AMQP.

This module reads Django's settings for ``rabbit/``, which does not import Django.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import urlsplit

from django.conf import settings

from rabbit.addresses import split_addresses
from rabbit.amqp import TIMEOUT_SECONDS, Session, Sessions
from rabbit.errors import BrokerUnavailable
from rabbit.management import Management
from rabbit.prometheus import Prometheus
from rabbit.publishing import NotPublished, Publisher
from rabbit.requests.sending import Call

PAGE_SECONDS = 1.8
"""How long a page that is read waits for all its requests to the broker, so that it answers within two seconds."""

ACTION_SECONDS = 4.8
"""How long an action waits without an answer of the broker, so that it answers within five seconds if that hangs."""

listeners: list[Callable[[Call], None]] = []
"""Functions called after each request to the management API, in its thread. The site adds its log and its metrics."""

request_id: Callable[[], str] = str
"""Returns the ``X-Request-ID`` for requests to the broker. The site replaces it."""


def management(*, read_timeout: float | None = None) -> Management:
    """Return this process's management client, which its threads share.

    ``read_timeout`` is in seconds. If it differs from the setting's, the result is a second client.
    """
    seconds = settings.GUARDIAN_BROKER_TIMEOUT_SECONDS if read_timeout is None else read_timeout
    return _management(os.getpid(), settings.RABBITMQ_MANAGEMENT_URL, seconds)


@lru_cache(maxsize=2)  # one for each of the two timeouts
def _management(process: int, url: str, timeout: float) -> Management:
    # The process id is in the cache's key, so that a forked worker doesn't share its parent's connections.
    if not url:
        remedy = "set RABBITMQ_MANAGEMENT_URL to http://user:password@host:15672"
        raise BrokerUnavailable(f"no broker is configured; {remedy}", never_reached=True)
    try:
        return Management(url, read_timeout=timeout, on_call=_notify_listeners, request_id=lambda: request_id())
    except ValueError as error:
        raise BrokerUnavailable(f"RABBITMQ_MANAGEMENT_URL can't be used: {error}", never_reached=True) from error


def prometheus() -> Prometheus:
    """Return this process's client of the nodes' Prometheus endpoints, which its threads share."""
    urls = tuple(settings.GUARDIAN_PROMETHEUS_URLS)
    return _prometheus(os.getpid(), settings.RABBITMQ_MANAGEMENT_URL, urls, settings.GUARDIAN_BROKER_TIMEOUT_SECONDS)


@lru_cache(maxsize=1)
def _prometheus(process: int, management_url: str, urls: tuple[str, ...], timeout: float) -> Prometheus:
    try:
        host = urlsplit(next(iter(split_addresses(management_url)), "")).hostname or ""
        return Prometheus(urls, host=host, read_timeout=timeout, on_call=_notify_listeners)
    except ValueError as error:
        raise BrokerUnavailable(f"GUARDIAN_PROMETHEUS_URLS can't be used: {error}", never_reached=True) from error


def _notify_listeners(call: Call) -> None:
    for listener in listeners:
        listener(call)


def amqp_url() -> str:
    """Return the guarded broker's addresses for AMQP, separated by commas: ``amqp://user:password@host:port``."""
    return str(settings.RABBIT_URL).rstrip("/")


def session(vhost: str) -> Session:
    """Return an unopened AMQP session in a vhost. Use it in a ``with``."""
    return Session(amqp_url(), vhost, _amqp_seconds())


def _amqp_seconds() -> float:
    return min(TIMEOUT_SECONDS, float(settings.GUARDIAN_BROKER_TIMEOUT_SECONDS))


class Clients(NamedTuple):
    """A task's clients of the broker: of the management API, and over AMQP."""

    management: Management
    sessions: Sessions


@contextmanager
def clients() -> Iterator[Clients]:
    """Open this task's clients, and close its AMQP sessions at the end."""
    with Sessions(amqp_url(), _amqp_seconds()) as sessions:
        yield Clients(management(), sessions)


def publisher() -> Publisher:
    """Return this process's publisher, which its threads share."""
    return _publisher(os.getpid(), amqp_url())


@lru_cache(maxsize=1)
def _publisher(process: int, url: str) -> Publisher:
    # The process id is in the cache's key, so that a forked worker doesn't share its parent's connections.
    if not url:
        remedy = "set RABBIT_URL to amqp://user:password@host:5672"
        raise NotPublished(f"no broker is configured for AMQP; {remedy}")
    try:
        return Publisher(url)
    except ValueError as error:
        raise NotPublished(f"RABBIT_URL can't be used: {error}") from error
