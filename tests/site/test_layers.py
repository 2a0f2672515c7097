"""Imports run one way: a package uses only those below it, also in functions, foreign keys and task names."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.apps import apps

from tests.support.plugin import ROOT

LAYERS = ["rabbit", "core", "accounts", "notifications", "queues", "agents", "installation", "status", "guardian_site"]
BESIDE = {"message_store": {"rabbit", "core", "accounts"}}
"""Packages beside the layers, and the layers they may use. `installation` and the packages above it may use them."""

INSIDE = {
    "queues": ["access", "models", "rules", "archives mails", "guard", "actions watching", "moves", "pages api admin"],
    "accounts": [
        "mailboxes allauth_private",
        "models",
        "audit signals queue_effects",
        "access",
        "pulse_users signing_in",
        "importing",
        "pages api",
        "admin",
    ],
    "agents": ["access", "models", "removal", "registration", "events services sweeps", "pages api admin"],
    "message_store": [
        "store models",
        "parameters principals quota database cassandra",
        "queues applications leases",
        "worker http pages admin",
    ],
}
"""The packages of an app, lowest first; those of one floor don't import each other. Tasks and URLs are above."""

LONGER = "Longer than 500 lines, because"
"""The docstring of a longer file gives the reason."""

PACKAGES = [*LAYERS, *BESIDE]
DISTRIBUTIONS = ["guardian_consumers", "guardian_store"]
BY_NAME = re.compile(rf"(?P<package>{'|'.join(PACKAGES)})\.(?:tasks\.\w+|[A-Z]\w+)")
"""A task, or a model as in a foreign key."""

LOADS_BY_NAME = {"import_module", "import_string", "get_model", "get_app_config"}


def related_names(package: str) -> set[str]:
    """Return the names by which queries of this package could join the models of the packages above it."""
    used = [model for model in apps.get_models() if model._meta.app_label in allowed(package)]
    related = [field for model in used for field in model._meta.related_objects]
    upward = {*PACKAGES} - allowed(package)
    above = {field.name for field in related if field.related_model._meta.app_label in upward}
    return above - {field.name for field in related if field.related_model._meta.app_label not in upward}


def allowed(package: str) -> set[str]:
    if package in BESIDE:
        return {package} | BESIDE[package]
    below = set(LAYERS[: LAYERS.index(package) + 1])
    return below | set(BESIDE) if "installation" in below else below


def used(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the package of each use of another package in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.lineno, node.module.split(".")[0]
        elif isinstance(node, ast.Import):
            for name in node.names:
                yield node.lineno, name.name.split(".")[0]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in LOADS_BY_NAME and node.args:
            yield node.lineno, str(getattr(node.args[0], "value", "")).split(".")[0]
        elif isinstance(node, ast.Constant) and (found := BY_NAME.fullmatch(str(node.value))):
            yield node.lineno, found["package"]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_packages_below_it(package):
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    upward = [
        f"{path.relative_to(ROOT)}:{line} uses {other}"
        for path in files
        for line, other in used(path)
        if other in {*PACKAGES, "tools", "tests"} - allowed(package)
    ]
    assert upward == []


@pytest.mark.parametrize("app", INSIDE)
def test_packages_inside_an_app_import_only_those_below(app):
    floors = {name: floor for floor, names in enumerate(INSIDE[app]) for name in names.split()}
    upward = [
        f"{path.relative_to(ROOT)}:{line} uses {other}"
        for path in sorted((ROOT / app).rglob("*.py"))
        for line, other in used_inside(path, app)
        if (mine := path.relative_to(ROOT / app).parts[0].removesuffix(".py")) in floors
        and other != mine
        and floors.get(other, len(floors)) >= floors[mine]
    ]
    assert upward == []


def used_inside(path: Path, app: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the package of each import from this app."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            first, *rest = node.module.split(".")
            if first == app:
                yield from ((node.lineno, name) for name in rest[:1] or [alias.name for alias in node.names])


def test_a_file_over_500_lines_gives_the_reason():
    texts = {
        path: path.read_text() for name in (*PACKAGES, "packages", "tools") for path in (ROOT / name).rglob("*.py")
    }
    assert [path for path, text in texts.items() if text.count("\n") > 500 and LONGER not in text] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_query_joins_the_tables_of_a_package_above(package):
    joins = {f"{name}__" for name in related_names(package)}
    upward = []
    for path in sorted((ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.arg if isinstance(node, ast.keyword) else getattr(node, "value", None)
            if isinstance(name, str) and name.startswith(tuple(joins)):
                upward.append(f"{path.relative_to(ROOT)}:{node.lineno} joins {name}")
    assert upward == []


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_distribution_imports_nothing_of_the_site(name):
    files = sorted((ROOT / "packages" / name.replace("_", "-")).rglob("*.py"))
    assert files
    assert [path for path in files for _, other in used(path) if other in PACKAGES] == []


def test_rabbit_does_not_import_django():
    files = (ROOT / "rabbit").rglob("*.py")
    assert [path for path in files for _, other in used(path) if other == "django"] == []
