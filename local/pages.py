"""``make docs``: the pages of the documents that are written from the code.

``docs/settings.md`` has every setting, from ``.env.example`` and ``guardian_site/settings.py``; ``docs/house.md`` every
file of the house, by what it says of itself; ``docs/speed.md``, its chart and ``docs/a-million-queues.md`` what was
measured last (``speed.py``). A test fails where they are stale.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from local import speed

PROJECT = Path(__file__).resolve().parent.parent
DOCS = PROJECT / "docs"

KINDS = {
    "bool": "true or false",
    "int": "whole number",
    "float": "number",
    "str": "text",
    "items": "list, with commas",
    "address": "address",
    "database": "address",
    "email_url": "address",
    "level": "text",
}
"""What a setting's reader takes, in words."""

ROOMS = {
    "guardian_site": "Wiring: settings, addresses, health, figures, logs. No rule of its own.",
    "queues": "What is guarded, what people do to it, how they are told, and what agents registered.",
    "accounts": "Owners, signing in, vouching, tokens, RabbitMQ accounts, and the audit trail.",
    "rabbit": "The only code that speaks to RabbitMQ. No Django in it.",
    "consumers": "The consumer toolkit: a plain Python package that needs no Django, and nothing of the others.",
    "message_store": "Queues over HTTP, and the workers on top of them. It has nothing to do with RabbitMQ.",
    "local": "What runs on one machine: private brokers and databases, `make run`, `make demo`, these pages.",
    "deploy": "How it runs in production, and is watched.",
}

AS_DJANGO_HAS_IT = {
    "apps.py": "What is run when Django starts.",
    "views.py": "The pages. Thin: they call the others.",
    "subscription_views.py": "The pages of agents and their subscriptions. Thin.",
    "settings_views.py": "The page where owners say how they are told. Thin.",
}
"""What files are whose name says it, so that they say nothing of themselves."""


class Setting(NamedTuple):
    """A setting: its name, its default as one would write it ("" where there is none), and what it means."""

    name: str
    default: str
    meaning: str


class Reader(NamedTuple):
    """How settings.py reads a setting: the kind of value, and the default; None where that depends on others."""

    kind: str
    default: str | None


def documented() -> dict[str, list[Setting]]:
    """Return what ``.env.example`` says, by its headings."""
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


def read() -> dict[str, Reader]:
    """Return the settings that ``guardian_site/settings.py`` reads from the environment."""
    tree = ast.parse((PROJECT / "guardian_site" / "settings.py").read_text())
    return {name: reader for node in ast.walk(tree) for name, reader in _read_by(node)}


def _read_by(node: ast.AST) -> Iterator[tuple[str, Reader]]:
    """Give the setting that this expression reads, where it reads one by its name."""
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
    yield name, Reader(kind, _as_written(default))


def _as_written(default: ast.expr) -> str | None:
    """Return a default as it would stand in the environment; None where it is worked out."""
    try:
        value = ast.literal_eval(default)
    except ValueError:
        return None
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return ",".join(value) if isinstance(value, list) else str(value)


def settings_page() -> str:
    """Return ``docs/settings.md``."""
    readers = read()
    lines = [
        "# Every setting",
        "",
        "`make docs` writes this page from `.env.example` and `guardian_site/settings.py`.",
        "",
        "A setting comes from the environment, or from the file `.env` beside `manage.py`; the environment wins.",
        "Processes read them when they start, so restart them after a change. `manage.py check` says what is wrong",
        "with yours, and `manage.py doctor` whether what they name answers.",
    ]
    for heading, settings in documented().items():
        lines += ["", f"## {heading}", "", "| setting | what it takes | default | |", "| --- | --- | --- | --- |"]
        for setting in settings:
            default = f"`{setting.default}`" if setting.default else ""
            takes = "address" if setting.name.endswith("_URL") else KINDS[readers[setting.name].kind]
            lines.append(f"| `{setting.name}` | {takes} | {default} | {setting.meaning} |")
    return "\n".join(lines) + "\n"


def house_page() -> str:
    """Return ``docs/house.md``."""
    lines = [
        "# The house, file by file",
        "",
        "`make docs` writes this page from what the files say of themselves. [For those who change the code](code.md)",
        "says where which rule is.",
    ]
    for room, what in ROOMS.items():
        lines += ["", f"## {room}/", "", what, "", "| file | |", "| --- | --- |"]
        for path in files(room):
            lines.append(f"| `{path.relative_to(PROJECT / room)}` | {_of_itself(path)} |")
    return "\n".join(lines) + "\n"


def files(room: str) -> list[Path]:
    """Return the files of Python in a room, but for migrations and what only makes it a package."""
    found = sorted((PROJECT / room).rglob("*.py"))
    return [path for path in found if "migrations" not in path.parts and path.name != "__init__.py"]


def _of_itself(path: Path) -> str:
    """Return what a file says of itself, in a sentence or two."""
    if path.name in AS_DJANGO_HAS_IT:
        return AS_DJANGO_HAS_IT[path.name]
    tree = ast.parse(path.read_text())
    said = ast.get_docstring(tree)
    if "commands" in path.parts:
        command = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Command")
        said = f"`manage.py {path.stem}`: {ast.get_docstring(command)}"
    if said is None:  # it has one thing, which says it
        things = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        said = next(text for node in things if (text := ast.get_docstring(node)))
    return " ".join(said.partition("\n\n")[0].split()).replace("``", "`").replace("|", "\\|")


PAGES = {
    "settings.md": settings_page,
    "house.md": house_page,
    "speed.md": speed.speed_page,
    "speed.svg": speed.chart,
    "a-million-queues.md": speed.million_page,
}


def main() -> None:
    """Write the pages."""
    for name, write in PAGES.items():
        (DOCS / name).write_text(write())
        print(f"docs/{name}")


if __name__ == "__main__":
    main()
