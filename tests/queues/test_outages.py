"""Real failures of the database, the connection to the mail server and the clock; and concurrent work."""

import contextlib
import subprocess
import sys
from collections import Counter
from datetime import timedelta
from pathlib import Path

import httpx
import psycopg2
import pytest
import time_machine
from django.db import Error, OperationalError, close_old_connections, connection, transaction
from django.test import Client
from django.utils import timezone

from accounts.models import AuthToken, Owner
from agents.models import AgentIdentity, SubscriptionQueue
from agents.registration import queues
from agents.removal import deletions
from agents.sweeps import sweep
from core import removals
from core.models import Removal
from notifications import claims, enqueue, mail_sending, sending
from notifications.enqueue import Notice
from notifications.models import Notification
from queues.guard import monitor, once
from queues.models import Pass, Queue, QueueEvent
from rabbit.names import DEAD_LETTER_QUEUE
from tests.support import plugin
from tests.support.faults import let_time_pass, once_after, run_scheduled_work
from tests.support.proxy import Proxy
from tests.support.toolbox import in_background, in_parallel, queue_names, sent, wait_until, wait_until_blocked
from tools.invariants import (
    breaches,
    count_resent_mails,
    duplicate_mails,
    missing_notifications,
    overlapping_passes,
    undelivered_mails,
)

pytestmark = [pytest.mark.usefixtures("guarded", "pulse_user"), pytest.mark.sqlite, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
BUILDS = "queue/alice/builds"


def browser_of(owner):
    browser = Client(raise_request_exception=False)
    browser.force_login(owner)
    return browser


def api_client(owner):
    return Client(
        raise_request_exception=False,
        headers={"authorization": f"Token {AuthToken.objects.create(owner, scope='all')[1]}"},
    )


@pytest.fixture
def cluster(guarded):
    """Give the PostgreSQL server of the tests, which a test may stop; start it afterwards."""
    if connection.vendor != "postgresql":
        pytest.skip("needs PostgreSQL")
    yield plugin.cluster
    if not plugin.cluster.running:
        plugin.cluster.start()
    connection.close()


@contextlib.contextmanager
def read_only():
    """Make PostgreSQL read-only, like a standby."""
    database = f'ALTER DATABASE "{connection.settings_dict["NAME"]}"'
    with connection.cursor() as cursor:
        cursor.execute(f"{database} SET default_transaction_read_only = on")
    connection.close()  # it applies to new connections
    try:
        yield
    finally:
        with connection.cursor() as cursor:
            cursor.execute("SET default_transaction_read_only = off")
            cursor.execute(f"{database} RESET default_transaction_read_only")
        connection.close()


@pytest.mark.parametrize("step", ["the list", "the recheck", "the announcement", "the deletion"])
def test_a_pass_interrupted_by_a_database_stop_is_finished_by_the_next(
    cluster, amqp, guarded, management, mailbox, monkeypatch, step
):
    amqp.queue("queue/alice/short", 1)
    once.run_once()
    amqp.queue(BUILDS, 11)
    once_after(monkeypatch, step, cluster.halt)
    with pytest.raises(Error):
        once.run_once()
    assert (BUILDS in queue_names(management, guarded)) == (step not in ("the announcement", "the deletion"))
    close_old_connections()
    with pytest.raises(Error):
        once.run_once()
    cluster.start()
    close_old_connections()
    let_time_pass()
    run_scheduled_work()
    assert breaches(management, [guarded], mailbox.mails) == []
    assert sent("alice@example.org") == ["deletion"]
    assert queue_names(management, guarded) == {"queue/alice/short"}


def test_a_database_stop_while_mails_are_sent_repeats_at_most_one(
    cluster, guarded, management, mailbox, settings, monkeypatch
):
    monkeypatch.setattr(mail_sending, "MAIL_BATCH_SIZE", 1)  # a known number of mails is being sent
    settings.GUARDIAN_OPERATOR_EMAILS = ["a@example.org", "b@example.org", "c@example.org"]
    with transaction.atomic():
        enqueue.enqueue([Notice("outage", {"error": "x"})], timezone.now())
    record_sent, recorded = claims.record_sent, []

    def stop_before_second_record(*arguments):
        recorded.append(arguments)
        if len(recorded) == 2:
            cluster.halt()
        record_sent(*arguments)

    monkeypatch.setattr(mail_sending, "record_sent", stop_before_second_record)
    with pytest.raises(Error):
        sending.send_due()
    assert len(mailbox.mails) == 2
    cluster.start()
    close_old_connections()
    let_time_pass()
    run_scheduled_work()
    assert breaches(management, [guarded], mailbox.mails, interrupted=1) == []
    assert count_resent_mails(mailbox.mails) == 1


def test_pages_and_the_api_are_503_while_the_database_is_stopped(cluster, alice, live_server):
    browser, agent = browser_of(alice), api_client(alice)
    kept = {name: cookie.value for name, cookie in browser.cookies.items()}
    with httpx.Client(base_url=live_server.url, cookies=kept, trust_env=False, timeout=30) as served:
        assert served.get("/queues/").status_code == 200
        cluster.halt()
        page, answer = served.get("/queues/"), agent.get("/api/queues/")
        assert (page.status_code, page.headers["Retry-After"]) == (503, "30")
        assert "use its database" in page.text
        assert (answer.status_code, answer["Content-Type"]) == (503, "application/problem+json")
        assert served.get("/healthz").status_code == 200
        ready = served.get("/readyz")
        assert (ready.status_code, ready.json()["database"]) == (503, False)
        cluster.start()
        assert served.get("/queues/").status_code == 200
        cluster.halt()
        cluster.start()
        assert served.get("/queues/").status_code == 200  # on a connection that was cut


def test_the_monitor_continues_when_the_database_is_back(
    cluster, amqp, environment, guarded, management, mailbox, tmp_path
):
    log = tmp_path / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "manage.py", "monitor_queues"],
            cwd=ROOT,
            env={**environment, "GUARDIAN_POLL_MAX_SECONDS": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until(lambda: Pass.objects.count() > 1)
        cluster.halt()
        wait_until(lambda: "The database can't be used" in log.read_text())
        cluster.start()
        connection.close()
        let_time_pass()
        amqp.queue(BUILDS, 11)
        wait_until(lambda: sent("alice@example.org") == ["deletion"])
        assert process.poll() is None
    finally:
        process.terminate()
        process.wait(timeout=60)
    run_scheduled_work()
    assert breaches(management, [guarded], mailbox.mails) == []


def test_with_a_read_only_database_nothing_is_deleted_or_changed(cluster, amqp, alice, guarded, management, mailbox):
    browser, agent = browser_of(alice), api_client(alice)
    amqp.queue(BUILDS, 11)
    with read_only():
        with pytest.raises(Error, match="read-only"):
            once.run_once()
        with pytest.raises(Error, match="read-only"):
            sweep.sweep_orphans()
        assert browser.get("/queues/").status_code == 200
        assert agent.get("/api/queues/").status_code == 200
        assert browser.post("/signout/").status_code == 503
        assert browser.post("/api/tokens/", {"name": "x"}, content_type="application/json").status_code == 503
        assert Client(headers={"Authorization": "Token " + "0" * 64}).get("/api/me/").status_code == 401
        change = agent.patch("/api/settings/", {"time_zone": "Europe/Tallinn"}, content_type="application/json")
        assert (change.status_code, change["Retry-After"]) == (503, "30")
        assert queue_names(management, guarded) == {BUILDS}
    run_scheduled_work()
    assert breaches(management, [guarded], mailbox.mails) == []
    assert sent("alice@example.org") == ["deletion"]


def take_all_connections(cluster, taken):
    with contextlib.suppress(psycopg2.OperationalError):
        while True:
            taken.enter_context(contextlib.closing(psycopg2.connect(cluster.database_url())))


def test_without_a_free_database_connection_nothing_is_done(cluster, amqp, alice, guarded, management, mailbox):
    browser = browser_of(alice)
    amqp.queue(BUILDS, 11)
    connection.close()
    with contextlib.ExitStack() as taken:
        take_all_connections(cluster, taken)
        with pytest.raises(OperationalError, match=r"too many clients|remaining connection slots"):
            once.run_once()
        page = browser.get("/queues/")
        assert (page.status_code, page["Retry-After"]) == (503, "30")
        assert queue_names(management, guarded) == {BUILDS}
    wait_until(is_connected)  # the server needs a moment to free closed connections
    run_scheduled_work()
    assert breaches(management, [guarded], mailbox.mails) == []
    assert sent("alice@example.org") == ["deletion"]


def is_connected():
    with contextlib.suppress(OperationalError):
        connection.ensure_connection()
    return connection.connection is not None


def test_a_pass_ended_by_a_deadlock_is_done_by_the_next(cluster, amqp, guarded, management, mailbox):
    for name in ("queue/alice/first", "queue/alice/second"):
        amqp.queue(name, 1)
    once.run_once()
    first, second = Queue.objects.order_by("id").values_list("id", flat=True)
    for name in ("queue/alice/first", "queue/alice/second"):
        amqp.publish(name, 5)

    def run():
        with connection.cursor() as cursor:
            cursor.execute("SET deadlock_timeout = '2s'")  # by then the other transaction waits too
        once.run_once()

    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SET LOCAL deadlock_timeout = '60s'")  # so that PostgreSQL ends the pass, not this transaction
        Queue.objects.select_for_update().get(pk=second)
        a_pass = in_background(run)
        wait_until_blocked(a_pass)
        Queue.objects.select_for_update().get(pk=first)
    assert deletions.is_deadlock(a_pass.exception())
    run_scheduled_work()
    assert breaches(management, [guarded], mailbox.mails) == []
    assert sent("alice@example.org") == ["warning", "warning"]


@pytest.fixture
def full_disk(guarded):
    """Give a context manager in which SQLite's file cannot grow."""
    if connection.vendor != "sqlite":
        pytest.skip("needs SQLite")

    @contextlib.contextmanager
    def fill():
        with connection.cursor() as cursor:
            cursor.execute("PRAGMA max_page_count = 1")  # existing pages are kept
            write_until_full(
                lambda: Pass.objects.create(at=timezone.now(), seconds=0, listing_seconds=0, errors=["x" * 3000])
            )
            try:
                yield
            finally:
                cursor.execute("PRAGMA max_page_count = 1073741823")

    return fill


def write_until_full(write):
    """Write until the file is full: deleted rows left room inside it."""
    with contextlib.suppress(OperationalError):
        while True:
            write()


@pytest.mark.parametrize("step", ["the list", "the announcement"])
def test_a_pass_interrupted_by_a_full_disk_is_finished_later(
    full_disk, amqp, guarded, management, mailbox, monkeypatch, step
):
    number = 30
    for one in range(number):
        amqp.queue(f"queue/alice/{one}", 11)
    with contextlib.ExitStack() as filled:
        once_after(monkeypatch, step, lambda: filled.enter_context(full_disk()))
        with pytest.raises(OperationalError, match="full"):
            once.run_once()
        if step == "the list":
            assert len(queue_names(management, guarded)) == number
            assert not Queue.objects.exists()
            assert not Notification.objects.exists()
            assert not QueueEvent.objects.filter(kind="deleted").exists()
    let_time_pass()
    run_scheduled_work()
    assert breaches(management, [guarded], mailbox.mails) == []
    assert sent("alice@example.org") == ["deletion"] * number
    assert queue_names(management, guarded) == set()


def test_with_a_full_disk_reads_work_and_writes_are_503(full_disk, alice):
    browser = browser_of(alice)
    another = Owner.objects.create_user("bob@example.org")
    wanted = {"name": "one"}
    with full_disk():
        write_until_full(lambda: AuthToken.objects.create(user=another))
        answer = browser.post("/api/tokens/", wanted, content_type="application/json")
        assert (answer.status_code, answer["Retry-After"]) == (503, "30")
        assert answer.json()["detail"].startswith("The database can't be used")
        assert not AuthToken.objects.filter(name="one").exists()
        assert browser.get("/queues/").status_code == 200
    assert browser.post("/api/tokens/", wanted, content_type="application/json").status_code == 201


def test_mails_arrive_after_a_cut_connection_with_few_duplicates(mailbox, settings):
    with Proxy("127.0.0.1", mailbox.port) as between:
        settings.EMAIL_PORT = between.port
        cuts = range(0, 200, 7)  # the server sends about 180 bytes
        for count in cuts:
            with transaction.atomic():
                enqueue.enqueue([Notice("outage", {"error": str(count)})], timezone.now())
            between.cut_after(count)
            sending.send_due()
            between.forward()
            let_time_pass()
            sending.send_due()
    assert Notification.objects.filter(state="sent").count() == len(cuts)
    assert Notification.objects.filter(attempts__gt=0).count() > 15
    resent = count_resent_mails(mailbox.mails)
    assert resent <= 3  # cut within the 250 response that follows the mail
    assert (
        missing_notifications() + undelivered_mails(mailbox.mails) + duplicate_mails(mailbox.mails, interrupted=resent)
        == []
    )


def test_a_clock_that_jumps_a_day_ahead_loses_and_repeats_nothing(amqp, agents, alice, guarded, management, mailbox):
    presented = agents.token(alice)
    identity = agents.identity(alice)
    subscription, _ = queues.register_subscription(identity, "order", presented)
    queue, _ = queues.create_queue(subscription, identity.offering, "order", presented)
    management.declare_queue(queue.vhost, "subscription_orphan")
    amqp.queue("queue/alice/warned", 6)
    amqp.queue(BUILDS, 6)
    once.run_once()
    mailbox.refuse(True)
    sending.send_due()
    removals.write(
        [Removal(kind=Removal.Kind.QUEUE, vhost=queue.vhost, name="gone")], due_at=timezone.now() - timedelta(seconds=1)
    )
    amqp.publish(BUILDS, 6)
    mailbox.refuse(False)
    with time_machine.travel(timezone.now() + timedelta(days=1), tick=True):
        run_scheduled_work()
        amqp.take("queue/alice/warned", 6)
        again, is_new = queues.create_queue(subscription, identity.offering, "order", presented)
        assert (again, is_new) == (queue, False)
        run_scheduled_work()
        wrong = breaches(management, [guarded, queue.vhost], mailbox.mails)
    assert wrong == []
    by_queue = Counter(
        (one.kind, one.facts["queue"]) for one in Notification.objects.filter(recipient="alice@example.org")
    )
    assert by_queue == {
        ("warning", "queue/alice/warned"): 1,
        ("reminder", "queue/alice/warned"): 1,
        ("recovery", "queue/alice/warned"): 1,
        ("warning", BUILDS): 1,
        ("deletion", BUILDS): 1,
    }
    assert set(agents.queues(queue.vhost)) == {queue.queue_name, DEAD_LETTER_QUEUE}


@pytest.mark.parametrize("count", [2, 5, pytest.param(10, marks=pytest.mark.soak)])
def test_concurrent_passes_sweeps_senders_and_registrations_do_everything_once(
    amqp, agents, alice, guarded, management, mailbox, count
):
    presented = agents.token(alice)
    identity = agents.identity(alice)
    subscription, _ = queues.register_subscription(identity, "order", presented)
    vhost = alice.uuid.hex
    for number in range(3):
        amqp.queue(f"queue/alice/long-{number}", 11)
        amqp.queue(f"queue/alice/warned-{number}", 6)
        management.declare_queue(vhost, f"subscription_orphan_{number}")
    leaving = agents.identity(alice)
    queues.register_consumer(leaving, presented, None)
    registered = []

    def register():
        registered.append(queues.create_queue(subscription, identity.offering, "order", presented))

    def remove():
        deletions.delete(AgentIdentity.objects.filter(pk=leaving.pk))

    outcomes = in_parallel(
        *[monitor.run_pass] * count,
        *[sweep.sweep_orphans] * count,
        *[sending.send_due] * count,
        *[remove] * count,
        *[register] * count,
    )
    assert [outcome for outcome in outcomes if isinstance(outcome, Exception)] == []
    assert [is_new for _, is_new in registered].count(True) == 1
    let_time_pass()
    run_scheduled_work()
    assert breaches(management, [guarded, vhost], mailbox.mails) + overlapping_passes() == []
    assert Counter(sent("alice@example.org")) == {"warning": 3, "deletion": 3}
    (queue,) = SubscriptionQueue.objects.all()
    assert set(agents.queues(vhost)) == {queue.queue_name, DEAD_LETTER_QUEUE}
