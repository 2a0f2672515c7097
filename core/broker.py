"""The guarded broker: this process's one management client and one publisher, and the address for AMQP.

The settings are read here, when a client is needed; ``rabbit/`` does not import Django.
"""

import os
from collections.abc import Callable
from functools import lru_cache
from urllib.parse import urlsplit

from django.conf import settings

from rabbit.management import BrokerUnavailable, Call, Management
from rabbit.prometheus import Prometheus
from rabbit.publishing import NotPublished, Publisher

listeners: list[Callable[[Call], None]] = []
"""Who is told of each call to the management API, in the thread that made it. The site adds its log and its metrics."""

request_id: Callable[[], str] = str
"""Says under which id the work at hand is logged; it goes along with each call. The site puts its own here."""


def management(*, read_timeout: float | None = None) -> Management:
    """Return the management client of this process. It is pooled, and shared by its threads.

    ``read_timeout`` is seconds, for what can't wait as long as the settings say: there is another client for that.

    Raises:
        BrokerUnavailable: no broker is configured, or the address is none.
    """
    seconds = settings.GUARDIAN_BROKER_TIMEOUT_SECONDS if read_timeout is None else read_timeout
    return _management(os.getpid(), settings.RABBITMQ_MANAGEMENT_URL, seconds)


@lru_cache(maxsize=2)  # one for each of the two timeouts
def _management(process: int, url: str, timeout: float) -> Management:
    # A forked worker must not share its parent's connections, hence the process in the key.
    if not url:
        how = "set RABBITMQ_MANAGEMENT_URL to http://user:password@host:15672"
        raise BrokerUnavailable(f"no broker is configured; {how}", never_reached=True)
    try:
        return Management(url, read_timeout=timeout, on_call=_tell, request_id=lambda: request_id())
    except ValueError as error:
        raise BrokerUnavailable(f"RABBITMQ_MANAGEMENT_URL can't be used: {error}", never_reached=True) from error


def prometheus() -> Prometheus:
    """Return the Prometheus endpoints of the nodes, for this process. They are pooled, and shared by its threads.

    Raises:
        BrokerUnavailable: an address is none.
    """
    urls = tuple(settings.GUARDIAN_PROMETHEUS_URLS)
    return _prometheus(os.getpid(), settings.RABBITMQ_MANAGEMENT_URL, urls, settings.GUARDIAN_BROKER_TIMEOUT_SECONDS)


@lru_cache(maxsize=1)
def _prometheus(process: int, management_url: str, urls: tuple[str, ...], timeout: float) -> Prometheus:
    try:
        host = urlsplit(management_url).hostname or ""
        return Prometheus(urls, host=host, read_timeout=timeout, on_call=_tell)
    except ValueError as error:
        raise BrokerUnavailable(f"GUARDIAN_PROMETHEUS_URLS can't be used: {error}", never_reached=True) from error


def _tell(call: Call) -> None:
    for listener in listeners:
        listener(call)


def amqp_url() -> str:
    """Return where AMQP is spoken to the guarded broker, without a vhost: ``amqp://user:password@host:port``."""
    return str(settings.RABBIT_URL).rstrip("/")


def publisher() -> Publisher:
    """Return the publisher of this process. It is pooled, and shared by its threads.

    Raises:
        NotPublished: no broker is configured, or the address is none.
    """
    return _publisher(os.getpid(), amqp_url())


@lru_cache(maxsize=1)
def _publisher(process: int, url: str) -> Publisher:
    # A forked worker must not share its parent's connections, hence the process in the key.
    if not url:
        how = "set RABBIT_URL to amqp://user:password@host:5672"
        raise NotPublished(f"no broker is configured for AMQP; {how}")
    try:
        return Publisher(url)
    except ValueError as error:
        raise NotPublished(f"RABBIT_URL can't be used: {error}") from error
