from datetime import datetime, time, timedelta
from urllib.parse import quote

import pytest
from django.utils import timezone

from accounts.models import Owner
from notifications import preferences
from notifications.models import Channel
from queues.actions import single
from queues.api.archives import StartRestoreSerializer, TargetSerializer
from queues.api.moves import GroupKeySerializer, MoveTargetSerializer
from queues.api.watches import StartWatchSerializer
from queues.models import Queue, QueueSample, Watch
from queues.rules.listing import ArchiveFilter, QueueFilter
from tests.support.api import Program
from tests.support.toolbox import call_before, stored_queue, wait_until

FIELDS = {
    "uuid", "url", "vhost", "name", "type", "durable", "pulse_user", "owners", "state", "severity", "blocked",
    "length", "ready", "unacknowledged", "consumers", "bytes", "warn_length", "max_length", "unbounded", "registered",
    "limits_until", "diagnosis", "muted_until", "acknowledged_at", "acknowledged_by", "first_seen", "last_seen",
}  # fmt: skip


def row(name, pulse_user=None, vhost="/", **facts):
    """Store a queue as a pass does."""
    return stored_queue(name, vhost=vhost, pulse_user=pulse_user, **{"ready": 1, "unacknowledged": 0, **facts})


def test_a_queue_is_shown_with_all_its_fields(alice, pulse_user, settings):
    pulse_user.warn_length = 5
    pulse_user.save()
    queue = row("queue/alice/q", pulse_user, ready=3, unacknowledged=4, consumers=2, max_length=50, state="warned")
    program = Program(alice)
    data = program.get(f"queues/{queue.uuid}/").json()
    assert set(data) == FIELDS
    assert data["uuid"] == queue.uuid.hex
    assert data["url"] == f"{settings.GUARDIAN_BASE_URL}/api/queues/{queue.uuid.hex}/"
    assert (data["length"], data["consumers"], data["owners"]) == (7, 2, ["alice@example.org"])
    assert (data["warn_length"], data["max_length"], data["pulse_user"]) == (5, 50, "alice")
    assert (data["state"], data["severity"]) == ("warned", "warning")
    assert program.client.get(data["url"].removeprefix(settings.GUARDIAN_BASE_URL)).json() == data
    assert program.get("queues/").json() == [data]
    for spelling in (queue.uuid.hex, str(queue.uuid).upper()):
        assert program.get(f"queues/{spelling}/").json() == data


def test_a_queue_is_diagnosed_from_what_is_stored(alice, pulse_user):
    now = timezone.now()
    since = now - timedelta(minutes=5)
    Watch.objects.create(consumers_counted_at=now)
    queue = row("queue/alice/q", pulse_user, consumers=0, unattended_since=since)
    found = Program(alice).get(f"queues/{queue.uuid}/").json()["diagnosis"]
    assert set(found) == {"code", "text", "since"}
    assert (found["code"], found["text"][:43]) == ("no_consumer", "It has had no consumer for 5 minutes. Guard")
    assert datetime.fromisoformat(found["since"]) == since
    Queue.objects.update(state="gone")
    assert Program(alice).get(f"queues/{queue.uuid}/").json()["diagnosis"] is None


def test_a_registered_queue_belongs_to_the_agents_owner(alice, bob, operator):
    queue = row("consumer_1", vhost=alice.uuid.hex, owner=alice, registered=True)
    data = Program(alice).get(f"queues/{queue.uuid}/").json()
    assert (data["owners"], data["pulse_user"], data["registered"]) == (["alice@example.org"], None, True)
    assert Program(alice).get("queues/").json() == Program(operator).get("queues/").json() == [data]
    assert Program(bob).get("queues/").json() == []
    for answer in (Program(alice).delete(f"queues/{queue.uuid}/"), Program(alice).post(f"queues/{queue.uuid}/purge/")):
        assert answer.status_code == 403
        assert "An agent registered this queue" in answer.json()["detail"]


def test_last_seen_of_a_present_queue_is_the_time_of_the_last_list(alice, pulse_user):
    listed_at = timezone.now()
    Watch.objects.update_or_create(id=1, defaults={"listed_at": listed_at})
    old = listed_at - timedelta(hours=1)
    for name, facts, expected in [
        ("there", {}, listed_at),
        ("missed", {"misses": 1}, old),
        ("gone", {"state": "gone"}, old),
        ("written later", {"last_seen": listed_at + timedelta(seconds=1)}, listed_at + timedelta(seconds=1)),
    ]:
        queue = row(f"queue/alice/{name}", pulse_user, **{"last_seen": old, **facts})
        data = Program(alice).get(f"queues/{queue.uuid}/").json()["last_seen"]
        assert timezone.datetime.fromisoformat(data) == expected, name


def test_queues_are_filtered_and_ordered(operator, pulse_user):
    row("queue/alice/short", pulse_user, ready=2)
    row("queue/alice/long", pulse_user, ready=900, state="warned")
    row("elsewhere/other", vhost="elsewhere")
    for query, names in (
        ({}, ["queue/alice/long", "queue/alice/short", "elsewhere/other"]),
        ({"pulse_user": "alice", "ordering": "length"}, ["queue/alice/short", "queue/alice/long"]),
    ):
        answer = Program(operator).get("queues/", **query)
        assert ([data["name"] for data in answer.json()], answer["X-Result-Count"]) == (names, str(len(names)))


@pytest.fixture
def real(guarded, amqp, pulse_user, vhost):
    """Return a queue on the broker with three messages."""
    amqp.queue("queue/alice/<b>%2F é", 3)
    return row("queue/alice/<b>%2F é", pulse_user, vhost=vhost, ready=3)


def test_a_queue_is_inspected_purged_and_deleted(alice, real, amqp, management, vhost):
    management.declare_exchange(vhost, "exchange/alice/x")
    management.bind_queue(vhost, "exchange/alice/x", real.name, "build.#")
    program = Program(alice)
    live = program.get(f"queues/{real.uuid}/live/").json()
    assert (live["ready"], live["consumers"]) == (3, 0)
    bindings = program.get(f"queues/{real.uuid}/bindings/")
    assert bindings["X-Result-Count"] == "1"
    assert bindings.json() == [
        {"source": "exchange/alice/x", "destination": real.name, "destination_type": "queue",
         "routing_key": "build.#", "arguments": {}}
    ]  # fmt: skip
    assert live["upstream"] == []
    assert program.post(f"queues/{real.uuid}/purge/").status_code == 204
    assert amqp.ready(real.name) == 0
    assert program.delete(f"queues/{real.uuid}/").status_code == 204
    assert real.name not in [row["name"] for row in management.list_queues(vhost, {"disable_stats": "true"})]
    assert program.get(f"queues/{real.uuid}/").json()["state"] == "gone"
    events = program.get(f"queues/{real.uuid}/events/").json()
    assert [(event["kind"], event["by"]) for event in events if event["kind"] in ("removed", "purged")] == [
        ("removed", "alice@example.org"), ("purged", "alice@example.org"),
    ]  # fmt: skip


@pytest.mark.parametrize(("method", "path"), [("DELETE", ""), ("POST", "purge/")])
def test_deleting_or_purging_a_vanished_queue_answers_404(alice, real, management, vhost, method, path):
    management.delete_queue(vhost, real.name)
    answer = Program(alice).send(method, f"queues/{real.uuid}/{path}")
    assert (answer.status_code, answer["Content-Type"]) == (404, "application/problem+json")


@pytest.mark.parametrize(
    ("body", "status", "limits"),
    [
        ({"unbounded": True, "warn_length": 1, "max_length": 2}, 200, (True, 1, 2)),
        ({"warn_length": 3, "max_length": 2}, 400, (False, None, None)),
        ({"max_length": 10**30}, 400, (False, None, None)),
    ],
)
def test_operators_set_limits_of_a_queue(operator, pulse_user, body, status, limits):
    queue = row("queue/alice/q", pulse_user)
    assert Program(operator).patch(f"queues/{queue.uuid}/", body).status_code == status
    queue.refresh_from_db()
    assert (queue.unbounded, queue.warn_length, queue.max_length) == limits


def test_samples_cover_the_time_span_and_the_one_before_it(alice, pulse_user):
    queue = row("queue/alice/q", pulse_user)
    now = timezone.now()
    for minutes in (1, 30, 90, 60 * 30, 60 * 24 * 8):
        QueueSample.objects.create(queue=queue, at=now - timedelta(minutes=minutes), length=minutes)
    program = Program(alice)
    where = f"queues/{queue.uuid}/samples/"

    def lengths(**query):
        return [sample["length"] for sample in program.get(where, **query).json()]

    assert lengths() == lengths(span="hour") == [90, 30, 1]
    assert lengths(span="day") == [1800, 90, 30, 1]
    assert lengths(span="week") == [11_520, 1800, 90, 30, 1]
    assert lengths(since=(now - timedelta(minutes=2)).isoformat()) == [30, 1]
    assert lengths(since="2000-01-01") == lengths(since="2000-01-01T00:00:00Z") == lengths(span="week")


def test_rates_are_of_the_chosen_span(guarded, alice, pulse_user, amqp, vhost, management):
    queue = row("queue/alice/q", pulse_user, vhost=vhost)
    amqp.queue(queue.name, 1)
    wait_until(lambda: management.queue_rates(vhost, queue.name, 3600, 600))
    answer = Program(alice).get(f"queues/{queue.uuid}/rates/", span="8-hours").json()
    assert (answer["step"], len(answer["samples"]), answer["why_none"]) == (600, 6, "")
    assert set(answer["samples"][0]) == {"at", "published", "acknowledged", "redelivered"}
    assert Program(alice).get(f"queues/{queue.uuid}/rates/", span="week").status_code == 400


def test_at_most_5000_samples_are_returned(alice, pulse_user):
    queue = row("queue/alice/q", pulse_user)
    now = timezone.now()
    QueueSample.objects.bulk_create(
        QueueSample(queue=queue, at=now - timedelta(seconds=second), length=second) for second in range(5200)
    )
    samples = Program(alice).get(f"queues/{queue.uuid}/samples/", span="week").json()
    assert (len(samples), samples[0]["length"], samples[-1]["length"]) == (5000, 4999, 0)


def test_events_have_pages_with_the_newest_first(alice, pulse_user, operator):
    queue = row("queue/alice/q", pulse_user)
    now = timezone.now()
    for number in range(30):
        queue.new_event("warned", operator, now + timedelta(seconds=number), length=number).save()
    answer = Program(alice).get(f"queues/{queue.uuid}/events/")
    assert answer["X-Result-Count"] == "30"
    assert [event["details"]["length"] for event in answer.json()] == list(range(29, 19, -1))
    assert answer.json()[0]["by"] == "ops@example.org"


def test_exchanges_with_any_name_are_listed_and_deleted(alice, pulse_user, guarded, management, vhost, settings):
    strange = ["x", "a'\"b", "100%2F", "", "..", "é \u202e/", "a&name=b+c"]
    names = [f"exchange/alice/{name}" for name in strange]
    for name in names:
        management.declare_exchange(vhost, name)
    management.declare_exchange(vhost, "exchange/alicia/x")
    management.declare_queue(vhost, "q")
    management.bind_queue(vhost, "exchange/alice/x", "q", "a.*")
    program = Program(alice)
    listed = program.get("exchanges/", page_size=50)
    assert sorted(data["name"] for data in listed.json()) == sorted(names)
    assert listed["X-Result-Count"] == str(len(names))
    [data] = program.get("exchanges/", name="exchange/alice/x").json()
    assert (data["pulse_user"], data["bindings"][0]["destination"]) == ("alice", "q")
    for data in listed.json():
        path = data["url"].removeprefix(f"{settings.GUARDIAN_BASE_URL}/api/")
        assert program.delete(path).status_code == 204, data["name"]
        assert program.delete(path).status_code == 404
    assert program.delete(f"exchanges/?name={quote('exchange/alicia/x', safe='')}").status_code == 404
    assert program.get("exchanges/").json() == []
    left = [exchange.name for exchange in management.exchanges(vhost)]
    assert "exchange/alicia/x" in left


@pytest.mark.parametrize("query", ["", "?name=", "?nam=exchange/alice/x"])
def test_deleting_an_exchange_needs_its_name(alice, pulse_user, query):
    answer = Program(alice).delete(f"exchanges/{query}")
    assert (answer.status_code, list(answer.json())) == (400, ["name"])


def test_a_channels_url_is_not_shown(alice, bob, caplog):
    program = Program(alice)
    created = program.post("channels/", {"name": "chat", "url": "https://1.1.1.1/hooks/secret-word"})
    assert created.status_code == 201, created.text
    data = created.json()
    assert len(data.pop("secret")) == 64
    assert set(data) == {"uuid", "name", "service", "created", "last_sent_at", "last_error"}
    assert program.get(f"channels/{data['uuid']}/").json() == data
    assert program.get("channels/").json() == [data]
    twice = program.post("channels/", {"name": "chat", "url": "https://1.1.1.1/hooks/secret-word"})
    assert (twice.status_code, list(twice.json())) == (400, ["name"])
    for answer in (created, twice, program.get("channels/")):
        assert "secret-word" not in answer.text + caplog.text
    assert Program(bob).get("channels/").json() == []
    assert program.delete(f"channels/{data['uuid']}/").status_code == 204
    assert not Channel.objects.exists()


def test_settings_are_shown_and_changed(alice):
    program = Program(alice)
    assert program.get("settings/").json() == {
        "quiet_from": None, "quiet_until": None, "time_zone": "UTC", "weekly_summary": True,
    }  # fmt: skip
    changed = program.patch("settings/", {"quiet_from": "22:00", "quiet_until": "06:30", "time_zone": "Europe/Berlin"})
    expected = {"quiet_from": "22:00", "quiet_until": "06:30", "time_zone": "Europe/Berlin", "weekly_summary": True}
    assert (changed.status_code, changed.json()) == (200, expected)
    off = program.patch("settings/", {"weekly_summary": False, "quiet_from": None, "quiet_until": None})
    assert off.json() == {**expected, "quiet_from": None, "quiet_until": None, "weekly_summary": False}
    assert program.get("settings/").json() == off.json()


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"quiet_from": "22:00"}, "quiet_until"),
        ({"time_zone": "Mars/Olympus", "weekly_summary": False}, "time_zone"),
        ({"weekly_summary": None}, "weekly_summary"),
        *(
            ({"quiet_from": time_of_day, "quiet_until": "07:00"}, "quiet_from")
            for time_of_day in ("22:00:30", "22:00:00.000001", "22:00Z", "22:00+05:00", "24:00", "22", "")
        ),
    ],
)
def test_invalid_settings_are_refused_on_their_field(alice, body, field):
    answer = Program(alice).patch("settings/", body)
    assert (answer.status_code, list(answer.json())) == (400, [field])
    alice.refresh_from_db()
    assert (alice.quiet_from, alice.time_zone, alice.weekly_summary) == (None, "UTC", True)


def test_concurrent_changes_of_limits_are_both_kept(operator, pulse_user, monkeypatch):
    queue = row("queue/alice/q", pulse_user, warn_length=100, max_length=1000)
    call_before(monkeypatch, single, "set_limits", lambda: Queue.objects.update(warn_length=200))
    data = Program(operator).patch(f"queues/{queue.uuid}/", {"max_length": 5000}).json()
    queue.refresh_from_db()
    assert (queue.warn_length, queue.max_length) == (data["warn_length"], data["max_length"]) == (200, 5000)


def test_concurrent_changes_of_settings_are_both_kept(alice, monkeypatch):
    call_before(monkeypatch, preferences, "set_quiet_hours", lambda: Owner.objects.update(time_zone="Europe/Berlin"))
    data = Program(alice).patch("settings/", {"quiet_from": "22:00", "quiet_until": "07:00"}).json()
    alice.refresh_from_db()
    assert (alice.time_zone, data["time_zone"], data["quiet_from"]) == ("Europe/Berlin", "Europe/Berlin", "22:00")
    assert alice.quiet_from == time(22)


def test_bindings_of_a_gone_queue_answer_404(alice, pulse_user, guarded):
    queue = row("queue/alice/gone", pulse_user, vhost=guarded, state="gone")
    answer = Program(alice).get(f"queues/{queue.uuid}/bindings/")
    assert (answer.status_code, answer["Content-Type"]) == (404, "application/problem+json")
    Queue.objects.update(state="ok")  # as before the next pass
    assert Program(alice).get(f"queues/{queue.uuid}/bindings/").status_code == 503


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        (TargetSerializer().fields, "queue exchange"),
        (MoveTargetSerializer().fields, "queue exchange routing_key"),
        (GroupKeySerializer().fields, "queue exchange routing_key"),
        (StartRestoreSerializer().fields, "queue"),
        (StartWatchSerializer().fields, "exchange routing_key"),
        (QueueFilter().form.fields, "vhost"),
        (ArchiveFilter().form.fields, "queue vhost"),
    ],
)
def test_names_on_the_broker_keep_their_spaces(fields, names):
    for name in names.split():
        field = fields[name]
        check = field.run_validation if hasattr(field, "run_validation") else field.clean
        assert check(" a ") == " a "
