"""System checks: what can be wrong with the settings, told before it goes wrong at three in the morning."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from email.utils import parseaddr
from typing import Any
from urllib.parse import SplitResult

from django.conf import settings
from django.core import checks
from django.core.checks import CheckMessage, Error, register
from django.core.exceptions import ImproperlyConfigured, ValidationError
from django.core.validators import validate_email

from core.addresses import split_address
from guardian_site import logs
from message_store.store import STORES
from queues.thresholds import POLICIES

_IN_PASSWORDS = "In a user or password write @ as %40, / as %2F, ? as %3F, # as %23 and % as %25."

LONGEST_QUEUE = 255
"""Characters of a queue's name, at most."""

SEARCH_SECONDS = 3
"""For so long the names may be searched that the expression of ignored queues is tried with."""

NAMESPACE_POLICIES = ("report", "delete-misnamed", "delete-unpatterned")
SNAPSHOTS = ("management", "prometheus")

REMOVED_SETTINGS = {"GUARDIAN_SHARD_BY_VHOST": "To make a pass cheaper, set GUARDIAN_SNAPSHOT=prometheus."}
"""Settings that no longer exist, by name, and a sentence that says what replaces each."""


@register()
def check_settings(app_configs: Sequence[Any] | None, **kwargs: Any) -> list[CheckMessage]:
    """Return everything that is wrong with Guardian's settings."""
    return [
        *_unreadable(),
        *_removed(),
        *_secrets(),
        *_addresses(),
        *_task_queue(),
        *_lengths(),
        *_choices(),
        *_bounds(),
        *_people(),
        *_signing_in(),
        *_metrics(),
        *_reports(),
    ]


def _unreadable() -> Iterable[CheckMessage]:
    for name, why in settings.UNREADABLE.items():
        yield Error(
            f"{name} can't be read: {why.rstrip('.')}.", hint="See .env.example for what it says.", id="guardian.E015"
        )


def _removed() -> Iterable[CheckMessage]:
    for name, replacement in REMOVED_SETTINGS.items():
        if name in os.environ:  # settings.py has added what .env says
            yield Error(f"{name} was removed.", hint=f"Delete it. {replacement}", id="guardian.E021")


def _secrets() -> Iterable[CheckMessage]:
    if not _value("SECRET_KEY"):
        yield Error("SECRET_KEY is empty.", hint="Set it to a long random text; it has no default.", id="guardian.E001")
    for name, form in (
        ("RABBITMQ_MANAGEMENT_URL", "http://user:password@host:15672"),
        ("RABBIT_URL", "amqp://user:password@host:5672"),
    ):
        if not _value(name):
            yield checks.Warning(
                f"{name} is empty: no queue is guarded.", hint=f"Set it to {form}.", id="guardian.W001"
            )


def _addresses() -> Iterable[CheckMessage]:
    for name, schemes in (
        ("RABBITMQ_MANAGEMENT_URL", ("http", "https")),
        ("RABBIT_URL", ("amqp", "amqps")),
        ("GUARDIAN_BASE_URL", ("http", "https")),
        ("OIDC_ISSUER", ("http", "https")),
    ):
        if not _value(name):
            continue
        parts = split_address(_value(name))
        if parts is None or parts.scheme not in schemes or not parts.hostname:
            # The value may hold a password, so it isn't repeated.
            yield Error(
                f"{name} is not an address.",
                hint=(
                    f"It begins with {' or '.join(f'{scheme}://' for scheme in schemes)} and names a host. "
                    f"{_IN_PASSWORDS}"
                ),
                id="guardian.E002",
            )
    for url in settings.GUARDIAN_PROMETHEUS_URLS:
        parts = split_address(url)
        if parts is None or parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            yield Error(
                "GUARDIAN_PROMETHEUS_URLS has something that is not an address.",
                hint=f"Such as http://rabbit-1:15692,http://rabbit-2:15692. {_IN_PASSWORDS}",
                id="guardian.E002",
            )


def _task_queue() -> Iterable[CheckMessage]:
    # Celery's form for several, as of sentinels: with semicolons.
    several = settings.CELERY_BROKER_URL.split(";")
    addresses = [parts for url in several if (parts := split_address(url)) is not None]
    if len(addresses) < len(several) or not addresses[0].scheme:
        yield Error(
            "CELERY_BROKER_URL is not an address.",
            hint=f"For Redis: redis://host:6379/0. {_IN_PASSWORDS}",
            id="guardian.E003",
        )
        return
    guarded = {
        _host_and_port(split_address(_value("RABBIT_URL"))),
        (_host(split_address(_value("RABBITMQ_MANAGEMENT_URL"))), None),
    }
    of_amqp = [tasks for tasks in addresses if tasks.scheme in ("amqp", "amqps", "pyamqp")]
    if any(_host_and_port(tasks) in guarded or (_host(tasks), None) in guarded for tasks in of_amqp):
        yield Error(
            "CELERY_BROKER_URL is the RabbitMQ that Guardian guards.",
            hint=(
                "Under a memory or disk alarm that broker blocks everybody who publishes, Celery too, so Guardian "
                "would stand still when it is needed most. Use Redis, or leave it empty for the file system."
            ),
            id="guardian.E004",
        )


def _lengths() -> Iterable[CheckMessage]:
    warn, most = settings.GUARDIAN_WARN_QUEUE_LENGTH, settings.GUARDIAN_MAX_QUEUE_LENGTH
    if warn < 1:
        yield Error(
            f"GUARDIAN_WARN_QUEUE_LENGTH is {warn}.", hint="It is a number of messages, 1 at least.", id="guardian.E005"
        )
    if warn >= most:
        yield Error(
            f"GUARDIAN_WARN_QUEUE_LENGTH ({warn}) is not below GUARDIAN_MAX_QUEUE_LENGTH ({most}).",
            hint="A queue would be deleted before its owner is warned. Lower the first or raise the second.",
            id="guardian.E006",
        )
    owners_most = settings.GUARDIAN_OWNERS_MAX_QUEUE_LENGTH
    if owners_most < 0 or 0 < owners_most <= warn:
        yield Error(
            f"GUARDIAN_OWNERS_MAX_QUEUE_LENGTH is {owners_most}.",
            hint=f"It is above GUARDIAN_WARN_QUEUE_LENGTH ({warn}), or 0: owners set no maximum.",
            id="guardian.E017",
        )
    if settings.GUARDIAN_DELETE_BRAKE < 0:
        yield Error(
            f"GUARDIAN_DELETE_BRAKE is {settings.GUARDIAN_DELETE_BRAKE}.",
            hint="It is the number of queues that may be deleted at once, 0 at least.",
            id="guardian.E007",
        )


def _choices() -> Iterable[CheckMessage]:
    for name, choices in (
        ("GUARDIAN_THRESHOLD_POLICY", tuple(POLICIES)),
        ("GUARDIAN_NAMESPACE_POLICY", NAMESPACE_POLICIES),
        ("GUARDIAN_SNAPSHOT", SNAPSHOTS),
        ("LOG_FORMAT", logs.FORMATS),
        ("MESSAGE_STORE", tuple(STORES)),
    ):
        if _value(name) not in choices:
            yield Error(
                f"{name} is '{_value(name)}'.", hint=f"Choose one of: {', '.join(choices)}.", id="guardian.E008"
            )
    yield from _ignored_queues(settings.GUARDIAN_IGNORED_QUEUES)
    guarded = settings.GUARDIAN_VHOSTS
    if guarded and "*" not in guarded and settings.GUARDIAN_PULSE_VHOST not in guarded:
        yield checks.Warning(
            f"GUARDIAN_VHOSTS leaves out GUARDIAN_PULSE_VHOST ('{settings.GUARDIAN_PULSE_VHOST}').",
            hint="The queues of the Pulse users are not guarded. Name it there too.",
            id="guardian.W003",
        )
    if "*" in settings.GUARDIAN_VHOSTS and len(settings.GUARDIAN_VHOSTS) > 1:
        yield Error(
            "GUARDIAN_VHOSTS has a * beside other names.", hint="Use * alone for all vhosts.", id="guardian.E010"
        )


_SEARCH = """
import json, re, sys
pattern, names = json.load(sys.stdin)
for name in names:
    re.search(pattern, name)
"""


def _ignored_queues(pattern: str) -> Iterable[CheckMessage]:
    """Return what is wrong with the regular expression, beside its form also whether it ends.

    Whoever may make a queue chooses its name, and one that a careless expression can be read into in very many ways
    would stop the pass that looks at it. So names are tried that are made of what stands in the expression.
    """
    try:
        re.compile(pattern)
    except re.error as error:
        yield Error(
            f"GUARDIAN_IGNORED_QUEUES is not a regular expression: {error}.",
            hint="It names the queues that are left alone, such as ^(amq\\.gen|test-). Empty: none.",
            id="guardian.E009",
        )
        return
    if not pattern:
        return
    words = {"", *re.findall(r"[\w/.-]+", pattern)}
    repeated = {*pattern, *words, *re.findall(r"\w+", pattern), "a", "0"} - {""}
    names = [
        f"{word}{part * LONGEST_QUEUE}"[: LONGEST_QUEUE - 2] + end
        for word in sorted(words)
        for part in sorted(repeated)
        for end in ("!", "\n!")
    ]
    try:
        subprocess.run(
            [sys.executable, "-I", "-S", "-c", _SEARCH],
            input=json.dumps([pattern, names]).encode(),
            stderr=subprocess.DEVNULL,
            timeout=SEARCH_SECONDS,
            check=True,
        )
    except subprocess.TimeoutExpired:
        yield checks.Warning(
            "GUARDIAN_IGNORED_QUEUES takes too long on some names.",
            hint="A queue of such a name would stop the guarding. Repeat nothing in what is repeated, as (a+)+ does.",
            id="guardian.W006",
        )


def _bounds() -> Iterable[CheckMessage]:
    for name, least, most in (
        ("GUARDIAN_POLL_SECONDS", 0.1, 3600),
        ("GUARDIAN_BROKER_TIMEOUT_SECONDS", 0.1, 20),  # a pass waits that long several times within its lease of 90 s
        ("GUARDIAN_QUIET_SECONDS", 0, 604_800),
        ("GUARDIAN_FORGET_DAYS", 1, 3650),
        ("MESSAGE_STORE_MAX_BODY", 1, 1 << 27),
        ("MESSAGE_STORE_POSTS_PER_MINUTE", 0, 1_000_000_000),
        ("GUARDIAN_EVENTS_PER_MINUTE", 0, 1_000_000_000),
        ("GUARDIAN_NO_CONSUMER_MINUTES", 0, 525_600),
        ("GUARDIAN_STALLED_MINUTES", 0, 525_600),
    ):
        if not least <= _value(name) <= most:
            hint = f"It is {least} at least, and {most} at most."
            yield Error(f"{name} is {_value(name)}.", hint=hint, id="guardian.E011")
    if settings.GUARDIAN_POLL_MAX_SECONDS < settings.GUARDIAN_POLL_SECONDS:
        yield Error(
            "GUARDIAN_POLL_MAX_SECONDS is below GUARDIAN_POLL_SECONDS.",
            hint="It is the longest wait between passes while the broker is away.",
            id="guardian.E013",
        )


def _people() -> Iterable[CheckMessage]:
    # A host without a dot is all right here, which Django's validator refuses: a machine's own name is one.
    if not re.fullmatch(r"[^@\s]+@[A-Za-z0-9.-]*[A-Za-z0-9]", parseaddr(settings.DEFAULT_FROM_EMAIL)[1]):
        yield Error(
            f"DEFAULT_FROM_EMAIL is '{settings.DEFAULT_FROM_EMAIL}', which has no e-mail address in it.",
            hint="Such as: Guardian <guardian@example.org>.",
            id="guardian.E016",
        )
    for address in settings.GUARDIAN_OPERATOR_EMAILS:
        try:
            validate_email(address)
        except ValidationError:
            yield Error(
                f"GUARDIAN_OPERATOR_EMAILS has '{address}', which is not an e-mail address.",
                hint="Separate addresses by commas.",
                id="guardian.E014",
            )
    if not settings.GUARDIAN_OPERATOR_EMAILS:
        yield checks.Warning(
            "GUARDIAN_OPERATOR_EMAILS is empty: nobody hears of an outage, or of queues without an owner.",
            hint="Name one address at least.",
            id="guardian.W002",
        )


def _signing_in() -> Iterable[CheckMessage]:
    for domain in settings.GUARDIAN_VOUCHED_DOMAINS:
        if not re.fullmatch(r"[^\s@*/:.,;]+(\.[^\s@*/:.,;]+)*", domain):
            yield Error(
                f"GUARDIAN_VOUCHED_DOMAINS has '{domain}', which is not a domain.",
                hint="It is what stands after the @ of an address, such as example.org. Name each subdomain.",
                id="guardian.E018",
            )
    if settings.OIDC_ISSUER:
        for name in ("OIDC_CLIENT_ID", "OIDC_CLIENT_SECRET"):
            if not _value(name):
                yield Error(
                    f"{name} is empty, and OIDC_ISSUER is set.",
                    hint="The issuer gives both when Guardian is registered there, or else leave OIDC_ISSUER empty.",
                    id="guardian.E019",
                )
    elif settings.OIDC_VOUCHED_GROUPS:
        yield checks.Warning(
            "OIDC_VOUCHED_GROUPS is set, and OIDC_ISSUER is empty: nobody is in a group.",
            hint="Set OIDC_ISSUER, or leave OIDC_VOUCHED_GROUPS empty.",
            id="guardian.W004",
        )


def _metrics() -> Iterable[CheckMessage]:
    if settings.GUARDIAN_BASE_URL.startswith("https://") and not settings.GUARDIAN_METRICS_TOKEN:
        yield checks.Warning(
            "GUARDIAN_METRICS_TOKEN is empty: /metrics is open to everybody.",
            hint="It names nobody, but tells how many queues there are. Set a long random text, for Prometheus too.",
            id="guardian.W005",
        )


def _reports() -> Iterable[CheckMessage]:
    if not settings.SENTRY_DSN:
        return
    from guardian_site import sentry  # nobody else has to wait for it

    if not sentry.is_dsn(settings.SENTRY_DSN):
        # The key in it is a secret, so it isn't repeated.
        yield Error(
            "SENTRY_DSN is not the address of a project.",
            hint="Sentry shows it in the project's settings: https://key@host/number.",
            id="guardian.E020",
        )


def _value(name: str) -> Any:
    try:
        return getattr(settings, name)
    except ImproperlyConfigured:  # as Django says of an empty SECRET_KEY
        return ""


def _host(parts: SplitResult | None) -> str:
    host = (parts.hostname or "") if parts else ""
    return "localhost" if host in ("127.0.0.1", "::1") else host


def _host_and_port(parts: SplitResult | None) -> tuple[str, int | None]:
    return (_host(parts), (parts.port or (5671 if parts.scheme == "amqps" else 5672)) if parts else None)
