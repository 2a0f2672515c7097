"""Render notifications as e-mails. The templates are in ``templates/mails/``, three for each kind."""

from datetime import UTC
from email.utils import parseaddr
from typing import Any

from django.conf import settings
from django.core.mail import EmailMultiAlternatives
from django.template.loader import render_to_string
from django.urls import reverse

from core.formatting import duration, rate_in_words
from notifications import kinds
from notifications.models import Notification
from rabbit.names import readable

MAX_NAME_IN_SUBJECT = 80

FACT_DEFAULTS = dict.fromkeys(
    ("agents", "registered", "dead_letters", "account", "more_bindings", "more_upstream", "broker_limit", "blocked"),
    "",
)
"""Facts that most notifications lack. Undefined names are expensive in templates: with these defaults, rendering a
warning takes a fifth less time."""


def compose(notification: Notification) -> EmailMultiAlternatives:
    """Return the notification as a mail with text and HTML.

    Raises:
        Obsolete: there is nothing to send any more.
    """
    context = _context(notification)
    subject, body = _in_text(notification.kind, context)
    domain = parseaddr(settings.DEFAULT_FROM_EMAIL)[1].rpartition("@")[2] or "localhost"
    mail = EmailMultiAlternatives(
        subject=subject,
        body=body,
        to=[notification.recipient],
        headers={
            "Message-ID": f"<{notification.uuid}@{domain}>",  # the same in each attempt
            "Auto-Submitted": "auto-generated",
            "X-Guardian-Kind": notification.kind,
        },
    )
    mail.attach_alternative(render_to_string(f"mails/{notification.kind}.html", context), "text/html")
    return mail


def in_text(notification: Notification) -> tuple[str, str]:
    """Return the notification's subject and text, for channels.

    Raises:
        Obsolete: there is nothing to send any more.
    """
    return _in_text(notification.kind, _context(notification))


def _in_text(kind: str, context: dict[str, Any]) -> tuple[str, str]:
    shortened = {**context, "queue": _shortened(context["queue"])}
    subject = render_to_string(f"mails/{kind}.subject.txt", shortened)
    return " ".join(subject.split()), render_to_string(f"mails/{kind}.txt", context)


def _context(notification: Notification) -> dict[str, Any]:
    """Return the context of the templates."""
    facts = notification.facts
    base_url = settings.GUARDIAN_BASE_URL
    context = {
        **FACT_DEFAULTS,
        **facts,
        "queue": readable(facts.get("queue", "")),
        "vhost": readable(facts.get("vhost", "")),
        "bindings": _readable_bindings(facts.get("bindings")),
        "upstream": _readable_bindings(facts.get("upstream")),
        "pace": rate_in_words(facts.get("per_second")),
        "time_to_max": duration(facts.get("seconds_to_max")),
        "lasted": duration(facts.get("seconds")),
        "kept": duration(facts.get("seconds_kept")),
        "to_operator": notification.recipient not in facts.get("owners", []) and "account" not in facts,
        "as_of": f"{notification.created.astimezone(UTC):%Y-%m-%d %H:%M} UTC",  # the mail may be read hours later
        "base_url": base_url,
        "settings_url": f"{base_url}{reverse('settings')}",
        "url": "" if "account" in facts else _url(notification),  # an added address has no access to the page
        "quiet_minutes": settings.GUARDIAN_QUIET_SECONDS // 60,
    }
    context |= kinds.get(notification.kind).context(notification)
    return context


def _shortened(name: str) -> str:
    return name if len(name) <= MAX_NAME_IN_SUBJECT else name[: MAX_NAME_IN_SUBJECT - 1] + "…"


def _readable_bindings(bindings: list[dict[str, str]] | None) -> list[dict[str, str]] | None:
    if bindings is None:
        return None
    return [{name: readable(value) for name, value in binding.items()} for binding in bindings]


def _url(notification: Notification) -> str:
    return f"{settings.GUARDIAN_BASE_URL}{notification.subject.path}" if notification.subject else ""
