"""What a notification says to a program: a webhook's fields, and the incident of an on-call service."""

import uuid
from collections.abc import Mapping
from typing import Any, NamedTuple

from django.conf import settings

from notifications import kinds
from notifications.content import subject_url
from notifications.kinds import Severity
from notifications.models import Notification


class Event(NamedTuple):
    """``incident`` is the same in the notification that begins trouble and in the one that ends it.

    ``fields`` are those of ``docs/examples/webhook.schema.json``.
    """

    severity: Severity
    incident: str
    fields: Mapping[str, Any]

    @property
    def url(self) -> str:
        return str(self.fields["url"])


NO_FIELDS: Mapping[str, Any] = dict.fromkeys(
    ("queue", "vhost", "owner", "length", "limit", "seconds_left", "diagnosis")
)


def of_test(at: str) -> Event:
    fields = {"event": "test", "severity": Severity.INFO, "url": settings.GUARDIAN_BASE_URL, "at": at, **NO_FIELDS}
    return Event(Severity.INFO, _incident("a test"), fields)


def of(notification: Notification) -> Event:
    facts, kind = notification.facts, kinds.get(notification.kind)
    severity, seconds = kind.severity_of(facts), facts.get("seconds_to_max")
    fields = {
        "event": kind.name,
        "severity": severity,
        "queue": facts.get("queue"),
        "vhost": facts.get("vhost"),
        "owner": ", ".join(facts.get("owners", [])) or None,
        "length": facts.get("length"),
        "limit": None if facts.get("spared") else facts.get("max"),
        "seconds_left": round(seconds) if seconds is not None and not facts.get("spared") else None,
        "url": subject_url(notification) or settings.GUARDIAN_BASE_URL,
        "at": notification.created.isoformat(),
        "diagnosis": (facts.get("diagnosis") or {}).get("text"),
    }
    return Event(severity, _incident(f"{notification.about} {kind.topic}"), fields)


def _incident(about: str) -> str:
    return uuid.uuid5(uuid.NAMESPACE_URL, f"{settings.GUARDIAN_BASE_URL} {about}").hex
