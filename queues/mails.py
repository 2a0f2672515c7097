"""How a notification is said by e-mail. The words are in ``templates/mails/``, one pair for each kind."""

import unicodedata
from email.utils import parseaddr

from django.conf import settings
from django.core.mail import EmailMultiAlternatives
from django.core.mail.backends.base import BaseEmailBackend
from django.template.loader import render_to_string
from django.urls import reverse

from queues.models import Notification

NAME_IN_SUBJECT = 80


def compose(notification: Notification, connection: BaseEmailBackend | None = None) -> EmailMultiAlternatives:
    """Return the mail, in text and HTML, that says what this notification tells."""
    facts = notification.facts
    context = {
        **facts,
        "queue": readable(facts.get("queue", "")),
        "vhost": readable(facts.get("vhost", "")),
        "bindings": _readable_bindings(facts.get("bindings")),
        "pace": pace(facts.get("per_second")),
        "time_to_max": duration(facts.get("seconds_to_max")),
        "lasted": duration(facts.get("seconds")),
        "to_operator": notification.recipient not in facts.get("owners", []),
        "base_url": settings.GUARDIAN_BASE_URL,
        "url": _url(notification),
        "quiet_minutes": settings.GUARDIAN_QUIET_SECONDS // 60,
    }
    name = f"mails/{notification.kind}"
    subject = render_to_string(f"{name}.subject.txt", {**context, "queue": _shortened(context["queue"])})
    domain = parseaddr(settings.DEFAULT_FROM_EMAIL)[1].rpartition("@")[2] or "localhost"
    mail = EmailMultiAlternatives(
        subject=" ".join(subject.split()),
        body=render_to_string(f"{name}.txt", context),
        to=[notification.recipient],
        connection=connection,
        headers={
            "Message-ID": f"<{notification.uuid}@{domain}>",  # the same when it has to be sent again
            "Auto-Submitted": "auto-generated",
            "X-Guardian-Kind": notification.kind,
        },
    )
    mail.attach_alternative(render_to_string(f"{name}.html", context), "text/html")
    return mail


def readable(name: str) -> str:
    """Return a name of the broker's as it can be shown anywhere: what has no shape of its own is written as an escape.

    A queue's name may hold any character, such as ones that reverse the direction of the text behind them.
    """
    return "".join(
        character if unicodedata.category(character)[0] not in "CZ" or character == " " else _escape(character)
        for character in name
    )


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _shortened(name: str) -> str:
    return name if len(name) <= NAME_IN_SUBJECT else name[: NAME_IN_SUBJECT - 1] + "…"


def pace(per_second: float | None) -> str:
    """Return how fast a queue grows or shrinks, in words; empty where it isn't known."""
    if per_second is None:
        return ""
    if abs(per_second) < 1 / 3600:
        return "not growing"
    amount = abs(per_second)
    number, unit = (amount, "a second") if amount >= 1 else (amount * 60, "a minute")
    if number < 1:
        number, unit = amount * 3600, "an hour"
    return f"{'growing' if per_second > 0 else 'shrinking'} by {number:,.0f} messages {unit}"


def duration(seconds: float | None) -> str:
    """Return a time in words, in its largest unit that fits; empty where it isn't known."""
    if seconds is None:
        return ""
    for size, unit in ((86_400, "day"), (3_600, "hour"), (60, "minute")):
        if seconds >= size * 1.5:
            return f"{seconds / size:,.0f} {unit}s"
    return f"{seconds:,.0f} second{'' if round(seconds) == 1 else 's'}"


def _readable_bindings(bindings: list[dict[str, str]] | None) -> list[dict[str, str]] | None:
    if bindings is None:
        return None
    return [{name: readable(value) for name, value in binding.items()} for binding in bindings]


def _url(notification: Notification) -> str:
    if notification.queue is None:
        return ""
    return f"{settings.GUARDIAN_BASE_URL}{reverse('queue', args=[notification.queue.uuid])}"
