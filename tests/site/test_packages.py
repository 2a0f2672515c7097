"""`make audit`: known vulnerabilities of the packages."""

import re
import sys

import pytest

from tests.support.plugin import ROOT
from tools import audit

pytestmark = pytest.mark.slow

SAFE = {"name": "django", "version": "5.2.19", "vulns": []}
VULNERABLE = {
    "name": "pika",
    "version": "1.0.0",
    "vulns": [
        {"id": "PYSEC-2026-1", "fix_versions": ["1.0.1", "1.1"], "aliases": [], "description": "It is bad."},
        {"id": "GHSA-aaaa", "fix_versions": [], "aliases": [], "description": "It is bad, too."},
    ],
}
UNKNOWN = {"name": "amqp", "skip_reason": "Dependency not found on PyPI and could not be audited: amqp (5.4.2)"}


def packages_of(lock):
    return set(re.findall(r"^([\w.-]+)==", (ROOT / lock).read_text(), re.MULTILINE))


def program(tmp_path, code):
    """Write a program that replaces pip-audit, and return its command."""
    (tmp_path / "program.py").write_text(code)
    return [sys.executable, str(tmp_path / "program.py")]


def test_a_known_vulnerability_fails_the_audit():
    code, lines = audit.evaluate_report({"dependencies": [SAFE, VULNERABLE, UNKNOWN], "fixes": []})
    assert code == 1
    assert lines == [
        "pika 1.0.0 has PYSEC-2026-1; fixed in 1.0.1, 1.1.",
        "pika 1.0.0 has GHSA-aaaa; no fixed version yet.",
    ]


def test_an_audit_without_findings_counts_packages_and_names_unknown_ones():
    assert audit.evaluate_report({"dependencies": [SAFE, SAFE]}) == (0, ["No known vulnerabilities in 2 packages."])
    line = "No known vulnerabilities in 1 packages. No data about amqp."
    assert audit.evaluate_report({"dependencies": [SAFE, UNKNOWN]}) == (0, [line])


@pytest.mark.parametrize(
    ("does", "seconds", "code", "says"),
    [
        ("import time; time.sleep(60)", 1, 0, "Skipped the check for known vulnerabilities"),
        ("raise SystemExit('ERROR:pip_audit:Could not connect to the vulnerability feed')", 60, 0, "can't be reached"),
        ("raise SystemExit('ERROR:pip_audit:invalid requirements input')", 60, 1, "invalid requirements input"),
        ("print('{}')", 60, 1, "pip-audit failed"),
    ],
    ids=["hangs", "not reached", "fails", "unexpected output"],
)
def test_an_unreachable_index_passes_the_audit_and_other_errors_fail_it(tmp_path, does, seconds, code, says):
    ended, [line] = audit.audit(program(tmp_path, does), seconds)
    assert (ended, says in line) == (code, True), line


def test_the_audit_covers_every_package_of_the_image():
    assert len(packages_of("requirements-production.lock")) > 20
    assert packages_of("requirements-production.lock") <= packages_of(audit.LOCK.name)


def test_the_lock_of_the_audit_has_hashes_and_no_address():
    text = (ROOT / "requirements-audit.lock").read_text()
    assert text.count("==") == len(re.findall(r"^[\w.-]+==\S+.*\\\n    --hash=sha256:", text, re.MULTILINE))
    assert "pip-audit==" in text
    assert "://" not in text
