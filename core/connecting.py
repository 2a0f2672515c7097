"""How programs connect to the broker: its public addresses, and examples for client libraries."""

import json
from typing import Any, NamedTuple

from django.conf import settings
from django.template.loader import render_to_string

from core.addresses import split_address
from core.links import absolute_url

PORTS = {"amqp": 5672, "amqps": 5671, "ws": 80, "wss": 443}
"""The schemes of public addresses with their default ports."""

LIBRARIES = {"pika": "Python (pika)", "java": "Java", "node": "Node.js (amqplib)", "go": "Go (amqp091-go)"}
"""The AMQP libraries with an example in ``templates/connecting``, and their names."""

INSTALL = {
    "pika": "pip install pika",
    "node": "npm install amqplib",
    "go": "go get github.com/rabbitmq/amqp091-go",
}
"""The commands that install them. Java's is a dependency in the build file."""


class Address(NamedTuple):
    """A public address of the broker. ``path`` is that of STOMP over WebSocket, or empty."""

    host: str
    port: int
    tls: bool
    path: str
    url: str


class Example(NamedTuple):
    """A program, and the command that installs its library, if there is one."""

    name: str
    code: str
    install: str = ""


def amqp_address() -> Address | None:
    """Return the broker's public address for AMQP, or None if GUARDIAN_PUBLIC_AMQP_URL is empty."""
    return _address(settings.GUARDIAN_PUBLIC_AMQP_URL)


def stomp_address() -> Address | None:
    """Return the broker's public address for STOMP over WebSocket, or None if GUARDIAN_PUBLIC_STOMP_URL is empty."""
    return _address(settings.GUARDIAN_PUBLIC_STOMP_URL)


def context(username: str, vhost: str, queue: str, exchange: str = "") -> dict[str, Any]:
    """Return the context of ``connecting/_connecting.html``: how this user connects, with ``examples``."""
    return {
        "amqp_address": amqp_address(),
        "stomp_address": stomp_address(),
        "connect_vhost": vhost,
        "examples": examples(username, vhost, queue, exchange),
        "examples_publish": bool(exchange),
    }


def examples(username: str, vhost: str, queue: str, exchange: str = "") -> list[Example]:
    """Return a program for each of ``LIBRARIES`` if the broker has a public address.

    It consumes the queue. With an exchange, it first declares both, binds them and publishes a message. Programs read
    the password from the environment, so it is in none of them.
    """
    address = amqp_address()
    if address is None:
        return []
    # JSON's string literals are also those of Python, Java, JavaScript and Go.
    values = {"username": username, "vhost": vhost, "queue": queue, "exchange": exchange, "host": address.host}
    context = {
        **{name: json.dumps(value) for name, value in values.items()},
        "publishes": bool(exchange),
        "port": address.port,
        "tls": address.tls,
    }
    return [
        Example(name, render_to_string(f"connecting/{library}.txt", context).strip(), INSTALL.get(library, ""))
        for library, name in LIBRARIES.items()
    ]


def curl(path: str) -> str:
    return f'curl -H "Authorization: Token $TOKEN" "{absolute_url(path)}"'


def _address(url: str) -> Address | None:
    parts = split_address(url)
    if parts is None or parts.scheme not in PORTS:  # the system checks report it
        return None
    tls = parts.scheme in ("amqps", "wss")
    return Address(parts.hostname or "", parts.port or PORTS[parts.scheme], tls, parts.path, url)
