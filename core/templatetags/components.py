"""What all templates show in one way: times, and names in one line."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from django import template
from django.utils import timezone
from django.utils.html import escape, format_html
from django.utils.safestring import SafeString
from django.utils.text import capfirst

from core.formatting import relative

register = template.Library()

KEPT_AT_THE_END = 14
"""The last characters of a name, which stay when it is cut. As in ``.cut`` of guardian.css."""


@register.filter
def ago(at: datetime | str | None) -> SafeString | str:
    """Return a time relative to now, with the exact one in a tooltip, or an empty text if there is none."""
    if not isinstance(at, datetime):
        return ""  # a variable that the context lacks is an empty text here
    words = relative((timezone.now() - at).total_seconds())
    exact = timezone.localtime(at)
    shown = words or f"{exact:%Y-%m-%d}"
    return format_html(
        '<time datetime="{}" title="{}">{}</time>', exact.isoformat(), f"{exact:%Y-%m-%d %H:%M:%S %Z}", shown
    )


@register.filter
def cut(name: str) -> SafeString:
    """Return a name for one line. The browser cuts the middle of one that is too long; the tooltip has all of it."""
    if len(name) <= 2 * KEPT_AT_THE_END:
        return format_html('<span class="cut" title="{}">{}</span>', name, name)
    start, end = name[:-KEPT_AT_THE_END], name[-KEPT_AT_THE_END:]
    return format_html('<span class="cut" title="{}"><span>{}</span><span>{}</span></span>', name, start, end)


@register.filter
def labelled(cells: Iterable[SafeString], headers: Sequence[dict[str, Any]]) -> list[SafeString]:
    """Return the cells of a row of an admin's list with the words of their columns, which a phone shows."""
    return [
        SafeString(f'<td data-label="{escape(capfirst(header["text"]))}"{cell[3:]}')
        if header["sortable"] and cell.startswith("<td")
        else cell
        for cell, header in zip(cells, headers, strict=True)
    ]
