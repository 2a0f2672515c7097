"""Which queues a list shows, and in which order: the same on the page and in the API."""

import re
from typing import NamedTuple

from django.db.models import Case, Count, F, FloatField, Q, QuerySet, Value, When
from django.db.models.expressions import Expression, OrderBy
from django.db.models.functions import Cast, Coalesce
from django_filters import BooleanFilter, CharFilter, ChoiceFilter, FilterSet  # type: ignore[import-untyped]

from queues.models import Queue
from queues.thresholds import BrokerState, policy
from rabbit.names import DEAD_LETTER_QUEUE

WORST_FIRST = "state"

ORDERINGS = [
    (WORST_FIRST, "worst first"),
    ("-state", "best first"),
    ("-length", "longest first"),
    ("length", "shortest first"),
    ("-share", "nearest to their maximum"),
    ("share", "farthest from their maximum"),
    ("name", "name"),
    ("-name", "name, backwards"),
]

LENGTH = F("ready") + F("unacknowledged")
UNCONSUMED_NAMES = r"\.(parked|retry\.[0-9]+m?s)\Z"
"""Endings of the consumer toolkit's parking and delay queues (``guardian_consumers.names``), which have no consumer:
their messages wait for a person, or for their next attempt."""
_IS_UNREAD = (Q(name__contains=".parked") | Q(name__contains=".retry.")) & Q(name__regex=UNCONSUMED_NAMES)
# The first two say nothing of their own: SQLite asks Python about each name that has to match a pattern.
WITHOUT_CONSUMER = Q(consumers=0, exclusive=False) & ~Q(registered=True, name=DEAD_LETTER_QUEUE) & ~_IS_UNREAD
"""Queues that are known to have no consumer, and ``should_have_consumer``."""
STALLED = Q(stalled_told_at__isnull=False) & ~Q(consumers=0) & ~Q(state=Queue.State.GONE)
"""Queues whose consumers take nothing out, as their owners were told, and it isn't over."""

BY_NAME = [OrderBy(F("name")), OrderBy(F("vhost"))]


def should_have_consumer(name: str, *, exclusive: bool, registered: bool) -> bool:
    """Return whether somebody is meant to read this queue. ``WITHOUT_CONSUMER`` has the same rule for a list.

    Nobody has to read dead letters, or what is parked or delayed. One connection has an exclusive queue to itself, and
    reads it when it will.
    """
    return not exclusive and not (registered and name == DEAD_LETTER_QUEUE) and not re.search(UNCONSUMED_NAMES, name)


class QueueFilter(FilterSet):  # type: ignore[misc]  # the library has no types
    """Part of the name, state, vhost, Pulse user, and the order. Queues that are gone are left out unless asked for."""

    search = CharFilter(field_name="name", lookup_expr="icontains", label="Part of the name", max_length=255)
    state = ChoiceFilter(choices=Queue.State.choices, label="State", empty_label="all but gone")
    vhost = CharFilter(label="Virtual host")
    pulse_user = CharFilter(field_name="pulse_user__username", label="Pulse user")
    without_consumers = BooleanFilter(method="filter_without_consumers", label="Without consumers")
    ordering = ChoiceFilter(choices=ORDERINGS, method="filter_ordering", label="Order", empty_label=None)

    class Meta:
        model = Queue
        fields: list[str] = []

    def filter_queryset(self, queryset: QuerySet[Queue]) -> QuerySet[Queue]:
        """Return the queues that are asked for. What is asked in a way that can't be understood is left out."""
        asked = self.form.cleaned_data
        queryset = super().filter_queryset(queryset)
        if not asked.get("state"):
            queryset = queryset.exclude(state=Queue.State.GONE)
        if not asked.get("ordering"):
            queryset = self.filter_ordering(queryset, "ordering", WORST_FIRST)
        return queryset

    def filter_without_consumers(self, queryset: QuerySet[Queue], name: str, value: bool) -> QuerySet[Queue]:
        """Return the queues that are known to have no consumer; where it isn't asked for, all."""
        return queryset.filter(WITHOUT_CONSUMER) if value else queryset

    def filter_ordering(self, queryset: QuerySet[Queue], name: str, value: str) -> QuerySet[Queue]:
        """Return the queues in one of ``ORDERINGS``. What is unknown comes last, equals are by name."""
        backwards = value.startswith("-")
        key = value.removeprefix("-")
        if key == "name":
            return queryset.order_by(*(OrderBy(term.expression, descending=backwards) for term in BY_NAME))
        if key == "state":
            longest = OrderBy(LENGTH, descending=True, nulls_last=True)
            return queryset.order_by(OrderBy(_severity(), descending=backwards), longest, *BY_NAME)
        by = _share() if key == "share" else LENGTH
        return queryset.order_by(OrderBy(by, descending=backwards, nulls_last=True), *BY_NAME)


class StateCount(NamedTuple):
    """How many queues stand where: by state and vhost, and how many of them have no consumer."""

    state: str
    vhost: str
    number: int
    unattended: int


def count_by_state(queues: QuerySet[Queue]) -> list[StateCount]:
    """Return how many of these queues stand where, in one statement; gone ones too."""
    groups = queues.order_by().values("state", "vhost")
    counts = groups.annotate(number=Count("id"), unattended=Count("id", filter=WITHOUT_CONSUMER))
    return [StateCount(*row) for row in counts.values_list("state", "vhost", "number", "unattended")]


def _severity() -> Expression:
    order = [Queue.State.DELETING, Queue.State.WARNED, Queue.State.OK]
    return Case(*(When(state=state, then=Value(place)) for place, state in enumerate(order)), default=Value(len(order)))


def _share() -> Expression:
    """The length as a part of the maximum that applies, as ``thresholds.of_queue`` has it. No maximum is below 1."""
    by_policy = policy()(None, BrokerState()).max
    most = Coalesce(F("max_length"), F("pulse_user__max_length"), Value(by_policy))
    return Cast(LENGTH, FloatField()) / Cast(most, FloatField())
