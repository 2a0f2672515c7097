"""Quotas: how much one owner may have, so that a runaway program can't fill the broker. Operators are exempt.

The message store's quota of an application is in ``message_store/quota.py``.
"""

from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.core.exceptions import NON_FIELD_ERRORS
from django.db.models import QuerySet

from accounts.access import vouching
from accounts.models import Owner
from core.refusals import Refusal


@dataclass(frozen=True)
class Quota:
    """The maximum number of ``things`` of an owner. It is the value of a setting, where 0 is no limit.

    ``remove`` is how an owner makes room.
    """

    setting: str
    things: str
    remove: str = "Delete"

    @property
    def maximum(self) -> int:
        return int(getattr(settings, self.setting))


PULSE_USERS = Quota("GUARDIAN_MAX_PULSE_USERS", "Pulse users")
TOKENS = Quota("GUARDIAN_MAX_TOKENS", "tokens", "Revoke")
SUBSCRIPTIONS = Quota("GUARDIAN_MAX_SUBSCRIPTIONS", "subscriptions")
CHANNELS = Quota("GUARDIAN_MAX_CHANNELS", "channels")


def require_room(quota: Quota, owner: Owner, rows: QuerySet[Any], things: str = "") -> None:
    """Lock the owner's row, and check that the owner may have one more of these rows.

    Call this in the transaction that inserts the row. ``things`` names the rows if the quota applies to several kinds.
    """
    if owner.is_staff or not quota.maximum:
        return
    vouching.lock(owner)
    if not has_room(quota, owner, rows):
        raise Refusal(
            f"An owner may have at most {quota.maximum} {things or quota.things}. "
            f"{quota.remove} one that nobody uses any more, or ask an operator for more.",
            NON_FIELD_ERRORS,
        )


def has_room(quota: Quota, owner: Owner, rows: QuerySet[Any]) -> bool:
    return owner.is_staff or not quota.maximum or rows.count() < quota.maximum
