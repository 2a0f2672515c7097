"""A toolkit for RabbitMQ consumers, based on pika and the conventions of yapw. Django is optional.

`docs/consumers.md` is the guide.
"""

from guardian_consumers.consumer import Consumer, run_all
from guardian_consumers.delivery import Delivery
from guardian_consumers.errors import ConsumerError, Halted, Hung, NotPublished, Refused, SettingsError, Unroutable
from guardian_consumers.message import Message
from guardian_consumers.names import Names
from guardian_consumers.outcomes import Discard, Halt, Outcome, Park, Policy, Requeue, Retry
from guardian_consumers.priority import BrokerPriorities, PriorityQueues
from guardian_consumers.publisher import Publisher
from guardian_consumers.rate import SharedTokenBucket, TokenBucket
from guardian_consumers.settings import Settings
from guardian_consumers.source import DeliveryBuffer, Limiter, PhysicalQueue, PlainQueue, Source

__all__ = [
    "BrokerPriorities",
    "Consumer",
    "ConsumerError",
    "Delivery",
    "DeliveryBuffer",
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
    "run_all",
]
