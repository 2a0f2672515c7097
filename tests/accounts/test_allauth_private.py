"""The parts of allauth's private API that Guardian uses exist and behave as Guardian expects."""

import ast
import re
from pathlib import Path

import pytest
from allauth.account.views import ConfirmLoginCodeView, RequestLoginCodeView
from allauth.core.context import request_context
from django.contrib.auth.models import AnonymousUser
from django.contrib.messages.storage.fallback import FallbackStorage
from django.contrib.sessions.backends.db import SessionStore
from django.core.cache import cache

from accounts import allauth_private

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def request_(rf, db):
    """Return a visitor's request with a session."""
    cache.clear()
    request = rf.post("/signin/", REMOTE_ADDR="192.0.2.7")
    request.session, request.user = SessionStore(), AnonymousUser()
    request._messages = FallbackStorage(request)
    with request_context(request):  # as allauth's middleware does
        yield request


def test_no_other_module_imports_allauths_private_names():
    for app in (
        "accounts",
        "agents",
        "core",
        "guardian_site",
        "message_store",
        "notifications",
        "queues",
        "status",
        "tools",
    ):
        for path in (ROOT / app).rglob("*.py"):
            imported = {
                f"{node.module}.{name.name}"
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("allauth")
                for name in node.names
            }
            private = {name for name in imported if re.search(r"\.(internal\b|_)", name)}
            assert not private or path == Path(allauth_private.__file__), (path, private)


def test_a_clients_address_is_the_last_named_by_a_trusted_proxy(rf, settings):
    settings.ALLAUTH_TRUSTED_PROXY_COUNT = 1
    request = rf.get("/", HTTP_X_FORWARDED_FOR="203.0.113.1, 192.0.2.7")
    assert allauth_private.client_address(request) == "192.0.2.7"
    settings.ALLAUTH_TRUSTED_PROXY_COUNT = 3
    assert allauth_private.client_address(request) == ""


@pytest.mark.parametrize("proxies", [0, 1])
def test_an_ipv4_client_of_a_socket_for_both_versions_of_ip_has_its_ipv4_address(rf, settings, proxies):
    settings.ALLAUTH_TRUSTED_PROXY_COUNT = proxies
    request = rf.get("/", **{"HTTP_X_FORWARDED_FOR" if proxies else "REMOTE_ADDR": "::ffff:192.0.2.7"})
    assert allauth_private.client_address(request) == "192.0.2.7"
    assert allauth_private.client_network(request) == "192.0.2.7"


def test_the_address_of_a_client_on_a_unix_socket_is_empty(rf, settings):
    settings.ALLAUTH_TRUSTED_PROXY_COUNT = 0
    assert allauth_private.client_address(rf.get("/", REMOTE_ADDR="")) == ""


def test_clients_of_one_ipv6_network_are_counted_together(rf, settings):
    settings.ALLAUTH_TRUSTED_PROXY_COUNT = 0
    networks = {
        allauth_private.client_network(rf.get("/", REMOTE_ADDR=address))
        for address in ("2001:db8:1::1", "2001:db8:1::2", "2001:db8:1:ff::1", "2001:db8:2::1")
    }
    assert networks == {"2001:db8:1::", "2001:db8:2::"}
    assert allauth_private.client_network(rf.get("/", REMOTE_ADDR="192.0.2.7")) == "192.0.2.7"


def test_a_started_code_is_mailed_and_expected(request_, alice, mailbox):
    assert not allauth_private.expects_code(request_)
    allauth_private.start_code(request_, alice, "alice@example.org")
    assert len(mailbox.to("alice@example.org")) == 1
    assert allauth_private.expects_code(request_)


def test_without_a_user_a_code_is_expected_but_not_mailed(request_, mailbox):
    allauth_private.start_code(request_, None, "alice@example.org")
    assert mailbox.to("alice@example.org") == []
    assert allauth_private.expects_code(request_)


def test_the_code_form_has_an_address_and_a_user_and_can_be_aborted(request_, alice, mailbox):
    allauth_private.start_code(request_, alice, "alice@example.org")
    assert allauth_private.expects_code(request_)
    view = allauth_private.EnterCodeView()
    view.setup(request_)
    view.dispatch(request_)
    assert (view.address, view.user) == ("alice@example.org", alice)
    view.abort()
    assert not allauth_private.expects_code(request_)


def test_our_code_forms_override_methods_that_allauth_has():
    assert callable(RequestLoginCodeView._redirect_to_pending_stage)
    assert not hasattr(ConfirmLoginCodeView, "address")
    assert not hasattr(ConfirmLoginCodeView, "user")
    assert not hasattr(ConfirmLoginCodeView, "abort")


def test_the_last_method_is_the_one_recorded_last(request_, alice):
    allauth_private.record_method(request_, alice, "code")
    allauth_private.record_method(request_, alice, "link")
    assert allauth_private.last_method(request_, alice) == "link"
