"""``make docs``: write the pages that are generated. A test fails if one of them is stale.

``.env.example`` and ``docs/settings.md`` come from ``guardian_site/own_settings.py``, the JSON Schema of installation
files from ``installation/schema.py``, and each package's ``docs/reference.md`` from its docstrings.
"""

import ast
import json
import os
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from itertools import groupby, pairwise
from pathlib import Path
from typing import NamedTuple

import django

from tools.reference import reference

PROJECT = Path(__file__).resolve().parent.parent
DECLARATIONS = PROJECT / "guardian_site" / "own_settings.py"
EXAMPLE = PROJECT / ".env.example"
PAGE = PROJECT / "docs" / "settings.md"
SCHEMA = PROJECT / "docs" / "examples" / "installation.schema.json"

PUBLIC_MODULES: dict[str, Sequence[str]] = {
    "guardian-consumers": ("django", "headers", "metrics", "names"),
    "guardian-store": (),
}
"""By package: its modules with public names. Those of the package itself are always public."""

KINDS = {
    "flag": "true or false",
    "int": "whole number",
    "number": "number",
    "items": "list, with commas",
    "url": "address",
}
"""Descriptions of the kinds of settings; of the others: address if the name ends in _URL, else text."""


EXAMPLE_HEADER = """\
# Every setting of Guardian, with its default. Copy this file to .env, and remove the # from settings that you change.
# A value ends at the end of its line and is taken literally, $ and # included. Quotes around a whole value are removed.
# An empty value counts as not set."""


class Setting(NamedTuple):
    """A setting as it is declared. ``default`` is empty if it depends on other settings."""

    heading: str
    name: str
    kind: str
    default: str
    meaning: str

    @property
    def takes(self) -> str:
        return KINDS.get(self.kind, "address" if self.name.endswith("_URL") else "text")


def declared_settings() -> list[Setting]:
    source = DECLARATIONS.read_text()
    headings = [(number, line[3:]) for number, line in enumerate(source.splitlines(), 1) if line.startswith("## ")]
    return list(_declarations(ast.parse(source).body, headings))


def _declarations(body: list[ast.stmt], headings: list[tuple[int, str]]) -> Iterator[Setting]:
    """Yield each setting that a statement reads, with its meaning from the string after the statement."""
    for statement, following in pairwise(body):
        for call in ast.walk(statement):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "read":
                assert isinstance(following, ast.Expr), f"line {statement.lineno} needs a description"
                name, kind, default = call.args
                heading = [text for number, text in headings if number < statement.lineno][-1]
                meaning = " ".join(ast.literal_eval(following.value).split())
                yield Setting(heading, ast.literal_eval(name), ast.unparse(kind), _default(default), meaning)


def _default(expression: ast.expr) -> str:
    """Return a default outside DEBUG; empty if it is computed."""
    if isinstance(expression, ast.IfExp) and ast.unparse(expression.test) == "DEBUG":
        expression = expression.orelse
    return str(expression.value) if isinstance(expression, ast.Constant) else ""


def example_file() -> str:
    lines = [EXAMPLE_HEADER]
    for heading, settings in groupby(declared_settings(), lambda setting: setting.heading):
        lines += ["", f"## {heading}"]
        for setting in settings:
            wrapped = textwrap.wrap(setting.meaning, 118, break_long_words=False, break_on_hyphens=False)
            lines += [f"# {line}" for line in wrapped]
            lines.append(f"# {setting.name}={setting.default}")
    return "\n".join(lines) + "\n"


def settings_page() -> str:
    lines = [
        "# Every setting",
        "",
        "Set them in the environment, or in the file `.env` beside `manage.py`; the environment takes precedence.",
        "Values are taken literally, with any `$`, `#` and blank inside them. In `.env`, quotes around a whole value",
        "are removed. An empty value counts as not set. Processes read settings when they start: restart them after a",
        "change. `manage.py check` reports invalid and unknown settings, and `manage.py doctor` reports services that",
        "do not respond.",
    ]
    for heading, settings in groupby(declared_settings(), lambda setting: setting.heading):
        lines += ["", f"## {heading}", "", "| setting | value | default | meaning |", "| --- | --- | --- | --- |"]
        for setting in settings:
            default = f"`{setting.default}`" if setting.default else ""
            lines.append(f"| `{setting.name}` | {setting.takes} | {default} | {setting.meaning} |")
    lines += ["", "`make docs` writes this page from `guardian_site/own_settings.py`."]
    return "\n".join(lines) + "\n"


def schema_of_installations() -> str:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "guardian_site.settings")
    django.setup()  # the schema's limits are those of models
    schema = import_module("installation.schema").SCHEMA
    return json.dumps(schema, indent=2) + "\n"


GENERATED: dict[Path, Callable[[], str]] = {
    EXAMPLE: example_file,
    PAGE: settings_page,
    SCHEMA: schema_of_installations,
    **{
        PROJECT / "packages" / name / "docs" / "reference.md": partial(reference, name.replace("-", "_"), *modules)
        for name, modules in PUBLIC_MODULES.items()
    },
}


def main() -> None:
    for path, text in GENERATED.items():
        path.write_text(text())
        print(path.relative_to(PROJECT))


if __name__ == "__main__":
    main()
