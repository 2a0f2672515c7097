"""Agents' identities and services that are no longer used: which they are, and their removal by operators."""

from datetime import datetime

from django.db.models import Q, QuerySet

from agents.models import AgentIdentity, AgentService
from agents.removal import deletions


def orphaned_identities() -> QuerySet[AgentIdentity]:
    """Return the identities without a subscription, a consumer and a service."""
    registered = Q(event_subscriptions__isnull=False) | Q(consumer__isnull=False) | Q(services__isnull=False)
    return AgentIdentity.objects.exclude(pk__in=AgentIdentity.objects.filter(registered).values("pk"))


def remove_orphaned_identities(before: datetime, *, dry_run: bool) -> list[AgentIdentity]:
    """Remove the orphaned identities that were last changed before this time, and return them.

    An identity that has registered something since is kept.
    """
    rows = orphaned_identities().filter(modified__lt=before)
    found = list(rows.select_related("offering"))
    if not dry_run and found:
        deletions.delete(rows.filter(pk__in=[one.pk for one in found]))
    return found


def remove_stale_services(before: datetime, *, dry_run: bool) -> list[AgentService]:
    """Remove the services whose last report is older than this time, with their processors, and return them."""
    rows = AgentService.objects.filter(modified__lt=before)
    found = list(rows.select_related("identity"))
    if not dry_run and found:
        deletions.delete(rows.filter(pk__in=[one.pk for one in found]))
    return found
