"""A toolkit for RabbitMQ consumers, based on pika and the conventions of yapw. Django is optional.

`docs/consumers.md` in Guardian's repository is the guide.
"""

from guardian_consumers._asynchronous import AsyncConsumer, AsyncMessage, AsyncPublisher, run_all_async
from guardian_consumers._consumer import Consumer, run_all
from guardian_consumers._delivery import Delivery
from guardian_consumers._errors import ConsumerError, Halted, Hung, NotPublished, Refused, SettingsError, Unroutable
from guardian_consumers._message import Message
from guardian_consumers._outcomes import Discard, Halt, Outcome, Park, Policy, Requeue, Retry
from guardian_consumers._priority import BrokerPriorities, PriorityQueues
from guardian_consumers._publisher import Publication, Publisher
from guardian_consumers._rate import SharedTokenBucket, TokenBucket
from guardian_consumers._settings import Settings
from guardian_consumers._source import (
    Binding,
    DeliveryBuffer,
    Exchange,
    Limiter,
    OverdueBuffer,
    PhysicalQueue,
    PlainQueue,
    Routed,
    Source,
)
from guardian_consumers.names import Names

__all__ = [
    "AsyncConsumer",
    "AsyncMessage",
    "AsyncPublisher",
    "Binding",
    "BrokerPriorities",
    "Consumer",
    "ConsumerError",
    "Delivery",
    "DeliveryBuffer",
    "Discard",
    "Exchange",
    "Halt",
    "Halted",
    "Hung",
    "Limiter",
    "Message",
    "Names",
    "NotPublished",
    "Outcome",
    "OverdueBuffer",
    "Park",
    "PhysicalQueue",
    "PlainQueue",
    "Policy",
    "PriorityQueues",
    "Publication",
    "Publisher",
    "Refused",
    "Requeue",
    "Retry",
    "Routed",
    "Settings",
    "SettingsError",
    "SharedTokenBucket",
    "Source",
    "TokenBucket",
    "Unroutable",
    "run_all",
    "run_all_async",
]
