"""The form of a file, as a JSON Schema. ``make docs`` writes it to ``docs/examples/installation.schema.json``."""

from typing import Any

from accounts.models import MAX_THRESHOLD
from accounts.pulse_users.addresses import MAX_ADDRESSES
from accounts.pulse_users.ownership import MAX_OWNERS
from accounts.pulse_users.thresholds import MAX_HOLD_OFF_MINUTES


def _text(description: str) -> dict[str, Any]:
    return {"type": "string", "minLength": 1, "description": description}


def _flag(description: str) -> dict[str, Any]:
    return {"type": "boolean", "description": description}


def _addresses(description: str, **limits: int) -> dict[str, Any]:
    items = {"type": "string", "description": "An e-mail address."}
    return {"type": "array", "items": items, "description": description, **limits}


def _object(properties: dict[str, Any], *required: str, **more: Any) -> dict[str, Any]:
    return {
        "type": "object", "properties": properties, "required": list(required), "additionalProperties": False, **more,
    }  # fmt: skip


def _named(what: str, entry: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": entry, "description": what}


def _threshold(description: str) -> dict[str, Any]:
    return {
        "type": ["integer", "null"], "minimum": 1, "maximum": MAX_THRESHOLD,
        "description": f"{description}, in messages. null: the default.",
    }  # fmt: skip


_THRESHOLDS = {
    "warn_length": _threshold("The warning threshold"),
    "max_length": _threshold("The deletion limit"),
}

_OWNER = _object(
    {
        "access": _flag("Whether the owner may use the broker. Operators always may."),
        "operator": _flag("Whether the owner runs the installation."),
    }
)

_PULSE_USER = _object(
    {
        "owners": _addresses(
            "Its owners. They need access. A new Pulse user needs at least one.", minItems=1, maxItems=MAX_OWNERS
        ),
        **_THRESHOLDS,
        "keeps_archives": _flag("Whether the messages of its deleted and purged queues are kept for a while."),
        "hold_off_minutes": {
            "type": "integer", "minimum": 0, "maximum": MAX_HOLD_OFF_MINUTES,
            "description": "Minutes over its warning threshold after which the owners of a queue are warned.",
        },
        "notification_emails": _addresses(
            "Further addresses for notifications. Each gets a request to confirm.", maxItems=MAX_ADDRESSES
        ),
    }
)  # fmt: skip

_QUEUE = _object(
    {
        "name": _text("The name of a queue, which need not exist yet."),
        "pattern": _text("A regular expression for whole names of queues that exist now."),
        "vhost": _text("Its vhost. Default: the vhost of Pulse users."),
        **_THRESHOLDS,
        "unbounded": _flag("Whether the queue is never deleted for its length."),
    },
    oneOf=[{"required": ["name"]}, {"required": ["pattern"]}],
)

_OFFERING = _object(
    {
        "name": _text("Its name."),
        "uuid": _text("Its UUID. Without it, the offering of this name is meant, or a new one."),
        "members": _addresses("The owners whose agents may subscribe to its events."),
        "publishers": _addresses("The owners who may publish its events."),
    },
    "name",
)

SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "An installation of Guardian, for manage.py apply",
    **_object(
        {
            "version": {"const": 1, "description": "The version of this form."},
            "owners": _named("Owners and their access, by e-mail address.", _OWNER),
            "pulse_users": _named("Pulse users, by name.", _PULSE_USER),
            "queues": {
                "type": "array", "items": _QUEUE,
                "description": "Limits of queues. A name takes precedence over patterns, and the first pattern that "
                "matches over later ones.",
            },
            "offerings": {"type": "array", "items": _OFFERING, "description": "What agents register queues for."},
            "applications": {
                "type": "array", "items": _text("A name."),
                "description": "Applications of the message store. Their keys are created elsewhere.",
            },
        },
        "version",
    ),
}  # fmt: skip
"""The schema. ``reading.py`` checks what it can't express, such as addresses and names."""
