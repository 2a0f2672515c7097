"""What goes wrong with a consumer, and not with one message: one root."""


class ConsumerError(Exception):
    """Anything that this package raises about itself, its settings or the broker."""


class SettingsError(ConsumerError):
    """A setting is missing or can't be used; the text names it."""


class Refused(ConsumerError):
    """The broker refuses for good: the account, its permissions, or a queue that exists with other arguments."""


class Halted(ConsumerError):
    """The consumer stopped because of a message, which is back in its queue; the cause is the exception."""


class Hung(ConsumerError):
    """A callback took longer than its time limit. Its message was dealt with; the process should be started anew."""


class NotPublished(ConsumerError):
    """The broker has not confirmed a message. ``unknown``: it may have it all the same."""

    def __init__(self, text: str, *, unknown: bool = False) -> None:
        super().__init__(text)
        self.unknown = unknown


class Unroutable(NotPublished):
    """No queue is bound to the exchange by this routing key, and the publisher asked for one."""
