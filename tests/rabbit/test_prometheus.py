"""Passes with GUARDIAN_SNAPSHOT=prometheus: lengths from the nodes' Prometheus endpoints."""

from datetime import timedelta
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
from django.utils import timezone

from core import broker
from guardian_site.checks import check_settings
from queues.guard import once
from queues.models import Pass, Queue, Watch
from rabbit import prometheus
from rabbit.errors import BrokerUnavailable, MalformedResponse
from tests.rabbit.test_http import Server
from tests.support.counting import counted_requests
from tests.support.proxy import http_answer
from tests.support.toolbox import wait_until_equal

IDENTITY = 'rabbitmq_identity_info{{rabbitmq_node="{node}",rabbitmq_cluster="c"}} 1\n'


def page(*queues, node="rabbit@here"):
    """Return a page like RabbitMQ's about these queues: vhost, name, ready, unacknowledged."""
    lines = ["# TYPE rabbitmq_detailed_queue_messages_ready gauge"]
    lines += [f'rabbitmq_detailed_queue_messages_ready{{vhost="{v}",queue="{q}"}} {ready}' for v, q, ready, _ in queues]
    lines += ["# TYPE rabbitmq_detailed_queue_messages_unacked gauge"]
    lines += [f'rabbitmq_detailed_queue_messages_unacked{{vhost="{v}",queue="{q}"}} {out}' for v, q, _, out in queues]
    return "\n".join([*lines, "# TYPE rabbitmq_identity_info untyped", IDENTITY.format(node=node)])


WHOLE = page(("/", "jobs", 3, 1), ("é\u2028", "} 5", 0, 7))


def test_a_page_has_its_node_and_the_lengths_of_its_queues():
    read = prometheus.parse_metrics(WHOLE)
    assert read.node == "rabbit@here"
    assert read.depths == {("/", "jobs"): (3, 1, "rabbit@here"), ("é\u2028", "} 5"): (0, 7, "rabbit@here")}
    assert prometheus.parse_metrics(page()).depths == {}


@pytest.mark.parametrize("name", ['a"b', "a\\b", 'a",queue="b', 'x"} 7', "a\\nb"])
def test_an_ambiguous_name_is_left_out(name):
    read = prometheus.parse_metrics(page(("/", "jobs", 3, 1), ("/", name, 9, 9)))
    assert read.depths.keys() == {("/", "jobs")}
    assert prometheus.has_ambiguous_name("/", name)
    assert not prometheus.has_ambiguous_name("/", "jobs")


def test_a_truncated_page_is_malformed():
    for end in range(len(WHOLE) - 1):
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
def test_a_page_of_another_shape_is_malformed(text):
    assert text != WHOLE
    with pytest.raises(MalformedResponse):
        prometheus.parse_metrics(text)


@pytest.fixture
def wait_for_figures(guarded, settings, management, amqp):
    """Guard by Prometheus, and give a function that waits until it shows these lengths (None: no such queue)."""
    settings.GUARDIAN_SNAPSHOT = "prometheus"
    listeners = management.overview()["listeners"]
    if not any(listener["protocol"] in prometheus.PROTOCOLS for listener in listeners):
        pytest.skip("the broker lacks the plugin rabbitmq_prometheus")

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
    once.run_once()
    wait(long=20)
    return wait


def run():
    with counted_requests() as sent:
        report = once.run_once()
    return report, [request.partition(" ")[2] for request in sent]


def states():
    return dict(Queue.objects.values_list("name", "state"))


def set_age_of_list(seconds=20):
    Watch.objects.update(exact_at=timezone.now() - timedelta(seconds=seconds))


def test_a_prometheus_pass_requests_no_list_for_a_minute(wait_for_figures, guarded):
    Queue.objects.filter(name="long").update(ready=1, state="ok", notified_state="ok", durable=False)
    set_age_of_list()
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


def test_nothing_is_deleted_by_outdated_prometheus_figures(wait_for_figures, guarded, management):
    set_age_of_list()
    Queue.objects.update(max_length=10)
    management.purge_queue(guarded, "long")  # Prometheus still shows 20
    report, sent = run()
    assert "/metrics/detailed" in sent
    assert (report.deleted, report.kept, report.queues) == (0, 0, 3)
    assert states() == {"long": "ok", "short": "ok", 'quo"ted': "ok"}
    assert Queue.objects.get(name="long").ready == 0


def test_a_queue_over_its_limit_by_prometheus_is_listed_and_deleted(wait_for_figures):
    set_age_of_list()
    Queue.objects.update(max_length=10)
    report, sent = run()
    assert "/metrics/detailed" in sent
    assert (report.deleted, report.errors) == (1, [])
    assert states()["long"] == "gone"
    assert Watch.objects.get().exact_at == Pass.objects.latest("at").at


def test_new_and_missing_names_are_looked_up(wait_for_figures, guarded, management, amqp):
    amqp.queue("new", durable=True)
    amqp.queue(f"guardian.watch.{'0' * 32}")  # of a watch, so left out
    management.delete_queue(guarded, "short")
    wait_for_figures(new=0, short=None)
    for passes in (1, 2):
        set_age_of_list()
        report, sent = run()
        assert (report.errors, report.new) == ([], 2 - passes)
        assert len([path for path in sent if path.startswith("/api/queues")]) == 3 - passes, sent
        assert Queue.objects.get(name="short").misses == 2 - passes
    assert states() == {"long": "warned", "short": "gone", 'quo"ted': "ok", "new": "ok"}
    assert Queue.objects.get(name="new").durable


def test_a_missing_queue_with_an_ambiguous_name_is_gone(wait_for_figures, guarded, management):
    management.delete_queue(guarded, 'quo"ted')
    report = once.run_once()  # Prometheus cannot tell whether it exists
    assert (report.gone, Queue.objects.get(name='quo"ted').misses) == (0, 0)
    Watch.objects.update(exact_at=None)
    once.run_once()
    assert Queue.objects.get(name='quo"ted').misses == 1
    set_age_of_list()
    report, sent = run()
    assert ("/metrics/detailed" in sent, report.gone, report.errors) == (True, 1, [])
    assert states() == {"long": "warned", "short": "ok", 'quo"ted': "gone"}


def test_an_endpoint_of_another_broker_is_ignored(wait_for_figures, guarded, management, settings):
    listeners = management.overview()["listeners"]
    port = next(listener["port"] for listener in listeners if listener["protocol"] == "http/prometheus")
    host = urlsplit(settings.RABBITMQ_MANAGEMENT_URL).hostname
    theirs = page((guarded, "long", 5, 5), (guarded, "theirs", 7, 0))
    with Server(http_answer("200 OK", theirs.encode())) as served:
        settings.GUARDIAN_PROMETHEUS_URLS = [f"http://{host}:{port}", f"http://127.0.0.1:{served.port}"]
        scrape = broker.prometheus().scrape(management, [guarded])
    assert scrape.depths[guarded, "long"].ready == 20
    assert (guarded, "theirs") not in scrape.depths


def test_a_management_answer_of_another_shape_is_malformed(management):
    listeners = [{"protocol": "http/prometheus", "node": one.name, "port": None} for one in management.nodes()]
    malformed = SimpleNamespace(nodes=management.nodes, overview=lambda: {"listeners": listeners})
    with pytest.raises(MalformedResponse):
        prometheus.Prometheus([], host="127.0.0.1").scrape(malformed, None)


def test_an_existing_queue_without_figures_keeps_its_stored_length(wait_for_figures, guarded, management):
    set_age_of_list()
    scrape = broker.prometheus().scrape(management, [guarded])
    known = {(row.vhost, row.name): row for row in Queue.objects.all()}
    without = scrape._replace(depths={key: depth for key, depth in scrape.depths.items() if key[1] == "long"})
    seen = without.to_snapshot(management, known, lambda vhost, name: False, lambda: None)
    assert {(queue.name, queue.ready) for queue in seen.queues} == {("long", 20), ("short", 0), ('quo"ted', 0)}
    twice = scrape._replace(depths=dict.fromkeys(scrape.depths))
    seen = twice.to_snapshot(management, known, lambda *_: False, lambda: None)
    assert {queue.ready for queue in seen.queues} == {20, 0}


def test_many_new_or_missing_queues_need_a_list(wait_for_figures, guarded, management):
    scrape = broker.prometheus().scrape(management, [guarded])
    new = {(guarded, f"new-{number}"): None for number in range(prometheus.MAX_LOOKUPS + 1)}
    ignored = scrape._replace(depths=scrape.depths | new)
    known = {(row.vhost, row.name): row for row in Queue.objects.all()}
    assert len(ignored.to_snapshot(management, known, lambda _, name: name.startswith("new"), lambda: None).queues) == 3
    for depths in (scrape.depths | new, {}):
        with pytest.raises(prometheus.ListNeeded):
            scrape._replace(depths=depths).to_snapshot(management, known, lambda *_: False, lambda: None)


@pytest.mark.parametrize(
    ("status", "text", "error_text"),
    [
        ("200 OK", WHOLE, "no metrics from"),  # of a node outside the cluster
        ("200 OK", WHOLE[:-40], "incomplete"),
        ("200 OK", "<html>Sign in</html>", "incomplete, or not RabbitMQ's"),
        ("404 Not Found", "", "answered 404"),
        (None, "", "can't connect"),
    ],
)
def test_a_bad_prometheus_answer_falls_back_to_the_list(guarded, amqp, settings, status, text, error_text):
    amqp.queue("long", 7)
    amqp.queue("short")
    once.run_once()
    settings.GUARDIAN_SNAPSHOT = "prometheus"
    set_age_of_list()
    with Server(http_answer(status or "", text.encode())) as served:
        settings.GUARDIAN_PROMETHEUS_URLS = [f"http://127.0.0.1:{served.port if status else 1}"]
        report, sent = run()
    assert f"/api/queues/{guarded}" in sent
    assert (report.queues, report.gone, report.new, report.away) == (2, 0, 0, False)
    [error] = report.errors
    assert error_text in error
    assert states() == {"long": "warned", "short": "ok"}


def test_the_password_of_an_endpoint_is_in_no_error(management, settings):
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
        ("GUARDIAN_PROMETHEUS_URLS", ["http://rabbit-1:15692", "https://reader:word@rabbit-2/metrics"], None),
    ],
)
def test_invalid_prometheus_settings_are_refused(settings, name, value, id_):
    setattr(settings, name, value)
    assert [message.id for message in check_settings(None) if name in message.msg] == ([id_] if id_ else [])
