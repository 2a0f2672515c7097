"""Signals about owners and accounts. Other packages send notifications about them.

Each signal is sent in the transaction that records the change.
"""

from django.dispatch import Signal

vouch_requested = Signal()
"""``owner`` requests to be vouched for, with a ``reason``."""

vouched = Signal()
"""``by`` vouched for ``owner``. None: a rule did."""

address_added = Signal()
"""``address``, a NotificationAddress, must be confirmed."""

pulse_user_removed = Signal()
"""``pulse_user`` was deleted from the broker with its queues and exchanges. Its row is about to be deleted."""
