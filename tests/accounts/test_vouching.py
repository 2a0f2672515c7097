"""Access to the broker: granted by owners, operators or rules, and withdrawn."""

from datetime import timedelta
from functools import partial

import pytest
from django.core.exceptions import PermissionDenied, ValidationError
from django.db import connection
from django.utils import timezone

from accounts import signals
from accounts.access import vouching
from accounts.access.tokens import create_token
from accounts.access.vouching import (
    NotVouched,
    apply_rules,
    may_vouch,
    request_vouching,
    require_vouched,
    vouch,
)
from accounts.models import AuthToken, Owner, PulseUser, Vouching
from accounts.pulse_users.creation import create_pulse_user
from accounts.pulse_users.withdrawal import withdraw
from accounts.signing_in.owners import get_or_create_owner, mark_address_verified
from core.refusals import Refusal
from tests.conftest import Amqp
from tests.support.toolbox import in_parallel, url_for

pytestmark = pytest.mark.usefixtures("transactional_db")


@pytest.fixture
def newcomer(transactional_db):
    return Owner.objects.create_user("alice@example.org")


@pytest.fixture
def signals_sent():
    """Collect the arguments of sent signals, and whether a transaction was open."""
    sent = []

    def collect(sender, **what):
        what.pop("signal")
        sent.append({**what, "in a transaction": connection.in_atomic_block})

    signals.vouched.connect(collect)
    signals.vouch_requested.connect(collect)
    yield sent
    signals.vouched.disconnect(collect)
    signals.vouch_requested.disconnect(collect)


@pytest.fixture
def names(name):
    return [f"{name}-{owner}" for owner in ("alone", "shared")]


def records(owner):
    return [(record.vouched, record.by, record.reason) for record in owner.vouchings.order_by("id")]


def test_operators_vouch_and_owners_if_the_setting_allows(newcomer, bob, operator, settings):
    from django.contrib.auth.models import AnonymousUser

    everybody = [AnonymousUser(), newcomer, bob, operator]
    assert [may_vouch(visitor) for visitor in everybody] == [False, False, False, True]
    with pytest.raises(PermissionDenied):
        vouch(newcomer, bob)
    assert not Vouching.objects.exists()
    settings.GUARDIAN_OWNERS_MAY_VOUCH = True
    assert [may_vouch(visitor) for visitor in everybody] == [False, False, True, True]


def test_unvouched_and_deactivated_owners_are_refused_with_the_reason(newcomer, bob):
    with pytest.raises(NotVouched, match=r"alice@example\.org has no access .* Request access on the page Access"):
        require_vouched(newcomer)
    bob.is_active = False
    with pytest.raises(NotVouched, match="is deactivated"):
        require_vouched(bob)


def test_vouching_is_recorded_notified_and_ends_the_request(newcomer, operator, signals_sent):
    request_vouching(newcomer, "I build things")
    vouch(newcomer, operator, "  he builds\nthings ")
    newcomer.refresh_from_db()
    assert (newcomer.vouched, newcomer.vouch_requested_at, newcomer.vouch_request) == (True, None, "")
    assert records(newcomer) == [(True, operator, "he builds things")]
    assert signals_sent == [
        {"owner": newcomer, "reason": "I build things", "in a transaction": True},
        {"owner": newcomer, "by": operator, "in a transaction": True},
    ]


def test_vouching_twice_is_recorded_and_notified_once(newcomer, operator, signals_sent):
    stale = Owner.objects.get(pk=newcomer.pk)
    vouch(newcomer, operator)
    vouch(stale, operator)
    assert len(records(newcomer)) == 1
    assert len(signals_sent) == 1
    assert stale.vouched


@pytest.mark.parametrize("reason", ["x" * 301, "NUL\0", "half \ud800 a character"])
def test_an_invalid_reason_is_refused(newcomer, operator, reason):
    with pytest.raises(ValidationError):
        vouch(newcomer, operator, reason)
    assert not Vouching.objects.exists()


def test_access_can_be_requested_once_a_day_and_only_without_access(newcomer, bob, signals_sent):
    with pytest.raises(Refusal, match="have access already"):
        request_vouching(bob, "again")
    request_vouching(newcomer, "first")
    with pytest.raises(Refusal, match="within the last day"):
        request_vouching(newcomer, "second")
    Owner.objects.update(vouch_requested_at=timezone.now() - timedelta(days=1, seconds=1))
    request_vouching(newcomer, "third")
    assert [message["reason"] for message in signals_sent] == ["first", "third"]


@pytest.mark.parametrize("reason", ["", " \n ", "x" * 501, "NUL\0"])
def test_a_request_needs_a_valid_reason(newcomer, signals_sent, reason):
    with pytest.raises(ValidationError):
        request_vouching(newcomer, reason)
    assert signals_sent == []


def test_an_address_of_a_vouched_domain_is_vouched_once(newcomer, settings, signals_sent):
    settings.GUARDIAN_VOUCHED_DOMAINS = ["example.org"]
    for _ in range(2):
        apply_rules(newcomer, address="Alice@Example.ORG", groups=None)
    assert records(newcomer) == [(True, None, "By rule: an address at example.org")]
    assert len(signals_sent) == 1
    assert newcomer.vouched


OF_OTHER_DOMAINS = [None, "alice@sub.example.org", "alice@notexample.org", '"a@example.org"@evil.com']


@pytest.mark.parametrize("address", OF_OTHER_DOMAINS)
def test_an_address_of_another_domain_is_not_vouched(newcomer, settings, address):
    settings.GUARDIAN_VOUCHED_DOMAINS = ["example.org"]
    apply_rules(newcomer, address=address, groups=None)
    assert records(newcomer) == []
    assert not newcomer.vouched


def test_a_member_of_a_vouched_group_has_access_until_leaving_it_unless_a_person_vouched(newcomer, operator, settings):
    settings.OIDC_VOUCHED_GROUPS = ["builders", "testers"]
    for others in ("supertesters", ["supertesters", "Testers"]):
        apply_rules(newcomer, address=None, groups=others)
        assert not newcomer.vouched
    apply_rules(newcomer, address=None, groups=["others", "testers"])
    assert newcomer.vouched
    apply_rules(newcomer, address=None, groups=["builders"])
    apply_rules(newcomer, address=None, groups=None)  # sign-in by code: groups are unknown
    assert newcomer.vouched
    apply_rules(newcomer, address=None, groups=["others"])
    apply_rules(newcomer, address=None, groups=[])
    assert not newcomer.vouched
    apply_rules(newcomer, address=None, groups="builders")
    assert [record[0] for record in records(newcomer)] == [True, False, True]
    assert [record[2] for record in records(newcomer)][:2] == [
        "By rule: a member of the group testers",
        "By rule: no longer a member of a group with access",
    ]
    vouch(newcomer, operator)
    apply_rules(newcomer, address=None, groups=[])
    assert newcomer.vouched


def test_an_operator_who_leaves_a_vouched_group_keeps_access(newcomer, settings):
    settings.OIDC_VOUCHED_GROUPS = ["builders"]
    apply_rules(newcomer, address=None, groups=["builders"])
    Owner.objects.update(is_staff=True)
    apply_rules(newcomer, address=None, groups=[])
    assert newcomer.vouched


def test_withdrawn_access_overrides_rules_until_somebody_vouches(newcomer, operator, settings):
    settings.GUARDIAN_VOUCHED_DOMAINS = ["example.org"]
    settings.OIDC_VOUCHED_GROUPS = ["builders"]
    apply_rules(newcomer, address="alice@example.org", groups=["builders"])
    withdraw(newcomer, operator)
    apply_rules(newcomer, address="alice@example.org", groups=["builders"])
    assert not newcomer.vouched
    vouch(newcomer, operator)
    assert newcomer.vouched
    withdraw(newcomer, operator)
    operator.delete()
    apply_rules(newcomer, address="alice@example.org", groups=["builders"])
    assert not newcomer.vouched


def test_access_withdrawn_by_an_operator_is_not_restored_by_owners(newcomer, bob, operator, settings):
    settings.GUARDIAN_OWNERS_MAY_VOUCH = True
    vouch(newcomer, bob)
    withdraw(newcomer, operator)
    with pytest.raises(PermissionDenied, match="An operator withdrew the access"):
        vouch(newcomer, bob)
    assert [record[0] for record in records(newcomer)] == [True, False]


def test_withdrawn_access_prevents_new_pulse_users_and_tokens_only(guarded, bob, operator, names, management):
    create_pulse_user(names[0], [bob])
    create_token(bob, "nightly")
    withdraw(bob, operator, reason="left the project")
    assert records(bob) == [(False, operator, "left the project")]
    stale = Owner.objects.get(pk=bob.pk)
    stale.vouched = True  # like a page that was opened before
    for make in (lambda: create_pulse_user(names[1], [stale]), lambda: create_token(stale, "new")):
        with pytest.raises(NotVouched):
            make()
    assert [user.username for user in PulseUser.objects.all()] == [names[0]]
    assert management.user(names[0]).name == names[0]
    assert AuthToken.objects.count() == 1


def test_only_operators_withdraw_access_and_not_from_operators(newcomer, bob, operator, settings):
    settings.GUARDIAN_OWNERS_MAY_VOUCH = True
    vouch(newcomer, bob)
    with pytest.raises(PermissionDenied, match="Only operators"):
        withdraw(newcomer, bob, remove=True)
    with pytest.raises(PermissionDenied, match="is an operator"):
        withdraw(operator, operator)
    assert Owner.objects.filter(vouched=True).count() == 3


def test_withdrawing_access_can_remove_tokens_and_pulse_users(guarded, broker, bob, operator, names, management):
    carol, gone = (Owner.objects.create_user(f"{who}@example.org", vouched=True) for who in ("carol", "gone"))
    pulse_user, password = create_pulse_user(names[0], [bob])
    pulse_user.owners.add(gone)
    Owner.objects.filter(pk=gone.pk).update(is_active=False)  # who can't sign in, so nobody could change the password
    shared, _ = create_pulse_user(names[1], [bob, carol])
    create_token(bob, "bob's")
    create_token(carol, "carol's")
    Amqp(url_for(broker, names[0], password), guarded).queue(f"queue/{names[0]}/q")
    withdraw(bob, operator, remove=True)
    assert list(PulseUser.objects.all()) == [shared]
    assert list(shared.owners.all()) == [carol]
    assert [token.name for token in AuthToken.objects.all()] == ["carol's"]
    assert {user.name for user in management.users()} & set(names) == {names[1]}
    assert management.list_queues(guarded, {"columns": "name"}) == []


def test_concurrent_withdrawals_leave_no_pulse_user_without_an_owner(guarded, bob, operator, settings):
    settings.RABBITMQ_MANAGEMENT_URL = "http://guest:guest@127.0.0.1:1"
    carol = Owner.objects.create_user("carol@example.org", vouched=True)
    pulse_users = [PulseUser.objects.create(username=f"both-{number}", ready=True) for number in range(5)]
    for pulse_user in pulse_users:
        pulse_user.owners.set([bob, carol])
    outcomes = in_parallel(*(partial(withdraw, owner, operator, remove=True) for owner in (bob, carol)))
    assert not [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    for pulse_user in pulse_users:
        pulse_user.refresh_from_db()
        assert (pulse_user.owners.count(), pulse_user.removing_since is not None) == (1, True)


# The admin


def test_operators_vouch_in_the_admin_by_an_action_and_not_by_the_form(admin, newcomer, operator):
    form = {"email": newcomer.email, "full_name": "Alice", "is_active": "on", "vouched": "on"}
    assert admin.post(f"/admin/accounts/owner/{newcomer.pk}/change/", form).status_code == 302
    newcomer.refresh_from_db()
    assert (newcomer.full_name, newcomer.vouched) == ("Alice", False)
    chosen = {"action": "vouch_for", "_selected_action": [newcomer.pk], "post": "yes"}
    admin.post("/admin/accounts/owner/", chosen)
    assert records(newcomer)[0][:2] == (True, operator)


@pytest.mark.parametrize("reason", ["By rule: no mining", "  by RULE:\tno mining", "By rule:"])
def test_a_reason_cannot_look_like_a_rules(bob, operator, reason):
    for say in (vouching.vouch, vouching.unvouch):
        with pytest.raises(ValidationError, match="can't begin with"):
            say(bob, operator, reason)
    assert not Vouching.objects.exists()


def test_an_owner_who_never_signed_in_is_not_found(operator, bob):
    typed = get_or_create_owner("typed@example.org")
    assert vouching.find_owner(" TYPED@example.org ") is None
    assert vouching.find_owner("nobody@example.org") is None
    assert vouching.find_owner("ops@example.org") == operator
    mark_address_verified(typed)
    assert vouching.find_owner("typed@example.org") == typed
    Owner.objects.filter(pk=bob.pk).update(last_login=timezone.now())
    assert vouching.find_owner(bob.email) == bob
