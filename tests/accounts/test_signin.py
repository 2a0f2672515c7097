"""Sign-in by code and by link, sign-out, and refused sign-ins."""

import logging
import re
import threading
from datetime import timedelta
from io import StringIO
from urllib.parse import urlsplit

import pytest
import time_machine
from allauth.account.models import EmailAddress
from axe_playwright_python.sync_playwright import Axe
from django.contrib.sessions.models import Session
from django.core.cache import cache
from django.core.exceptions import ValidationError
from django.core.management import CommandError, call_command
from django.db.models import QuerySet
from django.test import Client
from django.utils import timezone
from django.utils.html import escape

from accounts.models import Owner, PulseUser, SignInLink
from accounts.signing_in import code_limits
from accounts.signing_in.links import create_link
from accounts.signing_in.owners import get_or_create_owner, prune_visitors
from accounts.tasks import prune_visitors as prune_visitors_task
from core.limits import RateLimit
from guardian_site.logs import LineFormatter
from tests.support.chromium import checked_page, sign_in
from tests.support.toolbox import in_parallel

CODE = re.compile(r"^[B-Z]{4}-[B-Z]{4}$", re.MULTILINE)


@pytest.fixture(autouse=True)
def clear_limits(db):
    cache.clear()


def request_code(client, address, **more):
    return client.post("/signin/", {"email": address}, **more)


def code_for(mailbox, address):
    return CODE.search(mailbox.to(address)[-1].text).group()


def enter(client, code, path="/signin/code/", **more):
    return client.post(path, {"code": code}, **more)


def sign_in_by_code(client, mailbox, address):
    request_code(client, address)
    return enter(client, code_for(mailbox, address))


def is_signed_in(client):
    return "_auth_user_id" in client.session


def test_the_first_sign_in_creates_the_owner_and_its_mail_explains_the_code(client, mailbox, settings):
    settings.GUARDIAN_BASE_URL = "https://guardian.example.org"  # regardless of the request's Host header
    assert request_code(client, " Alice@Example.ORG ").url == "/signin/code/"
    owner = Owner.objects.get()
    assert (owner.email, owner.vouched, owner.has_usable_password()) == ("alice@example.org", False, False)
    address = EmailAddress.objects.get()
    assert (address.user, address.email, address.primary, address.verified) == (owner, owner.email, True, False)
    page = client.get("/signin/code/")
    assert "alice@example.org" in page.text
    answer = enter(client, code_for(mailbox, "alice@example.org"))
    assert (answer.status_code, answer.url) == (302, "/")
    assert is_signed_in(client)
    assert EmailAddress.objects.get().verified
    (mail,) = mailbox.mails
    assert (mail.subject, mail.html) == ("[Guardian] Your sign-in code", "")
    for words in ("signs you in to Guardian at https://guardian.example.org", "10 minutes", "If you did not ask"):
        assert words in mail.text


@pytest.mark.parametrize("change", [str.lower, lambda code: code.replace("-", ""), lambda code: f" {code} "])
def test_a_code_is_accepted_in_any_case_and_without_dash(client, mailbox, change):
    request_code(client, "alice@example.org")
    enter(client, change(code_for(mailbox, "alice@example.org")))
    assert is_signed_in(client)


def test_an_existing_owner_signs_in_and_is_redirected_to_next(client, mailbox):
    owner = Owner.objects.create_user("alice@example.org", vouched=True)
    answer = client.post("/signin/?next=/tokens/", {"email": owner.email})
    assert answer.url == "/signin/code/?next=%2Ftokens%2F"
    before = client.cookies["sessionid"].value
    assert enter(client, code_for(mailbox, owner.email), answer.url).url == "/tokens/"
    assert client.cookies["sessionid"].value != before
    assert (Owner.objects.count(), EmailAddress.objects.get().verified) == (1, True)
    assert len(mailbox.mails) == 1


@pytest.mark.parametrize("elsewhere", ["https://example.com/", "//example.com/", "javascript:alert(1)", "/\n/x", "\\x"])
def test_next_never_redirects_to_another_site(client, mailbox, elsewhere):
    answer = client.post("/signin/", {"email": "alice@example.org", "next": elsewhere})
    assert urlsplit(answer.url).netloc == ""
    answer = client.post("/signin/code/", {"code": code_for(mailbox, "alice@example.org"), "next": elsewhere})
    assert answer.status_code == 302
    assert "example.com" not in answer.url
    assert not answer.url.startswith(("javascript", "//", "\\"))


def test_known_unknown_and_inactive_addresses_get_the_same_answer(mailbox):
    Owner.objects.create_user("known@example.org")
    Owner.objects.create_user("closed@example.org", is_active=False)
    pages = []
    for name in ("known", "unknown", "closed"):
        client = Client()
        answer = request_code(client, f"{name}@example.org")
        page = client.get(answer.url)
        token = page.context["csrf_token"]
        pages.append((answer.status_code, answer.url, page.text.replace(str(token), "").replace(f"{name}@", "x@")))
        assert len(mailbox.to(f"{name}@example.org")) == 1
    assert pages[0] == pages[1] == pages[2]


def test_an_inactive_owner_gets_a_mail_without_a_code(client, mailbox):
    owner = Owner.objects.create_user("closed@example.org", is_active=False)
    request_code(client, owner.email)
    (mail,) = mailbox.mails
    assert mail.subject == "[Guardian] You can't sign in: an operator deactivated you"
    assert not CODE.search(mail.text)
    for code in ("", "BCDF-GHJK", "none"):
        enter(client, code)
    assert not is_signed_in(client)


def test_an_owner_deactivated_before_entering_the_code_is_refused(client, mailbox):
    request_code(client, "alice@example.org")
    Owner.objects.update(is_active=False)
    answer = enter(client, code_for(mailbox, "alice@example.org"))
    assert (answer.status_code, "deactivated" in answer.text) == (403, True)
    assert not is_signed_in(client)


def test_an_owner_deleted_before_entering_the_code_starts_again(client, mailbox):
    request_code(client, "alice@example.org")
    code = code_for(mailbox, "alice@example.org")
    Owner.objects.all().delete()
    answer = enter(client, code, follow=True)
    assert "Request a new one" in answer.text
    assert not is_signed_in(client)


def test_a_code_does_not_prove_an_address_that_an_operator_entered_meanwhile(client, mailbox):
    request_code(client, "alice@example.org")
    Owner.objects.update(email="else@example.org")
    answer = enter(client, code_for(mailbox, "alice@example.org"), follow=True)
    assert "Request a new one" in answer.text
    assert not is_signed_in(client)
    assert not EmailAddress.objects.filter(email="else@example.org").exists()


def test_a_session_ends_when_its_owner_is_deactivated(client, mailbox):
    sign_in_by_code(client, mailbox, "alice@example.org")
    assert client.get("/signout/").status_code == 200
    Owner.objects.update(is_active=False)
    assert client.get("/signout/").status_code == 302
    # Another owner can sign in with the same browser.
    sign_in_by_code(client, mailbox, "bob@example.org")
    assert client.get("/signout/").context["user"].email == "bob@example.org"


def test_the_third_wrong_code_ends_the_attempt(client, mailbox):
    request_code(client, "alice@example.org")
    for _ in range(2):
        page = enter(client, "BBBB-BBBB")
        assert (page.status_code, "the code that we sent last" in page.text) == (200, True)
    page = enter(client, "BBBB-BBBB", follow=True)
    assert page.redirect_chain == [("/signin/", 302)]
    assert "so the code is invalid now. Request a new one" in page.text
    page = enter(client, code_for(mailbox, "alice@example.org"), follow=True)
    assert not is_signed_in(client)
    sign_in_by_code(client, mailbox, "alice@example.org")
    assert is_signed_in(client)


@pytest.mark.parametrize("code", ["", "x" * 5000, "é", "\x00", "\u202eBBBB", "<script>", "' OR 1=1"])
def test_no_input_as_a_code_breaks_the_page(client, mailbox, code):
    request_code(client, "alice@example.org")
    assert enter(client, code).status_code == 200
    assert not is_signed_in(client)


@pytest.mark.parametrize(("minutes", "works"), [(9, True), (11, False), (40, False)])
def test_a_code_expires_after_ten_minutes(client, mailbox, minutes, works):
    with time_machine.travel(timezone.now()) as traveller:
        request_code(client, "alice@example.org")
        traveller.shift(timedelta(minutes=minutes))
        page = enter(client, code_for(mailbox, "alice@example.org"), follow=works is False)
    assert is_signed_in(client) is works
    if not works:
        assert "for ten minutes" in page.text
        assert page.redirect_chain == [("/signin/", 302)]


def test_a_code_works_once_and_only_in_its_browser(client, mailbox):
    request_code(client, "alice@example.org")
    code = code_for(mailbox, "alice@example.org")
    page = enter(Client(), code, follow=True)
    assert "in the browser in which you" in page.text
    enter(client, code)
    client.post("/signout/")
    page = enter(client, code, follow=True)
    assert "A code works once" in page.text
    assert not is_signed_in(client)


def test_a_new_code_replaces_the_one_before(client, mailbox):
    with time_machine.travel(timezone.now()) as traveller:
        request_code(client, "alice@example.org")
        first = code_for(mailbox, "alice@example.org")
        traveller.shift(timedelta(minutes=9))
        page = client.post("/signin/code/?next=/tokens/", {"action": "resend"}, follow=True)
        assert "We sent a new code" in page.text
        traveller.shift(timedelta(minutes=9))
        assert enter(client, first).status_code == 200
        answer = enter(client, code_for(mailbox, "alice@example.org"), "/signin/code/?next=/tokens/")
    assert answer.url == "/tokens/"


def test_an_unavailable_mail_server_is_503_and_later_attempts_work(client, mailbox):
    mailbox.stop()
    page = request_code(client, "alice@example.org")
    assert (page.status_code, "could not send" in page.text) == (503, True)
    assert 'value="alice@example.org"' in page.text
    assert client.get("/signin/code/").status_code == 302
    mailbox.start()
    request_code(client, "alice@example.org")
    mailbox.refuse(True)
    page = client.post("/signin/code/", {"action": "resend"})
    assert (page.status_code, "The previous code" in page.text) == (503, True)
    enter(client, code_for(mailbox, "alice@example.org"))
    assert is_signed_in(client)
    assert Owner.objects.count() == 1


def test_an_address_rejected_by_the_mail_server_has_an_error_at_the_field(client, mailbox):
    mailbox.rejected.add("nobody@example.org")
    page = request_code(client, "nobody@example.org")
    assert page.status_code == 200
    assert "Check it, or use another one" in str(page.context["form"].errors["email"])


REFUSED = [
    "", "alice", "alice@", "@example.org", "alice@example", "a b@example.org", "alice@example.org\nBcc: x@example.org",
    "alice@exam\nple.org", "<script>alert(1)</script>@example.org", '"alice"@exa"mple.org', "alice\u200f@example.org",
    "alice@exam\u200bple.org", "alice@example.org\u202e", "alice@\uff45xample.org", "ålice@example.org",
    "alice@example.org\x00", f"{'a' * 255}@example.org", f"{'a' * 60}@{'b' * 60}.{'c' * 60}.{'d' * 60}.{'e' * 60}.org",
    "é" * 127 + "@example.org", "alice@example.org, bob@example.org", "al\u0131ce@example.org",
]  # fmt: skip


@pytest.mark.parametrize("address", REFUSED)
def test_an_invalid_address_has_an_error_at_the_field(client, mailbox, address):
    page = request_code(client, address)
    assert page.status_code == 200
    assert page.context["form"].errors["email"]
    assert "<script>alert" not in page.text
    assert not Owner.objects.exists()
    assert mailbox.mails == []


@pytest.mark.parametrize(
    ("typed", "known"),
    [
        ("ALICE@EXAMPLE.ORG", "alice@example.org"),
        ("o'hara+x@example.org", "o'hara+x@example.org"),
        ("alice@BÜCHER.example", "alice@xn--bcher-kva.example"),
        ('"a<b>"@example.org', '"a<b>"@example.org'),
        (r'"a\<b"@example.org', '"a<b"@example.org'),
        (r'"Fr\ed.x"@example.org', "fred.x@example.org"),
    ],
)
def test_an_address_is_normalised(client, mailbox, typed, known):
    answer = request_code(client, typed)
    assert answer.status_code == 302
    assert Owner.objects.get().email == known
    assert escape(known) in client.get("/signin/code/").text
    enter(client, CODE.search(mailbox.mails[-1].text).group())
    assert is_signed_in(client)


def codes_sent(addresses, network="192.0.2.1"):
    """Request a code for each of these addresses from a network, and return how many were sent."""
    return [request_code(Client(REMOTE_ADDR=network), address).status_code for address in addresses].count(302)


def test_a_network_gets_three_codes_a_minute_for_a_mailbox(mailbox, middle_of_an_interval):
    client = Client(REMOTE_ADDR="192.0.2.1")
    assert [request_code(client, "alice@example.org").status_code for _ in range(4)] == [302, 302, 302, 429]
    page = request_code(client, "alice@example.org")
    assert 1 <= int(page["Retry-After"]) <= 60
    assert "Try again in 1 minute." in page.text
    assert len(mailbox.mails) == 3
    assert request_code(client, "bob@example.org").status_code == 302
    middle_of_an_interval.shift(int(page["Retry-After"]))
    assert request_code(client, "alice@example.org").status_code == 302


def test_code_requests_from_one_network_do_not_keep_the_owner_from_signing_in(mailbox, middle_of_an_interval):
    sent = 0
    for _ in range(4):
        sent += codes_sent(["alice@example.org"] * 4)
        middle_of_an_interval.shift(61)
    assert sent == 10
    client = Client(REMOTE_ADDR="198.51.100.7")
    assert request_code(client, "alice@example.org").status_code == 302
    enter(client, code_for(mailbox, "alice@example.org"))
    assert is_signed_in(client)


SAME_MAILBOX = [
    '"fred"@example.org', r'"fr\ed"@example.org', r'"\f\r\e\d"@example.org', "Fred@EXAMPLE.org",
    "fred+1@example.org", "fred+a+b@example.org", '"fred+2"@example.org',
]  # fmt: skip


@pytest.mark.parametrize(
    ("address", "spelling"),
    [
        *(("fred@example.org", spelling) for spelling in SAME_MAILBOX),
        ("al@b\xfccher.example", "al@xn--bcher-kva.example"),
    ],
)
def test_spellings_of_one_mailbox_have_one_limit(mailbox, middle_of_an_interval, address, spelling):
    assert codes_sent([address, spelling, address, spelling]) == 3
    assert codes_sent(["fredo@example.org"]) == 1


def test_a_mailbox_gets_a_limited_number_of_codes_an_hour_from_all_networks(
    mailbox, middle_of_an_interval, monkeypatch
):
    monkeypatch.setattr(code_limits, "TO_MAILBOX", (RateLimit("sign-in codes", 10, 3600),))
    networks = [f"192.0.2.{number}" for number in range(4)]
    assert sum(codes_sent(["alice@example.org"] * 3, network) for network in networks) == 10


def test_a_network_gets_twenty_codes_a_minute(mailbox, middle_of_an_interval):
    addresses = [f"a{number}@example.org" for number in range(21)]
    assert codes_sent(addresses) == 20
    assert codes_sent(addresses[:1], "192.0.2.2") == 1


def test_a_refused_request_does_not_count_for_the_mailbox(mailbox, middle_of_an_interval, monkeypatch):
    monkeypatch.setattr(code_limits, "TO_MAILBOX", (RateLimit("sign-in codes", 4, 3600),))
    assert codes_sent(["alice@example.org"] * 9) == 3
    assert codes_sent(["alice@example.org"], "198.51.100.7") == 1


def test_a_resent_code_counts_towards_the_limit(client, mailbox, middle_of_an_interval):
    request_code(client, "alice@example.org")
    answers = [client.post("/signin/code/", {"action": "resend"}).status_code for _ in range(3)]
    assert answers == [302, 302, 429]


@pytest.mark.parametrize(
    "origin",
    [{"REMOTE_ADDR": ""}, {"HTTP_X_FORWARDED_FOR": "192.0.2.1"}, {"HTTP_X_FORWARDED_FOR": "unknown, unknown"}],
    ids=["none", "fewer proxies than GUARDIAN_PROXIES", "no IP address"],
)
def test_sign_in_works_without_a_client_address(mailbox, settings, origin):
    settings.ALLAUTH_TRUSTED_PROXY_COUNT = 2
    assert request_code(Client(**origin), "alice@example.org").status_code == 302


def test_concurrent_requests_for_a_new_address_create_one_owner(transactional_db, mailbox, monkeypatch):
    monkeypatch.setattr(code_limits, "TO_MAILBOX_FROM_NETWORK", ())
    clients = iter([Client() for _ in range(6)])
    lock = threading.Lock()

    def one():
        with lock:
            client = next(clients)
        return request_code(client, "alice@example.org").status_code

    assert in_parallel(*[one] * 6) == [302] * 6
    assert Owner.objects.count() == EmailAddress.objects.count() == 1
    assert len(mailbox.mails) == 6


def test_a_former_address_signs_in_another_owner(client, mailbox):
    owner = Owner.objects.create_user("before@example.org")
    create_link(owner)
    Owner.objects.update(email="after@example.org")
    sign_in_by_code(client, mailbox, "before@example.org")
    assert Owner.objects.get(email="before@example.org").pk != owner.pk
    assert client.get("/signout/").context["user"].pk != owner.pk
    other = Client()
    sign_in_by_code(other, mailbox, "after@example.org")
    assert other.get("/signout/").context["user"].pk == owner.pk
    assert sorted(EmailAddress.objects.values_list("email", "verified")) == [
        ("after@example.org", True),
        ("before@example.org", True),
    ]


def test_an_owner_of_a_vouched_domain_gets_access_by_the_first_code(client, mailbox, settings):
    settings.GUARDIAN_VOUCHED_DOMAINS = ["example.org"]
    request_code(client, "alice@example.org")
    assert not Owner.objects.get().vouched
    enter(client, code_for(mailbox, "alice@example.org"))
    assert Owner.objects.get().vouched


def test_a_signed_in_owner_is_redirected_from_sign_in(client):
    client.force_login(Owner.objects.create_user("alice@example.org"))
    assert client.get("/signin/").url == "/"
    assert client.get("/signin/?next=/tokens/").url == "/tokens/"
    assert client.get("/signin/code/").url == "/"


# Sign-in links


def path_of(link):
    return urlsplit(link).path


def test_login_link_prints_a_link_that_works_once(client, settings):
    settings.GUARDIAN_BASE_URL = "https://guardian.example.org"
    call_command("create_owner", "alice@example.org", stdout=StringIO())
    out = StringIO()
    call_command("login_link", "ALICE@example.org", stdout=out)
    link = out.getvalue().strip()
    assert re.fullmatch(r"https://guardian\.example\.org/signin/link/[\w-]{43}/", link)
    assert link.split("/")[-2] not in str(SignInLink.objects.values())
    answer = client.post(path_of(link))
    assert (answer.status_code, answer.url) == (302, "/")
    assert is_signed_in(client)
    other = Client()
    for ask in (other.get, other.post):
        page = ask(path_of(link))
        assert (page.status_code, 'href="/signin/"' in page.text) == (410, True)
    assert not is_signed_in(other)


def test_create_owner_and_login_link_verify_the_address(db):
    call_command("create_owner", "alice@example.org", stdout=StringIO())
    assert EmailAddress.objects.get(user__email="alice@example.org").verified
    Owner.objects.create_user("bob@example.org")
    call_command("login_link", "bob@example.org", stdout=StringIO())
    assert EmailAddress.objects.get(user__email="bob@example.org").verified


@pytest.mark.parametrize("address", ["nobody@example.org", "closed@example.org", "", "x"])
def test_login_link_for_a_missing_or_closed_owner_says_what_to_do(address):
    Owner.objects.create_user("closed@example.org", is_active=False)
    with pytest.raises(CommandError, match=r"is deactivated" if "closed" in address else r"manage.py create_owner"):
        call_command("login_link", address)


@pytest.mark.parametrize("token", ["x", "é", "a" * 5000, "%00", "<b>", "%2e%2e"])
def test_an_invalid_or_expired_link_signs_nobody_in(client, token):
    expired = path_of(create_link(Owner.objects.create_user("alice@example.org")))
    with time_machine.travel(timezone.now() + timedelta(minutes=10, seconds=1)):
        for path in (f"/signin/link/{token}/", expired):
            for ask in (client.get, client.post):
                assert ask(path).status_code == 410
    assert not is_signed_in(client)


def test_one_of_six_concurrent_uses_of_a_link_succeeds(transactional_db):
    path = path_of(create_link(Owner.objects.create_user("alice@example.org")))
    assert sorted(in_parallel(*[lambda: Client().post(path).status_code] * 6)) == [302] + [410] * 5


def test_a_link_preview_does_not_use_up_a_link_and_nothing_is_logged(client, caplog):
    caplog.set_level(logging.DEBUG)
    path = path_of(create_link(Owner.objects.create_user("alice@example.org")))
    token = path.split("/")[-2]
    strict = Client(enforce_csrf_checks=True)
    statuses = {method: getattr(strict, method)(path).status_code for method in ("head", "get", "put", "post")}
    assert statuses == {"head": 200, "get": 200, "put": 403, "post": 403}
    assert strict.get(path.rstrip("/")).status_code == 301
    assert not is_signed_in(strict)
    page = client.get(path)
    assert "alice@example.org" in page.text
    assert client.post(path).url == "/"
    shown = [LineFormatter().format(record) for record in caplog.records if record.name != "django.db.backends"]
    assert not any(token in line for line in shown)


def test_a_link_of_an_inactive_owner_signs_nobody_in(client):
    owner = Owner.objects.create_user("alice@example.org")
    path = path_of(create_link(owner))
    Owner.objects.update(is_active=False)
    assert client.post(path).status_code == 403
    assert not is_signed_in(client)


def test_a_link_replaces_the_session_of_another_owner(client):
    client.force_login(Owner.objects.create_user("bob@example.org"))
    path = path_of(create_link(Owner.objects.create_user("alice@example.org")))
    assert 'You are signed in as <span class="name">bob@example.org' in client.get(path).text
    client.post(path)
    assert client.get("/signout/").context["user"].email == "alice@example.org"
    page = client.get(path)
    assert (page.status_code, 'href="/queues/"' in page.text) == (410, True)


# Sign-out, and sign-in to the admin


def test_the_admin_redirects_to_sign_in_and_back(client, mailbox):
    Owner.objects.create_superuser("ops@example.org")
    page = client.get("/admin/queues/queue/", follow=True)
    assert page.redirect_chain[-1][0] == "/signin/?next=%2Fadmin%2Fqueues%2Fqueue%2F"
    assert client.post("/admin/login/", {"username": "x", "password": "y"}).url == "/signin/?next=%2Fadmin%2F"
    answer = client.post(page.redirect_chain[-1][0], {"email": "ops@example.org"})
    assert enter(client, code_for(mailbox, "ops@example.org"), answer.url).url == "/admin/queues/queue/"
    assert client.get("/admin/queues/queue/").status_code == 200
    assert client.get("/admin/login/").url == "/admin/"


@pytest.mark.parametrize(
    "name", ["signup", "password/reset", "email", "3rdparty", "inactive", "reauthenticate", "login"]
)
def test_other_pages_of_allauth_are_404(client, name):
    assert client.get(f"/signin/{name}/").status_code == 404
    assert client.get(f"/accounts/{name}/").status_code == 404


# Pruning of visitors


def test_visitors_without_a_verified_address_are_deleted_after_a_day(client, mailbox):
    request_code(client, "visitor@example.org")
    sign_in_by_code(client, mailbox, "proven@example.org")
    kept = {"proven@example.org", "link@example.org", "vouched@example.org", "account@example.org", "ops@example.org",
            "closed@example.org", "late@example.org", "by-hand@example.org"}  # fmt: skip
    Owner.objects.create_user("by-hand@example.org")  # like an owner created in the admin
    create_link(Owner.objects.create_user("link@example.org"))
    Owner.objects.create_user("vouched@example.org", vouched=True)
    PulseUser.objects.create(username="a").owners.add(Owner.objects.create_user("account@example.org"))
    Owner.objects.create_superuser("ops@example.org")
    Owner.objects.create_user("closed@example.org", is_active=False)
    Owner.objects.create_user("late@example.org", date_joined=timezone.now() + timedelta(hours=3))
    assert prune_visitors() == 0
    with time_machine.travel(timezone.now() + timedelta(hours=25)):
        prune_visitors_task()
    assert set(Owner.objects.values_list("email", flat=True)) == kept
    assert not SignInLink.objects.exists()
    assert Session.objects.exists()
    with time_machine.travel(timezone.now() + timedelta(days=15)):
        prune_visitors()
    assert not Session.objects.exists()


def test_the_statements_of_pruning_visitors_do_not_grow(db, django_assert_max_num_queries):
    for number in range(60):
        get_or_create_owner(f"v{number}@example.org")
    Owner.objects.update(date_joined=timezone.now() - timedelta(days=2))
    with django_assert_max_num_queries(37):
        assert prune_visitors() == 60


def test_a_visitor_vouched_during_pruning_is_kept(db, monkeypatch):
    owner = get_or_create_owner("visitor@example.org")
    Owner.objects.update(date_joined=timezone.now() - timedelta(days=2))
    real = QuerySet.delete

    def vouch_first(self):
        if self.model is Owner:
            Owner.objects.filter(pk=owner.pk).update(vouched=True)
        return real(self)

    monkeypatch.setattr(QuerySet, "delete", vouch_first)
    assert prune_visitors() == 0
    assert Owner.objects.get() == owner


@pytest.mark.parametrize("address", ["a@exam\u200bple.org", "a@\u202eelpmaxe.org", "a@\uff45xample.org"])
def test_no_owner_is_created_with_a_look_alike_address(db, address):
    with pytest.raises(ValidationError):
        Owner.objects.create_user(address)
    with pytest.raises(CommandError):
        call_command("create_owner", address)
    assert not Owner.objects.exists()


# In a browser


def test_a_person_signs_in_and_out_with_the_keyboard(page, mailbox):
    page.goto("/signin/")
    assert Axe().run(page).violations_count == 0
    page.keyboard.type("alice@example.org")  # the field has the focus
    page.keyboard.press("Enter")
    page.wait_for_url("**/signin/code/")
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    page.get_by_text("the code that we sent last").wait_for()
    assert Axe().run(page).violations_count == 0
    page.get_by_label("Code").fill(code_for(mailbox, "alice@example.org"))
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile("//[^/]+/$"))
    page.get_by_role("button", name="Sign out").click()
    page.get_by_text("You are signed out.").wait_for()
    owner = Owner.objects.get()
    assert owner.last_login is not None


def test_the_sign_in_pages_are_accessible(live_server, page):
    page.goto(path_of(create_link(Owner.objects.create_user("bob@example.org"))))
    assert Axe().run(page).violations_count == 0
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url(re.compile("//[^/]+/$"))
    sign_in(page, Owner.objects.create_user("alice@example.org"))
    assert page.url == f"{live_server.url}/"
    for path, words in (
        ("/signout/", "Sign out?"),
        ("/signin/link/used/", "This link no longer works"),
        ("/admin/", "This is for operators"),
    ):
        page.goto(path)
        assert page.get_by_role("heading", level=1).inner_text() == words
        assert Axe().run(page).violations_count == 0


@pytest.mark.parametrize(
    ("script", "error_text"),
    [
        ("document.body.setAttribute('style', 'color: red')", "violated: style-src"),
        ("setTimeout(() => { throw new Error('broken') })", "script: broken"),
        ("document.body.append(Object.assign(new Image(), {src: '/missing.png'}))", "404: "),
    ],
)
def test_a_browser_test_fails_on_page_errors(browser, live_server, script, error_text):
    def open_and_run_script():
        with checked_page(browser, live_server.url, set()) as page:
            page.goto("/signin/")
            page.evaluate(script)
            page.wait_for_timeout(300)

    with pytest.raises(AssertionError, match=error_text):
        open_and_run_script()
