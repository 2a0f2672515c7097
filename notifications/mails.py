"""Render notifications as e-mails, and as texts for channels.

Mails about one subject to one recipient share a thread: all refer to the id of a mail that was never sent.
"""

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from email.utils import parseaddr

from django.conf import settings
from django.core.mail import EmailMultiAlternatives
from django.template.loader import render_to_string
from django.urls import reverse

from core.links import absolute_url
from core.mails import AUTOMATIC_HEADERS
from notifications import content, grouping, kinds, subjects
from notifications.content import Content, Fact, Table, Why
from notifications.models import Notification
from rabbit.names import readable_text

GROUP = "group"


def compose(*notifications: Notification) -> EmailMultiAlternatives:
    """Return a mail with text and HTML: one notification, or a table of several. Raises Obsolete."""
    said, why = _content(notifications)
    kind = notifications[0].kind if len(notifications) == 1 else GROUP
    subject = _subject(said)
    mail = EmailMultiAlternatives(
        subject=subject,
        body=_as_text(said, why),
        to=[notifications[0].recipient],
        headers={**AUTOMATIC_HEADERS, "X-Guardian-Kind": kind, **_thread(notifications)},
    )
    context = {
        "subject": subject,
        "content": said,
        "why": why,
        "base_url": settings.GUARDIAN_BASE_URL,
        "help_url": _help_url(),
    }
    mail.attach_alternative(render_to_string("mails/message.html", context), "text/html")
    return mail


def in_text(*notifications: Notification) -> tuple[str, str]:
    """Return the subject and the text for channels, of three lines. Raises Obsolete."""
    said, _ = _content(notifications)
    if len(notifications) > 1:
        return _subject(said), grouping.brief_text(notifications)
    link = f"{said.action.text}: {said.action.url}" if said.action else settings.GUARDIAN_BASE_URL
    return _subject(said), "\n".join([said.happened, f"Next: {said.next}", link])


def _content(notifications: grouping.Delivery) -> tuple[Content, Why]:
    first = notifications[0]
    said = kinds.get(first.kind).content(first) if len(notifications) == 1 else grouping.content(notifications)
    # People and the broker write some values, and a carriage return in one would begin a paragraph of the mail.
    said = replace(said, facts=[fact._replace(value=readable_text(fact.value)) for fact in said.facts])
    return said, said.why or content.why(first)


def _subject(said: Content) -> str:
    return " ".join(f"[Guardian] {said.subject}".split())


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


def _help_url() -> str:
    return absolute_url(reverse("help"))


def _as_text(said: Content, why: Why) -> str:
    footer = [why.text, *([f"{why.link.text}: {why.link.url}"] if why.link else [])]
    signature = "\n".join(["-- ", *footer, f"Guardian, {settings.GUARDIAN_BASE_URL}", f"Help: {_help_url()}"])
    return "\n\n".join([*_paragraphs(said), signature]) + "\n"


def _paragraphs(said: Content) -> Iterator[str]:
    yield said.happened
    yield f"What happens next: {said.next}"
    if said.advice:
        yield f"What you can do: {said.advice}"
    if said.commands:
        yield "\n".join(f"    {command}" for command in said.commands)
    if said.action:
        yield f"{said.action.text}:\n{said.action.url}"
    if said.help:
        yield f"{said.help.text}: {said.help.url}"
    for table in said.tables:
        yield _table(table)
    if said.facts:
        yield _facts(said.facts)


def _facts(facts: Sequence[Fact]) -> str:
    width = max(len(fact.label) for fact in facts) + len(":  ")
    lines = (f"{label}:".ljust(width) + value.replace("\n", "\n" + " " * width) for label, value in facts)
    return "\n".join(lines)


def _table(table: Table) -> str:
    """Return a table with the names in the last column, as they may be long."""
    lines = [(*row.cells, row.name) for row in table.rows]
    if table.heads:
        lines.insert(0, (*table.heads, table.name_head))
    *columns, names = zip(*lines, strict=True)
    if not table.heads:
        names = tuple(f"{row.name}\n  {row.url}" if row.url else row.name for row in table.rows)
    widths = [max(map(len, column)) for column in columns]
    aligned = [
        [cell.rjust(width) if number else cell.ljust(width) for cell in column]
        for number, (column, width) in enumerate(zip(columns, widths, strict=True))
    ]
    text = [f"{table.title}:"] if table.title else []
    text += map("  ".join, zip(*aligned, names, strict=True))
    if table.more:
        text.append(f"… and {table.more:,} more")
    return "\n".join(text)
