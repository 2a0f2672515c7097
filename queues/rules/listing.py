"""Filters and orders of lists of queues, for the page and the API."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from django.db.models import Case, Count, F, FloatField, OuterRef, Q, QuerySet, Subquery, Value, When
from django.db.models.expressions import Expression, OrderBy
from django.db.models.functions import Cast, Coalesce
from django.db.models.lookups import GreaterThan
from django.utils import timezone
from django_filters import BooleanFilter, CharFilter, ChoiceFilter, FilterSet  # type: ignore[import-untyped]

from accounts.models import Owner, PulseUser
from queues.models import IS_BLOCKED, Archive, Queue, QueueSample
from queues.rules import growth
from queues.rules.states import UNCONSUMED_NAMES
from queues.rules.thresholds import BrokerState, QueueLoad, policy
from rabbit.names import DEAD_LETTER_QUEUE

WORST_FIRST = "state"

ORDERINGS = [
    (WORST_FIRST, "worst first"),
    ("-state", "best first"),
    ("-length", "longest first"),
    ("length", "shortest first"),
    ("-share", "closest to their deletion limit"),
    ("share", "farthest from their deletion limit"),
    ("name", "name"),
    ("-name", "name, backwards"),
    ("consumers", "fewest consumers"),
    ("-consumers", "most consumers"),
    ("-growth", "fastest growing"),
    ("growth", "fastest shrinking"),
    ("-bytes", "largest first"),
    ("bytes", "smallest first"),
    ("pulse_user", "Pulse user"),
    ("-pulse_user", "Pulse user, backwards"),
    ("vhost", "virtual host"),
    ("-vhost", "virtual host, backwards"),
]

LENGTH = F("ready") + F("unacknowledged")
_IS_UNREAD = (Q(name__contains=".parked") | Q(name__contains=".retry.")) & Q(name__regex=UNCONSUMED_NAMES)
# The two ``contains`` are for speed only: SQLite calls Python for each name that it matches with a pattern.
WITHOUT_CONSUMER = Q(consumers=0, exclusive=False) & ~Q(registered=True, name=DEAD_LETTER_QUEUE) & ~_IS_UNREAD
"""Queues without a consumer that ``states.should_have_consumer``."""
STALLED = Q(stalled_notified_at__isnull=False) & ~Q(consumers=0) & ~Q(state=Queue.State.GONE)
"""Queues whose consumers acknowledge nothing, with owners notified, until the stall is over."""
NEEDS_ATTENTION = (
    Q(state__in=[Queue.State.DELETING, Queue.State.WARNED])
    | IS_BLOCKED & ~Q(state=Queue.State.GONE)
    | WITHOUT_CONSUMER & ~Q(state=Queue.State.GONE) & (Q(ready__gt=0) | Q(unacknowledged__gt=0))
    | STALLED
)
"""Queues that are not healthy: over a threshold, blocked, stalled, or with messages and no consumer.

Queues that will soon be full need attention, too: ``needs_attention``.
"""

IS_SPARED = Q(unbounded=True) | Q(exclusive=True) | Q(registered=True)
"""Queues that are never deleted for their length, as in ``thresholds.is_spared``."""

BY_NAME = [OrderBy(F("name")), OrderBy(F("vhost"))]

STATES = [(Queue.State.OK.value, "within their limits"), *Queue.State.choices[1:]]
"""The states to choose from. Queues within their limits may need attention, and then aren't healthy."""

BY_STATE = {"state", "blocked", "without_consumers"}
"""The filters that choose queues by their state."""


class QueueFilter(FilterSet):  # type: ignore[misc]  # the library has no types
    """Filters and order of a list of queues. Queues that are gone are left out unless that state is chosen."""

    search = CharFilter(method="filter_search", label="Part of the name, or of an owner's address", max_length=255)
    state = ChoiceFilter(choices=STATES, label="State", empty_label="all but gone")
    vhost = CharFilter(label="Virtual host", strip=False)
    pulse_user = CharFilter(field_name="pulse_user__username", label="Pulse user")
    without_consumers = BooleanFilter(method="filter_without_consumers", label="Without consumers")
    blocked = BooleanFilter(method="filter_blocked", label="Deletion blocked")
    ordering = ChoiceFilter(choices=ORDERINGS, method="filter_ordering", label="Order", empty_label=None)

    soon: Sequence[int] = ()
    """The primary keys of the queues that will soon be full, if the caller predicts it, for the order by state."""

    class Meta:
        model = Queue
        fields: list[str] = []

    def filter_queryset(self, queryset: QuerySet[Queue]) -> QuerySet[Queue]:
        """Return the chosen queues. Invalid filters are ignored."""
        chosen = self.form.cleaned_data
        queryset = super().filter_queryset(queryset)
        if not chosen.get("state"):
            queryset = queryset.exclude(state=Queue.State.GONE)
        if not chosen.get("ordering"):
            queryset = self.filter_ordering(queryset, "ordering", WORST_FIRST)
        return queryset

    def in_any_state(self) -> QuerySet[Queue]:
        """Return the queues, gone ones included, that all filters but those by state choose."""
        self.form.full_clean()
        queues: QuerySet[Queue] = self.queryset.all()
        for name, one in self.filters.items():
            if name not in {*BY_STATE, "ordering"}:
                queues = one.filter(queues, self.form.cleaned_data.get(name))
        return queues

    def filter_search(self, queryset: QuerySet[Queue], name: str, value: str) -> QuerySet[Queue]:
        """Return the queues with this text in their name, or in an owner's address or name."""
        owned = Q(pulse_user__in=PulseUser.objects.search(value)) | Q(owner__email__icontains=value)
        return queryset.filter(Q(name__icontains=value) | owned)

    def filter_without_consumers(self, queryset: QuerySet[Queue], name: str, value: bool) -> QuerySet[Queue]:
        return queryset.filter(WITHOUT_CONSUMER) if value else queryset

    def filter_blocked(self, queryset: QuerySet[Queue], name: str, value: bool) -> QuerySet[Queue]:
        return queryset.filter(IS_BLOCKED) if value else queryset

    def filter_ordering(self, queryset: QuerySet[Queue], name: str, value: str) -> QuerySet[Queue]:
        """Return the queues in one of ``ORDERINGS``. Unknown lengths come last; ties are ordered by name."""
        backwards = value.startswith("-")
        key = value.removeprefix("-")
        if key == "name":
            return queryset.order_by(*(OrderBy(term.expression, descending=backwards) for term in BY_NAME))
        if key == "state":
            return nearest_to_limit(queryset, self.soon, reverse=backwards)
        if key == "growth":
            queryset = with_first_sample(queryset, timezone.now())
        by: Any = {
            "share": _share(),
            "length": LENGTH,
            "growth": LENGTH - F("first_length"),
            "pulse_user": F("pulse_user__username"),
        }.get(key, F(key))
        return queryset.order_by(OrderBy(by, descending=backwards, nulls_last=True), *BY_NAME)


class ArchiveFilter(FilterSet):  # type: ignore[misc]  # the library has no types
    search = CharFilter(field_name="queue_name", lookup_expr="icontains", label="Part of the name", max_length=255)
    queue = CharFilter(field_name="queue_name", label="Queue", strip=False)
    vhost = CharFilter(label="Virtual host", strip=False)
    pulse_user = CharFilter(field_name="pulse_user__username", label="Pulse user")

    class Meta:
        model = Archive
        fields: list[str] = []


def nearest_to_limit(queues: QuerySet[Queue], soon: Sequence[int] = (), *, reverse: bool = False) -> QuerySet[Queue]:
    """Return the queues by condition, the worst first, and the furthest past or nearest to its limit first in each.

    ``soon`` are the primary keys of queues that will soon be full, the soonest first: they follow the critical ones.
    Those that need attention for another reason come before the healthy ones.
    """
    share = OrderBy(_share(), descending=not reverse, nulls_last=True)
    return queues.order_by(OrderBy(_severity(soon), descending=reverse), share, *BY_NAME)


class StateCount(NamedTuple):
    """The number of queues of one state in one vhost.

    How many of them have no consumer, need attention, and are blocked from deletion.
    """

    state: str
    vhost: str
    number: int
    unattended: int
    attention: int
    blocked: int


def needs_attention(soon: Sequence[int]) -> Q:
    """Return which queues need attention. ``soon`` are the primary keys of those that will soon be full."""
    return NEEDS_ATTENTION | Q(pk__in=soon)


def count_by_state(queues: QuerySet[Queue], soon: Sequence[int] = ()) -> list[StateCount]:
    """Count these queues by state and vhost in one statement, gone ones included. ``soon``: see ``needs_attention``."""
    groups = queues.order_by().values("state", "vhost")
    counts = groups.annotate(
        number=Count("id"),
        unattended=Count("id", filter=WITHOUT_CONSUMER),
        attention=Count("id", filter=needs_attention(soon)),
        blocked=Count("id", filter=IS_BLOCKED),
    )
    return [StateCount(*row) for row in counts.values_list(*StateCount._fields)]


def count_by_diagnosis() -> dict[str, int]:
    """Return the number of queues on the broker by their last diagnosis, in one statement."""
    rows = Queue.objects.exclude(state=Queue.State.GONE).order_by().values_list("diagnosis")
    counted = dict(rows.annotate(Count("id")))
    return {code.value: counted.get(code.value, 0) for code in Queue.Diagnosis}


class Counts(NamedTuple):
    """The numbers of queues by state. All but ``gone`` are of queues that are not gone."""

    total: int
    attention: int
    blocked: int
    unattended: int
    deleting: int
    warned: int
    gone: int


def add_up(groups: Sequence[StateCount]) -> Counts:
    existing = [group for group in groups if group.state != Queue.State.GONE]

    def number(state: str) -> int:
        return sum(group.number for group in groups if group.state == state)

    return Counts(
        total=sum(group.number for group in existing),
        attention=sum(group.attention for group in existing),
        blocked=sum(group.blocked for group in existing),
        unattended=sum(group.unattended for group in existing),
        deleting=number(Queue.State.DELETING),
        warned=number(Queue.State.WARNED),
        gone=number(Queue.State.GONE),
    )


def _severity(soon: Sequence[int]) -> Expression:
    """Return the place of a queue's condition: critical ones first, as in ``states.condition``."""
    over = Q(GreaterThan(LENGTH, _limit())) & ~IS_SPARED
    critical = (IS_BLOCKED | Q(state=Queue.State.DELETING) | over) & ~Q(state=Queue.State.GONE)
    order = [
        critical,
        *(Q(pk=pk) for pk in soon),
        Q(state=Queue.State.WARNED),
        NEEDS_ATTENTION,
        Q(state=Queue.State.OK),
    ]
    return Case(*(When(which, then=Value(place)) for place, which in enumerate(order)), default=Value(len(order)))


def _share() -> Expression:
    """Return the length divided by the limit. No limit is below 1."""
    return Cast(LENGTH, FloatField()) / Cast(_limit(), FloatField())


def _limit() -> Expression:
    """Return the deletion limit that applies, as in ``thresholds.of_queue``."""
    by_policy = policy()(QueueLoad(None), BrokerState()).max
    return Coalesce(F("max_length"), F("pulse_user__max_length"), Value(by_policy))


def with_first_sample(queues: QuerySet[Queue], now: datetime) -> QuerySet[Any]:
    """Annotate queues with ``first_at`` and ``first_length``, the first sample in the time over which growth counts.

    Subqueries find the sample by its index, because a queue may have a hundred samples in that time.
    """
    since = now - timedelta(seconds=growth.WINDOW_SECONDS)
    of_queue = QueueSample.objects.filter(queue=OuterRef("pk"), at__gte=OuterRef("first_seen"))  # as growth.since
    samples = of_queue.filter(at__gte=since).order_by("at")
    return queues.annotate(
        first_at=Subquery(samples.values("at")[:1]), first_length=Subquery(samples.values("length")[:1])
    )


def that_may_fill(queues: QuerySet[Queue], now: datetime) -> QuerySet[Any]:
    """Return the queues that may reach their limit within half an hour, by their growth in the last minutes.

    Growth of two minutes that fills a queue in thirty has filled a sixteenth of it.
    """
    within_limit = queues.filter(state__in=[Queue.State.OK, Queue.State.WARNED])
    long_enough = within_limit.annotate(share=_share()).filter(share__gte=1 / 16)
    grown = with_first_sample(long_enough, now).annotate(grown=LENGTH - F("first_length"))
    filling: QuerySet[Any] = grown.filter(grown__gt=0).order_by("-grown", *BY_NAME)
    return filling


def whose(pulse_user: PulseUser | None, owner: Owner | None) -> str:
    """Return whose a queue is, in words: its Pulse user's, or that of an owner's agents."""
    if pulse_user is not None:
        return pulse_user.username
    return f"agents of {owner.email}" if owner is not None else "nobody"
