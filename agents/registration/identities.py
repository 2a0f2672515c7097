"""Identities of agents, and the validation of UUIDs, offerings and object types in requests."""

import logging
import re
import uuid as uuids
from typing import Any

from django.db import IntegrityError, transaction
from django.utils import timezone

from accounts.models import Owner
from agents.models import AgentIdentity, ObjectType, Offering
from agents.registration.records import insert
from core import sealing
from core.refusals import Refusal

logger = logging.getLogger(__name__)


_UUID = re.compile("[0-9a-fA-F]{32}|[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


def read_uuid(text: Any) -> uuids.UUID:
    """Return the UUID in this text: 32 hex digits, with all four dashes in their places or without dashes.

    Python and Django also accept numbers, braces, prefixes and misplaced dashes, which can turn a mistake into another
    valid UUID. Raises ValueError.
    """
    if not isinstance(text, str) or _UUID.fullmatch(text) is None:
        raise ValueError("A UUID is 32 hex digits, with or without its four dashes.")
    return uuids.UUID(text)


def subscribable_offering(owner: Owner, uuid: uuids.UUID) -> Offering:
    """Return the offering with this UUID. If the owner may not subscribe to it, raise a Refusal without a field."""
    offering = Offering.objects.subscribed_by(owner).filter(uuid=uuid).first()
    if offering is None:
        raise _no_such_offering()
    return offering


def _no_such_offering() -> Refusal:
    return Refusal("There is no such offering, or your agents may not subscribe to it.")


def check_object_type(object_type: str) -> str:
    """Return this object type. Raises Refusal if there is no such type."""
    if object_type not in ObjectType.values:
        raise Refusal(f"There is no such object type. Use one of: {', '.join(ObjectType.values)}.", "object_type")
    return object_type


def create_identity(owner: Owner, offering: Offering, name: str, **introduced: Any) -> AgentIdentity:
    """Create an identity of an agent of this owner, for this offering, with the other fields that the agent sent."""
    identity = AgentIdentity(owner=owner, offering=offering, name=name, **_as_fields(introduced))
    try:
        insert(lambda: identity.save(force_insert=True), owner, AgentIdentity)
    except IntegrityError as error:
        raise _conflict(identity) from error
    return identity


def update_identity(identity: AgentIdentity, **introduced: Any) -> None:
    """Change the given fields of an identity."""
    changed = {**_as_fields(introduced), "modified": timezone.now()}
    for name, value in changed.items():
        setattr(identity, name, value)
    try:
        with transaction.atomic():
            if not AgentIdentity.objects.filter(pk=identity.pk).update(**changed):
                raise AgentIdentity.DoesNotExist("The identity no longer exists.")
    except IntegrityError as error:
        raise _conflict(identity) from error


def read_config(identity: AgentIdentity) -> str:
    """Return the agent's configuration file, or "" if there is none or it can't be decrypted any more."""
    if not identity.sealed_config:
        return ""
    try:
        return sealing.unseal(sealing.CONFIGURATIONS, identity.sealed_config)
    except sealing.CannotUnseal as error:
        logger.warning("The configuration of the agent %s can't be decrypted: %s", identity.uuid.hex, error)
        return ""


def _as_fields(introduced: dict[str, Any]) -> dict[str, Any]:
    fields = dict(introduced)
    if "config_file_content" in fields:
        content = fields.pop("config_file_content")
        fields["sealed_config"] = sealing.seal(sealing.CONFIGURATIONS, content) if content else ""
    return fields


def _conflict(identity: AgentIdentity) -> Refusal:
    if Offering.objects.filter(pk=identity.offering_id).exists():
        return Refusal(f"You have an agent '{identity.name}' for this offering already; choose another name.", "name")
    return _no_such_offering()
