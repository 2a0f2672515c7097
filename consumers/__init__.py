"""A toolkit for the people who write the workers: consumers of RabbitMQ that keep their queues healthy.

On top of yapw's conventions and pika; usable without Django. `docs/consumers.md` is the guide.
"""

from consumers.consumer import Consumer, run_all
from consumers.delivery import Delivery
from consumers.errors import ConsumerError, Halted, Hung, NotPublished, Refused, SettingsError, Unroutable
from consumers.message import Message
from consumers.names import Names
from consumers.outcomes import Discard, Halt, Outcome, Park, Policy, Requeue, Retry
from consumers.priority import BrokerPriorities, PriorityQueues
from consumers.publisher import Publisher
from consumers.rate import SharedTokenBucket, TokenBucket
from consumers.settings import Settings
from consumers.source import Limiter, PhysicalQueue, PlainQueue, Source, Waiting

__all__ = [
    "BrokerPriorities",
    "Consumer",
    "ConsumerError",
    "Delivery",
    "Discard",
    "Halt",
    "Halted",
    "Hung",
    "Limiter",
    "Message",
    "Names",
    "NotPublished",
    "Outcome",
    "Park",
    "PhysicalQueue",
    "PlainQueue",
    "Policy",
    "PriorityQueues",
    "Publisher",
    "Refused",
    "Requeue",
    "Retry",
    "Settings",
    "SettingsError",
    "SharedTokenBucket",
    "Source",
    "TokenBucket",
    "Unroutable",
    "Waiting",
    "run_all",
]
