"""The HTTP API of the message store, as its contract describes it."""

import base64
import json
import re
import shlex
import time
import uuid
from fractions import Fraction
from functools import partial
from io import StringIO

import httpx
import orjson
import pytest
import time_machine
from django.core.cache import cache
from django.core.exceptions import ValidationError
from django.core.management import CommandError, call_command
from django.test import Client
from hypothesis import HealthCheck, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from accounts.models import AuditEntry, AuthToken, Owner
from core.leases import lease
from guardian_store import _ids as ids
from guardian_store._ids import MAX_REST, Place
from message_store import applications, leases, parameters, principals, queues, quota, tasks
from message_store import store as stores
from message_store.database.store import DatabaseStore
from message_store.http import request_parsing, views
from message_store.models import Application, ApplicationKey
from message_store.queues import MessageInput
from message_store.store import NewMessage, NoQueue, StoreUnavailable, store
from tests.message_store.test_message_store import clock, database_unavailable  # noqa: F401
from tests.support.plugin import ROOT
from tests.support.served import send_raw
from tests.support.toolbox import call_before, in_parallel, raising

FORM = "application/x-www-form-urlencoded"
JSON = "application/json"
TEXT = "text/plain"
NESTED = "[" * 1000 + "]" * 1000


class Program:
    """A client of an application's queues, by default with a key of the application."""

    def __init__(self, name="shop", authorization=None):
        self.name = name
        if authorization is None:
            authorization = f"Application {applications.create_key(applications.create_application(name))[1]}"
        self.authorization = authorization
        self.client = Client(headers={"Authorization": authorization} if authorization else {})

    def ask(self, method, path="", body=b"", kind=FORM, **headers):
        """Return the status and the JSON of the answer."""
        if isinstance(body, dict):
            body, kind = json.dumps(body), JSON
        address = f"/v1/{self.name}{path}"
        answer = self.client.generic(
            method, address, body, kind, headers={name.replace("_", "-"): value for name, value in headers.items()}
        )
        assert answer["Content-Type"] == JSON
        data = answer.json()
        assert (data["status"] == "ok") == (answer.status_code < 400), data
        assert isinstance(data.get("error_msg", {}), dict)
        return answer.status_code, data

    def ok(self, method, path="", body=b"", kind=FORM, **headers):
        """Return the answer; fail unless it is 200, or 201 to a POST."""
        status, data = self.ask(method, path, body, kind, **headers)
        assert status == (201 if method == "POST" else 200), data
        return data

    def post(self, path, body="hello", **headers):
        return self.ok("POST", path, body, TEXT, **headers)["messages"][0]["key"]

    def put(self, path, ticks, body="hello", partition=1):
        """Write a message with an id of this time, and return the id."""
        message_id = ids.message_id(Place(ticks, uuid.uuid1().int & MAX_REST)).hex
        self.ok("PUT", f"{path}/{partition}:{message_id}", body, TEXT)
        return message_id

    def bodies(self, path):
        return [message["body"] for message in self.ok("GET", path)["messages"]]


ON_CASSANDRA_TOO = pytest.mark.parametrize("program", ["database", "cassandra"], indirect=True)
"""For a test of each rule of storage. The others need Cassandra only in `make soak`."""


@pytest.fixture(params=["database", pytest.param("cassandra", marks=pytest.mark.soak)])
def program(request, db):
    """Give a client of an application without queues, on each store."""
    if request.param == "cassandra":
        request.getfixturevalue("cassandra_store")
    return Program()


@pytest.fixture
def shop(program):
    """Give a client of an application with the queues ``one`` (1 partition) and ``three`` (3 partitions)."""
    program.ok("POST", "", "queue_name=one")
    program.ok("POST", "", "queue_name=three&partitions=3")
    return program


# Successful calls


@ON_CASSANDRA_TOO
def test_queues_are_created_changed_listed_and_deleted(shop):
    made = shop.ok("POST", "", "queue_name=inbox&partitions=2&type=public&consistency=weak&principles=app:shop,app:b")
    assert made == {
        "status": "ok", "queue_name": "inbox", "partitions": 2, "type": "public", "consistency": "weak",
        "principles": ["app:shop", "app:b"],
    }  # fmt: skip
    drawn = shop.ok("POST")
    assert re.fullmatch("[0-9a-f]{32}", drawn.pop("queue_name"))
    assert drawn == {"status": "ok", "partitions": 1, "type": "user", "consistency": "strong", "principles": []}
    changed = shop.ok("PUT", "/inbox", "partitions=5&type=user&principles=bid:Ann@Example.org")
    created = changed.pop("created")
    assert abs(created - time.time()) < 100
    assert changed == {
        "status": "ok", "queue_name": "inbox", "partitions": 5, "type": "user", "consistency": "weak",
        "principles": ["bid:ann@example.org"],
    }  # fmt: skip
    [listed] = shop.ok("GET", "?details=true&include_count=true&offset=inbox&limit=1")["queues"]
    assert listed == {
        "queue_name": "inbox", "application": "shop", "created": created, "partitions": 5, "type": "user",
        "consistency": "weak", "principles": ["bid:ann@example.org"], "count": 0,
    }  # fmt: skip
    assert shop.ok("PUT", "/inbox", "principles=")["principles"] == []
    assert {**shop.ok("GET", "/inbox/info"), "principles": []} == {**changed, "created": created, "principles": []}
    assert shop.ok("PUT", "/inbox")["partitions"] == 5
    assert shop.ok("DELETE", "/inbox") == {"status": "ok"}
    for method in ("GET", "POST", "PUT", "DELETE"):
        assert shop.ask(method, "/inbox")[0] == 404


def test_posting_an_existing_queue_changes_it_and_keeps_its_messages(shop):
    shop.ok("PUT", "/three", "principles=app:shop&type=public")
    shop.post("/three", x_partition="3")
    for fields, expected in (("", 3), ("&partitions=1", 3), ("&partitions=4&type=user", 4)):
        data = shop.ok("POST", "", f"queue_name=three{fields}")
        assert (data["partitions"], data["principles"]) == (expected, ["app:shop"])
    assert data["type"] == "user"
    assert shop.bodies("/three?partitions=1,2,3") == ["hello"]


@ON_CASSANDRA_TOO
def test_messages_are_posted_read_overwritten_and_deleted(shop):
    [posted] = shop.ok("POST", "/three", "first", "text/x-mine", x_partition="2", x_ttl="300")["messages"]
    key, timestamp = posted["key"], posted["timestamp"]
    assert posted == {"key": key, "timestamp": timestamp, "partition": 2}
    assert timestamp == ids.timestamp(uuid.UUID(key))
    assert re.fullmatch(r"\d+\.\d{7}", timestamp)
    expected = {
        "message_id": key, "timestamp": timestamp, "body": "first", "partition": 2, "content_type": "text/x-mine",
    }  # fmt: skip
    assert shop.ok("GET", "/three?partitions=2") == {"status": "ok", "messages": [expected]}
    assert shop.ok("GET", f"/three/2:{key}") == {"status": "ok", "messages": [expected]}
    shop.ok("PUT", f"/three/2:{key}", "second", TEXT, x_ttl="600")
    [message] = shop.ok("GET", "/three?partitions=2")["messages"]
    assert message == {**expected, "body": "second", "content_type": TEXT}
    other = shop.put("/three", 17 * ids.TICKS_PER_SECOND)
    [made] = shop.ok("GET", "/three")["messages"]
    assert (made["message_id"], made["timestamp"]) == (other, "17.0000000")
    found = shop.ok("GET", f"/three/{other},3:{other},200:{other},9999:{other},2:{key}")["messages"]
    assert [message["message_id"] for message in found] == [other, key]
    assert shop.ok("DELETE", f"/three/2:{key},1:{other},3:{other},9999:{other}") == {"status": "ok"}
    assert shop.bodies("/three?partitions=1,2,3") == []


def test_a_put_writes_all_of_its_messages_or_none(shop):
    places = [ids.message_id(Place(seconds * ids.TICKS_PER_SECOND, 1 << 63)).hex for seconds in (17, 18)]
    first, second = places
    assert [one["key"] for one in shop.ok("PUT", f"/three/{first},2:{second}", "same", TEXT)["messages"]] == places
    assert shop.bodies("/three?partitions=1,2") == ["same", "same"]
    assert shop.ask("PUT", f"/three/{first},4:{second}", "other", TEXT)[0] == 400
    assert shop.ask("PUT", f"/three/{first},{AHEAD}", "other", TEXT)[0] == 400
    assert shop.bodies("/three?partitions=1,2") == ["same", "same"]


def test_a_message_id_of_the_future_can_be_overwritten_but_not_created(shop):
    """Such an id exists if it was posted before the clock was set back."""
    with time_machine.travel(time.time() + 59):
        soon = ids.message_id(Place(ids.now(), 1 << 63)).hex
    shop.ok("PUT", f"/one/{soon}", "near", TEXT)
    message_id = uuid.UUID(AHEAD)
    store().overwrite(queues.find("shop", "one"), message_id, NewMessage(b"far", 1, 300, TEXT))
    shop.ok("PUT", f"/one/{AHEAD}", "farther", TEXT)
    assert shop.bodies("/one") == ["near", "farther"]
    shop.ok("DELETE", f"/one/{AHEAD}")
    assert shop.ask("PUT", f"/one/{AHEAD}", "again", TEXT)[0] == 400


@ON_CASSANDRA_TOO
def test_a_batch_is_stored_in_order(shop):
    message = {"body": "b", "partition": 2, "ttl": "3600"}
    batch = [{"body": "a", "partition": "2"}, message, {"body": "c", "partition": 1, "content_type": "text/x-mine"}]
    posted = shop.ok("POST", "/three", {"messages": batch})["messages"]
    assert [entry["partition"] for entry in posted] == [2, 2, 1]
    read = shop.ok("GET", "/three?partitions=2,1,3")["messages"]
    assert [(one["body"], one["content_type"]) for one in read] == [("a", ""), ("b", ""), ("c", "text/x-mine")]
    assert [one["message_id"] for one in read] == [entry["key"] for entry in posted]


def test_a_message_without_a_partition_gets_a_random_one(shop):
    posted = shop.ok("POST", "/three", {"messages": [{"body": "x"}] * 200})["messages"]
    assert {entry["partition"] for entry in posted} == {1, 2, 3}
    assert sum(len(shop.bodies(f"/three?partitions={partition}")) for partition in (1, 2, 3)) == 200


def test_a_message_expires_after_its_ttl_or_three_days(program, clock):  # noqa: F811
    program.ok("POST", "", "queue_name=one")
    key = program.post("/one", "goes", x_ttl="300")
    program.post("/one", "stays")
    for seconds, expected in ((299, ["goes", "stays"]), (301, ["stays"]), (3 * 24 * 3600 + 1, [])):
        clock(seconds)
        assert program.bodies("/one") == expected
        assert [one["body"] for one in program.ok("GET", f"/one/{key}")["messages"]] == expected[:-1]
        assert program.ok("GET", "?include_count=true")["queues"][0]["count"] == len(expected)


def test_the_limit_applies_to_each_partition_in_the_requested_order(shop):
    for partition in (1, 2, 3):
        for number in range(3):
            shop.post("/three", f"{partition}.{number}", x_partition=str(partition))
    assert shop.bodies("/three?partitions=3,1&limit=2") == ["3.0", "3.1", "1.0", "1.1"]
    assert shop.bodies("/three?partitions=1,%202,1&limit=1&order=descending") == ["1.2", "2.2"]
    assert shop.bodies("/three?limit=&partitions=&since=&order=") == ["1.0", "1.1", "1.2"]


@ON_CASSANDRA_TOO
def test_positions_are_refused_if_they_changed_since_they_were_read(shop):
    first, second, third = (uuid.uuid1().hex for _ in range(3))
    path = "/v1/shop/three/positions/mail"

    def put(body, **headers):
        return shop.client.put(path, body, "application/json", headers=headers)

    read = shop.client.get(path)
    assert put({"1": first}, if_match=read["ETag"]).json() == {"status": "ok", "positions": {"1": first}}
    refused = put({"1": second, "2": second}, if_match=read["ETag"])
    assert refused.status_code == 412
    assert list(refused.json()["error_msg"]) == ["positions"]
    assert shop.client.get(path).json()["positions"] == {"1": first}
    assert put({"1": second}, if_match=f"W/{shop.client.get(path)['ETag']}").status_code == 200
    assert shop.client.delete(path, headers={"if-match": read["ETag"]}).status_code == 412
    assert put({"1": third}).status_code == 200  # without the header it overwrites
    assert shop.client.delete(path, headers={"if-match": shop.client.get(path)["ETag"]}).status_code == 200
    assert shop.client.get(path).json()["positions"] == {}


@ON_CASSANDRA_TOO
@pytest.mark.django_db(transaction=True)
def test_of_conditional_writers_at_once_one_succeeds(shop):
    path = "/v1/shop/one/positions/mail"
    tag = shop.client.get(path)["ETag"]

    def put():
        body = {"1": uuid.uuid1().hex}
        return shop.client.put(path, body, "application/json", headers={"If-Match": tag}).status_code

    assert sorted(in_parallel(*[put] * 4)) == [200, 412, 412, 412]


def test_partitions_that_do_not_exist_are_empty(shop):
    """The original service answered so, and its workers may be configured with such partitions."""
    [posted] = shop.ok("POST", "/one", "a book", TEXT)["messages"]
    assert shop.ok("GET", "/one?partitions=0,4")["messages"] == []
    assert [message["partition"] for message in shop.ok("GET", "/one?partitions=4,1")["messages"]] == [1]
    for partition in (0, 4):
        assert shop.ok("GET", f"/one/{partition}:{posted['key']}")["messages"] == []
        shop.ok("DELETE", f"/one/{partition}:{posted['key']}")
    assert len(shop.ok("GET", "/one")["messages"]) == 1


def test_a_trailing_slash_is_ignored(shop):
    shop.ok("POST", "/", "queue_name=two")
    shop.post("/one/")
    assert len(shop.ok("GET", "/one/")["messages"]) == 1
    assert shop.ok("GET", "/one/positions/mail/")["positions"] == {}


def test_a_position_advances_from_the_named_message_only(shop):
    first, second, third = (shop.post("/three", x_partition="2") for _ in range(3))
    path = "/three/positions/mail"

    def advance(**moves):
        status, data = shop.ask("POST", path, {name[1:]: {"from": at, "to": to} for name, (at, to) in moves.items()})
        assert status == 200
        return data["positions"]

    assert advance(p1=(None, first), p2=(None, first)) == {"1": first, "2": first}
    assert advance(p1=(None, second), p2=(first, second)) == {"1": first, "2": second}
    assert advance(p1=(third, second)) == {"1": first, "2": second}
    tag = shop.client.get(f"/v1/shop{path}")["ETag"]
    assert shop.client.post(f"/v1/shop{path}", {"1": {"from": third, "to": first}}, JSON)["ETag"] == tag


def test_positions_name_the_partitions_with_later_messages(shop):
    path = "/three/positions/mail"
    assert "waiting" not in shop.ok("GET", path)
    posted = shop.post("/three", x_partition="2")
    shop.post("/three", x_partition="3")
    assert shop.ok("GET", f"{path}?waiting=2,1") == {"status": "ok", "positions": {}, "waiting": [2]}
    shop.ok("PUT", path, {"2": posted})
    assert shop.ok("GET", f"{path}?waiting=1,2,3")["waiting"] == [3]


ONE, TWO = "1" * 32, "2" * 32


def test_a_workers_leases_are_free_once_it_is_removed(shop):
    def workers(who, method="PUT", query="", body="seconds=15"):
        return shop.ask(method, f"/consumers/mail/workers/{who}{query}", body)

    def lease(who, **changes):
        return shop.ask("POST", f"/consumers/mail/leases/{who}", changes)

    gone = (404, {"status": "error", "error_msg": {"worker": "There is no such worker"}})
    assert workers(ONE, "POST") == lease(ONE, acquire={"one": [1]}) == gone
    assert workers(ONE)[0] == workers(TWO)[0] == 201
    assert lease(ONE, acquire={"three": [1, 2], "one": [1]})[1]["leases"] == {"one": [1], "three": [1, 2]}
    assert lease(TWO, acquire={"three": [1, 2, 3, 4], "none": [1]})[1]["leases"] == {"three": [3]}
    assert lease(ONE, release={"three": [1, 3]})[0] == 200
    assert workers(TWO, "POST")[0] == 200
    assert shop.ok("GET", f"/consumers/mail/leases/{TWO}") == {
        "status": "ok",
        "workers": [{"worker": ONE, "beats": 0, "seconds": 15.0}, {"worker": TWO, "beats": 1, "seconds": 15.0}],
        "leases": {"one": {"1": ONE}, "three": {"2": ONE, "3": TWO}},
    }
    assert workers(TWO, "DELETE", "?beats=0")[1]["removed"] is False
    assert workers(ONE, "DELETE", "?beats=0")[1]["removed"] is True
    assert workers(ONE, "POST") == gone
    assert lease(TWO, acquire={"three": [2]})[1]["leases"] == {"three": [2]}
    assert workers(TWO, "DELETE")[1]["removed"] is True
    assert workers(TWO, "DELETE")[1]["removed"] is False


def test_a_key_reaches_no_worker_of_another_application_or_consumer(shop):
    assert shop.ask("PUT", f"/consumers/mail/workers/{ONE}", "seconds=15")[0] == 201
    assert shop.ask("POST", f"/consumers/mail/leases/{ONE}", {"acquire": {"one": [1]}})[0] == 200
    for program, consumer in ((Program("other"), "mail"), (shop, "other")):
        path = f"/consumers/{consumer}/workers/{ONE}"
        program.ask("PUT", path, "seconds=15")
        assert program.ask("POST", path)[0] == 404
        assert program.ok("DELETE", path)["removed"] is False
        assert program.ok("GET", path.replace("workers", "leases"))["leases"] == {}


# Invalid requests

ID = uuid.uuid1().hex
AHEAD = ids.message_id(Place(ids.MAX_TICKS, 1 << 63)).hex
BAD: list[tuple[str, str, object, dict[str, str], int, dict[str, str]]] = [
    # method, path, body (text: a form or a message), headers, status, errors
    ("POST", "", "partitions=0", {}, 400, {"partitions": "0 is less than minimum value 1"}),
    ("POST", "", "partitions=201", {}, 400, {"partitions": "201 is greater than maximum value 200"}),
    ("POST", "", "partitions=%D9%A3", {}, 400, {"partitions": '"٣" is not a number'}),
    ("POST", "", "consistency=no", {}, 400, {"consistency": '"no" is not one of weak, strong, very_strong'}),
    ("POST", "", "principles=app:shop,apple:a", {}, 400,
     {"principles": '"apple:a" is not a principal, such as app:NAME or bid:EMAIL'}),
    ("POST", "", "principles=bid:ann", {}, 400,
     {"principles": '"bid:ann" is not a principal, such as app:NAME or bid:EMAIL'}),
    ("POST", "", "principles=" + ",".join(f"app:{n}" for n in range(101)), {}, 400,
     {"principles": "101 principals are more than 100"}),
    ("POST", "", "type=no&partitions=no", {}, 400,
     {"type": '"no" is not one of user, public', "partitions": '"no" is not a number'}),
    ("POST", "", "queue_name=" + "q" * 51, {}, 400, {"queue_name": "Longer than maximum length 50"}),
    ("POST", "", "queue_name=..", {}, 400, {"queue_name": '".." can\'t be a name: it is not usable in a URL'}),
    ("POST", "", "queue_name=a%00b", {}, 400,
     {"queue_name": '"a\\x00b" can\'t be a name: it is not usable in a URL'}),
    ("POST", "", "queue_name=a/b", {}, 400, {"queue_name": '"a/b" can\'t be a name: it is not usable in a URL'}),
    ("POST", "", "queue_name=%ff", {}, 400, {"queue_name": "Not valid UTF-8"}),
    ("POST", "", "queue_name=100%", {}, 400, {"queue_name": "Write % as %25"}),
    ("POST", "", b"\xff=1", {}, 400, {"body": "Not valid UTF-8"}),
    ("POST", "", {"queue_name": "inbox"}, {}, 400, {"body": f"Must be {FORM}"}),
    ("POST", "", "x=" + "x" * 65_536, {}, 413, {"body": "More bytes than maximum value 65536"}),
    ("GET", "?limit=0", "", {}, 400, {"limit": "0 is less than minimum value 1"}),
    ("GET", "?details=perhaps", "", {}, 400, {"details": '"perhaps" is not one of true, false'}),
    ("GET", "?offset=a%00", "", {}, 400, {"offset": '"a\\x00" can\'t be a name: it is not usable in a URL'}),
    ("GET", "?%ff=1", "", {}, 400, {"query": "Not valid UTF-8"}),
    ("PUT", "/three", "partitions=2", {}, 400, {"partitions": "2 is less than minimum value 3"}),
    ("GET", "/one?partitions=-1", "", {}, 400, {"partitions": "-1 is less than minimum value 0"}),
    ("GET", "/one?partitions=1&partitions=1", "", {}, 400, {"partitions": "Given twice"}),
    ("POST", "", "queue_name=a&queue_name=b", {}, 400, {"queue_name": "Given twice"}),
    ("GET", "/one?limit=1001", "", {}, 400, {"limit": "1001 is greater than maximum value 1000"}),
    ("GET", "/one?order=random", "", {}, 400, {"order": '"random" is not one of ascending, descending'}),
    ("GET", "/one?since=fred", "", {}, 400, {"since": '"fred" is not a timestamp or a message id'}),
    ("GET", "/one?since=" + "f" * 32, "", {}, 400, {"since": f'"{"f" * 32}" is not a timestamp or a message id'}),
    ("POST", "/one", "", {}, 400, {"body": "Required"}),
    ("POST", "/one", "x", {"x_partition": "fred"}, 400, {"partition": '"fred" is not a number'}),
    ("POST", "/one", "x", {"x_ttl": "33554433"}, 400, {"ttl": "33554433 is greater than maximum value 33554432"}),
    ("POST", "/one", "x", {"x_ttl": "9" * 5000}, 400, {"ttl": f'"{"9" * 50}" is not a number'}),
    ("POST", "/one", "x", {"x_ttl": "0", "x_partition": "2"}, 400,
     {"ttl": "0 is less than minimum value 1", "partition": "2 is greater than maximum value 1"}),
    ("POST", "/one", "x", {"content_type": "x" * 256}, 400, {"content_type": "Longer than maximum length 255"}),
    ("POST", "/one", {"messages": []}, {}, 400, {"messages": "Required"}),
    ("POST", "/one", {"messages": {"body": "x"}}, {}, 400, {"messages": "Must be a list"}),
    ("POST", "/one", {"messages": [{"body": "x"}] * 1001}, {}, 400, {"messages": "1001 messages are more than 1000"}),
    ("POST", "/one", {"messages": [{"body": "x", "ttl": 0}, {"body": ""}, {"body": 1}, "x", {"body": "y"}]}, {}, 400,
     {"0.ttl": "0 is less than minimum value 1", "1.body": "Required", "2.body": "Must be text",
      "3": "Must be an object"}),
    ("POST", "/one", {"messages": [{"body": "x", "ttl": True, "partition": 1.5}]}, {}, 400,
     {"0.ttl": '"True" is not a number', "0.partition": '"1.5" is not a number'}),
    ("POST", "/one", {"messages": [{"body": "*", "encoding": "base64"}]}, {}, 400, {"0.body": "Not valid base64"}),
    ("POST", "/one", {"messages": [{"body": "x", "encoding": "rot13"}]}, {}, 400,
     {"0.encoding": '"rot13" is not one of base64'}),
    ("POST", "/one", f'{{"messages": [{{"body": "x", "ttl": {NESTED}}}, {{"body": "x", "encoding": {NESTED}}}]}}',
     {"content_type": JSON}, 400, {"0.ttl": '"list" is not a number', "1.encoding": '"list" is not one of base64'}),
    ("POST", "/one", {"messages": [{"body": "x", "content_type": "a\nb"}]}, {}, 400,
     {"0.content_type": '"a\\x0ab" is not a content type'}),
    ("PUT", f"/one/{ID}", "", {}, 400, {"body": "Required"}),
    ("PUT", f"/one/{ID},{AHEAD}", "x", {}, 400, {"message_id": f'"{AHEAD}" is more than 60 seconds ahead'}),
    ("PUT", f"/one/{ID},2:{ID}", "x", {}, 400, {"partition": "2 is greater than maximum value 1"}),
    ("GET", f"/one/{ID},", "", {}, 400, {"message_id": '"" is not a message id'}),
    ("GET", "/one/" + ",".join([ID] * 1000), "", {}, 400, {"message_id": "More than 100 message ids"}),
    ("DELETE", "/one/2:asdfasdf", "", {}, 400, {"message_id": '"asdfasdf" is not a message id'}),
    ("PUT", "/one/positions/mail", "", {}, 400, {"positions": "Required"}),
    ("PUT", "/one/positions/mail", {"2": ID, "x": ID}, {}, 400,
     {"2": "2 is greater than maximum value 1", "x": '"x" is not a number'}),
    ("PUT", "/one/positions/mail", {"1": ID, "01": ID}, {}, 400, {"01": "Given twice"}),
    ("PUT", "/one/positions/mail", {"1": 5}, {}, 400, {"1": '"5" is not a message id'}),
    ("GET", "/one/positions/mail?waiting=2", "", {}, 400, {"waiting": "2 is greater than maximum value 1"}),
    ("POST", "/one/positions/mail", {"1": ID}, {}, 400, {"1": "Must be an object with from and to"}),
    ("POST", "/one/positions/mail", {"1": {"from": None, "to": ID}}, {"if_match": '"x"'}, 400,
     {"If-Match": "Use PUT or DELETE with it. POST compares each position with its from"}),
    ("POST", "/one/positions/mail", {"1": {"from": None, "to": None}}, {}, 400, {"1": '"None" is not a message id'}),
    ("PUT", "/consumers/c/workers/1", "seconds=15", {}, 400, {"worker": "Must be a UUID in 32 hex digits"}),
    ("PUT", f"/consumers/c/workers/{ONE}", "seconds=nan", {}, 400, {"seconds": "Must be a number from 1 to 3600"}),
    ("DELETE", f"/consumers/c/workers/{ONE}?beats=x", "", {}, 400, {"beats": '"x" is not a number'}),
    ("POST", f"/consumers/{'c' * 51}/workers/{ONE}", "", {}, 400, {"consumer": "Longer than maximum length 50"}),
    ("POST", f"/consumers/c/leases/{ONE}", {"acquire": {"one": 1}}, {}, 400,
     {"acquire": "Must be an object with a list of partitions for each queue"}),
    ("POST", f"/consumers/c/leases/{ONE}", {"release": {"one": [201]}}, {}, 400,
     {"release": "201 is greater than maximum value 200"}),
    ("GET", "/none", "", {}, 404, {"queue_name": "There is no such queue"}),
    ("POST", f"/{'blip' * 30}", "x", {}, 404, {"queue_name": "There is no such queue"}),
    ("GET", "/a%00b", "", {}, 404, {"queue_name": "There is no such queue"}),
    ("GET", "/one%0A", "", {}, 404, {"queue_name": "There is no such queue"}),
    ("GET", "/one//", "", {}, 404, {"path": "This address does not exist"}),
    ("PATCH", "/one", "", {}, 405, {"method": "PATCH is not allowed here"}),
]  # fmt: skip


def test_an_invalid_request_names_the_fields_and_changes_nothing(shop):
    before = shop.ok("GET", "?details=1&include_count=1")
    for method, path, body, headers, status, errors in BAD:
        kind = headers.get("content_type", FORM)
        data = shop.ask(method, path, body, kind, **headers)
        assert data == (status, {"status": "error", "error_msg": errors}), (method, path, body, headers)
    assert shop.ok("GET", "?details=1&include_count=1") == before


@pytest.mark.parametrize(
    "body", [b"[this isnt good}", b"", b"3", b"null", b"[" * 100_000, b'{"messages": [{"body": "\xff"}]}', b"NaN",
             b'{"messages": [{"body": "\\ud800"}]}'],
    ids=["broken", "empty", "number", "null", "deep", "not-utf-8", "nan", "surrogate"],
)  # fmt: skip
def test_invalid_json_or_another_shape_is_400(program, body):
    program.ok("POST", "", "queue_name=one")
    status, data = program.ask("POST", "/one", body, JSON)
    assert (status, list(data["error_msg"])) == (400, ["body"])
    assert program.bodies("/one") == []


def test_values_at_the_limits_are_accepted(shop, settings):
    settings.MESSAGE_STORE_MAX_BODY = 10
    shop.ok("POST", "", f"queue_name={'é' * 50}&partitions=200")
    assert shop.ok("GET", "?offset=three")["queues"][-1]["queue_name"] == "é" * 50
    shop.post("/one", "x" * 10, x_ttl="33554432", x_partition="1", content_type="x" * 255)
    shop.post("/one", " ", x_ttl=" 1 ")
    shop.post(f"/{'é' * 50}", "x", x_partition="200")
    assert shop.bodies(f"/{'é' * 50}?partitions={','.join(map(str, range(1, 201)))}&limit=1000") == ["x"]
    assert shop.ok("GET", "/one/" + ",".join([ID] * 100))["messages"] == []
    # A time that no id can have is before or after all ids.
    assert shop.bodies("/one?limit=1&since=-99999999999999999999") == ["x" * 10]
    assert shop.bodies("/one?since=99999999999999999999") == []


def test_a_body_over_the_limit_is_413(shop, settings):
    settings.MESSAGE_STORE_MAX_BODY = 1000
    expected = (413, {"status": "error", "error_msg": {"body": "More bytes than maximum value 1000"}})
    assert shop.ask("POST", "/one", "x" * 1001, TEXT) == expected
    assert shop.ask("PUT", f"/one/{ID}", "x" * 1001, TEXT) == expected
    assert shop.ask("POST", "/one", {"messages": [{"body": "x" * 500}, {"body": "x" * 500}]}) == expected
    assert shop.bodies("/one") == []


# The quota of an application


@pytest.fixture
def small_quota(settings):
    """Let an application store 1000 bytes."""
    settings.MESSAGE_STORE_MAX_BYTES = 1000


def of(size, content_type=TEXT):
    """Return a body with which a message counts as this number of bytes."""
    return "x" * (size - stores.MESSAGE_OVERHEAD - len(content_type))


@ON_CASSANDRA_TOO
def test_messages_past_the_quota_are_refused_with_the_number(shop, small_quota):
    shop.post("/one", of(600))
    shop.post("/three", of(400))
    status, answer = shop.ask("POST", "/one", "x", TEXT)
    assert (status, list(answer["error_msg"])) == (400, ["quota"])
    assert "more than 1000 bytes" in answer["error_msg"]["quota"]
    assert shop.ask("PUT", f"/one/{ID}", "x", TEXT)[0] == 400
    assert shop.bodies("/one") == [of(600)]
    other = Program("other")
    other.ok("POST", "", "queue_name=one")
    other.post("/one", of(1000))


def test_a_batch_past_the_quota_is_refused_as_a_whole_and_does_not_count(shop, small_quota):
    for _ in range(5):
        assert shop.ask("POST", "/one", {"messages": [{"body": of(501, "")}, {"body": of(500, "")}]})[0] == 400
    assert shop.bodies("/one") == []
    shop.ok("POST", "/one", {"messages": [{"body": of(500, "")}, {"body": of(500, "")}]})


@ON_CASSANDRA_TOO
@pytest.mark.parametrize(
    "delete", [lambda shop, key: f"/one/{key}", lambda shop, key: "/one"], ids=["message", "queue"]
)
def test_deleted_messages_make_room_when_the_task_has_measured(shop, small_quota, delete):
    key = shop.post("/one", of(1000))
    tasks.measure_applications()
    shop.ok("DELETE", delete(shop, key))
    with lease(quota.LEASE):  # one process measures at a time
        tasks.measure_applications()
    status, answer = shop.ask("POST", "/three", of(1000), TEXT)
    assert (status, "subtracted within a minute" in answer["error_msg"]["quota"]) == (400, True)
    tasks.measure_applications()
    shop.post("/three", of(1000))


def test_an_application_is_measured_when_half_of_its_room_is_used(shop, small_quota, monkeypatch):
    monkeypatch.setattr(quota, "QUEUES_PER_READ", 1)

    def counted():
        tasks.measure_applications()
        return Application.objects.get(name="shop").stored_bytes

    kept = [shop.post(queue, of(200)) for queue in ("/one", "/three")]
    assert counted() == 400
    shop.ok("DELETE", f"/one/{kept[0]}")
    shop.post("/one", of(300))
    assert counted() == 700
    shop.post("/one", of(120))
    assert counted() == 620


@ON_CASSANDRA_TOO
def test_a_message_for_a_queue_deleted_meanwhile_does_not_count(shop, small_quota):
    stored = store().find("shop", "one")
    store().remove("shop", "one")
    for _ in range(5):
        with pytest.raises(NoQueue):
            queues.post(stored, MessageInput(b"x" * 60))
    assert Application.objects.get(name="shop").stored_bytes == 0


def test_without_a_quota_bytes_are_counted_for_the_day_that_there_is_one(shop, settings):
    cache.clear()
    settings.MESSAGE_STORE_MAX_BYTES = 0
    shop.post("/one", "x" * 1000)
    settings.MESSAGE_STORE_MAX_BYTES = 1000
    assert shop.ask("POST", "/one", "x", TEXT)[0] == 400


@pytest.mark.django_db(transaction=True)
def test_concurrent_posts_do_not_exceed_the_quota(small_quota):
    shop = Program()
    shop.ok("POST", "", "queue_name=one&partitions=8")
    statuses = in_parallel(*[lambda: shop.ask("POST", "/one", of(300), TEXT)[0]] * 8)
    assert sorted(statuses) == [201] * 3 + [400] * 5
    assert store().stored_bytes(store().queues("shop")) == 900


@ON_CASSANDRA_TOO
def test_a_queue_has_a_limited_number_of_consumers_and_an_application_of_workers(shop, monkeypatch):
    monkeypatch.setattr(queues, "MAX_CONSUMERS", 1)
    monkeypatch.setattr(leases, "MAX_WORKERS", 1)

    def move(consumer):
        return shop.ask("POST", f"/one/positions/{consumer}", {"1": {"from": None, "to": ID}})[0]

    def place(consumer):
        return shop.ask("PUT", f"/one/positions/{consumer}", f"1={ID}")[0]

    assert [place("a"), place("a"), place("b"), move("a"), move("b")] == [200, 200, 400, 200, 400]
    shop.ok("DELETE", "/one/positions/a")
    assert [move("b"), place("a")] == [200, 400]
    workers = [f"/consumers/{consumer}/workers/{worker}" for consumer, worker in (("a", ONE), ("a", ONE), ("b", TWO))]
    assert [shop.ask("PUT", path, "seconds=15")[0] for path in workers] == [201, 201, 400]


# Responses


@pytest.mark.parametrize("program", ["database"], indirect=True)
@hypothesis_settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.binary(min_size=1, max_size=50) | st.text(min_size=1, max_size=20).map(str.encode))
@example("\N{BYTE ORDER MARK}ünï\0code\u2028".encode())
@example(b"\xff\x00")
def test_any_bytes_survive_a_round_trip(program, body):
    program.ok("POST", "", "queue_name=one")
    key = program.ok("POST", "/one", body, "image/x")["messages"][0]["key"]
    data = program.ok("GET", f"/one/{key}")["messages"][0]
    try:
        assert (data["body"], "encoding" in data) == (body.decode(), False)
    except UnicodeDecodeError:
        assert (base64.b64decode(data["body"]), data["encoding"]) == (body, "base64")
    # The returned message can be posted again.
    given = {name: data[name] for name in ("body", "encoding", "content_type") if name in data}
    again = program.ok("POST", "/one", {"messages": [given]})["messages"][0]["key"]
    assert program.ok("GET", f"/one/{again}")["messages"][0].items() >= given.items()


@given(ticks=st.integers(-(10**18), 10**18), more=st.integers(0, 999), negative=st.booleans(), descending=st.booleans())
def test_since_a_time_is_exact_to_the_tick(ticks, more, negative, descending):
    text = f"{'-' if negative else ''}{abs(ticks) // 10**7}.{abs(ticks) % 10**7:07}{more:03}"
    exact = Fraction(text) * ids.TICKS_PER_SECOND
    place = parameters.parse_since(text, descending=descending)
    if ids.MIN_TICKS <= exact <= ids.MAX_TICKS:
        near = place.ticks - exact
        assert -1 < near <= 0 if descending else 0 <= near < 1
    else:
        assert place.ticks == (ids.MIN_TICKS if exact < ids.MIN_TICKS else ids.MAX_TICKS)
    assert place.rest == (MAX_REST if descending else 0)


@ON_CASSANDRA_TOO
def test_messages_younger_than_the_delay_are_hidden(program, settings):
    settings.MESSAGE_STORE_DELAY_SECONDS = 60.0
    program.ok("POST", "", "queue_name=one")
    key = program.post("/one", "young")
    old = program.put("/one", 17 * ids.TICKS_PER_SECOND, "old")
    assert program.bodies("/one") == ["old"]
    assert program.bodies("/one?order=descending") == ["old"]
    assert program.bodies(f"/one?since={key}") == []
    assert [one["message_id"] for one in program.ok("GET", f"/one/{key},{old}")["messages"]] == [old]


LARGEST_BODY = "\0" * 100
LARGEST = 6 * len(LARGEST_BODY) + 200
"""The bytes of the largest message in JSON."""


@pytest.mark.parametrize("order", ["ascending", "descending"])
def test_a_large_answer_is_truncated_and_says_so(shop, settings, monkeypatch, order):
    settings.MESSAGE_STORE_MAX_BODY = 100
    monkeypatch.setattr(views, "MAX_RESPONSE_BYTES", 1000)
    monkeypatch.setattr(queues, "BATCH_BYTES", 250)
    bodies = [LARGEST_BODY, "x", "\x1b" * 50, "x", LARGEST_BODY, LARGEST_BODY, '"' * 100, "x", b"\xff" * 60]
    keys = [shop.post("/one", body) for body in bodies]
    read, since = [], ""
    for _ in bodies:
        page = shop.ok("GET", f"/one?order={order}{since}")
        assert len(orjson.dumps(page)) < 1000 + LARGEST
        fresh = [message["message_id"] for message in page["messages"] if message["message_id"] not in read]
        read += fresh
        if not page.get("truncated"):
            break
        since = f"&since={read[-1]}"
    assert since
    assert read == (keys if order == "ascending" else keys[::-1])
    # The same for reads by id; ids that are not found do not count.
    asked = ",".join([*([ID] * 5), *read])
    data = shop.ok("GET", f"/one/{asked}")
    assert data["truncated"]
    assert [message["message_id"] for message in data["messages"]] == read[: len(data["messages"])]
    assert 1000 <= len(orjson.dumps(data)) < 1000 + LARGEST
    assert "truncated" not in shop.ok("GET", f"/one/{','.join(read[1:3])}")


def test_messages_larger_than_an_answer_are_read_two_at_a_time(shop, monkeypatch):
    monkeypatch.setattr(views, "MAX_RESPONSE_BYTES", 1)
    keys = [shop.post("/one", str(number)) for number in range(3)]
    page = shop.ok("GET", "/one")
    assert ([message["message_id"] for message in page["messages"]], page["truncated"]) == (keys[:2], True)
    page = shop.ok("GET", f"/one?since={keys[1]}")
    assert ([message["message_id"] for message in page["messages"]], "truncated" in page) == (keys[1:], False)


# Access


CALLS = {
    "list": ("GET", "", ""),
    "create": ("POST", "", "queue_name=another"),
    "change": ("PUT", "/q", "type=user"),
    "post": ("POST", "/q", "x"),
    "overwrite": ("PUT", f"/q/{ID}", "x"),
    "read": ("GET", "/q", ""),
    "read ids": ("GET", f"/q/{ID}", ""),
    "info": ("GET", "/q/info", ""),
    "positions": ("GET", "/q/positions/c", ""),
    "set positions": ("PUT", "/q/positions/c", f"1={ID}"),
    "forget positions": ("DELETE", "/q/positions/c", ""),
    "advance positions": ("POST", "/q/positions/c", {"1": {"from": None, "to": ID}}),
    "delete": ("DELETE", f"/q/{ID}", ""),
    "remove": ("DELETE", "/q", ""),
}
LEASE_CALLS = {
    "join": ("PUT", f"/consumers/c/workers/{ONE}", "seconds=15"),
    "renew": ("POST", f"/consumers/c/workers/{ONE}", ""),
    "leases": ("GET", f"/consumers/c/leases/{ONE}", ""),
    "lease": ("POST", f"/consumers/c/leases/{ONE}", {"acquire": {"q": [1]}}),
    "leave": ("DELETE", f"/consumers/c/workers/{ONE}", ""),
}
POSITIONS = {"positions", "set positions", "advance positions", "forget positions"}
OWN = {"list", "create", "change", "remove", "post", "overwrite"} | POSITIONS | set(LEASE_CALLS)
READS, DELETES = {"read", "read ids", "info"}, {"delete"}
NAMED = READS | DELETES | POSITIONS
ACCESS = [
    # type, principals, the calls each caller may make; a caller without an entry may make none
    ("user", "", {"shop": OWN | NAMED}),
    ("user", "app:other", {"shop": OWN, "other": NAMED}),
    ("user", "bid:ANN@example.org", {"shop": OWN, "ann": NAMED}),
    ("user", "bid:ann@example.org,app:shop,app:other", {"shop": OWN | NAMED, "ann": NAMED, "other": NAMED}),
    ("public", "", {"shop": OWN | NAMED, "other": READS, "ann": READS, "bob": READS, "nobody": READS}),
    ("public", "bid:ann@example.org",
     {"shop": OWN | READS, "other": READS, "ann": NAMED, "bob": READS, "nobody": READS}),
]  # fmt: skip


def token(name):
    email = f"{name}@example.org"
    owner = Owner.objects.filter(email=email).first() or Owner.objects.create_user(email)
    return f"Token {AuthToken.objects.create(user=owner, scope='all')[1]}"


@pytest.mark.parametrize(("type_", "named", "allowed"), ACCESS)
def test_each_caller_may_make_only_the_calls_of_the_table(program, type_, named, allowed):
    callers = {
        "shop": program.authorization, "other": Program("other").authorization,
        "ann": token("ann"), "bob": token("bob"), "nobody": "",
    }  # fmt: skip
    recreate = f"queue_name=q&type={type_}&principles={named}"
    program.ok("POST", "", recreate)
    for who, authorization in callers.items():
        caller = Program("shop", authorization)
        may = allowed.get(who, set())
        for call, (method, path, body) in {**CALLS, **LEASE_CALLS}.items():
            status, data = caller.ask(method, path, body)
            if call in may:
                assert status < 300, (who, call, data)
            else:
                assert (status, data["error_msg"]) == (403, {"AccessDenied": "Access was denied"}), (who, call)
            if call in ("change", "remove"):
                program.ok("POST", "", recreate)


def test_an_unknown_key_is_401_and_an_unknown_application_404(shop):
    for authorization in ("Application OOPS", "Application", "application a b", f"Application {'x' * 5000}"):
        status, data = Program("shop", authorization).ask("GET")
        assert (status, data["error_msg"]) == (401, {"InvalidApplicationKey": "There is no such key"})
        assert Program("shop", authorization).ask("POST", "/one", "x")[0] == 401
    assert list(Program("shop", "Token nonsense").ask("GET", "/one")[1]["error_msg"]) == ["InvalidToken"]
    for authorization in ("", shop.authorization, token("ann")):
        for path, name in (("", "fredrick"), ("/one", "a" * 51), (f"/one/{ID}", "a%00"), ("/one/positions/c", "%20")):
            status, data = Program(name, authorization).ask("GET", path)
            assert (status, list(data["error_msg"])) == (404, ["application"])
    for authorization in ("", "Bearer 0123456789", token("ann")):
        assert Program("shop", authorization).ask("POST")[0] == 403
    assert Client().get("/v1/").json()["status"] == "error"


def test_principals_are_deduplicated_and_addresses_normalised():
    assert principals.parse(" app:a, bid:Ann@Example.ORG,app:a,,") == ("app:a", "bid:ann@example.org")
    assert principals.parse("") == ()


# Applications and keys


def test_create_application_prints_only_a_new_key_each_time(program):
    def run(name):
        output = StringIO()
        call_command("create_application", name, stdout=output)
        assert re.fullmatch("[0-9a-f]{64}\n", output.getvalue())
        return output.getvalue().strip()

    keys = [run("mail"), run("mail")]
    assert len(set(keys)) == 2
    for key in keys:
        Program("mail", f"Application {key}").ok("GET")
        assert not ApplicationKey.objects.filter(digest=key).exists()
    applications.revoke_key(ApplicationKey.objects.get(beginning=keys[0][:8]))
    assert Program("mail", f"Application {keys[0]}").ask("GET")[0] == 401
    assert Program("mail", f"Application {keys[1]}").ask("GET")[0] == 200
    events = list(AuditEntry.objects.filter(event__in=("created", "revoked")).values_list("event", flat=True))
    assert (events.count("created"), events.count("revoked")) == (5, 1)  # two applications, and their three keys
    assert not any(key in str(row) for key in keys for row in AuditEntry.objects.values_list())
    for name in (" ", "a/b", ".a", "a" * 51, "é", "a\n"):
        with pytest.raises(CommandError, match="begins with a letter"):
            call_command("create_application", name)


def test_an_application_has_a_key_limit_and_is_deleted_only_without_queues(program):
    application = Application.objects.get(name="shop")
    for _ in range(applications.MAX_KEYS - 1):
        applications.create_key(application)
    with pytest.raises(ValidationError, match="has 20 keys"):
        applications.create_key(application)
    program.ok("POST", "", "queue_name=one")
    with pytest.raises(ValidationError, match="has queues"):
        applications.delete_application(application)
    program.ok("DELETE", "/one")
    applications.delete_application(application)
    assert program.ask("GET")[0] == 401
    assert not ApplicationKey.objects.exists()


# Failures of the store


class UnavailableStore(DatabaseStore):
    """A store whose every method raises StoreUnavailable."""

    def __getattribute__(self, name):
        if not name.startswith("_") and name != "delay":
            raise StoreUnavailable("nobody answers")
        return super().__getattribute__(name)


def test_an_unavailable_store_is_503(client, program, settings, monkeypatch):
    assert client.get("/__heartbeat__").json() == {"status": "ok"}
    monkeypatch.setitem(stores.STORES, "unavailable", f"{__name__}.UnavailableStore")
    settings.MESSAGE_STORE = "unavailable"
    for method, path, body in CALLS.values():
        status, data = program.ask(method, path, body)
        assert (status, list(data["error_msg"])) == (503, ["storage"]), (method, path)
    answer = client.get("/__heartbeat__")
    assert (answer.status_code, list(answer.json()["error_msg"])) == (503, ["storage"])


def test_an_unexpected_error_has_the_same_form(program):
    program.client.raise_request_exception = False
    with raising(queues, "create", RuntimeError("unexpected")):
        status, data = program.ask("POST")
    assert (status, list(data["error_msg"])) == (500, ["server"])
    answer = program.client.get("/v1/shop", headers={"Host": "evil.example.org"})
    assert (answer.status_code, list(answer.json()["error_msg"])) == (400, ["request"])


@ON_CASSANDRA_TOO
def test_a_queue_deleted_during_its_creation_is_created_again(program, monkeypatch):
    program.ok("POST", "", "queue_name=one")
    used = type(store())
    call_before(monkeypatch, used, "update", lambda: store().remove("shop", "one"))
    assert program.ok("POST", "", "queue_name=one&partitions=2")["partitions"] == 2
    monkeypatch.setattr(used, "register", lambda *_, **__: (_ for _ in ()).throw(queues.QueueExists()))
    monkeypatch.setattr(used, "update", lambda *_, **__: (_ for _ in ()).throw(NoQueue()))
    assert program.ask("POST", "", "queue_name=one")[0] == 503


def test_a_form_may_come_as_multipart(program):
    answer = program.client.post("/v1/shop", {"queue_name": "ünï", "partitions": 2})
    assert (answer.status_code, answer.json()["queue_name"], answer.json()["partitions"]) == (201, "ünï", 2)
    status, data = program.ask("POST", "", "--x\r\n", "multipart/form-data")
    assert (status, list(data["error_msg"])) == (400, ["body"])


# Over a socket


def send(*request):
    """Send a raw request; return the status and the fields of the errors."""
    status, body = send_raw(*request)
    return status, sorted(orjson.loads(body).get("error_msg", {}))


@pytest.mark.slow
def test_bodies_of_wrong_or_missing_length_block_no_other_request(served):
    shop = Program()
    shop.ok("POST", "", "queue_name=one")
    head = f"POST /v1/shop/one HTTP/1.1\nHost: 127.0.0.1\nAuthorization: {shop.authorization}"
    chunk = b"1000\r\n" + b"x" * 0x1000 + b"\r\n"
    assert send(served, f"{head}\nTransfer-Encoding: chunked", b"5\r\nhello\r\n0\r\n\r\n") == (201, [])
    assert send(served, f"{head}\nTransfer-Encoding: chunked", *[chunk] * 100) == (413, ["body"])
    assert send(served, f"{head}\nContent-Length: 10000000000") == (413, ["body"])
    assert send(served, head) == (400, ["body"])
    assert send(served, f"{head}\nContent-Length: 8", b"half", None) == (400, ["body"])
    for broken in (b"5\r\nhal", b"3\r\nhalf\r\n", b"4\r\nhalf\r\nzz\r\n", b"4\r\nhalf\r\n0\r\nno trailer\r\n\r\n"):
        assert send(served, f"{head}\nTransfer-Encoding: chunked", broken, None) == (400, ["body"]), broken
    began = time.monotonic()
    slow = [
        partial(send, served, f"{head}\n{more}", b"5\r\nhello\r\n")
        for more in ("Content-Length: 100", "Transfer-Encoding: chunked") * 3  # more requests than threads
    ]
    assert in_parallel(*slow) == [(408, ["body"])] * 6
    assert time.monotonic() - began < 60
    assert shop.bodies("/one") == ["hello"]


def test_a_chunked_body_is_411_unless_the_server_knows_its_end(program):
    program.ok("POST", "", "queue_name=one")
    answer = program.client.generic("POST", "/v1/shop/one", "half", TEXT, HTTP_TRANSFER_ENCODING="chunked")
    assert answer.status_code == 411
    assert program.bodies("/one") == []


# docs/message-store.md

DOCUMENT = (ROOT / "docs" / "message-store.md").read_text()
SHOWN = re.findall(r"^ {4}(\S.*)$", re.sub(r"^```.*?^```$", "", DOCUMENT, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)


def test_the_examples_of_the_document_work(live_server):
    owner = Owner.objects.create_user("ann@example.org")
    data = {
        "GUARDIAN": live_server.url,
        "TOKEN": AuthToken.objects.create(user=owner, scope="all")[1],
        "KEY": "",
        "ID": "",
    }
    done = []
    for line in SHOWN:
        if line.startswith(".venv/bin/python manage.py "):
            output = StringIO()
            call_command(*shlex.split(line)[2:], stdout=output)
            data["KEY"] = output.getvalue().strip()
        elif line.startswith("curl "):
            answer = curl(re.sub(r"\$([A-Z]+)", lambda match: data[match[1]], line))
            assert answer.is_success, (line, answer.text)
            done.append((line, answer.json()))
            if "X-Partition: 1" in line:
                data["ID"] = answer.json()["messages"][0]["key"]
        else:
            assert line.startswith('{"status": "error"'), line
    read = [answer["messages"] for line, answer in done if " -X " not in line and "messages" in answer]
    assert read[1] == [{**read[1][0], "body": "a book", "partition": 1, "content_type": "text/plain"}]
    assert "a glass" in [message["body"] for message in read[-1]]
    assert {"positions": {"1": data["ID"]}, "status": "ok"} in [answer for _, answer in done]
    assert len(done) == DOCUMENT.count("    curl ") == 12


def curl(line):
    """Send the request of this curl command."""
    _, *words = shlex.split(line)
    options = {"-H": [], "-d": [], "-X": [], "--json": []}
    while words[0] in options:
        options[words[0]].append(words[1])
        words = words[2:]
    [url] = words
    headers = dict(header.split(": ", 1) for header in options["-H"])
    if options["--json"]:
        headers["Content-Type"] = JSON
    elif options["-d"]:
        headers.setdefault("Content-Type", FORM)
    body = "&".join(options["-d"] + options["--json"])
    [method] = options["-X"] or ["POST" if body else "GET"]
    return httpx.request(method, url, headers=headers, content=body, trust_env=False)


def test_the_document_states_every_limit():
    limits = (
        queues.MAX_BATCH, queues.MAX_READ, parameters.MAX_IDS, parameters.MAX_PARTITIONS, queues.MAX_NAME_LENGTH,
        queues.MAX_CONTENT_TYPE_LENGTH, principals.MAX_PRINCIPALS, request_parsing.MAX_FORM_BYTES,
        applications.MAX_KEYS,
    )  # fmt: skip
    table = DOCUMENT.partition("## Limits")[2]
    assert {str(limit) for limit in limits} == set(re.findall(r"\| (\d+)(?: bytes)? \|", table))
    assert str(queues.MAX_TTL_SECONDS) in DOCUMENT
