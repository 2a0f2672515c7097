"""The filters of agents' services and processors: those that released clients send."""

from datetime import timedelta

from django.db.models import QuerySet
from django.utils import timezone
from django_filters import BooleanFilter, CharFilter, FilterSet, MultipleChoiceFilter  # type: ignore[import-untyped]

from agents.api.filters import StrictUUIDFilter, TimeFilter
from agents.models import AgentProcessor, AgentService

SERVICE_STALE_AFTER = timedelta(hours=24)
PROCESSOR_STALE_AFTER = timedelta(hours=1)

STATES = {"1": AgentService.State.ACTIVE, "2": AgentService.State.IDLE, "3": AgentService.State.ERROR}
"""The states by the numbers that released clients send."""


class ServiceFilter(FilterSet):  # type: ignore[misc]  # the library has no types
    """Filters of services."""

    identity_uuid = StrictUUIDFilter(field_name="identity__uuid", label="UUID of an agent's identity.")
    mode = CharFilter(label="With exactly this mode.")
    state = MultipleChoiceFilter(
        choices=[*((number, state.label) for number, state in STATES.items()), *AgentService.State.choices],
        method="filter_state",
        label="In one of these states: 1 (active), 2 (idle), 3 (error), or their names.",
    )
    modified_after = TimeFilter(field_name="modified", lookup_expr="gt", label="Reported after this time.")
    modified_before = TimeFilter(field_name="modified", lookup_expr="lt", label="Reported before this time.")
    stale = BooleanFilter(method="filter_stale", label="Whether its last report is older than 24 hours.")

    class Meta:
        model = AgentService
        fields: list[str] = []

    def filter_state(self, queryset: QuerySet[AgentService], name: str, value: list[str]) -> QuerySet[AgentService]:
        return queryset.filter(state__in=[STATES.get(one, one) for one in value]) if value else queryset

    def filter_stale(self, queryset: QuerySet[AgentService], name: str, value: bool) -> QuerySet[AgentService]:
        since = timezone.now() - SERVICE_STALE_AFTER
        return queryset.filter(modified__lt=since) if value else queryset.filter(modified__gte=since)


class ProcessorFilter(FilterSet):  # type: ignore[misc]  # the library has no types
    """Filters of processors."""

    service_uuid = StrictUUIDFilter(field_name="service__uuid", label="UUID of a service.")
    backend_type = CharFilter(label="With exactly this type of backend.")
    backend_version = CharFilter(label="With exactly this version of the backend.")
    last_run = TimeFilter(lookup_expr="gte", label="Ran at this time or later.")
    last_run_before = TimeFilter(field_name="last_run", lookup_expr="lt", label="Ran last before this time.")
    stale = BooleanFilter(method="filter_stale", label="Whether it ran last more than an hour ago.")

    class Meta:
        model = AgentProcessor
        fields: list[str] = []

    def filter_stale(self, queryset: QuerySet[AgentProcessor], name: str, value: bool) -> QuerySet[AgentProcessor]:
        since = timezone.now() - PROCESSOR_STALE_AFTER
        return queryset.filter(last_run__lt=since) if value else queryset.filter(last_run__gte=since)
