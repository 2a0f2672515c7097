"""Passes by the figures of the nodes' Prometheus endpoints: what they see, and what they never do by them."""

import threading
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from core import broker
from guardian_site.checks import check_settings
from queues import monitor
from queues.models import Pass, Queue, Watch
from rabbit import prometheus
from rabbit.management import BrokerUnavailable, MalformedResponse
from tests.toolbox import wait_until_equal
from tools.benchmarks.passes import counted_requests

IDENTITY = 'rabbitmq_identity_info{{rabbitmq_node="{node}",rabbitmq_cluster="c"}} 1\n'


def page(*queues, node="rabbit@here"):
    """Give a page as RabbitMQ writes it, about these queues: vhost, name, ready, unacknowledged."""
    lines = ["# TYPE rabbitmq_detailed_queue_messages_ready gauge"]
    lines += [f'rabbitmq_detailed_queue_messages_ready{{vhost="{v}",queue="{q}"}} {ready}' for v, q, ready, _ in queues]
    lines += ["# TYPE rabbitmq_detailed_queue_messages_unacked gauge"]
    lines += [f'rabbitmq_detailed_queue_messages_unacked{{vhost="{v}",queue="{q}"}} {out}' for v, q, _, out in queues]
    return "\n".join([*lines, "# TYPE rabbitmq_identity_info untyped", IDENTITY.format(node=node)])


WHOLE = page(("/", "jobs", 3, 1), ("é\u2028", "} 5", 0, 7))


def test_a_page_says_which_node_it_is_of_and_the_lengths_of_its_queues():
    read = prometheus.parse_metrics(WHOLE)
    assert read.node == "rabbit@here"
    assert read.depths == {("/", "jobs"): (3, 1, "rabbit@here"), ("é\u2028", "} 5"): (0, 7, "rabbit@here")}
    assert prometheus.parse_metrics(page()).depths == {}


@pytest.mark.parametrize("name", ['a"b', "a\\b", 'a",queue="b', 'x"} 7', "a\\nb"])
def test_a_name_of_which_nobody_can_tell_where_it_ends_is_left_out(name):
    read = prometheus.parse_metrics(page(("/", "jobs", 3, 1), ("/", name, 9, 9)))
    assert (read.depths.keys(), read.skipped) == ({("/", "jobs")}, 1)
    assert prometheus.has_ambiguous_name("/", name)
    assert not prometheus.has_ambiguous_name("/", "jobs")


@pytest.mark.parametrize("end", range(0, len(WHOLE), 7))
def test_a_page_that_was_cut_anywhere_is_none(end):
    with pytest.raises(MalformedResponse):
        prometheus.parse_metrics(WHOLE[:end])


@pytest.mark.parametrize(
    "text",
    [
        WHOLE.replace('vhost="/",queue="jobs"', 'queue="jobs",vhost="/"'),
        WHOLE.replace('queue="jobs"} 3', 'queue="jobs"} 3.5'),
        WHOLE.replace('queue="jobs"} 1', 'queue="others"} 1'),
        WHOLE.replace('rabbitmq_detailed_queue_messages_unacked{vhost="/",queue="jobs"} 1\n', ""),
        page(("/", "jobs", 3, 1), ("/", "jobs", 4, 1)),
        WHOLE + IDENTITY.format(node="rabbit@there"),
        IDENTITY.format(node="rabbit@here") + page(("/", "jobs", 3, 1)).rpartition("rabbitmq_identity")[0],
    ],
)
def test_a_page_of_another_shape_is_none(text):
    assert text != WHOLE
    with pytest.raises(MalformedResponse):
        prometheus.parse_metrics(text)


# Passes


@pytest.fixture
def figures(guarded, settings, management, amqp):
    """Guard by figures, and give a function that waits until they show these lengths. None: no such queue."""
    settings.GUARDIAN_SNAPSHOT = "prometheus"
    listeners = management.overview()["listeners"]
    if not any(listener["protocol"] in prometheus.PROTOCOLS for listener in listeners):
        pytest.skip("the broker that was named has no Prometheus endpoint (rabbitmq_prometheus)")

    def wait(**lengths):
        def shown():
            scrape = broker.prometheus().scrape(management, [guarded])
            found = {name: depth.ready for (_, name), depth in scrape.depths.items()}
            return {name: found.get(name) for name in lengths}

        wait_until_equal(shown, lengths)

    amqp.queue("long", 20)
    amqp.queue("short")
    amqp.queue('quo"ted')
    settings.GUARDIAN_MAX_QUEUE_LENGTH = 100
    monitor.run_pass()
    wait(long=20)
    return wait


def run():
    with counted_requests() as sent:
        report = monitor.run_pass()
    return report, [request.partition(" ")[2] for request in sent]


def states():
    return dict(Queue.objects.values_list("name", "state"))


def put_off_the_list(seconds=20):
    Watch.objects.update(exact_at=timezone.now() - timedelta(seconds=seconds))


def test_a_steady_pass_by_figures_asks_for_no_list_and_a_list_comes_each_minute(figures, guarded):
    Queue.objects.filter(name="long").update(ready=1, state="ok", said="ok", durable=False)
    put_off_the_list()
    report, sent = run()
    assert (report.queues, report.changed, report.warned, report.errors) == (3, 1, 1, [])
    assert sent[0] == sent[-1] == "/api/nodes"
    assert sent[-2] == "/metrics/detailed"
    assert not [path for path in sent if path.startswith("/api/queues") and not path.endswith("/bindings")]
    row = Queue.objects.get(name="long")
    assert (row.ready, row.state, row.durable) == (20, "warned", False)
    Watch.objects.update(exact_at=timezone.now() - timedelta(seconds=61))
    report, sent = run()
    assert not [path for path in sent if path.startswith("/metrics")]
    assert Queue.objects.get(name="long").durable


def test_nothing_is_deleted_by_figures_that_lag(figures, guarded, management, settings):
    put_off_the_list()
    settings.GUARDIAN_MAX_QUEUE_LENGTH = 10
    management.purge_queue(guarded, "long")  # the figures still say 20
    report, sent = run()
    assert "/metrics/detailed" in sent
    assert (report.deleted, report.kept, report.queues) == (0, 0, 3)
    assert states() == {"long": "ok", "short": "ok", 'quo"ted': "ok"}
    assert Queue.objects.get(name="long").ready == 0


def test_what_is_past_its_maximum_by_figures_is_deleted_by_the_list_in_the_same_pass(figures, settings):
    put_off_the_list()
    settings.GUARDIAN_MAX_QUEUE_LENGTH = 10
    report, sent = run()
    assert "/metrics/detailed" in sent
    assert (report.deleted, report.errors) == (1, [])
    assert states()["long"] == "gone"
    assert Watch.objects.get().exact_at == Pass.objects.latest("at").at


def test_names_that_are_new_or_gone_are_looked_up(figures, guarded, management, amqp):
    amqp.queue("new", durable=True)
    management.delete_queue(guarded, "short")
    figures(new=0, short=None)
    for passes in (1, 2):
        put_off_the_list()
        report, sent = run()
        assert (report.errors, report.new) == ([], 2 - passes)
        assert len([path for path in sent if path.startswith("/api/queues")]) == 3 - passes, sent
        assert Queue.objects.get(name="short").misses == 2 - passes
    assert states() == {"long": "warned", "short": "gone", 'quo"ted': "ok", "new": "ok"}
    assert Queue.objects.get(name="new").durable


def test_a_queue_that_is_gone_with_a_name_that_figures_cannot_tell_is_gone(figures, guarded, management):
    management.delete_queue(guarded, 'quo"ted')
    assert (monitor.run_pass().gone, Queue.objects.get(name='quo"ted').misses) == (0, 0)  # by figures it may be there
    Watch.objects.update(exact_at=None)
    monitor.run_pass()
    assert Queue.objects.get(name='quo"ted').misses == 1
    put_off_the_list()
    report, sent = run()
    assert ("/metrics/detailed" in sent, report.gone, report.errors) == (True, 1, [])
    assert states() == {"long": "warned", "short": "ok", 'quo"ted': "gone"}


def test_what_a_list_said_is_not_taken_back_by_figures_that_are_older(figures):
    Queue.objects.filter(name="long").update(ready=1, state="ok", said="ok")
    put_off_the_list(seconds=0)
    report, sent = run()
    assert ("/metrics/detailed" in sent, report.changed, report.warned) == (True, 0, 0)
    put_off_the_list()
    assert run()[0].warned == 1


def test_a_node_of_another_broker_tells_nothing_of_this_ones_queues(figures, guarded, management, settings):
    listeners = management.overview()["listeners"]
    port = next(listener["port"] for listener in listeners if listener["protocol"] == "http/prometheus")
    host = urlsplit(settings.RABBITMQ_MANAGEMENT_URL).hostname
    with Served(page((guarded, "long", 5, 5), (guarded, "theirs", 7, 0))) as served:
        settings.GUARDIAN_PROMETHEUS_URLS = [f"http://{host}:{port}", served.url]
        scrape = broker.prometheus().scrape(management, [guarded])
    assert scrape.depths[guarded, "long"].ready == 20
    assert (guarded, "theirs") not in scrape.depths


class Garbled:
    """A management API that answers with something of another shape."""

    def __init__(self, management):
        self.nodes = management.nodes

    def overview(self):
        names = [node.name for node in self.nodes()]
        return {"listeners": [{"protocol": "http/prometheus", "node": name, "port": None} for name in names]}

    def queue(self, vhost, name):
        return {"vhost": vhost, "name": name}


def test_an_answer_of_another_shape_is_an_error_of_the_brokers(management):
    garbled = Garbled(management)
    with pytest.raises(MalformedResponse):
        prometheus.Prometheus([], host="127.0.0.1").scrape(garbled, None)
    scrape = prometheus.Scrape({("/", "new"): None}, frozenset(), frozenset(), 0.0)
    with pytest.raises(MalformedResponse):
        scrape.to_snapshot(garbled, {}, lambda *_: False, lambda: None)


def test_a_queue_without_figures_that_is_there_stays_as_it_is_known(figures, guarded, management):
    put_off_the_list()
    scrape = broker.prometheus().scrape(management, [guarded])
    known = {(row.vhost, row.name): row for row in Queue.objects.all()}
    without = scrape._replace(depths={key: depth for key, depth in scrape.depths.items() if key[1] == "long"})
    seen = without.to_snapshot(management, known, lambda vhost, name: False, lambda: None)
    assert {(queue.name, queue.ready) for queue in seen.queues} == {("long", 20), ("short", 0), ('quo"ted', 0)}
    twice = scrape._replace(depths=dict.fromkeys(scrape.depths))
    assert {queue.ready for queue in twice.to_snapshot(management, known, lambda *_: False, lambda: None).queues} == {
        20,
        0,
    }


def test_many_queues_that_are_new_or_gone_have_the_list_asked_for(figures, guarded, management):
    scrape = broker.prometheus().scrape(management, [guarded])
    new = {(guarded, f"new-{number}"): None for number in range(prometheus.MAX_LOOKUPS + 1)}
    ignored = scrape._replace(depths=scrape.depths | new)
    known = {(row.vhost, row.name): row for row in Queue.objects.all()}
    assert len(ignored.to_snapshot(management, known, lambda _, name: name.startswith("new"), lambda: None).queues) == 3
    for depths in (scrape.depths | new, {}):
        with pytest.raises(prometheus.ListNeeded):
            scrape._replace(depths=depths).to_snapshot(management, known, lambda *_: False, lambda: None)


def test_a_pass_by_figures_takes_as_many_statements_and_requests_for_many_queues_as_for_few(
    figures, guarded, management, amqp
):
    found = []
    for queues in (50, 300):
        names = [f"{queues}-{number}" for number in range(queues)]
        definitions = {
            "queues": [{"name": name, "durable": True, "auto_delete": False, "arguments": {}} for name in names]
        }
        management._exchange("POST", ("definitions", guarded), json=definitions)
        put_off_the_list(61)
        assert run()[0].new == queues
        changing = names[::10]
        for name in changing:
            amqp.publish(name, 1)
        figures(**dict.fromkeys(changing, 1))
        put_off_the_list()
        with CaptureQueriesContext(connection) as statements:
            report, sent = run()
        assert (report.changed, report.errors, "/metrics/detailed" in sent) == (len(changing), [], True)
        found.append((len(statements), len(sent)))
    assert found[0] == found[1]


class Served:
    """A server that answers every request with this text, or status."""

    def __init__(self, text, status=200):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        (WHOLE, 200, "no metrics from"),  # of a node that isn't the broker's
        (WHOLE[:-40], 200, "incomplete"),
        ("<html>Sign in</html>", 200, "incomplete, or not RabbitMQ's"),
        ("", 404, "answered 404"),
        (None, 0, "can't connect"),
    ],
)
def test_a_bad_answer_has_the_list_asked_for_and_removes_nothing(guarded, amqp, settings, text, status, said):
    amqp.queue("long", 7)
    amqp.queue("short")
    monitor.run_pass()
    settings.GUARDIAN_SNAPSHOT = "prometheus"
    put_off_the_list()
    with Served(text or "", status) as served:
        settings.GUARDIAN_PROMETHEUS_URLS = [served.url if text is not None else "http://127.0.0.1:1"]
        report, sent = run()
    assert f"/api/queues/{guarded}" in sent
    assert (report.queues, report.gone, report.new, report.away) == (2, 0, 0, False)
    [error] = report.errors
    assert said in error
    assert states() == {"long": "warned", "short": "ok"}


def test_the_password_of_an_endpoint_stands_in_no_error(management, settings):
    settings.GUARDIAN_PROMETHEUS_URLS = ["http://reader:s3cret@127.0.0.1:1/rabbit"]
    with pytest.raises(BrokerUnavailable) as raised:
        broker.prometheus().scrape(management, None)
    assert "s3cret" not in str(raised.value)
    assert "http://127.0.0.1:1" in str(raised.value)


@pytest.mark.parametrize(
    ("name", "value", "id_"),
    [
        ("GUARDIAN_SNAPSHOT", "metrics", "guardian.E008"),
        ("GUARDIAN_PROMETHEUS_URLS", ["rabbit-1:15692"], "guardian.E002"),
        ("GUARDIAN_PROMETHEUS_URLS", ["http://rabbit-1:15692", "http://"], "guardian.E002"),
    ],
)
def test_nonsense_in_the_settings_is_told(settings, name, value, id_):
    setattr(settings, name, value)
    assert [message.id for message in check_settings(None) if name in message.msg] == [id_]


def test_good_addresses_are_all_right(settings):
    settings.GUARDIAN_SNAPSHOT = "prometheus"
    settings.GUARDIAN_PROMETHEUS_URLS = ["http://rabbit-1:15692", "https://reader:word@rabbit-2/metrics"]
    assert not [message for message in check_settings(None) if "PROMETHEUS" in message.msg or "SNAPSHOT" in message.msg]


def test_an_address_whose_path_can_not_be_sent_is_refused_before_anything_is_asked():
    with pytest.raises(ValueError, match="percent-encode it"):
        prometheus.Endpoint("http://127.0.0.1:15692/two words", connect_timeout=1, read_timeout=1, on_call=None)
