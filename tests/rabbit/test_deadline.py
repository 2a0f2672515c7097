import time

import pytest
from django.http import HttpResponse
from django.test import RequestFactory

from guardian_site.middleware import BrokerWait
from rabbit import amqp, deadline
from rabbit.errors import BrokerUnavailable
from rabbit.management import Management
from rabbit.threads import ContextThreadPool
from tests.support.proxy import Proxy


@pytest.fixture
def hanging(broker, proxy):
    """Return a client of a broker that doesn't answer within 30 seconds."""
    proxy.delay(30)
    client = Management(proxy.url(broker.management_url))
    yield client
    client.close()


def seconds_of(call):
    began = time.monotonic()
    with pytest.raises(BrokerUnavailable) as caught:
        call()
    return time.monotonic() - began, caught.value


def test_without_a_limit_a_client_has_its_own_timeout():
    assert deadline.seconds_left(20) == 20
    assert not deadline.is_limited()


def test_all_requests_within_a_limit_share_its_time(hanging):
    with deadline.limit(0.3):
        first, error = seconds_of(hanging.whoami)
        assert 0.2 < first < 2
        assert error.timed_out
        second, error = seconds_of(hanging.nodes)
        assert second < 0.1
        assert (error.never_reached, "an earlier request took all the time" in str(error)) == (True, True)
    assert deadline.seconds_left(20) == 20


def test_requests_over_amqp_share_the_limit_with_those_over_http(hanging, broker):
    with deadline.limit(0.3):
        seconds_of(hanging.whoami)
        with amqp.Session(broker.amqp_url, "/") as session:
            assert seconds_of(lambda: session.declare_passively("any"))[0] < 0.1


def test_the_limit_starts_with_the_first_request(management):
    with deadline.limit(1):
        time.sleep(1.1)
        assert management.whoami()


def test_only_a_renewed_limit_counts_from_the_last_answer(management):
    with deadline.limit(0.8, renewed=True):
        for _ in range(3):
            time.sleep(0.4)
            assert management.whoami()
    with deadline.limit(0.5):
        management.whoami()
        time.sleep(0.6)
        with pytest.raises(BrokerUnavailable):
            management.whoami()


def test_threads_of_a_pool_share_the_limit_of_their_page(hanging):
    with deadline.limit(0.3), ContextThreadPool(2) as threads:
        seconds_of(threads.submit(hanging.whoami).result)
        assert seconds_of(threads.submit(hanging.whoami).result)[0] < 0.1


def test_an_answer_that_comes_in_pieces_ends_with_the_limit(broker):
    with Proxy.before(broker.management_url) as proxy:
        head = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"
        proxy.answer_slowly([head, *(b"x" for _ in range(300))], 0.1)
        client = Management(proxy.url(broker.management_url))
        with deadline.limit(0.5):
            assert seconds_of(client.whoami)[0] < 2
        client.close()


@pytest.mark.parametrize(("method", "seconds"), [("get", 1.8), ("head", 1.8), ("post", 4.8), ("delete", 4.8)])
def test_pages_wait_for_less_than_two_seconds_and_actions_for_less_than_five(method, seconds):
    left = []
    wait = BrokerWait(lambda request: HttpResponse(left.append(deadline.seconds_left(20))))
    wait(getattr(RequestFactory(), method)("/"))
    assert left == [pytest.approx(seconds, abs=0.01)]
    assert not deadline.is_limited()
