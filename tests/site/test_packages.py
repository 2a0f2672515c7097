"""`make audit`: known vulnerabilities of the packages."""

import re
import sys

import pytest

from tests.support.plugin import ROOT
from tools import audit

pytestmark = pytest.mark.slow


def packages_of(lock):
    return set(re.findall(r"^([\w.-]+)==", (ROOT / lock).read_text(), re.MULTILINE))


def program(tmp_path, code):
    """Write a program that replaces pip-audit, and return its command."""
    (tmp_path / "program.py").write_text(code)
    return [sys.executable, str(tmp_path / "program.py")]


@pytest.mark.parametrize(
    ("does", "seconds", "code", "says"),
    [
        ("import time; time.sleep(60)", 1, 0, "Skipped the check for known vulnerabilities"),
        ("raise SystemExit('ERROR:pip_audit:Could not connect to the vulnerability feed')", 60, 0, "can't be reached"),
        ("raise SystemExit('ERROR:pip_audit:invalid requirements input')", 60, 1, "invalid requirements input"),
        ("print('pika 1.0.0 PYSEC-2026-1 1.0.1'); raise SystemExit(1)", 60, 1, "PYSEC-2026-1"),
        ("print('No known vulnerabilities found')", 60, 0, "No known vulnerabilities found"),
    ],
    ids=["hangs", "not reached", "fails", "vulnerable", "safe"],
)
def test_a_known_vulnerability_fails_the_audit(tmp_path, does, seconds, code, says):
    ended, text = audit.audit(program(tmp_path, does), seconds)
    assert (ended, says in text) == (code, True), text


def test_the_audit_covers_every_package_of_the_image():
    assert len(packages_of("requirements-production.lock")) > 20
    assert packages_of("requirements-production.lock") <= packages_of(audit.LOCK.name)


def test_the_lock_of_the_audit_has_hashes_and_no_address():
    text = (ROOT / "requirements-audit.lock").read_text()
    assert text.count("==") == len(re.findall(r"^[\w.-]+==\S+.*\\\n    --hash=sha256:", text, re.MULTILINE))
    assert "pip-audit==" in text
    assert "://" not in text
