"""The services of agents and their processors: reports of agents about themselves, which Guardian stores and shows."""

from typing import Any

from django.core.exceptions import ValidationError
from django.utils import timezone

from agents.models import AgentIdentity, AgentProcessor, AgentService

MAX_SERVICES = 100
"""Of one identity; and processors of one service."""


def register_service(identity: AgentIdentity, name: str, mode: str) -> tuple[AgentService, bool]:
    """Store an agent's service, which is active now. Return its row, and whether it is new.

    Raises:
        ValidationError: the identity has too many services.
    """
    fields = {"mode": mode, "state": AgentService.State.ACTIVE}
    _require_room(identity.services.exclude(name=name).count(), "services")
    return AgentService.objects.update_or_create(identity=identity, name=name, defaults=fields)


def register_processor(
    service: AgentService, name: str, backend_type: str, backend_version: str
) -> tuple[AgentProcessor, bool]:
    """Store a processor of a service, which runs now. Return its row, and whether it is new.

    Raises:
        ValidationError: the service has too many processors.
    """
    fields = {"backend_type": backend_type, "backend_version": backend_version, "last_run": timezone.now()}
    _require_room(service.processors.exclude(name=name).count(), "processors")
    return AgentProcessor.objects.update_or_create(service=service, name=name, defaults=fields)


def set_statistics(service: AgentService, statistics: dict[str, Any]) -> None:
    """Replace the statistics of a service."""
    service.statistics = statistics
    service.save(update_fields=["statistics", "modified"])


def _require_room(others: int, what: str) -> None:
    if others >= MAX_SERVICES:
        raise ValidationError(f"There can be {MAX_SERVICES} {what} at most. Delete one first.")
