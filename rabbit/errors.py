"""Errors of requests to the broker, over HTTP and AMQP."""

MAX_REASON_LENGTH = 300


class BrokerError(Exception):
    def __init__(self, text: str) -> None:
        # PostgreSQL can't store a NUL from the broker's answer.
        super().__init__(text.replace("\0", "\N{REPLACEMENT CHARACTER}"))


class BrokerUnavailable(BrokerError):
    """The broker did not answer, or answered 5xx. It may have executed the request, so retry later.

    ``timed_out``: the request was sent, and the answer timed out. ``never_reached``: there was no connection, so the
    request was not executed. ``status`` is the HTTP status, or 0 without an answer.
    """

    def __init__(self, text: str, *, timed_out: bool = False, never_reached: bool = False, status: int = 0) -> None:
        super().__init__(text)
        self.timed_out = timed_out
        self.never_reached = never_reached
        self.status = status


class NodeDown(BrokerUnavailable):
    """The node of a queue is down. The text contains no address, so it may be shown to everybody."""


class Refused(BrokerError):
    """The broker refused with 401, 403 or another 4xx, or with a 500 without a reason. A retry does not help.

    ``status`` is the HTTP status, or 0 if the request was not sent. ``reason`` is the broker's.
    """

    def __init__(self, text: str, *, status: int, reason: str) -> None:
        super().__init__(text)
        self.status = status
        self.reason = reason


class ConnectionLimit(Refused):
    """A vhost, a user or a node has as many connections as its limit allows. The reason names the remedy, too."""

    def __init__(self, text: str, *, status: int, reason: str) -> None:
        remedy = "close connections, or let an operator raise the limit"
        super().__init__(f"{text}; {remedy}", status=status, reason=f"{reason}; {remedy}")


class InequivalentArguments(Refused):
    """The queue exists with other arguments, durability or auto-deletion."""


class NotOnBroker(BrokerError):
    """The broker has no object of this name. It gives the same answer for a queue whose node is down."""


class MalformedResponse(BrokerError):
    """The answer is not the management API's: not JSON, unexpected fields, a redirect, or too large."""


class AnotherVhost(MalformedResponse):
    """The answer is about another vhost than the request: something before the broker rewrites addresses."""


def was_not_executed(error: BrokerError) -> bool:
    """Return whether the broker certainly did not execute the request. If False, the outcome is unknown."""
    if isinstance(error, BrokerUnavailable):
        return error.never_reached
    # A 500 without a reason may also be a crash after the request was executed.
    return isinstance(error, NotOnBroker) or (isinstance(error, Refused) and error.status != 500)
