"""Who may do what: every page and every endpoint, by every kind of visitor and every method.

The table is held against the site's URLs: a page that isn't in it fails, and so does a method that isn't. The statuses
stand in the order of VISITORS. Where something could be destroyed it is really there, and is made anew for each.
"""

import contextlib
import json
import re
from typing import Any
from urllib.parse import urlencode
from uuid import UUID

import pytest
from django.db import transaction
from django.test import Client
from django.urls import URLPattern, URLResolver, get_resolver
from django.utils import timezone

from accounts.addresses import confirmation_token
from accounts.models import NotificationAddress, Owner, PulseUser
from accounts.tokens import make_token
from message_store.models import Application
from message_store.store import store
from queues.models import (
    AgentIdentity,
    Channel,
    Consumer,
    EventSubscription,
    Offering,
    Queue,
    SubscriptionQueue,
)
from rabbit.management import Management, NotThere

VISITORS = ("nobody", "unvouched", "owner", "co-owner", "other", "operator")
METHODS = ("get", "post", "put", "patch", "delete")
ACCOUNT = "who-may"
SUBSCRIPTION = UUID("8d9c5b7ef0a14c5f9e0a4f6b6f7c8d9e")
FREE = ("signin/link/<str:token>/", "signin/oidc/", "signin/oidc/callback/")
"""Where a post does nothing, by whomever: it leads to where one signs in, or is no page without OpenID Connect."""

NOTHING_HERE = ("api/^", "v1/^")
"""What answers for every address under /api/ and /v1/ that is none."""


# fmt: off
TABLE: dict[str, dict[str, str]] = {
    # nobody, unvouched, owner, co-owner, other, operator
    "": {"get": "200 200 200 200 200 200"},
    "signin/": {
        "get": "200 302 302 302 302 302",
        "post": "200 302 302 302 302 302",
        "put": "200 302 302 302 302 302",
        "patch": "405 302 302 302 302 302",
        "delete": "405 302 302 302 302 302",
    },
    "signin/code/": dict.fromkeys(METHODS, "302 302 302 302 302 302"),
    "signin/link/<str:token>/": {
        "get": "410 410 410 410 410 410",
        "post": "302 302 302 302 302 302",
        "put": "302 302 302 302 302 302",
        "patch": "302 302 302 302 302 302",
        "delete": "302 302 302 302 302 302",
    },
    "signin/oidc/": dict.fromkeys(METHODS, "404 404 404 404 404 404"),
    "signin/oidc/callback/": dict.fromkeys(METHODS, "404 404 404 404 404 404"),
    "signout/": {
        "get": "302 200 200 200 200 200",
        "post": "302 302 302 302 302 302",
    },
    "vouching/": {
        "get": "302 200 200 200 200 200",
        "post": "302 302 200 200 200 200",
    },
    "owners/": {
        "get": "302 403 403 403 403 200",
        "post": "302 403 403 403 403 200",
    },
    "owners/<uuid:uuid>/": {
        "get": "302 403 403 403 403 200",
        "post": "302 403 403 403 403 302",
    },
    "pulse-users/": {
        "get": "302 200 200 200 200 200",
        "post": "302 403 200 200 200 200",
    },
    "pulse-users/<account:username>/": {"get": "302 404 200 200 404 200"},
    "pulse-users/<account:username>/password/": {
        "get": "302 404 302 302 404 302",
        "post": "302 404 200 200 404 200",
    },
    "pulse-users/<account:username>/owners/": {
        "get": "302 404 302 302 404 302",
        "post": "302 404 302 302 404 302",
    },
    "pulse-users/<account:username>/addresses/": {
        "get": "302 404 302 302 404 302",
        "post": "302 404 200 200 404 200",
    },
    "pulse-users/<account:username>/thresholds/": {
        "get": "302 404 302 302 404 302",
        "post": "302 404 403 403 404 302",
    },
    "pulse-users/<account:username>/delete/": {
        "get": "302 404 200 200 404 200",
        "post": "302 404 302 302 404 302",
    },
    "addresses/<str:token>/": {
        "get": "200 200 200 200 200 200",
        "post": "200 200 200 200 200 200",
    },
    "tokens/": {
        "get": "302 200 200 200 200 200",
        "post": "302 403 201 201 201 201",
    },
    "tokens/<uuid:uuid>/revoke/": {
        "get": "302 404 200 404 404 404",
        "post": "302 404 302 404 404 404",
    },
    "queues/": {"get": "302 200 200 200 200 200"},
    "queues/<uuid:uuid>/": {"get": "302 404 200 200 404 200"},
    "queues/<uuid:uuid>/chart/": {"get": "302 404 302 302 404 302"},
    "queues/<uuid:uuid>/delete/": {
        "get": "302 404 200 200 404 200",
        "post": "302 404 302 302 404 302",
    },
    "queues/<uuid:uuid>/purge/": {
        "get": "302 404 200 200 404 200",
        "post": "302 404 302 302 404 302",
    },
    "queues/<uuid:uuid>/limits/": {
        "get": "302 404 403 403 404 200",
        "post": "302 404 403 403 404 302",
    },
    "exchanges/": {"get": "302 200 200 200 200 200"},
    "exchanges/delete/": {
        "get": "302 404 200 200 404 200",
        "post": "302 404 302 302 404 302",
    },
    "subscriptions/": {"get": "302 200 200 200 200 200"},
    "subscriptions/<uuid:uuid>/remove/": {
        "get": "302 404 200 404 404 200",
        "post": "302 404 302 404 404 302",
    },
    "subscriptions/agents/<uuid:uuid>/remove/": {
        "get": "302 404 200 404 404 200",
        "post": "302 404 302 404 404 302",
    },
    "subscriptions/consumers/<uuid:uuid>/remove/": {
        "get": "302 404 200 404 404 200",
        "post": "302 404 302 404 404 302",
    },
    "settings/": {
        "get": "302 200 200 200 200 200",
        "post": "302 200 200 200 200 200",
    },
    "settings/channels/<uuid:uuid>/test/": {"post": "302 404 302 404 404 404"},
    "settings/channels/<uuid:uuid>/delete/": {
        "get": "302 404 200 404 404 404",
        "post": "302 404 302 404 404 404",
    },
    "message-store/": {"get": "302 200 200 200 200 200"},
    "message-store/<str:application>/": {"get": "302 404 200 404 404 200"},
    "message-store/<str:application>/<str:queue>/": {"get": "302 404 200 404 404 200"},
    "api/pulse-users/": {
        "get": "401 200 200 200 200 200",
        "post": "401 403 400 400 400 400",
    },
    "api/pulse-users/<str:username>/": {
        "get": "401 404 200 200 404 200",
        "patch": "401 404 200 200 404 200",
        "delete": "401 404 204 204 404 204",
    },
    "api/pulse-users/<str:username>/rotate-password/": {"post": "401 404 200 200 404 200"},
    "api/pulse-users/<str:username>/connections/": {"get": "401 404 200 200 404 200"},
    "api/pulse-users/<str:username>/belongings/": {"get": "401 404 200 200 404 200"},
    "api/pulse-users/<str:username>/ask-again/": {"post": "401 404 400 400 404 400"},
    "api/me/": {"get": "401 200 200 200 200 200"},
    "api/vouching/ask/": {"post": "401 204 409 409 409 409"},
    "api/owners/": {"get": "401 403 403 403 403 200"},
    "api/owners/vouch/": {"post": "401 403 403 403 403 204"},
    "api/owners/adopt/": {
        "get": "401 403 403 403 403 200",
        "post": "401 403 403 403 403 400",
    },
    "api/owners/<str:uuid>/": {"get": "401 404 404 404 404 200"},
    "api/owners/<str:uuid>/vouch/": {"post": "401 404 404 404 404 200"},
    "api/owners/<str:uuid>/withdraw/": {"post": "401 404 404 404 404 200"},
    "api/tokens/": {
        "get": "401 200 200 200 200 200",
        "post": "401 403 201 201 201 201",
    },
    "api/tokens/<str:uuid>/": {
        "get": "401 404 200 404 404 404",
        "delete": "401 404 204 404 404 404",
    },
    "api/queues/": {"get": "401 200 200 200 200 200"},
    "api/queues/<str:uuid>/": {
        "get": "401 404 200 200 404 200",
        "patch": "401 404 403 403 404 200",
        "delete": "401 404 204 204 404 204",
    },
    "api/queues/<str:uuid>/purge/": {"post": "401 404 204 204 404 204"},
    "api/queues/<str:uuid>/live/": {"get": "401 404 200 200 404 200"},
    "api/queues/<str:uuid>/bindings/": {"get": "401 404 200 200 404 200"},
    "api/queues/<str:uuid>/samples/": {"get": "401 404 200 200 404 200"},
    "api/queues/<str:uuid>/events/": {"get": "401 404 200 200 404 200"},
    "api/exchanges/": {
        "get": "401 200 200 200 200 200",
        "delete": "401 404 204 204 404 204",
    },
    "api/channels/": {
        "get": "401 200 200 200 200 200",
        "post": "401 400 400 400 400 400",
    },
    "api/channels/<str:uuid>/": {
        "get": "401 404 200 404 404 404",
        "delete": "401 404 204 404 404 404",
    },
    "api/channels/<str:uuid>/test/": {"post": "401 404 409 404 404 404"},
    "api/settings/": {
        "get": "401 200 200 200 200 200",
        "patch": "401 200 200 200 200 200",
    },
    "api/offerings/": {"get": "401 200 200 200 200 200"},
    "api/offerings/<str:uuid>/": {"get": "401 404 200 200 404 200"},
    "api/offerings/<str:uuid>/events/": {"post": "401 404 403 200 404 200"},
    "api/marketplace-site-agent-identities/": {
        "get": "401 200 200 200 200 200",
        "post": "401 403 400 400 400 400",
    },
    "api/marketplace-site-agent-identities/<str:uuid>/": {
        "get": "401 404 200 404 404 200",
        "put": "401 404 400 404 404 400",
        "delete": "401 404 204 404 404 204",
    },
    "api/marketplace-site-agent-identities/<str:uuid>/register_event_subscription/": {
        "post": "401 404 403 404 404 403",
    },
    "api/marketplace-site-agent-identities/<str:uuid>/register_queue/": {"post": "401 404 403 404 404 403"},
    "api/marketplace-site-agent-identities/<str:uuid>/create_queue/": {"post": "401 404 403 404 404 403"},
    "api/agent-identities/": {
        "get": "401 200 200 200 200 200",
        "post": "401 403 400 400 400 400",
    },
    "api/agent-identities/<str:uuid>/": {
        "get": "401 404 200 404 404 200",
        "put": "401 404 400 404 404 400",
        "delete": "401 404 204 404 404 204",
    },
    "api/agent-identities/<str:uuid>/register_event_subscription/": {"post": "401 404 403 404 404 403"},
    "api/agent-identities/<str:uuid>/register_queue/": {"post": "401 404 403 404 404 403"},
    "api/agent-identities/<str:uuid>/create_queue/": {"post": "401 404 403 404 404 403"},
    "api/agent-consumers/": {"get": "401 200 200 200 200 200"},
    "api/agent-consumers/<str:uuid>/": {
        "get": "401 404 200 404 404 200",
        "delete": "401 404 204 404 404 204",
    },
    "api/event-subscriptions/": {
        "get": "401 200 200 200 200 200",
        "post": "401 403 403 403 403 403",
    },
    "api/event-subscriptions/<str:uuid>/": {
        "get": "401 404 200 404 404 200",
        "delete": "401 404 204 404 404 204",
    },
    "api/event-subscriptions/<str:uuid>/create_queue/": {"post": "401 404 403 404 404 403"},
    "api/event-subscription-queues/": {"get": "401 200 200 200 200 200"},
    "api/event-subscription-queues/<str:uuid>/": {
        "get": "401 404 200 404 404 200",
        "delete": "401 404 204 404 404 204",
    },
    "api/schema/": {"get": "200 200 200 200 200 200"},
    "api/docs/": {"get": "200 200 200 200 200 200"},
    # By a key or a token alone, and never by a session: test_message_store_api.py has who may.
    "v1/<str:application>": dict.fromkeys(("get", "post"), "403 403 403 403 403 403"),
    "v1/<str:application>/<str:queue>": dict.fromkeys(("get", "post", "put", "delete"), "403 403 403 403 403 403"),
    "v1/<str:application>/<str:queue>/positions/<str:consumer>": dict.fromkeys(
        ("get", "put", "delete"), "403 403 403 403 403 403"
    ),
    "v1/<str:application>/<str:queue>/<str:message_ids>": dict.fromkeys(
        ("get", "put", "delete"), "403 403 403 403 403 403"
    ),
    "healthz": {"get": "200 200 200 200 200 200"},
    "readyz": {"get": "200 200 200 200 200 200"},
    "admin/operate/pass/": dict.fromkeys(("get", "post"), "302 302 302 302 302 200"),
    "admin/operate/brake/": {"get": "302 302 302 302 302 200", "post": "302 302 302 302 302 409"},
    "admin/operate/orphans/": {"get": "302 302 302 302 302 200", "post": "302 302 302 302 302 409"},
    "admin/operate/stale/": {"get": "302 302 302 302 302 200", "post": "302 302 302 302 302 409"},
    "metrics": {"get": "200 200 200 200 200 200"},
}
# fmt: on

# What is sent, where more than nothing is needed for something to be done. API endpoints get it as JSON.
BODIES: dict[tuple[str, str], dict[str, Any]] = {
    ("queues/<uuid:uuid>/delete/", "post"): {"typed": f"queue/{ACCOUNT}/builds"},
    ("queues/<uuid:uuid>/purge/", "post"): {"typed": f"queue/{ACCOUNT}/builds"},
    ("exchanges/delete/", "post"): {"typed": f"exchange/{ACCOUNT}/events"},
    ("pulse-users/<account:username>/delete/", "post"): {"name": ACCOUNT},
    ("pulse-users/<account:username>/owners/", "post"): {"email": "other@example.org"},
    ("subscriptions/<uuid:uuid>/remove/", "post"): {"typed": SUBSCRIPTION.hex},
    ("subscriptions/agents/<uuid:uuid>/remove/", "post"): {"typed": "cellar"},
    ("subscriptions/consumers/<uuid:uuid>/remove/", "post"): {"typed": "consumer_1"},
    ("tokens/", "post"): {"name": "another", "days": 7},
    ("vouching/", "post"): {"reason": "I build things"},
    ("api/tokens/", "post"): {"name": "another"},
    ("api/vouching/ask/", "post"): {"reason": "I build things"},
    ("api/owners/vouch/", "post"): {"email": "unvouched@example.org"},
    ("api/offerings/<str:uuid>/events/", "post"): {"object_type": "order", "payload": {}},
}


def routes(patterns: Any = None, prefix: str = "") -> list[str]:
    found = []
    for pattern in patterns if patterns is not None else get_resolver().url_patterns:
        route = prefix + str(pattern.pattern)
        if isinstance(pattern, URLResolver):
            found += routes(pattern.url_patterns, route)
        elif isinstance(pattern, URLPattern):
            found.append(route)
    return found


class World:
    """One owner's things, and everybody who may come by."""

    def __init__(self, vhost: str) -> None:
        self.vhost = vhost
        self.people: dict[str, Owner | None] = {
            "nobody": None,
            "unvouched": Owner.objects.create_user("unvouched@example.org", last_login=timezone.now()),
            "owner": Owner.objects.create_user("owner@example.org", vouched=True, last_login=timezone.now()),
            "co-owner": Owner.objects.create_user("co-owner@example.org", vouched=True, last_login=timezone.now()),
            "other": Owner.objects.create_user("other@example.org", vouched=True, last_login=timezone.now()),
            "operator": Owner.objects.create_superuser("operator@example.org"),
        }
        owner = self.people["owner"]
        self.account = PulseUser.objects.create(username=ACCOUNT, ready=True)
        self.account.owners.set([owner, self.people["co-owner"]])
        self.queue = Queue.objects.create(
            vhost=vhost, name=f"queue/{ACCOUNT}/builds", type="classic", durable=True, auto_delete=False,
            exclusive=False, ready=1, unacknowledged=0, pulse_user=self.account,
            first_seen=timezone.now(), last_seen=timezone.now(),
        )  # fmt: skip
        self.address = NotificationAddress.objects.create(pulse_user=self.account, email="team@example.org")
        self.token, _ = make_token(owner, "theirs")
        self.channel = Channel.objects.create(owner=owner, name="chat", service="json", sealed_url="")
        self.offering = Offering.objects.create(name="theirs")
        self.offering.members.add(owner)
        self.offering.publishers.add(self.people["co-owner"])
        self.identity = AgentIdentity.objects.create(owner=owner, offering=self.offering, name="cellar")
        self.consumer = Consumer.objects.create(identity=self.identity, vhost=owner.uuid.hex, queue_name="consumer_1")
        self.subscription = EventSubscription.objects.create(
            uuid=SUBSCRIPTION, owner=owner, identity=self.identity, object_type="order"
        )
        self.subscription_queue = SubscriptionQueue.objects.create(
            subscription=self.subscription, offering=self.offering, object_type="order",
            vhost=owner.uuid.hex, queue_name="subscription_1",
        )  # fmt: skip

        Application.objects.create(name="shop")
        store().register("shop", "theirs", principals=["bid:owner@example.org"])

    def address_of(self, route: str) -> str:
        """Give the address that this route has in this world: the owner's things."""
        uuid = self.queue.uuid
        for part, thing in (
            ("tokens/", self.token), ("channels/", self.channel), ("owners/", self.people["other"]),
            ("subscriptions/", self.subscription), ("subscriptions/agents/", self.identity),
            ("subscriptions/consumers/", self.consumer),
            ("offerings/", self.offering), ("agent-identities/", self.identity), ("agent-consumers/", self.consumer),
            ("event-subscriptions/", self.subscription), ("event-subscription-queues/", self.subscription_queue),
        ):  # fmt: skip
            if part in route:
                uuid = thing.uuid
        token = confirmation_token(self.address) if route.startswith("addresses/") else "no-such-token"
        for placeholder, value in (
            ("<uuid:uuid>", uuid), ("<str:uuid>", uuid), ("<account:username>", ACCOUNT), ("<str:username>", ACCOUNT),
            ("<str:token>", token), ("<str:application>", "shop"), ("<str:queue>", "theirs"),
            ("<str:consumer>", "mail"), ("<str:message_ids>", "0" * 32),
        ):  # fmt: skip
            route = route.replace(placeholder, str(value))
        return f"/{route}?name=exchange/{ACCOUNT}/events" if "exchanges/" in route else f"/{route}"


@pytest.fixture
def things(guarded, management: Management):
    """Give a function that puts the owner's things onto the broker."""

    def put() -> None:
        management.put_user(ACCOUNT, "irrelevant")
        management.make_queue(guarded, f"queue/{ACCOUNT}/builds")
        management.make_exchange(guarded, f"exchange/{ACCOUNT}/events")

    yield put
    with contextlib.suppress(NotThere):
        management.delete_user(ACCOUNT)


def ask(world: World, visitor: str, method: str, route: str) -> int:
    client = Client(raise_request_exception=False)
    if (person := world.people[visitor]) is not None:
        client.force_login(person)
    address = world.address_of(route)
    body = BODIES.get((route, method), {})
    if route.startswith("api/"):
        return client.generic(method.upper(), address, json.dumps(body), "application/json").status_code
    return client.generic(method.upper(), address, urlencode(body), "application/x-www-form-urlencoded").status_code


class Undo(Exception):
    """So that what one visitor did is not there for the next."""


@pytest.mark.parametrize(
    ("route", "method"), [(route, method) for route, methods in TABLE.items() for method in methods]
)
def test_each_visitor_gets_what_the_table_says(guarded, things, route, method):
    statuses, world = [], World(guarded)
    things()
    for visitor in VISITORS:
        with contextlib.suppress(Undo), transaction.atomic():
            statuses.append(ask(world, visitor, method, route))
            raise Undo
        if method != "get":
            things()
    assert " ".join(map(str, statuses)) == TABLE[route][method]


@pytest.mark.parametrize("route", TABLE)
def test_what_the_table_does_not_name_is_allowed_to_nobody(guarded, route):
    world = World(guarded)
    for method in METHODS:
        if method not in TABLE[route]:
            assert ask(world, "operator", method, route) == 405
            assert ask(world, "nobody", method, route) in (302, 401, 405)


@pytest.mark.parametrize(
    ("route", "method"),
    [(route, method) for route, rows in TABLE.items() for method in rows if method != "get" and route not in FREE],
)
def test_nothing_is_done_by_a_session_without_its_csrf_token(guarded, route, method):
    world = World(guarded)
    client = Client(enforce_csrf_checks=True)
    client.force_login(world.people["operator"])
    assert client.generic(method.upper(), world.address_of(route), "{}", "application/json").status_code == 403


def test_every_page_and_every_endpoint_is_in_the_table():
    djangos = re.compile("admin/(?!operate/)")
    everywhere = {route for route in routes() if not djangos.match(route) and route not in NOTHING_HERE}
    assert everywhere == set(TABLE)


def test_the_administration_is_for_operators_alone(guarded):
    """Each of its pages asks by itself; that none forgets is seen here, whatever row its address names."""
    named = [route for route in routes() if route.startswith("admin/") and "(?P" not in route]
    pages = [f"/{re.sub('<[^>]+>', '1', route)}" for route in named]
    world = World(guarded)
    assert len(pages) > 100
    for visitor in VISITORS[:-1]:
        client = Client()
        if (person := world.people[visitor]) is not None:
            client.force_login(person)
        for page in pages:
            answer = client.get(page)
            assert answer.status_code == 302 or (page, answer.status_code) == ("/admin/login/", 403), page
