"""Access to every page and endpoint, for every visitor and method.

The table is compared with the site's URLs, so a missing page or method fails. Statuses are in the order of VISITORS.
The broker is real. The database is rolled back after each request.
"""

import contextlib
import copy
import json
import re
from collections.abc import Iterator
from datetime import timedelta
from http.cookies import SimpleCookie
from typing import Any
from urllib.parse import urlencode
from uuid import UUID

import pytest
from django.db import transaction
from django.test import Client
from django.urls import URLPattern, URLResolver, get_resolver
from django.utils import timezone

from accounts.access.tokens import create_token
from accounts.models import AuthToken, Invitation, NotificationAddress, Owner, PulseUser
from accounts.pulse_users.addresses import confirmation_token
from agents.models import AgentIdentity, Consumer, EventSubscription, Offering, SubscriptionQueue
from message_store.models import Application
from message_store.store import store
from notifications.models import Channel
from queues.models import MessageWatch, Move, Replay
from rabbit.errors import NotOnBroker
from rabbit.management import Management
from rabbit.names import WATCH_QUEUE
from tests.support.agents import broker_restored
from tests.support.archives import store_archive
from tests.support.toolbox import stored_queue

VISITORS = ("nobody", "unvouched", "owner", "co-owner", "other", "operator")
METHODS = ("get", "post", "put", "patch", "delete")
PULSE_USER = "who-may"
NEW_PULSE_USER = "who-may-new"
ADOPTABLE_PULSE_USER = "who-may-adopt"
SUBSCRIPTION = UUID("8d9c5b7ef0a14c5f9e0a4f6b6f7c8d9e")
QUEUE = UUID("5a3e0f9d2b764c1c8d5e6f7a8b9c0d1e")
WATCH = UUID("0f4a1f0d6c0f4d0e8a53c3f8b5d1a7e2")
OFFERING = UUID("1f6a0c1d6c0f4d0e8a53c3f8b5d1a7e2")
HARMLESS_POSTS = ("signin/oidc/", "signin/oidc/callback/")
"""A POST changes nothing here: it redirects to the sign-in page, or is 404 without OpenID Connect."""

CATCH_ALL = ("api/^", "v1/^")
"""Routes for all other addresses under /api/ and /v1/."""


SCOPES = ("agent", "read", "all")
SCOPES_OF = {"any": "agent read all", "agent": "agent all", "read": "read all", "session": ""}

ROWS = """
# Methods, statuses by session, scope, route. The scope is that of the tokens which may send the request: "agent" and
# "read" include "all", and "read" is for GET only; "any" is all three; "session" if only a session may, "-" if it reads
# no tokens. The store (v1/) reads no session: see test_message_store_api.py.
get                 200 200 200 200 200 200 -       /
get,post,put        200 302 302 302 302 302 -       signin/
patch,delete        405 302 302 302 302 302 -       signin/
any                 302 302 302 302 302 302 -       signin/code/
get,post            410 410 410 410 410 410 -       signin/link/<str:token>/
any                 404 404 404 404 404 404 -       signin/oidc/
any                 404 404 404 404 404 404 -       signin/oidc/callback/
get                 302 200 200 200 200 200 -       signout/
post                302 302 302 302 302 302 -       signout/
get                 302 200 200 200 200 200 -       vouching/
post                302 302 200 200 200 200 -       vouching/
get,post            302 403 403 403 403 200 -       owners/
get                 302 403 403 403 403 200 -       owners/<uuid:uuid>/
post                302 403 403 403 403 302 -       owners/<uuid:uuid>/
get                 302 200 200 200 200 200 -       pulse-users/
post                302 403 200 200 200 200 -       pulse-users/
get                 302 404 200 200 404 200 -       pulse-users/<pulse_user:username>/
get                 302 404 302 302 404 302 -       pulse-users/<pulse_user:username>/password/
post                302 404 200 200 404 200 -       pulse-users/<pulse_user:username>/password/
get,post            302 404 302 302 404 302 -       pulse-users/<pulse_user:username>/owners/
get                 302 404 200 200 404 200 -       pulse-users/<pulse_user:username>/owners/<uuid:uuid>/remove/
post                302 404 302 302 404 302 -       pulse-users/<pulse_user:username>/owners/<uuid:uuid>/remove/
get,post            302 404 302 302 404 302 -       pulse-users/<pulse_user:username>/connections/
get                 302 404 200 200 404 404 -       pulse-users/<pulse_user:username>/notifications/
post                302 404 302 302 404 404 -       pulse-users/<pulse_user:username>/notifications/
get                 302 404 302 302 404 302 -       pulse-users/<pulse_user:username>/addresses/
post                302 404 200 200 404 200 -       pulse-users/<pulse_user:username>/addresses/
get                 302 404 302 302 404 302 -       pulse-users/<pulse_user:username>/thresholds/
post                302 404 403 403 404 302 -       pulse-users/<pulse_user:username>/thresholds/
get,post            302 404 302 302 404 302 -       pulse-users/<pulse_user:username>/hold-off/
get,post            302 404 302 302 404 302 -       pulse-users/<pulse_user:username>/archives/
# It has a queue, so It asks first.: see test_effects.py.
get,post            302 404 200 200 404 200 -       pulse-users/<pulse_user:username>/delete/
get                 302 404 404 404 200 404 -       invitations/<uuid:uuid>/
post                302 404 404 404 302 404 -       invitations/<uuid:uuid>/
get,post            200 200 200 200 200 200 -       addresses/<str:token>/
get                 302 200 200 200 200 200 -       tokens/
post                302 403 201 201 201 201 -       tokens/
get                 302 404 200 404 404 404 -       tokens/<uuid:uuid>/revoke/
post                302 404 302 404 404 404 -       tokens/<uuid:uuid>/revoke/
get                 302 200 200 200 200 200 -       queues/
get                 302 404 200 200 404 200 -       queues/<uuid:uuid>/
post                302 404 302 302 404 302 -       queues/<uuid:uuid>/dismiss/
# No exchange is bound to the queue.
get,post            302 404 200 200 404 200 -       queues/<uuid:uuid>/watch/
get                 302 404 200 200 404 200 -       queues/<uuid:uuid>/delete/
post                302 404 302 302 404 302 -       queues/<uuid:uuid>/delete/
get                 302 404 200 200 404 200 -       queues/<uuid:uuid>/purge/
post                302 404 302 302 404 302 -       queues/<uuid:uuid>/purge/
get,post            302 302 302 302 302 302 -       queues/selected/
get,post            302 404 200 200 404 200 -       queues/<uuid:uuid>/limits/ask/
post                302 404 403 403 404 200 -       queues/<uuid:uuid>/limits/decline/
get                 302 404 403 403 404 200 -       queues/<uuid:uuid>/limits/
post                302 404 403 403 404 302 -       queues/<uuid:uuid>/limits/
get                 302 404 200 200 404 403 -       queues/<uuid:uuid>/mute/
post                302 404 302 302 404 403 -       queues/<uuid:uuid>/mute/
post                302 404 302 302 404 302 -       queues/<uuid:uuid>/acknowledge/
get,post            302 404 200 200 404 200 -       queues/<uuid:uuid>/messages/
get                 302 404 200 200 404 200 -       queues/<uuid:uuid>/move/
post                302 404 409 409 404 409 -       queues/<uuid:uuid>/move/
get,post            302 404 200 200 404 200 -       queues/<uuid:uuid>/dead-letters/
get                 302 404 200 200 404 200 -       queues/<uuid:uuid>/moves/<uuid:move_uuid>/
post                302 404 302 302 404 302 -       queues/<uuid:uuid>/moves/<uuid:move_uuid>/stop/
get                 302 200 200 200 200 200 -       archives/
get                 302 404 200 200 404 200 -       archives/<uuid:uuid>/
get                 302 404 200 200 404 200 -       archives/<uuid:uuid>/messages/<int:position>/
get                 302 404 200 200 404 200 -       archives/<uuid:uuid>/messages/<int:position>/body/
get                 302 404 200 200 404 200 -       archives/<uuid:uuid>/download/
get                 302 404 200 200 404 200 -       archives/<uuid:uuid>/delete/
post                302 404 302 302 404 302 -       archives/<uuid:uuid>/delete/
get                 302 404 200 200 404 200 -       archives/<uuid:uuid>/restore/
post                302 404 302 302 404 302 -       archives/<uuid:uuid>/restore/
get                 302 404 200 200 404 200 -       archives/<uuid:uuid>/replays/<uuid:replay_uuid>/
post                302 404 302 302 404 302 -       archives/<uuid:uuid>/replays/<uuid:replay_uuid>/stop/
get                 302 200 200 200 200 200 -       exchanges/
get                 302 404 200 200 404 200 -       exchanges/exchange/
get                 302 200 200 200 200 200 -       exchanges/watch/
# Others have no Pulse user that may read it.
post                302 403 302 302 200 200 -       exchanges/watch/
get                 302 404 200 404 404 404 -       exchanges/watches/<uuid:uuid>/
post                302 404 302 404 404 404 -       exchanges/watches/<uuid:uuid>/stop/
get                 302 404 200 200 404 200 -       exchanges/delete/
post                302 404 302 302 404 302 -       exchanges/delete/
get                 302 200 200 200 200 200 -       agents/
get                 302 302 302 302 302 302 -       subscriptions/
get                 302 404 200 404 404 200 -       agents/subscriptions/<uuid:uuid>/remove/
post                302 404 302 404 404 302 -       agents/subscriptions/<uuid:uuid>/remove/
get                 302 404 200 404 404 200 -       agents/<uuid:uuid>/remove/
post                302 404 302 404 404 302 -       agents/<uuid:uuid>/remove/
get                 302 404 200 404 404 200 -       agents/consumers/<uuid:uuid>/remove/
post                302 404 302 404 404 302 -       agents/consumers/<uuid:uuid>/remove/
get,post            302 200 200 200 200 200 -       settings/
post                302 404 302 404 404 404 -       settings/channels/<uuid:uuid>/test/
get                 302 404 200 404 404 404 -       settings/channels/<uuid:uuid>/delete/
post                302 404 302 404 404 404 -       settings/channels/<uuid:uuid>/delete/
get                 302 200 200 200 200 200 -       message-store/
get                 302 404 200 404 404 200 -       message-store/<str:application>/
get                 302 404 200 404 404 200 -       message-store/<str:application>/<str:queue>/
get                 401 200 200 200 200 200 read    api/pulse-users/
post                401 403 201 201 201 201 all     api/pulse-users/
get,patch           401 404 200 200 404 200 read    api/pulse-users/<str:username>/
# It has a queue, so It asks first.: see test_effects.py.
delete              401 404 409 409 404 409 all     api/pulse-users/<str:username>/
post                401 404 200 200 404 200 all     api/pulse-users/<str:username>/rotate-password/
get                 401 404 200 200 404 200 read    api/pulse-users/<str:username>/connections/
# Without a name.
delete              401 404 400 400 404 400 all     api/pulse-users/<str:username>/connections/
get,put             401 404 200 200 404 404 read    api/pulse-users/<str:username>/notifications/
get                 401 404 200 200 404 200 read    api/pulse-users/<str:username>/belongings/
post                401 404 204 204 404 204 all     api/pulse-users/<str:username>/ask-again/
get                 401 200 200 200 200 200 read    api/invitations/
get                 401 404 404 404 200 404 read    api/invitations/<str:uuid>/
post                401 404 404 404 204 404 all     api/invitations/<str:uuid>/accept/
post                401 404 404 404 204 404 all     api/invitations/<str:uuid>/decline/
get                 401 200 200 200 200 200 read    api/me/
post                401 204 409 409 409 409 all     api/vouching/ask/
get                 401 403 403 403 403 200 read    api/owners/
post                401 403 403 403 403 204 all     api/owners/vouch/
get                 401 403 403 403 403 200 read    api/owners/adopt/
post                401 403 403 403 403 201 all     api/owners/adopt/
get                 401 404 404 404 404 200 read    api/owners/<str:uuid>/
post                401 404 404 404 404 200 all     api/owners/<str:uuid>/vouch/
post                401 404 404 404 404 200 all     api/owners/<str:uuid>/withdraw/
get                 401 200 200 200 200 200 session api/tokens/
post                401 403 201 201 201 201 session api/tokens/
delete              401 404 404 404 404 404 any     api/tokens/current/
get                 401 404 200 404 404 404 session api/tokens/<str:uuid>/
delete              401 404 204 404 404 404 any     api/tokens/<str:uuid>/
get                 401 200 200 200 200 200 read    api/queues/
get                 401 404 200 200 404 200 read    api/queues/<str:uuid>/
patch               401 404 403 403 404 200 all     api/queues/<str:uuid>/
delete              401 404 204 204 404 204 all     api/queues/<str:uuid>/
post                401 404 204 204 404 204 all     api/queues/<str:uuid>/purge/
# It asks first.
post                401 400 409 409 400 409 all     api/queues/selected/delete/
post                401 400 409 409 400 409 all     api/queues/selected/purge/
post                401 400 403 403 400 200 all     api/queues/selected/limits/
# The queue is not blocked.
post                401 400 403 403 400 200 all     api/queues/selected/release/
post                401 404 204 204 404 204 all     api/queues/<str:uuid>/limits/ask/
# No request is open.
post                401 404 403 403 404 400 all     api/queues/<str:uuid>/limits/decline/
put                 401 404 200 200 404 403 all     api/queues/<str:uuid>/mute/
delete              401 404 204 204 404 403 all     api/queues/<str:uuid>/mute/
# The queue is not over its threshold.
post                401 404 409 409 404 409 all     api/queues/<str:uuid>/acknowledge/
post                401 404 409 409 404 409 all     api/queues/<str:uuid>/move/
get                 401 404 200 200 404 200 read    api/moves/<str:uuid>/
delete              401 404 204 204 404 204 all     api/moves/<str:uuid>/
get                 401 404 200 200 404 200 read    api/queues/<str:uuid>/live/
get                 401 404 200 200 404 200 read    api/queues/<str:uuid>/bindings/
get                 401 404 200 200 404 200 read    api/queues/<str:uuid>/samples/
get                 401 404 200 200 404 200 read    api/queues/<str:uuid>/rates/
get                 401 404 200 200 404 200 read    api/queues/<str:uuid>/events/
get                 401 404 200 200 404 200 all     api/queues/<str:uuid>/messages/
get                 401 200 200 200 200 200 read    api/archives/
get                 401 404 200 200 404 200 read    api/archives/<str:uuid>/
delete              401 404 204 204 404 204 all     api/archives/<str:uuid>/
get                 401 404 200 200 404 200 all     api/archives/<str:uuid>/messages/
get                 401 404 200 200 404 200 all     api/archives/<str:uuid>/download/
post                401 404 202 202 404 202 all     api/archives/<str:uuid>/replay/
post                401 404 202 202 404 202 all     api/archives/<str:uuid>/restore/
get                 401 404 200 200 404 200 read    api/archives/<str:uuid>/replays/
get                 401 404 200 200 404 200 read    api/archives/<str:uuid>/replays/<str:replay_uuid>/
delete              401 404 204 204 404 204 all     api/archives/<str:uuid>/replays/<str:replay_uuid>/
get                 401 200 200 200 200 200 read    api/exchanges/
delete              401 404 204 204 404 204 all     api/exchanges/
get                 401 404 200 200 404 200 read    api/exchanges/traffic/
post                401 403 201 201 400 400 all     api/watches/
get                 401 404 200 404 404 404 all     api/watches/<str:uuid>/
delete              401 404 204 404 404 404 all     api/watches/<str:uuid>/
get                 401 200 200 200 200 200 read    api/channels/
post                401 403 201 201 201 201 all     api/channels/
get                 401 404 200 404 404 404 read    api/channels/<str:uuid>/
delete              401 404 204 404 404 404 all     api/channels/<str:uuid>/
post                401 404 409 404 404 404 all     api/channels/<str:uuid>/test/
get,patch           401 200 200 200 200 200 read    api/settings/
get                 401 200 200 200 200 200 read    api/offerings/
get                 401 404 200 200 404 200 read    api/offerings/<str:uuid>/
post                401 404 403 200 404 200 all     api/offerings/<str:uuid>/events/
get                 401 200 200 200 200 200 any     api/agent-identities/
post                401 403 201 400 400 201 agent   api/agent-identities/
post                401 403 403 403 403 200 all     api/agent-identities/cleanup_orphaned/
get,put             401 404 200 404 404 200 any     api/agent-identities/<str:uuid>/
delete              401 404 204 404 404 204 agent   api/agent-identities/<str:uuid>/
post                401 404 403 404 404 403 agent   api/agent-identities/<str:uuid>/register_event_subscription/
post                401 404 403 404 404 403 agent   api/agent-identities/<str:uuid>/register_queue/
post                401 404 403 404 404 403 agent   api/agent-identities/<str:uuid>/create_queue/
post                401 404 201 404 404 403 agent   api/agent-identities/<str:uuid>/register_service/
get                 401 200 200 200 200 200 read    api/marketplace-site-agent-services/
post                401 403 403 403 403 200 all     api/marketplace-site-agent-services/cleanup_stale/
get                 401 404 200 404 404 200 read    api/marketplace-site-agent-services/<str:uuid>/
delete              401 404 204 404 404 204 all     api/marketplace-site-agent-services/<str:uuid>/
post                401 404 201 404 404 403 agent   api/marketplace-site-agent-services/<str:uuid>/register_processor/
post                401 404 200 404 404 403 agent   api/marketplace-site-agent-services/<str:uuid>/set_statistics/
get                 401 200 200 200 200 200 read    api/marketplace-site-agent-processors/
get                 401 404 200 404 404 200 read    api/marketplace-site-agent-processors/<str:uuid>/
delete              401 404 204 404 404 204 all     api/marketplace-site-agent-processors/<str:uuid>/
get                 401 200 200 200 200 200 any     api/version/
get                 401 200 200 200 200 200 any     api/users/me/
get                 401 200 200 200 200 200 read    api/agent-consumers/
get                 401 404 200 404 404 200 read    api/agent-consumers/<str:uuid>/
delete              401 404 204 404 404 204 all     api/agent-consumers/<str:uuid>/
get                 401 200 200 200 200 200 any     api/event-consumers/
post                401 403 403 403 403 403 agent   api/event-consumers/register/
get,patch           401 404 200 404 404 200 any     api/event-consumers/<str:uuid>/
delete              401 404 204 404 404 204 agent   api/event-consumers/<str:uuid>/
get                 401 200 200 200 200 200 any     api/event-subscriptions/
post                401 403 403 403 403 403 agent   api/event-subscriptions/
get                 401 404 200 404 404 200 any     api/event-subscriptions/<str:uuid>/
delete              401 404 204 404 404 204 agent   api/event-subscriptions/<str:uuid>/
post                401 404 403 404 404 403 agent   api/event-subscriptions/<str:uuid>/create_queue/
get                 401 200 200 200 200 200 any     api/event-subscription-queues/
get                 401 404 200 404 404 200 any     api/event-subscription-queues/<str:uuid>/
delete              401 404 204 404 404 204 agent   api/event-subscription-queues/<str:uuid>/
get                 200 200 200 200 200 200 -       api/schema/
get                 200 200 200 200 200 200 -       api/docs/
get                 200 200 200 200 200 200 -       api/docs/<str:tag>/
get                 200 200 200 200 200 200 -       help/
get                 200 200 200 200 200 200 -       help/<slug:name>/
get                 200 200 200 200 200 200 -       help/examples/<str:name>
get,post            403 403 403 403 403 403 all     v1/<str:application>
get,post,put,delete 403 403 403 403 403 403 all     v1/<str:application>/<str:queue>
get,post,put,delete 403 403 403 403 403 403 all     v1/<str:application>/<str:queue>/positions/<str:consumer>
put,post,delete     403 403 403 403 403 403 all     v1/<str:application>/consumers/<str:consumer>/workers/<str:worker>
get,post            403 403 403 403 403 403 all     v1/<str:application>/consumers/<str:consumer>/leases/<str:worker>
get                 403 403 403 403 403 403 all     v1/<str:application>/<str:queue>/info
get                 200 200 200 200 200 200 -       __heartbeat__
get,put,delete      403 403 403 403 403 403 all     v1/<str:application>/<str:queue>/<str:message_ids>
get                 404 404 404 404 404 404 -       styleguide/
get                 200 200 200 200 200 200 -       healthz
get                 200 200 200 200 200 200 -       readyz
get,post            302 302 302 302 302 200 -       admin/operate/pass/
get                 302 302 302 302 302 200 -       admin/operate/trail/
get                 302 302 302 302 302 200 -       admin/operate/brake/
post                302 302 302 302 302 409 -       admin/operate/brake/
get                 302 302 302 302 302 200 -       admin/operate/orphans/
post                302 302 302 302 302 409 -       admin/operate/orphans/
get                 302 302 302 302 302 200 -       admin/operate/stale/
post                302 302 302 302 302 409 -       admin/operate/stale/
get                 401 403 403 403 403 200 read    metrics
"""

TABLE: dict[str, dict[str, str]] = {}
"""The statuses of each route and method by session."""
BY_SCOPE: dict[str, dict[str, set[str]]] = {}
"""The scopes that may send each method, of routes that read tokens. Without a scope, a session is needed."""

for row in ROWS.strip().splitlines():
    if not row.startswith("#"):
        of_methods, *of_visitors, scope, path = row.split()
        route = path.removeprefix("/")
        for method in METHODS if of_methods == "any" else of_methods.split(","):
            TABLE.setdefault(route, {})[method] = " ".join(of_visitors)
            if scope != "-":
                changes = method != "get" and not route.startswith("api/tokens/")
                allowed = SCOPES_OF.get(scope, scope).split()
                BY_SCOPE.setdefault(route, {})[method] = {one for one in allowed if one != "read" or not changes}

# fmt: off
# Requests whose statuses by a token differ from those by a session.
BY_TOKEN: dict[tuple[str, str], str] = {
    ("api/schema/", "get"): "401 200 200 200 200 200",
    ("api/tokens/current/", "delete"): "401 204 204 204 204 204",
    ("api/tokens/<str:uuid>/", "delete"): "401 404 403 404 404 404",  # the owner's request names another token
    ("api/agent-identities/<str:uuid>/register_event_subscription/", "post"): "401 404 201 404 404 403",
    ("api/agent-identities/<str:uuid>/register_queue/", "post"): "401 404 201 404 404 403",
    ("api/agent-identities/<str:uuid>/create_queue/", "post"): "401 404 201 404 404 403",
    ("api/event-consumers/register/", "post"): "401 403 201 400 400 201",
    ("api/event-subscriptions/", "post"): "401 403 201 400 400 201",
    ("api/event-subscriptions/<str:uuid>/create_queue/", "post"): "401 404 201 404 404 403",
    ("v1/<str:application>/<str:queue>", "get"): "401 403 200 403 403 403",
    ("v1/<str:application>/<str:queue>/positions/<str:consumer>", "get"): "401 403 200 403 403 403",
    ("v1/<str:application>/<str:queue>/positions/<str:consumer>", "post"): "401 403 400 403 403 403",
    ("v1/<str:application>/<str:queue>/positions/<str:consumer>", "put"): "401 403 400 403 403 403",
    ("v1/<str:application>/<str:queue>/positions/<str:consumer>", "delete"): "401 403 200 403 403 403",
    ("v1/<str:application>/<str:queue>/info", "get"): "401 403 200 403 403 403",
    ("v1/<str:application>/<str:queue>/<str:message_ids>", "get"): "401 403 200 403 403 403",
    ("v1/<str:application>/<str:queue>/<str:message_ids>", "delete"): "401 403 200 403 403 403",
}

# Statuses of registering, by a token of any scope, for the owner without access, and after leaving the offering.
REGISTERING: dict[str, str] = {
    "api/agent-identities/": "403 400",
    "api/agent-identities/<str:uuid>/register_event_subscription/": "403 403",
    "api/agent-identities/<str:uuid>/register_queue/": "403 403",
    "api/agent-identities/<str:uuid>/create_queue/": "403 400",
    "api/event-consumers/register/": "403 400",
    "api/event-subscriptions/": "403 400",
    "api/event-subscriptions/<str:uuid>/create_queue/": "403 400",
}
# fmt: on

OTHER_PATH = "api/agent-identities/", "api/marketplace-site-agent-identities/"
"""Identities have two paths."""

for table in (TABLE, BY_SCOPE, REGISTERING):
    table |= {route.replace(*OTHER_PATH): row for route, row in table.items() if route.startswith(OTHER_PATH[0])}
BY_TOKEN |= {
    (route.replace(*OTHER_PATH), method): statuses
    for (route, method), statuses in BY_TOKEN.items()
    if route.startswith(OTHER_PATH[0])
}


def reads_tokens(route: str, method: str) -> bool:
    return route in BY_SCOPE or (route, method) in BY_TOKEN


def expected_by_token(scope: str, route: str, method: str, by_session: str) -> str:
    """Return the statuses of VISITORS with a token of this scope; "nobody" presents an unknown token."""
    if not reads_tokens(route, method):
        return " ".join([by_session.split()[0]] * len(VISITORS))
    if route in BY_SCOPE and scope not in BY_SCOPE[route][method]:
        return "401 " + " ".join(["403"] * (len(VISITORS) - 1))
    return BY_TOKEN.get((route, method), "401" + by_session[3:])


EXPECTED = {
    "session": {(route, method): statuses for route, rows in TABLE.items() for method, statuses in rows.items()}
}
EXPECTED |= {
    scope: {one: expected_by_token(scope, *one, statuses) for one, statuses in EXPECTED["session"].items()}
    for scope in SCOPES
}

QUEUE_WANTED = {"offering_uuid": OFFERING.hex, "object_type": "call"}

# Bodies of requests that need one to succeed; API endpoints get JSON.
BODIES: dict[tuple[str, str], dict[str, Any]] = {
    ("queues/<uuid:uuid>/delete/", "post"): {"typed": f"queue/{PULSE_USER}/builds"},
    ("queues/<uuid:uuid>/purge/", "post"): {"typed": f"queue/{PULSE_USER}/builds"},
    ("queues/<uuid:uuid>/messages/", "post"): {"count": 1},
    ("queues/<uuid:uuid>/move/", "post"): {"to": "queue", "name": f"queue/{PULSE_USER}/to"},
    ("queues/<uuid:uuid>/mute/", "post"): {"set": 1, "until": f"{timezone.now() + timedelta(days=7):%F}"},
    ("api/queues/<str:uuid>/mute/", "put"): {"until": f"{timezone.now() + timedelta(days=7):%F}T00:00Z"},
    ("archives/<uuid:uuid>/restore/", "post"): {"first": 1, "last": 1},
    ("exchanges/watch/", "post"): {"exchange": f"exchange/{PULSE_USER}/events"},
    ("api/watches/", "post"): {"exchange": f"exchange/{PULSE_USER}/events"},
    ("exchanges/delete/", "post"): {"typed": f"exchange/{PULSE_USER}/events"},
    ("pulse-users/<pulse_user:username>/delete/", "post"): {"typed": PULSE_USER},
    ("pulse-users/<pulse_user:username>/owners/", "post"): {"email": "operator@example.org"},
    ("invitations/<uuid:uuid>/", "post"): {"accept": "1"},
    ("agents/subscriptions/<uuid:uuid>/remove/", "post"): {"typed": SUBSCRIPTION.hex},
    ("agents/<uuid:uuid>/remove/", "post"): {"typed": "cellar"},
    ("agents/consumers/<uuid:uuid>/remove/", "post"): {"typed": "consumer_1"},
    ("tokens/", "post"): {"name": "another", "days": 7},
    ("vouching/", "post"): {"reason": "I build things"},
    ("api/pulse-users/", "post"): {"username": NEW_PULSE_USER},
    ("api/pulse-users/<str:username>/", "patch"): {"owners": ["owner@example.org"]},
    ("api/pulse-users/<str:username>/ask-again/", "post"): {"email": "team@example.org"},
    ("api/vouching/ask/", "post"): {"reason": "I build things"},
    ("api/owners/vouch/", "post"): {"email": "unvouched@example.org"},
    ("api/owners/adopt/", "post"): {"username": ADOPTABLE_PULSE_USER, "owners": ["owner@example.org"]},
    ("api/tokens/", "post"): {"name": "another"},
    ("api/queues/<str:uuid>/", "patch"): {"unbounded": True},
    ("api/queues/selected/delete/", "post"): {"uuids": [QUEUE.hex]},
    ("api/queues/selected/purge/", "post"): {"uuids": [QUEUE.hex]},
    ("api/queues/selected/limits/", "post"): {"uuids": [QUEUE.hex], "unbounded": True},
    ("api/queues/selected/release/", "post"): {"uuids": [QUEUE.hex]},
    ("api/queues/<str:uuid>/limits/decline/", "post"): {"reason": "no memory left"},
    ("api/queues/<str:uuid>/limits/ask/", "post"): {"max_length": 1_000_000, "reason": "a nightly import"},
    ("api/pulse-users/<str:username>/notifications/", "put"): {"muted": [{"topic": "length", "channel": "email"}]},
    ("api/queues/<str:uuid>/move/", "post"): {"to": "origin"},
    ("api/archives/<str:uuid>/replay/", "post"): {"to": {"queue": f"queue/{PULSE_USER}/builds"}},
    ("api/channels/", "post"): {"name": "another", "url": "https://1.1.1.1/hook"},
    ("api/settings/", "patch"): {"weekly_summary": False},
    ("api/offerings/<str:uuid>/events/", "post"): {"object_type": "order", "payload": {}},
    ("api/event-consumers/register/", "post"): {"scopes": [{"type": "offering", "uuid": OFFERING.hex}]},
    ("api/event-consumers/<str:uuid>/", "patch"): {"object_types": ["order"]},
    ("api/event-subscriptions/", "post"): {"observable_objects": [QUEUE_WANTED]},
    ("api/event-subscriptions/<str:uuid>/create_queue/", "post"): QUEUE_WANTED,
    ("api/agent-identities/", "post"): {"offering": OFFERING.hex, "name": "attic"},
    ("api/agent-identities/<str:uuid>/", "put"): {"offering": OFFERING.hex, "name": "attic"},
    ("api/agent-identities/<str:uuid>/register_event_subscription/", "post"): {"observable_object_type": "call"},
    ("api/agent-identities/<str:uuid>/create_queue/", "post"): QUEUE_WANTED,
    ("api/agent-identities/<str:uuid>/register_service/", "post"): {"name": "orders"},
    ("api/marketplace-site-agent-services/<str:uuid>/register_processor/", "post"): {
        "name": "another",
        "backend_type": "SLURM",
    },
    ("api/marketplace-site-agent-services/<str:uuid>/set_statistics/", "post"): {"statistics": {"orders": 1}},
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


@contextlib.contextmanager
def undone() -> Iterator[None]:
    """Roll back the block's changes of the database."""
    with transaction.atomic():
        yield
        transaction.set_rollback(True)


class World:
    """One owner's belongings, and every kind of visitor."""

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
        self.keys = {
            (visitor, scope): AuthToken.objects.create(user=person, scope=scope)[1] if person else "0" * 64
            for visitor, person in self.people.items()
            for scope in SCOPES
        }
        self.clients = {
            one: Client(headers={"Authorization": f"Token {key}"}, raise_request_exception=False)
            for one, key in self.keys.items()
        }
        self.cookies: dict[str, SimpleCookie] = {}
        owner = self.people["owner"]
        self.pulse_user = PulseUser.objects.create(username=PULSE_USER, ready=True)
        self.pulse_user.owners.set([owner, self.people["co-owner"]])
        name = f"queue/{PULSE_USER}/builds"
        owned = {"vhost": vhost, "pulse_user": self.pulse_user}
        self.queue = stored_queue(name, uuid=QUEUE, ready=1, unacknowledged=0, **owned)
        self.archive = store_archive(b"1", name=name, queue=self.queue, **owned)
        self.replay = Replay.objects.create(
            archive=self.archive, to_queue=self.queue.name, first=1, last=1, by=owner, created=timezone.now()
        )
        self.move = Move.objects.create(
            queue=self.queue, to_queue=f"queue/{PULSE_USER}/to", total=1, by=owner, created=timezone.now()
        )
        self.watch = MessageWatch.objects.create(
            uuid=WATCH, owner=owner, vhost=vhost, exchange=f"exchange/{PULSE_USER}/events",
            ends=timezone.now() + timedelta(hours=1), polled_at=timezone.now(),
        )  # fmt: skip
        self.invitation = Invitation.objects.create(
            pulse_user=self.pulse_user, inviter=owner, invitee=self.people["other"]
        )
        self.address = NotificationAddress.objects.create(pulse_user=self.pulse_user, email="team@example.org")
        self.token, _ = create_token(owner, "theirs")
        self.channel = Channel.objects.create(owner=owner, name="chat", service="json", sealed_url="")
        self.offering = Offering.objects.create(uuid=OFFERING, name="theirs")
        self.offering.members.add(owner)
        self.offering.publishers.add(self.people["co-owner"])
        self.identity = AgentIdentity.objects.create(owner=owner, offering=self.offering, name="cellar")
        self.service = self.identity.services.create(name="membership")
        self.processor = self.service.processors.create(name="slurm", backend_type="SLURM", last_run=timezone.now())
        self.consumer = Consumer.objects.create(
            identity=AgentIdentity.objects.create(owner=owner, offering=self.offering, name="barn"),
            vhost=owner.uuid.hex, queue_name="consumer_1",
        )  # fmt: skip
        self.subscription = EventSubscription.objects.create(
            uuid=SUBSCRIPTION, owner=owner, identity=self.identity, object_type="order"
        )
        self.subscription_queue = SubscriptionQueue.objects.create(
            subscription=self.subscription, offering=self.offering, object_type="order",
            vhost=owner.uuid.hex, queue_name="subscription_1",
        )  # fmt: skip
        Application.objects.create(name="shop")
        store().register("shop", "theirs", principals=["bid:owner@example.org"])

    def sign_in(self) -> None:
        """Open a session for each visitor but nobody."""
        for visitor, person in self.people.items():
            client = self.clients[visitor, "session"] = Client(raise_request_exception=False)
            if person:
                client.force_login(person)
            self.cookies[visitor] = copy.deepcopy(client.cookies)

    def client(self, visitor: str, by: str = "session") -> Client:
        """Return a client with this visitor's session or token of a scope ("nobody": no session, an unknown token)."""
        client = self.clients[visitor, by]
        cookies = self.cookies.get(visitor) if by == "session" else None
        client.cookies = copy.deepcopy(cookies or SimpleCookie())
        return client

    def address_of(self, route: str) -> str:
        """Return the address of the owner's object for this route."""
        uuid = self.queue.uuid
        for part, thing in (
            ("tokens/", self.token), ("channels/", self.channel), ("owners/", self.people["other"]),
            ("pulse-users/", self.people["co-owner"]), ("invitations/", self.invitation),
            ("agents/subscriptions/", self.subscription), ("agents/<", self.identity),
            ("agents/consumers/", self.consumer),
            ("archives/", self.archive), ("moves/<str", self.move), ("watches/", self.watch),
            ("agent-services/", self.service), ("agent-processors/", self.processor),
            ("offerings/", self.offering), ("agent-identities/", self.identity), ("agent-consumers/", self.consumer),
            ("event-consumers/", self.consumer),
            ("event-subscriptions/", self.subscription), ("event-subscription-queues/", self.subscription_queue),
        ):  # fmt: skip
            if part in route:
                uuid = thing.uuid
        token = confirmation_token(self.address) if route.startswith("addresses/") else "no-such-token"
        for placeholder, value in (
            ("<uuid:uuid>", uuid), ("<str:uuid>", uuid),
            ("<pulse_user:username>", PULSE_USER), ("<str:username>", PULSE_USER),
            ("<uuid:move_uuid>", self.move.uuid),
            ("<str:replay_uuid>", self.replay.uuid), ("<uuid:replay_uuid>", self.replay.uuid),
            ("<int:position>", 1), ("<str:token>", token), ("<str:tag>", "queues"),
            ("<str:application>", "shop"), ("<str:queue>", "theirs"), ("<str:consumer>", "mail"),
            ("<str:message_ids>", "00000000000010008000000000000000"), ("<str:worker>", "0" * 32),
            ("<slug:name>", "owners"), ("<str:name>", "shop.py"),
        ):  # fmt: skip
            route = route.replace(placeholder, str(value))
        return f"/{route}?name=exchange/{PULSE_USER}/events" if "exchanges/" in route else f"/{route}"


def restore_broker(management: Management, vhost: str) -> None:
    """Restore the Pulse user with its queue and exchange on the broker, and delete the new Pulse user."""
    management.put_user(PULSE_USER, "irrelevant")
    management.declare_queue(vhost, f"queue/{PULSE_USER}/builds")
    management.declare_exchange(vhost, f"exchange/{PULSE_USER}/events")
    management.declare_queue(vhost, WATCH_QUEUE + WATCH.hex)
    with contextlib.suppress(NotOnBroker):
        management.delete_user(NEW_PULSE_USER)


@pytest.fixture
def world(db, settings, broker, management: Management, vhost) -> Iterator[World]:
    settings.RABBITMQ_MANAGEMENT_URL = broker.management_url
    settings.RABBIT_URL = broker.amqp_url
    settings.GUARDIAN_VHOSTS = [vhost]
    settings.GUARDIAN_PULSE_VHOST = vhost
    world = World(vhost)
    world.sign_in()
    with broker_restored(management):
        management.put_user(ADOPTABLE_PULSE_USER, "irrelevant")
        restore_broker(management, vhost)
        yield world
        for name in (PULSE_USER, ADOPTABLE_PULSE_USER):
            management.delete_user(name)


def ask(world: World, client: Client, method: str, route: str) -> Any:
    """Send the table's request to the owner's object, and roll back its changes."""
    body: Any = BODIES.get((route.replace(*OTHER_PATH[::-1]), method), {})
    if route.startswith("api/"):
        content = json.dumps(body), "application/json"
    else:
        content = urlencode(body), "application/x-www-form-urlencoded"
    with undone():
        return client.generic(method.upper(), world.address_of(route), *content)


@pytest.mark.parametrize("by", ["session", *SCOPES])
def test_each_visitor_gets_the_statuses_of_the_table(world, management, by):
    wrong = []
    for (route, method), statuses in EXPECTED[by].items():
        for visitor, status in zip(VISITORS, map(int, statuses.split()), strict=True):
            if by != "session" and visitor != "operator" and not reads_tokens(route, method):
                continue  # a token says nothing here about whose it is
            got = ask(world, world.client(visitor, by), method, route).status_code
            if method != "get" and got < 400 and re.search("pulse-users/|queues/|exchanges/|watches/", route):
                restore_broker(management, world.vhost)
            if got != status:
                wrong.append(f"{method} {route} by {visitor}: {got}, not {status}")
    assert not wrong, "\n".join(wrong)


def test_every_endpoint_that_reads_tokens_is_in_the_table_of_scopes():
    public = {"api/schema/", "api/docs/", "api/docs/<str:tag>/"}
    read_tokens = {route for route in TABLE if route.startswith(("api/", "v1/", "metrics"))} - public
    assert {route: {*methods} for route, methods in BY_SCOPE.items()} == {
        route: {*TABLE[route]} for route in read_tokens
    }


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("name", ["uuid", "current"])
def test_a_token_may_revoke_itself(world, scope, name):
    token = AuthToken.objects.get(user=world.people["owner"], scope=scope, name="")
    path = f"/api/tokens/{token.uuid.hex if name == 'uuid' else name}/"
    assert world.client("owner", scope).delete(path).status_code == 204
    assert world.client("owner", scope).delete(path).status_code == 401
    assert AuthToken.objects.filter(user=world.people["owner"]).count() == len(SCOPES)


def test_registration_needs_access_and_membership_of_the_offering(world):
    losses = {
        "access": lambda: Owner.objects.filter(pk=world.people["owner"].pk).update(vouched=False),
        "the offering": world.offering.members.clear,
    }
    wrong = []
    for route, statuses in REGISTERING.items():
        for (lost, lose), status in zip(losses.items(), map(int, statuses.split()), strict=True):
            with undone():
                lose()
                got = ask(world, world.client("owner", "agent"), "post", route).status_code
            if got != status:
                wrong.append(f"{route} without {lost}: {got}, not {status}")
    assert not wrong, "\n".join(wrong)


def test_methods_missing_from_the_table_are_405(world):
    """Try one method that is not in the table: the answer's Allow header names all allowed methods."""
    wrong = []
    for route, methods in TABLE.items():
        for method in [method for method in METHODS if method not in methods][:1]:
            refused = ask(world, world.client("operator"), method, route)
            allowed = {*refused.get("Allow", "").lower().split(", ")} - {"head", "options"}
            if (refused.status_code, allowed) != (405, {*methods}):
                wrong.append(f"{method} {route}: {refused.status_code}, allowed: {allowed}")
    assert not wrong, "\n".join(wrong)


def test_a_session_without_a_csrf_token_changes_nothing(world):
    client, done = Client(enforce_csrf_checks=True), []
    client.cookies = world.cookies["operator"]
    for route in TABLE:
        if route in HARMLESS_POSTS or route.startswith("v1/"):  # the message store reads no session
            continue
        for method in {*TABLE[route]} - {"get"}:
            refused = ask(world, client, method, route)
            if refused.status_code != 403 or not re.search("CSRF Failed|The form was not accepted", refused.text):
                done.append(f"{method} {route}: {refused.status_code}")
    assert not done, "\n".join(done)


def test_every_page_and_endpoint_is_in_the_table():
    admin_pages = re.compile("admin/(?!operate/)")
    all_routes = {route for route in routes() if not admin_pages.match(route) and route not in CATCH_ALL}
    assert all_routes == set(TABLE)


def test_the_admin_is_for_operators_only(world):
    """Each page of the admin checks access, whatever row its address names."""
    named = [route for route in routes() if route.startswith("admin/") and "(?P" not in route]
    pages = [f"/{re.sub('<[^>]+>', '1', route)}" for route in named]
    assert len(pages) > 100
    for visitor in ("nobody", "owner"):
        client = world.client(visitor)
        answers = {page: client.get(page).status_code for page in pages}
        assert answers == {page: 403 if (visitor, page) == ("owner", "/admin/login/") else 302 for page in pages}
