"""Who may register a queue for an offering, publish its events, and see what agents registered.

To register something new, an owner also needs access to the broker: ``accounts.vouching.require_vouched``.
"""

from typing import TYPE_CHECKING, Any, Self

from django.contrib.auth.models import AnonymousUser
from django.db import models

from accounts.models import Owner, visible_to

if TYPE_CHECKING:
    pass


class OfferingQuerySet(models.QuerySet["Offering"]):
    """Offerings."""

    def subscribed_by(self, visitor: Owner | AnonymousUser) -> "OfferingQuerySet":
        """Return the offerings that this visitor's agents may subscribe to: all for operators, else as a member."""
        return visible_to(self, visitor, models.Q(members=visitor.pk))

    def published_by(self, visitor: Owner | AnonymousUser) -> "OfferingQuerySet":
        """Return the offerings that this visitor may publish to: all for operators, else as a publisher."""
        return visible_to(self, visitor, models.Q(publishers=visitor.pk))

    def seen_by(self, visitor: Owner | AnonymousUser) -> "OfferingQuerySet":
        """Return the offerings that this visitor may subscribe or publish to."""
        found = visible_to(self, visitor, models.Q(members=visitor.pk) | models.Q(publishers=visitor.pk))
        return found if visitor.is_staff else found.distinct()


class RegisteredQuerySet(models.QuerySet[Any]):
    """Rows that agents registered."""

    def seen_by(self, visitor: Owner | AnonymousUser) -> Self:
        """Return the rows that this visitor may see."""
        return visible_to(self, visitor, models.Q((self.model.OWNER_FIELD, visitor.pk)))
