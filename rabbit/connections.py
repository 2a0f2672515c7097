"""The guarded broker: this process's one management client and one publisher, and the address that AMQP is spoken to.

The only place in ``rabbit/`` that reads the settings, when it is called.
"""

import os
from functools import lru_cache

from django.conf import settings

from rabbit.management import BrokerAway, Management
from rabbit.publishing import NotPublished, Publisher


def management() -> Management:
    """Return the management client of this process. It is pooled, and shared by its threads.

    Raises:
        BrokerAway: no broker is configured, or the address is none.
    """
    return _management(os.getpid(), settings.RABBITMQ_MANAGEMENT_URL, settings.GUARDIAN_BROKER_TIMEOUT_SECONDS)


@lru_cache(maxsize=1)
def _management(process: int, url: str, timeout: float) -> Management:
    # A forked worker must not share its parent's connections, hence the process in the key.
    if not url:
        how = "set RABBITMQ_MANAGEMENT_URL to http://user:password@host:15672"
        raise BrokerAway(f"no broker is configured; {how}", never_reached=True)
    try:
        return Management(url, read_timeout=timeout)
    except ValueError as error:
        raise BrokerAway(f"RABBITMQ_MANAGEMENT_URL can't be used: {error}", never_reached=True) from error


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
