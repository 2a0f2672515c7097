"""What happens to queues when something happens to Pulse users."""

from typing import Any

from django.dispatch import receiver

from accounts import signals
from accounts.models import PulseUser
from queues import tombstones


@receiver(signals.pulse_user_removed)
def forget_queues(sender: object, pulse_user: PulseUser, **_: Any) -> None:
    """Forget the queues that went with an account."""
    tombstones.forget_queues_of(pulse_user)
