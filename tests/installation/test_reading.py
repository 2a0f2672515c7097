"""Files that are read, and problems with their line, column and remedy."""

import pytest

from installation import reading
from installation.resources import InvalidFile, Kind

WHOLE_FILES = [
    ("", "1:1: The file is empty"),
    (b"version: 1\n# \xff", "2:3: This is not UTF-8"),
    ("version: 1\n# \x07", "This is not YAML"),
    ("version: 1\n---\nversion: 1", "This is not YAML"),
    ("- a", "1:1: This is a list; write a mapping"),
    ("owners: {}", "1:1: 'version' is missing here: write version: 1"),
    ("version: 2", "1:10: Only version 1 is known"),
]

AFTER_THE_VERSION = [
    ("owners: [a", "2:11: This is not YAML"),
    ("pulse_user: {}", "2:1: There is no 'pulse_user' here. Did you mean 'pulse_users'?"),
    ("pulse_users: {ci: {warn_lenght: 5}}", "2:20: There is no 'warn_lenght' here. Did you mean 'warn_length'?"),
    ("owners:\n  a@example.org: {}\n  a@example.org: {}", "4:3: 'a@example.org' is here twice"),
    ("owners:\n  a@example.org: {}\n  A@Example.org: {}", "4:3: 'A@Example.org' is here twice"),
    ("owners: {alice: {}}", "2:10: 'alice' is not an e-mail address"),
    ("pulse_users: {123: {}}", "2:15: A name must be a text. Put it in quotes"),
    ("owners: &all {}\npulse_users: *all", "3:1: Aliases (*name) are not supported"),
    ("applications: [!!python/name:os.system x]", "2:16: 'x' can't be read"),
    ("pulse_users: {ci: {max_length: many}}", "2:32: This is a text; write a whole number or null"),
    ("pulse_users: {ci: {max_length: 9000.0}}", "2:32: This is a number; write a whole number or null"),
    ("pulse_users: {ci: {max_length: 190:00}}", "2:32: This is a text; write a whole number or null"),
    ("pulse_users: {ci: {max_length: 0}}", "2:32: 0 is too small; the minimum is 1"),
    ("pulse_users: {ci: {hold_off_minutes: 61}}", "2:38: 61 is too large; the maximum is 60"),
    ("pulse_users: {ci: {owners: []}}", "2:28: This list has 0 entries; it can have at least 1"),
    ("pulse_users: {a/b: {}}", "2:15: The name has the character '/' in it"),
    ("queues: [{name: 2026-01-01, unbounded: true}]", "2:17: This is a date; write a text"),
    ("queues: [{name: a, pattern: b, unbounded: true}]", "2:10: Write either 'name' or 'pattern'"),
    ("queues: [{pattern: 'a(', unbounded: true}]", "2:11: This is not a regular expression"),
    ("queues: [{pattern: 'a{99999999999}', unbounded: true}]", "2:11: This is not a regular expression"),
    (f"offerings: [{{name: a, uuid: '{'11' * 16}'}}, {{name: a}}]", "2:66: 'a' is here twice"),
    (f"queues: [{{name: {'é' * 128}, unbounded: true}}]", "2:11: RabbitMQ's names have at most 255 bytes"),
    ("queues: [{name: a}]", "2:10: No limit is given here"),
    ("queues:\n" + "  - {name: a, unbounded: true}\n" * 2, "4:5: 'a' is here twice"),
    ("offerings: [{name: a, uuid: b}]", "2:23: 'b' is not a UUID"),
    ("offerings: [{uuid: b}]", "2:13: 'name' is missing here"),
    ("applications: ['a b']", "2:16: The name begins with a letter or a digit"),
]

BAD_FILES = [*WHOLE_FILES, *((f"version: 1\n{text}", problem) for text, problem in AFTER_THE_VERSION)]


@pytest.mark.parametrize(("content", "problem"), BAD_FILES, ids=[problem for _, problem in BAD_FILES])
def test_a_problem_is_named_with_its_place_and_remedy(content, problem):
    with pytest.raises(InvalidFile) as refused:
        reading.read(content if isinstance(content, bytes) else content.encode())
    [found] = refused.value.problems
    assert problem in f"{found.at.line}:{found.at.column}: {found.text}"


def test_all_problems_are_reported_in_the_order_of_the_file():
    with pytest.raises(InvalidFile) as refused:
        reading.read(b"version: 1\nowners: []\npulse_users: []\nqueues: {}\n")
    assert [found.at.line for found in refused.value.problems] == [2, 3, 4]


@pytest.mark.parametrize("opened", [b"[", b"{a: "])
def test_deep_nesting_is_a_problem(opened):
    with pytest.raises(InvalidFile):
        reading.read(b"version: " + opened * 100_000)


def test_names_are_read_as_written_and_addresses_in_normal_form():
    [owner, queue] = reading.read(
        b'version: 1\nowners: {" Alice@Example.ORG": {access: true}}\n'
        b'queues: [{name: "a/\\0\'\\"\\n", vhost: v, warn_length: null}]'
    )
    assert (owner.kind, owner.key, owner.values) == (Kind.OWNER, ("alice@example.org",), {"access": True})
    assert (queue.key, queue.values) == (("v", "a/\0'\"\n"), {"warn_length": None})
