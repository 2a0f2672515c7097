"""Signals about owners and Pulse users. Other packages send notifications about them.

Each signal is sent in the transaction that records the change.
"""

from django.dispatch import Signal

vouch_requested = Signal()
"""``owner`` requests to be vouched for, with a ``reason``."""

vouched = Signal()
"""``by`` vouched for ``owner``, or a rule did (None)."""

address_added = Signal()
"""``address``, a NotificationAddress, must be confirmed."""

pulse_user_removed = Signal()
"""``pulse_user`` was deleted from the broker with its queues and exchanges. Its row is about to be deleted."""

owners_invited = Signal()
"""``invitations`` to one Pulse user were sent, all by one inviter."""

invitation_answered = Signal()
"""``invitation`` was accepted, or declined if ``accepted`` is false."""

owners_assigned = Signal()
"""``by``, an operator or a command (None), made each key of ``pulse_users`` an owner of its Pulse users."""

owners_left = Signal()
"""``owners`` no longer own ``pulse_users``. ``by``: who removed them, the owner who left, or None for a command."""

owner_deactivated = Signal()
"""``by``, an operator, deactivated ``owner``, who owns ``pulse_users``."""
