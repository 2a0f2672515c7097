"""The threat model: what each row says is shown by a test that is there."""

import ast
import re

import pytest

from tests.plugin import ROOT

DOCUMENT = (ROOT / "docs" / "threats.md").read_text()
NAMED = re.compile(r"`(test_\w+\.py)::(test_\w+)`")
SECTIONS = dict(
    part.partition("\n")[::2] for part in DOCUMENT.split("\n## ")[1:] if not part.startswith("What is not stopped")
)
ROWS = [
    (section, line)
    for section, text in SECTIONS.items()
    for line in re.findall(r"^\| .+ \|$", text, re.MULTILINE)
    if not line.startswith(("| ---", "| tries to |", "| is to |"))
]


def names_in(file):
    """Give the names of the tests in a file, those in classes too."""
    found = ast.walk(ast.parse((ROOT / "tests" / file).read_text()))
    return {one.name for one in found if isinstance(one, ast.FunctionDef) and one.name.startswith("test_")}


@pytest.mark.parametrize("file", sorted({file for file, _ in NAMED.findall(DOCUMENT)}))
def test_every_test_that_a_row_names_is_there(file):
    assert {name for of, name in NAMED.findall(DOCUMENT) if of == file} <= names_in(file)


def test_no_row_is_without_a_test():
    assert [line for _, line in ROWS if not NAMED.search(line.split(" | ")[-1])] == []


def test_everybody_has_a_row():
    assert set(SECTIONS) == {section for section, _ in ROWS}
    assert len(SECTIONS) == 14
    assert len(ROWS) > 60
