"""The brake on bulk deletion, changed settings, and the release of blocked queues, on a real broker."""

import json
from functools import partial

import pytest
from django.core.management import call_command
from django.utils import timezone

from accounts.models import AuditEntry, Owner, PulseUser
from notifications.models import Notification
from queues.actions import single
from queues.guard import destroying, once, persistence
from queues.guard.deleter import _Run
from queues.guard.earlier_settings import is_another_broker
from queues.models import Queue, Watch
from queues.rules import brake
from queues.rules.brake import groups_to_block
from rabbit.errors import Refused
from rabbit.management import Management
from tests.support.toolbox import Killed, brake_counts, in_parallel, queue_names


def other_notifications():
    return list(Notification.objects.exclude(about__startswith="queue ").order_by("id").values_list("kind", flat=True))


@pytest.fixture
def blocked(guarded, amqp, settings):
    """Let the brake block three queues."""
    settings.GUARDIAN_DELETE_BRAKE = 2
    for number in range(3):
        amqp.queue(f"long-{number}", 11)
    assert once.run_once().brake_held
    return guarded


def long_queues(guarded, queues=3, prefix="long"):
    return [(guarded, f"{prefix}-{number}") for number in range(queues)]


@pytest.fixture
def released(blocked, operator):
    """Release the three blocked queues."""
    brake.release_brake(operator, long_queues(blocked))
    return blocked


def test_operators_are_notified_of_the_number_of_blocked_queues_by_reason(blocked):
    facts = Notification.objects.filter(kind="brake").first().facts
    assert (facts["count"], facts["brake"]) == (3, 3)


def test_force_overrides_the_brake(blocked):
    report = once.run_once(force=True)
    assert (report.deleted, report.brake_held) == (3, False)


def test_a_release_lets_the_next_pass_delete_the_named_queues_and_is_used_up(released, amqp):
    amqp.channel.queue_purge("long-0")
    report = once.run_once()
    assert (report.deleted, report.brake_held) == (2, False)
    assert brake_counts() == (0, 0)
    for number in range(3):
        amqp.queue(f"long-{number}", 11)
    assert once.run_once().brake_held
    assert other_notifications() == ["brake", "brake"]


@pytest.mark.parametrize(("others", "deleted", "is_held"), [(3, 3, True), (2, 5, False)], ids=["too many", "a few"])
def test_the_brake_limits_other_queues_during_a_release(released, amqp, others, deleted, is_held):
    for number in range(others):
        amqp.queue(f"more-{number}", 11)
    report = once.run_once()
    assert (report.deleted, report.brake_held) == (deleted, is_held)
    assert brake_counts() == (others if is_held else 0, 0)
    assert other_notifications() == ["brake"] * (1 + is_held)


def test_a_release_is_valid_for_ten_minutes(released):
    Watch.objects.update(released_at=timezone.now() - brake.RELEASE_VALID_FOR)
    assert brake_counts() == (3, 0)
    assert once.run_once().brake_held


def test_a_release_is_not_valid_after_the_clock_was_set_back():
    now = timezone.now()
    watch = Watch(released=[["/", "long"]], released_at=now + brake.RELEASE_VALID_FOR)
    assert not brake.released_queues(watch, now)


def kill(*arguments, **options):
    raise Killed


@pytest.mark.parametrize("step", ["the decision", "the deletion"])
def test_a_release_survives_a_killed_pass(released, monkeypatch, step):
    with monkeypatch.context() as patch:
        patch.setattr(*((persistence, "_update_watch", kill) if step == "the decision" else (_Run, "carry_out", kill)))
        with pytest.raises(Killed):
            once.run_once()
    assert brake_counts() == ((3, 3) if step == "the decision" else (0, 0))
    report = once.run_once()
    assert (report.deleted, report.brake_held) == (3, False)
    assert other_notifications() == ["brake"]


def test_a_release_given_during_a_pass_applies_to_the_next_one(blocked, operator, monkeypatch):
    brake.release_brake(operator, long_queues(blocked, 1))
    remember = persistence._update_watch

    def release_another(*arguments):
        brake.release_brake(operator, long_queues(blocked))
        remember(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(persistence, "_update_watch", release_another)
        assert once.run_once().deleted == 1
    assert brake_counts() == (2, 2)
    assert once.run_once().deleted == 2


def test_an_unconfirmed_released_queue_is_deleted_by_a_later_pass(blocked, amqp, operator, monkeypatch):
    amqp.queue("unsure", 11)
    for _ in range(11):
        amqp.channel.basic_get("unsure", auto_ack=False)
    with monkeypatch.context() as patch:
        patch.setattr(destroying, "_list_again", lambda attempt: None)
        deletable = {line.key for line in once.run_once(dry_run=True).deletable}
        assert deletable == {*long_queues(blocked), (blocked, "unsure")}
        brake.release_brake(operator, deletable)
        report = once.run_once()
        assert (report.deleted, report.pending, report.brake_held) == (3, 1, False)
    assert once.run_once().deleted == 1
    assert brake_counts() == (0, 0)


def test_without_a_blocked_deletion_there_is_nothing_to_release(guarded, amqp, operator):
    assert brake_counts() == (0, 0)
    amqp.queue("short", 1)
    once.run_once()
    brake.release_brake(operator, [(guarded, "short")])
    assert brake_counts() == (0, 0)
    assert not AuditEntry.objects.filter(event="released the brake").exists()


def test_a_release_must_name_a_queue(blocked, operator):
    with pytest.raises(ValueError, match="name the queues"):
        brake.release_brake(operator, [])


def test_a_shrunken_list_does_not_lift_the_brake(blocked, operator, monkeypatch):
    since = Watch.objects.get().brake_since
    brake.release_brake(operator, long_queues(blocked))
    once.run_once(dry_run=True)
    with monkeypatch.context() as patch:
        patch.setattr(Management, "list_queues", lambda *_: [])
        assert not once.run_once().brake_held
    assert (Watch.objects.get().brake_since, brake_counts()) == (since, (3, 3))
    Watch.objects.update(**brake.NO_RELEASE)
    assert once.run_once().brake_held
    assert other_notifications().count("brake") == 1


# Groups


def test_within_the_limit_no_group_is_blocked():
    assert groups_to_block({"alice": 30, "bob": 20}, 50) == []


def test_the_fewest_groups_are_blocked_that_leave_the_rest_within_the_limit():
    assert groups_to_block({"bob": 1, "alice": 60}, 50) == ["alice"]
    assert groups_to_block({"a": 51, "b": 53, "c": 52, "d": 50}, 50) == ["b", "c", "a"]


def test_all_groups_are_blocked_if_blocking_three_is_not_enough():
    assert set(groups_to_block({"a": 60, "b": 60, "c": 60, "d": 60, "e": 1}, 50)) == set("abcde")


@pytest.fixture
def bobs_pulse_user(bob):
    pulse_user = PulseUser.objects.create(username="bob", ready=True)
    pulse_user.owners.add(bob)
    return pulse_user


def test_only_the_owner_who_exceeds_the_brake_is_blocked_with_all_their_pulse_users(
    guarded, alice, bobs_pulse_user, amqp, settings, management
):
    settings.GUARDIAN_DELETE_BRAKE = 3
    for number in range(4):
        PulseUser.objects.create(username=f"alice-{number}", ready=True).owners.add(alice)
    alices = {f"queue/alice-{number}/builds" for number in range(4)}
    for name in (*alices, "queue/bob/runaway", "queue/bob/another", "unowned"):
        amqp.queue(name, 11)
    report = once.run_once()
    assert (report.deleted, report.brake_held) == (3, True)
    assert queue_names(management, guarded) == alices
    assert block_reasons() == dict.fromkeys(alices, "brake")


def test_a_new_queue_of_a_blocked_owner_is_blocked_too(
    guarded, pulse_user, bobs_pulse_user, amqp, settings, management
):
    settings.GUARDIAN_DELETE_BRAKE = 2
    for name in ("queue/alice/0", "queue/alice/1", "queue/alice/2"):
        amqp.queue(name, 11)
    once.run_once()
    amqp.queue("queue/alice/another", 11)
    amqp.queue("queue/bob/runaway", 11)
    assert once.run_once().deleted == 1
    assert "queue/alice/another" in queue_names(management, guarded)
    assert brake_counts() == (4, 0)
    assert other_notifications() == ["brake"]


def test_operators_are_notified_of_each_owner_who_exceeds_the_brake(
    guarded, pulse_user, bobs_pulse_user, amqp, settings
):
    settings.GUARDIAN_DELETE_BRAKE = 2
    for owner in ("alice", "bob"):
        for number in range(3):
            amqp.queue(f"queue/{owner}/{number}", 11)
        assert once.run_once().brake_held
    assert other_notifications() == ["brake", "brake"]
    assert brake_counts() == (6, 0)


# Blocked until an operator decides


def block_reasons():
    """Return the reasons why deletions are blocked, by the queue's name."""
    return dict(Queue.objects.exclude(block_reason="").values_list("name", "block_reason"))


def test_a_queue_stays_blocked_when_few_are_left(blocked):
    Queue.objects.exclude(name="long-0").update(unbounded=True)
    assert [once.run_once().deleted for _ in range(2)] == [0, 0]
    assert block_reasons() == {"long-0": "brake"}


def test_a_blocked_queue_that_dips_below_its_limit_stays_blocked_until_it_is_back_to_normal(blocked, amqp):
    amqp.take("long-0", 2)
    report = once.run_once()
    assert (report.deleted, brake_counts()) == (0, (2, 0))
    amqp.publish("long-0", 2)
    assert (once.run_once().deleted, brake_counts()) == (0, (3, 0))
    assert other_notifications() == ["brake"]
    amqp.take("long-0", 7)
    once.run_once()
    assert block_reasons() == dict.fromkeys(["long-1", "long-2"], "brake")


def test_a_queue_deleted_by_its_owner_is_no_longer_blocked(blocked, operator):
    single.delete_queue(Queue.objects.get(name="long-0"), operator)
    assert set(block_reasons()) == {"long-1", "long-2"}
    assert brake.release_brake(operator, long_queues(blocked)) == brake.Release(2, 0, "", 1)


# Releases by several operators


def test_two_releases_add_up_and_each_queue_is_released_once(blocked, operator):
    other = Owner.objects.create_superuser("other@example.org")
    assert brake.release_brake(operator, long_queues(blocked, 2)) == brake.Release(2, 0, "", 0)
    assert brake.release_brake(other, long_queues(blocked)) == brake.Release(1, 2, "ops@example.org", 0)
    assert brake_counts() == (3, 3)
    assert once.run_once().deleted == 3
    released = AuditEntry.objects.filter(event="released the brake").order_by("id")
    assert [(entry.actor, entry.additional_data["queues"]) for entry in released] == [(operator, 2), (other, 1)]


def test_operators_who_release_at_the_same_moment_release_each_queue_once(blocked, operator):
    other = Owner.objects.create_superuser("other@example.org")
    names = long_queues(blocked)
    outcomes = in_parallel(*(partial(brake.release_brake, by, names) for by in (operator, other)))
    assert sorted(outcome.released for outcome in outcomes) == [0, 3]
    assert AuditEntry.objects.filter(event="released the brake").count() == 1


@pytest.mark.parametrize("limits", [{"unbounded": True}, {"max_length": 20}], ids=["unbounded", "a higher limit"])
def test_a_queue_released_by_one_operator_and_spared_by_another_stays(blocked, operator, management, limits):
    other = Owner.objects.create_superuser("other@example.org")
    brake.release_brake(operator, long_queues(blocked))
    single.set_limits(Queue.objects.get(name="long-0"), other, **limits)
    assert once.run_once().deleted == 2
    assert queue_names(management, blocked) == {"long-0"}
    assert brake_counts() == (0, 0)


def test_one_operator_releases_while_another_spares(blocked, operator, management):
    other = Owner.objects.create_superuser("other@example.org")
    spared = Queue.objects.get(name="long-0")
    in_parallel(
        partial(brake.release_brake, operator, long_queues(blocked)),
        partial(single.set_limits, spared, other, unbounded=True),
    )
    assert once.run_once().deleted == 2
    assert queue_names(management, blocked) == {"long-0"}


# The settings


@pytest.fixture
def earlier(guarded, amqp, settings):
    """Give a queue of 8 messages after a pass with the limit 10."""
    amqp.queue("long", 8)
    assert once.run_once().errors == []
    return guarded


def test_a_limit_lowered_in_the_environment_deletes_nothing_that_the_old_one_allowed(earlier, amqp, settings, operator):
    amqp.queue("longer", 11)
    settings.GUARDIAN_MAX_QUEUE_LENGTH = 7
    reports = [once.run_once() for _ in range(3)]
    assert [(report.deleted, report.brake_held) for report in reports] == [(1, True), (0, True), (0, True)]
    assert block_reasons() == {"long": "settings"}
    assert other_notifications() == ["brake"]
    brake.release_brake(operator, [(earlier, "long")])
    assert once.run_once().deleted == 1


def test_a_lowered_limit_that_is_raised_again_blocks_nothing(earlier, settings):
    for limit in (7, 10):
        settings.GUARDIAN_MAX_QUEUE_LENGTH = limit
        once.run_once()
    assert (block_reasons(), brake_counts()) == ({}, (0, 0))


def test_the_old_limit_counts_with_a_queues_own_and_its_pulse_users_limits(guarded, pulse_user, amqp, settings):
    amqp.queue("queue/alice/builds", 8)
    once.run_once()
    settings.GUARDIAN_MAX_QUEUE_LENGTH = 9
    PulseUser.objects.update(max_length=7)  # a person confirms such a change
    assert once.run_once().deleted == 1


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("GUARDIAN_NAMESPACE_POLICY", "report", "delete-unpatterned"),
        ("GUARDIAN_IGNORED_QUEUES", "^long", ""),
        ("GUARDIAN_IGNORED_QUEUES", "^lon", "^short"),
        ("GUARDIAN_VHOSTS", ["no-such-vhost"], None),
    ],
)
def test_any_setting_that_makes_a_queue_deletable_blocks_its_deletion(guarded, amqp, settings, name, before, after):
    amqp.queue("long", 2 if "NAMESPACE" in name else 11)
    setattr(settings, name, before)
    assert once.run_once().deleted == 0
    setattr(settings, name, [guarded] if after is None else after)
    assert [once.run_once().deleted for _ in range(2)] == [0, 0]
    assert block_reasons() == {"long": "settings"}


def test_a_misnamed_queue_is_no_longer_blocked_once_the_policy_is_revoked(guarded, amqp, settings):
    amqp.queue("stray", 2)
    for policy in ("report", "delete-unpatterned", "report"):
        settings.GUARDIAN_NAMESPACE_POLICY = policy
        once.run_once()
    assert block_reasons() == {}


@pytest.fixture
def unseen(guarded):
    """Guard the broker for the first time."""
    Watch.objects.all().delete()
    return guarded


def test_the_first_pass_over_a_broker_deletes_nothing_and_then_other_queues_are_guarded(unseen, amqp, management):
    amqp.queue("long", 11)
    amqp.queue("short", 1)
    assert [once.run_once().deleted for _ in range(2)] == [0, 0]
    assert block_reasons() == {"long": "settings"}
    amqp.queue("new", 11)
    amqp.publish("short", 10)
    assert once.run_once().deleted == 2
    assert queue_names(management, unseen) == {"long"}


def test_a_dry_run_before_the_first_pass_shows_what_is_blocked(unseen, amqp):
    amqp.queue("long", 11)
    report = once.run_once(dry_run=True)
    assert ([line.reason for line in report.deletable], report.would_delete) == (["settings"], [])
    assert not Watch.objects.exists()


def test_a_forced_first_pass_deletes(unseen, amqp):
    amqp.queue("long", 11)
    assert once.run_once(force=True).deleted == 1


@pytest.mark.parametrize("another", [{"nodes": ["rabbit@elsewhere"]}, {"cluster": "another"}], ids=str)
def test_the_first_pass_over_another_broker_deletes_nothing(earlier, amqp, another):
    assert Watch.objects.get().cluster
    Watch.objects.update(**another)
    amqp.queue("there-before", 11)
    assert [once.run_once().deleted for _ in range(2)] == [0, 0]
    assert block_reasons() == {"there-before": "settings"}


def test_another_side_of_a_split_cluster_is_the_same_broker():
    watch = Watch(nodes=["rabbit@a"], cluster="id")
    assert not is_another_broker(watch, "id", ["rabbit@b", "rabbit@a"])  # a is down


def test_after_a_policy_that_no_longer_exists_nothing_is_deleted(earlier, amqp):
    Watch.objects.update(deletion_settings={"GUARDIAN_THRESHOLD_POLICY": "removed"})
    amqp.publish("long", 3)
    assert once.run_once().deleted == 0
    assert Watch.objects.get().deletion_settings["GUARDIAN_THRESHOLD_POLICY"] == "static"


def test_changed_settings_count_as_new_until_all_vhosts_could_be_listed(
    guarded, vhosts, amqp, settings, management, monkeypatch
):
    unlisted = vhosts[0]
    settings.GUARDIAN_VHOSTS = [guarded, unlisted]
    management_lists = Management.list_queues

    def refuse(self, vhost, params):
        if vhost == unlisted:
            raise Refused("no", status=500, reason="no")
        return management_lists(self, vhost, params)

    Watch.objects.all().delete()
    with monkeypatch.context() as patch:
        patch.setattr(Management, "list_queues", refuse)
        once.run_once()
    assert Watch.objects.get().deletion_settings is None
    amqp.queue("long", 11)
    assert once.run_once().deleted == 0
    assert Watch.objects.get().deletion_settings is not None


# What people read


def test_the_queues_page_list_mail_and_api_say_that_its_deletion_is_blocked(
    as_alice, unseen, pulse_user, amqp, mailbox
):
    amqp.queue("queue/alice/builds", 11)
    amqp.queue("queue/alice/short")
    once.run_once()
    queue = Queue.objects.get(name="queue/alice/builds")
    sentence = "over deletion limit; deletion is blocked until an operator decides"
    pages = [as_alice.get(path).text for path in ("/queues/", f"/queues/{queue.uuid}/")]
    call_command("send_notifications", "--once")
    (mail,) = [mail for mail in mailbox.mails if "alice@example.org" in mail.recipients]
    for page in pages:
        assert "deletion blocked" in page
    for text in (mail.text, mail.html):
        assert sentence in " ".join(text.split()).replace("over its", "over").lower()
    for text in (*pages, mail.text, mail.html):
        assert "eleted past" not in text
        assert "deletes it with all" not in text
    assert "/admin/operate/brake/" in mailbox.to("ops@example.org")[0].text + mailbox.to("ops@example.org")[1].text
    assert as_alice.get(f"/api/queues/{queue.uuid.hex}/").json()["blocked"] is True
    assert as_alice.get("/api/queues/?search=short").json()[0]["blocked"] is False


def test_the_json_of_a_dry_run_has_the_table(blocked, pulse_user, amqp, capsys):
    amqp.queue("queue/alice/longer", 12)
    with pytest.raises(SystemExit) as ended:
        call_command("monitor_queues", "--dry-run", "--json")
    assert ended.value.code == 3
    report = json.loads(capsys.readouterr().out)
    assert report["diagnoses"]["no_consumer"] == 0  # nothing was counted yet
    first, *others = report["condemned"]
    assert first == {
        "vhost": blocked, "queue": "queue/alice/longer", "owner": "alice", "length": 12, "limit": 10,
        "per_second": None, "consumers": 0, "reason": "", "diagnosis": None,
    }  # fmt: skip
    assert [(line["queue"], line["owner"], line["reason"]) for line in others] == [
        (name, "nobody", "brake") for _, name in long_queues(blocked)
    ]
