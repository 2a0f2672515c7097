"""Render notifications as e-mails. The templates are in ``templates/mails/``, three for each kind.

Mails about one subject to one recipient share a thread: all refer to the id of a mail that was never sent.
"""

import uuid
from datetime import UTC
from email.utils import parseaddr
from typing import Any

from django.conf import settings
from django.core.mail import EmailMultiAlternatives
from django.template.loader import render_to_string
from django.urls import reverse

from core.formatting import duration, rate_in_words
from notifications import grouping, kinds, subjects
from notifications.models import Notification
from rabbit.names import readable

MAX_NAME_IN_SUBJECT = 80

FACT_DEFAULTS = dict.fromkeys(
    ("agents", "registered", "dead_letters", "account", "more_bindings", "more_upstream", "broker_limit", "blocked"),
    "",
)
"""Facts that most notifications lack. Undefined names are expensive in templates: with these defaults, rendering a
warning takes a fifth less time."""


GROUP = "group"
"""The templates of a message with several notifications."""


def compose(*notifications: Notification) -> EmailMultiAlternatives:
    """Return a mail with text and HTML: one notification, or a table of several.

    Raises:
        Obsolete: there is nothing to send any more.
    """
    name, context = _render_with(notifications)
    mail = EmailMultiAlternatives(
        subject=_subject(name, context),
        body=render_to_string(f"mails/{name}.txt", context),
        to=[notifications[0].recipient],
        headers={"Auto-Submitted": "auto-generated", "X-Guardian-Kind": name, **_thread(notifications)},
    )
    mail.attach_alternative(render_to_string(f"mails/{name}.html", context), "text/html")
    return mail


def in_text(*notifications: Notification) -> tuple[str, str]:
    """Return the subject and text for channels, which get only the first lines of a table.

    Raises:
        Obsolete: there is nothing to send any more.
    """
    name, context = _render_with(notifications)
    text = f"mails/{name}.brief.txt" if name == GROUP else f"mails/{name}.txt"
    return _subject(name, context), render_to_string(text, context)


def _render_with(notifications: grouping.Delivery) -> tuple[str, dict[str, Any]]:
    """Return the name of the templates, and their context."""
    contexts = [_context(one) for one in notifications]
    if len(contexts) == 1:
        return notifications[0].kind, contexts[0]
    lines = [grouping.line(one, context) for one, context in zip(notifications, contexts, strict=True)]
    accounts = sorted({context["account"] for context in contexts} - {""})
    to_operator = all(context["to_operator"] for context in contexts)
    return GROUP, {
        **contexts[0], **grouping.table(lines), "accounts": accounts, "to_operator": to_operator, "url": ""
    }  # fmt: skip


def _subject(name: str, context: dict[str, Any]) -> str:
    shortened = {**context, "queue": _shortened(context["queue"])}
    return " ".join(render_to_string(f"mails/{name}.subject.txt", shortened).split())


def _thread(notifications: grouping.Delivery) -> dict[str, str]:
    """Return the headers that identify a mail, the same in each attempt, and its thread.

    A group may be sent in several mails, such as a part after quiet hours, so its own id would not be unique.
    """
    first = notifications[0]
    domain = parseaddr(settings.DEFAULT_FROM_EMAIL)[1].rpartition("@")[2] or "localhost"
    headers = {"Message-ID": f"<{first.uuid}@{domain}>"}
    if len(notifications) == 1 and subjects.is_key(first.about):
        thread = uuid.uuid5(uuid.NAMESPACE_URL, f"{settings.GUARDIAN_BASE_URL} {first.about} {first.recipient}")
        headers |= dict.fromkeys(("In-Reply-To", "References"), f"<thread-{thread}@{domain}>")
    return headers


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
