"""The operators' actions on the front page of the admin."""

import re
from datetime import timedelta
from uuid import uuid4

import pytest
from django.utils import timezone

from accounts import audit
from accounts.models import AuditEntry, AuthToken, Owner
from agents.models import Sweep
from core.leases import lease
from queues.guard import deleter
from queues.guard.once import run_once
from queues.models import Pass, Queue, QueueEvent, QueueSample, Watch
from queues.rules.brake import released_queues
from status import blocked_queues, trail, views
from status.views import NAMES_SHOWN, names
from tests.support.agents import lose_registrations
from tests.support.archives import store_archive
from tests.support.toolbox import AWAY, brake_counts, queue_names, stored_queue

PASS, BRAKE, ORPHANS, STALE = (f"/admin/operate/{action}/" for action in ("pass", "brake", "orphans", "stale"))


def words(page):
    text = page.text.partition("<main")[2]
    return " ".join(re.sub(r"<[^>]*>", " ", text).replace("&#x27;", "'").split())


def key(page):
    return re.search(r'name="shown" value="([^"]+)"', page.text)[1]


def confirm(admin, address, **more):
    return admin.post(address, {"shown": key(admin.get(address)), **more}, follow=True)


def audited_actions():
    return [(entry.actor_email, entry.event) for entry in AuditEntry.objects.order_by("id") if entry.event != "created"]


# A pass


def test_an_operator_runs_a_pass_by_post_and_sees_its_result(admin, guarded, amqp):
    amqp.queue("long", 6)
    assert admin.get(PASS).status_code == 200
    assert Pass.objects.count() == 0
    page = admin.post(PASS)
    assert page.status_code == 200
    assert "OK The pass is done." in words(page)
    assert "1 queue in " in words(page)
    assert "1 over their warning threshold, 0 back to normal" in words(page)
    assert Queue.objects.get().state == "warned"
    assert audited_actions() == [("ops@example.org", "requested a pass")]


def test_a_pass_during_another_pass_is_409(admin, guarded):
    with lease("pass"):
        page = admin.post(PASS)
    assert page.status_code == 409
    assert "Another pass is running, so this one did nothing." in words(page)
    assert Pass.objects.count() == 0


# The brake


@pytest.fixture
def braked_queues(guarded, amqp, settings):
    settings.GUARDIAN_DELETE_BRAKE = 2
    for number in range(3):
        amqp.queue(f"long-{number}", 11)
    run_once()
    assert brake_counts() == (3, 0)


def everything(page):
    """Return the fields that release all queues that the page shows."""
    return {"shown": key(page), "all": "on", "typed": re.search('id="name">([^<]+)<', page.text)[1]}


def release(admin, address=BRAKE, *numbers):
    """Open the brake's page, select these rows or all, and confirm that they are released."""
    page = admin.get(address)
    if numbers:
        page = admin.post(BRAKE, {"shown": key(page), "queue": [str(number) for number in numbers]})
        assert f"This deletes {len(numbers)} queue" in words(page)
    return admin.post(BRAKE, everything(page), follow=True)


def test_an_operator_releases_all_queues_and_the_next_pass_deletes_them(admin, braked_queues, guarded, management):
    page = admin.get(BRAKE)
    assert all(f"long-{number} in {guarded}" in words(page) for number in range(3))
    assert len(management.list_queues(guarded, {"columns": "name"})) == 3
    page = release(admin)
    assert "You released 3 queues. The next pass within ten minutes deletes those that are still too long." in words(
        page
    )
    assert "ops@example.org released 3 of them." in words(page)
    assert "ops@example.org released the brake for 3 queues." in words(admin.get("/admin/"))
    assert "3 to be deleted now" in words(admin.post(PASS))
    assert deleter.run().deleted == 3
    assert management.list_queues(guarded, {"columns": "name"}) == []
    assert audited_actions() == [("ops@example.org", "released the brake"), ("ops@example.org", "requested a pass")]


def test_an_operator_releases_selected_queues(admin, braked_queues, guarded, management):
    page = release(admin, f"{BRAKE}?order=-queue", 0, 2)  # long-2 and long-0
    assert "You released 2 queues." in words(page)
    assert "Delete this queue" in words(page)
    assert "The deletion of 1 queue has been blocked" in words(admin.get("/admin/"))
    assert "2 to be deleted now" in words(admin.post(PASS))
    assert deleter.run().deleted == 2
    assert queue_names(management, guarded) == {"long-1"}


def test_an_operator_keeps_a_blocked_queue(admin, braked_queues, guarded, management):
    queue = Queue.objects.get(name="long-1")
    Queue.objects.filter(pk=queue.pk).update(warn_length=10**6)  # more than a deletion limit that was lowered since
    assert "too many at once just now" in words(admin.get(BRAKE))
    page = admin.post(BRAKE, {"keep": queue.uuid.hex}, follow=True)
    assert f"You keep long-1 in {guarded}. It is unbounded now" in words(page)
    assert queue.name not in words(admin.get(BRAKE))
    assert "You released 2 queues." in words(release(admin))
    admin.post(PASS)
    assert deleter.run().deleted == 2
    assert queue_names(management, guarded) == {"long-1"}
    for unknown in ("x", str(uuid4())):
        assert admin.post(BRAKE, {"keep": unknown}).status_code == 400


def test_a_release_without_a_selected_queue_is_400_and_an_expired_one_409(admin, braked_queues, monkeypatch):
    page = admin.post(BRAKE, {"shown": key(admin.get(BRAKE))})
    assert (page.status_code, "You selected no queue, so nothing was done." in words(page)) == (400, True)
    assert admin.post(BRAKE, {"shown": key(page), "queue": ["3", "-1", "x", "\u00b2"]}).status_code == 400
    monkeypatch.setattr(views, "PREVIEW_SECONDS", 0)
    assert release(admin).status_code == 409
    assert brake_counts() == (3, 0)


def test_the_brakes_page_lists_figures_and_totals(admin, guarded, pulse_user, amqp, settings):
    settings.GUARDIAN_DELETE_BRAKE = 0
    amqp.queue("queue/alice/builds", 12)
    amqp.queue("queue/alice/more", 11)
    run_once()
    Queue.objects.filter(name="queue/alice/more").update(consumers=2)
    page = words(admin.get(BRAKE))
    growth = "(unknown|steady)"  # the passes are half a second apart or less
    assert re.search(f"queue/alice/builds in {guarded} alice 12 10 {growth} unknown too many at once", page)
    assert re.search(f"2 queues in all 23 {growth} 2 ", page)


def test_a_total_of_unknown_figures_is_unknown(admin):
    stored_queue("queue/alice/builds", ready=12, unacknowledged=0, consumers=None, block_reason="brake")
    uncounted = stored_queue("queue/alice/more", consumers=None, block_reason="brake")
    QueueSample.objects.create(queue=uncounted, at=timezone.now() - timedelta(minutes=1), length=5)
    assert "2 queues in all 12 unknown unknown" in words(admin.get(BRAKE))


@pytest.mark.parametrize(
    ("order", "names"),
    [
        ("", ["bob", "anna", "carl"]),
        ("?order=length", ["carl", "anna", "bob"]),
        ("?order=queue", ["anna", "bob", "carl"]),
        ("?order=-queue", ["carl", "bob", "anna"]),
        ("?order=consumers", ["anna", "carl", "bob"]),
        ("?order=password", ["bob", "anna", "carl"]),
    ],
)
def test_an_operator_sorts_the_brakes_page(admin, guarded, order, names):
    for name, length, consumers in (("anna", 20, 1), ("bob", 30, None), ("carl", 10, 2)):
        stored_queue(name, ready=length, unacknowledged=0, consumers=consumers, block_reason="brake")
    page = admin.get(f"{BRAKE}{order}")
    assert re.findall(r'class="cut" title="(\w+)"', page.text) == names


def test_a_long_list_of_blocked_queues_has_pages_and_is_released_as_a_whole(admin, guarded, monkeypatch):
    monkeypatch.setattr(blocked_queues, "ROWS", 2)
    for number in range(5):
        stored_queue(f"long-{number}", ready=20, unacknowledged=0, block_reason="brake")
    page = admin.get(f"{BRAKE}?order=queue&page=2")
    assert "3 to 4 of 5; page 2 of 3" in words(page)
    assert "Delete all 5 queues" in words(page)
    release(admin, f"{BRAKE}?order=queue&page=2", 2)
    assert released_queues(Watch.objects.get(), timezone.now()) == {("/", "long-2")}
    assert "You released 4 queues." in words(release(admin))


def test_only_the_queues_that_were_shown_are_released(admin, braked_queues, guarded, amqp, management):
    shown = everything(admin.get(BRAKE))
    for number in range(2):
        amqp.take(f"long-{number}", 11)
    for number in range(3):
        amqp.queue(f"precious-{number}", 11)
    run_once()
    page = admin.post(BRAKE, shown, follow=True)
    assert "You released 1 queue." in words(page)
    assert "The deletion of 2 queues is not blocked any more." in words(page)
    page = admin.post(PASS)
    assert "The deletion of some queues is blocked until you decide." in words(page)
    deleter.run()
    left = queue_names(management, guarded)
    assert left == {"long-0", "long-1", "precious-0", "precious-1", "precious-2"}


def test_a_confirmation_works_once_and_for_its_operator_only(admin, braked_queues):
    shown = everything(admin.get(BRAKE))
    admin.logout()
    admin.force_login(Owner.objects.create_superuser("others@example.org"))
    page = admin.post(BRAKE, shown)
    assert (page.status_code, "so nothing was done. This is a new preview." in words(page)) == (409, True)
    assert brake_counts() == (3, 0)
    shown = everything(page)
    assert admin.post(BRAKE, {**shown, "typed": "4 queues"}).status_code == 400
    shown = everything(admin.get(BRAKE))
    assert admin.post(BRAKE, shown).status_code == 302
    assert brake_counts() == (3, 3)
    assert admin.post(BRAKE, shown).status_code == 409


@pytest.mark.parametrize("address", [BRAKE, ORPHANS, STALE])
@pytest.mark.parametrize("shown", ["", "3", "x", "1" * 5000, "0" * 32])
def test_an_unknown_confirmation_is_409(admin, braked_queues, address, shown):
    page = admin.post(address, {"shown": shown, "force": "on"})
    assert (page.status_code, "The preview has expired" in words(page)) == (409, True)
    assert (brake_counts(), Sweep.objects.count()) == ((3, 0), 0)


# Clean-ups


def test_an_operator_previews_and_confirms_a_sweep(admin, agent, reader):
    agent.orphan("subscription_<b>odd\u202e")
    agent.orphan("subscription_in_use")
    reader("subscription_in_use")
    page = admin.get(ORPHANS)
    assert "Delete 1 of 5 queues, with all messages, and keep 1 that have consumers" in words(page)
    assert "subscription_&lt;b&gt;odd\\u202e" in page.text
    assert 'name="force"' not in page.text
    assert "subscription_in_use" in agent.names
    assert Sweep.objects.count() == 0
    page = admin.post(ORPHANS, {"shown": key(page)})
    assert "OK It is done. 1 queue deleted of 5 1 kept" in words(page)
    assert "Kept, because they have consumers subscription_in_use" in words(page)
    assert agent.names == {*agent.registered, "subscription_in_use"}
    assert audited_actions()[-1] == ("ops@example.org", "requested a sweep of orphans")


def test_an_orphan_newer_than_the_preview_is_not_deleted_even_by_force(admin, agent, management):
    for name in ("subscription_shown", "subscription_removed"):
        agent.orphan(name)
    shown = key(admin.get(ORPHANS))
    management.delete_queue(agent.vhost, "subscription_removed")
    agent.orphan("subscription_another")
    page = admin.post(ORPHANS, {"shown": shown, "force": "on"})
    assert "It is done. What the preview did not show was kept. Refresh to see it." in words(page)
    assert "Kept, because they were not in the preview subscription_another" in words(page)
    assert agent.names == {*agent.registered, "subscription_another"}
    confirm(admin, ORPHANS)
    assert agent.names == agent.registered


def test_an_operator_overrides_the_brake_of_a_sweep(admin, agent, reader, settings):
    settings.GUARDIAN_DELETE_BRAKE = 2
    names_lost = lose_registrations(agent, 3)
    reader(sorted(names_lost)[0])
    page = admin.get(ORPHANS)
    assert "The brake would block this. the brake blocks the deletion of 3 of 6 queues; at most 2 are allowed" in words(
        page
    )
    assert "delete all 3 queues, even those that have consumers (1 now)" in words(page)
    page = confirm(admin, ORPHANS)
    assert "The brake blocked it: too many queues would be deleted at once, so none was." in words(page)
    assert names_lost <= agent.names
    page = confirm(admin, ORPHANS, force="on")
    assert "3 queues deleted of 6" in words(page)
    assert agent.names == agent.registered
    entry = AuditEntry.objects.latest("id")
    assert (entry.additional_data["agreed_to"], entry.additional_data["force"]) == (3, True)


def test_an_operator_previews_and_confirms_a_clean_up_of_stale_subscriptions(admin, agent):
    assert "There is nothing to clean up" in words(admin.get(STALE))
    AuthToken.objects.update(expiry=timezone.now() - timedelta(days=1))
    page = admin.get(STALE)
    assert "Delete 2 of 2 queues" in words(page)
    assert "of 1 owner without a valid token: alice@example.org" in words(page)
    assert agent.names == agent.registered
    page = admin.post(STALE, {"shown": key(page)})
    assert "2 subscriptions and consumers removed, 1 expired token removed" in words(page)
    assert agent.names == {"guardian.dlq"}
    assert ("ops@example.org", "requested a clean-up of stale subscriptions") in audited_actions()


@pytest.mark.parametrize(("address", "kind"), [(ORPHANS, "orphans"), (STALE, "stale")])
def test_a_clean_up_during_another_clean_up_is_409(admin, operator, guarded, address, kind):
    shown = views.store_preview(operator, kind, frozenset())
    with lease(kind):
        page = admin.post(address, {"shown": shown})
    assert (page.status_code, "Another clean-up is running" in words(page)) == (409, True)
    assert Sweep.objects.count() == 0


def test_a_sweep_without_the_broker_is_503(admin, agent, settings):
    agent.orphan()
    shown = key(admin.get(ORPHANS))
    settings.RABBITMQ_MANAGEMENT_URL = AWAY
    for page in (admin.get(ORPHANS), admin.post(ORPHANS, {"shown": shown})):
        assert page.status_code == 503
        assert "The broker does not answer, or stopped answering." in words(page)
        assert "Connection refused" in words(page)


def test_a_long_list_of_queues_is_shortened_and_counted():
    shown = names([{"vhost": "a", "queue": f"q{number}\n"} for number in range(NAMES_SHOWN + 7)])
    assert (shown.shown[0], len(shown.shown), shown.more) == (("q0\\x0a", "a"), NAMES_SHOWN, 7)


# The audit trail

TRAIL = "/admin/operate/trail/"


def rows_of(page):
    return [
        " ".join(re.sub(r"<[^>]*>", " ", row).split()) for row in page.text.partition("<tbody>")[2].split("</tr>")[:-1]
    ]


@pytest.fixture
def acts(operator, pulse_user, vhost="/"):
    """Have Guardian delete a queue, and an operator purge another and change a Pulse user, an hour apart."""
    now = timezone.now().replace(microsecond=0)
    deleted = stored_queue("queue/alice/builds", pulse_user=pulse_user, state="gone", ready=None, unacknowledged=None)
    purged = stored_queue("queue/bob/tests")
    AuditEntry.objects.all().delete()
    deleted.events.create(
        vhost=vhost, queue_name=deleted.name, kind="deleted", at=now - timedelta(hours=3), details={"length": 8001}
    )
    purged.events.create(vhost=vhost, queue_name=purged.name, kind="purged", at=now - timedelta(hours=2), by=operator)
    audit.record(operator, "purged", purged)
    AuditEntry.objects.update(timestamp=now - timedelta(hours=2))
    audit.record_changes(operator, [audit.Change(pulse_user, {"max_length": 8000}, {"max_length": 9000})])
    AuditEntry.objects.filter(event="changed").update(timestamp=now - timedelta(hours=1))


DELETED = "3 h ago Guardian deleted queue/alice/builds 8,001 messages"
PURGED = "2 h ago ops@example.org purged queue/bob/tests in /"
CHANGED = "60 min ago ops@example.org changed pulse user alice deletion limit: 8000 → 9000"


@pytest.mark.parametrize(
    ("filters", "shown"),
    [
        ({}, [CHANGED, PURGED, DELETED]),
        ({"queue": "builds"}, [DELETED]),
        ({"queue": "TESTS"}, [PURGED]),
        ({"pulse_user": "alice"}, [CHANGED, DELETED]),
        ({"person": "ops@"}, [CHANGED, PURGED]),
        ({"until": "2001-01-01"}, []),
        ({"since": "2001-01-01"}, [CHANGED, PURGED, DELETED]),
    ],
)
def test_the_audit_trail_has_each_act_of_guardian_and_of_people_once(admin, acts, filters, shown):
    assert rows_of(admin.get(TRAIL, filters)) == shown


def test_the_audit_trail_finds_what_people_did_with_a_queues_archives(admin, operator):
    audit.record(operator, "replayed", store_archive(b"1"))
    (row,) = rows_of(admin.get(TRAIL, {"queue": "builds"}))
    assert "1 messages of queue/alice/builds" in row


def test_the_audit_trail_continues_where_a_page_ended(admin, acts, monkeypatch):
    monkeypatch.setattr(trail, "ROWS", 1)
    AuditEntry.objects.update(timestamp=QueueEvent.objects.get(kind="deleted").at)  # three acts at the same time
    found, address = [], TRAIL
    while address:
        page = admin.get(address)
        found += rows_of(page)
        following = re.search(r'rel="next" href="([^"]+)"', page.text)
        address = TRAIL + following[1].replace("&amp;", "&") if following else ""
    assert [row.split()[-1] for row in found] == ["messages", "9000", "/"]


def test_the_audit_trail_ignores_a_position_that_it_never_gave(admin, acts):
    for before in ("x", "2026-01-01~0~1", "2026-01-01T00:00:00+00:00~0~x"):
        assert len(rows_of(admin.get(TRAIL, {"before": before}))) == 3
    assert "Enter a valid date." in admin.get(TRAIL, {"since": "x"}).text
    assert "Ensure this value" in admin.get(TRAIL, {"until": "9999-12-31"}).text  # there is no day after it
