"""The SQL statements and requests to the broker of each page and list do not grow with the rows.

The routes and the owner's objects are those of test_who_may.py; the admin's lists have the rows of test_admin.py.
The message store's own API is in test_message_store_api.py, and passes and tasks are in queues/test_shape.py.
"""

# ruff: noqa: F811 - `world` is a fixture

import copy
from datetime import timedelta
from operator import gt
from uuid import uuid4

from django.contrib import admin
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from accounts.models import Invitation, Owner, PulseUser
from agents.sweeps import sweep
from guardian_site import middleware
from message_store import queues as stored_queues
from message_store.queues import MessageInput
from queues.models import QueueSample
from rabbit.management import Management
from tests.site.test_admin import MAKE, path_of
from tests.site.test_who_may import PULSE_USER, TABLE, VISITORS, World, world  # noqa: F401
from tests.support.archives import store_archive
from tests.support.counting import counted_requests
from tests.support.toolbox import stored_queue

ROWS = (2, 8, 11)
"""The numbers of rows with which the pages are compared."""

MODELS = list(admin.site._registry)
GENERATED = ("api/schema/", "api/docs/", "api/docs/<str:tag>/")


def copied(row, **fields):
    """Store a copy of a row with another key, another UUID and these fields, and return it."""
    new = copy.copy(row)
    new.pk, new._state.adding = None, True
    for name, value in {"uuid": uuid4(), **fields}.items():
        setattr(new, name, value)
    new.save()
    return new


def add_rows(world: World, management: Management, number: int) -> None:
    """Add to the owner, and to each of the owner's objects, one of everything that belongs to it."""
    for make in MAKE.values():
        make()
    now, owner = timezone.now(), world.people["owner"]

    pulse_user = PulseUser.objects.create(username=f"{PULSE_USER}-{number}", ready=True)
    pulse_user.owners.add(owner)
    guest = Owner.objects.create_user(f"guest-{number}@example.org", vouched=True, vouch_requested_at=now)
    world.pulse_user.owners.add(guest)
    offered = PulseUser.objects.create(username=f"offered-{number}", ready=True)
    offered.owners.add(guest)
    Invitation.objects.create(pulse_user=offered, inviter=guest, invitee=owner)
    Invitation.objects.create(pulse_user=world.pulse_user, inviter=owner, invitee=guest)
    copied(world.address, email=f"team-{number}@example.org", added_by=guest)
    copied(world.token, digest=f"digest-{number}", name=f"token-{number}")
    copied(world.channel, name=f"chat-{number}")

    names = {"pulse_user": f"queue/{PULSE_USER}/{number}", "owner": f"consumer_{number}", "": f"nobody's-{number}"}
    for field, name in names.items():
        owned = {"pulse_user": world.pulse_user, "owner": owner}.get(field)
        stored_queue(
            name, vhost=world.vhost, ready=10_000 + number, unacknowledged=0, consumers=0, state="warned",
            block_reason="brake", registered=field == "owner", **({field: owned} if field else {}),
        )  # fmt: skip
        management.declare_queue(world.vhost, name)
    management.declare_exchange(world.vhost, f"exchange/{PULSE_USER}/{number}")
    for queue in (world.queue.name, names["pulse_user"]):
        management.bind_queue(world.vhost, f"exchange/{PULSE_USER}/events", queue, f"{number}")
    QueueSample.objects.create(queue=world.queue, at=now, length=number)
    world.queue.new_event("warned", guest).save()
    archive = store_archive(b"1", pulse_user=world.pulse_user, queue=world.queue, by=guest)
    copied(world.replay, archive=archive, by=guest)
    copied(world.replay, by=guest)

    offering = copied(world.offering, name=f"offering-{number}")
    offering.members.add(owner)
    world.offering.members.add(guest)
    identity = copied(world.identity, name=f"agent-{number}", offering=offering)
    copied(world.consumer, identity=identity, queue_name=f"consumer_of_{number}", rmq_username=uuid4().hex)
    copied(world.processor, service=copied(world.service, identity=identity))
    copied(world.processor, service=copied(world.service, name=f"service-{number}"), name=f"processor-{number}")
    copied(world.processor, name=f"processor-{number}")
    subscription = copied(world.subscription, object_type=f"type-{number}")
    for one in (subscription, world.subscription):
        name = f"subscription_{one.pk}_{number}"
        copied(world.subscription_queue, subscription=one, offering=offering, queue_name=name)
    stored = stored_queues.create("shop", f"queue-{number}", principals="bid:owner@example.org")
    for queue in (stored, stored_queues.find("shop", "theirs")):
        stored_queues.post_all(queue, [MessageInput(b"x")])


def pages_of(world: World) -> list[tuple[str, str]]:
    """Return the visitor and the address of each page that is compared: an operator's where it lists all owners'."""
    pages = [
        (visitor, world.address_of(route))
        for route, methods in TABLE.items()
        for visitor in ("owner", "operator")
        if "get" in methods and methods["get"].split()[VISITORS.index(visitor)] == "200"
        if route not in GENERATED and (visitor == "owner" or "<" not in route)
    ]
    return [*pages, ("operator", "/admin/"), *(("operator", path_of(model._meta.label)) for model in MODELS)]


def cost(world: World, visitor: str, address: str) -> tuple[int, int]:
    """Return the numbers of statements and of requests to the broker of a GET of this address."""
    client = world.client(visitor)
    with CaptureQueriesContext(connection) as statements, counted_requests() as requests:
        answer = client.get(address)
        assert (answer.status_code, len(answer.getvalue()) > 0) == (200, True), address
    return len(statements), len(requests)


def test_no_page_or_list_takes_more_statements_or_requests_for_more_rows(world, management, monkeypatch):
    monkeypatch.setattr(sweep, "REGISTRATION_GRACE", timedelta(0))  # rows of a slow run would grow older than it
    monkeypatch.setattr(middleware, "PAGE_SECONDS", 60)  # past it, a page shows what is stored, in fewer statements
    grown, before, stored = pages_of(world), {}, 0
    for rows in ROWS:
        for number in range(stored, rows):
            add_rows(world, management, number)
        now = {page: cost(world, *page) for page in grown}
        # The first GET of a page may fill a cache that the next one reads, so what grew once is compared again.
        grown = [page for page in grown if page not in before or any(map(gt, now[page], before[page]))]
        before, stored = now, rows
    assert not grown, "\n".join(f"{page}: {before[page]} statements and requests for {ROWS[-1]} rows" for page in grown)
    assert [model._meta.label for model in MODELS if model._base_manager.count() < ROWS[-1]] == []
