"""Sign-in with OpenID Connect at a running provider."""

import re
import socket
import threading
import time
from base64 import b64encode
from functools import partial
from urllib.parse import parse_qs, urlsplit

import pytest
import requests
import time_machine
from allauth.account.models import EmailAddress
from allauth.socialaccount.models import SocialAccount
from django.core.cache import cache
from django.test import Client
from django.utils import timezone
from oidc_provider_mock import run_server_in_thread

from accounts.models import Owner
from accounts.signing_in import openid_connect
from core import bounded_requests
from tests.accounts.test_signin import code_for, enter, is_signed_in
from tests.support.proxy import Proxy, http_answer
from tests.support.toolbox import in_parallel, wait_until
from tests.support.webhooks import Webhook, trickle

ALICE = {"email": "alice@example.org", "email_verified": True, "name": "Alice Example"}


@pytest.fixture(autouse=True)
def clear_limits(db):
    cache.clear()
    openid_connect.configurations.clear()


class Provider:
    """A running provider and the actions of a person there."""

    def __init__(self, url):
        self.url = url

    def register(self, sub, **claims):
        requests.put(f"{self.url}/users/{sub}", json=claims, timeout=5).raise_for_status()

    def sign_in(self, client, sub, path="/signin/oidc/", **choice):
        """Start at Guardian, sign in at the provider, and follow its redirect back."""
        return self.authorize(client, client.post(path).url, **(choice or {"sub": sub}))

    def authorize(self, client, url, **choice):
        answer = requests.post(url, data=choice, allow_redirects=False, timeout=5)
        return client.get(answer.headers["Location"].removeprefix("http://testserver"))


@pytest.fixture(scope="module")
def running():
    with run_server_in_thread() as server:
        yield f"http://localhost:{server.server_port}"


def provider_at(url):
    return {
        "openid_connect": {
            "OAUTH_PKCE_ENABLED": True,
            "APPS": [
                {
                    "provider_id": "oidc",
                    "name": "Example ID",
                    "client_id": "guardian",
                    "secret": "a-secret",
                    "settings": {"server_url": url},
                }
            ],
        }
    }


def use(settings, url):
    settings.OIDC_ISSUER = url
    settings.OIDC_NAME = "Example ID"
    settings.SOCIALACCOUNT_PROVIDERS = provider_at(url)
    directives = {**settings.CONTENT_SECURITY_POLICY["DIRECTIVES"], "form-action": ["'self'", url]}
    settings.CONTENT_SECURITY_POLICY = {"DIRECTIVES": directives}
    return Provider(url)


@pytest.fixture
def provider(running, settings):
    return use(settings, running)


@pytest.fixture
def proxied_provider(running, settings):
    """Have Guardian reach the provider through a proxy, and give the proxy."""
    with Proxy.before(running) as proxy:
        use(settings, proxy.url(running))
        yield proxy


def test_a_verified_address_creates_an_owner_with_the_name(client, provider):
    provider.register("first", **ALICE)
    answer = provider.sign_in(client, "first", "/signin/oidc/?next=/tokens/")
    assert (answer.status_code, answer.url) == (302, "/tokens/")
    owner = Owner.objects.get()
    assert (owner.email, owner.full_name, owner.vouched) == ("alice@example.org", "Alice Example", False)
    assert not owner.has_usable_password()
    assert EmailAddress.objects.get(user=owner).verified
    assert is_signed_in(client)
    # The provider's claims are not stored.
    assert (SocialAccount.objects.get().extra_data, "first" in SocialAccount.objects.get().uid) == ({}, False)


def test_a_verified_address_signs_in_its_existing_owner(client, provider):
    owner = Owner.objects.create_user("alice@example.org", full_name="Alice B.")
    provider.register("second", **{**ALICE, "email": "Alice@Example.Org"})
    provider.sign_in(client, "second")
    assert client.get("/signout/").context["user"] == owner
    owner.refresh_from_db()
    assert (owner.full_name, Owner.objects.count()) == ("Alice B.", 1)


def test_a_known_subject_with_another_address_is_the_same_owner(client, provider):
    provider.register("third", **ALICE)
    provider.sign_in(client, "third")
    provider.register("third", email="other@example.org", email_verified=True)
    again = Client()
    provider.sign_in(again, "third")
    assert again.get("/signout/").context["user"].email == "alice@example.org"
    assert Owner.objects.count() == 1


@pytest.mark.parametrize("verified", [False, None, "false", 1, "missing"])
def test_an_unverified_address_takes_over_no_owner(client, provider, mailbox, verified):
    victim = Owner.objects.create_user("alice@example.org", vouched=True)
    claims = {"email": "alice@example.org"} if verified == "missing" else {**ALICE, "email_verified": verified}
    provider.register("attacker", **claims)
    answer = provider.sign_in(client, "attacker", "/signin/oidc/?next=/tokens/")
    assert answer.url == "/signin/code/?next=%2Ftokens%2F"
    page = client.get(answer.url)
    assert "Example ID doesn&#x27;t confirm that this address is yours" in page.text
    enter(client, "BBBB-BBBB")
    assert not is_signed_in(client)
    assert not SocialAccount.objects.exists()
    assert len(mailbox.to(victim.email)) == 1


@pytest.fixture
def provider_that_changes(proxied_provider, running):
    """Return a function that signs in a person whose claims change between the ID token and the user info."""

    direct = Provider(running)

    def sign_in(client, sub, id_token, userinfo):
        direct.register(sub, **id_token)
        forward = proxied_provider._from_client

        def from_client(guardian, provider):
            if b"/userinfo" in guardian.recv(65536, socket.MSG_PEEK):
                direct.register(sub, **userinfo)
            return forward(guardian, provider)

        proxied_provider._from_client = from_client
        return Provider(proxied_provider.url(running)).sign_in(client, sub)

    return sign_in


ELSEWHERE = "mallory@example.org"


@pytest.mark.parametrize(
    ("id_token", "userinfo", "verified"),
    [
        (ALICE, {"email": ELSEWHERE}, None),
        (ALICE, {"email": ELSEWHERE, "email_verified": False}, None),
        ({"email": ELSEWHERE}, ALICE, "alice@example.org"),
        (ALICE, {"email_verified": True, "email": ELSEWHERE}, ELSEWHERE),
        (ALICE, {"email": "Alice@Example.org"}, "alice@example.org"),
        (ALICE, {"name": "Alice"}, "alice@example.org"),
        ({"email": "alice@example.org"}, {"email_verified": True}, None),
        ({"email_verified": True}, {"email": "alice@example.org"}, None),
    ],
)
def test_an_address_is_verified_by_the_document_that_names_it(
    client, provider_that_changes, mailbox, id_token, userinfo, verified
):
    answer = provider_that_changes(client, "two-documents", id_token, userinfo)
    assert is_signed_in(client) is (verified is not None)
    if verified is None:
        assert answer.url == "/signin/code/"
    else:
        assert Owner.objects.get().email == verified


def test_an_unverified_address_needs_a_code_once(client, provider, mailbox, settings):
    settings.OIDC_VOUCHED_GROUPS = ["staff"]
    provider.register("fourth", email="alice@example.org", name="Alice Example", groups=["staff"])
    answer = provider.sign_in(client, "fourth")
    enter(client, code_for(mailbox, "alice@example.org"), answer.url)
    assert is_signed_in(client)
    assert (Owner.objects.get().vouched, Owner.objects.get().full_name) == (True, "Alice Example")
    again = Client()
    provider.sign_in(again, "fourth")
    assert is_signed_in(again)
    assert (Owner.objects.count(), len(mailbox.mails)) == (1, 1)


def test_a_code_for_another_address_links_no_owner(client, provider, mailbox):
    provider.register("fifth", email="alice@example.org")
    provider.sign_in(client, "fifth")
    client.post("/signin/", {"email": "bob@example.org"})
    enter(client, code_for(mailbox, "bob@example.org"))
    assert is_signed_in(client)
    assert not SocialAccount.objects.exists()


def test_a_vouched_group_grants_access_and_leaving_it_withdraws_access(provider, settings):
    settings.OIDC_VOUCHED_GROUPS = ["staff"]
    for groups, vouched in ((["other", 7], False), (["staff"], True), ("staff", True), ([], False)):
        provider.register("sixth", **ALICE, groups=groups)
        client = Client()
        provider.sign_in(client, "sixth")
        assert is_signed_in(client)
        assert Owner.objects.get().vouched is vouched


def test_a_vouched_domain_needs_a_verified_address(provider, settings, mailbox):
    settings.GUARDIAN_VOUCHED_DOMAINS = ["example.org"]
    provider.register("seventh", **{**ALICE, "email_verified": False})
    provider.sign_in(Client(), "seventh")
    assert not Owner.objects.get().vouched
    provider.register("seventh", **ALICE)
    provider.sign_in(Client(), "seventh")
    assert Owner.objects.get().vouched


def test_an_inactive_owner_cannot_sign_in(client, provider):
    provider.register("ninth", **ALICE)
    Owner.objects.create_user("alice@example.org", is_active=False)
    for _ in range(2):
        page = provider.sign_in(client, "ninth")
        assert (page.status_code, "This account is deactivated" in page.text) == (403, True)
        assert not is_signed_in(client)


@pytest.mark.parametrize("address", ["none", "", "alice\u202e@example.org", "a@b\n.org"])
def test_without_a_usable_address_sign_in_is_refused(client, provider, address):
    provider.register("eleventh", **({} if address == "none" else {"email": address, "email_verified": True}))
    page = provider.sign_in(client, "eleventh")
    assert (page.status_code, "sent no e-mail address" in page.text) == (403, True)
    assert not Owner.objects.exists()


@pytest.mark.parametrize("name", ["\x00\x1bA\u202elice", None, "", "x" * 5000])
def test_a_long_or_unprintable_name_is_cleaned(client, provider, name):
    provider.register("twelfth", **{**ALICE, "name": name})
    provider.sign_in(client, "twelfth")
    stored = Owner.objects.get().full_name
    assert is_signed_in(client)
    assert len(stored) <= 200
    assert stored.isprintable()


@pytest.mark.parametrize("claims", [{"email": 7}, {"name": 7}, {"name": {"a": 1}}])
def test_claims_of_a_wrong_type_are_503(client, provider, claims):
    provider.register("senseless", **{**ALICE, **claims})
    answer = provider.sign_in(client, "senseless")
    assert answer.status_code == 503
    assert not is_signed_in(client)


def test_the_same_subject_at_another_provider_is_another_owner(provider, settings):
    provider.register("1", **ALICE)
    provider.sign_in(Client(), "1")
    with run_server_in_thread() as server:
        other = use(settings, f"http://localhost:{server.server_port}")
        other.register("1", email="mallory@example.org", email_verified=True)
        client = Client()
        other.sign_in(client, "1")
    assert client.get("/signout/").context["user"].email == "mallory@example.org"


# Failures


def test_a_cancelled_sign_in_links_back(client, provider):
    page = provider.sign_in(client, "", action="deny")
    assert (page.status_code, "Signing in was cancelled" in page.text) == (403, True)
    assert 'href="/signin/"' in page.text


@pytest.mark.parametrize("query", ["", "?code=x", "?code=x&state=y", "?error=x", "?state=%00", "?error=<b>&state="])
def test_a_callback_without_a_started_sign_in_is_400(client, provider, query):
    page = client.get(f"/signin/oidc/callback/{query}")
    assert (page.status_code, "was not started here" in page.text) == (400, True)


def test_an_error_of_the_provider_is_shown_without_its_description(client, provider):
    state = parse_qs(urlsplit(client.post("/signin/oidc/").url).query)["state"][0]
    page = client.get(
        "/signin/oidc/callback/", {"state": state, "error": "server_error", "error_description": "<b>call us</b>"}
    )
    assert (page.status_code, "refused to sign you in" in page.text) == (403, True)
    assert "call us" not in page.text


def test_an_authorization_code_works_once(client, provider):
    provider.register("thirteenth", **ALICE)
    url = client.post("/signin/oidc/").url
    back = requests.post(url, data={"sub": "thirteenth"}, allow_redirects=False, timeout=5).headers["Location"]
    assert client.get(back).status_code == 302
    client.post("/signout/")
    assert client.get(back).status_code == 400
    state = parse_qs(urlsplit(client.post("/signin/oidc/").url).query)["state"][0]
    page = client.get(re.sub(r"state=[^&]*", f"state={state}", back))
    assert (page.status_code, "be reached" in page.text) == (503, True)
    assert not is_signed_in(client)


def test_a_provider_that_is_unreachable_at_the_start_or_during_sign_in_is_503(client, provider, settings, caplog):
    url = client.post("/signin/oidc/").url
    use(settings, "http://localhost:1")
    assert provider.authorize(client, url, sub="x").status_code == 503
    page = client.post("/signin/oidc/")
    assert (page.status_code, "Example ID can't be reached" in page.text) == (503, True)
    assert "OpenID Connect: ConnectionError" in caplog.text


NESTED = b"[" * 200_000
GARBAGE = [b"", b"[]", b"{}", b'{"issuer": 7}', b"\xff\xfe", b'{"error": "x"}', b'{"access_token": 7}',
           b'{"access_token": "x", "id_token": "x", "expires_in": "soon"}',
           b'{"access_token": "x", "id_token": "e30.%s.e30"}' % b64encode(NESTED),
           NESTED, b'{"a":' * 200_000, b'{"access_token": "%s"}' % (b"x" * bounded_requests.MAX_BYTES)]  # fmt: skip


@pytest.mark.parametrize("body", GARBAGE, ids=range(len(GARBAGE)))
@pytest.mark.parametrize("header", ["Content-Type: application/json", "X-None: 1"])
def test_a_malformed_configuration_of_the_provider_is_503(client, proxied_provider, body, header):
    proxied_provider.answer(http_answer("200 OK", body, header))
    page = client.post("/signin/oidc/")
    assert (page.status_code, "be reached" in page.text) == (503, True)


@pytest.mark.parametrize("body", GARBAGE, ids=range(len(GARBAGE)))
@pytest.mark.parametrize("good_answers", [0, 1, 2])
def test_a_malformed_answer_during_the_callback_is_503(client, running, proxied_provider, body, good_answers):
    """The malformed answer follows 0 to 2 good ones: configuration, token, user info."""
    url = client.post("/signin/oidc/").url
    back = requests.post(url, data={"sub": "x@example.org"}, allow_redirects=False, timeout=5).headers["Location"]
    openid_connect.configurations.clear()
    seen = proxied_provider.requests
    forward, proxied_provider._from_client = proxied_provider._from_client, None

    def from_client(*both):
        if proxied_provider.requests >= seen + good_answers:
            proxied_provider.answer(http_answer("200 OK", body, "Content-Type: application/json"))
        return forward(*both)

    proxied_provider._from_client = from_client
    page = client.get(back)
    assert (page.status_code, "be reached" in page.text) == (503, True)
    assert not is_signed_in(client)


def test_a_provider_that_sends_a_byte_at_a_time_occupies_two_threads_until_the_deadline(settings, monkeypatch):
    monkeypatch.setattr(bounded_requests, "SECONDS", 2)
    with Webhook(None) as slow:
        slow.slowly = trickle
        use(settings, f"http://localhost:{slow.port}")
        began = time.monotonic()
        clients = [Client() for _ in range(8)]
        pages = in_parallel(*(partial(client.post, "/signin/oidc/") for client in clients))
        assert time.monotonic() - began < 6  # the server would take 30
        assert slow.connections == 2
        assert sorted((page.status_code, "is slow to answer" in page.text) for page in pages) == [
            *[(503, False)] * 2, *[(503, True)] * 6,
        ]  # fmt: skip
        wait_until(lambda: not any(one.name == bounded_requests.THREAD_NAME for one in threading.enumerate()))
    assert clients[0].post("/signin/oidc/").status_code == 503  # the threads are free: it is unreachable, not busy


def test_a_resolver_that_hangs_occupies_two_threads_until_it_answers(settings, monkeypatch):
    monkeypatch.setattr(bounded_requests, "SECONDS", 0.3)
    use(settings, "http://id.example.org")
    calls, answers = [], threading.Event()

    def getaddrinfo(host, *_, **__):
        calls.append(host)
        answers.wait(30)
        raise socket.gaierror("no such host")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)

    def is_busy():
        return "is slow to answer" in Client().post("/signin/oidc/").text

    assert [is_busy() for _ in range(4)] == [False, False, True, True]
    assert calls == ["id.example.org"] * 2
    answers.set()
    wait_until(lambda: not is_busy())


def test_the_configuration_is_fetched_once_in_some_minutes(client, proxied_provider):
    for _ in range(3):
        assert client.post("/signin/oidc/").status_code == 302
    assert proxied_provider.requests == 1
    url, (expires_at, config) = openid_connect.configurations.popitem()
    openid_connect.configurations[url] = expires_at - openid_connect.CONFIGURATION_SECONDS, config
    assert client.post("/signin/oidc/").status_code == 302
    assert proxied_provider.requests == 2


def test_starts_that_wait_for_the_provider_keep_no_sign_in_from_ending(client, provider):
    provider.register("sixteenth", **ALICE)
    url = client.post("/signin/oidc/").url
    with openid_connect._exchange(openid_connect._starts), openid_connect._exchange(openid_connect._starts):
        assert Client().post("/signin/oidc/").status_code == 503
        provider.authorize(client, url, sub="sixteenth")
    assert is_signed_in(client)


def test_a_code_that_cannot_be_mailed_is_503(client, provider, mailbox):
    mailbox.stop()
    provider.register("fourteenth", email="alice@example.org")
    page = provider.sign_in(client, "fourteenth")
    assert (page.status_code, "could not send" in page.text) == (503, True)


def test_codes_after_an_unverified_sign_in_are_limited(provider, mailbox):
    provider.register("fifteenth", email="alice@example.org")
    with time_machine.travel(timezone.now().replace(second=1)):  # the limit counts by the minute
        codes = [provider.sign_in(Client(), "fifteenth").status_code for _ in range(4)]
    assert codes == [302, 302, 302, 429]


def test_sign_in_starts_by_post_and_only_if_configured(client, provider, settings):
    assert client.get("/signin/oidc/?next=/tokens/").url == "/signin/?next=%2Ftokens%2F"
    assert "Sign in with Example ID" in client.get("/signin/").text
    assert Client(enforce_csrf_checks=True).post("/signin/oidc/").status_code == 403
    start = client.post("/signin/oidc/?process=connect&scope=everything&auth_params=prompt%3Dnone")
    query = parse_qs(urlsplit(start.url).query)
    assert set(query["scope"][0].split()) == {"openid", "profile", "email"}
    assert ("prompt" in query, query["code_challenge_method"]) == (False, ["S256"])
    settings.OIDC_ISSUER = ""
    assert "Example ID" not in client.get("/signin/").text
    assert client.post("/signin/oidc/").status_code == 404
    assert client.get("/signin/oidc/callback/").status_code == 404


# In a browser


def test_a_person_signs_in_with_the_provider(page, live_server, provider, other_hosts):
    other_hosts.add(urlsplit(provider.url).netloc)
    provider.register("browser", **ALICE)
    page.goto("/tokens/")
    page.get_by_role("button", name="Sign in with Example ID").click()
    page.get_by_placeholder("sub").fill("browser")
    page.get_by_role("button", name="Authorize").click()
    page.wait_for_url(f"{live_server.url}/tokens/")
    assert Owner.objects.get().email == "alice@example.org"
