"""What agents report about themselves, and what they ask Guardian, as released agents do."""

import json
import subprocess
import uuid
from datetime import timedelta
from pathlib import Path

import pytest
from django.utils import timezone
from waldur_api_client import AuthenticatedClient
from waldur_api_client.api.marketplace_site_agent_identities import marketplace_site_agent_identities_cleanup_orphaned
from waldur_api_client.api.marketplace_site_agent_services import marketplace_site_agent_services_cleanup_stale
from waldur_api_client.models.cleanup_request_request import CleanupRequestRequest

from agents.models import AgentIdentity, AgentService, EventSubscription, Offering
from agents.services import services
from guardian_site.version import __version__
from tests.support.api import Program
from tests.support.plugin import ROOT
from tests.support.toolbox import call_before

PATH = "marketplace-site-agent-identities/"
SERVICES = "marketplace-site-agent-services/"


@pytest.fixture
def offering(alice):
    created = Offering.objects.create(name="Cluster")
    created.members.add(alice)
    return created


@pytest.fixture
def identity(alice, offering):
    return AgentIdentity.objects.create(owner=alice, offering=offering, name="cellar", version="1.0.7")


@pytest.fixture
def agent(alice):
    return Program(alice, scope="agent")


def test_an_agent_registers_a_service_and_a_processor_and_sends_statistics(agent, identity, alice):
    path = f"{PATH}{identity.uuid.hex}/register_service/"
    created = agent.post(path, {"name": "orders", "mode": "order_process"})
    assert created.status_code == 201
    service = created.json()
    assert (service["identity"], service["state"], service["processors"]) == (identity.uuid.hex, "Active", [])
    assert agent.post(path, {"name": "orders", "mode": None}).status_code == 200
    path = f"{SERVICES}{service['uuid']}/register_processor/"
    processor = {"name": "slurm", "backend_type": "SLURM", "backend_version": "23.11"}
    assert agent.post(path, processor).status_code == 201
    assert agent.post(path, processor).status_code == 200
    statistics = {"orders": {"done": 3}, "name": "ä"}
    path = f"{SERVICES}{service['uuid']}/set_statistics/"
    assert agent.post(path, {"statistics": statistics}).json()["statistics"] == statistics
    [shown] = Program(alice).get(f"{PATH}{identity.uuid.hex}/").json()["services"]
    assert (shown["name"], shown["statistics"]) == ("orders", statistics)
    assert [one["name"] for one in shown["processors"]] == ["slurm"]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("register_processor", {"name": "slurm"}, "backend_type"),
        ("set_statistics", {}, "statistics"),
        ("set_statistics", {"statistics": {"a": "\0"}}, "statistics"),
        ("set_statistics", {"statistics": {"a": "x" * 70_000}}, "statistics"),
    ],
)
def test_an_invalid_report_names_its_field(agent, identity, path, body, field):
    service = identity.services.create(name="orders")
    answer = agent.post(f"{SERVICES}{service.uuid.hex}/{path}/", body)
    assert (answer.status_code, list(answer.json())) == (400, [field])


def test_an_owner_has_at_most_so_many_services_and_processors(agent, identity, settings):
    settings.GUARDIAN_MAX_SUBSCRIPTIONS = 2
    path = f"{PATH}{identity.uuid.hex}/register_service/"
    services = [agent.post(path, {"name": f"service {one}"}).json()["uuid"] for one in range(2)]
    refused = agent.post(path, {"name": "one too many"})
    assert (refused.status_code, "at most 2" in refused.text) == (400, True)
    assert agent.post(path, {"name": "service 0"}).status_code == 200
    processor = {"name": "slurm", "backend_type": "SLURM"}
    paths = [f"{SERVICES}{uuid}/register_processor/" for uuid in services]
    assert [agent.post(path, processor).status_code for path in (*paths, paths[0])] == [201, 201, 200]
    assert agent.post(paths[0], {**processor, "name": "one too many"}).status_code == 400


def test_a_report_about_a_service_that_was_deleted_meanwhile_is_404(agent, identity, monkeypatch):
    service = identity.services.create(name="orders")
    call_before(monkeypatch, services, "set_statistics", AgentService.objects.all().delete)
    answer = agent.post(f"{SERVICES}{service.uuid.hex}/set_statistics/", {"statistics": {}})
    assert answer.status_code == 404


def test_an_agent_reads_the_version_and_who_it_is(agent, alice):
    assert agent.get("version/").json() == {"version": __version__}
    me = agent.get("users/me/").json()
    assert (me["uuid"], me["username"], me["is_staff"]) == (alice.uuid.hex, alice.email, False)
    assert agent.get("users/me/", field="uuid").json() == {"uuid": alice.uuid.hex}
    assert agent.get("users/me/", fields="uuid").status_code == 400


def test_identities_are_filtered_by_every_parameter_of_the_client(agent, alice, identity):
    other = Offering.objects.create(name="Other")
    AgentIdentity.objects.create(owner=alice, offering=other, name="attic", version="1.0.5")
    EventSubscription.objects.create(owner=alice, identity=identity, object_type="order")

    def names(**query):
        return [one["name"] for one in agent.get(PATH, **query).json()]

    assert names(offering_uuid=str(identity.offering.uuid)) == ["cellar"]
    assert names(version="1.0.5") == ["attic"]
    assert names(orphaned="true") == ["attic"]
    assert names(orphaned="false") == ["cellar"]
    AgentIdentity.objects.get(name="attic").services.create(name="orders")
    assert names(orphaned="true") == []
    assert names(last_restarted="2030-01-01T00:00:00Z") == []
    assert names(page_size="1", o="name") == ["attic"]


def test_services_and_processors_are_filtered_by_every_parameter_of_the_client(alice, identity):
    now = timezone.now()
    old = {"last_run": now - timedelta(hours=2), "backend_type": "MOAB", "backend_version": "9"}
    idle = identity.services.create(name="idle", mode="report", state="Idle")
    active = identity.services.create(name="active", mode="order_process")
    AgentService.objects.filter(pk=idle.pk).update(modified=now - timedelta(days=2))
    idle.processors.create(name="old", **old)
    active.processors.create(name="new", backend_type="SLURM", backend_version="23", last_run=now)
    program = Program(alice)

    def services(**query):
        return [one["name"] for one in program.get(SERVICES, **query).json()]

    def processors(**query):
        return [one["name"] for one in program.get("marketplace-site-agent-processors/", **query).json()]

    yesterday = (now - timedelta(days=1)).isoformat()
    assert services(identity_uuid=identity.uuid.hex) == ["active", "idle"]
    assert services(identity_uuid=uuid.uuid4().hex) == []
    assert services(mode="report") == services(state=2) == services(state="Idle") == ["idle"]
    assert services(state=["1", "3", "1"]) == ["active"]
    assert services(stale="true") == services(modified_before=yesterday) == ["idle"]
    assert services(stale="false") == services(modified_after=yesterday) == ["active"]
    assert processors(service_uuid=idle.uuid.hex) == processors(stale="true") == ["old"]
    assert processors(backend_type="MOAB") == processors(backend_version="9") == ["old"]
    assert processors(last_run=yesterday) == ["new", "old"]
    assert processors(last_run_before=(now - timedelta(hours=1)).isoformat()) == ["old"]
    assert processors(stale="false") == ["new"]


def test_operators_remove_identities_with_nothing_registered_and_services_that_do_not_report(
    operator, alice, identity, live_server
):
    long_ago = timezone.now() - timedelta(days=2)
    attic = AgentIdentity.objects.create(owner=alice, offering=identity.offering, name="attic")
    service = identity.services.create(name="orders")
    AgentIdentity.objects.update(modified=long_ago)
    key = Program(operator).key
    with AuthenticatedClient(base_url=live_server.url, token=key, prefix="Token") as client:
        clean = marketplace_site_agent_identities_cleanup_orphaned.sync
        answers = [clean(client=client, body=CleanupRequestRequest(dry_run=dry)) for dry in (True, False, False)]
        assert [(one.dry_run, [item.uuid for item in one.items]) for one in answers] == [
            (True, [attic.uuid]), (False, [attic.uuid]), (False, []),
        ]  # fmt: skip
        assert (answers[0].items[0].offering_name, answers[0].deleted_count) == (identity.offering.name, 1)
        clean = marketplace_site_agent_services_cleanup_stale.sync
        assert clean(client=client, body=CleanupRequestRequest(dry_run=False)).items == []
        AgentService.objects.update(modified=long_ago)
        [item] = clean(client=client, body=CleanupRequestRequest(dry_run=False)).items
    assert (item.uuid, item.identity_name, item.state) == (service.uuid, "cellar", "Active")
    assert (AgentIdentity.objects.get(), AgentService.objects.count()) == (identity, 0)


@pytest.mark.parametrize(
    ("path", "query", "field"),
    [
        (PATH, {"offering": "x"}, "offering"),
        (SERVICES, {"state": "4"}, "state"),
        (SERVICES, {"mode": ["report", "report"]}, "mode"),
        ("event-consumers/", {"is_local": "x"}, "is_local"),
        (PATH, {"offering_uuid": "x"}, "offering_uuid"),
        (PATH, {"last_restarted": "yesterday"}, "last_restarted"),
    ],
)
def test_an_unknown_or_invalid_filter_is_refused(alice, path, query, field):
    answer = Program(alice).get(path, **query)
    assert (answer.status_code, list(answer.json())) == (400, [field])


def test_subscriptions_are_filtered_by_their_owner(operator, alice, bob):
    for owner in (alice, bob):
        EventSubscription.objects.create(owner=owner)
    program = Program(operator)
    assert len(program.get("event-subscriptions/", user_uuid=alice.uuid.hex).json()) == 1
    assert len(program.get("event-subscriptions/", user_username=bob.email).json()) == 1
    assert program.get("event-subscriptions/", user_uuid=uuid.uuid4().hex).json() == []


REPORT = """
import json, sys
from waldur_api_client import AuthenticatedClient
from waldur_api_client.api.users import users_me_retrieve
from waldur_api_client.api.version import version_retrieve
from waldur_site_agent.common.agent_identity_management import AgentIdentityManager
from waldur_site_agent.common.structures import Offering

url, token, offering = sys.argv[1:]
client = AuthenticatedClient(base_url=url, token=token, headers={}, prefix="Token")
manager = AgentIdentityManager(Offering(
    name="Cluster", waldur_api_url=url + "/api/", waldur_api_token=token, waldur_offering_uuid=offering,
    backend_type="none",
), client)
identity = manager.register_identity("agent-" + offering)
service = manager.register_service(identity, "orders", "order_process")
processor = manager.register_processor(service, "slurm", "SLURM", "23.11")
print(json.dumps([
    version_retrieve.sync(client=client).version, users_me_retrieve.sync(client=client).username, service.name,
    processor.name,
]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("version", ["1.0.5", "1.0.7", "1.0.8rc12"])
def test_the_agents_own_client_reads_all_of_it(live_server, alice, offering, version):
    python = Path(ROOT) / "var" / "site-agents" / version / "bin" / "python"
    key = Program(alice, scope="agent").key
    ran = subprocess.run(
        [python, "-c", REPORT, live_server.url, key, str(offering.uuid)], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout.splitlines()[-1]) == [__version__, alice.email, "orders", "slurm"]
