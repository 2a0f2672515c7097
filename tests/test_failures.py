"""The rest of the world, broken for real: what is lost or done twice (nothing), and what is told."""

import threading
from datetime import timedelta

import pytest
from django.utils import timezone

from accounts.models import Owner, PulseUser
from local.rabbitmq import PrivateNode
from queues import deletion, monitor
from queues.models import Notification, Pass, Queue, QueueEvent, Watch
from rabbit import connections, directly
from rabbit.management import Management
from tests.conftest import Amqp
from tests.proxy import Proxy, http_answer


@pytest.fixture
def alice(guarded):
    owner = Owner.objects.create_user("alice@example.org", vouched=True)
    PulseUser.objects.create(username="alice", ready=True).owners.add(owner)
    return owner


@pytest.fixture
def proxy(guarded, broker, settings):
    """Put a proxy between Guardian and the management API."""
    with Proxy.before(broker.management_url) as between:
        settings.RABBITMQ_MANAGEMENT_URL = between.url(broker.management_url)
        yield between


def told(recipient="ops@example.org"):
    return list(Notification.objects.filter(recipient=recipient).order_by("id").values_list("kind", flat=True))


def names(management, vhost):
    return sorted(row["name"] for row in management.list_queues(vhost, {"columns": "name"}))


def test_a_broker_that_is_down_at_the_start_is_an_outage_told_once_and_its_end_once(guarded, settings, broker, caplog):
    settings.RABBITMQ_MANAGEMENT_URL = "http://guest:secret-word@127.0.0.1:1"
    for _ in range(3):
        assert monitor.run_pass().away
    assert told() == ["outage"]
    assert "could not be asked" in caplog.text
    assert "secret-word" not in caplog.text + str(Notification.objects.get().facts)
    settings.RABBITMQ_MANAGEMENT_URL = broker.management_url
    assert not monitor.run_pass().away
    monitor.run_pass()
    assert told() == ["outage", "outage-over"]


def test_the_wait_grows_while_the_broker_is_away_up_to_the_bound(guarded, settings):
    settings.RABBITMQ_MANAGEMENT_URL = "http://guest:guest@127.0.0.1:1"
    waits = []
    for _ in range(6):
        monitor.run_pass()
        waits.append(monitor.seconds_to_wait())
    assert waits == [10, 20, 40, 60, 60, 60]
    assert not monitor.is_due()


def test_a_clock_that_is_set_back_an_hour_makes_no_pass_wait_for_an_hour(guarded, settings):
    settings.RABBITMQ_MANAGEMENT_URL = "http://guest:guest@127.0.0.1:1"
    monitor.run_pass()
    assert not monitor.is_due()
    Watch.objects.update(next_pass_at=timezone.now() + timedelta(hours=1))
    assert monitor.is_due()


def test_wrong_credentials_are_an_outage_that_says_so(guarded, settings, broker):
    host = broker.management_url.rpartition("@")[2]
    settings.RABBITMQ_MANAGEMENT_URL = f"http://guardian:wrong-word@{host}"
    report = monitor.run_pass()
    assert report.away
    assert "401" in report.errors[0]
    assert "wrong-word" not in report.errors[0]


@pytest.mark.parametrize("url", ["", "not an address", "http://", "amqp://guest:word@127.0.0.1", "http://h:port"])
def test_a_management_url_that_is_none_is_an_outage_that_names_the_setting(guarded, settings, url):
    settings.RABBITMQ_MANAGEMENT_URL = url
    report = monitor.run_pass()
    assert report.away
    assert "RABBITMQ_MANAGEMENT_URL" in report.errors[0]


@pytest.mark.parametrize(
    "answer",
    [
        http_answer("200 OK", b"<html>maintenance</html>"),
        http_answer("200 OK", b'[{"name": "a", "vhost"'),
        http_answer("200 OK", b'{"queues": 3}'),
        http_answer("200 OK", b'[{"name": "a"}]'),
        http_answer("200 OK", b""),
        http_answer("502 Bad Gateway", b"nginx"),
        http_answer("302 Found", b"", "Location: /login"),
        b"HTTP/1.1 200 OK\r\nContent-Length: 9000\r\n\r\n[{",
    ],
    ids=["html", "half a JSON", "another JSON", "rows of another shape", "nothing", "a 502", "a redirect", "cut"],
)
def test_an_answer_that_is_no_list_of_queues_removes_nothing(amqp, alice, proxy, management, guarded, answer):
    amqp.queue("queue/alice/builds", 3)
    amqp.queue("long", 3)
    monitor.run_pass()
    before = list(Queue.objects.order_by("id").values())
    amqp.publish("long", 10)
    proxy.answer(answer)
    for _ in range(4):
        assert monitor.run_pass().away
    assert list(Queue.objects.order_by("id").values()) == before
    assert names(management, guarded) == ["long", "queue/alice/builds"]
    assert told() == ["outage"]


def test_an_answer_that_stops_coming_is_given_up(amqp, proxy, settings):
    amqp.queue("a")
    settings.GUARDIAN_BROKER_TIMEOUT_SECONDS = 0.5
    proxy.delay(5)
    report = monitor.run_pass()
    assert report.away
    assert report.seconds < 3


def test_a_connection_that_is_cut_in_the_middle_of_the_list_is_made_anew(amqp, proxy):
    amqp.queue("a")
    assert monitor.run_pass().queues == 1
    proxy.cut_after(300)
    assert monitor.run_pass().queues == 1


def between_look_and_act(monkeypatch, action):
    """Have something happen right after the second look."""
    ask = directly.ask

    def ask_and_act(*arguments):
        answer = ask(*arguments)
        action()
        return answer

    monkeypatch.setattr(deletion.directly, "ask", ask_and_act)


def test_a_queue_that_was_emptied_since_the_list_stays(amqp, alice, monkeypatch, management, guarded):
    amqp.queue("queue/alice/builds", 11)
    take = Management.list_queues

    def list_and_empty(self, vhost, params):
        rows = take(self, vhost, params)
        monkeypatch.setattr(Management, "list_queues", take)
        amqp.take("queue/alice/builds", 4)
        return rows

    monkeypatch.setattr(Management, "list_queues", list_and_empty)
    report = monitor.run_pass()
    assert (report.deleted, report.kept) == (0, 1)
    assert names(management, guarded) == ["queue/alice/builds"]
    assert Queue.objects.get().state == "warned"
    (warning,) = Notification.objects.filter(recipient="alice@example.org")
    assert (warning.kind, warning.facts["length"]) == ("warning", 7)


def test_a_queue_whose_messages_are_all_unacknowledged_is_looked_at_by_the_list_too(amqp, alice):
    amqp.queue("queue/alice/builds", 11)
    for _ in range(6):
        amqp.channel.basic_get("queue/alice/builds", auto_ack=False)
    assert monitor.run_pass().deleted == 1


def test_a_queue_that_somebody_else_deleted_between_look_and_act_is_gone_and_not_claimed(amqp, alice, monkeypatch):
    amqp.queue("queue/alice/builds", 11)
    amqp.queue("another")
    calls = []

    def delete_at_the_second_look():
        calls.append(1)
        if len(calls) == 2:  # the first asks for the consumers, for the mail
            amqp.channel.queue_delete("queue/alice/builds")

    between_look_and_act(monkeypatch, delete_at_the_second_look)
    report = monitor.run_pass()
    assert report.deleted == 0
    assert [monitor.run_pass().gone for _ in range(2)] == [0, 1]
    assert told("alice@example.org") == []
    kinds = QueueEvent.objects.filter(queue_name="queue/alice/builds").order_by("id").values_list("kind", flat=True)
    assert list(kinds) == ["condemned", "gone"]


def test_a_queue_made_unbounded_between_the_decision_and_the_deletion_stays(
    amqp, alice, monkeypatch, management, guarded
):
    amqp.queue("queue/alice/builds", 11)
    between_look_and_act(monkeypatch, lambda: Queue.objects.update(unbounded=True))
    report = monitor.run_pass()
    assert (report.deleted, report.kept) == (0, 1)
    assert names(management, guarded) == ["queue/alice/builds"]


def test_without_amqp_the_second_look_is_the_list_alone(amqp, alice, settings):
    settings.RABBIT_URL = "amqp://guest:guest@127.0.0.1:1"
    amqp.queue("queue/alice/builds", 11)
    assert monitor.run_pass().deleted == 1


@pytest.mark.parametrize("after_the_broker_did_it", [False, True], ids=["before", "after"])
def test_a_pass_that_dies_at_the_deletion_is_finished_by_the_next_and_told_once(
    amqp, alice, monkeypatch, after_the_broker_did_it
):
    amqp.queue("queue/alice/builds", 11)
    amqp.queue("another")
    delete = Management.delete_queue

    class Killed(BaseException):
        """As sudden as SIGKILL, for this process."""

    def die(self, *arguments, **options):
        if after_the_broker_did_it:
            delete(self, *arguments, **options)
        raise Killed

    monkeypatch.setattr(Management, "delete_queue", die)
    with pytest.raises(Killed):
        monitor.run_pass()
    assert Queue.objects.get(name="queue/alice/builds").state == "deleting"
    monkeypatch.setattr(Management, "delete_queue", delete)
    assert monitor.run_pass().deleted == 1
    monitor.run_pass()
    assert told("alice@example.org") == ["deletion"]
    assert Queue.objects.get(name="queue/alice/builds").state == "gone"


def test_a_holder_that_lost_its_lease_stops_and_deletes_nothing(amqp, alice, monkeypatch, management, guarded):
    amqp.queue("queue/alice/builds", 11)

    def run_out():
        from queues.models import Lease

        Lease.objects.update(expires_at=timezone.now() - timedelta(seconds=1))

    between_look_and_act(monkeypatch, run_out)
    report = monitor.run_pass()
    assert report.deleted == 0
    assert "lease" in report.errors[-1]
    assert names(management, guarded) == ["queue/alice/builds"]


def test_a_process_that_was_stopped_after_its_second_look_deletes_nothing_by_it(
    amqp, alice, monkeypatch, management, guarded
):
    amqp.queue("queue/alice/builds", 11)
    monkeypatch.setattr(deletion, "LOOK_HOLDS_SECONDS", -1)
    report = monitor.run_pass()
    assert report.deleted == 0
    assert "too old" in report.errors[0]
    assert names(management, guarded) == ["queue/alice/builds"]
    monkeypatch.undo()
    assert monitor.run_pass().deleted == 1


def test_ten_passes_at_once_delete_once_and_tell_once(amqp, alice):
    from django.db import connection

    amqp.queue("queue/alice/builds", 11)
    begin = threading.Barrier(10)
    reports = []

    def run():
        begin.wait()
        try:
            reports.append(monitor.run_pass())
        finally:
            connection.close()

    threads = [threading.Thread(target=run) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(report.deleted for report in reports) == 1
    assert told("alice@example.org") == ["deletion"]
    assert Pass.objects.count() == sum(not report.another_pass for report in reports)


@pytest.fixture
def own_node(transactional_db, settings):
    """Guard a node of the test's own, which it may break."""
    with PrivateNode(plugins=["rabbitmq_management"]) as node:
        settings.RABBITMQ_MANAGEMENT_URL = node.management_url
        settings.RABBIT_URL = node.amqp_url
        settings.GUARDIAN_VHOSTS = ["/"]
        settings.GUARDIAN_WARN_QUEUE_LENGTH = 5
        settings.GUARDIAN_MAX_QUEUE_LENGTH = 10
        settings.GUARDIAN_OPERATOR_EMAILS = ["ops@example.org"]
        yield node


@pytest.mark.slow
def test_a_queue_process_that_hangs_is_told_to_the_operators_and_the_others_are_guarded_on(own_node, settings):
    settings.GUARDIAN_BROKER_TIMEOUT_SECONDS = 4
    amqp = Amqp(own_node.amqp_url, "/")
    amqp.queue("hung")
    amqp.queue("long", 7)
    monitor.run_pass()
    pid = 'amqqueue:get_pid(element(2, rabbit_amqqueue:lookup(rabbit_misc:r(<<"/">>, queue, <<"hung">>))))'
    own_node.eval(f"sys:suspend({pid}).")
    amqp.publish("long", 8)
    wait_for_statistics(connections.management(), "long", 15)
    report = monitor.run_pass()
    assert any("doesn't respond" in error for error in report.errors)
    assert report.deleted == 1
    assert "unresponsive" in told()
    own_node.eval(f"sys:resume({pid}).")
    report = monitor.run_pass()
    assert report.errors == []
    assert told().count("unresponsive") == told().count("responsive") == 1
    assert Queue.objects.get(name="hung").state == "ok"


def wait_for_statistics(management, name, messages):
    """Wait until the broker's statistics, which lag by seconds, have caught up."""
    import time

    for _ in range(150):
        if management.queue("/", name).get("messages") == messages:
            return
        time.sleep(0.1)
    pytest.fail("the statistics did not catch up")


@pytest.mark.slow
def test_a_broker_that_is_stopped_during_a_pass_and_comes_back_has_lost_nothing(own_node):
    amqp = Amqp(own_node.amqp_url, "/")
    for number in range(20):
        amqp.queue(f"q{number}", 1)
    monitor.run_pass()
    own_node.kill()
    assert monitor.run_pass().away
    own_node.restart()
    report = monitor.run_pass()
    assert (report.queues, report.gone, report.away) == (20, 0, False)
    assert told() == ["outage", "outage-over"]


@pytest.mark.slow
def test_a_frozen_broker_is_an_outage_and_a_thawed_one_goes_on(own_node, settings):
    settings.GUARDIAN_BROKER_TIMEOUT_SECONDS = 1
    Amqp(own_node.amqp_url, "/").queue("a")
    monitor.run_pass()
    own_node.suspend()
    try:
        report = monitor.run_pass()
    finally:
        own_node.resume()
    assert report.away
    assert monitor.run_pass().queues == 1


@pytest.mark.slow
def test_under_a_memory_alarm_queues_are_guarded_on(own_node):
    amqp = Amqp(own_node.amqp_url, "/")
    amqp.queue("long", 11)
    own_node.ctl("set_vm_memory_high_watermark", "0")
    assert monitor.run_pass().deleted == 1


@pytest.mark.slow
def test_a_list_that_is_half_there_while_a_node_stops_removes_nothing(own_node):
    with PrivateNode(name="second", plugins=["rabbitmq_management"], peer=own_node) as second:
        second.join(own_node)
        first_amqp, second_amqp = Amqp(own_node.amqp_url, "/"), Amqp(second.amqp_url, "/")
        for number in range(150):
            first_amqp.queue(f"one-{number}")
            second_amqp.queue(f"two-{number}")
        assert monitor.run_pass().queues == 300
        stopping = threading.Thread(target=second.stop)
        stopping.start()
        listed = []
        while stopping.is_alive():
            report = monitor.run_pass()
            assert report.gone == 0
            listed.append(report.queues)
        stopping.join()
        for _ in range(4):
            assert monitor.run_pass().gone == 0
    assert Queue.objects.exclude(state="gone").count() == 300
    assert Watch.objects.get().failures == 0
