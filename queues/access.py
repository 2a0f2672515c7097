"""Who may see a queue. Whoever may see it may see its events and samples too; all are reached through the queue."""

from typing import TYPE_CHECKING

from django.contrib.auth.models import AnonymousUser
from django.db import models

from accounts.models import Owner, PulseUser, visible_to

if TYPE_CHECKING:
    pass


class QueueQuerySet(models.QuerySet["Queue"]):
    """Queries for queues."""

    def seen_by(self, visitor: Owner | AnonymousUser) -> "QueueQuerySet":
        """Return the queues that this visitor may see: all for an operator, their own for an owner, else none."""
        own = models.Q(pulse_user__in=PulseUser.objects.filter(owners=visitor.pk)) | models.Q(owner=visitor.pk)
        return visible_to(self, visitor, own)
