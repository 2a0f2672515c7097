"""From an agent's registration to a received event: REST over a socket, the broker, STOMP over WebSocket."""

import json
import uuid
from typing import NamedTuple

import httpx
import pytest

from accounts.access.tokens import create_token
from tools.stomp import Refused, StompReader

pytestmark = pytest.mark.rabbitmq

TIMEOUT_SECONDS = 15


class Rest:
    """An API client with a token, over a socket."""

    def __init__(self, url, owner):
        self.token, self.key = create_token(owner, "agent", scope="all")  # it publishes, too
        self.client = httpx.Client(
            base_url=f"{url}/api/",
            headers={"Authorization": f"Token {self.key}"},
            trust_env=False,
            timeout=TIMEOUT_SECONDS,
        )

    def post(self, path, body, status=201):
        answer = self.client.post(path, json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    def delete(self, path):
        answer = self.client.delete(path)
        assert answer.status_code == 204, answer.text


class Registered(NamedTuple):
    """What an agent knows after its registration, and the path to delete it."""

    vhost: str
    login: str
    queue_name: str
    path: str

    def reader(self, url, passcode):
        return StompReader(url, vhost=self.vhost, login=self.login, passcode=passcode, queue_name=self.queue_name)


def for_one_type(rest, offering, object_type="order"):
    """Register like agents up to 1.0.5: a subscription and a queue for each type."""
    identity = rest.post("marketplace-site-agent-identities/", {"offering": offering.uuid.hex, "name": _name()})
    path = f"marketplace-site-agent-identities/{identity['uuid']}/register_event_subscription/"
    subscription = rest.post(path, {"observable_object_type": object_type})
    body = {"offering_uuid": offering.uuid.hex, "object_type": object_type}
    queue = rest.post(f"event-subscriptions/{subscription['uuid']}/create_queue/", body)
    assert queue["vhost"] == subscription["user_uuid"]
    return Registered(
        vhost=uuid.UUID(subscription["user_uuid"]).hex,
        login=uuid.UUID(subscription["uuid"]).hex,
        queue_name=f"subscription_{subscription['uuid']}_offering_{offering.uuid.hex}_{object_type}",
        path=f"event-subscriptions/{subscription['uuid']}/",
    )


def for_all_types(rest, offering):
    """Register like agents from 1.0.7 on: one queue."""
    identity = rest.post("marketplace-site-agent-identities/", {"offering": str(offering.uuid), "name": _name()})
    path = f"marketplace-site-agent-identities/{identity['uuid']}/"
    queue = rest.post(f"{path}register_queue/", {"object_types": []})
    return Registered(queue["vhost"], queue["rmq_username"], queue["queue_name"], path)


def _name():
    return f"agent-{uuid.uuid4().hex[:8]}"


@pytest.fixture(params=[for_one_type, for_all_types], ids=["subscription", "consumer"])
def register(request):
    return request.param


@pytest.fixture
def owner(agents):
    return agents.owner("alice")


@pytest.fixture
def offering(agents, owner):
    return agents.offering(owner, publishers=(owner,))


@pytest.fixture
def rest(live_server, owner):
    return Rest(live_server.url, owner)


def publish(rest, offering, payload):
    return rest.post(f"offerings/{offering.uuid}/events/", {"object_type": "order", "payload": payload}, status=200)


def test_an_event_arrives_complete(rest, offering, register, stomp_url):
    registered = register(rest, offering)
    with registered.reader(stomp_url, rest.key) as reader:
        published = publish(rest, offering, {"order_uuid": "7", "note": "grün"})
        headers, body = reader.messages.get(timeout=TIMEOUT_SECONDS)
    assert published["delivered"] == 1
    assert json.loads(body) == {
        "order_uuid": "7",
        "note": "grün",
        "object_type": "order",
        "offering_uuid": offering.uuid.hex,
        "schema_version": 1,
    }
    assert headers["object_type"] == "order"
    assert headers["amqp-message-id"] == published["message_id"]
    assert reader.messages.empty()


def test_a_revoked_token_closes_the_connection_and_the_next_opens_it(
    rest, live_server, owner, offering, register, stomp_url
):
    registered = register(rest, offering)
    other = Rest(live_server.url, owner)
    with registered.reader(stomp_url, rest.key) as reader:
        rest.delete(f"tokens/{rest.token.uuid}/")
        assert reader.closed.wait(TIMEOUT_SECONDS)
    with pytest.raises(Refused, match="Access refused"):
        registered.reader(stomp_url, rest.key).start()
    if register is for_all_types:
        other.post(f"{registered.path}register_queue/", {}, status=200)
    else:
        body = {"offering_uuid": offering.uuid.hex, "object_type": "order"}
        other.post(f"{registered.path}create_queue/", body, status=200)
    with registered.reader(stomp_url, other.key) as reader:
        publish(other, offering, {"order_uuid": "9"})
        assert json.loads(reader.messages.get(timeout=TIMEOUT_SECONDS).body)["order_uuid"] == "9"


def test_a_login_reads_its_own_queues_only(agents, rest, live_server, offering, register, stomp_url):
    registered = register(rest, offering)
    same_owner = for_one_type(rest, offering)
    with pytest.raises(Refused):
        same_owner._replace(queue_name=registered.queue_name).reader(stomp_url, rest.key).start()
    bob = agents.owner("bob")
    offering.members.add(bob)
    bobs = Rest(live_server.url, bob)
    stranger = for_one_type(bobs, offering)
    with pytest.raises(Refused, match="access denied"):
        stranger._replace(vhost=registered.vhost, queue_name=registered.queue_name).reader(stomp_url, bobs.key).start()
    with registered.reader(stomp_url, rest.key) as reader:
        publish(rest, offering, {"order_uuid": "10"})
        assert reader.messages.get(timeout=TIMEOUT_SECONDS)
