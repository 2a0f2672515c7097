"""Who may register a queue for an offering, publish its events, and see what agents registered. Operators may all.

To register something new, an owner also needs access to the broker: ``accounts.access.vouching.require_vouched``.
What an agent's token may do is in ``accounts/access/scopes.py``, and as a password on the broker in
``rabbit/permissions.py``.
"""

from django.contrib.auth.models import AnonymousUser
from django.db.models import Q

from accounts.models import Owner


def may_register(visitor: Owner | AnonymousUser) -> Q:
    """Return the condition for the offerings that an owner's agents may register queues for."""
    return Q(members=visitor.pk)


def may_publish(visitor: Owner | AnonymousUser) -> Q:
    """Return the condition for the offerings that an owner may publish events to."""
    return Q(publishers=visitor.pk)


def own_rows(owner_field: str, visitor: Owner | AnonymousUser) -> Q:
    """Return the condition for what an owner's agents registered. ``owner_field`` leads to the owner."""
    return Q((owner_field, visitor.pk))
