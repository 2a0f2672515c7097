"""Owners of Pulse users: invited, assigned, removed. Nobody becomes responsible for queues without consent."""

import re
from datetime import timedelta
from functools import partial

import pytest
import time_machine
from django.core.exceptions import ValidationError
from django.db.models import F
from django.utils import timezone

from accounts.access import vouching
from accounts.access.vouching import NotVouched
from accounts.models import AuditEntry, Invitation, Owner, PulseUser
from accounts.pulse_users import creation, invitations, ownership, passwords, removal
from accounts.pulse_users.ownership import add_owner, find_owners, remove_owner, set_owners
from accounts.pulse_users.withdrawal import withdraw
from accounts.tasks import prune_visitors
from core.limits import RateLimitExceeded
from core.refusals import Refusal
from notifications.kinds import Obsolete
from notifications.mails import compose
from notifications.models import Notification
from rabbit.management import Management
from tests.support.api import Program, Visitor
from tests.support.toolbox import AWAY, calling_first, can_log_in, in_parallel, sent, wait_until

DAY = timedelta(days=1)


@pytest.fixture
def carol(db):
    return Owner.objects.create_user("carol@example.org", vouched=True, last_login=timezone.now())


@pytest.fixture
def shared(alice, bob):
    """Return a Pulse user of Alice and Bob that only the database has."""
    pulse_user = PulseUser.objects.create(username="shared", ready=True)
    pulse_user.owners.set([alice, bob])
    return pulse_user


@pytest.fixture
def invitation(pulse_user, alice, bob):
    add_owner(pulse_user, bob, alice)
    return Invitation.objects.get()


@pytest.fixture
def on_broker(guarded, name, alice, bob):
    """Return a Pulse user of Alice and Bob on the broker, and its password."""
    return creation.create_pulse_user(name, [alice, bob])


def mails_to(owner):
    """Return the mails to this owner that are not yet outdated, oldest first."""
    return [compose(one) for one in Notification.objects.filter(recipient=owner.email).order_by("id")]


def owners_of(pulse_user):
    return set(pulse_user.owners.all())


# Finding owners


def test_owners_are_found_in_one_query_in_the_given_order(alice, bob, operator, django_assert_num_queries):
    with django_assert_num_queries(1):
        found = find_owners(["Bob@example.org ", "ops@example.org", "alice@example.org", "bob@EXAMPLE.org"])
    assert found == [bob, operator, alice]


def test_unknown_and_unvouched_owners_have_the_same_error(alice):
    Owner.objects.create_user("stranger@example.org")
    Owner.objects.create_user("gone@example.org", vouched=True, is_active=False)
    Owner.objects.create_user("never-here@example.org", vouched=True)
    texts = set()
    for email in (
        "stranger@example.org",
        "gone@example.org",
        "never-here@example.org",
        "nobody@example.org",
        "nonsense",
        "a\0@b",
        "\ud800@x.org",
    ):
        with pytest.raises(ValidationError) as error:
            find_owners(["alice@example.org", email])
        assert email in error.value.message
        assert "alice" not in error.value.message
        texts.add(error.value.message.replace(email, "…"))
    assert len(texts) == 1


# Inviting and answering


def test_an_invited_person_owns_the_pulse_user_after_accepting(pulse_user, alice, bob, invitation):
    assert owners_of(pulse_user) == {alice}
    with time_machine.travel(timezone.now() + 7 * DAY - timedelta(seconds=30)):
        invitations.accept(invitation)
    assert owners_of(pulse_user) == {alice, bob}
    assert not Invitation.objects.exists()
    events = AuditEntry.objects.filter(event__contains="own").order_by("id").values_list("actor_email", "event")
    assert list(events) == [
        ("alice@example.org", "invited to own"),
        ("bob@example.org", "accepted an invitation to own"),
    ]


ENDS = {
    "accepted": invitations.accept,
    "declined": invitations.decline,
    "withdrawn": lambda one: ownership.withdraw_invitation(one.pulse_user, one.invitee, one.inviter),
    "the inviter left": lambda one: remove_owner(one.pulse_user, one.inviter, by=one.inviter),
    "the inviter left and returned": lambda one: (
        remove_owner(one.pulse_user, one.inviter, by=one.inviter),
        one.pulse_user.owners.add(one.inviter),
    ),
    "the inviter lost access": lambda _: Owner.objects.filter(email="alice@example.org").update(vouched=False),
    "the Pulse user is being removed": lambda one: PulseUser.objects.update(removing_since=timezone.now()),
    "expired": lambda one: Invitation.objects.update(created=F("created") - 7 * DAY - timedelta(seconds=1)),
}


@pytest.mark.parametrize("answer", [invitations.accept, invitations.decline])
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_an_invitation_that_ended_cannot_be_answered(shared, alice, carol, end, answer):
    add_owner(shared, carol, alice)
    invitation = Invitation.objects.get()
    end(invitation)
    before = owners_of(shared)
    with pytest.raises(Invitation.DoesNotExist):
        answer(invitation)
    assert owners_of(shared) == before


def test_an_owner_without_access_invites_nobody(pulse_user, alice, bob):
    Owner.objects.filter(pk=alice.pk).update(vouched=False)
    with pytest.raises(ValidationError, match="has no access"):
        add_owner(pulse_user, bob, Owner.objects.get(pk=alice.pk))
    assert not Invitation.objects.exists()


def test_a_second_invitation_changes_nothing_while_the_first_is_open(pulse_user, alice, bob, invitation):
    add_owner(pulse_user, bob, alice)
    assert Invitation.objects.get() == invitation
    assert sent(bob.email) == ["invitation"]


def test_another_owner_can_invite_after_the_inviter_left(shared, alice, bob, carol):
    add_owner(shared, carol, alice)
    remove_owner(shared, alice, by=bob)
    add_owner(shared, carol, bob)
    invitations.accept(Invitation.objects.get())
    assert owners_of(shared) == {bob, carol}


def test_a_person_gets_twenty_invitations_an_hour_at_most(alice, bob):
    for number in range(21):
        pulse_user = PulseUser.objects.create(username=f"alice-{number}", ready=True)
        pulse_user.owners.add(alice)
        if number < 20:
            add_owner(pulse_user, bob, alice)
    with pytest.raises(RateLimitExceeded, match="invitations to this person"):
        add_owner(pulse_user, bob, alice)


def test_a_person_who_declined_is_invited_again_a_day_later_at_the_earliest(pulse_user, alice, bob, invitation):
    invitations.decline(invitation)
    with pytest.raises(ValidationError, match="You can invite them again after"):
        add_owner(pulse_user, bob, alice)
    assert sent(bob.email) == ["invitation"]
    with time_machine.travel(timezone.now() + DAY + timedelta(seconds=1)):
        add_owner(pulse_user, bob, alice)
    assert sent(bob.email) == ["invitation", "invitation"]


def test_invitations_that_expired_are_pruned(pulse_user, invitation):
    prune_visitors()
    assert Invitation.objects.exists()
    with time_machine.travel(timezone.now() + 8 * DAY):
        prune_visitors()
    assert not Invitation.objects.exists()


def test_an_invitation_accepted_twice_at_once_is_accepted_once(transactional_db, pulse_user, bob, invitation):
    answers = in_parallel(*[partial(invitations.accept, invitation)] * 2)
    assert sorted(type(answer).__name__ for answer in answers) == ["DoesNotExist", "NoneType"]
    assert bob in owners_of(pulse_user)
    assert sent("alice@example.org") == ["invitation-answered"]


def test_an_invitation_accepted_while_its_inviter_is_removed_counts_before_or_not_at_all(
    transactional_db, shared, alice, bob, carol
):
    add_owner(shared, carol, alice)
    invitation = Invitation.objects.get()
    accepted, removed = in_parallel(
        partial(invitations.accept, invitation), partial(remove_owner, shared, alice, by=bob)
    )
    assert removed is None
    assert (carol in owners_of(shared)) is (accepted is None)
    assert alice not in owners_of(shared)


# Assigning


def test_an_operator_assigns_an_owner_whose_open_invitation_ends(pulse_user, alice, bob, operator, invitation):
    add_owner(pulse_user, bob, operator)
    assert owners_of(pulse_user) == {alice, bob}
    assert sent(bob.email) == ["invitation", "owner-assigned"]
    assert not Invitation.objects.exists()


def test_the_owners_of_an_adopted_pulse_user_are_notified(guarded, alice, operator, create_pulse_user):
    creation.adopt_pulse_user(create_pulse_user("adopted"), [alice, operator], operator)
    assert sent(alice.email) == ["owner-assigned"]
    assert sent(operator.email) == []


@pytest.mark.parametrize("change", [add_owner, lambda pulse_user, owner, by: set_owners(pulse_user, [by, owner], by)])
def test_only_people_with_access_are_invited_or_assigned(pulse_user, alice, operator, change):
    stranger = Owner.objects.create_user("stranger@example.org")
    for by in (alice, operator):
        with pytest.raises(NotVouched):
            change(pulse_user, stranger, by)
    assert owners_of(pulse_user) == {alice}
    assert not Invitation.objects.exists()


def test_a_person_whose_access_was_just_withdrawn_is_not_invited(pulse_user, alice, bob, operator):
    [stale] = find_owners(["bob@example.org"])
    vouching.unvouch(bob, operator)
    with pytest.raises(NotVouched):
        add_owner(pulse_user, stale, alice)
    Owner.objects.filter(pk=bob.pk).delete()
    with pytest.raises(NotVouched, match="no longer exists"):
        add_owner(pulse_user, stale, alice)
    assert not Invitation.objects.exists()


def test_a_pulse_user_has_a_hundred_owners_at_most_including_those_who_are_invited(pulse_user, alice, bob):
    others = Owner.objects.bulk_create([Owner(email=f"o{number}@example.org") for number in range(98)])
    pulse_user.owners.add(*others[:50])
    Invitation.objects.bulk_create(
        [Invitation(pulse_user=pulse_user, invitee=other, inviter=alice) for other in others[50:]]
    )
    add_owner(pulse_user, bob, alice)
    carol = Owner.objects.create_user("carol@example.org", vouched=True)
    with pytest.raises(ValidationError, match="100 owners, including those who are invited"):
        add_owner(pulse_user, carol, alice)


def test_a_list_of_new_owners_counts_beside_the_present_ones(pulse_user, alice):
    people = Owner.objects.bulk_create([Owner(email=f"o{number}@example.org", vouched=True) for number in range(110)])
    pulse_user.owners.add(*people[:50])
    with pytest.raises(ValidationError, match="100 owners, including those who are invited"):
        set_owners(pulse_user, people[50:], alice)
    set_owners(pulse_user, people[50:99], alice)
    assert pulse_user.invitations.open().count() == 49


# Removing and leaving


def test_addresses_that_an_owner_added_get_nothing_after_the_owner_is_removed(shared, alice, bob):
    for owner in (alice, bob):
        shared.notification_addresses.create(email=f"other-{owner.email}", added_by=owner, confirmed_at=timezone.now())
    remove_owner(shared, bob, by=alice)
    assert [one.added_by for one in shared.notification_addresses.all()] == [alice]
    ownership.deactivated(alice, by=bob)
    assert not shared.notification_addresses.exists()


def test_owners_are_removed_except_the_last(shared, alice, bob):
    remove_owner(shared, alice, by=bob)
    with pytest.raises(Refusal, match="isn't an owner"):
        remove_owner(shared, alice, by=bob)
    with pytest.raises(Refusal, match="can't be removed"):
        remove_owner(shared, bob, by=bob)
    with pytest.raises(Refusal, match="at least one owner"):
        set_owners(shared, [], bob)
    assert owners_of(shared) == {bob}


def test_the_last_active_owner_cannot_be_removed(shared, alice, bob):
    Owner.objects.filter(pk=bob.pk).update(is_active=False)
    with pytest.raises(Refusal, match="the last owner who can sign in"):
        remove_owner(shared, alice, by=alice)
    with pytest.raises(Refusal, match="who can sign in"):
        set_owners(shared, [bob], alice)
    remove_owner(shared, bob, by=alice)
    assert owners_of(shared) == {alice}


def test_an_unvouched_owner_may_remain(shared, alice, bob):
    Owner.objects.filter(pk=bob.pk).update(vouched=False)
    set_owners(shared, [bob], alice)
    assert owners_of(shared) == {bob}


def test_somebody_who_was_just_removed_changes_nothing(shared, alice, bob, carol, operator):
    remove_owner(shared, bob, by=alice)
    for change in (
        partial(add_owner, shared, carol, bob),
        partial(remove_owner, shared, alice, by=bob),
        partial(set_owners, shared, [bob], bob),
        partial(ownership.withdraw_invitation, shared, carol, bob),
    ):
        with pytest.raises(PulseUser.DoesNotExist):
            change()
    assert owners_of(shared) == {alice}


def test_one_of_two_owners_leaving_or_removing_each_other_concurrently_remains(transactional_db, alice, bob, carol):
    for number in range(3):
        both, three = (PulseUser.objects.create(username=f"{name}-{number}", ready=True) for name in ("two", "three"))
        both.owners.set([alice, bob])
        three.owners.set([alice, bob, carol])
        left = in_parallel(*(partial(remove_owner, both, owner, by=owner) for owner in (alice, bob)))
        assert sorted(type(answer).__name__ for answer in left) == ["NoneType", "Refusal"]
        removed = in_parallel(*(partial(remove_owner, three, *pair) for pair in ((alice, bob), (bob, alice))))
        assert sorted(type(answer).__name__ for answer in removed) == ["DoesNotExist", "NoneType"]
        assert (both.owners.count(), three.owners.count()) == (1, 2)


def test_concurrent_changes_of_the_owners_leave_one_of_them(transactional_db, alice, bob, operator):
    for number in range(3):
        pulse_user = PulseUser.objects.create(username=f"set-{number}", ready=True)
        pulse_user.owners.set([alice])
        wanted = [{alice, bob}, {operator}]
        answers = in_parallel(*(partial(set_owners, pulse_user, list(owners), operator) for owners in wanted))
        assert answers == [None, None]
        assert owners_of(pulse_user) in wanted


def test_a_new_list_invites_removes_and_withdraws(shared, alice, bob, carol):
    dora = Owner.objects.create_user("dora@example.org", vouched=True)
    add_owner(shared, carol, bob)
    set_owners(shared, [alice, dora], alice)
    assert owners_of(shared) == {alice}
    assert [one.invitee for one in Invitation.objects.open()] == [dora]


# The password after an owner left


def test_a_password_set_by_an_owner_who_is_removed_meanwhile_counts_as_exposed(on_broker, alice, bob):
    pulse_user, _ = on_broker
    with calling_first(Management, "put_user", partial(remove_owner, pulse_user, bob, by=alice)):
        passwords.rotate_password(pulse_user, by=bob)
    pulse_user.refresh_from_db()
    assert pulse_user.password_exposed_at


def test_somebody_who_was_just_removed_sets_no_password(on_broker, alice, bob, broker, guarded):
    pulse_user, password = on_broker
    remove_owner(pulse_user, bob, by=alice)
    with pytest.raises(PulseUser.DoesNotExist):
        passwords.rotate_password(pulse_user, by=bob)
    assert can_log_in(broker, guarded, pulse_user.username, password)


def test_the_other_owners_are_notified_when_one_leaves_and_an_owner_whom_they_remove(shared, alice, bob, carol):
    shared.owners.add(carol)
    remove_owner(shared, bob, by=bob)
    assert (sent(alice.email), sent(carol.email), sent(bob.email)) == (["owner-left"], ["owner-left"], [])
    [mail] = mails_to(alice)
    assert mail.subject == "[Guardian] bob@example.org no longer owns shared: set a new password"
    assert "/pulse-users/shared/#password" in mail.body
    remove_owner(shared, carol, by=alice)
    assert (sent(alice.email), sent(carol.email)) == (["owner-left"], ["owner-left"] * 2)
    mail = compose(Notification.objects.latest("id"))
    assert mail.subject == "[Guardian] You no longer own shared"
    assert "alice@example.org removed you" in mail.body


def test_a_mail_sent_after_the_password_was_changed_says_so(shared, alice, bob):
    remove_owner(shared, bob, by=bob)
    PulseUser.objects.update(password_exposed_at=None)
    [mail] = mails_to(alice)
    assert mail.subject.endswith("shared: the password was changed")


def test_an_owner_who_left_too_gets_no_mail_about_the_departure(shared, alice, bob, carol):
    shared.owners.add(carol)
    remove_owner(shared, bob, by=bob)
    remove_owner(shared, alice, by=alice)
    with pytest.raises(Obsolete):
        mails_to(alice)


def test_a_withdrawal_sends_each_remaining_owner_one_mail(db, alice, bob, operator, settings):
    settings.RABBITMQ_MANAGEMENT_URL = AWAY
    for number in range(5):
        PulseUser.objects.create(username=f"shared-{number}", ready=True).owners.set([alice, bob])
    withdraw(bob, operator, remove=True)
    [mail] = mails_to(alice)
    assert mail.subject == "[Guardian] bob@example.org no longer owns 5 Pulse users: set a new password"
    assert mail.body.count("/#password") == 5
    assert PulseUser.objects.filter(password_exposed_at=None).count() == 0


def test_the_deactivation_of_an_owner_exposes_the_passwords_and_notifies_the_other_owners(
    client, shared, alice, bob, operator
):
    alone = PulseUser.objects.create(username="bob", ready=True)
    alone.owners.add(bob)
    client.force_login(operator)
    assert client.post(f"/admin/accounts/owner/{bob.pk}/change/", {"email": bob.email}).status_code == 302
    for pulse_user in (shared, alone):
        pulse_user.refresh_from_db()
        assert pulse_user.password_exposed_at
    assert set(shared.owners.all()) == {alice, bob}
    [mail] = mails_to(alice)
    assert mail.subject == "[Guardian] An owner of shared was deactivated: set a new password"
    assert "ops@example.org deactivated bob@example.org, an owner of the Pulse user shared." in mail.body
    assert "bob@example.org may know the password" in mail.body
    assert sent(bob.email) == []


# Mails about invitations


def test_the_invitation_mail_links_to_the_page_and_is_not_sent_after_a_withdrawal(pulse_user, alice, bob, invitation):
    [mail] = mails_to(bob)
    assert mail.subject == "[Guardian] alice@example.org invites you to own alice"
    assert f"/invitations/{invitation.uuid}/" in mail.body
    assert f"/invitations/{invitation.uuid}/" in mail.alternatives[0].content
    ownership.withdraw_invitation(pulse_user, bob, alice)
    with pytest.raises(Obsolete):
        mails_to(bob)


# Pages


@pytest.mark.parametrize(
    ("answer", "subject"), [("accept", "accepted and owns alice now"), ("decline", "declined to own alice")]
)
def test_an_invitation_is_answered_on_its_page_by_post_only_and_the_inviter_is_notified(
    pulse_user, alice, bob, invitation, away, answer, subject
):
    client = Visitor(bob).client
    path = f"/invitations/{invitation.uuid}/"
    assert path in client.get("/pulse-users/").text
    for method in ("get", "head"):
        assert getattr(client, method)(path, {answer: "1"}).status_code == 200
    assert Invitation.objects.open().exists()
    client.post(path, {answer: "1"})
    assert (bob in owners_of(pulse_user)) is (answer == "accept")
    assert not Invitation.objects.open().exists()
    [mail] = mails_to(alice)
    assert mail.subject == f"[Guardian] bob@example.org {subject}"


def test_an_owner_invites_and_withdraws_on_the_pulse_users_page(pulse_user, alice, bob, away):
    client = Visitor(alice).client
    invited = client.post("/pulse-users/alice/owners/", {"email": "Bob@Example.org"}, follow=True)
    assert "bob@example.org is invited" in invited.text
    invitation = Invitation.objects.get()
    assert f'name="withdraw" value="{invitation.uuid}"' in invited.text
    withdrawn = client.post("/pulse-users/alice/owners/", {"withdraw": str(invitation.uuid)}, follow=True)
    assert "The invitation is withdrawn." in withdrawn.text
    assert not Invitation.objects.open().exists()


def test_an_invitee_who_lost_access_cannot_accept_and_sees_why(pulse_user, alice, bob, invitation):
    client = Visitor(bob).client
    Owner.objects.filter(pk=bob.pk).update(vouched=False)
    page = client.post(f"/invitations/{invitation.uuid}/", {"accept": "1"})
    assert page.status_code == 403
    assert "bob@example.org has no access to the broker yet" in page.text
    assert owners_of(pulse_user) == {alice}


def test_removing_an_owner_offers_a_new_password_ticked(on_broker, alice, bob, broker, guarded):
    pulse_user, password = on_broker
    name = pulse_user.username
    client = Visitor(alice).client
    path = f"/pulse-users/{name}/owners/{bob.uuid}/remove/"
    assert path in client.get(f"/pulse-users/{name}/").text
    page = client.get(path)
    assert re.search(r'<input type="checkbox" name="new_password"[^>]* checked>', page.text)
    assert "bob@example.org" in page.text
    removed = client.post(path, {"new_password": "on"})
    assert (removed.status_code, removed["Cache-Control"]) == (200, "no-store")
    new = re.search(r'<code id="password">([^<]+)</code>', removed.text)[1]
    assert owners_of(pulse_user) == {alice}
    wait_until(lambda: not can_log_in(broker, guarded, name, password))
    assert can_log_in(broker, guarded, name, new)
    pulse_user.refresh_from_db()
    assert pulse_user.password_exposed_at is None


def test_removing_an_owner_without_the_tick_keeps_the_password(on_broker, alice, bob, broker, guarded):
    pulse_user, password = on_broker
    client = Visitor(alice).client
    page = client.post(f"/pulse-users/{pulse_user.username}/owners/{bob.uuid}/remove/", follow=True)
    assert "bob@example.org is no longer an owner" in page.text
    assert "may know the password" in page.text
    assert can_log_in(broker, guarded, pulse_user.username, password)


def test_without_the_broker_an_owner_is_removed_and_the_page_says_that_the_password_is_not_changed(
    shared, alice, bob, away
):
    page = Visitor(alice).client.post(f"/pulse-users/shared/owners/{bob.uuid}/remove/", {"new_password": "on"})
    assert page.status_code == 503
    assert "bob@example.org is no longer an owner of shared." in page.text
    assert "We don&#x27;t know whether the password was changed." in page.text
    assert owners_of(shared) == {alice}


def test_an_owner_who_leaves_gets_no_new_password(shared, alice, bob, away):
    client = Visitor(bob).client
    path = f"/pulse-users/shared/owners/{bob.uuid}/remove/"
    assert "new_password" not in client.get(path).text
    left = client.post(path, {"new_password": "on"})
    assert left["Location"] == "/pulse-users/"
    assert owners_of(shared) == {alice}


@pytest.mark.parametrize("method", ["get", "post"])
def test_removing_somebody_who_is_no_owner_says_so(shared, alice, carol, away, method):
    page = getattr(Visitor(alice).client, method)(f"/pulse-users/shared/owners/{carol.uuid}/remove/", follow=True)
    assert "is not an owner" in page.text


@pytest.mark.parametrize("by", ["page", "API"])
def test_an_owner_who_is_removed_while_the_broker_is_asked_deletes_no_pulse_user(
    on_broker, alice, bob, broker, guarded, by
):
    pulse_user, password = on_broker
    name = pulse_user.username
    with calling_first(removal, "_tags", partial(remove_owner, pulse_user, bob, by=alice)):
        if by == "page":
            page = Visitor(bob).client.post(f"/pulse-users/{name}/delete/", {"typed": name}, follow=True)
            assert f"{name} is no longer yours. Nothing was deleted." in page.text
        else:
            assert Program(bob).delete(f"pulse-users/{name}/").status_code == 404
    assert owners_of(pulse_user) == {alice}
    assert can_log_in(broker, guarded, name, password)


# Case P2


def test_a_pulse_user_is_handed_over_with_consent_and_a_new_password(guarded, name, broker, alice, bob):
    """Alice creates a Pulse user, makes Bob its only owner, and keeps the password."""
    program = Program(alice)
    password = program.post("pulse-users/", {"username": name}).json()["password"]
    asked = program.patch(f"pulse-users/{name}/", {"owners": ["bob@example.org"]}).json()
    assert (asked["owners"], asked["invited"]) == (["alice@example.org"], ["bob@example.org"])
    [row] = Program(bob).get("invitations/").json()
    Program(bob).post(f"invitations/{row['uuid']}/accept/")
    handed_over = program.patch(f"pulse-users/{name}/", {"owners": ["bob@example.org"]}).json()
    assert handed_over["owners"] == ["bob@example.org"]
    assert handed_over["password_exposed_at"]
    mail = compose(Notification.objects.get(recipient=bob.email, kind="owner-left"))
    assert mail.subject == f"[Guardian] alice@example.org no longer owns {name}: set a new password"
    client = Visitor(bob).client
    page = client.get(f"/pulse-users/{name}/")
    assert "An owner left or was deactivated on" in page.text
    assert re.search(r'name="close_connections"[^>]*>', page.text)
    assert not re.search(r'name="close_connections"[^>]* checked', page.text)  # nothing is closed without a tick
    client.post(f"/pulse-users/{name}/password/", {"close_connections": "on"})
    wait_until(lambda: not can_log_in(broker, guarded, name, password))
    assert "An owner left or was deactivated on" not in client.get(f"/pulse-users/{name}/").text
