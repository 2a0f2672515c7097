"""The front page of the admin: its verdicts, its figures, and their cost."""

import re
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from django.utils import timezone
from playwright.sync_api import Page, expect

from accounts.models import Owner, PulseUser
from agents.models import Sweep
from core.formatting import short_rate
from core.models import Removal
from notifications.models import Notification
from queues.guard.consumer_health import _as_stored
from queues.guard.facts import Facts as QueueFacts
from queues.guard.once import run_once
from queues.models import Pass, Queue, QueueSample, Watch
from queues.rules.thresholds import of_queue
from rabbit.entities import Node
from status import facts, overview, rules
from status.facts import BrokerFacts, GuardianFacts, Measurement, Outbox
from status.overview import of_broker, of_guardian
from status.verdicts import Level
from tests.queues.test_queue_list import make_queue
from tests.support.chromium import sign_in, violations
from tests.support.counting import counted_requests
from tests.support.toolbox import AWAY, wait_until

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
NODE = Node("rabbit@a", True, 100, 1000, False, 1000, 50, False, 10, 1000, 7200.0, ())


def minutes_ago(minutes: float, now: datetime = NOW) -> datetime:
    return now - timedelta(minutes=minutes)


# The broker's verdict


def cluster(*nodes):
    return BrokerFacts(Measurement(rules.BROKER, 0.1), nodes, {"rabbitmq_version": "3.10.8"})


def test_the_worst_problem_is_first_and_the_others_follow():
    worst, others = of_broker(cluster(NODE._replace(mem_used=900), NODE._replace(name="rabbit@b", running=False)))
    assert worst.sentence == "rabbit@b is not running."
    assert [other.sentence for other in others] == ["The memory of rabbit@a is at 90 % of its watermark."]


def test_an_alarm_missing_from_the_list_of_nodes_is_found():
    class WithoutAlarms:
        def nodes(self):
            return [NODE]

        def alarms(self):
            return ["disk on rabbit@a"]

    (node,) = facts.fetch_nodes(WithoutAlarms())
    assert (node.mem_alarm, node.disk_alarm) == (False, True)


def test_a_node_has_bars_with_text():
    shown = overview.show_node(NODE._replace(mem_used=850, mem_alarm=False))
    assert shown.memory == (85.0, "850 bytes of 1000 bytes", Level.WARNING)
    assert shown.disk == (5.0, "1000 bytes free, at least 50 bytes needed", Level.OK)
    assert (shown.files.words, shown.uptime, shown.state) == ("10 of 1,000", "2 hours", "running, no alarm")
    full = overview.show_node(NODE._replace(disk_alarm=True, disk_free=0, mem_alarm=True, mem_limit=0))
    assert (full.disk.full, full.disk.level, full.memory.full, full.memory.level) == (100, Level.CRITICAL) * 2


def test_a_stopped_node_has_no_bars():
    shown = overview.show_node(Node("rabbit@a", False, None, None, False, None, None, False))
    assert (shown.memory, shown.disk, shown.files, shown.uptime) == (None, None, None, "")
    assert (shown.state, shown.level) == ("not running", Level.CRITICAL)


# Guardian's verdict


def guardian(watch=None, last_pass=None, **more):
    """Return the facts of a healthy Guardian with these changes."""
    last = Pass(**{"at": NOW - timedelta(seconds=4), "queues": 12, "seconds": 0.25, **(last_pass or {})})
    stored = Watch(**{"consumers_counted_at": NOW, **(watch or {})})
    return GuardianFacts(NOW, stored, [last], **more)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"last_pass": {"errors": ["oh"]}}, "The last pass reported 1 error: oh"),
        ({"watch": {"consumers_counted_at": None}}, "Tasks other than passes have never run."),
        ({"outbox": Outbox(due=3, oldest=minutes_ago(16), last_error="refused")}, "Its last error: refused"),
    ],
)
def test_a_problem_of_guardian_is_shown_once_with_its_cause(changed, words):
    worst, others = of_guardian(guardian(**changed))
    assert (worst.level, others) == (Level.WARNING, [])
    assert words in worst.sentence


def test_a_brake_links_to_its_release_and_a_released_one_names_the_operator():
    brake = {"brake_since": minutes_ago(5), "blocked": 312}
    assert of_guardian(guardian(brake)).worst.rule.page == "operate_brake"
    names = [["/", str(number)] for number in range(312)]
    released = of_guardian(guardian({**brake, "released": names, "released_at": NOW, "released_by": "ops@example.org"}))
    assert released.others == []
    assert (released.worst.level, released.worst.rule.page) == (Level.WARNING, "")
    assert released.worst.sentence == "ops@example.org released the brake for 312 queues."


@pytest.mark.parametrize("known", ["outage_since", "brake_since", "refused_since", "unresponsive_since"])
def test_errors_explained_by_another_line_are_not_repeated(known):
    assert of_guardian(guardian({known: NOW}, {"errors": ["away"]})).others == []


def test_only_the_last_clean_up_of_each_kind_counts(transactional_db):
    Sweep.objects.create(kind="orphans", at=minutes_ago(9), found=90, brake_held=True)
    Sweep.objects.create(kind="orphans", at=minutes_ago(1))
    Sweep.objects.create(kind="stale", at=minutes_ago(20), found=80, brake_held=True)
    sweeps = facts.measure_guardian(NOW).sweeps
    worst, others = of_guardian(guardian(sweeps=sweeps))
    assert (worst.level, worst.rule.page, others) == (Level.WARNING, "operate_stale", [])
    assert "80 queues would be deleted at once" in worst.sentence


# The chart of passes


def drawn(*passes):
    rows = [(minutes_ago(minutes), seconds) for minutes, seconds in passes]
    return overview.chart_of_passes(rows, minutes_ago(60), NOW, timedelta(minutes=2))


def test_the_chart_shows_the_longest_pass_and_no_gap():
    passes = drawn(*((minutes, 3.5 if minutes == 30 else 0.5) for minutes in range(59, 0, -1)))
    assert (passes.number, passes.longest, list(passes.gaps)) == (59, 3.5, [])
    assert (passes.chart.lowest, passes.chart.highest) == (500, 3500)
    assert drawn() is None


def test_a_time_without_a_pass_is_a_gap_in_the_chart():
    passes = drawn((50, 0), (30, 60), (3, 0))
    gaps = [gap.words for gap in passes.gaps]
    assert gaps == ["from 11:10 for 20 minutes", "from 11:31 for 26 minutes", "from 11:57 for 3 minutes"]
    assert (passes.gaps[0].left, passes.gaps[0].width) == (pytest.approx(16.67), pytest.approx(33.33))
    assert drawn(*((minutes, 0) for minutes in range(50, 0, -5))).gaps_in_words == "10 times from 11:10 to 12:00"


# The figures


def test_the_front_page_shows_a_real_node_and_a_real_pass(guarded, amqp, management):
    Pass.objects.create(at=timezone.now() - timedelta(minutes=61), seconds=90)  # the chart shows the last hour
    amqp.queue("long", 6)
    amqp.queue("federation: builds -> downstream")
    run_once()
    Watch.objects.update(consumers_counted_at=timezone.now())
    wait_until(lambda: management.nodes()[0].mem_used)  # a node without statistics is asked for its alarms, too
    with counted_requests() as requests:
        found = SimpleNamespace(**overview.overview(timezone.now()))
    assert requests == ["GET /api/nodes", "GET /api/health/checks/alarms", "GET /api/overview"]
    assert found.broker.worst.sentence.startswith("The broker is healthy: 1 node runs RabbitMQ ")
    assert "it listed 2 queues " in found.guardian.worst.sentence
    (node,) = found.nodes
    assert node.state == "running, no alarm"
    assert "queue" in dict(found.totals)
    assert (found.counts.total, found.counts.attention, found.counts.warned) == (2, 1, 1)
    line = found.longest[0]
    assert (line.name, line.whose, line.figure) == ("long", "nobody", "6 messages")
    assert line.more == "60 % of its deletion limit 10"
    assert (found.unowned.number, found.unpatterned.number, found.misnamed.number) == (2, 1, 0)
    assert (found.passes.number, found.passes.longest) == (1, found.facts.passes[0].seconds)
    assert found.passes.gaps == []


def test_the_fastest_growing_queues_are_first_with_the_rate_of_a_warning(guarded, management, broker):
    now = timezone.now()
    pulse_user = PulseUser.objects.create(username="alice", ready=True, max_length=1_000)
    lengths = {"slow": (10, 20), "fast": (0, 600), "shrinks": (50, 5), "stands": (7, 7), "over": (100, 2_000)}
    for name, (first, last) in lengths.items():
        queue = make_queue(name, pulse_user=pulse_user, ready=last)
        for minutes, length in ((3, 10_000), (1.5, first), (0.5, 3)):  # samples older than two minutes do not count
            QueueSample.objects.create(queue=queue, at=minutes_ago(minutes, now), length=length)
    made = {queue.name: queue for queue in Queue.objects.all()}
    gathered = QueueFacts.gather(management, broker.amqp_url, [_as_stored(queue) for queue in made.values()], now)
    found = overview.overview(now)["growing"]
    assert [line.name for line in found] == ["over", "fast", "slow"]
    for line in found:
        recipients = gathered.of(_as_stored(made[line.name]), of_queue(made[line.name]))
        assert line.figure == short_rate(recipients["per_second"])
    assert [line.more.partition(", ")[2] for line in found] == [
        "over its deletion limit", "at its deletion limit in 60 seconds", "at its deletion limit in 2 hours",
    ]  # fmt: skip
    assert found[0].full == 100
    assert found[1].full == pytest.approx(600 / 1_900 * 100, abs=0.1)


def test_an_unbounded_queue_has_no_percentage(guarded):
    make_queue("free", ready=9, unbounded=True)
    assert overview.overview(timezone.now())["longest"][0].more == "never deleted for its length"


def test_the_outbox_counts_deferred_and_given_up_notifications_apart(transactional_db):
    now = timezone.now()

    def message(**fields):
        given = {"kind": "warning", "about": "x", "recipient": "a", "facts": {}, "created": now, "due_at": now}
        Notification.objects.create(**{**given, **fields})

    message(created=minutes_ago(2, now), last_error="refused")
    message(created=minutes_ago(90, now), deferred_until=now + timedelta(hours=1))
    message(created=minutes_ago(90, now), deferred_until=minutes_ago(1, now))
    message(state="sending")
    message(state="sent", deferred_until=now + timedelta(hours=1))
    message(state="failed", attempts=100)
    message(state="failed", attempts=0)
    message(state="failed", attempts=100, due_at=now - timedelta(days=3))
    assert facts.measure_guardian(now).outbox == Outbox(
        due=3, sending=1, sent=1, failed=3, deferred=1, given_up=1, oldest=minutes_ago(2, now), last_error="refused"
    )


# The page


@pytest.fixture
def visit(client, operator):
    client.force_login(operator)
    return lambda **headers: client.get("/admin/", headers=headers)


def test_the_page_links_to_queues_and_filtered_lists(visit, guarded):
    queue = make_queue('queue/a/<script>alert("1")</script>\u202e\n', ready=3)
    at = timezone.now()
    Notification.objects.create(kind="warning", recipient="a", facts={}, state="failed", created=at, due_at=at)
    page = visit()
    assert page.status_code == 200
    assert f'href="/queues/{queue.uuid}/"' in page.text
    assert "<script>alert" not in page.text
    assert "\u202e" not in page.text
    assert 'href="/admin/notifications/notification/?state__exact=failed"' in page.text
    assert 'href="/admin/accounts/owner/"' in page.text
    assert "No pass has run yet, so no queue is guarded." in page.text


def test_queues_with_stalled_consumers_are_listed_with_owner_and_duration(visit, guarded, settings):
    now = timezone.now()
    pulse_user = PulseUser.objects.create(username="alice", ready=True)
    for name, minutes, more in (
        ("later", 7, {}), ("builds", 12, {"pulse_user": pulse_user, "ready": 3}), ("deserted", 9, {"consumers": 0}),
    ):  # fmt: skip
        since = minutes_ago(minutes, now)
        make_queue(name, **{"consumers": 1, "stalled_since": since, "stalled_notified_at": since, **more})
    make_queue("unnoticed", consumers=1, stalled_since=minutes_ago(6, now), diagnosis="stalled")
    no_notification = "Owners get no notification of stalled consumers"
    assert no_notification in visit().text
    settings.GUARDIAN_STALLED_MINUTES = 5
    stalled = overview.overview(now)["stalled"]
    assert [(line.name, line.figure.partition(",")[0]) for line in stalled.shown] == [
        ("builds", "owner alice"), ("later", "owner nobody"), ("unnoticed", "owner nobody"),
    ]  # fmt: skip
    assert (stalled.number, stalled.more) == (3, 0)
    text = visit().text
    assert "Stalled consumers: 3</h3>" in text
    assert no_notification not in text
    assert "owner alice, 3 messages, nothing acknowledged for 12 minutes</td>" in text


def test_the_linked_lists_exist(visit, client, guarded):
    for number in range(overview.NAMES_SHOWN + 1):
        make_queue(f"nobody's {number}")
    Removal.objects.create(kind="queue", vhost="a", name="b")
    links = set(re.findall(r'href="(/(?:admin/queues|queues)/[^"]+)"', visit().text))
    assert (
        "/admin/queues/queue/?pulse_user__isnull=True&amp;owner__isnull=True&amp;state__in=ok,warned,deleting" in links
    )
    assert {link: client.get(link.replace("&amp;", "&")).status_code for link in links} == dict.fromkeys(links, 200)


def test_a_refresh_returns_only_the_figures(visit, guarded):
    part = visit(**{"HX-Request": "true"}).text
    assert "The broker is healthy" in part
    assert "<html" not in part
    assert "/admin/accounts/owner/" not in part


@pytest.mark.parametrize("email", [None, "alice@example.org"])
def test_a_refresh_by_a_non_operator_reloads_the_page(client, transactional_db, email):
    if email:
        client.force_login(Owner.objects.create_user(email, vouched=True))
    answer = client.get("/admin/", headers={"HX-Request": "true"})
    assert answer["HX-Refresh"] == "true"
    assert answer.content == b""


def test_the_front_page_is_accessible_and_refreshes_itself(page: Page, guarded, amqp, operator, settings):
    settings.GUARDIAN_POLL_SECONDS = 60
    amqp.queue("celery", 6)
    run_once()
    Watch.objects.update(consumers_counted_at=timezone.now())
    sign_in(page, operator)
    addresses = ["/admin/", *(f"/admin/operate/{action}/" for action in ("pass", "brake", "orphans", "stale"))]
    assert [found for address in addresses for found in violations(page, address)] == []
    page.clock.install()
    page.goto("/admin/")
    expect(page.get_by_role("region", name="Guardian")).to_contain_text("Guardian is healthy")
    Watch.objects.update(brake_since=timezone.now(), blocked=90)
    page.clock.fast_forward("00:10")
    expect(page.get_by_role("region", name="Guardian")).to_contain_text("The deletion of 90 queues has been blocked")
    settings.RABBITMQ_MANAGEMENT_URL = AWAY
    assert list(violations(page, "/admin/")) == []
    expect(page.get_by_role("region", name="The broker Critical")).to_contain_text("The broker can't be queried")
