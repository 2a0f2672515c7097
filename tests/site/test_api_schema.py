"""The REST API's schema is complete and readable. That answers match it is tested in test_fuzz.py."""

import json
import re
import shlex

import pytest
import schemathesis
from django.core.management import call_command
from playwright.sync_api import expect

from accounts.access.tokens import create_token
from accounts.models import Owner
from guardian_site import api_docs
from guardian_site.api_calls import SESSION
from guardian_site.api_urls import urlpatterns
from guardian_site.wsgi import application
from tests.site.test_who_may import TABLE
from tests.support.api import Program
from tests.support.chromium import sign_in

SCHEMA = schemathesis.openapi.from_wsgi("/api/schema/", application, headers={"Accept": "application/json"})
ALL_OPERATIONS = [found.ok() for found in SCHEMA.get_all_operations()]
OPERATIONS = [operation for operation in ALL_OPERATIONS if operation.path.startswith("/api/")]
"""The operations of the REST API, without those of the message store."""
RESOURCES = api_docs.reference().resources
CALLS = [call for resource in RESOURCES.values() for call in resource.calls]


def test_the_schema_is_generated_without_warnings(tmp_path):
    call_command("spectacular", validate=True, fail_on_warn=True, file=str(tmp_path / "schema.yaml"))
    assert (tmp_path / "schema.yaml").stat().st_size


def test_the_schema_has_every_endpoint():
    described = {re.sub(r"^/api/", "", operation.path) for operation in OPERATIONS}
    mounted = {re.sub(r"<str:(\w+)>", r"{\1}", str(pattern.pattern)) for pattern in urlpatterns}
    assert mounted - described == {"schema/", "docs/", "docs/{tag}/", "^"}
    assert described <= mounted


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
def test_each_endpoint_has_a_summary_and_documented_responses(operation):
    described = operation.definition.raw
    assert described["summary"]
    assert {"tokenAuth": []} in described["security"]
    assert {"cookieAuth": []} in described["security"]
    assert "401" in described["responses"]
    for status, answer in described["responses"].items():
        assert answer["description"]
        kinds = set(answer.get("content", {}))
        if status == "204" or (status == "202" and not operation.path.endswith(("/replay/", "/restore/", "/move/"))):
            assert not kinds
        elif status < "300":
            assert kinds == {"text/plain" if operation.path.endswith("/download/") else "application/json"}
        else:
            assert "application/problem+json" in kinds


def test_examples_match_their_schemas():
    components = SCHEMA.raw_schema["components"]["schemas"]
    seen = 0
    for operation in OPERATIONS:
        for answer in operation.definition.raw["responses"].values():
            content = answer.get("content", {}).get("application/json", {})
            for example in content.get("examples", {}).values():
                value, schema = example["value"], content["schema"]
                if "$ref" in schema:
                    schema = components[schema["$ref"].rpartition("/")[2]]
                if schema["type"] == "array":
                    [value], schema = value, components[schema["items"]["$ref"].rpartition("/")[2]]
                assert set(schema["required"]) <= set(value) <= set(schema["properties"]), operation.label
                seen += 1
    assert seen > 15


def test_the_schema_needs_no_sign_in():
    yaml = Program().send("GET", "schema/")
    assert (yaml.status_code, yaml["Content-Type"].partition(";")[0]) == (200, "application/vnd.oai.openapi")
    json = Program().send("GET", "schema/", accept="application/json")
    assert json.json()["openapi"].startswith("3.")
    assert Program().get("schema/", format="json").json() == json.json()


def test_the_schema_is_generated_once(monkeypatch):
    first = Program().send("GET", "schema/")
    monkeypatch.setattr(api_docs.SchemaGenerator, "get_schema", lambda *_, **__: pytest.fail("It is made again."))
    again = Program().send("GET", "schema/")
    assert (again.status_code, again.content) == (200, first.content)
    assert 'filename="Guardian.yaml"' in again["Content-Disposition"]


def test_endpoints_with_a_body_document_411():
    for operation in OPERATIONS:
        assert ("411" in operation.definition.raw["responses"]) == bool(operation.body), operation.label


@pytest.mark.django_db
@pytest.mark.parametrize("tag", RESOURCES)
def test_links_of_a_resource_lead_to_objects_on_its_page(client, tag):
    page = client.get(f"/api/docs/{tag}/").text
    anchors = re.findall(r' id="([^"]+)"', page)
    assert len(anchors) == len(set(anchors))
    assert set(re.findall(r'href="#([^"]+)"', page)) <= set(anchors)


@pytest.mark.parametrize(
    "call", [call for call in CALLS if call.path.startswith("/api/")], ids=lambda call: f"{call.method} {call.path}"
)
def test_the_curl_command_of_a_call_sends_its_method_and_example(call):
    words = shlex.split(call.curl("https://guardian.example.org"))
    if call.needs == SESSION:
        assert words == []
        return
    given = {word: words[words.index(word) + 1] for word in ("-X", "-H", "--json") if word in words}
    assert given.get("-X", "POST" if "--json" in words else "GET") == call.method
    assert given["-H"] == "Authorization: Token $TOKEN"
    assert json.loads(given.get("--json", "null")) == json.loads(call.body or "null")
    [address] = [word for word in words if word.startswith("https://guardian.example.org/api/")]
    assert not re.search("[{}]", address)  # curl expands braces


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("store_heartbeat", "curl http://g/__heartbeat__"),
        ("store_create_queue",
         'curl -H "Authorization: Application $KEY" http://g/v1/APPLICATION -d queue_name=orders -d partitions=2'),
        ("store_post_messages",
         'curl -H "Authorization: Application $KEY" http://g/v1/APPLICATION/QUEUE '
         """--json '{"messages": [{"body": "a book"}]}'"""),
        ("store_overwrite_messages",
         'curl -X PUT -H "Authorization: Application $KEY" http://g/v1/APPLICATION/QUEUE/MESSAGE_IDS '
         '-H "Content-Type: text/plain" -d BODY'),
    ],
)  # fmt: skip
def test_the_curl_command_of_the_message_store_presents_a_key(name, command):
    [call] = [call for call in CALLS if call.name == name]
    assert call.curl("http://g/") == command


def test_the_schema_has_every_call_of_the_message_store_and_no_other():
    described = {f"{one.method.lower()} {one.path[1:]}" for one in ALL_OPERATIONS if one not in OPERATIONS}
    routes = [route for route in TABLE if route.startswith(("v1/", "__heartbeat__"))]
    mounted = {f"{method} {route}" for route in routes for method in TABLE[route]}
    mounted = {re.sub("<str:([^>]+)>", r"{\1}", call) for call in mounted}
    assert described == mounted


def test_a_call_says_which_tokens_may_send_it():
    needs = {f"{call.method} {call.path}": call.needs for call in CALLS}
    assert needs["GET /api/agent-identities/"] == "a token of any kind, or a session"
    assert needs["POST /api/agent-identities/"] == "a token that can register queues or do everything, or a session"
    assert needs["GET /api/queues/"] == "a token that can read or do everything, or a session"
    assert needs["POST /api/tokens/"] == SESSION
    assert needs["GET /__heartbeat__"] == "nothing"
    assert needs["POST /v1/{application}"] == "a key of the application"
    assert needs["GET /v1/{application}/{queue}/info"] == (
        "a key of the application, or the token of a reader, or nothing if the queue is public"
    )


def opened(page, tag, name):
    page.goto(f"/api/docs/{tag}/#{name}")
    return page.locator(f"details#{name}")


@pytest.mark.django_db(transaction=True)
def test_a_reader_tries_a_call_with_the_session(page):
    """The fixture ``page`` fails the test at a violation of the content security policy."""
    owner = Owner.objects.create_user("alice@example.org")
    sign_in(page, owner)
    call = opened(page, "vouching", "vouching_ask")
    call.get_by_label("Body, JSON").fill('{"reason": "I build things"}')
    call.get_by_role("button", name="Send POST").click()
    expect(call.get_by_role("status")).to_contain_text("204 No Content")
    owner.refresh_from_db()
    assert owner.vouch_request == "I build things"


@pytest.mark.django_db(transaction=True)
def test_a_reader_tries_a_call_with_a_token_that_is_stored_nowhere(page):
    owner = Owner.objects.create_user("alice@example.org", vouched=True)
    _, key = create_token(owner, "a program", scope="all")
    sent = []
    page.on("request", lambda request: sent.append(request))
    call = opened(page, "tokens", "tokens_retrieve")
    page.get_by_label("Token", exact=True).fill(key)
    call.get_by_label("uuid").fill("no such token")
    call.get_by_role("button", name="Send GET").click()
    expect(call.get_by_role("status")).to_contain_text("403")
    assert sent[-1].url.endswith("/api/tokens/no%20such%20token/")
    assert sent[-1].headers["authorization"] == f"Token {key}"
    call = opened(page, "queues", "queues_list")
    page.get_by_label("Token", exact=True).fill(key)
    call.get_by_label("page_size").fill("5")
    call.get_by_role("button", name="Send GET").click()
    expect(call.get_by_role("status")).to_contain_text("X-Result-Count: 0")
    assert sent[-1].url.endswith("/api/queues/?page_size=5")
    assert not [request.url for request in sent if key in request.url]
    assert key not in page.evaluate("JSON.stringify([localStorage, sessionStorage, document.cookie, location.href])")


@pytest.mark.django_db
@pytest.mark.parametrize("accept", ["application/vnd.oai.openapi", "application/json"])
def test_errors_of_the_schema_are_json(client, accept):
    answer = client.get("/api/schema/", headers={"Authorization": f"Token {'0' * 64}", "Accept": accept})
    assert (answer.status_code, answer["Content-Type"]) == (401, "application/problem+json")
    assert json.loads(answer.content)["status"] == 401
