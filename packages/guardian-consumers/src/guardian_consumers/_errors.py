"""Errors of consumers and publishers, as opposed to errors of a callback."""


class ConsumerError(Exception):
    """Base class of this package's errors."""


class SettingsError(ConsumerError):
    """A setting is missing or invalid; the text names it."""


class Refused(ConsumerError):
    """The broker refuses permanently: the user, its permissions, or a queue that exists with other arguments."""


class Halted(ConsumerError):
    """A message stopped the consumer and was requeued. The cause is the callback's exception."""


class Hung(ConsumerError):
    """A callback exceeded its time limit. Its message is settled; restart the process."""


class NotPublished(ConsumerError):
    """The broker did not confirm a message. ``unknown``: the broker may have it nevertheless."""

    def __init__(self, text: str, *, unknown: bool = False) -> None:
        super().__init__(text)
        self.unknown = unknown


class Unroutable(NotPublished):
    """A mandatory message has no queue: none is bound to the exchange with its routing key."""
