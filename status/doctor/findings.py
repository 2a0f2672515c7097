"""What ``doctor`` found: a status, a sentence, the remedy."""

import re
import shlex
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import NamedTuple
from urllib.parse import unquote

from django.conf import settings

from core.masking import mask_secrets
from rabbit.addresses import split_addresses
from rabbit.names import readable
from status.verdicts import Level, Rule, Verdict

TIMEOUT_SECONDS = 18.0
"""For all checks together."""

BROKER_SECONDS = 4.0
"""The timeout of each answer of the management API."""
SAMPLE_NAMES = ("queue/alice/builds", "subscription_0_order", "consumer_0", "amq.default", "exchange/alice/events")
"""A name of each kind. The permissions of Guardian's RabbitMQ user must match all of them on each guarded vhost."""


class Status(StrEnum):
    """The status of a finding. With a warning, Guardian works; with a problem, it does not work correctly."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


class Finding(NamedTuple):
    """The result of a check. ``advice`` is empty if the status is OK."""

    name: str
    status: Status
    found: str
    advice: str = ""


Findings = Iterator[Finding]

STATUSES = {Level.OK: Status.OK, Level.WARNING: Status.WARNING, Level.CRITICAL: Status.PROBLEM}


def findings_of(verdicts: Iterable[Verdict]) -> Findings:
    """Yield a finding for each wrong verdict, and one for each rule without a wrong verdict."""
    by_rule: dict[Rule, list[Verdict]] = {}
    for verdict in verdicts:
        by_rule.setdefault(verdict.rule, []).append(verdict)
    for same in by_rule.values():
        known = [verdict for verdict in same if verdict.value is not None]
        highest = sorted(known, key=lambda verdict: verdict.value or 0)[-1:]
        for verdict in [verdict for verdict in known if verdict.is_wrong] or highest:
            yield finding_of(verdict)


def finding_of(verdict: Verdict, name: str = "") -> Finding:
    advice = f"{verdict.next_step} See docs/operators.md#{verdict.rule.runbook}." if verdict.is_wrong else ""
    return Finding(name or verdict.rule.name, STATUSES[verdict.level], verdict.sentence, advice)


UNKNOWN_AUTHORITY = re.compile(
    "self-signed certificate|unable to get (local )?issuer certificate|SSL error: certificate verify failed"
)
"""OpenSSL's reasons if a certificate's authority is not trusted, and PostgreSQL's text for all reasons."""

TRUST_ADVICE = (
    "Its certificate is from an authority that this machine doesn't trust. Add the authority's certificate to the "
    "system's store, or set SSL_CERT_FILE: see docs/operators.md#certificates-of-a-private-authority."
)


def with_certificate_advice(finding: Finding) -> Finding:
    """Return a finding with the advice for certificates, if it is about one."""
    return finding._replace(advice=TRUST_ADVICE) if UNKNOWN_AUTHORITY.search(finding.found) else finding


def quoted_names(names: Iterable[str]) -> str:
    """Return the first five names in quotes, and how many follow."""
    names = list(names)
    first = ", ".join(f"'{readable(name)}'" for name in names[:5])
    return f"{first} and {len(names) - 5} more" if len(names) > 5 else first


def shell_quoted(name: str) -> str:
    return shlex.quote(readable(name))


def without_passwords(finding: Finding) -> Finding:
    """Return a finding without secrets, which texts of errors may contain. The advice never contains any."""
    found = finding.found
    for password in sorted(_passwords(), key=len, reverse=True):
        # A short password may be a part of any word.
        pattern = re.escape(password) if len(password) > 5 else rf"(?<!\w){re.escape(password)}(?!\w)"
        found = re.sub(pattern, "…", found)
    found = readable(" ".join(mask_secrets(found).split()))
    return finding._replace(found=found)


def _passwords() -> set[str]:
    """Return the passwords in the settings, percent-encoded and decoded, except those that equal the user's name."""
    found = {str(settings.DATABASES["default"].get("PASSWORD") or ""), settings.EMAIL_HOST_PASSWORD or ""}
    of_broker = split_addresses(settings.RABBITMQ_MANAGEMENT_URL) + split_addresses(settings.RABBIT_URL)
    for url in (*of_broker, *settings.CELERY_BROKER_URL.split(";")):
        user, _, written = url.partition("://")[2].rpartition("@")[0].partition(":")
        if written != user:  # such as guest's, because findings contain the name
            found |= {written, unquote(written)}
    if settings.CASSANDRA_PASSWORD != settings.CASSANDRA_USER:
        found.add(settings.CASSANDRA_PASSWORD)
    return found - {""}
