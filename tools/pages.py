"""``make docs``: write ``docs/settings.md`` from ``.env.example`` and ``guardian_site/settings.py``.

A test fails if the page is stale.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PROJECT = Path(__file__).resolve().parent.parent
PAGE = PROJECT / "docs" / "settings.md"

KINDS = {
    "bool": "true or false",
    "int": "whole number",
    "float": "number",
    "str": "text",
    "items": "list, with commas",
    "url": "address",
    "database": "address",
    "email_url": "address",
    "log_level": "text",
}
"""Descriptions of the kinds of settings."""


class Setting(NamedTuple):
    """A setting's name, its default as text (empty if there is none), and its meaning."""

    name: str
    default: str
    meaning: str


class Reader(NamedTuple):
    """How settings.py reads a setting. ``default`` is None if it depends on other settings."""

    kind: str
    default: str | None


def documented_settings() -> dict[str, list[Setting]]:
    """Return the settings of ``.env.example`` by heading."""
    headings: dict[str, list[Setting]] = {}
    meaning: list[str] = []
    heading = ""
    for line in (PROJECT / ".env.example").read_text().splitlines():
        if line.startswith("## "):
            heading = line.removeprefix("## ")
            meaning = []
        elif found := re.fullmatch(r"# ([A-Z][A-Z0-9_]+)=(.*)", line):
            headings.setdefault(heading, []).append(Setting(found[1], found[2], " ".join(meaning)))
            meaning = []
        elif line:
            meaning.append(line.removeprefix("# "))
        else:
            meaning = []
    return headings


def read_settings() -> dict[str, Reader]:
    """Return the settings that ``guardian_site/settings.py`` reads from the environment."""
    tree = ast.parse((PROJECT / "guardian_site" / "settings.py").read_text())
    return {name: reader for node in ast.walk(tree) for name, reader in _reader_of(node)}


def _reader_of(node: ast.AST) -> Iterator[tuple[str, Reader]]:
    """Yield the setting that an expression reads, if it does."""
    if not (isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant)):
        return
    name, called = node.args[0].value, ast.unparse(node.func)
    if not (isinstance(name, str) and re.fullmatch(r"[A-Z][A-Z0-9_]+", name)):
        return
    if called in ("read", "items"):
        kind = "items" if called == "items" else ast.unparse(node.args[1]).removeprefix("env.")
        default = node.args[-1]
    elif called.startswith("env."):
        kind = called.removeprefix("env.")
        default = next(keyword.value for keyword in node.keywords if keyword.arg == "default")
    else:
        return
    yield name, Reader(kind, _default_text(default))


def _default_text(default: ast.expr) -> str | None:
    """Return a default as the environment would have it; None if it is computed."""
    try:
        value = ast.literal_eval(default)
    except ValueError:
        return None
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return ",".join(value) if isinstance(value, list) else str(value)


def settings_page() -> str:
    """Return ``docs/settings.md``."""
    readers = read_settings()
    lines = [
        "# Every setting",
        "",
        "Set them in the environment, or in the file `.env` beside `manage.py`; the environment takes precedence.",
        "Values are taken literally, with any `$`, `#` and blank inside them. In `.env`, quotes around a whole value",
        "are removed. Processes read settings when they start: restart them after a change. `manage.py check` reports",
        "invalid settings, and `manage.py doctor` reports services that do not respond.",
    ]
    for heading, settings in documented_settings().items():
        lines += ["", f"## {heading}", "", "| setting | value | default | meaning |", "| --- | --- | --- | --- |"]
        for setting in settings:
            default = f"`{setting.default}`" if setting.default else ""
            takes = "address" if setting.name.endswith("_URL") else KINDS[readers[setting.name].kind]
            lines.append(f"| `{setting.name}` | {takes} | {default} | {setting.meaning} |")
    lines += ["", "`make docs` writes this page from `.env.example` and `guardian_site/settings.py`."]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the page."""
    PAGE.write_text(settings_page())
    print(PAGE.relative_to(PROJECT))


if __name__ == "__main__":
    main()
