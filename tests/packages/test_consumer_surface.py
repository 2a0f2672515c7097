"""What is public of the consumer toolkit: the names in ``__all__``, of modules without an underscore."""

import ast
from importlib import import_module
from pathlib import Path

from tools.pages import PUBLIC_MODULES

PROJECT = Path(__file__).resolve().parents[2]
SOURCE = PROJECT / "packages" / "guardian-consumers" / "src" / "guardian_consumers"
PUBLIC = ["guardian_consumers", *(f"guardian_consumers.{name}" for name in PUBLIC_MODULES["guardian-consumers"])]
RUN_BY_PATH = {"move_priorities", "management", "processed"}

FOLDERS = ["agents", "core", "docs", "guardian_site", "notifications", "queues", "rabbit", "status", "tools"]


def imported(text):
    """Yield the module and name of each import from the package."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("guardian_consumers"):
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.startswith("guardian_consumers"))


def test_every_other_module_is_private_by_name():
    names = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert {name for name in names if not name.startswith("_")} == {*PUBLIC_MODULES["guardian-consumers"], *RUN_BY_PATH}


def test_guardian_imports_public_names_only():
    code = [path.read_text() for folder in FOLDERS for path in (PROJECT / folder).rglob("*.py")]
    used = {use for text in code if "guardian_consumers" in text for use in imported(text)}
    assert ("guardian_consumers.names", "parking_queue") in used
    assert {use for use in used if use[0] not in PUBLIC or use[1] not in import_module(use[0]).__all__} == set()
