"""Pulse users: created, changed, adopted and removed on the broker and in the database together, or not at all."""

import contextlib
import secrets
import threading
import time
import uuid
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import pika
import pytest
from django.core.exceptions import PermissionDenied, ValidationError
from django.core.signing import BadSignature, SignatureExpired
from django.db import connection, transaction
from django.utils import timezone

from accounts import signals
from accounts.access.vouching import NotVouched
from accounts.models import UNCHANGED, Invitation, NotificationAddress, Owner, PulseUser
from accounts.pulse_users import addresses, removal
from accounts.pulse_users.addresses import (
    add_address,
    address_for_token,
    confirm_address,
    confirmation_token,
    remove_address,
    resend_confirmation,
    set_addresses,
)
from accounts.pulse_users.creation import adopt_pulse_user, adoptable, create_pulse_user
from accounts.pulse_users.passwords import connections_of, rotate_password
from accounts.pulse_users.removal import Belongings, RemovalPending, belongings_of
from accounts.pulse_users.thresholds import set_thresholds
from accounts.pulse_users.validation import NameRefused, check_name, permissions_of
from accounts.pulse_users.withdrawal import withdraw
from core import locks, removals
from core.broker import Clients
from core.limits import RateLimit
from core.models import Lease, Removal
from core.refusals import Refusal
from rabbit.amqp import Session, Sessions
from rabbit.errors import BrokerError, BrokerUnavailable, NotOnBroker, Refused
from rabbit.fetching import Fetch
from rabbit.management import Management
from rabbit.permissions import FULL_ACCESS, NO_ACCESS, Permissions, for_pulse_user, in_words
from tests.conftest import Amqp
from tests.support.api import Program
from tests.support.counting import counted_requests
from tests.support.toolbox import (
    AWAY,
    Killed,
    call_after,
    calling_first,
    can_log_in,
    finish_removals,
    in_background,
    in_parallel,
    mark_for_removal,
    queue_names,
    raising,
    remove_as_a_person,
    url_for,
    wait_until,
)

pytestmark = pytest.mark.usefixtures("guarded")


@pytest.fixture
def removed():
    """Collect (username, in a transaction, row exists) of each ``pulse_user_removed`` signal."""
    collected = []

    def collect(sender, pulse_user, **rest):
        collected.append(
            (pulse_user.username, connection.in_atomic_block, PulseUser.objects.filter(pk=pulse_user.pk).exists())
        )

    signals.pulse_user_removed.connect(collect)
    yield collected
    signals.pulse_user_removed.disconnect(collect)


@pytest.fixture
def confirmation_requests():
    """Collect the addresses of each ``address_added`` signal."""
    collected = []

    def collect(sender, address, **rest):
        assert connection.in_atomic_block
        collected.append(address.email)

    signals.address_added.connect(collect)
    yield collected
    signals.address_added.disconnect(collect)


@pytest.fixture
def pulse_user(alice, name):
    return create_pulse_user(name, [alice])[0]


@contextmanager
def paused_at(place, name, call):
    """Make a call in the background that pauses at a function until the block ends. Give its future."""
    is_paused, may_continue = threading.Event(), threading.Event()

    def pause():
        if not is_paused.is_set():
            is_paused.set()
            assert may_continue.wait(30)

    with calling_first(place, name, pause):
        future = in_background(call)
        assert is_paused.wait(20)
        try:
            yield future
        finally:
            may_continue.set()
            wait_until(future.done)


def as_user(broker, vhost, name, password):
    return Amqp(url_for(broker, name, password), vhost)


# Creation


@pytest.mark.parametrize("chosen", [None, "correct horse battery", "päßwörter: ✓/@%&?#"])
def test_a_new_pulse_user_has_the_permissions_of_its_name_and_exactly_the_chosen_password(
    alice, name, broker, guarded, management, chosen
):
    pulse_user, password = create_pulse_user(name, [alice], chosen)
    assert (pulse_user.ready, list(pulse_user.owners.all())) == (True, [alice])
    assert management.permissions_of(name) == {guarded: for_pulse_user(name)}
    assert password == chosen or not chosen
    assert can_log_in(broker, guarded, name, password)
    assert not can_log_in(broker, guarded, name, password + " ")


@pytest.mark.parametrize(
    ("password", "error_text"),
    [
        ("", "too short"),
        ("sh0rt", "too short"),
        ("password123", "too common"),
        ("8317409283", "entirely numeric"),
        ("NAME", "too similar to the username"),
        ("guest\0and another", "contains a control character"),
        ("correct horse\nbattery", "contains a control character"),
        ("half \ud800 a character", "contains a control character"),
        ("x1" * 200, "too long"),
    ],
)
def test_an_invalid_password_is_refused_and_nothing_is_created(alice, name, management, password, error_text):
    password = password.replace("NAME", name)
    with pytest.raises(ValidationError, match=error_text) as error:
        create_pulse_user(name, [alice], password)
    assert list(error.value.message_dict) == ["password"]
    assert not password or password not in str(error.value)
    assert not PulseUser.objects.exists()
    assert name not in {user.name for user in management.users()}


@pytest.mark.parametrize("reserved", ["Guardian", "Admin", "ROOT", "watch.dog", "Watch.Dog", "ab" * 16])
def test_reserved_names_and_guardians_own_are_refused(alice, settings, reserved):
    settings.GUARDIAN_RESERVED_USERS = ["admin", "Root"]
    settings.RABBIT_URL = "amqp://watch%2Edog:word@rabbit"
    settings.RABBITMQ_MANAGEMENT_URL = "http://guardian:word@127.0.0.1:1"
    for refuse in (check_name, lambda username: create_pulse_user(username, [alice])):
        with pytest.raises(NameRefused, match="reserved"):
            refuse(reserved)
    assert not PulseUser.objects.exists()


@pytest.mark.parametrize(
    ("entries", "username", "is_reserved"),
    [
        (["^ops-"], "ops-builds", True), (["^ops-"], "OPS-builds", True), (["^ops-"], "my-ops-builds", False),
        (["svc-.*"], "svc-mail", True), (["^(root|admin)$"], "admin", True), (["^(root|admin)$"], "admins", False),
        (["guest", "^team[0-9]+"], "team7", True), (["a.b"], "a.b", True), (["a.b"], "axb", False),
        ([], "guest", False),
        (["admin"], "admins", False), (["admin"], "the-admin", False),
    ],
)  # fmt: skip
def test_reserved_users_are_names_and_expressions(db, settings, entries, username, is_reserved):
    settings.GUARDIAN_RESERVED_USERS = entries
    with pytest.raises(NameRefused, match="reserved") if is_reserved else contextlib.nullcontext():
        check_name(username)


def test_a_password_of_ones_own_is_refused_if_passwords_must_be_generated(alice, name, settings):
    settings.GUARDIAN_REQUIRE_GENERATED_PASSWORDS = True
    with pytest.raises(ValidationError) as error:
        create_pulse_user(name, [alice], "a password of my own")
    assert list(error.value.message_dict) == ["password"]
    pulse_user, password = create_pulse_user(name, [alice])
    assert len(password) == 32
    with pytest.raises(ValidationError, match="Passwords are generated"):
        rotate_password(pulse_user, "a password of my own")
    assert len(rotate_password(pulse_user)) == 32


def test_a_pulse_user_needs_vouched_owners(alice, name):
    stranger = Owner.objects.create_user("stranger@example.org")
    with pytest.raises(NotVouched):
        create_pulse_user(name, [alice, stranger])
    with pytest.raises(Refusal, match="at least one owner"):
        create_pulse_user(name, [])
    assert not PulseUser.objects.exists()


@pytest.mark.parametrize(("removing_since", "error_text"), [(None, "is taken"), (timezone.now(), "is being removed")])
def test_a_name_of_an_existing_pulse_user_is_refused(alice, name, removing_since, error_text):
    PulseUser.objects.create(username=name, ready=True, removing_since=removing_since).owners.add(alice)
    for refuse in (check_name, lambda username: create_pulse_user(username, [alice])):
        with pytest.raises(NameRefused, match=error_text):
            refuse(name)


def test_names_are_case_sensitive(alice, name, management):
    create_pulse_user(name, [alice])
    create_pulse_user(name.upper(), [alice])
    assert {name, name.upper()} <= {user.name for user in management.users()}
    management.delete_user(name.upper())


def test_refused_permissions_undo_the_creation(alice, name, settings, management, confirmation_requests):
    settings.GUARDIAN_PULSE_VHOST = "no-such-vhost"
    with pytest.raises(BrokerError):
        create_pulse_user(name, [alice], notification_emails=["team@example.org"])
    assert not PulseUser.objects.exists()
    assert confirmation_requests == []
    with pytest.raises(NotOnBroker):
        management.user(name)


@pytest.mark.parametrize("lost", ["put_user", "set_permissions"])
def test_a_creation_interrupted_by_an_outage_can_be_finished(alice, bob, name, broker, guarded, broker_proxy, lost):
    with calling_first(Management, lost, lambda: broker_proxy.close_next(1000)), pytest.raises(BrokerUnavailable):
        create_pulse_user(name, [alice])
    assert not PulseUser.objects.get().ready
    broker_proxy.close_next(0)
    with pytest.raises(NameRefused, match="choose another name"):
        create_pulse_user(name, [bob])
    _, password = create_pulse_user(name, [alice])
    assert PulseUser.objects.get().ready
    assert can_log_in(broker, guarded, name, password)


@pytest.mark.parametrize("step", ["put_user", "set_permissions"])
@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
def test_a_killed_creation_is_finished_by_repeating_it(alice, name, broker, guarded, step, done):
    with raising(Management, step, Killed, after=done), pytest.raises(Killed):
        create_pulse_user(name, [alice])
    assert not PulseUser.objects.get().ready
    check_name(name)
    _, password = create_pulse_user(name, [alice])
    assert PulseUser.objects.get().ready
    as_user(broker, guarded, name, password).queue(f"queue/{name}/builds")


def test_creating_a_pulse_user_again_that_the_broker_lost_takes_it_from_no_owner(alice, bob, name, management):
    pulse_user, _ = create_pulse_user(name, [alice, bob])
    management.delete_user(name)
    with raising(Management, "set_permissions", Refused("refused", status=400, reason="refused")):
        with pytest.raises(Refused):
            rotate_password(pulse_user)
        with pytest.raises(Refused):
            create_pulse_user(name, [bob], by=bob)
    with pytest.MonkeyPatch.context() as patched:
        call_after(patched, Management, "put_user", lambda: pulse_user.owners.remove(bob))
        with pytest.raises(ValidationError, match="You were removed"):
            create_pulse_user(name, [bob], by=bob)
    assert set(pulse_user.owners.all()) == {alice}
    pulse_user.owners.add(bob)
    assert create_pulse_user(name, [bob, alice], by=bob)[0] == pulse_user
    assert set(pulse_user.owners.all()) == {alice, bob}
    assert not Invitation.objects.exists()


def test_a_creation_whose_addresses_are_refused_is_undone(alice, name, management, monkeypatch):
    monkeypatch.setattr(addresses, "REQUEST_LIMIT", RateLimit("requests to confirm this address", 1, 3600))
    other = PulseUser.objects.create(username="other", ready=True)
    add_address(other, "team@example.org", alice)
    with pytest.raises(ValidationError, match="the limit is 1"):
        create_pulse_user(name, [alice], notification_emails=["team@example.org"])
    assert PulseUser.objects.get() == other
    with pytest.raises(NotOnBroker):
        management.user(name)


@pytest.mark.parametrize("unfinished", [True, False])
def test_a_creation_does_not_take_over_a_manual_rabbitmq_user(alice, name, management, guarded, unfinished):
    if unfinished:
        PulseUser.objects.create(username=name).owners.add(alice)
    management.put_user(name, "theirs", ["monitoring"])
    management.set_permissions(guarded, name, FULL_ACCESS)
    with pytest.raises(NameRefused, match="on the broker already"):
        create_pulse_user(name, [alice])
    assert management.permissions_of(name) == {guarded: FULL_ACCESS}
    assert management.user(name).tags == {"monitoring"}
    assert list(PulseUser.objects.values_list("ready", flat=True)) == [False] * unfinished


def test_rotation_and_removal_do_not_take_over_a_manual_rabbitmq_user(alice, name, management, guarded, removed):
    pulse_user = PulseUser.objects.create(username=name)
    pulse_user.owners.add(alice)
    management.put_user(name, "theirs", ["monitoring"])
    management.declare_queue(guarded, f"queue/{name}/theirs")
    with pytest.raises(ValidationError, match="created manually"):
        rotate_password(pulse_user)
    remove_as_a_person(pulse_user)
    assert management.user(name).tags == {"monitoring"}
    assert queue_names(management, guarded) == {f"queue/{name}/theirs"}
    assert not PulseUser.objects.exists()
    assert removed == []  # nothing was removed


@pytest.mark.parametrize("same_owner", [True, False], ids=["same owner", "two owners"])
def test_one_of_two_concurrent_creations_succeeds(alice, bob, name, broker, guarded, same_owner):
    owners = [alice, alice if same_owner else bob]
    answers = in_parallel(*(partial(create_pulse_user, name, [owner]) for owner in owners))
    [won] = [answer for answer in answers if isinstance(answer, tuple)]
    [lost] = [answer for answer in answers if isinstance(answer, NameRefused)]
    assert PulseUser.objects.get() == won[0]
    assert won[0].ready
    assert can_log_in(broker, guarded, name, won[1])
    assert won[1] not in str(lost)


def test_a_pulse_user_removed_during_its_creation_does_not_exist(alice, name, management):
    def remove():
        mark_for_removal(*PulseUser.objects.all())
        assert finish_removals() == 0

    with calling_first(Management, "set_permissions", remove), pytest.raises(NameRefused, match="by another request"):
        create_pulse_user(name, [alice])
    assert finish_removals() == 1
    assert not PulseUser.objects.exists()
    with pytest.raises(NotOnBroker):
        management.user(name)


# The password


def test_rotating_a_password_keeps_permissions_tags_and_connections_unless_asked_to_close_them(
    alice, name, broker, guarded, management
):
    pulse_user, old = create_pulse_user(name, [alice])
    management.put_user(name, old, ["monitoring"])
    before = management.permissions_of(name)
    live = as_user(broker, guarded, name, old)
    new = rotate_password(pulse_user)
    live.queue(f"queue/{name}/builds")
    assert (can_log_in(broker, guarded, name, old), can_log_in(broker, guarded, name, new)) == (False, True)
    assert management.user(name).tags == {"monitoring"}
    assert management.permissions_of(name) == before
    live.queue(f"queue/{name}/more")
    wait_until(lambda: connections_of(pulse_user))  # the management API lists a connection after some seconds
    [known] = connections_of(pulse_user)
    assert known.vhost == guarded
    rotate_password(pulse_user, close_connections=True)
    with pytest.raises(pika.exceptions.ConnectionClosedByBroker, match="password of this Pulse user was changed"):
        live.connection.process_data_events(10)


def test_a_failure_to_close_connections_is_reported_without_the_password(pulse_user):
    with (
        raising(Management, "close_connections_of", BrokerUnavailable("nobody answers")),
        pytest.raises(BrokerUnavailable, match="The password was changed") as error,
    ):
        rotate_password(pulse_user, "a password of my own 7", close_connections=True)
    assert "of my own" not in str(error.value)


def test_rotation_recreates_a_lost_rabbitmq_user_even_if_it_is_killed(pulse_user, name, broker, guarded, management):
    management.delete_user(name)
    password = rotate_password(pulse_user)
    as_user(broker, guarded, name, password).queue(f"queue/{name}/builds")
    management.delete_user(name)
    with raising(Management, "set_permissions", Killed), pytest.raises(Killed):
        rotate_password(pulse_user)
    assert not PulseUser.objects.get().ready
    password = rotate_password(pulse_user)
    assert PulseUser.objects.get().ready
    as_user(broker, guarded, name, password).queue(f"queue/{name}/builds")


def test_a_pulse_user_removed_during_rotation_is_not_recreated(pulse_user, name, management):

    def remove():
        with pytest.raises(RemovalPending, match="Guardian continues"):
            remove_as_a_person(PulseUser.objects.get())

    with calling_first(Management, "put_user", remove), pytest.raises(ValidationError, match="by another request"):
        rotate_password(pulse_user)
    with pytest.raises(ValidationError, match="being removed"):
        rotate_password(pulse_user)
    assert finish_removals() == 1
    assert not PulseUser.objects.exists()
    assert name not in {user.name for user in management.users()}


# Locking


def test_one_of_two_concurrent_rotations_is_refused(pulse_user, alice, name, broker, guarded):
    with paused_at(Management, "put_user", lambda: rotate_password(pulse_user)) as slow:
        with pytest.raises(ValidationError, match="right now"):
            rotate_password(PulseUser.objects.get())
        with pytest.raises(NameRefused, match="is taken"):
            create_pulse_user(name, [alice])
    assert can_log_in(broker, guarded, name, slow.result())


def test_a_locked_pulse_user_cannot_be_adopted(alice, name, management):
    management.put_user(name, "by hand")
    with locks.lock(name), pytest.raises(NameRefused, match="right now"):
        adopt_pulse_user(name, [alice], Owner.objects.create_superuser("ops@example.org"))
    assert not PulseUser.objects.exists()


def test_a_removal_of_a_locked_pulse_user_continues_later_and_page_and_api_say_so(alice, name, client, management):
    create_pulse_user(name, [alice])
    client.force_login(alice)
    with locks.lock(name):
        with pytest.raises(RemovalPending, match="is being removed, and Guardian continues"):
            remove_as_a_person(PulseUser.objects.get())
        assert finish_removals() == 0
        assert management.user(name)
        PulseUser.objects.update(removing_since=None)
        answer = client.post(f"/pulse-users/{name}/delete/", {"typed": name}, follow=True)
        assert "is being deleted. Guardian completes the deletion." in answer.text
        PulseUser.objects.update(removing_since=None)
        assert Program(alice).delete(f"pulse-users/{name}/").status_code == 202
    assert finish_removals() == 1
    assert not PulseUser.objects.exists()


@pytest.mark.parametrize("place", ["_remove_from_broker", "_delete"])
def test_a_removal_that_lost_its_lock_keeps_the_next_owners_pulse_user(
    alice, bob, name, amqp, guarded, management, place
):
    pulse_user, _ = create_pulse_user(name, [alice])
    amqp.queue(f"queue/{name}/builds", 1)
    mark_for_removal(*PulseUser.objects.all())
    with paused_at(removal, place, finish_removals) as slow:
        Lease.objects.filter(name=locks.lease_name(name)).delete()  # as if the lock had expired
        remove_as_a_person(pulse_user)
        made, _ = create_pulse_user(name, [bob])
        amqp.queue(f"queue/{name}/builds", 7)
    assert slow.result() == 0
    assert PulseUser.objects.get() == made
    assert management.user(name)
    assert queue_names(management, guarded) == {f"queue/{name}/builds"}


def test_a_removal_that_loses_its_lock_stops_deleting_queues(alice, name, guarded, management, monkeypatch):
    create_pulse_user(name, [alice])
    for number in range(3):
        management.declare_queue(guarded, f"queue/{name}/{number}")
    mark_for_removal(*PulseUser.objects.all())
    locked = Lease.objects.filter(name=locks.lease_name(name))
    call_after(monkeypatch, Fetch, "delete_queue", lambda: locked.update(holder=uuid.uuid4()))
    assert finish_removals() == 0
    assert len(queue_names(management, guarded)) == 2


def test_a_failed_creation_keeps_the_mark_of_a_withdrawal(alice, name, monkeypatch):
    operator = Owner.objects.create_superuser("ops@example.org")

    def unavailable(self, *arguments):
        raise BrokerUnavailable("no answer in time", timed_out=True)

    def interfere(self, *arguments):
        monkeypatch.setattr(Management, "delete_user", unavailable)
        withdraw(alice, operator, remove=True)
        raise BrokerUnavailable("no answer in time", timed_out=True)

    monkeypatch.setattr(Management, "set_permissions", unavailable)
    monkeypatch.setattr(Management, "delete_user", interfere)
    with pytest.raises(BrokerUnavailable):
        create_pulse_user(name, [alice])
    monkeypatch.undo()  # the fixture deletes the remaining user
    assert PulseUser.objects.get().removing_since is not None


def test_a_failed_creation_that_lost_its_lock_undoes_nothing(alice, name, broker, guarded, monkeypatch):
    real = Management.put_user

    def lost(self, *arguments):
        monkeypatch.setattr(Management, "put_user", real)
        Lease.objects.filter(name=locks.lease_name(name)).delete()
        made.append(create_pulse_user(name, [alice]))
        raise BrokerUnavailable("no answer in time", timed_out=True)

    made = []
    monkeypatch.setattr(Management, "put_user", lost)
    with pytest.raises(BrokerUnavailable):
        create_pulse_user(name, [alice])
    assert PulseUser.objects.get().ready
    assert can_log_in(broker, guarded, name, made[0][1])


# Adoption


@pytest.mark.parametrize(
    ("tags", "error_text"),
    [(["administrator"], "an administrator"), (["policymaker", "management"], "tag policymaker")],
)
def test_an_adopted_pulse_user_with_a_powerful_tag_is_not_changed_or_removed(
    alice, operator, name, guarded, management, tags, error_text
):
    management.put_user(name, "by hand", ["management", "monitoring"])
    management.declare_queue(guarded, f"queue/{name}/builds")
    pulse_user = adopt_pulse_user(name, [alice], operator)
    management.put_user(name, "by hand", tags)
    with pytest.raises(ValidationError, match=error_text):
        rotate_password(pulse_user)
    with pytest.raises(PermissionDenied, match=error_text):
        remove_as_a_person(pulse_user)
    assert PulseUser.objects.get().removing_since is None
    mark_for_removal(*PulseUser.objects.all())  # as a withdrawal does
    assert finish_removals() == 0
    assert management.user(name).tags == set(tags)
    assert queue_names(management, guarded) == {f"queue/{name}/builds"}
    PulseUser.objects.all().delete()
    assert name not in adoptable()
    with pytest.raises(NameRefused, match=error_text):
        adopt_pulse_user(name, [alice], operator)


def test_guardians_own_rabbitmq_user_is_not_changed_or_removed(alice, operator, name, guarded, management, settings):
    management.put_user(name, "word")
    pulse_user = adopt_pulse_user(name, [alice], operator)
    management.put_user(name, "word", ["administrator"])
    host = settings.RABBITMQ_MANAGEMENT_URL.rpartition("@")[2]
    settings.RABBITMQ_MANAGEMENT_URL = f"http://{name}:word@{host}"
    with pytest.raises(ValidationError, match="Guardian itself"):
        rotate_password(pulse_user)
    with pytest.raises(PermissionDenied, match="Guardian itself"):
        remove_as_a_person(pulse_user)
    assert management.user(name)


def test_an_adopted_pulse_user_keeps_password_permissions_and_tags(
    alice, bob, operator, name, broker, guarded, management
):
    management.put_user(name, "made by hand", ["monitoring"])
    by_hand = Permissions("^made-by-hand", ".*", "")
    management.set_permissions(guarded, name, by_hand)
    assert name in adoptable()
    pulse_user = adopt_pulse_user(name, [alice, bob], operator)
    assert (pulse_user.ready, set(pulse_user.owners.all())) == (True, {alice, bob})
    assert (pulse_user.warn_length, pulse_user.max_length) == (None, None)
    assert PulseUser.objects.get().ready
    assert management.user(name).tags == {"monitoring"}
    assert permissions_of(pulse_user) == {guarded: by_hand}
    assert can_log_in(broker, guarded, name, "made by hand")
    assert name not in adoptable()


def test_adoption_is_refused_for_unsafe_pulse_users_and_wrong_owners(alice, operator, name, management, guarded):
    stranger = Owner.objects.create_user("stranger@example.org")
    with pytest.raises(PermissionDenied, match="Only operators can adopt"):
        adopt_pulse_user(name, [alice], alice)
    with pytest.raises(NotOnBroker):
        adopt_pulse_user(name, [alice], operator)
    management.put_user(name, "word", ["administrator", "monitoring"])
    with pytest.raises(NameRefused, match="administrator"):
        adopt_pulse_user(name, [alice], operator)
    with pytest.raises(NameRefused, match="Guardian itself"):
        adopt_pulse_user(management.whoami().name, [alice], operator)
    with pytest.raises(NameRefused, match="the character '/'"):
        adopt_pulse_user("../guest", [alice], operator)
    assert not {name, management.whoami().name} & set(adoptable())
    management.put_user(name, "word")
    with pytest.raises(Refusal, match="at least one owner"):
        adopt_pulse_user(name, [], operator)
    with pytest.raises(NotVouched):
        adopt_pulse_user(name, [stranger], operator)
    adopt_pulse_user(name, [alice], operator)
    with pytest.raises(NameRefused, match="is taken"):
        adopt_pulse_user(name, [alice], operator)
    assert PulseUser.objects.count() == 1


def test_an_agents_login_and_an_invalid_name_cannot_be_adopted(alice, operator, create_pulse_user, guarded):
    login = create_pulse_user("f" + secrets.token_hex(16)[1:], exactly=True)
    invalid = create_pulse_user("no name")
    with pytest.raises(NameRefused, match="agent"):
        adopt_pulse_user(login, [alice], operator)
    assert not {login, invalid} & set(adoptable())
    assert not PulseUser.objects.exists()


# Notification addresses


def test_an_address_is_confirmed_by_its_token(alice, name, confirmation_requests):
    pulse_user, _ = create_pulse_user(name, [alice], notification_emails=[" Team@Example.org", "team@example.org"])
    address = pulse_user.notification_addresses.get()
    assert (address.email, address.added_by, address.confirmed_at) == ("team@example.org", alice, None)
    assert confirmation_requests == ["team@example.org"]
    token = confirmation_token(address)
    assert address_for_token(token) == address
    assert address_for_token(token).confirmed_at is None
    confirmed = confirm_address(token)
    assert confirmed.confirmed_at is not None
    assert confirm_address(token).confirmed_at == confirmed.confirmed_at
    resend_confirmation(address)
    assert confirmation_requests == ["team@example.org"]


def test_a_confirmation_can_be_resent_once_an_hour(alice, confirmation_requests, time_machine):
    began = timezone.now()
    time_machine.move_to(began, tick=False)
    pulse_user = PulseUser.objects.create(username="alices", ready=True)
    address = add_address(pulse_user, "team@example.org", alice)
    for minutes in (0, 59):
        time_machine.move_to(began + timedelta(minutes=minutes), tick=False)
        with pytest.raises(ValidationError, match=f"after {began + timedelta(hours=1):%H:%M} UTC"):
            resend_confirmation(address)
    assert confirmation_requests == ["team@example.org"]
    time_machine.move_to(began + timedelta(hours=1, seconds=2), tick=False)
    resend_confirmation(address)
    assert confirmation_requests == ["team@example.org"] * 2


def test_an_address_cannot_be_added_again_within_an_hour(pulse_user, alice, confirmation_requests):
    remove_address(add_address(pulse_user, "team@example.org", alice))
    with pytest.raises(ValidationError, match="less than an hour ago") as error:
        add_address(pulse_user, "Team@example.org", alice)
    assert list(error.value.message_dict) == ["email"]
    with pytest.raises(ValidationError, match="less than an hour ago") as error:
        set_addresses(pulse_user, ["fine@example.org", "team@example.org"], alice)
    assert list(error.value.message_dict) == ["notification_emails"]
    with pytest.raises(ValidationError, match="the same mailbox"):
        set_addresses(pulse_user, ["ops+a@example.org", "ops+b@example.org"], alice)
    assert not pulse_user.notification_addresses.exists()
    add_address(PulseUser.objects.create(username="bobs", ready=True), "team@example.org", alice)
    assert confirmation_requests.count("team@example.org") == 2


def test_an_owner_sends_a_limited_number_of_requests_to_one_mailbox(
    alice, bob, confirmation_requests, monkeypatch, time_machine
):
    time_machine.move_to(timezone.now().replace(minute=30))
    monkeypatch.setattr(addresses, "REQUEST_LIMIT", RateLimit("requests to confirm this address", 2, 3600))
    first, second, third = (PulseUser.objects.create(username=name, ready=True) for name in ("a", "b", "c"))
    for pulse_user in (first, second):
        add_address(pulse_user, "team@example.org", alice)
    with pytest.raises(ValidationError, match="the limit is 2 within an hour"):
        add_address(third, "team+more@example.org", alice)
    add_address(third, "other@example.org", alice)
    add_address(third, "team@example.org", bob)
    assert confirmation_requests.count("team@example.org") == 3


def test_a_rolled_back_address_can_be_added_immediately(pulse_user, alice, confirmation_requests):
    with transaction.atomic():
        add_address(pulse_user, "team@example.org", alice)
        transaction.set_rollback(True)
    assert add_address(pulse_user, "team@example.org", alice).pk


def test_the_token_of_a_removed_address_is_invalid(alice, time_machine):
    time_machine.move_to(timezone.now())
    pulse_user = PulseUser.objects.create(username="alices", ready=True)
    address = add_address(pulse_user, "team@example.org", alice)
    token = confirmation_token(address)
    remove_address(address)
    remove_address(address)
    with pytest.raises(BadSignature):
        confirm_address(token)
    time_machine.shift(timedelta(hours=1, seconds=2))
    add_address(pulse_user, "team@example.org", alice)
    with pytest.raises(BadSignature):
        confirm_address(token)
    assert NotificationAddress.objects.get().confirmed_at is None


def test_a_cut_token_confirms_nothing(pulse_user, alice):
    good = confirmation_token(add_address(pulse_user, "team@example.org", alice))
    with pytest.raises(BadSignature):
        confirm_address(good[:-1])
    assert NotificationAddress.objects.get().confirmed_at is None


def test_a_confirmation_token_expires_after_seven_days(pulse_user, alice, time_machine):
    began = timezone.now()
    token = confirmation_token(add_address(pulse_user, "team@example.org", alice))
    time_machine.move_to(began + timedelta(days=7, seconds=10))
    with pytest.raises(SignatureExpired):
        confirm_address(token)
    time_machine.move_to(began + timedelta(days=6, hours=23))
    assert confirm_address(token).confirmed_at is not None


@pytest.mark.parametrize(
    ("email", "error_text"),
    [
        ("a@exam\u200bple.org", "not an e-mail address"),
        ("Alice@example.org", "belongs to an owner"),
        ("team@example.org", "is already an address"),
    ],
)
def test_an_invalid_address_is_refused_with_the_reason(pulse_user, alice, confirmation_requests, email, error_text):
    add_address(pulse_user, "team@example.org", alice)
    with pytest.raises(ValidationError, match=error_text) as error:
        add_address(pulse_user, email, alice)
    assert list(error.value.message_dict) == ["email"]
    assert confirmation_requests == ["team@example.org"]


def test_a_pulse_user_has_at_most_ten_addresses(pulse_user, alice, confirmation_requests):
    ten = [f"team-{number}@example.org" for number in range(10)]
    set_addresses(pulse_user, ten, alice)
    with pytest.raises(ValidationError, match="10 further addresses"):
        add_address(pulse_user, "one-more@example.org", alice)
    with pytest.raises(ValidationError, match="you gave 11"):
        set_addresses(pulse_user, [*ten, "one-more@example.org"], alice)
    assert confirmation_requests == ten


def test_setting_addresses_keeps_confirmed_ones(pulse_user, alice, confirmation_requests):
    kept = add_address(pulse_user, "kept@example.org", alice)
    add_address(pulse_user, "gone@example.org", alice)
    confirm_address(confirmation_token(kept))
    set_addresses(pulse_user, ["new@example.org", "KEPT@example.org"], alice)
    addresses = {address.email: address.confirmed_at is not None for address in pulse_user.notification_addresses.all()}
    assert addresses == {"kept@example.org": True, "new@example.org": False}
    assert confirmation_requests == ["kept@example.org", "gone@example.org", "new@example.org"]
    with pytest.raises(ValidationError):
        set_addresses(pulse_user, ["fine@example.org", "nonsense"], alice)
    assert pulse_user.notification_addresses.count() == 2


# Thresholds


def test_operators_set_any_thresholds_and_owners_within_the_settings(pulse_user, alice, operator, settings):
    with pytest.raises(PermissionDenied):
        set_thresholds(pulse_user, 6, 9, alice)
    set_thresholds(pulse_user, 100_000, 200_000, operator)
    settings.GUARDIAN_OWNERS_MAX_QUEUE_LENGTH = 50
    set_thresholds(pulse_user, 50_000, 200_000, alice)  # the operator's maximum is unchanged
    with pytest.raises(ValidationError, match="at most 50 messages"):
        set_thresholds(pulse_user, 6, 51, alice)
    set_thresholds(pulse_user, 6, 50, alice)
    set_thresholds(pulse_user, 7, None, alice)
    pulse_user.refresh_from_db()
    assert (pulse_user.warn_length, pulse_user.max_length) == (7, None)


def test_an_omitted_threshold_keeps_its_stored_value(pulse_user, operator):
    PulseUser.objects.update(warn_length=3, max_length=8)
    set_thresholds(pulse_user, UNCHANGED, 9, operator)
    assert (pulse_user.warn_length, pulse_user.max_length) == (3, 9)
    with pytest.raises(ValidationError):
        set_thresholds(pulse_user, 9, UNCHANGED, operator)


@pytest.mark.parametrize("pair", [(0, 5), (-1, 5), (5, 5), (9, 5), (10, None), (None, 5), (5, 2**31), (2**31, 2**32)])
def test_invalid_thresholds_are_refused(pulse_user, operator, pair):
    with pytest.raises(ValidationError):
        set_thresholds(pulse_user, *pair, operator)
    pulse_user.refresh_from_db()
    assert (pulse_user.warn_length, pulse_user.max_length) == (None, None)


# Removal


def test_a_removal_deletes_the_pulse_users_own_queues_and_exchanges(alice, name, broker, guarded, management, removed):
    pulse_user, password = create_pulse_user(name, [alice])
    mine = as_user(broker, guarded, name, password)
    mine.queue(f"queue/{name}/builds", messages=0)
    mine.queue(f"queue/{name}/mine alone", exclusive=True)
    mine.channel.exchange_declare(f"exchange/{name}/events", "topic")
    management.declare_queue(guarded, f"queue/{name}2/builds")
    goes = belongings_of(pulse_user)
    assert goes == Belongings([f"queue/{name}/builds", f"queue/{name}/mine alone"], [f"exchange/{name}/events"])
    remove_as_a_person(pulse_user)
    assert queue_names(management, guarded) == {f"queue/{name}2/builds"}
    assert f"exchange/{name}/events" not in {exchange.name for exchange in management.exchanges(guarded)}
    assert not PulseUser.objects.exists()
    assert removed == [(name, True, True)]
    with pytest.raises(NotOnBroker):
        management.user(name)


def test_a_removal_without_the_broker_changes_nothing(pulse_user, settings, removed):
    settings.RABBITMQ_MANAGEMENT_URL = AWAY
    with pytest.raises(BrokerUnavailable):
        remove_as_a_person(pulse_user)
    with pytest.raises(BrokerUnavailable):
        belongings_of(pulse_user)
    assert PulseUser.objects.get().removing_since is None
    assert removed == []


@pytest.mark.parametrize("step", ["delete_user", "list_queues", "delete_queue", "delete_exchange", "nodes"])
@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
def test_a_killed_removal_is_finished_by_the_task(alice, name, broker, guarded, management, step, done):
    pulse_user, password = create_pulse_user(name, [alice])
    mine = as_user(broker, guarded, name, password)
    for queue in ("one", "two"):
        mine.queue(f"queue/{name}/{queue}")
    mine.channel.exchange_declare(f"exchange/{name}/events", "topic")
    client = {"delete_queue": Fetch, "delete_exchange": Session}.get(step, Management)
    with raising(client, step, Killed, after=done), pytest.raises(Killed):
        remove_as_a_person(pulse_user)
    assert PulseUser.objects.get().removing_since is not None
    finish_removals()
    assert not PulseUser.objects.exists()
    assert name not in {user.name for user in management.users()}
    assert management.list_queues(guarded, {"columns": "name"}) == []
    assert f"exchange/{name}/events" not in {exchange.name for exchange in management.exchanges(guarded)}


def test_a_removal_continues_while_a_queue_is_listed(alice, name, broker, guarded, removed):
    pulse_user, password = create_pulse_user(name, [alice])
    as_user(broker, guarded, name, password).queue(f"queue/{name}/builds")
    with raising(Fetch, "delete_queue", NotOnBroker("not there, or its node is down")):
        with pytest.raises(RemovalPending, match=f"Still there: 'queue/{name}/builds'"):
            remove_as_a_person(pulse_user)
        assert finish_removals() == 0
    assert PulseUser.objects.get().removing_since is not None
    assert removed == []
    assert finish_removals() == 1
    assert removed == [(name, True, True)]


def test_a_removal_does_not_trust_a_list_while_nodes_change(alice, name, monkeypatch):
    from rabbit import snapshot

    pulse_user, _ = create_pulse_user(name, [alice])
    nodes = iter([frozenset({"a", "b"}), frozenset({"a"})])
    with monkeypatch.context() as patch:
        patch.setattr(snapshot, "members", lambda management: (next(nodes), frozenset()))
        with pytest.raises(RemovalPending, match="a node that has just stopped or started"):
            remove_as_a_person(pulse_user)
    assert PulseUser.objects.exists()
    assert finish_removals() == 1
    assert not PulseUser.objects.exists()


def test_a_removal_does_not_trust_a_list_while_the_vhost_is_stopped(alice, name, broker, guarded):
    if broker.node is None:
        pytest.skip("the tests use an external broker")
    pulse_user, _ = create_pulse_user(name, [alice])
    broker.node.eval(f'rabbit_vhost_sup_sup:stop_and_delete_vhost(<<"{guarded}">>)')
    with pytest.raises(RemovalPending, match="a node that has just stopped or started"):
        remove_as_a_person(pulse_user)
    assert PulseUser.objects.exists()
    broker.node.eval(f'rabbit_vhost_sup_sup:start_vhost(<<"{guarded}">>)')
    assert finish_removals() == 1
    assert not PulseUser.objects.exists()


def test_no_transaction_is_open_during_requests_to_the_broker(alice, name, broker, guarded, monkeypatch):
    exchange = Management._exchange
    requests = []

    def look(self, method, path, **options):
        requests.append((method, connection.in_atomic_block))
        return exchange(self, method, path, **options)

    monkeypatch.setattr(Management, "_exchange", look)
    pulse_user, password = create_pulse_user(name, [alice], notification_emails=["team@example.org"])
    as_user(broker, guarded, name, password).queue(f"queue/{name}/builds")
    rotate_password(pulse_user)
    remove_as_a_person(pulse_user)
    assert {method for method, _ in requests} == {"GET", "PUT", "DELETE"}
    assert not any(in_transaction for _, in_transaction in requests)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (NotOnBroker("a node that has just started"), "answered 404"),
        (BrokerUnavailable("nobody answers"), "nobody answers"),
    ],
)
def test_a_failed_removal_keeps_the_row_and_is_retried(pulse_user, name, error, reason):
    with raising(Management, "nodes", error), pytest.raises(RemovalPending, match=reason):
        remove_as_a_person(pulse_user)
    assert Removal.objects.filter(kind="account", name=name).exists()
    assert finish_removals() == 1
    assert not PulseUser.objects.exists()


def test_a_removal_stops_when_its_time_is_over(alice, name, guarded, management, broker):
    create_pulse_user(name, [alice])
    management.declare_queue(guarded, f"queue/{name}/builds")
    mark_for_removal(*PulseUser.objects.all())
    with pytest.raises(removals.Postponed):
        removal._remove(Clients(management, Sessions(broker.amqp_url)), Removal.objects.get(), time.monotonic())
    assert queue_names(management, guarded) == {f"queue/{name}/builds"}
    assert finish_removals() == 1


def test_pulse_users_do_not_delay_the_removals_of_agents(name, guarded, management):
    mark_for_removal(PulseUser.objects.create(username=name))
    management.declare_queue(guarded, "subscription_x")
    Removal.objects.create(kind="queue", vhost=guarded, name="subscription_x")
    seen = []
    with calling_first(
        removal, "_remove_from_broker", lambda: seen.append(Removal.objects.filter(kind="queue").count())
    ):
        assert finish_removals() == 2
    assert seen == [0]


def test_a_removal_of_an_unmarked_pulse_user_is_dropped(alice, name, management):
    create_pulse_user(name, [alice])
    Removal.objects.create(kind="account", name=name)
    assert finish_removals() == 0
    assert not Removal.objects.exists()
    assert PulseUser.objects.get().ready
    assert management.user(name)


def test_a_creation_killed_while_it_is_undone_leaves_nothing(alice, name, management):
    with (
        raising(Management, "set_permissions", Refused("no", status=400, reason="no")),
        raising(Management, "delete_user", Killed),
        pytest.raises(Killed),
    ):
        create_pulse_user(name, [alice])
    assert PulseUser.objects.get().removing_since
    assert finish_removals() == 1
    assert not PulseUser.objects.exists()
    with pytest.raises(NotOnBroker):
        management.user(name)


def test_the_requests_of_a_removal_do_not_grow_with_others_queues(pulse_user, guarded, management):
    for number in range(30):
        management.declare_queue(guarded, f"queue/other-{number}/q")
    with counted_requests() as requests:
        remove_as_a_person(pulse_user)
    assert len(requests) <= 10, requests


def test_a_pulse_user_without_a_vhost_can_be_removed(pulse_user, guarded, management):
    management.delete_vhost(guarded)
    try:
        remove_as_a_person(pulse_user)
    finally:
        management.create_vhost(guarded)
    assert not PulseUser.objects.exists()


# Permissions


def test_custom_permissions_in_words():
    assert in_words(Permissions("", ".*", "builds"), "alice") == [
        "It can't create or delete anything.",
        "It can publish to and bind all queues and exchanges, of all owners.",
        "It can read from and bind to all queues and exchanges whose names match the pattern builds, of all owners.",
    ]
    assert len({*in_words(NO_ACCESS, "alice"), *in_words(FULL_ACCESS, "alice")}) == 6
    unescaped = "^(queue/a-b/.*|exchange/a-b/.*)"
    by_hand = Permissions(unescaped, unescaped, "^(queue/a-b/.*|exchange/.*)")
    assert in_words(by_hand, "a-b") == in_words(for_pulse_user("a-b"), "a-b")
