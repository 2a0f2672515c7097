"""Errors and pages that an owner sees never name a setting: an owner can't change it."""

import ast
import re

from guardian_site import environment
from tests.support.plugin import ROOT

FOR_OPERATORS = re.compile(
    r"(core/(broker|checks)|message_store/(cassandra/\w+|management/commands/\w+)|queues/admin|queues/guard/monitor|"
    r"queues/mails/about_broker|rabbit/prometheus|rabbit/publishing|status/.+)\.py"
)
"""Modules whose texts only operators see. ``core/rest.py`` replaces those of an unavailable broker."""

PACKAGES = ("accounts", "agents", "core", "message_store", "notifications", "queues", "rabbit", "status")


def texts(source):
    """Yield the texts of a module, without its docstrings and the bare names of settings."""
    tree = ast.parse(source)
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs
        if is_text and node.value not in environment.declared:
            yield node.value


def test_no_text_for_owners_names_a_setting():
    name = re.compile(rf"\b({'|'.join(environment.declared)})\b")
    found = []
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            place = str(path.relative_to(ROOT))
            if "migrations" not in path.parts and not FOR_OPERATORS.fullmatch(place):
                found += [f"{place}: {text}" for text in texts(path.read_text()) if name.search(text)]
    assert found == []
