"""A client that openapi-python-client generates from the served schema calls every operation of a running Guardian."""

import contextlib
import importlib
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from django.conf import settings as django_settings
from django.test import Client
from django.utils import timezone

from accounts.models import AuthToken, Invitation, Owner, PulseUser
from accounts.pulse_users.creation import create_pulse_user
from agents.models import Offering
from message_store.applications import create_key
from message_store.models import Application
from notifications.models import Channel
from queues.guard.once import run_once
from queues.models import Queue
from rabbit.errors import NotOnBroker

pytestmark = pytest.mark.slow

PACKAGE = "generated_guardian_client"
EXISTING = ("q", "purged", "deleted")
"""The queues of the Pulse user."""


class World:
    """Everything that the calls name, and the results of earlier calls by operation."""

    def __init__(self, amqp: Any, url: str) -> None:
        self.package, self.url, self.results = importlib.import_module(PACKAGE), url, {}
        self.confirmations: dict[str, str] = {}
        self.alice = Owner.objects.create_user("alice@example.org", vouched=True, last_login=timezone.now())
        self.bob = Owner.objects.create_user("bob@example.org", vouched=True, last_login=timezone.now())
        self.newcomer = Owner.objects.create_user("carol@example.org", last_login=timezone.now())
        self.operator = Owner.objects.create_superuser("ops@example.org")
        self.username = f"alice-{uuid.uuid4().hex[:8]}"
        self.second, self.adoptable = f"{self.username}-2", f"{self.username}-3"
        create_pulse_user(self.username, [self.alice], notification_emails=["team@example.org"])
        for name in EXISTING:
            amqp.queue(f"queue/{self.username}/{name}", 3)
        self.exchange = f"exchange/{self.username}/events"
        amqp.channel.exchange_declare(self.exchange, "topic")
        amqp.channel.queue_bind(self.queue("q"), self.exchange, "#")
        run_once()
        self.uuids = {name: Queue.objects.get(name=self.queue(name)).uuid.hex for name in EXISTING}
        self.invitations = []
        for name in ("shared-1", "shared-2"):
            shared = PulseUser.objects.create(username=name, ready=True)
            shared.owners.add(self.alice)
            invitation = Invitation.objects.create(pulse_user=shared, inviter=self.alice, invitee=self.bob)
            self.invitations.append(invitation.uuid.hex)
        self.offering = Offering.objects.create(name="Cluster")
        self.offering.members.add(self.alice)
        self.offering.publishers.add(self.alice)
        self.channel = Channel.objects.create(owner=self.alice, name="chat", service="json", sealed_url="")
        self.spare = AuthToken.objects.create(user=self.alice, name="spare")[0]
        self.key = create_key(Application.objects.create(name="shop"))[1]
        self.clients = {
            "nobody": self.package.Client(base_url=url, raise_on_unexpected_status=True),
            "session": self._session(),
            "the application": self._client(self.key, "Application"),
            "a token to revoke": self._client(AuthToken.objects.create(user=self.alice)[1]),
            "an agent": self._client(AuthToken.objects.create(user=self.alice, scope="agent")[1]),
            **{
                name: self._client(AuthToken.objects.create(user=owner, scope="all")[1])
                for name, owner in {
                    "alice": self.alice,
                    "bob": self.bob,
                    "newcomer": self.newcomer,
                    "operator": self.operator,
                }.items()
            },
        }

    def _client(self, key: str, prefix: str = "Token") -> Any:
        return self.package.AuthenticatedClient(
            base_url=self.url, token=key, prefix=prefix, raise_on_unexpected_status=True
        )

    def _session(self) -> Any:
        browser = Client()
        browser.force_login(self.alice)
        session = browser.cookies[django_settings.SESSION_COOKIE_NAME].value
        return self.package.Client(
            base_url=self.url,
            cookies={django_settings.SESSION_COOKIE_NAME: session, "csrftoken": "c" * 32},
            headers={"X-CSRFToken": "c" * 32},
            raise_on_unexpected_status=True,
        )

    def queue(self, name: str) -> str:
        return f"queue/{self.username}/{name}"

    def body(self, model: str, **fields: Any) -> Any:
        """Return a body of the generated client."""
        return getattr(importlib.import_module(f"{PACKAGE}.models"), model).from_dict(fields)

    def message(self, content: bytes) -> Any:
        return importlib.import_module(f"{PACKAGE}.types").File(payload=BytesIO(content))

    def call(self, tag: str, call: "Call") -> Any:
        """Send a call, and return the client's response."""
        function = importlib.import_module(f"{PACKAGE}.api.{tag}.{call.operation}").sync_detailed
        arguments = {name: given(self) if callable(given) else given for name, given in call.arguments.items()}
        response = function(client=self.clients[call.by], **arguments)
        if response.status_code < 300:
            self.results[call.operation] = response.parsed
        elif hasattr(response.parsed, "confirm"):
            self.confirmations[call.operation] = response.parsed.confirm
        return response

    def enum(self, name: str, value: str) -> Any:
        return getattr(importlib.import_module(f"{PACKAGE}.models"), name)(value)


class Call(NamedTuple):
    """A call of an operation, and the name of the class of its answer; empty: no body."""

    operation: str
    by: str
    answer: str
    status: int
    arguments: dict[str, Any]


def call(operation: str, by: str = "alice", answer: str = "", status: int = 200, **arguments: Any) -> Call:
    """Return a call. An argument may be a function of the world."""
    return Call(operation, by, answer, status, arguments)


def body(model: str, **fields: Any) -> Callable[[World], Any]:
    """Return an argument: a body with these fields, of which each may be a function of the world."""
    return lambda world: world.body(
        model, **{name: given(world) if callable(given) else given for name, given in fields.items()}
    )


def result(operation: str, name: str = "uuid") -> Callable[[World], Any]:
    """Return an argument: a field of an earlier result, or of the first row of a list."""

    def found(world: World) -> Any:
        parsed = world.results[operation]
        return getattr(parsed[0] if isinstance(parsed, list) else parsed, name)

    return found


def pulse_user(world: World) -> str:
    return world.username


def queue(name: str = "q") -> Callable[[World], str]:
    return lambda world: world.uuids[name]


def offering(world: World) -> str:
    return str(world.offering.uuid.hex)


def agents_calls(resource: str) -> list[Call]:
    """Return the calls of one of the two paths of identities. The second path has an identity of its own."""
    identity = {"uuid": result(f"{resource}_create")}
    new = body("NewAgentIdentity", offering=offering, name=resource)
    wanted = body("NewSubscriptionQueue", offering_uuid=offering, object_type="call")
    return [
        call(f"{resource}_create", "an agent", "AgentIdentity", 201, body=new),
        call(f"{resource}_list", "an agent", "list", name=resource),
        call(f"{resource}_cleanup_orphaned", "operator", "CleanedUpIdentities", body=body("CleanUp", dry_run=True)),
        call(f"{resource}_retrieve", "an agent", "AgentIdentity", **identity),
        call(f"{resource}_update", "an agent", "AgentIdentity", **identity, body=new),
        call(f"{resource}_register_event_subscription", "an agent", "EventSubscription", 201, **identity,
             body=body("NewAgentSubscription", observable_object_type="order")),
        call(f"{resource}_register_queue", "an agent", "ConsumerQueue", 201, **identity, body=body("NewConsumer")),
        call(f"{resource}_create_queue", "an agent", "SubscriptionQueue", 201, **identity, body=wanted),
        call(f"{resource}_register_service", "an agent", "Service", 201, **identity,
             body=body("NewService", name=f"{resource}-orders")),
    ]  # fmt: skip


def confirmation(operation: str) -> Callable[[World], str]:
    """Return an argument: the confirmation that an earlier call was asked for."""
    return lambda world: world.confirmations[operation]


SERVICE = {"uuid": result("agent_identities_register_service")}
EVENT_CONSUMER = {"uuid": result("event_consumers_list")}
SUBSCRIPTION = {"uuid": result("event_subscriptions_create")}
ARCHIVE = {"uuid": result("archives_list")}
REPLAY = {**ARCHIVE, "replay_uuid": result("archives_replay")}
TOKEN = {"uuid": lambda world: world.spare.uuid.hex}
NEWCOMER = {"uuid": lambda world: world.newcomer.uuid.hex}
SHOP = {"application": "shop"}
ORDERS = {**SHOP, "queue": "orders"}
MAIL = {**ORDERS, "consumer": "mail"}
WORKER = {**SHOP, "consumer": "mail", "worker": "8d9c5b7ef0a14c5f9e0a4f6b6f7c8d9e"}
MESSAGES = {**ORDERS, "message_ids": lambda world: world.results["store_post_messages"].messages[0].key}

CALLS = [
    call("version_retrieve", "an agent", "Version"),
    call("users_me_retrieve", "an agent", "User", field=["uuid"]),
    call("me", answer="Me"),
    call("vouching_ask", "newcomer", status=204, body=body("Ask", reason="I build things")),
    call("owners_list", "operator", "list", search="carol"),
    call("owners_retrieve", "operator", "OwnerDetail", **NEWCOMER),
    call("owners_vouch", "operator", "OwnerDetail", **NEWCOMER, body=body("Reason", reason="I know her")),
    call("owners_withdraw", "operator", "OwnerDetail", **NEWCOMER, body=body("Withdraw", remove=False, reason="left")),
    call("owners_vouch_for", "operator", status=204, body=body("Vouch", email="carol@example.org")),
    call("owners_adoptable", "operator", "list"),
    call("owners_adopt", "operator", "PulseUser", 201,
         body=body("Adoption", username=lambda world: world.adoptable, owners=["alice@example.org"])),
    call("invitations_list", "bob", "list"),
    call("invitations_retrieve", "bob", "Invitation", uuid=lambda world: world.invitations[0]),
    call("invitations_accept", "bob", status=204, uuid=lambda world: world.invitations[0]),
    call("invitations_decline", "bob", status=204, uuid=lambda world: world.invitations[1]),
    # Pulse users
    call("pulse_users_create", answer="MadePulseUser", status=201,
         body=body("NewPulseUser", username=lambda world: world.second)),
    call("pulse_users_list", answer="list", search="alice", page=1, page_size=2),
    call("pulse_users_retrieve", answer="PulseUserDetail", username=pulse_user),
    call("pulse_users_partial_update", "operator", "PulseUserDetail", username=pulse_user,
         body=body("PatchedPulseUserChanges", max_length=5000, warn_length=None)),
    call("pulse_users_rotate_password", answer="Password", username=pulse_user, body=body("NewPassword")),
    call("pulse_users_connections", answer="list", username=pulse_user),
    call("pulse_users_close_connection", answer="Problem", status=404, username=pulse_user, name="127.0.0.1:1 -> …"),
    call("pulse_users_belongings", answer="Belongings", username=pulse_user),
    call("pulse_users_ask_again", answer="FieldErrors", status=400, username=pulse_user,
         body=body("Address", email="team@example.org")),
    call("pulse_users_notifications_update", answer="Mutes", username=pulse_user,
         body=body("Mutes", muted=[{"topic": "length", "channel": "email"}])),
    call("pulse_users_notifications_retrieve", answer="Mutes", username=pulse_user),
    # Queues
    call("queues_list", answer="list", ordering=lambda world: world.enum("QueuesListOrdering", "name"), page_size=1),
    call("queues_retrieve", answer="Queue", uuid=queue()),
    call("queues_partial_update", "operator", "Queue", uuid=queue(), body=body("PatchedLimits", max_length=4000)),
    call("queues_ask_for_limit", status=204, uuid=queue(),
         body=body("LimitRequest", max_length=9000, reason="a nightly import")),
    call("queues_decline_limit", "operator", status=204, uuid=queue(), body=body("Decline", reason="no memory left")),
    call("queues_mute", answer="Queue", uuid=queue(),
         body=body("MuteQueue", until=(timezone.now() + timedelta(days=7)).isoformat())),
    call("queues_unmute", status=204, uuid=queue()),
    call("queues_acknowledge", answer="Problem", status=409, uuid=queue()),
    call("queues_live", answer="Live", uuid=queue()),
    call("queues_bindings", answer="list", uuid=queue()),
    call("queues_samples", answer="list", uuid=queue(),
         span=lambda world: world.enum("QueuesSamplesSpan", "day")),
    call("queues_rates", answer="Rates", uuid=queue()),
    call("queues_events", answer="list", uuid=queue()),
    call("queues_messages", answer="list", uuid=queue(), count=2),
    call("queues_move", answer="Move", status=202, uuid=queue(),
         body=body("StartMove", to=lambda world: {"queue": world.queue("purged")}, count=1)),
    call("moves_retrieve", answer="Move", uuid=result("queues_move")),
    call("moves_destroy", status=204, uuid=result("queues_move")),
    call("queues_purge", status=204, uuid=queue(), body=body("Keep", archive=True)),
    call("queues_limit_selected", "operator", "Results",
         body=body("SelectedLimits", uuids=lambda world: [world.uuids["q"]], unbounded=True)),
    call("queues_release_selected", "operator", "Results",
         body=body("Selection", uuids=lambda world: [world.uuids["q"]])),
    call("queues_purge_selected", answer="ConfirmationRequired", status=409,
         body=body("Selection", uuids=lambda world: [world.uuids["purged"]])),
    call("queues_purge_selected", answer="Results", body=body(
        "Selection", uuids=lambda world: [world.uuids["purged"]], confirm=confirmation("queues_purge_selected"))),
    call("queues_delete_selected", answer="ConfirmationRequired", status=409,
         body=body("Selection", uuids=lambda world: [world.uuids["deleted"]])),
    call("queues_delete_selected", answer="Results", body=body(
        "Selection", uuids=lambda world: [world.uuids["deleted"]], confirm=confirmation("queues_delete_selected"))),
    # Archives
    call("archives_list", answer="list", queue=lambda world: world.queue("q")),
    call("archives_retrieve", answer="Archive", **ARCHIVE),
    call("archives_messages", answer="list", **ARCHIVE, first=1, count=2),
    call("archives_download", answer="str", **ARCHIVE),
    call("archives_replay", answer="Replay", status=202, **ARCHIVE,
         body=body("StartReplay", to=lambda world: {"queue": world.queue("q")})),
    call("archives_restore", answer="Replay", status=202, **ARCHIVE, body=body("StartRestore", first=1, last=1)),
    call("archives_replays_list", answer="list", **ARCHIVE),
    call("archives_replays_retrieve", answer="Replay", **REPLAY),
    call("archives_replays_destroy", status=204, **REPLAY),
    call("archives_destroy", status=204, **ARCHIVE),
    call("exchanges_list", answer="list", name=lambda world: world.exchange),
    call("exchanges_traffic", answer="Traffic", name=lambda world: world.exchange),
    call("watches_create", answer="Watch", status=201,
         body=body("StartWatch", exchange=lambda world: world.exchange, routing_key="#")),
    call("watches_retrieve", answer="Caught", uuid=result("watches_create")),
    call("watches_destroy", status=204, uuid=result("watches_create")),
    call("exchanges_destroy", status=204, name=lambda world: world.exchange),
    call("queues_destroy", status=204, uuid=queue(), body=body("Keep", archive=False)),
    call("pulse_users_destroy", answer="ConfirmationRequired", status=409, username=pulse_user, body=body("Confirm")),
    call("pulse_users_destroy", status=204, username=pulse_user,
         body=body("Confirm", confirm=confirmation("pulse_users_destroy"))),
    # Channels, settings and tokens
    call("channels_create", answer="MadeChannel", status=201,
         body=body("NewChannel", name="another", url="https://1.1.1.1/hook")),
    call("channels_list", answer="list"),
    call("channels_retrieve", answer="Channel", uuid=result("channels_create")),
    call("channels_destroy", status=204, uuid=result("channels_create")),
    call("channels_test", answer="Problem", status=409, uuid=lambda world: world.channel.uuid.hex),
    call("settings_change", answer="Preferences",
         body=body("PatchedPreferences", quiet_from="22:00", quiet_until="07:00", time_zone="Europe/Berlin")),
    call("settings_retrieve", answer="Preferences"),
    call("tokens_create", "session", "MadeToken", 201, body=body("NewToken", name="another")),
    call("tokens_list", "session", "list"),
    call("tokens_retrieve", "session", "Token", **TOKEN),
    call("tokens_destroy", "session", status=204, **TOKEN, body=body("Confirm")),
    call("tokens_revoke_current", "a token to revoke", status=204),
    # Agents
    *agents_calls("agent_identities"),
    *agents_calls("marketplace_site_agent_identities"),
    call("offerings_list", answer="list"),
    call("offerings_retrieve", answer="Offering", uuid=offering),
    call("offerings_publish", answer="Published", uuid=offering,
         body=body("NewEvent", object_type="call", payload={"id": 1})),
    call("event_subscriptions_create", "an agent", "EventSubscription", 201,
         body=body("NewEventSubscription", observable_objects=[{"object_type": "call"}])),
    call("event_subscriptions_list", "an agent", "list"),
    call("event_subscriptions_retrieve", "an agent", "EventSubscription", **SUBSCRIPTION),
    call("event_subscriptions_create_queue", "an agent", "SubscriptionQueue", 201, **SUBSCRIPTION,
         body=body("NewSubscriptionQueue", offering_uuid=offering, object_type="call")),
    call("event_subscription_queues_list", "an agent", "list",
         object_type=lambda world: world.enum("EventSubscriptionQueuesListObjectType", "call")),
    call("event_subscription_queues_retrieve", "an agent", "SubscriptionQueue",
         uuid=result("event_subscriptions_create_queue")),
    call("event_subscription_queues_destroy", "an agent", status=204, uuid=result("event_subscriptions_create_queue")),
    call("event_subscriptions_destroy", "an agent", status=204, **SUBSCRIPTION),
    call("agent_consumers_list", answer="list"),
    call("agent_consumers_retrieve", answer="Consumer", uuid=result("agent_consumers_list")),
    call("agent_consumers_destroy", status=204, uuid=result("agent_consumers_list")),
    call("event_consumers_register", "an agent", "ConsumerQueue", 201, body=body(
        "NewEventConsumer", scopes=lambda world: [{"type": "offering", "uuid": offering(world)}])),
    call("event_consumers_list", "an agent", "list", is_global=False),
    call("event_consumers_retrieve", "an agent", "EventConsumer", **EVENT_CONSUMER),
    call("event_consumers_partial_update", "an agent", "EventConsumer", **EVENT_CONSUMER,
         body=body("PatchedEventConsumerUpdate", object_types=["order"])),
    call("event_consumers_destroy", "an agent", status=204, **EVENT_CONSUMER),
    call("marketplace_site_agent_services_list", answer="list"),
    call("marketplace_site_agent_services_cleanup_stale", "operator", "CleanedUpServices", body=body("CleanUp")),
    call("marketplace_site_agent_services_retrieve", answer="Service", **SERVICE),
    call("marketplace_site_agent_services_register_processor", "an agent", "Processor", 201, **SERVICE,
         body=body("NewProcessor", name="slurm", backend_type="SLURM")),
    call("marketplace_site_agent_services_set_statistics", "an agent", "Service", **SERVICE,
         body=body("Statistics", statistics={"orders": 1})),
    call("marketplace_site_agent_processors_list", answer="list"),
    call("marketplace_site_agent_processors_retrieve", answer="Processor",
         uuid=result("marketplace_site_agent_processors_list")),
    call("marketplace_site_agent_processors_destroy", status=204,
         uuid=result("marketplace_site_agent_processors_list")),
    call("marketplace_site_agent_services_destroy", status=204, **SERVICE),
    call("agent_identities_destroy", "an agent", status=204, uuid=result("agent_identities_create")),
    call("marketplace_site_agent_identities_destroy", "an agent", status=204,
         uuid=result("marketplace_site_agent_identities_create")),
    # The message store
    call("store_heartbeat", "nobody", "StoreDone"),
    call("store_create_queue", "the application", "StoreQueue", 201, **SHOP,
         body=body("NewStoreQueue", queue_name="orders", partitions=2, principles="app:shop,bid:alice@example.org")),
    call("store_list_queues", "the application", "StoreQueues", **SHOP, details=True, include_count=True, limit=5),
    call("store_change_queue", "the application", "StoreError", 400, **ORDERS,
         body=body("StoreQueueSettings", partitions=1)),
    call("store_change_queue", "the application", "StoreQueue", **ORDERS,
         body=body("StoreQueueSettings", consistency="weak")),
    call("store_queue_info", answer="StoreQueueInfo", **ORDERS),
    call("store_post_messages", "the application", "PostedMessages", 201, **ORDERS, x_ttl=60, x_partition=1,
         body=lambda world: world.message(b"a \xff book")),
    call("store_post_messages", "the application", "PostedMessages", 201, **ORDERS,
         body=body("NewStoredMessages", messages=[{"body": "a book", "partition": 1}, {"body": "a glass", "ttl": 9}])),
    call("store_read_messages", answer="StoredMessages", **ORDERS, partitions="1,2", limit=9,
         order=lambda world: world.enum("StoreReadMessagesOrder", "descending")),
    call("store_overwrite_messages", "the application", "PostedMessages", **MESSAGES,
         body=lambda world: world.message(b"another book")),
    call("store_read_messages_by_id", answer="StoredMessages", **MESSAGES),
    call("store_set_positions", answer="StorePositions", **MAIL,
         body=body("NewStorePositions", **{"1": MESSAGES["message_ids"]})),
    call("store_set_positions", answer="StoreError", status=412, **MAIL, if_match='"other"',
         body=body("NewStorePositions", **{"1": MESSAGES["message_ids"]})),
    call("store_positions", answer="StorePositions", **MAIL),
    call("store_move_positions", answer="StorePositions", **MAIL,
         body=body("StoreMoves", **{"2": {"from": None, "to": "3a6592301e0911e190b1002500f0fa7c"}})),
    call("store_delete_positions", answer="StoreDone", **MAIL),
    call("store_join_worker", "the application", "StoreDone", 201, **WORKER, body=body("NewStoreWorker", seconds=15)),
    call("store_renew_worker", "the application", "StoreDone", **WORKER),
    call("store_change_leases", "the application", "HeldStoreLeases", **WORKER,
         body=body("StoreLeaseChanges", acquire={"orders": [1, 2]})),
    call("store_leases", "the application", "StoreLeases", **WORKER),
    call("store_remove_worker", "the application", "StoreRemoval", **WORKER, beats=1),
    call("store_delete_messages", answer="StoreDone", **MESSAGES),
    call("store_delete_queue", "the application", "StoreDone", **ORDERS),
]  # fmt: skip
"""Calls of every operation, in an order in which each finds what it needs."""


@pytest.fixture
def schema(live_server: Any) -> dict[str, Any]:
    answer = httpx.get(f"{live_server.url}/api/schema/", headers={"Accept": "application/json"})
    found: dict[str, Any] = answer.json()
    return found


@pytest.fixture
def generated(live_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Generate the client. A warning fails, because the client would lack something."""
    config = tmp_path / "config.yaml"
    config.write_text("post_hooks: []\nhttp_timeout: 60\n")  # no formatting; the schema takes seconds on a busy machine
    command = [Path(sys.prefix) / "bin/openapi-python-client", "generate", "--fail-on-warning", "--meta", "none"]
    where = ["--url", f"{live_server.url}/api/schema/", "--output-path", tmp_path / PACKAGE]
    subprocess.run([*command, *where, "--config", config], check=True, timeout=120)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture
def world(agents: Any, generated: None, guarded: str, management: Any, amqp: Any, live_server: Any) -> Iterator[World]:
    found = World(amqp, live_server.url)
    management.put_user(found.adoptable, "irrelevant")
    yield found
    for client in found.clients.values():
        client.get_httpx_client().close()
    for name in (found.username, found.second, found.adoptable):
        with contextlib.suppress(NotOnBroker):
            management.delete_user(name)


def test_a_generated_client_calls_every_operation(world, schema):
    tags = {one["operationId"]: one["tags"][0] for path in schema["paths"].values() for one in path.values()}
    assert {one.operation for one in CALLS} == set(tags)
    for one in CALLS:
        response = world.call(tags[one.operation].replace("-", "_"), one)
        got = (response.status_code.value, type(response.parsed).__name__ if one.answer else "")
        assert got == (one.status, one.answer), f"{one.operation}: {response.content[:500]}"
