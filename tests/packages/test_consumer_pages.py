"""The programs of the toolkit's own pages run, and do what the pages say."""

import signal
import subprocess
import sys
from contextlib import suppress

import pytest

from guardian_consumers import Publisher, Unroutable
from tests.support.consumers import length, settings_at, take, without_django
from tests.support.package_pages import programs_of
from tests.support.toolbox import in_background, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def settings(broker, vhost):
    return settings_at(broker.amqp_url, vhost, exchange="shop_local")


@pytest.fixture
def start(settings, tmp_path):
    environment = {**without_django(), "RABBIT_URL": settings.url, "RABBIT_EXCHANGE_NAME": "shop_local"}
    with programs_of("guardian-consumers", tmp_path, environment) as start:
        yield start


def publish(settings, body, key):
    """Publish as soon as a queue is bound with this key."""
    with Publisher(settings) as publisher:

        def is_routed():
            try:
                publisher.publish(body, key, mandatory=True)
            except Unroutable:
                return False
            return True

        wait_until(is_routed)


def test_the_first_worker_ships_retries_and_parks(start, amqp):
    worker = start("consume worker:orders --retry-delays 2")

    def ordered(book):
        return start(f"python order.py {book}").wait(30) == 0

    wait_until(lambda: ordered("Dune"))  # fails until the queue exists
    assert worker.stdout.readline() == "shipped Dune at attempt 1\n"
    assert ordered("Ulysses")
    assert worker.stdout.readline() == "shipped Ulysses at attempt 2\n"
    assert ordered("Atlantis")
    properties, _ = take(amqp, "shop_local_orders.parked")
    assert properties.headers["consumer-error"].endswith("Park: no such book")
    worker.send_signal(signal.SIGINT)
    assert worker.wait(30) == 0


def test_a_worker_shares_its_queue_with_one_of_yapw(start, settings):
    workers = [start("python yapw_worker.py"), start("python moved_worker.py")]
    printed = [in_background(worker.stdout.readline) for worker in workers]
    with Publisher(settings) as publisher:

        def is_printed_by_both():
            with suppress(Unroutable):
                publisher.publish({"book": "Dune"}, "orders", mandatory=True)
            return all(line.done() for line in printed)

        wait_until(is_printed_by_both)
    assert [line.result() for line in printed] == ["yapw shipped Dune\n", "shipped Dune\n"]


def test_a_worker_reads_what_kombu_publishes(start, settings):
    worker = start("python moved_worker.py")
    publish(settings, {"book": "Emma"}, "orders")
    assert worker.stdout.readline() == "shipped Emma\n"
    assert start("python kombu_order.py").wait(30) == 0
    assert worker.stdout.readline() == "shipped Dune\n"


@pytest.mark.parametrize("command", ["python async_worker.py", "consume async_worker:mails async_worker:orders"])
def test_coroutines_consume_and_publish(start, settings, command):
    worker = start(command)
    for key in ("mails", "orders"):
        publish(settings, {"book": "Ulysses"}, key)
        assert worker.stdout.readline() == "shipped Ulysses\n"
    assert start("python async_order.py").wait(30) == 0
    assert {worker.stdout.readline() for _ in range(2)} == {"shipped Dune\n", "shipped Emma\n"}
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(30) == 0


def test_a_policy_keeps_the_other_settings_of_the_environment(start, settings, amqp):
    worker = start("python policy.py")
    publish(settings, {"thing": "glass"}, "orders")
    properties, _ = take(amqp, "shop_local_orders.parked")
    assert properties.headers["consumer-attempts"] == 1
    publish(settings, {"book": "Dune"}, "orders")
    assert worker.stdout.readline() == "shipped Dune\n"


@pytest.mark.parametrize(
    "command", ["python ledger.py", "consume ledger:ledger --routing-key orders --routing-key refunds"]
)
def test_a_queue_is_bound_with_several_routing_keys(start, settings, command):
    worker = start(command)
    for key in ("orders", "refunds"):
        publish(settings, 7, key)
        assert worker.stdout.readline() == f"shop_local_{key} 7\n"


def test_a_publisher_works_in_a_forked_child_and_in_its_parent(start, amqp):
    amqp.channel.exchange_declare("shop_local", "direct", durable=True)
    amqp.queue("shop_local_forks")
    amqp.channel.queue_bind("shop_local_forks", "shop_local")
    assert start("python forks.py").wait(30) == 0
    assert length(amqp, "shop_local_forks") == 3


def test_a_consumer_from_before_a_fork_says_where_to_create_it():
    program = (
        "import os; from guardian_consumers import *\n"
        "consumer = Consumer(Settings('amqp://127.0.0.1:1', 'shop'), 'orders', print)\n"
        "if os.fork() == 0: consumer.run()\n"
        "os.wait()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert "create it in the process that starts it" in done.stderr
