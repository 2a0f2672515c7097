"""What all templates show in one way: times, and names in one line."""

import re
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

LONG = 64
"""The characters of a name that fit into two lines of a list."""

FIGURE = re.compile(r"<td[^>]*>-?\d[\d,.]*(\s?(bytes?|[KMGT]B|s))?</td>")
NO_FIGURE = re.compile(r"<td[^>]*>(none|unknown)?</td>")
"""Cells of an admin's list."""


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
    """Return a name for a list. The middle of a very long one is cut; the tooltip has all of it."""
    shown = name if len(name) <= LONG else f"{name[: LONG // 2]}…{name[-LONG // 2 :]}"
    return format_html('<span class="cut" title="{}">{}</span>', name, shown)


@register.filter
def with_figures(headers: Sequence[dict[str, Any]], rows: Sequence[Sequence[SafeString]]) -> Sequence[dict[str, Any]]:
    """Mark the headers of an admin's list whose columns have figures, which are aligned at the right."""
    for header, cells in zip(headers, zip(*rows, strict=True), strict=True):
        others = [cell for cell in cells if not NO_FIGURE.fullmatch(cell)]
        header["has_figures"] = bool(others) and all(FIGURE.fullmatch(cell) for cell in others)
    return headers


@register.filter
def labelled(cells: Iterable[SafeString], headers: Sequence[dict[str, Any]]) -> list[SafeString]:
    """Return the cells of a row of an admin's list with the words of their columns, which a phone shows."""
    return [
        SafeString(
            f"<td{' data-figure' if header['has_figures'] else ''} "
            f'data-label="{escape(capfirst(header["text"]))}"{cell[3:]}'
        )
        if header["sortable"] and cell.startswith("<td")
        else cell
        for cell, header in zip(cells, headers, strict=True)
    ]
