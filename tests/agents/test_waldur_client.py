"""Every call of the contract by the agents' own client, over a real connection and with a real broker."""

import uuid
from datetime import UTC, datetime
from http import HTTPStatus

import pytest
from waldur_api_client import AuthenticatedClient
from waldur_api_client.api.event_consumers import (
    event_consumers_count,
    event_consumers_destroy,
    event_consumers_list,
    event_consumers_register,
)
from waldur_api_client.api.event_subscription_queues import (
    event_subscription_queues_count,
    event_subscription_queues_destroy,
    event_subscription_queues_list,
    event_subscription_queues_retrieve,
)
from waldur_api_client.api.event_subscriptions import (
    event_subscriptions_count,
    event_subscriptions_create,
    event_subscriptions_create_queue,
    event_subscriptions_destroy,
    event_subscriptions_list,
    event_subscriptions_retrieve,
)
from waldur_api_client.api.marketplace_site_agent_identities import (
    marketplace_site_agent_identities_count,
    marketplace_site_agent_identities_create,
    marketplace_site_agent_identities_destroy,
    marketplace_site_agent_identities_list,
    marketplace_site_agent_identities_register_event_subscription,
    marketplace_site_agent_identities_register_queue,
    marketplace_site_agent_identities_retrieve,
    marketplace_site_agent_identities_update,
)
from waldur_api_client.errors import UnexpectedStatus
from waldur_api_client.models.agent_dependency_request import AgentDependencyRequest
from waldur_api_client.models.agent_event_subscription_create_request import AgentEventSubscriptionCreateRequest
from waldur_api_client.models.agent_identity_request import AgentIdentityRequest
from waldur_api_client.models.agent_queue_registration_request import AgentQueueRegistrationRequest
from waldur_api_client.models.event_consumer_registration_request import EventConsumerRegistrationRequest
from waldur_api_client.models.event_consumer_scope_input_request import EventConsumerScopeInputRequest
from waldur_api_client.models.event_subscription_observable_object_request import (
    EventSubscriptionObservableObjectRequest,
)
from waldur_api_client.models.event_subscription_queue_create_request import EventSubscriptionQueueCreateRequest
from waldur_api_client.models.event_subscription_request import EventSubscriptionRequest
from waldur_api_client.models.observable_object_type_enum import ObservableObjectTypeEnum
from waldur_api_client.types import UNSET

from accounts.models import Owner
from agents.events import publishing
from agents.models import AgentIdentity, Consumer, EventSubscription, ObjectType, SubscriptionQueue
from rabbit.arguments import REGISTERED_QUEUE_ARGUMENTS
from tests.support.toolbox import AWAY

pytestmark = pytest.mark.usefixtures("agents")

ORDER = ObservableObjectTypeEnum.ORDER


@pytest.fixture
def offering(agents, alice):
    return agents.offering(alice)


@pytest.fixture
def client(agents, alice, live_server, settings):
    settings.GUARDIAN_BASE_URL = live_server.url
    with AuthenticatedClient(base_url=live_server.url, token=agents.token(alice).key, prefix="Token") as opened:
        yield opened


def identity_request(offering, **fields):
    return AgentIdentityRequest(**{
        "offering": offering.uuid, "name": f"agent-{offering.uuid}", "version": "1.0.7",
        "last_restarted": datetime(2026, 1, 5, 12, tzinfo=UTC), "config_file_path": "", "config_file_content": "a: 1",
        "dependencies": [AgentDependencyRequest(package="waldur-api-client", version="8.1.2")], **fields,
    })  # fmt: skip


def test_the_client_creates_reads_updates_and_deletes_identities(client, alice, offering):
    made = marketplace_site_agent_identities_create.sync(client=client, body=identity_request(offering))
    assert (made.offering, made.created_by, made.services) == (offering.uuid, alice.uuid, [])
    assert (made.version, made.config_file_content) == ("1.0.7", "a: 1")
    assert made.last_restarted == datetime(2026, 1, 5, 12, tzinfo=UTC)
    assert [one.package for one in made.dependencies] == ["waldur-api-client"]
    assert made.to_dict()["compatibility"]["status"] == "compatible"
    assert marketplace_site_agent_identities_list.sync(client=client, name=made.name) == [made]
    assert marketplace_site_agent_identities_list.sync(client=client, name="another") == []
    assert marketplace_site_agent_identities_count.sync(client=client, name=made.name) == 1
    assert marketplace_site_agent_identities_count.sync(client=client, name="another") == 0
    for written in (made.uuid, made.uuid.hex):
        assert marketplace_site_agent_identities_retrieve.sync(client=client, uuid=written) == made
    naive = datetime(2026, 1, 6, 12)  # noqa: DTZ001 - as 1.0.5 sends it
    updated = marketplace_site_agent_identities_update.sync(
        client=client, uuid=made.uuid.hex, body=identity_request(offering, version="1.0.5", last_restarted=naive)
    )
    assert (updated.uuid, updated.version, updated.last_restarted) == (made.uuid, "1.0.5", naive.replace(tzinfo=UTC))
    bare = marketplace_site_agent_identities_create.sync(
        client=client, body=AgentIdentityRequest(offering=offering.uuid, name="bare", version=None)
    )
    assert (bare.version, bare.dependencies, bare.last_restarted) == ("", [], bare.created)
    for one in (made, bare):
        answer = marketplace_site_agent_identities_destroy.sync_detailed(client=client, uuid=one.uuid)
        assert answer.status_code == HTTPStatus.NO_CONTENT
    with pytest.raises(UnexpectedStatus, match="404"):
        marketplace_site_agent_identities_retrieve.sync(client=client, uuid=made.uuid)


def test_the_client_reads_all_pages_of_a_list(client, alice, offering):
    names = [f"agent {number:03}" for number in range(230)]
    AgentIdentity.objects.bulk_create(AgentIdentity(owner=alice, offering=offering, name=name) for name in names)
    found = marketplace_site_agent_identities_list.sync_all(client=client)
    assert [one.name for one in found] == names
    assert marketplace_site_agent_identities_count.sync(client=client) == 230


def test_the_client_registers_a_subscription_and_a_queue_per_type(client, agents, alice, offering):
    Owner.objects.filter(pk=alice.pk).update(full_name="Alice")
    identity = marketplace_site_agent_identities_create.sync(client=client, body=identity_request(offering))
    body = AgentEventSubscriptionCreateRequest(observable_object_type=ORDER, description="orders")
    register = marketplace_site_agent_identities_register_event_subscription.sync_detailed
    answers = [register(client=client, uuid=identity.uuid.hex, body=body) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [201, 200]
    subscription = answers[0].parsed
    assert answers[1].parsed.uuid == subscription.uuid
    assert (subscription.user_uuid, subscription.user_username) == (alice.uuid, "alice@example.org")
    assert (subscription.user_full_name, subscription.source_ip) == ("Alice", "127.0.0.1")
    assert subscription.observable_objects[0].object_type == "order"
    body = EventSubscriptionQueueCreateRequest(offering_uuid=offering.uuid, object_type=ORDER)
    create = event_subscriptions_create_queue.sync_detailed
    answers = [create(client=client, uuid=subscription.uuid.hex, body=body) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [201, 200]
    queue = answers[0].parsed
    assert answers[1].parsed == queue
    name = f"subscription_{subscription.uuid.hex}_offering_{offering.uuid.hex}_order"
    assert (queue.queue_name, queue.vhost, queue.object_type) == (name, alice.uuid.hex, "order")
    assert (queue.event_subscription, queue.event_subscription_uuid) == (subscription.url, subscription.uuid.hex)
    assert queue.offering_uuid == offering.uuid.hex
    assert agents.queues(queue.vhost)[name] == dict(REGISTERED_QUEUE_ARGUMENTS)
    assert subscription.uuid.hex in agents.users()
    assert event_subscription_queues_retrieve.sync(client=client, uuid=queue.uuid) == queue
    mine = {"event_subscription_uuid": subscription.uuid, "offering_uuid": offering.uuid, "object_type": "order"}
    assert event_subscription_queues_list.sync(client=client, **mine) == [queue]
    assert event_subscription_queues_count.sync(client=client, **mine) == 1
    assert event_subscription_queues_count.sync(client=client, offering_uuid=uuid.uuid4()) == 0
    answer = event_subscription_queues_destroy.sync_detailed(client=client, uuid=queue.uuid)
    assert answer.status_code == HTTPStatus.NO_CONTENT
    assert event_subscription_queues_count.sync(client=client) == 0
    assert not SubscriptionQueue.objects.exists()
    assert name not in agents.queues(queue.vhost)


def test_the_client_registers_one_queue_for_all_types(client, agents, alice, offering):
    identity = marketplace_site_agent_identities_create.sync(client=client, body=identity_request(offering))
    types = [ORDER, ORDER, ObservableObjectTypeEnum.USER_ROLE]
    register = marketplace_site_agent_identities_register_queue.sync_detailed
    answers = []
    for body in [
        AgentQueueRegistrationRequest(object_types=types),
        AgentQueueRegistrationRequest(),
        AgentQueueRegistrationRequest(object_types=[]),
    ]:
        answers.append(register(client=client, uuid=identity.uuid.hex, body=body))
    assert [answer.status_code for answer in answers] == [201, 200, 200]
    assert [answer.parsed.observable_object_types for answer in answers] == [["order", "user_role"]] * 2 + [[]]
    consumer = Consumer.objects.get()
    for answer in answers:
        assert answer.parsed.rmq_username == consumer.rmq_username
        assert answer.parsed.queue_name == f"consumer_{consumer.uuid.hex}"
        assert answer.parsed.vhost == alice.uuid.hex
    assert agents.queues(alice.uuid.hex)[consumer.queue_name] == dict(REGISTERED_QUEUE_ARGUMENTS)
    assert consumer.rmq_username in agents.users()


def test_the_client_creates_reads_and_deletes_subscriptions(client, agents, alice, offering):
    observed = [
        EventSubscriptionObservableObjectRequest(object_type=ORDER, object_id=2**63 - 1, offering_uuid=offering.uuid),
        EventSubscriptionObservableObjectRequest(object_type=ObservableObjectTypeEnum.RESOURCE),
    ]
    body = EventSubscriptionRequest(description="mine", observable_objects=observed)
    made = event_subscriptions_create.sync(client=client, body=body)
    assert (made.description, made.user_uuid, made.source_ip) == ("mine", alice.uuid, "127.0.0.1")
    assert [one.to_dict() for one in made.observable_objects] == [
        {"object_type": "order", "object_id": 2**63 - 1, "offering_uuid": str(offering.uuid)},
        {"object_type": "resource"},
    ]
    wanted = EventSubscriptionQueueCreateRequest(
        offering_uuid=offering.uuid, object_type=ObservableObjectTypeEnum.USER_SSH_KEY
    )
    queue = event_subscriptions_create_queue.sync(client=client, uuid=made.uuid.hex, body=wanted)
    assert (queue.event_subscription_uuid, queue.object_type) == (made.uuid.hex, "user_ssh_key")
    bare = event_subscriptions_create.sync(client=client, body=EventSubscriptionRequest())
    assert (bare.description, bare.observable_objects) == ("", [])
    assert event_subscriptions_retrieve.sync(client=client, uuid=made.uuid).uuid == made.uuid
    assert {one.uuid for one in event_subscriptions_list.sync(client=client)} == {made.uuid, bare.uuid}
    assert event_subscriptions_count.sync(client=client) == 2
    assert {made.uuid.hex, bare.uuid.hex} <= agents.users()
    for one in (made, bare):
        answer = event_subscriptions_destroy.sync_detailed(client=client, uuid=one.uuid)
        assert answer.status_code == HTTPStatus.NO_CONTENT
    assert event_subscriptions_count.sync(client=client) == 0
    assert not EventSubscription.objects.exists()
    assert not SubscriptionQueue.objects.exists()
    assert not agents.users() & {made.uuid.hex, bare.uuid.hex}


def test_the_client_registers_lists_updates_and_deletes_event_consumers(client, agents, alice, offering):
    scope = EventConsumerScopeInputRequest(type_="offering", uuid=offering.uuid)
    answers = []
    for types in ([ORDER], [ORDER, ObservableObjectTypeEnum.USER_ROLE], UNSET, []):
        body = EventConsumerRegistrationRequest(object_types=types, scopes=[scope])
        answers.append(event_consumers_register.sync_detailed(client=client, body=body))
    assert [answer.status_code for answer in answers] == [201, 200, 200, 200]
    assert [answer.parsed.observable_object_types for answer in answers] == [
        ["order"], ["order", "user_role"], ["order", "user_role"], [],
    ]  # fmt: skip
    consumer = Consumer.objects.get()
    assert {answer.parsed.queue_name for answer in answers} == {consumer.queue_name}
    assert agents.queues(alice.uuid.hex)[consumer.queue_name] == dict(REGISTERED_QUEUE_ARGUMENTS)
    assert publishing.publish(offering, "order", {}).delivered == 1
    [shown] = event_consumers_list.sync(client=client, user_uuid=alice.uuid, user_username=alice.email)
    assert (shown.uuid, shown.rmq_username, shown.queue_created) == (consumer.uuid, consumer.rmq_username, True)
    assert [(one.type_, one.uuid) for one in shown.scopes] == [("offering", offering.uuid.hex)]
    assert (shown.user_uuid, shown.is_global, shown.delivery_blocked_reason) == (alice.uuid, False, None)
    assert shown["last_delivered_at"] is not None
    assert event_consumers_count.sync(client=client, is_global=False) == 1
    assert event_consumers_count.sync(client=client, is_global=True) == 0
    assert event_consumers_destroy.sync_detailed(client=client, uuid=shown.uuid).status_code == HTTPStatus.NO_CONTENT
    assert not AgentIdentity.objects.exists()
    assert consumer.queue_name not in agents.queues(alice.uuid.hex)


def test_an_event_consumer_has_exactly_one_offering(client, agents, alice, offering):
    of_offering = EventConsumerScopeInputRequest(type_="offering", uuid=offering.uuid)
    of_project = EventConsumerScopeInputRequest(type_="project", uuid=uuid.uuid4())
    of_others = EventConsumerScopeInputRequest(type_="offering", uuid=agents.offering().uuid)
    for scopes, reason in (
        ([], "exactly one scope"), ([of_offering, of_offering], "exactly one scope"),
        ([of_project], "exactly one scope"), ([of_others], "no such offering"),
    ):  # fmt: skip
        with pytest.raises(UnexpectedStatus, match=rf"400[\s\S]*{reason}"):
            event_consumers_register.sync(client=client, body=EventConsumerRegistrationRequest(scopes=scopes))
    assert not AgentIdentity.objects.exists()


def test_a_failed_registration_of_an_event_consumer_leaves_nothing(client, alice, offering, settings):
    settings.RABBITMQ_MANAGEMENT_URL = AWAY
    scope = EventConsumerScopeInputRequest(type_="offering", uuid=offering.uuid)
    with pytest.raises(UnexpectedStatus, match="503"):
        event_consumers_register.sync(client=client, body=EventConsumerRegistrationRequest(scopes=[scope]))
    assert not AgentIdentity.objects.exists()
    assert not Consumer.objects.exists()


def test_guardian_has_all_object_types_of_the_client():
    assert {one.value for one in ObservableObjectTypeEnum} <= set(ObjectType.values)
