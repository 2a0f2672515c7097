"""The parts of allauth's private API that Guardian uses exist and behave as Guardian expects."""

import ast
import re
from pathlib import Path

import pytest

from accounts import allauth_private

ROOT = Path(__file__).resolve().parents[2]


def test_no_other_module_imports_allauths_private_names():
    apps = "accounts agents core guardian_site message_store notifications queues status tools"
    for app in apps.split():
        assert (ROOT / app).is_dir()
        for path in (ROOT / app).rglob("*.py"):
            if "allauth" not in (text := path.read_text()):
                continue
            imported = {
                f"{node.module}.{name.name}"
                for node in ast.walk(ast.parse(text))
                if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("allauth")
                for name in node.names
            }
            private = {name for name in imported if re.search(r"\.(internal\b|_)", name)}
            assert not private or path == Path(allauth_private.__file__), (path, private)


@pytest.mark.parametrize(
    ("proxies", "forwarded", "known"),
    [
        (0, "203.0.113.1", "192.0.2.9"),
        (1, "203.0.113.1", "203.0.113.1"),
        (1, "198.51.100.7, 203.0.113.1", "203.0.113.1"),
        (2, "198.51.100.7, 203.0.113.1", "198.51.100.7"),
        (2, "203.0.113.1", ""),
        (1, "<script>", ""),
    ],
)
def test_a_clients_address_is_the_one_named_by_the_trusted_proxies(rf, settings, proxies, forwarded, known):
    settings.ALLAUTH_TRUSTED_PROXY_COUNT = proxies
    request = rf.get("/", REMOTE_ADDR="192.0.2.9", HTTP_X_FORWARDED_FOR=forwarded)
    assert allauth_private.client_address(request) == known


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
