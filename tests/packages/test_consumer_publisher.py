"""Messages of a publisher that are not confirmed: timed out, returned, or pending when it closes."""

import pytest
from pika import BasicProperties
from pika.frame import Method
from pika.spec import Basic

from guardian_consumers import NotPublished, Publication, Publisher, Unroutable
from guardian_consumers._publisher import _PendingMessage
from tests.support.consumers import settings_at
from tests.support.toolbox import wait_until

AWAY = "amqp://127.0.0.1:1"

in_both = pytest.mark.usefixtures("each_publisher")


@in_both
def test_messages_whose_timeout_passed_in_an_outage_are_dropped():
    with Publisher(settings_at(AWAY)) as publisher:
        kept = publisher.publish_async(*publisher.prepare("kept", "orders")[:3], mandatory=False)
        for _ in range(20):
            with pytest.raises(NotPublished, match="not confirmed"):
                publisher.publish("given up", "orders", timeout=0.01)
        wait_until(lambda: [waiting.done for waiting in publisher._unsent] == [kept])


def test_messages_cancelled_in_an_outage_are_dropped():
    with Publisher(settings_at(AWAY)) as publisher:
        kept, *cancelled = [
            publisher.publish_async(*publisher.prepare(n, "orders")[:3], mandatory=False) for n in range(20)
        ]
        assert all(future.cancel() for future in cancelled)
        wait_until(lambda: [waiting.done for waiting in publisher._unsent] == [kept])


@in_both
def test_messages_waiting_for_the_broker_fail_when_the_publisher_closes():
    publisher = Publisher(settings_at(AWAY))
    futures = [publisher.publish_async(*publisher.prepare(n, "orders")[:3], mandatory=False) for n in range(3)]
    publisher.close()
    assert [type(future.exception(timeout=5)) for future in futures] == [NotPublished] * 3
    with pytest.raises(NotPublished, match="closed"):
        publisher.publish({}, "orders")


def test_a_publisher_closed_during_an_alarm_is_not_blocked():
    publisher = Publisher(settings_at(AWAY))
    publisher.publish_async(*publisher.prepare({}, "orders")[:3], mandatory=False)
    publisher._set_blocked(True)
    publisher.close()
    assert not publisher.blocked  # otherwise a consumer would retry at once, endlessly


def test_a_returned_message_is_matched_among_two_with_the_same_id():
    publisher, properties = Publisher(settings_at(AWAY)), BasicProperties(message_id="one")
    routed, unroutable = (
        _PendingMessage("shop_test", Publication(key, b"{}", properties, True)) for key in ("orders", "nobody")
    )
    publisher._unconfirmed = {1: routed, 2: unroutable}
    # As a busy broker does: it returns the unroutable message, and then confirms both.
    publisher._on_return(None, Basic.Return(312, "NO_ROUTE", "shop_test", "nobody"), properties, b"{}")
    publisher._on_confirmation(Method(1, Basic.Ack(2, multiple=True)))
    assert routed.done.exception(timeout=0) is None
    assert isinstance(unroutable.done.exception(timeout=0), Unroutable)
