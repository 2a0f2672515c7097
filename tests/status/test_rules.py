"""The rules of status/rules.py: front page, doctor, /metrics, /readyz and alerts agree at every limit."""

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import time_machine
import yaml
from django.conf import settings
from django.utils.html import escape

from accounts.models import Owner
from agents.models import Sweep
from core.models import Removal
from notifications.models import Notification
from queues.guard.unguarded import UNCOUNTED_TIME
from queues.models import Archive, Pass, Watch
from rabbit.entities import Node
from status import facts, overview, rules
from status.doctor import broker as doctor_broker
from status.doctor import database, findings
from status.facts import BrokerFacts, Measurement
from status.verdicts import Level, Unit
from tests.status.test_metrics import scrape, value
from tests.support.proxy import Proxy

ROOT = Path(__file__).resolve().parents[2]
NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
NODE = Node("rabbit@a", True, 100, 1000, False, 1000, 50, False, 10, 1000, 7200.0, ())

ALERTS = {
    alert["alert"]: alert
    for group in yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())["groups"]
    for alert in group["rules"]
}
PROMETHEUS_ALONE = {
    "GuardianDown", "GuardianManyDeletions", "GuardianLengthsUnknown",
    "GuardianConsumersStalled", "GuardianBrokerCallsFail", "GuardianAgentsQueuesNotMade", "GuardianApiErrors",
}  # fmt: skip
"""Alerts without a rule: rates, and conditions that must last for some time."""

STEPS = {Unit.SECONDS: 0.5, Unit.SHARE: 0.01, Unit.COUNT: 1, Unit.FLAG: 1}


def at_limits(table):
    """Return each rule with values just below and at its limits, and the expected level."""
    cases = []
    for rule in table:
        below = Level.OK
        for level in (Level.WARNING, Level.CRITICAL):
            limit = rule.limit(level, settings)
            if limit is not None:
                step = STEPS[rule.unit]
                cases.append(pytest.param(rule, limit - step, below, id=f"{rule.name} below {level.name}"))
                cases.append(pytest.param(rule, limit, level, id=f"{rule.name} at {level.name}"))
                below = level
    return cases


def seconds_ago(seconds):
    return NOW - timedelta(seconds=seconds)


def set_since(field, **more):
    return lambda flag: Watch.objects.update(**{field: NOW if flag else None}, **more)


def create_waiting_notification(seconds):
    row = {"kind": "outage", "recipient": "ops@example.org", "facts": {}, "due_at": NOW}
    Notification.objects.create(created=seconds_ago(seconds), **row)


def create_given_up_notifications(number):
    row = {"kind": "outage", "recipient": "ops@example.org", "facts": {}, "due_at": NOW, "created": NOW}
    for _ in range(number):
        Notification.objects.create(state="failed", attempts=100, **row)


def delay_passes_in_an_outage(seconds):
    Pass.objects.update(at=seconds_ago(seconds))
    Watch.objects.update(outage_since=NOW)


def release_the_brake(number):
    names = [["/", f"queue {index}"] for index in range(number)]
    release = {"released": names or None, "released_at": NOW if names else None}
    Watch.objects.update(brake_since=NOW, blocked=number, **release)


def brake_a_sweep(kind):
    return lambda number: Sweep.objects.create(kind=kind, at=NOW, found=number, brake_held=bool(number))


def delay_a_removal(seconds):
    Removal.objects.create(kind="queue", vhost="a", name="b")
    Removal.objects.update(created=seconds_ago(seconds))


def leave_unguarded(reason):
    return lambda number: Watch.objects.update(unguarded={reason: [["/", str(index)] for index in range(number)]})


def leave_uncounted(number):
    since = seconds_ago(UNCOUNTED_TIME.total_seconds()).isoformat()
    Watch.objects.update(unguarded={"uncounted": [["/", str(index), since] for index in range(number)]})


def fail_archives(number):
    for _ in range(number):
        Archive.objects.create(vhost="/", queue_name="q", state="failed", error="why", created=NOW, expires=NOW)


def fill_archives(share):
    size = round(share * settings.GUARDIAN_ARCHIVE_TOTAL_BYTES)
    Archive.objects.create(vhost="/", queue_name="q", state="kept", stored_bytes=size, created=NOW, expires=NOW)


CAUSES = {
    rules.PASS_AGE: lambda seconds: Pass.objects.update(at=seconds_ago(seconds)),
    rules.PASS_AGE_IN_OUTAGE: delay_passes_in_an_outage,
    rules.PASS_SECONDS: lambda seconds: Pass.objects.update(seconds=seconds),
    rules.PASS_ERRORS: lambda number: Pass.objects.update(errors=["oh"] * number),
    rules.OUTAGE: set_since("outage_since"),
    rules.BRAKE: set_since("brake_since", blocked=90),
    rules.BRAKE_RELEASE: release_the_brake,
    rules.SHORT_LISTS: lambda number: Watch.objects.update(short_lists=number),
    rules.REFUSED: set_since("refused_since"),
    rules.LATE: set_since("late_since"),
    rules.UNRESPONSIVE: set_since("unresponsive_since"),
    rules.UNADDRESSABLE: leave_unguarded("unaddressable"),
    rules.STREAMS: leave_unguarded("streams"),
    rules.EXCLUSIVE: leave_unguarded("exclusive"),
    rules.UNCOUNTED: leave_uncounted,
    rules.ORPHANS_BRAKE: brake_a_sweep("orphans"),
    rules.STALE_BRAKE: brake_a_sweep("stale"),
    rules.OTHER_TASKS: lambda seconds: Watch.objects.update(consumers_counted_at=seconds_ago(seconds)),
    rules.NOTIFICATIONS_WAIT: create_waiting_notification,
    rules.NOTIFICATIONS_GIVEN_UP: create_given_up_notifications,
    rules.REMOVALS: delay_a_removal,
    rules.ARCHIVES_FAILED: fail_archives,
    rules.ARCHIVES_FULL: fill_archives,
}
"""Functions that change the database so that a rule measures a value."""


@pytest.fixture
def healthy(transactional_db, settings):
    """Give an installation without findings, except for the broker, which is not queried."""
    settings.RABBITMQ_MANAGEMENT_URL = ""
    settings.GUARDIAN_ARCHIVE_TOTAL_BYTES = 1000
    with time_machine.travel(NOW, tick=False):
        Pass.objects.create(at=NOW, seconds=0.1)
        Watch.objects.create(listed_at=NOW, consumers_counted_at=NOW)
        yield Owner.objects.create_superuser("ops@example.org")


def alert_fires(alert, figures):
    """Return whether an alert's expression is true for these figures."""
    asked = re.sub(r"max by \(job\) \((\w+)\)", lambda name: repr(value(figures, name[1])), ALERTS[alert]["expr"])
    comparison = asked.replace("time()", repr(NOW.timestamp()))
    assert re.fullmatch(r"[-+*>=\d.\s]+", comparison), comparison
    return eval(comparison)


@pytest.mark.parametrize(("rule", "measured", "level"), at_limits(rules.OF_GUARDIAN))
def test_page_doctor_and_alert_agree_about_guardian(healthy, client, rule, measured, level):
    CAUSES[rule](measured)
    (verdict,) = [one for one in facts.measure_guardian(NOW).verdicts() if one.rule is rule] or [None]
    assert (verdict.value, verdict.level) == (measured, level)

    client.force_login(healthy)
    page = client.get("/admin/")
    summary = page.context["overview"]["guardian"]
    lines = {line.sentence: line.level for line in (summary.worst, *summary.others)}
    assert lines.get(verdict.sentence, Level.OK) is level
    if level is not Level.OK:
        assert escape(verdict.sentence) in page.text
        assert escape(verdict.next_step) in page.text

    statuses = {finding.name: finding.status for finding in database._rows()}
    assert statuses[rule.name] is findings.STATUSES[level]

    if rule.alert:
        is_page = rule.critical is not None
        assert alert_fires(rule.alert, scrape()) is (level >= (Level.CRITICAL if is_page else Level.WARNING))


def node_with(rule, measured):
    """Return a node for which the rule measures this value."""
    changed = {
        rules.NODE_STOPPED: {"running": not measured},
        rules.CLUSTER_SPLIT: {"partitions": ("rabbit@b",) if measured else ()},
        rules.MEMORY_ALARM: {"mem_alarm": bool(measured)},
        rules.DISK_ALARM: {"disk_alarm": bool(measured)},
        rules.MEMORY: {"mem_used": round(measured * 1000)},
        rules.DISK: {"disk_free": 10_000, "disk_free_limit": round(measured * 10_000)},
        rules.FILES: {"fd_used": round(measured * 1000)},
    }
    return NODE._replace(**changed[rule])


@pytest.mark.parametrize(("rule", "measured", "level"), at_limits(rules.OF_BROKER))
def test_page_and_doctor_agree_about_the_broker(rule, measured, level):
    answer = Measurement(rules.BROKER, measured if rule is rules.BROKER else 0.1)
    nodes = [NODE if rule is rules.BROKER else node_with(rule, measured)]
    cluster = BrokerFacts(answer, nodes, {"rabbitmq_version": "4.0.1"})
    (verdict,) = [one for one in cluster.verdicts() if one.rule is rule]
    assert verdict.level is level
    summary = overview.of_broker(cluster)
    assert (summary.worst.level, summary.others) == (level, [])
    statuses = {finding.name: finding.status for finding in findings.findings_of(cluster.verdicts())}
    assert statuses[rule.name] is findings.STATUSES[level]
    assert {status for name, status in statuses.items() if name != rule.name} == {findings.Status.OK}


@pytest.mark.parametrize(("rule", "measured", "level"), at_limits(rules.OF_DOCTOR))
def test_rules_of_doctor_alone_have_limits_too(rule, measured, level):
    details = dict.fromkeys(("way", "lease", "error", "folder", "where", "sender", "recipient", "addresses"), "x")
    assert rule.judge(measured, settings, **details).level is level


def broker_verdicts(client):
    """Return the verdicts of page, doctor and /readyz about the broker."""
    page = client.get("/admin/").context["overview"]["broker"].worst.level
    (finding,) = [one for one in doctor_broker.check_broker() if one.name == "broker"]
    return page, finding.status, client.get("/readyz").json()["broker"]


def test_page_doctor_and_readyz_agree_about_a_healthy_or_unavailable_broker(admin, guarded, settings):
    assert broker_verdicts(admin) == (Level.OK, findings.Status.OK, True)
    settings.RABBITMQ_MANAGEMENT_URL = "http://guest:guest@127.0.0.1:1"
    assert broker_verdicts(admin) == (Level.CRITICAL, findings.Status.PROBLEM, False)


@pytest.mark.slow
def test_page_doctor_and_readyz_agree_about_a_slow_broker(admin, guarded, settings, broker):
    with Proxy.before(broker.management_url) as proxy:
        proxy.delay(30)
        settings.RABBITMQ_MANAGEMENT_URL = proxy.url(broker.management_url)
        assert broker_verdicts(admin) == (Level.WARNING, findings.Status.WARNING, False)


@pytest.mark.django_db
def test_an_installation_without_a_pass_is_critical_everywhere(client):
    summary = overview.of_guardian(facts.measure_guardian(NOW))
    assert (summary.worst.level, summary.worst.sentence) == (
        Level.CRITICAL, "No pass has run yet, so no queue is guarded.",
    )  # fmt: skip
    assert {one.name: one.status for one in database._rows()}["passes"] is findings.Status.PROBLEM
    assert alert_fires("GuardianNoPass", scrape())


def test_limits_of_pass_rules_follow_the_poll_interval(settings):
    settings.GUARDIAN_POLL_SECONDS, settings.GUARDIAN_POLL_MAX_SECONDS = 20, 90
    assert [rules.PASS_AGE.limit(level, settings) for level in (Level.WARNING, Level.CRITICAL)] == [90, 120]
    in_outage = rules.PASS_AGE_IN_OUTAGE
    assert [in_outage.limit(level, settings) for level in (Level.WARNING, Level.CRITICAL)] == [270, 300]


def test_an_unknown_value_is_no_finding():
    verdict = rules.MEMORY.judge(None, settings)
    assert (verdict.level, verdict.is_wrong, verdict.next_step) == (Level.UNKNOWN, False, "")


# The table of rules


def test_each_rule_has_a_unique_name_and_a_cause_in_this_file():
    assert len({rule.name for rule in rules.RULES}) == len(rules.RULES)
    assert CAUSES.keys() == set(rules.OF_GUARDIAN)


@pytest.mark.parametrize("rule", rules.RULES, ids=lambda rule: rule.name)
def test_each_rule_has_a_next_step_and_an_existing_runbook(rule):
    assert rule.next_step.endswith(".")
    assert rule.warning is not None or rule.critical is not None
    headings = re.findall(r"^#+ +(.+?) *$", (ROOT / "docs/operators.md").read_text(), re.M)
    assert rule.runbook in {re.sub(r"[^\w\- ]", "", one.lower()).strip().replace(" ", "-") for one in headings}


@pytest.mark.parametrize("rule", [rule for rule in rules.RULES if rule.alert], ids=lambda rule: rule.name)
def test_an_alert_has_the_severity_and_runbook_of_its_rule(rule):
    alert = ALERTS[rule.alert]
    assert alert["labels"]["severity"] == ("ticket" if rule.critical is None else "page")
    assert alert["annotations"]["runbook"] == f"docs/operators.md#{rule.runbook}"


def test_each_alert_has_a_rule_or_is_listed_as_prometheus_alone():
    of_rules = {rule.alert for rule in rules.RULES if rule.alert}
    assert of_rules | PROMETHEUS_ALONE == ALERTS.keys()
    assert not of_rules & PROMETHEUS_ALONE


@pytest.mark.parametrize(
    ("title", "rule"), [("Since the last pass", rules.PASS_AGE), ("Oldest notification", rules.NOTIFICATIONS_WAIT)]
)
def test_the_dashboard_uses_the_limits_of_the_rules(title, rule):
    panels = json.loads((ROOT / "deploy/grafana/guardian.json").read_text())["panels"]
    (panel,) = [panel for panel in panels if panel["title"] == title]
    steps = {step["color"]: step["value"] for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"]}
    limits = (rule.limit(Level.WARNING, settings), rule.limit(Level.CRITICAL, settings))
    assert (steps["orange"], steps.get("red")) == limits
