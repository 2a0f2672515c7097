"""A client that openapi-python-client generates from the served schema calls every operation, and reads its answers.

The requests of the REST API and their statuses are those of test_who_may.py.
"""

import importlib
import inspect
import json
import re
import subprocess
import sys
from functools import partial
from io import BytesIO
from pathlib import Path
from urllib.parse import parse_qsl

import httpx
import pytest

from guardian_site.wsgi import application
from message_store.applications import create_key
from message_store.models import Application
from tests.site.test_api_schema import SCHEMA
from tests.site.test_who_may import BODIES, EXPECTED, OTHER_PATH, PULSE_USER, VISITORS, restore_broker, undone, world  # noqa: F401
from tests.support.api import keeping_connections

pytestmark = pytest.mark.slow

PACKAGE = "guardian_client"
"""The name that the generator derives from the title of the schema."""

OPERATIONS = {
    described["operationId"]: (path, method, described)
    for path, methods in SCHEMA.raw_schema["paths"].items()
    for method, described in methods.items()
}
OF_STORE = {name for name, (path, *_) in OPERATIONS.items() if not path.startswith("/api/")}


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """Generate the client. A warning fails, because the client would lack something."""
    folder = tmp_path_factory.mktemp("client")
    (folder / "schema.json").write_text(json.dumps(SCHEMA.raw_schema))
    (folder / "config.yaml").write_text("post_hooks: []\n")
    command = [Path(sys.prefix) / "bin/openapi-python-client", "generate", "--fail-on-warning", "--meta", "none"]
    files = ["--path", folder / "schema.json", "--config", folder / "config.yaml", "--output-path", folder / PACKAGE]
    subprocess.run([*command, *files], check=True, timeout=120)
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(folder)
        yield importlib.import_module(PACKAGE)


@pytest.fixture(autouse=True)
def in_this_thread():
    """Answer requests in the test's transaction."""
    with keeping_connections():
        yield


def client(package, key="", prefix="Token", **options):
    """Return a generated client that sends a token or key, or none, and raises if an answer is not in the schema."""
    options |= {"base_url": "http://testserver", "raise_on_unexpected_status": True}
    options["httpx_args"] = {"transport": httpx.WSGITransport(application)}
    if key:
        return package.AuthenticatedClient(token=key, prefix=prefix, **options)
    return package.Client(**options)


def body_of(function, given):
    """Return this body, JSON or bytes, as the function takes it."""
    if isinstance(given, bytes):
        return importlib.import_module(f"{PACKAGE}.types").File(payload=BytesIO(given))
    kinds = inspect.signature(function).parameters["body"].annotation
    [kind] = [one for one in getattr(kinds, "__args__", [kinds]) if hasattr(one, "from_dict")]
    return kind.from_dict(given)


def send(operation, by, status, body=None, **arguments):
    """Call an operation, and return the answer. It has this status and, if the schema describes one, a content."""
    described = OPERATIONS[operation][2]
    module = f"{PACKAGE}.api.{described['tags'][0].replace('-', '_')}.{operation}"
    function = importlib.import_module(module).sync_detailed
    if body is not None and "body" in inspect.signature(function).parameters:
        arguments["body"] = body_of(function, body)
    answer = function(client=by, **arguments)
    assert answer.status_code == status, f"{operation}: {answer.content[:500]}"
    has_content = "content" in described["responses"][str(status)]
    assert (answer.parsed is not None) == has_content, f"{operation}: {answer.content[:500]}"
    return answer.parsed


def rest_client(package, world, visitor, by):  # noqa: F811
    """Return a client with a visitor's session, or with a token of this scope."""
    if by != "session":
        return client(package, world.keys[visitor, by])
    token = "c" * 32
    cookies = {name: cookie.value for name, cookie in world.cookies[visitor].items()} | {"csrftoken": token}
    return client(package, cookies=cookies, headers={"X-CSRFToken": token})


def test_a_generated_client_reads_every_answer_of_the_rest_api(world, management, package):  # noqa: F811
    wrong = []
    for operation in OPERATIONS.keys() - OF_STORE - {"pulse_users_close_connection"}:
        path, method, _ = OPERATIONS[operation]
        route = re.sub(r"{(\w+)}", r"<str:\1>", path.removeprefix("/"))
        address, _, query = world.address_of(route).partition("?")
        names = re.fullmatch(re.sub(r"{(\w+)}", r"(?P<\1>[^/]+)", path), address).groupdict() | dict(parse_qsl(query))
        body = BODIES.get((route.replace(*OTHER_PATH[::-1]), method), {})
        by = "session" if path.startswith("/api/tokens/") else "all"
        statuses = map(int, EXPECTED[by][route, method].split())
        for status, visitor in dict(zip(statuses, VISITORS, strict=True)).items():
            try:
                with undone():
                    send(operation, rest_client(package, world, visitor, by), status, body, **names)
            except Exception as error:
                wrong.append(f"{operation} by {visitor}: {error!r}")
        if method != "get":
            restore_broker(management, world.vhost)
    assert not wrong, "\n".join(wrong)
    owner = rest_client(package, world, "owner", "all")  # whose request lacks the name in that table
    send("pulse_users_close_connection", owner, 404, username=PULSE_USER, name="127.0.0.1:1 -> …")


def test_the_documented_program_prints_the_queues_of_the_owner(world, package, monkeypatch, capsys):  # noqa: F811
    text = (Path(__file__).resolve().parents[2] / "docs" / "owners.md").read_text()
    [code] = re.findall(rf"^```python\n(from {PACKAGE} .*?)^```$", text, re.MULTILINE | re.DOTALL)
    in_process = partial(package.AuthenticatedClient, httpx_args={"transport": httpx.WSGITransport(application)})
    monkeypatch.setattr(package, "AuthenticatedClient", in_process)
    exec(code, {"GUARDIAN": "http://testserver", "TOKEN": world.keys["owner", "read"]})
    assert f"queue/{PULSE_USER}/builds " in capsys.readouterr().out


def test_a_generated_client_uses_a_queue_of_the_message_store(world, package):  # noqa: F811
    program = client(package, create_key(Application.objects.get())[1], "Application")
    reader = client(package, world.keys["owner", "all"])
    order = importlib.import_module(f"{PACKAGE}.models").StoreReadMessagesOrder("descending")
    shop, called = {"application": "shop"}, set()
    orders = {**shop, "queue": "orders"}
    mail = {**orders, "consumer": "mail"}
    worker = {**shop, "consumer": "mail", "worker": "8d9c5b7ef0a14c5f9e0a4f6b6f7c8d9e"}

    def call(operation, status=200, by=program, **arguments):
        called.add(operation)
        return send(operation, by, status, **arguments)

    call("store_heartbeat", by=client(package))
    new = {"queue_name": "orders", "partitions": 2, "principles": "app:shop,bid:owner@example.org"}
    call("store_create_queue", 201, **shop, body=new)
    call("store_list_queues", **shop, details=True, include_count=True, limit=5)
    call("store_change_queue", 400, **orders, body={"partitions": 1})
    call("store_change_queue", **orders, body={"consistency": "weak"})
    call("store_queue_info", by=reader, **orders)
    call("store_post_messages", 201, **orders, x_ttl=60, x_partition=1, body=b"a \xff book")
    two = [{"body": "a book", "partition": 1}, {"body": "a glass", "ttl": 9}]
    posted = call("store_post_messages", 201, **orders, body={"messages": two})
    message = {**orders, "message_ids": posted.messages[0].key}
    call("store_read_messages", by=reader, **orders, partitions="1,2", limit=9, order=order)
    call("store_overwrite_messages", **message, body=b"another book")
    call("store_read_messages_by_id", by=reader, **message)
    position = {"1": message["message_ids"]}
    call("store_set_positions", by=reader, **mail, body=position)
    call("store_set_positions", 412, by=reader, **mail, if_match='"other"', body=position)
    call("store_positions", by=reader, **mail)
    moves = {"2": {"from": None, "to": "3a6592301e0911e190b1002500f0fa7c"}}
    call("store_move_positions", by=reader, **mail, body=moves)
    call("store_delete_positions", by=reader, **mail)
    call("store_join_worker", 201, **worker, body={"seconds": 15})
    call("store_renew_worker", **worker)
    call("store_change_leases", **worker, body={"acquire": {"orders": [1, 2]}})
    call("store_leases", **worker)
    call("store_remove_worker", **worker, beats=1)
    call("store_delete_messages", by=reader, **message)
    call("store_delete_queue", **orders)
    assert called == OF_STORE
