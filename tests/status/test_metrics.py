"""The figures of /metrics, their cost, who may read them, and the alerts and dashboard built on them."""

import json
import os
import re
import subprocess
import sys
import textwrap
from datetime import timedelta
from pathlib import Path

import pytest
import yaml
from django.test import Client
from django.utils import timezone
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from accounts.access.tokens import create_token
from accounts.models import Owner, PulseUser
from agents.models import AgentIdentity, Consumer, EventSubscription, Offering, SubscriptionQueue, Sweep
from core import broker
from core.models import Removal
from notifications.models import Notification
from queues.guard import once
from queues.models import Archive, Pass, Queue, Replay
from rabbit.errors import BrokerUnavailable
from rabbit.requests.sending import Call
from status import counters
from tests.support.served import run_python
from tests.support.toolbox import queue_row

pytestmark = pytest.mark.django_db

ROOT = Path(__file__).resolve().parents[2]
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
DASHBOARD = ROOT / "deploy" / "grafana" / "guardian.json"


def scrape(client=None, **headers):
    answer = (client or Client()).get("/metrics", headers={"Host": "127.0.0.1:8000", **headers})
    assert answer.status_code == 200, answer.text
    return read(answer.text)


def read(text):
    """Return each sample's value by its name and labels."""
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(figures, name, **labels):
    return figures[(name, *sorted(labels.items()))]


def is_gauge(name):
    return name.startswith("guardian_") and not name.endswith(("_total", "_created", "_bucket", "_count", "_sum"))


def increase(before, after, name, **labels):
    key = (name, *sorted(labels.items()))
    return after[key] - before.get(key, 0)


def make_queue(number, **fields):
    return queue_row(f"queue {number}", **{"ready": number, "unacknowledged": 1, "state": "ok", **fields})


def make_notification(now, **fields):
    fields = {"state": "due", "created": now, "due_at": now, **fields}
    return Notification(kind="outage", about="the broker", recipient="ops@example.org", facts={}, **fields)


@pytest.fixture
def registered(db):
    owner = Owner.objects.create_user("alice@example.org", vouched=True)
    offering = Offering.objects.create(name="compute")
    identity = AgentIdentity.objects.create(owner=owner, offering=offering, name="cellar")
    return EventSubscription.objects.create(owner=owner, identity=identity, object_type="order")


def test_an_empty_installation_has_every_gauge_at_zero():
    figures = scrape()
    gauges = {key: figure for key, figure in figures.items() if is_gauge(key[0])}
    assert len({name for name, *_ in gauges}) > 25
    assert {key: figure for key, figure in gauges.items() if figure} == {
        ("guardian_poll_seconds",): 5.0,
        ("guardian_poll_max_seconds",): 60.0,
    }
    assert value(figures, "guardian_passes_total") == 0


def test_queues_are_counted_by_state_and_owner(registered):
    pulse_user = PulseUser.objects.create(username="alice", ready=True)
    Queue.objects.bulk_create(
        [
            make_queue(1, pulse_user=pulse_user),
            make_queue(20, pulse_user=pulse_user, state="warned"),
            make_queue(300, registered=True),
            make_queue(4000, owner=registered.owner, state="deleting"),
            make_queue(5, ready=None),
            make_queue(6, ready=None, unacknowledged=None, type="stream"),
            make_queue(60000, state="gone"),
        ]
    )
    figures = scrape()
    number = {key[1:]: figure for key, figure in figures.items() if key[0] == "guardian_queues" and figure}
    assert number == {
        (("owner", "account"), ("state", "ok")): 1,
        (("owner", "account"), ("state", "warned")): 1,
        (("owner", "agents"), ("state", "ok")): 1,
        (("owner", "agents"), ("state", "deleting")): 1,
        (("owner", "nobody"), ("state", "ok")): 2,
    }
    assert value(figures, "guardian_messages", kind="ready") == 4321
    assert value(figures, "guardian_messages", kind="unacknowledged") == 5
    assert value(figures, "guardian_longest_queue_messages") == 4001
    assert value(figures, "guardian_queues_of_unknown_length") == 1


def test_queues_with_stalled_consumers_are_counted():
    stalled = {"stalled_notified_at": timezone.now()}
    Queue.objects.bulk_create(
        [
            make_queue(1, consumers=1, **stalled),
            make_queue(2, consumers=None, state="warned", **stalled),
            make_queue(3, consumers=0, **stalled),
            make_queue(4, consumers=1, state="gone", **stalled),
            make_queue(5, consumers=1, stalled_since=timezone.now()),
        ]
    )
    assert value(scrape(), "guardian_queues_stalled") == 2


def test_queues_are_counted_by_diagnosis():
    codes = ["stalled", "stalled", "healthy", ""]
    Queue.objects.bulk_create([make_queue(number, diagnosis=code) for number, code in enumerate(codes)])
    figures = scrape()
    assert [value(figures, "guardian_queues_diagnosed", code=code) for code in ("stalled", "healthy", "unknown")] == [
        2, 1, 0,
    ]  # fmt: skip


def test_the_last_pass_is_shown_and_pruning_does_not_lower_the_total():
    for minutes in (30, 20, 10):
        at = timezone.now() - timedelta(minutes=minutes)
        last = Pass.objects.create(at=at, seconds=1.5, listing_seconds=0.25, errors=["one", "two"])
    figures = scrape()
    passes = value(figures, "guardian_passes_total")
    assert passes >= 3
    assert value(figures, "guardian_last_pass_timestamp_seconds") == pytest.approx(last.at.timestamp())
    assert value(figures, "guardian_last_pass_seconds") == 1.5
    assert value(figures, "guardian_last_pass_listing_seconds") == 0.25
    assert value(figures, "guardian_last_pass_errors") == 2
    Pass.objects.exclude(pk=last.pk).delete()
    Pass.objects.create(at=timezone.now())
    assert value(scrape(), "guardian_passes_total") == passes + 1


def test_notifications_are_counted_by_state_with_the_oldest_age():
    now = timezone.now()
    Notification.objects.bulk_create(
        [
            make_notification(now - timedelta(seconds=100)),
            make_notification(now - timedelta(seconds=20), state="sending"),
            make_notification(now - timedelta(hours=1), state="sent"),
            make_notification(now - timedelta(hours=1), state="failed"),
            make_notification(now - timedelta(hours=1), state="failed", attempts=100),
        ]
    )
    figures = scrape()
    states = {state: value(figures, "guardian_notifications", state=state) for state in Notification.State.values}
    assert states == {"due": 1, "sending": 1, "sent": 1, "failed": 2}
    assert value(figures, "guardian_notifications_given_up") == 1
    assert 100 <= value(figures, "guardian_oldest_notification_seconds") < 110


def test_registrations_and_pending_removals_are_counted(registered):
    for state in ("creating", "ready", "ready"):
        number = SubscriptionQueue.objects.count()
        SubscriptionQueue.objects.create(
            subscription=registered, offering=registered.identity.offering, object_type=f"type-{number}",
            vhost="agents", queue_name=f"queue-{number}", state=state,
        )  # fmt: skip
    Consumer.objects.create(identity=registered.identity, vhost="agents", queue_name="consumer_1")
    Removal.objects.create(kind="user", name="somebody")
    Removal.objects.update(created=timezone.now() - timedelta(seconds=100))
    Removal.objects.create(kind="account", name="bob")
    figures = scrape()
    assert value(figures, "guardian_subscriptions") == 1
    assert value(figures, "guardian_agents_queues", kind="subscription", state="creating") == 1
    assert value(figures, "guardian_agents_queues", kind="subscription", state="ready") == 2
    assert value(figures, "guardian_agents_queues", kind="consumer", state="creating") == 1
    pending = {kind: value(figures, "guardian_removals_pending", kind=kind) for kind in Removal.Kind.values}
    assert pending == {"password": 0, "user": 1, "vhost": 0, "queue": 0, "account": 1}
    assert 100 <= value(figures, "guardian_oldest_removal_seconds") < 110


def test_archives_and_replays_are_counted():
    now = timezone.now()
    common = {"vhost": "/", "queue_name": "secret-name", "created": now, "expires": now}
    kept = Archive.objects.create(state="kept", messages=40, stored_bytes=5000, **common)
    Archive.objects.create(state="open", messages=2, stored_bytes=100, **common)
    Archive.objects.create(state="failed", **common)
    Archive.objects.create(state="failed", **{**common, "created": now - timedelta(days=3)})
    Replay.objects.create(archive=kept, first=1, last=40, state="running", created=now)
    figures = scrape()
    states = {state: value(figures, "guardian_archives", state=state) for state in Archive.State.values}
    assert states == {"open": 1, "fetched": 0, "kept": 1, "failed": 2}
    assert value(figures, "guardian_archived_messages") == 42
    assert value(figures, "guardian_archive_bytes") == 5100
    assert value(figures, "guardian_archives_failed") == 1
    assert value(figures, "guardian_replays", state="running") == 1


def test_no_queue_and_no_owner_is_named(registered):
    pulse_user = PulseUser.objects.create(username="pulse-alice", ready=True)
    Queue.objects.bulk_create([make_queue(7, pulse_user=pulse_user)])
    Client().get("/api/queues/secret-name/", headers={"Authorization": "Token wrong"})
    text = Client().get("/metrics", headers={"Host": "localhost"}).text
    for name in ("alice", "example.org", "queue 7", "secret-name", "compute", "cellar"):
        assert name not in text


# Access


def test_with_a_metrics_token_only_its_bearer_and_operators_may_read(settings):
    settings.GUARDIAN_METRICS_TOKEN = "scrape-wörd"
    settings.GUARDIAN_BASE_URL = "https://guardian.example.org"
    bearer = "Bearer scrape-wörd".encode().decode("latin-1")
    assert value(scrape(Authorization=bearer), "guardian_passes_total") == 0
    operator, owner = (
        Owner.objects.create_superuser("ops@example.org"),
        Owner.objects.create_user("al@example.org", vouched=True),
    )
    for somebody, status in ((operator, 200), (owner, 403)):
        signed_in = Client()
        signed_in.force_login(somebody)
        assert signed_in.get("/metrics").status_code == status
        for scope, by_token in (("all", status), ("agent", 403)):
            token = create_token(somebody, "for scraping", scope=scope)[1]
            assert Client().get("/metrics", headers={"Authorization": f"Token {token}"}).status_code == by_token


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Bearer wrong", "Bearer scrape", "scrape-word", "Basic scrape-word",
               "Token scrape-word", f"Token {'0' * 64}", "Bearer scrape-word x", "Bearer \xff"]
)  # fmt: skip
def test_a_wrong_metrics_token_is_401(settings, header):
    settings.GUARDIAN_METRICS_TOKEN = "scrape-word"
    answer = Client().get("/metrics", headers={} if header is None else {"Authorization": header})
    assert (answer.status_code, answer["WWW-Authenticate"]) == (401, "Bearer")
    assert "guardian_passes" not in answer.text
    assert "scrape-word" not in answer.text


def test_with_its_token_metrics_are_answered_on_any_host(settings):
    settings.GUARDIAN_METRICS_TOKEN = "scrape-word"
    assert scrape(Host="10.42.0.17:8000", Authorization="Bearer scrape-word")


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost", "[::1]:8000"])
@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_without_a_metrics_token_in_the_settings_this_machine_may_read(host, address):
    assert scrape(Client(REMOTE_ADDR=address), Host=host)


@pytest.mark.parametrize(
    ("address", "headers"),
    [
        ("192.0.2.7", {"Host": "127.0.0.1:8000"}),
        ("", {"Host": "127.0.0.1:8000"}),
        # Through a proxy on this machine:
        ("127.0.0.1", {"Host": "guardian.example.org"}),
        ("127.0.0.1", {"Host": "127.0.0.1:8000", "X-Forwarded-For": "192.0.2.7"}),
        ("127.0.0.1", {"Host": "localhost", "X-Forwarded-For": "127.0.0.1"}),
        ("127.0.0.1", {"Host": "localhost", "X-Forwarded-For": "127.0.0.1, 192.0.2.7"}),
    ],
)
@pytest.mark.parametrize("proxies", [0, 1, 2])
def test_without_a_metrics_token_in_the_settings_nobody_else_may_read(settings, address, headers, proxies):
    settings.ALLAUTH_TRUSTED_PROXY_COUNT = proxies
    answer = Client(REMOTE_ADDR=address).get("/metrics", headers=headers)
    assert answer.status_code == 401
    assert "Set GUARDIAN_METRICS_TOKEN" in answer.text


def test_openmetrics_is_sent_to_clients_that_accept_it(client):
    accepted = "application/openmetrics-text; version=1.0.0,text/plain;q=0.5"
    answer = client.get("/metrics", headers={"Host": "localhost", "Accept": accepted})
    assert answer["Content-Type"].startswith("application/openmetrics-text")
    assert "guardian_queues" in {family.name for family in read_openmetrics(answer.text)}
    assert "no-store" in answer["Cache-Control"]


@pytest.mark.slow
def test_without_the_database_the_answer_is_503():
    program = (
        "from django.test import Client; a = Client().get('/metrics', headers={'Host': 'localhost'}); "
        "print(a.status_code)"
    )
    answer = manage(program, DATABASE_URL="postgres://guardian:secret-word@127.0.0.1:1/guardian")
    assert answer.stdout.split() == ["503"]
    assert "secret-word" not in answer.stderr


# Counters of processes


@pytest.fixture
def own_folder(monkeypatch, tmp_path):
    """Have this process write its counters to a new folder."""
    folder = tmp_path / "metrics"
    monkeypatch.setattr(counters, "FOLDER", folder)
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(folder))
    monkeypatch.setattr(counters, "HOST", tmp_path.name)
    return folder


COUNT = """
from status import counters
from rabbit.requests.sending import Call

def count():
    counters.count_call(Call("GET", "/api/queues", "ok", 0.003))

def counted():
    calls = [metric for metric in counters.collect() if metric.name == "guardian_broker_calls"]
    return sum(sample.value for metric in calls for sample in metric.samples)

count()
"""


def manage(code, **changes):
    code = f"import django; django.setup()\n{textwrap.dedent(code)}"
    answer = run_python({**os.environ, "DJANGO_SETTINGS_MODULE": "guardian_site.settings", **changes}, "-c", code)
    answer.check_returncode()
    return answer


def test_a_pass_counts_its_calls_and_deletions(guarded, amqp):
    once.run_once()
    before = scrape()
    amqp.queue("long", 11)
    assert once.run_once().deleted == 1
    after = scrape()
    assert increase(before, after, "guardian_queues_deleted_total", by="pass") == 1
    assert increase(before, after, "guardian_passes_total") == 1
    assert increase(before, after, "guardian_passes_failed_total", why="away") == 0
    calls = increase(before, after, "guardian_broker_calls_total", method="GET", outcome="ok")
    assert calls >= 3
    assert increase(before, after, "guardian_broker_call_seconds_count", method="GET") >= calls
    assert increase(before, after, "guardian_broker_call_seconds_sum", method="GET") > 0
    assert value(after, "guardian_queues", state="ok", owner="nobody") == 0


@pytest.mark.parametrize(("login", "outcome"), [("guest:guest@127.0.0.1:1", "away"), ("nobody:wrong@{}", "refused")])
def test_a_pass_without_the_broker_is_counted_as_failed(guarded, settings, broker, login, outcome):
    settings.RABBITMQ_MANAGEMENT_URL = "http://" + login.format(broker.management_url.rpartition("@")[2])
    before = scrape()
    once.run_once()
    after = scrape()
    assert increase(before, after, "guardian_passes_failed_total", why="away") == 1
    assert increase(before, after, "guardian_passes_failed_total", why="errors") == 0
    assert increase(before, after, "guardian_broker_calls_total", method="GET", outcome=outcome) == 1
    assert value(after, "guardian_outage") == value(after, "guardian_passes_failed_in_a_row") == 1


def test_deletions_of_sweeps_are_counted_once_if_a_report_is_saved_twice():
    before = scrape()
    for kind, deleted in (("orphans", 2), ("stale", 5)):
        Sweep.objects.create(kind=kind, at=timezone.now(), deleted=deleted).save()
    Pass.objects.create(at=timezone.now(), listing_seconds=1, errors=["one"]).save()
    after = scrape()
    deleted = {by: increase(before, after, "guardian_queues_deleted_total", by=by) for by in counters.DELETED_BY}
    assert deleted == {"pass": 0, "orphans": 2, "stale": 5}
    assert increase(before, after, "guardian_passes_failed_total", why="errors") == 1


def test_api_requests_are_counted_by_status_and_pages_are_not(admin):
    before = scrape()
    Client().get("/api/queues/")
    admin.get("/api/settings/")
    admin.generic("BREW", "/api/queues/")
    admin.get("/")
    after = scrape()
    assert increase(before, after, "guardian_api_requests_total", method="GET", status="4xx") == 1
    assert increase(before, after, "guardian_api_requests_total", method="GET", status="2xx") == 1
    assert increase(before, after, "guardian_api_requests_total", method="other", status="4xx") == 1
    assert increase(before, after, "guardian_api_request_seconds_count", method="GET") == 2


@pytest.mark.slow
def test_counters_of_ended_and_forked_processes_are_kept():
    before = scrape()
    code = """
        import os
        from status.counters import count_call
        from rabbit.requests.sending import Call

        count_call(Call("PUT", "/api/queues", "ok", 0.003))
        if os.fork() == 0:
            count_call(Call("PUT", "/api/queues", "ok", 0.003))
            os._exit(0)
        os.wait()
        os.kill(os.getpid(), 9) if os.environ.get("KILLED") else None
    """
    manage(code)
    with pytest.raises(subprocess.CalledProcessError):
        manage(code, KILLED="yes")
    for _ in range(2):
        after = scrape()
        assert increase(before, after, "guardian_broker_calls_total", method="PUT", outcome="ok") == 4
        assert increase(before, after, "guardian_broker_call_seconds_bucket", method="PUT", le="0.005") == 4
        assert increase(before, after, "guardian_broker_call_seconds_bucket", method="PUT", le="+Inf") == 4


@pytest.mark.slow
def test_only_the_first_process_clears_the_folder(tmp_path):
    environment = {"GUARDIAN_VAR_DIR": str(tmp_path), "DJANGO_SETTINGS_MODULE": "guardian_site.settings"}
    then = "print('counts', flush=True), input(), print(counted())"
    manage(COUNT, **environment)
    process = subprocess.Popen(
        [sys.executable, "-c", f"import django; django.setup()\n{COUNT}{then}"],
        cwd=ROOT, env={**os.environ, **environment},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "counts\n"
    manage(COUNT, **environment)
    assert process.communicate("\n", timeout=30)[0] == "2.0\n"


@pytest.mark.slow
def test_requests_work_without_a_folder_for_counters(tmp_path):
    (tmp_path / "metrics").write_text("a file where the folder should be")
    answer = manage(
        """
        from django.test import Client
        from status.counters import count_call
        from rabbit.requests.sending import Call

        for _ in range(3):
            count_call(Call("GET", "/api/queues", "ok", 0.003))
        print(Client().get("/healthz").status_code, Client().get("/api/schema/").status_code)
        """,
        GUARDIAN_VAR_DIR=str(tmp_path),
    )
    assert answer.stdout.split() == ["200", "200"]
    assert answer.stderr.count("counters for /metrics can't be written") == 1


def called(figures, method):
    return value(figures, "guardian_broker_calls_total", method=method, outcome="ok")


@pytest.mark.parametrize(
    "content", [b"", b"\x30\0\0\0\0\0\0\0\x08\0\0\0no JSON!" + b"\0" * 100], ids=["empty", "no JSON"]
)
def test_a_damaged_counter_file_or_folder_hides_only_the_counters(own_folder, content, monkeypatch):
    counters.count_call(Call("GET", "/api/queues", "ok", 0.003))
    assert called(scrape(), "GET") == 1
    (own_folder / "counter_dead.db").write_bytes(content)
    for folder in (own_folder, own_folder / "counter_dead.db"):  # the second is no folder
        monkeypatch.setattr(counters, "FOLDER", folder)
        figures = scrape()
        assert value(figures, "guardian_outage") == 0
        assert "guardian_broker_calls_total" not in {key[0] for key in figures}


@pytest.mark.slow
def test_while_the_disk_is_full_nothing_is_counted(tmp_path):
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({}, resource.RLIM_INFINITY))\n"
    code = f"""
{limit.format(4096)}{COUNT}
print(counted(), list(counters.FOLDER.glob("*.db")))
{limit.format("resource.RLIM_INFINITY")}
count()
print(counted())
"""
    answer = manage(code, GUARDIAN_VAR_DIR=str(tmp_path))
    assert answer.stdout.splitlines() == ["0 []", "1.0"]


def test_an_error_in_counting_a_call_does_not_break_the_call(guarded, settings):
    broker.management().whoami()
    counters.count_call(Call("GET", "/api", "ok", "no number"))
    settings.RABBITMQ_MANAGEMENT_URL = "http://guest:guest@127.0.0.1:1"
    with pytest.raises(BrokerUnavailable):
        broker.management().whoami()


# Alerts and dashboard


def rules():
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def expressions():
    dashboard = json.loads(DASHBOARD.read_text())
    used = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    used += [variable["definition"] for variable in dashboard["templating"]["list"] if "definition" in variable]
    return [*(rule["expr"] for rule in rules()), *used]


def test_every_metric_that_alerts_and_dashboard_use_exists(guarded, client):
    once.run_once()
    client.get("/api/queues/")
    exposed = {key[0] for key in scrape()}
    used = {name for expression in expressions() for name in re.findall(r"\bguardian_\w+", expression)}
    assert len(used) > 20
    assert used - exposed == set()


def test_every_label_value_that_alerts_and_dashboard_use_exists():
    exposed = scrape()
    for expression in expressions():
        for name, labels in re.findall(r"(guardian_\w+)\{([^}]*)\}", expression):
            for label, wanted in re.findall(r'(\w+)="([^"$]+)"', labels):
                if is_gauge(name):
                    assert any(key[0] == name and (label, wanted) in key[1:] for key in exposed), expression


def test_every_alert_has_a_severity_a_description_and_a_runbook_in_the_docs():
    names = [rule["alert"] for rule in rules()]
    assert len(names) == len(set(names)) > 10
    headings = re.findall(r"^#+ +(.+?) *$", (ROOT / "docs/operators.md").read_text(), re.M)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
    for rule in rules():
        assert rule["labels"]["severity"] in ("page", "ticket"), rule["alert"]
        assert rule["annotations"].keys() == {"summary", "description", "runbook"}, rule["alert"]
        path, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert (path, anchor in anchors) == ("docs/operators.md", True), rule["alert"]


def test_every_panel_has_a_description_and_uses_the_chosen_data_source():
    dashboard = json.loads(DASHBOARD.read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert dashboard["schemaVersion"] >= 39
    assert [variable["name"] for variable in dashboard["templating"]["list"]] == ["datasource", "job"]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    for panel in panels:
        assert panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}, panel["title"]


def test_the_example_scrape_configuration_uses_the_token_and_the_alerts():
    example = yaml.safe_load((ALERTS.parent / "scrape.yml").read_text())
    (job,) = example["scrape_configs"]
    assert (job["job_name"], job["metrics_path"], job["authorization"]["type"]) == ("guardian", "/metrics", "Bearer")
    assert example["rule_files"] == [ALERTS.name]
