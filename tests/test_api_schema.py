"""The REST API keeps what its schema says, and the schema can be read."""

import contextlib
import re
import uuid
from typing import Any

import pytest
import schemathesis
from django.core.management import call_command
from django.utils import timezone
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from accounts.models import AuthToken, Owner, PulseUser
from accounts.pulse_users import make_pulse_user
from guardian_site import api_docs
from guardian_site.api_urls import urlpatterns
from guardian_site.wsgi import application
from queues.models import (
    AgentIdentity,
    Channel,
    Consumer,
    EventSubscription,
    Offering,
    Queue,
    QueueEvent,
    QueueSample,
    SubscriptionQueue,
)
from rabbit.management import NotThere
from tests.agents import agents  # noqa: F401
from tests.api import Program

SCHEMA = schemathesis.openapi.from_wsgi("/api/schema/", application, headers={"Accept": "application/json"})
OPERATIONS = [found.ok() for found in SCHEMA.get_all_operations()]
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    response_headers_conformance,
]
EXAMPLES = 20


def test_the_schema_is_valid_and_nothing_in_it_had_to_be_guessed(tmp_path):
    call_command("spectacular", validate=True, fail_on_warn=True, file=str(tmp_path / "schema.yaml"))
    assert (tmp_path / "schema.yaml").stat().st_size


def test_the_schema_has_every_endpoint():
    described = {re.sub(r"^/api/", "", operation.path) for operation in OPERATIONS}
    mounted = {re.sub(r"<str:(\w+)>", r"{\1}", str(pattern.pattern)) for pattern in urlpatterns}
    assert mounted - described == {"schema/", "docs/", "^"}
    assert described <= mounted


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
def test_each_endpoint_is_described(operation):
    described = operation.definition.raw
    assert described["summary"]
    assert {"tokenAuth": []} in described["security"]
    assert {"cookieAuth": []} in described["security"]
    assert "401" in described["responses"]
    for status, answer in described["responses"].items():
        assert answer["description"]
        kinds = set(answer.get("content", {}))
        if status in ("202", "204"):
            assert not kinds
        elif status < "300":
            assert kinds == {"application/json"}
        else:
            assert "application/problem+json" in kinds


def test_examples_have_the_fields_that_their_schemas_have():
    components = SCHEMA.raw_schema["components"]["schemas"]
    seen = 0
    for operation in OPERATIONS:
        for answer in operation.definition.raw["responses"].values():
            content = answer.get("content", {}).get("application/json", {})
            for example in content.get("examples", {}).values():
                value, schema = example["value"], content["schema"]
                schema = components[schema["$ref"].rpartition("/")[2]]
                if schema["type"] == "array":
                    [value], schema = value, components[schema["items"]["$ref"].rpartition("/")[2]]
                assert set(schema["required"]) <= set(value) <= set(schema["properties"]), operation.label
                seen += 1
    assert seen > 15


def test_everybody_may_read_the_schema():
    yaml = Program().send("GET", "schema/")
    assert (yaml.status_code, yaml["Content-Type"].partition(";")[0]) == (200, "application/vnd.oai.openapi")
    json = Program().send("GET", "schema/", accept="application/json")
    assert json.json()["openapi"].startswith("3.")
    assert Program().get("schema/", format="json").json() == json.json()


def test_the_schema_is_made_once(monkeypatch):
    first = Program().send("GET", "schema/")
    monkeypatch.setattr(api_docs.SchemaGenerator, "get_schema", lambda *_, **__: pytest.fail("It is made again."))
    again = Program().send("GET", "schema/")
    assert (again.status_code, again.content) == (200, first.content)
    assert 'filename="Guardian.yaml"' in again["Content-Disposition"]


def test_endpoints_with_a_body_say_that_they_need_its_length():
    for operation in OPERATIONS:
        assert ("411" in operation.definition.raw["responses"]) == bool(operation.body), operation.label


@pytest.mark.django_db
def test_the_page_to_read_names_every_endpoint_and_has_nothing_inline(client):
    page = client.get("/api/docs/")
    assert page.status_code == 200
    for operation in OPERATIONS:
        assert f"<code>{operation.label}</code>" in page.text
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|<script(?![^>]* src=)", page.text)
    assert not re.search(r"(src|href)=.https?:", page.text)


class World:
    """An owner with one of everything, which is made again when a request has removed it."""

    def __init__(self, guarded: str, management: Any) -> None:
        self.vhost, self.management = guarded, management
        self.owner = Owner.objects.create_user("alice@example.org", vouched=True)
        self.username = f"alice-{uuid.uuid4().hex[:8]}"
        self.queue, self.exchange = f"queue/{self.username}/q", f"exchange/{self.username}/e"
        self.key = AuthToken.objects.create(user=self.owner)[1]
        self.restore()

    def restore(self) -> None:
        account = PulseUser.objects.filter(username=self.username).first()
        if account is None:
            account, _ = make_pulse_user(self.username, [self.owner])
        self.management.make_queue(self.vhost, self.queue)
        self.management.make_exchange(self.vhost, self.exchange)
        now = timezone.now()
        queue, new = Queue.objects.get_or_create(
            vhost=self.vhost, name=self.queue,
            defaults={"type": "classic", "durable": True, "auto_delete": False, "exclusive": False,
                      "ready": 1, "unacknowledged": 0, "first_seen": now, "last_seen": now},
        )  # fmt: skip
        if new:
            QueueSample.objects.create(queue=queue, at=now, length=1)
            QueueEvent.objects.create(queue=queue, vhost=self.vhost, queue_name=self.queue, kind="warned", at=now)
        Queue.objects.filter(pk=queue.pk).update(state="ok", pulse_user=account)
        channel = Channel.objects.get_or_create(owner=self.owner, name="chat", defaults={"service": "Webhook"})[0]
        spare = AuthToken.objects.filter(user=self.owner, name="spare").first()
        spare = spare or AuthToken.objects.create(user=self.owner, name="spare")[0]
        offering = Offering.objects.get_or_create(name="Cluster")[0]
        offering.members.add(self.owner)
        offering.publishers.add(self.owner)
        identity = AgentIdentity.objects.get_or_create(owner=self.owner, offering=offering, name="cellar")[0]
        named = {"vhost": self.owner.uuid.hex, "queue_name": f"consumer_{uuid.uuid4().hex}"}
        consumer = Consumer.objects.get_or_create(identity=identity, defaults=named)[0]
        subscription = EventSubscription.objects.get_or_create(
            owner=self.owner, identity=identity, object_type="order", defaults={"source_ip": "192.0.2.7"}
        )[0]
        named = {"vhost": self.owner.uuid.hex, "queue_name": f"subscription_{uuid.uuid4().hex}"}
        subscribed = SubscriptionQueue.objects.get_or_create(
            subscription=subscription, offering=offering, object_type="call", defaults=named
        )[0]
        self.offering = offering
        self.uuids = {
            "queues": queue.uuid, "channels": channel.uuid, "tokens": spare.uuid, "owners": self.owner.uuid,
            "offerings": offering.uuid, "agent-consumers": consumer.uuid, "event-subscriptions": subscription.uuid,
            "event-subscription-queues": subscribed.uuid,
            **dict.fromkeys(["marketplace-site-agent-identities", "agent-identities"], identity.uuid),
        }  # fmt: skip

    def point(self, case: schemathesis.Case) -> None:
        """Have this request name what is there."""
        kind = case.path.split("/")[2]
        if "uuid" in case.path_parameters:
            case.path_parameters["uuid"] = self.uuids[kind].hex
        if "username" in case.path_parameters:
            case.path_parameters["username"] = self.username
        if kind == "exchanges":
            case.query["name"] = self.exchange
        for field in {"offering", "offering_uuid"} & (set(case.body) if isinstance(case.body, dict) else set()):
            case.body[field] = self.offering.uuid.hex

    def remove(self) -> None:
        """Take what was made off the broker, where accounts are not bound to the test's vhost."""
        for account in PulseUser.objects.all():
            with contextlib.suppress(NotThere):
                self.management.delete_user(account.username)


@pytest.fixture
def world(guarded, management, settings, agents):  # noqa: F811
    settings.GUARDIAN_OWNERS_MAX_QUEUE_LENGTH = 1000
    made = World(guarded, management)
    yield made
    made.remove()


@pytest.mark.slow
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
def test_every_answer_is_one_that_the_schema_tells_of(world, operation):
    """Whatever is sent, sensible or not, by an owner, about what is there or not."""
    sensible = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
    nonsense = operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)
    sent = 0

    @settings(
        max_examples=EXAMPLES, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(
        case=sensible | nonsense if takes_something(operation) else sensible,
        there=st.sampled_from([True, True, False]),
    )
    def send(case: schemathesis.Case, there: bool) -> None:
        nonlocal sent
        if there and operation.label != "POST /api/channels/{uuid}/test/":  # it would be sent to somebody
            world.restore()
            world.point(case)
        case.call_and_validate(headers={"Authorization": f"Token {world.key}"}, checks=CHECKS)
        sent += 1

    send()
    assert sent


def takes_something(operation: schemathesis.APIOperation) -> bool:
    return bool(operation.body or operation.query or operation.path_parameters)
