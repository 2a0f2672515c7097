"""Metrics of consumers, and how Guardian sees their queues."""

import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from accounts.models import Owner, PulseUser
from guardian_consumers import Consumer, Policy, Requeue, SettingsError
from guardian_consumers.metrics import serve_metrics
from queues.guard import once
from queues.models import Queue
from tests.support.consumers import PARKED, QUEUE, consuming, publish_raw, without_django
from tests.support.toolbox import wait_until
from tools.processes import free_port

PROJECT = Path(__file__).resolve().parents[2]


def scrape(port):
    """Return the samples by name, and by outcome where there are several, for QUEUE only."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    return {
        (sample.name, outcome) if (outcome := sample.labels.get("outcome")) else sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.get("queue", QUEUE) == QUEUE and "le" not in sample.labels
    }


@pytest.mark.usefixtures("each_consumer")
def test_prometheus_metrics_count_outcomes_and_messages_in_hand(consumer_settings, amqp):
    begun = time.time()
    held = []

    def callback(message):
        if message.body == "hold":
            held.append(message)
            wait_until(lambda: len(held) > 1)
        elif message.body == "fail":
            raise LookupError("no such order")

    consumer = Consumer(consumer_settings(policy=Policy(delays=(0.05,))), "orders", callback)
    port = free_port()
    with serve_metrics(str(port), [consumer]), consuming(consumer):
        before = scrape(port)
        assert before["consumer_last_acknowledged_timestamp_seconds"] == pytest.approx(begun, abs=5)
        for body in (b'"hold"', b'"fail"', b"1", b"2"):
            publish_raw(amqp, body)
        wait_until(lambda: consumer.counts["park"] and consumer.counts["done"] == 2)
        wait_until(lambda: scrape(port)["consumer_seconds_count"] >= 4)  # listeners are called after the count
        figures = scrape(port)
        link = consumer._connection._link
        link.call(lambda: link.reconnect("as by a crash"))  # what is in hand is void
        wait_until(lambda: consumer.counts["reconnected"] == 1)
        held.append(None)
        wait_until(lambda: consumer.counts["void"] == 1)
        after = scrape(port)
    assert {name: value for name, value in figures.items() if "messages_total" in name[0] and value} == {
        ("consumer_messages_total", "done"): 2,
        ("consumer_messages_total", "retry"): 1,
        ("consumer_messages_total", "park"): 1,
    }
    assert (figures["consumer_in_hand"], figures["consumer_waiting"], figures["consumer_connected"]) == (1, 0, 1)
    assert figures["consumer_prefetch"] == 20
    assert (before["consumer_seconds_count"], figures["consumer_seconds_count"]) == (0, 4)
    assert 0 < figures["consumer_seconds_sum"] < figures["consumer_oldest_in_hand_seconds"] + 5
    assert begun - 1 < figures["consumer_last_acknowledged_timestamp_seconds"] < time.time()
    assert figures["process_resident_memory_bytes"] > 0
    assert (figures["consumer_reconnects_total"], after["consumer_reconnects_total"]) == (0, 1)
    assert (figures["consumer_void_total"], after["consumer_void_total"]) == (0, 1)


def test_a_requeued_message_does_not_count_as_acknowledged(consumer_settings, amqp):
    go_on = threading.Event()

    def callback(message):
        if not message.redelivered:
            raise Requeue("once")
        go_on.wait(10)

    consumer = Consumer(consumer_settings(), "orders", callback)
    made = time.monotonic()
    with consuming(consumer):
        publish_raw(amqp)
        wait_until(lambda: consumer.counts["requeue"] == 1 and consumer.figures()["in_hand"])
        since = time.monotonic() - made
        assert consumer.figures()["seconds_since_acknowledged"] >= since
        go_on.set()
        wait_until(lambda: consumer.counts["done"] == 1)
        assert consumer.figures()["seconds_since_acknowledged"] < since


@pytest.mark.parametrize("at_", ["nine", "70000", "127.0.0.1:", "-1"])
def test_an_invalid_metrics_port_is_reported(at_):
    with pytest.raises(SettingsError, match=r"--metrics must be \[HOST:\]PORT"), serve_metrics(at_, []):
        pass


def test_a_metrics_port_in_use_is_reported():
    port = free_port()
    with (
        serve_metrics(str(port), []),
        pytest.raises(SettingsError, match=f"listen at {port}"),
        serve_metrics(str(port), []),
    ):
        pass


def test_the_command_serves_metrics_on_loopback_until_it_ends(consumer_settings, amqp):
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "guardian_consumers", "builtins:print=orders", "--metrics", str(port)],
        cwd=PROJECT,
        env={
            **without_django(),
            "RABBIT_URL": consumer_settings().url,
            "RABBIT_EXCHANGE_NAME": "shop_test",
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(lambda: scrape_or_none(port), 30)
        wait_until(lambda: scrape(port)["consumer_connected"])
        publish_raw(amqp)
        wait_until(lambda: scrape(port)["consumer_messages_total", "done"] == 1)
        listening = subprocess.run(
            ["cat", f"/proc/{process.pid}/net/tcp", f"/proc/{process.pid}/net/tcp6"],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        assert [line.split()[1] for line in listening.splitlines() if f":{port:04X} " in line and " 0A " in line] == [
            f"0100007F:{port:04X}"
        ]
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0
    finally:
        process.kill()
        process.communicate()
    assert not scrape_or_none(port)


def scrape_or_none(port):
    try:
        return scrape(port)
    except OSError:
        return None


def test_all_queues_of_a_pulse_users_consumer_have_its_owner(guarded, consumer_settings):
    alice = Owner.objects.create_user("alice@example.org", vouched=True)
    pulse_user = PulseUser.objects.create(username="alice", ready=True)
    pulse_user.owners.add(alice)
    with consuming(
        Consumer(consumer_settings(pulse_user="alice", queue_type="quorum"), "orders", lambda message: None)
    ):
        once.run_once()
    assert set(Queue.objects.values_list("name", "pulse_user__username")) == {
        (f"queue/alice/{name}", "alice") for name in (QUEUE, PARKED, f"{QUEUE}.retry.50ms", f"{QUEUE}.retry.200ms")
    }
    assert set(Queue.objects.seen_by(alice)) == set(Queue.objects.all())
