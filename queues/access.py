"""Who may see a queue, and with it its events and samples, and who may see an archive. Operators see all."""

from django.contrib.auth.models import AnonymousUser
from django.db.models import Q

from accounts.models import Owner, PulseUser


def own_queues(visitor: Owner | AnonymousUser) -> Q:
    """Return the condition for an owner's queues: those of their Pulse users, and of their agents."""
    return Q(pulse_user__in=PulseUser.objects.filter(owners=visitor.pk)) | Q(owner=visitor.pk)


def own_archives(visitor: Owner | AnonymousUser) -> Q:
    """Return the condition for an owner's archives: those of their Pulse users. An agent's queues have none."""
    return Q(pulse_user__in=PulseUser.objects.filter(owners=visitor.pk))
