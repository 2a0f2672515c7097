"""An e-mail address has one form, wherever it is stored or compared."""

import io
import re

import pytest
from allauth.account.models import EmailAddress
from django.core.exceptions import ValidationError
from django.core.management import CommandError, call_command
from django.test import Client
from django.utils import timezone

from accounts.access import vouching
from accounts.importing import owners_file
from accounts.models import NotificationAddress, Owner, PulseUser, owners_by_address
from accounts.models import normalize_address as normal
from accounts.pulse_users import addresses, ownership
from accounts.signing_in.owners import get_or_create_owner, valid_address
from agents.api.views import SubscriptionFilter
from agents.models import EventSubscription, Offering
from message_store import principals
from message_store.store import StoredQueue
from notifications import audience
from status.doctor import database
from status.doctor.findings import Status

UNICODE, ASCII = "x@exämple.org", "x@xn--exmple-cua.org"
SPELLINGS = [UNICODE, ASCII, "X@EXÄMPLE.ORG", "x@exa\u0308mple.org", "X@XN--Exmple-CUA.org", '"x"@exämple\u3002org']

CODE = re.compile(r"[A-Z]{4}-[A-Z]{4}")


@pytest.fixture
def owner(db):
    return Owner.objects.create_user(UNICODE, vouched=True, last_login=timezone.now())


@pytest.fixture
def older(owner):
    """Return an owner whose address was stored before domains had one form."""
    Owner.objects.filter(pk=owner.pk).update(email=UNICODE)
    owner.refresh_from_db()
    return owner


def stored(address, **fields):
    """Create an owner whose address has this form in the database."""
    number = Owner.objects.count()
    owner = Owner.objects.create_user(f"o{number}@example.org", **fields)
    Owner.objects.filter(pk=owner.pk).update(email=address)
    return owner


def sign_in(mailbox, address, sent_to=ASCII):
    """Sign in by code, and return the owner who is signed in."""
    client = Client()
    client.post("/signin/", {"email": address})
    client.post("/signin/code/", {"code": CODE.search(mailbox.to(sent_to)[-1].text)[0]})
    return Owner.objects.get(pk=client.session["_auth_user_id"])


# The form


@pytest.mark.parametrize("written", SPELLINGS)
def test_spellings_of_an_address_have_one_form(written):
    assert normal(written) == valid_address(written) == ASCII


@pytest.mark.parametrize(
    ("written", "stored"),
    [
        ("x@straße.de", "x@xn--strae-oqa.de"),  # not strasse.de, which may be another person's
        ("x@аpple.org", "x@xn--pple-43d.org"),  # noqa: RUF001  # its first letter is Cyrillic
        ("x@[127.0.0.1]", "x@[127.0.0.1]"),
        ("nobody", "nobody"),
    ],
)
def test_another_domain_stays_another(written, stored):
    assert normal(written) == normal(stored) == stored


@pytest.mark.parametrize(
    "written",
    ["al\u0131ce@example.org", "\u212aate@example.org", "\u017fue@example.org", "x@\u2488example.org", "x@-ä.org",
     f"x@{'ä' * 70}.org", "x@ä..org", "x@ä.org.", "x@\ud800.org"],
)  # fmt: skip
def test_an_address_without_that_form_is_refused(db, written):
    with pytest.raises(ValidationError):
        valid_address(written)
    with pytest.raises(ValidationError):
        Owner.objects.create_user(written)


# Who stores and compares addresses


@pytest.mark.parametrize("first", [UNICODE, ASCII])
def test_both_forms_sign_in_one_owner(db, mailbox, settings, first):
    settings.GUARDIAN_VOUCHED_DOMAINS = ["xn--exmple-cua.org"]
    signed_in = sign_in(mailbox, first)
    assert signed_in == sign_in(mailbox, ASCII if first is UNICODE else UNICODE) == Owner.objects.get()
    assert (signed_in.email, EmailAddress.objects.get().email, signed_in.vouched) == (ASCII, ASCII, True)


@pytest.mark.parametrize("written", [UNICODE, ASCII])
@pytest.mark.parametrize("row", ["owner", "older"])
def test_commands_find_an_owner_by_both_forms(request, row, written):
    found = request.getfixturevalue(row)
    call_command("create_owner", written, "--operator", stdout=io.StringIO())
    call_command("login_link", written, stdout=io.StringIO())
    call_command("create_token", written, stdout=io.StringIO())
    call_command("create_offering", "Cluster", "--member", written, stdout=io.StringIO())
    assert Owner.objects.get() == found
    assert Owner.objects.get().is_staff
    assert (found.auth_token_set.count(), Offering.objects.get().members.get()) == (1, found)


@pytest.mark.parametrize("written", [UNICODE, ASCII])
@pytest.mark.parametrize("row", ["owner", "older"])
def test_invitations_approvals_and_imports_find_an_owner_by_both_forms(request, guarded, row, written, tmp_path):
    found = request.getfixturevalue(row)
    assert ownership.find_owners([written, ASCII]) == [found]
    assert vouching.find_owner(written) == found
    path = tmp_path / "owners.csv"
    path.write_text(f"username,owners\nnot-on-the-broker,{written}\n")
    with pytest.raises(owners_file.InvalidSource) as error:
        owners_file.plan(path)
    assert "no such user" in str(error.value)
    assert "no owner with access" not in str(error.value)


@pytest.mark.parametrize("written", [UNICODE, ASCII])
def test_agents_lists_are_filtered_by_both_forms(owner, bob, written):
    mine, _ = [EventSubscription.objects.create(owner=one) for one in (owner, bob)]
    assert list(SubscriptionFilter({"user_username": written}, EventSubscription.objects.all()).qs) == [mine]


def test_an_owners_address_is_no_further_address_in_either_form(older):
    pulse_user = PulseUser.objects.create(username="x")
    pulse_user.owners.add(older)
    for written in (UNICODE, ASCII):
        with pytest.raises(ValidationError, match="belongs to an owner"):
            addresses.add_address(pulse_user, written, older)


def test_a_further_address_in_an_older_form_stays_confirmed(alice):
    pulse_user = PulseUser.objects.create(username="alice")
    present = NotificationAddress.objects.create(pulse_user=pulse_user, email=UNICODE, confirmed_at=timezone.now())
    for written in (UNICODE, ASCII):
        addresses.set_addresses(pulse_user, [written], alice)
        assert NotificationAddress.objects.get() == present
        with pytest.raises(ValidationError, match="already an address"):
            addresses.add_address(pulse_user, written, alice)


def test_operators_get_one_mail_whatever_the_form_in_the_settings(settings):
    settings.GUARDIAN_OPERATOR_EMAILS = [UNICODE, ASCII]
    assert audience.operators() == [ASCII]


@pytest.mark.parametrize("named", [UNICODE, ASCII])
@pytest.mark.parametrize("caller", [UNICODE, ASCII])
def test_a_principal_is_compared_in_one_form(named, caller):
    queue = StoredQueue("app", "queue", timezone.now(), 1, "user", "strong", (f"bid:{named}",), None)
    assert principals.may_read(queue, principals.Caller(email=caller))
    assert not principals.may_read(queue, principals.Caller(email="x@example.org"))


def test_an_owner_whose_domain_is_in_doubt_is_not_the_principal_of_that_domain():
    queue = StoredQueue("app", "queue", timezone.now(), 1, "user", "strong", ("bid:x@xn--strae-oqa.de",), None)
    assert not principals.may_read(queue, principals.Caller(email="x@straße.de"))


# Addresses that were stored before


@pytest.mark.parametrize("written", [UNICODE, ASCII])
def test_an_owner_with_an_older_form_signs_in_by_both(mailbox, older, written):
    assert sign_in(mailbox, written) == older == Owner.objects.get()


def test_saving_an_owner_in_the_admin_stores_the_form_of_today(admin, older):
    page = admin.get(f"/admin/accounts/owner/{older.pk}/change/")
    form = {name: value for name, value in page.context["adminform"].form.initial.items() if value}
    admin.post(f"/admin/accounts/owner/{older.pk}/change/", form)
    assert Owner.objects.get(pk=older.pk).email == ASCII


def test_an_owners_address_is_not_changed_to_that_of_an_older_form(admin, older, bob):
    """An owner who has the address already can be changed otherwise."""
    url = f"/admin/accounts/owner/{bob.pk}/change/"
    form = {name: value for name, value in admin.get(url).context["adminform"].form.initial.items() if value}
    assert "An owner with this address exists" in admin.post(url, {**form, "email": ASCII}).text
    Owner.objects.filter(pk=bob.pk).update(email=ASCII)
    assert admin.post(url, {**form, "email": ASCII, "full_name": "Bob B."}).status_code == 302
    assert Owner.objects.get(pk=bob.pk).full_name == "Bob B."


def test_no_second_owner_is_created_for_an_older_form(older):
    with pytest.raises(ValidationError, match="exists"):
        Owner.objects.create_user(ASCII)
    assert get_or_create_owner(ASCII) == older


@pytest.mark.parametrize("written", ["x@strasse.de", "x@straße.de", "x@xn--strae-oqa.de"])
def test_nobody_signs_in_to_an_owner_whose_domain_is_in_doubt(db, written):
    """The mails to x@straße.de went to x@strasse.de before."""
    in_doubt = stored("x@straße.de")
    assert get_or_create_owner(valid_address(written)) != in_doubt


def test_an_owner_whose_domain_is_in_doubt_is_saved_with_a_corrected_address_only(db):
    in_doubt = stored("x@straße.de")
    in_doubt.refresh_from_db()
    with pytest.raises(ValidationError, match="enter the domain in its ASCII form"):
        in_doubt.clean()
    in_doubt.email = "x@xn--strae-oqa.de"
    in_doubt.clean()


def test_an_owner_whose_domain_is_forbidden_today_signs_in_by_its_ascii_form(mailbox, db):
    owner = stored("x@♥.com")
    assert sign_in(mailbox, "x@xn--g6h.com", "x@xn--g6h.com") == owner


@pytest.mark.parametrize("last", [UNICODE, ASCII])
def test_of_two_owners_with_one_address_the_one_who_signed_in_last_is_found(db, last):
    first_seen, now = timezone.now() - timezone.timedelta(days=1), timezone.now()
    two = {address: stored(address, last_login=now if address == last else first_seen) for address in (UNICODE, ASCII)}
    assert owners_by_address([UNICODE, "nobody@example.org"]) == {ASCII: two[last]}


def test_doctor_lists_older_addresses_and_owners_with_one_address(db):
    def found():
        return {one.name: (one.status, one.found) for one in database._rows()}

    stored("plain@example.org")
    assert [found()[name][0] for name in ("older addresses", "owners of one address")] == [Status.OK] * 2
    stored("x@straße.de")
    stored(UNICODE)
    assert found()["older addresses"] == (
        Status.WARNING, f"The address of 2 owners is stored in an older form: {UNICODE}, x@straße.de.",
    )  # fmt: skip
    assert found()["owners of one address"][0] is Status.OK
    stored(ASCII)
    assert found()["owners of one address"] == (
        Status.WARNING, f"Owners have the same address: {UNICODE}, {ASCII}.",
    )  # fmt: skip


def test_an_unknown_owner_is_named_as_written(db):
    with pytest.raises(CommandError, match="exämple"):
        call_command("login_link", UNICODE)
