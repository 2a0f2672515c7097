"""``/metrics``, for Prometheus.

Each scrape reads the metrics here from the database, so that all web processes on all machines return the same values.
``counters.py`` has the counters of processes. Metrics name no queue and no person.
"""

import logging
import secrets
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any, cast

from django.conf import settings
from django.db import Error
from django.db.models import Case, Count, F, Max, Q, QuerySet, Sum, Value, When
from django.http import HttpRequest, HttpResponse
from django.http.request import split_domain_port
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.request import Request

from accounts.access import scopes
from accounts.access.authentication import TokenAuthentication
from agents.models import Consumer, EventSubscription, Registration, SubscriptionQueue
from core.addresses import is_loopback
from core.models import Removal
from message_store.store import StoreUnavailable
from notifications.models import Notification
from queues.models import Archive, Queue, Replay
from queues.rules.listing import STALLED, count_by_diagnosis
from rabbit.snapshot import TYPES_WITHOUT_LENGTH
from status import counters, facts, rules
from status.facts import GuardianFacts
from status.verdicts import Unit

logger = logging.getLogger(__name__)

STATES = (Queue.State.OK, Queue.State.WARNED, Queue.State.DELETING)
OWNERS = ("account", "agents", "nobody")


class Families(Collector):
    """A collector of finished metrics, for prometheus-client's encoder."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


@never_cache
@require_safe
def scrape(request: HttpRequest) -> HttpResponse:
    """Answer with all metrics, in the requested format; 503 if the database can't be read."""
    try:
        refusal = _refusal(request)
        if refusal is not None:
            return refusal
        families = list(from_database())
    except Error as error:
        logger.warning("The metrics can't be read from the database: %s", error)
        return _plain_text("The database can't be read.", HTTPStatus.SERVICE_UNAVAILABLE)
    try:
        families += counters.collect()
    except Exception as error:  # the metrics from the database don't depend on the files
        logger.warning("The processes' counters can't be read: %s: %s", type(error).__name__, error)
    encode, content_type = choose_encoder(request.headers.get("Accept", ""))
    registry = CollectorRegistry()
    registry.register(Families(families))
    return HttpResponse(encode(registry), content_type=content_type)


def _refusal(request: HttpRequest) -> HttpResponse | None:
    """Return a 401 or 403 for a client that may not read the metrics; None: it may.

    Operators may, and clients that present GUARDIAN_METRICS_TOKEN. If it is not set, this machine may, too.
    """
    token = settings.GUARDIAN_METRICS_TOKEN
    if not token and _is_from_this_machine(request):
        return None
    scheme, _, presented = request.META.get("HTTP_AUTHORIZATION", "").partition(" ")
    if scheme.lower() == "bearer":
        # WSGI decodes headers as Latin-1.
        if token and secrets.compare_digest(presented.strip().encode("latin-1", "replace"), token.encode()):
            return None
        return _unauthorized("The bearer token is not GUARDIAN_METRICS_TOKEN.")
    try:
        by_token = TokenAuthentication().authenticate(cast(Request, request))
    except AuthenticationFailed as error:
        return _unauthorized(str(error.detail))
    if by_token and not scopes.allows_metrics(by_token[1]):
        return _plain_text(scopes.needs_all(by_token[1]), HTTPStatus.FORBIDDEN)
    visitor = by_token[0] if by_token else request.user
    if not visitor.is_authenticated:
        first_step = "" if token else "Set GUARDIAN_METRICS_TOKEN: without it only Guardian's own machine may read. "
        return _unauthorized(f"{first_step}Send GUARDIAN_METRICS_TOKEN in the header Authorization: Bearer TOKEN.")
    if not visitor.is_staff:
        return _plain_text("Only operators may read the metrics.", HTTPStatus.FORBIDDEN)
    return None


def _is_from_this_machine(request: HttpRequest) -> bool:
    """Return whether this machine sent the request, and not through a proxy.

    A proxy on this machine connects from a loopback address too. It adds X-Forwarded-For, or asks for a public host.
    """
    is_forwarded = "HTTP_X_FORWARDED_FOR" in request.META
    host = split_domain_port(request.META.get("HTTP_HOST", ""))[0]
    return not is_forwarded and is_loopback(request.META.get("REMOTE_ADDR", "")) and is_loopback(host)


def _unauthorized(reason: str) -> HttpResponse:
    response = _plain_text(reason, HTTPStatus.UNAUTHORIZED)
    response["WWW-Authenticate"] = "Bearer"
    return response


def _plain_text(text: str, status: HTTPStatus) -> HttpResponse:
    return HttpResponse(f"{text}\n", status=status, content_type="text/plain; charset=utf-8")


def from_database() -> Iterator[Metric]:
    """Yield the metrics from the database, in a constant number of statements."""
    guardian = facts.measure_guardian(timezone.now())
    yield from _rules(guardian)
    yield from _passes(guardian)
    yield from _queues()
    yield _by_label(
        "guardian_notifications",
        "Notifications in the outbox, which keeps them for 90 days. Outdated ones count as failed.",
        "state",
        Notification.State.values,
        guardian.outbox._asdict(),
    )
    yield _by_label(
        "guardian_removals_pending",
        "Pending removals from the broker.",
        "kind",
        Removal.Kind.values,
        guardian.removals.numbers,
    )
    yield from _archives(guardian)
    yield from _agents()
    yield from _message_store()


def _rules(guardian: GuardianFacts) -> Iterator[Metric]:
    """Yield the value of each rule with a metric; 0 if it was not measured."""
    values = {one.rule: one.value for one in guardian.measurements()}
    for rule in rules.RULES:
        if rule.metric:
            is_flag = rule.unit is Unit.FLAG
            description = f"1 while {rule.measures}, otherwise 0." if is_flag else f"{rule.measures.capitalize()}."
            yield _gauge(rule.metric, description, values.get(rule) or 0)


def _passes(guardian: GuardianFacts) -> Iterator[Metric]:
    # The primary key never decreases, unlike the number of rows, which are pruned.
    last = guardian.last_pass
    yield CounterMetricFamily("guardian_passes", "Recorded passes.", last.pk if last else 0)
    at = last.at.timestamp() if last else 0
    yield _gauge("guardian_last_pass_timestamp_seconds", "Start of the last pass; 0: there was none.", at)
    listing = last.listing_seconds if last else 0
    yield _gauge("guardian_last_pass_listing_seconds", "Duration of the broker's list in the last pass.", listing)
    poll = settings.GUARDIAN_POLL_SECONDS
    yield _gauge("guardian_poll_seconds", "GUARDIAN_POLL_SECONDS: the time between two passes.", poll)
    yield _gauge(
        "guardian_poll_max_seconds",
        "GUARDIAN_POLL_MAX_SECONDS: the longest time between two passes during an outage.",
        settings.GUARDIAN_POLL_MAX_SECONDS,
    )
    yield _gauge(
        "guardian_passes_failed_in_a_row",
        "Consecutive passes that could not reach the broker.",
        guardian.watch.failures,
    )


def _queues() -> Iterator[Metric]:
    whose = Case(
        When(pulse_user__isnull=False, then=Value("account")),
        When(Q(registered=True) | Q(owner__isnull=False), then=Value("agents")),
        default=Value("nobody"),
    )
    rows = list(
        # Name the states: a condition "not gone" would not use the index.
        Queue.objects.filter(state__in=STATES)
        .order_by()
        .values("state", whose=whose)
        .annotate(
            number=Count("id"),
            all_ready=Sum("ready"),
            all_unacknowledged=Sum("unacknowledged"),
            longest=Max(F("ready") + F("unacknowledged")),
            unknown=Count("id", filter=(Q(ready=None) | Q(unacknowledged=None)) & ~Q(type__in=TYPES_WITHOUT_LENGTH)),
            stalled=Count("id", filter=STALLED),
        )
    )
    number = GaugeMetricFamily("guardian_queues", "Queues on the broker.", labels=("state", "owner"))
    counted = {(row["state"], row["whose"]): row["number"] for row in rows}
    for state in STATES:
        for owner in OWNERS:
            number.add_metric((state.value, owner), counted.get((state.value, owner), 0))
    yield number
    messages = GaugeMetricFamily("guardian_messages", "Messages in all queues of known length.", labels=("kind",))
    messages.add_metric(("ready",), sum(row["all_ready"] or 0 for row in rows))
    messages.add_metric(("unacknowledged",), sum(row["all_unacknowledged"] or 0 for row in rows))
    yield messages
    longest = max((row["longest"] or 0 for row in rows), default=0)
    yield _gauge("guardian_longest_queue_messages", "Messages in the longest queue.", longest)
    unknown = sum(row["unknown"] for row in rows)
    yield _gauge(
        "guardian_queues_of_unknown_length", "Queues whose length is unknown, without streams and MQTT QoS 0.", unknown
    )
    yield _gauge(
        "guardian_queues_stalled",
        "Queues whose consumers acknowledged nothing for GUARDIAN_STALLED_MINUTES; if that is 0, none is checked.",
        sum(row["stalled"] for row in rows),
    )
    yield _by_label(
        "guardian_queues_diagnosed",
        "Queues by their diagnosis, as of the last count of consumers.",
        "code",
        Queue.Diagnosis.values,
        count_by_diagnosis(),
    )


def _archives(guardian: GuardianFacts) -> Iterator[Metric]:
    archives = guardian.archives
    yield _by_label(
        "guardian_archives",
        "Archives of deleted and purged queues; they are kept for GUARDIAN_ARCHIVE_DAYS.",
        "state",
        Archive.State.values,
        archives.numbers,
    )
    yield _gauge("guardian_archived_messages", "Messages in archives.", archives.messages)
    yield _gauge("guardian_archive_bytes", "Bytes that archives take in the database.", archives.stored_bytes)
    replays = _counted(Replay.objects.all(), "state")
    yield _by_label("guardian_replays", "Replays of archives.", "state", Replay.State.values, replays)


def _agents() -> Iterator[Metric]:
    subscriptions = EventSubscription.objects.count()
    yield _gauge("guardian_subscriptions", "Event subscriptions that agents registered.", subscriptions)
    queues = GaugeMetricFamily("guardian_agents_queues", "Queues that agents registered.", labels=("kind", "state"))
    for kind, model in (("subscription", SubscriptionQueue), ("consumer", Consumer)):
        counted = _counted(model._default_manager.all(), "state")
        for state in Registration.values:
            queues.add_metric((kind, state), counted.get(state, 0))
    yield queues


def _message_store() -> Iterator[Metric]:
    if settings.MESSAGE_STORE != "cassandra":
        return
    from message_store.cassandra.checkup import examine  # the import takes a while

    try:
        cluster = examine()
    except StoreUnavailable:
        cluster = None
    up, down = (cluster.up, len(cluster.down)) if cluster else (0, 0)
    nodes = {"up": up, "down": down}
    yield _by_label("guardian_cassandra_nodes", "Known Cassandra nodes, by state.", "state", ("up", "down"), nodes)
    if cluster:
        yield _gauge(
            "guardian_cassandra_clock_difference_seconds",
            "How much the clocks of the Cassandra nodes differ.",
            cluster.clock_difference,
        )


def _gauge(name: str, description: str, value: float) -> Metric:
    return GaugeMetricFamily(name, description, value)


def _by_label(name: str, description: str, label: str, values: Any, counted: Mapping[str, Any]) -> Metric:
    """Return a gauge with a number for each value of a label, including 0."""
    family = GaugeMetricFamily(name, description, labels=(label,))
    for value in values:
        family.add_metric((value,), counted.get(value, 0))
    return family


def _counted(rows: QuerySet[Any], field: str) -> dict[str, int]:
    """Return the number of rows for each value of a field."""
    return dict(rows.order_by().values_list(field).annotate(Count("pk")))
