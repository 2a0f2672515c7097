"""The REST API's schema is complete and readable. That answers match it is tested in test_fuzz.py."""

import json
import re

import pytest
import schemathesis
from django.core.management import call_command
from playwright.sync_api import expect

from accounts.models import Owner
from guardian_site import api_docs
from guardian_site.api_schema import METHODS
from guardian_site.api_urls import urlpatterns
from guardian_site.wsgi import application
from tests.api import Program

SCHEMA = schemathesis.openapi.from_wsgi("/api/schema/", application, headers={"Accept": "application/json"})
OPERATIONS = [found.ok() for found in SCHEMA.get_all_operations()]


def test_the_schema_is_generated_without_warnings(tmp_path):
    call_command("spectacular", validate=True, fail_on_warn=True, file=str(tmp_path / "schema.yaml"))
    assert (tmp_path / "schema.yaml").stat().st_size


def test_the_schema_has_every_endpoint():
    described = {re.sub(r"^/api/", "", operation.path) for operation in OPERATIONS}
    mounted = {re.sub(r"<str:(\w+)>", r"{\1}", str(pattern.pattern)) for pattern in urlpatterns}
    assert mounted - described == {"schema/", "docs/", "^"}
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
        if status == "204" or (status == "202" and not operation.path.endswith("/replay/")):
            assert not kinds
        elif status < "300":
            assert kinds == {"application/x-ndjson" if operation.path.endswith("/download/") else "application/json"}
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


@pytest.mark.parametrize("answer", ["MadePulseUser", "Password"])
def test_the_password_of_an_answer_is_optional(answer):
    schema = SCHEMA.raw_schema["components"]["schemas"][answer]
    assert "password" in schema["properties"]
    assert "password" not in schema["required"]


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


def test_methods_of_a_path_have_a_fixed_order():
    for path, operations in SCHEMA.raw_schema["paths"].items():
        assert list(operations) == [method for method in METHODS if method in operations], path


def test_endpoints_with_a_body_document_411():
    for operation in OPERATIONS:
        assert ("411" in operation.definition.raw["responses"]) == bool(operation.body), operation.label


@pytest.mark.django_db(transaction=True)
def test_the_docs_page_shows_every_endpoint_without_csp_violations(page):
    """The fixture fails the test on a CSP violation and on a request to another host."""
    page.goto("/api/docs/")
    shown = page.locator(".opblock-summary")
    expect(shown).to_have_count(len(OPERATIONS))
    words = [f"{one.method.upper()} {one.path}" for one in OPERATIONS]
    assert [" ".join(text.replace("\u200b", "").split()[:2]) for text in shown.all_inner_texts()] == words
    shown.first.click()
    expect(page.get_by_role("table").first).to_contain_text("page_size")
    expect(page.get_by_role("button", name=re.compile("Try it out|Authorize"))).to_have_count(0)


@pytest.mark.django_db
def test_the_docs_page_has_no_inline_code(client):
    page = client.get("/api/docs/")
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|<script(?![^>]* src=)", page.text)
    assert not re.search(r"(src|href)=.https?:", page.text)


@pytest.mark.django_db
def test_the_docs_page_names_the_signed_in_owner(client):
    assert "Sign in" in client.get("/api/docs/").text
    client.force_login(Owner.objects.create_user("alice@example.org"))
    assert "alice@example.org" in client.get("/api/docs/").text


@pytest.mark.django_db
@pytest.mark.parametrize("accept", ["application/vnd.oai.openapi", "application/json"])
def test_errors_of_the_schema_are_json(client, accept):
    answer = client.get("/api/schema/", headers={"Authorization": f"Token {'0' * 64}", "Accept": accept})
    assert (answer.status_code, answer["Content-Type"]) == (401, "application/problem+json")
    assert json.loads(answer.content)["status"] == 401
