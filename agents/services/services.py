"""The services of agents and their processors: what agents report about themselves. The REST API lists them.

The errors are those of ``agents/registration``.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from django.utils import timezone

from agents.models import AgentIdentity, AgentProcessor, AgentService
from agents.registration.records import get_or_create

Reported = TypeVar("Reported", AgentService, AgentProcessor)


def register_service(identity: AgentIdentity, name: str, mode: str) -> tuple[AgentService, bool]:
    """Store an agent's service, which is active now. Return its row, and whether it is new."""
    fields = {"mode": mode, "state": AgentService.State.ACTIVE}
    row, is_new = get_or_create(AgentService.objects.all(), fields, identity.owner, identity=identity, name=name)
    return (row if is_new else _changed(row, fields)), is_new


def register_processor(
    service: AgentService, name: str, backend_type: str, backend_version: str
) -> tuple[AgentProcessor, bool]:
    """Store a processor of a service, which runs now. Return its row, and whether it is new."""
    fields = {"backend_type": backend_type, "backend_version": backend_version, "last_run": timezone.now()}
    owner = service.identity.owner
    row, is_new = get_or_create(AgentProcessor.objects.all(), fields, owner, service=service, name=name)
    return (row if is_new else _changed(row, fields)), is_new


def set_statistics(service: AgentService, statistics: dict[str, Any]) -> None:
    _changed(service, {"statistics": statistics})


def _changed(row: Reported, fields: Mapping[str, Any]) -> Reported:
    values = {**fields, "modified": timezone.now()}
    if not type(row).objects.filter(pk=row.pk).update(**values):
        raise type(row).DoesNotExist
    for name, value in values.items():
        setattr(row, name, value)
    return row
