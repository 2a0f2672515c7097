"""Markdown as HTML that the content security policy allows: no inline styles, no HTML of the source."""

import re
from collections.abc import Callable
from itertools import pairwise

from django.utils.safestring import SafeString
from markdown_it import MarkdownIt
from markdown_it.token import Token

PARSER = MarkdownIt("commonmark", {"html": False}).enable("table")


def anchor(heading: str) -> str:
    """Return the anchor of a heading, as GitHub generates it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def to_html(text: str, address: Callable[[str], str] = str) -> SafeString:
    """Return Markdown as HTML. ``address`` maps the targets of links and pictures."""
    tokens = PARSER.parse(text)
    _add_anchors(tokens)
    _label_cells(tokens)
    for token in tokens:
        if token.type in ("fence", "code_block"):
            token.attrs["tabindex"] = "0"  # it scrolls
        for child in token.children or ():
            for attribute in ("href", "src"):
                if attribute in child.attrs:
                    child.attrs[attribute] = address(str(child.attrs[attribute]))
            if child.type == "image":
                child.attrs["loading"] = "lazy"
    return SafeString(PARSER.renderer.render(tokens, PARSER.options, {}))


def to_inline_html(text: str) -> SafeString:
    """Return a line of Markdown as HTML without a paragraph around it."""
    return SafeString(PARSER.renderInline(text))


def _add_anchors(tokens: list[Token]) -> None:
    for opening, content in pairwise(tokens):
        if opening.type == "heading_open":
            opening.attrs["id"] = anchor(_plain_text(content))


def _plain_text(content: Token) -> str:
    return "".join(child.content for child in content.children or ())


def _label_cells(tokens: list[Token]) -> None:
    """Give tables the classes and labels with which ``guardian.css`` shows a row as a card on a phone."""
    labels: list[str] = []
    column = 0
    for opening, content, closing in zip(tokens, tokens[1:], tokens[2:], strict=False):
        if opening.type == "table_open":
            opening.attrs["class"] = "cards"
            labels = []
        elif opening.type == "tr_open":
            column = 0
        elif opening.type in ("th_open", "td_open"):
            if "right" in str(opening.attrs.pop("style", "")):
                opening.attrs["class"] = "number"
            if opening.type == "th_open":
                labels.append(_plain_text(content))
                if labels[-1]:
                    opening.attrs["scope"] = "col"
                else:
                    opening.tag = closing.tag = "td"  # a header without text is not accessible
            elif content.content and labels[column]:
                opening.attrs["data-label"] = labels[column]
            column += 1
