"""What happens to owners and their accounts that others act upon: ``queues`` tells people of it.

Each is sent in the transaction that writes what happened.
"""

from django.dispatch import Signal

vouch_requested = Signal()
"""``owner`` asks to be vouched for; ``reason`` is why, in the owner's words."""

vouched = Signal()
"""``owner`` is vouched for now, ``by`` somebody, or by a rule where that is None."""

address_added = Signal()
"""``address``, a NotificationAddress, waits for its confirmation."""

pulse_user_removed = Signal()
"""``pulse_user`` is gone from the broker with all that it had, and its row is about to be deleted."""
