"""Agents' identities and services that are no longer used: which they are, and their removal by operators."""

from datetime import datetime
from typing import Any

from django.db.models import Q, QuerySet

from agents.models import AgentIdentity
from agents.removal import deletions


def orphaned_identities() -> QuerySet[AgentIdentity]:
    """Return the identities without a subscription, a consumer and a service."""
    registered = Q(event_subscriptions__isnull=False) | Q(consumer__isnull=False) | Q(services__isnull=False)
    return AgentIdentity.objects.exclude(pk__in=AgentIdentity.objects.filter(registered).values("pk"))


def remove(rows: QuerySet[Any], before: datetime, *, dry_run: bool) -> list[Any]:
    """Remove those of these identities or services that were last changed before this time, and return them.

    One that is used or reports meanwhile is kept.
    """
    unused = rows.filter(modified__lt=before)
    found = list(unused)
    if not dry_run and found:
        deletions.delete(unused.filter(pk__in=[one.pk for one in found]))
    return found
