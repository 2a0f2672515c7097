"""The client of RabbitMQ's management API.

All threads of a process share one :class:`Management`. Its methods return plain values or raise a
``BrokerError`` of ``errors.py``. The error's text names the request, the problem and the remedy. ``requests/`` has the
methods, by what they are about.
"""

from rabbit.requests.broker import BrokerRequests
from rabbit.requests.connections import ConnectionRequests
from rabbit.requests.exchanges import ExchangeRequests
from rabbit.requests.queues import QueueRequests
from rabbit.requests.users import UserRequests


class Management(BrokerRequests, QueueRequests, ExchangeRequests, UserRequests, ConnectionRequests):
    """A client of the management API. ``Requests`` describes its arguments and errors."""
