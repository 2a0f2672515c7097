import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from django.contrib import messages
from django.core.paginator import Paginator
from django.db.models import Count, F, OuterRef, Prefetch, Q, QuerySet, Subquery, Value, Window
from django.db.models.functions import Coalesce, RowNumber
from django.http import HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils import timezone
from django.views.decorators.http import require_http_methods, require_safe

from accounts.access.vouching import may_use_broker
from accounts.models import Owner
from accounts.pages.common import search_text, uuids_in
from accounts.pages.forms import NameForm
from agents.events.delivery import blocked_reason, with_delivery
from agents.models import AgentIdentity, Consumer, EventSubscription, Offering, Registration, SubscriptionQueue
from agents.removal import deletions
from core import broker, connecting
from core.links import absolute_url
from core.models import Removal
from queues.models import Queue
from queues.pages.destroy import describe_failure
from queues.pages.queue_list import Row, rows_of
from queues.pages.visitors import Request, signed_in
from rabbit import amqp
from rabbit.entities import Client
from rabbit.errors import BrokerError, NotOnBroker
from rabbit.names import readable

logger = logging.getLogger(__name__)

AGENTS_PER_PAGE = 20
QUEUES_SHOWN = 50
"""Of one agent."""
OFFERINGS_SHOWN = 50

Removable = AgentIdentity | EventSubscription | Consumer


class LiveConnections(NamedTuple):
    """The live connections of a RabbitMQ user: their number, and the oldest one's start if the broker reports it."""

    number: int
    since: datetime | None


class QueueRow(NamedTuple):
    """A registered queue, with what ``with_delivery`` annotates.

    ``listed`` is None if no pass has listed the queue, or it is gone.
    """

    row: SubscriptionQueue | Consumer
    listed: Row | None
    blocked_reason: str | None


class Reader(NamedTuple):
    """A consumer or subscription, which logs in to read queues. ``online`` is None if it isn't connected."""

    row: EventSubscription | Consumer
    is_consumer: bool
    object_types: list[str]
    queues: list[QueueRow]
    more: int
    online: LiveConnections | None


class Agent(NamedTuple):
    """An identity with its readers, or a subscription without an identity."""

    identity: AgentIdentity | None
    owner: Owner
    readers: list[Reader]


# The list


@signed_in
@require_safe
def agents_page(request: Request) -> HttpResponse:
    """List the visitor's agents with their subscriptions; for operators, all agents."""
    search = search_text(request)
    page = Paginator(_entries(request.user, search), AGENTS_PER_PAGE).get_page(request.GET.get("page"))
    vhost = None if request.user.is_staff else request.user.uuid.hex
    clients, trouble = _clients(vhost) if page.object_list else ([], "")
    agents = _agents(page.object_list, clients)
    readers = [reader for agent in agents for reader in agent.readers]
    offerings = list(Offering.objects.subscribed_by(request.user)[: OFFERINGS_SHOWN + 1])
    return render(
        request,
        "agents/agents.html",
        {
            **_connecting(agents),
            "page": page,
            "search": search,
            "agents": agents,
            "trouble": trouble,
            "asked": clients is not None,
            "looked_at": timezone.now(),
            "being_made": any(
                shown.row.state == Registration.CREATING for reader in readers for shown in reader.queues
            ),
            "token_gone": any(reader.row.token_id is None for reader in readers),
            "may_use_broker": may_use_broker(request.user),
            "offerings": offerings[:OFFERINGS_SHOWN],
            "more_offerings": len(offerings) > OFFERINGS_SHOWN,
            "address": absolute_url("/"),
        },
    )


def _connecting(agents: Iterable[Agent]) -> dict[str, Any]:
    """Return how the first of these agents consumes its first queue, or an empty dictionary if none has a queue."""
    for agent in agents:
        for reader in agent.readers:
            for queue in reader.queues:
                return connecting.context(reader.row.rmq_username, agent.owner.uuid.hex, queue.row.queue_name)
    return {}


def _entries(visitor: Owner, search: str) -> QuerySet[Any, dict[str, Any]]:
    """Return the entries of the list: identities, and subscriptions without one, ordered by owner and name."""
    identities = AgentIdentity.objects.seen_by(visitor)
    alone = EventSubscription.objects.seen_by(visitor).filter(identity=None)
    if search:
        uuids = uuids_in(search)
        owned = Q(owner__email__icontains=search) | Q(owner__full_name__icontains=search)
        queued = SubscriptionQueue.objects.filter(
            Q(offering__name__icontains=search) | Q(offering__uuid__in=uuids) | Q(object_type=search)
        ).values("subscription")
        of_one = EventSubscription.objects.filter(Q(uuid__in=uuids) | Q(object_type=search) | Q(pk__in=queued))
        read = Consumer.objects.filter(Q(uuid__in=uuids) | Q(rmq_username__in=[uuid.hex for uuid in uuids]))
        identities = identities.filter(
            owned
            | Q(name__icontains=search)
            | Q(offering__name__icontains=search)
            | Q(uuid__in=uuids)
            | Q(offering__uuid__in=uuids)
            | Q(pk__in=of_one.values("identity"))
            | Q(pk__in=read.values("identity"))
        )
        alone = alone.filter(owned | Q(description__icontains=search) | Q(pk__in=of_one))
    shape = ("who", "alone", "label", "pk")
    of_identities = identities.order_by().annotate(who=F("owner__email"), alone=Value(0), label=F("name"))
    of_others = alone.order_by().annotate(who=F("owner__email"), alone=Value(1), label=F("description"))
    entries: QuerySet[Any, dict[str, Any]] = of_identities.values(*shape).union(of_others.values(*shape), all=True)
    return entries.order_by(*shape)


def _clients(vhost: str | None) -> tuple[list[Client] | None, str]:
    """Return the connections to a vhost, or to all vhosts, or None and an error text. One request to the broker."""
    try:
        return broker.management().clients(vhost), ""
    except NotOnBroker:
        return [], ""
    except BrokerError as error:
        return None, describe_failure(error, "The connections could not be listed", destructive=False)[0]


def _agents(entries: Iterable[dict[str, Any]], clients: Sequence[Client] | None) -> list[Agent]:
    keys = [(bool(entry["alone"]), entry["pk"]) for entry in entries]
    queues = SubscriptionQueue.objects.filter(subscription=OuterRef("pk")).order_by().values("subscription")
    subscriptions = (
        EventSubscription.objects.annotate(
            number_of_queues=Coalesce(Subquery(queues.annotate(number=Count("pk")).values("number")), 0)
        )
        .select_related("owner")
        .order_by("object_type", "id")
    )
    identities = (
        AgentIdentity.objects.select_related("owner", "offering")
        .prefetch_related(
            Prefetch("consumer", with_delivery(Consumer.objects.select_related("identity__offering"))),
            Prefetch("event_subscriptions", subscriptions),
            "services__processors",
        )
        .in_bulk([pk for alone, pk in keys if not alone])
    )
    without_identity = subscriptions.in_bulk([pk for alone, pk in keys if alone])
    logins: dict[AgentIdentity | EventSubscription, list[Any]] = {}
    for alone, pk in keys:
        if alone and (subscription := without_identity.get(pk)):  # it may have been deleted since
            logins[subscription] = [subscription]
        elif not alone and (identity := identities.get(pk)):
            consumers = [identity.consumer] if hasattr(identity, "consumer") else []
            logins[identity] = [*consumers, *identity.event_subscriptions.all()]
    readers = _readers([login for of_one in logins.values() for login in of_one], clients)
    return [
        Agent(one if isinstance(one, AgentIdentity) else None, one.owner, [readers[login] for login in of_one])
        for one, of_one in logins.items()
    ]


def _readers(logins: Sequence[Any], clients: Sequence[Client] | None) -> dict[EventSubscription | Consumer, Reader]:
    """Return consumers and subscriptions with their queues, in two statements."""
    # Limit the queues of each agent, so that one agent doesn't fill the page.
    agent = Coalesce("subscription__identity_id", -F("subscription_id"))
    subscriptions = [login for login in logins if isinstance(login, EventSubscription)]
    registered = (
        with_delivery(SubscriptionQueue.objects.filter(subscription__in=subscriptions))
        .annotate(number=Window(RowNumber(), partition_by=agent, order_by=["object_type", "pk"]))
        .filter(number__lte=QUEUES_SHOWN)
        .select_related("offering", "subscription")
        .order_by("object_type", "offering__name", "pk")
    )
    queues: dict[int, list[SubscriptionQueue]] = defaultdict(list)
    for queue in registered:
        queues[queue.subscription_id].append(queue)
    names = [login.queue_name for login in logins if isinstance(login, Consumer)]
    rows = _rows_by_name([*names, *(queue.queue_name for some in queues.values() for queue in some)])
    online = _live_connections(clients or [])
    found = {}
    for login in logins:
        is_consumer = isinstance(login, Consumer)
        of_login = [login] if is_consumer else queues[login.pk]
        shown = [QueueRow(one, rows.get((one.vhost, one.queue_name)), blocked_reason(one)) for one in of_login]
        more = 0 if is_consumer else login.number_of_queues - len(shown)
        user = (login.rmq_username, login.owner.uuid.hex)
        found[login] = Reader(login, is_consumer, _types_of(login), shown, more, online.get(user))
    return found


def _types_of(row: EventSubscription | Consumer) -> list[str]:
    """Return the object types of a login's events. Empty: of a consumer, all."""
    if isinstance(row, Consumer):
        return list(row.object_types)
    if row.object_type:
        return [row.object_type]
    types = [one.get("object_type") for one in row.observable_objects if isinstance(one, dict)]
    return list(dict.fromkeys(str(name) for name in types if name))


def _rows_by_name(names: Sequence[str]) -> dict[tuple[str, str], Row]:
    """Return the table rows of these queues, if they are stored, by vhost and name. Their names contain UUIDs."""
    found = Queue.objects.filter(name__in=names).exclude(state=Queue.State.GONE).select_related("pulse_user")
    return {(row.queue.vhost, row.queue.name): row for row in rows_of(found)} if names else {}


def _live_connections(clients: Iterable[Client]) -> dict[tuple[str, str], LiveConnections]:
    found: dict[tuple[str, str], LiveConnections] = {}
    for client in clients:
        before = found.get((client.user, client.vhost), LiveConnections(0, client.connected_at))
        known = [moment for moment in (before.since, client.connected_at) if moment is not None]
        found[client.user, client.vhost] = LiveConnections(before.number + 1, min(known, default=None))
    return found


# Removing


@signed_in
@require_http_methods(["GET", "HEAD", "POST"])
def agent_remove(request: Request, uuid: UUID) -> HttpResponse:
    identity = get_object_or_404(AgentIdentity.objects.seen_by(request.user).select_related("owner"), uuid=uuid)
    logins = [*Consumer.objects.filter(identity=identity), *identity.event_subscriptions.all()]
    return _remove(request, identity, logins, "agent", readable(identity.name))


@signed_in
@require_http_methods(["GET", "HEAD", "POST"])
def subscription_remove(request: Request, uuid: UUID) -> HttpResponse:
    subscription = get_object_or_404(
        EventSubscription.objects.seen_by(request.user).select_related("owner", "identity"), uuid=uuid
    )
    return _remove(request, subscription, [subscription], "subscription", subscription.uuid.hex)


@signed_in
@require_http_methods(["GET", "HEAD", "POST"])
def consumer_remove(request: Request, uuid: UUID) -> HttpResponse:
    consumer = get_object_or_404(Consumer.objects.seen_by(request.user).select_related("identity__owner"), uuid=uuid)
    return _remove(request, consumer, [consumer], "consumer", consumer.queue_name)


def _messages_in(queues: Sequence[tuple[str, str]]) -> int | None:
    """Return the number of messages in these queues, given as (vhost, name), or None if a length is unknown.

    The lengths of queues that the last pass did not list are requested now, with one connection for each vhost.
    """
    rows = _rows_by_name([name for _, name in queues])
    lengths = {name: row.queue.length for name, row in rows.items() if row.queue.length is not None}
    depths = amqp.declare_passively(broker.amqp_url(), [queue for queue in queues if queue not in lengths])
    # A queue with consumers may have unacknowledged messages, which are not counted here.
    lengths |= {name: depth.ready for name, depth in depths.items() if not depth.consumers}
    return sum(lengths[queue] for queue in queues) if lengths.keys() >= set(queues) else None


def _remove(
    request: Request, row: Removable, logins: Sequence[EventSubscription | Consumer], kind: str, name: str
) -> HttpResponse:
    """Show what is deleted with a row and its logins, and delete it. If messages are lost, the name must be typed."""
    subscriptions = [one for one in logins if isinstance(one, EventSubscription)]
    registered = SubscriptionQueue.objects.filter(subscription__in=subscriptions).values_list("vhost", "queue_name")
    named = [*((one.vhost, one.queue_name) for one in logins if isinstance(one, Consumer)), *registered]
    queues = [queue_name for _, queue_name in named]
    users = [one.rmq_username for one in logins]
    messages_in_them = _messages_in(named)
    form = None
    if messages_in_them != 0:
        form = NameForm(name, request.POST if request.method == "POST" else None)
    if request.method == "POST" and (form is None or form.is_valid()):
        deletions.delete(row)
        logger.info("%s removed the %s %s of %s", request.user, kind, name, row.owner)
        if Removal.objects.filter(name__in=[*queues, *users]).exists():
            messages.warning(
                request,
                f"The {kind} {name} was removed. Guardian removes its queues and logins as soon as the broker answers. "
                "You don't have to do anything.",
            )
        else:
            messages.success(request, f"The {kind} {name} was removed, with its queues and logins.")
        return redirect("agents")
    clients, trouble = _clients(row.owner.uuid.hex)
    return render(
        request,
        "agents/remove.html",
        {
            "kind": kind,
            "row": row,
            "types": [] if isinstance(row, AgentIdentity) else _types_of(row),
            "name": name,
            "queues": queues,
            "messages_in_them": messages_in_them,
            "users": users,
            "connected": None if clients is None else sum(client.user in users for client in clients),
            "form": form,
            "trouble": trouble,
        },
    )
