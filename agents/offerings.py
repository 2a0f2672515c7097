"""Offerings, as commands create and change them. Operators do it in the admin, too."""

import uuid
from collections.abc import Sequence

from django.db import transaction

from accounts.access.vouching import require_vouched
from accounts.models import Owner
from agents.models import Offering


def save_offering(
    key: uuid.UUID,
    name: str,
    members: Sequence[Owner] | None = None,
    publishers: Sequence[Owner] | None = None,
    *,
    replace: bool = False,
) -> Offering:
    """Create the offering with this UUID or change its name, add members and publishers, and return it.

    ``replace`` removes other members and publishers, except those who are deactivated. None leaves them as they are.
    """
    with transaction.atomic():
        offering, _ = Offering.objects.update_or_create(uuid=key, defaults={"name": name})
        for people, wanted in ((offering.members, members), (offering.publishers, publishers)):
            if wanted is not None:
                for new in set(wanted).difference(people.all()):
                    require_vouched(new)
                people.add(*wanted)
                if replace:
                    people.remove(*people.filter(is_active=True).exclude(pk__in=[one.pk for one in wanted]))
    return offering
