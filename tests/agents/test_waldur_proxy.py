"""The proxy of deploy/nginx/waldur.conf: registration goes to Guardian, everything else to a Waldur. nginx is real."""

import re
from urllib.parse import urlsplit

import httpx
import pytest
from waldur_api_client import AuthenticatedClient
from waldur_api_client.api.marketplace_site_agent_identities import (
    marketplace_site_agent_identities_create,
    marketplace_site_agent_identities_register_queue,
    marketplace_site_agent_identities_register_service,
)
from waldur_api_client.models.agent_identity_request import AgentIdentityRequest
from waldur_api_client.models.agent_queue_registration_request import AgentQueueRegistrationRequest
from waldur_api_client.models.agent_service_create_request import AgentServiceCreateRequest

from agents.events import publishing
from agents.models import AgentIdentity
from tests.support.plugin import ROOT
from tests.support.recorder import Recorder
from tools.nginx import PrivateNginx

pytestmark = pytest.mark.slow

WALDUR_TOKEN = "Token 0123456789abcdef0123456789abcdef01234567"


def recipe(directory, guardian, waldur, tokens):
    """Return a private nginx with the recipe, with the addresses and tokens of a test."""
    text = (ROOT / "deploy" / "nginx" / "waldur.conf").read_text()
    (directory / "agent-tokens.conf").write_text(tokens)
    for written, here in (
        ("/etc/nginx/agent-tokens.conf", str(directory / "agent-tokens.conf")),
        ("server 127.0.0.1:8000;", f"server {guardian};"),
        ("server waldur.example.org:443;", f"server 127.0.0.1:{waldur};"),
        ("https://waldur", "http://waldur"),
    ):
        assert text.count(written) == 1
        text = text.replace(written, here)
    text = re.sub(r"^ +(listen|server_name|ssl_\w+|proxy_ssl_\w+) .*;\n", "", text, flags=re.M)
    before, lines = re.fullmatch(r"(.+)^server {\n(.+)^}\n", text, re.M | re.S).groups()
    return PrivateNginx(lines, before)


@pytest.fixture
def token(agents, alice):
    return agents.token(alice)


@pytest.fixture
def waldur():
    """Give a stand-in for a Waldur, which records requests."""
    with Recorder(b"[]") as recorder:
        yield recorder


@pytest.fixture
def proxy(agents, live_server, waldur, token, tmp_path):
    tokens = f'"Token {token.key}" "{WALDUR_TOKEN}";\n'
    with recipe(tmp_path, urlsplit(live_server.url).netloc, waldur.port, tokens) as nginx:
        waldur.received.clear()
        yield nginx


def test_registration_reaches_guardian_and_nothing_of_it_the_waldur(proxy, waldur, agents, alice, token):
    offering = agents.offering(alice)
    with AuthenticatedClient(base_url=proxy.url, token=token.key, prefix="Token") as client:
        identity = marketplace_site_agent_identities_create.sync(
            client=client, body=AgentIdentityRequest(offering=offering.uuid, name="cellar")
        )
        service = AgentServiceCreateRequest(name="orders")
        marketplace_site_agent_identities_register_service.sync(client=client, uuid=identity.uuid, body=service)
        body = AgentQueueRegistrationRequest()
        queue = marketplace_site_agent_identities_register_queue.sync(client=client, uuid=identity.uuid, body=body)
    assert AgentIdentity.objects.get().services.get().name == "orders"
    assert queue.queue_name in agents.queues(queue.vhost)
    assert publishing.publish(offering, "order", {}).delivered == 1
    assert waldur.received == []


@pytest.mark.parametrize("path", ["/api/version/", "/api/users/me/?field=uuid", "/api/marketplace-orders/a%2Fb/", "/"])
def test_everything_else_reaches_the_waldur_with_its_own_token(proxy, waldur, token, path):
    headers = {"Authorization": f"Token {token.key}"}
    assert httpx.get(f"{proxy.url}{path}", headers=headers, trust_env=False).status_code == 200
    [asked] = waldur.received
    assert (asked.path, asked.headers["Authorization"]) == (path, WALDUR_TOKEN)
    assert asked.headers["Host"] == "waldur.example.org"


def test_an_unknown_token_reaches_the_waldur_unchanged(proxy, waldur):
    httpx.get(f"{proxy.url}/api/version/", headers={"Authorization": "Token another"}, trust_env=False)
    assert waldur.received[-1].headers["Authorization"] == "Token another"
